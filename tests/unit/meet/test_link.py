"""Who leaves, falls silent or is lost once all have met."""

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

from entrypoint.meet import wire as wire_module
from entrypoint.meet.link import Link
from entrypoint.meet.messages import AllDone, Done, Fail, Failed
from entrypoint.meet.node_failures import NodeFailures
from entrypoint.meet.wire import Wire
from tests.unit.meet.meeting import SHORT, Place, close, events, failure, hello, run, three, until, who


def mute(*wires: Wire) -> None:
    """Let nothing more out of these ends, heartbeats included."""
    for wire in wires:
        vars(wire)["send"] = lambda message: None  # noqa: ARG005


async def error_told(link: Link) -> str:
    async with asyncio.timeout(15):
        (found,) = await events(link)
    return found.failure.error


class GivenUp(NodeFailures):
    """What a scheduler reports that has given up nodes 1 and 2."""

    def __init__(self, fails: int = 0) -> None:
        """`fails`: so many of the first looks."""
        super().__init__(Path("job.log"), ())
        self.fails = fails
        self.looks = 0

    def look(self) -> list[int]:
        self.looks += 1
        if self.looks <= self.fails:
            raise OSError("a file system that cannot tell")
        return [1, 2]


@run
async def test_leaving_after_done_is_no_loss() -> None:
    links = await three(Place())
    links[1].report(Done())
    await links[1].close()
    await asyncio.sleep(0.5)
    links[0].report(Done())
    links[2].report(Done())
    assert await events(links[0], links[2]) == [AllDone()] * 2
    await close(*links)


@run
async def test_leaving_without_done_is_a_loss() -> None:
    links = await three(Place())
    before = time.time()
    await links[1].close()
    first, last = await events(links[0], links[2])
    assert first == last
    assert before <= first.failure.time <= time.time()
    assert replace(first.failure, time=0.0) == failure(
        1, 0.0, rank=None, status=1, error="lost: it closed the connection"
    )
    await close(*links)


@run
async def test_a_killed_spoke_is_lost_at_once() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=60))
    links[1]._peers[0, None].abort()
    found = await events(links[0], links[2])
    assert {event.failure.error for event in found} == {"lost: it closed the connection"}
    assert {event.failure.node_rank for event in found} == {1}
    await close(*links)


@run
async def test_a_silent_spoke_is_lost_within_its_bound_and_told_so() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=0.6))
    mute(links[1]._peers[0, None])
    silent = time.time()
    async with asyncio.timeout(15):
        found = await events(*links)
    assert {event.failure.error for event in found} == {"lost: nothing was heard from it for 0.6 s"}
    assert {event.failure.node_rank for event in found} == {1}
    assert abs(found[0].failure.time - silent) < 5
    await close(*links)


@run
async def test_node_0_that_hears_from_nobody_says_that_it_may_be_cut_off_itself() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=0.6))
    mute(links[1]._peers[0, None], links[2]._peers[0, None])
    why = "nothing was heard from it for 0.6 s, nor from any other node: n0 may be cut off"
    assert await error_told(links[0]) == f"lost: {why}"
    await close(*links)


@run
async def test_of_two_nodes_neither_can_tell_which_is_cut_off() -> None:
    place = Place()
    links = await place.all(who(0), who(1), timeouts=replace(SHORT, peer=0.6))
    mute(links[1]._peers[0, None])
    why = "nothing was heard from it for 0.6 s: it is gone, or n0 is cut off"
    assert await error_told(links[0]) == f"lost: {why}"
    await close(*links)


@run
async def test_a_node_of_which_another_task_is_heard_is_not_cut_off() -> None:
    tasks = [
        who(node, local_rank=local, mode="rank", nproc_per_node=2) for node in (0, 1) for local in (0, 1)
    ]
    links = await Place().all(*tasks, timeouts=replace(SHORT, peer=0.6))
    mute(links[3]._peers[0, None])
    assert await error_told(links[0]) == "lost: nothing was heard from it for 0.6 s"
    await close(*links)


@run
async def test_a_node_that_has_done_its_part_is_not_missed() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=0.6))
    links[2].report(Done())
    await links[2].close()
    mute(links[1]._peers[0, None])
    assert (await error_told(links[0])).endswith(" for 0.6 s: it is gone, or n0 is cut off")
    await close(*links)


@run
async def test_node_0_is_not_cut_off_that_hears_from_a_node_that_has_done_its_part() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=0.6))
    links[2].report(Done())
    mute(links[1]._peers[0, None])
    assert await error_told(links[0]) == "lost: nothing was heard from it for 0.6 s"
    await close(*links)


@run
async def test_a_spoke_that_was_silent_for_longer_than_its_bound_is_lost_at_the_next_heartbeat() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=18))  # heartbeats come every 3 s
    mute(links[1]._peers[0, None])
    links[0]._peers[1, None].heard -= 1.5 * 18
    async with asyncio.timeout(8):
        event = await links[0].next()
    assert isinstance(event, Failed)
    assert event.failure.error == "lost: nothing was heard from it for 18 s"
    await close(*links)


@run
async def test_heartbeats_keep_a_quiet_run_together() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=0.6))
    await asyncio.sleep(1.5)
    for link in links:
        link.report(Done())
    assert await events(*links) == [AllDone()] * 3
    await close(*links)


@run
async def test_a_suspension_of_this_process_is_not_the_others_silence() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=0.6))
    time.sleep(1.0)
    await asyncio.sleep(0.3)
    for link in links:
        link.report(Done())
    assert await events(*links) == [AllDone()] * 3
    await close(*links)


@run
async def test_a_silent_participant_is_forgotten_before_the_start() -> None:
    place = Place()
    async with place.hub(who(0, nnodes=3), timeouts=replace(SHORT, peer=0.3)):
        wire, _ = await place.spoke()
        wire.send(hello(who(1, nnodes=3)))
        await until(lambda: len(place.said) > 0 and "left before" in place.said[0])
        assert place.said[0] == (
            "node 1 (n1) left before the start (nothing was heard from it for 0.3 s): waiting for it again"
        )
        wire.abort()


@run
async def test_a_lost_hub_is_node_0s_failure() -> None:
    links = await three(Place())
    for peer in links[0]._peers.values():
        peer.abort()
    found = await events(links[1], links[2])
    assert [replace(event.failure, time=0.0) for event in found] == [
        failure(0, 0.0, rank=None, status=1, error="lost: it closed the connection")
    ] * 2
    await close(*links)


@run
async def test_a_silent_hub_is_lost_within_its_bound() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=0.6))
    mute(*links[0]._peers.values())
    found = await events(links[1], links[2])
    assert {event.failure.error for event in found} == {"lost: nothing was heard from it for 0.6 s"}
    await close(*links)


@run
async def test_the_own_failure_counts_where_the_hub_is_lost_before_its_verdict() -> None:
    links = await three(Place())
    mute(*links[0]._peers.values())
    links[1].report(Fail(failure(1, 5.0)))
    for peer in links[0]._peers.values():
        peer.abort()
    assert await events(links[1]) == [Failed(failure(1, 5.0), lost=(0,))]
    await close(*links)


@run
async def test_a_hub_that_leaves_right_after_its_failure_tells_it_first() -> None:
    links = await three(Place())
    links[0].report(Fail(failure(0, 5.0)))
    await links[0].close()
    assert await events(links[1], links[2]) == [Failed(failure(0, 5.0))] * 2
    await close(*links)


@run
async def test_a_hub_may_leave_at_once_after_the_last_event_while_spokes_end_their_ranks() -> None:
    links = await three(Place())
    links[1].report(Fail(failure(1, 5.0)))
    await events(links[0])
    async with asyncio.timeout(0.8 * wire_module.LINGER):
        await links[0].close()
    assert await events(links[1], links[2]) == [Failed(failure(1, 5.0))] * 2
    await close(*links)


@run
async def test_a_spoke_that_leaves_right_after_its_failure_is_not_lost() -> None:
    links = await three(Place())
    links[1].report(Fail(failure(1, time.time() + 100)))
    await links[1].close()
    found = await events(links[0], links[2])
    assert {event.failure.error for event in found} == {"ValueError: x"}
    await close(*links)


@run
async def test_who_comes_after_the_start_finds_nobody() -> None:
    place = Place()
    links = await place.all(who(0), who(1))
    (text,) = await place.refusals(who(1), timeouts=replace(SHORT, join=0.4))
    assert text.startswith(f"Unavailable: node 0 (n0) at {place.endpoint} has not started yet within 0.4 s")
    for link in links:
        link.report(Done())
    assert await events(*links) == [AllDone()] * 2
    await close(*links)


@run
async def test_the_port_can_be_bound_again_right_after_the_end() -> None:
    place = Place()
    await close(*await place.all(who(0), who(1)))
    await close(*await place.all(who(0), who(1)))


@run
async def test_a_node_that_the_scheduler_gives_up_is_lost_sooner_if_it_is_silent_and_only_then() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=12))
    links[0].watch(GivenUp())
    mute(links[1]._peers[0, None])
    async with asyncio.timeout(11):  # without the scheduler's word it would take 12 s and more
        event = await links[0].next()
    assert isinstance(event, Failed)
    assert (event.failure.node_rank, event.lost) == (1, (1,))
    why = "the scheduler reports that the node failed, and nothing was heard from it for 6 s"
    assert event.failure.error == f"lost: {why}"
    await close(*links)


@run
async def test_a_node_that_the_scheduler_gives_up_wrongly_stays_while_it_is_heard() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=1.2))
    scheduler = GivenUp(fails=1)
    links[0].watch(scheduler)
    await asyncio.sleep(2.5)
    assert scheduler.looks > 2
    for link in links:
        link.report(Done())
    assert await events(*links) == [AllDone()] * 3
    await close(*links)


@run
async def test_while_a_file_system_holds_a_look_for_nodes_given_up_there_is_one_thread() -> None:
    release, threads = threading.Event(), []

    class Held(GivenUp):
        def look(self) -> list[int]:
            threads.append(threading.current_thread())
            release.wait(30)
            return super().look()

    links = await three(Place(), timeouts=replace(SHORT, peer=1.2))
    links[0].watch(scheduler := Held())
    await asyncio.sleep(3)
    assert [thread.is_alive() for thread in threads] == [True]
    release.set()
    await until(lambda: scheduler.looks > 1)
    await close(*links)


@run
async def test_a_look_that_a_file_system_holds_delays_nobody_who_leaves() -> None:
    began, release = threading.Event(), threading.Event()

    class Held(GivenUp):
        def look(self) -> list[int]:
            began.set()
            release.wait(30)
            return super().look()

    links = await three(Place())
    links[0].watch(scheduler := Held())
    await until(began.is_set)
    for link in links:
        link.report(Done())
    assert await events(*links) == [AllDone()] * 3
    await close(*links)
    assert scheduler.looks == 0
    release.set()
