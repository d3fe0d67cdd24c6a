"""Asks a machine what it is: commands with a time limit, and files of its kernel. Begin at `LoginNode`.
Nothing here changes the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from entrypoint.core.plain import counted, plain

ANSWER = 20.0
"""Seconds that a command has."""


class LoginNode:
    """The machine that this runs on. `told` has a line for each command: what became of it."""

    def __init__(self, env: Mapping[str, str], root: Path = Path("/"), answer: float = ANSWER):
        self.env = env
        self.told: list[str] = []
        self._root = root
        self._answer = answer

    def find(self, program: str) -> str:
        """The program's path; empty where it is not in PATH."""
        return shutil.which(program, path=self.env.get("PATH", os.defpath)) or ""

    def ask(self, *command: str, name: str = "", after: str = "") -> str:
        """What the command prints; empty where it is not there, fails, or does not answer in time. `name`:
        as it is told (else its words but options). `after`: only what it prints behind this counts."""
        name = name or " ".join(word for word in command if not word.startswith("--"))
        if not self.find(command[0]):
            self.told.append(f"{name}: not in PATH")
            return ""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            # Files, not pipes: a grandchild that holds a pipe open would hold us up.
            status = self._run(command, out.fileno(), errors.fileno())
            said, wrong = _text(out), _text(errors)
        if after:
            said = said.partition(after)[2]
        if status is None:
            self.told.append(f"{name}: no answer in {self._answer:.0f} s")
        elif status:
            why = plain(wrong.strip().splitlines()[-1]) if wrong.strip() else "it says nothing"
            self.told.append(f"{name}: status {status}: {why}")
        else:
            self.told.append(f"{name}: {counted(len(said.splitlines()), 'line')}")
        return "" if status else said

    def _run(self, command: tuple[str, ...], out: int, errors: int) -> int | None:
        env = {**self.env, "LC_ALL": "C"}
        try:
            child = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True
            )
        except OSError as error:
            os.write(errors, str(error).encode())
            return 127
        try:
            return child.wait(self._answer)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def read(self, path: str) -> str:
        """A file of the kernel; empty where it is not there or says nothing, as an interface that is down."""
        try:
            return (self._root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """What is in a directory; nothing where there is none."""
        try:
            return sorted(entry.name for entry in (self._root / path).iterdir())
        except OSError:
            return []


def _text(file: object) -> str:
    assert hasattr(file, "seek")
    assert hasattr(file, "read")
    file.seek(0)
    found: bytes = file.read()
    return found.decode(errors="replace")
