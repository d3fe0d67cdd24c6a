"""Who is let in: strangers, disagreement and duplicates."""

import asyncio
import contextlib
import gc
import json
import resource
from dataclasses import replace
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.meet import door
from entrypoint.meet.hub import COLLECT_AFTER
from entrypoint.meet.messages import Stopped
from entrypoint.meet.wire import PROTOCOL
from entrypoint.node import processes
from tests.unit.meet.meeting import (
    KEY,
    NOT_VERIFIED,
    PORT_ADVICE,
    SHORT,
    Place,
    close,
    hello,
    run,
    unsent,
    until,
    who,
)

HASTY = replace(SHORT, handshake=0.4)
LIST_ADVICE = "start every node with the same list of nodes"
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
    async with place.hub(timeouts=HASTY) as hub:
        reader, writer = await place.connect()
        writer.write(sent)
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
        assert place.said == [f"refused a stranger from 127.0.0.1 on {place.endpoint}: {why}"]
        writer.transport.abort()
        await close(await place.meet(who(1)), await hub)


@pytest.mark.parametrize("meets", [True, False])
@run
async def test_garbage_is_collected_less_often_until_all_have_met(meets: bool) -> None:
    before = gc.get_threshold()
    place = Place()
    async with place.hub() as hub:
        assert gc.get_threshold() == (COLLECT_AFTER, *before[1:])
        if meets:
            await close(await place.meet(who(1)), await hub)
        else:
            hub.cancel()
            await asyncio.wait([hub])
        assert gc.get_threshold() == before


@run
async def test_a_stranger_that_sends_a_byte_at_a_time_is_cut_off() -> None:
    place = Place()
    async with place.hub(timeouts=HASTY):
        reader, writer = await place.connect()
        left = list(PROTOCOL * 10)
        with contextlib.suppress(ConnectionError):
            while left and not (reader.at_eof() or reader.exception()):
                writer.write(bytes([left.pop(0)]))
                await asyncio.sleep(0.05)
        assert left
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
        ({"type": "go", "absent": "2"}, "it did not say who it is"),
        ({"type": "hello", "identity": {}, "left": 1.0}, "it sent no Identity"),
        (hello(who(1)) | {"left": "x"}, "it sent a wrong left: 'x'"),
        (
            {**hello(who(1)), "identity": {**hello(who(1))["identity"], "nnodes": "2"}},
            "it sent a wrong nnodes: '2'",
        ),
        (
            {**hello(who(1)), "identity": {**hello(who(1))["identity"], "versions": {"torch": 2}}},
            "it sent a wrong versions: {'torch': 2}",
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


async def told(place: Place, **changes: Any) -> dict[str, Any]:
    """What the hub answers to node 1, which says this of itself in as few bytes as JSON allows."""
    wire, _ = await place.spoke()
    raw = hello(who(1))
    raw["identity"] |= changes
    wire.send(json.dumps(raw, ensure_ascii=False).encode())
    async with asyncio.timeout(5):
        answer = await wire.receive()
    wire.abort()
    return answer


WIDE = "\N{GRINNING FACE}"
"""It takes four bytes."""


@run
async def test_a_participant_of_another_run_is_sent_away_whatever_letters_its_names_have() -> None:
    place = Place()
    async with place.hub() as hub:
        answer = await told(place, job_id=700 * WIDE, name=600 * WIDE)
        begin = f"the hub at {place.endpoint} is of job 7, attempt 0, and node 1 ("
        end = f", attempt 0: {PORT_ADVICE}"
        assert answer == {
            "type": "end",
            "status": 69,
            "text": begin + (495 - len(begin)) * WIDE + " ... " + (495 - len(end)) * WIDE + end,
        }
        await close(await place.meet(who(1)), await hub)


@run
async def test_a_disagreement_is_told_whatever_letters_it_quotes() -> None:
    place = Place()
    async with place.hub() as hub:
        answer = await told(place, image_id=800 * WIDE)
        with pytest.raises(BadInput) as caught:
            await hub
    what = f"image_id is 7be444fb on node 0 (n0) and {800 * WIDE} on node 1 (n1)"
    text = no_agreement(what).removeprefix("BadInput: ")
    assert str(caught.value) == text
    assert answer == {"type": "end", "status": 64, "text": text}


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


@run
async def test_a_participant_that_says_what_has_no_meaning_before_the_start_is_waited_for_again() -> None:
    place = Place()
    async with place.hub(who(0, nnodes=3)) as hub:
        wire, _ = await place.spoke()
        wire.send(hello(who(1, nnodes=3)))
        wire.send({"type": "looked", "x": 1})
        await until(lambda: bool(place.said))
        assert place.said == [
            "node 1 (n1) left before the start (it sent a message that has no meaning here): waiting for it again"
        ]
        await close(*await place.all(*(who(node, nnodes=3) for node in (1, 2))), await hub)


@run
async def test_what_the_nodes_found_is_known_to_node_0_by_their_names() -> None:
    place = Place()
    found = {"NCCL_NET": "Socket"}
    links = await place.all(who(0), who(1, findings=found))
    assert [link.findings for link in links] == [{"n1": found}, {}]
    await close(*links)


@run
async def test_findings_that_no_first_frame_holds_are_cut_short() -> None:
    place = Place()
    links = await place.all(who(0), who(1, findings={f"{number}": 900 * WIDE for number in range(3)}))
    assert links[0].findings == {"n1": {f"{number}": 200 * WIDE for number in range(3)}}
    await close(*links)


@run
async def test_what_the_tasks_of_a_node_found_is_known_together() -> None:
    place, mode = Place(), {"mode": "rank", "nnodes": 1, "nproc_per_node": 2}
    first, second = (who(0, local_rank=rank, findings={f"numa {rank}": "far"}, **mode) for rank in (0, 1))
    links = await place.all(first, second)
    assert links[0].findings == {first.name: {"numa 0": "far", "numa 1": "far"}}
    await close(*links)


@run
async def test_the_bound_of_a_trial_that_is_over_changes_nothing() -> None:
    place = Place()
    links = await place.all(who(0), who(1), timeouts=replace(SHORT, reach=0.05, handshake=0.2))
    loop = asyncio.get_running_loop()
    over = loop.time() + 0.3
    await until(lambda: loop.time() > over)  # the bound is real time
    hub, spoke = links
    hub.report(Stopped())
    assert await spoke.next() == Stopped()
    await close(*links)
