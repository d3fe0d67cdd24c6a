"""What follows an attempt: the rule, and who applies it."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from entrypoint.batch import conclude
from entrypoint.batch.conclude import Verdict
from entrypoint.batch.prepared import PreparedJob
from entrypoint.core.errors import BadInput
from entrypoint.job import handover, outcome
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.plan.failure_policy import FailurePolicy

STOP, REQUEUE, RESTART = FailurePolicy
PREEMPTED = "JobId=7 JobState=RUNNING Restarts=0 PreemptEligibleTime=2026-11-21T09:00:00 PreemptTime=2026-11-21T10:00:00 "
NAMES = ("follows", "status", "attempt", "say", "tell", "by_hand", "asked")
TAKEN = Outcome(status=69, node="a", error="the port is taken")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conclude, "LATE_PAUSE", 0.001)


@pytest.fixture
def hand(tmp_path: Path) -> Path:
    (tmp_path / "hand").mkdir()
    return tmp_path / "hand"


def job(tmp_path: Path, **changes: Any) -> PreparedJob:
    """One of two nodes with a task each, whose run directory is there."""
    run = tmp_path / "my run"
    RunDirectory(run, 0).create()
    known: dict[str, Any] = {
        "run_dir": run,
        "attempt": 0,
        "hosts": ("a", "b"),
        "tasks": 1,
        "policy": STOP,
        "bound": None,
        "port_by_hand": False,
        "scheduler": "slurm",
        "batch": True,
        "began": int(time.time()),
    }
    return PreparedJob(**{**known, **changes})


def write(of: PreparedJob, *outcomes: Outcome | int | None, attempt: int = 0) -> None:
    """Each node's, in order."""
    for place, found in enumerate(outcomes):
        if found is not None:
            ended = found if isinstance(found, Outcome) else Outcome(status=found, time=1.0)
            outcome.write(RunDirectory(of.run_dir, attempt).outcome(place, None), ended)


def decided(of: PreparedJob, *, is_planned: bool = False, told: str = "", patience: int = 0) -> Verdict:
    run, ended = conclude.last(of, patience)
    return conclude.verdict(of, run, ended, is_planned=is_planned, told=told)


def lines(found: Verdict) -> list[str]:
    return [line for _, line in found.said]


FAILED = Outcome(status=7, rank=1, node="b", time=9.0, error="ValueError: no")


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize(
    ("policy", "outcomes", "planned", "follows", "status"),
    [
        (STOP, (0, 0), False, "end", 0),
        (STOP, (0, FAILED), False, "end", 7),
        (REQUEUE, (0, FAILED), False, "requeue", 7),
        (RESTART, (0, FAILED), False, "requeue", 7),
        (REQUEUE, (64, 0), False, "end", 64),
        (STOP, (75, 75), True, "requeue", 75),
        (STOP, (75, 75), False, "requeue", 75),
        (STOP, (75, 0), True, "end", 1),
        (REQUEUE, (0, None), False, "requeue", 1),
        (STOP, (TAKEN, None), False, "again", 69),
        (STOP, (dataclasses.replace(TAKEN, rank=0), None), False, "end", 69),
    ],
)
def test_what_follows(
    tmp_path: Path,
    policy: FailurePolicy,
    outcomes: tuple[Outcome | int | None, ...],
    planned: bool,
    follows: str,
    status: int,
    batch: bool,
) -> None:
    of = job(tmp_path, policy=policy, batch=batch)
    write(of, *outcomes)
    found = decided(of, is_planned=planned)
    by_hand = follows == "requeue" and not batch
    assert (found.follows, found.status) == ("end" if by_hand else follows, status)
    assert (of.by_hand in lines(found)) == by_hand


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        (Outcome(status=3, rank=1, node="b", time=9.0), "rank 1 on b: nothing on stderr"),
        (Outcome(status=3, node="b", time=9.0), "b: no reason was told"),
    ],
)
def test_a_failure_that_nobody_gave_a_reason_for_is_told_as_such(
    tmp_path: Path, silent: Outcome, told: str
) -> None:
    of = job(tmp_path)
    write(of, 0, silent)
    assert lines(decided(of)) == [f"status 3: {told} (logs: {of.run_dir}/logs/0)"]


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ((0, FAILED), "status 7: rank 1 on b: ValueError: no"),
        ((75, FAILED), "status 7: rank 1 on b: ValueError: no"),
        ((None, FAILED), "status 7: rank 1 on b: ValueError: no"),
        ((75, 0), "status 1: a saved to go on, the others ended well"),
        ((0, None), "status 1: no outcome was written by b"),
        ((0, Outcome(status=1, node="b", error="lost: it fell silent")), "status 1: b: lost: it fell silent"),
        ((0, Outcome(status=64, node="b", error="there is no image")), "status 64: b: there is no image"),
    ],
)
def test_a_failure_is_said_with_who_failed_and_where_the_logs_are(
    tmp_path: Path, outcomes: tuple[Outcome | int | None, ...], said: str
) -> None:
    of = job(tmp_path)
    write(of, *outcomes)
    if 75 in outcomes:  # which counts with its node's name
        saved = Outcome(status=75, node="a", time=1.0)
        outcome.write(RunDirectory(of.run_dir, 0).outcome(0, None), saved)
    assert lines(decided(of)) == [f"{said} (logs: {of.run_dir}/logs/0)"]


def test_another_port_is_tried_three_times_unless_it_was_chosen_by_hand(tmp_path: Path) -> None:
    of = job(tmp_path)
    write(of, TAKEN)
    assert lines(decided(of)) == [
        "attempt 0: a: the port is taken",
        "trying again: attempt 1, with other ports",
    ]
    assert decided(dataclasses.replace(of, tries=2)).follows == "again"
    assert decided(dataclasses.replace(of, tries=3)).follows == "end"
    assert decided(dataclasses.replace(of, port_by_hand=True)).follows == "end"


def test_a_preempted_job_runs_again_whatever_its_policy(tmp_path: Path) -> None:
    of = job(tmp_path)
    write(of, Outcome(status=143, node="a", error="ended by SIGTERM"))
    found = decided(of, told=PREEMPTED)
    assert (found.follows, lines(found)) == ("requeue", ["preempted: a: ended by SIGTERM"])
    assert decided(of, told=PREEMPTED.replace("2026-11-21T10:00:00", "None")).follows == "end"
    assert decided(dataclasses.replace(of, batch=False), told=PREEMPTED).follows == "end"


def test_what_a_node_that_is_cut_off_says_of_the_first_counts_only_where_that_did_not_fail(
    tmp_path: Path,
) -> None:
    of = job(tmp_path)
    lost = Outcome(status=1, node="a", time=1.0, error="lost: nothing was heard from it for 60 s")
    failed = Outcome(status=9, rank=0, node="a", time=2.0, error="ValueError: no")
    write(of, failed, lost)
    assert decided(of).status == 9
    write(of, 0, lost)
    assert decided(of).status == 1
    assert lines(decided(of)) == [f"status 1: a: {lost.error} (logs: {of.run_dir}/logs/0)"]


def test_after_a_restart_the_last_attempt_counts_and_those_that_took_part(tmp_path: Path, hand: Path) -> None:
    of = job(tmp_path, policy=RESTART)
    write(of, FAILED, FAILED)
    crew = RunDirectory(of.run_dir, 1)
    crew.claim([(1, "b"), (7, "nobody")], exclusive=False)
    write(of, None, 0, attempt=1)
    run, ended = conclude.last(of, 0)
    assert (run.attempt, ended.status) == (1, 0)
    write(of, None, dataclasses.replace(FAILED, status=9), attempt=1)
    found = decided(of)
    assert (found.follows, found.status) == ("requeue", 9)
    assert lines(found) == [
        f"status 9: rank 1 on b: ValueError: no (logs: {of.run_dir}/logs/1)",
        "it does not go on inside the allocation: as with --on-failure requeue",
    ]
    conclude.carry_out(hand, of, found)
    assert (of.run_dir / "restarts").read_text() == "2 0\n"


@pytest.mark.parametrize("mode_rank", [True, False])
def test_each_task_of_a_node_has_its_outcome(tmp_path: Path, mode_rank: bool) -> None:
    of = job(tmp_path, tasks=2 if mode_rank else 1)
    run = RunDirectory(of.run_dir, 0)
    for place in (0, 1):
        for task in range(of.tasks):
            outcome.write(run.outcome(place, task), Outcome(status=0))
    assert decided(of).follows == "end"
    run.outcome(1, of.tasks - 1).unlink()
    assert lines(decided(of)) == [f"status 1: no outcome was written by b (logs: {of.run_dir}/logs/0)"]


def test_a_late_outcome_is_waited_for_and_only_for_a_while_where_a_failure_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = job(tmp_path)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            write(of, 0, 0)

    monkeypatch.setattr(time, "sleep", sleep)
    assert conclude.last(of, conclude.LATE)[1].status == 0
    assert len(pauses) == 5
    write(of, FAILED)
    RunDirectory(of.run_dir, 0).outcome(1, None).unlink()
    pauses[:] = [0.0] * 10
    conclude.last(of, conclude.LATE)
    assert len(pauses) == 10 + conclude.LATE_FAILED


def planned_ends(of: PreparedJob, hand: Path, times: int) -> list[Verdict]:
    """What follows each of so many planned ends in a row."""
    found = []
    for attempt in range(times):
        of = dataclasses.replace(of, attempt=attempt)
        write(of, 75, 75, attempt=attempt)
        found.append(decided(of, is_planned=True))
        conclude.carry_out(hand, of, found[-1])
    return found


@pytest.mark.parametrize("saves", ["never", "once"])
def test_planned_ends_without_progress_are_bounded(tmp_path: Path, hand: Path, saves: str) -> None:
    of = job(tmp_path)
    if saves == "once":
        (of.run_dir / "checkpoints/step-00000001").mkdir(parents=True)
    found = planned_ends(of, hand, 4)
    assert [one.follows for one in found] == [
        "requeue",
        "requeue",
        "end",
        "requeue",
    ]  # what begins anew is counted anew
    assert lines(found[2]) == [
        "saved at a planned end",
        (
            "not run again: 3 planned ends in a row without a new checkpoint: the time limit is too short, or the "
            f"warning comes too early (--signal, --stop-before); {of.by_hand}"
        ),
    ]


def test_planned_ends_are_not_bounded_where_a_script_may_keep_its_checkpoints_elsewhere(
    tmp_path: Path, hand: Path
) -> None:
    found = planned_ends(job(tmp_path, began=int(time.time()) - 301), hand, 5)
    assert {one.follows for one in found} == {"requeue"}


def test_a_new_checkpoint_between_planned_ends_is_progress(tmp_path: Path, hand: Path) -> None:
    of = job(tmp_path)
    for attempt in range(5):
        of = dataclasses.replace(of, attempt=attempt)
        (of.run_dir / f"checkpoints/step-{attempt:08}").mkdir(parents=True)
        os.utime(of.run_dir / f"checkpoints/step-{attempt:08}", (attempt + 1, attempt + 1))
        write(of, 75, 75, attempt=attempt)
        found = decided(of, is_planned=True)
        conclude.carry_out(hand, of, found)
        assert found.follows == "requeue"


def test_failures_and_unasked_ends_are_bounded_and_planned_ones_are_not(tmp_path: Path, hand: Path) -> None:
    of = job(tmp_path, policy=REQUEUE, bound=1)
    write(of, 0, FAILED)
    conclude.carry_out(hand, of, decided(of))
    assert (of.run_dir / "restarts").read_text() == "1 0\n"
    found = decided(of)
    assert (found.follows, lines(found)[-1]) == (
        "end",
        f"not run again: restarted 1 time before, and --max-restarts is 1; {of.by_hand}",
    )
    write(of, 75, 75)
    assert decided(of).follows == "end"
    conclude.carry_out(hand, of, decided(of, is_planned=True))
    assert not (of.run_dir / "restarts").exists()
    assert decided(of).follows == "requeue"


@pytest.mark.parametrize(
    ("ends", "status"), [((0, 0), 0), ((0, FAILED), 7)], ids=["a good end", "one failure too many"]
)
def test_a_run_that_is_not_run_again_begins_to_count_anew(
    tmp_path: Path, hand: Path, ends: tuple[Outcome | int, ...], status: int
) -> None:
    of = job(tmp_path, policy=RESTART)
    (of.run_dir / "restarts").write_text("1 0\n2 0\n3 0\n")
    write(of, *ends)
    found = decided(of)
    conclude.carry_out(hand, of, found)
    assert (found.follows, found.status) == ("end", status)
    assert not (of.run_dir / "restarts").exists()


# --- who decides ------------------------------------------------------------------------------------------------


def heard(hand: Path) -> dict[str, list[str]]:
    """The verdict, without what is empty."""
    facts = handover.read(hand / handover.VERDICT, NAMES)
    return {name: facts.all(name) for name in NAMES if any(facts.all(name))}


def left(
    hand: Path, of: PreparedJob, place: int = 0, asked: int | None = None, lost: tuple[int, ...] = ()
) -> bool:
    """Whether a node's `launch` leaves a verdict."""
    of.write(hand)
    (hand / handover.VERDICT).unlink(missing_ok=True)
    conclude.leave(hand, of.attempt, RunDirectory(of.run_dir, of.attempt), place, asked, lost)
    return (hand / handover.VERDICT).exists()


def test_the_first_node_decides_where_nothing_more_is_to_be_known(tmp_path: Path, hand: Path) -> None:
    of = job(tmp_path)
    write(of, 0, 0)
    assert left(hand, of)
    assert heard(hand) == {
        "follows": ["end"],
        "status": ["0"],
        "attempt": ["1"],
        "tell": [f"done: {of.run_dir}"],
        "by_hand": [of.by_hand],
    }
    write(of, 75, 75)
    (of.run_dir / "stop").touch()
    assert left(hand, of)
    assert (heard(hand)["follows"], heard(hand)["say"]) == (["requeue"], ["saved at a planned end"])


def test_it_leaves_to_the_host_what_slurm_may_know_more_of_and_what_is_missing(
    tmp_path: Path, hand: Path
) -> None:
    of = job(tmp_path)
    write(of, 0, FAILED)
    assert not left(hand, of)
    assert left(hand, dataclasses.replace(of, scheduler="pbs"))
    assert left(hand, dataclasses.replace(of, batch=False))
    RunDirectory(of.run_dir, 0).outcome(1, None).unlink()
    assert not left(hand, dataclasses.replace(of, scheduler="pbs"))
    assert not left(hand, of, asked=143)


def test_an_attempt_whose_first_node_could_not_tell_its_end_gets_it_here(tmp_path: Path, hand: Path) -> None:
    of = job(tmp_path)
    manifest = of.run_dir / "manifest.json"
    manifest.write_text('{"attempts": [{"attempt": 0, "ended": null, "status": null}]}')
    write(of, None, FAILED)
    conclude.carry_out(hand, of, decided(of))
    assert json.loads(manifest.read_text())["attempts"][0]["status"] == 7


def test_who_is_asked_to_end_says_how_to_go_on(tmp_path: Path, hand: Path) -> None:
    of = job(tmp_path, scheduler="pbs")
    assert left(hand, of, asked=143, lost=(1,))
    assert (heard(hand)["asked"], heard(hand)["follows"], heard(hand)["status"]) == (
        ["143"],
        ["end"],
        ["143"],
    )
    assert heard(hand)["say"] == [
        f"ended by a signal (status 143), not run again by this script; {of.by_hand}"
    ]
    over = handover.read(hand / handover.OVER, ("lost", "asked"))
    assert (over.all("lost"), over.one("asked")) == (["1"], "yes")


def test_another_node_says_only_whether_the_first_has_ended(tmp_path: Path, hand: Path) -> None:
    of = job(tmp_path)
    assert not left(hand, of, place=1)
    assert (hand / handover.OVER).read_bytes() == b""
    RunDirectory(of.run_dir, 1).claim([(0, "a"), (1, "b")], exclusive=False)
    write(of, 0)
    assert not left(hand, of, place=1)
    assert (hand / handover.OVER).read_bytes() == b"", "it is the last attempt that counts"
    write(of, 0, attempt=1)
    assert not left(hand, of, place=1)
    assert (hand / handover.OVER).read_bytes() == b"first=ended\0"


def ask(hand: Path, attempt: int = 0, **facts: str) -> None:
    handover.write(hand / handover.ASK, [("attempt", str(attempt)), *facts.items()])


@pytest.mark.parametrize(("told", "again"), [(" Restarts=3 x", True), (" Restarts=2 x", False), ("", False)])
def test_slurms_own_requeue_is_seen_in_its_count(tmp_path: Path, hand: Path, told: str, again: bool) -> None:
    of = job(tmp_path, restarts=2)
    of.write(hand)
    ask(hand, asked="143", told=told)
    assert conclude.conclude(hand) == 0
    said = heard(hand)
    assert ("tell" in said, "say" in said) == (again, not again)
    assert said["asked"] == ["143"]


def test_a_warning_or_the_stop_file_makes_an_end_a_planned_one(tmp_path: Path, hand: Path) -> None:
    of = job(tmp_path, policy=RESTART)
    of.write(hand)
    write(of, 75, 75)
    ask(hand, warned="yes")
    conclude.conclude(hand)
    assert heard(hand)["say"] == ["saved at a planned end"]
    ask(hand, warned="")
    conclude.conclude(hand)
    assert heard(hand)["say"] == ["saved at an end that was not asked for"]


def test_the_next_attempt_begins_where_this_one_could_not(tmp_path: Path, hand: Path) -> None:
    of = job(tmp_path, policy=RESTART)
    of.write(hand)
    write(of, TAKEN)
    (of.run_dir / "stop").touch()
    ask(hand)
    conclude.conclude(hand)
    assert (heard(hand)["follows"], heard(hand)["attempt"]) == (["again"], ["1"])
    assert PreparedJob.read(hand, 1) == dataclasses.replace(of, attempt=1, tries=2)
    following = RunDirectory(of.run_dir, 1)
    assert (following.logs.is_dir(), following.is_closed(), following.unfinished()) == (True, True, 1)
    assert following.stop.exists()  # no rank has seen it yet


def test_who_is_killed_before_the_verdict_is_there_has_decided_nothing(
    tmp_path: Path, hand: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first node's `launch` is, where Slurm ends the step because another node has left it."""
    of = job(tmp_path)
    of.write(hand)
    write(of, TAKEN, TAKEN)
    written = handover.write

    def killed(path: Path, entries: Any) -> None:
        if path.name == handover.VERDICT:
            raise KeyboardInterrupt
        written(path, entries)

    with monkeypatch.context() as patch:
        patch.setattr(handover, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            conclude.leave(hand, 0, RunDirectory(of.run_dir, 0), 0, None, ())
    ask(hand)
    conclude.conclude(hand)
    assert (heard(hand)["follows"], heard(hand)["status"]) == (["again"], ["69"])
    assert heard(hand)["say"] == [
        "attempt 0: a: the port is taken",
        "trying again: attempt 1, with other ports",
    ]
    assert PreparedJob.read(hand, 1) == dataclasses.replace(of, attempt=1, tries=2)


def test_a_run_that_its_own_job_script_could_not_conclude_has_come_to_its_end_or_not(tmp_path: Path) -> None:
    of = job(tmp_path)
    write(of, 0, 0)
    assert conclude.came_to_its_end(of, 0)
    write(of, 0, FAILED)
    assert not conclude.came_to_its_end(of, 0)


def test_a_run_of_which_this_job_lacks_a_node_has_not_come_to_its_end_as_far_as_it_knows(
    tmp_path: Path,
) -> None:
    of = job(tmp_path)
    write(of, 0, 0)
    RunDirectory(of.run_dir, 0).claim([(0, "a"), (7, "h")], exclusive=False)
    assert not conclude.came_to_its_end(of, 0)


def test_a_job_is_the_same_after_it_was_written(tmp_path: Path, hand: Path) -> None:
    for of in (job(tmp_path), job(tmp_path, bound=0, port_by_hand=True, batch=False, restarts=4, tries=3)):
        of.write(hand)
        assert PreparedJob.read(hand, of.attempt) == of
        assert (hand / "state.0").stat().st_mode & 0o777 == 0o600
    with pytest.raises(BadInput, match=r"state\.0 cannot be read"):
        PreparedJob.read(tmp_path, 0)


# --- the files ----------------------------------------------------------------------------------------------------


def test_what_one_half_writes_the_other_reads(tmp_path: Path) -> None:
    entries = [("a", "x=y"), ("b", "two\nlines"), ("a", ""), ("c", "\udcff")]
    handover.write(tmp_path / "facts", entries)
    facts = handover.read(tmp_path / "facts", ("a", "b", "c"))
    assert (facts.all("a"), facts.one("a"), facts.one("b"), facts.one("c")) == (
        ["x=y", ""],
        "",
        "two\nlines",
        "\udcff",
    )
    assert (facts.one("d"), facts.all("d")) == ("", [])
    with pytest.raises(BadInput, match="facts has 'c', which this image does not know"):
        handover.read(tmp_path / "facts", ("a", "b"))


def test_the_environment_is_gone_once_it_was_read(tmp_path: Path) -> None:
    (tmp_path / handover.ENVIRONMENT).write_bytes(b"A=b=c\0D=\n\0")
    assert handover.environment(tmp_path) == {"A": "b=c", "D": "\n"}
    assert not (tmp_path / handover.ENVIRONMENT).exists()
    with pytest.raises(BadInput):
        handover.environment(tmp_path)


def test_the_directory_counts_where_it_is_ones_own_and_of_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = (tmp_path / f"apptrain.{node}.x" for node in (os.uname().nodename, "another"))
    for path in (mine, other):
        path.mkdir()
    found = {handover.VARIABLE: str(mine)}
    assert handover.folder(found) == mine
    assert handover.folder({handover.VARIABLE: str(other)}) is None
    assert handover.folder({}) is None
    assert handover.folder({handover.VARIABLE: f"{tmp_path}/none"}) is None
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert handover.folder(found) is None
