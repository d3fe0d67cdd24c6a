"""containers/run.sh: how it ends, outcomes, and what is shown of a line."""

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome
from tests.unit.host.node import (
    BOUND,
    IMAGE_ID,
    NODE,
    NV,
    OF_CHECKOUT,
    RUN_SH,
    Node,
    bound,
    named,
    said,
)


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
CATCHING = """
import os, signal, sys, time
seen = []
def note(signum, frame):
    seen.append(signum)
for signum in map(int, sys.argv[1:]):
    signal.signal(signum, note)
print("ready", signal.getsignal(signal.SIGINT) != signal.SIG_IGN, flush=True)
while not seen:
    time.sleep(0.02)
time.sleep(0.2)  # for a second one
print(*seen)
sys.exit(7)
"""


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_reaches_the_command_once_and_its_status_comes_back(
    node: Node, signum: signal.Signals
) -> None:
    with node.start(sys.executable, "-c", CATCHING, str(int(signum))) as process:
        assert first_line(process) == "ready True\n"
        process.send_signal(signum)
        out, err = process.communicate(timeout=BOUND)
    assert (process.returncode, out, err, node.left()) == (7, f"{int(signum)}\n", "", [])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_death_by_a_signal_is_128_and_its_number(node: Node, signum: signal.Signals) -> None:
    ended = node.run("sh", "-c", f"kill -{int(signum)} $$")
    assert (ended.returncode, ended.stderr, node.left()) == (128 + signum, "", [])


def test_a_signal_that_ends_the_command_leaves_nothing(node: Node) -> None:
    with node.start("sh", "-c", "echo ready; exec sleep 60") as process:
        assert first_line(process) == "ready\n"
        process.terminate()
        _, err = process.communicate(timeout=BOUND)
    assert (process.returncode, err, node.left()) == (143, "", [])


def test_a_signal_before_the_start_ends_it(node: Node) -> None:
    gate = node.programs / "gate"
    os.mkfifo(gate)
    node.program("od", f'#!/bin/sh\nread line <{gate}\nexec /usr/bin/od "$@"\n')
    with node.start("true") as process:
        writer = gate.open("w")
        process.terminate()
        writer.close()
        _, err = process.communicate(timeout=BOUND)
    assert (process.returncode, err, node.calls(), node.left()) == (143, "", [], [])


def test_a_user_whose_shell_overwrites_nothing_has_the_same_run(node: Node) -> None:
    options = node.path / "of shells"
    options.write_text("set -o noclobber\n")
    ended = node.run("echo", "hi", BASH_ENV=str(options))
    assert (ended.returncode, ended.stdout, ended.stderr, node.left()) == (0, "hi\n", "", [])


def test_standard_input_reaches_the_command(node: Node) -> None:
    assert node.call([node.image, "cat"], text="line\n").stdout == "line\n"


def test_off_a_terminal_the_command_has_a_process_group_of_its_own(node: Node) -> None:
    assert node.run("true").returncode == 0
    (call,) = node.calls()
    assert call["group"] == call["pid"]


def test_at_a_terminal_ctrl_c_reaches_the_command_once(node: Node) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        command = [str(RUN_SH), str(node.image), sys.executable, "-c", CATCHING, "2"]
        os.chdir(node.work)
        os.execve(
            RUN_SH, command, {os.fsencode(name): os.fsencode(value) for name, value in node.env.items()}
        )
    said_there = b""
    asked = False
    while select.select([terminal], [], [], BOUND)[0]:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:
            break
        said_there += chunk
        if not asked and b"ready" in said_there:
            os.write(terminal, b"\x03")
            asked = True
    _, status = os.waitpid(pid, 0)
    lines = [line for line in said_there.decode().splitlines() if "/dev/shm" not in line]
    assert (os.waitstatus_to_exitcode(status), lines) == (7, ["ready True", "^C2"])
    assert node.left() == []


TASK = {"SLURM_NODEID": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "APPTRAIN_ATTEMPT": "2"}


def outcomes(run: Path) -> dict[str, Outcome | None]:
    return {path.name: outcome.read(path) for path in (run / "outcome").iterdir()}


def check_outcome(run: Path, name: str, status: int, error: str, signum: int = 0) -> None:
    """There is this outcome and no other, written within the test's time."""
    (found,) = outcomes(run).items()
    assert found[1] is not None
    assert abs(found[1].time - time.time()) < BOUND
    expected = Outcome(status=status, node=NODE, signal=signum, time=found[1].time, error=error)
    assert found == (name, expected)
    assert (run / "outcome" / name).stat().st_mode & 0o777 == 0o600
    assert run.stat().st_mode & 0o777 == 0o700


def test_a_node_without_its_image_leaves_an_outcome(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    missing = node.path / "none.sif"
    ended = node.call(["--outcome", named(run), missing, "python"], env=TASK)
    assert ended.returncode == 64
    check_outcome(run, "2.3", 64, said(ended))


def test_apptainers_own_failure_leaves_an_outcome(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    ended = node.task("--outcome", named(run), FAKE_STATUS="255", **TASK)
    assert ended.returncode == 255
    check_outcome(run, "2.3", 255, "apptainer ended with status 255 before CMD began")


def test_an_entrypoint_that_was_killed_leaves_an_outcome(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    node.python("kill -9 $$")
    assert node.task("--outcome", named(run), **TASK).returncode == 137
    check_outcome(run, "2.3", 137, "the entrypoint ended with status 137 and left no outcome", signum=9)


def test_an_outcome_that_the_entrypoint_writes_where_it_is_told_to_is_kept(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    node.python('echo status=5 >"$APPTRAIN_OUTCOME"; exit 5')
    assert node.task("--outcome", named(run), **TASK).returncode == 5
    assert outcomes(run) == {"2.3": Outcome(status=5)}


def test_a_good_end_and_other_commands_leave_none(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    node.python("exit 0")
    assert node.task("--outcome", named(run), **TASK).returncode == 0
    assert node.run("false", **TASK).returncode == 1
    assert outcomes(run) == {}


def test_an_earlier_runs_outcome_of_the_same_attempt_goes_at_the_start(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    (run / "outcome").mkdir(parents=True)
    for name in ("2.3", "2.4", "1.3"):
        (run / "outcome" / name).write_text("status=1\n")
    node.python("exit 0")
    assert node.task("--outcome", named(run), **TASK).returncode == 0
    assert sorted(outcomes(run)) == ["1.3", "2.4"]


@pytest.mark.parametrize(
    ("task", "name", "found"),
    [
        ({"PBS_NODENUM": "1"}, "%a.%n", "0.1"),
        ({"APPTRAIN_NODE_RANK": "4"}, "%a.%n", "0.4"),
        ({"SLURM_NODEID": "1", "APPTRAIN_ATTEMPT": "2"}, "%a.%n", "2.1"),
        ({"SLURM_NODEID": "1", "SLURM_LOCALID": "3"}, "%a.%n.%t", "0.1.3"),
    ],
)
def test_the_outcome_has_the_name_that_the_job_script_says(
    node: Node, task: dict[str, str], name: str, found: str
) -> None:
    run = node.path / "runs" / "100%n of it"
    node.python("exit 9")
    assert node.task("--outcome", f"{run}/outcome/{name}", **task).returncode == 9
    assert list(outcomes(run)) == [found]


def test_a_run_directory_that_cannot_be_made_is_refused(node: Node) -> None:
    (node.work / "file").touch()
    ended = node.task("--outcome", named(node.work / "file" / "run"), **TASK)
    assert node.refused(ended) == (
        f"the run directory {node.work}/file/run cannot be made: give another in APPTRAIN_RUN_DIR, which all nodes share"
    )


def test_help_names_each_option_that_there_is() -> None:
    text = RUN_SH.read_text()
    listed = re.search(r"\n    while \(\(\$#\)\) && \[\[ \$1 == --\* \]\]; do\n(.*?)\n    done\n", text, re.S)
    assert listed
    printed = subprocess.run(
        ["bash", RUN_SH, "--help"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout.startswith("Usage: containers/run.sh [OPTION...] IMAGE CMD [ARG...]")
    named = re.findall(r"(?m)^ {7}(--[a-z-]+)", printed.stdout)
    assert sorted(named) == sorted(set(re.findall(r"(?m)(?:^ {12}|\| )(--[a-z-]+)", listed[1])))


def test_show_prints_what_would_run_and_starts_nothing(node: Node) -> None:
    read_only = node.path / "set"
    read_only.mkdir()
    run = node.path / "runs" / "job-1"
    command = ("python", "-P", "-m", "entrypoint", "launch", "--", "a b.py")
    env = {
        "HF_TOKEN": "secret",
        "APPTRAIN_BIND": f"{read_only}:/data:ro",
        "APPTRAIN_RUN_DIR": str(run),
        **TASK,
    }
    ended = node.call(["--show", node.image, *command], env=env)
    assert (ended.returncode, ended.stderr, node.calls(), node.left(), run.exists()) == (0, "", [], [], False)
    tmp = re.search(rf"{node.disk}/apptrain\.\w{{6}}", ended.stdout)
    assert tmp
    given = [
        *(
            "APPTRAIN_ATTEMPT",
            "APPTRAIN_BIND",
            "APPTRAIN_IMAGE_ID",
            "APPTRAIN_NOT_PASSED",
            "APPTRAIN_PASSED",
            "APPTRAIN_RUN_DIR",
            "HF_HOME",
            "HF_TOKEN",
            "LOGNAME",
            "MPLCONFIGDIR",
        ),
        *(
            "PYTHONNOUSERSITE",
            "SLURM_NODEID",
            "SLURM_STEP_TASKS_PER_NODE",
            "TMPDIR",
            "TORCHINDUCTOR_CACHE_DIR",
        ),
        *("TORCH_HOME", "TRITON_CACHE_DIR", "USER", "XDG_CACHE_HOME"),
    ]
    binds = [
        (f"{read_only}:/data", "ro", "APPTRAIN_BIND"),
        (node.home, "rw", "HOME"),
        ("/tmp", "rw", "the node's"),
        ("/var/tmp", "rw", "the node's"),
        (node.work, "rw", "the working directory"),
        (f"{RUN_SH.parents[1]}/entrypoint:/.apptrain/entrypoint", "ro", "the checkout's"),
        (f"{RUN_SH.parents[1]}/src/train:/.apptrain/train", "ro", "the checkout's"),
    ]
    mounts = [bound(read_only, "/data") + ",ro", *node.always(), bound(node.work), *OF_CHECKOUT]
    line = [
        *(str(node.apptainer), "-q", "exec", "--cleanenv", "--no-eval", "--no-mount", "home,cwd,tmp", *NV),
        *(word for mount in mounts for word in ("--mount", mount)),
        *("--pwd", str(node.work), str(node.image), "/bin/sh", f"{tmp[0]}/.start", *command),
    ]
    *shown, last = ended.stdout.splitlines()
    assert shown == [
        f"image    {node.image} (sif {IMAGE_ID})",
        f"with     {node.apptainer} (apptainer 1.4.5)",
        f"starts   in {node.work}",
        "",
        "binds",
        *(f"  {path}, {mode}  [{reason}]" for path, mode, reason in binds),
        "",
        "variables",
        *(f"  {name}" for name in sorted(given)),
        "",
        "command",
    ]
    assert shlex.split(last) == line


def test_the_documentation_names_what_passes_and_what_never_does() -> None:
    script = f"""checkout={RUN_SH.parents[1]}; source "$checkout/host/schedulers.sh"; source "$checkout/host/environment.sh"; read_table
        printf '%s\\n' "${{PASSED[@]}}" "${{FILES[@]}}" "${{NEVER[@]}}" "${{CACHES[@]}}" """
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    names = ended.stdout.split()
    assert len(names) > 60
    text = (RUN_SH.parents[1] / "docs" / "run.md").read_text()
    assert [name for name in names if f"`{name}`" not in text] == []


# --- one function at a time -----------------------------------------------------------------------------------

STATE = """
node=n1 node_rank='' local_rank='' quiet='' tmp=$2 outcome='' signalled='' opened='' entry='' share='' package=apptainer
status=0 line=(apptainer exec) lock='' hold=''
print_message() { echo "says $*"; }
"""


def bash(folder: Path, script: str) -> list[str]:
    """The lines that this prints with run.sh's functions, which run nothing."""
    (folder / "containers").mkdir(exist_ok=True)
    text = RUN_SH.read_text()
    assert text.endswith('\nmain "$@"\n')
    (folder / "containers/run.sh").write_text(text.removesuffix('main "$@"\n'))
    if not (folder / "host").exists():
        (folder / "host").symlink_to(RUN_SH.parents[1] / "host")
    tmp = folder / "tmp"
    tmp.mkdir(exist_ok=True)
    line = [
        "bash",
        "-c",
        'source "$1"; ' + STATE + script,
        "bash",
        str(folder / "containers/run.sh"),
        str(tmp),
    ]
    return subprocess.run(
        line, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=BOUND, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize(
    ("state", "for_node", "for_job"),
    [
        ("", True, True),
        ("local_rank=0 node_rank=0", True, True),
        ("local_rank=1", False, False),
        ("node_rank=2", True, False),
        ("node_rank=2 local_rank=1", False, False),
        ("quiet=yes", False, False),
    ],
)
def test_what_is_the_same_for_all_is_said_by_the_first_task(
    tmp_path: Path, state: str, for_node: bool, for_job: bool
) -> None:
    told = bash(tmp_path, f"{state or ':'}; say_for_node one; say_for_job two")
    assert told == ["says n1: one"] * for_node + ["says n1: two"] * for_job


@pytest.mark.parametrize(
    ("free", "why"), [("63", "says n1: /dev/shm has 63 MB free, less than 64: "), ("64", ""), ("65", "")]
)
def test_little_shared_memory_is_said_with_what_it_does(tmp_path: Path, free: str, why: str) -> None:
    told = bash(tmp_path, f"shm_mb=64; free=(1000 {free}); check_shm")
    advice = "DataLoader's workers and NCCL may fail (use fewer workers or none, NCCL_SHM_DISABLE=1)"
    assert told == ([why + advice] if why else [])


def test_paths_that_cmd_names_are_those_that_are_there(tmp_path: Path) -> None:
    for name in ("a b", "data", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "x.py").touch()
    words = [
        "x.py",
        "a b",
        "--data=data",
        "none",
        "--lr=0.1",
        f"{tmp_path}/runs/new",
        f"--out={tmp_path}/runs/new",
        "/none/new",
        "runs/new",
        "/",
    ]
    quoted = " ".join(shlex.quote(word) for word in words)
    told = bash(tmp_path, f"cd {tmp_path}; command=({quoted}); find_named; printf '%s\\n' \"${{named[@]}}\"")
    assert told == ["x.py", "a b", "data", f"{tmp_path}/runs", f"{tmp_path}/runs", "/"]


@pytest.mark.parametrize("text", ["plain", "it's", "''", "a b", "$x`y`", "", "\n"])
def test_a_text_is_one_word_of_a_shell(tmp_path: Path, text: str) -> None:
    (word,) = shlex.split(
        "".join(
            f"{line}\n" for line in bash(tmp_path, f'quote {shlex.quote(text)}; echo "$answer"')
        ).removesuffix("\n")
    )
    assert word == text


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("status=0", []),
        ("status=7; touch $tmp/.started", ["7 the entrypoint ended with status 7 and left no outcome"]),
        ("status=143 signalled=yes", ["143 the entrypoint ended with status 143 and left no outcome"]),
        (
            "status=255",
            [
                "says n1: apptainer ended with status 255 before CMD began: its own message stands above",
                "255 apptainer ended with status 255 before CMD began",
            ],
        ),
    ],
)
def test_how_it_ended_is_told_in_the_entrypoints_place(tmp_path: Path, state: str, told: list[str]) -> None:
    assert bash(tmp_path, f'tell_outcome() {{ echo "$*"; }}; {state}; conclude') == told


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ("join_share() { entry=5; }", "apptainer exec"),
        ("share=/s; join_share() { entry=5; }", "enter_share"),
        ("share=/s; join_share() { return 1; }", "apptainer exec released"),
        ("share=/s; join_share() { entry=5; return 1; }", "apptainer exec released"),
    ],
)
def test_a_task_enters_the_container_that_is_shared_or_mounts_the_image(
    tmp_path: Path, state: str, line: str
) -> None:
    script = f'release_share() {{ line+=(released); }}; {state}; use_share 4>&2; echo "${{line[*]}}"'
    assert bash(tmp_path, script) == [line]


@pytest.mark.parametrize(
    ("state", "failed"),
    [
        ("entry=5 status=1", True),
        ("entry=5 status=1 opened=yes", True),
        ("entry='' status=1", False),
        ("entry=5 status=0", False),
        ("entry=5 status=1 signalled=yes", False),
        ("entry=5 status=1; touch $tmp/.started", False),
    ],
)
def test_a_container_that_could_not_be_entered_is_done_without(
    tmp_path: Path, state: str, failed: bool
) -> None:
    """Who has opened it keeps it for the others."""
    script = f"release_share() {{ echo released; }}; {state}; if share_failed; then echo failed; fi"
    released = ["released"] if "opened" not in state else []
    told = [*released, "says n1: nsenter ended with status 1: this task mounts the image itself", "failed"]
    assert bash(tmp_path, script) == (told if failed else [])


def test_nothing_that_a_task_runs_before_it_has_looked_for_room_is_a_here_document() -> None:
    """Before 5.1 bash writes each to TMPDIR, which may be full, or not be there."""
    sourced = re.findall(r'source "\$checkout/(.*)"', RUN_SH.read_text())
    assert len(sourced) > 5
    for path in (RUN_SH, *(RUN_SH.parents[1] / name for name in sourced)):
        assert not re.search(r"<<[<-]?[ '\"$\w]", path.read_text()), path
