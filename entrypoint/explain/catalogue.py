"""The catalogue of causes: its entries, and the patterns by which a line of a log is one of them.

`load` gives the entries that come with the program, `check` makes them from any data and refuses what is
wrong. catalogue.yaml is written by hand; catalogue.json beside it is made from it (`make catalogue`), as the
Python of a login node may have no PyYAML. Patterns are plain text with `*`: no pattern can take long.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.frozen import dataclass

SOURCE = Path(__file__).with_name("catalogue.yaml")
MADE = SOURCE.with_suffix(".json")
MOST_BYTES = 1 << 20
MOST_ENTRIES, MOST_PATTERNS, LONGEST = 1000, 64, 2000
"""Entries, patterns of one of them, characters of a text."""
OWN_ERROR = "script-error"
GENERAL = frozenset({"rank-failed", "rank-silent"})
"""Entries that say no more than that something failed."""
KINDS = ("cause", "symptom", "warning", "hint", "echo")
SHORTEST = 5
"""Characters of a pattern that are no `*`: fewer would be found everywhere."""
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_FIELDS = {
    *("id", "family", "kind", "title", "any", "none", "frame", "all", "then", "follows"),
    *("why", "node", "do", "source", "example"),
}


class Wrong(ValueError):
    """An entry that cannot be taken. The text names it, and says what is wrong."""


@dataclass(frozen=True)
class Pattern:
    """A line that it matches has `parts` in this order."""

    text: str
    parts: tuple[bytes, ...]
    begins: bool
    """Whether the first part stands at the beginning, behind times and ranks."""
    ends: bool
    longest: bytes
    """Of the parts."""

    def may_be_in(self, line: bytes) -> bool:
        """Whether it has the parts, in any order."""
        return all(part in line for part in self.parts)

    def is_in(self, line: bytes, body: bytes) -> bool:
        """`body`: the line without what stands before a message."""
        return self.span(line, body) is not None

    def span(self, line: bytes, body: bytes) -> tuple[int, int] | None:
        """Where the first part begins and the last one ends; None if the line is none of it."""
        at = len(line) - len(body) if self.begins else 0
        if self.begins and not body.startswith(self.parts[0]):
            return None
        begin = -1
        for part in self.parts:
            found = line.find(part, at)
            if found < 0:
                return None
            begin = found if begin < 0 else begin
            at = found + len(part)
        return (begin, at) if not self.ends or line.rstrip().endswith(self.parts[-1]) else None


@dataclass(frozen=True)
class Remedy:
    text: str
    when: str = ""
    """The situation in which it helps; empty: always."""


@dataclass(frozen=True)
class Entry:
    id: str
    family: str
    kind: str
    """One of KINDS: catalogue.yaml says what they are."""
    title: str
    any: tuple[Pattern, ...]
    none: tuple[bytes, ...]
    all: tuple[Pattern, ...]
    then: tuple[Pattern, ...]
    follows: frozenset[str]
    why: str
    node: str
    """`yes`: the node is at fault; `alone`: if no other node says the same; else empty."""
    remedies: tuple[Remedy, ...]
    source: str
    example: str
    frame: bytes = b""
    """What the last frame of a traceback has, of which a line is the end; empty: it need be none."""

    @property
    def remedy(self) -> str:
        """All that may be done, in one line."""
        return " ".join(f"If {one.when}: {one.text}." if one.when else one.text for one in self.remedies)


@functools.lru_cache(maxsize=1)
def load() -> tuple[Entry, ...]:
    """The entries that come with the program."""
    return check(files.read_json(MADE, MOST_BYTES))


def own_error() -> Entry:
    """The entry of an exception that ended the program, and that no other entry has."""
    return next(one for one in load() if one.id == OWN_ERROR)


def check(data: Any) -> tuple[Entry, ...]:
    """The entries of a list as catalogue.yaml has it. Raises Wrong."""
    if not isinstance(data, list) or not 0 < len(data) <= MOST_ENTRIES:
        raise Wrong(f"the catalogue is a list of 1 to {MOST_ENTRIES} entries")
    entries = tuple(_entry(one) for one in data)
    ids = [one.id for one in entries]
    for one in entries:
        if ids.count(one.id) > 1:
            raise Wrong(f"{one.id}: two entries have this id")
        if unknown := sorted(one.follows - set(ids)):
            raise Wrong(f"{one.id}: follows {unknown[0]}, which is no entry")
    return entries


def _entry(data: Any) -> Entry:
    if not isinstance(data, dict):
        raise Wrong("an entry is no mapping")
    id = data.get("id")
    if not isinstance(id, str) or not _ID.fullmatch(id) or len(id) > 60:
        raise Wrong(f"{str(id)[:60]!r} is no id: small letters, digits, dashes between words")
    if unknown := sorted(map(str, set(data) - _FIELDS)):
        raise Wrong(f"{id}: unknown key {unknown[0][:60]}")
    kind = data.get("kind", "cause")
    if kind not in KINDS:
        raise Wrong(f"{id}: kind is {str(kind)[:60]!r}: give one of {', '.join(KINDS)}")
    node = {True: "yes", False: "", "alone": "alone"}.get(data.get("node", False))
    if node is None:
        raise Wrong(f"{id}: node is true, false or alone")
    return Entry(
        id=id,
        family=_text(data, id, "family"),
        kind=kind,
        title=_text(data, id, "title"),
        any=tuple(pattern(text) for text in _texts(data, id, "any", least=1)),
        none=tuple(text.encode() for text in _texts(data, id, "none")),
        frame=_text(data, id, "frame").encode() if "frame" in data else b"",
        all=tuple(pattern(text) for text in _texts(data, id, "all")),
        then=tuple(pattern(text) for text in _texts(data, id, "then")),
        follows=frozenset(_texts(data, id, "follows")),
        why=_text(data, id, "why"),
        node=node,
        remedies=tuple(_remedies(data.get("do"), id)),
        source=_text(data, id, "source"),
        example=_text(data, id, "example"),
    )


def _text(data: dict[str, Any], id: str, name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST:
        raise Wrong(f"{id}: {name} must be a text of 1 to {LONGEST} characters")
    return value.rstrip("\n")


def _texts(data: dict[str, Any], id: str, name: str, least: int = 0) -> list[str]:
    value = data.get(name, [])
    is_list = isinstance(value, list) and all(isinstance(one, str) and 0 < len(one) <= 300 for one in value)
    if not is_list or not least <= len(value) <= MOST_PATTERNS:
        raise Wrong(f"{id}: {name} must be a list of {least} to {MOST_PATTERNS} texts")
    return list(value)


def _remedies(data: Any, id: str) -> list[Remedy]:
    found = []
    for one in data if isinstance(data, list) else []:
        if isinstance(one, str):
            found.append(Remedy(one))
        elif (
            isinstance(one, dict)
            and set(one) == {"if", "do"}
            and all(isinstance(v, str) for v in one.values())
        ):
            found.append(Remedy(one["do"], one["if"]))
        else:
            raise Wrong(f"{id}: do holds texts, and mappings with if and do")
    if not 0 < len(found) <= MOST_PATTERNS:
        raise Wrong(f"{id}: do must say at least one thing")
    return found


def pattern(text: str) -> Pattern:
    """Of its text. Raises Wrong."""
    begins, ends = text.startswith("^") and not text.startswith("^M"), text.endswith("$")
    inner = text[begins : len(text) - ends]
    parts = tuple(part.encode() for part in inner.split("*") if part)
    if sum(map(len, parts)) < SHORTEST or not re.search("[A-Za-z]", inner):
        raise Wrong(f"the pattern {text!r} says too little")
    return Pattern(text, parts, begins, ends, max(parts, key=len))
