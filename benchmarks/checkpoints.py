"""Measures what checkpoints cost a training: `saves` compares saves in the background with blocking ones,
`checkpoints` a training with checkpoints and one without.

`held` is the time for which the training loop stands still for a save, as the program itself counts it. The
rate is images per second over the steps and these waits together, from the second step on, so it includes
what the writing thread takes from the steps. Waiting for the last save, which every run does, is left out.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

CONFIG: Final = "digits"
STEPS: Final = 75
OFTEN: Final = 5
"""Steps between the saves that are compared with each other; the config's own interval is 30."""

Run = Callable[[list[str]], str]
Alternate = Callable[[Callable[[], float], Callable[[], float], int], list[tuple[float, float]]]
Spread = Callable[[list[float]], dict[str, float]]


def saves(pairs: int, run: Run, alternate: Alternate, spread: Spread) -> dict[str, Any]:
    """How long a save holds training up: written in the background, over written at once."""

    def held_ms(background: str) -> float:
        found = _trained(run, f"checkpoint.every={OFTEN}", f"checkpoint.background={background}")[
            "checkpoints"
        ]
        return float(1000 * found["held_s"] / found["saved"])

    held = alternate(lambda: held_ms("true"), lambda: held_ms("false"), pairs)
    ratio = spread([beside / waiting for beside, waiting in held])
    print(f"training held by a save: asynchronous / synchronous {ratio}")
    return {"steps": STEPS, "every": OFTEN, "held_ms_per_save": held, "ratio": ratio}


def checkpoints(pairs: int, run: Run, alternate: Alternate, spread: Spread) -> dict[str, Any]:
    """Images per second with checkpoints at the config's own interval, over those without any."""

    def images_per_s(*overrides: str) -> float:
        found = _trained(run, *overrides)
        images = (found["steps"] - 1) * found["batch_size"]
        return float(images / (images / found["images_per_s"] + found["checkpoints"]["held_s"]))

    rates = alternate(images_per_s, lambda: images_per_s("checkpoint.every=0"), pairs)
    ratio = spread([kept / none for kept, none in rates])
    print(f"images/s with checkpoints at the config's interval / without {ratio}")
    return {"steps": STEPS, "images_per_s": rates, "ratio": ratio}


def _trained(run: Run, *overrides: str) -> dict[str, Any]:
    """The result of the training on two embedded nodes."""
    with TemporaryDirectory() as folder:
        launch = [sys.executable, "-P", "-m", "entrypoint.cli.embedded", "--run-dir", f"{folder}/run"]
        common = [f"steps={STEPS}", "evaluate.every=0", "checkpoint.minutes=0"]
        run([*launch, "--", "-m", "train", "--config", CONFIG, *common, *overrides])
        found: dict[str, Any] = json.loads((Path(folder) / "run" / "result.json").read_text())
    return found
