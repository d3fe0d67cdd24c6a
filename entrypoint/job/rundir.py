"""Knows the run directory: which file lies where, made so that only its owner can read it. Begin at
`RunDirectory`.

A run has one directory on the shared file system. It stays the same over restarts and requeues. The reading
half runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.core.plain import file_part, plain
from entrypoint.core.private import write_private
from entrypoint.job.outcome import file_name

PROBE = 1 << 16
"""Bytes that it must take before anything starts: outcomes, plans and logs begin with less."""
MOST = 1 << 22
"""Bytes of a file of ours in it that is read: a line for each of 10,000 nodes has less."""
FOLDERS = ("outcome", "logs", "stacks", "tasks")
TRUSTED = (*FOLDERS, "job.log", "join.key", "chain.env", "manifest.json")
"""What we write into, or believe, and so must be no link and nobody else's."""
CONTENT = (*FOLDERS, "checkpoints")
"""Folders that are no sign of anything else."""
FIRST = "first-attempt"
"""Holds the attempt with which somebody started the run last."""
OURS = ("join.key", FIRST)
"""By any of which a run directory is known: a project has `logs`, `checkpoints` or `lock` too."""
FAR = 366 * 86400.0
"""Seconds from now within which a job ends."""


class RunDirectory:
    """Paths of one run; `create` makes the folders, and the directory private (mode 700)."""

    def __init__(self, path: Path, attempt: int):
        self.path = path
        self.attempt = attempt
        self.key = path / "join.key"
        self.stop = path / "stop"
        self.manifest = path / "manifest.json"

    def create(self) -> tuple[int, int] | None:
        """Returns the wish to stop that was there before the attempt's folders. Raises BadInput when it
        cannot be made or written, or stays open to others."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_private()
            self._probe()  # after which also NFS looks anew
            earlier = self._wish()
            for folder in (self.path / "outcome", self.logs.parent, self.logs):
                folder.mkdir(exist_ok=True, mode=0o700)
            return earlier
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise BadInput(
                    "run-dir-full",
                    f"the run directory {self.path} is full on {os.uname().nodename} ({error.strerror}): "
                    "remove what is not needed there (df -h, df -i, quota), or give another with --run-dir",
                ) from None
            raise _unwritable(self.path, error.strerror) from None

    def inode(self) -> tuple[int, int]:
        """Device and inode, by which one that was made anew differs. Raises OSError."""
        found = self.path.stat()
        return found.st_dev, found.st_ino

    def _probe(self) -> None:
        """Raises OSError where nothing can be written."""
        probe = self.path / f".writable.{os.uname().nodename}.{os.getpid()}"
        try:
            with probe.open("xb") as file:
                file.write(bytes(PROBE))
        finally:
            probe.unlink(missing_ok=True)

    def _make_private(self) -> None:
        """Whatever mode somebody made it with: logs and key lie in it. Raises BadInput, OSError."""
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if not mode & 0o077:
            self._check_planted()
            return
        inside = list(self.path.iterdir())
        names = {path.name for path in inside}
        if names and mode & 0o022:
            raise BadInput(
                "run-dir-was-open",
                f"the run directory {self.path} was writable by others (mode {mode:o}), who may have put "
                "files in it: look at it and move it away, or give another with --run-dir",
            )
        folders = sorted(path.name for path in inside if path.is_dir() and path.name not in CONTENT)
        if folders and not self._is_known(names):
            raise BadInput(
                "run-dir-foreign",
                f"the run directory {self.path} has other folders ({folders[0]}) and is no run directory, "
                "and it would be closed to others: give another with --run-dir, such as a new folder in it",
            )
        try:
            self.path.chmod(mode & ~0o077)
        except PermissionError:
            raise BadInput(
                "run-dir-open",
                f"the run directory {self.path} is open to others (mode {mode & 0o777:o}) and not yours to "
                "close: give --run-dir a directory of your own",
            ) from None
        self._check_planted()

    def _is_known(self, names: set[str]) -> bool:
        """Whether an attempt has been here, also one that ended early: the first thing that each makes is its
        folders."""
        has_attempts = "outcome" in names and any((self.path / "logs").glob("[0-9]*"))
        return has_attempts or not names.isdisjoint(OURS)

    def _check_planted(self) -> None:
        """Raises BadInput if what is written into or trusted is a link, or of another owner than we, root and
        the directory have. The directory's owner too: root may run in that of a user."""
        owners = {self.path.stat().st_uid, os.geteuid(), 0}
        for name in TRUSTED:
            path = self.path / name
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            is_folder = name in FOLDERS
            right = stat.S_ISDIR(found.st_mode) if is_folder else stat.S_ISREG(found.st_mode)
            if not right or found.st_uid not in owners:
                what = "a folder" if is_folder else "a regular file"
                raise BadInput(
                    "run-dir-planted",
                    f"{path} is not {what} of yours: look at it and remove it, or give another run directory "
                    "with --run-dir",
                )

    @property
    def logs(self) -> Path:
        return self.path / "logs" / str(self.attempt)

    def log(self, node: str, who: str, stream: str) -> Path:
        """A log of this attempt; `who` is `rank3` or `agent`, `stream` `out` or `err`."""
        return self.logs / f"{file_part(node)}.{who}.{stream}"

    def outcome(self, place: int, local_rank: int | None) -> Path:
        """`place` is the node's in the allocation, which is its node rank unless nodes were replaced."""
        return self.path / "outcome" / file_name(self.attempt, place, local_rank)

    def release_logs(self, node: str) -> None:
        """Removes this node's logs of an attempt that was never begun. With the last of them their folder
        goes, and the attempt does not count."""
        with contextlib.suppress(OSError):
            for log in self.logs.glob(f"{file_part(node)}.*"):
                log.unlink()
            self.logs.rmdir()

    @property
    def stacks(self) -> Path:
        """Where this attempt's ranks were when it hung."""
        return self.path / "stacks" / str(self.attempt)

    def stack(self, node: str, rank: int) -> Path:
        return self.stacks / f"{file_part(node)}.rank{rank}.txt"

    def claim(self, nodes: Sequence[tuple[int, str]], *, exclusive: bool) -> None:
        """Writes who takes part in this attempt: `PLACE NAME` a line, in node-rank order; nobody closes it.

        FileExistsError where it is `exclusive` and the attempt is claimed or closed; of two at once one wins.
        """
        path = self._crew(self.attempt)
        partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        write_private(partial, "".join(f"{place} {name}\n" for place, name in nodes))
        try:
            if exclusive:
                os.link(partial, path)
            else:
                partial.rename(path)
        except FileExistsError:
            if partial.stat().st_nlink == 1:  # NFS may say so of a link that it has just made
                raise
        finally:
            partial.unlink(missing_ok=True)

    def crew(self) -> list[int] | None:
        """The places of the nodes that take part in this attempt; None where nobody has claimed it."""
        return list(self.crew_names()) or None

    def crew_names(self) -> dict[int, str]:
        """The same with their names; empty where nobody has claimed it."""
        try:
            lines = _lines(self._crew(self.attempt))
        except (OSError, ValueError):
            return {}
        rows = [line.partition(" ")[::2] for line in lines]
        return {int(place): name for place, name in rows if _is_number(place)}

    def begin(self, *, restarts: bool, forgets_stop: bool) -> None:
        """Makes this attempt's folders before its nodes start. With `forgets_stop` an earlier wish to stop is
        forgotten: it was meant for another job. With `restarts` nodes of before that still run, cut off from
        the others, cannot claim it for themselves. Raises BadInput, OSError."""
        earlier = self.create()
        if restarts:
            write_private(self._crew(self.attempt), "")
        if forgets_stop:
            self.forget_stop(earlier)

    def _wish(self) -> tuple[int, int] | None:
        """What tells this wish for a planned end from a later one: inode, and when it was written; None
        without one."""
        try:
            found = self.stop.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def forget_stop(self, earlier: tuple[int, int] | None) -> None:
        """A wish from before `create` was not meant for this attempt. Who sees the folders that it has made
        may ask at once: that wish stays. Raises BadInput, OSError."""
        if earlier is None or earlier != self._wish():
            return
        try:
            self.stop.unlink(missing_ok=True)
        except IsADirectoryError:
            raise BadInput(
                "stop-file-directory", f"{self.stop} is a directory, not a wish to stop: remove it"
            ) from None

    def note_begun(self) -> None:
        """Whoever comes after this job learns that the attempt was begun, unless somebody says how it ended
        (host/job.sh does where the image cannot). Raises OSError."""
        write_private(self._unfinished, f"{self.attempt}\n")

    def note_first(self) -> None:
        """Somebody starts the run with this attempt; those after it go on by themselves, until the next such
        start. Raises OSError."""
        write_private(self.path / FIRST, f"{self.attempt}\n")

    def unfinished(self) -> int | None:
        """The attempt of a job whose script told nobody how it ended; else None."""
        try:
            text = "".join(_lines(self._unfinished)).strip()
        except (OSError, ValueError):
            return None
        return int(text) if _is_number(text) else None

    def finish(self) -> None:
        """Somebody knows how the attempt ended. Another job that has begun here since is its own matter."""
        begun = self.unfinished()
        if begun is None or begun <= self.attempt:
            self._unfinished.unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        """Asks for a planned end, as far as the file system lets us."""
        with contextlib.suppress(OSError):
            self.stop.touch(mode=0o600)

    def close(self) -> None:
        """No restart may claim this attempt, unless one has."""
        with contextlib.suppress(OSError):
            self.claim([], exclusive=True)

    def is_closed(self) -> bool:
        """Whether nobody may claim this attempt as a restart."""
        return self.has_claims() and not self.crew()

    def has_claims(self) -> bool:
        """Whether the nodes of this attempt claim it, or might: its job restarts inside the allocation."""
        with contextlib.suppress(OSError):
            return self._crew(self.attempt).exists()
        return False

    def later_attempts(self) -> int:
        """The last of the attempts that followed this one without a pause."""
        last = self
        while (following := RunDirectory(self.path, last.attempt + 1)).crew():
            last = following
        return last.attempt

    def forget_claims(self) -> None:
        """Removes those of earlier runs here, where attempts are not counted on."""
        for path in (self.path / "outcome").glob("*.nodes"):
            path.unlink(missing_ok=True)

    def forget_restarts(self) -> None:
        """Somebody has started the run anew, who may have corrected what failed."""
        self._restarts.unlink(missing_ok=True)

    def forget_planned_ends(self) -> None:
        """The run has come to an end that nothing follows by itself."""
        self._planned_ends.unlink(missing_ok=True)

    def _crew(self, attempt: int) -> Path:
        return self.path / "outcome" / f"{attempt}.nodes"

    @property
    def _restarts(self) -> Path:
        return self.path / "restarts"

    @property
    def _planned_ends(self) -> Path:
        return self.path / "planned"

    @property
    def _unfinished(self) -> Path:
        return self.path / "unfinished"

    def newest_checkpoint(self) -> str:
        """When it was written, in Unix seconds as text; `0` where there is none. Another value: progress."""
        newest = 0
        with contextlib.suppress(OSError):
            for path in (self.path / "checkpoints").iterdir():
                if not path.name.startswith("."):
                    with contextlib.suppress(OSError):  # it may be deleted meanwhile
                        newest = max(newest, path.stat().st_mtime_ns)
        return f"{newest // 10**9}.{newest % 10**9:09}" if newest else "0"

    def restarts(self) -> list[str]:
        """Of each restart of this run, whoever began it, the newest checkpoint at that time."""
        return _last_words(self._restarts)

    def add_restart(self) -> None:
        """Notes that this attempt is a restart."""
        self._note(self._restarts)

    def planned_ends(self) -> list[str]:
        """Of each planned end that the run went on from by itself, the newest checkpoint at that time."""
        return _last_words(self._planned_ends)

    def add_planned_end(self) -> None:
        """Notes that this attempt goes on from a planned end."""
        self._note(self._planned_ends)

    def _note(self, path: Path) -> None:
        """Adds a line `ATTEMPT NEWEST_CHECKPOINT`."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.write(f"{self.attempt} {self.newest_checkpoint()}\n")

    def plan(self, place: int, local_rank: int | None) -> Path:
        task = place if local_rank is None else f"{place}.{local_rank}"
        return self.path / f"plan.{task}.json"

    def write_plan(self, plan: dict[str, Any], place: int) -> None:
        """`place` is the node's in the allocation."""
        write_private(self.plan(place, plan["local_rank"]), json.dumps(plan, indent=2) + "\n")

    def make_key(self) -> None:
        """The join's secret, made once by whoever starts the nodes; an existing one is kept."""
        if not self.key.exists() or not self.key.stat().st_size:  # A disk that was full has left it empty.
            write_private(self.key, os.urandom(32).hex() + "\n")


def refuse_unwritable(path: Path) -> None:
    """Raises BadInput if a run directory cannot be made there, as far as can be seen without making it."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _unwritable(path, error.strerror) from None
    there = next(one for one in (path, *path.parents) if os.access(one, os.F_OK))
    if not there.is_dir():
        raise _unwritable(path, f"{there} is no directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unwritable(path, f"you may not write to {there}")


def _unwritable(path: Path, why: str | None) -> BadInput:
    return BadInput(
        "run-dir-unwritable",
        f"the run directory {path} cannot be written ({why}): "
        "give --run-dir a directory that all nodes share and you may write",
    )


def next_attempt(path: Path) -> int:
    """One more than any before in this run directory, also than those that were killed or left only logs."""
    begun = [*(path / "outcome").glob("[0-9]*"), *(path / "logs").glob("[0-9]*")]
    # An attempt that nobody may begin counts for nobody.
    names = [entry.name for entry in begun if entry.suffix != ".nodes" or entry.stat().st_size]
    numbers = [name.partition(".")[0] for name in names]
    return max((int(number) for number in numbers if _is_number(number)), default=-1) + 1


def _last_words(path: Path) -> list[str]:
    """Of each line that is not blank; none where the file is not there."""
    try:
        lines = _lines(path)
    except (OSError, ValueError):
        return []
    return [line.split()[-1] for line in lines if line.strip()]


def _lines(path: Path) -> list[str]:
    """Of a small file. Raises OSError, Unfit."""
    return files.read(path, MOST).decode("utf-8", errors="replace").splitlines()


def _is_number(text: str) -> bool:
    """Whether a file that others may have written says so: no more than nine digits."""
    return text.isascii() and text.isdigit() and len(text) <= 9


def job_end(stop_file: Path) -> tuple[float | None, str]:
    """(when the job ends that is to go on as another, in Unix seconds, as whoever asked for the planned end
    wrote it; what to say of a file that is neither empty nor says when).

    None if that is not known, or the job does not go on. A stop was asked for whatever the file holds.
    """
    try:
        text = files.read_text(stop_file, 4096).strip()
    except OSError:
        return None, ""
    except ValueError as error:
        return None, f"{stop_file} was taken as a wish to stop, but {error}"
    if not text:
        return None, ""
    name, _, value = text.partition("=")
    if name == "end" and re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", value):
        end = float(value)
        if abs(end - time.time()) <= FAR:
            return end, ""
    shown = str(plain(text))[:60]
    found = f"{stop_file} was taken as a wish to stop, but it holds {shown!r}"
    return None, f"{found}: it is empty, or has end=UNIX_SECONDS"


def read_key(path: Path) -> bytes:
    """The join's secret. Raises BadInput when it cannot be read, is too short, or is open to others."""
    try:
        mode = path.stat().st_mode
        key = files.read(path, 4096).strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadInput("key-file-unreadable", f"--join-key-file {path} cannot be read: {why}") from None
    if mode & 0o077:
        raise BadInput(
            "key-file-open",
            f"--join-key-file {path} is open to others (mode {mode & 0o777:o}): chmod 600 {path}",
        )
    if len(key) < 16:
        raise BadInput(
            "key-file-short",
            f"--join-key-file {path} holds {len(key)} bytes, 16 at least: head -c 32 /dev/urandom | base64",
        )
    return key
