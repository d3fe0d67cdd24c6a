"""YAML that somebody else may have written: what `load` gives, or one line that says which line is wrong.

`load` is the entry; profiles of sites, configs of the reference job and the list of stacks come in by it.
What no such file needs is refused before it costs anything: aliases and merge keys (a few bytes can stand for
gigabytes), tags, a key that stands twice, more than some thousand values, deep nesting. So are numbers that
YAML reads otherwise than people do: 1:30 (base 60) and 010 (base 8).

`train` may import this module too, and `files` and `plain` beside it. It imports PyYAML, and runs with the
Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from entrypoint.core import files
from entrypoint.core.files import Unfit
from entrypoint.core.plain import plain

MOST_BYTES = 1 << 18
"""The largest file that comes with the program has 4 kB."""
MOST_VALUES = 10_000
MOST_DEEP = 16
MOST_DIGITS = 40
SHOWN = 60
"""Characters of a key or number in a message."""
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_BASE_8 = re.compile(r"[-+]?0[0-9_]+")


def load(path: Path, *, texts: str = "") -> Any:
    """What the file holds; None for an empty one. `texts`: a key whose values become texts, so that a number
    there must be written as it is printed. Raises OSError, or Unfit with one line that begins with the number
    of the line that is wrong, if one is."""
    content = files.read(path, MOST_BYTES)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unfit(content.count(b"\n", 0, error.start), "it is not UTF-8") from None
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            _check_printed(loader, node, texts)
            return None if node is None else loader.construct_document(node)
        except (OverflowError, ValueError) as error:  # of an escape such as \U99999999
            if isinstance(error, Unfit):
                raise
            raise _unfit(loader.line, f"it is not YAML: {plain(str(error))[:200]}") from None
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        raise _unfit(line, "it is not YAML: a control character stands there") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise _unfit(mark.line if mark else 0, f"it is not YAML: {plain(why)[:300]}") from None


def _check_printed(loader: _Loader, node: Any, texts: str) -> None:
    """Refuses a number under the key `texts` that would be printed otherwise, as 2.20 or 0x1f."""
    sections = [value for key, value in _entries(node) if key.value == texts]
    for value in (value for section in sections for _, value in _entries(section)):
        if value.tag in _NUMBERS and (printed := str(loader.number(value))) != value.value:
            text = _shown(value.value)
            why = f'{text} without quotes is the number {_shown(printed)}: write "{text}"'
            raise _unfit(value.start_mark.line, why)


def _entries(node: Any) -> list[tuple[Any, Any]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._depth = 0

    def get_event(self) -> Any:
        """Each event passes here before anything is made of it."""
        event = super().get_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _unfit(line, "anchors (&NAME) and aliases (*NAME) are not taken: write the value out")
        if getattr(event, "tag", None) is not None:
            raise _unfit(line, f"the tag {_shown(event.tag)} is not taken: leave tags out")
        if isinstance(event, yaml.ScalarEvent) and _NO_TEXT.search(event.value):
            raise _unfit(line, f"{_shown(event.value)} holds what is no text: a NUL or half a character")
        if isinstance(event, yaml.NodeEvent):
            self._values += 1
            if self._values > MOST_VALUES:
                raise _unfit(line, f"more than {MOST_VALUES} keys and values")
        if isinstance(event, yaml.CollectionStartEvent):
            self._depth += 1
            if self._depth > MOST_DEEP:
                raise _unfit(line, f"nested more than {MOST_DEEP} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            self._depth -= 1
        return event

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """In place of SafeLoader's, which takes merge keys in; refuses keys that are not single."""
        seen = set()
        for key, _ in node.value:
            line = key.start_mark.line
            if key.tag == "tag:yaml.org,2002:merge":
                raise _unfit(line, "the merge key << is not taken: write the keys out")
            if not isinstance(key, yaml.ScalarNode):
                raise _unfit(line, "a key is a list or a mapping: give a word")
            if not key.value.isprintable():
                raise _unfit(line, f"the key {_shown(key.value)} is not one line of printable characters")
            if key.value in seen:
                raise _unfit(
                    line,
                    f"the key {_shown(key.value)} stands twice, and only the last would count: make it one",
                )
            seen.add(key.value)

    def number(self, node: yaml.ScalarNode) -> Any:
        """A number or a date, without the surprises."""
        text, line = node.value, node.start_mark.line
        if _BASE_60.fullmatch(text):
            raise _unfit(
                line, f'{_shown(text)} without quotes is a number in base 60: write "{_shown(text)}"'
            )
        if _BASE_8.fullmatch(text):
            raise _unfit(line, f'{_shown(text)} without quotes is a number in base 8: write "{_shown(text)}"')
        if len(text) > MOST_DIGITS:
            raise _unfit(line, f"{_shown(text)} is a number of {len(text)} characters")
        try:
            return _MAKERS[node.tag](self, node)
        except ValueError as error:
            raise _unfit(line, f"{_shown(text)} cannot be read: {plain(str(error))[:200]}") from None


_MAKERS = {
    f"tag:yaml.org,2002:{kind}": getattr(yaml.SafeLoader, f"construct_yaml_{kind}")
    for kind in ("int", "float", "timestamp")
}
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
for _tag in _MAKERS:
    _Loader.add_constructor(_tag, _Loader.number)


def _shown(text: str) -> str:
    cut = str(plain(text))
    return cut if len(cut) <= SHOWN else f"{cut[:SHOWN]}..."


def _unfit(line: int, why: str) -> Unfit:
    return Unfit(f"line {line + 1}: {why}")
