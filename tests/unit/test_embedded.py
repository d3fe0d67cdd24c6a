"""The embedded scheduler: what it says before its nodes start and after they end; tests/embedded has its jobs."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint import checkout, embedded

CHECKOUT = Path(__file__).resolve().parents[2]
BOUND = 30  # s
OURS = """
import sys
from entrypoint import embedded
from entrypoint.job.outcome import Outcome
embedded._Nodes._attempt = lambda self, attempt: (Outcome(status=0), attempt)
sys.exit(embedded.main(sys.argv[1:]))
"""
"""With nodes that end at once."""
NEXT = f"apptrain: next: {CHECKOUT}/apptrain run -- my_script.py"
NO_CMD = "apptrain: no CMD given: trains the reference job, as apptrain demo; your own: apptrain run -- my_script.py"


def said(folder: Path, *arguments: str, status: int = 0, **env: str) -> list[str]:
    """By `apptrain run` in this folder, whose nodes end with this status."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", OURS.replace("status=0", f"status={status}"), *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    return done.stderr.splitlines()


def started(folder: Path) -> list[str]:
    return [
        f"apptrain: 2 nodes on this machine, run directory {folder}/run",
        f"apptrain: to follow it from elsewhere: tail -f {folder}/run/job.log",
    ]


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        ((), [NO_CMD], [NEXT]),
        (("--",), [NO_CMD], [NEXT]),
        (("--", "my_script.py"), [], []),
        (("--", "-m", "train", "--config", "digits", "steps=2"), [], [NEXT]),
        (("--doctor",), [], []),
    ],
)
def test_the_reference_job_is_named_where_nobody_said_what_to_run_and_the_next_step_behind_it(
    arguments: tuple[str, ...], first: list[str], last: list[str], tmp_path: Path
) -> None:
    (tmp_path / "my_script.py").touch()
    assert said(tmp_path, "--run-dir", "run", *arguments) == [*first, *started(tmp_path), *last]


class Task:
    """A process that ends when it has been asked `polls` times, or is killed."""

    def __init__(self, polls: int) -> None:
        self.polls, self.killed = polls, False

    def poll(self) -> int | None:
        self.polls -= 1
        return -9 if self.killed else 0 if self.polls < 0 else None

    def kill(self) -> None:
        self.killed = True


class Clock:
    """One that never waits."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("signals", "killed"), [([], False), ([15], True)])
def test_tasks_are_killed_only_after_a_signal_and_the_time_that_their_ranks_may_save(
    signals: list[int], killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(embedded, "time", clock)
    task, ended = Task(polls=1000), list[tuple[Path, object]]()
    nodes: Any = SimpleNamespace(tasks=[task], signals=signals, _complete=lambda *what: ended.append(what))
    embedded._Nodes._wait(nodes, [Path("0.0")])
    assert (task.killed, ended) == (killed, [(Path("0.0"), task)])
    assert clock.now == pytest.approx(embedded.KILL_AFTER if killed else 50.0, abs=0.2)


def test_after_a_failure_no_next_step_is_named(tmp_path: Path) -> None:
    ended = ["apptrain: the job ended with status 3: "]
    assert said(tmp_path, "--run-dir", "run", status=3) == [NO_CMD, *started(tmp_path), *ended]


def test_the_next_step_is_spelled_as_it_works_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(CHECKOUT)
    assert checkout.apptrain() == "./apptrain"
    (tmp_path / "apptrain").symlink_to(CHECKOUT / "apptrain")
    assert checkout.apptrain() == "apptrain"
