"""Shares of this machine's processors for nodes of a cluster: what compares nodes is to find what they do to each
other, not what other tests do to them meanwhile.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.host import Host
from tests.vcluster.cluster import Cluster

CGROUPS = Path("/sys/fs/cgroup/cpu")
MUCH = "65536"
"""Of a share, where others have 1024."""


@contextmanager
def shares(cluster: Cluster, *groups: Sequence[str]) -> Iterator[None]:
    """All that runs on the nodes of a group has one share of the processors, far more than that of another test.
    Nothing is changed where this machine has no cgroups of version 1."""
    made = []
    try:
        for number, nodes in enumerate(groups if os.access(CGROUPS / "cpu.shares", os.W_OK) else ()):
            made.append(CGROUPS / f"apptrain.{cluster.plan.name}.{number}")
            made[-1].mkdir()
            (made[-1] / "cpu.shares").write_text(MUCH)
            for node in nodes:
                _move(_processes_of(cluster[node]), made[-1])
        yield
    finally:
        for folder in made:
            while pids := (folder / "cgroup.procs").read_text().split():
                _move(map(int, pids), CGROUPS)
            folder.rmdir()


def _move(pids: Iterator[int], group: Path) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _processes_of(host: Host) -> Iterator[int]:
    """By this machine's numbers, all of a host, which has numbers of its own."""
    inside = Path(f"/proc/{host.pid}/ns/pid_for_children").stat().st_ino
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "ns/pid").stat().st_ino == inside:
                yield int(folder.name)
