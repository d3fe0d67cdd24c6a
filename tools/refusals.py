"""Lists the refusals of the product: the id of each, where it is raised or printed, and what it says.

For whoever adds one, and for pages that explain them. It reads the files that git knows, and runs none of
them. Begin at `find`.

Usage: tools/refusals.py [--lint] [DIR]    DIR: a checkout, else this one

A refusal ends a command with one line for the user. In Python it is an error of a class in ROOTS, or of one
derived from these; its first argument is the id. In bash it is a call of a function in PRINTERS; its first
word is the id. The id names the cause, is not printed, and stays when the text changes. A refusal that passes
on another one takes that one's (`error.id`), and is not listed.
"""

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from tools import structure  # noqa: E402

ROOTS = ("Refusal", "BuildError", "TrainingRefused")
PRINTERS = ("refuse", "fail")
ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
SHARED: Mapping[str, str] = {
    "apptainer-missing": "the build, the command that calls it, and a node each look for Apptainer",
    "apptainer-too-old": "the build and a node each look at it",
    "apptainer-unknown": "it says nothing of what it is, or names another program",
    "bind-missing": "of a bind that the job needs, and of one that was asked for",
    "checkout-incomplete": "a file of the checkout is missing, whichever it is",
    "cmd-missing": "the same, with and without a file of a similar name",
    "gpus-none": "cuda is asked for, or taken by default",
    "gpus-unknown": "cuda is asked for, or taken by default",
    "host-file-outdated": "submit and the job script each look",
    "image-missing": "submit, the build and a node each look for the image",
    "image-not-unpacked": "submit, the doctor and a node each look at the image",
    "interface-missing": "gloo's list of interfaces may have several, NCCL's filter is told as a whole",
    "join-two-addresses": "node 0 or another node finds that node 0's name leads to two addresses",
    "manual-no-node-rank": "the same, with and without a host name that could tell it",
    "no-current-directory": "the command and containers/run.sh each look",
    "no-temporary-directory": "of a node's job script, and of a task",
    "not-a-checkout": "of both job scripts",
    "not-bash": "of both job scripts",
    "pass-malformed": "a node in an image and `apptrain run` each look",
    "profile-file-name": "of a profile that is read, and of one that is written",
    "profile-missing": "the job script and what reads the profile each look",
    "profile-variable-unset": "the job script and what reads the profile each expand",
    "run-dir-not-on-node": "of the node of the job script, and of a task's",
    "run-dir-of-another": "of the job before in a chain, and of a task",
    "told-by-another-node": "the text is another node's, of either status",
    "train-run-dir": "it cannot be made, or is not writable",
    "venv-not-a-venv": "a node and the command in the image each look",
    "venv-not-ours": "of a directory where a venv is to be made or removed",
    "venv-other-python": "a node and the command in the image each look",
}
"""Ids of several refusals, and why these have one cause."""
BEFORE_A_COMMAND = r"(?:^|&&|\|\||[;{(!)]|\b(?:then|else|do))"
CALL = re.compile(rf"{BEFORE_A_COMMAND}\s*(?:{'|'.join(PRINTERS)})[ \t]+(?P<words>\S.*)")


@dataclass(frozen=True, kw_only=True)
class Site:
    """One refusal."""

    id: str
    """Empty if it has none."""
    place: str
    """FILE:LINE."""
    text: str
    """As the source has it; what is filled in stands in braces, or after a dollar sign."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/refusals.py", description="List the refusals by their ids.")
    parser.add_argument("--lint", action="store_true", help="print only what is wrong; 1 if anything is")
    parser.add_argument("checkout", nargs="?", type=Path, default=CHECKOUT, metavar="DIR")
    options = parser.parse_args(arguments)
    sites = find(structure.read(options.checkout))
    lines = list(wrongs(sites) if options.lint else in_words(sites))
    print("\n".join(lines), end="\n" * bool(lines))
    return bool(options.lint and lines)


def find(files: Mapping[str, str]) -> list[Site]:
    """Those of the product, of sources by path."""
    product = {name: text for name, text in files.items() if name.split("/")[0] in structure.PRODUCT}
    python = {
        name: ast.parse(text) for name, text in product.items() if structure.kind(name, text) == "Python"
    }
    classes = _error_classes(python)
    sites = [site for name, tree in python.items() for site in _in_python(name, tree, classes)]
    for name, text in product.items():
        if structure.kind(name, text) == "bash":
            sites += _in_bash(name, text)
    return sites


def _error_classes(trees: Mapping[str, ast.Module]) -> set[str]:
    """ROOTS, and what is derived from them."""
    found, before = set(ROOTS), 0
    while len(found) > before:
        before = len(found)
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and found & set(map(_last_name, node.bases)):
                    found.add(node.name)
    return found


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _in_python(file: str, tree: ast.Module, classes: set[str]) -> Iterator[Site]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=called, args=[ast.Attribute(attr="id"), _, *_]) if (
                _last_name(called) in classes
            ):
                pass  # it passes on another refusal
            case ast.Call(func=called, args=[ast.Constant(value=str(id)), text, *_]) if (
                _last_name(called) in classes
            ):
                yield Site(id=id, place=f"{file}:{node.lineno}", text=_template(text))
            case ast.Call(func=called, args=[first, *_]) if _last_name(called) in classes:
                yield Site(id="", place=f"{file}:{node.lineno}", text=_template(first))


def _template(text: ast.expr) -> str:
    match text:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) for part in parts)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
    return f"{{{ast.unparse(text)}}}"


def _in_bash(file: str, text: str) -> Iterator[Site]:
    lines = text.split("\n")
    for at, line in enumerate(lines):
        found = None if line.lstrip().startswith("#") else CALL.search(line)
        if not found:
            continue
        words, end = found["words"], at
        while words.endswith("\\") and end + 1 < len(lines):
            end += 1
            words = words[:-1].rstrip() + " " + lines[end].strip()
        id, _, said = words.partition(" ")
        is_id = re.fullmatch(r"[a-z0-9-]+", id) is not None
        yield Site(id=id if is_id else "", place=f"{file}:{at + 1}", text=said.strip() if is_id else words)


def wrongs(sites: list[Site]) -> Iterator[str]:
    """What is to be corrected, a line each."""
    places = defaultdict(list)
    for site in sites:
        places[site.id].append(site.place)
        if not site.id:
            yield f"{site.place}: a refusal without an id: {site.text}"
        elif not ID.fullmatch(site.id):
            yield f"{site.place}: the id {site.id} is not of small letters, digits and dashes between words"
    for id, where in places.items():
        if id and len(where) > 1 and id not in SHARED:
            yield (
                f"{where[-1]}: the id {id} is that of {where[0]}: choose another, or say in SHARED "
                "(tools/refusals.py) why both have one cause"
            )
    yield from (
        f"tools/refusals.py: SHARED has {id}, which {len(places[id])} refusal has"
        for id in SHARED
        if len(places[id]) < 2
    )


def in_words(sites: list[Site]) -> Iterator[str]:
    """Three columns, and at the end how many there are."""
    for site in sorted(sites, key=lambda site: (site.id, site.place)):
        yield f"{site.id or '-':<28} {site.place:<40} {site.text}"
    yield f"{len(sites)} refusals, {len({site.id for site in sites})} ids, {len(SHARED)} of them shared"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
