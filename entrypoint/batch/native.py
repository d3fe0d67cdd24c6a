"""Reads the words of sbatch and of qsub, by a table of each one's options. `read` takes an option from a
command line; `merged` has each option once.

The tables are beside each scheduler's `login`. Runs with Python 3.9.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass


@dataclass(frozen=True)
class NativeOption:
    """An option as it was given."""

    name: str
    """The long one where a short one has one, the first of several long ones; empty for words that the table
    does not know."""
    value: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class OptionTable:
    """The options of a scheduler's own program."""

    program: str
    """Whose options they are."""
    valued: tuple[str, ...]
    """Options that take a value, in the same word or the next."""
    optional: tuple[str, ...]
    """Long options that may have one, behind `=` alone."""
    flags: tuple[str, ...]
    """Options without a value."""
    long: Mapping[str, str] = field(default_factory=dict)
    """Short options that have a long form, and second names of long ones."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options that a submission by us cannot have: why, and what to do."""
    called: Mapping[str, str] = field(default_factory=dict)
    """Options of other schedulers, with what is to be given for them here."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.valued, *self.optional, *self.flags)


Replaces = Callable[[NativeOption, NativeOption], bool]
"""Whether the first, given later, leaves no place for the second."""


def read(words: Sequence[str], table: OptionTable) -> NativeOption | None:
    """The option that the words begin with; None if the table has none of that name. Raises BadInput if its
    value is missing, or one stands where none may be."""
    first, rest = words[0], words[1:]
    if first.startswith("--"):
        given, equals, value = first.partition("=")
        if given not in table.names:
            return None
        if equals and given in table.flags:
            raise BadInput("native-needless-value", f"{first}: {table.program} takes no value for {given}")
        name = table.long.get(given, given)
        if equals or given not in table.valued:
            return NativeOption(name, value, (first,))
        return NativeOption(name, *_next(first, rest, table))
    if len(first) < 2 or not first.startswith("-") or first[:2] not in table.names:
        return None
    name = table.long.get(first[:2], first[:2])
    if first[:2] in table.valued:
        if len(first) > 2:
            return NativeOption(name, first[2:], (first,))
        return NativeOption(name, *_next(first, rest, table))
    return NativeOption(name, "", (first,)) if len(first) == 2 else None


def _next(name: str, rest: Sequence[str], table: OptionTable) -> tuple[str, tuple[str, ...]]:
    """(the value of an option, its words)."""
    if not rest or is_option(rest[0]):
        raise BadInput("native-no-value", f"{name} of {table.program} needs a value: give {name} VALUE")
    return rest[0], (name, rest[0])


def is_option(word: str) -> bool:
    """Whether a word begins like an option, so that it is no value of the one before it: `--array --dry-run`
    would submit."""
    return re.match("--|-[A-Za-z]", word) is not None


def read_all(words: Sequence[str], table: OptionTable) -> list[NativeOption]:
    """All options of a command line; a word that is none stands alone, without a name."""
    found: list[NativeOption] = []
    at = 0
    while at < len(words):
        option = read(words[at:], table) or NativeOption("", "", (words[at],))
        found.append(option)
        at += len(option.words)
    return found


def merged(
    own: Sequence[NativeOption], users: Sequence[NativeOption], replaces: Replaces
) -> tuple[list[NativeOption], list[str]]:
    """(the options, each once: the user's win over our own; a line for each of the user's that says
    otherwise)."""
    kept = list(own)
    said: list[str] = []
    for option in users:
        before = [each for each in kept if replaces(option, each)]
        kept = [each for each in kept if each not in before]
        said += _in_place_of(before, option)
        kept.append(option)
    return kept, said


def without_rivals(
    given: Sequence[NativeOption], typed: Sequence[NativeOption], replaces: Replaces
) -> tuple[list[NativeOption], list[str]]:
    """(the first without those that would take the place of one of the others; a line for each of the others
    that wins over one that says otherwise)."""
    left = list(given)
    said: list[str] = []
    for option in typed:
        rivals = [each for each in given if replaces(each, option)]
        left = [each for each in left if each not in rivals]
        said += _in_place_of(rivals, option)
    return left, said


def _in_place_of(replaced: Sequence[NativeOption], option: NativeOption) -> list[str]:
    """A line, if some of those that the option has replaced say otherwise; else none."""
    others = [str(each) for each in replaced if (each.name, each.value) != (option.name, option.value)]
    return [f"{option} in place of {', '.join(others)}"] if others else []


def words(options: Sequence[NativeOption]) -> list[str]:
    """Of a command line."""
    return [word for option in options for word in option.words]
