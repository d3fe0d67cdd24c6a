"""Draws a scaling measurement: the speed-up beside the ideal line, and the efficiency beneath. `svg` makes a
picture that stands alone, `figures` what a page of ours takes in.

As the charts of a report it needs no library, and knows light, dark and paper. Each point has the range of
its repeats. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted
from entrypoint.report import charts
from entrypoint.report.charts import Scale, shown
from entrypoint.scaling.result import Scaling

WIDTH, HEIGHT = 420, 250
"""Of a chart, in its own units: as wide as a phone."""
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 12, 40
TITLE, HEAD = 28, 26
"""Heights of the title, and of a chart's own."""
STYLE = (
    "svg{--bg:#fff;--fg:#1b1f24;--dim:#59636e;--line:#d5dae0;--c1:#0068b3;--c2:#c25400}"
    "@media (prefers-color-scheme:dark){svg{--bg:#14181d;--fg:#e4e8ec;--dim:#9aa5b1;--line:#38414b;"
    "--c1:#58b0f5;--c2:#ff9a52}}"
    'text{fill:var(--dim);font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}'
    "text.head{fill:var(--fg);font-size:13px}text.title{fill:var(--fg);font-size:15px;font-weight:600}"
)
SHARED = (
    ".bg{fill:var(--bg)}.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--dim);stroke-width:1}"
    ".ideal{stroke:var(--c2);stroke-width:1.6;stroke-dasharray:6 4;fill:none}"
    ".seen{stroke:var(--c1);stroke-width:1.8;fill:none}.dots{fill:var(--c1)}"
    "text.ideal-word{fill:var(--c2);stroke:none}text.seen-word{fill:var(--c1);stroke:none}"
)
"""For both kinds of page. Line, dash and words tell the two series apart, not their colours alone."""
LOG_FROM = 6.0
"""If the largest size has that many times the ranks of the least, its axes are logarithmic."""


@dataclass(frozen=True)
class ChartPoint:
    """A point of a chart, with the range of its repeats."""

    nodes: int
    value: float
    least: float
    most: float
    ideal: float


def svg(scaling: Scaling) -> str:
    """The picture as a file of its own."""
    title = f"{scaling.first.program}: {scaling.kind} scaling"
    parts = _parts(scaling)
    height = TITLE + len(parts) * (HEAD + HEIGHT)
    drawn = "".join(
        f'<g transform="translate(0 {TITLE + at * (HEAD + HEIGHT)})">'
        f'<text class="head" x="8" y="{HEAD - 8}">{escape(name)}</text>'
        f'<g transform="translate(0 {HEAD})">{chart}</g></g>'
        for at, (name, chart, _) in enumerate(parts)
    )
    said = " ".join([*(f"{words}." for _, _, words in parts), scaling.finding.sentence])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}"><title>{escape(title)}</title><desc>{escape(said)}</desc>'
        f"<style>{STYLE}{SHARED}</style>"
        f'<rect class="bg" width="{WIDTH}" height="{height}"/>'
        f'<text class="title" x="8" y="20">{escape(title)}</text>{drawn}</svg>\n'
    )


def figures(scaling: Scaling) -> str:
    """The same as figures of a report, with their words."""
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    return "".join(charts.figure(name, said, drawn, size=size) for name, drawn, said in _parts(scaling))


def _parts(scaling: Scaling) -> list[tuple[str, str, str]]:
    """(title, drawing, its words) of both charts."""
    base = scaling.sizes[0]
    speed, share = [], []
    for size in scaling.sizes:
        found, more = scaling.gain(size), size.ranks / base.ranks
        speed.append(ChartPoint(size.nodes, found.speedup, found.least * more, found.most * more, more))
        share.append(ChartPoint(size.nodes, found.efficiency, found.least, found.most, 1.0))
    unit = f"{counted(base.nodes, 'node')}: {shown(scaling.median_rate(scaling.groups[0]))} {scaling.unit}"
    is_log = speed[-1].ideal >= LOG_FROM
    top = 1.05 * max(max(one.ideal, one.most) for one in speed)
    low = min(0.8, *(one.least for one in speed)) if is_log else 0.0
    y = Scale(low, top, HEIGHT - BOTTOM, TOP, log=is_log)
    first = _chart(speed, y, is_log=is_log)
    y = Scale(0.0, max(1.1, *(one.most for one in share)), HEIGHT - BOTTOM, TOP)
    second = _chart(share, y, is_log=is_log, percent=True)
    told = "; ".join(f"{one.nodes}: {one.value:.2f}" for one in speed)
    shares = "; ".join(
        f"{one.nodes}: {100 * one.value:.0f} % ({100 * one.least:.0f} to {100 * one.most:.0f} %)"
        for one in share
    )
    bars = "bars reach from the slowest repeats to the fastest"
    return [
        (f"Speed-up ({unit})", first, f"by nodes: {told}; {bars}"),
        ("Efficiency against the ideal", second, f"by nodes: {shares}"),
    ]


def _chart(seen: Sequence[ChartPoint], y: Scale, *, is_log: bool, percent: bool = False) -> str:
    low, high = seen[0].nodes, seen[-1].nodes
    room = 0.06 * (high - low)
    ends = (low / 1.15, high * 1.15) if is_log else (low - room, high + room)
    x = Scale(*ends, LEFT, WIDTH - RIGHT, log=is_log)
    drawn = [_grid(x, y, [one.nodes for one in seen], percent=percent)]
    ideal = [(x(one.nodes), y(one.ideal)) for one in seen]
    left, top = _last_middle(ideal)
    drawn.append(
        f'<polyline class="ideal" points="{_points(ideal)}"/>'
        f'<text class="ideal-word" x="{left - 4:.1f}" y="{top - 7:.1f}" text-anchor="end">ideal</text>'
    )
    places = [(x(one.nodes), y(one.value)) for one in seen]
    drawn.append(f'<polyline class="seen" points="{_points(places)}"/>')
    for one in seen:
        at, least, most = x(one.nodes), y(one.least), y(one.most)
        if least != most:
            drawn.append(
                f'<path class="seen" d="M{at} {least}V{most}M{at - 5} {least}h10M{at - 5} {most}h10"/>'
            )
        drawn.append(f'<circle class="dots" cx="{at}" cy="{y(one.value)}" r="3.5"/>')
    left, _ = _last_middle(places)
    below = max(top for _, top in places[-2:]) + 18  # the line may fall, and no word may lie on it
    drawn.append(
        f'<text class="seen-word" x="{left:.1f}" y="{below:.1f}" text-anchor="middle">measured</text>'
    )
    return "".join(drawn)


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{left},{top}" for left, top in places)


def _last_middle(places: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The middle of the last part of a line."""
    (left, top), (right, bottom) = places[-2:]
    return (left + right) / 2, (top + bottom) / 2


def _grid(x: Scale, y: Scale, nodes: Sequence[int], *, percent: bool) -> str:
    base, drawn = HEIGHT - BOTTOM, []
    for value in _powers(y) if y.log else y.ticks():
        at = y(value)
        label = f"{100 * value:.3g} %" if percent else shown(value)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{label}</text>')
    drawn.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    free = 0.0
    for number in nodes:
        at = x(number)
        drawn.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{base}" y2="{base + 4}"/>')
        if at >= free:
            drawn.append(f'<text x="{at}" y="{base + 17}" text-anchor="middle">{number}</text>')
            free = at + 9 * len(str(number)) + 6
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">nodes</text>')
    return "".join(drawn)


def _powers(y: Scale) -> list[float]:
    """Powers of two, at most eight of them."""
    first, last = math.ceil(math.log2(y.low)), math.floor(math.log2(y.high))
    return [2.0**at for at in range(first, last + 1, max(1, (last - first) // 7 + 1))]
