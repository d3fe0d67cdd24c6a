"""Saves checkpoints while training goes on. Begin at `Saver`.

Training waits while the state is copied; then a thread writes the copy. There is one copy and one thread, so
memory is bounded: the next save waits for the one before. Only rank 0 saves; on the other ranks nothing
happens here.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Final

from train import checkpoint
from train.checkpoint import Checkpoint, Draft, NotWorthKeeping
from train.config import CheckpointOptions as Settings
from train.files import revive
from train.trouble import Troubles, reason_of

Say = Callable[[str], None]
CHECKPOINTS: Final = "checkpoints"
_REHEARSAL: Final = "rehearsal of a save"
_SLOW_S: Final = 1.0
"""A wait for the save before that is worth a line."""
_GLANCE_S: Final = 1.0
"""How often a wait looks whether the writing makes progress."""


class Saver:
    """Writes RUN/checkpoints and keeps it in bounds."""

    def __init__(
        self,
        run_dir: Path | None,
        settings: Settings,
        *,
        say: Say,
        troubles: Troubles,
        before_commit: Callable[[], None] = lambda: None,
        scores: Mapping[int, float] | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`run_dir` None: not rank 0. `scores`: accuracies of earlier steps. `before_commit` runs before a
        checkpoint is given its name, `beat` while one that is waited for makes progress."""
        self._run_dir, self._settings = run_dir, settings
        self._say, self._troubles, self._before_commit = say, troubles, before_commit
        self._scores, self._beat = dict(scores or {}), beat
        self._draft = Draft()
        self._thread: Thread | None = None
        self._bug: Exception | None = None
        self._failure: Exception | None = None
        self._begun = time.monotonic()
        self._seen = False
        self.saved = 0
        """Checkpoints written."""
        self.failed = 0
        """Checkpoints that could not be written."""
        self.held_s = 0.0
        """How long `start` kept training waiting, in all."""

    @property
    def directory(self) -> Path:
        return (self._run_dir or Path()) / CHECKPOINTS

    def rehearse(self) -> None:
        """Find out in the background whether checkpoints can be written, before there is one to lose.

        It also brings all that a save runs through into memory: when a job is cancelled, the image may be
        gone before the last save.
        """
        if self._run_dir is not None:
            self._thread = Thread(target=self._guarded, args=(self._rehearse,), daemon=True)
            self._thread.start()

    def due(self) -> bool:
        """Whether so many minutes have passed since the last save began that the next is due."""
        minutes = self._settings.minutes
        if self._run_dir is None or not minutes or (self._thread and self._thread.is_alive()):
            return False
        return time.monotonic() - self._begun >= 60 * minutes

    def scored(self, step: int, accuracy: float) -> None:
        """Tell how good a step's weights are."""
        self._scores[step] = accuracy

    def start(self, state: Checkpoint) -> None:
        """Begin to save a state: when this returns, training may change it.

        Waits for the save before, if that goes on. Raises what is a bug, not what a disk may do.
        """
        self.finish_before(state.step)
        begin = time.monotonic()
        self._begun = begin
        self._draft.take(state)
        self._failure = None
        self._thread = Thread(target=self._guarded, args=(self._write,), daemon=True)
        self._thread.start()
        if not self._settings.background:
            self._join()
        self.held_s += time.monotonic() - begin

    def finish_before(self, step: int) -> None:
        """Wait for the save before that of this step, or for the rehearsal, if it goes on."""
        before = self._draft.step  # 0: the rehearsal alone
        begin = time.monotonic()
        self._join()
        waited = time.monotonic() - begin
        self.held_s += waited
        if before and waited > _SLOW_S and self._settings.background:
            self._say(f"step {step}: waited {waited:.1f} s for the save of step {before}")

    @property
    def is_in_background(self) -> bool:
        """Whether training goes on while a state is written."""
        return self._settings.background

    def wait(self) -> bool:
        """Wait until the last save is on the disk. False: it is not, and the user has been told why."""
        self._join()
        return self._failure is None

    @property
    def failure(self) -> str:
        """Why the last save failed; empty where it did not."""
        return reason_of(self._failure) if self._failure else ""

    def abandon(self, seconds: float) -> None:
        """Give a save that goes on a moment, because the process is about to end."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _join(self) -> None:
        progress = -1
        while self._thread is not None and self._thread.is_alive():
            if self._draft.progress != progress:
                progress = self._draft.progress
                self._beat()
            self._thread.join(_GLANCE_S)
        self._thread = None
        if self._bug is not None:
            raise self._bug

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as bug:
            self._bug = bug

    def _rehearse(self) -> None:
        try:
            checkpoint.rehearse(self.directory)
            self._seen = True
        except OSError as error:
            then = f"no checkpoint can be written to {self.directory}; training goes on"
            self._troubles.tell(_REHEARSAL, error, then)

    def _write(self) -> None:
        begin, step = time.monotonic(), self._draft.step
        try:
            self._revive()
            self._draft.check()
            path = self._draft.write(self.directory, self._before_commit)
        except (OSError, NotWorthKeeping) as error:
            self._failure = error
            self.failed += 1
            newest = checkpoint.newest_whole(self.directory)
            last = "there is none" if newest is None else f"the newest is that of step {newest}"
            then = f"step {step} is not saved to {self.directory}; training goes on; {last}"
            self._troubles.tell(CHECKPOINTS, error, then)
            return
        self.saved += 1
        self._seen = True
        self._troubles.over(CHECKPOINTS)
        self._troubles.over(_REHEARSAL)
        seconds = time.monotonic() - begin
        self._say(f"step {step}: saved {path.name} ({self._draft.size / 1e6:.1f} MB in {seconds:.2f} s)")
        self._prune()

    def _revive(self) -> None:
        if self._run_dir is None or not self._seen or self.directory.exists():
            return
        revive(self._run_dir)
        then = f"made {self.directory} anew; training goes on"
        self._troubles.tell("directory of checkpoints", OSError(0, "it has vanished"), then, passing=True)

    def _prune(self) -> None:
        scores = self._scores if self._settings.keep_best else {}
        try:
            checkpoint.prune(self.directory, self._settings.keep, dict(scores))
        except OSError as error:
            self._troubles.tell("old checkpoints", error, f"they cannot be deleted from {self.directory}")
