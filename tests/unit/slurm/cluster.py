"""`slurm/multinode.sbatch` and `host/job.sh` with stand-ins for Slurm's programs and for run.sh.

The stand-in for srun starts the tasks of a step, one for each task of each node, with the variables of a step; the
one for run.sh does what a test says for an attempt and a node. tests/cluster/test_slurm.py has the real ones.
"""

import marshal
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest

from clusters import render
from tests.embedded import disks
from tests.unit.bounds import shorten

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 60  # s, for anything started here
Tasks = dict[str, dict[str, Any]]
"""What a task of an attempt and a node (`1.0`), or of a node in all attempts (`0`), does."""
# A script is started four times a job and more: these import what takes no time, or are sh's.
SRUN = """#!{python} -IS
import _signal, marshal, os, sys
from _socket import socket
argv = sys.argv[1:]
at = next(i for i, word in enumerate(argv) if not word.startswith("-"))
with open("{here}/calls", "ab") as calls:
    marshal.dump({{"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}}, calls)
if os.environ.get("FAKE_SRUN"):
    sys.exit(os.environ["FAKE_SRUN"])
given = dict(word[2:].split("=", 1) for word in argv[:at] if "=" in word)
nodes, tasks = int(given["nodes"]), int(given["ntasks-per-node"])
running, worst = [], 0
own = socket()
own.bind(("127.0.0.1", 0))
own.listen()
told = {{"SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURM_SRUN_COMM_PORT": str(own.getsockname()[1])}}
def interrupted(signum, frame):
    for task in running:
        try:
            os.kill(task, signum)
        except ProcessLookupError:
            pass
_signal.signal(_signal.SIGINT, interrupted)
for node in range(nodes):
    for task in range(tasks):
        step = {{"SLURM_STEP_ID": "0", "SLURM_NODEID": str(node), "SLURM_LOCALID": str(task)}}
        running.append(os.posix_spawn(argv[at], argv[at:], {{**os.environ, **told, **step}}))
while running:
    task, status = os.wait()
    running.remove(task)
    worst = max(worst, os.waitstatus_to_exitcode(status))
sys.exit(worst)
"""
SCONTROL = """#!/bin/sh
echo "$*" >>"{here}/scontrol"
case "$*" in
    "show hostnames "*) set -f; IFS=,; printf '%s\\n' $3 ;;
    "--oneliner show job "*)
        case ${{FAKE_JOB-}} in
            "") echo "JobId=7 JobName=x Command=${{FAKE_COMMAND-(null)}} WorkDir=/ StdErr=x" ;;
            @*) cat "${{FAKE_JOB#@}}" ;;
            *) printf '%s\\n' "$FAKE_JOB" ;;
        esac ;;
    "requeue "*) if [ -n "${{FAKE_REQUEUE-}}" ]; then echo "$FAKE_REQUEUE" >&2; exit 1; fi ;;
esac
"""
SQUEUE = """#!/bin/sh
echo "${{FAKE_END-N/A}}"
"""
RUN_SH = """#!{python} -IS
import _signal, os, sys, time
word = sys.argv[sys.argv.index("entrypoint") + 1]
if word in ("prepare", "conclude"):
    if os.environ.get("FAKE_IMAGE") in (word, "all"):
        print("FATAL: no such image", file=sys.stderr)
        sys.exit(255)
    code = "import sys; from entrypoint import cli; from entrypoint.job import conclude; conclude.LATE_PAUSE = 0.02; sys.exit(cli.main(sys.argv[1:]))"
    os.execve("{python}", ["{python}", "-Pc", code, *sys.argv[-2:]], {{"PATH": os.environ["PATH"], "PYTHONPATH": "{packages}", "APPTRAIN_STACK": "/none"}})
node, attempt = os.environ["SLURM_NODEID"], os.environ["APPTRAIN_ATTEMPT"]
what = eval(os.environ.get("FAKE_TASKS", "{{}}"))
what = what.get(attempt + "." + node, what.get(node, {{}}))
run = os.environ["APPTRAIN_RUN_DIR"]
print(f"task of node {{node}}", what.get("print", ""), flush=True)
if what.get("stderr"):
    print(what["stderr"], file=sys.stderr, flush=True)
if word == "plan":
    sys.exit(what.get("status", 0))
if "SLURM_LOCALID" in os.environ and what.get("tasks"):
    node += "." + os.environ["SLURM_LOCALID"]
if what.get("wait"):  # for a file, or an end by signal
    def ended(signum, frame):
        what["status"] = 128 + signum
        what["wait"] = ""
    _signal.signal(_signal.SIGINT, ended)
    _signal.signal(_signal.SIGTERM, ended)
    open(f"{{run}}/began.{{node}}", "w").close()
    deadline = time.monotonic() + 50
    while what["wait"] and not os.path.exists(f"{{run}}/{{what['wait']}}") and time.monotonic() < deadline:
        time.sleep(0.02)
if what.get("asked"):
    open(f"{{run}}/stop", "w").close()
status = what.get("status", 0)
if status != "none":
    lines = {{"status": status, "rank": what.get("rank", ""), "node": what.get("node", ""), "signal": 0,
        "time": what.get("time", "100.000000"), "error": what.get("error", "")}}
    for number, crew in what.get("crews", {{}}).items():
        with open(f"{{run}}/outcome/{{number}}.nodes", "w") as file:
            file.write(crew)
    for number, later in {{attempt: status, **what.get("then", {{}})}}.items():
        with open(f"{{run}}/outcome/{{number}}.{{node}}", "w") as file:
            file.writelines(f"{{name}}={{value}}\\n" for name, value in {{**lines, "status": later}}.items())
    sys.exit(0 if status == 75 else status)
sys.exit(1)
"""
BOUNDS = {"LOG_PAUSE": 0.01, "LOG_TRIES": 500}
"""Of host/job.sh."""


class Cluster:
    """A checkout with the real scripts, and stand-ins for what they call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkout = folder / "check out"
        self.submit_dir = folder / "submit"
        self.spool = folder / "spool" / "slurm_script"
        for path in (
            self.checkout / "containers",
            self.submit_dir,
            self.spool.parent,
            folder / "bin",
            folder / "home",
        ):
            path.mkdir(parents=True)
        shutil.copytree(CHECKOUT / "slurm", self.checkout / "slurm")
        shutil.copy(CHECKOUT / "slurm" / "multinode.sbatch", self.spool)
        (self.checkout / "host").mkdir()
        for name in ("job.sh", "common.sh"):
            shutil.copy(CHECKOUT / "host" / name, self.checkout / "host")
        shorten(self.checkout / "host" / "job.sh", **BOUNDS)
        (self.checkout / "clusters").mkdir()
        programs = {
            "bin/srun": SRUN,
            "bin/scontrol": SCONTROL,
            "bin/squeue": SQUEUE,
            "check out/containers/run.sh": RUN_SH,
        }
        for name, text in programs.items():
            (folder / name).write_text(text.format(python=sys.executable, here=folder, packages=CHECKOUT))
            (folder / name).chmod(0o755)
        self.env = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "apptrain",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "a,b",
            "SLURM_CLUSTER_NAME": "lab",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_TASKS_PER_NODE": "1(x2)",
            "SLURM_CPUS_PER_TASK": "8",
            "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
            "SLURM_GPUS_ON_NODE": "1",
            "SLURM_SUBMIT_DIR": str(self.submit_dir),
            "APPTRAIN_HOME": str(self.checkout),
        }
        self.run_dir = self.submit_dir / "runs" / "apptrain-7"

    def start(
        self,
        *arguments: str,
        script: Path | None = None,
        batch: bool = True,
        tasks: Tasks | None = None,
        cwd: Path | None = None,
        out: IO[str] | None = None,
        parent: str = "",
        **env: str | None,
    ) -> "subprocess.Popen[str]":
        """Starts the job script, as slurmd starts a batch job unless not `batch`; None takes a variable away.

        `parent` is what its parent process calls itself.
        """
        changed = {**self.env, "FAKE_TASKS": repr(tasks or {}), **env}
        begin = "export SLURM_TASK_PID=$$; " if batch and not parent else ""
        line = ["bash", "-c", begin + 'exec bash "$@"', "bash", str(script or self.spool), *arguments]
        if parent:
            line = ["bash", "-c", 'exec -a "$0" bash -c \'"$@"; exit\' "$0" "$@"', parent, *line]
        return subprocess.Popen(
            line,
            cwd=cwd or self.submit_dir,
            env={name: value for name, value in changed.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=out or subprocess.PIPE,
            stderr=out or subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments, **how) as process:
            try:
                out, err = process.communicate(timeout=BOUND)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def refused(self, *arguments: str, **how: Any) -> str:
        """What is said where nothing was started."""
        ended = self.run(*arguments, **how)
        assert (ended.returncode, ended.stdout, self.calls()) == (64, "", [])
        assert ended.stderr.startswith("apptrain: ")
        assert ended.stderr.count("\n") == 1
        return ended.stderr.removeprefix("apptrain: ").removesuffix("\n")

    def calls(self) -> list[dict[str, Any]]:
        """How srun was called."""
        found, file = [], self.folder / "calls"
        if file.exists():
            with file.open("rb") as records, suppress(EOFError):
                while True:
                    found.append(marshal.load(records))
        return found

    def srun(self) -> list[str]:
        """The last command line of srun."""
        return list(self.calls()[-1]["argv"])

    def handed(self, name: str) -> str | None:
        """A variable as the last srun had it."""
        value: str | None = self.calls()[-1]["env"].get(name)
        return value

    def launched(self) -> list[str]:
        """The arguments of `entrypoint launch`."""
        argv = self.srun()
        return argv[argv.index("launch") + 1 :]

    def run_options(self) -> list[str]:
        """What containers/run.sh is told to do for each task."""
        argv = self.srun()
        at = argv.index(str(self.checkout / "containers" / "run.sh"))
        return argv[at + 1 : argv.index("python") - 1]

    def binds(self) -> dict[str, list[str]]:
        """What is shown inside, by why."""
        options, found = self.run_options(), {}  # type: tuple[list[str], dict[str, list[str]]]
        for at, option in enumerate(options):
            if option == "--bind":
                found.setdefault(options[at + 1], []).append(options[at + 2])
        return found

    def scontrol(self) -> list[str]:
        """What scontrol was told to do, without the questions."""
        return [line for line in self._lines("scontrol") if not line.startswith(("show", "--oneliner show"))]

    def questions(self) -> int:
        """How often it was asked about the job."""
        return self._lines("scontrol").count("--oneliner show job 7")

    def _lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def said(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """The job script's own lines on stderr."""
    lines = ended.stderr.splitlines()
    return [line.removeprefix("apptrain: ") for line in lines if line.startswith("apptrain: ")]


# --- what is started --------------------------------------------------------------------------------------------


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


def test_one_task_for_each_rank_gets_its_own_cores(cluster: Cluster) -> None:
    tasks = {"0": {"tasks": True}, "1": {"tasks": True}}
    layout = {
        "SLURM_NTASKS": "8",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_CPUS_PER_TASK": "2",
    }
    assert cluster.run(tasks=tasks, **layout).returncode == 0
    assert cluster.srun()[2:6] == [
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--cpus-per-task=2",
        "--cpu-bind=cores",
    ]


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ({"SLURM_CPUS_PER_TASK": None}, ["--ntasks-per-node=1", "--cpus-per-task=8"]),
        (
            {"SLURM_CPUS_PER_TASK": None, "SLURM_JOB_CPUS_PER_NODE": "64(x3),32"},
            ["--ntasks-per-node=1", "--cpus-per-task=32"],
        ),
        ({"SLURM_NTASKS": None}, ["--ntasks-per-node=1", "--cpus-per-task=8"]),
        ({"SLURM_NTASKS": None, "SLURM_NTASKS_PER_NODE": None}, ["--ntasks-per-node=1", "--cpus-per-task=8"]),
        ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": None}, ["--ntasks-per-node=2", "--cpus-per-task=8"]),
    ],
)
def test_tasks_and_their_cores_come_from_whichever_variables_the_job_has(
    cluster: Cluster, env: dict[str, str | None], options: list[str]
) -> None:
    cluster.run(tasks={"0": {"tasks": "4" in env.values()}, "1": {"tasks": "4" in env.values()}}, **env)
    assert cluster.srun()[3:5] == options


def test_what_another_job_has_asked_for_does_not_reach_srun(cluster: Cluster) -> None:
    outer = {
        "SLURM_STEP_ID": "3",
        "SLURM_GPUS_PER_TASK": "4",
        "SLURM_GPUS": "8",
        "SLURM_GPUS_PER_NODE": "1",
        "SLURM_TRES_PER_TASK": "cpu=2",
        "SLURM_TRES_BIND": "gres/gpu:per_task:1",
        "SLURM_MEM_PER_CPU": "500",
        "SLURM_MEM_PER_NODE": "1024",
        "SLURM_CPU_BIND_LIST": "0x1",
        "SLURM_DISTRIBUTION": "cyclic",
    }
    assert cluster.run(parent="slurmstepd: [7.batch]", **outer).returncode == 0
    assert [name for name in outer if cluster.handed(name) and name != "SLURM_STEP_ID"] == []
    assert "--overlap" not in cluster.srun()


def test_in_the_shell_of_a_step_our_step_shares_its_resources(cluster: Cluster) -> None:
    assert cluster.run(batch=False, SLURM_STEP_ID="4294967290").returncode == 0
    assert "--overlap" in cluster.srun()


def test_gpus_are_not_bound_to_tasks_where_there_are_none(cluster: Cluster) -> None:
    cluster.run(SLURM_GPUS_ON_NODE=None)
    assert "--gpu-bind=none" not in cluster.srun()


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


def test_the_checkout_is_the_scripts_own_where_it_is_started_by_hand(cluster: Cluster) -> None:
    link = cluster.folder / "link"
    link.symlink_to(cluster.checkout / "slurm" / "multinode.sbatch")
    ended = cluster.run(APPTRAIN_HOME=None, script=link, batch=False)
    assert (ended.returncode, cluster.handed("APPTRAIN_HOME")) == (0, str(cluster.checkout))


@pytest.mark.parametrize("home", [None, "/nowhere"])
def test_a_checkout_that_is_not_found_is_refused(cluster: Cluster, home: str | None) -> None:
    text = cluster.refused(APPTRAIN_HOME=home)
    assert text == f"{home or cluster.submit_dir} is no checkout of apptrain: set APPTRAIN_HOME to it"


# --- the run directory ------------------------------------------------------------------------------------------


def test_the_run_directory_and_its_key_are_the_users_alone(cluster: Cluster) -> None:
    cluster.run()
    modes = {
        path.name: oct(path.stat().st_mode & 0o777) for path in [cluster.run_dir, *cluster.run_dir.iterdir()]
    }
    assert modes == {
        "apptrain-7": "0o700",
        "job.log": "0o600",
        "join.key": "0o600",
        "logs": "0o700",
        "outcome": "0o700",
    }
    assert len((cluster.run_dir / "join.key").read_text().strip()) == 64


def test_the_key_is_in_no_argument_variable_or_output(cluster: Cluster) -> None:
    ended = cluster.run()
    key = (cluster.run_dir / "join.key").read_text().strip()
    assert key not in repr(cluster.calls()) + ended.stdout + ended.stderr


def test_a_requeued_job_goes_on_in_its_run_directory_with_its_key(cluster: Cluster) -> None:
    cluster.run(tasks={"0": {"status": 75}, "1": {"status": 75}})
    key = (cluster.run_dir / "join.key").read_text()
    ended = cluster.run(SLURM_RESTART_COUNT="1")
    assert (
        "apptrain: this run directory has been used before: the run goes on there"
        in ended.stdout.splitlines()
    )
    assert (cluster.handed("APPTRAIN_ATTEMPT"), (cluster.run_dir / "join.key").read_text()) == ("1", key)
    assert (cluster.run_dir / "job.log").read_text().count("run directory /") == 2


def test_an_attempt_that_left_nothing_but_its_logs_counts(cluster: Cluster) -> None:
    (cluster.run_dir / "logs" / "9").mkdir(parents=True)
    (cluster.run_dir / "outcome").mkdir()
    (cluster.run_dir / "outcome" / "4.0").touch()
    cluster.run()
    assert cluster.handed("APPTRAIN_ATTEMPT") == "10"


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "apptrain-5_3"),
        ({"SLURM_JOB_NAME": "größe/a b;$(x)"}, "gr__e_a_b___x_-7"),
        ({"SLURM_JOB_NAME": None}, "job-7"),
    ],
)
def test_the_run_directory_is_named_after_the_job(
    cluster: Cluster, env: dict[str, str | None], name: str
) -> None:
    cluster.run(**env)
    assert [path.name for path in (cluster.submit_dir / "runs").iterdir()] == [name]


def test_a_given_run_directory_is_taken_from_where_the_script_runs(cluster: Cluster) -> None:
    cluster.run("--run-dir", "my runs/one", APPTRAIN_RUN_DIR="/another")
    assert cluster.handed("APPTRAIN_RUN_DIR") == f"{cluster.submit_dir}/my runs/one"
    assert (cluster.submit_dir / "my runs" / "one" / "job.log").exists()
    assert "--run-dir" not in cluster.launched()


def test_a_run_directory_that_cannot_be_made_is_refused(cluster: Cluster) -> None:
    (cluster.submit_dir / "file").touch()
    text = cluster.refused("--run-dir=file/run")
    assert text == (
        f"the run directory {cluster.submit_dir}/file/run cannot be written (Not a directory): "
        "give --run-dir a directory that all nodes share and you may write"
    )


# --- how it ends ------------------------------------------------------------------------------------------------


def failed(time: str, **how: Any) -> dict[str, Any]:
    return {"status": 7, "rank": 1, "node": "b", "error": "ValueError: no", "time": time, **how}


@pytest.mark.parametrize(
    ("tasks", "status", "line"),
    [
        ({}, 0, None),
        ({"1": failed("9.000000")}, 7, "status 7: rank 1 on b: ValueError: no"),
        (
            {"0": failed("10.000000", status=3, rank=0, node="a"), "1": failed("9.500000")},
            7,
            "status 7: rank 1 on b: ValueError: no",
        ),
        (
            {"0": failed("9.000000", status=3, rank=0, node="a"), "1": failed("9.500000")},
            3,
            "status 3: rank 0 on a: ValueError: no",
        ),
        (
            {"0": {"status": 75, "time": "1.000000"}, "1": failed("9.000000")},
            7,
            "status 7: rank 1 on b: ValueError: no",
        ),
        ({"0": {"status": "none"}, "1": failed("9.000000")}, 7, "status 7: rank 1 on b: ValueError: no"),
        (
            {"1": failed("9.000000", rank="", error="lost: it fell silent", status=1)},
            1,
            "status 1: b: lost: it fell silent",
        ),
        (
            {"0": {"status": 75, "node": "a"}, "1": {"status": 0}},
            1,
            "status 1: a saved to go on, the others ended well",
        ),
        (
            {"1": {"status": 64, "node": "b", "error": "there is no image"}},
            64,
            "status 64: b: there is no image",
        ),
    ],
)
def test_the_status_is_that_of_the_earliest_failure(
    cluster: Cluster, tasks: Tasks, status: int, line: str | None
) -> None:
    ended = cluster.run(tasks=tasks)
    assert (ended.returncode, said(ended)) == (
        status,
        [f"{line} (logs: {cluster.run_dir}/logs/0)"] if line else [],
    )
    assert cluster.scontrol().count("requeue 7") == 0


def test_a_node_without_an_outcome_is_a_failure_that_names_it(cluster: Cluster) -> None:
    ended = cluster.run(tasks={"1": {"status": "none"}})
    assert (ended.returncode, said(ended)) == (
        1,
        [f"status 1: no outcome was written by b (logs: {cluster.run_dir}/logs/0)"],
    )


def test_a_step_that_cannot_start_is_a_failure(cluster: Cluster) -> None:
    ended = cluster.run(FAKE_SRUN="srun: error: Unable to create step")
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "srun: error: Unable to create step",
        f"apptrain: status 1: no outcome was written by a, b (logs: {cluster.run_dir}/logs/0)",
    ]


def test_a_port_that_is_taken_is_tried_again_with_the_next_attempt(cluster: Cluster) -> None:
    taken = {"status": 69, "node": "a", "error": "the port is taken"}
    ended = cluster.run(tasks={"0.0": taken, "1.0": taken})
    assert ended.returncode == 0
    assert [call["env"]["APPTRAIN_ATTEMPT"] for call in cluster.calls()] == ["0", "1", "2"]
    assert said(ended) == [
        "attempt 0: a: the port is taken",
        "trying again: attempt 1, with other ports",
        "attempt 1: a: the port is taken",
        "trying again: attempt 2, with other ports",
    ]


def test_a_rank_that_ends_with_69_itself_is_not_tried_again(cluster: Cluster) -> None:
    ended = cluster.run(tasks={"0": {"status": 69, "node": "a", "rank": 0, "error": "no licence"}})
    assert (ended.returncode, len(cluster.calls())) == (69, 1)
    assert said(ended) == [f"status 69: rank 0 on a: no licence (logs: {cluster.run_dir}/logs/0)"]


def test_three_attempts_are_all(cluster: Cluster) -> None:
    ended = cluster.run(tasks={"0": {"status": 69, "node": "a", "error": "the port is taken"}})
    assert (ended.returncode, len(cluster.calls())) == (69, 3)
    assert said(ended)[-1] == f"status 69: a: the port is taken (logs: {cluster.run_dir}/logs/2)"


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (["--master-port", "29500"], {}),
        (["--master_port=29500"], {}),
        ([], {"APPTRAIN_MASTER_PORT": "29500"}),
        ([], {"APPTRAIN_ARGS": "--device cpu --master-port 29500 -- x.py"}),
    ],
)
def test_a_port_set_by_hand_is_not_tried_again(
    cluster: Cluster, arguments: list[str], env: dict[str, str]
) -> None:
    ended = cluster.run(*arguments, tasks={"0": {"status": 69}}, **env)
    assert (ended.returncode, len(cluster.calls())) == (69, 1)


def test_a_planned_end_on_every_node_requeues_the_job(cluster: Cluster) -> None:
    ended = cluster.run(tasks={node: {"status": 75, "asked": True} for node in "01"})
    assert (ended.returncode, said(ended)) == (75, ["saved at a planned end"])
    assert ended.stdout.splitlines()[-1] == "apptrain: the job will run again, and go on there"
    assert cluster.scontrol() == ["requeue 7"]


def test_a_requeued_job_whose_run_directory_is_gone_says_that_it_begins_anew(cluster: Cluster) -> None:
    gone = f"WARNING: this job has run before, but its run directory {cluster.run_dir} is not there: it begins anew"
    assert said(cluster.run(SLURM_RESTART_COUNT="1")) == [gone]
    assert said(cluster.run(SLURM_RESTART_COUNT="2")) == []


def test_a_job_that_may_not_be_requeued_says_how_to_go_on(cluster: Cluster) -> None:
    ended = cluster.run(
        tasks={"0": {"status": 75}, "1": {"status": 75}}, FAKE_REQUEUE="slurm_requeue error: disabled"
    )
    assert ended.returncode == 75
    assert said(ended)[-1] == (
        "slurm does not run it again (slurm_requeue error: disabled); "
        f"to go on: the same line again with APPTRAIN_RUN_DIR={cluster.run_dir}"
    )


def test_inside_an_allocation_nothing_is_requeued(cluster: Cluster) -> None:
    ended = cluster.run(batch=False, tasks={"0": {"status": 75}, "1": {"status": 75}})
    assert (ended.returncode, cluster.scontrol()) == (75, [])
    assert said(ended)[-1] == f"to go on: the same line again with APPTRAIN_RUN_DIR={cluster.run_dir}"


def requeues(cluster: Cluster, *arguments: str, checkpoints: bool = False) -> list[bool]:
    """Whether the job is requeued after its first to its sixth failure; with a new checkpoint before each."""
    found: list[bool] = []
    for number in range(6):
        if checkpoints:
            checkpoint = cluster.run_dir / "checkpoints" / f"step-{number:08}"
            checkpoint.mkdir(parents=True)
            os.utime(checkpoint, (1_000_000_000 + number, 1_000_000_000 + number))
        assert cluster.run(*arguments, tasks={"0": failed("1.000000")}).returncode == 7
        found.append(len(cluster.scontrol()) > sum(found))
        if not found[-1]:
            break
    return found


def test_failures_requeue_the_job_where_asked_for(cluster: Cluster) -> None:
    ended = cluster.run("--on-failure", "requeue", tasks={"0": failed("1.000000")})
    assert (ended.returncode, cluster.scontrol()) == (7, ["requeue 7"])
    assert cluster.launched() == ["--on-failure=requeue"]
    assert ended.stdout.splitlines()[-1] == "apptrain: the job will run again, and go on there"
    assert (cluster.run_dir / "restarts").read_text() == "1 0\n"


def test_requeues_without_a_new_checkpoint_between_them_come_to_an_end(cluster: Cluster) -> None:
    assert requeues(cluster, "--on-failure=requeue") == [True, True, True, False]
    ended = cluster.run("--on-failure=requeue", "--max-restarts=0", tasks={"0": failed("1.000000")})
    again = f"to go on: the same line again with APPTRAIN_RUN_DIR={cluster.run_dir}"
    assert said(ended)[-1] == f"not run again: restarted 0 times before, and --max-restarts is 0; {again}"


def test_a_new_checkpoint_is_progress_after_which_a_job_may_be_requeued(cluster: Cluster) -> None:
    assert requeues(cluster, "--on-failure=requeue", checkpoints=True) == [True] * 6


def test_requeues_are_as_many_as_asked_in_all(cluster: Cluster) -> None:
    bounds = ("--on-failure=requeue", "--max-restarts", "4")
    assert requeues(cluster, *bounds, checkpoints=True) == [True] * 4 + [False]
    assert cluster.launched() == ["--max-restarts=4", "--on-failure=requeue"]


def test_within_that_number_checkpoints_that_were_seen_must_go_on_to_come(cluster: Cluster) -> None:
    (cluster.run_dir / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert requeues(cluster, "--on-failure=requeue", "--max-restarts=5") == [True, True, True, False]


def test_restarts_without_a_new_checkpoint_count_only_in_a_row(cluster: Cluster) -> None:
    cluster.run_dir.mkdir(parents=True)
    (cluster.run_dir / "restarts").write_text("1 0\n2 1000000010.000000000\n3 0\n4 0\n")
    cluster.run("--on-failure=requeue", tasks={"0": failed("1.000000")})
    assert cluster.scontrol() == ["requeue 7"]


def test_where_there_are_no_checkpoints_a_given_number_of_requeues_counts_alone(cluster: Cluster) -> None:
    assert requeues(cluster, "--on-failure=requeue", "--max-restarts=5") == [True] * 5 + [False]


def test_restarts_inside_the_allocation_count_with_requeues(cluster: Cluster) -> None:
    cluster.run_dir.mkdir(parents=True)
    (cluster.run_dir / "restarts").write_text("1 0\n2 0\n3 0\n")
    ended = cluster.run("--on-failure=restart", tasks={"0": failed("1.000000")})
    assert cluster.scontrol() == []
    assert said(ended)[-1].startswith(
        "not run again: restarted 3 times before, the last 3 without a new checkpoint; "
    )
    assert not (cluster.run_dir / "restarts").exists()


@pytest.mark.parametrize(("end", "requeued"), [(75, 7), (0, 6)])
def test_a_planned_end_and_a_good_one_break_a_row_of_failures(
    cluster: Cluster, end: int, requeued: int
) -> None:
    for status in (7, 7, 7, end, 7, 7, 7):
        tasks = {node: {"status": status, "asked": status == 75} for node in "01"}
        cluster.run(tasks=tasks, APPTRAIN_ON_FAILURE="requeue")
    assert len(cluster.scontrol()) == requeued


def test_a_script_that_ends_with_75_unasked_and_saves_nothing_is_not_run_for_ever(cluster: Cluster) -> None:
    tasks = {node: {"status": 75} for node in "01"}
    ends = [cluster.run(tasks=tasks) for _ in range(4)]
    assert [ended.returncode for ended in ends] == [75] * 4
    assert cluster.scontrol() == ["requeue 7"] * 3
    again = f"to go on: the same line again with APPTRAIN_RUN_DIR={cluster.run_dir}"
    assert said(ends[-1]) == [
        "saved at an end that was not asked for",
        f"not run again: restarted 3 times before, the last 3 without a new checkpoint; {again}",
    ]


def test_a_script_that_ends_with_75_unasked_and_saves_goes_on(cluster: Cluster) -> None:
    for number in range(6):
        step = cluster.run_dir / "checkpoints" / f"step-{number}"
        step.mkdir(parents=True)
        os.utime(step, (number, number))
        cluster.run(tasks={node: {"status": 75} for node in "01"})
    assert cluster.scontrol() == ["requeue 7"] * 6


# --- where the image does not decide ---------------------------------------------------------------------------


def test_an_image_that_does_not_start_is_said_once_and_nothing_is_requeued(cluster: Cluster) -> None:
    ended = cluster.run("--on-failure=requeue", FAKE_IMAGE="prepare")
    image = cluster.checkout / "containers" / "image.sif"
    error = f"the image {image} does not start on {os.uname().nodename} (status 255): FATAL: no such image"
    assert (ended.returncode, ended.stdout, said(ended)) == (255, "", [error])
    assert (cluster.calls(), cluster.scontrol(), cluster.run_dir.exists()) == ([], [], False)


def test_an_image_of_before_is_told_by_what_it_lacks(cluster: Cluster) -> None:
    program = cluster.checkout / "containers" / "run.sh"
    program.write_text(
        "#!/bin/sh\necho \"entrypoint: argument COMMAND: invalid choice: 'prepare' (choose)\" >&2; exit 64\n"
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


# --- restarts inside the allocation -----------------------------------------------------------------------------

GONE_ON = {"crews": {"1": "1 b\n2 c\n"}}
"""Node 0 is lost, and the next two go on, as a job of three nodes of which two take part."""


def three(**more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "a,b,c",
        "SLURM_NTASKS": "3",
        "SLURM_TASKS_PER_NODE": "1(x3)",
        "SLURM_JOB_CPUS_PER_NODE": "8(x3)",
        **more,
    }


def test_a_step_whose_nodes_go_on_is_not_ended_by_one_that_fails_or_is_lost(cluster: Cluster) -> None:
    cluster.run("--on-failure=restart", tasks={})
    assert {"--kill-on-bad-exit=0", "--wait=0", "--no-kill"} <= set(cluster.srun())
    cluster.run("--on-failure=requeue", tasks={})
    assert {"--kill-on-bad-exit=1", "--no-kill"} & set(cluster.srun()) == {"--kill-on-bad-exit=1"}


def test_after_a_restart_the_last_attempt_of_those_that_took_part_counts(cluster: Cluster) -> None:
    tasks = {
        "0": {"status": "none"},
        "1": {**failed("1.000000"), **GONE_ON, "then": {"1": 0}},
        "2": {"then": {"1": 0}},
    }
    ended = cluster.run("--on-failure=restart", "--nnodes=2", tasks=tasks, **three())
    assert (ended.returncode, said(ended)) == (0, [])


def test_where_the_last_attempt_fails_the_job_is_requeued_instead(cluster: Cluster) -> None:
    tasks = {
        "0": {"status": "none"},
        "1": {**failed("1.000000"), **GONE_ON, "then": {"1": 9}},
        "2": {"then": {"1": 0}},
    }
    ended = cluster.run("--on-failure=restart", "--nnodes=2", tasks=tasks, **three())
    assert (ended.returncode, cluster.scontrol()[-1]) == (9, "requeue 7")
    assert said(ended)[-1] == "it does not go on inside the allocation: as with --on-failure requeue"
    assert said(ended)[-2].endswith(f"(logs: {cluster.run_dir}/logs/1)")
    assert (cluster.run_dir / "restarts").read_text() == "2 0\n"


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
    (cluster.run_dir / "unfinished").write_text("0\n")
    (outcomes / "1.1").write_text("status=9\n")
    assert "attempt 2," in cluster.run("--on-failure=restart").stdout
    assert [call["env"]["APPTRAIN_ATTEMPT"] for call in cluster.calls()] == ["2"]
    assert not (cluster.run_dir / "unfinished").exists()


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


def test_an_attempt_of_the_job_script_is_closed_to_nodes_of_an_earlier_one(cluster: Cluster) -> None:
    cluster.run("--on-failure=restart", tasks={})
    assert (cluster.run_dir / "outcome" / "0.nodes").read_text() == ""
    (cluster.run_dir / "outcome" / "1.nodes").touch()
    ended = cluster.run("--on-failure=restart", tasks={})
    assert "attempt 1," in ended.stdout


def test_bad_input_is_never_requeued(cluster: Cluster) -> None:
    ended = cluster.run("--on-failure=requeue", tasks={"0": {"status": 64}})
    assert (ended.returncode, cluster.scontrol()) == (64, [])


# --- signals ----------------------------------------------------------------------------------------------------


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


def test_the_warning_becomes_the_stop_file(
    cluster: Cluster, waiting: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = waiting()
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGUSR2)
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
        ("restart", "2026-11-21T10:00:00", "end=1795255200"),
        ("stop", "2026-11-21T10:00:00", ""),
        ("requeue", "N/A", ""),
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
        (None, 0, 1, True),
        (None, 0, 0, False),
        ("2", 2, 3, True),
        ("2", 2, 2, False),
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


TERMINATED: Tasks = {"0": {"status": 143, "node": "a", "error": "ended by SIGTERM"}}


def test_a_preempted_job_whose_tasks_end_within_the_grace_time_runs_again(cluster: Cluster) -> None:
    job = "JobId=7 JobState=RUNNING Restarts=0 PreemptEligibleTime=2026-11-21T09:00:00 PreemptTime=2026-11-21T10:00:00 "
    ended = cluster.run(tasks=TERMINATED, FAKE_JOB=job)
    assert (ended.returncode, said(ended)) == (143, ["preempted: a: ended by SIGTERM"])
    assert ended.stdout.splitlines()[-1] == "apptrain: the job will run again, and go on there"
    assert cluster.scontrol() == ["requeue 7"]


def test_a_requeue_that_slurm_has_begun_itself_is_one(cluster: Cluster) -> None:
    job = "JobId=7 JobState=COMPLETING Restarts=1 PreemptTime=2026-11-21T10:00:00 "
    ended = cluster.run(tasks=TERMINATED, FAKE_JOB=job, FAKE_REQUEUE="Job is pending execution for job 7")
    assert said(ended) == ["preempted: a: ended by SIGTERM"]
    assert ended.stdout.splitlines()[-1] == "apptrain: the job will run again, and go on there"


def test_tasks_that_were_ended_with_no_preemption_have_failed(cluster: Cluster) -> None:
    job = "JobId=7 JobState=RUNNING Restarts=0 PreemptEligibleTime=2026-11-21T09:00:00 PreemptTime=None "
    ended = cluster.run(tasks=TERMINATED, FAKE_JOB=job)
    assert said(ended) == [f"status 143: a: ended by SIGTERM (logs: {cluster.run_dir}/logs/0)"]
    assert (ended.returncode, cluster.scontrol()) == (143, [])


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


# --- without starting anything ------------------------------------------------------------------------------------


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


# --- refusals -----------------------------------------------------------------------------------------------------


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
            "SLURM_HET_SIZE=2: a heterogeneous job, whose step may leave nodes out: submit one component (no ':' between requests)",
        ),
        (
            [],
            {"SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2,1"},
            "3 tasks on 2 nodes (2,1): every node needs the same number: --ntasks-per-node=1, or one for each rank",
        ),
        (
            [],
            {"SLURM_GPUS": "a100:6", "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "0"},
            "SLURM_GPUS=a100:6 on 2 nodes, but 4 on the first: every node needs the same number: request --gpus-per-node rather than --gpus",
        ),
        (
            [],
            {"SLURM_NTASKS": "two"},
            "SLURM_NTASKS=two: must be a number: unset it if you set it yourself",
        ),
        (["--start", "ssh"], {}, "--start ssh: under Slurm tasks start with srun: leave it out"),
        (["--stop-before=60"], {}, "--stop-before 60: under Slurm it is sbatch --signal=B:USR2@SECONDS"),
        (["--on-failure", "retry"], {}, "--on-failure=retry: must be one of stop, requeue, restart"),
        (
            ["--run-dir"],
            {},
            "argument --run-dir: expected one argument: see `python -m entrypoint launch --help`",
        ),
        (["--run-dir="], {}, "--run-dir is empty: give DIR or leave it out"),
        ([], {"APPTRAIN_DRY_RUN": "yes"}, "APPTRAIN_DRY_RUN=yes: must be 1 or 0"),
        (
            [],
            {"APPTRAIN_ARGS_FILE": "/nowhere"},
            "APPTRAIN_ARGS_FILE=/nowhere cannot be read (No such file or directory): give a path that exists",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    cluster: Cluster, arguments: list[str], env: dict[str, str | None], text: str
) -> None:
    assert cluster.refused(*arguments, **env) == text


def test_a_host_without_room_for_the_pipes_of_the_log_is_refused(cluster: Cluster) -> None:
    mktemp = cluster.folder / "bin/mktemp"
    mktemp.write_text("#!/bin/sh\nexit 1\n")
    mktemp.chmod(0o755)
    text = "no temporary directory can be made: set TMPDIR to a directory of this node"
    assert cluster.refused() == text


def test_two_commands_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "arguments"
    file.write_text("--\0a.py\0")
    text = cluster.refused("--", "b.py", APPTRAIN_ARGS_FILE=str(file))
    assert text == "CMD stands both on the command line and in APPTRAIN_ARGS_FILE: give it once"


def test_the_script_started_in_every_task_of_a_step_is_refused(cluster: Cluster) -> None:
    text = cluster.refused(parent="slurmstepd: [7.0]", SLURM_STEP_ID="0")
    assert text == "job 7, step 0: start this script once, not with srun"


def test_the_script_in_place_of_the_shell_of_an_interactive_step_is_no_task(cluster: Cluster) -> None:
    ended = cluster.run(parent="slurmstepd: [7.interactive]", SLURM_STEP_ID="4294967290")
    assert (ended.returncode, "--overlap" in cluster.srun()) == (0, True)


# --- the site's profile -------------------------------------------------------------------------------------------

LAB = "scheduler: slurm\nclusters: [lab, other]\n"
MODULES = """\
module() {{
    printf '%s\\n' "$*" >>{calls}
    if [[ $1 == use ]]; then MODULEPATH=$2; fi
    if [[ $2 == missing/1 ]]; then return 3; fi
    PATH=$PATH:/from/modules
}}
"""


def add_profile(cluster: Cluster, name: str, text: str) -> Path:
    """A profile of the checkout, or of another place, with its host file."""
    file = cluster.checkout / "clusters" / f"{name}.yaml"
    file.write_text(text)
    render.render(file, write=True)
    return file


def test_the_profile_is_the_one_that_knows_the_clusters_name(cluster: Cluster) -> None:
    add_profile(cluster, "elsewhere", "scheduler: slurm\nclusters: [laboratory, la]\n")
    add_profile(cluster, "nameless", "scheduler: slurm\n")
    file = add_profile(cluster, "here", LAB)
    ended = cluster.run()
    assert (ended.returncode, cluster.handed("APPTRAIN_PROFILE")) == (0, str(file))
    assert f"profile {file}," in ended.stdout


def test_an_option_wins_over_a_variable_and_that_over_the_clusters_name(cluster: Cluster) -> None:
    for name, text in (("here", LAB), ("mine", "scheduler: slurm"), ("other", "scheduler: slurm")):
        add_profile(cluster, name, text)
    clusters = cluster.checkout / "clusters"
    cluster.run(APPTRAIN_PROFILE="other")
    assert cluster.handed("APPTRAIN_PROFILE") == str(clusters / "other.yaml")
    cluster.run("--profile=mine", APPTRAIN_PROFILE="other")
    assert cluster.handed("APPTRAIN_PROFILE") == str(clusters / "mine.yaml")
    assert cluster.launched() == []


def test_a_profile_from_outside_the_checkout_is_shown_inside(cluster: Cluster) -> None:
    file = add_profile(cluster, "../../submit/mine", "scheduler: slurm").resolve()
    assert cluster.run("--profile", "mine.yaml").returncode == 0
    assert (cluster.handed("APPTRAIN_PROFILE"), cluster.binds()["the profile"]) == (str(file), [str(file)])


def test_a_profile_says_what_starts_the_image_and_what_it_shows(cluster: Cluster) -> None:
    add_profile(
        cluster,
        "here",
        LAB + "launcher_args: ['--network=single_node_vni', '--comment=a $(touch pwned) b']\n"
        "container: {program: $HOME/bin/apptainer, stack: cu126, pass: [MY_*, TOKEN],\n"
        "            binds: ['$DATA', '/a b:/c:ro', '/`touch pwned`']}\n",
    )
    ended = cluster.run(DATA="/data/it's $HOME", APPTRAIN_BIND="/mine", APPTRAIN_PASS="OWN")
    assert (ended.returncode, ended.stderr) == (0, "")
    handed = {name: cluster.handed(f"APPTRAIN_{name}") for name in ("IMAGE", "APPTAINER", "BIND", "PASS")}
    assert handed == {
        "IMAGE": f"{cluster.checkout}/containers/image-cu126.sif",
        "APPTAINER": f"{cluster.folder}/home/bin/apptainer",
        "BIND": "/mine",
        "PASS": "OWN",
    }
    assert cluster.binds()["the profile's"] == ["/data/it's $HOME", "/a b:/c:ro", "/`touch pwned`"]
    options = cluster.run_options()
    assert [options[at + 1] for at, word in enumerate(options) if word == "--pass"] == ["MY_*", "TOKEN"]
    words = cluster.srun()
    at = words.index("--quit-on-interrupt")
    assert words[at + 1 : at + 3] == ["--network=single_node_vni", "--comment=a $(touch pwned) b"]
    assert not list(cluster.folder.rglob("pwned"))


def test_what_the_user_set_wins_over_the_profile(cluster: Cluster) -> None:
    add_profile(
        cluster, "here", LAB + "scratch: /nowhere\ncontainer: {program: /site/apptainer, stack: cu126}\n"
    )
    mine = {"APPTRAIN_APPTAINER": "/my/apptainer", "APPTRAIN_IMAGE": "/my.sif"}
    assert cluster.run("--run-dir", "run", **mine).returncode == 0
    assert {name: cluster.handed(name) for name in mine} == mine
    assert cluster.handed("APPTRAIN_RUN_DIR") == f"{cluster.submit_dir}/run"


def test_run_directories_lie_in_the_profiles_scratch(cluster: Cluster) -> None:
    add_profile(cluster, "here", LAB + "scratch: ${SCRATCH}/$USER/\n")
    assert cluster.run(SCRATCH=f"{cluster.folder}/scratch", USER="alice").returncode == 0
    assert cluster.handed("APPTRAIN_RUN_DIR") == f"{cluster.folder}/scratch/alice/runs/apptrain-7"


@pytest.mark.parametrize("variable", ["LMOD_PKG", "MODULESHOME"])
def test_modules_are_loaded_from_the_profiles_paths_and_reach_the_nodes(
    cluster: Cluster, variable: str
) -> None:
    calls = cluster.folder / "modules.txt"
    init = cluster.folder / "lmod" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text(MODULES.format(calls=shlex.quote(str(calls))))
    paths = "container: {module_paths: [/soft/modules, $SOFT/more], modules: [spack/1, apptainer]}\n"
    add_profile(cluster, "here", LAB + paths)
    ended = cluster.run(SOFT="/my soft", **{variable: str(init.parent.parent)})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert calls.read_text() == "use /soft/modules /my soft/more\nload spack/1 apptainer\n"
    assert (cluster.handed("PATH") or "").endswith(":/from/modules:/from/modules")


@pytest.mark.parametrize(("init", "status"), [("lmod", 3), ("nowhere", 127)])
def test_modules_that_cannot_be_loaded_end_the_job(cluster: Cluster, init: str, status: int) -> None:
    (cluster.folder / "lmod" / "init").mkdir(parents=True)
    (cluster.folder / "lmod" / "init" / "bash").write_text(MODULES.format(calls="/dev/null"))
    file = add_profile(cluster, "here", LAB + "container: {modules: [missing/1]}\n")
    ended = cluster.run(LMOD_PKG=str(cluster.folder / init))
    assert (ended.returncode, cluster.calls()) == (64, [])
    assert said(ended) == [
        f"module load missing/1 of the profile {file} ended with status {status}: "
        "correct its modules (module avail lists them)"
    ]


def test_two_profiles_for_a_cluster_are_refused(cluster: Cluster) -> None:
    for name in ("a", "b"):
        add_profile(cluster, name, LAB)
    assert cluster.refused() == "a.yaml b.yaml are all for the cluster lab: choose one with --profile"
    assert cluster.run("--profile", "b").returncode == 0


def test_an_unknown_profile_is_refused(cluster: Cluster) -> None:
    clusters = cluster.checkout / "clusters"
    assert cluster.refused("--profile", "nowhere") == (
        f"there is no profile {clusters}/nowhere.yaml: the sites are in {clusters}"
    )


def test_a_profile_without_its_host_file_or_with_an_older_one_is_refused(cluster: Cluster) -> None:
    file = add_profile(cluster, "here", LAB)
    host = file.with_suffix(".host")
    file.write_text(LAB + "title: changed\n")
    assert cluster.refused() == f"{host} is not made from {file} as that is now: make profiles"
    mine = cluster.submit_dir / "it's mine.yaml"
    mine.write_text(LAB)
    assert cluster.refused("--profile", "./it's mine.yaml") == (
        f"{cluster.submit_dir}/./it's mine.host is missing: "
        f"make profiles PROFILE={cluster.submit_dir}/./it\\'s\\ mine.yaml"
    )


def test_a_profile_for_another_scheduler_is_refused(cluster: Cluster) -> None:
    file = add_profile(cluster, "elsewhere", "scheduler: pbs")
    assert cluster.refused("--profile=elsewhere") == (
        f"the profile {file} is for pbs, and this is a job of slurm: choose another with --profile"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("scratch: $SCRATCH/x", "$SCRATCH/x"),
        ("container: {binds: ['${SCRATCH}:/x']}", "${SCRATCH}:/x"),
        ("container: {module_paths: [$SCRATCH/m], modules: [x]}", "$SCRATCH/m"),
        ("container: {program: $SCRATCH/apptainer}", "$SCRATCH/apptainer"),
    ],
)
def test_a_variable_that_is_not_set_here_is_refused(cluster: Cluster, text: str, value: str) -> None:
    file = add_profile(cluster, "here", LAB + text)
    assert cluster.refused() == (
        f"{value} in the profile {file}: SCRATCH is not set here: set it, or correct the profile"
    )


def test_the_profiles_that_are_there_are_read_by_the_job_scripts(cluster: Cluster) -> None:
    for file in (CHECKOUT / "clusters").glob("*.*"):
        if file.suffix in (".yaml", ".host"):
            shutil.copy(file, cluster.checkout / "clusters")
    ended = cluster.run(SLURM_CLUSTER_NAME="perlmutter", PSCRATCH=f"{cluster.folder}/pscratch")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert cluster.handed("APPTRAIN_PROFILE") == f"{cluster.checkout}/clusters/perlmutter.yaml"
    assert cluster.handed("APPTRAIN_RUN_DIR") == f"{cluster.folder}/pscratch/runs/apptrain-7"
