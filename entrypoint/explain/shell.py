"""Reads a shell script into its commands, without running anything: `commands` is the entry. A pure function.

It knows what job scripts are made of: quotes, continued lines, comments, here-documents, substitutions, and
the ends of commands. Functions, loops and conditions are taken for the commands in them. A parser of bash
(tree-sitter-bash) would need a compiled package that a login node's Python has not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from entrypoint.core.frozen import dataclass

MOST = 1 << 20
"""Characters of a script."""
MOST_COMMANDS = 20_000
_DEEPEST = 8
"""Brackets around a command that are told apart."""
_HERE = re.compile(r"<<(-?)\s*(?:'([^'\n]{1,80})'|\"([^\"\n]{1,80})\"|\\?([A-Za-z_][\w.-]{0,80}))")
_COMMENT = re.compile(r"`\s*#[^`\n]*`")
"""A note in a command that goes on over several lines: the shell makes nothing of it."""
_DOUBLE_QUOTE = re.compile(r'(\\?)"')
_KEYWORDS = {
    *("if", "then", "else", "elif", "fi", "do", "done", "while", "until", "time", "!", "{", "}", "(", ")"),
    *("exec", "nohup", "command", "builtin", "case", "esac"),
}
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")


@dataclass(frozen=True)
class Word:
    raw: str
    """As the script has it, quotes and all."""
    line: int
    """From 1."""
    variable: Word | None = None
    """What sets the variable that this comes from; None where the command has it itself."""

    @cached_property
    def text(self) -> str:
        """Without its quotes; what the shell would fill in stays as it stands."""
        return self._unquoted("")

    @cached_property
    def script(self) -> str:
        """The same, for a shell that reads it: lines that go on stay lines, so that they can be counted."""
        return self._unquoted("\\\n")

    def _unquoted(self, continued: str) -> str:
        return "".join(continued if letter == "\\\n" else letter for letter, _ in self._letters())

    @cached_property
    def letters(self) -> tuple[tuple[str, bool], ...]:
        """Those of `text`, each with whether the shell leaves it as it is: in single quotes, or escaped."""
        return tuple(one for one in self._letters() if one[0] != "\\\n")

    def _letters(self) -> Iterator[tuple[str, bool]]:
        """The same, with what makes a line go on."""
        at, quote = 0, ""
        raw = self.raw
        while at < len(raw):
            letter = raw[at]
            escaped = raw[at + 1 : at + 2] if letter == "\\" and quote != "'" else ""
            if escaped and (not quote or escaped in '$`"\\\n'):
                yield ("\\\n" if escaped == "\n" else escaped), True
                at += 2
                continue
            if letter in "'\"" and quote in ("", letter):
                quote = "" if quote else letter
            else:
                yield letter, quote == "'"
            at += 1

    @cached_property
    def single_quoted(self) -> str:
        """What stands in single quotes, not inside double ones."""
        found, quote = [], ""
        for letter in self.raw:
            if letter in "'\"" and quote in ("", letter):
                quote = "" if quote else letter
            elif quote == "'":
                found.append(letter)
        return "".join(found)


@dataclass
class _HereDocument:
    """One that was named, and begins behind the line."""

    end: str
    is_stripped: bool
    """Of tabs."""
    is_kept: bool
    """Whether the shell leaves all in it as it is."""
    command: int | None = None
    """The number of the command that reads it, known at its end; -1 for none."""


@dataclass(frozen=True)
class Command:
    words: tuple[Word, ...]
    """Without assignments in front of a command, and keywords."""
    assigned: tuple[Word, ...]
    """These assignments; of `export` too."""
    in_loop: bool = False
    in_background: bool = False
    subshells: tuple[int, ...] = ()
    """Around it, each by where it begins: a folder that is changed to in one stays there."""
    here: Word | None = None
    """What it reads from a here-document, in quotes as its shell fills it in."""

    @property
    def line(self) -> int:
        return (self.words or self.assigned)[0].line

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.words]


def commands(text: str, first: int = 1) -> list[Command]:
    """Of a script; `first`: the number of its first line."""
    found: list[Command] = []
    words: list[Word] = []
    word: list[str] = []
    at, line, begun = 0, first, first
    depth, pipeline = 0, 0
    """Loops around this place; commands before its pipeline."""
    groups: list[tuple[str, int, int]] = []
    """Brackets around it, with the commands before each, and its place."""
    waiting: list[_HereDocument] = []
    """Here-documents that begin behind this line."""
    text = text[:MOST]

    def end_word() -> None:
        raw = "".join(word)
        if word and not _COMMENT.fullmatch(raw):
            words.append(Word(raw, begun))
        word.clear()

    def end_group(bracket: str) -> None:
        """What follows is of all that stands in the brackets."""
        nonlocal pipeline
        if groups and groups[-1][0] == bracket:
            pipeline = groups.pop()[1]

    def end_command(mark: str = "") -> None:
        nonlocal depth, pipeline
        end_word()
        count = len(found)
        first_word = words[0].raw if words else ""
        depth = max(0, depth + (first_word == "do") - (first_word == "done"))
        groups.extend(("{", len(found), at) for one in words if one.raw == "{")
        if first_word == "}":
            end_group("{")
        if words and len(found) < MOST_COMMANDS:
            inside = tuple(begin for bracket, _, begin in groups[:_DEEPEST] if bracket == "(")
            found.extend(replace(one, in_loop=depth > 0, subshells=inside) for one in _command(words))
        for one in waiting:
            if one.command is None:
                one.command = len(found) - 1 if len(found) > count else -1
        words.clear()
        if mark == "&":
            found[pipeline:] = [replace(one, in_background=True) for one in found[pipeline:]]
        if mark != "|":
            pipeline = len(found)

    while at < len(text):
        letter = text[at]
        if letter == "\n":
            end_command()
            line += 1
            at += 1
            for document in waiting:
                rows, end = _here(text, at, document)
                if document.command is not None and document.command >= 0:
                    read = Word(_in_quotes(rows, document), line)
                    found[document.command] = replace(found[document.command], here=read)
                line += text.count("\n", at, end) + (not text.endswith("\n", at, end))
                at = end
            waiting.clear()
            continue
        if letter == "\\" and text[at + 1 : at + 2] == "\n":
            line += 1
            at += 2
            continue
        if letter == "#" and not word:
            at = _or_end(text.find("\n", at), text)
            continue
        if letter in " \t\r":
            end_word()
            at += 1
            continue
        if letter in ";&|" and not (
            letter == "&" and (text[at + 1 : at + 2] == ">" or (word and word[-1] in "<>"))
        ):
            mark = text[at : at + 2] if text[at : at + 2] in ("&&", "||") else letter
            end_command(mark)
            at += len(mark)
            continue
        here = _HERE.match(text, at) if letter == "<" and text[at : at + 3] != "<<<" else None
        if here:
            end_word()
            is_kept = here[4] is None or "\\" in here[0]
            waiting.append(_HereDocument(here[2] or here[3] or here[4], bool(here[1]), is_kept))
            at = here.end()
            continue
        if letter in "()" and (not word or (letter == ")" and groups and groups[-1][0] == "(")):
            end_command()
            if letter == "(":
                groups.append((letter, len(found), at))
            else:
                end_group("(")
            at += 1
            continue
        if not word:
            begun = line
        end = _piece(text, at)
        piece = text[at:end]
        line += piece.count("\n")
        word.append(piece)
        at = end
    end_command()
    return found


def _or_end(at: int, text: str) -> int:
    return at if at >= 0 else len(text)


def _here(text: str, at: int, document: _HereDocument) -> tuple[list[str], int]:
    """The lines of a here-document that begins at `at`, and where it ends."""
    rows = []
    while at < len(text):
        stop = _or_end(text.find("\n", at), text)
        row = text[at:stop].rstrip("\r")
        at = min(stop + 1, len(text))
        row = row.lstrip("\t") if document.is_stripped else row
        if row == document.end:
            break
        rows.append(row)
    return rows, at


def _in_quotes(rows: Sequence[str], document: _HereDocument) -> str:
    text = "\n".join(rows)
    if document.is_kept:
        return "'" + text.replace("'", "'\\''") + "'"
    return '"' + _DOUBLE_QUOTE.sub(r"\1\1\"", text) + '"'


def _piece(text: str, at: int) -> int:
    """Where the piece of a word ends that begins here: a quoted text, a substitution, or one letter."""
    letter = text[at]
    if letter == "'":
        return _or_end(text.find("'", at + 1) + 1 or -1, text)
    if letter == '"':
        return _quoted(text, at)
    if letter == "`":
        return _or_end(text.find("`", at + 1) + 1 or -1, text)
    if letter == "\\":
        return min(at + 2, len(text))
    if letter in "$=<>" and text[at + 1 : at + 2] in ("(", "{"):
        return _bracketed(text, at + 1)
    return at + (3 if text.startswith("<<<", at) else 1)


def _quoted(text: str, at: int) -> int:
    """Behind a text in double quotes that begins here."""
    at += 1
    while at < len(text) and text[at] != '"':
        if text[at] == "\\":
            at += 2
        elif text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = _bracketed(text, at + 1)
        else:
            at += 1
    return min(at + 1, len(text))


def _bracketed(text: str, at: int) -> int:
    """Behind what begins with this bracket. Quotes in it are not looked into deeper than the brackets."""
    opening = text[at]
    closing = ")" if opening == "(" else "}"
    depth = 0
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 2
            continue
        if letter == "'" and opening == "(":
            at = _or_end(text.find("'", at + 1), text)
        elif letter == opening:
            depth += 1
        elif letter == closing:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(text)


def _command(words: Sequence[Word]) -> list[Command]:
    """Of the words of a command: none, if only keywords and the name of a function are left."""
    rest = list(words)
    assigned = []
    while rest:
        if rest[0].raw in _KEYWORDS or rest[0].raw.endswith("()"):
            rest.pop(0)
        elif ASSIGNMENT.match(rest[0].raw):
            assigned.append(rest.pop(0))
        elif rest[0].raw in ("export", "declare", "local", "readonly", "env") and len(rest) > 1:
            rest.pop(0)
            while rest and (rest[0].raw.startswith("-") or ASSIGNMENT.match(rest[0].raw)):
                one = rest.pop(0)
                if not one.raw.startswith("-"):
                    assigned.append(one)
        else:
            break
    return [Command(tuple(rest), tuple(assigned))] if rest or assigned else []
