"""The YAML that is read, and what is refused in one line, at once."""

from pathlib import Path

import pytest

from entrypoint import yaml_files

NINE = ",".join("x" * 9)
LAUGHS = [f"l0: &l0 [{NINE}]", *(f"l{n}: &l{n} [{','.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10))]
REFUSED = {
    "aliases of aliases": ("\n".join(LAUGHS), "line 1: an anchor or alias (& or *): write the value out"),
    "an alias of itself": ("&a [*a]", "line 1: an anchor or alias (& or *): write the value out"),
    "a merge key": ("a: {b: 1}\n<<: {c: 2}", "line 2: a merge key (<<): write the values out"),
    "many keys": (
        "\n".join(f"k{n}: 1" for n in range(20_000)),
        "line 10000: it has more than 20000 values",
    ),
    "many brackets": ("[" * 20_000, "line 1: it is nested more than 16 deep"),
    "many mappings": (
        "\n".join("  " * n + "a:" for n in range(300)),
        "line 17: it is nested more than 16 deep",
    ),
    "a long number": ("a: 0x" + "f" * 1000, "line 1: a number of 1002 characters"),
    "a long number of sixties": ("a: 59" + ":59" * 3000, "line 1: a number of 9002 characters"),
    "a key twice": (
        "a: 1\nb: 2\na: 3",
        "line 3: the key a stands twice, and only the last would count: make it one",
    ),
    "a key that is a list": ("? [a, b]\n: 1", "line 1: a key that is no text"),
    "two documents": ("a: 1\n---\nb: 2", "line 2: a second document: one is read"),
    "an object of Python": (
        "a: !!python/object/apply:os.system [x]",
        "line 1: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
    ),
    "a control character": ("a: \x1b[31m", "special characters are not allowed in"),
    "no YAML": ("a: [", "line 1: expected the node content, but found '<stream end>'"),
    "too much": ("#" * (1 << 18) + "\n", "it has more than 262144 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stands_for_more_than_it_is_or_is_no_plain_yaml_is_refused(tmp_path: Path, name: str) -> None:
    text, said = REFUSED[name]
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^\S.*") as caught:
        yaml_files.read(tmp_path / "file.yaml")
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_what_is_plain_is_read(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("a: [1, 2.5, yes, ~, 'x y']\nb: {c: 2026-01-01x}\n")
    assert yaml_files.read(tmp_path / "file.yaml") == {
        "a": [1, 2.5, True, None, "x y"],
        "b": {"c": "2026-01-01x"},
    }
    (tmp_path / "file.yaml").write_text("")
    assert yaml_files.read(tmp_path / "file.yaml") is None


def test_every_shipped_file_is_read() -> None:
    checkout = Path(__file__).resolve().parents[2]
    found = [*checkout.glob("clusters/*.yaml"), *checkout.glob("src/train/configs/*.yaml")]
    assert len(found) > 10
    assert all(isinstance(yaml_files.read(path), dict) for path in found)
