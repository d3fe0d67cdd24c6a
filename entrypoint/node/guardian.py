"""A small process that cleans up after a launcher that was killed: it ends what is left of the ranks, and
removes the launch's directory. `Guardian` is the launcher's side; the process waits in WAIT, and becomes
`main`.

It finds them by their environment, in which the launch's own directory is named; a rank's children may have
another session and parent, but they inherit this. `main` runs as a file, with the standard library alone.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

VARIABLE = "APPTRAIN_HEARTBEAT"
"""Its value lies in an attempt's directory."""
DONE = "done"
WAIT = f"""trap '' TERM INT HUP USR1 USR2
while IFS= read -r line; do
    [ "$line" != {DONE} ] || exit 0
    set -- "$@" "$line"
done
exec "$@"
"""
"""It reads a line for each attempt: its directory, in the environment of its ranks; then DONE. Closed without
it: the launcher was killed. What ends the launcher may be sent to every process of its job: it is not heard.

A shell waits, because Python would need 0.06 CPU seconds for it on each node, just while the job starts."""
GRACE = 3.0
"""Seconds from SIGTERM to SIGKILL, as for ranks whose job has failed."""
KILL = 5.0
"""Seconds for which SIGKILL is sent to what still comes up."""
GLANCE = 0.1


class Guardian:
    """The launcher's end of it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # A launch that may start no process will say so itself.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", WAIT, "sh", sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                start_new_session=True,
                bufsize=0,  # what it was killed before it read would be complained of at the end
            )

    @property
    def pids(self) -> list[int]:
        """Its process; none if none could be started."""
        return [self._process.pid] if self._process else []

    def watch(self, folder: Path) -> None:
        """What has this directory in its environment is to end with us, and so is the directory."""
        self._write(str(folder))

    def dismiss(self) -> None:
        """Nothing is left."""
        self._write(DONE)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL)

    def _write(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(os.fsencode(line) + b"\n")


def end_all_below() -> None:
    """Kills everything below this process, a guardian last: one whose launcher was killed finds nobody left,
    and removes what the launcher made."""
    import psutil

    from entrypoint.node import processes

    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [child.pid] if __file__ in child.cmdline() else []
    processes.kill_descendants(spare=found)
    deadline = time.monotonic() + KILL
    while any(processes.is_running(pid) for pid in found) and time.monotonic() < deadline:
        time.sleep(0.02)
    processes.kill_descendants()


def main(folders: Sequence[str]) -> None:
    marks = [os.fsencode(folder) for folder in folders]
    for signum, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, KILL)):
        _send(signum, strays(marks))
        deadline = time.monotonic() + seconds
        while (left := strays(marks)) and time.monotonic() < deadline:
            if signum == signal.SIGKILL:
                _send(signum, left)
            time.sleep(GLANCE)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def strays(folders: Collection[bytes]) -> list[int]:
    """The processes that have one of the directories in their environment."""
    marks = tuple(f"{VARIABLE}=".encode() + folder + b"/" for folder in folders)
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # It is gone, or another user's.
            if entry.name.isdecimal() and any(
                variable.startswith(marks) for variable in (entry / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
    return found


def _send(signum: int, pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


if __name__ == "__main__":
    main(sys.argv[1:])
