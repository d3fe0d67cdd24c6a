"""What a run has cost, as result.json has it."""

import json
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import torch
from torch import Tensor

from train import figures
from train.distributed import ROOM
from train.environment import RankInfo
from train.loop import LoopEnd
from train.status import DONE

CPU = torch.device("cpu")


def ending(*, steps: int, first_step_done: float | None = None) -> LoopEnd:
    return LoopEnd(
        status=DONE,
        saved=True,
        steps=steps,
        train_s=5.0,
        first_step_done=first_step_done,
        first_step_s=3.0,
        input_wait_s=0.5,
        sync_wait_s=1.25,
        first_step_waits=(0.25, 0.75),
        loss=1.0,
    )


def test_times_are_those_of_this_process_in_utc() -> None:
    info, before = RankInfo(node="here", job_id="7", attempt=2), time.time()
    found = figures.of_run(ending(steps=5, first_step_done=time.monotonic()), 8, info)
    began, ended = (datetime.fromisoformat(found[name]) for name in ("began", "ended"))
    assert before - 1 < ended.timestamp() <= time.time()
    assert (ended - began).total_seconds() == pytest.approx(found["wall_s"], abs=1.01)
    assert 0 < found["first_step_s"] <= found["wall_s"] < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert (found["job_id"], found["attempt"], found["train_s"], found["images_per_s"]) == ("7", 2, 5.0, 16.0)


def test_what_a_process_did_not_do_has_no_figure() -> None:
    for steps in (0, 1):
        found = figures.of_run(ending(steps=steps), 8, RankInfo(node="here"))
        assert [found[name] for name in ("job_id", "first_step_s", "images_per_s")] == [None, None, None]


def test_a_rank_says_its_work_and_its_memory() -> None:
    found = figures.of_rank(ending(steps=5), 4, RankInfo(node="gpu-a01", rank=3, world_size=4), CPU)
    peak = found.pop("peak_memory_bytes")
    assert 50e6 < peak < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found == {
        "rank": 3,
        "node": "gpu-a01",
        "images": 20,
        "images_per_s": 8.0,
        "train_s": 5.0,
        "input_wait_s": 0.5,
        "sync_wait_s": 1.25,
        "first_step": {"train_s": 3.0, "input_wait_s": 0.25, "sync_wait_s": 0.75},
        "peak_gpu_memory_bytes": None,
    }


def test_a_rank_of_any_name_fits_where_all_are_gathered() -> None:
    info = RankInfo(node="\U0001f600" * 300, rank=10**6 - 1, world_size=10**6)
    assert len(json.dumps(figures.of_rank(ending(steps=10**9), 10**6, info, CPU))) <= ROOM


def test_the_peaks_of_a_run_are_the_largest_of_its_ranks() -> None:
    ranks = [
        {"peak_memory_bytes": process, "peak_gpu_memory_bytes": gpu}
        for process, gpu in ((5, None), (7, None), (None, None))
    ]
    assert figures.of_ranks(ranks) == {"peak_memory_bytes": 7, "peak_gpu_memory_bytes": None, "ranks": ranks}


@pytest.mark.parametrize(
    ("status", "peak"),
    [("Name:\tpython\nVmHWM:\t    2144 kB\nThreads:\t1\n", 2144 * 1024), ("Name:\ta\n", None)],
)
def test_the_peak_of_a_process_is_what_the_kernel_says(tmp_path: Path, status: str, peak: int | None) -> None:
    (tmp_path / "status").write_text(status)
    assert figures.peak_memory(tmp_path / "status") == peak


def test_the_time_for_which_a_rank_waits_for_images_is_counted() -> None:
    def slow() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(2):
            time.sleep(0.05)
            yield torch.tensor(number), torch.tensor(number)

    batches = figures.Timed(slow())
    began = time.monotonic()
    assert [int(images) for images, _ in batches] == [0, 1]
    assert 0.1 <= batches.waited_s <= time.monotonic() - began
