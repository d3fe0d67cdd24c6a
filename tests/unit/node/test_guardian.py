"""entrypoint/node/guardian.py: what is done about processes that a killed launcher has left, on a clock that never waits."""

import io
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.node import guardian, processes


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


def run(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO("".join(f"{line}\n" for line in lines).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    guardian.main()


def test_a_launcher_that_ended_itself_is_not_cleaned_up_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, after=0.0)
    run(monkeypatch, str(tmp_path), guardian.DONE)
    assert (machine.done, tmp_path.exists()) == ([], True)


def test_what_ends_the_launcher_does_not_end_the_guardian(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, after=0.0)
    stdin = SimpleNamespace(buffer=io.BytesIO(f"{guardian.DONE}\n".encode()))
    heeded: dict[int, Any] = {}
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(signal, "signal", heeded.__setitem__)
    guardian.main()
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    assert heeded == {getattr(signal, name): signal.SIG_IGN for name in names}


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


def test_a_guardian_is_one_process_that_ends_when_it_is_dismissed(tmp_path: Path) -> None:
    one = guardian.Guardian()
    (pid,) = one.pids
    assert processes.is_running(pid)
    one.watch(tmp_path)
    one.dismiss()
    assert not processes.is_running(pid)
    assert tmp_path.exists()


def test_what_ends_at_sigterm_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, after=1.0)
    run(monkeypatch, str(tmp_path))
    assert machine.done == [(0.0, "SIGTERM")]
    assert 1.0 <= machine.now < 1.0 + 2 * guardian.GLANCE
    assert not tmp_path.exists()


def test_what_does_not_is_killed_after_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, after=0.0, deaf=True)
    run(monkeypatch, str(tmp_path))
    (_, first), (when, second) = machine.done
    assert (first, second) == ("SIGTERM", "SIGKILL")
    assert guardian.GRACE <= when < guardian.GRACE + 2 * guardian.GLANCE
    assert not tmp_path.exists()
