"""Says in one sentence where more nodes stop paying, and what holds them back, by the numbers alone. Begin at
`judge`; the rules are pure functions.

A rate is work per second. On k times the ranks, k times the rate is ideal, whether a step has the same work
(strong scaling) or each rank has (weak). Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted, plain

PAYS = 0.5
"""Larger sizes pay if with one of them the nodes that are added give at least this share of the ideal."""
NEAR = 0.1
"""An efficiency that is so near to 1 is ideal, if 1 lies in the range that the repeats leave."""
NEAR_ALONE = 0.05
"""The same if no size has repeats, so that nothing tells how far they differ."""
QUIET = 0.4
"""A range of efficiencies wider than this tells nothing about a loss that lies in it."""
MOSTLY = 0.5
"""A part of the loss that is at least so large is named alone."""
PARTS = ("communication", "data", "imbalance", "compute")


@dataclass(frozen=True)
class Parts:
    """Shares of a rank's time in its steps, 0 to 1; the rest is its own work."""

    communication: float
    """Exchange with the other ranks, without the wait for slower ones."""
    data: float
    """Wait for data."""
    imbalance: float
    """Wait for slower ranks."""
    slowest: str = ""
    """The rank that the others wait for, as it is named; empty if none stands out."""

    @property
    def compute(self) -> float:
        return max(0.0, 1 - self.communication - self.data - self.imbalance)


@dataclass(frozen=True)
class Size:
    """What was measured on one number of nodes."""

    nodes: int
    ranks: int
    rates: tuple[float, ...]
    """Work per second of each repeat, larger than 0; at least one."""
    parts: Parts | None = None
    """None: not known."""
    cores: int = 0
    """Of the one machine that all ranks share, if they take them all; else 0."""

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """From the slowest repeat to the fastest, as a share of the median."""
        return (max(self.rates) - min(self.rates)) / self.rate


@dataclass(frozen=True)
class Gain:
    """A size against a smaller one."""

    speedup: float
    efficiency: float
    least: float
    most: float
    """The range of the efficiency, by the slowest and the fastest repeats of both."""


@dataclass(frozen=True)
class ScalingFinding:
    kind: str
    """ideal, pays, stops, noise, or one-size."""
    cause: str
    """communication, data, imbalance, compute, several, unknown; empty if nothing is lost."""
    sentence: str


def gain(size: Size, base: Size) -> Gain:
    more = size.ranks / base.ranks
    return Gain(
        speedup=size.rate / base.rate,
        efficiency=size.rate / base.rate / more,
        least=min(size.rates) / max(base.rates) / more,
        most=max(size.rates) / min(base.rates) / more,
    )


def judge(sizes: Sequence[Size], *, is_strong: bool) -> ScalingFinding:
    """The finding of sizes in ascending order of their ranks."""
    if len(sizes) < 2:
        return ScalingFinding("one-size", "", "One size alone shows no scaling.")
    base, last = sizes[0], sizes[-1]
    kinds = [_kind(size, base) for size in sizes[1:]]
    repeats = max(len(size.rates) for size in sizes)
    spread = max(size.spread for size in sizes)
    if set(kinds) == {"ideal"}:
        return ScalingFinding("ideal", "", _ideal(last, base, repeats))
    if "real" not in kinds:
        return ScalingFinding(
            "noise",
            "unknown",
            f"Noise: repeats of one size differ by up to {_percent(spread)}, more than what the nodes "
            "change: the numbers do not show what more nodes give. Longer runs or more repeats may.",
        )
    stop = next((at for at in range(1, len(sizes)) if not _pay(sizes[at:], sizes[at - 1])), None)
    unsharp = ""
    if stop is not None and _is_near(sizes[stop], sizes[stop - 1]):
        unsharp = f" Repeats differ by up to {_percent(spread)}, so that limit is not sharp."
    size = last if stop is None else sizes[stop]
    begin = "Most of the loss is" if stop is None else "What holds it back is"
    cause, why = _cause(size, base, begin, is_strong=is_strong)
    if stop is None:
        found = gain(last, base)
        sentence = (
            f"It pays up to {counted(last.nodes, 'node')}, the most that were tried: "
            f"{found.speedup:.2f} times as fast as on {counted(base.nodes, 'node')}, "
            f"an efficiency of {_percent(found.efficiency)}. {why}"
        )
        return ScalingFinding("pays", cause, sentence.rstrip())
    before = sizes[stop - 1]
    found = gain(size, before)
    sentence = (
        f"It stops paying beyond {counted(before.nodes, 'node')}: {counted(size.nodes, 'node')} "
        f"{'is' if size.nodes == 1 else 'are'} {found.speedup:.2f} times as fast as {before.nodes}, where "
        f"{size.ranks / before.ranks:.2f} would be ideal.{unsharp} {why}"
    )
    return ScalingFinding("stops", cause, sentence)


def _kind(size: Size, base: Size) -> str:
    """ideal, noise or real: what the repeats leave of the difference from the ideal."""
    found = gain(size, base)
    if len(size.rates) == len(base.rates) == 1:
        return "ideal" if found.efficiency >= 1 - NEAR_ALONE else "real"
    width = found.most - found.least
    if found.least > 1 or (found.most >= 1 and found.efficiency >= 1 - NEAR and width <= QUIET):
        return "ideal"
    if found.most >= 1 or width > max(QUIET, 1 - found.efficiency):
        return "noise"
    return "real"


def _ideal(last: Size, base: Size, repeats: int) -> str:
    found = gain(last, base)
    begin = f"up to {counted(last.nodes, 'node')}: an efficiency of {_percent(found.efficiency)}"
    if repeats == 1:
        return (
            f"It scales ideally {begin}, as far as one run of each size tells; repeats would show the noise."
        )
    return (
        f"It scales ideally within noise {begin}, "
        f"by the repeats from {_percent(found.least)} to {_percent(found.most)}."
    )


def _added(speedup: float, size: Size, before: Size) -> float:
    """What the added ranks give, as a share of what they would ideally."""
    return (speedup - 1) / (size.ranks / before.ranks - 1)


def _pay(sizes: Sequence[Size], before: Size) -> bool:
    """Whether one of these larger sizes does: the next one alone may have been measured at a bad time."""
    return any(_added(gain(size, before).speedup, size, before) >= PAYS for size in sizes)


def _is_near(size: Size, before: Size) -> bool:
    """Whether the fastest repeats would pay."""
    found, more = gain(size, before), size.ranks / before.ranks
    return _added(found.most * more, size, before) >= PAYS


def _cause(size: Size, base: Size, begin: str, *, is_strong: bool) -> tuple[str, str]:
    """(the cause, a sentence about it that begins so) of what this size loses against the smallest one."""
    crowd = f"{counted(size.ranks, 'rank')} share the {counted(size.cores, 'core')} of this machine" * bool(
        size.cores
    )
    if size.parts is None or base.parts is None:
        why = "The numbers do not show what holds it back: no parts of the steps are known"
        return "unknown", f"{why}, and {crowd}." if crowd else f"{why}."
    lost = _losses(size, base)
    total = sum(lost.values())
    if total <= 0:
        return "", ""
    name = max(PARTS, key=lambda part: lost[part])
    if lost[name] < MOSTLY * total:
        told = ", ".join(
            f"{_named(part)} {_percent(lost[part] / total)}" for part in PARTS if lost[part] > 0.05 * total
        )
        return "several", f"No part alone holds it back; of what is lost: {told}."
    share, before = getattr(size.parts, name), getattr(base.parts, name)
    grown = (
        f"{_percent(share)} of a step on {counted(size.nodes, 'node')}, {_percent(before)} on {base.nodes}"
    )
    if name == "communication":
        return name, f"{begin} communication: {grown}."
    if name == "data":
        return name, f"{begin} the wait for data: {grown}."
    if name == "imbalance":
        who = f"{plain(size.parts.slowest)} is the slowest" if size.parts.slowest else "no rank stands out"
        return name, f"{begin} imbalance, the wait for slower ranks: {grown}; {who}."
    slower = f"the same work takes a rank {1 + lost[name] / base.parts.compute:.2f} times as long"
    if crowd:
        ours = f"{counted(size.ranks, 'rank')} share its {counted(size.cores, 'core')}"
        return name, f"{begin} this machine: {ours}, and {slower}."
    if is_strong:
        return name, f"{begin} too little work a rank: in its small share {slower}."
    return name, f"{begin} in the ranks' own work: {slower}, so they share something."


def _losses(size: Size, base: Size) -> Mapping[str, float]:
    """How much longer each part takes a rank for the same work than on the smallest size, in units of that
    size's time; only what has grown."""
    assert size.parts is not None
    assert base.parts is not None
    slower = 1 / gain(size, base).efficiency
    return {part: max(0.0, getattr(size.parts, part) * slower - getattr(base.parts, part)) for part in PARTS}


def _named(part: str) -> str:
    return {"data": "waiting for data", "compute": "the ranks' own work"}.get(part, part)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
