"""Ranks that make no step, and hangs."""

from dataclasses import replace
from typing import Any

import pytest

from entrypoint.job.outcome import Outcome
from entrypoint.meet.job_state import Now
from entrypoint.meet.messages import AllDone, Failed, Look, LookCloser, NoOutput, Paused, Peek, Seen, Stalled
from entrypoint.meet.reports import Failure
from entrypoint.run import node_state
from entrypoint.run.node_state import (
    CollectStacks,
    Effect,
    Event,
    HangPolicy,
    HangWatch,
    NodeState,
    Signs,
    StacksCollected,
    TellHub,
    TerminateRanks,
)
from tests.unit.run.attempts import BOTH, DONE, NO_STEP, STATES, STAYS, ended, ends, started, well
from tests.unit.scene import (
    NEVER,
    SIGHTINGS,
    STUCK,
    Scene,
    Step,
)

PAUSE = "no step for 30 s"


def test_a_pause_is_reported_once_and_its_end_too() -> None:
    scene = Scene(step=30.0)
    scene.heartbeats.pauses_from = 5.0

    def go_on(scene: Scene) -> None:
        scene.heartbeats.pauses_from = NEVER

    scene.play(*BOTH, 45.0, go_on, 10.0)
    assert [entry for entry in scene.log if entry[1] == "paused"] == [
        (35.0, "paused", PAUSE),
        (45.0, "paused", None),
    ]


def test_a_bound_that_the_user_chose_ends_a_pause_too() -> None:
    scene = Scene(step=30.0, is_chosen=True)
    scene.heartbeats.pauses_from = 5.0
    scene.play(*BOTH, 45.0)
    assert (35.0, "stalled", PAUSE) in scene.log
    assert "paused" not in {entry[1] for entry in scene.log}


def test_a_rank_that_ended_well_long_ago_has_the_others_looked_at_without_a_word() -> None:
    scene = Scene(step=30.0)
    scene.after([*BOTH, ended(0)], 45.0)
    assert [entry[1:] for entry in scene.log] == [("paused", "")]


WORKERS = (
    "rank 0 on 127.0.0.2 has started processes of its own, and they wait in init_process_group (train.py:9)"
)


def scene_of_workers(**changes: Any) -> Scene:
    scene = Scene(changes=changes)
    scene.heartbeats.steps = None
    scene.lasts = 200.0
    return scene


def test_ranks_whose_own_workers_wait_are_told_of_the_mode_for_them_once() -> None:
    scene = scene_of_workers()

    def wait(scene: Scene) -> None:
        scene.workers = WORKERS

    why = "torchrun starts one process for each rank, and a script that starts its own (mp.spawn) needs --mode exec"
    assert scene.play(30.0, wait) == [
        *[(20.0, "looks for workers"), (60.0, "looks for workers")],
        (60.0, "says", f"{WORKERS}: {why}"),
    ]


def test_workers_are_looked_for_only_so_often() -> None:
    assert scene_of_workers().play() == [(when, "looks for workers") for when in (20.0, 60.0, 140.0)]


@pytest.mark.parametrize("changes", [{"mode": "exec"}, {"mode": "rank"}, {"members": (0, 1, 2)}])
def test_workers_are_looked_for_under_torchrun_on_the_first_node_alone(changes: dict[str, Any]) -> None:
    assert scene_of_workers(**changes).play() == []


def test_a_rank_that_makes_steps_has_no_workers_that_wait() -> None:
    scene = scene_of_workers()
    scene.heartbeats.steps = 1
    assert scene.play() == []


def test_where_ranks_are_is_told_and_they_go_on() -> None:
    scene = Scene()
    assert scene.after(BOTH, Peek()) == [(0, "peek"), (0, "peeked", SIGHTINGS)]
    scene = Scene()
    assert scene.after(STATES[DONE], Peek()) == [(0, "peeked", [])]


def test_alone_a_pause_is_said_once_and_a_deadlock_ends_it() -> None:
    scene = Scene(alone=True, step=30.0)
    scene.heartbeats.pauses_from = 0.0
    scene.sightings = [replace(SIGHTINGS[0], waits_in=""), SIGHTINGS[1]]
    scene.play(*BOTH, 50.0)
    looks = [entry[0] for entry in scene.log if entry[1] == "peek"]
    assert looks == [30.0, 36.0, 48.0]
    assert [entry[0] for entry in scene.log if entry[1] == "says"] == [30.0]
    assert "ends" not in {entry[1] for entry in scene.log}

    scene = Scene(alone=True, step=30.0)
    scene.heartbeats.pauses_from = 0.0
    scene.play(*BOTH, 50.0)
    assert scene.log[-1][1] == "ends"
    assert (scene.log[-1][2].status, scene.log[-1][2].rank) == (124, 1)


def quiet(scene: Scene) -> None:
    """No rank gives a sign from now on."""
    scene.heartbeats.beating = False


def output(scene: Scene) -> None:
    """A rank writes something."""
    scene.ranks.heard = scene.clock.now


def suspended(scene: Scene) -> None:
    """Nothing of this process runs for an hour."""
    scene.clock.now += 3600.0


LIKE_ALL = "it gave its last sign first, and is in train.py:90 advance like all others"
HERE = Failure(
    node_rank=1,
    node="127.0.0.2",
    rank=1,
    status=124,
    signal=0,
    time=0.0,
    error=f"stuck, {NO_STEP} after step 7: {LIKE_ALL}",
)


def test_a_rank_without_a_step_for_too_long_makes_all_nodes_look() -> None:
    scene = Scene(step=30.0)
    scene.lasts = 60.0
    assert scene.play(*BOTH, quiet) == [
        *[(30.0, "stalled", NO_STEP), (30.0, "look"), (30.0, "seen", SIGHTINGS)],
        *[
            (30.3, "SIGTERM", 0),
            (30.3, "SIGTERM", 1),
            (30.3, "kill"),
            (30.3, "says", "kept"),
            ends(30.3, STUCK),
        ],
    ]


def test_alone_a_rank_without_a_step_is_sought_here() -> None:
    scene = Scene(step=30.0, alone=True)
    scene.lasts = 60.0
    assert scene.play(*BOTH, quiet) == [
        *[(30.0, "look"), (30.0, "look closer"), (30.0, "SIGTERM", 0), (30.0, "SIGTERM", 1), (30.0, "kill")],
        *[(30.0, "says", "kept")],
        ends(30.0, replace(HERE, time=1030.0)),
    ]


def test_a_job_in_which_no_rank_is_found_is_stuck_all_the_same() -> None:
    scene = Scene(step=30.0, alone=True)
    scene.sightings = []
    scene.lasts = 60.0
    stuck = Outcome(status=124, node="127.0.0.2", time=1030.0, error="stuck, no step for 30 s")
    assert scene.play(*BOTH, quiet)[-1] == (30.0, "ends", stuck)


@pytest.mark.parametrize(
    ("answers_after", "after", "found"),
    [
        (24.9, 24.9, STUCK),
        (25.1, 25.0, replace(HERE, time=1000.51)),
        (NEVER, 25.0, replace(HERE, time=1000.51)),
    ],
)
def test_the_verdict_on_a_hang_has_five_seconds_beyond_the_hubs_own_bound(
    answers_after: float, after: float, found: Failure
) -> None:
    scene = Scene()
    scene.link.answers_after = answers_after
    scene.link.verdict = Failed(STUCK, lost=(2,))
    scene.lasts = 60.0
    assert scene.after(BOTH, Look(NO_STEP))[-3:] == [
        *[(after, "kill"), (after, "says", "kept"), ends(after, found)],
    ]
    assert scene.supervisor.state.lost == ((2,) if found is STUCK else ())


def test_without_a_verdict_and_a_rank_the_hang_is_the_outcome() -> None:
    scene = Scene()
    scene.link.answers_after = NEVER
    scene.lasts = 60.0
    stuck = Outcome(status=124, node="127.0.0.2", time=1025.51, error="stuck, no step for 30 s")
    assert scene.after(STATES[DONE], Look(NO_STEP)) == [
        *[(0, "seen", []), (25.0, "kill"), (25.0, "says", "kept"), (25.0, "ends", stuck)],
    ]


def test_a_job_that_is_done_as_everyone_is_asked_to_look_has_ended_well() -> None:
    scene = Scene()
    scene.link.answers_after = NEVER
    scene.lasts = 60.0
    assert scene.after(STATES[DONE], Look(NO_STEP), AllDone()) == [
        *[(0, "seen", []), (0, "wait", 10.0), well(0, 1, at=1000.2)],
    ]


def test_ranks_that_go_on_are_watched_once_a_second_and_those_that_have_ended_are_not() -> None:
    scene = Scene(step=30.0, silence=60.0)
    scene.lasts = 0.1
    begin: list[Step] = [1.5, started(0), 1.0, started(1), 1.0]
    scene.play(*begin, ended(0), 1.0, started(0), 1.0, ended(0), ended(1), 1.0)
    assert scene.heartbeats.looks == [
        *[(1.0, [], 1.0), (2.0, [0], 1.0), (3.0, [0, 1], 1.0), (4.0, [1], 1.0), (5.0, [0, 1], 1.0)],
        (6.0, [], 1.0),
    ]


@pytest.mark.parametrize(
    ("step", "silence", "interval"),
    [(30.0, 0.0, 1.0), (0.0, 30.0, 1.0), (2.0, 30.0, 0.5), (30.0, 1.0, 0.25), (1.0, 2.0, 0.25)],
)
def test_a_short_bound_is_looked_at_four_times_in_its_time(
    step: float, silence: float, interval: float
) -> None:
    scene = Scene(step=step, silence=silence)
    scene.lasts = 0.0
    scene.play(*BOTH, output, interval + 0.01)
    assert scene.heartbeats.looks == [(interval, [0, 1], interval)]


def test_without_bounds_no_rank_is_watched() -> None:
    scene = Scene()
    scene.play(*BOTH, quiet, 5.0)
    assert scene.heartbeats.looks == []


def test_steps_are_not_asked_for_where_silence_alone_counts() -> None:
    scene = Scene(silence=30.0)
    scene.lasts = 20.0
    assert scene.after(BOTH, quiet) == STAYS


def test_silence_does_not_count_where_steps_alone_do() -> None:
    scene = Scene(step=5.0)
    scene.lasts = 20.0
    assert scene.after(BOTH) == STAYS


def test_time_in_which_the_process_was_suspended_does_not_count() -> None:
    scene = Scene(step=30.0, silence=30.0)
    scene.lasts = 20.0
    assert scene.after(BOTH, quiet, 1.0, suspended) == STAYS
    assert max(passed for _, _, passed in scene.heartbeats.looks) == 2.0


QUIET = "no rank has written anything for 10 s (--silence-timeout)"


def test_silence_is_told_and_taken_back_when_a_rank_writes_again() -> None:
    scene = Scene(silence=10.0)
    scene.lasts = 12.4
    assert scene.after([*BOTH, output], 11.0, 4.0, output) == [
        *[(10.49, "silent", QUIET), (15.49, "silent", ""), (25.49, "silent", QUIET)],
    ]


def test_output_now_and_then_is_no_silence() -> None:
    scene = Scene(silence=10.0)
    now_and_then: list[Step] = [output, 9.0]
    scene.lasts = 0.0
    assert scene.after(BOTH, *(6 * now_and_then)) == STAYS


def test_alone_silence_is_a_hang() -> None:
    scene = Scene(silence=10.0, alone=True)
    scene.lasts = 20.0
    why = QUIET
    failure = replace(HERE, time=1011.0, error=f"stuck, {why} after step 7: {LIKE_ALL}")
    assert scene.play(*BOTH, output) == [
        *[(11.0, "look"), (11.0, "look closer"), (11.0, "SIGTERM", 0), (11.0, "SIGTERM", 1), (11.0, "kill")],
        *[(11.0, "says", "kept")],
        ends(11.0, failure),
    ]


def test_alone_output_that_comes_while_the_ranks_are_sought_does_not_end_the_search() -> None:
    scene = Scene(silence=10.0, alone=True)
    scene.look_takes, scene.lasts = 5.0, 15.0
    assert [(after, what) for after, what, *_ in scene.after([*BOTH, output], 12.0, output)] == [
        *[(10.49, "look"), (15.49, "look closer"), (20.49, "SIGTERM"), (20.49, "SIGTERM"), (20.49, "kill")],
        *[(20.49, "says"), (20.49, "ends")],
    ]


# --- the state alone ------------------------------------------------------------------------------------------

NOW = Now(wall=1000.0, steady=0.0)


def followed(state: NodeState, *events: Event) -> list[list[Effect]]:
    """What is to be done after each of these."""
    found = []
    for event in events:
        state, effects = node_state.step(state, event, NOW)
        found.append(effects)
    return found


def test_what_is_told_while_the_ranks_are_looked_at_waits_for_the_look() -> None:
    state = Scene().supervisor.state
    look, verdict, found = Look(NO_STEP), Failed(STUCK, (2,)), StacksCollected(tuple(SIGHTINGS))
    first, told, after = followed(state, look, verdict, found)
    assert (first, told) == ([CollectStacks(closer=False)], [])
    assert after[0] == TellHub(Seen(tuple(SIGHTINGS), last=True))
    assert TerminateRanks() in after
    first, told, after = followed(state, look, LookCloser(), found)
    assert (first, told, after[-1]) == ([CollectStacks(closer=False)], [], CollectStacks(closer=True))
    *_, after, told, again = followed(state, look, found, LookCloser(), verdict)
    assert (told, again) == ([CollectStacks(closer=True)], [])


def signs(**changes: Any) -> Signs:
    """Ranks that go on."""
    return replace(
        Signs(passed=1.0, is_stalled=False, is_paused=False, heard=5.0, any_ended=False), **changes
    )


def reports(policy: dict[str, Any], *looks: Signs) -> list[list[Any]]:
    """What is told of these looks."""
    state = Scene().supervisor.state
    given: dict[str, Any] = {
        "step": 0.0,
        "silence": 0.0,
        "start": 20.0,
        "is_chosen": False,
        "again": 6.0,
    } | policy
    state = replace(state, watch=HangWatch(policy=HangPolicy(**given), heard=5.0))
    return [
        [one.report for one in effects if isinstance(one, TellHub)] for effects in followed(state, *looks)
    ]


SILENT = "no rank has written anything for 10 s (--silence-timeout)"


def test_silence_is_told_once_it_has_lasted_longer_than_the_bound_and_taken_back() -> None:
    ten, more, word = signs(passed=10.0), signs(passed=0.5), signs(heard=6.0)
    assert reports({"silence": 10.0}, ten, more, more, word, replace(word, passed=10.0)) == [
        [],
        [NoOutput(SILENT)],
        [],
        [NoOutput("")],
        [],
    ]
    assert reports({}, ten, more) == [[], []]


@pytest.mark.parametrize(
    ("policy", "sign", "told"),
    [
        ({"step": 30.0}, {"is_stalled": True}, [Stalled(PAUSE)]),
        ({"step": 30.0}, {"is_paused": True}, [Paused(PAUSE)]),
        ({"step": 30.0, "is_chosen": True}, {"is_paused": True}, [Stalled(PAUSE)]),
        ({"step": 0.0, "is_chosen": True}, {"is_paused": True, "is_stalled": True}, []),
        ({"step": 30.0}, {"any_ended": True, "passed": 30.0}, []),
        ({"step": 30.0}, {"any_ended": True, "passed": 30.5}, [Paused("")]),
        ({"step": 30.0}, {"any_ended": True, "is_paused": True, "passed": 30.5}, [Paused(PAUSE)]),
        ({"step": 0.0}, {"any_ended": True, "passed": 30.5}, []),
    ],
)
def test_what_a_look_at_the_ranks_tells(
    policy: dict[str, Any], sign: dict[str, Any], told: list[Any]
) -> None:
    seen = signs(**sign)
    assert reports(policy, seen, replace(seen, passed=0.0)) == [told, []]


def test_nothing_is_told_after_a_stall() -> None:
    stalled = signs(is_stalled=True)
    assert reports({"step": 30.0, "silence": 1.0}, stalled, signs(passed=9.0), signs(is_paused=True))[1:] == [
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("step", "silence", "interval"),
    [(0.0, 0.0, None), (100.0, 0.0, 1.0), (2.0, 0.0, 0.5), (0.0, 1.0, 0.25), (2.0, 1.0, 0.25)],
)
def test_ranks_are_looked_at_four_times_within_the_least_bound_and_once_a_second(
    step: float, silence: float, interval: float | None
) -> None:
    assert HangPolicy(step=step, silence=silence, start=1.0, is_chosen=False, again=1.0).interval == interval
