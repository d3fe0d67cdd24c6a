"""The job script for Slurm: what follows where the image does not decide, and after a node is lost."""

import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.embedded import disks
from tests.unit.bounds import shorten
from tests.unit.slurm.cluster import BOUND, Cluster, Tasks, failed, said, until


def test_an_image_that_does_not_start_is_said_once_and_nothing_is_requeued(cluster: Cluster) -> None:
    ended = cluster.run("--on-failure=requeue", FAKE_IMAGE="prepare")
    image = cluster.checkout / "containers" / "image.sif"
    error = f"the image {image} does not start on {os.uname().nodename} (status 255): FATAL: no such image"
    assert (ended.returncode, ended.stdout, said(ended)) == (255, "", [error])
    assert (cluster.calls(), cluster.scontrol(), cluster.run_dir.exists()) == ([], [], False)


def test_an_image_of_before_is_told_by_what_it_lacks(cluster: Cluster) -> None:
    program = cluster.checkout / "containers" / "run.sh"
    program.write_text(
        "#!/bin/sh\necho \"apptrain: argument COMMAND: invalid choice: 'prepare' (choose)\" >&2; exit 64\n"
    )
    assert cluster.refused() == (
        f"the image {cluster.checkout}/containers/image.sif is of another version than the checkout "
        f"{cluster.checkout}: make image"
    )


PLANNED: Tasks = {node: {"status": 75, "asked": True} for node in "01"}


def test_a_planned_end_is_requeued_though_the_image_is_gone(cluster: Cluster) -> None:
    ended = cluster.run(tasks=PLANNED, FAKE_IMAGE="conclude")
    assert (ended.returncode, cluster.scontrol()) == (1, ["requeue 7"])
    assert said(ended) == ["the image does not say what follows (FATAL: no such image): ended with status 0"]
    inside = cluster.run(batch=False, tasks=PLANNED, FAKE_IMAGE="conclude")
    assert said(inside)[-1] == f"to go on: the same line again with APPTRAIN_RUN_DIR={cluster.run_dir}"
    assert ended.stdout.splitlines()[-1] == "apptrain: the job will run again, and go on there"


def test_any_other_end_is_the_end_where_the_image_is_gone(cluster: Cluster) -> None:
    for tasks, status in (({"1": failed("1.000000")}, 7), ({node: {"status": 75} for node in "01"}, 1)):
        ended = cluster.run("--on-failure=requeue", tasks=tasks, FAKE_IMAGE="conclude")
        assert (ended.returncode, cluster.scontrol()) == (status, [])
        assert said(ended)[0].startswith("the image does not say what follows (FATAL: no such image): ")


@pytest.mark.parametrize(("what", "status"), [("prepare", 137), ("conclude", 1)])
def test_a_prepare_or_a_conclude_that_is_killed_is_one_line_and_no_loop(
    cluster: Cluster, what: str, status: int
) -> None:
    program = cluster.checkout / "containers" / "run.sh"
    program.rename(program.with_name("real.sh"))
    program.write_text(
        f'#!/bin/bash\nif [[ " $* " == *" {what} "* ]]; then kill -KILL $$; fi\nexec "${{0%/*}}/real.sh" "$@"\n'
    )
    program.chmod(0o755)
    ended = cluster.run(tasks=PLANNED)
    assert (ended.returncode, len(said(ended))) == (status, 1)
    assert cluster.scontrol() == (["requeue 7"] if what == "conclude" else [])
    assert len(cluster.calls()) == (what == "conclude")


@disks.marked
@pytest.mark.parametrize("when", ["before", "while it runs"])
def test_a_full_disk_under_what_the_halves_tell_each_other_loses_no_planned_end(
    cluster: Cluster, when: str
) -> None:
    disk = disks.Disk(cluster.folder / "disk", "64k")
    try:
        script = ["bash", "-c", 'SLURM_TASK_PID=$$ exec bash "$@"', "bash", str(cluster.spool)]
        env = {
            **cluster.env,
            "TMPDIR": f"{cluster.folder}/disk",
            "FAKE_TASKS": repr(PLANNED),
            "FAKE_IMAGE": "",
        }
        if when == "before":
            disk.fill()
        else:
            filler = f"head -c 1000000 /dev/zero >{cluster.folder}/disk/filler 2>/dev/null; exec {cluster.folder}/srun"
            (cluster.folder / "bin/srun").rename(cluster.folder / "srun")
            (cluster.folder / "bin/srun").write_text(f'#!/bin/sh\n{filler} "$@"\n')
            (cluster.folder / "bin/srun").chmod(0o755)
        ended = subprocess.run(
            [*disk.prefix, *script],
            env=env,
            cwd=cluster.submit_dir,
            capture_output=True,
            text=True,
            timeout=BOUND,
        )
    finally:
        disk.close()
    if when == "before":
        assert (ended.returncode, cluster.calls(), cluster.scontrol()) == (64, [], [])
        assert len(said(ended)) == 1
        assert "TMPDIR" in said(ended)[0]
    else:
        assert (ended.returncode, cluster.scontrol()) == (1, ["requeue 7"])
        assert said(ended)[0].startswith("the image does not say what follows (")
        assert not (cluster.run_dir / "unfinished").exists(), "it was said here"


@pytest.mark.parametrize("options", [["--dry-run"], ["--profile=none.yaml"]])
def test_a_job_script_that_begins_nothing_leaves_what_another_has_begun(
    cluster: Cluster, options: list[str]
) -> None:
    cluster.run_dir.mkdir(parents=True)
    (cluster.run_dir / "unfinished").write_text("0\n")
    (cluster.run_dir / "logs/0").mkdir(parents=True)
    cluster.run(*options)
    assert (cluster.run_dir / "unfinished").read_text() == "0\n"


@pytest.mark.parametrize("broken", ["", "conclude"])
def test_what_another_job_has_begun_meanwhile_stays_when_this_one_ends(cluster: Cluster, broken: str) -> None:
    tasks = {"0": {"another": 1}, "1": {"another": 1}}
    ended = cluster.run(tasks=tasks, FAKE_IMAGE=broken)
    assert ended.returncode == int(bool(broken)), ended.stderr
    assert (cluster.run_dir / "unfinished").read_text() == "1\n"


def test_a_run_that_came_to_its_end_without_its_job_script_is_only_concluded(cluster: Cluster) -> None:
    outcomes = cluster.run_dir / "outcome"
    outcomes.mkdir(parents=True)
    (outcomes / "0.nodes").write_text("0 a\n1 b\n")
    (outcomes / "1.nodes").write_text("1 b\n")
    (outcomes / "1.1").write_text("status=0\n")
    (cluster.run_dir / "unfinished").write_text("0\n")
    ended = cluster.run("--on-failure=restart")
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, f"apptrain: done: {cluster.run_dir}")
    assert cluster.calls() == []


@pytest.fixture
def closed_port() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        yield str(taken.getsockname()[1])


LEFT = "JobId=7 JobState=RUNNING Requeue=1 BatchHost=a NodeList=b,c "


@pytest.mark.parametrize(
    ("job", "does"),
    [
        (LEFT, ["requeue 7"]),
        (LEFT.replace("Requeue=1", "Requeue=0"), ["cancel 7"]),
        (LEFT.replace("RUNNING", "COMPLETING"), []),
    ],
)
def test_the_tasks_that_are_left_have_a_job_run_again_whose_script_is_lost_with_its_node(
    cluster: Cluster, closed_port: str, job: str, does: list[str]
) -> None:
    assert survived(cluster, closed_port, FAKE_JOB=job) == (5, does)
    element = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    alone = [f"{word}_3" for word in does]
    assert survived(cluster, closed_port, FAKE_JOB=job, **element) == (5, [*does, *alone])


def test_they_wait_until_slurm_knows_that_the_node_is_lost(cluster: Cluster, closed_port: str) -> None:
    job = cluster.folder / "job"

    job.write_text("")  # slurmctld does not answer
    with surviving(cluster, closed_port, FAKE_JOB=f"@{job}") as process:
        until(lambda: cluster.questions() >= 2, "it asks a second time")
        job.write_text(LEFT.replace("NodeList=b", "NodeList=a,b"))
        until(lambda: cluster.questions() >= 4, "it goes on to ask")
        job.write_text(LEFT)
        assert process.wait(BOUND) == 5
    assert cluster.scontrol()[-1] == "requeue 7"


def test_where_the_job_script_is_there_they_only_end(cluster: Cluster, closed_port: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as srun:
        assert survived(cluster, str(srun.getsockname()[1]), FAKE_JOB=LEFT) == (5, [])
    says = "printf 'first=ended\\0' >\"$APPTRAIN_HAND/over\"; exit 5"
    assert survived(cluster, closed_port, "bash", "-c", says, FAKE_JOB=LEFT) == (5, [])


def test_signals_pass_through_to_the_task(cluster: Cluster, closed_port: str) -> None:
    lives = "for i in {1..1200}; do sleep 0.05; done"
    command = ("bash", "-c", f"trap 'exit 3' TERM; touch {cluster.folder}/up; {lives}")
    with surviving(cluster, closed_port, *command, FAKE_JOB=LEFT.replace("RUNNING", "COMPLETING")) as process:
        until((cluster.folder / "up").exists, "the task is up")
        process.terminate()
        assert process.wait(BOUND) == 3


def surviving(cluster: Cluster, port: str, *command: str, **env: str) -> "subprocess.Popen[bytes]":
    """A task on another node than the first."""
    (cluster.folder / "bin" / "scancel").write_text(
        f'#!/bin/sh\necho "cancel $*" >>{cluster.folder}/scontrol\n'
    )
    (cluster.folder / "bin" / "scancel").chmod(0o755)
    given = {"SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURM_SRUN_COMM_PORT": port}
    script = cluster.checkout / "slurm" / "survivor.sh"
    shorten(script, POLL=0.05)
    return subprocess.Popen(
        ["bash", script, *(command or ("bash", "-c", "exit 5"))],
        env={**cluster.env, **given, **env},
    )


def survived(cluster: Cluster, port: str, *command: str, **env: str) -> tuple[int, list[str]]:
    """(its status, what it has Slurm do)."""
    with surviving(cluster, port, *command, **env) as process:
        status = process.wait(BOUND)
    return status, cluster.scontrol()
