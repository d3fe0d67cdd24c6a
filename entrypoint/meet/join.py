"""Has all nodes of a job meet before any rank starts, and stay in touch until the end. `meet` is the entry;
it also chooses which node is the hub, and which one follows if that cannot be reached.

Node 0 is the hub: it listens (hub.py), every other participant connects (spoke.py), proves who it is and
waits for the answer that all get. Afterwards the connections carry heartbeats, the planned end, the first
failure and the end.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from entrypoint.errors import BadInput, Unavailable
from entrypoint.meet.hub import Hub
from entrypoint.meet.identity import Identity
from entrypoint.meet.link import Link
from entrypoint.meet.spoke import NoHub, Spoke, resolve
from entrypoint.meet.terms import DEFAULTS, MembershipPolicy, Timeouts
from entrypoint.meet.waiting import Waiting


async def _stay(address: str) -> str:
    raise BadInput(f"this participant cannot take node 0 at {address}")


async def meet(
    me: Identity,
    *,
    nodes: Sequence[str],
    address: str,
    port: int,
    key: bytes | None,
    say: Callable[[str], None],
    timeouts: Timeouts = DEFAULTS,
    never_started: Callable[[], str | None] | None = None,
    begun: Callable[[], str | None] | None = None,
    everywhere: bool = False,
    move: Callable[[str], Awaitable[str]] = _stay,
    muster: MembershipPolicy | None = None,
) -> Link:
    """Meet all participants of the job; returns when each of them has proved itself and agreed.

    `nodes` are the names in node-rank order, `address` is node 0's, `key` is the run's join key (None:
    identity alone). `say` takes lines for the user. `never_started` is asked about once a second, in a
    thread; a text ends the wait. So is `begun`: where node 0 is about to listen; None before it has begun.
    With a `muster` the meeting is one without those who do not come.

    Node 0's name may mean another address to itself than to the others. `everywhere`: it listens on all of
    its own. Who has another than most have reached is told that one by `move`, which returns its contact
    then; a Refusal ends the meeting.

    BadInput: the participants do not agree, or two claim one place; everyone gets the same text.
    Unavailable: the port is taken, no hub can be reached or it is none, or too many do not come.
    """
    candidates = [*muster.candidates] if muster else [0]
    while True:
        hub = candidates.pop(0)
        try:
            where = await muster.address(hub) if muster else address
            return await _meet_at(
                hub,
                where,
                port,
                me=me,
                nodes=nodes,
                key=key or b"",
                timeouts=timeouts,
                say=say,
                waiting=Waiting(timeouts, say, never_started, begun),
                everywhere=everywhere,
                move=move,
                muster=muster,
            )
        except NoHub as error:
            if not candidates:
                raise Unavailable(str(error)) from error
            say(f"{error}: trying the next node")


async def _meet_at(hub: int, address: str, port: int, *, me: Identity, **given: Any) -> Link:
    link = (Hub if me.node_rank == hub and not me.local_rank else Spoke)(
        me=me,
        hub=hub,
        endpoint=f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
        found=await resolve(address, port),
        **given,
    )
    try:
        await link.meet()
    except BaseException:
        await link.close()
        raise
    return link
