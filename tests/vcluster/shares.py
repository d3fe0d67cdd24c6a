"""Shares of this machine's processors for nodes of a cluster. `shares`: what compares nodes is to find what they do to
each other, not what other tests do to them meanwhile. `small_nodes`: nodes with a bound of their own, as those of a
cluster have, where nodes without one would measure how they share one machine.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.host import Host, Refused
from tests.vcluster.cluster import Cluster
from tests.vcluster.layout import NETWORKS, Network

CGROUPS = Path("/sys/fs/cgroup/cpu")
MUCH = "65536"
"""Of a share, where others have 1024."""
PERIOD = 20_000
"""Microseconds: short, so that a node does not stand still for long while others wait for it."""
BURST = "256kb"
"""That a token bucket lets through at once."""
BOUND = 30.0
"""Seconds for the processes of a group to be moved out of it."""


@contextmanager
def shares(cluster: Cluster, *groups: Sequence[str]) -> Iterator[None]:
    """All that runs on the nodes of a group has one share of the processors, far more than that of another test.
    Nothing is changed where this machine has no cgroups of version 1."""
    with ExitStack() as undo:
        for number, nodes in enumerate(groups if os.access(CGROUPS / "cpu.shares", os.W_OK) else ()):
            group = _group(f"{cluster.plan.name}.{number}", undo)
            (group / "cpu.shares").write_text(MUCH)
            for node in nodes:
                _move(_processes_of(cluster[node]), group)
        yield


@contextmanager
def small_nodes(cluster: Cluster, *, cores: float, mbit: int) -> Iterator[None]:
    """Each compute node has so much of a core, and sends so many Mbit/s on each of its networks (a token bucket).

    Raises Refused where this machine has no cgroups of version 1.
    """
    if not os.access(CGROUPS / "cpu.cfs_quota_us", os.W_OK):
        raise Refused(f"{CGROUPS} is no cgroup hierarchy of version 1: nodes cannot be bounded here")
    with ExitStack() as undo:
        for name, node in cluster.nodes.items():
            group = _group(f"{cluster.plan.name}.{name}", undo)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD)))
            _move(_processes_of(node), group)
            for network in NETWORKS:
                undo.enter_context(token_bucket(node, network, mbit))
        yield


@contextmanager
def token_bucket(host: Host, network: Network, mbit: int) -> Iterator[None]:
    """The host sends so many Mbit/s on this network."""
    place = ("dev", network.name, "root")
    bucket = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", "100ms")
    host.run(["tc", "qdisc", "add", *place, *bucket]).check_returncode()
    try:
        yield
    finally:
        host.run(["tc", "qdisc", "delete", *place])


def _group(name: str, undo: ExitStack) -> Path:
    """A new one, which `undo` removes."""
    group = CGROUPS / f"apptrain.{name}"
    group.mkdir()
    undo.callback(_remove, group)
    return group


def _remove(group: Path) -> None:
    """Raises TimeoutError if a process cannot be moved out of it."""
    deadline = time.monotonic() + BOUND
    while pids := (group / "cgroup.procs").read_text().split():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{group} still has the processes {', '.join(pids[:10])}")
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
