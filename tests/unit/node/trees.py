"""Machines of tests/recordings/numa as trees of sysfs, and torch's own functions made to read such a tree."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from torch.numa import binding as of_torch

from entrypoint.node import numa
from entrypoint.plan.cores import GpuPlace, Topology
from tests.unit.plans import RECORDINGS

MACHINES: dict[str, dict[str, Any]] = yaml.safe_load((RECORDINGS / "numa" / "machines.yaml").read_text())


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of them, under `root`."""

    root: Path
    granted: frozenset[int]
    topology: Topology
    """As it is read there."""
    gpus: tuple[GpuPlace, ...] | None
    """As CUDA numbers them; None if the job has none."""


def built(name: str, root: Path) -> Machine:
    machine = MACHINES[name]
    nodes = {node: numa.parse_list(text) for node, text in machine["nodes"].items()}
    for node, text in machine["nodes"].items():
        write(root / f"devices/system/node/node{node}/cpulist", text)
    write(root / "devices/system/node/possible", ",".join(map(str, nodes)))
    apart = machine["siblings"]
    for socket, members in enumerate(machine["sockets"]):
        for core in (core for node in members for core in nodes[node]):
            first = core % apart if apart else core
            siblings = f"{first},{first + apart}" if apart else str(core)
            write(root / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", siblings)
            write(root / f"devices/system/cpu/cpu{core}/topology/physical_package_id", str(socket))
    gpus = machine["gpus"]
    for index, node in enumerate(gpus or ()):
        write(root / f"bus/pci/devices/0000:{index + 0xC1:02x}:00.0/numa_node", str(node))
    every = frozenset(core for its in nodes.values() for core in its)
    granted = numa.parse_list(machine["granted"]) if machine["granted"] else every
    addresses = [f"00000000:{index + 0xC1:02X}:00.0" for index in range(len(gpus or ()))]
    return Machine(
        root=root,
        granted=granted,
        topology=numa.topology(granted, root),
        gpus=None if gpus is None else tuple(numa.place(address, root) for address in addresses),
    )


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def show_to_torch(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """torch's functions read this machine, and see its GPUs."""

    def opened(path: str) -> Any:
        return Path(path.replace("/sys", str(machine.root), 1)).open()

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=index + 0xC1, pci_device_id=0)

    accelerator = SimpleNamespace(
        is_available=lambda: machine.gpus is not None,
        current_accelerator=lambda: "cuda",
        device_count=lambda: len(machine.gpus or ()),
    )
    module = SimpleNamespace(get_device_properties=properties)
    patch.setattr(
        of_torch, "torch", SimpleNamespace(accelerator=accelerator, get_device_module=lambda _: module)
    )
    patch.setattr(of_torch, "open", opened, raising=False)
    patch.setattr(os, "sched_getaffinity", lambda _: set(machine.granted))
    patch.setattr(shutil, "which", lambda _: "numactl")
