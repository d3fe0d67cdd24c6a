"""What a person and other programs get to see of a run, all on rank 0.

The secret: the bar, the lines, TensorBoard, result.json, curves.png and the final table. TensorBoard's
events are written at evaluations, once a minute and at the end: importing it takes as long as a few steps.
Nothing here ends a run: what cannot be written is told to the `Troubles`.
"""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO

from tqdm import tqdm

from train import metrics
from train.board import Board, Scalar
from train.evaluate import Score
from train.files import replace, replace_json, revive
from train.metrics import History, MetricsFile
from train.trouble import Troubles

BOARD_PERIOD_S: Final = 60.0
_MOST_SCALARS: Final = 100_000
"""Points kept for a disk that takes none; the oldest are dropped."""


class Recorder:
    """Writes down what happens, step by step. On ranks other than 0 it does nothing."""

    def __init__(self, run_dir: Path | None, troubles: Troubles, *, step: int, total_steps: int) -> None:
        """`run_dir` None: not rank 0. `step` is the one that the run begins after."""
        self._run_dir, self._troubles = run_dir, troubles
        if run_dir is not None:
            self._metrics = MetricsFile(run_dir / metrics.NAME, troubles)
            self._board = Board(run_dir / "tensorboard")
            self._scalars: list[Scalar] = []
            self._flushed = time.monotonic()
            self._bar = tqdm(
                total=total_steps, initial=step, unit="step", file=sys.stderr, mininterval=0.5, smoothing=0.1
            )

    def say(self, line: str) -> None:
        """Print a line beside the bar. Any thread may call it."""
        if self._run_dir is not None:
            show(line)

    def step(self, step: int, *, loss: float, lr: float, images_per_s: float) -> None:
        if self._run_dir is None:
            return
        self._metrics.step(step, loss=loss, lr=lr, images_per_s=images_per_s)
        now = time.time()
        for name, value in (("loss", loss), ("lr", lr), ("images_per_s", images_per_s)):
            self._scalars.append(Scalar(tag=f"train/{name}", value=value, step=step, time=now))
        if time.monotonic() - self._flushed > BOARD_PERIOD_S:
            self._flush_board()
        with suppress(OSError):  # A terminal or a log that takes no more.
            self._bar.set_postfix_str(f"loss {loss:.4f}, {images_per_s:.0f} images/s", refresh=False)
            self._bar.update()

    def evaluation(self, step: int, score: Score, split: str) -> None:
        if self._run_dir is None:
            return
        self._metrics.evaluation(step, accuracy=score.accuracy, correct=score.correct, total=score.total)
        accuracy = Scalar(tag=f"{split}/accuracy", value=score.accuracy, step=step, time=time.time())
        self._scalars.append(accuracy)
        self._flush_board()
        self.say(f"step {step}: {split} accuracy {score.accuracy:.2%} ({score.correct} of {score.total})")

    def sync(self) -> None:
        """Bring the metrics to the disk: a checkpoint without the lines before it would leave a gap."""
        if self._run_dir is not None:
            self._metrics.sync()

    def close(self) -> None:
        if self._run_dir is not None:
            with suppress(OSError):
                self._bar.close()
            self._metrics.close()
            self._flush_board()
            self._board.close()

    def _flush_board(self) -> None:
        self._flushed = time.monotonic()
        try:
            self._board.write(self._scalars)
            self._scalars.clear()
            self._troubles.over("tensorboard")
        except OSError as error:
            del self._scalars[:-_MOST_SCALARS]
            self._troubles.tell("tensorboard", error, f"{self._run_dir}/tensorboard takes no events as yet")


def show(line: str) -> None:
    """Print a line on stdout, beside a bar."""
    with suppress(OSError):
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


def warn(line: str) -> None:
    """Print a line on stderr, beside a bar."""
    with suppress(OSError):
        tqdm.write(line, file=sys.stderr)


def finish(run_dir: Path, result: dict[str, Any], troubles: Troubles, out: TextIO = sys.stdout) -> bool:
    """Write result.json and curves.png and print the table. Returns whether all of it was written."""
    complete = True
    for name, write in (("result.json", _write_result), ("curves.png", _write_curves)):
        try:
            revive(run_dir)
            write(run_dir / name, result)
        except OSError as error:
            complete = False
            troubles.tell(name, error, f"{run_dir} does not take it")
    with suppress(OSError):
        print(table(run_dir, result), file=out, flush=True)
    return complete


def _write_result(path: Path, result: dict[str, Any]) -> None:
    replace_json(path, result)


def _write_curves(path: Path, result: dict[str, Any]) -> None:
    history = metrics.read(path.parent / metrics.NAME)
    replace(path, lambda temporary: draw(history, result, temporary))


def table(run_dir: Path, result: dict[str, Any]) -> str:
    """The final figures, aligned."""
    accuracy = f"{result['accuracy']:.2%} ({result['correct']} of {result['total']})"
    speed, first = result["images_per_s"], result["first_step_s"]
    rows = [
        (f"{result['split']} accuracy", accuracy),
        ("images/s", f"{speed:.0f}" if speed else "-"),
        ("time to first step", f"{first:.1f} s" if first else "-"),
        ("training time", f"{result['train_s']:.1f} s"),
        ("wall time", f"{result['wall_s']:.1f} s"),
        ("run directory", str(run_dir)),
    ]
    return "\n".join(f"{name:<20}{value}" for name, value in rows)


def draw(history: History, result: dict[str, Any], path: Path) -> None:
    """Draw loss and accuracy over the steps as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    blue, orange, grey = "#2f6db5", "#d9772b", "#5a5a5a"
    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with pyplot.rc_context({**style, "font.size": 10, "axes.edgecolor": grey, "axes.titlelocation": "left"}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=120, layout="constrained")
        left.plot(*_series(history.loss), color=blue, alpha=0.25, linewidth=0.8)
        left.plot(*_series(smoothed(history.loss)), color=blue, linewidth=1.8)
        left.set(title="Training loss", xlabel="step", xlim=(0, None), ylim=(0, None))
        on_the_way, at_the_end = _series(history.accuracy), ([result["steps"]], [result["accuracy"]])
        if result["evaluated_on"] == "train":
            on_the_way = _series({step: v for step, v in history.accuracy.items() if step < result["steps"]})
        line = {"linewidth": 1.8, "marker": "o", "markersize": 4, "clip_on": False}
        colour = grey if result["evaluated_on"] == "train" else orange
        right.plot(*on_the_way, color=colour, label=result["evaluated_on"], **line)
        right.plot(*at_the_end, color=orange, label=result["split"], **(line | {"markersize": 8}))
        low = min([*on_the_way[1], result["accuracy"]])
        right.set(title="Accuracy", xlabel="step", xlim=(0, None))
        right.set_ylim(max(0.0, low - 0.1 * (1 - low) - 0.01), 1)
        right.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        right.annotate(
            f"{result['split']} {result['accuracy']:.2%}", (result["steps"], result["accuracy"]),
            xytext=(0, -14), ha="right", va="top", textcoords="offset points", color=orange, weight="bold",
        )  # fmt: skip
        if result["evaluated_on"] == "train":
            right.legend(loc="lower right", frameon=False)
        figure.suptitle(
            f"{result['config']}: {result['model']}, {result['world_size']} ranks on {result['device']}",
            x=0.01, ha="left", weight="bold",
        )  # fmt: skip
        figure.savefig(path, format="png", metadata={"Software": None})
        pyplot.close(figure)


def smoothed(series: dict[int, float], weight: float = 0.8) -> dict[int, float]:
    """An exponential moving average without a bias towards its start."""
    mean = share = 0.0
    result = {}
    for step, value in series.items():
        mean, share = weight * mean + (1 - weight) * value, weight * share + (1 - weight)
        result[step] = mean / share
    return result


def _series(series: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(series), list(series.values())
