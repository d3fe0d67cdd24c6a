"""Looks at processes below this one through /proc, and ends all of them. `signal_groups` and
`kill_descendants` end processes, `adopt_orphans` keeps them in reach.

Ranks lead sessions of their own, and their parent, the agent, may die before them. So this process adopts
orphans (PR_SET_CHILD_SUBREAPER), and finds what is left by walking the process tree. Linux only.
"""

import contextlib
import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from entrypoint.core.plain import plain
from entrypoint.core.proc import stat_fields

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHELLS = ("sh", "bash", "dash", "ksh", "zsh", "tcsh", "csh")
STOPPED = ("T", "t")
"""States of a process that a signal has stopped, or a debugger."""


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process instead of process 1's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """This process gets SIGTERM when its parent dies. For a child between fork and exec."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal (SigCgt in /proc/PID/status); False if gone."""
    lines = _read(pid, "status").split(b"\n")
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith(b"SigCgt:")), 0)
    return bool(caught >> (signum - 1) & 1)


def catching_below(pid: int, signum: int) -> list[int]:
    """The topmost descendants that have a handler for the signal."""
    found: list[int] = []
    for child in _children(pid):
        found += [child] if catches(child, signum) else catching_below(child, signum)
    return found


def heeding(pids: Iterable[int], signum: int, told: Collection[int] = ()) -> dict[int, tuple[int, ...]]:
    """Which processes heed the signal for each of these: itself, if it has a handler. A shell only waits for
    what it has started: in its place those of them that have one, or none. `told`: these got the signal
    already, and may have taken their handler back."""
    by_parent = functools.cache(_by_parent)  # at most once for all, and not if there is no shell

    def targets(pid: int) -> list[int]:
        if pid in told or catches(pid, signum):
            return [pid]
        below = by_parent().get(pid, []) if _program(pid) in SHELLS else []
        return [target for child in below for target in targets(child)]

    return {pid: tuple(targets(pid)) for pid in pids}


def _program(pid: int) -> str:
    """The file that the process runs, without its folder: a script with a #! line gives it a name of its own.
    That name where nobody may see the file; empty if gone."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "exe").readlink().name
    return name(pid)


def state(pid: int) -> str:
    """The letter of the process's state, such as S, R, D or T; empty if gone."""
    return stat_fields(pid)[0]


def begun(pid: int) -> str:
    """When the process began, in ticks since the boot: with its id, its own alone. Empty if gone."""
    fields = stat_fields(pid)
    return fields[19] if fields[0] not in ("", "Z", "X") else ""


def age(pid: int) -> float | None:
    """Seconds since the process began, to a hundredth. None if gone."""
    if not (ticks := begun(pid)):
        return None
    return float(Path("/proc/uptime").read_text().split()[0]) - int(ticks) / os.sysconf("SC_CLK_TCK")


def cpu(pid: int) -> float:
    """Seconds of CPU that the process's threads have used so far; 0 if gone."""
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields[0] else 0.0


def name(pid: int) -> str:
    """The process's name, of 15 bytes at most, as printable text; empty if gone. A program gives itself any
    bytes, and the kernel cuts a name inside a letter."""
    return str(plain(_read(pid, "comm").decode(errors="replace")))


def _read(pid: int, what: str) -> bytes:
    """A file of the process in /proc, which holds its name and so any bytes; empty if gone."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def signal_groups(pids: Iterable[int], signum: int) -> None:
    """Sends to the process groups that these ranks lead, so that their own children are reached too."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signum)


def in_groups(leaders: Collection[int]) -> list[int]:
    """What runs below this process in the process groups of these leaders, which may have ended."""
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(child.pid) in leaders and is_running(child.pid):
                found.append(child.pid)
    return found


def kill_descendants(seconds: float = 5.0, *, spare: Collection[int] = ()) -> None:
    """SIGKILL to everything below this process but `spare`, again until nothing is left, at most for
    `seconds`."""
    import psutil

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        below = psutil.Process().children(recursive=True)
        left = [child for child in below if child.pid not in spare and is_running(child.pid)]
        if not left:
            break
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def reap(before: frozenset[int]) -> frozenset[int]:
    """Takes the end of those children of this process that have ended and had at the look `before`, too:
    whoever waits for its own child does so at once. Returns the others that have ended."""
    with contextlib.suppress(ChildProcessError):
        # One call; to list the children, all processes are looked at.
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return frozenset()
    ended = frozenset(pid for pid in _children(os.getpid()) if state(pid) == "Z")
    for pid in ended & before:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return ended - before


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    return state(pid) not in ("", "Z", "X")


def _children(pid: int) -> list[int]:
    return _by_parent().get(pid, [])


def _by_parent() -> dict[int, list[int]]:
    """The children of each process. All processes of the machine are looked at: 35 ms of CPU for 2,000."""
    found: dict[int, list[int]] = {}
    for pid in (path.name for path in Path("/proc").iterdir()):
        if pid.isdecimal() and (fields := stat_fields(pid))[0]:
            found.setdefault(int(fields[1]), []).append(int(pid))
    return found


def open_files() -> int:
    """How many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def allow_open_files(count: int) -> int:
    """Raises the soft limit of open files to `count`, or as far as the hard limit lets it, for this process
    and its children; returns how many may be open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = map(_number, limits)
    wanted = min(count, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
            return wanted
    return soft


def most_open_files() -> int:
    """How many files this process may have open at most."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _prctl(option: int, value: int) -> None:
    import ctypes  # which what only asks for processes does not need

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")
