"""What a meeting is given, its bounds and who may be missing, and what it tells afterwards: the events."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from entrypoint.watch.reports import Failure

PORT_ADVICE = "the next attempt uses another port; where it was chosen by hand, choose another --master-port"
NAME_ADVICE = "correct DNS or /etc/hosts, so that it is the same on all nodes, or give --master-addr"


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Bounds in seconds."""

    join: float = 300.0
    """From the start of whoever began first to the meeting of all."""
    peer: float = 60.0
    """Silence after which a participant counts as lost."""
    connect: float = 15.0
    """From the first connection that is not refused to the hub's proof."""
    handshake: float = 10.0
    """What the hub allows a newcomer to prove who it is."""
    remind: float = 10.0
    """Between two lines that say who is missing."""
    poll: float = 1.0
    """Between two looks at who never started."""
    settle: float = 0.3
    """In which the hub collects failures before it calls one of them the first."""
    settle_echo: float = 1.5
    """The same where the first to come is that of a rank which has lost another one."""
    answer: float = 20.0
    """In which a hub must answer before the next candidate is tried."""
    look: float = 20.0
    """In which everyone looks where its ranks are when the job seems to hang."""
    again: float = 60.0
    """Between the first two looks at ranks that make no step."""
    reach: float = 8.0
    """In which a node reaches another, before the start."""
    refused: float = 45.0
    """In which a hub that has begun must listen: it looks at its GPUs before, for `gpu.ANSWER` at most."""


DEFAULTS = Timeouts()


@dataclass(frozen=True)
class Stopped:
    """A planned end was announced; who announced it gets this too."""

    left: float | None = None
    """Seconds to the end of the job that is to go on as another; None where nothing is known of that."""


@dataclass(frozen=True)
class Look:
    """The job seems to hang: say where your ranks are, with `seen`, and end none yet. `Failed` follows."""

    why: str


@dataclass(frozen=True)
class LookCloser:
    """Everyone has answered a Look: say with `seen` again where your ranks are; those that show nothing
    otherwise may be ended for it."""


@dataclass(frozen=True)
class Peek:
    """The job makes no step: say where your ranks are, with `peeked`, and let them go on."""


@dataclass(frozen=True)
class Failed:
    """The first failure of all, the same for everyone. The last event."""

    failure: Failure
    lost: tuple[int, ...] = ()
    """The node ranks of the participants that are known to be lost."""


@dataclass(frozen=True)
class AllDone:
    """Every participant is done. The last event."""

    alone: bool = False
    """Whether there are several ranks, and each has trained without the others."""


Event = Stopped | Look | LookCloser | Peek | Failed | AllDone


@dataclass(frozen=True, kw_only=True)
class Muster:
    """A meeting of one task a node that goes on without nodes that do not come."""

    candidates: Sequence[int]
    """The nodes that may be the hub: each is tried until one answers, or it is this one."""
    address: Callable[[int], Awaitable[str]]
    """A node's address; of this one the address to listen on. Refusal: it has none."""
    absent: Collection[int] = ()
    """Nodes that are lost and not waited for; they may come all the same."""
    least: int
    """So many are enough when the time is up."""
    most: int
    """So many take part; the others are spares."""
    quorum: int = 0
    """Fewer wait until the time is up even where nobody else is expected: others may be cut off from them."""
    seal: Callable[[Sequence[int]], None]
    """The hub calls it with the nodes that take part before it says go; a Refusal ends the meeting."""
