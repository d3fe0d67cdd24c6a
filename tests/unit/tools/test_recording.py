"""tools/recording.py: the picture of a failing job shows what a run printed."""

from xml.etree import ElementTree

from tools.recording import COLUMNS, PICTURE, draw, kind

SVG = "{http://www.w3.org/2000/svg}"


def shown(picture: str) -> list[tuple[str, str]]:
    return [
        (text.text or "", text.get("class") or "")
        for text in ElementTree.fromstring(picture).iter(f"{SVG}text")
    ]


def test_each_line_is_a_text_and_the_first_failure_stands_out() -> None:
    lines = [
        "$ apptrain run -- a.py",
        "File '<b>' & c",
        "apptrain: rank 3 on b failed first, status 1: E",
        "status 1",
    ]
    assert shown(draw(lines)) == [
        ("$ apptrain run -- a.py", "typed"),
        ("File '<b>' & c", ""),
        ("apptrain: rank 3 on b failed first, status 1: E", "first"),
        ("status 1", "first"),
    ]


def test_a_long_line_is_wrapped_within_the_width_and_keeps_its_class() -> None:
    (first, name), (second, other) = shown(draw([f"status 1 {'x' * 60} {'y' * 60}"]))
    assert first == f"status 1 {'x' * 60}"
    assert second == f"    {'y' * 60}"
    assert len(second) <= COLUMNS
    assert name == other == "first"


def test_the_picture_of_the_readme_names_the_rank_the_status_and_what_to_do() -> None:
    found = [text for text, _ in shown(PICTURE.read_text())]
    assert [line for line in found if kind(line) == "typed"] == [
        '$ apptrain run --nproc-per-node 2 -- fail.py; echo "status $?"',
        "$ apptrain explain runs/*",
    ]
    assert "apptrain: rank 3 on 127.0.0.2 failed first, status 1: RuntimeError: no such data" in found
    assert "status 1" in found
    assert any(line.startswith("  do: ") for line in found)
