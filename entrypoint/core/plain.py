"""Text of others, fit for a line of ours or a file's name: what a rank, a peer or a file said may hold
anything. And numbers with their noun."""

import re
import shlex
from typing import Any

LONGEST = 2000
"""Characters of a message."""
_END = 600
"""How many of them are the message's end, which says what to do."""
ENDS_TRACEBACK = re.compile(
    rb"(?:(?:[A-Za-z_]\w{0,80}|<locals>)\.){0,8}[A-Z]\w{2,80}(?:: .*|\s*)$"
    rb"|(?:(?:[A-Za-z_]\w{0,80}|<locals>)\.){1,8}[a-z]\w{2,80}: .*$"
)
"""The line of an exception behind its traceback: the name need not say that it is an error."""


def plain(value: Any) -> Any:
    """The value with each text as one printable line of bounded length."""
    if isinstance(value, dict):
        return {plain(name): plain(item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    line = " ".join(value[:4000].split())
    if not line.isprintable():
        line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line[:1000]


def counted(number: int, what: str) -> str:
    """`1 node`, `2 nodes`, `0 nodes`: for a noun that takes an s."""
    return f"{number} {plural(number, what)}"


def plural(number: int, what: str) -> str:
    """The noun alone: `node`, `nodes`."""
    return f"{what}{'s' * (number != 1)}"


def file_part(name: str) -> str:
    """A job's, a node's or another name, as the name of a file has it."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)


def shell_word(word: str) -> str:
    """The word as a person can paste it into bash, without a control character.

    Raises ValueError for one that no command line can have: with a NUL, or with a half of a character.
    """
    if "\0" in word:
        raise ValueError("it has a NUL")
    word.encode("utf-8", "surrogateescape")
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_in_ansi_c, word)) + "'"


def _in_ansi_c(letter: str) -> str:
    if letter in "\\'":
        return "\\" + letter
    if letter.isprintable():
        return letter
    return "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogateescape"))


def one_line(message: str) -> str:
    """A message of ours as one printable line, of which the middle is left out if it is too long: what it
    quotes may hold anything."""
    if len(message) > LONGEST:
        message = f"{message[: LONGEST - _END]} ... {message[-_END:]}"
    return "".join(letter if letter.isprintable() else " " if letter in "\n\t" else "?" for letter in message)
