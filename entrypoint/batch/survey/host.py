"""Reads what a login node itself shows: networks, the program that starts images, a scratch file system. Each
public function finds one of these.

A network is known by signs on the login node. Some of them say little, because the compute nodes may have
others.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from entrypoint.batch.survey.ask import LoginNode
from entrypoint.batch.survey.draft import Line
from entrypoint.core.frozen import dataclass
from entrypoint.schedulers import hostnames

VIRTUAL = re.compile(r"(lo|docker|veth|virbr|br-|cni|tun|tap|ifb|dummy|vnet|podman|cali|flannel).*")
"""Interfaces that lead to no other node."""
SUFFIXES = ("-hsn", "-hsn0", "-ib", "-ib0", "-ipoib", "-opa")
"""What sites append to a node's name for its address on the fast network."""
PROGRAMS = ("apptainer", "singularity", "singularityce", "singularity-ce")
MODULES = "modules-follow\n"
"""What is printed before the modules: login shells print the site's news."""
SCRATCH = ("SCRATCH", "PSCRATCH", "WORK", "WRKDIR", "SCRATCHDIR", "CINECA_SCRATCH", "MYSCRATCH")
NODE_HAS = "`ip -br addr` on a compute node says"
PLUGIN = (
    "NCCL speaks TCP on Slingshot, unless its plugin (aws-ofi-nccl) and libfabric are bound into the image: "
    "docs/site.md has how. Does the site have them?"
)
ROCE = (
    "an RDMA device is here, but no active port of InfiniBand. Is it RoCE, or have only the compute nodes "
    "InfiniBand?"
)
NO_PROGRAM = (
    "neither apptainer nor singularity is in PATH or a module here: which module has it, or where is it "
    "(program: PATH)?"
)
NO_SCRATCH = (
    "where do large files go that all nodes see, such as /scratch/$USER? Else runs lie where you submit"
)


@dataclass(frozen=True)
class LoginInterface:
    name: str
    is_infiniband: bool
    speed: int
    """Mbit/s; 0: the kernel does not say."""
    addresses: Sequence[str]
    """IPv4, with the length of the network's prefix."""

    def __str__(self) -> str:
        rate = f" {self.speed // 1000} Gbit/s" if self.speed >= 1000 else ""
        return f"{self.name}{rate}"


# --- networks -----------------------------------------------------------------------------------------------


def network(machine: LoginNode, node: str, switch: str) -> Iterator[Line]:
    """`node`: one of the cluster's, or ''; `switch`: Slurm's plugin for the network between nodes, or ''."""
    found = interfaces(machine)
    suffix = list(_suffix(machine, node, found)) if node else []
    yield from suffix
    fast = [one for one in found if re.fullmatch(r"hsn\d+", one.name)]
    cxi = machine.names("sys/class/cxi")
    if "slingshot" in switch or cxi or fast:
        yield from _slingshot(fast, cxi, switch)
        return
    ports = list(_ports(machine))
    if ports:
        yield from _infiniband(found, ports, named=bool(suffix))
        return
    yield from _ethernet(machine, found, named=bool(suffix))


def interfaces(machine: LoginNode) -> list[LoginInterface]:
    """Those that are up and may lead to other nodes."""
    try:
        told: list[dict[str, Any]] = json.loads(machine.ask("ip", "-j", "addr") or "[]")
        listed = {str(one["ifname"]): one for one in told}
    except (ValueError, LookupError, TypeError):
        listed = {}
    found = []
    for name in listed or machine.names("sys/class/net"):
        of_it = listed.get(name, {})
        down = of_it.get("operstate") == "DOWN" or machine.read(f"sys/class/net/{name}/operstate") == "down"
        if down or VIRTUAL.fullmatch(name):
            continue
        speed = machine.read(f"sys/class/net/{name}/speed")
        addresses = [
            f"{each['local']}/{each['prefixlen']}"
            for each in of_it.get("addr_info", ())
            if each.get("family") == "inet"
        ]
        is_infiniband = (
            of_it.get("link_type") == "infiniband" or machine.read(f"sys/class/net/{name}/type") == "32"
        )
        found.append(
            LoginInterface(
                name=name,
                is_infiniband=is_infiniband,
                speed=int(speed) if speed.isdecimal() else 0,
                addresses=addresses,
            )
        )
    return found


def _ports(machine: LoginNode) -> Iterator[str]:
    """The active ports of InfiniBand, in words."""
    for device in machine.names("sys/class/infiniband"):
        for port in machine.names(f"sys/class/infiniband/{device}/ports"):
            at = f"sys/class/infiniband/{device}/ports/{port}"
            layer, state = machine.read(f"{at}/link_layer"), machine.read(f"{at}/state")
            if layer == "InfiniBand" and "ACTIVE" in state:
                yield f"{device} port {port} {machine.read(f'{at}/rate')}".strip()


def _slingshot(fast: Sequence[LoginInterface], cxi: Sequence[str], switch: str) -> Iterator[Line]:
    signs = [
        f"SwitchType {switch}" if "slingshot" in switch else "",
        ", ".join(cxi),
        ", ".join(map(str, fast)),
    ]
    why = f"Slingshot: {'; '.join(filter(None, signs))} here"
    unsure = (
        ()
        if cxi or "slingshot" in switch
        else (f"{fast[0].name} is Slingshot's name, but no cxi device is here: {NODE_HAS}",)
    )
    yield Line("env.NCCL_SOCKET_IFNAME", "hsn", why, unsure)
    yield Line("launch.fabric", questions=(PLUGIN,))


def _infiniband(found: Sequence[LoginInterface], ports: Sequence[str], *, named: bool) -> Iterator[Line]:
    yield Line("launch.fabric", "infiniband", f"active here: {', '.join(ports)}")
    over = [one for one in found if one.is_infiniband and one.addresses]
    if over and not named:
        text = f"do the compute nodes have {over[0].name} too? ({NODE_HAS}; without it leave this out)"
        yield Line("launch.interface", over[0].name, f"InfiniBand with {over[0].addresses[0]} here", (text,))


def _ethernet(machine: LoginNode, found: Sequence[LoginInterface], *, named: bool) -> Iterator[Line]:
    listed = ", ".join(map(str, found)) or "no interface"
    yield Line("launch.fabric", "ethernet", f"no InfiniBand and no Slingshot here: {listed}")
    if machine.names("sys/class/infiniband"):
        yield Line("launch.fabric", questions=(ROCE,))
    addressed = sorted((one for one in found if one.addresses), key=lambda one: -one.speed)
    if named or len(addressed) < 2:
        return
    first, second = addressed[:2]
    if first.speed > second.speed:
        text = f"do the compute nodes have {first.name} too? ({NODE_HAS}; without it leave this out)"
        yield Line("launch.interface", first.name, f"the fastest here: {listed}", (text,))
    else:
        text = f"is one faster than that of the node's name, the default? Here are {listed} ({NODE_HAS})"
        yield Line("launch.interface", questions=(text,))


def _suffix(machine: LoginNode, node: str, found: Sequence[LoginInterface]) -> Iterator[Line]:
    """What turns a node's name into that of an address on a network that this host is on, too."""
    own = _addresses(machine, node)
    for suffix in SUFFIXES if own else ():
        name = hostnames.with_suffix(node, suffix)
        for address in _addresses(machine, name) - own:
            on = [one for one in found if any(_holds(network, address) for network in one.addresses)]
            if on:
                why = f"{name} is {address}, on the network of {on[0].name} here"
                yield Line("host_suffix", suffix, why)
                return


def _addresses(machine: LoginNode, name: str) -> set[str]:
    before = len(machine.told)
    answer = machine.ask("getent", "ahostsv4", name)
    del machine.told[before:]  # most of these names are guesses
    return {line.split()[0] for line in answer.splitlines() if line.split()}


def _holds(network: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


# --- what starts the image, and where files go --------------------------------------------------------------


def program(machine: LoginNode) -> Iterator[Line]:
    for name in PROGRAMS[:2]:
        if path := machine.find(name):
            text = f"{name} is {path} here. Do the compute nodes have it in PATH too? Else name its module"
            yield Line("container.modules", questions=(text,))
            return
    names = modules(machine)
    if names:
        rest = f"; there is also {', '.join(names[1:])}" if names[1:] else ""
        yield Line("container.modules", (names[0],), f"module avail{rest}")
        return
    yield Line("container.modules", questions=(NO_PROGRAM,))


def modules(machine: LoginNode) -> list[str]:
    """The modules of Apptainer and Singularity as the site spells them, without versions, the best first."""
    command = f"echo {MODULES.strip()}; module -t avail 2>&1"
    answer = machine.ask("bash", "-lc", command, name="module avail", after=MODULES)
    found: dict[str, tuple[int, int]] = {}
    for line in answer.splitlines():
        word, *marks = line.split() or [""]
        if word.endswith(":") or any(mark[0] not in "(<" for mark in marks):
            continue  # a heading, or a message
        parts = word.partition("(")[0].split("/")
        known = [count for count, part in enumerate(parts, 1) if part.lower() in PROGRAMS]
        if known:
            name = "/".join(parts[: known[0]])
            found[name] = (PROGRAMS.index(parts[known[0] - 1].lower()), known[0])
    return sorted(found, key=found.__getitem__)


def scratch(machine: LoginNode) -> Iterator[Line]:
    known = [name for name in SCRATCH if machine.env.get(name, "").startswith("/")]
    if known:
        rest = f"; also set: {', '.join(known[1:])}" if known[1:] else ""
        yield Line("scratch", f"${known[0]}", f"{known[0]} is {machine.env[known[0]]} here{rest}")
        return
    yield Line("scratch", questions=(NO_SCRATCH,))
