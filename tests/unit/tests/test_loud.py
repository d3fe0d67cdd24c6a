"""What a failing test shows of its logs."""

from pathlib import Path

import pytest

from tests import loud

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def nothing_named() -> None:
    loud.forget()


def test_the_latest_log_comes_first_and_all_together_are_a_hundred_lines() -> None:
    loud.explain("early", lambda: "\n".join(f"early {number}" for number in range(500)))
    loud.explain("late", lambda: "\n".join(f"late {number}" for number in range(500)))
    (late, first), (early, second) = loud.explanations()
    assert late == "late (the last 66 of 500 lines)"
    assert early == "early (the last 22 of 500 lines)"
    assert first.splitlines()[-1] == "late 499"
    assert second.splitlines()[0] == "early 478"


def test_a_short_log_is_shown_whole_and_an_empty_one_not_at_all() -> None:
    loud.explain("empty", lambda: "")
    loud.explain("short", lambda: "one\ntwo\n")
    assert loud.explanations() == [("short", "one\ntwo")]


def test_a_log_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    loud.explain("job 7", (tmp_path / "job.log").read_text)
    ((title, text),) = loud.explanations()
    assert title == "job 7"
    assert text.startswith("cannot be read: FileNotFoundError(2, ")


def test_a_failure_shows_them_and_the_next_test_begins_with_none(pytester: pytest.Pytester) -> None:
    conftest = Path(loud.__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(conftest)
    pytester.makepyfile(
        """
        from tests.loud import explain
        def test_first():
            explain("job 1", lambda: "it said why")
            assert False
        def test_second():
            assert False
        """
    )
    ended = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    ended.assert_outcomes(failed=2)
    ended.stdout.fnmatch_lines(["*test_first*", "*- job 1 -*", "it said why", "*test_second*"])
    assert ended.outlines.count("it said why") == 1
