"""pbs/host.sh, one function at a time: whose job this is, what qsub could not carry, who copies the image to whom."""

import os
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
START = 'set -euo pipefail; APPTRAIN_HOME=$1; source "$1/host/job.sh"; source "$1/pbs/host.sh"; begin_job; '


def bash(script: str, *arguments: object, **env: str) -> str:
    return subprocess.run(
        ["bash", "-c", START + script, "bash", str(CHECKOUT), *map(str, arguments)],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("env", "is_job"),
    [
        ({}, False),
        ({"PBS_ENVIRONMENT": "PBS_BATCH"}, False),
        ({"PBS_JOBID": "7.srv"}, True),
        ({"PBS_JOBID": "7.srv", "PBS_TASKNUM": "1"}, True),
        ({"PBS_JOBID": "7.srv", "PBS_TASKNUM": "2"}, False),
        ({"PBS_JOBID": "7", "SLURM_JOB_ID": "7"}, False),  # Slurm's own qsub
        (
            {"PBS_JOBID": "7.srv", "SLURM_JOB_ID": "7", "PBS_ENVIRONMENT": "PBS_INTERACTIVE"},
            True,
        ),  # qsub -V there
    ],
)
def test_a_job_of_pbs_is_told_from_its_tasks_and_from_one_of_slurm(env: dict[str, str], is_job: bool) -> None:
    assert bash("if is_pbs_job; then echo yes; fi", **env) == "yes\n" * is_job


def test_lines_that_came_in_variables_of_their_own_are_one_variable_again() -> None:
    binds = {
        "APPTRAIN_BIND": "/a",
        "APPTRAIN_BIND_2": "/b:/c",
        "APPTRAIN_BIND_3": "/d e",
        "APPTRAIN_BIND_5": "/f",
    }
    told = bash("env -0 | grep -z ^APPTRAIN_BIND | sort -z", **binds)
    assert told.split("\0") == ["APPTRAIN_BIND=/a\n/b:/c\n/d e", "APPTRAIN_BIND_5=/f", ""]


def test_a_job_of_a_chain_has_the_variables_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "chain").write_bytes(b"APPTRAIN_ARGS=-- 'a b'\0LARGE=/x\ny\0")
    script = r'printf "%s|" "$APPTRAIN_ARGS" "$LARGE" "${APPTRAIN_CHAIN_FILE-none}" "${carried[@]}"'
    told = bash(script, APPTRAIN_CHAIN_FILE=str(tmp_path / "chain"))
    assert told == "-- 'a b'|/x\ny|none|carried=APPTRAIN_ARGS|carried=LARGE|"


@pytest.mark.parametrize(
    ("wave", "sends"),
    [(0, "a:|"), (1, "a: b c|d: e|"), (2, "a: f|"), (3, "")],
)
def test_a_wave_has_who_sends_and_to_whom(wave: int, sends: str, tmp_path: Path) -> None:
    """The first node takes it from the shared file system; a node whose source is lost takes no part."""
    rows = ["0", "", "a", "1", "a", "b", "1", "d", "e", "1", "a", "c", "2", "a", "f"]
    (tmp_path / "copies").write_bytes(b"".join(word.encode() + b"\0" for word in rows))
    script = """
        handover_dir=$2
        read_wave "$3" || exit 0
        for i in "${!sources[@]}"; do printf '%s:%s|' "${sources[i]}" "${targets[i]-}"; done
        """
    assert bash(script, tmp_path, wave) == sends
