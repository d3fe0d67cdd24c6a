"""What is in the way of a spoke: taken ports, other listeners, hubs that are none."""

import asyncio
import contextlib
import errno
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from entrypoint.meet import door
from entrypoint.meet.wire import MAX_BODY, PROTOCOL, greet
from tests.unit.meet.meeting import (
    NOT_VERIFIED,
    PORT_ADVICE,
    SHORT,
    Place,
    close,
    listener,
    one_after_another,
    run,
    until,
    who,
)


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


def test_a_name_that_a_resolver_holds_keeps_nobody_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    began, release, ended = threading.Event(), threading.Event(), threading.Event()
    look_up = socket.getaddrinfo

    def hang(*args: Any, **options: Any) -> Any:
        if not options.get("flags"):
            began.set()
            release.wait(20)
            ended.set()
        return look_up(*args, **options)

    async def leave() -> None:
        joining = asyncio.create_task(Place().meet(who(1), address="no such name"))
        await until(began.is_set)
        joining.cancel()
        await asyncio.wait([joining])

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    asyncio.run(leave())
    assert not ended.is_set()
    release.set()


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
        (text,) = await place.refusals(who(1), timeouts=replace(SHORT, connect=1))
    assert text == (
        f"Unavailable: node 1 (n1) cannot reach node 0 (n0) at {place.endpoint}: no answer: is this a "
        "network that joins the nodes (--master-addr), or is a firewall between them?"
    )


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


@run
async def test_an_order_to_try_no_way_is_carried_out() -> None:
    place, order = Place(), {"type": "try", "number": 3, "ways": []}
    bounds = replace(SHORT, join=2, handshake=2)
    text, heard = await one_after_another(place, {"type": "welcome"}, order, timeouts=bounds)
    assert heard == [{"type": "tried", "number": 3, "failed": []}]
    assert text.startswith(f"Unavailable: node 0 (n0) at {place.endpoint} did not decide within ")


@run
async def test_a_hub_whose_order_to_try_ways_makes_no_sense_is_lost() -> None:
    place, order = Place(), {"type": "try", "number": 3, "ways": [[1, "lo nowhere 9 token"]]}
    text, heard = await one_after_another(place, {"type": "welcome"}, order)
    assert (text, heard) == (
        f"Unavailable: node 0 (n0) at {place.endpoint} was lost before the start: it said where it listens in a form "
        "that has no meaning here: see its output",
        [],
    )
