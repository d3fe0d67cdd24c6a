"""metrics.jsonl: a line per step and per evaluation, and how a file with restarts in it is read."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from train.files import private


class MetricsFile:
    """Appends whole lines; they reach the file as they are written."""

    def __init__(self, path: Path) -> None:
        """A last line that an earlier process left unfinished is removed."""
        self._file: BinaryIO = open(path, "a+b", buffering=0, opener=private)  # noqa: SIM115
        end = self._file.seek(0, 2)
        if end:
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def step(self, step: int, *, loss: float, lr: float, images_per_s: float) -> None:
        self._line({"step": step, "loss": loss, "lr": lr, "images_per_s": images_per_s})

    def evaluation(self, step: int, *, accuracy: float, correct: int, total: int) -> None:
        self._line({"step": step, "accuracy": accuracy, "correct": correct, "total": total})

    def close(self) -> None:
        self._file.close()

    def _line(self, row: dict[str, float]) -> None:
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")


@dataclass(kw_only=True)
class History:
    """What counts of a metrics file, by step in ascending order."""

    loss: dict[int, float] = field(default_factory=dict)
    lr: dict[int, float] = field(default_factory=dict)
    images_per_s: dict[int, float] = field(default_factory=dict)
    accuracy: dict[int, float] = field(default_factory=dict)
    """In 0..1."""


def read(path: Path) -> History:
    """Read a metrics file. Where a run was resumed, its last line for a step counts; from the step where
    it went on, what an earlier attempt wrote beyond is forgotten. An unfinished last line is skipped."""
    history = History()
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        row: dict[str, Any] = json.loads(line)
        step = row.pop("step")
        if "loss" in row:
            _forget_from(history, step)
        for name in ("loss", "lr", "images_per_s", "accuracy"):
            if name in row:
                getattr(history, name)[step] = row[name]
    return history


def _forget_from(history: History, step: int) -> None:
    for series in (history.loss, history.lr, history.images_per_s, history.accuracy):
        while series and next(reversed(series)) >= step:
            series.popitem()
