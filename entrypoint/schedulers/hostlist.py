"""Expand node lists as Slurm writes them. The only module that knows their syntax.

`gpu-a[01-02,07],b[1-3]n[0-1],login` names nodes between commas; a bracket holds numbers and ranges,
its own commas included, and may stand several times in a name. Zero padding is kept, and so is the
order of the list: a node's rank is its place in it.
"""

from __future__ import annotations

import itertools

from entrypoint.core.errors import BadInput

MOST_NAMES = 100_000
"""More is a mistyped range: no cluster has as many nodes."""

_LONGEST_NUMBER = 18
_PUNCTUATION = frozenset(".-_:%")
_REMEDY = "give names such as gpu-a[01-02,07],b1"


class _Wrong(Exception):
    """What is wrong with the list and, counted from 1, at which character."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(f"{what} at character {at + 1}")


def expand(text: str, source: str) -> tuple[str, ...]:
    """The names in list order, repeated ones included.

    `source` is the variable or option that `text` comes from. Raises BadInput naming it, what is
    wrong and where; also for more than `MOST_NAMES` names.
    """
    names: list[str] = []
    try:
        for start, end in _elements(text):
            parts = _parts(text, start, end)
            _bounded(len(names), parts, start)
            names += map("".join, itertools.product(*parts))
    except _Wrong as wrong:
        raise BadInput(
            "node-list-malformed", f"{source}={_shown(text)} is not a node list: {wrong}: {_REMEDY}"
        ) from None
    return tuple(names)


def distinct(names: tuple[str, ...], source: str) -> tuple[str, ...]:
    """`names` as they are; BadInput where one stands there twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadInput("node-twice", f"{source} names {name} twice: give every node once")
        seen.add(name)
    return names


def _elements(text: str) -> list[tuple[int, int]]:
    """Start and end of every element between the commas outside brackets."""
    found = []
    start, opened = 0, -1
    for at, letter in enumerate(text):
        if letter == "[":
            if opened >= 0:
                raise _Wrong("'[' inside a bracket", at)
            opened = at
        elif letter == "]":
            if opened < 0:
                raise _Wrong("']' without '['", at)
            opened = -1
        elif letter == "," and opened < 0:
            found.append((start, at))
            start = at + 1
    if opened >= 0:
        raise _Wrong("'[' without ']'", opened)
    return [*found, (start, len(text))]


def _parts(text: str, start: int, end: int) -> list[list[str]]:
    """One element as the alternatives at each place: `b[1-2]n` is `[["b"], ["1", "2"], ["n"]]`."""
    if start == end:
        raise _Wrong("empty name", start)
    parts = []
    while start < end:
        if text[start] == "[":
            close = text.index("]", start)
            parts.append(_numbers(text, start + 1, close))
            start = close + 1
        else:
            stop = text.find("[", start, end)
            stop = end if stop < 0 else stop
            parts.append([_plain(text, start, stop)])
            start = stop
    return parts


def _plain(text: str, start: int, end: int) -> str:
    for at in range(start, end):
        letter = text[at]
        if not (letter.isascii() and letter.isalnum()) and letter not in _PUNCTUATION:
            raise _Wrong(f"{letter!r}, which no host name has,", at)
    return text[start:end]


def _numbers(text: str, start: int, end: int) -> list[str]:
    """What stands in one bracket, `01-02,07`, expanded."""
    numbers: list[str] = []
    for item in text[start:end].split(","):
        low, dash, high = item.partition("-")
        first = _number(low, start)
        last = _number(high, start + len(low) + 1) if dash else first
        if last < first:
            raise _Wrong(f"range {item} that runs backwards", start)
        if last - first >= MOST_NAMES:
            raise _Wrong(f"range {item} of more than {MOST_NAMES} names", start)
        numbers += [str(number).zfill(len(low)) for number in range(first, last + 1)]
        start += len(item) + 1
    return numbers


def _number(digits: str, at: int) -> int:
    if not digits:
        raise _Wrong("missing number", at)
    if not (digits.isascii() and digits.isdigit()):
        raise _Wrong(f"{digits!r} in place of a number", at)
    if len(digits) > _LONGEST_NUMBER:
        raise _Wrong(f"number of {len(digits)} digits", at)
    return int(digits)


def _bounded(so_far: int, parts: list[list[str]], at: int) -> None:
    """Refuse before multiplying: two brackets of 50,000 numbers would not end."""
    total = 1
    for part in parts:
        total *= len(part)
    if so_far + total > MOST_NAMES:
        raise _Wrong(f"more than {MOST_NAMES} names", at)


def _shown(text: str) -> str:
    """The list on one line, its middle left out where it is long."""
    text = repr(text)
    return text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}"
