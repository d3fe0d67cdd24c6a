"""Knows the messages of apptrain itself: `entry` gives the one that a line is.

messages.json is made (`make catalogue`): the text of each refusal, from the sources, and what messages.yaml
says beyond it. Without advice there, the line itself says what to do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.frozen import dataclass
from entrypoint.explain.catalogue import GENERAL, Entry, Remedy

SOURCE = Path(__file__).with_name("messages.yaml")
MADE = SOURCE.with_suffix(".json")
MOST_BYTES = 1 << 20
DIGITS = b"0123456789"
SHAPES = 1000
"""Lines without their digits whose messages are kept."""
PREFIX = re.compile(rb"(?:apptrain|entrypoint|train|run\.sh): ")
"""Each line of ours begins with one of these."""
REFUSED = "apptrain refused this, and the line says why"


@dataclass(frozen=True)
class _Message:
    parts: tuple[bytes, ...]
    shape: tuple[bytes, ...]
    """The parts without their digits."""
    size: int
    entry: Entry


def entry(body: bytes) -> Entry | None:
    """The message that a line is, behind times and ranks. Of several, the one with most text of its own."""
    if not PREFIX.match(body):
        return None
    found = [one for one in _of_shape(body.translate(None, DIGITS)) if _are_in(one.parts, body)]
    return max(found, key=_size).entry if found else None


@functools.lru_cache(maxsize=SHAPES)
def _of_shape(line: bytes) -> Sequence[_Message]:
    """Those that a line may be, which comes without digits: most lines of a log differ in digits alone."""
    return [one for one in _load() if _are_in(one.shape, line)]


def _are_in(parts: Sequence[bytes], line: bytes) -> bool:
    """Whether a line has them all, one behind the other."""
    at = 0
    for part in parts:
        found = line.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def rather(known: Entry | None, body: bytes) -> Entry | None:
    """The entry of a line that the catalogue knows so. A refusal of ours says more than what the catalogue
    has for its words."""
    if known is not None and known.family == "apptrain" and known.id not in GENERAL:
        return known
    own = entry(body)
    return own if own is not None and (known is None or own.kind == "cause") else known


def _size(one: _Message) -> int:
    return one.size


@functools.lru_cache(maxsize=1)
def _load() -> Sequence[_Message]:
    return tuple(_message(row) for row in files.read_json(MADE, MOST_BYTES))


def _message(row: dict[str, Any]) -> _Message:
    parts = tuple(part.encode() for part in row["parts"])
    return _Message(
        parts,
        tuple(part.translate(None, DIGITS) for part in parts),
        sum(map(len, parts)),
        Entry(
            id=row["id"],
            family="apptrain",
            kind="cause" if row["is_refusal"] else "hint",
            title=row["means"] or REFUSED,
            any=(),
            none=(),
            all=(),
            then=(),
            follows=frozenset(),
            why="" if row["means"] else "It says what was given, what was found, and what to do.",
            node="",
            remedies=(Remedy(row["do"] or "Do what the line says, and start the same again."),),
            source="docs/troubleshooting.md",
            example="",
        ),
    )
