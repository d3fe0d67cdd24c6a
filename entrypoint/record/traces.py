"""The numbers of a run step by step, and from which step those of two runs part.

`read` and `compare` are the entries. `metrics.jsonl` is read line by line: its size has no bound, and each of
its lines has one. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from entrypoint.core import files
from entrypoint.core.frozen import dataclass

NAME = "metrics.jsonl"
SERIES = ("loss", "lr", "accuracy")
"""What is compared. `images_per_s` is a time."""
MOST_LINE = 1 << 20
"""Bytes of a line that is read; a longer one is skipped."""
MOST_ODD = 1_000_000
"""Lines without a step in a file; with more it is no trace."""
MOST_DIGITS = 300
"""Of a whole number: a float takes no more than 308."""
LAST_STEP = 2**63 - 1
MOST_MOVED = 100_000_000
"""Values that are moved to put earlier steps in their place; 1 is enough if the steps ascend."""


class Series(Mapping[int, float]):
    """Values by step, in ascending order: 16 bytes for each."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.floats = array("d")
        self._moved = 0

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __getitem__(self, step: int) -> float:
        at = bisect_left(self.steps, step)
        if at == len(self.steps) or self.steps[at] != step:
            raise KeyError(step)
        return self.floats[at]

    @property
    def last(self) -> int:
        """The last step; 0 if there is none."""
        return self.steps[-1] if self.steps else 0

    def equals(self, other: Series) -> bool:
        """Bit for bit."""
        return self.steps == other.steps and self.floats.tobytes() == other.floats.tobytes()

    def bits(self) -> array[int]:
        """Each value as the integer that has the same 64 bits."""
        return array("q", self.floats.tobytes())

    def append(self, step: int, value: float) -> None:
        """Adds the value of a step behind the last one."""
        self.steps.append(step)
        self.floats.append(value)

    def put(self, step: int, value: float) -> None:
        """Adds a value, or replaces that of the step. Raises ValueError if the steps are in no order."""
        if not self.steps or step > self.steps[-1]:
            self.append(step, value)
            return
        at = bisect_left(self.steps, step)
        if self.steps[at] == step:
            self.floats[at] = value
            return
        self._moved += len(self.steps) - at
        if self._moved > MOST_MOVED:
            raise ValueError("its steps are in no order")
        self.steps.insert(at, step)
        self.floats.insert(at, value)

    def forget_from(self, step: int) -> None:
        """Removes this step and all later ones."""
        if self.steps and self.steps[-1] >= step:
            at = bisect_left(self.steps, step)
            del self.steps[at:]
            del self.floats[at:]


Trace = Mapping[str, Series]


def read(path: Path) -> Trace:
    """The trace that a file holds. A step may appear again, after a resume: its last line counts, and what an
    earlier attempt wrote beyond it is forgotten. Lines that are no JSON object with a step are skipped.

    Raises OSError if the file cannot be read, and ValueError if it is no trace.
    """
    found = empty(SERIES)
    fill(found, path)
    return found


def empty(names: Iterable[str]) -> Trace:
    """A trace to fill: these numbers of each step."""
    return {name: Series() for name in names}


def fill(found: Trace, path: Path, seconds: float = math.inf) -> bool:
    """Reads into a trace, as `read` does; what stands before a refused line stays in it. Returns False if the
    time was too short for the whole file."""
    odd, top, late = 0, -LAST_STEP, time.monotonic() + seconds
    with files.open_regular(path) as file:
        for number, line in enumerate(_lines(file), 1):
            if number % 4096 == 0 and time.monotonic() > late:
                return False
            try:
                row = _row(line)
                if row is None:
                    odd += 1
                    if odd > MOST_ODD:
                        raise ValueError(f"more than {MOST_ODD} lines have no step")
                    continue
                top = _add(found, row, top)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return True


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Each whole line; an empty one in place of one that is too long. The last one may be unfinished."""
    while line := file.readline(MOST_LINE):
        if line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MOST_LINE)
        yield b""


def _add(found: Trace, row: Mapping[str, Any], top: int) -> int:
    """Adds what a line says. `top`: the highest step so far; returns that with this line."""
    step: int = row["step"]
    if not -LAST_STEP <= step <= LAST_STEP:
        raise ValueError("step has more than 63 bits")
    if step > top:
        for name in found.keys() & row.keys():
            value = row[name]
            if type(value) is float or type(value) is int:
                found[name].append(step, float(value))
        return step
    if "loss" in row:
        for series in found.values():
            series.forget_from(step)
    for name, series in found.items():
        value = row.get(name)
        if type(value) is float or type(value) is int:
            series.put(step, float(value))
    return top


def _row(line: bytes) -> dict[str, Any] | None:
    """The object in a line, if it has a step. Raises ValueError for a number that no float can hold."""
    try:
        text = line.decode("utf-8").strip()
        decoder = _JSON if len(text) > MOST_DIGITS else _SHORT
        row, end = decoder.raw_decode(text)
    except _TooLong:
        raise
    except (ValueError, RecursionError):
        return None
    if end != len(text):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


class _TooLong(ValueError):
    """A whole number with too many digits."""


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise _TooLong(f"a number has {len(text)} digits")
    return int(text)


_JSON = json.JSONDecoder(parse_int=_whole)
_SHORT = json.JSONDecoder()
"""For a line in which no number can have too many digits: it calls no Python for each whole number."""


@dataclass(frozen=True)
class Parting:
    """How two traces differ."""

    steps: int
    """Steps that both have."""
    first: int | None
    """The first one with another value; None if there is none."""
    series: str
    """Which value that is; empty for none."""
    values: tuple[float, float] | None
    within: float
    """The largest difference of any loss that both have; infinite if one is no number, and the other is."""
    lengths: tuple[int, int]
    """The last step of each."""
    uneven: str
    """The first series of which they do not have the same steps; empty for none."""
    counts: tuple[int, int]
    """How many steps of it each has."""

    @property
    def identical(self) -> bool:
        return self.first is None and not self.uneven


def compare(one: Trace, other: Trace) -> Parting:
    """Bit for bit."""
    partings = [
        (step, at) for at, name in enumerate(SERIES) if (step := _parts(one[name], other[name])) is not None
    ]
    steps, within = _distance(one["loss"], other["loss"])
    first, at = min(partings, default=(None, 0))
    name = SERIES[at] if first is not None else ""
    uneven = next((name for name in SERIES if one[name].steps != other[name].steps), "")
    return Parting(
        steps=steps,
        first=first,
        series=name,
        values=None if first is None else (one[name][first], other[name][first]),
        within=within,
        lengths=(one["loss"].last, other["loss"].last),
        uneven=uneven,
        counts=(len(one[uneven]), len(other[uneven])) if uneven else (0, 0),
    )


def common(one: Series, other: Series) -> Iterator[tuple[int, int]]:
    """The places in both of each step that both have, in ascending order."""
    a, b = one.steps, other.steps
    at = to = 0
    while at < len(a) and to < len(b):
        if a[at] == b[to]:
            yield at, to
            at += 1
            to += 1
        elif a[at] < b[to]:
            at += 1
        else:
            to += 1


def _parts(one: Series, other: Series) -> int | None:
    """The first step at which two series have other bits."""
    if one.equals(other):
        return None
    a, b = one.bits(), other.bits()
    return next((one.steps[at] for at, to in common(one, other) if a[at] != b[to]), None)


def _distance(one: Series, other: Series) -> tuple[int, float]:
    """How many steps both have, and the largest difference there."""
    if one.equals(other):
        return len(one), 0.0
    a, b = one.bits(), other.bits()
    steps, within = 0, 0.0
    for at, to in common(one, other):
        steps += 1
        if a[at] != b[to]:
            apart = abs(one.floats[at] - other.floats[to])
            within = max(within, math.inf if math.isnan(apart) else apart)
    return steps, within
