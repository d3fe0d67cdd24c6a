"""Measures how long each part of a job's start takes, from the job script's first line to the first sum over
all ranks. `start` is the entry.

The manifest has the parts up to the ranks, as the first node measured them. The script notes when it begins
(benchmarks/slurm.py), and the ranks print when they have summed; the last rank counts.

BENCH_OTHER=DIR, another checkout, with BENCH_OTHER_IMAGE=FILE, its image, alternates with this one.
"""

import json
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
SUMMED: Final = re.compile(r"at (\d+\.\d+) \(began")
PARTS: Final = {
    "script": "the job script: `prepare` in the image, and the log",
    "task": "srun, the container, Python",
    "plan": "the launcher's start and its addresses",
    "nodes": "the nodes meet; torch is imported meanwhile, once a node",
    "torch": "what the import takes longer than that",
    "ranks": "torchrun forks the ranks",
    "sum": "they meet in torch's store and sum",
}
"""The parts by their names in the manifest (entrypoint/run/start.py), and the last."""


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
        totals = [{side: sum(one[side].values()) for side in sides} for one in found]
        report["ratio"] = slurm.spread([one["ours"] / one["other"] for one in totals])
        print(f"from the first line to the first sum, this checkout / the other: {report['ratio']}")
    return report


def _pair(cluster: Cluster, sides: dict[str, tuple[Path, Path]], number: int) -> dict[str, dict[str, float]]:
    """Seconds of each part."""
    order = list(sides)[:: 1 if number % 2 else -1]
    found = {side: _trace(cluster, *sides[side]) for side in order}
    said = ", ".join(f"{sum(found[side].values()):.2f}" for side in sides)
    print(f"  start {number or '(warm-up)'}: {said} s", flush=True)
    return found


def _trace(cluster: Cluster, checkout: Path, image: Path) -> dict[str, float]:
    options = ("--device", "cpu", "--nproc-per-node", str(slurm.RANKS), "--", "first_sum.py")
    number, printed = slurm.run(cluster, "torchrun", image, checkout / "slurm/multinode.sbatch", *options)
    began = slurm.noted(cluster, number, "job")
    (run,) = (cluster.folder / str(slurm.WORK).lstrip("/") / "runs").glob(f"*-{number}")
    first_sum = max(float(at) for at in SUMMED.findall(printed)) - began
    attempt = json.loads((run / "manifest.json").read_text())["attempts"][-1]
    parts = {part: float(seconds) for part, seconds in attempt["start"].items()}
    return parts | {"sum": first_sum - sum(parts.values())}


def _parts(traces: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds of each."""
    return {part: round(statistics.median(trace[part] for trace in traces), 3) for part in PARTS}
