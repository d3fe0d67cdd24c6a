"""`host/share.sh` with stand-ins for Apptainer and nsenter: the tasks of a node meet at one container.

The stand-in for the container is a process of this machine that waits, and to enter it is to run a program with its
environment. tests/cluster/test_run_sh.py has the real ones.
"""

import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from entrypoint.node import processes
from tests.unit.bounds import shorten

SHARE_SH = Path(__file__).resolve().parents[3] / "host" / "share.sh"
BOUND = 40  # s, for anything started here
RUN_SH = r"""
set -euo pipefail
source "$1"
share=$2 SLURM_LOCALID=$3 nsenter=$4 tmp=$5 container_shell=$6
say_for_node() { printf '%s\n' "$*" >&2; }
quote() { answer="'$1'"; }
image=/images/image.sif image_id=7be444fb nv='' compat='' prefix=APPTAINER
sources=(/scratch) targets=(/scratch) modes=("${7:-rw}") given=(WORD)
opened='' container='' lock='' hold='' entry=''
export APPTAINERENV_WORD='two words'
command=(sh -c 'echo "$0: $WORD, $OF_THE_IMAGE"' "task $SLURM_LOCALID")
line=(env OF_THE_IMAGE=yes "$container_shell" "$tmp/.start" "${command[@]}")
{ join_share 2>/dev/null || entry=''; } 4>&2
echo "${entry:-none}"
if [[ -n $entry ]]; then (enter_share); else release_share; fi
read -r status
if [[ -n $opened ]]; then close_share 2>/dev/null || true; fi
"""
"""What containers/run.sh does with it. The last line that it reads is the status of what ran."""
ENTERS = '#!/bin/sh\nwhile [ "$1" != --target ]; do shift; done\nshift 2\nexec "$@"\n'


class Task:
    def __init__(self, node: "Node", local_rank: int, modes: str) -> None:
        argv: list[str | Path] = [
            "bash",
            "-c",
            RUN_SH,
            "run.sh",
            node.script,
            node.share,
            str(local_rank),
            node.nsenter,
            node.folder,
        ]
        self.process = subprocess.Popen(
            [*argv, node.shell, modes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )

    def line(self) -> str:
        out = self.process.stdout
        assert out is not None
        assert select.select([out], [], [], BOUND)[0], f"it says nothing for {BOUND} s"
        return out.readline().decode().rstrip("\n")

    def over(self, status: int = 0) -> None:
        """What it ran is over."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % status)

    def end(self) -> str:
        """What it said on stderr, once it has ended."""
        _, err = self.process.communicate(timeout=BOUND)
        assert self.process.returncode == 0, err
        return err.decode()


class Node:
    """Where the tasks of a step meet."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.share = folder, folder / "share"
        self.script, self.nsenter, self.shell = folder / "share.sh", folder / "nsenter", "/bin/sh"
        shutil.copyfile(SHARE_SH, self.script)
        shorten(self.script, SHARE_WAIT=3600, LINGER=3600)
        self.program(self.nsenter, ENTERS)
        (folder / ".start").write_text('exec "$@"\n')
        self.tasks: list[Task] = []

    def program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def start(self, local_rank: int, modes: str = "rw") -> Task:
        self.tasks.append(Task(self, local_rank, modes))
        return self.tasks[-1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path)
    yield found
    for task in found.tasks:
        task.process.kill()
        task.process.communicate()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


NOBODY = 65534
BASH = shutil.which("bash") or "bash"
SETPRIV = shutil.which("setpriv") or "setpriv"
AS_A_USER = [SETPRIV, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
STEP = {
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "3",
    "APPTRAIN_ATTEMPT": "2",
    "SLURM_RESTART_COUNT": "5",
    "kind": "sif",
    "package": "apptainer",
    "outcome": "/run/outcome/0.0",
    "show_only": "",
    "setuid": "",
    "unmounted": "",
}
"""What run.sh knows of the task where tasks may share a mount."""


def place(*without: str, **changes: str) -> str:
    """Where such a task meets the others, without the user; empty where it does not."""
    env = {
        name: value
        for name, value in (STEP | {"PATH": os.environ["PATH"]} | changes).items()
        if name not in without
    }
    script = f'{SHARE_SH.read_text()}\nfind_share </dev/null\nprintf %s "$share"'
    done = subprocess.run(
        [*AS_A_USER, BASH, "-euo", "pipefail", "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(str(NOBODY if AS_A_USER else os.geteuid()), "USER")


def test_the_tasks_of_an_attempt_on_a_node_have_a_place_of_their_own() -> None:
    assert place() == "/tmp/apptrain-USER.7.0.2.1"
    assert place("APPTRAIN_ATTEMPT") == "/tmp/apptrain-USER.7.0.5.1"
    assert place("APPTRAIN_ATTEMPT", "SLURM_RESTART_COUNT") == "/tmp/apptrain-USER.7.0.0.1"
    assert place(options="--no-fakeroot --x") == place()
    assert place(SLURM_STEP_TASKS_PER_NODE="2,1") == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        {"SLURM_STEP_TASKS_PER_NODE": "1"},
        {"SLURM_STEP_TASKS_PER_NODE": ""},
        {"SLURM_LOCALID": ""},
        {"SLURM_STEP_ID": "interactive"},
        {"kind": "sandbox"},
        {"package": "singularity"},
        {"outcome": ""},
        {"show_only": "yes"},
        {"setuid": "yes"},
        {"unmounted": "fuse: no luck"},
        {"options": "--x --fakeroot"},
        {"PATH": "/no/programs"},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_a_task_that_cannot_share_a_mount_has_none(changes: dict[str, str]) -> None:
    assert place(**changes) == ""


@pytest.mark.parametrize("status", [0, 1, 143])
def test_the_tasks_of_a_node_enter_one_container_which_ends_after_the_last(node: Node, status: int) -> None:
    tasks = [node.start(local_rank) for local_rank in (2, 0, 1)]
    (entry,) = {int(task.line()) for task in tasks}
    assert [task.line() for task in tasks] == [f"task {rank}: two words, yes" for rank in (2, 0, 1)]
    assert b"APPTAINERENV" not in Path(f"/proc/{entry}/environ").read_bytes()
    first, *others = tasks[1], tasks[0], tasks[2]
    first.over(status)
    until((node.share / "closed").exists)
    late = node.start(3)
    assert late.line() == "none"
    for task in (late, *others):
        assert processes.is_running(entry)
        assert first.process.poll() is None
        task.over()
        assert task.end() == ""
    assert first.end() == ""
    assert not processes.is_running(entry)
    assert not node.share.exists()


def test_a_task_that_needs_to_be_shown_something_else_mounts_the_image_itself(node: Node) -> None:
    first, other = node.start(0), node.start(1, modes="ro")
    assert (first.line() != "none", other.line()) == (True, "none")
    for task in (other, first):
        task.over()
        assert task.end() == ""


def test_a_process_that_is_not_the_one_that_waits_is_neither_entered_nor_ended(node: Node) -> None:
    first = node.start(0)
    assert first.line() != "none"
    another = subprocess.Popen(["sleep", "600"])
    try:
        (node.share / "entry").write_text(f"{another.pid}\n")
        other = node.start(1)
        assert other.line() == "none"
        for task in (other, first):
            task.over()
            task.end()
        assert another.poll() is None
    finally:
        another.kill()
        another.wait()


def test_a_first_task_that_failed_waits_for_the_others_for_a_while_only(node: Node) -> None:
    shorten(node.script, LINGER=0.1)
    first, other = node.start(0), node.start(1)
    (entry,) = {task.line() for task in (first, other)}
    first.over(status=1)
    first.end()
    assert not processes.is_running(int(entry))
    assert not node.share.exists()


def test_the_container_ends_with_a_first_task_that_is_killed(node: Node) -> None:
    first = node.start(0)
    entry = int(first.line())
    first.process.kill()
    until(lambda: not processes.is_running(entry))


def test_where_the_container_cannot_be_entered_that_is_said_once_and_nobody_waits(node: Node) -> None:
    node.program(node.nsenter, "#!/bin/sh\necho reassociate to namespaces failed >&2\nexit 1\n")
    tasks = [node.start(local_rank) for local_rank in (0, 1)]
    assert [task.line() for task in tasks] == ["none"] * 2
    for task in reversed(tasks):
        task.over()
    assert [task.end() for task in tasks] == [
        "each task of this node mounts the image for itself: nsenter: reassociate to namespaces failed\n",
        "",
    ]
    assert not node.share.exists()


def test_where_the_container_does_not_start_nobody_waits(node: Node) -> None:
    node.shell = "/bin/false"
    tasks = [node.start(local_rank) for local_rank in (0, 1)]
    assert [task.line() for task in tasks] == ["none"] * 2


def test_where_the_container_is_not_there_in_time_nobody_waits_for_longer(node: Node) -> None:
    shorten(node.script, SHARE_WAIT=1)
    node.shell = str(node.folder / "slow")
    node.program(Path(node.shell), "#!/bin/sh\nread -r _\n")
    first = node.start(0)
    assert first.line() == "none"
    assert (node.share / "closed").exists()


def test_where_no_place_can_be_made_nobody_waits(node: Node) -> None:
    node.share = node.folder / "none/share"
    tasks = [node.start(local_rank) for local_rank in (0, 1)]
    assert [task.line() for task in tasks] == ["none"] * 2


def test_a_place_that_is_no_directory_of_the_users_own_is_let_alone(node: Node) -> None:
    elsewhere = node.folder / "elsewhere"
    elsewhere.mkdir()
    node.share.symlink_to(elsewhere)
    tasks = [node.start(local_rank) for local_rank in (0, 1)]
    assert [task.line() for task in tasks] == ["none"] * 2
    for task in tasks:
        task.over()
        task.end()
    assert node.share.is_symlink()
    assert list(elsewhere.iterdir()) == []
