"""Measures a sweep on nodes of this machine: `apptrain run` for each size and repeat, one after the other.
Begin at `LocalRuns`.

Runs in the venv or the image, as `apptrain run`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from entrypoint.core import checkout, files
from entrypoint.core.errors import BAD_INPUT, BadInput, of_returncode
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted, plain
from entrypoint.node import processes
from entrypoint.report.charts import duration, shown
from entrypoint.report.facts import ends_of, lines
from entrypoint.scaling import measured
from entrypoint.scaling.measured import NotMeasured
from entrypoint.scaling.sweep import NoSuchSize, Sweep, SweepFolder, of_size

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TO_END = 90.0
"""Seconds from SIGTERM to SIGKILL: ranks may save."""
GLANCE = 0.1
JOB_ENDED = "apptrain: the job ended with status "
"""Begins the last line of a job that failed, which tells nothing more than its status."""


class BrokenOff(Exception):
    """A signal has ended it."""

    def __init__(self, status: int):
        super().__init__()
        self.status = status


@dataclass(frozen=True)
class FailedSize:
    """A run that gave no rate."""

    nodes: int
    why: str


class LocalRuns:
    """Starts the runs that are missing. `signals` grows as they come, and `child` is the run that is on."""

    def __init__(
        self,
        folder: SweepFolder,
        sweep: Sweep,
        command: Sequence[str],
        options: Sequence[str],
        *,
        batch: int,
        minutes: float,
        say: Callable[[str], None],
        env: Mapping[str, str],
    ):
        """`command`, `options`: with their secrets. `batch`: as `of_size` takes it."""
        self._folder, self._sweep = folder, sweep
        self._command, self._options = command, options
        self._batch, self._seconds, self._say, self._env = batch, 60 * minutes, say, env
        self.signals: list[int] = []
        self.child: subprocess.Popen[bytes] | None = None

    def run(self) -> list[FailedSize]:
        """Measures what is not measured yet; returns what failed. Raises BrokenOff after a signal, BadInput
        if the first run is refused, as all would be."""
        for signum in HANDLED:
            signal.signal(signum, self._signalled)
        done = self._folder.noted("done")
        order = [one for one in self._sweep.order() if one not in done]
        whole = len(order) + len(done)
        if done:
            self._say(f"{len(done)} of {whole} runs are there already")
        failed: list[FailedSize] = []
        times: list[float] = []
        for at, (nodes, repeat) in enumerate(order):
            if any(one.nodes == nodes for one in failed):
                continue
            left = f", about {duration((len(order) - at) * sum(times) / len(times))} to go" if times else ""
            self._say(f"run {len(done) + at + 1} of {whole}: {counted(nodes, 'node')}{left}")
            began = time.monotonic()
            try:
                self._one(nodes, repeat, is_first=not done and not at)
            except (NotMeasured, NoSuchSize) as error:
                failed.append(FailedSize(nodes, str(error)))
                self._say(f"left out: {counted(nodes, 'node')}: {error}")
            times.append(time.monotonic() - began)
        return failed

    def _one(self, nodes: int, repeat: int, *, is_first: bool) -> None:
        words = of_size(self._command, nodes, batch=self._batch)
        run = self._folder.new_run(nodes, repeat)
        log = run.with_name(f"{run.name}.log")
        status, late = self._start(nodes, run, log, words)
        if self.signals:
            raise BrokenOff(128 + self.signals[0])
        if is_first and status == BAD_INPUT:
            raise BadInput("scaling-run-refused", _last_line(log))
        if not (run / "manifest.json").exists():
            raise NotMeasured(f"status {status}: {_last_line(log)}")
        try:
            found = measured.read(run, self._env)
        except NotMeasured as error:
            last = f": {_last_line(log)}" if status else ""
            raise NotMeasured(f"{error}{last} ({plain(str(log))})") from None
        self._say(
            f"   {shown(found.rate)} {found.unit} over {counted(found.timed, 'step')}"
            + (f", ended after {duration(self._seconds)}" if late else "")
        )
        self._folder.note("done", nodes, repeat, {"run": run.name, "rate": found.rate, "unit": found.unit})

    def _start(self, nodes: int, run: Path, log: Path, words: Sequence[str]) -> tuple[int, bool]:
        """(status of the run, whether its time was over)."""
        env = dict(os.environ)
        if path := checkout.python_path(env.get("PYTHONPATH", "")):
            env["PYTHONPATH"] = path
        start = [sys.executable, "-P", "-m", "entrypoint.cli.apptrain", "run", "--nodes", str(nodes)]
        start += ["--run-dir", str(run), *self._options, "--", *words]
        with open(log, "xb", opener=_private) as file:
            self.child = subprocess.Popen(
                start,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
        try:
            return self._wait(self.child)
        finally:
            self.child = None

    def _wait(self, child: subprocess.Popen[bytes]) -> tuple[int, bool]:
        late = False
        deadline = time.monotonic() + self._seconds
        if self.signals:  # It came while the run was being started.
            child.send_signal(self.signals[-1])
        while child.poll() is None:
            time.sleep(GLANCE)
            now = time.monotonic()
            if self.signals:
                deadline = min(deadline, now + TO_END)
            if now < deadline:
                continue
            if self.signals or late:
                child.kill()
                child.wait()
                break
            late = True
            child.terminate()
            deadline = now + TO_END
        return of_returncode(child.returncode)[0], late

    def _signalled(self, signum: int, _: FrameType | None) -> None:
        self.signals.append(signum)
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signum)


def _last_line(log: Path) -> str:
    """The last thing that the launcher said of its own in a run's output; if it said nothing, the last
    line."""
    try:
        with files.open_regular(log) as file:
            said = [line for line in lines(ends_of(file, 1 << 16)) if line]
    except (OSError, ValueError):
        return "it said nothing"
    ours = [line for line in said if line.startswith("apptrain: ") and JOB_ENDED not in line]
    return (ours or said or ["it said nothing"])[-1].removeprefix("apptrain: ")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
