"""Decides which cores each rank runs on: the rule of --numa-binding. Begin at `bind`.

Pure: what the kernel says of a node, which cores were granted and where the GPUs are come as values, and
entrypoint/node/numa.py reads them. A core here is what Linux calls a CPU: with hyperthreads, a physical core
has several. The names mean what torchrun means by them (torch/numa/binding.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted

NONE, AUTO = "none", "auto"
BINDINGS = ("node", "socket", "exclusive", AUTO, NONE)


@dataclass(frozen=True)
class Topology:
    """The granted cores of a node, as its kernel groups them."""

    nodes: Mapping[int, frozenset[int]]
    """The granted cores of each NUMA node; a node without any is left out."""
    physical: Mapping[int, int]
    """Of each, the lowest core that shares its physical core, granted or not."""
    sockets: Mapping[int, int]
    """Of each, the socket."""
    is_whole: bool = False
    """Whether the machine has one NUMA node."""

    @property
    def granted(self) -> frozenset[int]:
        return frozenset(core for cores in self.nodes.values() for core in cores)

    def on_socket_of(self, node: int) -> frozenset[int]:
        """The cores of all NUMA nodes of the socket that this one belongs to."""
        socket = self._socket(node)
        return frozenset(
            core for other, cores in self.nodes.items() for core in cores if self._socket(other) == socket
        )

    def _socket(self, node: int) -> int:
        return self.sockets[min(self.nodes[node])]

    def physical_cores(self, cores: Iterable[int]) -> list[list[int]]:
        """The cores in groups that share a physical core, in order."""
        found: dict[int, list[int]] = {}
        for core in sorted(cores):
            found.setdefault(self.physical[core], []).append(core)
        return [found[first] for first in sorted(found)]

    def nodes_of(self, cores: Iterable[int]) -> tuple[int, ...]:
        wanted = set(cores)
        return tuple(sorted(node for node, its in self.nodes.items() if wanted & its))


@dataclass(frozen=True)
class GpuPlace:
    """Where a GPU is attached."""

    address: str
    """On the PCI bus, such as 0000:07:00.0."""
    numa_node: int | None
    """None if the kernel does not say."""


@dataclass(frozen=True)
class TaskRanks:
    """The ranks that this process starts."""

    local_ranks: tuple[int, ...]
    nproc_per_node: int
    """Those of all tasks of the node."""
    has_own_cores: bool = False
    """Whether the scheduler has given this task, which is one rank, cores that its neighbours do not have."""
    remedy: str = "request whole nodes"
    """How to get cores beside the GPUs."""

    @property
    def is_one_of_several(self) -> bool:
        return len(self.local_ranks) < self.nproc_per_node


@dataclass(frozen=True)
class RankCores:
    """The cores of a rank, and why it has these."""

    local_rank: int
    cores: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    """Those that the cores are on."""
    gpu: str = ""
    """The address of the GPU that they are close to; empty on CPUs."""

    def to_json(self) -> dict[str, Any]:
        return {
            "local_rank": self.local_rank,
            "cores": listed(self.cores),
            "numa_nodes": list(self.numa_nodes),
            "gpu": self.gpu or None,
        }


@dataclass(frozen=True)
class Binding:
    """What becomes of --numa-binding on a node."""

    ranks: tuple[RankCores, ...] = ()
    """Empty: each rank may use every granted core."""
    why_not: str = ""
    """Why `ranks` is empty."""


def bind(
    binding: str, machine: Topology, gpus: Sequence[GpuPlace] | None, task: TaskRanks
) -> tuple[RankCores, ...]:
    """The cores of each rank. `gpus`: as CUDA numbers them here; None for ranks on CPUs.

    node: those of the NUMA node of the rank's GPU; socket: those of its socket; exclusive: those of the NUMA
    node are shared out among the GPUs on it. On CPUs the ranks are spread over the NUMA nodes in proportion
    to their cores, neighbours together, and exclusive shares out among the ranks of a node.

    Raises BadInput if a rank would have none, or it is unknown where its GPU is.
    """
    return tuple(_of_rank(binding, machine, gpus, task, rank) for rank in task.local_ranks)


def auto(machine: Topology, gpus: Sequence[GpuPlace] | None, task: TaskRanks) -> Binding:
    """node or socket, the first that leaves no granted core without a rank; without one nothing is bound."""
    why = "it would leave granted cores without a rank"
    try:
        for binding in ("node", "socket"):
            left = _left(binding, machine, gpus, task)
            if left == 0:
                return Binding(ranks=bind(binding, machine, gpus, task))
            if left is None:
                why = (
                    "this task sees only its own GPU, and not where the other ranks of the node would run: "
                    "request GPUs per node rather than per task, or use node"
                )
    except BadInput as error:
        why = str(error)
    return Binding(why_not=f"--numa-binding auto binds nothing: {why}")


def decide(
    binding: str, machine: Topology, gpus: Sequence[GpuPlace] | None, task: TaskRanks, node: str
) -> Binding:
    """What becomes of a binding on the node of that name. Raises BadInput as `bind`, but not for auto."""
    found = (
        auto(machine, gpus, task) if binding == AUTO else Binding(ranks=bind(binding, machine, gpus, task))
    )
    if found.ranks and all(frozenset(rank.cores) == machine.granted for rank in found.ranks):
        why = f"{node} has one NUMA node" if machine.is_whole else f"all cores granted on {node} are near"
        why = "each task has cores of its own" if task.has_own_cores else why
        return Binding(why_not=f"--numa-binding {binding} changes nothing: {why}")
    return found


def far_gpus(
    machine: Topology, gpus: Sequence[GpuPlace], task: TaskRanks
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local ranks whose GPU is on a NUMA node without a granted core, those NUMA nodes). What is unknown is
    not among them."""
    found = []
    for rank in task.local_ranks:
        with contextlib.suppress(BadInput):
            node = node_of(gpus[device_of(rank, gpus, task)], machine)
            if node not in machine.nodes:
                found.append((rank, node))
    return tuple(rank for rank, _ in found), tuple(sorted({node for _, node in found}))


def advice(machine: Topology, gpus: Sequence[GpuPlace], task: TaskRanks, node: str) -> str:
    """What --numa-binding would change on the node of that name; empty if nothing, or it could not be."""
    try:
        found = decide("node", machine, gpus, task, node).ranks
        if not found:
            return ""
        left, by_socket = (_left(binding, machine, gpus, task) for binding in ("node", "socket"))
    except BadInput:  # of a neighbour's rank, too
        return ""
    other = f" (socket: {by_socket})" if left and by_socket is not None and by_socket < left else ""
    idle = f", and leave {counted(left, 'core')} without a rank{other}" if left else ""
    return (
        f"each rank may use all {len(machine.granted)} cores granted on {node}, of {len(machine.nodes)} NUMA "
        f"nodes: --numa-binding node would keep {in_words(found)}{idle}"
    )


def _left(binding: str, machine: Topology, gpus: Sequence[GpuPlace] | None, task: TaskRanks) -> int | None:
    """How many granted cores would have no rank: this task's or, if it has no cores of its own, its
    neighbours' either. None if it cannot see where these would run."""
    are_shared = task.is_one_of_several and not task.has_own_cores
    knows_all = gpus is None or len(gpus) >= task.nproc_per_node
    ranks = tuple(range(task.nproc_per_node)) if are_shared and knows_all else task.local_ranks
    bound = bind(binding, machine, gpus, replace(task, local_ranks=ranks))
    left = len(machine.granted - {core for rank in bound for core in rank.cores})
    return None if left and are_shared and not knows_all else left


def _of_rank(
    binding: str, machine: Topology, gpus: Sequence[GpuPlace] | None, task: TaskRanks, rank: int
) -> RankCores:
    if gpus is None:
        return _on_cpus(binding, machine, task, rank)
    device = device_of(rank, gpus, task)
    node = node_of(gpus[device], machine)
    where = f"NUMA node {node}, where GPU {device} ({gpus[device].address}) of local rank {rank} is"
    if node not in machine.nodes:
        raise _too_few(binding, f"no core was granted on {where}", task)
    cores = machine.on_socket_of(node) if binding == "socket" else machine.nodes[node]
    if binding == "exclusive" and not task.has_own_cores:
        if task.is_one_of_several and len(gpus) == 1:
            raise BadInput(
                "numa-exclusive-own-gpu",
                "--numa-binding exclusive shares out a NUMA node's cores among the GPUs on it, but this task "
                "sees only its own GPU: request GPUs per node rather than per task, or use node",
            )
        sharers = [index for index, gpu in enumerate(gpus) if node_of(gpu, machine) == node]
        cores = _share(machine, cores, sharers.index(device), len(sharers))
        if not cores:
            raise _too_few(binding, f"{len(sharers)} GPUs share too few physical cores of {where}", task)
    return _made(machine, rank, cores, gpus[device].address)


def device_of(rank: int, gpus: Sequence[GpuPlace], task: TaskRanks) -> int:
    """The number of the GPU that a rank uses: its local rank, or 0 if its task sees no other. Raises
    BadInput if neither can be."""
    if task.is_one_of_several and len(gpus) == 1:
        return 0
    if rank >= len(gpus):
        raise BadInput(
            "numa-rank-gpu",
            f"--numa-binding needs to know the GPU of local rank {rank}, but this task sees "
            f"{counted(len(gpus), 'GPU')}: leave --numa-binding out, or request GPUs per node",
        )
    return rank


def node_of(gpu: GpuPlace, machine: Topology) -> int:
    """The NUMA node of a GPU. Raises BadInput if it is unknown, and there are several."""
    if gpu.numa_node is not None:
        return gpu.numa_node
    if machine.is_whole:
        return next(iter(machine.nodes))
    raise BadInput(
        "numa-gpu-node",
        f"--numa-binding needs to know the NUMA node of the GPU at {gpu.address or 'an unknown address'}, "
        "and neither the driver nor the kernel says it: leave --numa-binding out",
    )


def _on_cpus(binding: str, machine: Topology, task: TaskRanks, rank: int) -> RankCores:
    if task.has_own_cores:
        node = max(machine.nodes, key=lambda number: (len(machine.nodes[number]), -number))
        cores = machine.on_socket_of(node) if binding == "socket" else machine.nodes[node]
        return _made(machine, rank, cores)
    nodes = _spread(machine, task.nproc_per_node)
    cores = machine.on_socket_of(nodes[rank]) if binding == "socket" else machine.nodes[nodes[rank]]
    if binding == "exclusive":
        sharers = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        cores = _share(machine, cores, sharers.index(rank), len(sharers))
        if not cores:
            found = counted(len(machine.physical_cores(machine.granted)), "physical core")
            raise BadInput(
                "numa-ranks",
                f"--numa-binding exclusive, but the {task.nproc_per_node} ranks of this node would share "
                f"{found}: start fewer ranks, request more cores, or leave it out",
            )
    return _made(machine, rank, cores)


def _spread(machine: Topology, ranks: int) -> list[int]:
    """The NUMA node of each rank."""
    units = [node for node in sorted(machine.nodes) for _ in machine.physical_cores(machine.nodes[node])]
    return [units[rank * len(units) // ranks] for rank in range(ranks)]


def _share(machine: Topology, cores: Iterable[int], index: int, shares: int) -> frozenset[int]:
    """One of so many shares of physical cores, the first ones larger if it does not come out even."""
    groups = machine.physical_cores(cores)
    each, more = divmod(len(groups), shares)
    start = index * each + min(index, more)
    end = start + each + (index < more)
    return frozenset(core for group in groups[start:end] for core in group)


def _made(machine: Topology, rank: int, cores: Iterable[int], gpu: str = "") -> RankCores:
    ordered = tuple(sorted(cores))
    return RankCores(local_rank=rank, cores=ordered, numa_nodes=machine.nodes_of(ordered), gpu=gpu)


def _too_few(binding: str, found: str, task: TaskRanks) -> BadInput:
    return BadInput("numa-cores", f"--numa-binding {binding}, but {found}: {task.remedy}, or leave it out")


def threads(ranks: Sequence[RankCores]) -> int:
    """How many threads each rank can have so that none waits for a core: those of the rank with the fewest
    cores, shared among the ranks that have the same ones."""
    sharers: dict[tuple[int, ...], int] = {}
    for rank in ranks:
        sharers[rank.cores] = sharers.get(rank.cores, 0) + 1
    return max(1, min(len(cores) // count for cores, count in sharers.items()))


# --- in words -----------------------------------------------------------------------------------------------


def listed(numbers: Iterable[int]) -> str:
    """As the kernel lists them: 0-15,64-79."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def in_words(ranks: Sequence[RankCores]) -> str:
    """Which local ranks run on which cores: those with the same ones together."""
    together: dict[tuple[int, ...], list[RankCores]] = {}
    for rank in ranks:
        together.setdefault(rank.cores, []).append(rank)
    return "; ".join(_group_in_words(group) for group in together.values())


def _group_in_words(group: Sequence[RankCores]) -> str:
    nodes = group[0].numa_nodes
    which = f"NUMA node{'s' * (len(nodes) > 1)} {listed(nodes)}"
    numbers = listed(rank.local_rank for rank in group)
    cores = f"core{'s' * (len(group[0].cores) > 1)} {listed(group[0].cores)}"
    return f"local rank{'s' * (len(group) > 1)} {numbers} on {cores} ({which})"
