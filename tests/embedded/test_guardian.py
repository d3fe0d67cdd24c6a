"""A launcher that is killed leaves nothing behind, and no test leaves a launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.embedded.jobs import Job, clean_env, give_up_all, gone, processes_with, start
from tests.embedded.test_output import launch

STRAYS = """
trap '' TERM
setsid /bin/sh -c 'trap "" TERM; cd /; touch "$APPTRAIN_RUN_DIR/stray"; while :; do sleep 0.1; done' &
touch "$APPTRAIN_RUN_DIR/begun"
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize("mode", ["exec", "torchrun"])
def test_what_ignores_sigterm_or_has_a_session_of_its_own_ends_with_a_killed_launcher(
    tmp_path: Path, mode: str
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary), "APPTRAIN_DEVICE": "cpu"}
    job = launch(tmp_path, "--mode", mode, "--no-python", "--", "/bin/sh", "-c", STRAYS, env=env)
    try:
        job.until(
            lambda: all((job.run / name).exists() for name in ("begun", "stray")), "the rank and its child"
        )
        assert list(temporary.iterdir())
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        assert gone(str(job.run), 15)
        deadline = time.monotonic() + 5
        while (left := list(temporary.glob("apptrain-*"))) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []
    finally:
        for pid in processes_with(str(job.run)):
            os.kill(pid, signal.SIGKILL)


def launches(job: Job) -> list[int]:
    """The launchers of a job's nodes, in their order."""
    below = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    named = {Path("/proc", pid, "environ").read_bytes(): int(pid) for pid in below}
    return [
        next(pid for held, pid in named.items() if f"NODENAME=127.0.0.{node}\0".encode() in held)
        for node in (1, 2)
    ]


RANK = (
    "--mode",
    "rank",
    "--peer-timeout",
    "4",
    "--no-python",
    "--",
    "/bin/sh",
    "-c",
    STRAYS.replace("begun", "$RANK"),
)


@pytest.mark.parametrize(
    ("signum", "node", "status", "said"),
    [
        (signal.SIGKILL, 0, 137, "the launch of 127.0.0.1, task 0 was killed by SIGKILL"),
        (signal.SIGKILL, 1, 1, ""),
        (
            signal.SIGSTOP,
            0,
            1,
            "the launch of 127.0.0.1, task 0 (process {}) was stopped by a signal, and was killed",
        ),
        (signal.SIGSTOP, 1, 1, ""),
    ],
)
def test_a_job_ends_with_a_launcher_that_is_killed_or_stopped_and_leaves_nothing(
    tmp_path: Path, signum: int, node: int, status: int, said: str
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    job = start(tmp_path, *RANK, env={"TMPDIR": str(temporary), "APPTRAIN_DEVICE": "cpu"}, stopped=1)
    job.until(lambda: all((job.run / name).exists() for name in ("0", "1", "stray")), "the ranks")
    pid = launches(job)[node]
    os.kill(pid, signum)
    ended = job.end()
    assert ended.status == status, ended.err
    last = f"apptrain: the job ended with status {status}"
    assert ended.err.splitlines()[-1] == last + (f": {said.format(pid)}" if said else "")
    assert (f"(process {pid}) was stopped" in ended.err) == (signum == signal.SIGSTOP)
    assert gone(str(job.run))
    assert list(temporary.iterdir()) == []


def test_torchruns_agent_leaves_no_folder(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary), "APPTRAIN_DEVICE": "cpu"}
    job = start(tmp_path, "--nodes", "1", "--no-python", "--", "/bin/true", env=env)
    assert job.end().status == 0
    assert list(temporary.glob("torchelastic_*")) == list(temporary.glob("apptrain-*")) == []


def test_a_launch_that_ends_well_leaves_no_guardian(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path), "APPTRAIN_DEVICE": "cpu"}
    waits = f"touch {tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    job = launch(tmp_path, "--mode", "exec", "--no-python", "--", "/bin/sh", "-c", waits, env=env)
    job.until((tmp_path / "begun").exists, "the rank")
    (guardian,) = guardians(job.process.pid)
    (tmp_path / "go").touch()
    assert job.end().status == 0
    assert not Path("/proc", guardian).exists()


def test_a_job_that_a_failed_test_leaves_running_is_ended(tmp_path: Path) -> None:
    job = Job([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, tmp_path, clean_env())
    with pytest.raises(AssertionError, match=r"waited 0\.1 s for a file"):
        job.until(lambda: False, "a file", 0.1)
    give_up_all()
    assert job.process.returncode == -signal.SIGTERM


def guardians(launcher: int) -> list[str]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [pid for pid in children if b"guardian.py" in Path("/proc", pid, "cmdline").read_bytes()]


def test_a_guardian_that_is_killed_is_not_complained_of() -> None:
    """As by a scheduler that ends every process of a job at once. From Python 3.13 on it is also without -X dev."""
    script = """
import os, signal, sys
from pathlib import Path
from entrypoint.node.guardian import Guardian
guardian = Guardian()
(pid,) = guardian.pids
os.kill(pid, signal.SIGKILL)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
guardian.watch(Path("/nowhere"))
guardian.dismiss()
"""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-P", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stderr == ""
