"""Node 0's name does not mean one address to all."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from entrypoint.core.errors import BadInput, Unavailable
from entrypoint.meet import spoke
from entrypoint.meet.hub import Hub
from entrypoint.meet.identity import Identity
from entrypoint.meet.messages import Move, Moved, Tried, pack
from entrypoint.meet.reach import Listener
from entrypoint.meet.terms import MembershipPolicy, Timeouts
from entrypoint.meet.waiting import Waiting
from entrypoint.meet.wire import Wire, greet
from tests.unit.meet.meeting import (
    KEY,
    SHORT,
    FakeNode,
    Place,
    close,
    hello,
    names,
    one_after_another,
    run,
    said_to,
    until,
    who,
)


def moving(moves: list[tuple[int, str]], node: int) -> dict[str, Any]:
    """What a participant is given that may have to take another address of node 0's."""

    async def move(address: str) -> str:
        moves.append((node, address))
        return ""

    return {"everywhere": True, "move": move}


async def astray(
    place: Place, addresses: Sequence[str], *identities: Identity, **changes: Any
) -> tuple[list[Any], list[tuple[int, str]]]:
    """(links or refusals, who was told which address), where node 0 is looked up at these addresses."""
    moves: list[tuple[int, str]] = []
    meetings = [
        place.meet(me, address=address, **(moving(moves, me.node_rank) | changes))
        for me, address in zip(identities, addresses, strict=True)
    ]
    return await asyncio.gather(*meetings, return_exceptions=True), moves


@run
async def test_where_the_others_reach_node_0_at_another_address_it_takes_that_one() -> None:
    place, nodes = Place(), [who(node, nnodes=3) for node in range(3)]
    links, moves = await astray(place, ["127.0.0.1", "127.0.0.2", "127.0.0.2"], *nodes)
    assert (moves, [link.moved for link in links]) == ([(0, "127.0.0.2")], ["127.0.0.2", "", ""])
    assert place.said == ["n0 is 127.0.0.1 on n0, and 127.0.0.2 on n1: 127.0.0.2 is taken"]
    await close(*links)


@run
async def test_of_two_addresses_that_the_others_reach_all_take_the_one_that_most_do() -> None:
    place, nodes = Place(), [who(node, nnodes=4) for node in range(4)]
    links, moves = await astray(place, ["127.0.0.1", "127.0.0.3", "127.0.0.2", "127.0.0.3"], *nodes)
    assert sorted(moves) == [(0, "127.0.0.3"), (2, "127.0.0.3")]
    assert [link.moved for link in links] == ["127.0.0.3", "", "127.0.0.3", ""]
    await close(*links)


@run
async def test_of_two_addresses_that_as_many_reach_node_0s_own_is_taken() -> None:
    place, nodes = Place(), [who(node, nnodes=3) for node in range(3)]
    links, moves = await astray(place, ["127.0.0.1", "127.0.0.1", "127.0.0.2"], *nodes)
    assert (moves, [link.moved for link in links]) == ([(2, "127.0.0.1")], ["", "", "127.0.0.1"])
    assert place.said == ["n0 is 127.0.0.2 on n2, and 127.0.0.1 on n0: 127.0.0.1 is taken"]
    await close(*links)


@run
async def test_what_node_0s_other_tasks_reach_does_not_count() -> None:
    place = Place()
    tasks = [
        who(node, local_rank=local, mode="rank", nproc_per_node=4) for node in (0, 1) for local in range(4)
    ]
    links, moves = await astray(place, ["127.0.0.1"] * 4 + ["127.0.0.2"] * 4, *tasks)
    assert moves == [(0, "127.0.0.2")] * 4
    assert [link.moved for link in links] == ["127.0.0.2"] * 4 + [""] * 4
    await close(*links)


CANNOT = (
    "BadInput: n0 is 127.0.0.2 on n2, and 127.0.0.1 on n0, which n2 cannot use: {}: correct DNS or /etc/hosts, so that "
    "it is the same on all nodes, or give --master-addr with an address that all nodes reach"
)


@run
async def test_a_node_that_cannot_use_the_address_ends_the_join_for_everyone() -> None:
    async def refuse(address: str) -> str:
        raise BadInput("some-cause", f"there is no interface for {address}")

    place, nodes = Place(), [who(node, nnodes=3) for node in range(3)]
    found, _ = await astray(place, ["127.0.0.1", "127.0.0.1", "127.0.0.2"], *nodes, move=refuse)
    texts = [f"{type(error).__name__}: {error}" for error in found]
    assert texts == [CANNOT.format("there is no interface for 127.0.0.1")] * 3


@run
async def test_a_node_that_does_not_get_through_to_the_address_ends_the_join_for_everyone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_way(*_: object) -> None:
        raise OSError(113, "asyncio's own words")

    monkeypatch.setattr(spoke.Spoke, "_visit", no_way)
    place, nodes = Place(), [who(node, nnodes=3) for node in range(3)]
    found, moves = await astray(place, ["127.0.0.1", "127.0.0.1", "127.0.0.2"], *nodes)
    texts = [f"{type(error).__name__}: {error}" for error in found]
    assert (texts, moves) == ([CANNOT.format("No route to host")] * 3, [])


@run
async def test_an_address_where_something_else_answers_is_not_taken() -> None:
    async def something_else(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = await greet(reader, writer, KEY, hub=True)
        await wire.receive()
        wire.send({"type": "go"})

    place = Place()
    moves: list[tuple[int, str]] = []
    bounds = replace(SHORT, join=1)
    async with await asyncio.start_server(something_else, "127.0.0.2", place.port):
        orders = [{"type": "welcome"}, {"type": "move", "address": "127.0.0.2"}]
        _, heard = await one_after_another(place, *orders, timeouts=bounds, **moving(moves, 1))
    assert (heard, moves) == (
        [
            {
                "type": "moved",
                "address": "127.0.0.2",
                "contact": "",
                "why": "it sent a message that has no meaning here",
            }
        ],
        [],
    )


@run
async def test_a_participant_that_cannot_move_says_so() -> None:
    place, nodes = Place(), [who(node, nnodes=3) for node in range(3)]
    addresses = ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
    meetings = [
        place.meet(me, address=where, everywhere=True) for me, where in zip(nodes, addresses, strict=True)
    ]
    found = await asyncio.gather(*meetings, return_exceptions=True)
    assert {str(error) for error in found} == {
        CANNOT.format("this participant cannot take node 0 at 127.0.0.1").removeprefix("BadInput: ")
    }


@run
async def test_an_answer_to_nothing_that_was_asked_moves_nobody() -> None:
    place = Place()
    async with place.hub(who(0, nnodes=3)) as hub:
        wires = []
        for node in (1, 2):
            wire, _ = await place.spoke()
            wires.append(wire)
            wire.send(hello(who(node, nnodes=3)))
            unasked = {"address": "127.0.0.9", "contact": f"lo 127.0.0.{node} 9 token", "why": ""}
            wire.send({"type": "moved", **unasked})
        async with asyncio.timeout(5):
            assert (await hub).members == (0, 1, 2)
        for wire in wires:
            wire.abort()


@run
async def test_a_node_that_does_not_say_whether_it_can_use_the_address_ends_the_join_for_everyone() -> None:
    async def wait(_: str) -> str:
        await asyncio.sleep(60)
        return ""

    place, nodes = Place(), [who(node, nnodes=3) for node in range(3)]
    bounds = replace(SHORT, reach=0.2, handshake=0.5)
    found, _ = await astray(
        place, ["127.0.0.1", "127.0.0.1", "127.0.0.2"], *nodes, move=wait, timeouts=bounds
    )
    texts = [f"{type(error).__name__}: {error}" for error in found]
    assert texts == [CANNOT.format("it does not say how that went")] * 3


@pytest.mark.parametrize(
    "refusal",
    [Unavailable("some-cause", "port 29500 of torch's store is taken"), BadInput("some-cause", "x")],
)
@run
async def test_why_node_0_cannot_take_the_address_is_told_to_everyone(refusal: Exception) -> None:
    async def refuse(_: str) -> str:
        raise refusal

    place, nodes = Place(), [who(node, nnodes=3) for node in range(3)]
    found, _ = await astray(place, ["127.0.0.1", "127.0.0.2", "127.0.0.2"], *nodes, move=refuse)
    assert [(type(error), str(error)) for error in found] == [(type(refusal), str(refusal))] * 3


@run
async def test_the_contact_that_comes_with_another_address_is_the_one_that_is_tried() -> None:
    async def move(_: str) -> str:
        return "lo 127.0.0.9 9 token"

    place = Place()
    async with Listener("lo", "127.0.0.1") as there:
        nodes = [who(0, contact="lo 127.0.0.1 9 token"), who(1, contact=str(there))]
        found, _ = await astray(place, ["127.0.0.1", "127.0.0.2"], *nodes, move=move)
    assert str(found[0]).startswith("n1 cannot reach n0 at 127.0.0.9 (lo): Connection refused: ")
    assert [str(error) for error in found] == [str(found[0])] * 2


@run
async def test_a_hub_that_waits_elsewhere_than_where_it_is_out_of_reach_is_named_with_both() -> None:
    place = Place()
    bounds = replace(SHORT, refused=0.3, poll=0.1)
    found = await place.refusals(who(1), begun=lambda: "10.77.42.11", timeouts=bounds)
    assert found == [
        f"BadInput: node 1 (n1) cannot reach node 0 (n0) at {place.endpoint}: Connection refused, 0.3 s after it began; "
        "to itself n0 is 10.77.42.11: correct DNS or /etc/hosts, so that it is the same on all nodes, or give "
        "--master-addr 10.77.42.11"
    ]


PATIENT = Timeouts(join=300, peer=60, reach=300, poll=0.05)
"""No bound of these passes while a test waits for something else."""


async def come(place: Place, address: str, node: int, nnodes: int = 4, **changes: Any) -> Wire:
    """A node that has node 0 at this address, and has been taken in."""
    wire = await greet(*await asyncio.open_connection(address, place.port), KEY, hub=False)
    wire.send(hello(who(node, nnodes=nnodes, **changes)))
    assert await wire.receive() == {"type": "welcome"}
    return wire


@run
async def test_a_node_need_not_take_an_address_at_which_nobody_is_left() -> None:
    place = Place()
    moves: list[tuple[int, str]] = []
    async with place.hub(who(0, nnodes=4), timeouts=PATIENT, **moving(moves, 0)) as hub:
        left = [await come(place, "127.0.0.2", node) for node in (1, 2)]
        stays = await come(place, "127.0.0.3", 3)
        assert await said_to(stays) == pack(Move("127.0.0.2"))
        for wire in left:
            wire.abort()
        await until(lambda: len(place.said) == 3)
        stays.send(pack(Moved("127.0.0.2", "", "no answer")))
        again = [await come(place, "127.0.0.3", node) for node in (1, 2)]
        async with asyncio.timeout(5):
            link = await hub
        assert (link.members, link.moved) == ((0, 1, 2, 3), "127.0.0.3")
        assert moves == [(0, "127.0.0.2"), (0, "127.0.0.3")]
        assert place.said[-1] == "n0 is 127.0.0.2 on n0, and 127.0.0.3 on n3: 127.0.0.3 is taken"
        for wire in [*again, stays]:
            wire.abort()


@run
async def test_nobody_goes_before_it_is_known_where_a_node_is_that_was_asked_to_move() -> None:
    """Also where those for whose sake it was asked have left, and it says nothing beyond its bound."""
    place = Place()
    moves: list[tuple[int, str]] = []
    bounds = replace(PATIENT, reach=1, handshake=1)
    async with place.hub(who(0, nnodes=4), timeouts=bounds, **moving(moves, 0)) as hub:
        left = [await come(place, "127.0.0.2", node) for node in (1, 2)]
        slow = await come(place, "127.0.0.1", 3)
        assert await said_to(slow) == pack(Move("127.0.0.2"))
        for wire in left:
            wire.abort()
        await until(lambda: len(place.said) == 3)
        again = [await come(place, "127.0.0.1", node) for node in (1, 2)]
        await asyncio.sleep(2.5)
        assert not hub.done()
        slow.send(pack(Moved("127.0.0.2", "", "")))
        assert await said_to(slow) == pack(Move("127.0.0.1"))
        slow.send(pack(Moved("127.0.0.1", "", "")))
        async with asyncio.timeout(5):
            assert (await hub).moved == "127.0.0.1"
        for wire in [*again, slow]:
            wire.abort()


@run
async def test_node_0_stays_where_it_is_if_it_cannot_take_an_address_at_which_nobody_is_left() -> None:
    release = asyncio.Event()

    async def refuse(_: str) -> str:
        await release.wait()
        raise BadInput("some-cause", "no such interface")

    place = Place()
    async with place.hub(who(0, nnodes=3), timeouts=PATIENT, everywhere=True, move=refuse) as hub:
        left = [await come(place, "127.0.0.2", node, 3) for node in (1, 2)]
        for wire in left:
            wire.abort()
        await until(lambda: len(place.said) == 3)
        again = [await come(place, "127.0.0.1", node, 3) for node in (1, 2)]
        release.set()
        async with asyncio.timeout(5):
            assert (await hub).members == (0, 1, 2)
        for wire in again:
            wire.abort()


@run
async def test_a_move_of_node_0_that_never_ends_holds_nobody_for_ever() -> None:
    async def hang(_: str) -> str:
        await asyncio.Event().wait()
        return ""

    place, policy = Place(), MembershipPolicy(candidates=[0], least=1, most=3)
    bounds = Timeouts(join=1, peer=60, poll=0.05, reach=0.3, handshake=0.3)
    asked: dict[str, Any] = {"timeouts": bounds, "muster": policy, "everywhere": True, "move": hang}
    async with place.hub(who(0, nnodes=3), **asked) as hub:
        for wire in [await come(place, "127.0.0.2", node, 3) for node in (1, 2)]:
            wire.abort()
        async with asyncio.timeout(5):
            assert (await hub).members == (0,)


@run
async def test_what_was_tried_before_a_node_left_does_not_count_when_it_comes_again_elsewhere() -> None:
    place = Place()
    moves: list[tuple[int, str]] = []
    contacts = {node: f"lo 127.0.0.{node} 9 token" for node in (1, 2)}
    async with place.hub(who(0, nnodes=3), timeouts=PATIENT, **moving(moves, 0)) as hub:
        first, other = [await come(place, "127.0.0.1", node, 3, contact=contacts[node]) for node in (1, 2)]
        assert (await said_to(first))["number"] == (await said_to(other))["number"] == 1
        first.send(pack(Tried(1, ())))
        first.abort()
        await until(lambda: bool(place.said))
        again = await come(place, "127.0.0.2", 1, 3, contact=contacts[1])
        assert await said_to(again) == pack(Move("127.0.0.1"))
        other.send(pack(Tried(1, ())))
        again.send(pack(Moved("127.0.0.1", contacts[1], "")))
        for wire in (again, other):
            assert (await said_to(wire))["number"] == 2
            wire.send(pack(Tried(2, ())))
        async with asyncio.timeout(5):
            assert (await hub).members == (0, 1, 2)
        again.abort()
        other.abort()


@run
async def test_a_time_that_is_up_while_nodes_move_says_which() -> None:
    async def wait(_: str) -> str:
        await asyncio.sleep(60)
        return ""

    place, nodes = Place(), [who(0), who(1)]
    bounds = replace(SHORT, join=2, reach=300, handshake=10)
    found, _ = await astray(place, ["127.0.0.1", "127.0.0.2"], *nodes, move=wait, timeouts=bounds)
    text = "all nodes have come, but another address of node 0's has not been taken by 0 (n0) within 2 s "
    text += "(--join-timeout): "
    assert [str(error) for error in found] == [f"{text}see the output of what is missing"] * 2


@run
async def test_the_hub_looks_at_everyone_once_before_and_once_after_many_have_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[bool] = []
    look = Hub._have_one_address

    def counted(hub: Hub) -> bool:
        looks.append(look(hub))
        return looks[-1]

    class Deaf:
        def send(self, message: object) -> None: ...

    monkeypatch.setattr(Hub, "_have_one_address", counted)
    local, nnodes = FakeNode("127.0.0.1", []), 100
    hub = Hub(
        me=who(0, nnodes=nnodes),
        hub=0,
        nodes=names(nnodes),
        endpoint="127.0.0.1:9",
        found=(socket.AF_INET, ("127.0.0.1", 9)),
        key=KEY,
        timeouts=PATIENT,
        local=local,
        waiting=Waiting(PATIENT, local),
        everywhere=True,
        muster=None,
    )
    for node in range(1, nnodes):
        hub._members[node, None] = (who(node, nnodes=nnodes), "127.0.0.1")
        hub._reached[node, None] = "127.0.0.2" if node <= 40 else "127.0.0.1"
        vars(hub)["_peers"][node, None] = Deaf()
    hub._go_if_complete()
    for node in range(1, 41):
        assert not hub._met.done()
        hub._hear((node, None), Moved("127.0.0.1", "", ""))
    assert (looks, hub.members) == ([False, True], tuple(range(nnodes)))
