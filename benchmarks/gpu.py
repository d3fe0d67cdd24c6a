"""Measures training on GPUs: images/s, their share of the GPUs' peak, and torchvision's own script beside
ours. `gpu` is the entry.

ResNet-50 and ViT-B/16 run in bf16 on images made on the device, compiled and not, for the share of the peak.
Then the same models train on a folder of JPEGs, alternating with references/classification/train.py of a
checkout of pytorch/vision (TORCHVISION=DIR), which no wheel has. With ResNet-50, whose loaders keep all cores
busy, that script runs under our launcher too, so that the launchers can be compared.
"""

import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

from benchmarks import bounded, device
from benchmarks.device import Unready
from entrypoint.core.plain import counted

PAIRS: Final = 2
"""More than 10 minutes on one H100 have room for: 450 s had room for the first."""
TOTAL_S: Final = 560.0
"""For all of it; what it does not reach is told."""
RUN_S: Final = 150.0
"""For one training."""
STEPS: Final = 60
MEASURED: Final = 20
"""The last steps: before them loaders use up what they had read while the model was made."""
WORKERS: Final = 16
"""Processes that read images, at most, over all ranks."""
SIDE, SHOWN = 256, 224
"""Pixels: of the JPEGs, and of what the models see."""
DISTINCT, CLASSES, TESTED = 512, 8, 64
"""JPEGs that are made (the others are hard links to them), their classes, and how many are for the test."""
SMALL_GIB: Final = 40.0
"""A GPU with less memory gets half of the batch."""
LINE: Final = re.compile(r"^Epoch: \[0\] +\[ *\d+/\d+\].* img/s: ([\d.e+]+) .* time: ([\d.]+) ", re.M)
DIFFERS: Final = (
    "theirs is fp16 with loss scaling (--amp has no bf16), ours bf16",
    "theirs keeps ResNet-50 in NCHW, ours in channels_last",
    "theirs waits for the GPU in every step (loss, accuracies); ours reads the loss a step later",
    "theirs normalises each image on the CPU and copies float32; ours copies bytes and normalises on the GPU",
    "the rates compared are those of whole steps, waiting for images included; its own img/s leaves that out",
)


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    name: str
    gmacs: float
    """Multiply-adds of a forward pass of an image in 1e9: torchvision's own figure, its weights' GFLOPS."""
    batch: int
    """Images a GPU."""
    channels_last: bool
    launchers: bool
    """Whether torchvision's script runs under our launcher too."""

    @property
    def gflop(self) -> float:
        """Of training on one image: two operations each, and a backward pass takes two forward passes."""
        return 2 * 3 * self.gmacs


MODELS: Final = (
    BenchModel(name="resnet50", gmacs=4.089, batch=256, channels_last=True, launchers=True),
    BenchModel(name="vit_b_16", gmacs=17.564, batch=128, channels_last=False, launchers=False),
)

WAYS: Final = ("forks", "spawns")
"""In which our launcher starts the ranks of torchvision's script."""
WITHOUT_WAITING: Final = "theirs_without_waiting"

T = TypeVar("T")


class NoFigure(Exception):
    """A training that gives no figure."""


def refusal(env: Mapping[str, str]) -> str | None:
    """Why nothing can be measured here, and what to do; None where it can."""
    try:
        device.ask(env)
    except Unready as why:
        return str(why)
    folder = env.get("TORCHVISION", "")
    if not folder:
        tag = f"v{metadata.version('torchvision').partition('+')[0]}"
        return (
            "TORCHVISION is not set: give a checkout of github.com/pytorch/vision with TORCHVISION=DIR "
            f"(its tag {tag} fits the torchvision here)"
        )
    if not _script(folder).is_file():
        return (
            f"TORCHVISION={folder}: no references/classification/train.py there: "
            "give a checkout of github.com/pytorch/vision"
        )
    return None


def _script(folder: str) -> Path:
    return Path(folder).absolute() / "references" / "classification" / "train.py"


def gpu(pairs: int) -> dict[str, Any]:
    """All of it. What fails, or has no time left, is among `failed`."""
    end = time.monotonic() + TOTAL_S
    facts = device.ask(os.environ, matmul=True)
    print(device.table(facts), flush=True)
    with TemporaryDirectory(prefix="apptrain-bench-", ignore_cleanup_errors=True) as folder:
        return Bench(facts, Path(folder), _script(os.environ["TORCHVISION"]), end).all(pairs)


class Bench:
    """One machine, and a folder for images and runs."""

    def __init__(self, facts: Mapping[str, Any], folder: Path, script: Path, end: float) -> None:
        self.facts, self.folder, self.script, self.end = facts, folder, script, end
        self.ranks = len(facts["gpus"])
        self.workers = max(1, min(os.cpu_count() or 1, WORKERS) // self.ranks)
        self.failed: list[str] = []

    def all(self, pairs: int) -> dict[str, Any]:
        alone = {model.name: dict(self._alone(model)) for model in MODELS}
        for model in MODELS:
            self.make_images(model)
        compared: dict[str, list[dict[str, float]]] = {model.name: [] for model in MODELS}
        for number in range(pairs):
            for model in MODELS:
                if found := self._pair(model, number):
                    compared[model.name].append(found)
        beside = {name: summary(found) for name, found in compared.items()}
        for name, found in beside.items():
            print(f"{name} on JPEGs: {in_words(found) or 'no pair was measured'}")
        return {
            "gpus": self.facts,
            "alone": alone,
            "beside_torchvision": beside,
            "differs": DIFFERS,
            "torchvision": metadata.version("torchvision"),
            "torchvision_script": device.commit(self.script.parents[2]),
            "settings": {"steps": STEPS, "measured": MEASURED, "workers_a_rank": self.workers},
            "batch_a_gpu": {model.name: self.batch(model) for model in MODELS},
            "gflop_an_image": {model.name: model.gflop for model in MODELS},
            "failed": self.failed,
        }

    def _alone(self, model: BenchModel) -> Iterator[tuple[str, dict[str, float | None]]]:
        for name, compiled in (("eager", False), ("compiled", True)):
            what = f"{model.name}, {name}"
            if rate := self._try(what, lambda: self.ours(model, compiled=compiled)):  # noqa: B023
                found = shares(rate, model, self.facts["gpus"])
                print(
                    f"{what}: {rate:.0f} images/s, {_percent(found['of_peak'])} of the datasheets' peak",
                    flush=True,
                )
                yield name, found

    def _pair(self, model: BenchModel, number: int) -> dict[str, float]:
        """Rates of all, less what failed; their order turns, so that a drift of the machine falls on each."""
        turned = ("ours", "torchrun", *(WAYS if model.launchers else ()))[:: -1 if number % 2 else 1]
        found: dict[str, float] = {}
        for way in turned:
            what = f"{model.name}, pair {number + 1}, {way}"
            found |= self._try(what, partial(self._rates, model, way)) or {}
        said = ", ".join(f"{name} {rate:.0f}" for name, rate in found.items() if name != WITHOUT_WAITING)
        if found:
            print(f"  {model.name}, pair {number + 1}: {said} images/s", flush=True)
        return found

    def _rates(self, model: BenchModel, way: str) -> dict[str, float]:
        """On JPEGs: `ours`, or torchvision's script as `way` starts it, which is `theirs` under torchrun."""
        images = self.folder / model.name
        if way == "ours":
            return {way: self.ours(model, images=images)}
        theirs = self.theirs(model, images, way)
        if way == "torchrun":
            return {"theirs": theirs["images_per_s"], WITHOUT_WAITING: theirs["img_s"]}
        return {way: theirs["images_per_s"]}

    def _try(self, what: str, measure: Callable[[], T]) -> T | None:
        if time.monotonic() >= self.end:
            self.failed.append(f"{what}: no time was left for it")
        else:
            try:
                return measure()
            except NoFigure as why:
                self.failed.append(f"{what}: {why}")
        print(self.failed[-1], file=sys.stderr, flush=True)
        return None

    def batch(self, model: BenchModel) -> int:
        """Images a GPU."""
        least = min(gpu["memory_bytes"] for gpu in self.facts["gpus"]) / 2**30
        return model.batch if least >= SMALL_GIB else model.batch // 2

    def make_images(self, model: BenchModel) -> None:
        """A folder of just so many JPEGs that a pass over them has STEPS steps."""
        pool = self.folder / "pool"
        if not pool.exists():
            pool.mkdir()
            write_jpegs(pool, DISTINCT)
        link_images(pool, self.folder / model.name, train=self.batch(model) * self.ranks * STEPS, test=TESTED)

    def ours(self, model: BenchModel, *, compiled: bool = False, images: Path | None = None) -> float:
        """Images/s of the training program under the launcher; without `images` on synthetic ones."""
        with TemporaryDirectory(dir=self.folder) as folder:
            run = Path(folder) / "run"
            ranks = ("--device", "cuda", "--nproc-per-node", str(self.ranks))
            self._run([*device.launcher(run), *ranks, "--", *self.arguments(model, compiled, images)])
            return rate(run / "metrics.jsonl")

    def arguments(self, model: BenchModel, compiled: bool, images: Path | None) -> list[str]:
        """Of the training program."""
        data = ["data.name=synthetic"]
        if images:
            data = ["data.name=imagefolder", f"data.path={images}", f"data.workers={self.workers}"]
        return [
            *("-m", "train", "--config", "synthetic-resnet50"),
            *(f"model.name={model.name}", f"batch_size={self.batch(model) * self.ranks}", f"steps={STEPS}"),
            *(f"channels_last={str(model.channels_last).lower()}", f"compile={str(compiled).lower()}"),
            *(*data, f"data.image_size={SHOWN}", "evaluate.batch_size=64"),
            *("optimizer.lr=0.01", "optimizer.warmup_steps=10", "checkpoint.minutes=0"),
        ]

    def theirs(self, model: BenchModel, images: Path, way: str) -> dict[str, float]:
        """Images/s of torchvision's script, as it counts them, and those of whole steps. `way` is torchrun,
        or one of WAYS."""
        with TemporaryDirectory(dir=self.folder) as folder:
            argv = [*self.launched(way, Path(folder)), *self.their_command(model, images)]
            ended = self._run(argv, Path(folder))
        return their_rates(ended.out, self.batch(model), self.ranks)

    def launched(self, way: str, folder: Path) -> list[str]:
        """What starts a script on all GPUs; its words follow."""
        ranks = ("--nproc-per-node", str(self.ranks))
        if way == "torchrun":
            torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
            return [sys.executable, *torchrun, *ranks]
        how = ("--device", "cuda", "--start-ranks", {"forks": "fork", "spawns": "spawn"}[way])
        return [*device.launcher(folder / "run"), *ranks, *how, "--"]

    def their_command(self, model: BenchModel, images: Path) -> list[str]:
        return [
            *(str(self.script), "--data-path", str(images), "--model", model.name),
            *("--batch-size", str(self.batch(model)), "--workers", str(self.workers), "--epochs", "1"),
            *("--print-freq", "1", "--lr", "0.01", "--amp", "--output-dir", ""),
        ]

    def _run(self, argv: Sequence[str], cwd: Path | None = None) -> bounded.CommandResult:
        env = device.environment(os.environ) | {"OMP_NUM_THREADS": "1"}
        left = min(RUN_S, self.end - time.monotonic())
        ended = bounded.run(argv, cwd=cwd or self.folder, env=env, seconds=left)
        if ended.status is None:
            raise NoFigure(f"it was ended after {ended.seconds:.0f} s")
        if ended.status:
            said = [
                line for line in ended.err.splitlines() if "Error" in line or line.startswith("apptrain: ")
            ]
            raise NoFigure(
                f"it ended with {ended.status}: {(said or ended.err.splitlines() or [''])[-1][:300]}"
            )
        return ended


def rate(metrics: Path) -> float:
    """Images/s over the last steps of a run of ours. Raises Failed where there are too few."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rates = [row["images_per_s"] for row in rows if "loss" in row][-MEASURED:]
    if len(rates) < MEASURED:
        raise NoFigure(f"it did {len(rates)} steps only")
    return float(statistics.harmonic_mean(rates))


def their_rates(out: str, batch: int, ranks: int) -> dict[str, float]:
    """What torchvision's script printed after each step, for all ranks together. `img_s` is its own figure,
    of the time after a batch was there; `images_per_s` is from its `time`, a mean of its last 20 whole steps.
    Raises Failed where too little is printed."""
    lines = LINE.findall(out)
    if len(lines) < MEASURED:
        raise NoFigure(f"it printed 'img/s' {len(lines)} times only")
    own = statistics.harmonic_mean([float(img_s) for img_s, _ in lines[-MEASURED:]])
    return {"img_s": own * ranks, "images_per_s": batch * ranks / float(lines[-1][1])}


def shares(rate: float, model: BenchModel, gpus: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """A rate with its share of the datasheets' peaks, None where one is not known, and of the products'."""
    done = rate * model.gflop / 1e3
    peaks = [gpu["bf16_peak_tflops"] for gpu in gpus]
    return {
        "images_per_s": rate,
        "of_peak": None if None in peaks else done / sum(peaks),
        "of_measured_matmul": done / sum(gpu["bf16_tflops"] for gpu in gpus),
    }


def summary(pairs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The pairs, and the median and the range of their ratios, of ours and of each of our launcher's ways to
    torchvision's script under torchrun; those that nothing was measured of are left out."""
    of = {
        name: [pair[name] / pair["theirs"] for pair in pairs if {name, "theirs"} <= pair.keys()]
        for name in ("ours", *WAYS)
    }
    return {"pairs": list(pairs), "ratios": {name: _spread(ratios) for name, ratios in of.items() if ratios}}


def _spread(ratios: Sequence[float]) -> dict[str, float | int]:
    spread = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return spread | {"pairs": len(ratios)}


def in_words(found: Mapping[str, Any]) -> str:
    """What `summary` found."""
    words = {"ours": "ours", **{way: f"that script under our launcher, {way}" for way in WAYS}}
    return "; ".join(
        f"{words[name]} {one['median']:.3f} of torchvision's script ({one['min']:.3f} to {one['max']:.3f}, "
        f"{counted(one['pairs'], 'pair')})"
        for name, one in found["ratios"].items()
    )


def _percent(share: float | None) -> str:
    return "an unknown share" if share is None else f"{share:.1%}"


def write_jpegs(folder: Path, count: int) -> None:
    """Pictures of SIDE pixels with soft shapes and some grain, the same every time."""
    import numpy as np
    from PIL import Image

    draws = np.random.default_rng(1)
    for number in range(count):
        shapes = draws.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        large = np.asarray(
            Image.fromarray(shapes).resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.int16
        )
        grain = draws.integers(-12, 13, (SIDE, SIDE, 3), dtype=np.int16)
        pixels = np.clip(large + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04}.jpg", quality=80)


def link_images(pool: Path, folder: Path, *, train: int, test: int) -> None:
    """train/CLASS/ and val/CLASS/ with so many files in all, which are hard links to those of the pool."""
    files = sorted(pool.iterdir())
    draws = random.Random(1)
    for part, count in (("train", train), ("val", test)):
        folders = [folder / part / f"class{number}" for number in range(CLASSES)]
        for one in folders:
            one.mkdir(parents=True)
        for number in range(count):
            (folders[number % CLASSES] / f"{number:07}.jpg").hardlink_to(draws.choice(files))
