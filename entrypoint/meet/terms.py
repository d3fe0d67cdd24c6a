"""What a meeting is given: its bounds in seconds, who may be missing, and the node that it asks."""

from collections.abc import Collection, Sequence

from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass

OTHER_PORT, CHOOSE_PORT = "the next attempt uses another port", "give another --master-port"
NAME_ADVICE = "correct DNS or /etc/hosts, so that it is the same on all nodes, or give --master-addr"


@dataclass(frozen=True, kw_only=True)
class JobBounds:
    """Bounds in seconds of what is decided for all nodes alike, once they have met."""

    collect: float = 0.3
    """In which the hub collects failures before it calls one of them the first."""
    collect_echo: float = 1.5
    """The same where the first to come is that of a rank which has lost another one."""
    look: float = 20.0
    """In which everyone looks where its ranks are when the job seems to hang."""
    again: float = 60.0
    """Between the first two looks at ranks that make no step."""


@dataclass(frozen=True, kw_only=True)
class Timeouts(JobBounds):
    """Those of the meeting too."""

    join: float
    """From the start of whoever began first to the meeting of all (--join-timeout)."""
    peer: float
    """Silence after which a participant counts as lost (--peer-timeout)."""
    beat: float = 5.0
    """Between two heartbeats; a sixth of `peer` at most."""
    connect: float = 15.0
    """From the first connection that is not refused to the hub's proof."""
    handshake: float = 10.0
    """What the hub allows a newcomer to prove who it is."""
    remind: float = 10.0
    """Between two lines that say who is missing."""
    poll: float = 1.0
    """Between two looks at who never started."""
    answer: float = 20.0
    """In which a hub must answer before the next candidate is tried."""
    reach: float = 8.0
    """In which a node reaches another, before the start."""
    refused: float = 45.0
    """In which a hub that has begun must listen: it looks at its GPUs before, for `gpu.ANSWER` at most."""


@dataclass(frozen=True, kw_only=True)
class MembershipPolicy:
    """A meeting of one task a node that goes on without nodes that do not come."""

    candidates: Sequence[int]
    """The nodes that may be the hub: each is tried until one answers, or it is this one."""
    absent: Collection[int] = ()
    """Nodes that are lost and not waited for; they may come all the same."""
    least: int
    """So many are enough when the time is up."""
    most: int
    """So many take part; the others are spares."""
    quorum: int = 0
    """Fewer wait until the time is up even where nobody else is expected: others may be cut off from them."""


class LocalNode:
    """The node that takes part, as its meeting asks it. This one says nothing and knows nothing; a job's is
    `OurNode` in run/meeting.py."""

    @property
    def port_advice(self) -> str:
        """What to do about a port that another program or another job has."""
        return CHOOSE_PORT

    def say(self, text: str) -> None:
        """Takes a line for the user."""

    def never_started(self) -> str | None:
        """Why a node will not come, which ends the wait; None as far as is known. Asked about once a second,
        in a thread."""

    def begun(self) -> str | None:
        """Where node 0 is about to listen; None before it has begun. Asked as `never_started`."""

    async def address(self, hub: int) -> str:
        """The address of a node that may be the hub; of this one the address to listen on. Refusal: it has
        none."""
        raise BadInput("join-no-address", f"this participant knows no address of node {hub}")

    async def move(self, address: str) -> str:
        """Takes node 0 at this address, which most have reached. Returns where this node is reached then,
        empty if nobody needs to; a Refusal ends the meeting."""
        raise BadInput("join-address-fixed", f"this participant cannot take node 0 at {address}")

    def seal(self, members: Sequence[int]) -> None:
        """Hears from the hub which nodes take part, before it says go; a Refusal ends the meeting."""
