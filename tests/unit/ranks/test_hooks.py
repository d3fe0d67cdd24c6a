"""What a rank tells of itself without a change to its script."""

import _thread
import importlib.metadata
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.ranks import hooks as inside


class Group:
    """torch.distributed, as far as it is asked."""

    def __init__(self) -> None:
        self.size = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.size > 0

    def get_world_size(self) -> int:
        return self.size


def told(folder: Path, name: str = "3.optimizer") -> str:
    """The steps and the size of the group; the process itself stands behind."""
    steps, size, _, pid, first, last = (folder / name).read_text().split()
    assert 0 < int(first) <= int(last) <= time.monotonic_ns() // 1000
    assert int(pid) == os.getpid()
    return f"{steps} {size}"


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")


@pytest.mark.usefixtures("rank")
def test_the_steps_of_the_first_optimizer_are_counted_and_those_of_others_are_signs(tmp_path: Path) -> None:
    steps, one, two = inside._Steps(str(tmp_path), Group()), SimpleNamespace(), SimpleNamespace()
    for optimizer in (one, two, one, one):
        steps.count(optimizer)
    assert told(tmp_path) == "3 1"
    os.utime(tmp_path / "3.optimizer", (1, 1))
    steps.count(two)
    assert told(tmp_path) == "3 1"
    assert (tmp_path / "3.optimizer").stat().st_mtime > 1


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(("local", "told"), [("4", "4"), ("", "0"), ("x", "0")])
def test_how_many_ranks_a_launcher_started_here_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: str, told: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    inside._Steps(str(tmp_path), Group()).count(self)
    assert (tmp_path / "3.optimizer").read_text().split()[:4] == ["1", "1", told, str(os.getpid())]


@pytest.mark.usefixtures("rank")
def test_the_largest_process_group_counts_also_when_it_is_left(tmp_path: Path) -> None:
    group = Group()
    steps = inside._Steps(str(tmp_path), group)
    found = []
    for size in (0, 1, 4, 0):
        group.size = size
        steps.count(group)
        found.append(told(tmp_path))
    assert found == ["1 1", "2 1", "3 4", "4 4"]


def test_where_the_script_starts_its_workers_itself_they_speak_for_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("NODE_RANK", "2")
    monkeypatch.setenv("NPROC_PER_NODE", "4")
    inside._Steps(str(tmp_path), Group()).count(self)
    assert told(tmp_path, "8.optimizer") == "1 1"


self: Any = object()


def test_what_fails_inside_a_rank_is_not_the_scripts_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "no number")
    steps = inside._Steps(str(tmp_path), Group())
    steps.count(self)
    steps.count(self)
    monkeypatch.setenv(inside.FOLDER, str(tmp_path / "none"))
    inside.start()
    monkeypatch.delenv(inside.FOLDER)
    inside.start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("rank")
def test_steps_of_torchs_optimizers_are_told_but_not_while_a_compiler_traces_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[Any] = []
    compiling = [False]
    torch = SimpleNamespace(distributed=Group(), compiler=SimpleNamespace(is_compiling=lambda: compiling[0]))
    optimizers = SimpleNamespace(register_optimizer_step_post_hook=hooks.append)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", optimizers)
    inside._tell_steps(str(tmp_path))
    (hook,) = hooks
    for is_compiling in (False, True, False):
        compiling[0] = is_compiling
        hook(torch, (), {})
    assert told(tmp_path) == "2 1"
    assert (tmp_path / "3.optimizer").stat().st_mode & 0o777 == 0o600


def test_torch_finds_what_is_installed_and_nothing_else_is_there(tmp_path: Path) -> None:
    inside.install(tmp_path / "inside")
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "inside")])
    (point,) = found.entry_points
    assert (point.group, point.value, found.metadata["Name"]) == (
        "torch.backends",
        "apptrain_inside:start",
        "apptrain_inside",
    )
    assert len(list((tmp_path / "inside").iterdir())) == 2


STACKS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import apptrain_inside
apptrain_inside.start()
import ctypes
libc = ctypes.CDLL(None)
def waits():
    print("ready", flush=True)
    sys.exit("interrupted" if libc.usleep(30_000_000) else 0)
waits()
"""


def test_a_signal_shows_the_stacks_and_ends_and_interrupts_nothing(tmp_path: Path) -> None:
    """A script that imports no torch all the same; its steps are not told."""
    inside.install(tmp_path / "inside")
    env = {inside.FOLDER: str(tmp_path)}
    argv = [sys.executable, "-S", "-P", "-c", STACKS, str(tmp_path / "inside")]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        file, deadline = tmp_path / f"stack.{process.pid}", time.monotonic() + 10
        while file.read_text().count("line 10 in waits") < 2 and time.monotonic() < deadline:
            os.kill(process.pid, inside.STACK_SIGNAL)
            time.sleep(0.02)
        alive = process.poll() is None
        process.kill()
    assert alive
    assert file.read_text().count("line 10 in waits") >= 2
    assert file.stat().st_mode & 0o777 == 0o600


# --- the end --------------------------------------------------------------------------------------------------

# As a thread of gloo does after its collective: it works without the interpreter's lock, and then needs it.
ENDS = """
import _thread, hashlib, sys, threading
sys.path.insert(0, sys.argv[1])
import apptrain_inside
apptrain_inside.start()

def work():
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[3]))
    print("has let go", flush=True)

begun = threading.Event()
if sys.argv[2] == "library":
    _thread.start_new_thread(work, ())
else:
    threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize(
    ("thread", "rounds", "said"), [("library", 300_000, "has let go\n"), ("script", 10_000_000, "")]
)
def test_a_rank_ends_when_threads_of_libraries_have_nothing_more_to_do(
    tmp_path: Path, thread: str, rounds: int, said: str
) -> None:
    inside.install(tmp_path / "inside")
    argv = [sys.executable, "-S", "-P", "-c", ENDS, str(tmp_path / "inside"), thread, str(rounds)]
    env = {inside.FOLDER: str(tmp_path)}
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert (ran.stdout, ran.stderr) == (said, "")


@pytest.mark.parametrize(
    ("states", "seconds"),
    [
        ([[]], 0.0),
        ([["S"], ["S", "S"]], 0.02),
        ([["S", "R"], ["S", "S"], ["D", "S"], ["S", "S"], ["S", "S"]], 0.05),
        ([["R"], []], 0.01),
        (itertools.repeat(["R"]), inside.REST),
    ],
    ids=["none", "asleep", "busy", "gone", "for-ever"],
)
def test_the_end_waits_until_these_threads_rest_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, states: Iterable[list[str]], seconds: float
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    found = iter(states)
    monkeypatch.setattr(inside, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(inside, "_states_of_libraries", lambda: next(found))
    inside._let_libraries_rest()
    assert now == pytest.approx(seconds, abs=0.011)
    assert not list(itertools.islice(found, 1)) or seconds == inside.REST


def test_threads_of_libraries_are_those_that_python_did_not_start() -> None:
    """Such as gloo's, of which older versions of torch do not bear a name."""
    before, over, ended = len(inside._states_of_libraries()), threading.Event(), threading.Event()
    begun = [threading.Event(), threading.Event()]

    def work(begun: threading.Event) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("a) R (b")
        begun.set()
        over.wait()

    def work_as_library() -> None:
        work(begun[0])
        ended.set()

    _thread.start_new_thread(work_as_library, ())
    threading.Thread(target=work, args=(begun[1],), daemon=True).start()
    assert all(one.wait(10) for one in begun)
    found = inside._states_of_libraries()
    over.set()
    assert ended.wait(10)
    assert len(found) == before + 1
