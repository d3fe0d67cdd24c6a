"""Passes facts between a job's bash half on the host and its Python half in the image. `read` and `write` are
the entries; host/job.sh is the other side.

They are files in APPTRAIN_HAND, a directory on the first node's own disk that is private to the user. A file
holds NAME=VALUE entries, each ended by NUL; a repeated name makes a list. Neither side runs what it reads,
and calculates only with numbers. A name that is not listed here is refused: then the two halves are of
different versions.

    environment   the job script's variables, for `prepare`, which removes the file
    ask           what only the host knows, for `prepare` and `conclude`; it may come after `prepare` has
                  started, for the job script asks the scheduler meanwhile
    answer        what `prepare` decided
    state.N       what `conclude` must know for attempt N. The next attempt's is written before the verdict:
                  if we are killed in between, nothing is decided
    verdict       what follows an attempt: from the first node's `launch`, else from `conclude`
    over          the first node's `launch` has ended, and which nodes it has lost
    copies        how the image comes to the nodes: wave, source (empty: the shared file system) and target,
                  each ended by NUL
    copies.shared under PBS, the same where ssh does not reach the nodes: all from the shared file system
    tasks.env     under PBS, the variables of the tasks
    chain.*       under PBS, what the next job of a chain gets
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from entrypoint.core.errors import BadInput
from entrypoint.core.private import write_private

VARIABLE = "APPTRAIN_HAND"
ASK, ENVIRONMENT, ANSWER, STATE, VERDICT, OVER = "ask", "environment", "answer", "state", "verdict", "over"
COPIES, SHARED_COPIES = "copies", "copies.shared"
ASKED = (
    *("scheduler", "home", "image", "profile", "batch", "script", "arg"),
    *("runs_in", "told", "first_node", "queue", "nodefile", "began", "zone", "mpiexec", "carried"),
    *("attempt", "asked", "warned", "left_out", "again"),
)
"""`script`: the job script's process id; `runs_in`: what of Slurm runs it; `told`: what the scheduler says of
the job, `first_node` of a batch job's first node, `queue` of its queue; `began`: Unix seconds, `zone` of the
host as +0100; `mpiexec`: what that says of its version; `carried`: a variable from an earlier job of a chain;
`attempt`: the one that has ended; `asked`: the status of the signal that the job script got; `warned`:
whether it was told of a planned end; `left_out`: a node that takes no part; `again`: the attempt that was
prepared with that node, and is to begin without it."""

LATEST = 180.0
"""Seconds: under PBS the host half asks three programs, and gives each 30."""
PAUSE = 0.002
"""Seconds."""

ANSWERED = (
    *("stage", "stage_bytes", "stage_id", "stage_digest", "stage_needs", "stage_least", "stage_by_name"),
    "stage_named",
    "each_node",
    *("run_dir", "attempt", "profile", "outcome", "starter", "stop_at", "end_at", "status", "follows"),
    *("goes_on", "tells_end", "over", "dry_run", "by_hand", "no_chain", "asked", "host", "line", "start"),
    *("plan", "run", "launch", "chain", "export", "say", "tell"),
)
"""What `answer` and `verdict` may have: the cases of read_answer in host/job.sh, where each is explained."""


class Facts:
    """The entries of one file."""

    def __init__(self, found: Mapping[str, list[str]]):
        self._found = found

    def one(self, name: str) -> str:
        """The last value of that name, else the empty one."""
        return self._found.get(name, [""])[-1]

    def all(self, name: str) -> list[str]:
        return list(self._found.get(name, []))


def folder(env: Mapping[str, str]) -> Path | None:
    """The directory, where it is on this node; None outside a job script, and on the other nodes."""
    path = Path(env.get(VARIABLE, ""))
    own = path.name.startswith(f"apptrain.{os.uname().nodename}.")  # TMPDIR may be one that nodes share
    with contextlib.suppress(OSError):
        if own and path.is_dir() and path.stat().st_uid == os.getuid():
            return path
    return None


def has_host_half(env: Mapping[str, str]) -> bool:
    """Whether a job script started us: it counts the attempts."""
    return "APPTRAIN_ATTEMPT" in env


def asked(where: Path) -> Facts:
    """What the host half has asked. Raises BadInput like `read`, also if it asks nothing in LATEST."""
    path = where / ASK
    end = time.monotonic() + LATEST
    while not path.exists() and time.monotonic() < end:
        time.sleep(PAUSE)
    return read(path, ASKED)


def read(path: Path, names: Iterable[str]) -> Facts:
    """Raises BadInput where the file cannot be read or holds another name."""
    found: dict[str, list[str]] = {}
    for name, value in _entries(path):
        if name not in names:
            raise BadInput(
                "handover-other-version",
                f"{path.name} has {name[:40]!r}, which this image does not know: it is of another version of "
                "apptrain than the checkout: make image",
            )
        found.setdefault(name, []).append(value)
    return Facts(found)


def environment(where: Path) -> dict[str, str]:
    """The job script's variables; the file is gone then."""
    path = where / ENVIRONMENT
    try:
        return dict(_entries(path))
    finally:
        path.unlink(missing_ok=True)


def answer(path: Path, entries: Iterable[tuple[str, str]]) -> None:
    """Writes `answer` or `verdict`. Raises OSError, and ValueError for a name that the host half lacks."""
    known = list(entries)
    if unknown := sorted({name for name, _ in known} - {*ANSWERED}):
        raise ValueError(f"host/job.sh knows no {unknown[0]}")
    write(path, known)


def write(path: Path, entries: Iterable[tuple[str, str]]) -> None:
    """By rename, for the user alone. Raises OSError."""
    write_list(path, (f"{name}={value}" for name, value in entries))


def write_list(path: Path, entries: Iterable[str]) -> None:
    """The same of entries without names."""
    write_private(path, b"".join(entry.encode(errors="surrogateescape") + b"\0" for entry in entries))


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(
            "handover-unreadable", f"{path} cannot be read ({error.strerror}): the job script writes it"
        ) from None
    for entry in content.decode(errors="surrogateescape").split("\0")[:-1]:
        name, _, value = entry.partition("=")
        yield name, value
