"""Names the first cause of all that a log said. `judge` is the rule: a pure function.

A failure echoes: a rank runs out of memory, the others lose their connection to it, torchrun sums up. So an
entry of the catalogue that is a cause comes before one that is a symptom, and that before a warning; an echo
is never a cause. Among equals the earliest counts: by time where the lines have one, else by their order.

A wrong answer is worse than none. What a program went on after is no cause. A line is weak if it calls itself
a warning, or is of a command of a job script, which goes on after such: it gives way to other causes, and to
an exception that is not in the catalogue. Such an exception also keeps a later symptom from being the cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from entrypoint.core.frozen import dataclass
from entrypoint.explain.catalogue import OWN_ERROR, Entry
from entrypoint.explain.scan import STEPS, Evidence, ProcessEnd, Restart, Scan

_RANKING = {"cause": 0, "warning": 0, "symptom": 1, "hint": 2, "echo": 3}
_OF_GOOD_RUNS = ("warning", "hint")
"""Kinds of lines that good runs have too."""
CLOSE = 5.0
"""Seconds: clocks of nodes differ so much, and a process takes as long to say why it ends."""

YEAR = 366 * 86400.0
"""Seconds of that one which all times are of."""
MESSAGE = 6
"""Lines behind the name of an exception that may be of its message."""

STEPS_BEFORE, FAR = 2, 30
"""Different steps just before a failure, by which the program lived until then, and lines between that
failure and what may be no part of it."""
_OF_CLEANING_UP = ("NameError: ", "UnboundLocalError: ")
"""What `except` and `finally` raise if they use a name that was not set yet."""
SAYS_FAILED = frozenset({"child-failed", "mpi-abort", "rank-aborted"})
"""Echoes that tell that a run failed, though not why."""
DEATHS = frozenset({"segfault", "rank-killed", "illegal-instruction", "host-out-of-memory"})
"""Entries of processes that were ended from outside."""
FEW_BEHIND, MANY_BEHIND = 4, 40
"""Lines of a file behind all that was found in it, after which its program went on: after a warning, and
after an error. The last word of a failure stands near the end."""


@dataclass(frozen=True)
class CauseFound:
    """An entry that was seen."""

    entry: Entry
    first: Evidence
    rank: int | None
    node: str
    device: str
    leave_out: str
    """The node to leave out; empty where the cause is not known to be the node's."""
    count: int
    """Lines that say it."""


@dataclass(frozen=True)
class Judgement:
    causes: tuple[CauseFound, ...]
    """The first cause first; empty where it is not known."""
    others: tuple[CauseFound, ...]
    """What else was seen: it may follow from the cause."""
    unknown: Evidence | None
    """Where no cause is known: the earliest error."""


def of(scan: Scan, own_error: Entry, begins: Mapping[str, float] | None = None) -> Judgement:
    """Of all that was scanned. `own_error`: the entry of an exception that no other one has. `begins`: of a
    file, the line before which all is of a run that is over."""
    return judge(
        scan.found,
        own_error,
        counts=scan.counts,
        ends=scan.ends,
        nodes=scan.nodes,
        places=scan.places,
        helped=scan.helped,
        lengths=scan.lengths,
        restarts=scan.restarts,
        ended_well=scan.ended_well,
        begins=begins,
    )


def judge(
    found: Sequence[Evidence],
    own_error: Entry,
    *,
    counts: Mapping[str, int],
    ends: Sequence[ProcessEnd] = (),
    nodes: Iterable[str] = (),
    places: Mapping[int, str] | None = None,
    helped: Mapping[tuple[str, int], tuple[int, int]] | None = None,
    lengths: Mapping[str, int] | None = None,
    restarts: Mapping[str, Sequence[Restart]] | None = None,
    ended_well: Mapping[str, int] | None = None,
    begins: Mapping[str, float] | None = None,
) -> Judgement:
    """`counts`: lines of each entry, also of those that were not kept; `begins` as `of` has them, the others
    as `Scan` does."""
    known = begins or {}
    found, ends = _in_one_year(found, ends)
    all_timed = [one for one in _timed(found) if one.number >= known.get(one.file, 0)]
    ends = [end for end in ends if end.number >= known.get(end.file, 0)]
    last_runs = _last_runs(all_timed, ends, restarts or {}, ended_well or {})
    ends = [end for end in ends if end.number >= last_runs.get(end.file, 0)]
    who = _Who(ends, set(nodes), places or {})
    of_last_run = [one for one in all_timed if one.number >= last_runs.get(one.file, 0)]
    timed = _ending(of_last_run, ends, lengths or {}, ended_well or {})
    if not timed and not ends:
        return Judgement((), _seen_only(all_timed, who, counts), None)
    timed = _doubted(timed or of_last_run)
    by_entry: dict[str, list[Evidence]] = {}
    for one in timed:
        if one.entry is not None and _has_company(one, helped or {}):
            by_entry.setdefault(one.entry.id, []).append(one)
    findings = [who.finding(_surest(lines), counts) for lines in by_entry.values()]
    followed = {id_ for one in findings for id_ in one.entry.follows}
    lasting = [one for one in findings if not _passed(one, followed)]
    seen = {one.entry.id for one in lasting}
    first = [one for one in lasting if not one.entry.follows & (seen - {one.entry.id})] or lasting
    has_failed = bool(ends) or any(not _is_of_good_run(one) for one in timed)
    first = [one for one in first if has_failed or not _is_of_good_run(one.first)]
    first.sort(key=_ranking)
    unknown = _surest([one for one in timed if one.entry is None and one.is_exception])
    best = first[0] if first else None
    if unknown and (best is None or best.entry.kind == "echo" or _is_behind(best, unknown[0])):
        same = [replace(one, entry=own_error) for one in unknown]
        return Judgement((who.finding(same, counts),), tuple(sorted(findings, key=_ranking)), None)
    if best is None or best.entry.kind in ("hint", "echo") or _is_doubtful(best, timed):
        rows = [one for one in timed if one.entry is None]
        earliest = next((one for one in rows if not one.is_mild), None) or next(iter([*rows, *timed]), None)
        return Judgement((), tuple(sorted(findings, key=_ranking)), earliest and who.of(earliest))
    if any(_is_rival(one, best) for one in first[1:]):
        return Judgement((), tuple(sorted(findings, key=_ranking)), best.first)
    level = _RANKING[best.entry.kind]
    causes = [one for one in first if _RANKING[one.entry.kind] == level]
    others = [one for one in findings if one not in causes]
    return Judgement(tuple(causes), tuple(sorted(others, key=_ranking)), None)


def _last_runs(
    timed: Sequence[Evidence],
    ends: Sequence[ProcessEnd],
    restarts: Mapping[str, Sequence[Restart]],
    ended_well: Mapping[str, int],
) -> dict[str, int]:
    """Of files with several runs of a job, the line with which the one begins that tells how it ended: what
    was before is of a run that is over."""
    begins = {}
    by_file: dict[str, list[Evidence]] = {}
    for one in sorted(timed, key=_order):
        if one.file in restarts:
            by_file.setdefault(one.file, []).append(one)
    ended: dict[str, list[int]] = {}
    for end in ends:
        ended.setdefault(end.file, []).append(end.number)
    for file, rows in by_file.items():
        failures = [one for one in rows if _is_failure(one)]
        over = [one.number for one in rows if _is_by_scheduler(one)] + ended.get(file, [])
        for place in sorted(restarts[file], key=_number, reverse=True):
            if place.is_head and not any(number < place.number for number in over):
                continue
            later = [one for one in failures if one.number > place.number]
            before = [one for one in failures if one.number <= place.number]
            is_told = _tells_of_itself(later) and not (place.is_head and _may_follow(later, before))
            went_well = place.steps >= STEPS or ended_well.get(file, 0) > place.number
            if is_told if later else went_well:
                begins[file] = place.number
                break
    return begins


def _ending(
    timed: Sequence[Evidence],
    ends: Sequence[ProcessEnd],
    lengths: Mapping[str, int],
    ended_well: Mapping[str, int],
) -> list[Evidence]:
    """Those after which the program did not go on, as far as one can tell; and commands of the job script
    that failed, where one of those may follow from it."""
    last: dict[str, int] = {}
    for one in timed:
        last[one.file] = max(last.get(one.file, 0), one.number)
    behind = {file: lengths.get(file, 0) - number for file, number in last.items()}
    died = {one.file for one in timed if _tells_end(one)} | {one.file for one in ends}
    ending = [
        one
        for one in timed
        if behind[one.file] < (FEW_BEHIND if one.is_mild and one.file not in died else MANY_BEHIND)
        and not _went_on(one, ends)
        and (one.file in died or one.number >= ended_well.get(one.file, 0) or not _may_be_over(one))
    ]
    followed = {id_ for one in ending if one.entry is not None for id_ in one.entry.follows}
    kept = {one.order for one in ending}
    return [
        one
        for one in timed
        if one.order in kept or (one.is_of_shell and one.entry is not None and one.entry.id in followed)
    ]


def _may_be_over(one: Evidence) -> bool:
    """Whether the end of a program that says it ended well speaks against it. Where none ever ran, a job
    script says so too, of its last command."""
    return one.entry is None or (one.entry.family != "Apptainer" and one.entry.id != "script-missing")


def _tells_of_itself(failures: Sequence[Evidence]) -> bool:
    """Whether these failures of a further run need not follow from the run before: nodes that do not find
    each other again may."""
    causes = [one for one in failures if one.entry is None or one.entry.kind != "echo"]
    return not causes or any(one.entry is None or one.entry.family != "rendezvous" for one in causes)


def _tells_end(one: Evidence) -> bool:
    """Whether a process failed with it, or the scheduler says what became of the job."""
    if one.is_last:
        return True
    if one.entry is None or one.is_mild:
        return False
    return _is_by_scheduler(one) or one.entry.id in (SAYS_FAILED | DEATHS)


def _is_by_scheduler(one: Evidence) -> bool:
    return one.entry is not None and one.entry.family in ("Slurm", "PBS")


def _may_follow(later: Sequence[Evidence], before: Sequence[Evidence]) -> bool:
    """Whether what failed later says no cause of its own, or may follow from what had failed before."""
    causes = [one for one in later if one.entry is None or one.entry.kind == "cause"]
    known = {one.entry.id for one in before if one.entry is not None}
    return not causes or any(one.entry is not None and one.entry.follows & known for one in causes)


def _passed(one: CauseFound, followed: Iterable[str]) -> bool:
    """Whether the line only passes by. A command of a job script that failed may be what another cause that
    was seen follows from."""
    is_behind_it = one.first.is_of_shell and one.entry.id in followed
    return one.first.is_passing and one.entry.kind == "cause" and not is_behind_it


def _time(one: ProcessEnd) -> float:
    return one.time


def _number(one: Restart) -> int:
    return one.number


def _is_failure(one: Evidence) -> bool:
    """Whether a run failed with it: no warning, and no more than that others left."""
    if one.entry is None:
        return one.is_exception and not one.is_mild
    is_end = one.entry.kind in ("cause", "symptom") or one.entry.id in SAYS_FAILED
    return is_end and not one.is_mild and not one.is_of_shell and not one.went_on


def _went_on(one: Evidence, ends: Sequence[ProcessEnd]) -> bool:
    """A traceback that the program shows itself may be the last that it did, and what it had in a buffer
    comes behind: that counts where a process failed."""
    return one.went_on and not (one.is_printed and ends)


def _doubted(timed: Sequence[Evidence]) -> list[Evidence]:
    """The same: if steps stand just before a later failure of a file, its program went on after what it said
    before and did not end with, and after an exception that it caught if another one ended it."""
    alive: dict[str, tuple[int, int]] = {}
    for one in timed:
        is_failure = one.is_exception if one.entry is None else one.entry.kind == "cause" and one.is_last
        if is_failure and one.steps_before >= STEPS_BEFORE:
            alive[one.file] = max(alive.get(one.file, (0, 0)), one.order)
    last: dict[str, list[Evidence]] = {}
    for one in timed:
        if one.is_last:
            last.setdefault(one.file, []).append(one)
    return [
        replace(one, may_have_gone_on=True)
        if (not one.is_last and one.order[1] + FAR < alive.get(one.file, (0, 0))[1])
        or _is_replaced(one, last.get(one.file, ()))
        else one
        for one in timed
    ]


def _surest(rows: Sequence[Evidence]) -> list[Evidence]:
    """Those after which the program did not go on; of them those that are no warnings. If there are none of a
    kind, all."""
    ending = [one for one in rows if not one.may_have_gone_on]
    return [one for one in ending if not one.is_mild] or ending or list(rows)


def _is_rival(one: CauseFound, best: CauseFound) -> bool:
    """Whether two processes ended with causes of different kinds, and nothing tells which was first: their
    lines are in different files, and have no time."""
    each_ended = all(which.entry.kind == "cause" and which.first.is_last for which in (one, best))
    is_unordered = one.first.file != best.first.file and one.first.time is None and best.first.time is None
    return each_ended and is_unordered and one.entry.family != best.entry.family


def _seen_only(timed: Sequence[Evidence], who: _Who, counts: Mapping[str, int]) -> tuple[CauseFound, ...]:
    first = {one.entry.id: one for one in reversed(timed) if one.entry is not None}
    return tuple(sorted((who.finding([one], counts) for one in first.values()), key=_ranking))


def _in_one_year(
    found: Sequence[Evidence], ends: Sequence[ProcessEnd]
) -> tuple[Sequence[Evidence], Sequence[ProcessEnd]]:
    """Times have no year: of two that are more than half of one apart, the one of January comes after that
    of December."""
    times = [*(one.time for one in found), *(end.time for end in ends)]
    begin = max((time for time in times if time is not None and time < math.inf), default=0.0) - YEAR / 2
    return (
        [
            replace(one, time=one.time + YEAR) if one.time is not None and one.time < begin else one
            for one in found
        ],
        [replace(end, time=end.time + YEAR) if end.time < begin else end for end in ends],
    )


def _timed(found: Sequence[Evidence]) -> list[Evidence]:
    """The earliest first. A line without a time has that of the line before it in its file, else of the one
    behind; if a file has none, its lines come last."""
    rows = sorted(found, key=_order)
    for way in (rows, rows[::-1]):
        known: dict[str, float] = {}
        for at, one in enumerate(way):
            if one.time is not None:
                known[one.file] = one.time
            elif one.file in known:
                way[at] = replace(one, time=known[one.file])
        rows[:] = way if way is rows else way[::-1]
    return sorted(rows, key=_when)


def _order(one: Evidence) -> tuple[int, int]:
    return one.order


def _has_company(one: Evidence, helped: Mapping[tuple[str, int], tuple[int, int]]) -> bool:
    """Whether the other patterns that its entry asks for were there, those of `then` behind it."""
    entry = one.entry
    assert entry is not None
    places = [helped.get((entry.id, place)) for place in range(len(entry.all) + len(entry.then))]
    if None in places:
        return False
    later = [place for place in places[len(entry.all) :] if place is not None]
    steps = [one.order, *later]
    return all(steps[at] < steps[at + 1] for at in range(len(later)))


def _when(one: Evidence) -> tuple[float, bool, tuple[int, int]]:
    """Lines without a time come behind those that have one, in their order. torchrun's report has seconds
    alone, and its first failure comes last in it."""
    return (one.time if one.time is not None else float("inf"), one.is_later, one.order)


def _ranking(one: CauseFound) -> tuple[int, bool, float, bool, tuple[int, int]]:
    """Weak lines come behind others."""
    return (_RANKING[one.entry.kind], _is_weak(one.first), *_when(one.first))


def _is_of_good_run(one: Evidence) -> bool:
    """Whether good runs have such lines too."""
    if one.entry is None:
        return False
    return one.entry.kind in _OF_GOOD_RUNS or (one.is_mild and one.entry.kind in ("cause", "echo"))


def _is_weak(one: Evidence) -> bool:
    if one.is_mild or one.is_of_shell or one.may_have_gone_on:
        return True
    return one.entry is not None and one.entry.kind == "warning"


def _is_doubtful(best: CauseFound, timed: Sequence[Evidence]) -> bool:
    """Whether a line that calls itself a warning is all that speaks for it, and there is an error that nobody
    knows."""
    is_mild = best.first.is_mild and best.entry.kind != "warning"
    return is_mild and any(one.entry is None and not one.is_mild for one in timed)


class _Who:
    """Finds the rank and node of a finding by what other lines tell. It does not change."""

    def __init__(self, ends: Sequence[ProcessEnd], nodes: set[str], places: Mapping[int, str]) -> None:
        self._ends = sorted(ends, key=_time)
        self._nodes = nodes
        self._places = places

    def finding(self, lines: Sequence[Evidence], counts: Mapping[str, int]) -> CauseFound:
        """Of the lines of one entry, the earliest first."""
        first = lines[0]
        entry = first.entry
        assert entry is not None
        one = self.of(first, lines)
        failed = {end.node for end in self._ends if end.node}
        is_alone = len(failed | {one.node}) == 1 and len(self._nodes) > 1
        ranks = {end.rank for end in self._ends if end.node == one.node}
        is_first_of_many = bool(ranks - {None, 0}) and 0 not in ranks
        is_alone = is_alone or (is_first_of_many and len(failed) == 1)
        at_fault = entry.node == "yes" or (entry.node == "alone" and is_alone)
        device = next((line.device for line in lines if line.device), "")
        count = max(counts.get(entry.id, 0), len(lines))
        return CauseFound(entry, one, one.rank, one.node, device, one.node if at_fault else "", count)

    def of(self, first: Evidence, lines: Sequence[Evidence] = ()) -> Evidence:
        """The same with its rank and node, as far as they can be known."""
        rank, node = first.rank, first.node
        alike = [one for one in lines if one.file == first.file and one.rank is not None]
        if rank is None and alike and alike[0].node in ("", node):
            rank = alike[0].rank
        named = [one.node for one in lines if one.node]
        ends = self._ends_of(first, named)
        if rank is None:
            rank = next((end.rank for end in ends if end.is_one and node in ("", end.node)), None)
        if not node and rank is not None:
            node = self._places.get(rank, "") or next(
                (end.node for end in self._ends if end.rank == rank), ""
            )
        if not node:
            failed = {end.node for end in ends if end.node}
            node = named[0] if named else next(iter(failed), "") if len(failed) == 1 else ""
        return replace(first, rank=rank, node=node)

    def _ends_of(self, first: Evidence, named: Sequence[str]) -> Sequence[ProcessEnd]:
        """Those that may be of a line: on the nodes that its entry names, if there are any. Of an exception,
        those that were not aborted, if there are any: that is how others end that wait for its rank."""
        short = {node.partition(".")[0] for node in named}
        ends = [end for end in self._ends if end.node.partition(".")[0] in short] or self._ends
        others = [end for end in ends if end.rank is not None and not end.is_abort]
        return others if first.is_last and others else ends


def _is_behind(best: CauseFound, unknown: Evidence) -> bool:
    """Whether a symptom or a weak line may have nothing to do with an exception that nobody knows, or may be
    its consequence."""
    if _RANKING[best.entry.kind] == 0:
        is_consequence = OWN_ERROR in best.entry.follows and _when(unknown) < _when(best.first)
        is_later = _is_behind_an_end(best.first, unknown) or _is_told_later(best.first, unknown)
        return _is_weak(best.first) or is_consequence or is_later
    if best.first.time is not None and unknown.time is not None:
        return unknown.time <= best.first.time + CLOSE
    if best.first.file == unknown.file:
        return unknown.order < best.first.order
    return True


def _is_behind_an_end(one: Evidence, end: Evidence) -> bool:
    """Whether an exception had ended a process before this was said, which ended none. What stands just
    behind an exception may be of its message."""
    if not end.is_last or one.is_last:
        return False
    if one.file == end.file:
        return one.number > end.number + MESSAGE
    return one.time is not None and end.time is not None and one.time > end.time + CLOSE


def _is_told_later(one: Evidence, other: Evidence) -> bool:
    """Whether torchrun's report has this failure, and names the other one as the first."""
    return one.is_later and not other.is_later and one.file == other.file


def _is_replaced(one: Evidence, last: Sequence[Evidence]) -> bool:
    """Whether an exception was caught, and a later one ended its program: not that saving failed too, or that
    cleaning up missed what had not been set yet, while the first one was on its way; nor that others waited
    for its rank, or did not meet it. `last`: those of its file that ended a process."""
    if not (one.is_chained or one.is_caught):
        return False
    behind = [later for later in last if later.order > one.order and not _is_by_scheduler(later)]
    same = [later for later in behind if one.rank is None or later.rank in (None, one.rank)]
    if one.is_chained:
        following = min(same, key=_order, default=one)
        is_of_cleaning_up = following.is_of_cleaning_up or following.text.startswith(_OF_CLEANING_UP)
        same = [] if is_of_cleaning_up or following is one else [following]
    else:
        same = [later for later in same if later.entry is None or later.entry.family != "rendezvous"]
    return any(_may_replace(one, later) for later in same)


def _may_replace(one: Evidence, later: Evidence) -> bool:
    """Whether the later one is a cause, and does not follow from the other."""
    if later.entry is None:
        return later.is_exception
    id_ = one.entry.id if one.entry is not None else OWN_ERROR
    return later.entry.kind == "cause" and id_ not in later.entry.follows
