"""Finds the processes of a node: ranks, agent, launcher. `processes` is the entry.

A process of a node is one of this machine's too, with a number of its own here. So a signal reaches it at the
very moment that a case has waited for, without a command that first has to start over there.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from entrypoint.ranks.agent import NAME
from tests.host import Host


@dataclass(frozen=True, kw_only=True)
class Process:
    pid: int
    """On this machine."""
    uid: int
    argv: tuple[str, ...]
    env: dict[str, str]

    @property
    def name(self) -> str:
        """As ps shows it without arguments; empty if it has ended."""
        try:
            return Path(f"/proc/{self.pid}/comm").read_text(errors="replace").strip()
        except OSError:
            return ""

    @property
    def state(self) -> str:
        """The letter of its state, such as S, R or T; empty if it has ended."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            return ""
        return "" if letter in "ZX" else letter


def processes(node: Host) -> Iterator[Process]:
    """Those that run on a node; what has ended but was not waited for is none."""
    try:
        namespace = Path(f"/proc/{node.pid}/ns/pid").readlink()
    except OSError:
        return
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                if (folder / "ns/pid").readlink() != namespace:
                    continue
                found = Process(
                    pid=int(folder.name),
                    uid=folder.stat().st_uid,
                    argv=tuple(_strings(folder / "cmdline")),
                    env=dict(text.split("=", 1) for text in _strings(folder / "environ") if "=" in text),
                )
                if found.state:
                    yield found


def of_user(node: Host, uid: int) -> list[Process]:
    return [one for one in processes(node) if one.uid == uid]


def ranks(node: Host, run_dir: str) -> dict[int, Process]:
    """The ranks of a run on a node, by their number."""
    found: dict[int, Process] = {}
    for one in processes(node):
        if "RANK" in one.env and "train" in one.argv and one.env.get("APPTRAIN_RUN_DIR") == run_dir:
            found[int(one.env["RANK"])] = one
    return found


def agent(node: Host, run_dir: str) -> Process | None:
    """torchrun's agent."""
    return _first(node, run_dir, lambda one: one.name == NAME)


def launcher(node: Host, run_dir: str) -> Process | None:
    """The entrypoint's `launch`."""

    def is_launcher(one: Process) -> bool:
        return one.argv[1:5] == ("-P", "-m", "entrypoint", "launch")

    return _first(node, run_dir, is_launcher)


def _first(node: Host, run_dir: str, fits: Callable[[Process], bool]) -> Process | None:
    mine = (one for one in processes(node) if one.env.get("APPTRAIN_RUN_DIR") == run_dir)
    return next(filter(fits, mine), None)


def _strings(file: Path) -> list[str]:
    return [part.decode(errors="replace") for part in file.read_bytes().split(b"\0") if part]
