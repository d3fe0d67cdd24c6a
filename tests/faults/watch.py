"""Notes when what appeared in a run's files. Begin at `Watch`, which looks in a thread 50 times a second.

Times are Unix seconds of this machine, which is all nodes' clock.
"""

import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from train import checkpoint

PERIOD = 0.02


@dataclass(kw_only=True)
class Watch:
    """Notes for the length of a `with`; each list is in the order of its times."""

    run_dir: Path
    output: Path
    """What Slurm writes the job's output to."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """(time, step) of each line of metrics.jsonl that has a loss."""
    lines: list[tuple[float, str]] = field(default_factory=list)
    """(time, line) of the job's output."""
    checkpoints: Path = field(init=False)
    """Where this machine sees the run's."""
    attempts: dict[int, float] = field(default_factory=dict)
    outcomes: dict[str, float] = field(default_factory=dict)
    """Names in RUN/outcome."""
    saved: list[tuple[float, int]] = field(default_factory=list)
    """(time, step) of each checkpoint that has got its name."""
    _read: dict[Path, int] = field(default_factory=dict)
    _present: set[int] = field(default_factory=set)
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.checkpoints = self.run_dir / "checkpoints"

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread:
            self._thread.join()

    @property
    def attempt(self) -> int:
        """The newest attempt; -1 before the first."""
        return max(self.attempts, default=-1)

    @property
    def step(self) -> int:
        """The step of the last line; 0 before the first."""
        return self.steps[-1][1] if self.steps else 0

    def begun(self, attempt: int) -> float:
        """When the attempt began; 0 for -1, far ahead where it has not."""
        return self.attempts.get(attempt, 0.0 if attempt < 0 else float("inf"))

    def text(self, since: float = 0.0) -> str:
        """The output from some time on."""
        return "\n".join(line for at, line in self.lines if at >= since)

    def saving(self) -> str:
        """The name under which a checkpoint is being written at this moment; empty where none is."""
        with suppress(OSError):
            for path in self.checkpoints.iterdir():
                if path.name.startswith(".step-") and path.name.split(".")[2] not in ("replaced", "deleted"):
                    return path.name
        return ""

    def lost(self, done: int, every: int) -> tuple[int, int]:
        """(steps that were done again since the first `done` lines of steps were there, how many a save may cost).

        What a save may cost are the steps that are done while it is written: the most that were seen during a whole
        one, or since the last multiple of `every` where the checkpoint of that step had not got its name.
        """
        numbers = [step for _, step in self.steps]
        pairs = list(pairwise(numbers))[max(0, done - 1) :]
        again = sum(max(0, before + 1 - after) for before, after in pairs)
        during = [self._during(at, step) for at, step in self.saved]
        if done:
            at, last = self.steps[done - 1]
            begun = last - last % every
            if begun and not any(saved >= begun for when, saved in self.saved if when <= at):
                during.append(last - begun)
        return again, max(during, default=0)

    def _during(self, saved: float, step: int) -> int:
        """Steps that were done while one was saved."""
        before = [number for at, number in self.steps if at <= saved]
        return max(0, before[-1] - step) if before else 0

    def _look_on(self) -> None:
        while not self._end.wait(PERIOD):
            self.look()

    def look(self) -> None:
        now = time.time()
        self.lines += [(now, line) for line in self._new_lines(self.output)]
        for line in self._new_lines(self.run_dir / "metrics.jsonl"):
            with suppress(ValueError):  # what a lost node has left of one
                row = json.loads(line)
                if "loss" in row:
                    self.steps.append((now, row["step"]))
        for path in _inside(self.run_dir / "logs"):
            if path.name.isdecimal():
                self.attempts.setdefault(int(path.name), now)
        for path in _inside(self.run_dir / "outcome"):
            if not path.name.startswith("."):
                self.outcomes.setdefault(path.name, now)
        present = {
            step for path in _inside(self.checkpoints) if (step := checkpoint.step_of(path)) is not None
        }
        self.saved += [(now, step) for step in sorted(present - self._present)]
        self._present = present

    def _new_lines(self, file: Path) -> list[str]:
        """Whole lines since the last time."""
        try:
            with file.open("rb") as stream:
                stream.seek(self._read.get(file, 0))
                content = stream.read()
        except OSError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._read[file] = self._read.get(file, 0) + len(whole)
        return whole.decode(errors="replace").splitlines()


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
