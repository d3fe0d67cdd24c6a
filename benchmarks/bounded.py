"""Runs a command with a time limit, and ends everything that it started. `run` is the entry.

The calling process adopts orphans, so that all that is left of a command is below it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final

from entrypoint.node import processes

TERM_S: Final = 5.0
"""Seconds from SIGTERM to SIGKILL for a command that has overrun."""
GONE_S: Final = 5.0
"""Seconds for a killed process to be gone; inside a driver that hangs it may never be."""
MOST: Final = 4 << 20
"""Bytes of an output that are kept: its end."""


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    status: int | None
    """128+N for a signal N; None where it overran."""
    out: str
    err: str
    seconds: float

    def tail(self, lines: int = 30) -> str:
        """The end of what it printed."""
        text = self.out.splitlines()[-lines:] + self.err.splitlines()[-lines:]
        return "\n".join(f"    {line}" for line in text)


def run(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], seconds: float) -> CommandResult:
    """Runs a command to its end or its bound, and ends whatever it has left. What runs below this process
    already, such as a mount, stays."""
    import psutil

    processes.adopt_orphans()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with TemporaryFile() as out, TemporaryFile() as err:
        begin = time.monotonic()
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )
        overran = False
        try:
            process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            overran = True
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TERM_S)
        finally:
            passed = time.monotonic() - begin
            _end(process, before)
        code = process.returncode
        status = None if overran or code is None else 128 - code if code < 0 else code
        return CommandResult(status=status, out=_text(out), err=_text(err), seconds=passed)


def _end(process: "subprocess.Popen[bytes]", before: Collection[int]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GONE_S)
    processes.kill_descendants(GONE_S, spare=before)


def _text(file: IO[bytes]) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - MOST))
    return file.read().decode(errors="replace")
