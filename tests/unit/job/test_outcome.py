"""Outcome files, and the job's status that they make."""

from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome

FAILED = Outcome(status=7, rank=3, node="gpu-b07", signal=0, time=1795254231.5, error="ValueError: x = 'a b'")


def test_a_file_holds_name_and_value_lines_and_reads_back(tmp_path: Path) -> None:
    outcome.write(tmp_path / "0.1", FAILED)
    text = "status=7\nrank=3\nnode=gpu-b07\nsignal=0\ntime=1795254231.500000\nerror=ValueError: x = 'a b'\n"
    assert (tmp_path / "0.1").read_text() == text
    assert outcome.read(tmp_path / "0.1") == FAILED
    assert (tmp_path / "0.1").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["0.1"]


def test_every_field_reads_back(tmp_path: Path) -> None:
    killed = replace(FAILED, status=137, rank=0, signal=9, time=1795254231.123456)
    outcome.write(tmp_path / "0.1", killed)
    assert outcome.read(tmp_path / "0.1") == killed


def test_what_a_file_of_ours_leaves_out_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "0.1").write_text("status=3\nrank=\nsignal=\ntime=\n")
    assert outcome.read(tmp_path / "0.1") == Outcome(status=3)


def test_an_error_of_any_length_leaves_a_whole_file_within_its_space(tmp_path: Path) -> None:
    outcome.write(tmp_path / "0.1", replace(FAILED, error="x" * 5000))
    content = (tmp_path / "0.1").read_bytes()
    assert (len(content), content[-2:]) == (outcome.SPACE, b"x\n")
    found = outcome.read(tmp_path / "0.1")
    assert found is not None
    assert (found.status, set(found.error)) == (7, {"x"})


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (FAILED, "ValueError: x = 'a b'"),
        (replace(FAILED, error=""), "nothing on stderr"),
        (replace(FAILED, error="", rank=0), "nothing on stderr"),
        (replace(FAILED, error="", rank=None), "no reason was told"),
    ],
)
def test_a_failure_without_an_error_has_a_reason_all_the_same(ended: Outcome, reason: str) -> None:
    assert ended.reason == reason


def test_an_error_with_line_breaks_stays_one_line(tmp_path: Path) -> None:
    outcome.write(tmp_path / "0.0", Outcome(status=1, error="first\nstatus=0\r\nsecond"))
    assert outcome.read(tmp_path / "0.0") == Outcome(status=1, error="first status=0 second")


def test_a_status_without_a_rank_reads_back(tmp_path: Path) -> None:
    outcome.write(tmp_path / "0.0", Outcome(status=69, node="a"))
    assert outcome.read(tmp_path / "0.0") == Outcome(status=69, node="a", rank=None)


def test_that_each_rank_trained_alone_reads_back_and_is_said_of_no_other_outcome(tmp_path: Path) -> None:
    alone = Outcome(status=0, rank=3, node="a", alone=True)
    outcome.write(tmp_path / "0.0", alone)
    assert outcome.read(tmp_path / "0.0") == alone
    assert "process_group=none\n" in (tmp_path / "0.0").read_text()
    outcome.write(tmp_path / "0.1", FAILED)
    assert "process_group" not in (tmp_path / "0.1").read_text()


@pytest.mark.parametrize("text", ["", "status=", "status=x\n", "rank=1\n", "status=1\nrank=one\n"])
def test_what_is_no_outcome_counts_as_missing(tmp_path: Path, text: str) -> None:
    (tmp_path / "0.0").write_text(text)
    assert outcome.read(tmp_path / "0.0") is None


def test_a_missing_file_is_no_outcome(tmp_path: Path) -> None:
    assert outcome.read(tmp_path / "0.0") is None


def test_a_file_is_never_run_by_a_shell_that_sources_nothing(tmp_path: Path) -> None:
    outcome.write(tmp_path / "0.0", Outcome(status=1, error="$(touch pwned) `id`"))
    found = outcome.read(tmp_path / "0.0")
    assert found is not None
    assert found.error == "$(touch pwned) `id`"


def at(time: float, status: int) -> Outcome:
    return Outcome(status=status, rank=0, node="n", time=time)


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ([at(1, 0), at(2, 0)], 0),
        ([at(1, 75), at(2, 75)], 75),
        ([at(1, 75), at(2, 0)], 1),
        ([at(2, 7), at(1, 9)], 9),
        ([at(1, 137), at(2, 1)], 137),
        ([at(1, 75), at(2, 3)], 3),
        ([at(1, 0), None], 1),
        ([None, None], 1),
        ([at(5, 64), None], 64),
        ([at(5, 75), None], 1),
    ],
)
def test_the_jobs_status_follows_the_files(files: list[Outcome | None], status: int) -> None:
    job = outcome.of_job((f"0.{index}", found) for index, found in enumerate(files))
    assert job.status == status


@pytest.mark.parametrize("noticed", [4.0, 6.0])
def test_of_a_node_that_is_taken_for_lost_its_tasks_status_alone_says_less(noticed: float) -> None:
    lost = Outcome(status=1, node="b", time=5.0, error="lost: it closed the connection")
    task = Outcome(status=137, time=noticed, error="0.1 ended with status 137")
    assert outcome.of_job([("a", lost), ("b", task)], first="a") == lost
    assert outcome.of_job([("b", task), ("a", lost)]) == lost
    # Where another node is missed, the earliest says why.
    another = replace(lost, node="c")
    assert outcome.of_job([("a", another), ("b", task)], first="a") == (task if noticed < 5 else another)
    assert outcome.of_job([("a", Outcome(status=0, node="a", time=9.0)), ("b", task)], first="a") == task
    # The first node has failed itself: the others only miss it.
    assert outcome.of_job([("b", task), ("a", lost)], first="b") == task


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (1, "0.0"),
        (4, "0.0, 0.1, 0.2, 0.3"),
        (5, "0.0, 0.1, 0.2, 0.3 and 1 more"),
        (6, "0.0, 0.1, 0.2, 0.3 and 2 more"),
    ],
)
def test_missing_files_are_named(missing: int, named: str) -> None:
    job = outcome.of_job((f"0.{index}", None) for index in range(missing))
    assert job == Outcome(status=1, error=f"no outcome was written by {named}")
    twice = outcome.of_job(("a", None) for _ in range(missing))
    assert twice.error == "no outcome was written by a"


def test_ranks_that_saved_beside_some_that_ended_well_are_named() -> None:
    job = outcome.of_job([("a", at(1, 0)), ("b", at(2, 75)), ("c", at(3, 75))])
    assert job == Outcome(status=1, error="b, c saved to go on, the others ended well")


def test_a_job_that_ended_well_ended_when_the_last_did() -> None:
    assert outcome.of_job([("a", at(3, 0)), ("b", at(5, 0)), ("c", at(4, 0))]) == at(5, 0)


def test_names_count_the_task_only_where_a_task_is_a_rank() -> None:
    assert outcome.file_name(2, 5, None) == "2.5"
    assert outcome.file_name(2, 5, 0) == "2.5.0"


def test_a_run_directory_that_has_vanished_is_made_anew_for_the_outcome(tmp_path: Path) -> None:
    path = tmp_path / "run" / "outcome" / "0.1"
    outcome.write(path, Outcome(status=75))
    assert outcome.read(path) == Outcome(status=75)
    assert [folder.stat().st_mode & 0o777 for folder in (path.parent.parent, path.parent)] == [0o700] * 2


def test_space_is_taken_before_and_given_back_where_nothing_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "outcome" / "0.1"
    outcome.reserve(path)
    (taken,) = path.parent.iterdir()
    assert (taken.stat().st_size, outcome.read(path)) == (outcome.SPACE, None)
    outcome.write(path, FAILED)
    assert ([file.name for file in path.parent.iterdir()], outcome.read(path)) == (["0.1"], FAILED)
    outcome.reserve(path)
    outcome.release(path)
    outcome.release(path)
    assert [file.name for file in path.parent.iterdir()] == ["0.1"]


def test_only_what_no_rank_ended_with_says_that_another_attempt_may_help() -> None:
    assert Outcome(status=69).is_unavailable
    assert not Outcome(status=69, rank=0).is_unavailable
    assert not Outcome(status=1).is_unavailable
