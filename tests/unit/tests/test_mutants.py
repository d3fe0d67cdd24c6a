"""`make mutants` (tests/mutants) on snippets, and on projects of one function that are written here."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests import procs
from tests.mutants import __main__ as command
from tests.mutants import bash, python, trial
from tests.mutants.change import Mutant, draw

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 60  # s, for anything started here
CODE = """def grade(points):
    if points > 100:
        raise ValueError(points)
    return points >= 50
"""
TEST = """from entrypoint.marks import grade
def test_a_grade():
    assert grade(50)
    assert not grade(49)
"""
MARKS = ["tests/test_marks.py"]


def after(language: str, text: str) -> list[str]:
    """The whole text after each change to it."""
    edits = sorted(set((python if language == "python" else bash).edits(text)))
    return [text[:start] + new + text[end:] for start, end, new in edits]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = a == b", ["x = a != b"]),
        ("x = a < b <= c", ["x = a <= b <= c", "x = a < b < c"]),
        ("x = a  not  in b", ["x = a  in b"]),
        ("x = (a) is (b)", ["x = (a) is not (b)"]),
        ("x = a and b or c", ["x = a or b or c", "x = a and b and c"]),
        ("x = not a", ["x = a"]),
        ("x = 7, 0, True", ["x = 6, 0, True", "x = 8, 0, True", "x = 7, 1, True", "x = 7, 0, False"]),
        ("if a: b = c", ["if not (a): b = c"]),
        ("while a: b = c", ["while not (a): b = c"]),
        ("x = a if (\n  b\n) else c", ["x = a if (\n  not (b)\n) else c"]),
        ("x = [y for y in z if y]", ["x = [y for y in z if not (y)]"]),
        ("match a:\n  case 1 if b: c = d", ["match a:\n  case 1 if not (b): c = d"]),
        ("def f(): return x", ["def f(): return None"]),
        ("def f(): return False", ["def f(): return True"]),
        ("def f(): return (\n  x\n)", ["def f(): return (\n  None\n)"]),
        ("f(\n  x)", ["pass"]),
        ("x += y", ["pass"]),
        ("x.y = x[z] = a", ["pass"]),
        ("del x", ["pass"]),
        ("while True: break", ["while False: break", "while True: pass"]),
        ("raise Odd(1 < 2)", ["pass"]),
        ("x = 'ä' < y", ["x = 'ä' <= y"]),
    ],
)
def test_each_of_these_is_changed_in_python(text: str, expected: list[str]) -> None:
    assert after("python", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        '"""A text == another, 1 of 2."""',
        "x: Literal[1] = y",
        "def f(x: Literal[1]) -> Literal[2]: x = y",
        "@f(1)\ndef g(): x = y",
        "x = f'{a + 1} of {b if c else d}'",
        "__all__ = [1, 2]",
        "x = 0.5",
        "assert x == 1",
        "x = time.monotonic() < y",
        "x = time.perf_counter() - y < z",
        "if TYPE_CHECKING: x = y",
        "if __name__ == '__main__': x = y",
        "x = say('a', 1)",
        "x = self._say_once(1 < 2)",
        "match x:\n  case 1: y = z",
        "def f(): return",
        "def f(): return None",
        "x = y",
    ],
)
def test_none_of_these_is_changed_in_python(text: str) -> None:
    assert after("python", text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[ $a == b ]]", ["[[ $a != b ]]"]),
        ("[[ -z $a && ! -n $b ]]", ["[[ -n $a && ! -n $b ]]", "[[ -z $a || ! -n $b ]]", "[[ -z $a && ! -z $b ]]"]),
        ("((a < 3))", ["((a <= 3))", "((a < 4))"]),
        ("((SECONDS >= 5))", ["((SECONDS >= 6))"]),
        ("((a >= b << 1))", ["((a > b << 1))", "((a >= b << 2))"]),
        ("    return 0", ["    :", "    return 1"]),
        ("[[ $a ]] || exit 64", ["[[ $a ]] && exit 64", "[[ $a ]] || exit 0"]),
        ("if a; then b; fi", ["if ! a; then b; fi"]),
        ("while ! a; do b; done", ["while a; do b; done"]),
        ("  rm -- \"$a\"  # it's gone", ["  :  # it's gone"]),
        ("cat <<'END' && b\n  1 == 2 && it's\nEND\n", [":\n", "cat <<'END' || b\n  1 == 2 && it's\nEND\n"]),
        ("say 'one\n  && two'", [":"]),
        ("a=$(b \"$(c || d \"e\")\" || f)", [":", "a=$(b \"$(c || d \"e\")\" && f)"]),
    ],
)  # fmt: skip
def test_each_of_these_is_changed_in_bash(text: str, expected: list[str]) -> None:
    assert after("bash", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "# [[ $a == b ]] && exit 1",
        "say() { :; }",
        "case $a in\n    b) c ;;\nesac",
        "x=(\n    a\n    b\n)",
        '"$a" \\\n    b |\n    c',
        "local a=b",
        "set -euo pipefail",
        'echo "${#a} && b $(c || "d")" >&2 |\n    c',
        "'$' \"it's\" \\\n    a",
    ],
)
def test_none_of_these_is_changed_in_bash(text: str) -> None:
    assert after("bash", text) == []


def test_the_table_names_tests_for_each_source_and_nothing_that_is_gone() -> None:
    sources, table = command.sources(CHECKOUT), yaml.safe_load(command.TABLE.read_text())
    assert list(table) == sorted(table)
    assert set(table) == {file for file, text in sources.items() if draw({file: text}, 1, 1)}
    assert {test for tests in table.values() for test in tests if not (CHECKOUT / test).is_file()} == set()


@pytest.mark.parametrize(
    "file", ["containers/run.sh", "pbs/starters.sh", "entrypoint/meet/hub.py", "src/train/stop.py"]
)
def test_real_sources_have_places_everywhere_that_leave_a_file_that_parses(file: str) -> None:
    text = (CHECKOUT / file).read_text()
    lines = sorted(mutant.line for mutant in draw({file: text}, 1, 40))
    assert lines[0] < text.count("\n") / 4
    assert lines[-1] > text.count("\n") * 3 / 4


def test_the_seed_decides_what_is_drawn() -> None:
    sources = command.sources(CHECKOUT, "entrypoint/schedulers/*")
    drawn = draw(sources, 1, 20)
    assert drawn == draw(sources, 1, 20)
    assert drawn != draw(sources, 2, 20)
    assert len({(mutant.file, mutant.line) for mutant in drawn}) == 20


def test_a_change_is_found_again_by_its_function_and_its_lines() -> None:
    old = "def f():\n    return g(0)\n\n\nclass A:\n    def f(self):\n        x()\n        x()\n"
    new = "# moved\nclass A:\n    def f(self):\n        x()\n        y()\n        x()\n\ndef h():\n    return g(0)\n"
    found = {(mutant.function, mutant.nth): mutant for mutant in draw({"a.py": old}, 1, 9)}
    assert set(found) == {("f", 0), ("A.f", 0), ("A.f", 1)}
    assert found["A.f", 1].applied_to(new) == new.replace("y()\n        x()", "y()\n        pass")
    assert found["f", 0].applied_to(new) is None


def test_a_change_is_sought_where_its_function_has_moved_to_unless_there_are_two_such_places() -> None:
    old, other = "def f():\n    return g(0)\n", "def h():\n    return g(0)\n"
    (mutant,) = draw({"a.py": old}, 1, 1)
    assert mutant.sought_in({"a.py": f"{other}\n{old}", "b.py": old}) == mutant
    assert mutant.sought_in({"a.py": other, "b/c.py": old, "c.sh": old}) == replace(mutant, file="b/c.py")
    assert mutant.sought_in({"b.py": old, "c.py": old}) is None
    assert mutant.sought_in({"a.py": other}) is None


def test_a_function_of_bash_is_known_by_its_name() -> None:
    text = "f() { return 1; }\ng() {\n    f\n}\nf\n"
    assert [(name, first, last) for name, first, last in bash.functions(text)] == [("f", 0, 0), ("g", 1, 3)]
    assert {mutant.function for mutant in draw({"a.sh": text}, 1, 9)} == {"f", "g", ""}


# --- trials ---------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one function, with its test, under git."""
    folder = tmp_path / "project"
    files = {"entrypoint/__init__.py": "", "entrypoint/marks.py": CODE, "tests/test_marks.py": TEST}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(command, "CHECKOUT", folder)
    monkeypatch.setattr(command, "TABLE", tmp_path / "table.yaml")
    (tmp_path / "table.yaml").write_text("entrypoint/marks.py: [tests/test_marks.py]\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without the seconds."""
    return re.sub(r" +[0-9.]+ s(?= )| in [0-9]+ s$", "", capsys.readouterr().out, flags=re.M)


def test_what_no_test_notices_is_shown_and_the_checkout_stays_as_it_is(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "entrypoint/marks.py").write_text(CODE.replace("100", "99"))
    before = contents(checkout)
    assert command.main(["--at", "HEAD", "--seed", "3", "--jobs", "1"]) == 1
    assert contents(checkout) == before
    assert printed(capsys) == (
        "gone     entrypoint/marks.py:2 grade\n"
        "-     if points > 100:\n"
        "+     if points >= 100:\n"
        "  1/2 caught  entrypoint/marks.py:4  tests/test_marks.py::test_a_grade\n"
        "  2/2 UNNOTICED  entrypoint/marks.py:3  all tests pass\n"
        "\n"
        "entrypoint/marks.py:3 grade\n"
        "-         raise ValueError(points)\n"
        "+         pass\n"
        "  all tests pass: tests/test_marks.py\n"
        "\n"
        "caught 1 of 2 (50 %)\n"
    )


def attempt(
    checkout: Path, after: str, tests: list[str] = MARKS, *, bound: float = 120, test_bound: float = 60
) -> trial.Verdict:
    """What the tests say of another `return points >= 50`."""
    mutant = Mutant(
        file="entrypoint/marks.py",
        line=4,
        function="grade",
        nth=0,
        before="    return points >= 50",
        after=f"    return {after}",
    )
    bench = trial.Bench(tree=checkout, folder=checkout.parent, bound=bound, test_bound=test_bound)
    return bench.attempt(mutant, tests)


@pytest.mark.parametrize(
    ("after", "caught", "why"),
    [
        ("points < 50", True, "tests/test_marks.py::test_a_grade"),
        ("50 <= points", False, "all tests pass"),
        ("points >= 50\nimport nothing", True, "tests/test_marks.py"),
        ("__import__('os')._exit(9)", True, "pytest ended with status 9: no output"),
    ],
)
def test_a_verdict_says_what_has_noticed_the_change(
    checkout: Path, after: str, caught: bool, why: str
) -> None:
    found = attempt(checkout, after)
    assert (found.caught, found.why) == (caught, why)


def test_a_test_that_fails_without_the_change_too_has_not_noticed_it(checkout: Path) -> None:
    (checkout / "tests/test_never.py").write_text("def test_never():\n    assert False\n")
    found = attempt(checkout, "points < 50", ["tests/test_never.py", *MARKS])
    assert (found.caught, found.why) == (
        False,
        "tests/test_never.py::test_never, but it fails without the change too",
    )


def test_a_test_that_hangs_has_noticed_the_change(checkout: Path) -> None:
    found = attempt(checkout, "__import__('time').sleep(600)", test_bound=2)
    assert (found.caught, found.why) == (
        True,
        "tests/test_marks.py::test_a_grade hangs, it does not end within 2 s",
    )


def test_tests_for_which_the_time_is_short_have_noticed_nothing(checkout: Path) -> None:
    (checkout / "tests/test_slow.py").write_text("import time\ndef test_slow():\n    time.sleep(0.2)\n")
    found = attempt(checkout, "points < 50", ["tests/test_slow.py", *MARKS], bound=0.1)
    assert (found.caught, found.why) == (False, "no test has failed within 0.1 s")


@pytest.mark.ci_may_skip("a container may deny namespaces")
def test_nothing_that_a_change_starts_outlives_its_tests(checkout: Path) -> None:
    if trial._alone() == trial.INIT:
        pytest.skip("no process namespace can be had")
    seconds = f"600.{os.getpid()}"
    start = f"__import__('subprocess').Popen(['sleep', '{seconds}'], start_new_session=True)"
    assert attempt(checkout, f"{start} and points >= 50").why == "all tests pass"
    assert not running(seconds)


def running(word: str) -> list[str]:
    """The command lines with this word."""
    lines = (line.decode(errors="replace").split("\0") for _, line in procs.files("cmdline"))
    return [" ".join(words) for words in lines if word in words]
