"""pbs/task.sh alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.pbs.site import BOUND, CHECKOUT, Site, task


def prepared(folder: Path) -> Path:
    run = folder / "run"
    for name in ("tasks", "outcome", "logs/0"):
        (run / name).mkdir(parents=True)
    (run / "tasks/0.env").write_text("A=b\0")
    (run / "tasks/0.argv").write_text(f"{folder}\0true\0")
    return run


def test_a_task_that_does_not_see_the_run_directory_says_so(tmp_path: Path) -> None:
    error = f"the run directory {tmp_path}/run is not there on this node: give one that all nodes share in APPTRAIN_RUN_DIR"
    found = task(tmp_path, "pbsdsh", "1", "pbsn2")
    assert found == (64, f"apptrain: {os.uname().nodename}: {error}\n", [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a directory of another user's")
def test_a_run_directory_that_another_user_has_put_there_is_not_believed(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    run.chmod(0o755)
    os.chown(run, 65534, 65534)
    error = (
        f"the run directory {run} is not yours, and open to others: give one of your own in APPTRAIN_RUN_DIR"
    )
    found = task(tmp_path, "pbsdsh", "1", "pbsn2")
    assert found == (64, f"apptrain: {os.uname().nodename}: {error}\n", [])


def test_a_task_of_one_command_for_all_that_finds_no_place_is_refused(tmp_path: Path) -> None:
    prepared(tmp_path)
    here = os.uname().nodename
    error = "mpiexec tells no rank of one of far1 far2"
    assert task(tmp_path, "mpiexec", "-", "far1", "far2") == (64, f"apptrain: {here}: {error}\n", [])
    assert task(tmp_path, "mpiexec", "-", "far1", "far2", PMI_RANK="2") == (
        64,
        f"apptrain: {here}: {error}\n",
        [],
    )


def test_a_host_without_room_for_temporary_files_is_refused(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mktemp").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/mktemp").chmod(0o755)
    status, _, outcome = task(tmp_path, "ssh", "0", "a", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    error = "no temporary directory can be made: set TMPDIR to a directory of this node"
    assert status == 64
    assert outcome == ["status=64", "rank=", "node=a", "signal=0", f"error={error}"]
    assert (run / "logs/0/a.task.log").read_text() == f"apptrain: {os.uname().nodename}: {error}\n"


def seen_by_cmd(folder: Path, *arguments: str, **env: str) -> tuple[int, dict[str, str]]:
    """(the task's status, the environment that CMD had), where CMD ends with 5."""
    run = prepared(folder)
    job = {
        "A": "b",
        "PBS_X": "job",
        "NCPUS": "4",
        "HOME": "/job",
        "OMP_NUM_THREADS": "9",
        "APPTRAIN_BIND": "/job",
    }
    (run / "tasks/0.env").write_text("".join(f"{name}={value}\0" for name, value in job.items()))
    (run / "tasks/0.argv").write_text(f"{folder}\0sh\0-c\0env -0 >seen; exit 5\0")
    (folder / "pbs").mkdir()
    (folder / "pbs/keep.sh").write_text('shift\nexec "$@"\n')
    status = task(folder, *arguments, **env)[0]
    pairs = (folder / "seen").read_text().split("\0")
    return status, dict(pair.split("=", 1) for pair in pairs if pair)


@pytest.mark.parametrize(
    ("ranks", "rank"),
    [
        ({"PMI_RANK": "1"}, "1"),
        ({"PMI_RANK": "0", "PMIX_RANK": "1"}, "1"),
        ({"PMI_RANK": "0", "PMIX_RANK": "0", "PALS_RANKID": "1"}, "1"),
        ({"PMIX_RANK": "1", "PALS_RANKID": "1", "OMPI_COMM_WORLD_RANK": "0"}, "0"),
    ],
)
def test_a_task_of_one_command_for_all_is_that_of_the_rank_that_it_was_given(
    ranks: dict[str, str], rank: str, tmp_path: Path
) -> None:
    """Its status is not mpiexec's, which would end the others."""
    status, seen = seen_by_cmd(tmp_path, "mpiexec", "-", "far1", "far2", **ranks)
    assert (status, seen["APPTRAIN_PLACE"], seen["APPTRAIN_NODE_RANK"]) == (0, rank, rank)
    assert "PBS_NODENUM" not in seen
    host, pid, boot = (tmp_path / f"run/tasks/0.{rank}").read_text().split()
    assert host == os.uname().nodename
    assert pid.isdecimal()
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (tmp_path / f"run/logs/0/far{int(rank) + 1}.task.log").exists()


def test_a_task_has_the_scripts_variables_and_what_pbs_set_on_its_own_host(tmp_path: Path) -> None:
    own = {"PBS_NODENUM": "1", "PBS_JOBID": "7.srv", "PBS_X": "own", "NCPUS": "2", "HOME": "/own"}
    status, seen = seen_by_cmd(
        tmp_path, "pbsdsh", "1", "pbsn2", APPTRAIN_BIND="/own", APPTRAIN_ARGS="x", **own
    )
    assert status == 5
    names = (
        "A",
        "PBS_X",
        "NCPUS",
        "HOME",
        "OMP_NUM_THREADS",
        "APPTRAIN_BIND",
        "PBS_NODENUM",
        "APPTRAIN_HOSTNAME",
    )
    assert {name: seen.get(name) for name in names} == {
        "A": "b",
        "PBS_X": "own",
        "NCPUS": "2",
        "HOME": "/own",
        "OMP_NUM_THREADS": "9",
        "APPTRAIN_BIND": "/job",
        "PBS_NODENUM": "1",
        "APPTRAIN_HOSTNAME": "pbsn2",
    }
    assert not {"APPTRAIN_ARGS", "APPTRAIN_PLACE", "APPTRAIN_NODE_RANK"} & seen.keys()
    assert not Path(seen["TMPDIR"]).exists()


def test_a_task_that_pbs_has_started_on_another_host_is_refused(tmp_path: Path) -> None:
    prepared(tmp_path)
    status, _, lines = task(tmp_path, "pbsdsh", "1", "pbsn2", PBS_NODENUM="0")
    assert status == 64
    assert lines[-1] == (
        f"error=the task for pbsn2, host 1 of this job, runs as host 0 on {os.uname().nodename}: "
        "the node file has changed since the job began"
    )


@pytest.fixture
def slow_shell(tmp_path: Path) -> str:
    """A file for BASH_ENV: every command of a script comes later than whatever it started in the background."""
    file = tmp_path / "slow.sh"
    file.write_text("trap '/bin/sleep 0.05' DEBUG\n")
    return str(file)


def test_the_status_of_a_task_that_ends_at_once_is_kept(tmp_path: Path, slow_shell: str) -> None:
    prepared(tmp_path)
    (tmp_path / "pbs").mkdir()
    (tmp_path / "pbs/keep.sh").write_text("exit 5\n")
    assert task(tmp_path, "pbsdsh", "0", "a", PBS_NODENUM="0", BASH_ENV=slow_shell)[0] == 5


def test_the_status_of_a_program_that_ends_at_once_is_kept(tmp_path: Path, slow_shell: str) -> None:
    (tmp_path / "own").mkdir()
    held, holds = os.pipe()
    script = 'exec 8<&"$0" && exec bash "$@"'
    ended = subprocess.run(
        ["bash", "-c", script, str(held), CHECKOUT / "pbs/keep.sh", tmp_path / "own", "sh", "-c", "exit 5"],
        env={"PATH": os.environ["PATH"], "BASH_ENV": slow_shell},
        pass_fds=[held],
        start_new_session=True,
        timeout=BOUND,
    )
    os.close(held)
    os.close(holds)
    assert (ended.returncode, (tmp_path / "own").exists()) == (5, False)


def shape(script: Path) -> list[str]:
    """The headings and steps of a job script, each once."""
    steps = re.compile(
        r"# (?:Usage|Reads|Exit|SITE)\b|set -.*|trap .*|if \[\[ .*|source .*|start\(\) \{|run_job .*"
    )
    text = script.read_text().replace("slurm/", "pbs/")
    return list(dict.fromkeys(step[0] for line in text.splitlines() if (step := steps.match(line))))


def test_the_job_scripts_of_both_schedulers_have_the_same_sections_in_the_same_order() -> None:
    mine, other = shape(CHECKOUT / "pbs/multinode.pbs"), shape(CHECKOUT / "slurm/multinode.sbatch")
    assert mine == other
    assert mine[-4:] == [
        'source "$APPTRAIN_HOME/host/job.sh"',
        'source "$APPTRAIN_HOME/pbs/host.sh"',
        "start() {",
        'run_job "$@"',
    ]


def test_a_checkout_that_cannot_be_found_is_said(site: Site) -> None:
    script = site.folder / "alone.pbs"
    shutil.copy(site.script, script)
    assert site.ran(script=script) == (
        "64",
        [f"apptrain: {site.submit_dir} is no checkout of apptrain: set APPTRAIN_HOME to it, with qsub -v"],
    )


def test_a_sites_time_limit_for_idle_shells_ends_no_task(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    held, writer = os.pipe()
    ended = subprocess.run(
        [
            "bash",
            "-c",
            f'exec setsid bash "$@" 8<&{held}',
            "bash",
            CHECKOUT / "pbs/keep.sh",
            own,
            "sleep",
            "2",
        ],
        env={**os.environ, "TMOUT": "1"},
        pass_fds=[held],
        timeout=BOUND,
    )
    os.close(held)
    os.close(writer)
    assert ended.returncode == 0


STRANGER = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"a\\nb) S", 0, 0, 0)
print(flush=True)
time.sleep(80)
"""


def test_a_task_ends_well_beside_a_process_with_a_newline_in_its_name(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    keep = CHECKOUT / "pbs/keep.sh"
    stranger = [sys.executable, "-ISc", STRANGER]
    with subprocess.Popen(stranger, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            held, writer = os.pipe()
            line = f'exec setsid bash "$1" "$2" true 8<&{held}'
            ended = subprocess.run(
                ["bash", "-c", line, "bash", keep, own],
                pass_fds=[held],
                capture_output=True,
                text=True,
                timeout=BOUND,
            )
            os.close(held)
            os.close(writer)
            assert (ended.returncode, ended.stderr, own.exists()) == (0, "", False)
        finally:
            process.kill()
