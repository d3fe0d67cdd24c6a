"""Writes and reads metrics.jsonl: a line for each step and evaluation. Begin at `MetricsFile`; `read` also
understands a file with restarts and damage in it.

If the disk takes no lines, they are kept until it does.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from train.files import private, revive
from train.trouble import Troubles

NAME: Final = "metrics.jsonl"
_MOST_WAITING: Final = 100_000
"""Lines kept for a disk that takes none; later ones are lost."""


class MetricsFile:
    """Appends whole lines; they reach the file as they are written. Never raises OSError."""

    def __init__(self, path: Path, troubles: Troubles) -> None:
        """A last line that an earlier process left unfinished is removed."""
        self._path, self._troubles = path, troubles
        self._waiting: deque[bytes] = deque()
        self._part = 0
        """Bytes of the first waiting line that are in the file."""
        self._file: BinaryIO | None = None
        self._size = 0
        """Bytes that the file must have."""
        self._lock = threading.Lock()
        try:
            self._open()
        except OSError as error:
            self._tell(error)

    def step(self, step: int, *, loss: float, lr: float, images_per_s: float) -> None:
        self._line({"step": step, "loss": loss, "lr": lr, "images_per_s": images_per_s})

    def evaluation(self, step: int, *, accuracy: float, correct: int, total: int) -> None:
        self._line({"step": step, "accuracy": accuracy, "correct": correct, "total": total})

    def sync(self) -> None:
        """Bring what the file has to the disk. Any thread may call it; the others need not wait."""
        with self._lock:
            descriptor = os.dup(self._file.fileno()) if self._file else None
        if descriptor is None:
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            self._tell(error)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._write()
        if self._waiting:
            self._harmed("lines are lost", f"{self._path} lacks the last {len(self._waiting)}")
        try:
            if self._file:
                self._file.close()
        except OSError as error:
            self._tell(error)

    def _line(self, row: dict[str, float]) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._write()

    def _write(self) -> None:
        try:
            file = self._checked()
            while self._waiting:
                written = file.write(self._waiting[0][self._part :])
                self._size += written
                self._part += written
                if self._part == len(self._waiting[0]):
                    self._waiting.popleft()
                    self._part = 0
            self._troubles.over(NAME)
        except OSError as error:
            self._tell(error)

    def _checked(self) -> BinaryIO:
        """The file, made anew where it has vanished, and with whole lines only where it was cut."""
        if self._file is None:
            return self._open()
        state, had = os.fstat(self._file.fileno()), self._size
        if state.st_nlink and state.st_size >= had:
            return self._file
        file = self._open()
        if not state.st_nlink:
            self._harmed("it has vanished", f"made {self._path} anew, without its earlier lines")
        else:
            self._harmed("something has cut it", f"{self._path} has {state.st_size} bytes of {had}")
        return file

    def _open(self) -> BinaryIO:
        revive(self._path.parent)
        file = open(self._path, "a+b", buffering=0, opener=private)  # noqa: SIM115
        with self._lock:
            if self._file:
                self._file.close()
            self._file, self._part = file, 0
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        self._size = file.seek(0, os.SEEK_END)
        return file

    def _tell(self, error: OSError) -> None:
        self._troubles.tell(NAME, error, f"{self._path} takes no lines; training goes on, they wait")

    def _harmed(self, how: str, then: str) -> None:
        self._troubles.tell("metrics file", OSError(0, how), then, passing=True)


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
    it went on, what an earlier attempt wrote beyond is forgotten. What is no line of ours, such as one
    that a crash has cut, is skipped."""
    history = History()
    for row in _rows(path.read_bytes()):
        step = row.pop("step")
        if "loss" in row:
            _forget_from(history, step)
        for name in ("loss", "lr", "images_per_s", "accuracy"):
            if name in row:
                getattr(history, name)[step] = row[name]
    return history


def _rows(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            yield row


def _forget_from(history: History, step: int) -> None:
    for series in (history.loss, history.lr, history.images_per_s, history.accuracy):
        while series and next(reversed(series)) >= step:
            series.popitem()
