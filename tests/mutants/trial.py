"""Whether the tests notice a change: they run in a private copy of the tree, which is gone afterwards.

This alone knows how a copy is made that imports itself, how pytest is asked and how its answer is read, and how all
that it left running is ended. Where Linux allows it, a run has a process namespace of its own: what a change makes of
a kill reaches nobody else, and nothing outlives the run.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.change import Mutant

MARGIN = 30.0
"""Seconds beyond its own bounds in which pytest ends, if it ends."""
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
PYTEST = ["-P", "-m", "pytest", "-x", "-q", "-o", "addopts=--import-mode=importlib"]
INIT = ["bash", "-c", 'ulimit -d 8388608 && "$@"; exit $?', "bash"]
"""The namespace's process 1, which reaps; a loop without an end takes no more than 8 GiB."""


class Stopped(Exception):
    """Somebody has asked for an end."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    caught: bool
    why: str
    """One line: the test that failed, or what else happened."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Ended:
    status: int | None
    """None: it did not end within its bounds."""
    failed: str
    """The first test that failed; empty if none did."""
    output: str


@dataclass(kw_only=True)
class Bench:
    """Tries changes to a tree; several threads may do so at once."""

    tree: Path
    """Code and tests, changed by nobody."""
    folder: Path
    """Where the copies are made."""
    bound: float
    """Seconds after which a run starts no further test."""
    test_bound: float
    """Seconds for a single test; one that takes longer hangs."""
    _running: set["subprocess.Popen[bytes]"] = field(init=False, default_factory=set)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _stopped: bool = field(init=False, default=False)
    _passes: dict[str, bool] = field(init=False, default_factory=dict)
    """Tests that were run on the tree as it is."""

    def collect(self, tests: Sequence[str]) -> str:
        """What pytest has against these tests on the tree as it is; empty if nothing."""
        ended = self._run(None, [*tests, "--collect-only"])
        return "" if ended.status == 0 else ended.output

    def attempt(self, mutant: Mutant, tests: Sequence[str]) -> Verdict:
        """Runs these tests on the change, in this order, up to the first that fails. A test that fails without the
        change too has not noticed it."""
        begin = time.monotonic()
        ended = self._run(mutant, [*tests, f"--session-timeout={self.bound}"])
        caught, why = True, ended.failed
        if ended.failed:
            if "Failed: Timeout" in ended.output:
                why += f" hangs, it does not end within {self.test_bound:g} s"
            caught = self._is_fine(ended.failed)
            if not caught:
                why += ", but it fails without the change too"
        elif ended.status is None:
            why = f"hangs, the tests do not end within {self._limit:g} s"
        elif ended.status == 0:
            caught, why = False, "all tests pass"
        elif "session-timeout" in ended.output:
            caught, why = False, f"no test has failed within {self.bound:g} s"
        else:
            why = (
                f"pytest ended with status {ended.status}: {(ended.output.splitlines() or ['no output'])[-1]}"
            )
        return Verdict(caught=caught, why=why, seconds=time.monotonic() - begin)

    def stop(self) -> None:
        """Ends what runs, and lets nothing start any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _end(process)

    @property
    def _limit(self) -> float:
        return self.bound + self.test_bound + MARGIN

    def _is_fine(self, test: str) -> bool:
        """Whether it passes on the tree as it is; a file, which could not be imported, whether it can be."""
        if test not in self._passes:
            ended = self._run(None, [test] if "::" in test else [test, "--collect-only"])
            self._passes[test] = ended.status == 0
        return self._passes[test]

    def _run(self, mutant: Mutant | None, arguments: Sequence[str]) -> _Ended:
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as folder:
            copy, output = Path(folder, "tree"), Path(folder, "output")
            shutil.copytree(self.tree, copy, symlinks=True)
            if mutant is not None:
                file = copy / mutant.file
                file.write_bytes((mutant.applied_to(file.read_bytes().decode()) or "").encode())
            command = [*_alone(), _make_venv(copy), *PYTEST, f"--timeout={self.test_bound}", *arguments]
            status = self._wait(command, copy, output)
            failures = copy / ".pytest_cache/v/cache/lastfailed"
            failed = next(iter(json.loads(failures.read_text())), "") if failures.exists() else ""
            return _Ended(status=status, failed=failed, output=output.read_bytes().decode(errors="replace"))

    def _wait(self, command: Sequence[str], copy: Path, output: Path) -> int | None:
        unwanted = re.compile("CI|APPTRAIN_.*|PYTEST_.*|PYTHONPATH")
        env = {name: value for name, value in os.environ.items() if not unwanted.fullmatch(name)}
        env["TMPDIR"] = str(output.with_name("tmp"))
        Path(env["TMPDIR"]).mkdir()
        with self._lock, Path(os.devnull).open("rb") as nothing, output.open("wb") as file:
            if self._stopped:
                raise Stopped
            streams: dict[str, Any] = {"stdin": nothing, "stdout": file, "stderr": file}
            process = subprocess.Popen(command, cwd=copy, env=env, start_new_session=True, **streams)
            self._running.add(process)
        try:
            return process.wait(self._limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with self._lock:
                _end(process)
                self._running.discard(process)
                if self._stopped:
                    raise Stopped


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _make_venv(copy: Path) -> str:
    """A venv that imports the copy, and everything else from the venv of this Python. Returns its Python."""
    folder, own = copy / ".venv", Path(sys.prefix)
    venv.create(folder, symlinks=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(packages, "copy.pth").write_text(f"{copy}\n{copy / 'src'}\n{sysconfig.get_path('purelib')}\n")
    for program in (own / "bin").iterdir():
        mine = folder / "bin" / program.name
        if program.is_symlink() or mine.exists():
            continue
        if program.open("rb").read(2) == b"#!":
            mine.write_bytes(program.read_bytes().replace(bytes(own), bytes(folder)))
            mine.chmod(0o755)
        else:
            mine.symlink_to(program)
    return str(folder / "bin/python")


@functools.cache
def _alone() -> list[str]:
    """What a command line begins with that runs in a process namespace, if this machine has any for us."""
    for user in ([], ["--user", "--map-current-user"]):
        command = [*NAMESPACE, *user, "setsid", *INIT]
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
                return command
    return INIT
