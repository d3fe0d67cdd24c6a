"""Shares of this machine's processors for nodes of a cluster. `shares`: what compares nodes is to find what they do to
each other, not what other tests do to them meanwhile. `small_nodes`: nodes with a bound of their own, as those of a
cluster have, where nodes without one would measure how they share one machine.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.host import Host, Refused
from tests.vcluster.cluster import Cluster
from tests.vcluster.layout import NETWORKS

CGROUPS = Path("/sys/fs/cgroup/cpu")
MUCH = "65536"
"""Of a share, where others have 1024."""
PERIOD = 20_000
"""Microseconds: short, so that a node does not stand still for long while others wait for it."""
BURST = "256kb"
"""That a token bucket lets through at once."""


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
            _remove(folder)


@contextmanager
def small_nodes(cluster: Cluster, *, cores: float, mbit: int) -> Iterator[None]:
    """Each compute node has so much of a core, and sends so many Mbit/s on each of its networks (a token bucket).

    Raises Refused where this machine has no cgroups of version 1.
    """
    if not os.access(CGROUPS / "cpu.cfs_quota_us", os.W_OK):
        raise Refused(f"{CGROUPS} is no cgroup hierarchy of version 1: nodes cannot be bounded here")
    made = []
    try:
        for name, node in cluster.nodes.items():
            made.append(CGROUPS / f"apptrain.{cluster.plan.name}.{name}")
            made[-1].mkdir()
            (made[-1] / "cpu.cfs_period_us").write_text(str(PERIOD))
            (made[-1] / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD)))
            _move(_processes_of(node), made[-1])
            for network in NETWORKS:
                bucket = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", "100ms")
                node.run(["tc", "qdisc", "add", "dev", network.name, "root", *bucket]).check_returncode()
        yield
    finally:
        for network in NETWORKS:
            for node in cluster.nodes.values():
                node.run(["tc", "qdisc", "delete", "dev", network.name, "root"])
        for folder in made:
            _remove(folder)


def _remove(group: Path) -> None:
    while pids := (group / "cgroup.procs").read_text().split():
        _move(map(int, pids), CGROUPS)
    group.rmdir()


def _move(pids: Iterable[int], group: Path) -> None:
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
