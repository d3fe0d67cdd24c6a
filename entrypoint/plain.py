"""Text of others, fit for a line of ours or a file's name: what a rank, a peer or a file said may hold
anything."""

from typing import Any


def plain(value: Any) -> Any:
    """The value with each text as one printable line of bounded length."""
    if isinstance(value, dict):
        return {plain(name): plain(item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    line = " ".join(value[:4000].split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:1000]


def file_part(name: str) -> str:
    """A job's, a node's or another name, as the name of a file has it."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
