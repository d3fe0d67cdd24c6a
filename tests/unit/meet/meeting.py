"""The meeting of all nodes and what they tell each other afterwards, in one process over loopback."""

import asyncio
import contextlib
import errno
import functools
import inspect
import json
import re
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint.errors import BadInput, Unavailable
from entrypoint.meet import door, spoke
from entrypoint.meet import wire as wire_module
from entrypoint.meet.claims import Identity, disagreement, load, missing, pack, unpack
from entrypoint.meet.join import meet
from entrypoint.meet.link import Link
from entrypoint.meet.terms import AllDone, Failed, Look, Muster, Peek, Stopped, Timeouts
from entrypoint.meet.wire import MAX_BODY, PROTOCOL, Wire, WireError, WrongKey, greet
from entrypoint.node import processes
from entrypoint.watch.reports import End, Failure, Sighting

KEY = b"k" * 32
PORT_ADVICE = "the next attempt uses another port; where it was chosen by hand, choose another --master-port"
LIST_ADVICE = "start every node with the same list of nodes"
NOT_VERIFIED = "it sent a frame that the join key does not verify"
SHORT = Timeouts(join=10, peer=5, connect=1, handshake=0.4, remind=60, poll=0.05, settle=0.15)
TALKATIVE = replace(SHORT, remind=0.3)


def who(node_rank: int, **changes: Any) -> Identity:
    identity = Identity(
        job_id="7",
        attempt=0,
        node_rank=node_rank,
        local_rank=None,
        name=f"n{node_rank}",
        nnodes=2,
        nproc_per_node=4,
        mode="torchrun",
        device="cpu",
        image_id="7be444fb",
        lock_digest="5e1f",
        versions={"torch": "2.15.0"},
    )
    return replace(identity, **changes)


def free_port(address: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


@functools.cache
def names(nnodes: int) -> tuple[str, ...]:
    return tuple(f"n{node}" for node in range(nnodes))


class Place:
    """One address and port, and what was said there."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address, self.port = address, free_port(address)
        self.said: list[str] = []
        self.endpoint = f"[{address}]:{self.port}" if ":" in address else f"{address}:{self.port}"

    async def meet(self, me: Identity, **changes: Any) -> Link:
        arguments: dict[str, Any] = {
            "nodes": names(me.nnodes),
            "address": self.address,
            "port": self.port,
            "key": KEY,
            "timeouts": SHORT,
            "say": self.said.append,
        }
        return await meet(me, **(arguments | changes))

    async def all(self, *identities: Identity, **changes: Any) -> list[Link]:
        return await asyncio.gather(*(self.meet(me, **changes) for me in identities))

    async def refusals(self, *identities: Identity, **changes: Any) -> list[str]:
        """How each of them was refused: class and text."""
        found = await asyncio.gather(*(self.meet(me, **changes) for me in identities), return_exceptions=True)
        return [f"{type(error).__name__}: {error}" for error in found]

    @contextlib.asynccontextmanager
    async def hub(self, me: Identity | None = None, **changes: Any) -> AsyncIterator[asyncio.Task[Link]]:
        """Node 0, listening and waiting for the others."""
        task = asyncio.create_task(self.meet(me or who(0), **changes))
        await until(lambda: self.listens() or task.done())
        try:
            yield task
        finally:
            task.cancel()
            found = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(found, Link):
                await found.close()

    def listens(self) -> bool:
        table = Path("/proc/net/tcp6" if ":" in self.address else "/proc/net/tcp").read_text()
        return any(f":{self.port:04X} " in line and " 0A " in line for line in table.splitlines())

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.address, self.port)

    async def spoke(self, key: bytes = KEY) -> tuple[Wire, asyncio.StreamWriter]:
        """A connection that has exchanged the greetings and said nothing."""
        reader, writer = await self.connect()
        return await greet(reader, writer, key, hub=False), writer


def hello(me: Identity) -> dict[str, Any]:
    return {"type": "hello", "identity": asdict(me), "left": 10.0}


def failure(node_rank: int, at: float, **changes: Any) -> Failure:
    first = Failure(
        node_rank=node_rank, node=f"n{node_rank}", rank=4, status=9, signal=0, time=at, error="ValueError: x"
    )
    return replace(first, **changes)


def unsent(wire: Wire, writer: asyncio.StreamWriter, message: dict[str, Any]) -> bytes:
    """The bytes of the wire's next frame, which it takes for sent."""
    caught: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "write", caught.append)
        wire.send(message)
    return caught[0]


def mute(*wires: Wire) -> None:
    """Let nothing more out of these ends, heartbeats included."""
    for wire in wires:
        vars(wire)["send"] = lambda message: None  # noqa: ARG005


async def until(condition: Callable[[], bool], bound: float = 5) -> None:
    async with asyncio.timeout(bound):
        while not condition():
            await asyncio.sleep(0.01)


async def events(*links: Link) -> list[Any]:
    async with asyncio.timeout(5):
        return [await link.next() for link in links]


async def close(*links: Link) -> None:
    await asyncio.gather(*(link.close() for link in links))


def run(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own, with a bound, in which no task may be left over."""

    def sync(**arguments: Any) -> None:
        async def bounded() -> None:
            complaints: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            async with asyncio.timeout(20):
                await test(**arguments)
            await asyncio.sleep(0)
            assert complaints == []

        asyncio.run(bounded())

    sync.__name__, sync.__doc__ = test.__name__, test.__doc__
    sync.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    for mark in getattr(test, "pytestmark", []):
        sync = getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs)(sync)
    return sync


def sighting(rank: int, **changes: Any) -> Sighting:
    waiting = Sighting(
        rank=rank,
        node_rank=rank // 4,
        node=f"n{rank // 4}",
        step=7,
        quiet=30.0,
        state="S",
        at="train.py:90 advance",
        waits_in="all_reduce",
        stack="5f0a",
    )
    return replace(waiting, **changes)


# Everybody meets.


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
@run
async def test_two_nodes_meet(address: str) -> None:
    place = Place(address)
    links = await place.all(who(1), who(0))
    await close(*links)
    assert place.said == []


@run
async def test_a_name_that_resolves_is_as_good_as_an_address() -> None:
    place = Place()
    await close(*await place.all(who(0), who(1), address="localhost"))


@run
async def test_a_single_participant_meets_itself() -> None:
    place = Place()
    (link,) = await place.all(who(0, nnodes=1))
    link.done()
    assert await events(link) == [AllDone()]
    await link.close()


@run
async def test_in_rank_mode_every_task_meets() -> None:
    place = Place()
    tasks = [
        who(node, local_rank=local, mode="rank", nproc_per_node=2) for node in (0, 1) for local in (0, 1)
    ]
    links = await place.all(*reversed(tasks))
    for link in links:
        link.done()
    assert await events(*links) == [AllDone()] * 4
    await close(*links)


@run
async def test_without_a_key_the_identity_alone_counts() -> None:
    place = Place()
    await close(*await place.all(who(0), who(1), key=None))


@run
async def test_five_hundred_and_twelve_nodes_meet_and_hear_of_one_failure() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
    try:
        place = Place()
        bounds = Timeouts(join=15)
        links = await place.all(*(who(node, nnodes=512) for node in range(512)), timeouts=bounds)
        links[300].fail(failure(300, 1.0))
        assert await events(*links) == [Failed(failure(300, 1.0))] * 512
        await close(*links)
        assert place.said == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@run
async def test_the_hub_listens_on_its_own_address_alone() -> None:
    place = Place("127.0.0.2")
    async with place.hub():
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", place.port)


@run
async def test_a_hub_that_is_found_by_a_name_listens_on_every_address() -> None:
    place = Place("127.0.0.2")
    async with place.hub(everywhere=True):
        for address in ("127.0.0.1", "127.0.0.3", "::1"):
            _, writer = await asyncio.open_connection(address, place.port)
            writer.transport.abort()


@run
async def test_a_refused_connection_means_wait() -> None:
    place = Place()
    early = asyncio.create_task(place.meet(who(1), timeouts=TALKATIVE))
    await until(lambda: bool(place.said))
    assert place.said[0].startswith(
        f"node 0 (n0) at {place.endpoint} has not started yet after 0 s: waiting "
    )
    links = [await place.meet(who(0)), await early]
    await close(*links)


@run
async def test_the_hub_says_who_is_missing() -> None:
    place = Place()
    async with place.hub(who(0, nnodes=3), timeouts=TALKATIVE):
        link = asyncio.create_task(place.meet(who(1, nnodes=3), say=lambda _: None))
        await until(lambda: any("1 of 3 nodes have not come: 2 (n2) after" in text for text in place.said))
        link.cancel()
        await asyncio.wait([link])


@run
async def test_the_hub_says_that_all_have_come_and_try_their_ways() -> None:
    place = Place()
    async with place.hub(who(0, contact="lo 127.0.0.1 9 token"), timeouts=TALKATIVE):
        wire, _ = await place.spoke()
        wire.send(hello(who(1, contact="lo 127.0.0.2 9 token")))
        said = "all nodes have come, and try to reach one another after "
        await until(lambda: any(text.startswith(said) for text in place.said))
        wire.abort()


def test_many_missing_nodes_are_counted() -> None:
    nodes = [f"n{node}" for node in range(100)]
    text = missing([(node, None) for node in range(10, 30)], 100, nodes, shown=3)
    assert text == "20 of 100 nodes have not come: 10 (n10), 11 (n11), 12 (n12) and 17 more"


def test_missing_tasks_are_named_with_their_local_rank() -> None:
    assert missing([(1, 0), (1, 1)], 4, ["a", "b"]) == "2 of 4 tasks have not come: 1.0 (b), 1.1 (b)"


@run
async def test_a_node_that_never_comes_ends_the_join_for_everyone() -> None:
    place = Place()
    bounds = replace(SHORT, join=0.7)
    found = await place.refusals(who(0, nnodes=3), who(1, nnodes=3), timeouts=bounds)
    assert (
        found
        == [
            "Unavailable: 1 of 3 nodes have not come: 2 (n2) within 0.7 s (--join-timeout): "
            "see the output of what is missing"
        ]
        * 2
    )


@run
async def test_who_began_first_waits_no_longer_than_the_join_timeout() -> None:
    place = Place()
    early = asyncio.create_task(place.refusals(who(1, nnodes=3), timeouts=replace(SHORT, join=1)))
    await asyncio.sleep(0.5)
    began = time.monotonic()
    async with place.hub(who(0, nnodes=3), timeouts=replace(SHORT, join=15)) as hub:
        assert (await early)[0].startswith("Unavailable: 1 of 3 nodes have not come: 2 (n2)")
        with pytest.raises(Unavailable):
            await hub
    assert time.monotonic() - began < 5


@run
async def test_a_hub_that_never_comes_ends_the_wait() -> None:
    place = Place()
    (text,) = await place.refusals(who(1), timeouts=replace(SHORT, join=0.5, connect=0.1))
    assert text == (
        f"Unavailable: node 0 (n0) at {place.endpoint} has not started yet within 0.5 s (--join-timeout): "
        "see the output of what is missing"
    )


@run
async def test_a_node_that_never_started_ends_the_wait_of_everyone_at_once() -> None:
    place = Place()
    verdicts: list[str] = []
    found = asyncio.create_task(
        place.refusals(
            who(0, nnodes=3), who(1, nnodes=3), never_started=lambda: verdicts[0] if verdicts else None
        )
    )
    await asyncio.sleep(0.3)
    verdicts.append("node 2 (n2) never started: no image")
    async with asyncio.timeout(3):
        assert await found == ["Unavailable: node 2 (n2) never started: no image"] * 2


@run
async def test_a_file_system_that_stalls_while_the_nodes_meet_holds_nobody_up() -> None:
    place, healed = Place(), threading.Event()

    def ask() -> None:
        """Who never started stands in files."""
        healed.wait(15)

    try:
        async with asyncio.timeout(5):
            links = await place.all(who(0), who(1), never_started=ask, begun=ask)
    finally:
        healed.set()
    await close(*links)


@run
async def test_a_spoke_looks_for_who_never_started_too() -> None:
    place = Place()
    found = await place.refusals(who(1), never_started=lambda: "node 0 (n0) never started: no image")
    assert found == ["Unavailable: node 0 (n0) never started: no image"]


@run
async def test_a_hub_that_has_begun_and_never_listens_is_out_of_reach() -> None:
    place = Place()
    looks = iter([None, None])
    bounds = replace(SHORT, refused=0.3, poll=0.1)
    found = await place.refusals(who(1), begun=lambda: next(looks, place.address), timeouts=bounds)
    assert found == [
        f"Unavailable: node 1 (n1) cannot reach node 0 (n0) at {place.endpoint}: Connection refused, 0.3 s after it "
        "began: is this a network that joins the nodes (--master-addr), or is a firewall between them?"
    ]


@run
async def test_a_hub_that_begins_late_and_listens_in_time_is_met() -> None:
    place = Place()
    bounds = replace(SHORT, refused=2.0, poll=0.1)
    spoke = asyncio.create_task(place.meet(who(1), begun=lambda: place.address, timeouts=bounds))
    await asyncio.sleep(0.5)
    links = [await place.meet(who(0)), await spoke]
    assert [link.members for link in links] == [(0, 1)] * 2
    await asyncio.gather(*(link.close() for link in links))


@run
async def test_a_participant_that_leaves_before_the_start_may_come_again() -> None:
    place = Place()
    async with place.hub(who(0, nnodes=3)) as hub:
        wire, _ = await place.spoke()
        wire.send(hello(who(1, nnodes=3)))
        assert await wire.receive() == {"type": "welcome"}
        wire.abort()
        await until(lambda: bool(place.said))
        assert place.said == [
            "node 1 (n1) left before the start (it closed the connection): waiting for it again"
        ]
        links = await place.all(who(1, nnodes=3), who(2, nnodes=3))
        await close(await hub, *links)


@run
async def test_a_hub_that_ends_before_the_start_ends_the_join() -> None:
    place = Place()
    async with place.hub(who(0, nnodes=3)) as hub:
        spoke = asyncio.create_task(place.refusals(who(1, nnodes=3)))
        await asyncio.sleep(0.3)
        hub.cancel()
        assert await spoke == [
            f"Unavailable: node 0 (n0) at {place.endpoint} was lost before the start: "
            "it closed the connection: see its output"
        ]


async def one_after_another(
    place: Place, *messages: dict[str, Any], **changes: Any
) -> tuple[str, list[dict[str, Any]]]:
    """(how node 1 was refused, what it said after its hello) by a hub that says these things, and no more."""
    heard: list[dict[str, Any]] = []

    async def hub(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = await greet(reader, writer, KEY, hub=True)
        await wire.receive()
        for message in messages:
            wire.send(message)
        with contextlib.suppress(WireError):
            while True:
                heard.append(await wire.receive())

    text = await listener(place, hub, **changes)
    return text, [message for message in heard if message["type"] != "beat"]


@run
async def test_a_hub_that_does_not_decide_is_waited_for_as_long_as_the_join_may_take() -> None:
    place = Place()
    text, _ = await one_after_another(place, {"type": "welcome"}, timeouts=replace(SHORT, join=1))
    assert re.sub(r"[\d.]+ s", "N s", text) == (
        f"Unavailable: node 0 (n0) at {place.endpoint} did not decide within N s: see its output"
    )


# Node 0's name does not mean one address to all.


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
        raise BadInput(f"there is no interface for {address}")

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


@pytest.mark.parametrize("refusal", [Unavailable("port 29500 of torch's store is taken"), BadInput("x")])
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

    place, nodes = Place(), [who(node, contact=f"lo 127.0.0.{node} 9 token") for node in (0, 1)]
    found, _ = await astray(place, ["127.0.0.1", "127.0.0.2"], *nodes, move=move)
    assert str(found[0]).startswith("n0 cannot reach n1 at 127.0.0.1 (lo): Connection refused, nor n1 to n0")
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


# What is in the way.


@run
async def test_a_taken_port_ends_the_join_at_once() -> None:
    place = Place()
    with socket.create_server((place.address, place.port)):
        found = await place.refusals(who(0))
    assert found == [f"Unavailable: the join port of {place.endpoint} is taken on node 0 (n0): {PORT_ADVICE}"]


@run
async def test_an_address_of_another_machine_is_bad_input() -> None:
    place = Place()
    found = await place.refusals(who(0), address="192.0.2.1")
    assert found == [
        f"BadInput: node 0 (n0) cannot listen on 192.0.2.1:{place.port}: Cannot assign requested address: "
        "the address must be one of node 0's own (--master-addr)"
    ]


@run
async def test_a_host_without_ipv6_listens_everywhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = door.listen

    def without_ipv6(family: socket.AddressFamily, where: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "not supported")
        return listen(family, where)

    monkeypatch.setattr(door, "listen", without_ipv6)
    place = Place()
    await close(*await place.all(who(0), who(1), everywhere=True))
    (text,) = await place.refusals(who(0), address="::1", everywhere=True)
    assert text.startswith(f"BadInput: node 0 (n0) cannot listen on [::1]:{place.port}: Address family not ")


@run
async def test_a_name_that_does_not_resolve_is_bad_input() -> None:
    place = Place()
    found = await place.refusals(who(0), who(1), address="no such name")
    assert (
        found
        == [
            "BadInput: the rendezvous address no such name does not resolve to an address: give one that "
            "does (--master-addr, --nodes)"
        ]
        * 2
    )


@run
async def test_no_route_ends_the_join_at_once() -> None:
    place = Place()
    (text,) = await place.refusals(who(1), address="255.255.255.255")
    assert text == (
        f"Unavailable: node 1 (n1) cannot reach node 0 (n0) at 255.255.255.255:{place.port}: Network is "
        "unreachable: is this a network that joins the nodes (--master-addr), or is a firewall "
        "between them?"
    )


@run
async def test_a_connection_that_nobody_answers_ends_the_join() -> None:
    place = Place()
    with socket.socket() as full, contextlib.ExitStack() as fillers:
        full.bind((place.address, place.port))
        full.listen(0)
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex((place.address, place.port))
        (text,) = await place.refusals(who(1))
    assert text == (
        f"Unavailable: node 1 (n1) cannot reach node 0 (n0) at {place.endpoint}: no answer: is this a "
        "network that joins the nodes (--master-addr), or is a firewall between them?"
    )


async def listener(
    place: Place, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any], **changes: Any
) -> str:
    """How a spoke is refused that finds this listener."""
    server = await asyncio.start_server(answer, place.address, place.port)
    try:
        return (await place.refusals(who(1), **changes))[0]
    finally:
        server.close()


def no_hub(place: Place, why: str) -> str:
    return (
        f"Unavailable: something that is no apptrain hub answers on {place.endpoint}, where node 0 "
        f"(n0) should: {why}: {PORT_ADVICE}"
    )


@run
async def test_a_listener_that_says_nothing_is_no_hub() -> None:
    place = Place()
    writers: list[asyncio.StreamWriter] = []
    text = await listener(place, lambda _, writer: writers.append(writer))
    assert text == no_hub(place, "it says nothing")
    for writer in writers:
        writer.transport.abort()


@run
async def test_a_listener_that_talks_another_protocol_is_no_hub() -> None:
    place = Place()
    writers: list[asyncio.StreamWriter] = []

    def banner(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")
        writers.append(writer)

    text = await listener(place, banner)
    assert text == no_hub(place, "it does not speak apptrain-join/1")
    writers[0].transport.abort()


@run
async def test_a_listener_that_closes_every_connection_is_no_hub() -> None:
    place = Place()
    tries: list[int] = []

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tries.append(1)
        writer.transport.abort()

    assert await listener(place, hang_up) == no_hub(place, "it closed the connection")
    assert len(tries) > 1


@run
async def test_a_connection_with_itself_means_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place()
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    async def from_the_same_port(sock: socket.socket, where: Any) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        await connect(sock, where)

    monkeypatch.setattr(loop, "sock_connect", from_the_same_port)
    (text,) = await place.refusals(who(1), timeouts=replace(SHORT, join=0.4))
    assert text.startswith(f"Unavailable: node 0 (n0) at {place.endpoint} has not started yet within 0.4 s")


@run
async def test_a_hub_that_starts_where_another_one_is_just_ending_is_found() -> None:
    place = Place()
    server = await asyncio.start_server(lambda _, writer: writer.transport.abort(), place.address, place.port)
    spoke = asyncio.create_task(place.meet(who(1)))
    await asyncio.sleep(0.3)
    server.close()
    links = [await place.meet(who(0)), await spoke]
    await close(*links)


@run
async def test_a_hub_with_another_key_is_refused_by_the_spoke() -> None:
    place = Place()
    async with place.hub():
        (text,) = await place.refusals(who(1), key=b"other")
    assert text == (
        f"Unavailable: the hub at {place.endpoint} does not hold the join key of node 1 (n1): it is another "
        f"run's, or the key file is not the same on both nodes: {PORT_ADVICE}"
    )
    assert place.said == [f"refused a stranger from 127.0.0.1 on {place.endpoint}: {NOT_VERIFIED}"]


@run
async def test_a_false_hub_that_says_welcome_without_the_key_is_refused() -> None:
    place = Place()

    async def false_hub(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = await greet(reader, writer, b"guess", hub=True)
        wire.send({"type": "welcome"})
        wire.send({"type": "go"})

    assert "does not hold the join key of node 1 (n1)" in await listener(place, false_hub)


@run
async def test_a_false_hub_that_sends_a_hello_back_is_refused() -> None:
    place = Place()

    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PROTOCOL + b"n" * 32)
        await reader.readexactly(len(PROTOCOL) + 32)
        writer.write(await reader.read(MAX_BODY))

    assert "does not hold the join key of node 1 (n1)" in await listener(place, mirror)


# Strangers at the hub.

STRANGERS = {
    "an http request": (b"GET / HTTP/1.1\r\nHost: n0\r\n\r\n", "it does not speak apptrain-join/1"),
    "garbage": (bytes(range(256)), "it does not speak apptrain-join/1"),
    "silence": (b"", "it did not prove who it is in 0.4 s"),
    "half a greeting": (PROTOCOL[:5], "it did not prove who it is in 0.4 s"),
    "a frame too large": (
        PROTOCOL + b"n" * 32 + (8193).to_bytes(4, "big") + b"x" * 1000,
        "it sent a frame of 8193 bytes, at most 8192 are allowed",
    ),
    "a frame without a proof": (
        PROTOCOL + b"n" * 32 + (2).to_bytes(4, "big") + b"m" * 32 + b"{}",
        "it sent a frame that the join key does not verify",
    ),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@run
async def test_a_stranger_is_refused_and_the_wait_goes_on(stranger: str) -> None:
    sent, why = STRANGERS[stranger]
    place = Place()
    async with place.hub() as hub:
        reader, writer = await place.connect()
        writer.write(sent)
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
        assert place.said == [f"refused a stranger from 127.0.0.1 on {place.endpoint}: {why}"]
        writer.transport.abort()
        await close(await place.meet(who(1)), await hub)


@run
async def test_a_stranger_that_sends_a_byte_at_a_time_is_cut_off() -> None:
    place = Place()
    async with place.hub():
        reader, writer = await place.connect()
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in PROTOCOL * 10:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)
                if reader.at_eof() or reader.exception():
                    break
        assert time.monotonic() - began < 4
        writer.transport.abort()
        assert place.said == [
            f"refused a stranger from 127.0.0.1 on {place.endpoint}: it did not prove who it is in 0.4 s"
        ]


@run
async def test_strangers_that_hold_every_place_do_not_keep_a_participant_out() -> None:
    place = Place()
    async with place.hub(timeouts=replace(SHORT, handshake=15)) as hub:
        connections = [await place.connect() for _ in range(door.STRANGERS + 10)]
        oldest, _ = connections[0]
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                await oldest.read()  # ends as the hub gives it up
            links = [await place.meet(who(1)), await hub]
        await close(*links)
        for _, writer in connections:
            writer.transport.abort()
    assert place.said == [
        f"refused a stranger from 127.0.0.1 on {place.endpoint}: too many connections that prove nothing"
    ]


@run
async def test_strangers_are_reported_once_an_address_and_only_so_many() -> None:
    place = Place("127.0.0.1")
    async with place.hub():
        for number in [1, 1, *range(2, 30)]:
            reader, writer = await asyncio.open_connection(
                place.address, place.port, local_addr=(f"127.0.0.{number}", 0)
            )
            writer.write(b"x" * 100)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.transport.abort()
    assert [text.split()[4] for text in place.said[:-1]] == [f"127.0.0.{number}" for number in range(1, 17)]
    assert place.said[-1] == "further strangers are refused without a word"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"type": "go"}, "it did not say who it is"),
        ({"type": "hello", "identity": {}, "left": 1.0}, "it sent no Identity"),
        (hello(who(1)) | {"left": "x"}, "it did not say who it is"),
        (
            {**hello(who(1)), "identity": {**hello(who(1))["identity"], "nnodes": "2"}},
            "it sent a wrong nnodes",
        ),
        (
            {**hello(who(1)), "identity": {**hello(who(1))["identity"], "versions": {"torch": 2}}},
            "it sent a wrong versions",
        ),
    ],
)
@run
async def test_a_hello_of_another_shape_is_a_stranger(message: dict[str, Any], why: str) -> None:
    place = Place()
    async with place.hub() as hub:
        wire, _ = await place.spoke()
        wire.send(message)
        await until(lambda: bool(place.said))
        assert place.said == [f"refused a stranger from 127.0.0.1 on {place.endpoint}: {why}"]
        await close(await place.meet(who(1)), await hub)


@pytest.mark.parametrize("changes", [{"job_id": "8"}, {"attempt": 1}])
@run
async def test_a_participant_of_another_run_is_sent_away_and_the_wait_goes_on(
    changes: dict[str, Any],
) -> None:
    place = Place()
    other = who(1, **changes)
    async with place.hub() as hub:
        found = await place.refusals(other)
        assert found == [
            f"Unavailable: the hub at {place.endpoint} is of job 7, attempt 0, and node 1 (n1) is of job "
            f"{other.job_id}, attempt {other.attempt}: {PORT_ADVICE}"
        ]
        assert place.said == [
            f"refused a stranger from 127.0.0.1 on {place.endpoint}: it is of job {other.job_id}, attempt "
            f"{other.attempt}"
        ]
        await close(await place.meet(who(1)), await hub)


@run
async def test_a_recorded_join_cannot_be_played_again() -> None:
    place = Place()
    async with place.hub(who(0, nnodes=3)):
        wire, writer = await place.spoke()
        frame = unsent(wire, writer, hello(who(1, nnodes=3)))
        writer.write(frame)
        assert await wire.receive() == {"type": "welcome"}
        wire.abort()
        await until(lambda: len(place.said) == 1)
        reader, again = await place.connect()
        again.write(PROTOCOL + b"n" * 32 + frame)
        await until(lambda: len(place.said) == 2)
        assert place.said[1] == f"refused a stranger from 127.0.0.1 on {place.endpoint}: {NOT_VERIFIED}"
        again.transport.abort()
        assert len(await reader.read(1000)) > 0


# Disagreement and duplicates.


def no_agreement(what: str) -> str:
    return (
        f"BadInput: the nodes do not agree: {what}: start every node with the same options, profile and image"
    )


DISAGREEMENTS: list[tuple[dict[str, Any], str]] = [
    ({"nnodes": 3}, "nnodes is 2 on node 0 (n0) and 3 on node 1 (n1)"),
    ({"nproc_per_node": 8}, "nproc_per_node is 4 on node 0 (n0) and 8 on node 1 (n1)"),
    ({"mode": "exec"}, "mode is torchrun on node 0 (n0) and exec on node 1 (n1)"),
    (
        {"mode": "rank", "local_rank": 0},
        "mode is torchrun on node 0 (n0) and rank on node 1 (n1, local rank 0)",
    ),
    ({"device": "cuda"}, "device is cpu on node 0 (n0) and cuda on node 1 (n1)"),
    ({"image_id": "090607d9"}, "image_id is 7be444fb on node 0 (n0) and 090607d9 on node 1 (n1)"),
    ({"image_id": ""}, "image_id is 7be444fb on node 0 (n0) and unknown on node 1 (n1)"),
    ({"lock_digest": "8a02"}, "lock_digest is 5e1f on node 0 (n0) and 8a02 on node 1 (n1)"),
    (
        {"versions": {"torch": "2.13.0", "numpy": "2"}},
        "version of numpy is unknown on node 0 (n0) and 2 on node 1 (n1); "
        "version of torch is 2.15.0 on node 0 (n0) and 2.13.0 on node 1 (n1)",
    ),
]


@pytest.mark.parametrize(
    ("changes", "what"), DISAGREEMENTS, ids=[next(iter(item[0])) for item in DISAGREEMENTS]
)
@pytest.mark.parametrize("key", [KEY, None], ids=["key", "identity alone"])
@run
async def test_a_disagreement_ends_the_join_for_everyone(
    changes: dict[str, Any], what: str, key: bytes | None
) -> None:
    place = Place()
    found = await place.refusals(who(0), who(1, **changes), key=key)
    assert found == [no_agreement(what)] * 2


@run
async def test_who_has_joined_already_hears_of_a_disagreement() -> None:
    place = Place()
    first = asyncio.create_task(place.refusals(who(0, nnodes=3), who(1, nnodes=3)))
    await asyncio.sleep(0.3)
    last = await place.refusals(who(2, nnodes=3, device="cuda"))
    expected = no_agreement("device is cpu on node 0 (n0) and cuda on node 2 (n2)")
    assert await first + last == [expected] * 3


def test_more_than_five_differences_are_counted() -> None:
    versions = {f"package{number}": "1" for number in range(9)}
    text = disagreement(who(0), who(1, versions=versions))
    assert text.count(" is unknown on node 0 (n0) and 1 on node 1 (n1)") == 5
    assert "; and 5 more: start" in text


def test_what_a_peer_claims_cannot_write_to_the_terminal() -> None:
    raw = hello(who(1, device="cu\x1b[2Jda\nroot"))["identity"]
    assert disagreement(who(0), load(Identity, raw)).startswith(
        "the nodes do not agree: device is cpu on node 0 (n0) and cu?[2Jda root on node 1 (n1): "
    )


@pytest.mark.parametrize("node_rank", [2, -1])
@run
async def test_a_node_rank_out_of_range_ends_the_join_for_everyone(node_rank: int) -> None:
    place = Place()
    found = await place.refusals(who(0), who(node_rank))
    assert (
        found
        == [
            f"BadInput: a participant from 127.0.0.1 says it is node {node_rank} (n{node_rank}), "
            f"outside the 2 nodes with 1 tasks each that node 0 (n0) knows: {LIST_ADVICE}"
        ]
        * 2
    )


@run
async def test_a_local_rank_out_of_range_ends_the_join_for_everyone() -> None:
    place = Place()
    mode = {"mode": "rank", "nproc_per_node": 2}
    found = await place.refusals(who(0, local_rank=0, **mode), who(1, local_rank=2, **mode))
    assert (
        found
        == [
            "BadInput: a participant from 127.0.0.1 says it is node 1 (n1, local rank 2), "
            f"outside the 2 nodes with 2 tasks each that node 0 (n0, local rank 0) knows: {LIST_ADVICE}"
        ]
        * 2
    )


@run
async def test_another_name_than_the_listed_one_ends_the_join_for_everyone() -> None:
    place = Place()
    found = await place.refusals(who(0), who(1, name="m9"))
    assert (
        found
        == [
            "BadInput: the nodes do not agree: node 1 is n1 in the list of node 0 (n0) and calls "
            "itself m9 at 127.0.0.1: start every node with the same list of nodes"
        ]
        * 2
    )


@run
async def test_two_participants_in_one_place_end_the_join_for_everyone() -> None:
    place = Place()
    first = asyncio.create_task(place.refusals(who(0, nnodes=3), who(1, nnodes=3)))
    await asyncio.sleep(0.3)
    second = await place.refusals(who(1, nnodes=3, name="n2"))
    assert (
        await first + second
        == [
            "BadInput: two participants claim one place: node 1 (n1) at 127.0.0.1 and node 1 (n2) at "
            "127.0.0.1: start each once, with its own --node-rank"
        ]
        * 3
    )


@run
async def test_a_second_node_0_ends_the_join_for_everyone() -> None:
    place = Place()
    async with place.hub() as hub:
        wire, _ = await place.spoke()
        wire.send(hello(who(0)))
        text = (
            f"two participants claim one place: node 0 (n0) at {place.endpoint} and node 0 (n0) at "
            "127.0.0.1: start each once, with its own --node-rank"
        )
        assert await wire.receive() == {"type": "end", "status": 64, "text": text}
        wire.abort()
        with pytest.raises(BadInput) as caught:
            await hub
    assert str(caught.value) == text


# In touch.


async def three(place: Place, **changes: Any) -> list[Link]:
    return await place.all(*(who(node, nnodes=3) for node in range(3)), **changes)


@pytest.mark.parametrize("node", [0, 1])
@run
async def test_a_planned_end_reaches_everyone_once(node: int) -> None:
    links = await three(Place())
    links[node].stop(12.5)
    links[node].stop(None)
    assert await events(*links) == [Stopped(left=12.5)] * 3
    for link in links:
        link.done()
    assert await events(*links) == [AllDone()] * 3
    await close(*links)


@pytest.mark.parametrize("node", [0, 1])
@run
async def test_a_failure_reaches_everyone(node: int) -> None:
    links = await three(Place())
    links[node].fail(failure(node, 5.0))
    async with asyncio.timeout(2):
        assert await events(*links) == [Failed(failure(node, 5.0))] * 3
    assert await events(*links) == [Failed(failure(node, 5.0))] * 3
    await close(*links)


@run
async def test_the_earliest_failure_wins_whoever_reports_first() -> None:
    links = await three(Place())
    links[0].fail(failure(0, 7.0))
    links[2].fail(failure(2, 6.0))
    await asyncio.sleep(0.05)
    links[1].fail(failure(1, 5.0, signal=9, rank=None))
    assert await events(*links) == [Failed(failure(1, 5.0, signal=9, rank=None))] * 3
    await close(*links)


@pytest.mark.parametrize(
    "late",
    [
        {"type": "tried"},
        {"type": "moved", "address": "127.0.0.9", "contact": "lo 127.0.0.9 9 token", "why": ""},
    ],
    ids=["tried", "moved"],
)
@run
async def test_an_answer_that_comes_when_the_meeting_is_over_changes_nothing(late: dict[str, Any]) -> None:
    links = await three(Place())
    for link in links:
        link._report(late)
        link.done()
    assert await events(*links) == [AllDone()] * 3
    await close(*links)


@pytest.mark.parametrize("apart", [-3600.0, 3600.0, 0.5])
@run
async def test_of_failures_on_nodes_whose_clocks_disagree_the_first_to_come_is_told(apart: float) -> None:
    links = await three(Place())
    links[1]._peers[0, None].send({"type": "beat", "time": time.time() + apart})
    now = time.time()
    links[2].fail(failure(2, now))
    await asyncio.sleep(0.02)
    late = now + 0.02
    links[1].fail(failure(1, late + apart, error="KeyError: 'followed'"))
    assert await events(*links) == [Failed(failure(2, now))] * 3
    await close(*links)


@run
async def test_of_failures_alike_the_first_that_says_why_is_told() -> None:
    links = await three(Place())
    links[0].fail(failure(0, 7.0, status=64, error="train: unknown key"))
    links[1].fail(failure(1, 5.0, status=64, error=""))
    links[2].fail(failure(2, 6.0, status=1, error="another reason"))
    assert await events(*links) == [Failed(failure(0, 7.0, status=64, error="train: unknown key"))] * 3
    await close(*links)


def left(rank: int, **changes: Any) -> End:
    """A rank that has ended well."""
    node = rank // 2
    end = End(rank=rank, node_rank=node, node=f"n{node}", status=0, time=4.0, step=8)
    return replace(end, **changes)


RESET = "RuntimeError: [pair.cc:545] Connection reset by peer"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@run
async def test_a_rank_that_ended_well_while_others_needed_it_is_to_blame(late: bool) -> None:
    links = await three(Place(), timeouts=replace(SHORT, settle_echo=0.3))
    fails = replace(failure(0, 5.0, rank=0, status=1, error=RESET), at="in backward (train.py:31)")
    if late:
        links[0].fail(fails)
        await asyncio.sleep(0.05)
    links[1].ended(left(3))
    links[2].ended(left(5, time=3.9, step=7))
    links[0].fail(fails)
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
    links[1].fail(failure(1, 5.0, error="a\nb\x1b" + "x" * 200_000))
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
        links[rank].ended(left(rank, alone=one))
    for link in links:
        link.done()
    assert await events(*links) == [AllDone(said)] * 3
    await close(*links)


@run
async def test_a_failure_after_the_own_end_reaches_who_is_done() -> None:
    links = await three(Place())
    links[0].done()
    links[1].done()
    links[2].fail(failure(2, 5.0))
    assert await events(*links) == [Failed(failure(2, 5.0))] * 3
    await close(*links)


@pytest.mark.parametrize("node", [0, 1])
@run
async def test_a_hang_that_anyone_notices_is_looked_into_by_everyone_and_the_stuck_rank_named(
    node: int,
) -> None:
    links = await three(Place())
    links[node].stalled("no step for 30 s")
    links[2].stalled("no step for 30 s")
    assert await events(*links) == [Look("no step for 30 s")] * 3
    links[2].fail(failure(2, time.time()))  # A rank whose neighbours were ended to print their stacks.
    links[0].seen([sighting(0), sighting(1)])
    links[1].seen([sighting(4, state="T"), sighting(5)])
    found = await events(*links)
    assert found == [found[0]] * 3
    assert (found[0].failure.rank, found[0].failure.node, found[0].failure.status) == (4, "n1", 124)
    await close(*links)


@pytest.mark.parametrize("letter", ["x", "训", "\N{GRINNING FACE}"])
@run
async def test_sightings_of_more_ranks_than_a_frame_holds_arrive(letter: str) -> None:
    links = await three(Place())
    links[0].stalled("no step for 30 s")
    await events(*links)
    links[0].seen([])
    links[1].seen([sighting(rank, at=letter * 200, node="n1") for rank in range(400)])
    links[2].seen([sighting(400, state="T")])
    found = await events(*links)
    assert found[1].failure.rank == 400
    assert "400 of 401 ranks wait" in found[1].failure.error
    await close(*links)


@run
async def test_a_node_that_does_not_say_where_its_ranks_are_is_named_in_the_verdict() -> None:
    links = await three(Place(), timeouts=replace(SHORT, look=0.3))
    links[1].stalled("no step for 30 s")
    await events(*links)
    links[0].seen([sighting(0)])
    links[1].seen([sighting(4, quiet=31.0)])
    found = await events(*links)
    assert found[2].failure.rank == 4
    assert found[2].failure.error.endswith("; nothing was heard from n2")
    await close(*links)


@run
async def test_a_hang_without_any_rank_is_a_failure_all_the_same() -> None:
    links = await three(Place())
    links[1].stalled("no step for 30 s")
    await events(*links)
    for link in links:
        link.seen([])
    found = await events(*links)
    assert {event.failure.error for event in found} == {"lost: no step for 30 s, and no rank was found"}
    await close(*links)


@run
async def test_a_failure_before_a_hang_is_the_failure() -> None:
    links = await three(Place())
    links[1].fail(failure(1, 5.0))
    links[2].fail(failure(2, 6.0))
    links[0].stalled("no step for 30 s")
    found = await events(*links)
    while isinstance(found[0], Look):
        found = await events(*links)
    assert found == [Failed(failure(1, 5.0, same=1))] * 3
    await close(*links)


async def peeked(links: list[Link], sightings: list[list[Sighting]]) -> None:
    """Everyone is asked, and answers."""
    assert await events(*links) == [Peek()] * 3
    for link, found in zip(links, sightings, strict=True):
        link.peeked(found)


@pytest.mark.parametrize("node", [0, 2])
@run
async def test_a_pause_that_anyone_reports_has_everyone_looked_at_and_a_deadlock_ends_it(node: int) -> None:
    place = Place()
    changed = {"nnodes": 3, "nproc_per_node": 1}
    links = await place.all(*(who(one, **changed) for one in range(3)), timeouts=replace(SHORT, again=0.2))
    busy = [[sighting(0)], [sighting(1, waits_in="", stack="77aa", at="data.py:3 read")], [sighting(2)]]
    links[node].paused("no step for 30 s")
    await peeked(links, busy)
    await until(lambda: any("data.py:3 read" in line for line in place.said))
    for _ in range(2):
        await peeked(links, [[sighting(rank)] for rank in range(3)])
    verdicts = await events(*links)
    assert verdicts == verdicts[:1] * 3
    assert isinstance(verdicts[0], Failed)
    assert verdicts[0].failure.status == 124
    await close(*links)


@run
async def test_a_pause_that_is_over_is_looked_at_no_more() -> None:
    links = await Place().all(who(0), who(1), timeouts=replace(SHORT, again=0.05))
    links[1].paused("no step for 30 s")
    assert await events(*links) == [Peek()] * 2
    for link in links:
        link.peeked([])
    links[1].paused(None)
    links[1].stop(None)
    assert await events(*links) == [Stopped()] * 2
    for link in links:
        link.done()
    assert await events(*links) == [AllDone()] * 2
    await close(*links)


QUIET = "no rank has written anything for 30 s (--silence-timeout)"


@run
async def test_silence_counts_when_everyone_is_silent() -> None:
    links = await three(Place())
    links[0].silent(QUIET)
    links[1].silent(QUIET)
    links[0].silent("")
    links[2].silent(QUIET)
    await asyncio.sleep(0.1)
    links[0].silent(QUIET)
    assert await events(*links) == [Look(QUIET)] * 3
    for link in links:
        link.fail(failure(0, 1.0, rank=None))
    await events(*links)
    await close(*links)


@run
async def test_silence_that_is_taken_back_does_not_count_nor_do_those_that_are_done() -> None:
    links = await three(Place())
    links[2].done()
    await links[2].close()
    links[0].silent("too early")
    links[0].silent("")
    links[1].silent("too early")
    links[1].stop(None)
    assert await events(*links[:2]) == [Stopped(left=None)] * 2
    links[0].silent(QUIET)
    assert await events(*links[:2]) == [Look(QUIET)] * 2
    links[0].fail(failure(0, 1.0, rank=None))
    await events(*links[:2])
    await close(*links[:2])


@run
async def test_leaving_after_done_is_no_loss() -> None:
    links = await three(Place())
    links[1].done()
    await links[1].close()
    await asyncio.sleep(0.5)
    links[0].done()
    links[2].done()
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
    links = await three(Place())
    links[1]._peers[0, None].abort()
    async with asyncio.timeout(2):
        found = await events(links[0], links[2])
    assert {event.failure.error for event in found} == {"lost: it closed the connection"}
    assert {event.failure.node_rank for event in found} == {1}
    await close(*links)


@run
async def test_a_silent_spoke_is_lost_within_its_bound_and_told_so() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=0.6))
    mute(links[1]._peers[0, None])
    silent = time.time()
    async with asyncio.timeout(3):
        found = await events(*links)
    assert {event.failure.error for event in found} == {"lost: nothing was heard from it for 0.6 s"}
    assert {event.failure.node_rank for event in found} == {1}
    assert abs(found[0].failure.time - silent) < 0.5
    await close(*links)


@run
async def test_heartbeats_keep_a_quiet_run_together() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=0.6))
    await asyncio.sleep(1.5)
    for link in links:
        link.done()
    assert await events(*links) == [AllDone()] * 3
    await close(*links)


@run
async def test_a_suspension_of_this_process_is_not_the_others_silence() -> None:
    links = await three(Place(), timeouts=replace(SHORT, peer=0.6))
    time.sleep(1.0)
    await asyncio.sleep(0.3)
    for link in links:
        link.done()
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
    async with asyncio.timeout(3):
        found = await events(links[1], links[2])
    assert {event.failure.error for event in found} == {"lost: nothing was heard from it for 0.6 s"}
    await close(*links)


@run
async def test_the_own_failure_counts_where_the_hub_is_lost_before_its_verdict() -> None:
    links = await three(Place())
    mute(*links[0]._peers.values())
    links[1].fail(failure(1, 5.0))
    for peer in links[0]._peers.values():
        peer.abort()
    assert await events(links[1]) == [Failed(failure(1, 5.0), lost=(0,))]
    await close(*links)


@run
async def test_a_hub_that_leaves_right_after_its_failure_tells_it_first() -> None:
    links = await three(Place())
    links[0].fail(failure(0, 5.0))
    await links[0].close()
    assert await events(links[1], links[2]) == [Failed(failure(0, 5.0))] * 2
    await close(*links)


@run
async def test_a_hub_may_leave_at_once_after_the_last_event_while_spokes_end_their_ranks() -> None:
    links = await three(Place())
    links[1].fail(failure(1, 5.0))
    await events(links[0])
    async with asyncio.timeout(0.8 * wire_module.LINGER):
        await links[0].close()
    assert await events(links[1], links[2]) == [Failed(failure(1, 5.0))] * 2
    await close(*links)


@run
async def test_a_spoke_that_leaves_right_after_its_failure_is_not_lost() -> None:
    links = await three(Place())
    links[1].fail(failure(1, time.time() + 100))
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
        link.done()
    assert await events(*links) == [AllDone()] * 2
    await close(*links)


@run
async def test_the_port_can_be_bound_again_right_after_the_end() -> None:
    place = Place()
    await close(*await place.all(who(0), who(1)))
    await close(*await place.all(who(0), who(1)))


async def lost_by(send: Callable[[Wire, asyncio.StreamWriter], None]) -> str:
    """Why the hub gives up a spoke that sends this after go."""
    place = Place()
    task = asyncio.create_task(place.meet(who(0)))
    await until(place.listens)
    wire, writer = await place.spoke()
    wire.send(hello(who(1)))
    link = await task
    send(wire, writer)
    (event,) = await events(link)
    wire.abort()
    await link.close()
    return str(event.failure.error)


@run
async def test_a_replayed_frame_is_refused() -> None:
    def replay(wire: Wire, writer: asyncio.StreamWriter) -> None:
        frame = unsent(wire, writer, {"type": "beat", "time": 1.0})
        writer.write(frame + frame)

    assert await lost_by(replay) == "lost: it sent a frame that the join key does not verify"


@run
async def test_a_left_out_frame_is_noticed() -> None:
    def skip(wire: Wire, writer: asyncio.StreamWriter) -> None:
        unsent(wire, writer, {"type": "beat", "time": 1.0})
        wire.send({"type": "done"})

    assert await lost_by(skip) == "lost: it sent a frame that the join key does not verify"


@run
async def test_a_tampered_frame_is_refused() -> None:
    def tamper(wire: Wire, writer: asyncio.StreamWriter) -> None:
        writer.write(unsent(wire, writer, {"type": "beat", "time": 1.0}).replace(b"beat", b"done"))

    assert await lost_by(tamper) == "lost: it sent a frame that the join key does not verify"


@pytest.mark.parametrize(
    "message", [{"type": "go"}, {}, {"type": "fail", "failure": {"status": 1}}], ids=["go", "empty", "fail"]
)
@run
async def test_a_message_without_a_meaning_ends_a_connection(message: dict[str, Any]) -> None:
    expected = (
        "lost: it sent no Failure"
        if "failure" in message
        else ("lost: it sent a message that has no meaning here")
    )
    assert await lost_by(lambda wire, _: wire.send(message)) == expected


@pytest.mark.parametrize(
    "message", [{"type": "go", "members": "1"}, {"type": "stop"}, {}], ids=["go", "stop", "empty"]
)
@run
async def test_a_hub_that_sends_a_message_without_a_meaning_is_lost(message: dict[str, Any]) -> None:
    links = await Place().all(who(0), who(1))
    for peer in links[0]._peers.values():
        peer.send(message)
    (event,) = await events(links[1])
    assert (event.failure.node_rank, event.failure.error) == (
        0,
        "lost: it sent a message that has no meaning here",
    )
    await close(*links)


@run
async def test_a_frame_that_nests_too_deep_ends_a_connection() -> None:
    def nest(wire: Wire, _: asyncio.StreamWriter) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json, "dumps", lambda *_, **__: "[" * 60_000)
            wire.send({})

    assert await lost_by(nest) == "lost: it sent a frame that holds no JSON object"


@run
async def test_what_the_hub_says_cannot_be_sent_back_to_it() -> None:
    place = Place()
    task = asyncio.create_task(place.meet(who(0)))
    await until(place.listens)
    reader, writer = await place.connect()
    wire = await greet(reader, writer, KEY, hub=False)
    wire.send(hello(who(1)))
    link = await task
    writer.write(await reader.read(MAX_BODY))
    (event,) = await events(link)
    assert event.failure.error == "lost: it sent a frame that the join key does not verify"
    wire.abort()
    await link.close()


@run
async def test_closing_waits_until_the_peer_has_read_everything() -> None:
    place = Place()
    ended = asyncio.Event()

    async def send_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = await greet(reader, writer, KEY, hub=True)
        for number in range(200):
            wire.send({"number": number, "text": "x" * (60_000 if number else 0)})
        await wire.close()
        ended.set()

    server = await asyncio.start_server(send_and_close, place.address, place.port)
    wire, _ = await place.spoke()
    await asyncio.sleep(0.2)
    assert [(await wire.receive())["number"] for _ in range(200)] == list(range(200))
    wire.abort()
    await ended.wait()
    server.close()


@run
async def test_closing_does_not_wait_for_ever_for_a_peer_that_stays() -> None:
    place = Place()
    writers: list[asyncio.StreamWriter] = []

    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer, KEY, hub=True)
        writers.append(writer)

    server = await asyncio.start_server(stay, place.address, place.port)
    wire, _ = await place.spoke()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_module, "LINGER", 0.2)
        async with asyncio.timeout(5):
            await wire.close()
    writers[0].transport.abort()
    server.close()


@run
async def test_a_frame_larger_than_the_bound_is_not_sent() -> None:
    place = Place()
    async with place.hub():
        wire, _ = await place.spoke()
        with pytest.raises(ValueError, match=r"a frame of 8211 bytes, at most 8192 are allowed"):
            wire.send({"text": "x" * 8200})
        wire.send(hello(who(1)))
        with pytest.raises(ValueError, match=r"a frame of 70011 bytes, at most 65536 are allowed"):
            wire.send({"text": "x" * 70_000})
        wire.abort()


@pytest.mark.parametrize("nodes", [range(16_384), range(0, 16_384, 2), range(16_383, 16_384)])
@run
async def test_which_of_16384_nodes_take_part_fits_into_a_frame(nodes: range) -> None:
    place = Place()
    got: list[dict[str, Any]] = []

    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = await greet(reader, writer, KEY, hub=True)
        wire.send({"type": "welcome"})
        wire.send({"type": "go", "members": pack(nodes)})
        await wire.close()

    server = await asyncio.start_server(tell, place.address, place.port)
    wire, _ = await place.spoke()
    got = [await wire.receive(), await wire.receive()]
    await wire.close()
    server.close()
    assert unpack(got[1]["members"], 16_384) == tuple(nodes)
    assert len(got[1]["members"]) <= 4096


@pytest.mark.parametrize("text", ["", "10", "g", " 1", "0x1", "1_0", "-1", "f" * 5000])
def test_nodes_that_there_are_not_are_refused(text: str) -> None:
    assert unpack("b", 4) == (0, 1, 3)
    assert unpack("0", 4) == ()
    with pytest.raises(WireError, match="it sent nodes that are none"):
        unpack(text, 4)


@run
async def test_a_wire_without_the_key_reads_nothing() -> None:
    place = Place()
    async with place.hub():
        wire, _ = await place.spoke(b"other")
        wire.send(hello(who(1)))
        with pytest.raises(WrongKey):
            await wire.receive()
        wire.abort()


def limited(monkeypatch: pytest.MonkeyPatch, hard: int) -> list[int]:
    """A process with ten open files and this hard limit; to what its soft limit was raised."""
    raised: list[int] = []
    monkeypatch.setattr(processes, "open_files", lambda: 10)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits[0]))
    return raised


@pytest.mark.parametrize(
    ("hard", "soft", "said"),
    [
        (4096, 10 + 256 + 3 * 600 + 2 * 256, []),
        (
            1024,
            1024,
            [
                "node 0 may have 1024 open files (ulimit -Hn): it listens to 79 at once that have not proved who they "
                "are, instead of 856"
            ],
        ),
    ],
)
@run
async def test_where_open_files_are_few_the_hub_hears_fewer_strangers_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, hard: int, soft: int, said: list[str]
) -> None:
    raised = limited(monkeypatch, hard)
    place = Place()
    async with place.hub(who(0, nnodes=600)):
        pass
    assert (raised, place.said) == ([soft], said)


@run
async def test_more_participants_than_files_may_be_open_are_bad_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited(monkeypatch, 900)
    place = Place()
    assert await place.refusals(who(0, nnodes=600)) == [
        "BadInput: node 0 needs 930 open files to meet all others and may have 900 (ulimit -Hn): have the hard limit "
        "raised on the nodes"
    ]


# A meeting that goes on without nodes that do not come.


class Field:
    """Nodes with addresses of their own and one port, and what was sealed and said there."""

    def __init__(self, nnodes: int, **muster: Any) -> None:
        self.nnodes, self.port = nnodes, free_port()
        self.said: list[str] = []
        self.sealed: list[list[int]] = []
        self.given: dict[str, Any] = {"absent": (), "least": 1, "most": nnodes} | muster

    async def address(self, node: int) -> str:
        return f"127.0.0.{1 + node}"

    def seal(self, members: Sequence[int]) -> None:
        if self.sealed:
            raise Unavailable("others were first")
        self.sealed.append(list(members))

    async def meet(self, node: int, *, timeouts: Timeouts = SHORT, **muster: Any) -> Link:
        given: dict[str, Any] = {"address": self.address, "seal": self.seal} | self.given | muster
        candidates = [other for other in range(node + 1) if other not in given["absent"]]
        return await meet(
            who(node, nnodes=self.nnodes, attempt=1),
            nodes=names(self.nnodes),
            address="",
            port=self.port,
            key=KEY,
            say=self.said.append,
            timeouts=timeouts,
            muster=Muster(**({"candidates": candidates} | given)),
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
        links = await field.all(0, 1, 3, timeouts=Timeouts())
    assert crews(links) == {(0, 1, 3)}
    await close(*links)


@run
async def test_the_next_listed_node_takes_over_when_the_first_is_lost() -> None:
    field = Field(4, absent=(0,))
    links = await field.all(3, 2, 1)
    assert (crews(links), links[0].hub) == ({(1, 2, 3)}, 1)
    links[2].fail(failure(1, 5.0))
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
    links[1].fail(failure(1, 5.0))
    assert await events(*links[:3]) == [Failed(failure(1, 5.0), lost=(3,))] * 3
    await close(*links)


@run
async def test_a_job_is_done_when_those_that_take_part_are() -> None:
    field = Field(3, most=2)
    links = await field.all(0, 1, 2)
    links[1].done()
    links[0].done()
    assert await events(*links) == [AllDone()] * 3
    await close(*links)


@run
async def test_a_hang_is_looked_into_without_the_spares() -> None:
    field = Field(3, most=2)
    links = await field.all(0, 1, 2)
    links[1].stalled("no step for 30 s")
    await events(*links)
    links[0].seen([sighting(0)])
    links[1].seen([sighting(4, state="T")])
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
    vars(vars(links[0])["_judge"])["_gone"] |= set(gone)
    links[1].fail(failure(16_383, 5.0))
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
        links = await field.all(*nodes, timeouts=Timeouts())
    assert crews(links) == {tuple(nodes)}
    await close(*links)
