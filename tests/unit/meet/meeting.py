"""Meetings in one process, for the tests: participants, their place, what they hear."""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint.meet.identity import Identity
from entrypoint.meet.join import meet
from entrypoint.meet.link import Link
from entrypoint.meet.messages import Peeked, Seen
from entrypoint.meet.reports import End, Failure, RankSnapshot
from entrypoint.meet.terms import LocalNode, Timeouts
from entrypoint.meet.wire import Wire, WireError, greet
from tests.ports import free_port

KEY = b"k" * 32
PORT_ADVICE = "give another --master-port"
NOT_VERIFIED = "it sent a frame that the join key does not verify"
SHORT = Timeouts(join=10, peer=5, connect=10, handshake=10, remind=60, poll=0.05, collect=0.15)
"""`connect` and `handshake` are long enough for a busy machine: who waits for their end shortens them."""


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


@functools.cache
def names(nnodes: int) -> tuple[str, ...]:
    return tuple(f"n{node}" for node in range(nnodes))


class FakeNode(LocalNode):
    """A node that takes part: its hub has this address, and what it says is kept."""

    def __init__(self, where: str, said: list[str]) -> None:
        self.where = where
        self.said = said

    def say(self, text: str) -> None:
        self.said.append(text)

    async def address(self, hub: int) -> str:
        assert hub == 0
        return self.where


class Place:
    """One address and port, and what was said there."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address, self.port = address, free_port(address)
        self.said: list[str] = []
        self.endpoint = f"[{address}]:{self.port}" if ":" in address else f"{address}:{self.port}"

    async def meet(self, me: Identity, **changes: Any) -> Link:
        arguments: dict[str, Any] = {
            "nodes": names(me.nnodes),
            "port": self.port,
            "key": KEY,
            "timeouts": SHORT,
        }
        local = FakeNode(changes.pop("address", self.address), self.said)
        for asked in ("say", "never_started", "begun", "move"):
            if asked in changes:
                setattr(local, asked, changes.pop(asked))
        return await meet(me, local=local, **(arguments | changes))

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


GUARD = 15
"""Seconds for what comes at once, on any machine."""


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


async def said_to(wire: Wire) -> dict[str, Any]:
    """The next message but for signs of life."""
    async with asyncio.timeout(GUARD):
        while (message := await wire.receive())["type"] == "beat":
            pass
    return message


async def until(condition: Callable[[], bool], bound: float = GUARD) -> None:
    async with asyncio.timeout(bound):
        while not condition():
            await asyncio.sleep(0.01)


async def events(*links: Link) -> list[Any]:
    async with asyncio.timeout(GUARD):
        return [await link.next() for link in links]


async def close(*links: Link) -> None:
    await asyncio.gather(*(link.close() for link in links))


def run(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own, with a bound, in which no task may be left over."""

    def sync(**arguments: Any) -> None:
        async def bounded() -> None:
            complaints: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            async with asyncio.timeout(60):
                await test(**arguments)
            await asyncio.sleep(0)
            assert complaints == []

        asyncio.run(bounded())

    sync.__name__, sync.__doc__ = test.__name__, test.__doc__
    sync.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    for mark in getattr(test, "pytestmark", []):
        sync = getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs)(sync)
    return sync


def sighting(rank: int, **changes: Any) -> RankSnapshot:
    waiting = RankSnapshot(
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


def seen(*sightings: RankSnapshot) -> Seen:
    return Seen(sightings, last=True)


def peeked(*sightings: RankSnapshot) -> Peeked:
    return Peeked(sightings, last=True)


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


async def listener(
    place: Place, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any], **changes: Any
) -> str:
    """How a spoke is refused that finds this listener."""
    changes.setdefault("timeouts", replace(SHORT, connect=1))
    server = await asyncio.start_server(answer, place.address, place.port)
    try:
        return (await place.refusals(who(1), **changes))[0]
    finally:
        server.close()


async def three(place: Place, **changes: Any) -> list[Link]:
    return await place.all(*(who(node, nnodes=3) for node in range(3)), **changes)


def left(rank: int, **changes: Any) -> End:
    """A rank that has ended well."""
    node = rank // 2
    end = End(rank=rank, node_rank=node, node=f"n{node}", status=0, time=4.0, step=8)
    return replace(end, **changes)
