"""Has all nodes of a job meet before any rank starts, and stay in touch until the end. `meet` is the entry;
it also chooses which node is the hub, and which one follows if that cannot be reached.

Node 0 is the hub: it listens (hub.py), every other participant connects (spoke.py), proves who it is and
waits for the answer that all get. Afterwards the connections carry heartbeats, the planned end, the first
failure and the end.
"""

from collections.abc import Sequence
from typing import Any

from entrypoint.core.errors import Unavailable
from entrypoint.meet.hub import Hub
from entrypoint.meet.identity import Identity
from entrypoint.meet.link import Link
from entrypoint.meet.spoke import NoHub, Spoke, resolve
from entrypoint.meet.terms import LocalNode, MembershipPolicy, Timeouts
from entrypoint.meet.waiting import Waiting


async def meet(
    me: Identity,
    *,
    local: LocalNode,
    nodes: Sequence[str],
    port: int,
    key: bytes | None,
    timeouts: Timeouts,
    everywhere: bool = False,
    muster: MembershipPolicy | None = None,
) -> Link:
    """Meet all participants of the job; returns when each of them has proved itself and agreed.

    `local` is asked for what only this node knows. `nodes` are the names in node-rank order, `key` is the
    run's join key (None: identity alone). With a `muster` the meeting is one without those who do not come.

    Node 0's name may mean another address to itself than to the others. `everywhere`: it listens on all of
    its own. Who has another than most have reached is told that one (`LocalNode.move`).

    BadInput: the participants do not agree, or two claim one place; everyone gets the same text.
    Unavailable: the port is taken, no hub can be reached or it is none, or too many do not come.
    """
    candidates = [*muster.candidates] if muster else [0]
    while True:
        hub = candidates.pop(0)
        try:
            return await _meet_at(
                hub,
                await local.address(hub),
                port,
                me=me,
                local=local,
                nodes=nodes,
                key=key or b"",
                timeouts=timeouts,
                waiting=Waiting(timeouts, local),
                everywhere=everywhere,
                muster=muster,
            )
        except NoHub as error:
            if not candidates:
                raise Unavailable(error.id, str(error)) from error
            local.say(f"{error}: trying the next node")


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
