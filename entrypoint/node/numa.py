"""Reads from sysfs which cores belong to which NUMA node, physical core and socket, and where a GPU is
attached. `topology` and `place` are the entries; they judge nothing (entrypoint/plan/cores.py does).
"""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from entrypoint.core import files
from entrypoint.plan.cores import GpuPlace, Topology

SYS = Path("/sys")
LARGEST = 1 << 16
"""Bytes of a file there."""
MOST = 1 << 16
"""Cores of a machine: Linux knows 8192 at most."""
ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


def granted() -> frozenset[int]:
    """The cores that this process may use: those of its cpuset that nobody has taken from it."""
    return frozenset(os.sched_getaffinity(0))


def topology(cores: Iterable[int], root: Path = SYS) -> Topology:
    """Where these cores are. A kernel that knows no NUMA nodes has one, 0."""
    wanted = frozenset(cores)
    system = root / "devices/system"
    every: dict[int, frozenset[int]] = {}
    for folder in system.glob("node/node[0-9]*"):
        if found := _list(folder / "cpulist"):  # memory alone has no cores, such as a GPU's
            every[int(folder.name.removeprefix("node"))] = found
    nodes = {node: its & wanted for node, its in sorted(every.items()) if its & wanted}
    if not nodes:
        nodes = {0: wanted}
    physical, sockets = {}, {}
    for core in sorted(wanted):
        about = system / f"cpu/cpu{core}/topology"
        physical[core] = min(_list(about / "thread_siblings_list") or {core})
        sockets[core] = _number(about / "physical_package_id") or 0
    return Topology(nodes=nodes, physical=physical, sockets=sockets, is_whole=len(every) <= 1)


def place(address: str, root: Path = SYS) -> GpuPlace:
    """Where the GPU with this address on the PCI bus is. Drivers write it in several ways."""
    found = ADDRESS.fullmatch(address.lower())
    if not found:
        return GpuPlace(address=address, numa_node=None)
    domain, bus, device, function = found.groups()
    known = f"{int(domain, 16):04x}:{bus}:{device}.{function}"
    node = _number(root / "bus/pci/devices" / known / "numa_node")
    return GpuPlace(address=known, numa_node=node if node is not None and node >= 0 else None)


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(files.read_text(file, LARGEST))
    return None


def _list(file: Path) -> frozenset[int]:
    """The numbers of a list such as 0-3,8; empty if there is none, or it is no such list."""
    try:
        return parse_list(files.read_text(file, LARGEST))
    except (OSError, ValueError):
        return frozenset()


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a list of the kernel's, such as 0-3,8. Raises ValueError if it is none."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if span.stop > MOST:
            raise ValueError(f"{part} is no core's number")
        found.update(span)
    return frozenset(found)
