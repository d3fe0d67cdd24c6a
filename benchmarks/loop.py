"""Measures what the launcher costs while a script of others trains: pytorch/examples' ImageNet script under
plain torchrun and under apptrain, with ranks that are forks and with ranks that are started each by itself;
its pictures are small files, in one squashfs that is mounted, and in memory. `loop` is the entry.

EXAMPLES=DIR is a checkout of github.com/pytorch/examples, which no package has. JPEGs are made for it; all
are in the page cache. Two ranks, a thread each, and a model so small that the pictures count; the script's
own time of each step counts, from the slower rank. The ranks read the pictures themselves: with more
processes than cores, rounds differ by more than a launcher costs. What it does cost is counted too, as CPU
seconds of the processes beside the ranks. The squashfs needs mksquashfs, squashfuse and fusermount3.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks import bounded, device
from benchmarks.gpu import link_images, write_jpegs

SCRIPT: Final = "imagenet/main.py"
RANKS: Final = 2
MODEL: Final = "shufflenet_v2_x0_5"
BATCH: Final = 8
"""Images of a rank."""
STEPS, WARMUP = 60, 10
"""Of a run, and those of them that do not count."""
DISTINCT: Final = 64
LIMIT: Final = 300.0
"""Seconds for a run, and for a mount:"""
MOUNTED: Final = 10.0
MEMORY: Final = Path("/dev/shm")
FOR_SQUASHFS: Final = ("mksquashfs", "squashfuse", "fusermount3")
STEP: Final = re.compile(r"^Epoch: \[0\]\[ *(\d+)/\d+\]\s+Time +([\d.]+) ", re.M)
APPTRAIN: Final = ("-m", "entrypoint.cli.embedded", "--nodes", "1", "--nproc-per-node", str(RANKS))
GLANCE: Final = 0.5
"""Seconds between two looks at the CPU seconds of a run's processes."""
FEWEST: Final = 8
"""Looks that a run needs."""
WAYS: Final[Mapping[str, Sequence[str]]] = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
    "forks": (*APPTRAIN, "--start-ranks", "fork"),
    "spawns": (*APPTRAIN, "--start-ranks", "spawn"),
}


@dataclass(frozen=True, kw_only=True)
class LoopRun:
    """What was measured of one run."""

    images_per_s: float
    launcher: float
    """CPU seconds of the processes beside the ranks, for each second and core."""


def refusal(env: Mapping[str, str]) -> str | None:
    """Why nothing can be measured here, and what to do; None where it can."""
    given = env.get("EXAMPLES", "")
    if not given:
        return "EXAMPLES is not set: give a checkout of github.com/pytorch/examples with EXAMPLES=DIR"
    if not Path(given, SCRIPT).is_file():
        return f"EXAMPLES={given}: no {SCRIPT} there: give a checkout of github.com/pytorch/examples"
    return None


def loop(rounds: int) -> dict[str, Any]:
    """For each loader, images/s of each way in each round, and the ratios to torchrun's of the same round;
    for each way, what the launcher took of the CPU."""
    checkout = Path(os.environ["EXAMPLES"]).absolute()
    script = checkout / SCRIPT
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="apptrain-bench-")))
        images = folder / "images"
        pool = folder / "pool"
        pool.mkdir()
        write_jpegs(pool, DISTINCT)
        link_images(pool, images, train=RANKS * BATCH * STEPS, test=RANKS * BATCH)
        loaders = {"files": images}
        if missing := [name for name in FOR_SQUASHFS if shutil.which(name) is None]:
            print(f"squashfs is left out: no {', '.join(missing)} in PATH", flush=True)
        else:
            loaders["squashfs"] = stack.enter_context(_squashfs(images, folder))
        memory = stack.enter_context(TemporaryDirectory(prefix="apptrain-bench-", dir=MEMORY))
        loaders["memory"] = Path(shutil.copytree(images, Path(memory) / "images"))
        found = [_round(number, rounds, script, loaders, folder) for number in range(rounds + 1)][1:]
    ratios = {
        loader: {
            way: _spread(_ratios([one[loader] for one in found], way)) for way in WAYS if way != "torchrun"
        }
        for loader in loaders
    }
    launchers = {
        way: _spread([one[loader][way].launcher for one in found for loader in loaders]) for way in WAYS
    }
    for loader, ways in ratios.items():
        for way, one in ways.items():
            print(f"{loader}, {way}: {one['median']:.3f} of torchrun ({one['min']:.3f} to {one['max']:.3f})")
    for way, one in launchers.items():
        print(
            f"beside the ranks, {way}: {one['median']:.2%} of the CPU ({one['min']:.2%} to {one['max']:.2%})"
        )
    return {
        "images_per_s": [
            {loader: {way: run.images_per_s for way, run in ways.items()} for loader, ways in one.items()}
            for one in found
        ],
        "ratio": ratios,
        "launcher": launchers,
        "examples": device.commit(checkout),
        "settings": {"model": MODEL, "ranks": RANKS, "batch_a_rank": BATCH, "steps": STEPS, "warmup": WARMUP},
    }


def _ratios(rounds: Sequence[Mapping[str, LoopRun]], way: str) -> list[float]:
    return [one[way].images_per_s / one["torchrun"].images_per_s for one in rounds]


def _spread(values: Sequence[float]) -> dict[str, float]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "mean": statistics.mean(values),
        "standard_error": error,
    }


@contextmanager
def _squashfs(images: Path, folder: Path) -> Iterator[Path]:
    """These files in one squashfs, mounted."""
    file, place = folder / "images.sqfs", folder / "mounted"
    place.mkdir()
    subprocess.run(["mksquashfs", images, file, "-no-progress", "-quiet"], check=True, timeout=LIMIT)
    with subprocess.Popen(["squashfuse", "-f", file, place]) as mount:
        try:
            end = time.monotonic() + MOUNTED
            while not place.is_mount():
                if mount.poll() is not None or time.monotonic() > end:
                    sys.exit(f"squashfuse did not mount {file} within {MOUNTED:g} s")
                time.sleep(0.05)
            yield place
        finally:
            mount.terminate()  # which unmounts it


def _round(
    number: int, rounds: int, script: Path, loaders: Mapping[str, Path], folder: Path
) -> dict[str, dict[str, LoopRun]]:
    """The order turns, so that a drift of the machine falls on all."""
    turned = [*WAYS][number % len(WAYS) :] + [*WAYS][: number % len(WAYS)]
    found = {}
    for loader, images in loaders.items():
        found[loader] = {way: _run(way, script, images, folder) for way in turned}
        said = ", ".join(f"{way} {found[loader][way].images_per_s:.2f}" for way in WAYS)
        print(f"  round {number or '(warm-up)'} of {rounds}, {loader}: {said} images/s", flush=True)
    return found


def _run(way: str, script: Path, images: Path, folder: Path) -> LoopRun:
    with TemporaryDirectory(dir=folder) as run:
        words = [sys.executable, "-P", *WAYS[way]]
        if way != "torchrun":
            words += ["--run-dir", str(Path(run) / "run"), "--"]
        options = ("-a", MODEL, "-b", str(BATCH), "-j", "0", "--epochs", "1", "-p", "1", "--no-accel")
        distributed = ("--dist-url", "env://", "--dist-backend", "gloo")
        env = device.environment(os.environ) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        argv = [*words, str(script), str(images), *options, *distributed]
        with _watched() as looks:
            ended = bounded.run(argv, cwd=Path(run), env=env, seconds=LIMIT)
    if ended.status != 0:
        sys.exit(f"{' '.join(argv)} ended with {ended.status}:\n{ended.tail()}")
    times = [float(seconds) for step, seconds in _of_slowest_rank(ended.out) if step > WARMUP]
    if len(times) != STEPS - WARMUP:
        sys.exit(f"{way}: {len(times)} steps were timed, not {STEPS - WARMUP}:\n{ended.tail()}")
    return LoopRun(images_per_s=RANKS * BATCH / statistics.mean(times), launcher=_beside_ranks(looks))


Look = tuple[float, dict[int, tuple[int, float]]]
"""When it was, in monotonic seconds; of each process its parent and its CPU seconds."""


@contextmanager
def _watched() -> Iterator[list[Look]]:
    """Looks at all processes below this one, again and again, but for those that are there already."""
    import psutil

    looks: list[Look] = []
    is_over = threading.Event()
    there = set(psutil.Process().children(recursive=True))

    def look() -> None:
        while not is_over.wait(GLANCE):
            seen = {}
            for process in set(psutil.Process().children(recursive=True)) - there:
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    seen[process.pid] = process.ppid(), times.user + times.system
            looks.append((time.monotonic(), seen))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        is_over.set()
        thread.join()


def _beside_ranks(looks: Sequence[Look]) -> float:
    """CPU seconds for each second and core of those that are no ranks and not below one, in the later half of
    a run, up to its last second. The ranks are the processes that work most; what begins or ends meanwhile
    does not count."""
    if len(looks) < FEWEST:
        sys.exit(f"a run was over after {len(looks)} looks at its processes, and {FEWEST} are needed")
    (begin, before), (end, after) = looks[len(looks) // 2], looks[-3]
    worked = {pid: cpu - before[pid][1] for pid, (_, cpu) in after.items() if pid in before}
    ranks = sorted(worked, key=lambda pid: worked[pid])[-RANKS:]

    def is_of_rank(pid: int) -> bool:
        while pid in after and pid not in ranks:
            pid = after[pid][0]
        return pid in ranks

    beside = sum(cpu for pid, cpu in worked.items() if not is_of_rank(pid))
    return beside / (end - begin) / (os.cpu_count() or 1)


def _of_slowest_rank(out: str) -> list[tuple[int, float]]:
    """(step, seconds) of each step, as long as it took the slowest of the ranks that print it."""
    slowest: dict[int, float] = {}
    for step, seconds in STEP.findall(out):
        slowest[int(step)] = max(float(seconds), slowest.get(int(step), 0.0))
    return sorted(slowest.items())
