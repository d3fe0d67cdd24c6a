"""The messages between the participants of a job: one frozen dataclass each, which checks itself.

`load` is the entry for what comes from the wire, `pack` for what goes there. A loaded message has the right
kinds of values within their bounds, and its texts are fit for a terminal. Anything else is a WireError, and
the peer that sent it is lost. Who sends which to whom: `Meeting` before the ranks start, `Report` from a
participant to node 0 after that, `Told` from node 0 to all.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from entrypoint.core.bitset import Bits
from entrypoint.core.errors import BAD_INPUT, BadInput, Refusal, Unavailable
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain
from entrypoint.meet.identity import Identity
from entrypoint.meet.reports import End, Failure, NodeRank, Range, Rank, RankSnapshot, UnixTime
from entrypoint.meet.wire import WireError

Nodes = Annotated[tuple[int, ...], "nodes"]
"""Places in the allocation's list of nodes, in ascending order; on the wire one hexadecimal number."""
MOST_SECONDS = 1e9
SHOWN = 40
"""Characters of a wrong value that are shown."""
MOST_TEXT = 1000
"""Characters of a text, at most, as `plain` cuts it: 4 bytes each."""
KEPT = 495
"""Of each end of a longer refusal."""
Seconds = Annotated[float, Range(0, MOST_SECONDS)]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How many there are in a job: what a message may name."""

    nodes: int
    ranks: int


@dataclass(frozen=True)
class _Bare:
    """A message without values."""


# --- while the nodes meet -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message of a participant: who it is."""

    identity: Identity
    left: Seconds
    """Seconds for which it still waits for the others."""


class Visit(_Bare):
    """The first message of a participant that only tries whether node 0 is at another address."""


class Welcome(_Bare):
    """The answer of a hub that takes a participant in, or is visited."""


class Refused(_Bare):
    """The answer to a stranger. It does not verify under another key, and so tells who holds one."""


@dataclass(frozen=True)
class Beat:
    """A sign of life, each way, from the first message to the end."""

    time: UnixTime
    """By the sender's clock."""


@dataclass(frozen=True)
class Try:
    """Node 0 asks a node to try its ways to others."""

    number: int
    """Of the trial: an answer to an earlier one counts for nothing."""
    ways: tuple[tuple[int, str], ...]
    """Each node with where it listens (the text of reach.ProbeEndpoint)."""


@dataclass(frozen=True)
class Tried:
    """The answer: the nodes that were not reached, each with the reason."""

    number: int
    failed: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Move:
    """Node 0 asks a participant to take this address for node 0's."""

    address: str


@dataclass(frozen=True)
class Moved:
    """The answer: where it listens now, or why it cannot have node 0 there."""

    address: str
    contact: str
    why: str


@dataclass(frozen=True)
class Go:
    """All have met, and the ranks start."""

    absent: Nodes
    """The nodes that do not take part: mostly none, so that the same few bytes go to each of many nodes."""


@dataclass(frozen=True)
class EndMeeting:
    """The meeting has failed; everyone ends with the same refusal."""

    status: int
    text: str


# --- what a participant reports while ranks run -------------------------------------------------------------


@dataclass(frozen=True)
class Stopped:
    """A planned end was announced. To node 0, and from there to everyone, who announced it included."""

    left: Seconds | None = None
    """Seconds to the end of the job that is to go on as another; None if nothing is known of that."""


@dataclass(frozen=True)
class Ended:
    """A rank of this participant ended well."""

    end: End


@dataclass(frozen=True)
class Done:
    """All ranks of this participant ended well."""

    saved: tuple[Rank, ...] = ()
    """Those of them that saved to go on."""


@dataclass(frozen=True)
class Fail:
    """This participant's first failure."""

    failure: Failure


@dataclass(frozen=True)
class Stalled:
    """A rank of this participant does not go on."""

    why: str


@dataclass(frozen=True)
class NoOutput:
    """All ranks of this participant have written nothing for too long; empty: they write again."""

    why: str


@dataclass(frozen=True)
class Paused:
    """Ranks of this participant make no step; None: they go on. Empty: they make none, but saying so would
    be wrong."""

    why: str | None


@dataclass(frozen=True)
class Peeked:
    """The answer to a Peek, in parts of a frame each."""

    sightings: tuple[RankSnapshot, ...]
    last: bool


@dataclass(frozen=True)
class Seen:
    """The answer to a Look or a LookCloser, in parts of a frame each."""

    sightings: tuple[RankSnapshot, ...]
    last: bool


# --- what node 0 tells everyone -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """The job seems to hang: say where your ranks are, with Seen, and end none yet. `Failed` follows."""

    why: str


class LookCloser(_Bare):
    """Everyone has answered a Look: say with Seen again where your ranks are; those that show nothing
    otherwise may be ended for it."""


class Peek(_Bare):
    """The job makes no step: say where your ranks are, with Peeked, and let them go on."""


@dataclass(frozen=True)
class Failed:
    """The first failure of all, the same for everyone. The last message."""

    failure: Failure
    lost: Nodes = ()
    """The nodes that are known to be lost."""


@dataclass(frozen=True)
class AllDone:
    """Every participant is done. The last message."""

    alone: bool = False
    """Whether there are several ranks, and each has trained without the others."""
    split: str = ""
    """Why the job has failed all the same: some ranks saved to go on, the others ended well. Empty: it has
    not."""


Meeting = Hello | Visit | Welcome | Refused | Beat | Try | Tried | Move | Moved | Go | EndMeeting
Report = Stopped | Ended | Done | Fail | Stalled | NoOutput | Paused | Peeked | Seen
Told = Stopped | Look | LookCloser | Peek | Failed | AllDone
Message = Meeting | Report | Told
KINDS: Mapping[str, type[Message]] = {
    "hello": Hello,
    "visit": Visit,
    "welcome": Welcome,
    "refused": Refused,
    "beat": Beat,
    "try": Try,
    "tried": Tried,
    "move": Move,
    "moved": Moved,
    "go": Go,
    "end": EndMeeting,
    "stop": Stopped,
    "ended": Ended,
    "done": Done,
    "fail": Fail,
    "stalled": Stalled,
    "no output": NoOutput,
    "paused": Paused,
    "peeked": Peeked,
    "seen": Seen,
    "look": Look,
    "look closer": LookCloser,
    "peek": Peek,
    "failed": Failed,
    "all done": AllDone,
}
"""Each message by its name on the wire."""
_NAMES: Mapping[type[Message], str] = {kind: name for name, kind in KINDS.items()}


def pack(message: Message) -> dict[str, Any]:
    """The message as a JSON object."""
    return {"type": _NAMES[type(message)], **_fields(message)}


def load(raw: Mapping[str, Any], extent: Extent) -> Message:
    """A message as a peer of a job of this extent sent it. WireError: it is none."""
    name = raw.get("type")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError(UNKNOWN)
    values = {key: value for key, value in raw.items() if key != "type"}
    if values.keys() != _loaders(kind).keys():
        raise WireError(UNKNOWN)
    loaded: Message = _object(kind, values, extent)
    return loaded


UNKNOWN = "it sent a message that has no meaning here"


def end_of(refusal: Refusal) -> EndMeeting:
    """What ends the meeting for everyone, in a frame that may be the first. Of a long text the middle is left
    out: its end says what to do."""
    text = str(refusal)
    if len(text) > MOST_TEXT:
        text = f"{text[:KEPT]} ... {text[-KEPT:]}"
    return EndMeeting(status=refusal.status, text=text)


def refusal_of(end: EndMeeting) -> Refusal:
    """The refusal that `end_of` has packed."""
    refusal = (
        BadInput("told-by-another-node", end.text)
        if end.status == BAD_INPUT
        else Unavailable("told-by-another-node", end.text)
    )
    refusal.told = True
    return refusal


# --- values as JSON has them --------------------------------------------------------------------------------


_AS_THEY_ARE = frozenset((str, int, float, bool, type(None)))
"""Kinds of most values by far: looked up first."""


def _fields(value: Any) -> dict[str, Any]:
    kind = type(value)
    hints = _hints(kind)
    return {one.name: _packed(getattr(value, one.name), hints[one.name]) for one in fields(value)}


def _packed(value: Any, hint: Any = None) -> Any:
    if type(value) in _AS_THEY_ARE:
        return value
    if hint is not None and hint == Nodes:
        return Bits.of(value).hex()
    if isinstance(value, tuple):
        return [item if type(item) in _AS_THEY_ARE else _packed(item) for item in value]
    return _fields(value) if is_dataclass(value) else value


def _object(kind: Any, raw: object, extent: Extent) -> Any:
    loaders = _loaders(kind)
    if not isinstance(raw, dict) or raw.keys() != loaders.keys():
        raise WireError(f"it sent no {kind.__name__}")
    loaded = {}
    for name, loader in loaders.items():
        try:
            loaded[name] = loader(raw[name], extent)
        except _Wrong:
            raise WireError(f"it sent a wrong {name}: {_shown(raw[name])}") from None
    return kind(**loaded)


def _shown(value: object) -> str:
    """What was sent, as far as a line has room for it."""
    try:
        text = str(plain(repr(value)))
    except ValueError:  # a number of more digits than Python writes out
        return "a number without end"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class _Wrong(Exception):
    """A value that is not of its kind, or out of its bounds."""


Loader = Callable[[Any, Extent], Any]
"""Makes a field's value of JSON's, in a job of this extent. _Wrong: it is none."""


def _loaders(kind: Any) -> Mapping[str, Loader]:
    if kind not in _LOADERS:
        _LOADERS[kind] = {name: _loader(hint) for name, hint in _hints(kind).items()}
    return _LOADERS[kind]


_LOADERS: dict[Any, Mapping[str, Loader]] = {}


def _hints(kind: Any) -> Mapping[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind, include_extras=True)
    return _HINTS[kind]


_HINTS: dict[Any, Mapping[str, Any]] = {}


def _loader(hint: Any) -> Loader:
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if get_origin(hint) is Annotated:
        base, bounds = get_args(hint)
        return _within(_loader(base), bounds)
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (one for one in get_args(hint) if one is not types.NoneType)
        return _or_none(_loader(inner))
    if get_origin(hint) is tuple:
        return _sequence([_loader(one) for one in get_args(hint) if one is not Ellipsis], hint)
    return _of_kind(hint)


def _text(raw: Any, _: Extent) -> str:
    if not isinstance(raw, str):
        raise _Wrong
    return str(plain(raw))


def _exactly(kind: type) -> Loader:
    def load_one(raw: Any, _: Extent) -> Any:
        if type(raw) is not kind:
            raise _Wrong
        return raw

    return load_one


def _node(raw: Any, extent: Extent) -> int:
    if type(raw) is not int or raw not in range(extent.nodes):
        raise _Wrong
    return raw


def _rank(raw: Any, extent: Extent) -> int:
    if type(raw) is not int or raw not in range(extent.ranks):
        raise _Wrong
    return raw


def _number(raw: Any, _: Extent) -> float:
    if type(raw) not in (int, float):
        raise _Wrong
    return raw  # type: ignore[no-any-return]


def _texts(raw: Any, extent: Extent) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise _Wrong
    return {_text(name, extent): _text(value, extent) for name, value in raw.items()}


def _nodes(raw: Any, extent: Extent) -> tuple[int, ...]:
    found = Bits.from_hex(raw) if isinstance(raw, str) and len(raw) <= extent.nodes // 4 + 1 else None
    if found is None or found.value >> extent.nodes:
        raise _Wrong
    return tuple(found)


def _within(inner: Loader, bounds: Range) -> Loader:
    def load_one(raw: Any, extent: Extent) -> Any:
        value = inner(raw, extent)
        if not bounds.least <= value <= bounds.most:  # NaN is in no range
            raise _Wrong
        return value

    return load_one


def _or_none(inner: Loader) -> Loader:
    def load_one(raw: Any, extent: Extent) -> Any:
        return None if raw is None else inner(raw, extent)

    return load_one


def _of_kind(kind: Any) -> Loader:
    def load_one(raw: Any, extent: Extent) -> Any:
        return _object(kind, raw, extent)

    return load_one


def _sequence(inner: list[Loader], hint: Any) -> Loader:
    """Of as many as there come, or of just these."""
    any_number = get_args(hint)[-1] is Ellipsis

    def load_all(raw: Any, extent: Extent) -> tuple[Any, ...]:
        if not isinstance(raw, list) or not (any_number or len(raw) == len(inner)):
            raise _Wrong
        loaders = inner * len(raw) if any_number else inner
        return tuple(loader(item, extent) for loader, item in zip(loaders, raw, strict=True))

    return load_all


_SIMPLE: Mapping[Any, Loader] = {
    str: _text,
    int: _exactly(int),
    bool: _exactly(bool),
    NodeRank: _node,
    Rank: _rank,
    float: _number,
    Nodes: _nodes,
    Mapping[str, str]: _texts,
}
