"""The result of a scaling measurement: in words, as a table, and as JSON. Begin at `of`.

Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted
from entrypoint.report.charts import shown
from entrypoint.scaling import measured
from entrypoint.scaling.finding import Gain, ScalingFinding, Size, gain, judge
from entrypoint.scaling.measured import SAMPLES, Measured, SizeRuns

HOUR, STEPS_OF_COST = 3600.0, 1000
"""Seconds; steps that a cost is told for if the samples of an epoch are not known."""


@dataclass(frozen=True)
class Scaling:
    """What several sizes of one program have shown."""

    groups: tuple[SizeRuns, ...]
    strong: bool
    same: Mapping[str, str]
    """What all runs have in common."""
    differ: Mapping[str, Sequence[str]]
    """What differs between them, and may explain their rates."""
    left_out: tuple[str, ...]
    """A line for each run or size that is not in it, with the reason."""
    finding: ScalingFinding

    @property
    def first(self) -> Measured:
        return self.groups[0].first

    @property
    def kind(self) -> str:
        return "strong" if self.strong else "weak"

    @property
    def sizes(self) -> list[Size]:
        return [group.size for group in self.groups]

    @property
    def unit(self) -> str:
        return self.first.unit

    def gain(self, size: Size) -> Gain:
        return gain(size, self.sizes[0])

    def rates(self, group: SizeRuns) -> list[float]:
        """In ascending order, as they are shown: of steps, not of the work in them."""
        return sorted(run.rate for run in group.runs)

    def median_rate(self, group: SizeRuns) -> float:
        return statistics.median(self.rates(group))

    def constant(self) -> str:
        """What was the same on all sizes, in words."""
        run, steps = self.first, max(run.timed for group in self.groups for run in group.runs)
        if self.strong:
            most = max(group.first.batch for group in self.groups)
            samples = f"{run.batch} samples" if most == run.batch else f"{run.batch} to {most} samples"
            work = f"the same total work a step{f' ({samples})' if run.batch else ''}"
        else:
            work = (
                f"the same work a rank and step{f' ({run.batch // run.ranks} samples)' if run.batch else ''}"
            )
        return f"{self.kind} scaling of {run.program}: {work}, up to {counted(steps, 'timed step')} a run"

    def cost(self, group: SizeRuns) -> tuple[str, float] | None:
        """(what for, hours of CPU cores or GPUs); None if it is not known how many there are."""
        run, size = group.first, group.size
        devices = size.ranks * (1 if run.device == "cuda" else run.threads)
        if not devices:
            return None
        rate = self.median_rate(group)
        what = "gpu" if run.device == "cuda" else "cpu"
        if run.unit == SAMPLES and run.epoch:
            return f"{what}_hours_per_epoch", devices * run.epoch / rate / HOUR
        per_step = run.batch / rate if run.unit == SAMPLES else 1 / rate
        return f"{what}_hours_per_{STEPS_OF_COST}_steps", devices * STEPS_OF_COST * per_step / HOUR


def of(runs: Sequence[Measured], asked: str, left_out: Sequence[str]) -> Scaling:
    """The result of these runs. `asked`: strong, weak, or empty: by what the runs are. Raises BadInput if
    they do not belong together, or are of one size."""
    if not runs:
        raise BadInput(
            "scaling-nothing",
            f"scaling: no run can be measured: {'; '.join(left_out[:4]) or 'there is none'}",
        )
    strong = measured.is_strong(runs, asked)
    groups = measured.together(runs, strong=strong)
    if len(groups) < 2:
        out = f"; left out: {'; '.join(left_out[:4])}" if left_out else ""
        raise BadInput(
            "scaling-one-size",
            f"scaling: all runs that can be measured are on {counted(groups[0].size.nodes, 'node')}: give "
            f"runs on at least two numbers of nodes{out}",
        )
    same, differ = measured.differing(runs)
    found = judge([group.size for group in groups], is_strong=strong)
    return Scaling(tuple(groups), strong, same, differ, tuple(left_out), found)


def to_json(scaling: Scaling) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "kind": scaling.kind,
        "constant": {"work": scaling.constant(), **scaling.same},
        "differs": {name: list(values) for name, values in scaling.differ.items()},
        "points": [_point(scaling, group) for group in scaling.groups],
        "finding": {
            "kind": scaling.finding.kind,
            "cause": scaling.finding.cause,
            "sentence": scaling.finding.sentence,
        },
        "left_out": list(scaling.left_out),
    }


def _point(scaling: Scaling, group: SizeRuns) -> dict[str, Any]:
    size, found, rates = group.size, scaling.gain(group.size), scaling.rates(group)
    cost, parts = scaling.cost(group), size.parts
    return {
        "nodes": size.nodes,
        "ranks": size.ranks,
        "rate": scaling.median_rate(group),
        "rate_least": rates[0],
        "rate_most": rates[-1],
        "unit": scaling.unit,
        "repeats": len(rates),
        "speedup": found.speedup,
        "efficiency": found.efficiency,
        "efficiency_least": found.least,
        "efficiency_most": found.most,
        "shares": parts
        and {
            "communication": parts.communication,
            "data": parts.data,
            "imbalance": parts.imbalance,
            "compute": parts.compute,
        },
        "slowest": (parts.slowest or None) if parts else None,
        "cost": cost and {cost[0]: cost[1]},
        "runs": [run.name for run in group.runs],
    }


def rows(scaling: Scaling) -> tuple[list[str], list[list[str]]]:
    """(heads, a row of cells for each size)."""
    cost = scaling.cost(scaling.groups[0])
    heads = [
        "nodes",
        "ranks",
        scaling.unit,
        "least to most",
        "speed-up",
        "efficiency",
        "communication",
        "data",
    ]
    heads += [_cost_head(cost[0])] if cost else []
    made = []
    for group in scaling.groups:
        size, found, rates = group.size, scaling.gain(group.size), scaling.rates(group)
        parts, price = size.parts, scaling.cost(group)
        made.append(
            [
                str(size.nodes),
                str(size.ranks),
                shown(scaling.median_rate(group)),
                f"{shown(rates[0])} to {shown(rates[-1])}" if len(rates) > 1 else "one run",
                f"{found.speedup:.2f}",
                f"{100 * found.efficiency:.0f} %",
                f"{100 * parts.communication:.0f} %" if parts else "-",
                f"{100 * parts.data:.0f} %" if parts else "-",
                *([shown(price[1]) if price else "-"] if cost else []),
            ]
        )
    return heads, made


def _cost_head(name: str) -> str:
    """`CPU hours per epoch` of cpu_hours_per_epoch."""
    return name.replace("_", " ").replace("cpu", "CPU").replace("gpu", "GPU").replace("1000", "1,000")


def in_words(scaling: Scaling) -> list[str]:
    """What the command prints: what was constant, the table, and the finding."""
    heads, made = rows(scaling)
    widths = [max(len(row[at]) for row in [heads, *made]) for at in range(len(heads))]
    table = ["  ".join(cell.rjust(widths[at]) for at, cell in enumerate(row)) for row in [heads, *made]]
    return [
        scaling.constant(),
        f"the same: {', '.join(f'{name} {value}' for name, value in scaling.same.items())}",
        *(f"not the same: {name}: {', '.join(values)}" for name, values in scaling.differ.items()),
        "",
        *table,
        "",
        *(f"left out: {line}" for line in scaling.left_out),
        scaling.finding.sentence,
    ]
