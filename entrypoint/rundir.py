"""The run directory: what lies where in it, made so that only its owner can read it.

The secret: the layout. One directory a run on the shared file system, the same over requeues.
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any

from entrypoint.errors import BadInput
from entrypoint.outcome import file_name


class RunDirectory:
    """Paths of one run; `create` makes the folders (mode 700)."""

    def __init__(self, path: Path, attempt: int):
        self.path = path
        self.attempt = attempt
        self.key = path / "join.key"
        self.stop = path / "stop"

    def create(self) -> None:
        """Raises BadInput when it cannot be made or written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in (self.path / "outcome", self._logs.parent, self._logs):
                folder.mkdir(exist_ok=True, mode=0o700)
            probe = self.path / f".writable.{os.uname().nodename}.{os.getpid()}"
            probe.touch(mode=0o600)
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(
                f"the run directory {self.path} cannot be written ({error.strerror}): "
                "give --run-dir a directory that all nodes share and you may write"
            ) from None

    @property
    def _logs(self) -> Path:
        return self.path / "logs" / str(self.attempt)

    def log(self, node: str, who: str, stream: str) -> Path:
        """A log of this attempt; `who` is `rank3` or `agent`, `stream` `out` or `err`."""
        return self._logs / f"{_file_part(node)}.{who}.{stream}"

    def outcome(self, node_rank: int, local_rank: int | None) -> Path:
        return self.path / "outcome" / file_name(self.attempt, node_rank, local_rank)

    @property
    def stacks(self) -> Path:
        """Where this attempt's ranks were when it hung."""
        return self.path / "stacks" / str(self.attempt)

    def stack(self, node: str, rank: int) -> Path:
        return self.stacks / f"{_file_part(node)}.rank{rank}.txt"

    def plan(self, node_rank: int, local_rank: int | None) -> Path:
        task = node_rank if local_rank is None else f"{node_rank}.{local_rank}"
        return self.path / f"plan.{task}.json"

    def write_plan(self, plan: dict[str, Any]) -> None:
        path = self.plan(plan["node_rank"], plan["local_rank"])
        write_private(path, json.dumps(plan, indent=2) + "\n")

    def make_key(self) -> None:
        """The join's secret, made once by whoever starts the nodes; an existing one is kept."""
        try:
            with os.fdopen(
                os.open(self.key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(secrets.token_hex(32) + "\n")
        except FileExistsError:
            pass


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, by rename."""
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    with os.fdopen(
        os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)
    partial.rename(path)


def job_end(stop_file: Path) -> float | None:
    """When the job ends that is to go on as another, in Unix seconds, as whoever asked for the planned end
    wrote it; None where that is not known, or the job does not go on."""
    try:
        name, _, value = stop_file.read_text(encoding="utf-8").strip().partition("=")
        return float(value) if name == "end" else None
    except (OSError, ValueError):
        return None


def read_key(path: Path) -> bytes:
    """The join's secret. Raises BadInput when it cannot be read, is too short, or is open to others."""
    try:
        mode = path.stat().st_mode
        key = path.read_bytes().strip()
    except OSError as error:
        raise BadInput(f"--join-key-file {path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise BadInput(f"--join-key-file {path} is open to others (mode {mode & 0o777:o}): chmod 600 {path}")
    if len(key) < 16:
        raise BadInput(
            f"--join-key-file {path} holds {len(key)} bytes, 16 at least: head -c 32 /dev/urandom | base64"
        )
    return key


def _file_part(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
