"""Shows what faults did: a line each, and the table of docs/measurements.md. `rows` and `fill_in` are the
entries.

The figures of the tutorials' job script are of one measurement each, of the same faults on a like cluster (3
nodes with 2 ranks, SlurmdTimeout 30 s; benchmarks/tutorial.sbatch is that script).
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.run import Suffered

PAGE = Path(__file__).resolve().parents[2] / "docs/measurements.md"
BEGIN, END = "<!-- written by make faults -->", "<!-- end -->"
TUTORIALS = {
    "kill -9 of a rank": "fails after 3.6 s; 197 lines",
    "kill -9 of torchrun's agent": "fails after 3.6 s; 148 lines",
    "SIGSTOP of a rank": "**hangs** until the walltime, says nothing",
    "power off a node": "requeued after 29 s, from step 0; 3 lines",
    "power off the first node": "requeued after 41 s, from step 0; says nothing",
    "cut a node off the network": "requeued after 42 s, from step 0",
    "cut a node off for 5 s": "(20 s:) goes on after 28 s",
    "scancel --batch --signal=USR2, a warning": "",
    "scancel, without a warning": "cancelled after 4.8 s, nothing saved",
    "walltime": "the warning ends the job half a minute early, nothing saved",
    "scontrol requeue, as a preemption does": "requeued, from step 0",
    "two jobs on the same nodes": "the second joins the first one's store, and fails when that ends",
    "a stranger holds the port": "**hangs**",
    "the image is missing on one node": "**hangs** on the others",
    "the disk is full while saving": "fails after 27 s; half a checkpoint; 262 lines",
}
HEADER = (
    "| what breaks | what happens | noticed, s | first new step, s | steps lost | tutorials' script |\n"
    "|---|---|---|---|---|---|\n"
)


def line(one: Suffered) -> str:
    noticed = "unnoticed" if one.noticed_s is None else f"noticed after {one.noticed_s:.1f} s"
    step = (
        "no step was left" if one.first_step_s is None else f"first new step after {one.first_step_s:.1f} s"
    )
    return (
        f"{one.case} ({one.where}: {one.what}): {one.then}, {noticed}, {step}, "
        f"{one.lost} steps lost of {one.bound}, {len(one.said)} lines"
    )


def row(one: Suffered) -> dict[str, Any]:
    """As it stands in the results."""
    return asdict(one)


def rows(runs: Sequence[dict[str, Any]]) -> str:
    """The table: a row for each case and policy, over all times that it happened."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for one in run["faults"]:
            found.setdefault((one["case"], run["policy"]), []).append(one)
    return HEADER + "".join(_row(case, policy, times) for (case, policy), times in found.items())


def _row(case: str, policy: str, times: Sequence[dict[str, Any]]) -> str:
    lost = _span([one["lost"] for one in times], "d") + f" of {max(one['bound'] for one in times)}"
    noticed = [one["noticed_s"] for one in times]
    cells = (
        case
        + ("" if policy == "requeue" else f", `{policy}`")
        + (f" ({len(times)} times)" if len(times) > 1 else ""),
        ", ".join(dict.fromkeys(one["then"] for one in times)),
        "as planned" if case == "walltime" else _span([one for one in noticed if one is not None], ".1f"),
        _span([one["first_step_s"] for one in times if one["first_step_s"] is not None], ".0f"),
        "0" if times[0]["planned"] else lost,
        TUTORIALS.get(case, "") or "-",
    )
    return f"| {' | '.join(cells)} |\n"


def _span(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def fill_in(runs: Sequence[dict[str, Any]]) -> None:
    """Writes the table between the marks of the page."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise RuntimeError(f"{PAGE} lacks {BEGIN} ... {END}")
    same = sum(not run["problems"] for run in runs)
    commands = "".join(f"- `{command}`\n" for command in dict.fromkeys(run["command"] for run in runs))
    text = (
        f"\n{rows(runs)}\n{same} of {len(runs)} runs came to the end, lost no more than they may, and had the loss and the "
        f"learning rate of every step and the weights\nof the run without a fault, bit for bit. Commands:\n\n{commands}"
    )
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
