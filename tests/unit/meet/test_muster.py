"""A meeting that goes on without nodes that do not come."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from entrypoint.core.bitset import Bits
from entrypoint.core.errors import Unavailable
from entrypoint.meet.join import meet
from entrypoint.meet.link import Link
from entrypoint.meet.messages import AllDone, Done, Fail, Failed, Stalled, Tried, pack
from entrypoint.meet.reach import Listener
from entrypoint.meet.terms import LocalNode, MembershipPolicy, Timeouts
from entrypoint.meet.wire import greet
from tests.ports import free_port
from tests.unit.meet.meeting import (
    KEY,
    SHORT,
    Place,
    close,
    events,
    failure,
    hello,
    names,
    run,
    said_to,
    seen,
    sighting,
    until,
    who,
)


class Field(LocalNode):
    """Nodes with addresses of their own and one port, and what was sealed and said there."""

    def __init__(self, nnodes: int, **muster: Any) -> None:
        self.nnodes, self.port = nnodes, free_port()
        self.said: list[str] = []
        self.sealed: list[list[int]] = []
        self.given: dict[str, Any] = {"absent": (), "least": 1, "most": nnodes} | muster

    def say(self, text: str) -> None:
        self.said.append(text)

    async def address(self, hub: int) -> str:
        return f"127.0.0.{1 + hub}"

    def seal(self, members: Sequence[int]) -> None:
        if self.sealed:
            raise Unavailable("some-cause", "others were first")
        self.sealed.append(list(members))

    async def meet(self, node: int, *, timeouts: Timeouts = SHORT, contact: str = "", **muster: Any) -> Link:
        given: dict[str, Any] = self.given | muster
        candidates = [other for other in range(node + 1) if other not in given["absent"]]
        return await meet(
            who(node, nnodes=self.nnodes, attempt=1, contact=contact),
            local=self,
            nodes=names(self.nnodes),
            port=self.port,
            key=KEY,
            timeouts=timeouts,
            muster=MembershipPolicy(**({"candidates": candidates} | given)),
        )

    async def all(self, *nodes: int, **changes: Any) -> list[Link]:
        return await asyncio.gather(*(self.meet(node, **changes) for node in nodes))


def crews(links: Sequence[Link]) -> set[tuple[int, ...]]:
    """What the links say who takes part: one crew if they agree."""
    return {link.members for link in links}


@run
async def test_all_nodes_take_part_where_none_is_lost() -> None:
    field = Field(3, least=3)
    links = await field.all(2, 1, 0)
    assert (crews(links), field.sealed) == ({(0, 1, 2)}, [[0, 1, 2]])
    await close(*links)


@run
async def test_survivors_go_on_at_once_without_a_node_that_is_known_to_be_lost() -> None:
    field = Field(4, absent=(2,), least=3)
    async with asyncio.timeout(5):
        links = await field.all(0, 1, 3, timeouts=Timeouts(join=300, peer=60))
    assert crews(links) == {(0, 1, 3)}
    await close(*links)


@pytest.mark.parametrize("left", list(combinations(range(4), 2)), ids=str)
@run
async def test_whichever_two_of_four_nodes_are_lost_the_others_reach_each_other(
    left: tuple[int, int],
) -> None:
    field = Field(4, absent=[node for node in range(4) if node not in left], least=2)
    async with contextlib.AsyncExitStack() as stack:
        there = [await stack.enter_async_context(Listener("lo", f"127.0.0.{1 + node}")) for node in left]
        meetings = (
            field.meet(node, contact=str(one), timeouts=Timeouts(join=300, peer=60))
            for node, one in zip(left, there, strict=True)
        )
        links = await asyncio.gather(*meetings)
    assert (crews(links), field.said) == ({left}, [])
    await close(*links)


@run
async def test_a_node_that_was_given_up_comes_and_leaves_again_while_all_try_their_ways() -> None:
    place = Place()
    policy = MembershipPolicy(candidates=[0], absent=[2], least=2, most=3)
    async with place.hub(who(0, nnodes=3), timeouts=Timeouts(join=300, peer=60), muster=policy) as hub:
        wires = []
        for node in (2, 1):
            wire, _ = await place.spoke()
            wire.send(hello(who(node, nnodes=3, contact=f"lo 127.0.0.{node} 9 token")))
            assert await wire.receive() == {"type": "welcome"}
            wires.append(wire)
        given_up, other = wires
        assert (await said_to(other))["ways"] == [[2, "lo 127.0.0.2 9 token"]]
        given_up.abort()
        assert await said_to(other) == {"type": "try", "number": 2, "ways": []}
        async with asyncio.timeout(5):
            other.send(pack(Tried(1, ((2, "Connection refused"),))))
            other.send(pack(Tried(2, ())))
            assert (await hub).members == (0, 1)
        other.abort()


@run
async def test_a_node_that_dies_while_the_others_try_to_reach_it_takes_nobody_with_it() -> None:
    """Node 0 and a spoke are refused by it, and say so of a trial that is over."""
    field, bounds = Field(4, least=2), Timeouts(join=3, peer=60, poll=0.05, answer=2, connect=3)
    held: list[asyncio.StreamWriter] = []

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    async with contextlib.AsyncExitStack() as stack:
        server = await asyncio.start_server(hold, "127.0.0.12", 0)
        contacts = [
            str(await stack.enter_async_context(Listener("lo", f"127.0.0.{11 + node}"))) for node in (0, 2, 3)
        ]
        links = asyncio.gather(
            *(
                field.meet(node, contact=there, timeouts=bounds)
                for node, there in zip((0, 2, 3), contacts, strict=True)
            )
        )
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_connection(await field.address(0), field.port)
        wire = await greet(reader, writer, KEY, hub=False)
        contact = f"lo 127.0.0.12 {server.sockets[0].getsockname()[1]} token"
        wire.send(hello(who(1, nnodes=4, attempt=1, contact=contact)))
        await until(lambda: len(held) >= 2)
        writer.transport.abort()
        server.close()
        await until(lambda: bool(field.said))
        for one in held:
            one.transport.abort()
        async with asyncio.timeout(30):
            met = await links
    assert crews(met) == {(0, 2, 3)}
    await close(*met)


@run
async def test_those_who_are_missed_where_too_few_have_come_are_the_lost_ones() -> None:
    place, policy = Place(), MembershipPolicy(candidates=[0], absent=[1, 2], least=1, most=3, quorum=2)
    bounds = Timeouts(join=9, peer=60, poll=0.05, remind=0.3)
    async with place.hub(who(0, nnodes=3), timeouts=bounds, muster=policy):
        await until(lambda: bool(place.said))
    assert place.said[0].startswith("2 of 3 nodes have not come: 1 (n1), 2 (n2) after ")


@run
async def test_the_next_listed_node_takes_over_when_the_first_is_lost() -> None:
    field = Field(4, absent=(0,))
    links = await field.all(3, 2, 1)
    assert (crews(links), links[0].hub) == ({(1, 2, 3)}, 1)
    links[2].report(Fail(failure(1, 5.0)))
    assert await events(*links) == [Failed(failure(1, 5.0))] * 3
    await close(*links)


@run
async def test_a_first_node_that_nobody_knew_to_be_lost_is_given_up_after_its_bound() -> None:
    field = Field(4)
    bounds = replace(SHORT, answer=0.5, join=1.5)
    links = await field.all(1, 2, 3, timeouts=bounds)
    assert crews(links) == {(1, 2, 3)}
    assert (
        field.said
        == [f"node 0 (n0) at 127.0.0.1:{field.port} did not answer within 0.5 s: trying the next node"] * 3
    )
    await close(*links)


@run
async def test_a_stranger_where_the_first_node_was_is_passed_over() -> None:
    field = Field(3)

    async def close_at_once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close_at_once, "127.0.0.1", field.port):
        links = await field.all(1, 2, timeouts=replace(SHORT, connect=2, handshake=2, join=5))
    assert crews(links) == {(1, 2)}, field.said
    await close(*links)


@run
async def test_a_node_that_does_not_come_is_left_behind_when_the_time_is_up_if_enough_are_there() -> None:
    field = Field(4, least=2)
    links = await field.all(0, 1, 3, timeouts=replace(SHORT, join=0.7))
    assert crews(links) == {(0, 1, 3)}
    await close(*links)


@run
async def test_too_few_do_not_go() -> None:
    field = Field(4, least=3)
    found = await asyncio.gather(
        *(field.meet(node, timeouts=replace(SHORT, join=0.7)) for node in (0, 1)), return_exceptions=True
    )
    text = "2 of 4 nodes have not come: 2 (n2), 3 (n3) within 0.7 s (--join-timeout): see the output of what is missing"
    assert [str(error) for error in found] == [text] * 2
    assert [error.told for error in found if isinstance(error, Unavailable)] == [False, True]
    assert field.sealed == []


@run
async def test_spare_nodes_stand_by_and_their_loss_is_no_failure() -> None:
    field = Field(4, most=2)
    links = await field.all(0, 1, 2, 3)
    assert crews(links) == {(0, 1)}
    links[3]._peers[0, None].abort()
    await until(lambda: bool(field.said))
    assert field.said == ["the spare node 3 (n3) is lost: it closed the connection"]
    links[1].report(Fail(failure(1, 5.0)))
    assert await events(*links[:3]) == [Failed(failure(1, 5.0), lost=(3,))] * 3
    await close(*links)


@run
async def test_a_job_is_done_when_those_that_take_part_are() -> None:
    field = Field(3, most=2)
    links = await field.all(0, 1, 2)
    links[1].report(Done())
    links[0].report(Done())
    assert await events(*links) == [AllDone()] * 3
    await close(*links)


@run
async def test_a_hang_is_looked_into_without_the_spares() -> None:
    field = Field(3, most=2)
    links = await field.all(0, 1, 2)
    links[1].report(Stalled("no step for 30 s"))
    await events(*links)
    links[0].report(seen(sighting(0)))
    links[1].report(seen(sighting(4, state="T")))
    found = await events(*links)
    assert [event.failure.rank for event in found] == [4] * 3
    await close(*links)


@run
async def test_everyone_hears_which_nodes_are_lost() -> None:
    field = Field(4, least=4)
    links = await field.all(0, 1, 2, 3)
    links[1]._peers[0, None].abort()
    links[2]._peers[0, None].abort()
    assert {event.lost for event in await events(links[0], links[3])} == {(1, 2)}
    await close(*links)


@run
async def test_of_16384_nodes_most_may_be_lost() -> None:
    field = Field(16_384, absent=range(1, 16_383), least=2)
    links = await field.all(0, 16_383)
    assert crews(links) == {(0, 16_383)}
    gone = tuple(range(1, 16_383))
    state = vars(links[0])["_job"]
    vars(links[0])["_job"] = replace(state, gone=state.gone | Bits.of(gone))
    links[1].report(Fail(failure(16_383, 5.0)))
    assert [event.lost for event in await events(*links)] == [gone] * 2
    await close(*links)


@run
async def test_of_two_halves_that_are_cut_off_from_each_other_one_goes_on() -> None:
    field = Field(4)
    halves = [field.all(0, 1, absent=(2, 3)), field.all(2, 3, absent=(0, 1))]
    found = await asyncio.gather(*halves, return_exceptions=True)
    (links,) = [half for half in found if isinstance(half, list)]
    (refused,) = [half for half in found if isinstance(half, Unavailable)]
    assert (str(refused), crews(links)) == ("others were first", {tuple(field.sealed[0])})
    await asyncio.sleep(0.1)
    await close(*links)


@run
async def test_a_minority_waits_for_others_although_it_expects_none() -> None:
    field = Field(4, quorum=2)
    alone = asyncio.create_task(field.meet(0, absent=(1, 2, 3), timeouts=replace(SHORT, join=3)))
    await asyncio.sleep(0.5)
    links = await field.all(1, 2, 3, absent=(0,))
    assert crews(links) == {(1, 2, 3)}
    with pytest.raises(Unavailable, match="others were first"):
        await alone
    await close(*links)


@run
async def test_two_hundred_survivors_of_a_lost_first_node_meet_again() -> None:
    field = Field(200, absent=(0, 77), least=150)
    nodes = [node for node in range(200) if node not in (0, 77)]
    async with asyncio.timeout(15):
        links = await field.all(*nodes, timeouts=Timeouts(join=300, peer=60))
    assert crews(links) == {tuple(nodes)}
    await close(*links)
