"""The frames: replayed, left out, changed, too large; and how a connection is closed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from entrypoint.meet import wire as wire_module
from entrypoint.meet.wire import MAX_BODY, Wire, WrongKey, greet
from tests.unit.meet.meeting import KEY, Place, close, events, hello, run, unsent, until, who


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
    "message", [{"type": "go", "absent": "2"}, {"type": "stop"}, {}], ids=["go", "stop", "empty"]
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
        wire.send(b"[" * 60_000)

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


@run
async def test_a_wire_without_the_key_reads_nothing() -> None:
    place = Place()
    async with place.hub():
        wire, _ = await place.spoke(b"other")
        wire.send(hello(who(1)))
        with pytest.raises(WrongKey):
            await wire.receive()
        wire.abort()
