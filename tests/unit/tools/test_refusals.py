"""What tools/refusals.py finds, on small sources."""

from pathlib import Path

import pytest

from tools import refusals, structure
from tools.refusals import Site

ERRORS = "class Refusal(Exception): ...\nclass BadInput(Refusal): ...\nclass InUse(BadInput): ...\n"


def found(statement: str = "", **scripts: str) -> list[Site]:
    """In a module of the product, and in bash by name."""
    files = {"entrypoint/errors.py": ERRORS, "entrypoint/one.py": statement, "tests/one.py": "BadInput(1)"}
    return refusals.find({**files, **{f"host/{name}.sh": text for name, text in scripts.items()}})


def site(id: str, text: str, place: str = "entrypoint/one.py:1") -> Site:
    return Site(id=id, place=place, text=text)


def wrongs(*sites: Site) -> list[str]:
    """Besides what is wrong for want of the ids that are shared."""
    shared = [site(id, "", place) for id in refusals.SHARED for place in ("a.py:1", "b.py:1")]
    return list(refusals.wrongs([*shared, *sites]))


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ('raise BadInput("port-taken", "port 1 is taken")', [site("port-taken", "port 1 is taken")]),
        (
            'raise BadInput("port-taken", f"port {plan.port:d} of " f"{host!r}") from None',
            [site("port-taken", "port {plan.port} of {host}")],
        ),
        ('raise errors.BadInput("port-taken", why)', [site("port-taken", "{why}")]),
        ('def of(x):\n    return InUse("dir-in-use", "x")', [site("dir-in-use", "x", "entrypoint/one.py:2")]),
        ('raise BadInput("port 1 is taken")', [site("", "port 1 is taken")]),
        ('raise BadInput(id, "port 1 is taken")', [site("", "{id}")]),
        ("raise BadInput(error.id, str(error))", []),
        ('raise ValueError("x")', []),
    ],
)
def test_each_refusal_of_python_is_found(statement: str, expected: list[Site]) -> None:
    assert found(statement) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('    [[ -r $file ]] || refuse no-file "$file is missing"', [("no-file", '"$file is missing"')]),
        ('*) refuse no-file "$1: no file" ;;', [("no-file", '"$1: no file" ;;')]),
        ('then fail no-file "no" \\\n    "file"', [("no-file", '"no" "file"')]),
        ('refuse "$file is missing"', [("", '"$file is missing"')]),
        ('refuse $1 "is missing"', [("", '$1 "is missing"')]),
        ('refuse() {\n    say "$*"', []),
        ('# refuse no-file "x"', []),
        ('say "it may refuse no-file"', []),
    ],
)
def test_each_refusal_of_bash_is_found(line: str, expected: list[tuple[str, str]]) -> None:
    assert found(job=f"#!/bin/bash\n{line}\n") == [site(*one, "host/job.sh:2") for one in expected]


def test_an_id_may_neither_lack_nor_be_malformed_nor_be_that_of_two() -> None:
    one, other = site("port-taken", "a", "a.py:1"), site("port-taken", "b", "b.py:2")
    assert wrongs(one) == []
    assert wrongs(one, site("", "text", "c.py:3")) == ["c.py:3: a refusal without an id: text"]
    assert wrongs(site("Port", "text", "c.py:3")) == [
        "c.py:3: the id Port is not of small letters, digits and dashes between words"
    ]
    assert wrongs(one, other) == [
        "b.py:2: the id port-taken is that of a.py:1: choose another, or say in SHARED (tools/refusals.py) "
        "why both have one cause"
    ]


def test_an_id_that_is_shared_is_that_of_several() -> None:
    first, *_ = refusals.SHARED
    assert f"tools/refusals.py: SHARED has {first}, which 1 refusal has" in list(
        refusals.wrongs([site(first, "text")])
    )


def test_it_lists_them_by_id_and_ends_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"entrypoint/one.py": f'{ERRORS}BadInput("port-taken", "a")\nBadInput("dir-in-use", "b")\n'}
    monkeypatch.setattr(structure, "read", {tmp_path: files}.get)
    monkeypatch.setattr(refusals, "SHARED", {})
    assert refusals.main([str(tmp_path)]) == 0
    assert [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()] == [
        ["dir-in-use", "entrypoint/one.py:5", "b"],
        ["port-taken", "entrypoint/one.py:4", "a"],
        ["2", "refusals,", "2 ids, 0 of them shared"],
    ]
    assert refusals.main(["--lint", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    files["entrypoint/one.py"] += 'BadInput("c")\n'
    assert refusals.main(["--lint", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "entrypoint/one.py:6: a refusal without an id: c\n"
