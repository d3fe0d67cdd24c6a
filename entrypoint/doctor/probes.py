"""Measures, with torch, a rank and what passes between nodes: how fast it computes and copies, how its clock
goes, and the network. Each public function is one measurement, bounded in time.

All ranks call the same functions in the same order.
"""

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from entrypoint.doctor.judge import Clock, Collective, FarGpu, GpuSpeed, Way, standing_out
from entrypoint.node import numa
from entrypoint.node.driver import DriverError, cuda_address, library
from entrypoint.plan import cores
from entrypoint.plan.cores import TaskRanks

SLICE = 0.1
"""Seconds of work that are timed as one: longer than a scheduler's turn, so that what else runs there
shows."""
SLICES = 4
"""The best of them counts."""
PATIENCE = 8.0
"""Seconds for a node that stands out to catch up."""
ALIKE = 0.8
"""Of the median of the others: a node that reaches so much is not measured again."""
EDGE = {"cpu": 256, "cuda": 8192}
"""Of the square matrices."""
COPY = {"cpu": 1 << 25, "cuda": 1 << 30}
"""Bytes that are copied: more than a cache holds."""
SIZES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 20, 1 << 24, 1 << 28)}
"""Bytes of a collective's buffer."""
GROWTH = 16
"""From one size to the next."""
BUDGET = 0.4
"""Seconds for a collective of one size."""
LONGEST = 1.5
"""Seconds that one call may take, by what the smaller size took; else that size is left out."""
PINGS = 8
PAYLOADS = (1 << 18, 1 << 23)
"""Bytes from node to node: the larger only if the smaller passes at once."""
AT_ONCE = 0.02
"""Seconds."""
SWEEPS = 4
WAYS = 5.0
"""Seconds for all ways between nodes; those that are left then are not tried."""


Measure = Callable[[], float]


class Store(Protocol):
    """torch's, which holds text for all ranks."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


# --- one rank -----------------------------------------------------------------------------------------------


def compute(device: torch.device) -> Measure:
    """Floating-point operations per second in products of matrices: on a GPU in bfloat16, else in float32 and
    one thread."""
    edge = EDGE[device.type]
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.ones(edge, edge, dtype=kind, device=device)
    right, out = left.clone(), left.clone()
    return lambda: 2 * edge**3 * _per_second(lambda: torch.mm(left, right, out=out), device)


def copy(device: torch.device) -> Measure:
    """Bytes per second, read and written, of a copy in the device's memory, in one thread on CPUs."""
    source = torch.ones(COPY[device.type] // 4, device=device)
    target = source.clone()
    return lambda: 2 * COPY[device.type] * _per_second(lambda: target.copy_(source), device)


def settled(measure: Measure, nodes: Sequence[str], device: torch.device) -> float:
    """The best of as many measurements as it takes until the nodes are alike, or PATIENCE has passed: a node
    that is busy for a moment catches up, one that is slow does not. `nodes`: of each rank."""
    began, best = time.perf_counter(), 0.0
    while True:
        dist.barrier()
        best = max(best, measure())
        values = [float(value) for value in _everyones(best, device)]
        passed = max(map(float, _everyones(time.perf_counter() - began, device)))
        if passed > PATIENCE or not standing_out(zip(nodes, values, strict=True), ALIKE):
            return best


def _per_second(work: Callable[[], object], device: torch.device) -> float:
    with _one_thread():
        work()
        _synchronize(device)
        return max(_slice(work, device) for _ in range(SLICES))


def _slice(work: Callable[[], object], device: torch.device) -> float:
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < SLICE:
        work()
        _synchronize(device)
        count += 1
    return count / passed


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Threads that wait for one another measure how busy the node is with ourselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gpu(rank: int, node: str, device: torch.device) -> GpuSpeed:
    """The GPU as this rank finds it; to be asked before anything is allocated there."""
    free, total = torch.cuda.mem_get_info(device)
    found = torch.cuda.get_device_properties(device)
    return GpuSpeed(
        rank=rank,
        node=node,
        name=found.name,
        used=total - free,
        total=total,
        ecc=_memory_errors(f"GPU-{found.uuid}"),
        visible=torch.cuda.device_count(),
    )


def far_gpu(node: str, local_rank: int, device: torch.device) -> list[FarGpu]:
    """The rank's GPU, if this process has no core on its NUMA node; also empty if that is unknown."""
    try:
        found = numa.place(cuda_address(library("libcuda.so.1"), ctypes.c_int(device.index)))
    except OSError:
        return []
    machine = numa.topology(numa.granted())
    _, nodes = cores.far_gpus(machine, (found,), TaskRanks(local_ranks=(0,), nproc_per_node=1))
    return [FarGpu(node=node, local_rank=local_rank, numa_node=one) for one in nodes]


def _memory_errors(uuid: str) -> int | None:
    """NVML's count of uncorrected errors since the driver was loaded; None where it keeps none."""
    uncorrected, since_loaded = 1, 0
    handle, count = ctypes.c_void_p(), ctypes.c_ulonglong()
    try:
        call = library("libnvidia-ml.so.1")
        call("nvmlInit_v2")
        call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        call("nvmlDeviceGetTotalEccErrors", handle, uncorrected, since_loaded, ctypes.byref(count))
    except (OSError, DriverError):
        return None
    return count.value


# --- among ranks --------------------------------------------------------------------------------------------


def clocks(store: Store, firsts: Mapping[int, str]) -> list[Clock]:
    """On rank 0 the clocks of the other nodes against its own; nothing elsewhere. `firsts`: the first rank of
    each node, with the node's name. Over torch's store, which every rank has: a rank tells its time between
    two answers.
    """
    mine = dist.get_rank()
    if mine == 0:
        return [_ask(store, rank, node) for rank, node in firsts.items() if rank]
    if mine in firsts:
        for number in range(PINGS):
            store.get(f"ping/{mine}/{number}")
            store.set(f"pong/{mine}/{number}", repr(time.time()))
    return []


def _ask(store: Store, rank: int, node: str) -> Clock:
    """The round that was the quickest says most: the answer was given at some time in it."""
    rounds = []
    for number in range(PINGS):
        began = time.time()
        store.set(f"ping/{rank}/{number}", "")
        theirs = float(store.get(f"pong/{rank}/{number}"))
        ended = time.time()
        rounds.append(Clock(node=node, ahead=theirs - (began + ended) / 2, bound=abs(ended - began) / 2))
    return min(rounds, key=lambda one: one.bound)


def collectives(device: torch.device) -> list[Collective]:
    """all_reduce and all_gather by size, the same numbers on every rank.

    Bus bandwidth as nccl-tests define it (doc/PERFORMANCE.md there): what a collective moves over the slowest
    link, whatever the number n of ranks. With a buffer of S bytes that takes t seconds:

        all_reduce   S / t * 2 (n - 1) / n
        all_gather   S / t * (n - 1) / n
    """
    ranks, mine = dist.get_world_size(), dist.get_rank()
    found: list[Collective] = []
    if ranks == 1:
        return found
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": (ranks - 1) / ranks}
    for name, factor in factors.items():
        expected = 0.0
        for size in SIZES[device.type]:
            if expected > LONGEST:
                break
            whole = torch.zeros(size // 4 // ranks * ranks, device=device)
            part = whole.chunk(ranks)[mine].clone()
            seconds = _seconds(name, whole, part, device)
            found.append(Collective(name, size, whole.nbytes / seconds * factor))
            expected = seconds * GROWTH
    return found


def _seconds(name: str, whole: torch.Tensor, part: torch.Tensor, device: torch.device) -> float:
    """Of one call, the slowest rank's mean."""

    def work() -> None:
        if name == "all_reduce":
            dist.all_reduce(whole)
        else:
            dist.all_gather_into_tensor(whole, part)

    work()
    once = _timed(work, device, 1)
    return _timed(work, device, max(1, min(50, int(BUDGET / once))))


def _timed(work: Callable[[], object], device: torch.device, count: int) -> float:
    dist.barrier()
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        work()
    _synchronize(device)
    return float(max(_everyones((time.perf_counter() - began) / count, device)))


def _everyones(value: float, device: torch.device) -> list[torch.Tensor]:
    """The value of each rank, the same on all."""
    found = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(found, torch.tensor([value], dtype=torch.float64, device=device))
    return list(found)


def ways(device: torch.device, firsts: Mapping[int, str]) -> list[Way]:
    """What passes from this rank's node to the others, measured by the first rank of each node: in each round
    every node with one other, all of them SWEEPS times and as often as it takes until the nodes are alike, if
    WAYS is enough. The best counts."""
    began, mine = time.perf_counter(), dist.get_rank()
    best: dict[int, float] = {}
    for sweep in itertools.count(1):
        for pairs in rounds(list(firsts)):
            for source, target in pairs:
                other = target if mine == source else source
                if mine == target:
                    _receive(device, source)
                if mine in (source, target):
                    best[other] = max(_send(device, other), best.get(other, 0.0))
                if mine == source:
                    _receive(device, target)
            time_is_up = max(_everyones(time.perf_counter() - began, device)) > WAYS
            if time_is_up:
                break
        if time_is_up or (sweep >= SWEEPS and _are_alike(best, device, firsts)):
            break
    return [Way(firsts[mine], firsts[other], bandwidth) for other, bandwidth in best.items()]


def _are_alike(best: Mapping[int, float], device: torch.device, firsts: Mapping[int, str]) -> bool:
    """Whether the best way from each node, and the best to it, reaches what those of the others do. `best`:
    from this rank to others."""
    places = {rank: place for place, rank in enumerate(firsts)}
    ends = torch.zeros(2, len(firsts), dtype=torch.float64, device=device)
    for target, bandwidth in best.items():
        ends[0, places[dist.get_rank()]] = max(best.values())
        ends[1, places[target]] = bandwidth
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return not any(standing_out(zip(firsts.values(), end, strict=True), ALIKE) for end in ends.tolist())


def rounds(players: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """All pairs, in rounds in which each player has one: the schedule of a tournament."""
    ring: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _send(device: torch.device, target: int) -> float:
    """Bytes per second."""
    bandwidth = 0.0
    answer = torch.zeros(1, device=device)
    dist.send(answer, target)  # the connection is made by the first
    dist.recv(answer, target)
    for size in PAYLOADS:
        payload = torch.zeros(size // 4, device=device)
        _synchronize(device)
        began = time.perf_counter()
        dist.send(payload, target)
        dist.recv(answer, target)
        _synchronize(device)
        seconds = time.perf_counter() - began
        bandwidth = size / seconds
        answer.fill_(float(seconds < AT_ONCE))
        dist.send(answer, target)
        if not answer.item():
            break
    return bandwidth


def _receive(device: torch.device, source: int) -> None:
    answer = torch.zeros(1, device=device)
    dist.recv(answer, source)
    dist.send(answer, source)
    for size in PAYLOADS:
        payload = torch.zeros(size // 4, device=device)
        dist.recv(payload, source)
        dist.send(answer, source)
        dist.recv(answer, source)
        if not answer.item():
            break
