"""What a run directory of ours knows of its end: `read` its outcomes, `with_told` what follows from them
for the judgement of its logs. The run has seen which rank failed first, so that comes before any
pattern.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from entrypoint.core import files
from entrypoint.core.errors import DONE, SAVED
from entrypoint.core.plain import plain
from entrypoint.explain import catalogue, lines, logs, messages
from entrypoint.explain.catalogue import GENERAL
from entrypoint.explain.judge import CauseFound, Judgement
from entrypoint.explain.scan import Evidence, Index, Scan
from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome

MOST_OUTCOMES = 100_000


@dataclass(frozen=True)
class Told:
    """How the last attempt of a run ended."""

    attempt: int
    failure: Outcome | None
    """None: it ended well, or is not over."""
    file: str
    """The outcome that says so, from the run directory."""
    stacks: str
    """The folder with where each rank was; empty for none."""

    @property
    def ended(self) -> str:
        if self.failure is None:
            return f"attempt {self.attempt} has no failure: it ended well, or still runs"
        who = f"rank {self.failure.rank} on " if self.failure.rank is not None else ""
        return str(plain(f"{who}{self.failure.node}: status {self.failure.status}: {self.failure.reason}"))


def is_one(path: Path) -> bool:
    """Whether this is a run directory of ours."""
    return (path / "outcome").is_dir() and ((path / "logs").is_dir() or (path / "manifest.json").exists())


def read(path: Path) -> Told | None:
    """None for anything but a run directory in which something has ended."""
    if not is_one(path):
        return None
    found: dict[int, list[tuple[Outcome, str]]] = {}
    for number, file in enumerate(sorted((path / "outcome").iterdir())):
        first = file.name.partition(".")[0]
        if number >= MOST_OUTCOMES or not (first.isascii() and first.isdigit() and len(first) < 9):
            continue
        one = outcome.read(file)
        if one is not None:
            found.setdefault(int(first), []).append((one, f"outcome/{file.name}"))
    if not found:
        return None
    attempt = max(found)
    failures = [one for one in found[attempt] if one[0].status not in (DONE, SAVED)]
    first_failure = min(failures, key=_time, default=None)
    stacks = f"stacks/{attempt}"
    return Told(
        attempt,
        first_failure[0] if first_failure else None,
        first_failure[1] if first_failure else "",
        stacks if (path / stacks).is_dir() else "",
    )


def _time(one: tuple[Outcome, str]) -> float:
    return one[0].time


def read_logs(path: Path, told: Told, scan: Scan) -> logs.Read:
    """The logs of that attempt, and the job's own."""
    done = logs.Read()
    folder = Path("logs", str(told.attempt))
    if (path / folder).is_dir():
        logs.read_folder(path / folder, f"{folder}/", scan, done)
    if files.is_regular(path / "job.log"):
        logs.read_file(path / "job.log", "job.log", scan, done)
    return done


def with_told(found: Judgement, told: Told) -> Judgement:
    """The judgement of the logs, corrected by how the run ended."""
    failure = told.failure
    if failure is None:
        others = tuple(one for one in (*found.causes, *found.others) if one.entry.kind != "echo")
        return Judgement((), others, None)
    said = f"failed first, status {failure.status}: {failure.reason}"
    who = f"rank {failure.rank} on {failure.node} " if failure.rank is not None else f"{failure.node}: "
    line = f"apptrain: {who}{said}".encode("utf-8", "replace")
    entry = messages.rather(Index(catalogue.load()).entry(line, lines.body(line)), line)
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
