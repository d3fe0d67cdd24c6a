"""The nodes try to reach one another before any rank starts, in one process over loopback."""

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from entrypoint.core.errors import Refusal
from entrypoint.meet import door, reach
from entrypoint.meet.identity import Identity
from entrypoint.meet.join import meet
from entrypoint.meet.link import Link
from entrypoint.meet.messages import Tried, Try
from entrypoint.meet.reach import Listener, ProbeEndpoint, ReachabilityTest, partners
from entrypoint.meet.terms import Timeouts
from entrypoint.meet.wire import WireError
from tests.ports import free_port
from tests.unit.meet.meeting import FakeNode, Place, hello

SHORT = Timeouts(join=10, peer=5, handshake=0.4, remind=60, poll=0.05, reach=0.5)
PATIENT = Timeouts(join=300, peer=60, poll=0.05)
"""Where all is to go well."""
ADVICE = "is this a network that joins the nodes (--interface), or is a firewall between them?"
MTU = "small packets pass, large ones do not (is the MTU the same everywhere?)"


def contact(number: int, **changes: Any) -> ProbeEndpoint:
    values: dict[str, Any] = {
        "interface": "hsn0",
        "address": f"10.77.43.{number}",
        "port": 40000 + number,
        "token": f"t{number}",
    }
    return ProbeEndpoint(**(values | changes))


# --- one way ------------------------------------------------------------------------------------------------


async def tried(there: ProbeEndpoint, limit: float = 0.5) -> str:
    """Why a way does not pass; empty where it does."""
    answer = await reach.carry_out(Try(3, ((7, str(there)),)), limit)
    assert answer.number == 3
    assert [node for node, _ in answer.failed] in ([], [7])
    return "".join(why for _, why in answer.failed)


@pytest.mark.parametrize("address", ["127.0.0.2", "::1"])
def test_a_node_that_listens_is_reached_and_more_than_a_packet_goes_both_ways(address: str) -> None:
    async def test() -> None:
        async with Listener("lo", address) as there:
            assert (there.interface, there.address) == ("lo", address)
            assert await asyncio.gather(*(tried(there, 5) for _ in range(20))) == [""] * 20
        assert await tried(there) == "Connection refused"

    asyncio.run(test())


def test_a_stranger_gets_no_byte_and_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "PROVE", 0.3)

    async def told(there: ProbeEndpoint, said: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(there.address, there.port)
        writer.write(said)
        try:
            async with asyncio.timeout(5):
                return await reader.read(1)
        except ConnectionResetError:
            return b""
        finally:
            writer.transport.abort()

    async def test() -> None:
        async with Listener("lo", "127.0.0.2") as there:
            echo = reach._proof(there.token, reach.LISTENER)
            for said in (b"", b"x" * 31, b"x" * 1000, there.token.encode(), echo):
                assert await told(there, said) == b""
            assert await tried(there, 5) == ""

    asyncio.run(test())


def test_who_was_sent_and_then_says_nothing_is_cut_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "TRY", 0.3)

    async def test() -> None:
        async with Listener("lo", "127.0.0.2") as there:
            reader, writer = await asyncio.open_connection(there.address, there.port)
            writer.write(reach._proof(there.token, reach.CALLER))
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1 << 16):
                    pass
            writer.transport.abort()

    asyncio.run(asyncio.wait_for(test(), 5))


def test_strangers_that_hold_every_place_do_not_keep_a_node_out() -> None:
    async def test() -> None:
        async with Listener("lo", "127.0.0.2") as there:
            held = [
                await asyncio.open_connection(there.address, there.port) for _ in range(door.STRANGERS + 50)
            ]
            assert await tried(there, 5) == ""
        for _, writer in held:
            writer.transport.abort()

    asyncio.run(test())


def test_a_node_that_lost_its_place_to_strangers_comes_again() -> None:
    """As it does where it had it for `door.FAIR` and was too slow."""
    visits: list[int] = []

    async def full_at_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(1)
        await reader.readexactly(reach.PROOF_BYTES)
        if len(visits) == 3:
            writer.write(KNOWS + reach.PAYLOAD)
            await reader.readexactly(len(reach.PAYLOAD))
            writer.write(b".")
        else:
            writer.close()

    async def test() -> None:
        async with answering(full_at_first) as there:
            assert await tried(there, 5) == ""

    asyncio.run(test())
    assert len(visits) == 3


def test_who_tries_is_gone_when_the_listener_ends() -> None:
    async def test() -> None:
        async with Listener("lo", "127.0.0.2") as there:
            reader, writer = await asyncio.open_connection(there.address, there.port)
            writer.write(reach._proof(there.token, reach.CALLER))
            await reader.readexactly(reach.PROOF_BYTES)
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1 << 16):
                pass
        writer.transport.abort()

    asyncio.run(asyncio.wait_for(test(), 5))


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[ProbeEndpoint]:
    """Where something else answers; the connections are closed at the end."""
    open_: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_.append(writer)
        await answer(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield contact(1, address="127.0.0.1", port=server.sockets[0].getsockname()[1], token="a" * 32)
    for writer in open_:
        writer.transport.abort()
    server.close()


async def silence(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...


KNOWS = reach._proof("a" * 32, reach.LISTENER)


async def another_machine(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_10.0p2 Debian-7\r\n")


async def an_echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read(1000))


async def small_packets_alone(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(KNOWS + reach.PAYLOAD[:1400])


async def nothing_large_taken(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(KNOWS + reach.PAYLOAD)


async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(reach.PROOF_BYTES)
    writer.write(KNOWS)
    writer.close()


async def nobody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(reach.PROOF_BYTES)
    writer.close()


async def a_firewall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(reach.PROOF_BYTES)
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (silence, "no answer in 0.5 s"),
        (another_machine, "another machine answers there"),
        (an_echo, "another machine answers there"),
        (small_packets_alone, MTU),
        (nothing_large_taken, MTU),
        (end, "the connection was closed"),
        (nobody, "the connection was closed"),
        (a_firewall, "Connection reset by peer"),
    ],
)
def test_a_way_that_does_not_pass_says_why(answer: Answer, why: str) -> None:
    async def test() -> None:
        async with answering(answer) as there:
            assert await tried(there) == why

    asyncio.run(test())


def test_a_destination_without_a_route_says_so_at_once() -> None:
    found = asyncio.run(tried(contact(1, address="255.255.255.255"), 60))
    assert found in ("Network is unreachable", "Permission denied")


# --- who tries which ways -----------------------------------------------------------------------------------


def test_each_node_tries_those_at_powers_of_two_and_no_node_is_left_out() -> None:
    assert partners(0, 1) == []
    assert partners(1, 2) == [0]
    assert [partners(node, 3) for node in range(3)] == [[1, 2], [2, 0], [0, 1]]
    assert partners(3, 8) == [4, 5, 7]
    for nnodes in range(2, 70):
        ways = {(node, other) for node in range(nnodes) for other in partners(node, nnodes)}
        assert all(node != other for node, other in ways)
        assert len({node for node, _ in ways}) == len({other for _, other in ways}) == nnodes


def trial(*numbers: int, **changes: Any) -> ReachabilityTest:
    return ReachabilityTest(
        {number: str(contact(number, **changes)) for number in numbers}, [f"n{i}" for i in range(8)], 4
    )


def answer(*failed: tuple[int, str], number: int = 4) -> Tried:
    return Tried(number, failed)


def test_the_order_names_the_nodes_that_take_part() -> None:
    ways = ((1, "hsn0 10.77.43.1 40001 t1"), (2, "hsn0 10.77.43.2 40002 t2"))
    assert trial(0, 1, 2).order(0) == Try(4, ways)
    assert reach.ways(trial(0, 1, 2).order(0)) == {1: contact(1), 2: contact(2)}


@pytest.mark.parametrize("nnodes", [4, 6, 8])
def test_whichever_nodes_are_lost_the_ways_join_all_others(nnodes: int) -> None:
    for count in range(2, nnodes + 1):
        for left in combinations(range(nnodes), count):
            one = trial(*left)
            ways = {node: set(reach.ways(one.order(node))) for node in left}
            assert all(others and others <= {*left} - {node} for node, others in ways.items()), left
            joined = {left[0]}
            for _ in left:
                joined |= {node for node, others in ways.items() if node in joined or others & joined}
                joined |= {other for node in joined for other in ways[node]}
            assert joined == {*left}


def test_a_node_that_is_alone_has_nobody_to_reach() -> None:
    assert trial(5).order(5) == Try(4, ())
    assert asyncio.run(reach.carry_out(Try(4, ()), 5)) == answer()


def test_a_trial_is_complete_once_all_have_answered_it_and_not_an_earlier_one() -> None:
    one = trial(0, 1)
    one.take(0, answer())
    one.take(1, answer((0, "no answer"), number=3))
    assert (one.complete, ReachabilityTest().complete) == (False, True)
    one.take(1, answer())
    assert (one.complete, one.verdict()) == (True, "")


def test_the_verdict_names_both_ends_of_the_first_way_and_the_others_beside_it() -> None:
    one = trial(*range(8))
    for node in range(8):
        one.take(node, answer(*((5, "no answer in 8 s") for _ in range(node in (4, 3, 1)))))
    assert one.verdict() == (
        f"n1 cannot reach n5 at 10.77.43.5 (hsn0): no answer in 8 s, nor n3 to n5, n4 to n5: {ADVICE}"
    )
    one.take(5, answer(*((node, "no answer in 8 s") for node in (6, 7, 1))))
    assert one.verdict() == (
        "n1 cannot reach n5 at 10.77.43.5 (hsn0): no answer in 8 s, nor n3 to n5, n4 to n5, n5 to n1, n5 to n6 "
        f"and 1 more: {ADVICE}"
    )


def test_a_node_that_does_not_answer_is_one_that_reaches_nobody() -> None:
    one = trial(0, 1, 3)
    one.take(0, answer())
    one.take(3, answer())
    assert (
        one.verdict() == f"n1 cannot reach n3 at 10.77.43.3 (hsn0): it does not say how that went: {ADVICE}"
    )


def test_an_address_that_two_nodes_have_joins_nothing() -> None:
    assert trial(0, 1, 2).clash == ""
    assert trial(3, 1, interface="docker0", address="172.17.0.1").clash == (
        "n1 and n3 both have 172.17.0.1 on docker0, which so does not join them: choose another (--interface)"
    )


def test_interfaces_of_another_name_are_known() -> None:
    contacts = {0: str(contact(0)), 1: str(contact(1, interface="ib0")), 2: str(contact(2))}
    assert ReachabilityTest(contacts, ["n0", "n1", "n2"]).elsewhere == {"n1": "ib0"}
    assert ReachabilityTest().elsewhere == {}


@pytest.mark.parametrize(
    "text", ["", "hsn0 10.77.43.1 40001", "hsn0 10.77.43.1 x t", "hsn0 10.77.43.1 65536 t", "a b 1 c d"]
)
def test_a_contact_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        ProbeEndpoint.parse(text)
    if text:
        with pytest.raises(WireError):
            reach.check(text)


@pytest.mark.parametrize("where", ["", "x", "lo 127.0.0.9 9", "lo 127.0.0.9 99999 token"])
def test_an_order_to_a_place_of_another_form_is_refused(where: str) -> None:
    with pytest.raises(WireError):
        reach.ways(Try(1, ((1, where),)))


def test_an_answer_to_an_earlier_trial_may_name_who_has_left_since() -> None:
    one = trial(0, 1)
    one.take(0, answer((3, "Connection refused"), number=3))
    one.take(0, answer())
    one.take(1, answer())
    assert (one.complete, one.verdict()) == (True, "")


def test_the_answer_of_a_node_to_a_trial_that_was_given_up_counts_for_nothing() -> None:
    """It names who has left, for whose sake the trial was given up."""
    one = ReachabilityTest(number=1)
    one.take(0, answer((1, "Connection refused")))
    assert one.verdict() == ""


def test_an_answer_that_names_who_takes_no_part_is_refused() -> None:
    with pytest.raises(WireError):
        trial(0, 1).take(0, answer((3, "x")))


# --- in the join --------------------------------------------------------------------------------------------


def who(node_rank: int, there: ProbeEndpoint | str, **changes: Any) -> Identity:
    values: dict[str, Any] = {
        "job_id": "7",
        "attempt": 0,
        "node_rank": node_rank,
        "local_rank": None,
        "name": f"n{node_rank}",
        "nnodes": 3,
        "nproc_per_node": 2,
        "mode": "torchrun",
        "device": "cpu",
        "image_id": "",
        "lock_digest": "",
        "versions": {},
        "contact": str(there),
    }
    return Identity(**(values | changes))


async def join(
    *identities: Identity, said: list[str] | None = None, timeouts: Timeouts = SHORT
) -> list[Link | BaseException]:
    port = free_port()
    meetings = [
        meet(
            me,
            nodes=["n0", "n1", "n2"],
            local=FakeNode("127.0.0.1", said if said is not None else []),
            port=port,
            key=None,
            timeouts=timeouts,
        )
        for me in identities
    ]
    return await asyncio.gather(*meetings, return_exceptions=True)


def refusals(found: Sequence[Link | BaseException]) -> list[tuple[int, str]]:
    """(status, text) of each."""
    assert all(isinstance(one, Refusal) for one in found), found
    return [(one.status, str(one)) for one in found if isinstance(one, Refusal)]


@contextlib.asynccontextmanager
async def listeners(*interfaces: str) -> AsyncIterator[list[ProbeEndpoint]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(Listener(name, f"127.0.1.{number}"))
            for number, name in enumerate(interfaces, 1)
        ]


def test_nodes_that_reach_one_another_meet_and_the_first_knows_the_others_interfaces() -> None:
    async def test() -> None:
        async with listeners("eth0", "eth0", "ib0") as there:
            links = await join(*(who(node, one) for node, one in enumerate(there)), timeouts=PATIENT)
        assert [link.elsewhere for link in links if isinstance(link, Link)] == [{"n2": "ib0"}, {}, {}]
        await asyncio.gather(*(link.close() for link in links if isinstance(link, Link)))

    asyncio.run(test())


def test_one_task_of_each_node_tries_for_all_of_them() -> None:
    async def test() -> None:
        async with listeners("eth0", "eth0", "eth0") as there:
            claims = [
                who(node, there[node] if local == 0 else "", mode="rank", local_rank=local)
                for node in range(3)
                for local in range(2)
            ]
            links = await join(*claims, timeouts=PATIENT)
        assert all(isinstance(link, Link) for link in links), links
        await asyncio.gather(*(link.close() for link in links if isinstance(link, Link)))

    asyncio.run(test())


def test_a_way_that_does_not_pass_ends_the_join_everywhere_with_the_same_words() -> None:
    async def test() -> None:
        async with listeners("eth0", "eth0") as there, answering(silence) as silent:
            found = await join(*(who(node, one) for node, one in enumerate([*there, silent])))
        text = f"n0 cannot reach n2 at 127.0.0.1 (hsn0): no answer in 0.5 s, nor n1 to n2: {ADVICE}"
        assert refusals(found) == [(69, text)] * 3

    asyncio.run(test())


def test_a_node_that_does_not_say_how_its_ways_went_holds_the_others_no_longer_than_they_may_take() -> None:
    async def test() -> None:
        place, bounds = Place(), replace(SHORT, join=300, peer=300)
        async with (
            listeners("eth0", "eth0") as there,
            place.hub(who(0, there[0], nnodes=2), timeouts=bounds) as hub,
        ):
            wire, writer = await place.spoke()
            wire.send(hello(who(1, there[1], nnodes=2)))
            text = "n1 cannot reach n0 at 127.0.1.1 (eth0): it does not say how that went: "
            with pytest.raises(Refusal, match=re.escape(text)):
                await asyncio.wait_for(hub, 10)
            writer.transport.abort()

    asyncio.run(test())


def test_nodes_with_one_address_are_refused() -> None:
    async def test() -> None:
        found = await join(*(who(node, contact(node, address="172.17.0.1")) for node in range(3)))
        text = "n0 and n1 both have 172.17.0.1 on hsn0, which so does not join them: choose another (--interface)"
        assert refusals(found) == [(64, text)] * 3

    asyncio.run(test())


def test_a_participant_whose_contact_makes_no_sense_is_a_stranger() -> None:
    async def test() -> None:
        said: list[str] = []
        await join(who(0, ""), who(1, "nonsense"), said=said, timeouts=replace(SHORT, join=0.5))
        assert any("in a form that has no meaning here" in line for line in said), said

    asyncio.run(test())
