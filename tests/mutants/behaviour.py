"""`python -m tests.mutants.behaviour`: breaks what users rely on, one fault after another, and sees whether the tests
named beside each fault notice it.

The faults are in behaviour.yaml, each a sentence, a place and a change. Begin at `main`; `Fault.found_in` looks for the
place. Where the code has moved, the sentence stays, and somebody corrects file, function and change.
"""

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.mutants import bash, python
from tests.mutants.__main__ import Refused, lay_out, sources
from tests.mutants.change import Mutant
from tests.mutants.trial import Bench

FAULTS = Path(__file__).with_name("behaviour.yaml")
BOUND = 240.0
"""Seconds of tests for one fault; it takes a few on an idle machine."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One that users would notice."""

    id: str
    broken: str
    """What is broken, one sentence."""
    file: str
    function: str
    """Where the lines are: `Class.method`; empty outside of all."""
    before: str
    """Whole lines, without the indentation that they have in common."""
    after: str
    tests: tuple[str, ...]
    """Files, or single tests of them, that are to notice it."""

    def found_in(self, present: Mapping[str, str]) -> Mutant:
        """The change to these sources. Refused: the lines are not there, or more than once."""
        text = present.get(self.file)
        if text is None:
            raise Refused(f"{self.id}: there is no {self.file}: correct it in {FAULTS.name}")
        language = python if self.file.endswith(".py") else bash
        lines = text.split("\n")
        whole = ("", 0, len(lines) - 1)
        wanted = _dedented(self.before.split("\n"))
        places = [
            at
            for name, first, last in [whole, *language.functions(text)]
            if name == self.function
            for at in range(first, last + 2 - len(wanted))
            if _dedented(lines[at : at + len(wanted)]) == wanted
        ]
        if len(places) != 1:
            found = f"{len(places)} times" if places else "not"
            where = f"{self.function} of {self.file}" if self.function else self.file
            raise Refused(f"{self.id}: its lines are {found} in {where}: correct it in {FAULTS.name}")
        at = places[0]
        old = lines[at : at + len(wanted)]
        mutant = Mutant(
            file=self.file,
            line=at + 1,
            function=self.function,
            nth=0,
            before="\n".join(old),
            after=textwrap.indent("\n".join(_dedented(self.after.split("\n"))), _margin(old)),
        )
        if not language.parses(mutant.applied_to(text) or ""):
            raise Refused(f"{self.id}: {self.file} does not parse with the change")
        return mutant


def _margin(lines: Iterable[str]) -> str:
    return min(
        (line[: len(line) - len(line.lstrip())] for line in lines if line.strip()), key=len, default=""
    )


def _dedented(lines: Sequence[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).split("\n")


def load() -> list[Fault]:
    """In the order of the file. Refused: two have the same id."""
    found = [
        Fault(**{**raw, "tests": tuple(raw["tests"])}) for raw in yaml.safe_load(FAULTS.read_text("utf-8"))
    ]
    ids = [fault.id for fault in found]
    if twice := sorted({one for one in ids if ids.count(one) > 1}):
        raise Refused(f"{', '.join(twice)} is there more than once in {FAULTS.name}")
    return found


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        faults = load()
        if unknown := sorted({*options.only} - {fault.id for fault in faults}):
            raise Refused(f"--only {unknown[0]}: there is no such fault in {FAULTS.name}")
        chosen = [fault for fault in faults if not options.only or fault.id in options.only]
        if options.list:
            print(*(f"{fault.id:24} {fault.file}: {fault.broken}" for fault in chosen), sep="\n")
            return 0
        with tempfile.TemporaryDirectory(prefix="behaviour.", ignore_cleanup_errors=True) as folder:
            return _try_all(chosen, Path(folder))
    except Refused as refusal:
        print(f"behaviour: {refusal}", file=sys.stderr)
        return 64
    except KeyboardInterrupt:
        print("behaviour: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.behaviour",
        description="Break what users rely on, one fault after another, and see whether the tests notice.",
        epilog="Ends with 0 if every fault was caught, with 1 if one was not; 64: wrong input, 130: interrupted.",
    )
    add = parser.add_argument
    add("--only", metavar="ID", action="append", default=[], help="this fault alone; may be given again")
    add("--list", action="store_true", help="print the faults, and end")
    return parser


def _try_all(faults: Sequence[Fault], folder: Path) -> int:
    tree = lay_out("", folder / "tree")
    present = sources(tree)
    mutants = {fault: fault.found_in(present) for fault in faults}
    bench = Bench(tree=tree, folder=folder, bound=BOUND, test_bound=BOUND / 2)
    # pytest ends as if it had noticed something where it does not find a test.
    if error := bench.collect(sorted({test for fault in faults for test in fault.tests})):
        raise Refused(f"pytest cannot collect the tests:\n{error}")
    missed = 0
    for number, (fault, mutant) in enumerate(mutants.items(), 1):
        verdict = bench.attempt(mutant, fault.tests)
        # A file that can no longer be imported shows no behaviour.
        caught = verdict.caught and ("::" in verdict.why or verdict.why.startswith("hangs"))
        missed += not caught
        word = "caught" if caught else "NOT CAUGHT"
        print(f"{number:3}/{len(mutants)} {word:10} {verdict.seconds:5.1f} s  {fault.id}: {fault.broken}")
        print(f"{'':28}{verdict.why}", flush=True)
    print(f"caught {len(mutants) - missed} of {len(mutants)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
