"""Names the rank to blame. `first` does so for several failures, `verdict` and `deadlock` for a job that
hangs. Pure functions.

In a collective all ranks but one wait; the rank that does not wait is sought, though the others are as silent
as it is. If a rank fails, the others lose their connection to it, and some of them fail before it has ended.
If a rank ends well too early, only the others fail.
"""

import re
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from entrypoint.core.errors import BAD_INPUT, STUCK, of_signal
from entrypoint.core.plain import counted
from entrypoint.meet.reports import NO_ENDS, Ends, Failure, RankSnapshot, when

_ECHO = re.compile(
    r"(RuntimeError|(torch\.distributed\.)?Dist\w+Error): .*"
    r"(Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|[Ff]ailed to recv, got 0 bytes)"
)
"""gloo's, NCCL's and the store's words."""
_WAITED = r"([Tt]imed out|wait timeout|timeout caused pair closure|collective operation timeout)"
"""Theirs of a rank that has waited for another in vain."""
_TIMED_OUT = re.compile(r"(RuntimeError|(torch\.distributed\.)?Dist\w+Error|TimeoutError): .*" + _WAITED)
_LEFT_EARLY = re.compile(r"ended with \d+\b.* still .*: do all ranks .*\?$")
IDLE = 0.05
"""Of a CPU: what torch's own threads may use while a rank waits."""
_FOR_DEVICE = {"synchronize"}
"""Functions of torch.cuda that wait for no rank."""
_STATES = {
    "T": "it is stopped by a signal",
    "t": "it is stopped by a debugger",
    "D": "it waits for a device or a file system",
}


def is_echo(error: str) -> bool:
    """Whether a rank's error says only that its connection to another one is gone."""
    return _ECHO.match(error) is not None


def is_consequence(failure: Failure) -> bool:
    """Whether it says only that another rank is gone or does not come. NCCL's watchdog says so and aborts."""
    if failure.signal == signal.SIGABRT and re.search(_WAITED, failure.error):
        return True
    return is_echo(failure.error) or _TIMED_OUT.match(failure.error) is not None


def has_left_early(error: str) -> bool:
    """Whether this is the error of a rank that is to blame although it ended well."""
    return _LEFT_EARLY.match(error) is not None


def first(failures: Sequence[Failure], ends: Ends = NO_ENDS, *, world: int = 0) -> Failure:
    """Of failures that came close together (at least one) the one that the others follow from: the earliest,
    or if that is an echo, the earliest of another kind that was not ended in consequence. Of ranks that
    refuse the same input one that says why. It counts those that failed alike.

    `ends`: the ranks that have ended well, of `world` in all. Where each failure only follows from something,
    and nothing failed that it could follow from, one of them is to blame.
    """
    by_time = sorted(failures, key=when)
    if ends and is_consequence(by_time[0]):
        by_time = [one for one in by_time if not is_consequence(one) and not _terminated(one)]
        if not by_time:
            return _left_early(failures, ends, world)
    elif is_echo(by_time[0].error):
        by_time = [one for one in by_time if not is_echo(one.error) and not _terminated(one)] or by_time
    alike = (one for one in by_time if one.status == by_time[0].status and one.error)
    found = next(alike, by_time[0])
    return replace(found, same=_same(found, failures))


def _same(found: Failure, failures: Iterable[Failure]) -> int:
    """How many other ranks have told the same error; what the program refuses is no rank's own."""
    if found.rank is None or not found.error or found.status == BAD_INPUT:
        return 0
    alike = [one for one in failures if one.rank is not None]
    return sum(1 + one.same for one in alike if (one.error, one.status) == (found.error, found.status)) - 1


def _left_early(failures: Sequence[Failure], ends: Ends, world: int) -> Failure:
    """The failure of a rank that has ended well while others needed it."""
    failed = min((one for one in failures if is_consequence(one)), key=when)
    places = Counter(one.at for one in failures if one.at and is_consequence(one))
    where = places.most_common(1)[0][0] if places else "running"
    return _of_end(ends, world - len(ends), where, failed.status, failed.time)


def _of_end(ends: Ends, others: int, where: str, status: int, time: float) -> Failure:
    """`ends`: at least one. `where`: the others were then."""
    one = ends.first
    assert one is not None
    after = f" after {counted(one.step, 'step')}" if one.step is not None else ""
    too = f" ({counted(len(ends) - 1, 'other rank')} too)" if len(ends) > 1 else ""
    rest = f"{others} other{'s were' if others > 1 else ' was'}" if others > 0 else "others were"
    question = "stop after the same step" if one.status else "make the same number of steps"
    return Failure(
        node_rank=one.node_rank,
        node=one.node,
        rank=one.rank,
        status=status,
        signal=0,
        time=time,
        error=f"ended with {one.status}{after}{too} while {rest} still {where}: do all ranks {question}?",
    )


def _terminated(failure: Failure) -> bool:
    return failure.status == of_signal(signal.SIGTERM)


def verdict(
    sightings: Sequence[RankSnapshot], why: str, *, unseen: Sequence[str], now: float
) -> Failure | None:
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


def pause(sightings: Sequence[RankSnapshot], why: str) -> str:
    """What is said of a job that makes no step and may go on; empty where no rank was seen."""
    found = verdict(sightings, why, unseen=(), now=0.0)
    if found is None:
        return ""
    where = "the job goes on, and stacks/ of the run directory has where each rank is (--hang-timeout)"
    return f"rank {found.rank} on {found.node}: {found.error.removeprefix('stuck, ')}: {where}"


def deadlock(
    before: Sequence[RankSnapshot],
    sightings: Sequence[RankSnapshot],
    elapsed: float,
    why: str,
    ends: Ends,
    *,
    world: int,
    now: float,
) -> Failure | None:
    """The failure of a job of `world` ranks that will never go on; None if that is not proven. Each rank has
    ended well, or waits for others as it did in the look `before`, `elapsed` seconds ago, and has used no CPU
    since, or is stopped by a signal as it was then."""
    earlier = {one.rank: one for one in before}
    alive = [one for one in sightings if one.rank not in ends.ranks]
    if not alive or len(alive) + len(ends) != world:
        return None
    stopped = {one.rank for one in alive if _stays_stopped(earlier.get(one.rank), one)}
    if not all(_waits_on(earlier.get(one.rank), one, elapsed) for one in alive if one.rank not in stopped):
        return None
    if stopped or not ends:
        return verdict(alive, why or _behind(ends), unseen=(), now=now)
    (at, waits_in), _ = Counter((one.at, one.waits_in) for one in alive).most_common(1)[0]
    return _of_end(ends, len(alive), f"in {waits_in} ({at.partition(' ')[0]})", STUCK, now)


def _behind(ends: Ends) -> str:
    """What is noticed of a rank that stays behind, where no step is missed: others have ended well."""
    ended = f"{counted(len(ends), 'other rank')} ended well, and " if ends else ""
    return f"{ended}it goes no further"


def _stays_stopped(before: RankSnapshot | None, one: RankSnapshot) -> bool:
    """Whether somebody has stopped the rank and let it be: it goes on only by another signal."""
    return before is not None and before.state == one.state == "T"


def _waits_on(before: RankSnapshot | None, one: RankSnapshot, elapsed: float) -> bool:
    """Whether the rank waits where it waited. A GPU that is waited for may be busy, and nobody sees that."""
    if before is None or not one.stack or (before.stack, before.state, one.state) != (one.stack, "S", "S"):
        return False
    is_idle = 0.0 <= one.cpu - before.cpu <= IDLE * elapsed
    return bool(one.waits_in) and one.waits_in not in _FOR_DEVICE and is_idle


def _blame(sightings: Sequence[RankSnapshot]) -> tuple[list[RankSnapshot], str]:
    """(the ranks to blame, how that is known)."""
    alive = [one for one in sightings if one.state]
    held = [one for one in alive if one.state in _STATES]
    if held:
        held.sort(key=_order)
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
    longest = max(sightings, key=_quiet)
    same = " like all others" if len(groups) == 1 and len(sightings) > 1 else ""
    where = f", and is{_at(longest)}{same}" if longest.at else ""
    return [longest], f"it gave its last sign first{where}"


def _order(one: RankSnapshot) -> int:
    """Of states that hold a rank: who is stopped comes first."""
    return "TtD".index(one.state)


def _quiet(one: RankSnapshot) -> float:
    return one.quiet


def _at(one: RankSnapshot) -> str:
    return f" in {one.at}" if one.at else ""


def _others(sightings: Sequence[RankSnapshot], blamed: Sequence[RankSnapshot]) -> str:
    """`, 5 others wait in all_reduce at train.py:120 step`."""
    ranks = {one.rank for one in blamed}
    others = [one for one in sightings if one.rank not in ranks and one.at]
    if not others:
        return ""
    (at, waits_in), count = Counter((one.at, one.waits_in) for one in others).most_common(1)[0]
    where = f"{waits_in}, {at}" if waits_in else at
    return f", while {count} of {len(sightings)} ranks wait in {where}"


def _ranks(sightings: Sequence[RankSnapshot]) -> str:
    shown = ", ".join(f"rank {one.rank} on {one.node}" for one in sightings[:4])
    return shown + (f" and {len(sightings) - 4} more" if len(sightings) > 4 else "")
