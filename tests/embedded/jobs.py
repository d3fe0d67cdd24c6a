"""Real jobs on this machine, for tests: started, bounded, and looked at from outside."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome
from entrypoint.ranks import agent
from tests import procs

CHECKOUT = Path(__file__).resolve().parents[2]
BOUND = 120.0
"""Seconds after which a job that hangs is killed and the test fails."""
GRACE = 40.0
"""Seconds from SIGTERM to SIGKILL for a job that a test has given up."""


def clean_env(**more: str) -> dict[str, str]:
    """The environment of this test run without what a scheduler or launcher may have left in it."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "USER", "PYTHONPATH")
    return {name: os.environ[name] for name in kept if name in os.environ} | more


@dataclass(frozen=True, kw_only=True)
class Ended:
    status: int
    out: str
    err: str
    run: Path
    seconds: float

    def outcome(self, name: str) -> Outcome:
        found = outcome.read(self.run / "outcome" / name)
        assert found is not None, f"no outcome {name}: {list((self.run / 'outcome').iterdir())}"
        return found

    def log(self, name: str) -> str:
        return (self.run / "logs" / name).read_text()


class Job:
    """One call of the embedded scheduler, or of anything else that ends by itself."""

    def __init__(self, argv: Sequence[str], cwd: Path, run: Path, env: dict[str, str]):
        self.run = run
        self.started = time.monotonic()
        self.out = (cwd / "stdout.txt").open("w+")
        self.err = (cwd / "stderr.txt").open("w+")
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=self.err,
            start_new_session=True,
        )
        STARTED.append(self)

    def until(self, condition: Callable[[], object], what: str, seconds: float = BOUND) -> None:
        """Waits until the condition holds; fails when the job ends before, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended before {what}\n{self.text()}"
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        return f"stdout:\n{self._read(self.out.name)}\nstderr:\n{self._read(self.err.name)}"

    def signal(self, signum: int) -> None:
        self.started = time.monotonic()
        self.process.send_signal(signum)

    def end(self, seconds: float = BOUND) -> Ended:
        """Waits for the end; `seconds` in the result count from the start or the last signal."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.give_up()
            raise AssertionError(f"still running after {seconds} s\n{self.text()}") from None
        return Ended(
            status=status,
            out=self._read(self.out.name),
            err=self._read(self.err.name),
            run=self.run,
            seconds=time.monotonic() - self.started,
        )

    def give_up(self) -> None:
        """Ends it where it has not ended: in order, if it does so within GRACE."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @staticmethod
    def _read(name: str) -> str:
        return Path(name).read_text(errors="replace")


STARTED: list[Job] = []
"""Since `give_up_all` was called last."""


def give_up_all() -> None:
    """Ends what a test has left running."""
    while STARTED:
        STARTED.pop().give_up()


def start(
    tmp_path: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    gate: Path | None = None,
    **bounds: float,
) -> Job:
    """Starts the embedded scheduler in `tmp_path` with its run directory there; `bounds` as in hasty.py.
    `gate`: it waits until this file is there."""
    run = tmp_path / "run"
    tmp_path.mkdir(exist_ok=True)
    hasty = ["tests.embedded.hasty", *(f"{name}={value}" for name, value in bounds.items()), "embedded"]
    program = hasty if bounds else ["entrypoint.cli.embedded"]
    argv = [sys.executable, "-P", "-m", *program, "--run-dir", str(run), *arguments]
    if gate:
        argv = ["sh", "-c", 'until [ -e "$0" ]; do sleep 0.05; done; exec "$@"', str(gate), *argv]
    return Job(argv, tmp_path, run, clean_env(**({"APPTRAIN_PASS": "PYTHONPATH"} | (env or {}))))


def run(tmp_path: Path, *arguments: str, env: dict[str, str] | None = None) -> Ended:
    return start(tmp_path, *arguments, env=env).end()


def master_port() -> str:
    """For a launch by hand: two free ports, torch's store's and the join's behind it, below those that the kernel
    hands out and those of jobs that have a scheduler."""
    while True:
        port = random.randrange(20000, 30000, 2)
        with contextlib.suppress(OSError):
            for number in (port, port + 1):
                socket.create_server(("", number)).close()
            return str(port)


def processes_with(text: str) -> list[int]:
    """Process ids whose environment holds the text: what a job has left behind."""
    return [pid for pid, held in procs.files("environ") if text.encode() in held and pid != os.getpid()]


def agents(run: Path) -> list[int]:
    """torchrun's agents of a job."""
    found = [pid for pid, held in procs.files("comm") if held.strip() == agent.NAME.encode()]
    return [pid for pid in processes_with(str(run)) if pid in found]


def gone(text: str, seconds: float = 30.0) -> bool:
    """Whether every process with the text in its environment has ended within the bound."""
    deadline = time.monotonic() + seconds
    while processes_with(text):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
