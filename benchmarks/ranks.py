"""Compares ranks that are forks of one process with ranks that each import torch: memory, and time to the
first sum. `ranks` is the entry.

Every rank reads its memory while all are there. Pages that several processes share count in parts (Pss of
smaps_rollup in proc(5)). The process that was forked counts too.
"""

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

RANKS: Final = 8
SCRIPT: Final = """\
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
at = time.time()
dist.barrier()
def pss(pid):
    rows = dict(line.split(":") for line in open(f"/proc/{pid}/smaps_rollup").readlines()[1:])
    return [int(rows[name].split()[0]) / 1024 for name in ("Rss", "Pss", "Private_Dirty")]
agent = pss(os.getppid())[1] if os.environ["LOCAL_RANK"] == "0" else 0.0
mine = pss("self")
dist.barrier()
print("found", at, *mine, agent, flush=True)
dist.destroy_process_group()
"""
FOUND: Final = re.compile(r"found ([\d.]+) ([\d.]+) ([\d.]+) ([\d.]+) ([\d.]+)$", re.MULTILINE)
SIDES: Final = ("fork", "spawn")


def ranks(
    pairs: int, run: Callable[[list[str]], str], spread: Callable[[list[float]], dict[str, float]]
) -> dict[str, Any]:
    """Each way in turn, on this machine."""
    found = []
    for number in range(pairs + 1):
        order = SIDES[:: 1 if number % 2 else -1]
        one = {side: _measure(side, run) for side in order}
        said = ", ".join(f"{side} {one[side]['seconds']:.2f} s {one[side]['mb']:.0f} MB" for side in SIDES)
        print(f"  {RANKS} ranks, round {number or '(warm-up)'} of {pairs}: {said}", flush=True)
        if number:
            found.append(one)
    fork, spawn = ([one[side] for one in found] for side in SIDES)
    ratio = {
        mark: spread([one[mark] / other[mark] for one, other in zip(fork, spawn, strict=True)])
        for mark in ("seconds", "mb")
    }
    print(f"fork / spawn: seconds to the first sum {ratio['seconds']}, memory {ratio['mb']}")
    return {"ranks": RANKS, "found": found, "ratio": ratio}


def _measure(side: str, run: Callable[[list[str]], str]) -> dict[str, float]:
    """`seconds` to the last rank's first sum; megabytes of all together, and of one rank by itself."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "sum.py"
        script.write_text(SCRIPT)
        launch = [sys.executable, "-P", "-m", "entrypoint.cli.embedded", "--nodes", "1", "--device", "cpu"]
        options = ["--run-dir", f"{folder}/run", "--nproc-per-node", str(RANKS), "--start-ranks", side]
        began = time.time()
        rows = [tuple(map(float, row)) for row in FOUND.findall(run([*launch, *options, "--", str(script)]))]
    if len(rows) != RANKS:
        raise RuntimeError(f"{len(rows)} of {RANKS} ranks said what they found")
    at, rss, pss, private, agent = zip(*rows, strict=True)
    return {
        "seconds": max(at) - began,
        "mb": sum(pss) + sum(agent),
        "rss_mb_of_one": max(rss),
        "private_mb_of_one": max(private),
        "cores": float(os.cpu_count() or 0),
    }
