"""Two jobs on one run directory: the second is refused, and the first never knows."""

import os
import signal
import time
from pathlib import Path

from entrypoint.job import lock
from tests.embedded.jobs import Job, gone, start
from tests.embedded.test_launch import SHELL
from tests.embedded.test_output import launch

WAITS = 'touch "$APPTRAIN_RUN_DIR/begun.$RANK"; until [[ -e $APPTRAIN_RUN_DIR/go ]]; do sleep 0.05; done'


def folder(tmp_path: Path, name: str) -> Path:
    """Where a job's own output goes; its run directory is that of all."""
    path = tmp_path / name
    path.mkdir()
    if name != "first":
        (path / "run").symlink_to(tmp_path / "first" / "run")
    return path


def begin(tmp_path: Path, name: str) -> Job:
    return start(folder(tmp_path, name), *SHELL, WAITS)


def test_a_second_job_on_a_run_directory_is_refused_at_once_and_the_first_is_not_disturbed(
    tmp_path: Path,
) -> None:
    first = begin(tmp_path, "first")
    run = first.run
    first.until(lambda: (run / "begun.1").exists(), "the ranks of the first job")
    (run / "stop").touch()
    second, third = (
        begin(tmp_path, "second"),
        launch(folder(tmp_path, "third"), "--mode", "exec", *SHELL[2:], "true"),
    )
    for job in (second, third):
        ended = job.end()
        assert (ended.status, ended.out) == (64, "")
        (line,) = ended.err.splitlines()
        assert line.startswith(f"apptrain: the run directory {job.run} is in use by job 20"), line
        assert line.endswith("): wait for its end, or give --run-dir another")
        assert str(first.process.pid) in line.split(" (process ")[0]
    assert (run / "stop").exists()
    (run / "go").touch()
    assert first.end().status == 0
    assert not (run / "lock").exists()
    assert sorted(path.name for path in (run / "outcome").iterdir()) == ["0.0.0", "0.1.0"]


def test_a_job_that_was_killed_leaves_its_run_directory_to_the_next(tmp_path: Path) -> None:
    first = begin(tmp_path, "first")
    run = first.run
    first.until(lambda: (run / "begun.1").exists(), "the ranks of the first job")
    assert (run / "lock").exists()
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert gone(str(run), 60)  # its nodes, which end by themselves
    begun = time.monotonic()
    (run / "go").touch()
    second = begin(tmp_path, "second").end()
    assert second.status == 0, second.err
    assert time.monotonic() - begun < lock.LEASE
    assert (run / "outcome" / "1.0.0").exists()
