"""What a node knows of itself: processes, the run directory, its GPUs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entrypoint import cli
from entrypoint.errors import BadInput
from entrypoint.job.rundir import RunDirectory, read_key
from entrypoint.node import gpu, processes
from entrypoint.plan.resolve import resolve


def child(code: str) -> subprocess.Popen[str]:
    """A Python process that says `ready` once it is."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_caught_signal_is_told_from_an_ignored_and_a_default_one() -> None:
    process = child(
        "import signal\nsignal.signal(signal.SIGUSR2, lambda *_: None)\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ninput()"
    )
    assert processes.catches(process.pid, signal.SIGUSR2)
    assert not processes.catches(process.pid, signal.SIGHUP)
    assert not processes.catches(process.pid, signal.SIGUSR1)
    process.kill()
    process.communicate()
    assert not processes.catches(process.pid, signal.SIGUSR2)


def test_a_zombie_is_not_running() -> None:
    process = child("print('ready', flush=True)\ninput()")
    assert processes.is_running(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.is_running(process.pid)
    process.communicate()
    assert not processes.is_running(process.pid)


def test_orphans_in_sessions_of_their_own_are_found_and_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import os, subprocess, sys, time
from entrypoint.node import processes
processes.adopt_orphans()
nap = "import os, time; open({str(pids)!r}, 'a').write(str(os.getpid()) + chr(10)); time.sleep(100)"
# A child that starts a session with a grandchild, and dies: what an agent leaves behind.
middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {{nap!r}}], start_new_session=True)"
subprocess.run([sys.executable, "-c", middle], check=True)
while not os.path.exists({str(pids)!r}): time.sleep(0.02)
processes.kill_descendants()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    pid = int(pids.read_text())
    assert not processes.is_running(pid)


def test_a_child_may_be_made_to_die_with_its_parent() -> None:
    code = """
import subprocess, sys, time
from entrypoint.node import processes
nap = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], preexec_fn=processes.die_with_parent)
print(nap.pid, flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert processes.is_running(pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while processes.is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes.is_running(pid)


def test_a_run_directory_is_private_and_its_key_is_made_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "job", 2)
    run.create()
    run.make_key()
    key = read_key(run.key)
    run.make_key()
    assert read_key(run.key) == key
    assert len(key) == 64
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.key.stat().st_mode & 0o777 == 0o600
    assert run.log("fd00::1", "rank3", "err") == run.path / "logs" / "2" / "fd00__1.rank3.err"


def test_a_run_directory_that_stays_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    tmp_path.chmod(0o770)
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(BadInput) as refused:
        RunDirectory(tmp_path, 0).create()
    assert str(refused.value) == (
        f"the run directory {tmp_path} is open to others (mode 770) and not yours to close: give --run-dir a directory "
        "of your own"
    )


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput) as refused:
        RunDirectory(tmp_path / "file" / "run", 0).create()
    assert str(refused.value) == (
        f"the run directory {tmp_path}/file/run cannot be written (Not a directory): "
        "give --run-dir a directory that all nodes share and you may write"
    )


def test_a_key_that_is_missing_open_or_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(BadInput, match="cannot be read: No such file or directory"):
        read_key(path)
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    with pytest.raises(BadInput, match=r"is open to others \(mode 644\): chmod 600"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == b"0123456789abcdef"
    path.write_text("short\n")
    with pytest.raises(BadInput, match="holds 5 bytes, 16 at least"):
        read_key(path)


def gpu_check(seen: int, *options: str, gpus: str | None = None, mode: str = "torchrun") -> str | None:
    """The refusal of a node listed by hand on which torch sees this many GPUs; None where it may start."""
    env = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    arguments = ["launch", "--nodes", "a,b", "--node-rank", "1", "--mode", mode, *options]
    plan, _ = resolve(env, vars(cli.parser().parse_args(arguments)), ["x.py"], hostname="b")
    try:
        gpu.check_gpus(plan, seen)
    except BadInput as refused:
        return str(refused)
    return None


def test_gpus_that_nobody_asked_for_are_not_left_idle_in_silence() -> None:
    assert gpu_check(4) == "torch sees 4 GPUs on b: choose --device cuda or --device cpu"
    assert gpu_check(4, "--device", "cpu") is None
    assert gpu_check(0) is None


def test_a_plan_for_cuda_needs_a_gpu_that_torch_sees() -> None:
    assert gpu_check(0, gpus="0,1") == (
        "torch sees no GPU on b, but the plan is for cuda: run `python -m entrypoint check` there "
        "(driver, --nv, CUDA_VISIBLE_DEVICES), or give --device cpu"
    )


def test_a_derived_number_of_ranks_must_be_what_torch_sees() -> None:
    assert gpu_check(2, gpus="0,1") is None
    assert gpu_check(1, gpus="0,1") == (
        "nproc_per_node is 2 (derived:CUDA_VISIBLE_DEVICES), but torch sees 1 GPUs on b: "
        "give --nproc-per-node N, or correct the request"
    )
    assert gpu_check(4, "--device", "cuda", "--nproc-per-node", "2") is None
    assert gpu_check(1, "--device", "cuda", "--nproc-per-node", "2") == (
        "nproc_per_node is 2 (flag), but torch sees 1 GPUs on b: give --nproc-per-node N, or correct the request"
    )
