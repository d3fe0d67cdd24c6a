"""Measures what a run has cost: when it ran, how long its parts took, and each rank's work and memory.
`of_run` and `of_rank` are the entries.

The figures come from the kernel and from torch. They differ between runs that are otherwise equal.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from entrypoint.core.proc import stat_fields

if TYPE_CHECKING:
    from train.datasets import Batch
    from train.environment import RankInfo
    from train.loop import LoopEnd

_PROCESS, _GPU = PEAKS = ("peak_memory_bytes", "peak_gpu_memory_bytes")


@dataclass
class Timed:
    """Batches, and how long the rank has waited for them."""

    batches: "Iterator[Batch]"
    waited_s: float = 0.0

    def __iter__(self) -> "Iterator[Batch]":
        return self

    def __next__(self) -> "Batch":
        begin = time.monotonic()
        try:
            return next(self.batches)
        finally:
            self.waited_s += time.monotonic() - begin


def of_run(ending: "LoopEnd", batch_size: int, info: "RankInfo") -> dict[str, Any]:
    """The job, and the times of this attempt, from the start of this process until now; None for steps that
    it did not do."""
    began = process_start()
    now, age = time.time(), time.monotonic() - began
    first = ending.first_step_done
    return {
        "job_id": info.job_id,
        "attempt": info.attempt,
        "began": _utc(now - age),
        "ended": _utc(now),
        "wall_s": age,
        "first_step_s": None if first is None else first - began,
        "train_s": ending.train_s,
        "images_per_s": _pace(ending, batch_size),
    }


def of_rank(ending: "LoopEnd", images_a_step: int, info: "RankInfo", device: torch.device) -> dict[str, Any]:
    """What this rank did, and the most memory that it had. `images_a_step`: its share of a batch."""
    is_gpu = device.type == "cuda"
    data_s, sync_s = ending.first_step_waits
    return {
        "rank": info.rank,
        "node": info.node[:128],  # that it fits into `ROOM`, whatever it is made of
        "images": ending.steps * images_a_step,
        "images_per_s": _pace(ending, images_a_step),
        "train_s": ending.train_s,
        "input_wait_s": ending.input_wait_s,
        "sync_wait_s": ending.sync_wait_s,
        "first_step": {"train_s": ending.first_step_s, "input_wait_s": data_s, "sync_wait_s": sync_s},
        _PROCESS: peak_memory(),
        _GPU: torch.cuda.max_memory_allocated(device) if is_gpu else None,
    }


def of_ranks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ranks' figures, and the largest peaks of any rank."""
    known = {name: [rank[name] for rank in ranks if rank[name] is not None] for name in PEAKS}
    return {name: max(peaks, default=None) for name, peaks in known.items()} | {"ranks": list(ranks)}


def peak_memory(status: Path = Path("/proc/self/status")) -> int | None:
    """The most bytes that this process had in memory; None where the kernel does not say. `getrusage` would
    also count those of the process that started this one."""
    found = re.search(rb"^VmHWM:\s+(\d+) kB$", status.read_bytes(), re.MULTILINE)
    return 1024 * int(found[1]) if found else None


def process_start() -> float:
    """When this process started, on the clock of time.monotonic: imports and the interpreter count too."""
    ticks = int(stat_fields()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def _pace(ending: "LoopEnd", images_a_step: int) -> float | None:
    """Images per second without the first step, which warms up."""
    rest, rest_s = ending.steps - 1, ending.train_s - ending.first_step_s
    return rest * images_a_step / rest_s if rest > 0 else None


def _utc(seconds: float) -> str:
    """As manifest.json has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(seconds))
