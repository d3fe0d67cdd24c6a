"""`make faults`: breaks a training on the test cluster in every way, and writes down what became of it.

Needs root on a Debian, for the cluster. The seed draws the moments and the victims; the same seed and the same cases
draw the same again. Ctrl-C ends the cluster and everything on it; what is complete has been written.
"""

import argparse
import json
import os
import secrets
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.account import Account, clear, given_image, open_account
from tests.cluster.images import built
from tests.faults import table
from tests.faults.cases import ALL, ROUND, Fault, Plan
from tests.faults.run import POLICIES, Reference, Suffered, go_through, reference

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = CHECKOUT / "benchmarks/results/faults.json"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="make faults ARGS='...'",
        description="Break a training on a Slurm cluster of this machine, and write down what became of it.",
        epilog="Ends with 1 where something was not as promised. Needs root. APPTRAIN_TEST_IMAGE=FILE: see "
        "tests/cluster/account.py.",
    )
    found.add_argument("--list", action="store_true", help="print the cases, and end")
    found.add_argument("--rounds", type=int, default=1, metavar="N", help="how often (1; 0: until Ctrl-C)")
    found.add_argument(
        "--seed", default="", help="draws the moments and the victims (one is chosen and printed)"
    )
    found.add_argument(
        "--case",
        action="append",
        nargs="+",
        choices=ALL,
        default=[],
        metavar="NAME",
        help="only a run through these, in this order; once for each run",
    )
    found.add_argument(
        "--policy", choices=POLICIES, help="what follows a failure (requeue; without --case: all)"
    )
    found.add_argument("--alone", action="store_true", help="a run of its own for each case")
    found.add_argument(
        "--table", action="store_true", help="only write the page's table anew from the results, and end"
    )
    found.add_argument("--add", action="store_true", help="keep the results that are there, and add to them")
    return found


def plans(asked: argparse.Namespace) -> list[Plan]:
    """One round's runs."""
    if asked.case:
        policy = asked.policy or "requeue"
        found: list[Plan] = [(policy, tuple(ALL[name] for name in names)) for names in asked.case]
    else:
        found = [plan for plan in ROUND if asked.policy in (None, plan[0])]
    if asked.alone:
        found = [(policy, (kind,)) for policy, kinds in found for kind in kinds]
    return found


def main(argv: Sequence[str]) -> int:
    command_line = parser()
    asked = command_line.parse_args(argv)
    for policy, kinds in plans(asked):
        for kind in kinds:
            if policy not in kind.policies:
                command_line.error(f"--policy {policy}: not tried with {kind.name}")
    if asked.list:
        for name, kind in ALL.items():
            print(f"{name:20} {kind.name} ({', '.join(kind.policies)})")
        return 0
    if asked.table:
        table.fill_in(json.loads(RESULTS.read_text())["runs"])
        return 0
    if os.geteuid() != 0:
        print("faults: needs root: the cluster's mounts, namespaces and users are its own", file=sys.stderr)
        return 64
    for one in (signal.SIGINT, signal.SIGTERM):  # also where a shell has started it in the background
        signal.signal(one, signal.default_int_handler)
    seed = asked.seed or secrets.token_hex(4)
    command = f"make faults ARGS={shlex.quote(shlex.join(_with_seed(argv, seed)))}"
    say(f"seed {seed}; to do it again: {command}")
    rows = json.loads(RESULTS.read_text())["runs"] if asked.add and RESULTS.exists() else []
    problems = 0
    try:
        given = given_image()
        with open_account(given or built("default").image, patched=given is not None) as account:
            undisturbed = reference(account)
            say(f"undisturbed: first step after {undisturbed.start_s:.1f} s")
            for number, (turn, (policy, kinds)) in enumerate(rounds(asked)):
                row = one_run(account, undisturbed, number, turn, policy, kinds, seed)
                problems += len(row["problems"])
                rows.append({"command": command, **row})
                write(rows)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    say(f"{problems} problems; {RESULTS.relative_to(CHECKOUT)}, {table.PAGE.relative_to(CHECKOUT)}")
    return 1 if problems else 0


def rounds(asked: argparse.Namespace) -> Iterator[tuple[int, Plan]]:
    """(round, run)."""
    turn = 0
    while asked.rounds == 0 or turn < asked.rounds:
        yield from ((turn, plan) for plan in plans(asked))
        turn += 1


def one_run(
    account: Account,
    undisturbed: Reference,
    number: int,
    turn: int,
    policy: str,
    kinds: tuple[type[Fault], ...],
    seed: str,
) -> dict[str, Any]:
    """A run's row in the results. A run that does not get through is a problem and no end of the others."""
    suffered: list[Suffered] = []

    def note(one: Suffered) -> None:
        suffered.append(one)
        say(table.line(one))

    faults, name, begin = [kind() for kind in kinds], f"{policy}-{number}", time.time()
    drawn = " ".join([seed, str(turn), *(kind.name for kind in kinds)])
    say(f"run {number + 1}, --on-failure {policy}: {', '.join(kind.name for kind in kinds)}")
    try:
        _, problems = go_through(account, name, faults, undisturbed, policy=policy, seed=drawn, on_fault=note)
    except (TimeoutError, RuntimeError, AssertionError, OSError) as error:
        traceback.print_exception(error)
        problems = [f"{name}: {str(error).partition(chr(10))[0]}"]
        make_whole(account)
    for one in problems:
        say(f"PROBLEM: {one}")
    say(
        f"run {number + 1}: {'as without a fault' if not problems else 'not as promised'}, {time.time() - begin:.0f} s"
    )
    return {"policy": policy, "problems": problems, "faults": [table.row(one) for one in suffered]}


def make_whole(account: Account) -> None:
    """The cluster for the next run, after one that was given up."""
    cluster = account.cluster
    cluster.controller.run(["scancel", "--user=alice"])
    for name in ("gpu-a01", "gpu-a02", "gpu-b07"):
        if name in cluster.nodes:
            cluster.heal(name)
            cluster.power_off(name)
        cluster.power_on(name)
    clear(account)


def write(runs: list[dict[str, Any]]) -> None:
    """The results, and the table in the documentation."""
    RESULTS.write_text(json.dumps({"schema_version": 1, "runs": runs}, indent=1) + "\n")
    table.fill_in(runs)


def say(text: str) -> None:
    print(f"{time.strftime('%T')} faults: {text}", file=sys.stderr, flush=True)


def _with_seed(argv: Sequence[str], seed: str) -> list[str]:
    return list(argv) if any(word.partition("=")[0] == "--seed" for word in argv) else ["--seed", seed, *argv]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
