"""messages.yaml, of which docs/troubleshooting.md is made, has messages as the program prints them: each is looked
for in the program's own strings. tools/catalogue.py makes the page.

In a message a word in capitals stands for something that the program fills in, or for itself (CMD, NCCL). Between two
`...` all words must be in one string of the program, in that order.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from entrypoint.core import strict_yaml
from entrypoint.explain import messages
from tools import catalogue, refusals, structure

CHECKOUT = Path(__file__).resolve().parents[3]
PYTHON = ("entrypoint", "src", "clusters", "containers")
SHELL = ("host/*.sh", "slurm/*", "pbs/*", "containers/*.sh", "tools/*.sh", "Makefile", "apptrain")
HOLE = "\0"
"""What the program fills in."""
CAPITALS = re.compile(r"\b[A-Z][A-Z0-9_]*\b")
ROWS = [row for part in strict_yaml.load(messages.SOURCE)["parts"] for row in part["rows"]]
SAID = [row["says"] for row in ROWS if "says" in row]


# --- the program's strings ------------------------------------------------------------------------------------


def _of_python(text: str) -> Iterator[str]:
    tree = ast.parse(text)
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.add(node.value)  # a docstring is no message
        elif isinstance(node, ast.JoinedStr):
            parts |= {part for part in node.values if isinstance(part, ast.Constant)}
            yield "".join(map(_part, node.values))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield re.sub(r"\{[^{}]*\}|%s", HOLE, node.value)


def _part(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    counted = re.search(r"\bcounted\(.*, '(.*)'\)", ast.unparse(node))
    return f"{HOLE} {counted[1]}s" if counted else HOLE


def _of_shell(text: str) -> Iterator[str]:
    text = re.sub(r'" *\\\n *"', " ", text).replace("\\\n", "").replace("\\`", "`")
    for line in text.splitlines():
        if not line.lstrip().startswith("#"):
            yield re.sub(r"\$\(\(.*?\)\)|\$\{[^{}]*\}|\$\([^()]*\)|\$\w+|%s", HOLE, line)


@cache
def strings() -> tuple[str, ...]:
    python = [file for folder in PYTHON for file in (CHECKOUT / folder).rglob("*.py")]
    shell = [file for pattern in SHELL for file in CHECKOUT.glob(pattern) if file.is_file()]
    found = [one for file in python for one in _of_python(file.read_text())]
    found += [one for file in shell for one in _of_shell(file.read_text())]
    return tuple({" ".join(one.split()) for one in found if " " in one})


# --- a message in them ----------------------------------------------------------------------------------------


def parts(message: str) -> list[str]:
    """What stands between two `...`."""
    return [part for part in re.split(r" *\.\.\. *", message) if part.strip(" ,.:;()")]


def fixed(part: str) -> list[str]:
    """The words of a part that nothing but the program's text can be."""
    return re.findall(r"[A-Za-z-]{2,}", CAPITALS.sub("", part))


def is_said(part: str) -> bool:
    pattern, end = "", 0
    for found in CAPITALS.finditer(part):
        pattern += re.escape(part[end : found.start()]) + f"(?:{HOLE}+|{found[0]})"
        end = found.end()
    wanted = re.compile(pattern + re.escape(part[end:]))
    return any(wanted.search(one) for one in strings())


def test_the_page_and_what_explain_reads_are_made_of_their_sources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (catalogue.main(["--check"]), capsys.readouterr().out) == (0, "")


def test_a_row_has_one_message_what_it_means_and_the_id_of_a_refusal() -> None:
    ids = {site.id for site in refusals.find(structure.read(CHECKOUT))}
    assert len(SAID) == len(set(SAID)) > 100
    for row in ROWS:
        assert row.keys() <= {"says", "line", "id", "note", "means", "do"}, row
        assert ("says" in row) != ("line" in row), row
        assert row["means"], row
        assert row.get("do") or row.get("note"), row
        assert row.get("id") in ids | {None}, row


@pytest.mark.parametrize("message", SAID)
def test_a_message_of_the_page_is_one_of_the_programs(message: str) -> None:
    assert parts(message)
    for part in parts(message):
        assert len("".join(fixed(part))) > 6, f"{part!r} says too little to be looked for"
        assert is_said(part), f"no string of the program has {part!r}"


@pytest.mark.parametrize(
    "part",
    [
        "RANK on NODE failed first, status N",
        "there is no image FILE on this node, or its directory may not be searched: correct the path",
        "this task sees N GPUs (WHERE)",
        "CMD begins with WORD: leave it out",
    ],
)
def test_a_message_is_found_and_not_if_a_word_of_it_changes(part: str) -> None:
    assert is_said(part)
    for word in fixed(part):
        assert not is_said(part.replace(word, f"{word}x", 1)), word
