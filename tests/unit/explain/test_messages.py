"""Messages of apptrain itself, in logs: the refusal that a line is, and what the page says beyond it."""

import io

import pytest

from entrypoint.explain import catalogue, judge, messages
from entrypoint.explain.scan import Index, Scan

INDEX = Index(catalogue.load())


def causes(text: str) -> list[str]:
    scan = Scan(INDEX)
    scan.read(io.BytesIO(text.encode()), "x.log", 1 << 20)
    return [one.entry.id for one in judge.of(scan, catalogue.own_error()).causes]


@pytest.mark.parametrize(
    ("line", "id"),
    [
        (
            "apptrain: the image /a b/x.sif is cut off: it has 12 of 33 bytes: copy or make it again",
            "image-cut-off",
        ),
        ("entrypoint: CMD x.py is a directory: give a script in it, with its arguments", "cmd-directory"),
        ("apptrain: status 64: n1: the run directory /r is gone (logs: /r/logs/0)", "run-dir-gone"),
        (
            "apptrain: rank 2 on n1 failed first, status 64: --resume x: no complete checkpoint there: "
            "give a step-... directory, or its parent",
            "resume-none",
        ),
    ],
)
def test_a_refusal_is_known_by_its_id(line: str, id: str) -> None:
    assert causes(f"begins\n{line}\n") == [id]


def test_what_the_page_says_beyond_the_message_is_said_without_its_markup() -> None:
    found = messages.entry(b"apptrain: FILE: the port 3 of x")
    assert found is None
    found = messages.entry(b"apptrain: --cluster is missing: give one of a, b, or write one")
    assert found is not None
    assert found.title == "submit does not know the site"
    assert found.remedy == "give one of the list, or write a profile (docs/site.md)"


@pytest.mark.parametrize(
    "line",
    [
        "apptrain: 1 of 2 nodes have not come: 1 (gpu-a02)",
        "apptrain: gpu-a01 has not started yet",
        "apptrain: trying again: attempt 1, with other ports",
        "another: the image x is cut off: it has 12 of 33 bytes: copy or make it again",
    ],
)
def test_a_note_and_a_line_of_another_program_are_no_causes(line: str) -> None:
    assert causes(f"{line}\n") == []
