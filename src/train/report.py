"""Shows a run to people and to other programs, on rank 0: progress bar, lines, TensorBoard, result.json,
curves.png and the final table. Begin at `Recorder`; `finish` is the end.

TensorBoard's events are written at evaluations, once a minute and at the end, since its import takes as long
as a few steps. Nothing here ends a run: what cannot be written is told to the `Troubles`.
"""

import itertools
import sys
import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

from tqdm import tqdm

from train import metrics
from train.board import Board, Scalar
from train.evaluate import Score
from train.files import replace, replace_json, revive
from train.metrics import History, MetricsFile
from train.status import TrainingRefused
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
            self._steps, self._paces = 0, 0.0
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
        speed = self._mean(images_per_s)
        text = f"loss {loss:.4f}" + (f", {speed:.0f} images/s" if speed else "")
        with suppress(OSError):  # A terminal or a log that takes no more.
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()

    def _mean(self, images_per_s: float) -> float | None:
        """Images per second since the first step, which warms up, as result.json has it at the end."""
        self._steps += 1
        if self._steps == 1:
            return None
        self._paces += 1 / images_per_s
        return (self._steps - 1) / self._paces

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

    @contextmanager
    def closed_if_refused(self) -> Iterator[None]:
        """What is refused inside gets a line of its own, after the bar: launchers quote the last line."""
        try:
            yield
        except TrainingRefused:
            self.close()
            raise

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
        ("images/s", f"{speed:.0f} (mean without the first step)" if speed else "-"),
        ("time to first step", f"{first:.1f} s" if first else "-"),
        ("training time", f"{result['train_s']:.1f} s"),
        ("wall time", f"{result['wall_s']:.1f} s"),
        ("run directory", str(run_dir)),
    ]
    return "\n".join(f"{name:<20}{value}" for name, value in rows)


def draw(history: History, result: dict[str, Any], path: Path) -> None:
    """Draw loss, accuracy and throughput over the steps as a PNG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    blue, orange, grey = "#2f6db5", "#d9772b", "#5a5a5a"
    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with mpl.rc_context({**style, "font.size": 10, "axes.edgecolor": grey, "axes.titlelocation": "left"}):
        figure = Figure(figsize=(13, 4), dpi=120, layout="constrained")
        left, right, last = figure.subplots(1, 3)
        for axes, series, title in (
            (left, history.loss, "Training loss"),
            (last, history.images_per_s, "Throughput in images/s"),
        ):
            window = window_of(series)
            axes.plot(*_series(series), color=blue, alpha=0.35, linewidth=0.8, label="each step")
            bold = _series(smoothed(series, window))
            axes.plot(*bold, color=blue, linewidth=1.8, label=f"mean of the {window} around")
            axes.set(title=title, xlabel="step", xlim=(0, None), ylim=(0, None))
        if result["images_per_s"]:
            mean = {"label": f"result: {result['images_per_s']:.0f}", "color": orange, "linestyle": "--"}
            last.axhline(result["images_per_s"], **mean)
        left.legend(loc="upper right", frameon=False)
        last.legend(loc="lower right", frameon=False)
        on_the_way, at_the_end = _series(history.accuracy), ([result["steps"]], [result["accuracy"]])
        if result["evaluated_on"] == "train":
            on_the_way = _series({step: v for step, v in history.accuracy.items() if step < result["steps"]})
        line = {"linewidth": 1.8, "marker": "o", "markersize": 4, "clip_on": False}
        colour = grey if result["evaluated_on"] == "train" else orange
        right.plot(*on_the_way, color=colour, label=result["evaluated_on"], **line)
        named = f"{result['split']} {result['accuracy']:.2%}"
        right.plot(*at_the_end, color=orange, label=named, **(line | {"markersize": 8}))
        low = min([*on_the_way[1], result["accuracy"]])
        right.set(title="Accuracy", xlabel="step", xlim=(0, None))
        right.set_ylim(max(0.0, low - 0.1 * (1 - low) - 0.01), 1)
        right.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        right.legend(loc="lower right", frameon=False)
        figure.suptitle(
            f"{result['config']}: {result['model']}, {result['world_size']} ranks on {result['device']}",
            x=0.01, ha="left", weight="bold",
        )  # fmt: skip
        figure.savefig(path, format="png", metadata={"Software": None})


def window_of(series: Sized) -> int:
    """How many steps a smoothed point is the mean of: an odd number."""
    return 2 * (len(series) // 40) + 3


def smoothed(series: dict[int, float], window: int) -> dict[int, float]:
    """The means over windows around each step, so that the curve neither lags nor leads; near the ends, where
    there is less on one side, they are as much narrower."""
    sums = [0.0, *itertools.accumulate(series.values())]
    result = {}
    for at, step in enumerate(series):
        half = min(window // 2, at, len(series) - 1 - at)
        result[step] = (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)
    return result


def _series(series: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(series), list(series.values())
