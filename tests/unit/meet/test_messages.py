"""Every message, and what of it a peer may not send."""

import contextlib
import json
import typing
from dataclasses import replace
from typing import Any

import pytest

from entrypoint.meet import messages
from entrypoint.meet.messages import (
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
    Paused,
    Peek,
    Peeked,
    Refused,
    Seen,
    Silent,
    Stalled,
    Stopped,
    Tried,
    Try,
    Visit,
    Welcome,
    load,
    pack,
)
from entrypoint.meet.wire import FIRST_BODY, MAX_BODY, WireError
from tests.unit.meet.meeting import failure, left, sighting, who

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
    Go((0, 1, 3)),
    EndMeeting(64, "the nodes do not agree"),
    Stopped(12.5),
    Ended(left(3)),
    Done(),
    Fail(failure(1, 5.0)),
    Stalled("no step for 30 s"),
    Silent(""),
    Paused(None),
    Peeked((sighting(0), sighting(1)), last=True),
    Seen((), last=False),
    Look("no step for 30 s"),
    LookCloser(),
    Peek(),
    Failed(failure(2, 5.0, rank=None), (1, 2)),
    AllDone(alone=True),
]


def of(kind: type[Message]) -> Message:
    return next(one for one in ALL if type(one) is kind)


def test_there_is_an_example_of_every_message() -> None:
    assert {type(one) for one in ALL} == set(messages.KINDS.values()) == set(typing.get_args(Message))


@pytest.mark.parametrize("message", ALL, ids=lambda one: type(one).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert load(json.loads(json.dumps(pack(message), allow_nan=False)), FOUR) == message


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


BOUNDS = [
    (Fail, "failure.status", 0),
    (Fail, "failure.status", 256),
    (Fail, "failure.status", 10**300),
    (Fail, "failure.rank", True),
    (Fail, "failure.rank", 1.0),
    (Fail, "failure.rank", 16),
    (Fail, "failure.node_rank", FOUR),
    (Fail, "failure.signal", 129),
    (Fail, "failure.time", 1e14),
    (Failed, "failure.status", 0),
    (Ended, "end.status", 256),
    (Ended, "end.node_rank", -1),
    (Stopped, "left", INF),
    (Stopped, "left", NAN),
    (Stopped, "left", 10**4000),
    (Stopped, "left", -1),
    (Beat, "time", 1e14),
    (Beat, "time", -1),
    (Hello, "left", INF),
]


@pytest.mark.parametrize(("kind", "where", "value"), BOUNDS)
def test_a_number_out_of_its_bounds_is_refused(kind: type[Message], where: str, value: object) -> None:
    path = tuple(where.split("."))
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
def test_which_of_16384_nodes_take_part_fits_into_a_frame(nodes: range) -> None:
    sent = pack(Go(tuple(nodes)))
    assert len(json.dumps(sent)) < FIRST_BODY < MAX_BODY
    assert load(sent, Extent(nodes=16_384, ranks=16_384)) == Go(tuple(nodes))


@pytest.mark.parametrize("text", ["", "10", "g", " 1", "0x1", "1_0", "-1", "f" * 5000])
def test_nodes_that_there_are_not_are_refused(text: str) -> None:
    assert load({"type": "go", "members": "b"}, FOUR) == Go((0, 1, 3))
    assert load({"type": "go", "members": "0"}, FOUR) == Go(())
    with pytest.raises(WireError, match=r"^it sent a wrong members: "):
        load({"type": "go", "members": text}, FOUR)
