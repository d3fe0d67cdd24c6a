"""`apptrain compare RUN RUN...`: what is equal, what differs, where the numbers part, and what explains it.
Begin at `main`; the words and exit statuses are here, the rules in causes.py and traces.py.

Runs on a login node, with Python 3.9 and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted, plain
from entrypoint.plan.mistakes import program
from entrypoint.record import causes, picture, reading, traces
from entrypoint.record.causes import Difference
from entrypoint.record.traces import Parting, Trace

IDENTICAL, DIFFERENT = 0, 1
WIDEST = 40
"""Characters of a value that is shown."""
A_LINE = 'a line {"step": 1, "loss": 2.3} for each step into it, in the directory APPTRAIN_RUN_DIR'
"""What a program has to write, for a message."""
OPEN = "unexplained: nothing that differs explains it (docs/compare.md)"


@dataclass(frozen=True)
class Run:
    path: Path
    manifest: dict[str, Any]
    trace: Trace

    @property
    def name(self) -> str:
        """Its path, as it is shown."""
        return str(plain(str(self.path)))


@dataclass(frozen=True)
class Pair:
    """The first run and another."""

    runs: tuple[str, str]
    equal: list[str]
    differ: list[Difference]
    parting: Parting
    unrecorded: Sequence[str] = ()
    """Variables that both runs had, and whose values no manifest has."""

    @property
    def explained(self) -> list[Difference]:
        """What explains that the numbers part; empty where they do not, or where nothing does."""
        return [one for one in self.differ if self.parting.series and one.explains(self.parting.series)]

    @property
    def verdict(self) -> str:
        if self.parting.identical:
            return "identical"
        if self.parting.first is None:
            return "one is longer" if self.parting.lengths[0] != self.parting.lengths[1] else "other steps"
        return "explained" if self.explained else "unexplained"

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": list(self.runs),
            "verdict": self.verdict,
            "equal": self.equal,
            "differ": [dataclasses.asdict(one) for one in self.differ],
            "traces": _finite(dataclasses.asdict(self.parting)),
            "causes": [one.name for one in self.explained],
        }

    def in_words(self) -> list[str]:
        rows = [(in_short(one.name), *map(in_short, one.values)) for one in self.differ]
        widths = [max((len(row[at]) for row in rows), default=0) for at in (0, 1)]
        return [
            f"{self.runs[0]} and {self.runs[1]}",
            f"equal: {', '.join(self.equal) or 'nothing that is known'}",
            "different:" if rows else "different: nothing that is known",
            *(f"  {name:{widths[0]}}  {a:{widths[1]}}  {b}".rstrip() for name, a, b in rows),
            self.in_steps(),
            *(f"because of {in_short(one.name)}: {one.rule}" for one in self.explained),
            *([self._open()] if self.verdict == "unexplained" else []),
        ]

    def _open(self) -> str:
        unknown = plain(", ".join(self.unrecorded))
        return OPEN + (f"; not recorded are the values of {unknown}" if unknown else "")

    def in_steps(self) -> str:
        found, steps = self.parting, counted(self.parting.steps, "step")
        if found.first is not None and found.values is not None:
            a, b = found.values
            return (
                f"traces: they part at step {found.first}, {found.series} {a!r} and {b!r}; "
                f"the losses are within {found.within:.3g} over {steps}"
            )
        if found.identical:
            return f"traces: identical, bit for bit, over {steps}"
        one, other = found.lengths
        if one != other:
            return f"traces: identical for {steps}; one ends at {one}, the other at {other}"
        one, other = found.counts
        values = counted(one, "value")
        return f"traces: identical for {steps}; of {found.uneven} one has {values}, the other {other}"


def main(paths: Sequence[str], *, as_json: bool, image: str = "") -> int:
    """Prints the comparison of the first run with each of the others. `image`: a file for its picture. Raises
    BadInput for what cannot be compared."""
    if image:
        picture.check(Path(image))
    runs = [load(Path(path)) for path in paths]
    first, *others = runs
    for other in others:
        _check(first, other)
    pairs = [_pair(first, other) for other in others]
    if as_json:
        text = json.dumps({"schema_version": 1, "pairs": [pair.to_json() for pair in pairs]}, indent=2)
        print(text.replace("\x7f", "\\u007f"))  # the one control character that JSON lets pass
    else:
        print("\n\n".join("\n".join(pair.in_words()) for pair in pairs))
    if image:
        picture.draw([run.name for run in runs], [run.trace for run in runs], Path(image))
        print(f"apptrain: {plain(image)} is drawn", file=sys.stderr)
    return IDENTICAL if all(pair.parting.identical for pair in pairs) else DIFFERENT


def load(path: Path) -> Run:
    """Raises BadInput where there is no run that can be compared."""
    name = plain(str(path))
    manifest = reading.of_run(path, "compared")
    try:
        trace = traces.read(path / traces.NAME)
    except OSError as error:
        raise BadInput(
            "metrics-unreadable",
            f"{name} cannot be compared: {traces.NAME}: {error.strerror}: "
            f"have the script write {A_LINE} (docs/compare.md)",
        ) from None
    except ValueError as error:
        raise BadInput("metrics-damaged", f"{name}/{traces.NAME} is no trace: {error}") from None
    if not trace["loss"]:
        raise BadInput(
            "metrics-no-step",
            f"{name} cannot be compared: {traces.NAME} has no step with a loss: "
            f"have the script write {A_LINE} (docs/compare.md)",
        )
    return Run(path, manifest, trace)


def _check(one: Run, other: Run) -> None:
    names = [program(run.manifest["command"]) if run.manifest["command"] else "" for run in (one, other)]
    if names[0] != names[1]:
        raise BadInput(
            "compare-other-program",
            f"{one.name} ran {plain(names[0])} and {other.name} ran {plain(names[1])}: "
            "give runs of the same program",
        )


def _pair(one: Run, other: Run) -> Pair:
    equal, differ = causes.sort(one.manifest, other.manifest)
    unrecorded = [
        name for name in causes.unrecorded(one.manifest) if name in causes.unrecorded(other.manifest)
    ]
    parting = traces.compare(one.trace, other.trace)
    return Pair((one.name, other.name), equal, differ, parting, unrecorded)


def _finite(value: Any) -> Any:
    """The value with a text for each number that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def in_short(value: object) -> str:
    """As much of a value as a table has room for."""
    if value is None:
        return "unknown"
    text = plain(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
