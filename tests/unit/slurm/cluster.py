"""`slurm/multinode.sbatch` and `host/job.sh` with stand-ins for Slurm's programs and for run.sh.

The stand-in for srun starts the tasks of a step, one for each task of each node, with the variables of a step; the
one for run.sh does what a test says for an attempt and a node. tests/cluster/test_slurm.py has the real ones.
"""

import marshal
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tests.unit import in_image
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
if word == "prepare" and os.environ.get("FAKE_WARNED"):  # of the end, before the tasks start
    os.kill(int(open(f"/proc/{{os.getppid()}}/stat").read().rpartition(")")[2].split()[1]), _signal.SIGUSR2)
if word in ("prepare", "conclude"):
    if os.environ.get("FAKE_IMAGE") in (word, "all"):
        print("FATAL: no such image", file=sys.stderr)
        sys.exit(255)
    exec({in_image!r})
node, attempt = os.environ["SLURM_NODEID"], os.environ["APPTRAIN_ATTEMPT"]
what = eval(os.environ.get("FAKE_TASKS", "{{}}"))
what = what.get(attempt + "." + node, what.get(node, {{}}))
run = os.environ["APPTRAIN_RUN_DIR"]
print(f"task of node {{node}}", what.get("print", ""), flush=True)
if what.get("stderr"):
    print(what["stderr"], file=sys.stderr, flush=True)
if word == "plan":
    sys.exit(what.get("status", 0))
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
if what.get("another"):  # job that has begun in this run directory
    with open(f"{{run}}/unfinished", "w") as file:
        print(what["another"], file=file)
status = what.get("status", 0)
if status != "none":
    lines = {{"status": status, "rank": what.get("rank", ""), "node": what.get("node", ""), "signal": 0,
        "time": what.get("time", "100.000000"), "error": what.get("error", "")}}
    with open(f"{{run}}/outcome/{{attempt}}.{{node}}", "w") as file:
        file.writelines(f"{{name}}={{value}}\\n" for name, value in lines.items())
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
        for script in ("train.py", "x.py", "my.py", "a.py", "b.py", "a b.py", "a b"):
            (self.submit_dir / script).touch()
        shutil.copytree(CHECKOUT / "slurm", self.checkout / "slurm")
        shutil.copy(CHECKOUT / "slurm" / "multinode.sbatch", self.spool)
        (self.checkout / "host").mkdir()
        for name in ("job.sh", "common.sh", "staging.sh", "stage.sh", "staged.sh"):
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
            (folder / name).write_text(
                text.format(python=sys.executable, here=folder, in_image=in_image.client())
            )
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


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def said(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """The job script's own lines on stderr."""
    lines = ended.stderr.splitlines()
    return [line.removeprefix("apptrain: ") for line in lines if line.startswith("apptrain: ")]


def failed(time: str, **how: Any) -> dict[str, Any]:
    return {"status": 7, "rank": 1, "node": "b", "error": "ValueError: no", "time": time, **how}
