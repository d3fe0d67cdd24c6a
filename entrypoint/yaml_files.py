"""Reads the YAML files of this project: site profiles, training configs, the list of stacks.

`read` is the entry. It takes plain YAML alone, in bounded size, depth and time: no anchors, aliases and merge
keys, with which a short file stands for a long one, and no key twice. Runs with the Python of a login node,
from 3.9 on, where PyYAML may be missing (ImportError). The package `train` reads its configs with it too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from entrypoint import files
from entrypoint.plain import plain

LARGEST = 1 << 18
"""Bytes: sixty times the longest that is shipped."""
MOST_EVENTS, MOST_DEPTH, MOST_DIGITS = 20_000, 16, 40
"""Scalars and collections of a file, collections in each other, and characters of a number."""


def read(path: Path) -> Any:
    """The content of a YAML file; None if it is empty.

    Raises OSError, or a ValueError whose text says in one line, with the file's line, what is wrong.
    """
    import yaml

    text = files.read_text(path, LARGEST)
    try:
        _check_events(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _check_node(root)
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        where = _line(error.problem_mark) if error.problem_mark else ""
        raise files.Unfit(f"{where}{plain(error.problem or error.context or 'it is not YAML')}") from None
    except yaml.YAMLError as error:
        raise files.Unfit(str(plain(str(error)))) from None


def _line(mark: Any) -> str:
    return f"line {mark.line + 1}: "


def _check_events(text: str) -> None:
    """While the file is parsed, before anything is built of it. Raises Unfit, yaml.YAMLError."""
    import yaml

    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        where = _line(event.start_mark)
        if count > MOST_EVENTS:
            raise files.Unfit(f"{where}it has more than {MOST_EVENTS} values")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise files.Unfit(f"{where}an anchor or alias (& or *): write the value out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MOST_DEPTH:
                raise files.Unfit(f"{where}it is nested more than {MOST_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent) and count > 1:
            raise files.Unfit(f"{where}a second document: one is read")


def _check_node(node: Any) -> None:
    if node.id == "scalar":
        kind = node.tag.rpartition(":")[2]
        if kind == "merge":
            raise files.Unfit(f"{_line(node.start_mark)}a merge key (<<): write the values out")
        if kind in ("int", "float") and len(node.value) > MOST_DIGITS:
            raise files.Unfit(f"{_line(node.start_mark)}a number of {len(node.value)} characters")
        return
    keys: set[str] = set()
    for item in node.value:
        if node.id == "sequence":
            _check_node(item)
            continue
        key, value = item
        _check_node(key)
        _check_node(value)
        if key.id != "scalar":
            raise files.Unfit(f"{_line(key.start_mark)}a key that is no text")
        if key.value in keys:
            shown = plain(key.value)
            raise files.Unfit(
                f"{_line(key.start_mark)}the key {shown} stands twice, and only the last would count: "
                "make it one"
            )
        keys.add(key.value)
