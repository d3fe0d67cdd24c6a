"""Judges facts and measurements of nodes: what is enough, what is slow, and the remedy for each. Pure
functions; `of_facts` judges one node, `of_speeds` and `of_ways` compare nodes.

Nothing is compared with a number that a healthy site must reach: a node stands out against the others, or
lacks what its profile says. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from entrypoint.core.frozen import dataclass
from entrypoint.doctor import facts
from entrypoint.doctor.facts import NodeFacts, Room
from entrypoint.plan import cores
from entrypoint.plan.cores import GpuPlace, TaskRanks, Topology
from entrypoint.plan.options import RDMA
from entrypoint.plan.profile import Profile

GIB = 1 << 30
RUN_ROOM = GIB
"""Bytes in the run directory: a few checkpoints of a small model."""
ROOMS = Path(__file__).with_name("room.txt")
"""MB in each other directory; containers/run.sh reads it too."""
INODES = 1000
MEMORY = GIB
OF_PROFILE = 0.9
"""Of the memory that a profile tells of a whole node: the kernel keeps some for itself."""
LIMITS = {"memlock": GIB, "nofile": 4096, "nproc": 1024}
SLOW = {"compute": 0.6, "memory": 0.5, "link": 0.5}
"""Of the median of the other nodes: one other program on the same core leaves a half. Nodes that share a
memory or a network by design differ more in these than in computing."""
OF_LINK = 0.02
"""Of the speed that the kernel knows of an interface: where there are only two nodes, one pair has no other
beside it. One stream of gloo takes a tenth of 100 Gbit/s."""
SHOWN = 4
"""Nodes that a line names."""
USED = 2 * GIB
"""Bytes of a GPU before we have taken any but CUDA's own: somebody else's process."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    node: str
    check: str
    text: str
    remedy: str
    is_final: bool = False
    """Whether no training can run so."""

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}"


@dataclass(frozen=True)
class Clock:
    """Of a node, against node 0's."""

    node: str
    ahead: float
    """Seconds."""
    bound: float
    """The most by which that may be wrong: half of a round trip."""


@dataclass(frozen=True)
class Speed:
    """What a rank has measured on its own."""

    rank: int
    node: str
    compute: float
    """Floating-point operations per second in products of matrices."""
    memory: float
    """Bytes per second, read and written, of a copy."""


@dataclass(frozen=True)
class GpuSpeed:
    """A rank's GPU."""

    rank: int
    node: str
    name: str
    used: int
    """Bytes that were taken when the rank came."""
    total: int
    ecc: int | None
    """Uncorrected memory errors since the driver was loaded; None where the GPU does not count them."""
    visible: int = 1
    """How many GPUs this rank sees."""


@dataclass(frozen=True)
class FarGpu:
    """A rank's GPU on a NUMA node of which the rank has no core."""

    node: str
    local_rank: int
    numa_node: int


@dataclass(frozen=True)
class Collective:
    """One collective at one size."""

    name: str
    size: int
    """Bytes of the buffer: of all_gather the one that holds all."""
    bandwidth: float
    """Bus bandwidth in bytes per second."""


@dataclass(frozen=True)
class Way:
    """From one node to another."""

    source: str
    target: str
    bandwidth: float
    """Bytes per second."""


# --- a node by itself ---------------------------------------------------------------------------------------

MAKE = "make it, or correct what names it (TMPDIR, --run-dir, scratch in the profile)"


def of_facts(found: NodeFacts, site: Profile, fabric: str) -> list[Finding]:
    """What a node lacks. `fabric`: that NCCL is to use; empty where that is unknown."""
    return [
        *_of_rooms(found),
        *_of_memory(found, site),
        *_of_limits(found, fabric),
        *_of_fabric(found, fabric),
    ]


def _of_rooms(found: NodeFacts) -> Iterable[Finding]:
    for name, room in found.rooms.items():
        if room.refused:
            text = f"{_called(name, room)} takes no file of 1 MiB ({room.refused})"
            remedy = MAKE if room.refused == os.strerror(errno.ENOENT) else _make_room(name)
            yield Finding(found.node, name, text, remedy, is_final=name != facts.SHARED_MEMORY)
        elif (text := _too_little(name, room)) != "":
            yield Finding(found.node, name, text, _make_room(name))


@cache
def least_room() -> dict[str, int]:
    """Bytes that are to be free, by what the directory is for."""
    lines = (line.split() for line in ROOMS.read_text("utf-8").splitlines())
    of_node = {line[0]: int(line[1]) * 10**6 for line in lines if line and line[0] != "#"}
    return {facts.RUN_DIRECTORY: RUN_ROOM, **of_node}


def _called(name: str, room: Room) -> str:
    return name if name == room.path else f"{name} {room.path}"


def _too_little(name: str, room: Room) -> str:
    if room.free < least_room()[name]:
        return f"{_called(name, room)} has {size(room.free)} left"
    if room.inodes is not None and room.inodes < INODES:
        return f"{_called(name, room)} takes {room.inodes} more files"
    return ""


def _make_room(name: str) -> str:
    if name == facts.SHARED_MEMORY:
        return "remove what ended jobs have left there, or have the administrators make it larger"
    if name == facts.TEMPORARY:
        return "remove what is not needed there, or set TMPDIR to a directory of the node with room"
    return "remove what is not needed there (df -h, df -i, quota), or give another with --run-dir"


def _of_memory(found: NodeFacts, site: Profile) -> Iterable[Finding]:
    if found.available < MEMORY:
        text = f"{size(found.available)} of {size(found.memory)} memory are free"
        yield Finding(found.node, "memory", text, "ask for more (--mem), or end what takes it")
    told = site.nodes.memory_gib if site.nodes.whole else None
    if told and found.memory < OF_PROFILE * told * GIB:
        text = f"it has {size(found.memory)} memory, and {site.name} says {told} GiB"
        yield Finding(found.node, "memory", text, "leave the node out and tell its administrators")
    if site.nodes.whole and site.nodes.cpus and found.cpus < site.nodes.cpus:
        text = f"{found.cpus} CPUs may be used, and {site.name} says {site.nodes.cpus}"
        yield Finding(found.node, "cpus", text, "ask for all of them (--cpus-per-task, --exclusive)")


def _of_limits(found: NodeFacts, fabric: str) -> Iterable[Finding]:
    for name, least in LIMITS.items():
        value = found.limits[name]
        if value is None or value >= least or (name == "memlock" and fabric not in RDMA):
            continue
        why = f", and {fabric} needs its buffers locked" if name == "memlock" else ""
        remedy = "have it raised for the scheduler's daemon on the nodes "
        remedy += f"(Limit{name.upper()}=infinity and the like)"
        yield Finding(found.node, name, f"the limit {name} is {limit(name, value)}{why}", remedy)


def _of_fabric(found: NodeFacts, fabric: str) -> Iterable[Finding]:
    if fabric in RDMA and not found.ports:
        text = f"no port of {fabric} is up here, and that is what NCCL is to use"
        yield Finding(found.node, "fabric", text, "leave the node out and tell its administrators (ibstat)")
    if fabric in RDMA and found.unloadable:
        text = f"what NCCL needs for {fabric} does not load ({found.unloadable})"
        remedy = (
            "bind it into the image (container: binds, APPTRAIN_BIND); it must find its own libraries by "
            "itself (ldd, in the image)"
        )
        yield Finding(found.node, "plugin", text, remedy)


def of_cores(node: str, machine: Topology, gpus: Sequence[GpuPlace], task: TaskRanks) -> list[Finding]:
    """Whether the granted cores of a node are far from the GPUs of a task's ranks."""
    ranks, nodes = cores.far_gpus(machine, gpus, task)
    check = f"numa {task.local_ranks[0]}" if task.is_one_of_several else "numa"
    return _of_far_cores(node, check, ranks, nodes, task.remedy)


def of_rank_cores(far: Sequence[FarGpu], remedy: str) -> list[Finding]:
    """The same of all nodes, from what their ranks have found each for itself."""
    findings = []
    for node in dict.fromkeys(one.node for one in far):
        its = [one for one in far if one.node == node]
        ranks = tuple(one.local_rank for one in its)
        findings += _of_far_cores(node, "numa", ranks, tuple(sorted({one.numa_node for one in its})), remedy)
    return findings


def _of_far_cores(
    node: str, check: str, ranks: tuple[int, ...], nodes: tuple[int, ...], remedy: str
) -> list[Finding]:
    if not ranks:
        return []
    which = f"the GPU{'s' * (len(ranks) > 1)} of local rank{'s' * (len(ranks) > 1)} {cores.listed(ranks)}"
    where = f"NUMA node{'s' * (len(nodes) > 1)} {cores.listed(nodes)}"
    text = f"no core was granted on {where}, where {which} {'are' if len(ranks) > 1 else 'is'}"
    return [Finding(node, check, text, remedy)]


def of_gpu(gpu: GpuSpeed) -> list[Finding]:
    """Who else uses a rank's GPU, and whether it is sound."""
    whole = f"the GPU of rank {gpu.rank} ({gpu.name})"
    found = []
    if gpu.used > USED:
        text = f"{whole} has {size(gpu.used)} of {size(gpu.total)} taken by another process"
        found.append(Finding(gpu.node, "gpu", text, "leave the node out, or end that process (nvidia-smi)"))
    if gpu.ecc:
        text = f"{whole} has {gpu.ecc} uncorrected memory errors"
        found.append(Finding(gpu.node, "gpu", text, "leave the node out and tell its administrators"))
    return found


def of_granted(gpus: Sequence[GpuSpeed], site: Profile) -> list[Finding]:
    """Nodes that come whole, and have fewer GPUs than the site says."""
    told = (site.nodes.gpus if site.nodes.whole else None) or 0
    counts = Counter(gpu.node for gpu in gpus)
    for gpu in gpus:  # there may be fewer ranks
        counts[gpu.node] = max(counts[gpu.node], gpu.visible)
    remedy = "ask for all of them, or leave the node out and tell its administrators"
    return [
        Finding(node, "gpus", f"{count} GPUs may be used, and {site.name} says {told}", remedy)
        for node, count in counts.items()
        if count < told
    ]


# --- the nodes against one another --------------------------------------------------------------------------


def of_clocks(clocks: Iterable[Clock], first: str, most: float) -> list[Finding]:
    """Clocks that are more than `most` seconds from that of node 0, called `first`."""
    return [
        Finding(
            one.node,
            "clock",
            f"its clock is {abs(one.ahead):.2f} s {'ahead of' if one.ahead > 0 else 'behind'} {first}'s",
            "have its administrators synchronize it (chronyc tracking, timedatectl)",
        )
        for one in clocks
        if abs(one.ahead) - one.bound > most
    ]


def of_differences(nodes: Sequence[NodeFacts], speeds: Sequence[Speed], ways: Sequence[Way]) -> list[Finding]:
    """Nodes that stand out by what they and their network do; none over loopback, where one machine plays
    them all."""
    if nodes[0].interface == "lo":
        return []
    return [*of_speeds(speeds), *of_ways(ways, nodes[0].speed)]


def of_speeds(speeds: Sequence[Speed]) -> list[Finding]:
    """Nodes whose slowest rank is slower than those of the others."""
    remedy = "end what else runs there (top, nvidia-smi), or leave the node out: it holds up all others"
    found = []
    for what, words in {"compute": "computes", "memory": "copies memory"}.items():
        slow = standing_out([(one.node, getattr(one, what)) for one in speeds], SLOW[what])
        for node, share in slow.items():
            text = f"it {words} at {share:.2f} of the median of the other nodes"
            found.append(Finding(node, what, text, remedy))
    return found


def of_ways(ways: Sequence[Way], speed: int | None) -> list[Finding]:
    """Nodes whose best way out, or in, is slow. `speed`: bits per second of node 0's interface, which counts
    where there are only two nodes; None where that is unknown."""
    remedy = "have its link and cable looked at (ethtool, ibstat, tc), or leave the node out"
    if len({way.source for way in ways}) == 2:
        least = OF_LINK * (speed or 0) / 8
        return [
            Finding(way.source, "link", f"it sends {_share(way, speed or 0)}", remedy)
            for way in ways
            if way.bandwidth < least
        ]
    found = []
    for words, end in (("sends to", "source"), ("gets from", "target")):
        best: dict[str, float] = {}
        for way in ways:
            node = getattr(way, end)
            best[node] = max(way.bandwidth, best.get(node, 0.0))
        for node, share in standing_out(best.items(), SLOW["link"]).items():
            text = f"it {words} no node more than {rate(best[node])}, {share:.2f} of the median of the others"
            found.append(Finding(node, "link", text, remedy))
    return found


def _share(way: Way, speed: int) -> str:
    return f"{rate(way.bandwidth)} to {way.target}, over an interface of {speed / 1e9:g} Gbit/s"


def standing_out(values: Iterable[tuple[str, float]], below: float) -> dict[str, float]:
    """The nodes whose least value is below this share of the median of the others' least, with the share that
    they reach."""
    from statistics import median  # and with it decimal and fractions, for which no start need wait

    least: dict[str, float] = {}
    for node, value in values:
        least[node] = min(value, least.get(node, value))
    found = {}
    for node, value in least.items():
        others = [other for name, other in least.items() if name != node]
        if others and value < below * median(others):
            found[node] = value / median(others)
    return found


# --- in words -----------------------------------------------------------------------------------------------


def by_nodes(found: Iterable[tuple[str, str]]) -> list[str]:
    """Of (node, text) each text once, behind the nodes that it is true of."""
    nodes: dict[str, list[str]] = {}
    for node, text in found:
        nodes.setdefault(text, []).append(node)
    return [f"{_named(where)}: {text}" for text, where in nodes.items()]


def _named(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    return ", ".join(nodes[:SHOWN]) + more


def size(amount: float) -> str:
    """Bytes in the unit in which they are short: 1.5 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount >= 1024:
            amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if amount >= 10 or unit == "B" else f"{amount:.1f} {unit}"


def limit(name: str, value: int | None) -> str:
    """The value of a limit."""
    if value is None:
        return "unlimited"
    return size(value) if name == "memlock" else str(value)


def rate(amount: float) -> str:
    """Bytes per second, by thousands, as networks and nccl-tests count."""
    return f"{amount / 1e9:.2f} GB/s" if amount >= 1e8 else f"{amount / 1e6:.2f} MB/s"
