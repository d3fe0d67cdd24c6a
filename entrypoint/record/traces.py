"""The numbers of a run step by step, and from which step those of two runs part.

What it alone knows: which lines of `metrics.jsonl` count. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"
SERIES = ("loss", "lr", "accuracy")
"""What is compared. `images_per_s` is a time."""
Trace = Mapping[str, Mapping[int, float]]
"""Each series' values by step."""


def read(path: Path) -> Trace:
    """Raises OSError where there is none. A step may appear again, after a resume: its last line counts, and
    what an earlier attempt wrote beyond it is forgotten. What is no line of ours is skipped."""
    found: dict[str, dict[int, float]] = {name: {} for name in SERIES}
    for line in path.read_bytes().splitlines(keepends=True):
        row = _row(line)
        step = row.get("step")
        if type(step) is not int:
            continue
        if "loss" in row:
            found = {name: {at: v for at, v in one.items() if at < step} for name, one in found.items()}
        for name in SERIES:
            if type(row.get(name)) in (int, float):
                found[name][step] = float(row[name])
    return found


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


@dataclass(frozen=True)
class Parting:
    """How two traces differ."""

    steps: int
    """Steps that both have."""
    first: int | None
    """The first one with another value; None where there is none."""
    series: str
    """Which value that is; empty for none."""
    values: tuple[float, float] | None
    within: float
    """The largest difference of any loss that both have."""
    lengths: tuple[int, int]
    """The last step of each."""

    @property
    def identical(self) -> bool:
        return self.first is None and self.lengths[0] == self.lengths[1]


def compare(one: Trace, other: Trace) -> Parting:
    """Bit for bit."""
    partings = [
        (step, at)
        for at, name in enumerate(SERIES)
        for step in one[name].keys() & other[name].keys()
        if _bits(one[name][step]) != _bits(other[name][step])
    ]
    both = one["loss"].keys() & other["loss"].keys()
    first, at = min(partings, default=(None, 0))
    name = SERIES[at] if first is not None else ""
    return Parting(
        steps=len(both),
        first=first,
        series=name,
        values=None if first is None else (one[name][first], other[name][first]),
        within=max((abs(one["loss"][step] - other["loss"][step]) for step in both), default=0.0),
        lengths=(max(one["loss"], default=0), max(other["loss"], default=0)),
    )


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)
