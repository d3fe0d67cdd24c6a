"""Writes the text of a first profile in YAML: each value with its origin, each gap as a question. `text` is
the entry.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence

from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain

ORDER = (
    *("title", "documented", "tested", "scheduler", "clusters", "start", "host_suffix", "scratch"),
    *("nodes.gpus", "nodes.cpus", "nodes.memory_gib", "nodes.whole", "nodes.architecture", "nodes.driver"),
    *("request.partition", "request.account", "request.time", "request.gpus", "request.form"),
    *("container.modules", "container.program", "container.stack"),
    *("launch.interface", "launch.fabric"),
    "env.NCCL_SOCKET_IFNAME",
)
QUESTION = "# question: "
WIDTH = 118
_PLAIN = re.compile(r"(?:[A-Za-z_/$]|-[A-Za-z])[A-Za-z0-9_./$+-]*(?: [A-Za-z0-9_./$+-]+)*")
_TAKEN = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
"""Words that YAML takes for something else."""


@dataclass(frozen=True)
class Line:
    """A key of the profile."""

    key: str
    """With its section, as request.time."""
    value: bool | int | str | Sequence[str] | None = None
    """None: the key is left out, and the questions stand in its place."""
    why: str = ""
    """Where the value comes from."""
    questions: tuple[str, ...] = ()


def text(head: Sequence[str], lines: Iterable[Line]) -> str:
    """The profile; `head` is what stands on its top. Of several lines with one key, all questions and the
    first value count."""
    found = [f"# {plain(line)}" for line in head]
    section = ""
    by_key: dict[str, list[Line]] = {}
    for line in lines:
        by_key.setdefault(line.key, []).append(line)
    for key in (key for key in ORDER if key in by_key):
        *outer, name = key.split(".")
        indent = "  " * len(outer)
        if outer and outer[0] != section:
            section = outer[0]
            given = [
                one for other in ORDER if other.startswith(f"{section}.") for one in by_key.get(other, ())
            ]
            found += ["", f"{section}:" if any(one.value is not None for one in given) else f"# {section}:"]
        elif key in ("title", "scheduler"):
            found.append("")
        for text in (plain(each) for line in by_key[key] for each in line.questions):
            found += textwrap.wrap(
                text, WIDTH, initial_indent=indent + QUESTION, subsequent_indent=f"{indent}#   "
            )
        line = next((line for line in by_key[key] if line.value is not None), Line(key))
        if line.value is not None:
            spelled = f"{indent}{name}: {_spelled(line.value)}".rstrip()
            found += _with_why(spelled, plain(line.why), indent)
    return "".join(f"{line.rstrip()}\n" for line in found)


def _with_why(spelled: str, why: str, indent: str) -> list[str]:
    """The comment behind the value, or above it where the line would be long."""
    beside = f"{spelled:<32} # {why}" if why else spelled
    return [beside] if len(beside) <= WIDTH else [f"{indent}# {why}", spelled]


def _spelled(value: bool | int | str | Sequence[str]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _scalar(value)
    return f"[{', '.join(map(_scalar, value))}]"


def _scalar(value: str) -> str:
    value = str(plain(value))
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in _TAKEN
    return value if is_plain or not value else json.dumps(value, ensure_ascii=False)
