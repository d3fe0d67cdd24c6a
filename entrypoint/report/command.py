"""`apptrain report RUN`: one HTML page about a run, or an archive for a support desk. `main` is the command,
`leave` what the end of a run calls.

Runs with the Python of a login node, from 3.9 on, and needs no package.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from entrypoint.core.errors import BadInput
from entrypoint.core.plain import plain
from entrypoint.core.private import write_output, write_private
from entrypoint.record import causes, reading, tokens, traces
from entrypoint.record.compare import Pair
from entrypoint.report import bundle, facts, page
from entrypoint.report.facts import RunFacts

NAME = "report.html"
SECONDS = 300.0
"""For the metrics of a run, if the command was typed."""
AT_END = 10.0
"""Seconds at the end of a run, all in all."""


def main(run: Path, out: str, *, bundled: bool, other: str, env: Mapping[str, str]) -> int:
    """Writes one file, and prints its name. Raises BadInput."""
    found = facts.read(run, env, SECONDS)
    _check_run(found)
    html = page.html(found, _pair(found, Path(other), env) if other else None)
    if bundled:
        target = Path(out) if out else Path(f"{run.resolve()}-support.tar.gz")
        content = bundle.pack(found, html, env)
        write_output(target, content.archive, "report", follow=bool(out))
        print("\n".join(content.in_words()))
    else:
        target = Path(out) if out else run / NAME
        write_output(target, html.encode(), "report", follow=bool(out))
        for line in found.missing:
            print(f"missing: {line}")
    print(target)
    return 0


def leave(run: Path, attempt: int, env: Mapping[str, str]) -> str:
    """Writes the report of a run of the reference program whose last attempt this was; of any other, nothing.
    Returns what kept it from that; empty if nothing did. It takes AT_END seconds at most: a file system that
    hangs keeps a thread, which does not keep the process."""
    failed = ["it took too long"]

    def write() -> None:
        try:
            if _trained(run, attempt):
                found = facts.read(run, env, AT_END / 2)
                write_private(run / NAME, page.html(found))
            failed.clear()
        except Exception as error:  # whatever it is: it must not change how the job ends
            failed[:] = [f"{type(error).__name__}: {plain(str(error))}"]

    thread = threading.Thread(target=write, daemon=True, name="report")
    thread.start()
    thread.join(AT_END)
    return failed[0] if failed else ""


def _trained(run: Path, attempt: int) -> bool:
    try:
        config = facts.config_of(run)
    except (OSError, ValueError):
        return False
    return config.get("attempt") == attempt


def _check_run(found: RunFacts) -> None:
    if not (found.attempts or found.plan or found.said or any(found.trace.values()) or found.result):
        raise BadInput(
            "report-no-run",
            f"report: {plain(str(found.path))} has nothing of a run: "
            f"give a run directory, such as {reading.such_as(found.path)}",
        )


def _pair(found: RunFacts, other: Path, env: Mapping[str, str]) -> Pair:
    """This run and the other one. Raises BadInput if the other has no manifest."""
    manifest = tokens.hide_values(reading.of_run(other, "compared"), env)
    theirs = facts.read(other, env, SECONDS)
    equal, differ = causes.sort(found.manifest, manifest)  # type: ignore[arg-type]
    names = (found.name, theirs.name)
    return Pair(names, equal, differ, traces.compare(found.trace, theirs.trace))
