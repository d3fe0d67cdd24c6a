"""A port that strangers reach: who is let in, and what it costs to hold the others off. Over loopback."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from entrypoint.meet import door
from entrypoint.meet.door import AuthListener, ConnectionHandler, PendingConnection
from entrypoint.meet.wire import WireError

PASSWORD = b"open sesame\n"


class Hall(ConnectionHandler):
    """A door whose guests say a password and stay."""

    def __init__(self) -> None:
        self.guests: list[PendingConnection] = []
        self.refused: list[str] = []
        self.address: tuple[str, int] = ("", 0)
        self.door: AuthListener

    async def admit(
        self, pending: PendingConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if await reader.readline() != PASSWORD:
            raise WireError("wrong password")
        pending.authenticate()
        self.guests.append(pending)
        writer.write(b"welcome\n")
        await reader.read()

    def refuse(self, address: str, why: str) -> None:  # noqa: ARG002
        self.refused.append(why)

    async def call(
        self, said: bytes = b"", source: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address, local_addr=(source, 0))
        writer.write(said)
        return reader, writer

    async def answer(self, said: bytes = PASSWORD) -> bytes:
        """The line that one who says this gets; empty where he is sent away."""
        reader, writer = await self.call(said)
        try:
            async with asyncio.timeout(5):
                return await reader.readline()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def hall(
    room: int = 20, seconds: float = 10, kind: type[socket.socket] = socket.socket
) -> AsyncIterator[Hall]:
    """An open one, in whose loop nothing may be left over that nobody looked at."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    one = Hall()
    sock = kind(fileno=door.listen(socket.AF_INET, ("127.0.0.2", 0)).detach())
    sock.setblocking(False)
    one.address = sock.getsockname()
    one.door = AuthListener([sock], one, room=room, seconds=seconds)
    try:
        yield one
    finally:
        await one.door.end()
        assert (one.door.unproved, one.door.held, complaints) == ({}, {}, [])


async def until(condition: Callable[[], bool], bound: float = 5) -> None:
    async with asyncio.timeout(bound):
        while not condition():
            await asyncio.sleep(0.01)


def test_who_belongs_is_let_in_and_has_no_bound_any_more() -> None:
    async def test() -> None:
        async with hall(seconds=2) as here:
            reader, writer = await here.call(PASSWORD)
            assert await reader.readline() == b"welcome\n"
            await asyncio.sleep(2.5)
            assert not reader.at_eof()
            assert [(guest.address, guest.came_to) for guest in here.guests] == [("127.0.0.1", "127.0.0.2")]
            writer.transport.abort()

    asyncio.run(test())


def test_who_proves_nothing_in_time_goes_and_so_does_who_says_something_wrong() -> None:
    async def test() -> None:
        async with hall(seconds=0.2) as here:
            assert [await here.answer(said) for said in (b"", b"half", b"wrong\n")] == [b""] * 3
            assert here.refused == [
                "it did not prove who it is in 0.2 s",
                "it did not prove who it is in 0.2 s",
                "wrong password",
            ]

    asyncio.run(test())


def test_strangers_that_hold_every_place_keep_nobody_out_and_stay_as_few() -> None:
    async def test() -> None:
        async with hall(room=20) as here:
            held = [await here.call() for _ in range(100)]
            assert await here.answer() == b"welcome\n"
            assert len(here.door.unproved) <= 20
            assert set(here.refused) == {"too many connections that prove nothing"}
            for _, writer in held:
                writer.transport.abort()

    asyncio.run(test())


def test_where_one_address_holds_most_its_connections_go_before_older_ones_of_others() -> None:
    async def test() -> None:
        async with hall(room=20) as here:
            slow, friend = await here.call(source="127.0.0.3")
            held = [await here.call() for _ in range(100)]
            assert await here.answer() == b"welcome\n"
            friend.write(PASSWORD)
            assert await slow.readline() == b"welcome\n"
            for _, writer in [*held, (slow, friend)]:
                writer.transport.abort()

    asyncio.run(test())


def test_what_each_address_holds_is_counted_as_they_come_prove_themselves_and_go() -> None:
    async def test() -> None:
        async with hall(room=4, seconds=60) as here:
            friend, one = await here.call(PASSWORD, source="127.0.0.3")
            assert await friend.readline() == b"welcome\n"
            assert here.door.held == {}
            held = [await here.call(source=f"127.0.0.{4 + number % 2}") for number in range(4)]
            await until(lambda: here.door.held == {"127.0.0.4": 2, "127.0.0.5": 2})
            evicted, _ = held[0]  # of two addresses that hold as many it is the oldest of all
            held.append(await here.call(source="127.0.0.6"))
            assert await evicted.read() == b""
            assert here.door.held == {"127.0.0.5": 2, "127.0.0.4": 1, "127.0.0.6": 1}
            for _, writer in [*held, (friend, one)]:
                writer.transport.abort()
            await until(lambda: not here.door.held)

    asyncio.run(test())


def test_a_crowd_of_those_who_belong_is_let_in_though_there_is_room_for_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "FAIR", 10)  # on a busy machine each of them takes its time

    async def test() -> None:
        async with hall(room=8) as here:
            assert await asyncio.gather(*(here.answer() for _ in range(200))) == [b"welcome\n"] * 200
            assert here.refused == []

    asyncio.run(test())


@pytest.mark.parametrize(
    ("error", "refused"),
    [(errno.EMFILE, ["too many connections that prove nothing"]), (errno.ECONNABORTED, [])],
    ids=["no open file is left", "another error"],
)
def test_a_stranger_gives_its_open_file_to_who_comes_if_none_is_left(error: int, refused: list[str]) -> None:
    errors: list[int] = []

    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if errors:
                raise OSError(errors.pop(), "accept")
            return super().accept()

    async def test() -> None:
        async with hall(kind=Full) as here:
            _, writer = await here.call()
            await until(lambda: len(here.door.unproved) == 1)
            errors.append(error)
            assert await here.answer() == b"welcome\n"
            assert here.refused == refused
            writer.transport.abort()

    asyncio.run(test())


def test_of_what_a_stranger_sends_little_is_read() -> None:
    async def test() -> None:
        readers: list[asyncio.StreamReader] = []

        async def hear(_: PendingConnection, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
            readers.append(reader)
            await asyncio.sleep(60)

        async with hall() as here:
            vars(here)["admit"] = hear
            _, writer = await here.call(b"x" * (1 << 22))
            await until(lambda: bool(readers) and len(vars(readers[0])["_buffer"]) > door.CHUNK)
            await asyncio.sleep(0.3)
            assert len(vars(readers[0])["_buffer"]) <= 3 * door.CHUNK
            writer.transport.abort()

    asyncio.run(test())


def test_who_is_welcome_may_send_as_much_as_he_likes() -> None:
    async def test() -> None:
        got: list[bytes] = []

        async def hear(
            pending: PendingConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            pending.authenticate()
            got.append(await reader.readexactly(1 << 20))
            writer.write(b"all\n")

        async with hall() as here:
            vars(here)["admit"] = hear
            assert await here.answer(b"y" * (1 << 20)) == b"all\n"
            assert got == [b"y" * (1 << 20)]

    asyncio.run(test())


def test_a_door_that_is_closed_keeps_those_who_belong_and_ends_with_them() -> None:
    async def test() -> None:
        async with hall() as here:
            stranger, one = await here.call()
            friend, other = await here.call(PASSWORD)
            assert await friend.readline() == b"welcome\n"
            here.door.close()
            with contextlib.suppress(ConnectionError):
                assert await stranger.read() == b""
            with pytest.raises(ConnectionRefusedError):
                await here.call()
            assert not friend.at_eof()
            await here.door.end()
            one.transport.abort()
            other.transport.abort()

    asyncio.run(asyncio.wait_for(test(), 10))


def test_a_door_may_be_closed_before_it_has_answered_anybody() -> None:
    async def test() -> None:
        async with hall() as here:
            here.door.close()
        assert here.refused == []

    asyncio.run(test())


def test_a_stranger_that_is_gone_before_it_is_heard_disturbs_nobody() -> None:
    async def test() -> None:
        async with hall() as here:
            for _ in range(50):
                with socket.create_connection(here.address) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            assert await here.answer() == b"welcome\n"

    asyncio.run(test())
