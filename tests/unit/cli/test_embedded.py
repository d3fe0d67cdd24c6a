"""The embedded scheduler: what it says before its nodes start and after they end; tests/embedded has its jobs."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.cli import embedded
from entrypoint.core import checkout

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 30  # s
OURS = """
import sys
from entrypoint.cli import embedded
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
    """A process that ends with this status when it has been asked `polls` times, or is killed."""

    def __init__(self, polls: int, status: int = 0, state: str = "S") -> None:
        self.polls, self.status, self.state = polls, status, state
        self.pid = id(self)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.polls -= 1
        if self.returncode is None and self.polls < 0:
            self.returncode = self.status
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9

    def wait(self, seconds: float) -> None:
        assert (self.returncode, seconds) == (-9, embedded.TO_DIE)


class Clock:
    """One that never waits."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


NEVER = 10**9
LOST = "the launch of 127.0.0.1 (process {}) "


@pytest.mark.parametrize(
    ("tasks", "signals", "may_restart", "seconds", "why"),
    [
        ([Task(6000)], [], False, 300, ""),
        ([Task(6000), Task(6000)], [], False, 300, ""),
        ([Task(NEVER)], [15], False, 35, "did not end with the job"),
        ([Task(NEVER), Task(20, status=1)], [], False, 206, "did not end with the job"),
        ([Task(6000), Task(20, status=1)], [], True, 300, ""),
        ([Task(NEVER), Task(20)], [], True, 206, "did not end with the job"),
        ([Task(NEVER, state="T"), Task(20, status=1)], [], True, 11, "was stopped by a signal"),
        ([Task(NEVER, state="T")], [2], False, 10, "was stopped by a signal"),
        ([Task(6000, state="T")], [], False, 300, ""),
    ],
    ids=[
        "one",
        "two",
        "signal",
        "failure",
        "restart",
        "restart-done",
        "stopped",
        "stopped-signal",
        "all-stopped",
    ],
)
def test_tasks_are_killed_that_do_not_end_with_the_job(
    tasks: list[Task],
    signals: list[int],
    may_restart: bool,
    seconds: float,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    clock, lines = Clock(), list[str]()
    monkeypatch.setattr(embedded, "time", clock)
    states = {task.pid: task.state for task in tasks}
    monkeypatch.setattr("entrypoint.node.processes.state", states.__getitem__)
    job = embedded.LocalJob(
        nodes=2,
        tasks_per_node=1,
        gpus_per_node=None,
        run_dir=tmp_path,
        job_id="1",
        launch=(),
        may_restart=may_restart,
    )
    nodes: Any = embedded._Nodes(job)
    nodes.tasks, nodes.signals, nodes._say = tasks, signals, lines.append
    nodes._wait([tmp_path / f"outcome/0.{index}" for index in range(len(tasks))])
    killed = LOST.format(tasks[0].pid) + f"{why}, and was killed"
    assert lines == ([killed] if why else [])
    assert clock.now == pytest.approx(seconds, abs=1)
    assert (nodes.ended["0"].status, nodes.ended["0"].error) == ((1, killed) if why else (0, ""))


def test_a_task_that_could_say_nothing_is_named_with_what_ended_it() -> None:
    told = [embedded._of_task("the launch of 127.0.0.1", code) for code in (-9, 3, 0)]
    assert [(ended.status, ended.error) for ended in told] == [
        (137, "the launch of 127.0.0.1 was killed by SIGKILL"),
        (3, "the launch of 127.0.0.1 ended with status 3"),
        (0, ""),
    ]


def test_after_a_failure_no_next_step_is_named(tmp_path: Path) -> None:
    ended = ["apptrain: the job ended with status 3"]
    assert said(tmp_path, "--run-dir", "run", status=3) == [NO_CMD, *started(tmp_path), *ended]


def test_the_next_step_is_spelled_as_it_works_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(CHECKOUT)
    assert checkout.apptrain() == "./apptrain"
    (tmp_path / "apptrain").symlink_to(CHECKOUT / "apptrain")
    assert checkout.apptrain() == "apptrain"


def test_each_node_gets_gpus_of_its_own(tmp_path: Path) -> None:
    job = embedded.LocalJob(
        nodes=2, tasks_per_node=1, gpus_per_node=2, run_dir=tmp_path, job_id="embedded-1", launch=()
    )
    envs = [embedded.node_env(job, node, 0, 0, {}, progress=False) for node in (0, 1)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["0,1", "2,3"]


def test_a_signal_reaches_the_tasks_that_run() -> None:
    got: dict[str, list[int]] = {"runs": [], "has ended": []}
    tasks = [
        SimpleNamespace(poll=lambda: None, send_signal=got["runs"].append),
        SimpleNamespace(poll=lambda: 0, send_signal=got["has ended"].append),
    ]
    nodes: Any = SimpleNamespace(tasks=tasks)
    embedded._Nodes._pass_on(nodes, 15)
    assert got == {"runs": [15], "has ended": []}
