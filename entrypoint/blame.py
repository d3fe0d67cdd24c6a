"""Which rank is to blame: for a job that hangs, and of several failures for the first.

The secret: the rules. In a collective all ranks but one wait, and the one that does not is sought; the ranks
that wait are as silent as it is. Where one fails, the others find their connections to it closed, some of
them before it has ended itself. Pure.
"""

import re
import signal
from collections import Counter
from collections.abc import Sequence

from entrypoint.claims import Failure, Sighting

STUCK = 124
"""Status of a rank that was ended because it hung: timeout's own."""
_ECHO = re.compile(
    r"(RuntimeError|(torch\.distributed\.)?Dist\w+Error): .*"
    r"(Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|[Ff]ailed to recv, got 0 bytes)"
)
"""gloo's, NCCL's and the store's words."""
_STATES = {
    "T": "it is stopped by a signal",
    "t": "it is stopped by a debugger",
    "D": "it waits for a device or a file system",
}


def is_echo(error: str) -> bool:
    """Whether a rank's error says only that its connection to another one is gone."""
    return _ECHO.match(error) is not None


def first(failures: Sequence[Failure]) -> Failure:
    """Of failures that came close together (at least one) the one that the others follow from: the earliest,
    or if that is an echo, the earliest of another kind that was not ended in consequence. Of ranks that
    refuse the same input one that says why."""
    by_time = sorted(failures, key=lambda one: one.time)
    if is_echo(by_time[0].error):
        by_time = [one for one in by_time if not is_echo(one.error) and not _terminated(one)] or by_time
    alike = (one for one in by_time if one.status == by_time[0].status and one.error)
    return next(alike, by_time[0])


def _terminated(failure: Failure) -> bool:
    return failure.status == 128 + signal.SIGTERM


def verdict(sightings: Sequence[Sighting], why: str, *, unseen: Sequence[str], now: float) -> Failure | None:
    """The failure that names the rank to blame; None where no rank was seen. `why` is what was noticed,
    `unseen` are the nodes that did not answer, `now` is in Unix seconds."""
    if not sightings:
        return None
    blamed, reason = _blame(sightings)
    first = blamed[0]
    after = f" after step {first.step}" if first.step is not None else ""
    more = f"; with it {_ranks(blamed[1:])}" if len(blamed) > 1 else ""
    silent = f"; nothing was heard from {', '.join(unseen[:4])}" if unseen else ""
    return Failure(
        node_rank=first.node_rank,
        node=first.node,
        rank=first.rank,
        status=STUCK,
        signal=0,
        time=now,
        error=f"stuck, {why}{after}: {reason}{more}{silent}",
    )


def _blame(sightings: Sequence[Sighting]) -> tuple[list[Sighting], str]:
    """(the ranks to blame, how that is known)."""
    alive = [one for one in sightings if one.state]
    held = [one for one in alive if one.state in _STATES]
    if held:
        held.sort(key=lambda one: "TtD".index(one.state))
        return held, _STATES[held[0].state] + _at(held[0]) + _others(sightings, held)
    steps = {one.step for one in sightings if one.step is not None}
    if len(steps) > 1:
        behind = [one for one in sightings if one.step == min(steps)]
        return behind, f"others are at step {max(steps)}, and it is{_at(behind[0]) or ' behind'}"
    busy = [one for one in alive if one.at and not one.waits_in]
    if busy and any(one.waits_in for one in alive):
        return busy, "it waits for no other rank, and is" + _at(busy[0]) + _others(sightings, busy)
    groups = Counter(one.stack for one in alive if one.stack)
    if groups:
        most, count = groups.most_common(1)[0]
        odd = [one for one in alive if one.stack and one.stack != most]
        if odd and 2 * count > len(alive):
            return odd, "it is" + _at(odd[0]) + _others(sightings, odd)
    longest = max(sightings, key=lambda one: one.quiet)
    same = " like all others" if len(groups) == 1 and len(sightings) > 1 else ""
    where = f", and is{_at(longest)}{same}" if longest.at else ""
    return [longest], f"it gave its last sign first{where}"


def _at(one: Sighting) -> str:
    return f" in {one.at}" if one.at else ""


def _others(sightings: Sequence[Sighting], blamed: Sequence[Sighting]) -> str:
    """`, 5 others wait in all_reduce at train.py:120 step`."""
    others = [one for one in sightings if one not in blamed and one.at]
    if not others:
        return ""
    (at, waits_in), count = Counter((one.at, one.waits_in) for one in others).most_common(1)[0]
    where = f"{waits_in}, {at}" if waits_in else at
    return f", while {count} of {len(sightings)} ranks wait in {where}"


def _ranks(sightings: Sequence[Sighting]) -> str:
    shown = ", ".join(f"rank {one.rank} on {one.node}" for one in sightings[:4])
    return shown + (f" and {len(sightings) - 4} more" if len(sightings) > 4 else "")
