"""Writes scalars to TensorBoard's event files. Begin at `Board`.

It uses TensorBoard's own record and message types. TensorBoard's writer would do the same in a thread of its
own, which dies with a traceback if the disk is full.
"""

import itertools
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from train.files import make_directory, private

_NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Scalar:
    tag: str
    value: float
    step: int
    time: float
    """Unix seconds."""


class Board:
    """Appends to one file; begins another where writing has failed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def write(self, scalars: list[Scalar]) -> None:
        """Write them all, to the operating system. What an earlier process logged from the first one's step
        on is hidden. Raises OSError; then they are to be written again."""
        if not scalars:
            return
        try:
            if self._file is None or not os.fstat(self._file.fileno()).st_nlink:
                self._open(scalars[0])
            for scalar in scalars:
                summary = {"value": [{"tag": scalar.tag, "simple_value": scalar.value}]}
                self._event(wall_time=scalar.time, step=scalar.step, summary=summary)
            if self._file is not None:
                self._file.flush()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Raises nothing: what matters was flushed."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError:
            return

    def _open(self, first: Scalar) -> None:
        make_directory(self._folder)
        suffix = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = open(self._folder / f"events.out.tfevents.{suffix}", "xb", opener=private)  # noqa: SIM115
        self._event(wall_time=first.time, step=first.step, file_version="brain.Event:2")
        self._event(wall_time=first.time, step=first.step, session_log={"status": "START"})

    def _event(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        RecordWriter(self._file).write(Event(**fields).SerializeToString())
