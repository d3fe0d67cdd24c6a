"""How ranks are ended."""

import signal
from dataclasses import replace

import pytest

from entrypoint.job.outcome import Outcome
from entrypoint.meet.messages import AllDone, Failed, Stopped
from entrypoint.meet.reports import End
from entrypoint.ranks.ranks import AgentEnded
from tests.unit.run.attempts import (
    AGAIN,
    BOTH,
    CRASH,
    CRASHED,
    ELSEWHERE,
    RESTART_STATES,
    STAYS,
    ended,
    ends,
    started,
    well,
)
from tests.unit.scene import (
    AGENT,
    NEVER,
    Scene,
)


def test_a_failure_that_torchrun_has_made_good_is_none() -> None:
    scene = Scene(changes={"max_restarts": 1})
    assert scene.after(RESTART_STATES[AGAIN], ended(0), ended(1), AgentEnded(), AllDone()) == [
        *[(0, "done"), (0, "wait", 10.0)],
        well(0, 0),
    ]


def test_a_rank_that_ends_well_beside_one_that_failed_leaves_the_failure() -> None:
    scene = Scene(changes={"max_restarts": 1})
    assert scene.after(CRASHED, ended(0)) == STAYS


def test_in_mode_rank_the_one_rank_of_a_task_is_told_with_its_own_number() -> None:
    """Its process is there before anything is said of it."""
    scene = Scene(changes={"mode": "rank"}, ranks=[5])
    scene.ranks.pids[5] = AGENT + 6
    crash = replace(CRASH, rank=5, error="")
    assert scene.play(Stopped(), ended(5, 9), AgentEnded()) == [
        *[(0, "SIGUSR2", 5), (0.25, "fail", crash), (0.25, "kill")],
        ends(0.55, crash),
    ]


@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
def test_a_rank_that_ended_by_signal_before_another_had_saved_has_failed(alone: bool) -> None:
    scene = Scene(alone=alone)
    scene.after([*BOTH, ended(0, 75, at=1000.51)], ended(1, 143, 15, at=1000.5))
    killed = Outcome(status=143, rank=1, node="127.0.0.2", signal=15, time=1000.5, error="killed by SIGTERM")
    assert scene.log[-1][2] == killed


def test_a_rank_that_failed_by_itself_after_another_had_saved_has_failed() -> None:
    scene = Scene()
    scene.after([*BOTH, ended(0, 75, at=1000.1)], ended(1, 1, at=1000.5))
    assert scene.log[-1][2] == Outcome(status=1, rank=1, node="127.0.0.2", time=1000.5)


def test_the_earliest_75_counts() -> None:
    scene = Scene(alone=True, ranks=[0, 1, 2])
    steps = [ended(0, 75, at=1000.2), ended(1, 75, at=1000.4), ended(2, 143, 15, at=1000.3)]
    assert scene.play(*BOTH, started(2), *steps) == [
        (0, "wait", 10.0),
        well(0, 1, 75, at=1000.4),
    ]


@pytest.mark.parametrize(
    ("signum", "wrote", "error"),
    [
        (11, "", "killed by SIGSEGV"),
        (6, "ValueError: x", "killed by SIGABRT: ValueError: x"),
        (35, "", "killed by signal 35"),
    ],
)
def test_the_signal_that_ended_a_rank_is_named(signum: int, wrote: str, error: str) -> None:
    scene = Scene(alone=True, errors={1: wrote})
    scene.after(BOTH, ended(1, 128 + signum, signum))
    assert scene.log[-1] == ends(1.27, replace(CRASH, status=128 + signum, signal=signum, error=error))


SHORT = "out of memory (the limit is 2.0 GiB)"
WORKER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("signum", "wrote", "error"),
    [
        (9, "", f"killed by SIGKILL: {SHORT}"),
        (9, "step 7", f"killed by SIGKILL: {SHORT}: step 7"),
        (0, WORKER, f"{WORKER}: {SHORT}"),
        (11, "", "killed by SIGSEGV"),
        (0, "ValueError: x", "ValueError: x"),
    ],
)
def test_what_the_kernel_ended_for_want_of_memory_is_said_of_who_was_killed(
    signum: int, wrote: str, error: str
) -> None:
    scene = Scene(alone=True, errors={1: wrote})
    scene.ranks.memory = SHORT
    status = 128 + signum if signum else 1
    scene.after(BOTH, ended(1, status, signum))
    assert scene.log[-1] == ends(1.27, replace(CRASH, status=status, signal=signum, error=error))


def test_one_error_of_several_ranks_is_told_once_with_their_number() -> None:
    scene = Scene(alone=True, ranks=[0, 1, 2, 3], errors=dict.fromkeys(range(4), "ValueError: x"))
    scene.after(
        [started(rank) for rank in range(4)], *(ended(rank, 9, at=1000.4 + rank / 10) for rank in range(1, 4))
    )
    same = replace(CRASH, same=2)
    assert scene.log[-1] == ends(1.27, replace(CRASH, error="ValueError: x; 2 other ranks: the same"))
    assert scene.ranks.told == [same]


def test_the_output_is_told_of_a_failure_elsewhere_before_the_ranks_have_ended() -> None:
    scene = Scene()
    elsewhere = replace(ELSEWHERE, same=1)
    scene.after(BOTH, Failed(elsewhere))
    assert scene.ranks.told == [elsewhere]
    assert scene.log[-1] == ends(1.02, replace(elsewhere, error="KeyError: 'a'; 1 other rank: the same"))


def test_of_ranks_that_fail_together_the_earliest_is_named() -> None:
    scene = Scene(alone=True)
    scene.after(BOTH, ended(0, 3, at=1000.6), 0.2, ended(1, 9, at=1000.5))
    assert scene.log == [(0.25, "kill"), ends(0.25, replace(CRASH, error=""))]


def test_of_ranks_that_fail_together_the_one_that_the_others_follow_from_is_named() -> None:
    echo = "RuntimeError: [pair.cc:545] Connection reset by peer"
    scene = Scene(alone=True, errors={0: echo, 1: "ValueError: x"})
    scene.after(BOTH, ended(0, 1, at=1000.4), 0.2, ended(1, 9, at=1000.5))
    assert scene.log[-1] == ends(0.25, CRASH)


RESET = "RuntimeError: [pair.cc:545] Connection reset by peer"
WELL = End(rank=0, node_rank=1, node="127.0.0.2", status=0, time=1000.1, step=7)


def test_the_others_are_told_of_ranks_that_end_well() -> None:
    scene = Scene()
    scene.play(*BOTH, ended(0, at=1000.1), 0.1, ended(1, 75))
    assert scene.link.ends == [WELL, replace(WELL, rank=1, status=75, time=1000.5)]


def test_the_others_are_told_of_ranks_that_trained_alone() -> None:
    scene = Scene()
    scene.heartbeats.alone = {0}
    scene.play(*BOTH, ended(0, at=1000.1), ended(1))
    assert scene.link.ends == [replace(WELL, alone=True), replace(WELL, rank=1, time=1000.5)]


@pytest.mark.parametrize(("members", "said"), [((1, 2), True), ((1,), False)])
def test_what_ranks_started_trains_apart_only_if_there_are_other_nodes(
    members: tuple[int, ...], *, said: bool
) -> None:
    scene = Scene(changes={"members": members})
    scene.heartbeats.apart = True
    scene.play(*BOTH, ended(0), ended(1))
    assert [end.alone for end in scene.link.ends] == [said, said]


def test_that_each_rank_of_the_job_trained_alone_is_in_the_outcome() -> None:
    scene = Scene()
    scene.play(*BOTH, ended(0), ended(1), AllDone(alone=True))
    assert scene.log[-1] == (0, "ends", Outcome(status=0, rank=0, node="127.0.0.2", time=1000.5, alone=True))


@pytest.mark.parametrize(("alone", "said"), [({0, 1}, True), ({0}, False), (set(), False)])
def test_of_a_single_participant_its_own_ranks_count(alone: set[int], said: bool) -> None:
    scene = Scene(alone=True)
    scene.heartbeats.alone = alone
    scene.play(*BOTH, ended(0), ended(1))
    assert scene.log[-1] == (0, "ends", Outcome(status=0, rank=0, node="127.0.0.2", time=1000.5, alone=said))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("alone", "known"), [({0, 1}, True), ({0}, False), (set(), False)])
def test_that_ranks_trained_alone_is_known_of_those_that_a_signal_ends_too(
    alone: set[int], known: bool, *, single: bool
) -> None:
    scene = Scene(alone=single)
    scene.heartbeats.alone = alone
    scene.after(BOTH, signal.SIGTERM)
    assert scene.supervisor.trained_alone == known


def test_one_rank_cannot_join_others() -> None:
    scene = Scene(alone=True, ranks=[0])
    scene.heartbeats.alone = {0}
    scene.play(started(0), ended(0))
    assert not scene.supervisor.trained_alone
    assert scene.log[-1] == (0, "ends", Outcome(status=0, rank=0, node="127.0.0.2", time=1000.5))


def test_with_restarts_left_a_rank_that_ends_well_may_be_started_again() -> None:
    scene = Scene(changes={"max_restarts": 1})
    scene.play(*BOTH, ended(0))
    assert scene.link.ends == []


def test_the_others_are_told_where_the_script_of_a_failed_rank_was() -> None:
    scene = Scene(errors={1: RESET})
    scene.ranks.places[1] = "in backward (train.py:31)"
    scene.after(BOTH, ended(1, 1))
    crash = replace(CRASH, status=1, error=RESET, at="in backward (train.py:31)")
    assert scene.log[0] == (0.25, "fail", crash)


@pytest.mark.parametrize("later", [False, True])
def test_alone_a_rank_that_ended_well_while_another_needed_it_is_named(later: bool) -> None:
    """Its connections are closed some time before it has ended."""
    scene = Scene(alone=True, errors={1: RESET})
    scene.ranks.places[1] = "in backward (train.py:31)"
    steps = [ended(1, 1), 0.5, ended(0)] if later else [ended(0), ended(1, 1)]
    scene.after(BOTH, *steps)
    early = (
        "ended with 0 after 7 steps while 1 other was still in backward (train.py:31): "
        "do all ranks make the same number of steps?"
    )
    assert scene.log[-1] == ends(1.5, replace(CRASH, rank=0, status=1, error=early))


def test_a_rank_that_ends_well_while_others_run_is_no_failure() -> None:
    scene = Scene(alone=True, errors={1: "ValueError: x"})
    assert scene.play(*BOTH, ended(0)) == []


def test_a_rank_that_fails_later_is_not_waited_for() -> None:
    scene = Scene(alone=True)
    scene.after(BOTH, ended(0, 3, at=1000.6), 0.3, ended(1, 9, at=1000.5))
    assert scene.log == [
        *[(0.25, "SIGTERM", 1), (0.31, "kill")],
        ends(0.31, replace(CRASH, rank=0, status=3, time=1000.6, error="")),
    ]


def test_what_else_happens_while_failures_are_told_apart_is_not_lost() -> None:
    scene = Scene()
    scene.after(BOTH, ended(1, 9), 0.1, Failed(ELSEWHERE, lost=(2,)))
    assert scene.log[-2:] == [(1.27, "kill"), ends(1.27, ELSEWHERE)]
    assert scene.supervisor.state.lost == (2,)


def test_why_a_command_cannot_be_started_is_the_error_of_its_rank() -> None:
    why = "./bad.py cannot be started: No such file or directory"
    scene = Scene(alone=True, changes={"mode": "exec"}, ranks=[0])
    scene.after([1e-6], ended(0, 127), AgentEnded(error=why))
    assert scene.log[-1] == ends(0.25, replace(CRASH, rank=0, status=127, error=why))


def test_a_rank_fails_while_its_agent_ends_with_an_error() -> None:
    scene = Scene(alone=True, errors={1: "ValueError: x"})
    scene.after(BOTH, AgentEnded(error="OSError: no space"), ended(1, 9))
    assert scene.log[-1] == ends(1.27, CRASH)


@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
@pytest.mark.parametrize(("stays", "leaves"), [(0.0, 0.0), (3.0, 3.0), (NEVER, 10.0)])
def test_torchruns_agent_has_ten_seconds_to_leave(alone: bool, stays: float, leaves: float) -> None:
    scene = Scene(alone=alone)
    scene.ranks.agent_leaves = stays
    scene.lasts = 30.0
    scene.after(BOTH, ended(0), ended(1), *([] if alone else [AllDone()]))
    assert scene.log[-2:] == [(0, "wait", 10.0), well(leaves, 0)]


def test_what_comes_while_torchruns_agent_leaves_changes_nothing() -> None:
    scene = Scene(alone=True)
    scene.ranks.agent_leaves = 3.0
    scene.after(BOTH, ended(0), ended(1), 1.0, signal.SIGTERM)
    assert scene.log == [(0, "wait", 10.0), well(3.0, 0)]
