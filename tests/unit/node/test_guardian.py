"""entrypoint/node/guardian.py: what is done about processes that a killed launcher has left, on a clock that never waits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from entrypoint.node import guardian, processes

ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""What ends a launcher, and may be sent to every process of its job."""


class Machine:
    """Processes that end `after` so many seconds, or at SIGKILL if they are `deaf` to all else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: float, deaf: bool = False):
        self.after, self.deaf = after, deaf
        self.now = 0.0
        self.looks = 0
        self.done: list[tuple[float, str]] = []
        self.killed = False
        monkeypatch.setattr(guardian, "strays", self.strays)
        monkeypatch.setattr(guardian, "_send", self.send)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(guardian, "time", clock)

    def strays(self, _: Any) -> list[int]:
        self.looks += 1
        assert self.looks < 1000, "it never waits"
        return [] if self.killed or (self.now >= self.after and not self.deaf) else [7]

    def send(self, signum: int, pids: list[int]) -> None:
        if pids:
            self.done.append((self.now, signal.Signals(signum).name))
            self.killed = signum == signal.SIGKILL

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "it would take a core"
        self.now += seconds
        assert self.now < 1000, "it waits for ever"


def test_a_guardian_that_could_not_be_started_guards_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    none = guardian.Guardian()
    none.watch(tmp_path)
    none.dismiss()
    assert none.pids == []


@pytest.fixture
def waiting() -> Iterator[guardian.Guardian]:
    """A guardian that hears no signal any more."""
    one = guardian.Guardian()
    (pid,) = one.pids
    deadline = time.monotonic() + 10
    while not ignored(pid) >= ENDS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield one
    one.dismiss()


def ignored(pid: int) -> set[int]:
    """The signals that a process ignores."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_a_guardian_is_one_process_that_ends_when_it_is_dismissed(
    tmp_path: Path, waiting: guardian.Guardian
) -> None:
    (pid,) = waiting.pids
    assert psutil.Process(pid).children() == []
    waiting.watch(tmp_path)
    waiting.dismiss()
    assert not processes.is_running(pid)
    assert tmp_path.exists()


def test_what_ends_the_launcher_does_not_end_the_guardian(waiting: guardian.Guardian) -> None:
    (pid,) = waiting.pids
    for number in ENDS:
        os.kill(pid, number)
    time.sleep(0.1)
    assert processes.is_running(pid)


def test_a_launch_whose_launcher_was_killed_leaves_no_directory(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in (" a  b", "a\\tb", "\udcff\udc81$x")]
    script = """
import sys
import time
from pathlib import Path
from entrypoint.node.guardian import Guardian
one = Guardian()
for name in sys.argv[1:]:
    one.watch(Path(name))
print(*one.pids, flush=True)
time.sleep(60)
"""
    for folder in folders:
        folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script, *map(str, folders)], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
    deadline = time.monotonic() + 30
    while processes.is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []


def test_what_ends_at_sigterm_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, after=1.0)
    guardian.main([str(tmp_path)])
    assert machine.done == [(0.0, "SIGTERM")]
    assert 1.0 <= machine.now < 1.0 + 2 * guardian.GLANCE
    assert not tmp_path.exists()


def test_what_does_not_is_killed_after_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, after=0.0, deaf=True)
    guardian.main([str(tmp_path)])
    (_, first), (when, second) = machine.done
    assert (first, second) == ("SIGTERM", "SIGKILL")
    assert guardian.GRACE <= when < guardian.GRACE + 2 * guardian.GLANCE
    assert not tmp_path.exists()
