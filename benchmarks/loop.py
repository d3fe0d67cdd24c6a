"""Measures what the launcher costs while a script of others trains: pytorch/examples' ImageNet script under
plain torchrun and under apptrain, with ranks that are forks and with ranks that are started each by itself;
its pictures are small files, in one squashfs that is mounted, and in memory. `loop` is the entry.

EXAMPLES=DIR is a checkout of github.com/pytorch/examples, which no package has. JPEGs are made for it; all
are in the page cache. Two ranks, a thread each, and a model so small that the pictures count; the script's
own time of each step counts, from the slower rank. The squashfs needs mksquashfs, squashfuse and fusermount3.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
WAYS: Final[Mapping[str, Sequence[str]]] = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
    "forks": (*APPTRAIN, "--start-ranks", "fork"),
    "spawns": (*APPTRAIN, "--start-ranks", "spawn"),
}


def refusal(env: Mapping[str, str]) -> str | None:
    """Why nothing can be measured here, and what to do; None where it can."""
    given = env.get("EXAMPLES", "")
    if not given:
        return "EXAMPLES is not set: give a checkout of github.com/pytorch/examples with EXAMPLES=DIR"
    if not Path(given, SCRIPT).is_file():
        return f"EXAMPLES={given}: no {SCRIPT} there: give a checkout of github.com/pytorch/examples"
    return None


def loop(rounds: int) -> dict[str, Any]:
    """For each loader, images/s of each way in each round, and the ratios to torchrun's of the same round."""
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
    spread = {
        loader: {way: _spread([one[loader] for one in found], way) for way in WAYS if way != "torchrun"}
        for loader in loaders
    }
    for loader, ways in spread.items():
        for way, one in ways.items():
            print(f"{loader}, {way}: {one['median']:.3f} of torchrun ({one['min']:.3f} to {one['max']:.3f})")
    return {
        "images_per_s": found,
        "ratio": spread,
        "examples": device.commit(checkout),
        "settings": {"model": MODEL, "ranks": RANKS, "batch_a_rank": BATCH, "steps": STEPS, "warmup": WARMUP},
    }


def _spread(rounds: Sequence[Mapping[str, float]], way: str) -> dict[str, float]:
    ratios = [one[way] / one["torchrun"] for one in rounds]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


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
) -> dict[str, dict[str, float]]:
    """The order turns, so that a drift of the machine falls on all."""
    turned = [*WAYS][number % len(WAYS) :] + [*WAYS][: number % len(WAYS)]
    found = {}
    for loader, images in loaders.items():
        found[loader] = {way: _rate(way, script, images, folder) for way in turned}
        said = ", ".join(f"{way} {found[loader][way]:.2f}" for way in WAYS)
        print(f"  round {number or '(warm-up)'} of {rounds}, {loader}: {said} images/s", flush=True)
    return found


def _rate(way: str, script: Path, images: Path, folder: Path) -> float:
    with TemporaryDirectory(dir=folder) as run:
        words = [sys.executable, "-P", *WAYS[way]]
        if way != "torchrun":
            words += ["--run-dir", str(Path(run) / "run"), "--"]
        options = ("-a", MODEL, "-b", str(BATCH), "-j", "1", "--epochs", "1", "-p", "1", "--no-accel")
        distributed = ("--dist-url", "env://", "--dist-backend", "gloo")
        env = device.environment(os.environ) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        argv = [*words, str(script), str(images), *options, *distributed]
        ended = bounded.run(argv, cwd=Path(run), env=env, seconds=LIMIT)
    if ended.status != 0:
        sys.exit(f"{' '.join(argv)} ended with {ended.status}:\n{ended.tail()}")
    times = [float(seconds) for step, seconds in _of_slowest_rank(ended.out) if step > WARMUP]
    if len(times) != STEPS - WARMUP:
        sys.exit(f"{way}: {len(times)} steps were timed, not {STEPS - WARMUP}:\n{ended.tail()}")
    return RANKS * BATCH / statistics.mean(times)


def _of_slowest_rank(out: str) -> list[tuple[int, float]]:
    """(step, seconds) of each step, as long as it took the slowest of the ranks that print it."""
    slowest: dict[int, float] = {}
    for step, seconds in STEP.findall(out):
        slowest[int(step)] = max(float(seconds), slowest.get(int(step), 0.0))
    return sorted(slowest.items())
