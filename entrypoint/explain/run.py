"""What a run directory of ours knows of its end: `read` its outcomes, `with_told` what follows from them
for the judgement of its logs. The run has seen which rank failed first, so that comes before any
pattern.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.errors import DONE, SAVED
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted, plain
from entrypoint.explain import catalogue, lines, logs, messages
from entrypoint.explain.catalogue import GENERAL
from entrypoint.explain.judge import CauseFound, Judgement
from entrypoint.explain.scan import LONGEST, Evidence, Index, Scan
from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.record import reading

NODE_LOST, CUT_OFF = "node-lost", "cut-off"
"""Entries of a node of which nothing was heard: it is known that it was gone, or it may have been the other
side."""
UNENDED = "no node has left an outcome: the run is not over, or all of it was killed"
JOB_LOG = "job.log"
_BEGINS = re.compile(rb"apptrain: (?:job \S+, |restart \d+ .*, as )attempt (\d{1,9})\b")
"""A line of it with which an attempt begins."""


@dataclass(frozen=True)
class Told:
    """How the last attempt of a run ended, as far as its nodes have left an outcome."""

    attempt: int
    failure: Outcome | None
    """None: it ended well, or is not over."""
    file: str
    """The outcome that says so, from the run directory."""
    stacks: str
    """The folder with where each rank was; empty for none."""
    loss: str = ""
    """Of a failure that is a node's loss, its entry."""
    otherwise: str = "it ended well, or still runs"
    """What became of an attempt without a failure."""
    before: Told | None = None
    """How the last one that left an outcome ended, if this one has left none."""

    @property
    def is_unended(self) -> bool:
        return self.before is not None

    @property
    def ended(self) -> str:
        if self.is_unended:
            return f"attempt {self.attempt}: {UNENDED}"
        if self.failure is None:
            return f"attempt {self.attempt} has no failure: {self.otherwise}"
        who = f"rank {self.failure.rank} on " if self.failure.rank is not None else ""
        return str(plain(f"{who}{self.failure.node}: status {self.failure.status}: {self.failure.reason}"))


def is_one(path: Path) -> bool:
    """Whether this is a run directory of ours."""
    if not files.is_directory(path / "outcome"):
        return False
    return files.is_directory(path / "logs") or files.exists(path / reading.NAME)


def read(path: Path) -> Told | None:
    """None for anything but a run directory in which something has ended."""
    if not is_one(path):
        return None
    try:
        attempt, found = outcome.of_newest_attempt(path / "outcome")
        begun = _newest_begun(path)
    except OSError:
        return None
    if not found:
        return None
    told = _told(path, attempt, found, script_is_lost=False)
    return Told(begun, None, "", "", before=told) if begun > attempt else told


def _newest_begun(path: Path) -> int:
    """The newest attempt that nodes have claimed, that has logs, or that the manifest has; -1 for none."""
    claimed = [one.name for one in (path / "outcome").glob("[0-9]*.nodes") if one.stat().st_size]
    numbers = [name.partition(".")[0] for name in (*claimed, *(one.name for one in path.glob("logs/[0-9]*")))]
    begun = [int(number) for number in numbers if number.isdecimal() and len(number) <= 9]
    return max([*begun, *(one["attempt"] for one in _attempts(path))], default=-1)


def of_attempt(path: Path, attempt: int, *, script_is_lost: bool, most: int) -> Told | None:
    """The same of one attempt, by at most so many outcomes; None where there are none. `script_is_lost`: it
    is known that its job script, which runs on the first node, did not live to its end. Raises OSError."""
    found = outcome.of_attempt(path / "outcome", attempt, most)
    return _told(path, attempt, found, script_is_lost=script_is_lost) if found else None


def _told(path: Path, attempt: int, found: Mapping[str, Outcome], *, script_is_lost: bool) -> Told:
    failures = {name: one for name, one in found.items() if one.is_failure}
    names = _names(path, attempt)
    left = {names.get(place) for place in outcome.places(path / "outcome", attempt)}
    silences = {name: one for name, one in found.items() if one.is_silence}
    gone = _gone(silences, set(names.values()) - left)
    if script_is_lost and not gone:
        gone = {one.node for one in silences.values()} & {names.get(0, "")}
    # Of two sides that lost each other, the one that was there to the end knows better.
    name = min(
        failures, key=lambda name: (_is_doubtful(failures[name], gone), failures[name].time), default=""
    )
    first = failures.get(name)
    loss = ""
    if first is not None and first.is_silence:
        loss = NODE_LOST if first.node in gone else CUT_OFF
    stacks = f"stacks/{attempt}"
    return Told(
        attempt,
        first,
        f"outcome/{name}" if name else "",
        stacks if files.is_directory(path / stacks) else "",
        loss,
        _without_failure(found, names, _ranks_per_node(path, attempt)),
    )


def _without_failure(found: Mapping[str, Outcome], names: Mapping[int, str], tasks_per_node: int) -> str:
    """What became of an attempt in which nothing failed, as far as its nodes' outcomes tell, or those of all
    tasks, if each rank is one: so many a node, 0 where that is not known."""
    one_a_node = {outcome.place(name): one.status for name, one in found.items() if name.count(".") == 1}
    statuses = set(one_a_node.values()) or {one.status for one in found.values()}
    if not names or (not one_a_node and len(found) != len(names) * tasks_per_node):
        return Told.otherwise
    missing = [name for place, name in sorted(names.items()) if one_a_node and place not in one_a_node]
    if missing:
        why = f"left no outcome that can be read, such as {missing[0]}: it still runs, or was killed"
        return str(plain(f"{len(missing)} of {counted(len(names), 'node')} {why}"))
    if statuses == {SAVED}:
        return f"it has saved, and ended as planned (status {SAVED})"
    return "it ended well" if statuses == {DONE} else Told.otherwise


def _is_doubtful(one: Outcome, gone: Iterable[str]) -> bool:
    return one.is_silence and one.node not in gone


def _gone(silences: Mapping[str, Outcome], left_nothing: set[str]) -> set[str]:
    """Of the nodes of which others heard nothing, those that were gone: they have left nothing, or several
    others say so of this one alone. `silences`: by the names of the files."""
    accusers: dict[str, set[int]] = {}
    for file, one in silences.items():
        accusers.setdefault(one.node, set()).add(outcome.place(file))
    by_several = {node for node, places in accusers.items() if len(places) > 1}
    return accusers.keys() & left_nothing | (by_several if len(by_several) == 1 else set())


def _names(path: Path, attempt: int) -> Mapping[int, str]:
    """The nodes of an attempt by their places, as far as the run directory tells."""
    if crew := RunDirectory(path, attempt).crew_names():
        return crew
    nodes = next((one.get("nodes", ()) for one in _attempts(path) if one["attempt"] == attempt), ())
    return dict(enumerate(nodes))


def _ranks_per_node(path: Path, attempt: int) -> int:
    """By the manifest; 0 where it does not say so."""
    counts = [one.get("nproc_per_node") for one in _attempts(path) if one["attempt"] == attempt]
    return next((count for count in counts if type(count) is int), 0)


def _attempts(path: Path) -> Sequence[Mapping[str, Any]]:
    """Those of the manifest; none if it cannot be read."""
    try:
        attempts = reading.read(path / reading.NAME)["attempts"]
    except (OSError, ValueError):
        return []
    return [one for one in attempts if type(one.get("attempt")) is int]


def begins(path: Path, told: Told) -> Mapping[str, float]:
    """The line of the job's log with which an attempt begins that has left no outcome: what is before it is
    of those that have. Infinite if there is none yet."""
    if not told.is_unended:
        return {}
    try:
        with files.open_regular(path / JOB_LOG) as file:
            number = 1
            while row := file.readline(LONGEST):
                found = _BEGINS.match(row) if row.startswith(b"apptrain: ") else None
                if found and int(found[1]) == told.attempt:
                    return {JOB_LOG: number}
                number += row.endswith(b"\n")
    except (OSError, ValueError):
        return {}
    return {JOB_LOG: math.inf}


def read_logs(path: Path, told: Told, scan: Scan) -> logs.Read:
    """The logs of that attempt, and the job's own."""
    done = logs.Read()
    folder = Path("logs", str(told.attempt))
    if files.is_directory(path / folder):
        logs.read_folder(path / folder, f"{folder}/", scan, done)
    if files.is_regular(path / JOB_LOG):
        logs.read_file(path / JOB_LOG, JOB_LOG, scan, done)
    return done


def with_told(found: Judgement, told: Told) -> Judgement:
    """The judgement of the logs, corrected by how the run ended."""
    if told.before is not None:
        earlier = with_told(Judgement((), (), None), told.before)
        one = earlier.unknown
        own = [CauseFound(catalogue.own_error(), one, one.rank, one.node, "", "", 1)] if one else []
        return replace(found, others=(*found.others, *earlier.causes, *own))
    failure = told.failure
    if failure is None:
        others = tuple(one for one in (*found.causes, *found.others) if one.entry.kind != "echo")
        return Judgement((), others, None)
    said = f"failed first, status {failure.status}: {failure.reason}"
    who = f"rank {failure.rank} on {failure.node} " if failure.rank is not None else f"{failure.node}: "
    line = f"apptrain: {who}{said}".encode("utf-8", "replace")
    entry = messages.rather(Index(catalogue.load()).entry(line, lines.body(line)), line)
    if told.loss:
        entry = next(one for one in catalogue.load() if one.id == told.loss)
    evidence = Evidence(
        entry=entry,
        text=plain(failure.reason),
        file=told.file,
        number=_line(failure),
        order=(-1, 0),
        time=None,
        rank=failure.rank,
        node=failure.node,
        device="",
    )
    own = [one for one in found.causes if one.entry.kind == "cause" and _is_of(one, failure)]
    is_vague = entry is None or entry.kind != "cause" or entry.id in GENERAL
    if entry is None or (is_vague and own):
        if own:
            first = replace(own[0], rank=failure.rank, node=own[0].node or failure.node)
            return Judgement((first, *own[1:]), found.others, None)
        return Judgement((), (*found.causes, *found.others), evidence)
    at_fault = failure.node if entry.node == "yes" else ""
    first = CauseFound(entry, evidence, failure.rank, failure.node, "", at_fault, 1)
    others = tuple(one for one in (*found.causes, *found.others) if one.entry.id != entry.id)
    return Judgement((first,), others, None)


def in_lines(failure: Outcome, where: Path) -> tuple[str, ...]:
    """At most two lines for the end of a job of ours; none if the catalogue has nothing of its own to say."""
    if not failure.error:
        return ()
    line = f"apptrain: rank {failure.rank} failed first, status {failure.status}: {failure.error}".encode()
    entry = Index(catalogue.load()).entry(line, lines.body(line))
    entry = messages.rather(entry, failure.error.encode())
    if entry is None or entry.kind == "echo" or entry.family == "apptrain":
        return ()
    first = entry.remedies[0].text
    return (
        f"explain: {entry.title}: {first}",
        f"explain: more by `apptrain explain {shlex.quote(str(where))}`",
    )


def _line(failure: Outcome) -> int:
    """Of the error, in an outcome's file."""
    return 6 if failure.error else 1


def _is_of(one: CauseFound, failure: Outcome) -> bool:
    """Whether this may be why the blamed rank failed."""
    if failure.rank is None or one.rank is None:
        return one.node in ("", failure.node) or not failure.node
    return one.rank == failure.rank
