"""The doctor's report as a person reads it, and as JSON: one table for all nodes, what passes between them,
and what is wrong.

Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted
from entrypoint.doctor import judge
from entrypoint.doctor.facts import NodeFacts
from entrypoint.doctor.judge import Clock, Collective, Finding, GpuSpeed, Speed, Way, rate, size

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Report:
    """All that was found; on a login node the first three alone."""

    nodes: Sequence[NodeFacts]
    findings: Sequence[Finding]
    seconds: float
    """That it took."""
    ranks: int = 0
    transport: str = ""
    """What the ranks speak over."""
    clocks: Sequence[Clock] = ()
    speeds: Sequence[Speed] = ()
    gpus: Sequence[GpuSpeed] = ()
    collectives: Sequence[Collective] = ()
    ways: Sequence[Way] = ()

    def to_json(self) -> dict[str, Any]:
        """The object that --json prints."""
        return {"schema_version": SCHEMA_VERSION, "healthy": not self.findings, **asdict(self)}

    def in_words(self) -> str:
        """The same for a person; the last line is the verdict."""
        lines = [self._head(), *_table(self._rows()), *self._measured()]
        lines += judge.by_nodes((one.node, str(one)) for one in self.findings)
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        found = self.findings
        return f"not healthy: {counted(len(found), 'finding')}" if found else "healthy"

    def _head(self) -> str:
        nodes = counted(len(self.nodes), "node")
        ranks = f", {self.ranks} ranks, {self.transport}" if self.ranks else ""
        return f"doctor: {nodes}{ranks}, {self.seconds:.1f} s"

    def _rows(self) -> list[list[str]]:
        """A row of names, and one for each node; of several ranks the slowest one's figures."""
        heads = ["node", "cpus", "memory", *self.nodes[0].rooms, *self.nodes[0].limits]
        heads += ["gpus"] if self.gpus else []
        heads += ["clock", "compute", "copy"] if self.speeds else []
        return [heads, *(self._row(one) for one in self.nodes)]

    def _row(self, one: NodeFacts) -> list[str]:
        cells = [one.node, str(one.cpus), size(one.available)]
        cells += [room.refused or size(room.free) for room in one.rooms.values()]
        cells += [judge.limit(name, value) for name, value in one.limits.items()]
        if self.gpus:
            names = [gpu.name for gpu in self.gpus if gpu.node == one.node]
            cells.append(f"{len(names)} x {names[0]}" if names else "none")
        if self.speeds:
            mine = [speed for speed in self.speeds if speed.node == one.node]
            ahead = {clock.node: f"{clock.ahead:+.3f} s" for clock in self.clocks}
            cells.append(ahead.get(one.node, ""))
            cells.append(_flops(min(speed.compute for speed in mine)))
            cells.append(rate(min(speed.memory for speed in mine)))
        return cells

    def _measured(self) -> list[str]:
        by_name: dict[str, list[str]] = {}
        for one in self.collectives:
            by_name.setdefault(one.name, []).append(f"{size(one.size)} {rate(one.bandwidth)}")
        lines = [f"{name}, bus bandwidth: {', '.join(cells)}" for name, cells in by_name.items()]
        if self.ways:
            way = min(self.ways, key=lambda one: one.bandwidth)
            lines.append(f"slowest pair: {way.source} to {way.target}, {rate(way.bandwidth)}")
        return lines


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.0f} Tflop/s" if rate >= 1e13 else f"{rate / 1e9:.0f} Gflop/s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{widths[at]}}" for at, cell in enumerate(row)).rstrip() for row in rows]
