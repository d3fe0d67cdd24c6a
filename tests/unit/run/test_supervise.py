"""What follows from what, over fakes and a clock of their own: ends, failures, signals."""

import inspect
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from entrypoint.job.outcome import Outcome
from entrypoint.meet.link import Link
from entrypoint.meet.messages import AllDone, Failed, Look, LookCloser, Stopped
from entrypoint.meet.reports import Failure
from entrypoint.node import processes
from entrypoint.ranks import heartbeat, ranks
from entrypoint.ranks.ranks import AgentEnded
from entrypoint.ranks.stacks import LastLook, StackCollector
from entrypoint.run.endings import asked_to_end, to_failure
from tests.unit.run.attempts import (
    AGAIN,
    BOTH,
    CRASH,
    DONE,
    ELSEWHERE,
    END,
    FAILED,
    NO_STEP,
    NONE,
    OURS,
    PART,
    RESTART_STATES,
    RUN,
    RUNS_ON,
    SAVED,
    STATES,
    STAYS,
    STOP,
    TERMINATED,
    as_outcome,
    ended,
    ends,
    started,
    well,
)
from tests.unit.scene import (
    NEVER,
    SIGHTINGS,
    STUCK,
    Entry,
    FakeHeartbeats,
    FakeLink,
    FakeLook,
    FakeRanks,
    FakeStacks,
    Scene,
    Step,
    planned,
)

KILLED = replace(CRASH, status=137, signal=9, error="killed by SIGKILL: ValueError: x")
UNTOLD = replace(OURS, error="the ranks ended without a status")
BROKEN = replace(OURS, error="OSError: no space")
NO_PORT = replace(OURS, status=69, error="DistNetworkError: the port is taken")
INTERRUPTED = replace(OURS, status=130, signal=2, time=1000.51, error="interrupted")
CANCELLED = replace(ELSEWHERE, rank=None, status=143, signal=15, error="ended by SIGTERM")
MIXED = "rank {} saved to go on, the others ended well"
GRACE_GOES_ON = [(0.51, "kill"), ends(0.51, replace(TERMINATED, time=1000.0))]
"""While the ranks may save after SIGTERM, whatever happens: they have their time, and the outcome is that of
the signal."""
Logs = dict[tuple[str, ...], list[Entry]]
"""What follows an event in each of these states."""


def node_fails(failure: Failure, *, told: bool) -> Logs:
    """After a moment in which ranks may tell why. `told`: whether there are others, whose verdict is heard."""
    fail = [(0.25, "fail", failure)] if told else []
    to_0, to_1 = (0.25, "SIGTERM", 0), (0.25, "SIGTERM", 1)
    return {
        (NONE,): [*fail, (0.25, "kill"), ends(0.55 if told else 0.25, failure)],
        (RUN, STOP): [*fail, to_0, to_1, (1.27, "kill"), ends(1.27, failure)],
        (PART, SAVED): [*fail, to_1, (1.27, "kill"), ends(1.27, failure)],
        (DONE,): STAYS,
    }


def all_end(failure: Failure, *, told: bool) -> Logs:
    """At once. `told`: whether the others are told."""
    fail = [(0, "fail", failure)] if told else []
    to_0, to_1 = (0, "SIGTERM", 0), (0, "SIGTERM", 1)
    return {
        (NONE, DONE): [*fail, (0, "kill"), ends(0, failure)],
        (RUN, STOP): [*fail, to_0, to_1, (1.02, "kill"), ends(1.02, failure)],
        (PART, SAVED): [*fail, to_1, (1.02, "kill"), ends(1.02, failure)],
    }


BESIDE_OTHERS: dict[str, tuple[Step, Logs]] = {
    "rank 1 ends well": (ended(1), {(NONE, RUN, DONE, STOP): STAYS, (PART, SAVED): [(0, "done")]}),
    "rank 1 has saved": (ended(1, 75), {(NONE, RUN, DONE, STOP): STAYS, (PART, SAVED): [(0, "done")]}),
    "rank 1 fails": (
        ended(1, 9),
        {
            (NONE, PART, DONE, SAVED): [(0.25, "fail", CRASH), (0.25, "kill"), ends(0.55, CRASH)],
            (RUN, STOP): [(0.25, "fail", CRASH), (0.25, "SIGTERM", 0), (1.27, "kill"), ends(1.27, CRASH)],
        },
    ),
    "rank 1 is killed": (
        ended(1, 137, 9),
        {
            (NONE, PART, DONE): [(0.25, "fail", KILLED), (0.25, "kill"), ends(0.55, KILLED)],
            (RUN, STOP): [(0.25, "fail", KILLED), (0.25, "SIGTERM", 0), (1.27, "kill"), ends(1.27, KILLED)],
            (SAVED,): [(0, "done")],
        },
    ),
    "rank 0 is started again": (
        started(0),
        {
            (NONE,): STAYS,  # it may have given its first sign already
            (RUN, PART, DONE, SAVED): [(0, "forget", 0)],
            (STOP,): [(0, "forget", 0), (1.49, "SIGUSR2", 0)],
            # Nobody has told the new process to end.
            (END,): [(6.49, "kill"), ends(6.49, replace(TERMINATED, time=1000.0))],
        },
    ),
    "the agent ends": (AgentEnded(), node_fails(UNTOLD, told=True)),
    "the agent ends with an error": (AgentEnded(error=BROKEN.error), node_fails(BROKEN, told=True)),
    "torch's store cannot be had": (
        AgentEnded(error=NO_PORT.error, status=69),
        node_fails(NO_PORT, told=True),
    ),
    "a rank elsewhere fails": (Failed(ELSEWHERE, lost=(2,)), all_end(ELSEWHERE, told=False)),
    "another node gets SIGTERM": (Failed(CANCELLED), all_end(CANCELLED, told=False)),
    "SIGTERM comes": (signal.SIGTERM, all_end(TERMINATED, told=True)),
    "Ctrl-C comes": (
        signal.SIGINT,
        all_end(INTERRUPTED, told=True)
        | {(END,): [(0.01, "kill"), ends(0.01, replace(TERMINATED, time=1000.0))]},
    ),
    "the job seems to hang": (
        Look(NO_STEP),
        {
            (NONE,): [
                (0, "look"),
                (0, "seen", SIGHTINGS),
                (0.3, "kill"),
                (0.3, "says", "kept"),
                ends(0.3, STUCK),
            ],
            (RUN, STOP): [
                *[(0, "look"), (0, "seen", SIGHTINGS), (0.3, "SIGTERM", 0), (0.3, "SIGTERM", 1)],
                *[(0.3, "kill"), (0.3, "says", "kept"), ends(0.3, STUCK)],
            ],
            (PART, SAVED): [
                *[
                    (0, "look"),
                    (0, "seen", SIGHTINGS),
                    (0.3, "SIGTERM", 1),
                    (0.3, "kill"),
                    (0.3, "says", "kept"),
                    ends(0.3, STUCK),
                ],
            ],
            (DONE,): [(0, "seen", []), (0.3, "kill"), (0.3, "says", "kept"), ends(0.3, STUCK)],
        },
    ),
    "all nodes are done": (
        AllDone(),
        {
            (NONE, RUN, STOP): [(0, "wait", 10.0), well(0, None, at=1000.51)],
            (PART,): [(0, "wait", 10.0), well(0, 0, at=1000.1)],
            (DONE,): [(0, "wait", 10.0), well(0, 1, at=1000.2)],
            (SAVED,): [(0, "wait", 10.0), well(0, 0, 75, at=1000.1)],
        },
    ),
    "all nodes are done, and some ranks saved beside others that ended well": (
        AllDone(split=MIXED.format(2)),
        {
            (NONE, RUN, STOP, PART, DONE, SAVED): [
                *[(0, "wait", 10.0), (0, "ends", Outcome(status=1, error=MIXED.format(2)))],
            ],
        },
    ),
    "a stop is asked for elsewhere": (
        Stopped(),
        {
            (NONE, DONE, STOP): STAYS,
            (RUN,): [(0, "SIGUSR2", 0), (0, "SIGUSR2", 1)],
            (PART, SAVED): [(0, "SIGUSR2", 1)],
        },
    ),
    "SIGUSR2 comes": (
        signal.SIGUSR2,
        {
            (NONE, DONE, STOP): [(0, "stop", None)],
            (RUN,): [(0, "stop", None), (0, "SIGUSR2", 0), (0, "SIGUSR2", 1)],
            (PART, SAVED): [(0, "stop", None), (0, "SIGUSR2", 1)],
        },
    ),
}


def cases(rows: Mapping[str, tuple[Step, Logs]], states: Sequence[str]) -> list[Any]:
    """One for each event in each of the states; where a row does not tell, the grace goes on."""
    found = []
    for event, (step, logs) in rows.items():
        by_state = {END: GRACE_GOES_ON} | {state: log for group, log in logs.items() for state in group}
        found += [pytest.param(s, step, by_state[s], id=f"{event} {s}") for s in states]
    return found


@pytest.mark.parametrize(("state", "step", "log"), cases(BESIDE_OTHERS, list(STATES)))
def test_beside_other_nodes(state: str, step: Step, log: list[Entry]) -> None:
    assert Scene(errors={1: "ValueError: x"}).after(STATES[state], step) == log


ALONE_STATES = {name: steps for name, steps in STATES.items() if name != DONE}
ALONE_STATES[STOP] = [*BOTH, signal.SIGUSR2]
ALONE: dict[str, tuple[Step, Logs]] = {
    "rank 1 ends well": (
        ended(1),
        {
            (NONE, RUN, STOP): STAYS,
            (PART,): [(0, "wait", 10.0), well(0, 1)],
            (SAVED,): [(0, "wait", 10.0), (0, "ends", Outcome(status=1, error=MIXED.format(0)))],
        },
    ),
    "rank 1 has saved": (
        ended(1, 75),
        {
            (NONE, RUN, STOP): STAYS,
            (PART,): [(0, "wait", 10.0), (0, "ends", Outcome(status=1, error=MIXED.format(1)))],
            (SAVED,): [(0, "wait", 10.0), well(0, 1, 75)],
        },
    ),
    "rank 1 fails": (
        ended(1, 9),
        {
            (NONE, PART, SAVED): [(0.25, "kill"), ends(0.25, CRASH)],
            (RUN, STOP): [(0.25, "SIGTERM", 0), (1.27, "kill"), ends(1.27, CRASH)],
        },
    ),
    "rank 1 is killed": (
        ended(1, 137, 9),
        {
            (NONE, PART): [(0.25, "kill"), ends(0.25, KILLED)],
            (RUN, STOP): [(0.25, "SIGTERM", 0), (1.27, "kill"), ends(1.27, KILLED)],
            (SAVED,): [(0, "wait", 10.0), well(0, 1, 75)],
        },
    ),
    "the agent ends": (AgentEnded(), node_fails(UNTOLD, told=False)),
    "the agent ends with an error": (AgentEnded(error=BROKEN.error), node_fails(BROKEN, told=False)),
    "SIGTERM comes": (signal.SIGTERM, all_end(TERMINATED, told=False)),
    "Ctrl-C comes": (
        signal.SIGINT,
        all_end(INTERRUPTED, told=False)
        | {(END,): [(0.01, "kill"), ends(0.01, replace(TERMINATED, time=1000.0))]},
    ),
    "SIGUSR2 comes": (
        signal.SIGUSR2,
        {
            (NONE, STOP): STAYS,
            (RUN,): [(0, "SIGUSR2", 0), (0, "SIGUSR2", 1)],
            (PART, SAVED): [(0, "SIGUSR2", 1)],
        },
    ),
}


@pytest.mark.parametrize(("state", "step", "log"), cases(ALONE, list(ALONE_STATES)))
def test_alone(state: str, step: Step, log: list[Entry]) -> None:
    scene = Scene(alone=True, errors={1: "ValueError: x"})
    assert scene.after(ALONE_STATES[state], step) == log


FAILS_FIRST = [(0.25, "fail", CRASH), (0.25, "SIGTERM", 0), (1.27, "kill"), ends(1.27, CRASH)]
RESTARTS: dict[str, tuple[Step, Logs]] = {
    "rank 1 fails": (ended(1, 9), {(RUN, FAILED, AGAIN): STAYS}),
    "rank 1 is killed": (ended(1, 137, 9), {(RUN, FAILED, AGAIN): STAYS}),
    "rank 1 ends well": (ended(1), {(RUN, FAILED, AGAIN): STAYS}),
    "rank 1 is started": (started(1), {(RUN, FAILED, AGAIN): [(0, "forget", 1)]}),
    "the agent ends": (
        AgentEnded(),
        {(RUN, AGAIN): node_fails(UNTOLD, told=True)[RUN, STOP], (FAILED,): FAILS_FIRST},
    ),
    "torch's store cannot be had": (
        AgentEnded(error=NO_PORT.error, status=69),
        {(RUN, AGAIN): node_fails(NO_PORT, told=True)[RUN, STOP], (FAILED,): FAILS_FIRST},
    ),
}


@pytest.mark.parametrize(("state", "step", "log"), cases(RESTARTS, list(RESTART_STATES)))
def test_with_restarts_left_torchruns_agent_decides(state: str, step: Step, log: list[Entry]) -> None:
    scene = Scene(changes={"max_restarts": 1}, errors={1: "ValueError: x"})
    assert scene.after(RESTART_STATES[state], step) == log


@pytest.mark.parametrize(
    ("answers_after", "found"),
    [(0.0, ELSEWHERE), (9.9, ELSEWHERE), (10.1, CRASH), (NEVER, CRASH)],
    ids=["that comes at once", "that comes late", "that comes too late", "that never comes"],
)
def test_the_verdict_of_all_nodes_has_ten_seconds(answers_after: float, found: Failure) -> None:
    scene = Scene(errors={1: "ValueError: x"})
    scene.ranks.saving[0] = 0.0
    scene.lasts = 12.0
    scene.link.answers_after = answers_after
    scene.link.verdict = Failed(ELSEWHERE, lost=(0, 2))
    scene.after(BOTH, ended(1, 9))
    assert scene.log[:3] == [(0.25, "fail", CRASH), (0.25, "SIGTERM", 0), (0.27, "kill")]
    assert scene.log[3:] == [ends(max(0.27, 0.25 + min(answers_after, 10.0)), found)]
    assert scene.supervisor.state.lost == ((0, 2) if found is ELSEWHERE else ())


def test_ranks_that_show_nothing_are_looked_at_closer_once_everyone_has_looked() -> None:
    scene = Scene()
    scene.link.answers_after = NEVER
    scene.closer = [replace(SIGHTINGS[0], rank=9)]
    scene.after(BOTH, Look(NO_STEP), 2.0, LookCloser(), 1.0, Failed(STUCK))
    assert scene.log == [
        *[(0, "look"), (0, "seen", SIGHTINGS)],
        *[(2.0, "look closer"), (2.0, "seen", [*SIGHTINGS, *scene.closer])],
        *[(3.0, "SIGTERM", 0), (3.0, "SIGTERM", 1), (3.0, "kill"), (3.0, "says", "kept"), ends(3.0, STUCK)],
    ]


def test_only_a_failure_is_the_verdict() -> None:
    scene = Scene(errors={1: "ValueError: x"})
    scene.link.answers_after = NEVER
    others: list[Step] = [Stopped(), Look(NO_STEP), LookCloser(), signal.SIGTERM, ended(0, 3), AgentEnded()]
    scene.after(BOTH, ended(1, 9), 0.3, *others, 0.1, Failed(ELSEWHERE))
    assert scene.log == [
        *[(0.25, "fail", CRASH), (0.25, "SIGTERM", 0), (0.31, "kill")],
        ends(0.4, ELSEWHERE),
    ]


def test_ranks_that_do_not_end_are_killed_after_three_seconds_although_the_verdict_is_known() -> None:
    scene = Scene(errors={1: "ValueError: x"})
    scene.ranks.saving[0] = NEVER
    scene.after(BOTH, ended(1, 9))
    assert scene.log == [
        *[(0.25, "fail", CRASH), (0.25, "SIGTERM", 0), (3.25, "kill")],
        ends(3.25, CRASH),
    ]


@pytest.mark.parametrize(
    ("failure", "grace"),
    [
        (ELSEWHERE, 3.0),
        (CANCELLED, 7.0),
        (replace(CANCELLED, rank=3), 3.0),
        (replace(CANCELLED, signal=2, status=130), 3.0),
    ],
    ids=["fails", "is cancelled", "has a rank that got SIGTERM", "is interrupted"],
)
def test_ranks_may_save_where_another_node(failure: Failure, grace: float) -> None:
    scene = Scene()
    scene.ranks.saving = {0: 0.5, 1: NEVER}
    scene.lasts = 30.0
    scene.after(BOTH, Failed(failure, lost=(0,)))
    assert scene.log == [(0, "SIGTERM", 0), (0, "SIGTERM", 1), (grace, "kill"), ends(grace, failure)]
    assert scene.supervisor.state.lost == (0,)


@pytest.mark.parametrize(
    ("signum", "error", "grace"),
    [
        (signal.SIGTERM, "ended by SIGTERM", 7.0),
        (signal.SIGINT, "interrupted", 3.0),
        (signal.SIGHUP, "ended by SIGHUP", 3.0),
    ],
)
@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
def test_ranks_that_do_not_end_are_killed_when_their_grace_is_over(
    alone: bool, signum: signal.Signals, error: str, grace: float
) -> None:
    scene = Scene(alone=alone)
    scene.ranks.saving = {0: NEVER, 1: NEVER}
    scene.lasts = 30.0
    mine = replace(OURS, status=128 + signum, signal=signum, time=1000.51, error=error)
    scene.after(BOTH, signum)
    told = [] if alone else [(0, "fail", mine)]
    assert scene.log == [*told, (0, "SIGTERM", 0), (0, "SIGTERM", 1), (grace, "kill"), ends(grace, mine)]


@pytest.mark.parametrize(
    ("first", "second", "after"),
    [
        (signal.SIGINT, signal.SIGINT, 1.02),
        (signal.SIGTERM, signal.SIGINT, 1.02),
        (signal.SIGINT, signal.SIGTERM, 3.0),
        (signal.SIGTERM, signal.SIGTERM, 7.0),
        (signal.SIGTERM, signal.SIGUSR2, 7.0),
    ],
)
def test_ctrl_c_ends_the_grace_of_an_earlier_signal(
    first: signal.Signals, second: signal.Signals, after: float
) -> None:
    scene = Scene(alone=True)
    scene.ranks.saving = {0: NEVER, 1: NEVER}
    scene.lasts = 30.0
    scene.after(BOTH, first, 1.01, second)
    assert scene.log[2] == (after, "kill")
    assert scene.log[3][2].signal == first


def test_ctrl_c_before_any_signal_ends_no_grace() -> None:
    """It is the failure's own, three seconds."""
    scene = Scene(alone=True, errors={1: "ValueError: x"})
    scene.ranks.saving[0] = NEVER
    scene.after(BOTH, ended(1, 9), 1.0, signal.SIGINT)
    assert scene.log[-1] == ends(3.25, CRASH)


def test_a_signal_that_came_before_there_was_anything_to_watch_is_answered() -> None:
    scene = Scene()
    scene.signals.take(signal.SIGTERM)
    mine = replace(TERMINATED, time=1000.0)
    assert scene.play() == [(0, "fail", mine), (0, "kill"), ends(0, mine)]


def test_what_the_others_say_during_the_grace_is_not_the_outcome() -> None:
    scene = Scene()
    scene.link.verdict = Failed(ELSEWHERE, lost=(2,))
    scene.after(BOTH, signal.SIGTERM)
    assert scene.log[-1] == ends(1.02, TERMINATED)
    assert scene.supervisor.state.lost == ()


def test_a_node_that_was_signalled_before_its_ranks_started_has_this_outcome() -> None:
    before = time.time()
    found = asked_to_end(planned().node, signal.SIGHUP, time.time())
    assert before <= found.time <= time.time()
    assert found == Outcome(status=129, signal=1, node="127.0.0.2", time=found.time, error="ended by SIGHUP")
    assert asked_to_end(planned().node, signal.SIGINT, 0.0).error == "interrupted"


def test_an_outcome_is_told_with_the_nodes_place_which_is_not_its_node_rank() -> None:
    assert planned().node_rank == 0
    assert to_failure(planned().place, as_outcome(CRASH)) == CRASH


@pytest.mark.parametrize(
    ("step", "log"),
    [
        (AllDone(), [(0, "wait", 10.0), well(0, None, at=1000.51)]),
        (
            AllDone(split=MIXED.format(2)),
            [(0, "wait", 10.0), (0, "ends", Outcome(status=1, error=MIXED.format(2)))],
        ),
        (Failed(ELSEWHERE), [(0, "kill"), ends(0, ELSEWHERE)]),
        (Look(NO_STEP), [(0, "seen", []), (0.3, "kill"), (0.3, "says", "kept"), ends(0.3, STUCK)]),
        (signal.SIGTERM, [(0, "fail", TERMINATED), (0, "kill"), ends(0, TERMINATED)]),
    ],
    ids=["all are done", "some ranks saved", "a rank fails", "the job hangs", "SIGTERM comes"],
)
def test_a_spare_stays_until(step: Step, log: list[Entry]) -> None:
    assert Scene(ranks=[]).after([1e-6], step) == log


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([ended(1, 9)], ""),
        ([ended(0), ended(1, 9)], ""),
        ([ended(0, 75), ended(1, 9)], "a rank has saved at a planned end"),
        ([Stopped(), ended(0, 75), ended(1, 9)], "a rank has saved at a planned end"),
        ([Stopped(), ended(1, 9)], "a planned end was asked for"),
        ([ended(0), ended(1), AllDone(split=MIXED.format(2))], "a rank has saved at a planned end"),
    ],
)
def test_nothing_may_follow_a_planned_end_whatever_failed(steps: list[Step], why: str) -> None:
    scene = Scene()
    scene.play(*BOTH, *steps)
    assert scene.log[-1][1] == "ends"
    assert scene.supervisor.state.why_final == why


AGENT_OF_TWO = """
setsid sh -c 'trap "exit 75" USR2; echo ready; while :; do sleep 0.05; done' & echo catching $!
setsid sh -c 'sleep 60 & echo child $!; echo ready; wait' & echo deaf $!
wait
"""


class Processes:
    """An agent, which the stop signal would end, and its two ranks: one catches it, the other has a child."""

    def __init__(self, agent: subprocess.Popen[str]) -> None:
        self.agent = agent
        assert agent.stdout is not None
        said = [agent.stdout.readline().split() for _ in range(5)]
        self.pids = {words[0]: int(words[1]) for words in said if words != ["ready"]}

    @property
    def alive(self) -> set[str]:
        return {name for name, pid in self.pids.items() if processes.is_running(pid)}

    def until(self, alive: set[str]) -> None:
        deadline = time.monotonic() + 10.0
        while self.alive != alive:
            assert time.monotonic() < deadline, f"after 10 s these are alive: {self.alive}"
            time.sleep(0.005)


@pytest.fixture
def real() -> Iterator[Processes]:
    with subprocess.Popen(["sh", "-c", AGENT_OF_TWO], stdout=subprocess.PIPE, text=True) as agent:
        real = Processes(agent)
        yield real
        processes.signal_groups((real.pids[name] for name in real.alive), signal.SIGKILL)
        agent.kill()


def test_the_stop_signal_reaches_a_process_that_catches_it_and_no_other(real: Processes) -> None:
    scene = Scene(pids=[real.pids["catching"], real.pids["deaf"]])
    scene.lasts = 11.0
    log = scene.play(Stopped(), lambda _: real.until({"deaf", "child"}))
    assert log == [(10.0, "says", RUNS_ON.format("rank 1"))]
    assert real.agent.poll() is None


def test_sigterm_reaches_the_processes_of_each_rank_and_not_the_agent(real: Processes) -> None:
    scene = Scene(pids=[real.pids["catching"], real.pids["deaf"]])
    log = scene.play(Failed(ELSEWHERE), lambda _: real.until(set()))
    assert [what for _, what, *_ in log] == ["kill", "ends"]
    assert real.agent.wait(10.0) == 0


@pytest.mark.parametrize(
    ("fake", "real", "names"),
    [
        (
            FakeRanks,
            ranks.Ranks,
            [
                "alive",
                "terminate",
                "are_ending",
                "first_error",
                "last_place",
                "shortage",
                "failed",
                "wait",
                "kill",
            ],
        ),
        (
            FakeLink,
            Link,
            ["next", "report"],
        ),
        (FakeStacks, StackCollector, ["last_look", "peek", "workers"]),
        (FakeLook, LastLook, ["first", "closer", "keep"]),
        (
            FakeHeartbeats,
            heartbeat.Heartbeats,
            ["observe", "stalled", "paused", "trained_alone", "step", "forget"],
        ),
    ],
)
def test_a_fake_is_called_as_what_it_stands_for(fake: type, real: type, names: list[str]) -> None:
    for name in names:
        one, other = getattr(fake, name), getattr(real, name)
        assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters)
        assert inspect.iscoroutinefunction(one) == inspect.iscoroutinefunction(other)
