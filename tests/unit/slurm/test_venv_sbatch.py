"""examples/venv.sbatch: where it finds the checkout, and when it has the job queued again; and what it and two
more examples say if they cannot start."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "examples/venv.sbatch"


def go(
    folder: Path, env: Mapping[str, str], status: int = 0, before: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    """As Slurm starts it, submitted from `folder`; srun and scontrol tell how they are called."""
    (folder / "bin").mkdir()
    for name, end in (("srun", status), ("scontrol", 0)):
        (folder / "bin" / name).write_text(f'#!/bin/sh\necho "{name} $*"\nexit {end}\n')
        (folder / "bin" / name).chmod(0o755)
    given = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": f"{folder}/home"}
    given |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7"} | dict(env)
    words = ["bash", str(SCRIPT), *before, "my script.py", "--lr", "0.1"]
    return subprocess.run(words, env=given, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("where", ["", "home/apptrain", "else where"])
def test_the_checkout_is_the_folder_of_submission_else_that_in_the_home_unless_named(
    where: str, tmp_path: Path
) -> None:
    (tmp_path / where).mkdir(parents=True, exist_ok=True)
    (tmp_path / where / "apptrain").touch()
    named = {"APPTRAIN_HOME": str(tmp_path / where)} if where == "else where" else {}
    ended = go(tmp_path, named)
    program = tmp_path / where / "apptrain"
    line = f"srun --ntasks-per-node=1 {program} launch -- my script.py --lr 0.1\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, line, "")


def test_two_dashes_before_the_script_are_taken_as_multinode_sbatch_takes_them(tmp_path: Path) -> None:
    (tmp_path / "apptrain").touch()
    assert go(tmp_path, {}, before=("--",)).stdout.endswith(" launch -- my script.py --lr 0.1\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("venv.sbatch", "this is no Slurm job: sbatch examples/venv.sbatch my_script.py"),
        ("venv.pbs", "start it as CMD='my_script.py' qsub -v CMD,VIRTUAL_ENV examples/venv.pbs"),
        ("nvidia_image.sh", "apptainer is not in PATH: load its module (module avail apptainer)"),
    ],
)
def test_outside_a_job_or_without_apptainer_one_line_says_what_to_do(
    name: str, said: str, tmp_path: Path
) -> None:
    words = ["/bin/bash", str(SCRIPT.with_name(name)), "a.sif", "my_script.py"]
    env = {"PATH": str(tmp_path)}
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (64, "", f"{name}: {said}\n")


@pytest.mark.parametrize("named", ["", "else where"])
def test_without_a_checkout_nothing_starts(named: str, tmp_path: Path) -> None:
    (tmp_path / "home/apptrain").mkdir(parents=True)
    if named:
        (tmp_path / "apptrain").touch()  # is not taken instead
    ended = go(tmp_path, {"APPTRAIN_HOME": named} if named else {})
    found = named or f"{tmp_path}/home/apptrain"
    said = f"venv.sbatch: {found} is no checkout of apptrain: name it in APPTRAIN_HOME\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (64, "", said)


@pytest.mark.parametrize(
    ("status", "starts", "again"), [(75, "", True), (75, "99", True), (75, "100", False), (1, "", False)]
)
def test_a_planned_end_alone_queues_the_job_again_and_not_for_ever(
    status: int, starts: str, again: bool, tmp_path: Path
) -> None:
    for name, element in (("7", {}), ("7_3", {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "apptrain").touch()
        ended = go(folder, {**element, **({"SLURM_RESTART_COUNT": starts} if starts else {})}, status)
        assert ended.returncode == status
        assert (f"scontrol requeue {name}\n" in ended.stdout) is again
