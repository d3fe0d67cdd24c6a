"""Every message, and what of it a peer may not send."""

import asyncio
import contextlib
import json
import time
import typing
from dataclasses import asdict, replace
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.meet import job_state, messages
from entrypoint.meet.messages import (
    MOST_SECONDS,
    AllDone,
    Beat,
    Done,
    Ended,
    EndMeeting,
    Extent,
    Fail,
    Failed,
    Go,
    Hello,
    Look,
    LookCloser,
    Message,
    Move,
    Moved,
    NoOutput,
    Paused,
    Peek,
    Peeked,
    Refused,
    Seen,
    Stalled,
    Stopped,
    Tried,
    Try,
    Visit,
    Welcome,
    end_of,
    load,
    pack,
)
from entrypoint.meet.wire import FIRST_BODY, MAX_BODY, WireError, encode
from tests.unit.meet.meeting import (
    Place,
    close,
    events,
    failure,
    left,
    one_after_another,
    run,
    sighting,
    who,
)

FOUR = Extent(nodes=4, ranks=16)
ALL: list[Message] = [
    Hello(who(1, versions={"torch": "2.15.0"}, findings={"gpu": "hot"}), 10.0),
    Visit(),
    Welcome(),
    Refused(),
    Beat(1.5e9),
    Try(2, ((1, "lo 127.0.0.9 9 token"), (3, "lo 127.0.0.8 9 token"))),
    Tried(2, ((3, "no answer in 8 s"),)),
    Move("127.0.0.9"),
    Moved("127.0.0.9", "lo 127.0.0.9 9 token", ""),
    Go((0, 2)),
    EndMeeting(64, "the nodes do not agree"),
    Stopped(12.5),
    Ended(left(3)),
    Done((3, 4)),
    Fail(failure(1, 5.0)),
    Stalled("no step for 30 s"),
    NoOutput(""),
    Paused(None),
    Peeked((sighting(0), sighting(1)), last=True),
    Seen((), last=False),
    Look("no step for 30 s"),
    LookCloser(),
    Peek(),
    Failed(failure(2, 5.0, rank=None), (1, 2)),
    AllDone(alone=True, split="rank 3 saved to go on, the others ended well"),
]


def of(kind: type[Message]) -> Message:
    return next(one for one in ALL if type(one) is kind)


def test_there_is_an_example_of_every_message() -> None:
    assert {type(one) for one in ALL} == set(messages.KINDS.values()) == set(typing.get_args(Message))


@pytest.mark.parametrize("message", ALL, ids=lambda one: type(one).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert load(json.loads(json.dumps(pack(message), allow_nan=False)), FOUR) == message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x" * 1000, "x" * 1000),
        ("\N{GRINNING FACE}" * 1000, "\N{GRINNING FACE}" * 1000),
        (
            "\N{GRINNING FACE}" * 999 + ": do that",
            "\N{GRINNING FACE}" * 495 + " ... " + "\N{GRINNING FACE}" * 486 + ": do that",
        ),
    ],
    ids=["plain letters", "as many others", "more"],
)
def test_whatever_a_refusal_quotes_it_fits_in_a_first_frame(text: str, told: str) -> None:
    end = end_of(BadInput("some-cause", text))
    assert end == EndMeeting(64, told)
    assert len(encode(pack(end))) <= FIRST_BODY
    assert load(json.loads(encode(pack(end))), FOUR) == end


NAN, INF = float("nan"), float("inf")
ODD: list[Any] = [None, True, -1, 0.5, "", "x", [], {}, [[]], [{}], NAN, INF, -INF, 10**4000, 1e300]


def places(raw: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a JSON value has others in it."""
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    return [found for key, value in items for found in [(*path, key), *places(value, (*path, key))]]


def changed(raw: Any, path: tuple[Any, ...], value: object) -> Any:
    if not path:
        return value
    copied = dict(raw) if isinstance(raw, dict) else list(raw)
    copied[path[0]] = changed(raw[path[0]], path[1:], value)
    return copied


@pytest.mark.parametrize("message", ALL, ids=lambda one: type(one).__name__)
def test_a_message_with_any_wrong_value_is_refused_or_means_what_it_says(message: Message) -> None:
    raw = json.loads(json.dumps(pack(message)))
    for path in places(raw):
        for value in ODD:
            with contextlib.suppress(WireError):
                json.dumps(pack(load(changed(raw, path, value), FOUR)), allow_nan=False)


@pytest.mark.parametrize("message", ALL, ids=lambda one: type(one).__name__)
def test_a_message_that_lacks_a_part_or_has_one_more_is_refused(message: Message) -> None:
    raw = pack(message)
    for other in [raw | {"more": 1}, *({k: v for k, v in raw.items() if k != name} for name in raw)]:
        with pytest.raises(WireError, match=r"^it sent a message that has no meaning here$"):
            load(other, FOUR)


BOUNDS: list[tuple[type[Message], str, list[Any], list[Any]]] = [
    (Fail, "failure.status", [1, 255], [0, 256, 10**300]),
    (Fail, "failure.rank", [0, 15, None], [True, 1.0, -1, 16]),
    (Fail, "failure.node_rank", [0, 3], [-1, 4, FOUR]),
    (Fail, "failure.signal", [0, 128], [-1, 129]),
    (Fail, "failure.time", [0.0, 1e10], [-0.1, 1.1e10, 1e14]),
    (Fail, "failure.same", [0, 15], [-1, 16]),
    (Failed, "failure.status", [1, 255], [0]),
    (Ended, "end.status", [0, 255], [-1, 256]),
    (Ended, "end.node_rank", [0, 3], [-1, 4]),
    (Ended, "end.step", [0, 1 << 62, None], [-1, (1 << 62) + 1, 1.0]),
    (Peeked, "sightings.0.quiet", [-1.0, 1e10], [-1.1, 1.1e10]),
    (Peeked, "sightings.0.cpu", [0.0, 1e12], [-0.1, 1.1e12]),
    (Stopped, "left", [0.0, 1e9, None], [INF, NAN, 10**4000, -1, 1.1e9]),
    (Beat, "time", [0.0, 1e10], [1e14, -1]),
    (Hello, "left", [0.0, 1e9], [INF, None]),
]
"""A field, what it may be and what it may not."""


@pytest.mark.parametrize(("kind", "where", "fit", "unfit"), BOUNDS)
def test_a_number_out_of_its_bounds_is_refused(
    kind: type[Message], where: str, fit: list[Any], unfit: list[Any]
) -> None:
    path = tuple(int(word) if word.isdecimal() else word for word in where.split("."))
    for value in fit:
        raw = changed(pack(of(kind)), path, value)
        assert pack(load(raw, FOUR)) == raw
    for value in unfit:
        with pytest.raises(WireError, match=rf"^it sent a wrong {path[-1]}: "):
            load(changed(pack(of(kind)), path, value), FOUR)


def test_the_line_has_the_value_as_far_as_there_is_room() -> None:
    for value, shown in ((256, "256"), ("x\x1b[2J" * 20, "'" + "x\\x1b[2J" * 4 + "x\\x1b[2...")):
        with pytest.raises(WireError) as caught:
            load(changed(pack(of(Fail)), ("failure", "status"), value), FOUR)
        assert str(caught.value) == f"it sent a wrong status: {shown}"


def test_texts_arrive_as_one_printable_line() -> None:
    sent = replace(failure(1, 5.0), error="a\nb\x1b[2J" + "x" * 5000)
    found = load(pack(Fail(sent)), FOUR)
    assert isinstance(found, Fail)
    assert found.failure.error == "a b?[2J" + "x" * 993


@pytest.mark.parametrize("name", ["nothing of ours", 7, None, [], "Done"])
def test_a_message_of_an_unknown_name_is_refused(name: object) -> None:
    with pytest.raises(WireError, match="it sent a message that has no meaning here"):
        load({"type": name}, FOUR)


@pytest.mark.parametrize("nodes", [range(16_384), range(0, 16_384, 2), range(16_383, 16_384)])
def test_which_of_16384_nodes_are_absent_fits_into_a_frame(nodes: range) -> None:
    sent = pack(Go(tuple(nodes)))
    assert len(json.dumps(sent)) < FIRST_BODY < MAX_BODY
    assert load(sent, Extent(nodes=16_384, ranks=16_384)) == Go(tuple(nodes))


def test_go_is_as_short_for_16384_nodes_as_for_one() -> None:
    assert pack(Go(())) == {"type": "go", "absent": "0"}


@pytest.mark.parametrize("text", ["", "10", "g", " 1", "0x1", "1_0", "-1", "f" * 5000])
def test_nodes_that_there_are_not_are_refused(text: str) -> None:
    assert load({"type": "go", "absent": "b"}, FOUR) == Go((0, 1, 3))
    assert load({"type": "go", "absent": "0"}, FOUR) == Go(())
    with pytest.raises(WireError, match=r"^it sent a wrong absent: "):
        load({"type": "go", "absent": text}, FOUR)


# --- through real connections -----------------------------------------------------------------------------


def of_failure(**changes: Any) -> dict[str, Any]:
    return {"type": "fail", "failure": {**asdict(failure(1, 5.0)), **changes}}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (of_failure(status=0), "status: 0"),
        (of_failure(status=256), "status: 256"),
        (of_failure(status=10**299), f"status: 1{'0' * 39}..."),
        (of_failure(rank=True), "rank: True"),
        (of_failure(rank=1.5), "rank: 1.5"),
        ({"type": "stop", "left": 10**4000}, f"left: 1{'0' * 39}..."),
        ({"type": "stop", "left": MOST_SECONDS * 2}, f"left: {MOST_SECONDS * 2}"),
        ({"type": "beat", "time": 1e14}, "time: 100000000000000.0"),
        ({"type": "done", "saved": [0, 10**6]}, "saved: [0, 1000000]"),
    ],
)
@run
async def test_the_hub_loses_a_spoke_that_says_what_may_not_be_and_tells_everyone(
    message: dict[str, Any], why: str
) -> None:
    links = await Place().all(who(0), who(1))
    links[1]._peers[0, None].send(message)
    first, second = await events(*links)
    assert (first.failure.node_rank, first.failure.status) == (1, 1)
    assert first.failure.error == f"lost: it sent a wrong {why}"
    assert first == second
    await close(*links)


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999"])
@run
async def test_a_number_that_is_none_ends_a_connection(number: str) -> None:
    links = await Place().all(who(0), who(1))
    links[1]._peers[0, None].send(f'{{"type":"stop","left":{number}}}'.encode())
    (event,) = await events(links[0])
    assert event.failure.error.startswith("lost: it sent a wrong left: ")
    await close(*links)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"type": "failed", "failure": {**asdict(failure(0, 5.0)), "status": 0}, "lost": "0"}, "status: 0"),
        ({"type": "failed", "failure": {**asdict(failure(0, 5.0)), "node_rank": 2}, "lost": "0"}, "node_rank: 2"),
        ({"type": "stop", "left": -1}, "left: -1"),
        ({"type": "all done", "alone": 1, "split": ""}, "alone: 1"),
        ({"type": "all done", "alone": False, "split": None}, "split: None"),
    ],
)  # fmt: skip
@run
async def test_a_spoke_takes_nothing_from_a_hub_that_says_what_may_not_be(
    message: dict[str, Any], why: str
) -> None:
    links = await Place().all(who(0), who(1))
    for wire in links[0]._peers.values():
        wire.send(message)
    (event,) = await events(links[1])
    assert (event.failure.node_rank, event.failure.status) == (0, 1)
    assert event.failure.error == f"lost: it sent a wrong {why}"
    await close(*links)


@pytest.mark.parametrize("absent", ["3", "1"])
@run
async def test_a_hub_that_says_go_without_itself_is_lost(absent: str) -> None:
    orders: list[dict[str, Any]] = [{"type": "welcome"}, {"type": "go", "absent": absent}]
    text, _ = await one_after_another(Place(), *orders)
    assert text.startswith("Unavailable: node 0 (n0) at ")
    assert text.endswith(
        " was lost before the start: it sent a message that has no meaning here: see its output"
    )


@pytest.mark.parametrize(
    "order",
    [Go(()), Welcome(), Move("127.0.0.9"), EndMeeting(64, "x"), Try(1, ((0, "lo 127.0.0.1 9 token"),))],
    ids=lambda one: type(one).__name__,
)
@run
async def test_a_hub_that_goes_on_to_meet_once_all_have_met_is_lost(order: Message) -> None:
    links = await Place().all(who(0), who(1))
    for wire in links[0]._peers.values():
        wire.send(pack(order))
    (event,) = await events(links[1])
    assert event.failure.node_rank == 0
    assert event.failure.error == "lost: it sent a message that has no meaning here"
    await close(*links)


@run
async def test_a_planned_end_of_a_job_without_end_has_the_longest_time() -> None:
    links = await Place().all(who(0), who(1))
    links[1].report(Stopped(1e300))
    assert [event.left for event in await events(*links)] == [MOST_SECONDS, MOST_SECONDS]
    await close(*links)


@run
async def test_no_clock_makes_a_failure_come_before_the_meeting() -> None:
    links = await Place().all(who(0), who(1))
    began = time.time()
    links[1]._peers[0, None].send({"type": "beat", "time": 1e9 * 9})
    links[1].report(Fail(failure(1, began)))
    first, second = await events(*links)
    assert first == second
    assert abs(first.failure.time - began) < 60
    await close(*links)


def broken(*_: object) -> None:
    raise ZeroDivisionError("of ours")


@run
async def test_a_bug_of_ours_loses_the_participant_and_is_said_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place()
    links = await place.all(who(0), who(1))
    monkeypatch.setattr(links[0], "_by_our_clock", broken)
    links[1].report(Fail(failure(1, 5.0)))
    (event,) = await events(links[0])
    assert event.failure.node_rank == 1
    assert event.failure.error.startswith("lost: a bug of apptrain: ZeroDivisionError in test_messages.py:")
    assert [line.partition(" in ")[0] for line in place.said] == ["a bug of apptrain: ZeroDivisionError"]
    assert place.said[0].endswith(": of ours: please report it")
    await close(*links)


@run
async def test_a_bug_of_ours_in_what_decides_ends_the_job_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = await Place().all(who(0), who(1))
    monkeypatch.setattr(job_state, "step", broken)
    links[1].report(Done())
    first, second = await events(*links)
    assert first == second
    assert (first.failure.node_rank, first.failure.status) == (0, 1)
    assert first.failure.error.startswith("lost: a bug of apptrain: ZeroDivisionError in test_messages.py:")
    await close(*links)


@run
async def test_a_bug_of_ours_in_what_nobody_waits_for_ends_the_job_with_a_word() -> None:
    place = Place()
    links = await place.all(who(0), who(1))

    async def broken() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError("of ours")

    links[1]._start(broken())
    found = await events(*links)
    assert {event.failure.node_rank for event in found} == {1}
    assert len(place.said) == 1
    assert replace(found[0].failure, time=0.0) == replace(found[1].failure, time=0.0)
    assert AllDone() not in found
    await close(*links)
