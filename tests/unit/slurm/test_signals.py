"""The job script for Slurm: warnings, cancellations, requeues."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.slurm.cluster import BOUND, Cluster, said, until


@pytest.fixture
def waiting(cluster: Cluster) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a job whose tasks wait for the stop file, and returns once they run."""
    started = []

    def start(*arguments: str, **how: Any) -> "subprocess.Popen[str]":
        tasks = {node: {"wait": "stop", "status": 75} for node in "01"}
        process = cluster.start(*arguments, tasks=tasks, **how)
        started.append(process)
        until(lambda: len(list(cluster.run_dir.glob("began.*"))) == 2, "the tasks did not start")
        return process

    yield start
    for process in started:
        with process:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_the_next_job_script_learns_of_an_attempt_whose_own_was_lost(
    cluster: Cluster, waiting: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = waiting("--on-failure=restart")
    assert (cluster.run_dir / "unfinished").read_text() == "0\n"
    (cluster.run_dir / "stop").touch()
    process.communicate(timeout=BOUND)
    assert not (cluster.run_dir / "unfinished").exists()


@pytest.mark.parametrize("warning", [signal.SIGUSR2, signal.SIGUSR1, None])
def test_the_warning_becomes_the_stop_file(
    cluster: Cluster, waiting: Callable[..., "subprocess.Popen[str]"], warning: "signal.Signals | None"
) -> None:
    """None: it comes before the tasks start."""
    if warning is None:
        process = waiting(FAKE_WARNED="1")
    else:
        process = waiting()
        process.send_signal(signal.SIGCONT)
        process.send_signal(warning)
    _, err = process.communicate(timeout=BOUND)
    assert (process.returncode, cluster.scontrol()) == (75, ["requeue 7"])
    assert err.splitlines() == [
        "apptrain: warned of the end: asking the ranks to save and stop",
        "apptrain: saved at a planned end",
    ]


@pytest.mark.parametrize(
    ("policy", "end", "told"),
    [
        ("requeue", "2026-11-21T10:00:00", "end=1795255200"),
        ("requeue", "N/A", ""),
        ("stop", "2026-11-21T10:00:00", ""),
    ],
)
def test_where_the_job_may_run_again_the_stop_file_says_when_it_ends(
    cluster: Cluster, waiting: Callable[..., "subprocess.Popen[str]"], policy: str, end: str, told: str
) -> None:
    process = waiting(f"--on-failure={policy}", FAKE_END=end, TZ="UTC")
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=BOUND)
    assert (cluster.run_dir / "stop").read_text() == told
    assert cluster.scontrol() == ["requeue 7"]


def test_a_stop_of_an_earlier_attempt_is_forgotten(cluster: Cluster) -> None:
    cluster.run_dir.mkdir(parents=True)
    (cluster.run_dir / "stop").touch()
    assert cluster.run().returncode == 0
    assert not (cluster.run_dir / "stop").exists()


def test_a_cancelled_job_waits_for_its_tasks_and_is_not_requeued(
    cluster: Cluster, waiting: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = waiting()
    process.send_signal(signal.SIGTERM)  # Slurm sends the tasks theirs; here they go on until told
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    (cluster.run_dir / "stop").touch()
    _, err = process.communicate(timeout=BOUND)
    assert (process.returncode, cluster.scontrol()) == (143, [])
    assert err == (
        "apptrain: ended by a signal (status 143), not run again by this script; "
        f"to go on: the same line again with APPTRAIN_RUN_DIR={cluster.run_dir}\n"
    )


@pytest.mark.parametrize(
    ("count", "at_first", "in_the_end", "again"),
    [
        (None, 0, 0, False),
        ("2", 0, 1, True),  # the count is that of a job from which this one was submitted
    ],
)
def test_who_is_ended_by_slurms_own_requeue_is_not_told_to_submit_again(
    cluster: Cluster,
    waiting: Callable[..., "subprocess.Popen[str]"],
    count: str | None,
    at_first: int,
    in_the_end: int,
    again: bool,
) -> None:
    job = cluster.folder / "job"
    told = "JobId=7 JobState=COMPLETING Requeue=1 Restarts={} BatchFlag=1"
    job.write_text(told.format(at_first))
    process = waiting(FAKE_JOB=f"@{job}", SLURM_RESTART_COUNT=count)
    job.write_text(told.format(in_the_end))
    process.send_signal(signal.SIGTERM)
    (cluster.run_dir / "stop").touch()
    out, err = process.communicate(timeout=BOUND)
    assert (process.returncode, cluster.scontrol()) == (143, [])
    line = "apptrain: ended by a signal (status 143): slurm runs the job again, and it goes on there"
    assert (out.splitlines()[-1] == line, "to go on: the same line again" in err) == (again, not again)


def test_a_requeue_that_slurm_has_begun_itself_is_one(cluster: Cluster) -> None:
    job = "JobId=7 JobState=COMPLETING Restarts=1 PreemptTime=2026-11-21T10:00:00 "
    terminated = {"0": {"status": 143, "node": "a", "error": "ended by SIGTERM"}}
    ended = cluster.run(tasks=terminated, FAKE_JOB=job, FAKE_REQUEUE="Job is pending execution for job 7")
    assert said(ended) == ["preempted: a: ended by SIGTERM"]
    assert ended.stdout.splitlines()[-1] == "apptrain: the job will run again, and go on there"


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_inside_an_allocation_signals_end_the_step(
    cluster: Cluster, waiting: Callable[..., "subprocess.Popen[str]"], signum: signal.Signals, status: int
) -> None:
    process = waiting(batch=False)
    process.send_signal(signum)
    process.communicate(timeout=BOUND)
    assert process.returncode == status
    assert (cluster.run_dir / "outcome" / "0.1").read_text().startswith("status=130\n")
