"""Draws the charts of a report as SVG: curves, bars and strips. Begin at `curves`.

The functions are pure: numbers in, text out. Colours are classes that the page's style defines, for light,
dark and paper. Each chart has a title and a description for who does not see it. No library draws: a page of
matplotlib's SVG is ten times as large, and knows no dark mode. Runs with Python 3.9.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain
from entrypoint.record.traces import Series

WIDTH, HEIGHT = 420, 230
"""Of a chart, in its own units: as wide as a phone, so that its text stays readable there."""
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 36
BUCKETS = 300
"""Points of a curve; each of a longer series is the mean of its steps, with a band from least to most."""
LOG_FROM = 50.0
"""A series of positive numbers whose largest is that many times its least has a logarithmic scale."""


LONGEST = 1e10
"""Seconds, 300 years."""


@dataclass(frozen=True)
class Point:
    x: float
    least: float
    mean: float
    most: float


def shown(value: float) -> str:
    """A number in few characters."""
    size = abs(value)
    if size >= 1e15 or size < 1e-4:
        return f"{value:.2g}"
    for least, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= least:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[letter]:.4g}{letter}"
    return f"{value:.4g}"


def percent_of(share: float) -> str:
    """`97.50 %` of 0.975."""
    return f"{100 * share:.2f} %" if abs(share) < 100 else f"{shown(100 * share)} %"


def duration(seconds: float) -> str:
    """`250 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`, `2 d 4 h`; `very long` for what no run takes."""
    if seconds >= LONGEST:
        return "very long"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02} s"
    if seconds < 48 * 3600:
        return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02} min"
    return f"{int(seconds) // 86400} d {int(seconds) % 86400 // 3600} h"


def thinned(series: Series, buckets: int = BUCKETS) -> list[Point]:
    """At most that many points, without values that are no number."""
    steps, floats = series.steps, series.floats
    size = max(1, math.ceil(len(floats) / buckets))
    found = []
    for at in range(0, len(floats), size):
        part = floats[at : at + size]
        values = part if all(map(math.isfinite, part)) else [one for one in part if math.isfinite(one)]
        if values:
            middle = (steps[at] + steps[min(at + size, len(steps)) - 1]) / 2
            mean = sum(values) / len(values)
            if not math.isfinite(mean):  # the sum alone is too large
                mean = math.fsum(one / len(values) for one in values)
            found.append(Point(middle, min(values), mean, max(values)))
    return found


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 1e-300 else raw
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= raw), raw)
    first = math.ceil(low / step - 1e-9)
    found = [(first + at) * step for at in range(most + 1)]
    return [value for value in found if value <= high + 1e-9 * span] or [low]


class Scale:
    """Of one axis: values to places."""

    def __init__(self, low: float, high: float, first: float, last: float, *, log: bool = False):
        self.log = log
        if low == high:
            low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
        self.low, self.high, self._first, self._last = low, high, first, last

    def __call__(self, value: float) -> float:
        low, high = self._of(self.low), self._of(self.high)
        part = self._of(value) / 2 - low / 2  # halves, so that no difference is infinite
        whole = high / 2 - low / 2
        part = part / whole if whole else 0.5
        return round(self._first + min(1.0, max(0.0, part)) * (self._last - self._first), 1)

    def _of(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value

    def ticks(self) -> list[float]:
        if not self.log:
            return ticks(self.low, self.high)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first < 1:
            return ticks(self.low, self.high)
        return [10.0**at for at in range(first, last + 1, max(1, (last - first) // 4))]


def curves(
    title: str,
    named: Mapping[str, Series],
    *,
    unit: str = "",
    marks: Iterable[float] = (),
    dots: bool = False,
    percent: bool = False,
) -> str:
    """A chart over the steps; empty if there is no number. `marks`: steps at which the run went on; `dots`:
    each point is drawn."""
    points = {name: found for name, series in named.items() if (found := thinned(series))}
    every = [point for found in points.values() for point in found]
    if not every:
        return ""
    low, high = min(point.least for point in every), max(point.most for point in every)
    log = low > 0 and high / low >= LOG_FROM and not percent
    if not log and not percent and low > 0 and low < high / 2:
        low = 0.0
    if percent and low == high and 0 <= low <= 1:
        low, high = 0.0, 1.0
    x = Scale(min(point.x for point in every), max(point.x for point in every), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, log=log)
    drawn = [_grid(x, y, "step", percent=percent)]
    drawn += [
        f'<line class="mark" x1="{x(at)}" x2="{x(at)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        for at in list(marks)[:50]
        if x.low <= at <= x.high
    ]
    for number, found in enumerate(points.values(), 1):
        drawn += _curve(found, x, y, f"c{number}", dots=dots)
    legend = _legend(list(points)) if len(points) > 1 else ""
    said = "; ".join(_in_words(name, named[name], unit, percent) for name in points)
    if log:
        said += "; logarithmic scale"
    return figure(title, said, "".join(drawn), legend)


def _curve(points: Sequence[Point], x: Scale, y: Scale, colour: str, *, dots: bool) -> list[str]:
    drawn = []
    if any(point.least < point.most for point in points):
        upper = [f"{x(point.x)},{y(point.most)}" for point in points]
        lower = [f"{x(point.x)},{y(point.least)}" for point in reversed(points)]
        drawn.append(f'<polygon class="band {colour}" points="{" ".join(upper + lower)}"/>')
    line = " ".join(f"{x(point.x)},{y(point.mean)}" for point in points)
    drawn.append(f'<polyline class="line {colour}" points="{line}"/>')
    if (dots and len(points) <= 100) or len(points) == 1:
        drawn += [
            f'<circle class="dot {colour}" cx="{x(point.x)}" cy="{y(point.mean)}" r="3"/>' for point in points
        ]
    return drawn


def _in_words(name: str, series: Series, unit: str, percent: bool) -> str:
    floats = series.floats
    values = floats if all(map(math.isfinite, floats)) else [one for one in floats if math.isfinite(one)]
    odd = len(series) - len(values)

    def said(value: float) -> str:
        return percent_of(value) if percent else f"{shown(value)}{unit}"

    if len(values) == 1:
        return f"{name}: {said(values[0])} at step {series.last}"
    words = (
        f"{name}: {said(values[0])} at step {series.steps[0]}, {said(values[-1])} at step {series.last}, "
        f"least {said(min(values))}, most {said(max(values))}"
    )
    return words + (f", {odd} values are no number" if odd else "")


def bars(title: str, edges: Sequence[float], counts: Sequence[float], *, x_label: str, said: str) -> str:
    """A histogram: `counts` between each two `edges`."""
    x = Scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    y = Scale(0.0, max(*counts, 1), HEIGHT - BOTTOM, TOP)
    drawn = [_grid(x, y, x_label)]
    for at, count in enumerate(counts):
        if count:
            left, right, top = x(edges[at]), x(edges[at + 1]), y(count)
            width, height = max(0.5, right - left - 0.6), max(0.8, HEIGHT - BOTTOM - top)
            drawn.append(
                f'<rect class="fill c1" x="{left}" y="{HEIGHT - BOTTOM - height:.1f}" '
                f'width="{width:.1f}" height="{height:.1f}"/>'
            )
    return figure(title, said, "".join(drawn))


def _grid(x: Scale, y: Scale, x_label: str, *, percent: bool = False) -> str:
    drawn = []
    for value in y.ticks():
        at = y(value)
        label = f"{100 * value:.3g} %" if percent else shown(value)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{label}</text>')
    base = HEIGHT - BOTTOM
    drawn.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    for value in x.ticks():
        at = x(value)
        anchor = "end" if at > WIDTH - RIGHT - 14 else "middle"
        drawn.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{base}" y2="{base + 4}"/>')
        drawn.append(f'<text x="{at}" y="{base + 16}" text-anchor="{anchor}">{shown(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{_safe(x_label)}</text>')
    return "".join(drawn)


def figure(title: str, said: str, drawn: str, legend: str = "", size: str = "") -> str:
    """A chart with its title and its words. `size`: attributes of the SVG instead of those of a chart."""
    size = size or f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    return (
        f"<figure><figcaption>{_safe(title)}</figcaption>{legend}"
        f'<svg role="img" {size}><title>{_safe(title)}</title><desc>{_safe(said)}</desc>{drawn}</svg>'
        f'<p class="said">{_safe(said)}.</p></figure>'
    )


def _legend(names: Sequence[str]) -> str:
    keys = (
        f'<span class="key"><i class="c{at}"></i>{_safe(name)}</span>' for at, name in enumerate(names, 1)
    )
    return f'<p class="legend">{"".join(keys)}</p>'


@dataclass(frozen=True)
class Part:
    """A part of a strip."""

    name: str
    begin: float
    end: float
    colour: int


def strips(
    title: str,
    rows: Sequence[tuple[str, Sequence[Part]]],
    *,
    begin: float,
    end: float,
    marks: Sequence[float] = (),
    said: str,
) -> str:
    """Rows of parts on one scale of seconds from `begin` to `end`. It is as wide as the page and its text
    keeps its size: places are percents. `marks`: times of checkpoints, in the row that
    they fall into."""
    span = max(end - begin, 1e-3)

    def at(time: float) -> float:
        return round(100 * min(1.0, max(0.0, (time - begin) / span)), 2)

    drawn, top = [], 4
    for name, parts in rows:
        drawn.append(f'<text x="0" y="{top + 11}">{_safe(name)}</text>')
        for part in parts:
            left, width = at(part.begin), at(part.end) - at(part.begin)
            drawn.append(
                f'<rect class="fill c{part.colour}" x="{left}%" y="{top + 17}" '
                f'width="{max(0.15, width):.2f}%" height="16"><title>{_safe(part.name)} '
                f"{duration(max(0.0, part.end - part.begin))}</title></rect>"
            )
        for time in marks:
            if parts and parts[0].begin <= time <= parts[-1].end:
                place = at(time)
                drawn.append(
                    f'<line class="save" x1="{place}%" x2="{place}%" y1="{top + 14}" y2="{top + 36}"/>'
                )
        top += 42
    drawn.append(f'<line class="axis" x1="0" x2="100%" y1="{top}" y2="{top}"/>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        label = duration(share * span) if share else "0"
        drawn.append(f'<text x="{100 * share}%" y="{top + 15}" text-anchor="{anchor}">{label}</text>')
    colours = {part.name: part.colour for _, parts in rows for part in parts}
    keys = "".join(
        f'<span class="key"><i class="c{colour}"></i>{_safe(name)}</span>' for name, colour in colours.items()
    )
    keys += '<span class="key"><i class="save"></i>checkpoint</span>' * bool(marks)
    size = f'width="100%" height="{top + 20}" class="strip"'
    return figure(title, said, "".join(drawn), f'<p class="legend">{keys}</p>', size)


def _safe(value: str) -> str:
    return escape(str(plain(value)))
