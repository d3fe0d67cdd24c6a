"""`apptrain explain LOG|DIR|RUN|JOBSCRIPT|- [--json]`: reads what was given, and says what it means.
Begin at `main`.

Exit statuses: of a log 0 if the cause is known, 1 if not; of a job script 0 if something is to be mended, 1
if nothing was found; 64 if there is nothing to read.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.checkout import apptrain
from entrypoint.core.errors import BadInput
from entrypoint.core.plain import counted, plain
from entrypoint.explain import catalogue, jobscript, judge, logs, run
from entrypoint.explain.judge import CauseFound, Judgement
from entrypoint.explain.scan import Evidence, Index, Scan

KNOWN, UNKNOWN = 0, 1
STDIN = "-"
SHOWN = 5
"""Further things that are listed in words."""


def main(what: str, *, as_json: bool) -> int:
    """Prints what is to be said of it. Raises BadInput."""
    if what != STDIN and jobscript.is_one(Path(what)):
        return jobscript.main(Path(what), as_json=as_json)
    if Path(what).suffix == ".py" and files.is_regular(Path(what)):
        raise BadInput(
            "explain-program",
            f"explain: {plain(what)} is a program: give the log of a run of it; of `{apptrain()} run -- "
            f"{plain(what)}` the run directory, which its first line names",
        )
    scan = Scan(Index(catalogue.load()))
    told = None
    if what == STDIN:
        done = logs.read_stream(sys.stdin.buffer, STDIN, scan)
    else:
        path = Path(what)
        told = run.read(path)
        done = run.read_logs(path, told, scan) if told else _read(path, scan)
    if scan.size == 0 and told is None:
        why = f" ({plain(done.skipped[0])})" if done.skipped else ""
        raise BadInput(
            "explain-nothing",
            f"explain: {plain(what)} has nothing to read{why}: give a log, a folder of logs, or -",
        )
    begins = run.begins(Path(what), told) if told is not None else {}
    found = judge.of(scan, catalogue.own_error(), begins)
    if told is not None:
        found = run.with_told(found, told)
    rows = [cause(one) for one in found.causes]
    if as_json:
        _print_json(found, rows, scan, done)
    else:
        is_run = what != STDIN and run.is_one(Path(what)) and _is_listed(Path(what))
        is_unended = told.is_unended if told else is_run
        print("\n".join(_in_words(found, rows, scan, done, told, is_unended=is_unended)))
    return KNOWN if rows else UNKNOWN


def _is_listed(path: Path) -> bool:
    return os.access(path / "outcome", os.R_OK | os.X_OK)


def _read(path: Path, scan: Scan) -> logs.Read:
    try:
        return logs.read_all(path, scan)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            "explain-unreadable",
            f"explain: {plain(str(path))} cannot be read ({plain(why)}): give a log, a folder of logs, a run "
            "directory, a job script, or - for a log that is piped in",
        ) from None


def cause(one: CauseFound) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "id": one.entry.id,
        "title": one.entry.title,
        "why": f"{one.entry.why} The log says: {plain(one.first.text)}",
        "remedy": one.entry.remedy,
        "where": {"file": plain(one.first.file), "line": one.first.number},
        "rank": one.rank,
        "node": plain(one.node) or None,
        "device": one.device or None,
        "leave_out": plain(one.leave_out) or None,
        "kind": one.entry.kind,
        "count": one.count,
        "source": one.entry.source,
    }


def _evidence(one: Evidence | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "text": plain(one.text),
        "where": {"file": plain(one.file), "line": one.number},
        "rank": one.rank,
        "node": plain(one.node) or None,
    }


def _print_json(found: Judgement, rows: list[dict[str, Any]], scan: Scan, done: logs.Read) -> None:
    whole = {
        "schema_version": 1,
        "causes": rows,
        "also_seen": [cause(one) for one in found.others],
        "earliest_error": _evidence(found.unknown),
        "read": {
            "files": done.count,
            "bytes": scan.size,
            "not_read": [plain(one) for one in done.skipped[:20]],
        },
    }
    print(json.dumps(whole, indent=2).replace("\x7f", "\\u007f"))


def _in_words(
    found: Judgement,
    rows: list[dict[str, Any]],
    scan: Scan,
    done: logs.Read,
    told: run.Told | None,
    *,
    is_unended: bool,
) -> Iterable[str]:
    if rows:
        first = found.causes[0]
        yield f"{first.entry.title} ({first.entry.id})"
        yield from _fact("where", _place(first))
        yield f"  {_at(first.first)}: {plain(first.first.text)}"
        if first.entry.kind == "symptom":
            yield from _fact("note", "a symptom: what caused it is not in this log")
        yield from _fact("why", first.entry.why)
        for number, remedy in enumerate(first.entry.remedies):
            text = f"if {remedy.when}: {remedy.text}" if remedy.when else remedy.text
            yield from _fact("do" if number == 0 else "", text)
        if first.leave_out:
            yield from _fact("leave out", plain(first.leave_out))
        yield from _fact("source", first.entry.source)
        if told is not None and told.is_unended:
            yield from _fact("note", told.ended)
    elif told is not None and told.failure is None and found.unknown is None:
        yield told.ended
    elif found.unknown is None and found.others:
        yield "nothing says that it failed: it went on after all that was seen"
    else:
        yield "the cause is not known"
        if found.unknown is not None:
            one = found.unknown
            yield "  the earliest error:" if one.entry is None else "  the earliest line that tells of one:"
            where = _who(one.rank, one.node, one.device)
            yield f"  {_at(one)}{f' ({where})' if where else ''}: {plain(one.text)}"
            for echo in found.others[:1]:
                yield from _fact("note", f"{echo.entry.title}: {echo.entry.remedy}")
        else:
            yield f"  no line of {counted(scan.lines, 'line')} looks like an error"
        if is_unended:
            yield f"  {told.ended if told else run.UNENDED}"
    others = [*found.causes[1:], *(one for one in found.others if rows or one.entry.kind != "echo")]
    if others:
        yield "also seen:"
        for other in others[:SHOWN]:
            count = f" ({other.count} lines)" if other.count > 1 else ""
            yield f"  {_at(other.first)}: {other.entry.title} ({other.entry.id}){count}"
        if len(others) > SHOWN:
            yield f"  and {len(others) - SHOWN} more (--json has all)"
    for one_skipped in done.skipped[:SHOWN]:
        yield f"not read: {plain(one_skipped)}"


def _fact(name: str, text: str) -> Iterable[str]:
    if text:
        yield f"  {name + ':' if name else '':<10} {text}"


def _at(one: Evidence) -> str:
    return f"{plain(one.file)}:{one.number}"


def _place(one: CauseFound) -> str:
    return _who(one.rank, one.node, one.device)


def _who(rank: int | None, node: str, device: str) -> str:
    parts: Sequence[str] = (
        f"rank {rank}" if rank is not None else "",
        f"node {plain(node)}" if node else "",
        f"GPU {device}" if device else "",
    )
    return ", ".join(part for part in parts if part)
