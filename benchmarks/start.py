"""A start of a job, from the job script's first line to the first sum over all ranks: who takes how long.

The secret: which marks a job leaves anyway. The script and its step note when they begin
(benchmarks/slurm.py); the launcher writes the node's plan once it knows its addresses, the manifest once the
nodes have met; the ranks print the rest. The last node and the last rank count.

BENCH_OTHER=DIR, another checkout, with BENCH_OTHER_IMAGE=FILE, its image, alternates with this one.
"""

import os
import re
import statistics
from pathlib import Path
from typing import Any, Final

from benchmarks import slurm
from tests.cluster.images import built
from tests.host import Bind
from tests.vcluster import Cluster, up

OTHER: Final = Path("/sw/other")
OTHER_IMAGE: Final = Path("/sw/images/other.sif")
MARK: Final = re.compile(r"at (\d+\.\d+) \(began (\d+\.\d+), imported (\d+\.\d+)\)")
PARTS: Final = {
    "step": "the job script: `prepare` in the image, and the log",
    "planned": "srun, the container, the launcher's start and its addresses",
    "met": "the nodes meet; torchrun's agent imports torch meanwhile",
    "began": "torchrun starts the ranks",
    "imported": "the ranks import torch",
    "sum": "they meet in torch's store and sum",
}
"""The marks, each with what takes the time before it."""


def start(pairs: int) -> dict[str, Any]:
    """Median seconds of each part. Needs root, for the cluster."""
    given = os.environ.get("APPTRAIN_TEST_IMAGE")
    image = Path(given) if given else built("default").image
    shown = [Bind(source=image, target=slurm.IMAGE), Bind(source=slurm.HERE.parent, target=slurm.CHECKOUT)]
    other = os.environ.get("BENCH_OTHER", "")
    sides = {"ours": (slurm.CHECKOUT, slurm.IMAGE)}
    if other:
        shown += [Bind(source=Path(other), target=OTHER)]
        shown += [Bind(source=Path(os.environ["BENCH_OTHER_IMAGE"]), target=OTHER_IMAGE)]
        sides["other"] = (OTHER, OTHER_IMAGE)
    with up("bench", binds=shown) as cluster:
        slurm.prepare(cluster)
        found = [_pair(cluster, sides, number) for number in range(pairs + 1)][1:]
    parts = {side: _parts([one[side] for one in found]) for side in sides}
    for mark, what in PARTS.items():
        print(f"{parts['ours'][mark]:6.2f} s  {what}")
    report: dict[str, Any] = {"seconds": found, "parts": parts}
    if other:
        report["ratio"] = slurm.spread([one["ours"]["sum"] / one["other"]["sum"] for one in found])
        print(f"from the first line to the first sum, this checkout / the other: {report['ratio']}")
    return report


def _pair(cluster: Cluster, sides: dict[str, tuple[Path, Path]], number: int) -> dict[str, dict[str, float]]:
    """Seconds from the job script's first line to each mark."""
    order = list(sides)[:: 1 if number % 2 else -1]
    found = {side: _trace(cluster, *sides[side]) for side in order}
    said = ", ".join(f"{found[side]['sum']:.2f}" for side in sides)
    print(f"  start {number or '(warm-up)'}: {said} s", flush=True)
    return found


def _trace(cluster: Cluster, checkout: Path, image: Path) -> dict[str, float]:
    options = ("--device", "cpu", "--nproc-per-node", str(slurm.RANKS), "--", "first_sum.py")
    number, printed = slurm.run(cluster, "torchrun", image, checkout / "slurm/multinode.sbatch", *options)
    began = slurm.noted(cluster, number, "job")
    (run,) = (cluster.folder / str(slurm.WORK).lstrip("/") / "runs").glob(f"*-{number}")
    ranks = [tuple(map(float, found)) for found in MARK.findall(printed)]
    marks = {
        "step": slurm.noted(cluster, number, "step"),
        "planned": max(path.stat().st_mtime for path in run.glob("plan.*.json")),
        "met": (run / "manifest.json").stat().st_mtime,
        "began": max(rank[1] for rank in ranks),
        "imported": max(rank[2] for rank in ranks),
        "sum": max(rank[0] for rank in ranks),
    }
    return {mark: at - began for mark, at in marks.items()}


def _parts(traces: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds between a mark and the one before it."""
    marks = list(PARTS)
    between = {
        mark: [trace[mark] - (trace[marks[at - 1]] if at else 0.0) for trace in traces]
        for at, mark in enumerate(marks)
    }
    return {mark: round(statistics.median(values), 3) for mark, values in between.items()}
