"""How a job ends, for everyone alike: failures, hangs, pauses, silence."""

import asyncio
import time
from dataclasses import replace

import pytest

from entrypoint.meet.hub import BEATS
from entrypoint.meet.link import Link
from entrypoint.meet.messages import (
    AllDone,
    Beat,
    Done,
    Ended,
    Fail,
    Failed,
    Look,
    LookCloser,
    Moved,
    NoOutput,
    Paused,
    Peek,
    Stalled,
    Stopped,
    Tried,
    pack,
)
from entrypoint.meet.reports import RankSnapshot
from tests.unit.meet.meeting import (
    SHORT,
    Place,
    close,
    events,
    failure,
    left,
    peeked,
    run,
    seen,
    sighting,
    three,
    until,
    who,
)


@pytest.mark.parametrize("node", [0, 1])
@run
async def test_a_planned_end_reaches_everyone_once(node: int) -> None:
    links = await three(Place())
    links[node].report(Stopped(12.5))
    links[node].report(Stopped())
    assert await events(*links) == [Stopped(left=12.5)] * 3
    for link in links:
        link.report(Done())
    assert await events(*links) == [AllDone()] * 3
    await close(*links)


@pytest.mark.parametrize("node", [0, 1])
@run
async def test_a_failure_reaches_everyone(node: int) -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=60))
    links[node].report(Fail(failure(node, 5.0)))
    assert await events(*links) == [Failed(failure(node, 5.0))] * 3
    assert await events(*links) == [Failed(failure(node, 5.0))] * 3
    await close(*links)


@run
async def test_the_earliest_failure_wins_whoever_reports_first() -> None:
    links = await three(Place(), timeouts=replace(SHORT, collect=1))
    links[0].report(Fail(failure(0, 7.0)))
    links[2].report(Fail(failure(2, 6.0)))
    await asyncio.sleep(0.05)
    links[1].report(Fail(failure(1, 5.0, signal=9, rank=None)))
    assert await events(*links) == [Failed(failure(1, 5.0, signal=9, rank=None))] * 3
    await close(*links)


@pytest.mark.parametrize("late", [Tried(1, ()), Moved("127.0.0.9", "lo 127.0.0.9 9 token", "")])
@run
async def test_an_answer_that_comes_when_the_meeting_is_over_changes_nothing(late: Tried | Moved) -> None:
    links = await three(Place())
    for link in links:
        link._report(late)
        link.report(Done())
    assert await events(*links) == [AllDone()] * 3
    await close(*links)


def beats(link: Link, *apart: float) -> None:
    """Heartbeats by a clock that differs by so many seconds."""
    for seconds in apart:
        link._peers[0, None].send(pack(Beat(time.time() + seconds)))


@pytest.mark.parametrize("apart", [-3600.0, 3600.0, 0.5])
@run
async def test_of_failures_on_nodes_whose_clocks_disagree_the_first_to_come_is_told(apart: float) -> None:
    links = await three(Place())
    beats(links[1], *(BEATS * [apart]))
    now = time.time()
    links[2].report(Fail(failure(2, now)))
    await asyncio.sleep(0.02)
    late = now + 0.02
    links[1].report(Fail(failure(1, late + apart, error="KeyError: 'followed'")))
    assert await events(*links) == [Failed(failure(2, now))] * 3
    await close(*links)


@run
async def test_a_heartbeat_that_is_late_does_not_move_the_failures_of_its_node() -> None:
    links = await three(Place())
    beats(links[2], 0.0, -2.0)
    now = time.time()
    links[2].report(Fail(failure(2, now)))
    links[1].report(Fail(failure(1, now + 0.05, error="KeyError: 'followed'")))
    assert await events(*links) == [Failed(failure(2, now))] * 3
    await close(*links)


@pytest.mark.parametrize("cause", [0, 2])
@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
@run
async def test_a_clock_of_node_0_that_is_set_while_the_job_runs_moves_no_failure(
    monkeypatch: pytest.MonkeyPatch, jump: float, cause: int
) -> None:
    links = await three(Place())
    beats(links[2], 0.0)
    clock, now = time.time, time.time()
    monkeypatch.setattr(time, "time", lambda: clock() + jump)
    for node, apart in (2, 0.0), (0, jump):
        links[node].report(Fail(failure(node, now + apart + (0.0 if node == cause else 0.05))))
    assert [event.failure.node for event in await events(*links)] == 3 * [f"n{cause}"]
    await close(*links)


@run
async def test_of_failures_alike_the_first_that_says_why_is_told() -> None:
    links = await three(Place())
    links[0].report(Fail(failure(0, 7.0, status=64, error="train: unknown key")))
    links[1].report(Fail(failure(1, 5.0, status=64, error="")))
    links[2].report(Fail(failure(2, 6.0, status=1, error="another reason")))
    assert await events(*links) == [Failed(failure(0, 7.0, status=64, error="train: unknown key"))] * 3
    await close(*links)


RESET = "RuntimeError: [pair.cc:545] Connection reset by peer"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@run
async def test_a_rank_that_ended_well_while_others_needed_it_is_to_blame(late: bool) -> None:
    links = await three(Place(), timeouts=replace(SHORT, collect_echo=0.3))
    fails = replace(failure(0, 5.0, rank=0, status=1, error=RESET), at="in backward (train.py:31)")
    if late:
        links[0].report(Fail(fails))
        await asyncio.sleep(0.05)
    links[1].report(Ended(left(3)))
    links[2].report(Ended(left(5, time=3.9, step=7)))
    links[0].report(Fail(fails))
    early = (
        "ended with 0 after 7 steps (1 other rank too) while 10 others were still in backward (train.py:31): "
        "do all ranks make the same number of steps?"
    )
    verdict = failure(2, 5.0, rank=5, status=1, error=early)
    assert await events(*links) == [Failed(verdict)] * 3
    await close(*links)


@run
async def test_an_error_of_many_lines_and_any_length_is_told_as_one_line() -> None:
    links = await three(Place())
    links[1].report(Fail(failure(1, 5.0, error="a\nb\x1b" + "x" * 200_000)))
    found = await events(*links)
    assert [event.failure.error for event in found] == ["a b?" + "x" * 996] * 3
    await close(*links)


@pytest.mark.parametrize(
    ("alone", "said"), [((True, True, True), True), ((True, False, True), False), ((True, True), False)]
)
@run
async def test_that_each_rank_trained_alone_is_told_at_the_end(alone: tuple[bool, ...], said: bool) -> None:
    links = await Place().all(*(who(node, nnodes=3, nproc_per_node=1) for node in range(3)))
    for rank, one in enumerate(alone):
        links[rank].report(Ended(left(rank, alone=one)))
    for link in links:
        link.report(Done())
    assert await events(*links) == [AllDone(said)] * 3
    await close(*links)


@run
async def test_a_failure_after_the_own_end_reaches_who_is_done() -> None:
    links = await three(Place())
    links[0].report(Done())
    links[1].report(Done())
    links[2].report(Fail(failure(2, 5.0)))
    assert await events(*links) == [Failed(failure(2, 5.0))] * 3
    await close(*links)


async def looking(ranks: int = 4) -> list[Link]:
    """Three nodes with so many ranks each that were asked where these are."""
    links = await Place().all(*(who(node, nnodes=3, nproc_per_node=ranks) for node in range(3)))
    links[0].report(Stalled("no step for 30 s"))
    assert await events(*links) == [Look("no step for 30 s")] * 3
    return links


@pytest.mark.parametrize("node", [0, 1])
@run
async def test_a_hang_that_anyone_notices_is_looked_into_by_everyone_and_the_stuck_rank_named(
    node: int,
) -> None:
    links = await three(Place())
    links[node].report(Stalled("no step for 30 s"))
    links[2].report(Stalled("no step for 30 s"))
    assert await events(*links) == [Look("no step for 30 s")] * 3
    # A rank whose neighbours were ended to print their stacks.
    links[2].report(Fail(failure(2, time.time())))
    await asyncio.sleep(2 * SHORT.collect)
    links[0].report(seen(sighting(0), sighting(1)))
    links[1].report(seen(sighting(4, state="T"), sighting(5)))
    found = await events(*links)
    assert found == [found[0]] * 3
    assert (found[0].failure.rank, found[0].failure.node, found[0].failure.status) == (4, "n1", 124)
    await close(*links)


@run
async def test_ranks_that_show_no_stack_are_looked_at_closer_only_once_everyone_has_looked() -> None:
    links = await looking()
    stopped = sighting(4, state="T", at="", waits_in="", stack="")
    links[1].report(seen(stopped, sighting(5)))
    links[0].report(seen(sighting(0)))
    await asyncio.sleep(0.1)
    assert [link._events.empty() for link in links] == [True] * 3
    gone = sighting(9, state="", at="", waits_in="", stack="")
    links[2].report(seen(gone))
    assert await events(*links) == [LookCloser()] * 3
    links[0].report(seen(sighting(0)))
    links[2].report(seen(gone))
    await asyncio.sleep(0.1)
    assert [link._events.empty() for link in links] == [True] * 3
    links[1].report(seen(replace(stopped, at="train.py:31 load"), sighting(5)))
    found = await events(*links)
    reason = "it is stopped by a signal in train.py:31 load, while 2 of 4 ranks wait in all_reduce"
    assert [event.failure.rank for event in found] == [4] * 3
    assert reason in found[0].failure.error
    await close(*links)


@run
async def test_a_node_that_is_lost_before_the_closer_look_is_not_waited_for() -> None:
    links = await looking()
    links[1].report(seen(sighting(4, stack="")))
    links[1].report(Fail(failure(1, time.time())))
    links[0].report(seen(sighting(0)))
    links[2].report(seen(sighting(8, quiet=31.0)))
    found = await events(*links)
    assert [event.failure.status for event in found] == [124] * 3
    await close(*links)


@pytest.mark.parametrize("letter", ["x", "训", "\N{GRINNING FACE}"])
@run
async def test_sightings_of_more_ranks_than_a_frame_holds_arrive(letter: str) -> None:
    links = await looking(400)
    links[0].report(seen())
    links[1].report(seen(*[sighting(rank, at=letter * 200, node="n1", node_rank=1) for rank in range(400)]))
    links[2].report(seen(sighting(400, state="T", node_rank=2)))
    found = await events(*links)
    assert found[1].failure.rank == 400
    assert "400 of 401 ranks wait" in found[1].failure.error
    await close(*links)


@run
async def test_a_node_that_does_not_say_where_its_ranks_are_is_named_in_the_verdict() -> None:
    links = await three(Place(), timeouts=replace(SHORT, look=0.3))
    links[1].report(Stalled("no step for 30 s"))
    await events(*links)
    links[0].report(seen(sighting(0)))
    links[1].report(seen(sighting(4, quiet=31.0)))
    found = await events(*links)
    assert found[2].failure.rank == 4
    assert found[2].failure.error.endswith("; nothing was heard from n2")
    await close(*links)


@run
async def test_a_hang_without_any_rank_is_a_failure_all_the_same() -> None:
    links = await three(Place())
    links[1].report(Stalled("no step for 30 s"))
    await events(*links)
    for link in links:
        link.report(seen())
    found = await events(*links)
    assert {event.failure.error for event in found} == {"lost: no step for 30 s, and no rank was found"}
    await close(*links)


@run
async def test_a_failure_before_a_hang_is_the_failure() -> None:
    links = await three(Place())
    links[1].report(Fail(failure(1, 5.0)))
    links[2].report(Fail(failure(2, 6.0)))
    links[0].report(Stalled("no step for 30 s"))
    found = await events(*links)
    while isinstance(found[0], Look):
        found = await events(*links)
    assert found == [Failed(failure(1, 5.0, same=1))] * 3
    await close(*links)


async def all_peek(links: list[Link], sightings: list[list[RankSnapshot]]) -> None:
    """Everyone is asked, and answers."""
    assert await events(*links) == [Peek()] * 3
    for link, found in zip(links, sightings, strict=True):
        link.report(peeked(*found))


@pytest.mark.parametrize("node", [0, 2])
@run
async def test_a_pause_that_anyone_reports_has_everyone_looked_at_and_a_deadlock_ends_it(node: int) -> None:
    place = Place()
    changed = {"nnodes": 3, "nproc_per_node": 1}
    links = await place.all(*(who(one, **changed) for one in range(3)), timeouts=replace(SHORT, again=0.2))
    busy = [[sighting(0)], [sighting(1, waits_in="", stack="77aa", at="data.py:3 read")], [sighting(2)]]
    links[node].report(Paused("no step for 30 s"))
    await all_peek(links, busy)
    await until(lambda: any("data.py:3 read" in line for line in place.said))
    for _ in range(2):
        await all_peek(links, [[sighting(rank)] for rank in range(3)])
    verdicts = await events(*links)
    assert verdicts == verdicts[:1] * 3
    assert isinstance(verdicts[0], Failed)
    assert verdicts[0].failure.status == 124
    await close(*links)


@run
async def test_a_pause_that_is_over_is_looked_at_no_more() -> None:
    links = await Place().all(who(0), who(1), timeouts=replace(SHORT, again=0.05))
    links[1].report(Paused("no step for 30 s"))
    assert await events(*links) == [Peek()] * 2
    for link in links:
        link.report(peeked())
    links[1].report(Paused(None))
    links[1].report(Stopped())
    assert await events(*links) == [Stopped()] * 2
    for link in links:
        link.report(Done())
    assert await events(*links) == [AllDone()] * 2
    await close(*links)


QUIET = "no rank has written anything for 30 s (--silence-timeout)"


@run
async def test_silence_counts_when_everyone_is_silent() -> None:
    links = await three(Place())
    links[0].report(NoOutput(QUIET))
    links[1].report(NoOutput(QUIET))
    links[0].report(NoOutput(""))
    links[2].report(NoOutput(QUIET))
    await asyncio.sleep(0.1)
    links[0].report(NoOutput(QUIET))
    assert await events(*links) == [Look(QUIET)] * 3
    for link in links:
        link.report(Fail(failure(0, 1.0, rank=None)))
    await events(*links)
    await close(*links)


@run
async def test_silence_that_is_taken_back_does_not_count_nor_do_those_that_are_done() -> None:
    links = await three(Place())
    links[2].report(Done())
    await links[2].close()
    links[0].report(NoOutput("too early"))
    links[0].report(NoOutput(""))
    links[1].report(NoOutput("too early"))
    links[1].report(Stopped())
    assert await events(*links[:2]) == [Stopped(left=None)] * 2
    links[0].report(NoOutput(QUIET))
    assert await events(*links[:2]) == [Look(QUIET)] * 2
    links[0].report(Fail(failure(0, 1.0, rank=None)))
    await events(*links[:2])
    await close(*links[:2])
