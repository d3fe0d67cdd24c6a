"""Small changes to sources: a seeded sample of them, and the same change in another version of a file.

A change replaces a few characters, and the rest stays as it is. `python` and `bash` know which there are.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from tests.mutants import bash, python
from tests.mutants.python import Edit, Function


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change to some whole lines of a file."""

    file: str
    line: int
    """From 1, in the version that it was drawn on."""
    function: str
    """The innermost one around it, or class: `Class.method`; empty outside of all."""
    nth: int
    """Which of the function's places that read like this, from 0."""
    before: str
    after: str

    def applied_to(self, text: str) -> str | None:
        """A version of the file with this change; None where it has no such place."""
        lines, old = text.split("\n"), self.before.split("\n")
        places = _places(lines, old, _functions(self.file, text), self.function)
        if self.nth >= len(places):
            return None
        at = places[self.nth]
        return "\n".join([*lines[:at], self.after, *lines[at + len(old) :]])

    def sought_in(self, sources: Mapping[str, str]) -> "Mutant | None":
        """The same change to other sources: in its own file, else in the only one that has such a place, as code
        moves. None where there is none, or several."""
        if self.applied_to(sources.get(self.file, "")) is not None:
            return self
        suffix = Path(self.file).suffix
        moved = [replace(self, file=file) for file in sources if Path(file).suffix == suffix]
        found = [one for one in moved if one.applied_to(sources[one.file]) is not None]
        return found[0] if len(found) == 1 else None


def draw(sources: Mapping[str, str], seed: int, count: int) -> list[Mutant]:
    """So many changes, no two at one line; each leaves a file that parses."""
    found = [
        (file, edit)
        for file, text in sorted(sources.items())
        for edit in sorted(set(_language(file).edits(text)))
    ]
    random.Random(seed).shuffle(found)
    drawn: dict[tuple[str, int], Mutant] = {}
    for file, edit in found:
        if len(drawn) == count:
            break
        mutant = _mutant(file, sources[file], edit)
        at = mutant.file, mutant.line
        if at not in drawn and _language(file).parses(mutant.applied_to(sources[file]) or ""):
            drawn[at] = mutant
    return list(drawn.values())


def _mutant(file: str, text: str, edit: Edit) -> Mutant:
    start, end, new = edit
    lines, functions = text.split("\n"), _functions(file, text)
    first, last = text.count("\n", 0, start), text.count("\n", 0, end)
    name = [name for name, begin, end in functions if begin <= first <= end][-1]
    old = lines[first : last + 1]
    before = "\n".join(old)
    begin = text.rfind("\n", 0, start) + 1
    return Mutant(
        file=file,
        line=first + 1,
        function=name,
        nth=_places(lines, old, functions, name).index(first),
        before=before,
        after=before[: start - begin] + new + before[end - begin :],
    )


def _functions(file: str, text: str) -> list[Function]:
    """With the file as a whole, named "", as the first."""
    return [("", 0, text.count("\n")), *_language(file).functions(text)]


def _places(lines: list[str], old: list[str], functions: Iterable[Function], name: str) -> list[int]:
    """Where these lines stand in the functions of that name."""
    return [
        at
        for function, first, last in functions
        if function == name
        for at in range(first, last + 2 - len(old))
        if lines[at : at + len(old)] == old
    ]


def _language(file: str) -> ModuleType:
    return python if file.endswith(".py") else bash
