"""The page about a scaling measurement: finding, picture, table and runs. `html` makes it; `apptrain report`
of the directory writes it.

As the report of a run it needs nothing else. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from entrypoint.core.plain import counted, plain
from entrypoint.report.charts import shown
from entrypoint.report.page import document, table_of
from entrypoint.scaling import picture, result
from entrypoint.scaling.finding import PARTS
from entrypoint.scaling.result import Scaling

LOOK = {"ideal": "good", "pays": "good", "stops": "wait", "noise": "wait"}


def html(name: str, scaling: Scaling, now: float | None = None) -> str:
    """`name`: of the directory; `now`: when it is made, in Unix seconds."""
    finding = scaling.finding
    heads, rows = result.rows(scaling)
    sections = [
        f"<p>{_safe(scaling.constant())}.</p>",
        f'<style>{picture.SHARED}</style><div class="charts">{picture.figures(scaling)}</div>',
        "<h2>Sizes</h2>" + table_of(heads, rows, style="stack"),
        _parts(scaling),
        _list("What differs though it should not", _differing(scaling)),
        _list("Left out", scaling.left_out),
        _list("The same in all runs", (f"{key}: {value}" for key, value in scaling.same.items())),
        _runs(scaling),
    ]
    return document(name, LOOK.get(finding.kind, "wait"), finding.sentence, sections, now)


def _parts(scaling: Scaling) -> str:
    """What a rank's time in its steps goes to, if that is known."""
    rows = [
        [counted(size.nodes, "node"), *(f"{100 * getattr(size.parts, name):.1f} %" for name in PARTS)]
        for size in scaling.sizes
        if size.parts is not None
    ]
    heads = ["", "communication", "waiting for data", "waiting for slower ranks", "own work"]
    return "<h2>Parts of a step</h2>" + table_of(heads, rows, numbers=(1, 2, 3, 4)) if rows else ""


def _differing(scaling: Scaling) -> Iterable[str]:
    return (f"{name}: {', '.join(values)}" for name, values in scaling.differ.items())


def _runs(scaling: Scaling) -> str:
    rows = [
        [str(run.nodes), f"{shown(run.rate)} {run.unit}", str(run.timed), run.path.name]
        for one in scaling.groups
        for run in one.runs
    ]
    return "<h2>Runs</h2>" + table_of(["nodes", "rate", "timed steps", "run"], rows, numbers=(0, 1, 2))


def _list(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{_safe(line)}</li>" for line in lines)
    return f"<h2>{title}</h2><ul>{items}</ul>" if items else ""


def _safe(text: str) -> str:
    return escape(str(plain(text)))
