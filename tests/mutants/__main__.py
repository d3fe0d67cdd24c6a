"""`make mutants`: changes the code in small ways, and prints the changes that no test noticed.

The changes are drawn by a seed. With --at they are drawn on another revision, and each is looked for in the tree that
is tried by its function and its lines, also in another file if there is one such place: so two revisions' tests can be
compared on the very same changes.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import yaml

from tests.mutants.change import Mutant, draw
from tests.mutants.trial import Bench

CHECKOUT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("table.yaml")
SOURCES = (
    "entrypoint/**/*.py",
    "src/train/**/*.py",
    "containers/*.py",
    "containers/image/ahead.py",
    "containers/image/imports.py",
    "containers/*.sh",
    "host/*.sh",
    "slurm/*",
    "pbs/*",
)
ENOUGH = 80
"""Percent."""


class Refused(Exception):
    """Wrong input, in one line."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="make mutants ARGS='...'",
        description="Change the code in small ways, and print the changes that no test notices.",
        epilog=f"Ends with 0 if {ENOUGH} percent or more were caught, else with 1; 64: wrong input, 130: interrupted.",
    )
    add = partial(found.add_argument, type=int, metavar="N")
    add("--seed", default=1, help="draws the changes (1)")
    add("--count", default=60, help="how many (60)")
    add("--jobs", default=os.cpu_count() or 1, help="how many at once (as many as there are cores)")
    add("--bound", default=90, metavar="S", help="seconds of tests for each of them (90)")
    add = partial(found.add_argument, default="")
    add("--at", metavar="REV", help="draw them on this git revision (the checkout as it is)")
    add("--on", metavar="REV", help="try them on this one, with its tests (the checkout as it is)")
    add("--files", metavar="GLOB", help="only in these files, such as 'entrypoint/*' (all)")
    found.add_argument("--list", action="store_true", help="print the changes, and end")
    return found


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="mutants.", ignore_cleanup_errors=True) as folder:
        try:
            return _go(options, Path(folder))
        except Refused as refusal:
            print(f"mutants: {refusal}", file=sys.stderr)
            return 64
        except KeyboardInterrupt:
            print("mutants: interrupted", file=sys.stderr)
            return 130


def _go(options: argparse.Namespace, folder: Path) -> int:
    origin = lay_out(options.at, folder / "at")
    drawn = draw(sources(origin, options.files), options.seed, options.count)
    if not drawn:
        raise Refused(f"there is nothing to change: --count {options.count}, --files {options.files or '*'}")
    if options.list:
        print(*map(shown, drawn), sep="\n")
        return 0
    tree = origin if options.on == options.at else lay_out(options.on, folder / "on")
    present = sources(tree, options.files)
    sought = {mutant: mutant.sought_in(present) for mutant in drawn}
    there = [found for found in sought.values() if found is not None]
    for mutant, found in sought.items():
        if found is None:
            print(f"gone     {shown(mutant)}", flush=True)
    tests = {mutant.file: noticing(mutant.file, tree) for mutant in there}
    bench = Bench(tree=tree, folder=folder, bound=options.bound, test_bound=options.bound / 2)
    if there and (error := bench.collect(sorted({test for some in tests.values() for test in some}))):
        raise Refused(f"pytest cannot collect the tests:\n{error}")
    return _try_all(bench, {mutant: tests[mutant.file] for mutant in there}, options.jobs)


def _try_all(bench: Bench, tests: Mapping[Mutant, Sequence[str]], jobs: int) -> int:
    begin, unnoticed = time.monotonic(), []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            trials = {pool.submit(bench.attempt, mutant, some): mutant for mutant, some in tests.items()}
            for number, trial in enumerate(as_completed(trials), 1):
                mutant, verdict = trials[trial], trial.result()
                word = "caught" if verdict.caught else "UNNOTICED"
                at = f"{mutant.file}:{mutant.line}"
                took = f"{verdict.seconds:5.1f} s"
                print(f"{number:3}/{len(tests)} {word:9} {took}  {at}  {verdict.why}", flush=True)
                if not verdict.caught:
                    unnoticed.append(f"{shown(mutant)}\n  {verdict.why}: {' '.join(tests[mutant])}")
        except BaseException:
            bench.stop()
            pool.shutdown(cancel_futures=True)
            raise
    print("", *[f"{one}\n" for one in sorted(unnoticed)], sep="\n")
    caught = len(tests) - len(unnoticed)
    share = 100 * caught // (len(tests) or 1)
    print(f"caught {caught} of {len(tests)} ({share} %) in {time.monotonic() - begin:.0f} s")
    return 0 if caught * 100 >= ENOUGH * len(tests) else 1


def lay_out(rev: str, folder: Path) -> Path:
    """The files of a revision; without one those of the checkout as they are now, ignored ones left out."""
    git = ["git", "-c", f"safe.directory={CHECKOUT}", "-C", str(CHECKOUT)]
    wanted = ["archive", rev] if rev else ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run([*git, *wanted], capture_output=True)
    if found.returncode:
        raise Refused(f"git {' '.join(wanted)}: {found.stderr.decode(errors='replace').strip()}")
    folder.mkdir()
    if rev:
        subprocess.run(["tar", "-xC", str(folder)], input=found.stdout, check=True)
    for name in [] if rev else found.stdout.decode().split("\0"):
        if name and os.path.lexists(CHECKOUT / name):  # git lists what was deleted too
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name, follow_symlinks=False)
    # Tests ask git what the code is.
    mine = ["git", "-C", str(folder), "-c", "user.name=mutants", "-c", "user.email=mutants@localhost"]
    for words in (["init", "-q"], ["add", "-f", "."], ["commit", "-qm", "As it is", "--no-verify"]):
        subprocess.run([*mine, *words], check=True, capture_output=True)
    return folder


def sources(tree: Path, files: str = "") -> dict[str, str]:
    """What may be changed, by its path."""
    paths = sorted(path for glob in SOURCES for path in tree.glob(glob) if path.is_file())
    found = {str(path.relative_to(tree)): path.read_text(encoding="utf-8") for path in paths}
    return {name: text for name, text in found.items() if fnmatch(name, files or "*")}


def noticing(file: str, tree: Path) -> list[str]:
    """The test files that are to notice a change to this file; another revision may lack some."""
    table: dict[str, list[str]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    found = [test for test in table.get(file, []) if (tree / test).exists()]
    if not found:
        raise Refused(f"{file} has no tests in tests/mutants/table.yaml: name them there, the fastest first")
    return found


def shown(mutant: Mutant) -> str:
    """Where it is, and the lines before and after."""
    sides = ((mark, side.split("\n")) for mark, side in (("-", mutant.before), ("+", mutant.after)))
    lines = [f"{mark} {line}" for mark, side in sides for line in side]
    return "\n".join([f"{mutant.file}:{mutant.line} {mutant.function}".rstrip(), *lines])


if __name__ == "__main__":
    for name in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a shell starts what it leaves in the background with Ctrl-C ignored
        signal.signal(name, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
