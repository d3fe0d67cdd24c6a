"""Chooses the settings of the `digits` config, by cross-validation on its 1,437 training images. `selection`
is the entry.

The training images are cut into five consecutive blocks. The file is in order of collection, so a block
stands for writers that were not seen. Each candidate trains five times, each time without one block, and is
judged by how many images of all five blocks it then gets wrong. The fewest win; of two that are equal, the
first in the list. No test image is read.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

FOLDS: Final = 5
COMMON: Final = [
    "epochs=12",
    "batch_size=128",
    "data.image_size=32",
    "data.strength=1",
    "label_smoothing=0.05",
    "optimizer.warmup_steps=20",
    "accumulation=2",  # Two passes of half a batch: what the two ranks of the demo do.
    f"data.folds={FOLDS}",
    "evaluate.every=0",
    "checkpoint.every=0",
]
ADAMW: Final = ["optimizer.name=adamw", "optimizer.lr=0.001", "optimizer.weight_decay=0.05"]
SGD: Final = [
    "optimizer.name=sgd",
    "optimizer.lr=0.05",
    "optimizer.nesterov=true",
    "optimizer.weight_decay=0.0005",
    "optimizer.clip_norm=1",
]
CANDIDATES: Final[dict[str, list[str]]] = {
    "AdamW": ADAMW,
    "AdamW, batch 64": [*ADAMW, "batch_size=64"],
    "AdamW, batch 64, learning rate 0.0005": [*ADAMW, "batch_size=64", "optimizer.lr=0.0005"],
    "AdamW, strength 0.7": [*ADAMW, "data.strength=0.7"],
    "AdamW, strength 1.5": [*ADAMW, "data.strength=1.5"],
    "AdamW, 48 pixels, 8 epochs": [*ADAMW, "data.image_size=48", "epochs=8"],
    "AdamW, 20 epochs": [*ADAMW, "epochs=20"],
    "SGD": SGD,
}


def selection(checkout: Path, workers: int) -> dict[str, Any]:
    """Train every candidate without every block; `workers` runs at once, each on one core."""
    wrong: dict[str, list[int]] = {}
    with ThreadPoolExecutor(workers) as pool:
        for name, overrides in CANDIDATES.items():
            runs = [pool.submit(_wrong, checkout, [*overrides, f"data.fold={fold}"]) for fold in range(FOLDS)]
            wrong[name] = [run.result() for run in runs]
            print(f"{name}: {sum(wrong[name])} of 1437 wrong, by block {wrong[name]}", flush=True)
    winner = min(wrong, key=lambda name: sum(wrong[name]))
    print(f"fewest wrong: {winner}")
    return {"common": COMMON, "candidates": CANDIDATES, "wrong": wrong, "winner": winner}


def _wrong(checkout: Path, overrides: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "APPTRAIN_RUN_DIR": folder}
        command = [sys.executable, "-P", "-m", "train", "--config", "digits", *COMMON, *overrides]
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=1800
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        result = json.loads((Path(folder) / "result.json").read_text())
    return int(result["total"] - result["correct"])
