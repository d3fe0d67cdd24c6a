"""Measures what the launcher costs while a script of others trains: pytorch/examples' ImageNet script under
plain torchrun and under apptrain, with ranks that are forks and with ranks that are started each by itself.
`loop` is the entry.

EXAMPLES=DIR is a checkout of github.com/pytorch/examples, which no package has. A folder of JPEGs is made for
it. Two ranks, a thread each; the script's own time of each step counts, from the slower rank.
"""

import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks import bounded, device
from benchmarks.gpu import link_images, write_jpegs

SCRIPT: Final = "imagenet/main.py"
RANKS: Final = 2
BATCH: Final = 4
"""Images of a rank."""
STEPS, WARMUP = 16, 4
"""Of a run, and those of them that do not count."""
DISTINCT: Final = 64
LIMIT: Final = 300.0
"""Seconds for a run."""
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
    """Images/s of each way in each round, and the ratios to torchrun's of the same round."""
    checkout = Path(os.environ["EXAMPLES"]).absolute()
    script = checkout / SCRIPT
    with TemporaryDirectory(prefix="apptrain-bench-") as folder:
        images = Path(folder) / "images"
        pool = Path(folder) / "pool"
        pool.mkdir()
        write_jpegs(pool, DISTINCT)
        link_images(pool, images, train=RANKS * BATCH * STEPS, test=RANKS * BATCH)
        found = [_round(number, rounds, script, images, Path(folder)) for number in range(rounds + 1)][1:]
    ratios = {way: [one[way] / one["torchrun"] for one in found] for way in WAYS if way != "torchrun"}
    spread = {
        way: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for way, values in ratios.items()
    }
    for way, one in spread.items():
        print(f"{way}: {one['median']:.3f} of torchrun ({one['min']:.3f} to {one['max']:.3f})")
    return {
        "images_per_s": found,
        "ratio": spread,
        "examples": device.commit(checkout),
        "settings": {"ranks": RANKS, "batch_a_rank": BATCH, "steps": STEPS, "warmup": WARMUP},
    }


def _round(number: int, rounds: int, script: Path, images: Path, folder: Path) -> dict[str, float]:
    """The order turns, so that a drift of the machine falls on all."""
    turned = [*WAYS][number % len(WAYS) :] + [*WAYS][: number % len(WAYS)]
    rates = {way: _rate(way, script, images, folder) for way in turned}
    said = ", ".join(f"{way} {rates[way]:.2f}" for way in WAYS)
    print(f"  round {number or '(warm-up)'} of {rounds}: {said} images/s", flush=True)
    return rates


def _rate(way: str, script: Path, images: Path, folder: Path) -> float:
    with TemporaryDirectory(dir=folder) as run:
        words = [sys.executable, "-P", *WAYS[way]]
        if way != "torchrun":
            words += ["--run-dir", str(Path(run) / "run"), "--"]
        options = ("-a", "resnet18", "-b", str(BATCH), "-j", "1", "--epochs", "1", "-p", "1", "--no-accel")
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
