"""Measures what one thread a rank costs if a rank has more CPUs: images per second of the reference training.
`threads` is the entry.

One node with one rank has all CPUs of this machine. It trains once with one thread, as the reference program
does everywhere so that runs agree bit for bit, and once with a thread for each CPU.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, WARMUP = 30, 5


def threads(
    pairs: int,
    run: Callable[[list[str]], str],
    alternate: Callable[[Callable[[], float], Callable[[], float], int], list[tuple[float, float]]],
    spread: Callable[[list[float]], dict[str, float]],
) -> dict[str, Any]:
    """`threads`: of the second; `ratio`: one thread's images per second over theirs."""
    cpus = len(os.sched_getaffinity(0))
    if cpus == 1:
        sys.exit("bench: threads: this machine has one CPU: nothing to compare")
    rates = alternate(lambda: _images(run, 1), lambda: _images(run, cpus), pairs)
    ratios = [one / other for one, other in rates]
    print(
        f"one thread: {statistics.median(ratios):.3f} of the images/s of {cpus} threads "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs)"
    )
    return {"threads": cpus, "images_per_s": rates, "ratio": spread(ratios)}


def _images(run: Callable[[list[str]], str], count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "run"
        command = [sys.executable, "-P", "-m", "entrypoint.cli.embedded", "--nodes", "1"]
        command += ["--run-dir", str(where)]
        command += ["--omp-num-threads", str(count), "--", "-m", "train", "--config", "digits"]
        run([*command, "evaluate.every=0", "checkpoint.every=0", f"steps={STEPS}"])
        rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    seconds = [1 / row["images_per_s"] for row in rows if "loss" in row and row["step"] > WARMUP]
    return float(len(seconds) / sum(seconds))
