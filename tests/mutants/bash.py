"""What can be changed in a bash script's text, by what is left when strings, comments and here documents are covered."""

import re
import subprocess
from collections.abc import Iterator

from tests.mutants.python import Edit, Function

SWAPPED = {"==": "!=", "<": "<=", ">": ">=", "&&": "||", "z": "n"}
SWAPPED |= {new: old for old, new in SWAPPED.items()}
SIMPLE = re.compile(
    r"(?!(local|readonly|declare|set|if|then|elif|else|fi|for|while|until|do|done|case|esac)\b)\w"
)
"""How a command of bash begins that can be dropped, or an assignment."""
PARTIAL = ("\\", "|", "&&", "(", "{", ";;")
"""How a line of bash ends that is not the whole of a command."""
PATTERN = re.compile(r"\w+\(\) |[^(]*\)")
"""How the head of a function begins, and a case with its pattern."""
HERE = re.compile(r"(?<!<)<<-?(?!<) *(['\"]?)(\w+)\1")


def parses(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True).returncode == 0


def functions(text: str) -> Iterator[Function]:
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if found := re.match(r"(\w+)\(\) [({]", line):
            end = at
            while not re.search(r"^[})]" if end > at else r"[})]( +#.*)?$", lines[end]):
                end += 1
            yield found[1], at, end


def edits(text: str) -> Iterator[Edit]:
    seen = covered(text)
    for test in re.finditer(r"\[\[ .*? \]\]", seen):
        for found in re.finditer(r"(?<= )[=!]=(?= )|(?<= -)[zn](?= )", test[0]):
            yield test.start() + found.start(), test.start() + found.end(), SWAPPED[found[0]]
    for sum_ in re.finditer(r"\(\(.*?\)\)", seen):
        for found in re.finditer(r"[=!<>]=|(?<!<)<(?!<)|(?<!>)>(?!>)|(?<![\w#$.])\d+\b", sum_[0]):
            is_time = "seconds" in sum_[0].lower()  # whether a moment is the last or past
            if is_time and not found[0].isdigit():
                continue
            new = SWAPPED.get(found[0]) or str(int(found[0]) + 1)
            yield sum_.start() + found.start(), sum_.start() + found.end(), new
    for found in re.finditer(r"&&|\|\|", seen):
        yield found.start(), found.end(), SWAPPED[found[0]]
    for found in re.finditer(r"\b(?:return|exit) (\d+)", seen):
        yield *found.span(1), "1" if found[1] == "0" else "0"
    for found in re.finditer(r"(?m)(?:^|[;{]|\b(?:do|then|else)\b) *(?:if|elif|while|until) (! )?", seen):
        yield found.start(1) if found[1] else found.end(), found.end(), "" if found[1] else "! "
    yield from _droppable(seen)


def _droppable(seen: str) -> Iterator[Edit]:
    """Commands that have whole lines for themselves."""
    start, listed, goes_on = 0, False, False
    for line in seen.split("\n"):
        command = line.strip()
        is_part = listed or goes_on or command.endswith(PARTIAL) or PATTERN.match(command)
        if SIMPLE.match(command) and not is_part:
            yield start + line.index(command), start + len(line.rstrip()), ":"
        listed = ")" not in command if listed else bool(re.search(r"=\([^)]*$", command))
        goes_on = command.endswith(("\\", "|", "&&"))
        start += len(line) + 1


def covered(text: str) -> str:
    """A script with a `"` for each character of its strings and here documents, a blank for those of comments."""
    shown, open_, here, at = list(text), [""], "", 0
    """`open_`: what ends each thing that is open here, the innermost last."""
    while at < len(text):
        char, top, is_string, end = text[at], open_[-1], '"' in open_, at + 1
        if char == "\\":
            end += 1
        elif char == "'" and top != '"':
            end = _after(r"(?:\\.|[^\\'])*'" if text[at - 1 : at] == "$" else "[^']*'", text, end)
            is_string = True
        elif char == '"':
            is_string = True
            open_ = open_[:-1] if top == '"' else [*open_, '"']
        elif char == "$" and text[end : end + 1] in ("(", "{"):
            open_.append(")" if text[end] == "(" else "}")
            end += 1
        elif char == "(" and top == ")":
            open_.append(")")
        elif char == top:
            open_.pop()
        elif char == "#" and top in ("", ")") and text[at - 1 : at] in ("", " ", "\n", ";", "("):
            end = _after("[^\n]*", text, at)
            shown[at:end] = " " * (end - at)
        elif not is_string and (found := HERE.match(text, at)):
            here, end = found[2], found.end()
        elif char == "\n" and here:
            end = _after(rf"(?s).*?\n{here}(?=\n)", text, at)
            is_string, here = True, ""
        if is_string:
            shown[at:end] = '"' * (end - at)
        at = end
    return "".join(shown)


def _after(pattern: str, text: str, at: int) -> int:
    found = re.compile(pattern).match(text, at)
    return found.end() if found else len(text)
