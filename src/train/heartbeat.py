"""Tells whoever watches that this rank goes on: `Heartbeat` writes the number of the last step into a file
after each step.
"""

from contextlib import suppress
from pathlib import Path


class Heartbeat:
    """Writes the file. A place that takes nothing harms nobody."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: nobody watches."""
        self._path = path
        self._step = 0

    def step(self, step: int) -> None:
        """A step is done."""
        self._step = step
        self.beat()

    def beat(self) -> None:
        """Something else goes on: an evaluation, a save."""
        if self._path is not None:
            with suppress(
                OSError
            ):  # it is tried again: a launcher that has heard once would take us for stuck
                self._path.write_text(str(self._step))
