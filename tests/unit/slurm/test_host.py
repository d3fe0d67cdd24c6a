"""slurm/host.sh, one function at a time: what Slurm is asked, and what is made of its answers."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
START = """
set -euo pipefail
APPTRAIN_HOME=$1
source "$1/host/job.sh"
source "$1/slurm/host.sh"
begin_job
SLURM_JOB_ID=7
timeout() { while [[ $1 == -* ]]; do shift; done; shift; "$@"; }
shielded() { shift; "$@"; }
"""


def bash(script: str, *arguments: object, refused: bool = False, env: Mapping[str, str] | None = None) -> str:
    """What these lines print; of a refusal, what it says. Slurm's programs are functions of theirs."""
    ended = subprocess.run(
        ["bash", "-c", START + script, "bash", str(CHECKOUT), *map(str, arguments)],
        env={"PATH": os.environ["PATH"], **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == (64 if refused else 0), ended.stderr
    return ended.stderr if refused else ended.stdout


def test_started_by_hand_outside_a_job_it_is_refused() -> None:
    told = bash("unset SLURM_JOB_ID; describe_job", refused=True)
    assert told.startswith(
        "apptrain: this is no Slurm job: sbatch slurm/multinode.sbatch, or salloc and then "
    )


@pytest.mark.parametrize(
    ("batch", "restarts", "facts"),
    [
        ("", None, ["runs_in=shell"]),
        ("", "0", ["runs_in=shell"]),
        ("", "1", ["runs_in=shell", "told=job"]),
        ("yes", None, ["runs_in=shell", "told=job", "first_node=node n3"]),
    ],
)
def test_what_slurm_says_of_a_job_is_asked_if_it_may_have_run_before(
    batch: str, restarts: str | None, facts: list[str]
) -> None:
    script = """
        told_of_job() { echo job; }
        told_of_this_node() { echo "node $SLURMD_NODENAME"; }
        is_batch=$2
        describe_job; ask_site
        printf '%s\\n' "$cluster" "${facts[@]}"
        """
    env = {"SLURM_CLUSTER_NAME": "lab", "SLURMD_NODENAME": "n3"}
    env |= {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    assert bash(script, batch, env=env).splitlines() == ["lab", *facts]


ELEMENT = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(("job", "env", "name"), [("7", {}, "7"), ("7", ELEMENT, "7_3"), ("8", ELEMENT, "8")])
def test_the_last_element_of_an_array_is_not_called_by_the_number_of_all(
    tmp_path: Path, job: str, env: dict[str, str], name: str
) -> None:
    script = """
        calls=$3
        squeue() { echo "squeue $*" >>"$calls"; }
        scontrol() { echo "scontrol $*" >>"$calls"; }
        SLURM_JOB_ID=$2
        job_end; told_of_job; run_again
        cat "$calls"
        """
    assert bash(script, job, tmp_path / "calls", env=env).splitlines() == [
        f"squeue --noheader --format=%e --jobs={name}",
        f"scontrol --oneliner show job {name}",
        f"scontrol requeue {name}",
    ]


@pytest.mark.parametrize(
    ("told", "left"),
    [
        ("JobId=8 ArrayJobId=7 ArrayTaskId=3 JobName=x ", "7"),
        ("JobId=8 JobName=x ", ""),  # it was submitted from the element
        ("", "7"),  # Slurm does not answer
    ],
)
def test_the_array_from_which_a_job_was_submitted_is_not_its_own(told: str, left: str) -> None:
    script = 'answer=$2; told_of_job() { printf %s "$answer"; }; SLURM_JOB_ID=8; described=$3; describe_job; ask_site; '
    script += 'echo "${SLURM_ARRAY_JOB_ID-}" "${SLURM_ARRAY_TASK_ID-}"; printf "%s\\n" "${facts[@]}"'
    found = bash(script, told, "JobId=1 JobName=of-all ", env=ELEMENT).splitlines()
    assert found == [f"{left} {'3' if left else ''}", "runs_in=shell", f"told={told}"]


@pytest.mark.parametrize(
    ("answer", "end"),
    [("2026-11-21T10:00:00", "1795255200"), ("N/A", ""), ("NONE", ""), ("", ""), ("Unknown", "")],
)
def test_when_the_job_ends_is_what_slurm_says_now(answer: str, end: str) -> None:
    script = 'squeue() { echo "$*" >&2; [[ $SLURM_TIME_FORMAT == standard ]] && echo "$2"; }'
    script = script.replace('"$2"', f'"{answer}"')
    assert bash(f"{script}; job_end", env={"TZ": "UTC", "SLURM_JOB_END_TIME": "1"}) == (
        f"{end}\n" if end else ""
    )


def test_a_slurm_that_does_not_answer_says_nothing_of_the_jobs_end_nor_of_the_job() -> None:
    script = (
        "squeue() { return 1; }; scontrol() { return 1; }; job_end; told_of_job; told_of_this_node; echo on"
    )
    assert bash(script, env={"SLURMD_NODENAME": "n3"}) == "on\n"


@pytest.mark.parametrize(
    ("says", "fails", "told"),
    [
        ("", False, "yes "),
        ("slurm_requeue error: Job is pending execution for job 7", True, "yes "),
        ("slurm_requeue error: disabled", True, "no slurm_requeue error: disabled"),
    ],
)
def test_a_job_runs_again_if_slurm_says_so_or_has_begun_it_itself(says: str, fails: bool, told: str) -> None:
    script = f'scontrol() {{ [[ $* == "requeue 7" ]] || exit 9; echo "{says}" >&2; return {int(fails)}; }}; '
    script += "timeout() { exit 9; }; "
    script += 'if said=$(run_again); then echo "yes $said"; else echo "no $said"; fi'
    assert bash(script) == f"{told}\n"


def test_of_the_first_node_slurm_is_asked_by_its_own_name_for_it() -> None:
    script = """
        scontrol() { [[ $* != "--oneliner show node n3" ]] || echo "NodeName=n3"; }
        told_of_this_node
        """
    assert bash(script, env={"SLURMD_NODENAME": "n3"}) == "NodeName=n3\n"


STAY = ("SLURM_JOB_ID", "SLURM_THREADS_PER_CORE", "SLURM_MPI_TYPE", "SLURM_NNODES", "SLURM_CPUS_PER_TASK")
GO = ("SLURM_GPUS_PER_NODE", "SLURM_EXACT", "SRUN_CPUS_PER_TASK", "SLURM_STEP_ID", "SLURM_HOSTFILE")


def test_a_command_on_the_nodes_gets_none_of_the_jobs_requests(tmp_path: Path) -> None:
    script = r"""
        timeout() { printf '%s\n' "$@"; env; }
        exec() { "$@"; }
        each_node=(--nodes=2 --ntasks=2) bound=5 handover_dir=$2
        step_on_nodes /bin/bash stage.sh look
        """
    env = dict.fromkeys((*STAY, *GO), "1")
    told = bash(script, tmp_path, env=env).splitlines()
    words = ["--foreground", "--signal=INT", "--kill-after=10", "5", "srun", "--nodes=2", "--ntasks=2"]
    assert told[: len(words) + 3] == [*words, "/bin/bash", "stage.sh", "look"]
    left = {line.partition("=")[0] for line in told[len(words) + 3 :]}
    assert left >= set(STAY)
    assert not left & set(GO)


BROADCAST = r"""
handover_dir=$2 hosts=(a b c) stage=/disk/copies APPTRAIN_IMAGE=/i.sif copy_error='' copy_failed=yes
facts=()
on_nodes() { printf '%s\n' "on_nodes $*" >>"$handover_dir/calls"; }
type() { [[ $2 != sbcast || -z ${NO_SBCAST-} ]]; }
await() { shift; status=0; "$@" || status=$?; }
exec() { "$@"; }
env() { shift 4; "$@"; }
sbcast() {
    printf '%s\n' "$*" >>"$handover_dir/calls"
    if [[ -n $FAILS ]]; then printf '%b' "$FAILS" >&2; FAILS=$NEXT; return 1; fi
}
copy_to "${@:3}"
printf '<%s>' "$copy_error" "$copy_failed"
"""
CUT = r"sbcast: error: REQUEST_FILE_BCAST(b): No space left\nsbcast: error: giving up\n"


@pytest.mark.parametrize(
    ("names", "fails", "after", "calls", "error"),
    [
        ("a b c", "", "", ["/i.sif /disk/copies/image.sif.1"], ""),
        ("a c", "", "", ["--nodelist=a,c /i.sif /disk/copies/image.sif.1"], ""),
        (
            "a b c",
            CUT,
            "",
            ["/i.sif /disk/copies/image.sif.1", "on_nodes clear b", "--nodelist=a,c /i.sif /disk/copies/image.sif.2"],
            "",
        ),
        (
            "a b c",
            CUT,
            "no luck",
            ["/i.sif /disk/copies/image.sif.1", "on_nodes clear b", "--nodelist=a,c /i.sif /disk/copies/image.sif.2"],
            "sbcast ended with status 1: sbcast: error: REQUEST_FILE_BCAST(b): No space left sbcast: error: giving up",
        ),
        ("b", CUT, "", ["--nodelist=b /i.sif /disk/copies/image.sif.1"],
         "sbcast ended with status 1: sbcast: error: REQUEST_FILE_BCAST(b): No space left sbcast: error: giving up"),
        ("a b c", "no luck", "", ["/i.sif /disk/copies/image.sif.1"], "sbcast ended with status 1: no luck"),
    ],
)  # fmt: skip
def test_the_image_is_sent_once_more_without_the_nodes_that_did_not_take_it(
    names: str, fails: str, after: str, calls: list[str], error: str, tmp_path: Path
) -> None:
    """Each time under another name."""
    told = bash(BROADCAST, tmp_path, *names.split(), env={"FAILS": fails, "NEXT": after})
    assert told == f"<{error}><yes>"
    assert (tmp_path / "calls").read_text().splitlines() == calls


def test_where_there_is_no_sbcast_another_attempt_would_not_help(tmp_path: Path) -> None:
    told = bash(BROADCAST, tmp_path, "a", "b", env={"FAILS": "", "NEXT": "", "NO_SBCAST": "1"})
    assert told == "<there is no sbcast in PATH><>"
    assert not (tmp_path / "calls").exists()
