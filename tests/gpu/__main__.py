"""`make test-gpu`: looks at the machine, tries everything, prints what was found, and keeps it as JSON.

A trial that fails stops nothing, and what the time does not reach is named. Nothing is ever skipped: without
a GPU the command is refused.
"""

import argparse
import datetime
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from benchmarks import device
from benchmarks.device import CHECKOUT, Unready

from . import node_trials, training_trials, trouble_trials
from .trial import Bench, Trial, Wrong, environment

TOTAL_S: Final = 480.0
"""For everything, from the start to the report."""
REPORT_S: Final = 15.0
"""Of it, for ending what is left and for the report."""
FAILED, BAD_INPUT = 1, 64
RESULTS: Final = CHECKOUT / "benchmarks" / "results" / "gpu-test.json"
TRIALS: Final = (
    Trial(name="check tells driver, versions and devices", seconds=60, run=node_trials.check),
    Trial(name="driver, stack and libcuda fit as torch finds", seconds=60, run=node_trials.fits),
    Trial(name="device order and visibility are as torch has them", seconds=120, run=node_trials.visibility),
    Trial(name="a fork before CUDA may use CUDA", seconds=60, run=node_trials.fork),
    Trial(name="all ranks greet over NCCL", seconds=90, run=training_trials.hello),
    Trial(name="the reference training learns", seconds=90, run=training_trials.reference),
    Trial(name="bf16 and channels_last learn", seconds=90, run=training_trials.mixed),
    Trial(
        name="a resumed run equals an undisturbed one bit for bit", seconds=150, run=training_trials.resume
    ),
    Trial(name="a save in the background holds its own step", seconds=120, run=training_trials.saves),
    Trial(name="a hang is ended, named and recorded", seconds=90, run=trouble_trials.hang),
    Trial(name="a GPU out of memory is one line", seconds=60, run=trouble_trials.memory),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"test-gpu: {message}: see make test-gpu ARGS=--help", file=sys.stderr)
        raise SystemExit(BAD_INPUT)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    begin = time.monotonic()
    parser = _Parser(prog="make test-gpu ARGS='...'", description=__doc__, allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="print the trials and their bounds, and run none")
    parser.add_argument(
        "--only", metavar="WORD", default="", help="those whose name has this word; nothing is kept"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help=f"default: {RESULTS.relative_to(CHECKOUT)}"
    )
    options = parser.parse_args(argv)
    trials = [trial for trial in TRIALS if options.only in trial.name]
    if not trials:
        parser.error(f"--only {options.only}: in no trial's name")
    if options.list:
        print("\n".join(f"{trial.seconds:5.0f} s  {trial.name}" for trial in trials))
        return 0
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    try:
        facts = device.ask(environment(), matmul=True)
    except Unready as why:
        print(f"test-gpu: {why}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    end = begin + TOTAL_S - REPORT_S
    print(f"test-gpu: {device.one_line(facts)}; {TOTAL_S / 60:.0f} minutes at most", flush=True)
    with tempfile.TemporaryDirectory(prefix="apptrain-gpu-", ignore_cleanup_errors=True) as folder:
        bench = bench_of(facts, Path(folder), end)
        try:
            found = attempt(trials, bench, end)
        except KeyboardInterrupt:
            print("test-gpu: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
    print(device.table(facts))
    output = options.output or (None if options.only else RESULTS)
    if output is not None:
        keep(output, facts, found)
    passed = sum(one["passed"] is True for one in found)
    print(f"test-gpu: {passed} of {len(found)} passed in {time.monotonic() - begin:.0f} s")
    return 0 if passed == len(found) else FAILED


def _interrupt(_signum: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def bench_of(facts: Mapping[str, Any], folder: Path, end: float) -> Bench:
    ranks = len(facts["gpus"])
    batch = f"batch_size={max(1, 128 // ranks) * ranks}"
    env = environment()
    return Bench(device="cuda", facts=facts, ranks=ranks, folder=folder, env=env, end=end, overrides=(batch,))


def attempt(trials: Sequence[Trial], bench: Bench, end: float) -> list[dict[str, Any]]:
    """Tries one after another, each in a folder of its own, and prints what each found. `passed` is None for
    those that were not reached before `end`."""
    found = []
    for number, trial in enumerate(trials):
        began = time.monotonic()
        folder = bench.folder / str(number)
        folder.mkdir()
        here = replace(bench, folder=folder, end=min(began + trial.seconds, end))
        passed, text = _result(trial, here) if began < end else (None, "no time was left for it")
        seconds = time.monotonic() - began
        word = {True: "ok", False: "FAILED", None: "not tried"}[passed]
        print(f"{word:<10}{seconds:6.1f} s  {trial.name}: {text}", flush=True)
        found.append({"name": trial.name, "passed": passed, "seconds": round(seconds, 1), "found": text})
    return found


def _result(trial: Trial, bench: Bench) -> tuple[bool, str]:
    try:
        return True, trial.run(bench)
    except Wrong as wrong:
        return False, str(wrong)
    except Exception as bug:  # of this machine's or of ours: the others are to be tried all the same
        return False, f"{type(bug).__name__}: {bug}"


def keep(path: Path, facts: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
    report = {
        "command": "make test-gpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": device.commit(CHECKOUT),
        "machine": facts,
        "trials": found,
    }
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        print(f"test-gpu: {path} cannot be written: {error.strerror}", file=sys.stderr)
    else:
        print(f"kept in {path}")


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
