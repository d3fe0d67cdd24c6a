"""The picture of a comparison: the losses of all runs, and how far each is from the first.

matplotlib is imported here alone, once a picture is asked for: a login node may have none.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from entrypoint.core.errors import BadInput
from entrypoint.core.plain import counted, plain
from entrypoint.core.private import write_output
from entrypoint.record.traces import Trace, common, compare

COLOURS = ("#2f6db5", "#d9772b", "#4a9c5d", "#8f5fb0", "#5a5a5a")
LEAST = 1e-8
"""Below it the scale is linear, so that 0 is on it."""
MOST = 1e100
"""What is further from 0 is left out: no axis has it."""


def check(path: Path) -> None:
    """Raises BadInput where nothing can draw, and for a name that is not of a PNG."""
    if path.suffix != ".png":
        raise BadInput(
            "picture-kind",
            f"compare -o {plain(str(path))}: the picture is PNG: give a name with .png",
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput(
            "picture-no-matplotlib",
            "compare -o: this Python has no matplotlib: give PYTHON=FILE with one that has it, such as that "
            "of make venv, or leave -o out",
        )


def draw(names: Sequence[str], traces: Sequence[Trace], path: Path) -> None:
    """Writes a PNG. Raises BadInput where it cannot be written."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with mpl.rc_context({**style, "font.size": 10, "axes.titlelocation": "left"}):
        figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
        left, right = figure.subplots(1, 2)
        first, widest = traces[0]["loss"], 0.0
        for at, trace in enumerate(traces):
            name = names[at].replace("$", r"\$")  # a pair of them would begin a formula
            look: Any = {"color": COLOURS[at % len(COLOURS)], "linestyle": "-" if at == 0 else "--"}
            losses = trace["loss"]
            left.plot(losses.steps, _on_paper(losses.floats), label=name, **look)
            if at == 0:
                continue
            parting = compare(traces[0], trace)
            apart = [
                (first.steps[one], abs(first.floats[one] - losses.floats[other]))
                for one, other in common(first, losses)
            ]
            said = "identical" if parting.identical else f"identical for {counted(parting.steps, 'step')}"
            if parting.first is not None:
                said = f"parts at step {parting.first}"
            far = _on_paper([value for _, value in apart])
            right.plot([step for step, _ in apart], far, label=f"{name}: {said}", **look)
            widest = max(widest, *filter(math.isfinite, far), 0.0)
        left.set(title="Loss", xlabel="step")
        right.set(title="Distance of the loss from that of " + names[0].replace("$", r"\$"), xlabel="step")
        right.set_yscale("symlog", linthresh=LEAST)
        right.set_ylim(0, 10 * max(widest, LEAST))
        for axes in (left, right):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend(loc="best", frameon=False, fontsize=8)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
    write_output(path, drawn.getvalue(), "compare")


def _on_paper(values: Iterable[float]) -> list[float]:
    return [value if abs(value) <= MOST else math.nan for value in values]
