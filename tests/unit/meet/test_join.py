"""All nodes of a job meet, in one process over loopback."""

import asyncio
import re
import resource
import threading
import time
from dataclasses import replace

import pytest

from entrypoint.core.errors import Unavailable
from entrypoint.meet.messages import AllDone, Done, Fail, Failed
from entrypoint.meet.terms import Timeouts
from tests.unit.meet.meeting import (
    SHORT,
    Place,
    close,
    events,
    failure,
    hello,
    one_after_another,
    run,
    until,
    who,
)

TALKATIVE = replace(SHORT, remind=0.3)


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
    link.report(Done())
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
        link.report(Done())
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
        bounds = Timeouts(join=15, peer=60)
        links = await place.all(*(who(node, nnodes=512) for node in range(512)), timeouts=bounds)
        links[300].report(Fail(failure(300, 1.0)))
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
    said = re.escape(f"node 0 (n0) at {place.endpoint} has not started yet after ")
    assert re.match(said + r"\d+ s: waiting ", place.said[0])
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
    early = asyncio.create_task(place.refusals(who(1, nnodes=3), timeouts=replace(SHORT, join=4)))
    await asyncio.sleep(0.5)
    began = time.monotonic()
    async with place.hub(who(0, nnodes=3), timeouts=replace(SHORT, join=15)) as hub:
        assert (await early)[0].startswith("Unavailable: 1 of 3 nodes have not come: 2 (n2)")
        with pytest.raises(Unavailable):
            await hub
    assert time.monotonic() - began < 10


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


@run
async def test_a_hub_that_does_not_decide_is_waited_for_as_long_as_the_join_may_take() -> None:
    place = Place()
    text, _ = await one_after_another(
        place, {"type": "welcome"}, timeouts=replace(SHORT, join=2, handshake=2)
    )
    assert re.sub(r"[\d.]+ s", "N s", text) == (
        f"Unavailable: node 0 (n0) at {place.endpoint} did not decide within N s: see its output"
    )
