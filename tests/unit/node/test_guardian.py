"""entrypoint/node/guardian.py: what is done about processes that a killed launcher has left, on a clock that never waits."""

import io
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.node import guardian


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
