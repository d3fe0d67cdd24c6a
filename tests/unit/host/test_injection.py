"""What stands in variables, profiles and the scheduler's answers is data to the job scripts, whatever it looks like.

Each variable that a job script reads is set to text that a shell would run if it were evaluated, also as arithmetic,
where bash runs what stands in an index. tests/unit/host/test_environment.py has the same of containers/run.sh, and
tests/unit/cli/test_host_files.py of the values of a profile.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit import in_image
from tests.unit.bounds import shorten
from tests.unit.pbs.site import BOUNDS
from tests.unit.slurm.cluster import Cluster

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 60.0
OWN = re.compile(r"\bAPPTRAIN_[A-Z_]+[A-Z]\b")
SLURM = (
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME"),
    *("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK"),
    *("SLURM_JOB_CPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_STEP_ID"),
    *("SLURM_ARRAY_JOB_ID", "SLURM_HET_SIZE", "SLURM_SUBMIT_DIR"),
)
PBS = (
    *(
        "PBS_JOBID",
        "PBS_JOBNAME",
        "PBS_QUEUE",
        "PBS_TASKNUM",
        "PBS_ENVIRONMENT",
        "PBS_NODEFILE",
        "PBS_NODENUM",
    ),
    *("PBS_O_WORKDIR", "PBS_O_QUEUE", "PBS_ARRAY_INDEX", "CUDA_VISIBLE_DEVICES", "NCPUS"),
)
FILES = (
    "host/job.sh",
    "host/staging.sh",
    *(f"pbs/{name}" for name in ("multinode.pbs", "host.sh", "starters.sh", "task.sh")),
)
TOLD = """\
Job Id: 7.lab
    Resource_List.walltime = {evil}
    Resource_List.ngpus = {evil}
    exec_host = {evil}+{evil}
    exec_vnode = ({evil}:ngpus={evil})
    run_count = {evil}
    stime = {evil}
    kill_delay = {evil}
    Variable_List = A={evil}
"""
"""Of qstat, which prints the job's own variables as they are."""


def in_the_image() -> str:
    """Of a stand-in for run.sh: it starts the program in the image where a job script asks for it."""
    program = f"exec {sys.executable} -ISc {shlex.quote(in_image.client())}"
    found = "[[ $word == prepare || $word == conclude ]]"
    return f'#!/bin/bash\nfor word; do if {found}; then {program} "$word" "${{@: -1}}"; fi; done\n'


STAND_INS = {
    "bin/ssh": "while [[ $1 != -- ]]; do shift; done\nexec /bin/bash -s\n",
    "bin/pbsdsh": 'shift 3\nPBS_NODENUM=0 exec "$@"\n',
    "bin/qstat": "cat $FOLDER/told\n",
    "check/containers/run.sh": (
        "printf 'status=0\\nrank=\\nnode=\\nsignal=0\\ntime=1.000000\\nerror=\\n' >\"$APPTRAIN_RUN_DIR/outcome/$APPTRAIN_ATTEMPT.0\"\n"
    ),
}


def evils(canary: Path) -> list[str]:
    """Texts that create the file when a shell runs them: as a number, and as words, quoted or not."""
    touch = f"touch {canary}"
    return [f"PATH[$({touch})]", f"$({touch})`{touch}`;{touch};\n{touch}\n';{touch} #\";{touch} #"]


@pytest.mark.parametrize(
    "line",
    [
        *("((x))", "[[ $x -gt 1 ]]", ": $((x + 1))", "declare -i n; n=$x", "a[$x]=1", ": ${PATH:$x:1}"),
        *('eval "$x"', "eval \"y='$x'\"", 'eval "y=\\"$x\\""', 'bash -c "$x"', "bash -c \"y='$x'\""),
    ],
)
def test_these_texts_are_run_by_a_shell_that_evaluates_them(tmp_path: Path, line: str) -> None:
    for evil in evils(tmp_path / "ran"):
        subprocess.run(["bash", "-c", line], env={**os.environ, "x": evil}, capture_output=True, check=False)
    assert (tmp_path / "ran").exists()


def own_variables(*files: str) -> list[str]:
    """Ours that these files name, but the one that says where the scripts themselves are."""
    found = {name for file in files for name in OWN.findall((CHECKOUT / file).read_text())}
    return sorted(found - {"APPTRAIN_HOME"})


@pytest.mark.parametrize(
    "name", [*own_variables("host/job.sh", "slurm/multinode.sbatch", "slurm/host.sh"), *SLURM]
)
def test_the_job_script_of_slurm_runs_no_value(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "ran"
    cluster = Cluster(tmp_path / "cluster")
    for evil in evils(canary):
        cluster.run("--", "train.py", **{name: evil})
        assert not canary.exists(), evil


def test_no_bash_takes_a_value_for_a_function_as_it_starts(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    own = own_variables("slurm/multinode.sbatch", "slurm/host.sh", *FILES)
    evil = dict.fromkeys([*own, *SLURM, *PBS], f"() {{ :; }}; touch {canary}")
    Cluster(tmp_path / "cluster").run("--", "train.py", **evil)
    Pbs(tmp_path / "pbs").run("--", "train.py", **evil)
    assert not canary.exists()


def test_the_job_script_of_slurm_runs_no_argument(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    cluster = Cluster(tmp_path / "cluster")
    for evil in evils(canary):
        assert cluster.run("--join-key-file", evil, "--", evil, evil).returncode == 0
        assert cluster.launched() == [f"--join-key-file={evil}", "--", evil, evil]
        for option in ("--profile", "--run-dir", "--on-failure", "--start", "--stop-before", "--nnodes"):
            cluster.run(option, evil, "--", "x")
    assert not canary.exists()


class Pbs:
    """A checkout with the real job script, and stand-ins for what it calls."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copytree(CHECKOUT / "pbs", folder / "check/pbs")
        for name in ("check/containers", "check/host", "check/clusters", "bin", "work"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "work/train.py").touch()
        for name in ("job.sh", "common.sh", "staging.sh"):
            shutil.copy(CHECKOUT / "host" / name, folder / "check/host")
        for name, values in BOUNDS.items():
            shorten(folder / "check" / name, **values)
        for name, text in STAND_INS.items():
            begin = in_the_image() if name.endswith("run.sh") else "#!/bin/bash\n"
            (folder / name).write_text(begin + text)
            (folder / name).chmod(0o755)
        (folder / "told").write_text("")
        (folder / "nodes").write_text("node1\n")

    def run(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """As a batch job of one host, or by hand where PBS_JOBID is empty."""
        job = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "FOLDER": str(self.folder),
            "PBS_JOBID": "7.lab",
            "PBS_TASKNUM": "1",
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_NODEFILE": str(self.folder / "nodes"),
            "PBS_O_WORKDIR": str(self.folder / "work"),
            **env,
        }
        line = ["bash", str(self.folder / "check/pbs/multinode.pbs"), *arguments]
        with subprocess.Popen(
            line,
            cwd=self.folder / "work",
            env=job,
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                said, _ = process.communicate(timeout=BOUND)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(line, process.returncode, said)


def test_the_stand_ins_of_pbs_run_a_job_to_its_end(tmp_path: Path) -> None:
    pbs = Pbs(tmp_path)
    for line, env in ((["--"], {}), (["--start", "ssh", "--nodes", "n1", "--"], {"PBS_JOBID": ""})):
        ended = pbs.run(*line, "train.py", **env)
        assert (ended.returncode, ended.stdout.splitlines()[-1].split(":")[1]) == (0, " done"), ended.stdout


@pytest.mark.parametrize("name", [*own_variables(*FILES), *PBS])
def test_the_job_script_of_pbs_runs_no_value(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "ran"
    pbs = Pbs(tmp_path / "pbs")
    for evil in evils(canary):
        pbs.run("--", "train.py", **{name: evil})
        assert not canary.exists(), evil


def test_the_job_script_of_pbs_runs_no_argument(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    pbs = Pbs(tmp_path / "pbs")
    for evil in evils(canary):
        pbs.run("--join-key-file", evil, "--", evil, evil)
        for option in ("--profile", "--run-dir", "--on-failure", "--start", "--stop-before", "--nodes"):
            pbs.run(option, evil, "--", "x")
        pbs.run("--start", "ssh", "--nodes", evil, "--", evil, PBS_JOBID="")
    assert not canary.exists()


def test_the_job_script_of_pbs_runs_nothing_that_qstat_tells(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    pbs = Pbs(tmp_path / "pbs")
    for evil in evils(canary):
        (pbs.folder / "told").write_text(TOLD.format(evil=evil))
        pbs.run("--", "train.py", APPTRAIN_CHAIN="1")
        assert not canary.exists(), evil


def test_the_job_scripts_run_nothing_that_stands_in_the_run_directory(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    pbs = Pbs(tmp_path / "pbs")
    for evil in evils(canary):
        run = tmp_path / "run"
        (run / "outcome").mkdir(parents=True, exist_ok=True)
        (run / "failures").write_text(evil)
        text = "".join(f"{name}={evil}\n" for name in ("status", "rank", "node", "signal", "time", "error"))
        program = pbs.folder / "check/containers/run.sh"
        (pbs.folder / "outcome").write_text(text)
        program.write_text(
            f'{in_the_image()}cp "$FOLDER/outcome" "$APPTRAIN_RUN_DIR/outcome/$APPTRAIN_ATTEMPT.0"\n'
        )
        pbs.run("--on-failure", "requeue", "--", "train.py", APPTRAIN_RUN_DIR=str(run))
        assert not canary.exists(), evil


ENTRIES = (
    *(
        "run_dir",
        "attempt",
        "profile",
        "status",
        "follows",
        "goes_on",
        "tells_end",
        "over",
        "dry_run",
        "by_hand",
    ),
    *(
        "outcome",
        "starter",
        "stop_at",
        "end_at",
        "no_chain",
        "asked",
        "host",
        "line",
        "start",
        "plan",
        "run",
        "launch",
    ),
    *("chain", "export", "say", "tell", "lost"),
)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_job_scripts_run_nothing_that_the_image_tells_them(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "ran"
    pbs = Pbs(tmp_path / "pbs")
    cluster = Cluster(tmp_path / "cluster")
    for number, evil in enumerate(evils(canary)):
        (tmp_path / "entry").write_bytes(f"{name}={evil}\0{evil}={evil}\0".encode())
        for checkout in (pbs.folder / "check", cluster.checkout):
            program = checkout / "containers/run.sh"
            real = program.with_name("real.sh")
            if not real.exists():
                program.rename(real)
            tell = f'for file in "$APPTRAIN_HAND"/{{answer,verdict,over}}; do cat {tmp_path}/entry >>"$file"; done'
            program.write_text(f'#!/bin/bash\n"${{0%/*}}/real.sh" "$@"; status=$?\n{tell}\nexit $status\n')
            program.chmod(0o755)
        pbs.run("--", "train.py", APPTRAIN_RUN_DIR=str(tmp_path / f"pbs.{number}"))
        cluster.run("--", "train.py", APPTRAIN_RUN_DIR=str(tmp_path / f"slurm.{number}"))
        assert not canary.exists(), evil
