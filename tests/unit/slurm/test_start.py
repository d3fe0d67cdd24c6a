"""The job script for Slurm: what it starts, and what it refuses."""

import os
import shlex
from pathlib import Path

import pytest

from tests.unit.slurm.cluster import BOUND, Cluster, Tasks


def test_one_task_starts_on_each_node_with_all_that_srun_would_take_from_elsewhere(cluster: Cluster) -> None:
    ended = cluster.run("--device", "cpu", "--", "train.py", "--lr", "0.1")
    assert (ended.returncode, ended.stderr) == (0, "")
    run_sh = str(cluster.checkout / "containers" / "run.sh")
    image = str(cluster.checkout / "containers" / "image.sif")
    assert cluster.srun() == [
        "--export=ALL",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--cpu-bind=none",
        "--mem=0",
        "--gpu-bind=none",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--quit-on-interrupt",
        *(run_sh, "--outcome", f"{cluster.run_dir}/outcome/%a.%n"),
        *("--bind", "the run directory", str(cluster.run_dir), "--cpu", "--script", "train.py"),
        *(image, "python", "-P", "-m", "entrypoint", "launch"),
        *("--device=cpu", "--", "train.py", "--lr", "0.1"),
    ]
    assert cluster.calls()[0]["cwd"] == str(cluster.submit_dir)


def test_the_first_lines_say_where_the_run_is_and_how_to_follow_it(cluster: Cluster) -> None:
    ended = cluster.run()
    assert ended.stdout.splitlines()[:3] == [
        f"apptrain: run directory {cluster.run_dir}",
        f"apptrain: to follow it: tail -f {cluster.run_dir}/job.log",
        f"apptrain: job 7, attempt 0, 2 nodes (a,b), profile none, image {cluster.checkout}/containers/image.sif",
    ]
    assert ended.stdout.splitlines()[-1] == f"apptrain: done: {cluster.run_dir}"


def test_the_output_of_the_ranks_reaches_the_jobs_output_and_its_log(cluster: Cluster) -> None:
    tasks = {"0": {"print": "loss 1", "stderr": "a warning"}, "1": {"print": "loss 2"}}
    ended = cluster.run(tasks=tasks)
    assert {"task of node 0 loss 1", "task of node 1 loss 2"} <= set(ended.stdout.splitlines())
    assert ended.stderr == "a warning\n"
    log = (cluster.run_dir / "job.log").read_text().splitlines()
    assert sorted(log) == sorted((ended.stdout + ended.stderr).splitlines())


def test_where_output_and_errors_are_one_file_they_keep_their_order(cluster: Cluster) -> None:
    tasks: Tasks = {"0": {"print": "first", "stderr": "second"}, "1": {"status": 3, "node": "b"}}
    with (cluster.folder / "out").open("w") as out, cluster.start(tasks=tasks, out=out) as process:
        assert process.wait(BOUND) == 3
    text = (cluster.folder / "out").read_text()
    assert text == (cluster.run_dir / "job.log").read_text()
    assert text.index("first") < text.index("second") < text.index("apptrain: status 3: b:")


NOT_FOR_SRUN = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK", "SLURM_GRES"),
    *(
        "SLURM_TRES_PER_TASK",
        "SLURM_TRES_PER_NODE",
        "SLURM_TRES_BIND",
        "SLURM_CPUS_PER_GPU",
        "SRUN_CPUS_PER_TASK",
    ),
    *(
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE",
        "SLURM_MEM_BIND",
        "SLURM_MEM_BIND_TYPE",
    ),
    *("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE"),
    *(
        "SLURM_DISTRIBUTION",
        "SLURM_DIST_PLANESIZE",
        "SLURM_GPU_BIND",
        "SLURM_CPU_BIND",
        "SLURM_CPU_BIND_LIST",
    ),
    "SLURM_HOSTFILE",
    *("SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_OVERLAP", "SLURM_NO_KILL", "SLURM_SRUN_MULTI"),
)
FOR_SRUN = (
    *("SLURM_THREADS_PER_CORE", "SLURM_HINT", "SLURM_MPI_TYPE", "SLURM_NETWORK", "SLURM_DEBUG"),
    *("SLURM_TASK_PROLOG", "SLURM_TASK_EPILOG", "SLURM_UNBUFFEREDIO", "SLURM_STDINMODE", "SLURM_CONF"),
    *("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS_PER_NODE"),
)


def test_every_variable_by_which_srun_would_lay_the_step_out_otherwise_is_kept_from_it(
    cluster: Cluster,
) -> None:
    """Also if they are of another job, from which this one was submitted: it has that one's step."""
    given = {name: cluster.env.get(name, "1") for name in NOT_FOR_SRUN + FOR_SRUN}
    assert cluster.run(parent="slurmstepd: [7.batch]", SLURM_STEP_ID="3", **given).returncode == 0
    assert [name for name in NOT_FOR_SRUN if cluster.handed(name) is not None] == []
    assert [name for name in FOR_SRUN if cluster.handed(name) is None] == []
    assert "--overlap" not in cluster.srun()


def test_in_the_shell_of_a_step_our_step_shares_its_resources(cluster: Cluster) -> None:
    assert cluster.run(batch=False, SLURM_STEP_ID="4294967290").returncode == 0
    assert "--overlap" in cluster.srun()


def test_arguments_arrive_as_they_are(cluster: Cluster) -> None:
    arguments = [
        "--",
        "a b.py",
        "it's",
        '"q"',
        "$HOME",
        "",
        "*",
        "line\nbreak",
        "--run-dir=x",
        "--",
        "--dry-run",
    ]
    assert cluster.run(*arguments).returncode == 0
    assert cluster.launched() == arguments


def test_arguments_of_a_file_stand_before_those_of_the_command_line(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "arguments"
    file.write_text(f"--device\0cpu\0--run-dir\0{tmp_path}/run\0--\0a b.py\0two\nlines\0")
    assert cluster.run("--show-ranks=0", APPTRAIN_ARGS_FILE=str(file)).returncode == 0
    assert cluster.launched() == ["--device=cpu", "--show-ranks=0", "--", "a b.py", "two\nlines"]
    assert cluster.handed("APPTRAIN_ARGS_FILE") is None
    assert (tmp_path / "run" / "job.log").exists()


def test_the_checkout_is_the_submit_directory_if_nothing_else_is_said(cluster: Cluster) -> None:
    run_dir = cluster.checkout / "runs" / "apptrain-7"
    ended = cluster.run(APPTRAIN_HOME=None, SLURM_SUBMIT_DIR=str(cluster.checkout))
    assert (ended.returncode, cluster.handed("APPTRAIN_HOME")) == (0, str(cluster.checkout))
    assert run_dir.is_dir()


def test_the_checkout_is_where_slurm_says_that_the_script_was(cluster: Cluster) -> None:
    command = f"{cluster.checkout}/slurm/multinode.sbatch -- train.py /slurm/multinode.sbatch"
    ended = cluster.run(APPTRAIN_HOME=None, FAKE_COMMAND=command)
    assert (ended.returncode, cluster.handed("APPTRAIN_HOME")) == (0, str(cluster.checkout))
    assert cluster.questions() == 2  # now, and at the end


def test_the_checkout_is_the_scripts_own_where_it_is_started_by_hand(cluster: Cluster) -> None:
    link = cluster.folder / "link"
    link.symlink_to(cluster.checkout / "slurm" / "multinode.sbatch")
    ended = cluster.run(APPTRAIN_HOME=None, script=link, batch=False)
    assert (ended.returncode, cluster.handed("APPTRAIN_HOME")) == (0, str(cluster.checkout))


@pytest.mark.parametrize("home", [None, "/nowhere"])
def test_a_checkout_that_is_not_found_is_refused(cluster: Cluster, home: str | None) -> None:
    text = cluster.refused(APPTRAIN_HOME=home)
    assert text == f"{home or cluster.submit_dir} is no checkout of apptrain: set APPTRAIN_HOME to it"


def test_a_dry_run_prints_the_launch_line_and_asks_every_task_for_its_plan(cluster: Cluster) -> None:
    ended = cluster.run("--dry-run", "--", "a b.py")
    assert (ended.returncode, ended.stderr, cluster.run_dir.exists()) == (0, "", False)
    head, line, *plans = ended.stdout.splitlines()
    assert head == "apptrain: the launch line, and below the plan of each task:"
    assert shlex.split(line)[0] == "srun"
    assert shlex.split(line)[-3:] == ["launch", "--", "a b.py"]
    assert sorted(plans) == ["task of node 0 ", "task of node 1 "]
    assert cluster.srun()[-3:] == ["plan", "--", "a b.py"]
    assert "--kill-on-bad-exit=0" in cluster.srun()
    assert cluster.handed("SLURM_LABELIO") == "1"


def test_a_dry_run_ends_with_the_status_of_a_plan_that_is_refused(cluster: Cluster) -> None:
    assert cluster.run(tasks={"1": {"status": 64}}, APPTRAIN_DRY_RUN="1").returncode == 64


@pytest.mark.parametrize(
    ("arguments", "env", "text"),
    [
        (
            [],
            {"SLURM_JOB_ID": None},
            "this is no Slurm job: sbatch slurm/multinode.sbatch, or salloc and then bash slurm/multinode.sbatch",
        ),
        (
            [],
            {"SLURM_HET_SIZE": "2"},
            "SLURM_HET_SIZE=2: a heterogeneous job, whose step may leave nodes out unseen: submit one component (no ':' between requests)",
        ),
        (
            ["--run-dir"],
            {},
            "argument --run-dir: expected one argument: see `apptrain launch --help`",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    cluster: Cluster, arguments: list[str], env: dict[str, str | None], text: str
) -> None:
    assert cluster.refused(*arguments, **env) == text


def test_a_temporary_directory_that_the_first_node_lacks_is_not_needed(cluster: Cluster) -> None:
    ended = cluster.run(TMPDIR="/scratch/of the login node")
    assert (ended.returncode, len(cluster.calls())) == (0, 1), ended.stderr
    hand = Path(cluster.handed("APPTRAIN_HAND") or "")
    assert (hand.parent, hand.exists()) == (Path("/tmp"), False)
    assert hand.name.startswith(f"apptrain.{os.uname().nodename}.")


def test_a_host_without_room_for_the_pipes_of_the_log_is_refused(cluster: Cluster) -> None:
    mktemp = cluster.folder / "bin/mktemp"
    mktemp.write_text("#!/bin/sh\nexit 1\n")
    mktemp.chmod(0o755)
    text = "no temporary directory can be made: set TMPDIR to a directory of this node"
    assert cluster.refused() == text


def test_the_script_started_in_every_task_of_a_step_is_refused(cluster: Cluster) -> None:
    text = cluster.refused(parent="slurmstepd: [7.0]", SLURM_STEP_ID="0")
    assert text == "job 7, step 0: start this script once, not with srun"


def test_the_script_in_place_of_the_shell_of_an_interactive_step_is_no_task(cluster: Cluster) -> None:
    ended = cluster.run(parent="slurmstepd: [7.interactive]", SLURM_STEP_ID="4294967290")
    assert (ended.returncode, "--overlap" in cluster.srun()) == (0, True)
