"""Measures what of a job's start grows with the nodes, and draws the start from 1 to 16,384. `scale` is the
entry.

Measured: the plan and the job script's `prepare`, a meeting's first node (meeting.py), torch's store
(store.py). Staging follows entrypoint/batch/staging.py. The rest is taken from benchmarks/results/start.json,
cited or assumed, and says which. PUBLISHED are figures of others to stand beside the curve.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.meeting import meeting
from benchmarks.store import store
from entrypoint.batch import staging
from entrypoint.batch.prepare import prepare
from entrypoint.job import handover

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs/images/scale.svg"
SIZES = (1, 16, 256, 4096, 16384)
DRAWN = tuple(2**power for power in range(15))
IMAGE = 3_060_000_000
"""Bytes of the image of the default stack."""
LEVEL = 0.5
"""Seconds that a scheduler needs to pass a step on by one level of its tree: assumed."""
TREE = 16
"""Nodes to which each of them passes it on: Slurm's TreeWidth by default since 24.05."""
BANDWIDTHS = {
    "shared 5 GB/s, a node 1 GB/s": staging.Bandwidth(),
    "shared 1 GB/s, a node 5 GB/s": staging.Bandwidth(shared=1e9, node=5e9),
}
"""What the shared file system gives to all nodes together, and what a node sends and writes."""
PUBLISHED = (
    (4096, 750.0, "ezpz: an environment of Python on every node"),
    (4096, 194.0, "ezpz: first step after that"),
    (4000, 373.0, "torchelastic: rendezvous, before"),
    (4000, 10.0, "torchelastic: rendezvous, after"),
    (8000, 85.0, "gloo: a full mesh"),
    (12000, 100.0, "TCPStore: 96,000 ranks, drawn as 8 a node"),
)
"""Nodes, seconds, and whose they are."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of a start."""

    name: str
    fixed: float
    """Seconds, whatever the number of nodes."""
    each: float = 0.0
    """Seconds a node."""
    level: float = 0.0
    """Seconds a level of the scheduler's tree."""
    source: str
    """Measured, cited or assumed, and where."""

    def seconds(self, nodes: int) -> float:
        return self.fixed + self.each * nodes + self.level * math.ceil(math.log(nodes, TREE))


def scale(pairs: int) -> dict[str, Any]:
    """All of it; `pairs`: rounds of each measurement."""
    print("plan, and prepare of the job script:")
    plans = {size: _spread([_plan(size) for _ in range(pairs)]) for size in SIZES}
    prepares = {size: _spread([_prepare(size) for _ in range(pairs)]) for size in SIZES}
    for size in SIZES:
        print(f"{size:6} nodes: plan {plans[size]['median']:.2f} s, prepare {prepares[size]['median']:.3f} s")
    print("the meeting:")
    met = meeting(pairs)
    print("torch's store:")
    stored = store(pairs)
    terms = model(
        met["hub_cpu_s"], stored["server_cpu_s"], {size: prepares[size]["median"] for size in SIZES}
    )
    curves = {name: _curve(terms, bandwidth) for name, bandwidth in BANDWIDTHS.items()}
    draw(curves)
    print(f"drawn in {PICTURE.relative_to(HERE.parent)}")
    return {
        "plan_s": plans,
        "prepare_s": prepares,
        "meeting": met,
        "store": stored,
        "model": [vars(term) for term in terms],
        "start_s": curves,
        "published": PUBLISHED,
    }


# --- what is measured here -------------------------------------------------------------------------------


def _plan(nodes: int) -> float:
    """Seconds of `plan` in a step of so many nodes, with Python's start."""
    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "recorded.env"
        env.write_text("".join(f"{name}={value}\n" for name, value in _step(nodes).items()))
        command = [sys.executable, "-S", "-m", "entrypoint", "plan", "--json", "--env-file", str(env)]
        begin = time.perf_counter()
        subprocess.run(command, cwd=HERE.parent, stdout=subprocess.DEVNULL, timeout=60, check=True)
        return time.perf_counter() - begin


def _step(nodes: int) -> dict[str, str]:
    names = f"nid[00001-{nodes:05}]" if nodes > 1 else "nid00001"
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": names,
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": names,
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": str(nodes),
        "SLURM_PROCID": "0",
        "SLURM_GPUS_ON_NODE": "4",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    }


def _prepare(nodes: int) -> float:
    """Seconds of `prepare` in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = _step(nodes)["SLURM_JOB_NODELIST"]
        env = {
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NAME": "apptrain",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": names,
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_JOB_CPUS_PER_NODE": f"8(x{nodes})",
            "SLURM_GPUS_ON_NODE": "4",
            "PWD": name,
        }
        facts = [("scheduler", "slurm"), ("home", name), ("image", f"{name}/image.sif"), ("batch", "yes")]
        handover.write(folder / handover.ASK, facts)
        handover.write(folder / handover.ENVIRONMENT, env.items())
        begin = time.perf_counter()
        prepare(folder, {"APPTRAIN_STACK": "/opt/apptrain/stack.json"})
        return time.perf_counter() - begin


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# --- the model ----------------------------------------------------------------------------------------------


def model(hub: Mapping[int, float], server: Mapping[int, float], prepares: Mapping[int, float]) -> list[Term]:
    """start = scheduler + image + container + meeting + import + store; the image's part is staging's."""
    start = json.loads((HERE / "results/start.json").read_text())["parts"]["ours"]
    most, clients = max(hub), max(server)
    here = "measured, benchmarks/results/start.json, 3 nodes on 2 cores"
    return [
        Term(
            name="job script",
            fixed=start["script"],
            each=max(0.0, prepares[max(prepares)] - prepares[min(prepares)]) / max(prepares),
            source=f"{here}; its growth measured to {max(prepares):,} nodes",
        ),
        Term(
            name="scheduler", fixed=0.0, level=LEVEL, source=f"assumed: {LEVEL} s a level, {TREE} nodes each"
        ),
        Term(name="container and Python", fixed=start["task"] + start["plan"], source=here),
        Term(
            name="meeting",
            fixed=start["nodes"],
            each=hub[most] / most,
            source=f"the first node's CPU seconds, measured to {most:,} participants",
        ),
        Term(name="import of torch", fixed=start["torch"], source=here),
        Term(
            name="ranks and torch's store",
            fixed=start["ranks"] + start["sum"],
            each=server[clients] / clients,
            source=f"the server's CPU seconds, measured to {clients:,} clients, straight on from there",
        ),
    ]


def _curve(terms: list[Term], bandwidth: staging.Bandwidth) -> dict[str, Any]:
    rest = {nodes: sum(term.seconds(nodes) for term in terms) for nodes in DRAWN}
    return {
        "nodes": DRAWN,
        "unstaged": [rest[n] + staging.unstaged(n, IMAGE, bandwidth) for n in DRAWN],
        "staged": [rest[n] + staging.staged(n, IMAGE, bandwidth) for n in DRAWN],
        "without the image": list(rest.values()),
        "auto stages from": staging.break_even(IMAGE, bandwidth),
    }


def draw(curves: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes PICTURE: a panel for each bandwidth."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "apptrain", "svg.fonttype": "none"})
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True)
    styles = (
        ("unstaged", "#d55e00", "-"),
        ("staged", "#0072b2", "-"),
        ("without the image", "#555555", "--"),
    )
    for axes, (name, curve) in zip(panels, curves.items(), strict=True):
        for what, colour, line in styles:
            axes.plot(curve["nodes"], curve[what], color=colour, linestyle=line, label=what)
        for number, (nodes, seconds, whose) in enumerate(PUBLISHED):
            marker = "osD^vx"[number]
            axes.plot([nodes], [seconds], marker, color="black", markerfacecolor="none", label=whose)
        axes.set(xscale="log", yscale="log", xlabel="nodes", title=f"3.06 GB image, {name}")
        axes.grid(visible=True, which="major", color="#dddddd")
    panels[0].set_ylabel("seconds from the job script to the first sum")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None})
