"""`python -m tests.mutants.behaviour`: where its faults are found, and what it says of those that nobody notices."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.mutants import __main__ as mutants
from tests.mutants import behaviour
from tests.mutants.__main__ import Refused
from tests.mutants.behaviour import Fault

CHECKOUT = Path(__file__).resolve().parents[3]
CODE = "class Marks:\n    def grade(self, points):\n        if points > 100:\n            raise ValueError\n        return points >= 50\n"
TEST = "from entrypoint.marks import Marks\ndef test_a_grade():\n    assert Marks().grade(50)\n"
RAISES = "if points > 100:\n    raise ValueError"


def fault(
    before: str = RAISES, after: str = "pass", *, function: str = "Marks.grade", name: str = "marks"
) -> Fault:
    return Fault(
        id=name,
        broken="More points than there are count.",
        file="entrypoint/marks.py",
        function=function,
        before=before,
        after=after,
        tests=("tests/test_marks.py",),
    )


def test_a_change_takes_the_indentation_of_the_lines_it_replaces() -> None:
    mutant = fault(after="if points > 100:\n    points = 0").found_in({"entrypoint/marks.py": CODE})
    assert mutant.applied_to(CODE) == CODE.replace("raise ValueError", "points = 0")
    assert mutant.line == 3


@pytest.mark.parametrize(
    ("wanted", "refusal"),
    [
        (fault("points = 1"), "marks: its lines are not in Marks.grade of entrypoint/marks.py"),
        (fault(function="grade"), "marks: its lines are not in grade of entrypoint/marks.py"),
        (fault(after="if points"), "marks: entrypoint/marks.py does not parse with the change"),
    ],
)
def test_a_place_that_is_not_there_or_does_not_parse_is_refused(wanted: Fault, refusal: str) -> None:
    with pytest.raises(Refused, match=f"^{re.escape(refusal)}"):
        wanted.found_in({"entrypoint/marks.py": CODE})


def test_lines_that_stand_twice_are_refused() -> None:
    with pytest.raises(Refused, match=r"its lines are 2 times in entrypoint/marks\.py"):
        fault("x = 1", function="").found_in({"entrypoint/marks.py": "x = 1\nif y:\n    x = 1\n"})


def test_each_fault_has_its_place_in_the_code_and_tests_that_are_there() -> None:
    present = mutants.sources(CHECKOUT)
    for one in behaviour.load():
        one.found_in(present)
        for test in one.tests:
            file, *names = test.split("::")
            assert (CHECKOUT / file).is_file(), one.id
            there = {
                node.name
                for node in ast.walk(ast.parse((CHECKOUT / file).read_text()))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert {*names} <= there, one.id


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A class with its test, under git, and the file of faults beside it."""
    folder = tmp_path / "project"
    files = {"entrypoint/__init__.py": "", "entrypoint/marks.py": CODE, "tests/test_marks.py": TEST}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", folder], check=True)
    monkeypatch.setattr(mutants, "CHECKOUT", folder)
    monkeypatch.setattr(behaviour, "FAULTS", tmp_path / "behaviour.yaml")
    return folder


def write(*faults: Fault) -> None:
    raw = [{**vars(one), "tests": [*one.tests]} for one in faults]
    behaviour.FAULTS.write_text(yaml.safe_dump(raw))


@pytest.mark.usefixtures("project")
def test_a_fault_that_no_test_notices_is_shown_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    write(fault(), fault("return points >= 50", "return points > 50", name="fifty"))
    assert behaviour.main([]) == 1
    assert re.sub(r" +[0-9.]+ s(?=  )", "", capsys.readouterr().out) == (
        "  1/2 NOT CAUGHT  marks: More points than there are count.\n"
        "                            all tests pass\n"
        "  2/2 caught  fifty: More points than there are count.\n"
        "                            tests/test_marks.py::test_a_grade\n"
        "caught 1 of 2\n"
    )
    assert behaviour.main(["--only", "fifty"]) == 0


@pytest.mark.usefixtures("project")
def test_a_file_that_cannot_be_imported_any_more_shows_no_behaviour(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(fault("class Marks:", "raise ImportError\nclass Marks:", function=""))
    assert behaviour.main([]) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out
