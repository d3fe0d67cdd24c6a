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
        # Tried again each time: a launcher that has heard of a rank takes its silence for a hang.
        with suppress(OSError):
            if self._path is not None:
                self._path.write_text(str(self._step))
