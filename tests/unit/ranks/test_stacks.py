"""What a dump of Python's faulthandler says."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.job.rundir import RunDirectory
from entrypoint.meet.terms import JobBounds
from entrypoint.ranks import hooks as inside
from entrypoint.ranks import stacks
from entrypoint.ranks.heartbeat import Heartbeats
from entrypoint.ranks.output import Relay, own_consoles
from entrypoint.ranks.stacks import LastLook, StackCollector, sighting, variables

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
IN_ALL_REDUCE = f"""Fatal Python error: Aborted

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 2938 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 81 in wrapper
  File "/home/alice/my project/train.py", line 90 in advance
  File "/home/alice/my project/train.py", line 120 in <module>

Extension modules: numpy._core._multiarray_umath (total: 1)
"""
IN_FORWARD = f"""Fatal Python error: Aborted

Thread 0x00007f0 (most recent call first):
  File "/home/alice/model.py", line 41 in forward
  File "{TORCH}/nn/modules/module.py", line 1500 in _call_impl
  File "{TORCH}/nn/parallel/distributed.py", line 1600 in forward
  File "/home/alice/train.py", line 88 in <module>
"""


def seen(tmp_path: Path, text: str) -> tuple[str, str]:
    one = sighting(Heartbeats(tmp_path), rank=3, node_rank=1, node="b", state="S", dump=text)
    return one.at, one.waits_in


def test_a_rank_in_a_collective_waits_there_and_is_at_the_users_line(tmp_path: Path) -> None:
    assert seen(tmp_path, IN_ALL_REDUCE) == ("train.py:90 advance", "all_reduce")


def test_a_rank_in_its_model_waits_for_nobody_although_ddp_called_it(tmp_path: Path) -> None:
    assert seen(tmp_path, IN_FORWARD) == ("model.py:41 forward", "")


def test_without_a_dump_nothing_is_known_but_the_state(tmp_path: Path) -> None:
    one = sighting(Heartbeats(tmp_path), rank=3, node_rank=1, node="b", state="D", dump="")
    assert (one.state, one.at, one.waits_in, one.stack, one.step, one.quiet) == ("D", "", "", "", None, -1.0)


def test_ranks_that_do_the_same_have_the_same_digest_whatever_the_line(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        return sighting(Heartbeats(tmp_path), rank=0, node_rank=0, node="a", state="S", dump=text).stack

    assert digest(IN_ALL_REDUCE) == digest(IN_ALL_REDUCE.replace("line 90", "line 91").replace("0x", "0x9"))
    assert digest(IN_ALL_REDUCE) != digest(IN_ALL_REDUCE.replace("in advance", "in evaluate"))


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import apptrain_inside
apptrain_inside.start()
def reads():
    print("ready", flush=True)
    time.sleep(30)
reads()
"""


def kept(run: RunDirectory) -> bool:
    """Whether the last look's stacks are in their files."""
    return run.stack("b", 4).exists() and "in reads" in run.stack("b", 3).read_text()


def test_ranks_are_looked_at_and_go_on(tmp_path: Path) -> None:
    inside.install(tmp_path / "inside")
    signs, run = tmp_path / "signs", RunDirectory(tmp_path / "run", 3)
    signs.mkdir()
    run.path.mkdir()
    (signs / "2.optimizer").write_text("9 4")
    argv = [sys.executable, "-P", "-S", "-c", SCRIPT, str(tmp_path / "inside")]
    # The second is below a shell, as a script that `--no-python` starts; the third knows nothing of this.
    below = ["/bin/sh", "-c", '"$@"; exit', "sh", *argv]
    options: dict[str, Any] = {
        "env": {inside.FOLDER: str(signs)},
        "stdout": subprocess.PIPE,
        "start_new_session": True,
    }
    commands = (argv, below, ["/bin/sh", "-c", "echo; sleep 30"])
    started: list[Any] = [subprocess.Popen(one, **options) for one in commands]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        pids = {rank: process.pid for rank, process in enumerate(started, 2)}
        ranks: Any = SimpleNamespace(pids=pids, plan=SimpleNamespace(place=1, node="b"))
        for _ in range(2):
            found = asyncio.run(StackCollector(ranks, run, tmp_path, signs).peek())
            assert [(one.rank, one.at.partition(" ")[2], one.step) for one in found] == [
                (2, "reads", 9),
                (3, "reads", None),
                (4, "", None),
            ]
        assert [process.poll() for process in started] == [None] * 3
        deadline = time.monotonic() + 10
        while not kept(run) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert kept(run)
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


STUCK = """
import time
def reads():
    print("ready", flush=True)
    time.sleep(30)
reads()
"""


def test_the_last_look_ends_only_ranks_that_show_nothing_otherwise_and_keeps_all_stacks(
    tmp_path: Path,
) -> None:
    inside.install(tmp_path / "inside")
    run, frozen = RunDirectory(tmp_path / "run", 3), []
    (tmp_path / "2").write_text("9")
    recorder = tmp_path / "recorder.rank2.pipe"
    os.mkfifo(recorder)
    pipe = os.open(recorder, os.O_RDWR)  # as torch has it
    of_stopped = tmp_path / "recorder.rank3.pipe"
    os.mkfifo(of_stopped)
    deaf = os.open(of_stopped, os.O_RDWR | os.O_NONBLOCK)
    run.stacks.mkdir(parents=True)
    (run.stacks / "nccl.rank2").write_bytes(b"dump")  # torch's answer
    shows = [sys.executable, "-P", "-S", "-c", SCRIPT, str(tmp_path / "inside")]
    knows_nothing = ["/bin/sh", "-c", '"$@"; exit', "sh", sys.executable, "-P", "-S", "-c", STUCK]
    commands = [shows, shows, knows_nothing, ["/bin/sh", "-c", "echo; exec sleep 30"]]
    relay, started = Relay(own_consoles({})), []
    for rank, command in enumerate(commands, 2):
        err = relay.add(f"rank{rank}", "err", tmp_path / f"{rank}.err", show=False)
        env = {"PYTHONFAULTHANDLER": "1", inside.FOLDER: str(tmp_path)}
        started.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=err, start_new_session=True)
        )
        os.close(err)
    relay.start()
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        started[1].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, started[1].pid, os.WSTOPPED)
        ranks: Any = SimpleNamespace(
            pids={rank: process.pid for rank, process in enumerate(started, 2)},
            plan=SimpleNamespace(place=1, node="b"),
            freeze_agent=lambda: frozen.append(True),
            divert_errors=lambda rank: relay.divert_errors(f"rank{rank}"),
            diverted=lambda rank: relay.diverted(f"rank{rank}").decode(),
        )
        look = LastLook(ranks, run, tmp_path, tmp_path, Heartbeats(tmp_path))
        own = set(Path("/proc/self/fd").iterdir())
        found = asyncio.run(look.first())
        assert set(Path("/proc/self/fd").iterdir()) <= own  # some of other tests may be closed meanwhile
        assert [(one.rank, one.node, one.state == "T", one.at.partition(" ")[2]) for one in found] == [
            (2, "b", False, "reads"),
            (3, "b", True, ""),
            (4, "b", False, ""),
            (5, "b", False, ""),
        ]
        assert (found[0].step, found[1].step) == (9, None)
        assert [process.poll() for process in started] == [None] * 4
        assert (frozen, os.read(pipe, 100)) == ([], b"dump\n")
        with pytest.raises(BlockingIOError):
            os.read(deaf, 100)  # a stopped rank could not answer
        assert {path.name for path in run.stacks.iterdir()} == {"nccl.rank2"}

        closer = asyncio.run(look.closer())
        assert frozen == [True]
        assert [(one.rank, one.state == "T", one.at.partition(" ")[2]) for one in closer] == [
            (2, False, "reads"),
            (3, True, "reads"),
            (4, False, "reads"),
            (5, False, ""),
        ]
        assert (started[1].wait(10), started[2].wait(10)) == (-6, 134)
        assert (started[0].poll(), started[3].poll()) == (None, None)

        said: list[str] = []
        asyncio.run(look.keep(said.append))
        assert said == []
        names = {f"b.rank{rank}.txt" for rank in (2, 3, 4)}
        assert {path.name for path in run.stacks.iterdir()} == {"nccl.rank2", *names}
        for rank in (2, 3, 4):
            assert "in reads" in run.stack("b", rank).read_text()
            assert (tmp_path / f"{rank}.err").read_text() == ""
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        relay.finish(5, 5)
        os.close(pipe)
        os.close(deaf)


def test_a_run_directory_that_takes_no_stacks_is_told(tmp_path: Path) -> None:
    run, said = RunDirectory(tmp_path, 3), list[str]()
    (tmp_path / "stacks").touch()
    with subprocess.Popen(["sleep", "30"]) as process:
        try:
            ranks: Any = SimpleNamespace(
                pids={0: process.pid}, plan=SimpleNamespace(place=1, node="b"), freeze_agent=lambda: None
            )
            look = LastLook(ranks, run, tmp_path, tmp_path, Heartbeats(tmp_path))
            asyncio.run(look.first())
            asyncio.run(look.keep(said.append))
        finally:
            process.kill()
    assert said == [f"b: the stacks cannot be kept in {tmp_path}/stacks/3: Not a directory"]


SPAWNS = """
import os, subprocess, sys
argv = [sys.executable, "-P", "-S", sys.argv[1], *sys.argv[2:]]
subprocess.run(argv)
"""
WORKER = """
import sys
sys.path[:0] = sys.argv[1:]
import apptrain_inside
from torch.distributed import distributed_c10d
apptrain_inside.start()
def setup():
    distributed_c10d.WAITS()
setup()
"""
C10D = """
import time
def init_process_group():
    print("ready", flush=True)
    time.sleep(30)
def all_reduce():
    init_process_group_no_more()
def init_process_group_no_more():
    print("ready", flush=True)
    time.sleep(30)
"""


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        (
            "init_process_group",
            "rank 2 on b has started processes of its own, and they wait in init_process_group (worker.py:8)",
        ),
        ("all_reduce", ""),
    ],
)
def test_processes_that_a_rank_started_and_that_wait_for_a_group_are_found(
    tmp_path: Path, waits: str, said: str
) -> None:
    inside.install(tmp_path / "inside")
    signs, torch = tmp_path / "signs", tmp_path / "torch" / "distributed"
    signs.mkdir()
    torch.mkdir(parents=True)
    (torch / "distributed_c10d.py").write_text(C10D)
    (tmp_path / "worker.py").write_text(WORKER.replace("WAITS", waits))
    argv = [sys.executable, "-P", "-S", "-c", SPAWNS, str(tmp_path / "worker.py"), str(tmp_path / "inside")]
    with subprocess.Popen(
        [*argv, str(tmp_path)],
        env={inside.FOLDER: str(signs)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            ranks: Any = SimpleNamespace(pids={2: process.pid}, plan=SimpleNamespace(node="b"))
            assert (
                asyncio.run(StackCollector(ranks, RunDirectory(tmp_path, 0), tmp_path, signs).workers())
                == said
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)


PIPE = {"PYTHONFAULTHANDLER": "1", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/scratch/recorder.rank"}
NEW = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "/run/stacks/3/nccl.rank"}
OLD = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/run/stacks/3/nccl.rank",
}
FILE = {name: value for name, value in NEW.items() if "FILE" in name}


@pytest.mark.parametrize(
    ("device", "torch", "given", "added"),
    [
        ("cpu", "2.15.0", {}, {"PYTHONFAULTHANDLER": "1"}),
        ("cpu", "2.15.0", {"PYTHONFAULTHANDLER": "0"}, {}),
        ("cuda", "2.15.0+cu132", {}, PIPE | NEW),
        ("cuda", "2.7.1", {}, PIPE | NEW | OLD),
        ("cuda", "", {}, PIPE | NEW),
        ("cuda", "2.15.0", {"TORCH_FR_BUFFER_SIZE": "0"}, PIPE | FILE),
        ("cuda", "2.15.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, PIPE | FILE),
    ],
)
def test_nccls_flight_recorder_is_on_unless_the_user_has_set_it(
    device: str, torch: str, given: dict[str, str], added: dict[str, str]
) -> None:
    run = RunDirectory(Path("/run"), 3)
    assert variables(device, Path("/scratch"), run, given, torch) == added


def test_both_looks_together_take_less_than_the_hub_allows() -> None:
    first = stacks.KEEP + max(stacks.RECORDER, stacks.DUMP)
    assert first + stacks.DUMP + stacks.SETTLED < JobBounds().look


def test_a_dump_is_awaited_until_it_is_written(tmp_path: Path) -> None:
    dump, began = tmp_path / "nccl.rank0", time.monotonic()
    dump.touch()
    writes = threading.Timer(0.3, dump.write_bytes, [b"all"])
    writes.start()
    stacks._await_files([dump], began + 20)
    assert 0.3 <= time.monotonic() - began < 20
    assert dump.read_bytes() == b"all"
    began = time.monotonic()
    stacks._await_files([dump, tmp_path / "nccl.rank1"], began + 0.3)
    assert 0.3 <= time.monotonic() - began < 20


def test_a_flight_recorder_is_asked_through_its_pipe_and_its_dump_awaited(tmp_path: Path) -> None:
    """Not that of a rank whose torch has made no pipe, or has ended."""
    run = RunDirectory(tmp_path, 3)
    for rank in (0, 2):
        os.mkfifo(tmp_path / f"recorder.rank{rank}.pipe")
    pipe = os.open(tmp_path / "recorder.rank0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    asked: list[bytes] = []

    def dump() -> None:
        while not asked or not asked[-1]:
            time.sleep(0.02)
            with contextlib.suppress(BlockingIOError):
                asked.append(os.read(pipe, 100))
        time.sleep(0.3)
        (run.stacks / "nccl.rank0").write_bytes(b"all")

    recorder = threading.Thread(target=dump, daemon=True)
    recorder.start()
    ranks: Any = SimpleNamespace(pids={}, plan=SimpleNamespace(place=1, node="b"))
    look = LastLook(ranks, run, tmp_path, tmp_path, Heartbeats(tmp_path))
    began = time.monotonic()
    asyncio.run(look._dump_recorders([0, 1, 2]))
    assert (run.stacks / "nccl.rank0").read_bytes() == b"all"
    assert time.monotonic() - began < stacks.RECORDER
    assert asked[-1] == b"dump\n"
    recorder.join(5)
    os.close(pipe)
    asyncio.run(look._dump_recorders([1]))
