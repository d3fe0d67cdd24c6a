"""Lets one job at a time use a run directory: the file RUN/lock names its holder. Begin at `Lock.take`.

It relies on no lock of the file system, as not every shared one has any. On the same host, and in the same
namespace of process ids, it looks for the holder's process. Elsewhere the holder is alive if it still touches
the file; clocks are not compared. A job that the scheduler runs again takes over its own lock at once: the
scheduler has ended it before. A job script asks with `Lock.await_free` before it changes anything there.
"""

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain
from entrypoint.core.private import write_private
from entrypoint.node import processes
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.schedulers import manual

NAME = "lock"
BEAT = 5.0
"""Seconds after which the holder touches the file again."""
LEASE = 60.0
"""Seconds without that, watched by whoever wants the lock, after which a holder elsewhere counts as dead."""
GLANCE = 0.5
MOST = 1 << 16
"""Bytes of the file. What is none of ours, whatever it is, is replaced; a directory cannot be."""
NO_FILE = (errno.ENOENT, errno.ENXIO, errno.ELOOP)
"""What `open` says of what is not there, of a socket, and of links in a circle."""
SETTLE = 1.0
"""Seconds after which a lock that was taken over is looked at again: of two at once, the last has it."""


class InUse(BadInput):
    """Another job has the run directory."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who has the run directory."""

    job: str
    is_unique: bool
    """Whether no other job has this name."""
    node: str
    pid: int
    where: str
    """Boot and namespace in which the process id means something."""
    begun: str
    """When the process began, in the kernel's ticks."""
    since: str
    token: str

    def __str__(self) -> str:
        return str(plain(f"job {self.job} (process {self.pid} on {self.node}, since {self.since})"))


def holder_of(plan: LaunchPlan) -> Holder:
    """This process, of the plan's job."""
    return this_process(plan.allocation.job_id)


def this_process(job: str) -> Holder:
    """As a process of the job with this id."""
    return Holder(
        job=job,
        is_unique=job != manual.NAME,
        node=os.uname().nodename,
        pid=os.getpid(),
        where=_where(),
        begun=processes.begun(os.getpid()),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        token=secrets.token_hex(8),
    )


def refuse_if_in_use(run_dir: Path) -> None:
    """Raises InUse where a process of this host has the run directory: what can be known at once."""
    holder = _read(run_dir / NAME)
    if holder is not None and _lives_here(holder):
        raise _in_use(run_dir, holder)


class Lock:
    """This job's hold on a run directory."""

    def __init__(self, run_dir: Path, mine: Holder, say: Callable[[str], None]):
        self._path = run_dir / NAME
        self._mine = mine
        self._say = say
        self._released = threading.Event()
        self._of_ours: set[str] = set()
        """Tokens of this job's holders: without a scheduler its name does not tell."""
        self.is_held = False

    def take(self, *, again: bool = False) -> None:
        """Raises InUse where another job has it, and OSError; waits where that has to be watched. `again`:
        whoever of this job has it was left behind."""
        self._take(again)
        self.is_held = True
        if self._released.is_set():
            self.release()

    def note_holder(self) -> None:
        """Whoever has it is of this job: this node has met it. OSError where the file system does not say."""
        if not self._mine.is_unique and (holder := _read(self._path)):
            self._of_ours.add(holder.token)

    def _take(self, again: bool) -> None:
        while not self._released.is_set():
            if self._is_left_behind(again):
                self._take_over()
                return
            if self._make():
                return

    def await_free(self) -> None:
        """Before this job changes anything in the run directory, and takes it: raises InUse and OSError as
        `take` does, after the same wait, and takes nothing. This job's own lock stays, whoever has it."""
        if not self._is_left_behind(again=True):
            return
        holder = _read(self._path)
        if holder is not None and not self._is_of_this_job(holder, again=True):
            self._remove(holder.token)  # `take` need not watch it once more

    def _is_left_behind(self, again: bool) -> bool:
        """Whether there is a lock that may be taken over. False if there is none, or this one is released.
        Raises InUse if another job has it; waits if that has to be watched."""
        watched: tuple[str, int] | None = None
        since = time.monotonic()
        while True:
            before = time.monotonic()
            holder, touched = _read(self._path), _touched(self._path)
            if time.monotonic() - before > BEAT:  # the file system hung: the holder could not touch it either
                since = time.monotonic()
            if holder is None and touched is not None:
                holder = _read(self._path)  # it appears whole, and may have come between the two looks
            if holder is None or self._may_follow(holder, again):
                return touched is not None
            if watched is None or watched[0] != holder.token:
                watched, since = (holder.token, touched or 0), time.monotonic()
                where = self._path.parent
                self._say(f"{holder} has the run directory {where}: waiting {LEASE:g} s for a sign of life")
            if touched not in (None, watched[1]):
                raise _in_use(self._path.parent, holder)
            if time.monotonic() - since > LEASE:
                return True
            if self._released.wait(GLANCE):
                return False

    def _may_follow(self, holder: Holder, again: bool) -> bool:
        """Whether the holder has ended, as far as that is known at once. Raises InUse where it has not."""
        same_job = self._is_of_this_job(holder, again)
        if _lives_here(holder) and not (same_job and again):
            raise _in_use(self._path.parent, holder)
        return same_job or (holder.where == self._mine.where != "")

    def _is_of_this_job(self, holder: Holder, again: bool) -> bool:
        is_same = holder.is_unique and holder.job == self._mine.job
        return is_same or (again and holder.token in self._of_ours)

    def release(self) -> None:
        self._released.set()
        self._remove(self._mine.token)

    def _remove(self, token: str) -> None:
        """Removes the lock if it is the one with this token."""
        with contextlib.suppress(OSError):
            holder = _read(self._path)
            if holder is not None and holder.token == token:
                self._path.unlink()

    def keep(self) -> str:
        """Touches the file until it is released. Returns then, empty, or why it is no longer this job's; also
        empty once another node of this job has gone on without this one."""
        while not self._released.wait(BEAT):
            with contextlib.suppress(OSError):
                holder = _read(self._path)
                if holder is not None and holder.token != self._mine.token:
                    # Another node of this job may have gone on without this one: the nodes settle that.
                    if holder.job != self._mine.job or not holder.is_unique:
                        return f"the run directory {self._path.parent} was taken by {holder}"
                    return ""
                os.utime(self._path)
        return ""

    def _make(self) -> bool:
        """Whether the lock is ours, of those who try at once."""
        partial = self._path.with_name(f".{NAME}.{self._mine.token}")
        write_private(partial, self._text())
        try:
            os.link(partial, self._path)
        except FileExistsError:
            return partial.stat().st_nlink > 1  # NFS may say so of a link that it has just made
        finally:
            partial.unlink(missing_ok=True)
        return True

    def _take_over(self) -> None:
        write_private(self._path, self._text())
        self._released.wait(SETTLE)
        holder = _read(self._path)
        if holder is not None and holder.token != self._mine.token:
            raise _in_use(self._path.parent, holder)

    def _text(self) -> str:
        return json.dumps(dataclasses.asdict(self._mine), indent=2) + "\n"


def _in_use(run_dir: Path, holder: Holder) -> InUse:
    return InUse(
        "run-dir-in-use",
        f"the run directory {run_dir} is in use by {holder}: wait for its end, or give --run-dir another",
    )


def _read(path: Path) -> Holder | None:
    """None where there is none, or no whole one. OSError where the file system does not say."""
    try:
        found: Mapping[str, Any] = files.read_json(path, MOST)
        holder = Holder(**{field.name: found[field.name] for field in dataclasses.fields(Holder)})
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        raise
    except (ValueError, KeyError, TypeError):
        return None
    kinds = {"pid": int, "is_unique": bool}
    given = dataclasses.asdict(holder)
    return holder if all(type(value) is kinds.get(name, str) for name, value in given.items()) else None


def _touched(path: Path) -> int | None:
    """When, by the file system's clock; opened, because NFS then asks the server. None: nothing has the
    name, not even a link to nowhere."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        return path.lstat().st_mtime_ns if path.is_symlink() or path.exists() else None
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _lives_here(holder: Holder) -> bool:
    return holder.where == _where() != "" and processes.begun(holder.pid) == holder.begun != ""


def _where() -> str:
    """Empty where the system does not say."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""
