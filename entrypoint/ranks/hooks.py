"""Runs inside each rank, without a change to the script: it reports steps and stacks, and lets the rank end
cleanly. `install` is the launcher's side, `start` the rank's.

torch calls it: `import torch` runs what a package in its path offers as an extension, so a folder in
PYTHONPATH that holds such a package is enough, under any Python. It imports nothing that the script does not
import. If something fails here, it fails silently, as the script comes first. This file is copied into that
folder and runs there, under any Python from 3.8 on.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = "APPTRAIN_HEARTBEAT"
"""Where a rank's signs are, in the environment of every rank."""
STEPS = "optimizer"
"""RANK.optimizer holds the number of optimizer steps, how many ranks the process group has, at most, how many
of them a launcher has started on this node (0: none did), the process id, and when the first and the last of
these steps were done, in microseconds of a clock that never goes back."""
STACKS = "stack"
"""stack.PID takes the stacks of all threads."""
STACK_SIGNAL = 48
"""A real-time signal that prints them there: frameworks use SIGUSR1 and SIGUSR2 themselves."""
REST = 5.0
"""Seconds that the end waits for threads of libraries, at most."""
_NAME = "apptrain_inside"
_ours: set[int] = set()
"""The kernel's ids of threads that start here."""


def install(folder: Path) -> None:
    """Makes a folder for PYTHONPATH."""
    package = folder / f"{_NAME}-1.dist-info"
    package.mkdir(parents=True)
    (folder / f"{_NAME}.py").write_text(Path(__file__).read_text())
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[torch.backends]\n{_NAME} = {_NAME}:start\n")


def start() -> None:
    """`import torch` calls it at its end."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    for part in (_show_stacks, _tell_steps, _end_in_order):
        try:
            part(folder)
        except Exception:  # the script goes on without
            continue


def _show_stacks(folder: str) -> None:
    import faulthandler
    import signal

    def takes_the_signal() -> None:
        _ours.add(threading.get_native_id())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])
        never = _thread.allocate_lock()
        never.acquire()
        never.acquire()

    file = os.open(f"{folder}/{STACKS}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    # In the script's own thread it would interrupt a system call, which torch's store takes for an error.
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACK_SIGNAL])
    # Not by threading, which would count it among the script's own.
    _thread.start_new_thread(takes_the_signal, ())


def _tell_steps(folder: str) -> None:
    torch: Any = sys.modules["torch"]
    steps = _Steps(folder, torch.distributed)
    is_compiling = torch.compiler.is_compiling

    def hook(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():  # a compiler that traces a step finds nothing here
            steps.count(optimizer)

    # torch.optim.optimizer is no attribute of torch.optim.
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(hook)


def _end_in_order(_folder: str) -> None:
    atexit.register(_let_libraries_rest)


def _let_libraries_rest() -> None:
    """Wait until no thread of torch, or of another library, has anything to do.

    gloo's threads tell that a collective is done before they let go of its tensors. One that is so late that
    the interpreter ends meanwhile aborts the process, all of whose work is done (pytorch/pytorch#190489).
    `destroy_process_group` does not prevent it: once a model was wrapped in DDP, torch keeps the group.
    """
    deadline = time.monotonic() + REST
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        states = _states_of_libraries()
        if not states:
            return
        time.sleep(0.01)  # and one that waits for the interpreter's lock, asleep, gets it
        quiet = 0 if {"R", "D"} & set(states) else quiet + 1


def _states_of_libraries() -> list[str]:
    """Of the threads of this process that Python did not start, as in proc(5); torch of old names none."""
    threads = [thread.native_id for thread in threading.enumerate()]
    of_python = {str(one) for one in (*threads, *_ours, threading.get_native_id())}
    found = []
    for thread in Path("/proc/self/task").iterdir():
        if thread.name in of_python:
            continue
        try:
            text = (thread / "stat").read_bytes()  # which holds the thread's name, so any bytes
        except OSError:
            continue  # It has ended.
        found.append(text.rpartition(b")")[2].split()[0].decode())
    return found


class _Steps:
    def __init__(self, folder: str, distributed: Any):
        self._folder = folder
        self._distributed = distributed
        self._file = -1
        self._steps = 0
        self._began = self._latest = 0
        self._size = 1
        self._who = b""
        self._first: int | None = None
        self._failed = False

    def count(self, optimizer: Any) -> None:
        """A step of an optimizer is done; where there are several, those of the first one are counted."""
        if self._failed:
            return
        try:
            self._count(optimizer)
        except Exception:  # a folder that is gone, an interpreter that ends
            self._failed = True

    def _count(self, optimizer: Any) -> None:
        if self._first is None:
            self._first = id(optimizer)
            name = f"{self._folder}/{_rank()}.{STEPS}"
            self._file = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
            local = os.environ.get("LOCAL_WORLD_SIZE", "")
            self._who = b"%d %d" % (int(local) if local.isdecimal() else 0, os.getpid())
        if id(optimizer) == self._first:
            self._steps += 1
            self._latest = time.monotonic_ns() // 1000
            self._began = self._began or self._latest
        if self._size == 1 and self._distributed.is_available() and self._distributed.is_initialized():
            self._size = self._distributed.get_world_size()
        told = (self._steps, self._size, self._who, self._began, self._latest)
        os.pwrite(self._file, b"%d %d %s %d %d" % told, 0)


def _rank() -> int:
    """The rank, or that of the first one of this node where the script starts its workers itself."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    return int(os.environ["NODE_RANK"]) * int(os.environ["NPROC_PER_NODE"])
