"""Finds this node's place in the network: its address for the rendezvous, and the interfaces for gloo and
NCCL. `find` is the entry.

Nothing falls back to localhost, and what torch would wait for in vain is refused.

    address     node 0: of --master-addr, else of its name (under a profile's host_suffix NAME + suffix);
                if the name means two addresses to different nodes, the one that most others reach. The
                others: of NAME + suffix, else the one from which the route to node 0's address starts
    interfaces  of --interface, else of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME as set, else the profile's,
                else the one that has the address
"""

import dataclasses
import errno
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from entrypoint.core import files
from entrypoint.core.errors import BadInput, Unavailable
from entrypoint.core.frozen import dataclass
from entrypoint.node import processes
from entrypoint.plan.launch_plan import LaunchPlan, with_env, with_local_addr
from entrypoint.plan.origin import Origin, ValueSource, derived_from, from_variable
from entrypoint.plan.rules import nccl_names
from entrypoint.schedulers import slurm

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
NCCL_NAMES = 16
"""So many names NCCL reads of its list; those after them it passes over without a word."""
BY_ADDRESS = derived_from("rendezvous.local_addr")
FIRST = "the first node's name"
OWN = "this node's name"
OTHERS = "name one that every node has, or none, to take the one on the way to the first node"


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One of the network on this machine."""

    name: str
    """As gloo and NCCL find it: an address with a label of its own, such as eth0:1, goes by that alone."""
    addresses: tuple[str, ...]
    """IPv4 first, in the system's order; no link-local ones of IPv6, which mean nothing elsewhere."""
    is_up: bool

    def __str__(self) -> str:
        has = self.addresses[0] if self.addresses else "without address"
        return f"{self.name} ({has if self.is_up else 'down'})"


class NetworkView(Protocol):
    """What is asked of the machine. The first two raise OSError."""

    def addresses_of(self, name: str) -> Sequence[str]: ...

    def source_towards(self, address: str) -> str:
        """The address that a datagram to `address` would be sent from."""

    def interfaces(self) -> Sequence[Interface]: ...


class ThisMachine:
    def addresses_of(self, name: str) -> Sequence[str]:
        try:
            return [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except UnicodeError as error:  # a name with an empty or overlong part
            raise OSError(errno.EINVAL, str(error)) from None

    def source_towards(self, address: str) -> str:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # nothing is sent
            return str(probe.getsockname()[0])

    def interfaces(self) -> Sequence[Interface]:
        import psutil

        stats = psutil.net_if_stats()
        found = []
        for name, entries in psutil.net_if_addrs().items():
            texts = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
            usable = [text for text in texts if not ipaddress.ip_address(text).is_link_local or "." in text]
            usable.sort(key=lambda text: ":" in text)
            device = name.partition(":")[0]
            is_up = device in stats and stats[device].isup
            found.append(Interface(name=name, addresses=tuple(usable), is_up=is_up))
        return found


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A node in the network."""

    plan: LaunchPlan
    """With its address, and the interfaces of gloo and NCCL for its workers."""
    first: str
    """Node 0's address for the rendezvous."""
    interface: str
    """Gloo's, of several the first; empty for a node alone."""
    address: str
    """The one of it that gloo listens on; empty for a node alone."""

    @property
    def joins_machines(self) -> bool:
        """Whether there are other nodes, and not on this same machine."""
        return bool(self.address) and not _parsed(self.address).is_loopback


def find(plan: LaunchPlan, env: Mapping[str, str], machine: NetworkView | None = None) -> Endpoint:
    """This node's endpoint; `env` is what its workers inherit.

    BadInput: a name leads to no address of use, or an interface that was asked for is not there. Unavailable:
    there is no route to the first node, or an interface is down.
    """
    machine = machine or ThisMachine()
    interfaces = {interface.name: interface for interface in machine.interfaces()}
    if plan.nnodes == 1:
        first = _lookup(plan, plan.rendezvous.master_addr, FIRST, machine, alone=True)
        plan = _with_labels(plan, interfaces)
        _check_chosen(plan, env, interfaces)
        return Endpoint(plan=plan, first=first, interface="", address="")
    first, own, notes = _addresses(plan, machine)
    interface = _with_address(plan, own, interfaces.values())
    plan = with_local_addr(dataclasses.replace(plan, notes=plan.notes + notes), own)
    names = {GLOO: interface.name, NCCL: nccl_names(interface.name)}
    added = {name: value for name, value in names.items() if not (env.get(name) or plan.env.get(name))}
    plan = _with_labels(with_env(plan, added, BY_ADDRESS), interfaces)
    _check_chosen(plan, env, interfaces)
    gloo = interfaces[_chosen(plan, env, GLOO).split(",")[0]]
    # Gloo takes an interface's first address, which need not be the rendezvous's.
    return Endpoint(plan=plan, first=first, interface=gloo.name, address=gloo.addresses[0])


def summary(plan: LaunchPlan, env: Mapping[str, str], elsewhere: Mapping[str, str]) -> str:
    """One line for the job: which addresses and interfaces are used, and what decided it.

    `elsewhere`: node to gloo's interface there, of the nodes where that is another one.
    """
    gloo, nccl = _chosen(plan, env, GLOO), _chosen(plan, env, NCCL)
    used = {"gloo": gloo}
    if plan.device == "cuda":
        used = {"gloo and NCCL": gloo} if nccl in (gloo, f"={gloo}") else {"gloo": gloo, "NCCL": nccl}
    where = ", ".join(f"{who} on {name}" for who, name in used.items())
    others = [f"{name} on {node}" for node, name in elsewhere.items()]
    if others:
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        where += f" ({', '.join(others[:4])}{more})"
    source = plan.sources.get(f"env.{GLOO}", from_variable(GLOO))
    if source != BY_ADDRESS:
        where += f" [{source}]"
    name, address = plan.rendezvous.master_addr, plan.rendezvous.local_addr
    at = name if name == address else f"{name} ({address})"
    return f"network: rendezvous at {at} [{plan.sources['master_addr']}], {where}"


def has_name(plan: LaunchPlan) -> bool:
    """Whether the others find this node by a name, which may mean another of its addresses to each."""
    return not _is_address(plan.hosts[plan.place])


def first_waits_at(plan: LaunchPlan, first_plan: Path) -> str | None:
    """The address at which node 0 waits, once its plan of this attempt is seen here."""
    try:
        first = files.read_json(first_plan, 8 << 20)
        attempt, there = first["attempt"], first["rendezvous"]["local_addr"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(there) if attempt == plan.attempt else None


def check_store_port(plan: LaunchPlan, advice: str) -> None:
    """Unavailable: the port of torch's store is taken on this node. The store listens on the rendezvous's
    address; where a rank starts it, and under c10d, on every one."""
    port = plan.rendezvous.master_port
    places = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]
    own = plan.rendezvous.local_addr
    if plan.mode == "torchrun" and plan.rendezvous.backend == "static" and _is_address(own):
        places = [(_family(own), own)]
    for family, everywhere in places:
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((everywhere, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                text = f"port {port} of torch's store is taken on {plan.node}{_holder(port)}: {advice}"
                raise Unavailable("store-port-taken", text) from None


# --- addresses ----------------------------------------------------------------------------------------------


def _addresses(plan: LaunchPlan, machine: NetworkView) -> tuple[str, str, tuple[str, ...]]:
    """(node 0's address, this node's, notes)."""
    rendezvous = plan.rendezvous
    if rendezvous.is_host:
        own, notes = _first_nodes_own(plan, machine)
        return own, own, notes
    first = _lookup(plan, rendezvous.master_addr, FIRST, machine)
    if _is_address(rendezvous.local_addr):
        return first, rendezvous.local_addr, ()
    if rendezvous.host_suffix:
        return first, _lookup(plan, rendezvous.local_addr, OWN, machine), ()
    return first, _on_the_way(plan, first, machine), ()


def _first_nodes_own(plan: LaunchPlan, machine: NetworkView) -> tuple[str, tuple[str, ...]]:
    """Node 0's own address; where its name is 127.0.1.1 to itself, the one on the way to another node."""
    name = plan.rendezvous.master_addr
    try:
        return _lookup(plan, name, FIRST, machine), ()
    except _Loopback as loopback:
        for place, other in enumerate(plan.allocation.nodes):
            if place == plan.place:
                continue
            try:
                address = _on_the_way(plan, _lookup(plan, plan.hosts[place], FIRST, machine), machine)
            except (BadInput, Unavailable):
                continue
            note = (
                f"{name} is {loopback.address} to itself: {address}, on the way to {other}, is taken instead"
            )
            return address, (note,)
        raise


class _Loopback(BadInput):
    def __init__(self, id: str, text: str, address: str):
        super().__init__(id, text)
        self.address = address


def _lookup(plan: LaunchPlan, name: str, whose: str, machine: NetworkView, *, alone: bool = False) -> str:
    """The address of a name: of several the same on all nodes, whatever the resolver's order."""
    if _is_address(name):
        return name
    try:
        found = [text for text in machine.addresses_of(name) if not _is_link_local(text)]
        if not found:
            raise OSError(errno.EADDRNOTAVAIL, "link-local addresses only")
    except OSError as error:
        by_slurm = whose == FIRST and plan.allocation.scheduler == slurm.NAME
        address = f" with what scontrol show node {plan.nodes[0]} has as NodeAddr" if by_slurm else ""
        raise BadInput(
            "name-unresolved",
            f"{whose} {name!r} does not resolve on {plan.node} ({_reason(error)}): "
            f"check the name, DNS and /etc/hosts, or give --master-addr{address}",
        ) from None
    usable = [text for text in found if alone or not _parsed(text).is_loopback]
    if not usable:
        raise _Loopback(
            "name-is-loopback",
            f"{whose} {name!r} resolves to {found[0]} on {plan.node}, which no other node can reach: "
            "correct /etc/hosts, or give --master-addr with an address of the network between the nodes",
            found[0],
        )
    return min(usable, key=lambda text: (_parsed(text).version, int(_parsed(text))))


def _on_the_way(plan: LaunchPlan, address: str, machine: NetworkView) -> str:
    try:
        return machine.source_towards(address)
    except OSError as error:
        raise Unavailable(
            "no-route",
            f"{plan.node} has no route to the first node's address {address} ({_reason(error)}): "
            "check its network, or give --master-addr with an address of another",
        ) from None


# --- interfaces ---------------------------------------------------------------------------------------------


def _with_address(plan: LaunchPlan, address: str, interfaces: Iterable[Interface]) -> Interface:
    """The interface that has the rendezvous's address."""
    wanted = _parsed(address)
    for interface in interfaces:
        if any(_parsed(text) == wanted for text in interface.addresses):
            _check_up(plan, interface, f"{_rendezvous_name(plan)} is {address}")
            return interface
        if interface.name == "lo" and wanted.version == 4 and wanted.is_loopback:
            return interface
    raise BadInput(
        "address-not-of-node",
        f"{_rendezvous_name(plan)} is {address}, but no interface of {plan.node} has that: it has "
        f"{_listed(interfaces)}: check its network, /etc/hosts and --node-rank, or give --master-addr",
    )


def _rendezvous_name(plan: LaunchPlan) -> str:
    return plan.rendezvous.master_addr if plan.rendezvous.is_host else plan.rendezvous.local_addr


def _check_chosen(plan: LaunchPlan, env: Mapping[str, str], interfaces: Mapping[str, Interface]) -> None:
    """Refuses interfaces that were asked for and that gloo or NCCL would not find."""
    value = _chosen(plan, env, GLOO)
    names = value.split(",") if value else []
    for name in names:
        given = _given(plan, GLOO, value)
        if name not in interfaces:
            raise _not_of_gloo(plan, value, name, interfaces.values())
        if not interfaces[name].addresses:
            raise BadInput(
                "interface-no-address",
                f"{given}: it has no address on {plan.node}, which has {_listed(interfaces.values())}",
            )
        _check_up(plan, interfaces[name], given)
    spec = _chosen(plan, env, NCCL)
    if plan.device == "cuda" and spec:
        matching = [one for one in interfaces.values() if _nccl_takes(spec, one.name) and one.addresses]
        if not matching:
            raise _absent(plan, _given(plan, NCCL, spec), interfaces.values())


def _with_labels(plan: LaunchPlan, interfaces: Mapping[str, Interface]) -> LaunchPlan:
    """The plan with what keeps NCCL to the address of a label, if its interface is one.

    What follows a colon is a port to NCCL: eth0:1 would be eth0, whose own address may be of another network.
    So it is told the names of all other interfaces, to leave them out.
    """
    spec = plan.env.get(NCCL, "")
    names = spec.removeprefix("=").split(",")
    is_label = spec.startswith("=") and any(":" in name and name in interfaces for name in names)
    if plan.device != "cuda" or not is_label:
        return plan
    others = [name for name in interfaces if name not in names]
    labels = [name for name in others if ":" in name]
    if labels or len(others) > NCCL_NAMES:
        given, has = _given(plan, NCCL, spec), ", ".join(labels) or len(others)
        raise BadInput(
            "nccl-label",
            f"{given}: NCCL finds a label only if it leaves out all other interfaces, at most {NCCL_NAMES} "
            f"and no other label, and {plan.node} has {has}: name an interface without a label",
        )
    return with_env(plan, {NCCL: f"^={','.join(others)}"}, plan.sources[f"env.{NCCL}"])


def _not_of_gloo(plan: LaunchPlan, value: str, name: str, interfaces: Iterable[Interface]) -> BadInput:
    """What is wrong with a name of gloo's that this node does not have."""
    given, has = _given(plan, GLOO, value), _listed(interfaces)
    if value[0] in "^=" or any(one.name.startswith(name) for one in interfaces):
        taken = (one for one in interfaces if one.addresses and one.name != "lo")
        fitting = [one.name for one in taken if _nccl_takes(value, one.name)]
        remedy = f"did you mean {_given(plan, GLOO, fitting[0])}?" if len(fitting) == 1 else OTHERS
        return BadInput(
            "gloo-interface-name",
            f"{given}: gloo takes whole names of interfaces alone (^, = and beginnings of names are NCCL's), "
            f"and {plan.node} has {has}: {remedy}",
        )
    if name == value:
        return _absent(plan, given, interfaces)
    return BadInput(
        "interface-missing", f"{given}: {plan.node} has no interface {name}, it has {has}: {OTHERS}"
    )


def _absent(plan: LaunchPlan, given: str, interfaces: Iterable[Interface]) -> BadInput:
    return BadInput(
        "interface-missing",
        f"{given}: {plan.node} has no such interface, it has {_listed(interfaces)}: {OTHERS}",
    )


def _check_up(plan: LaunchPlan, interface: Interface, given: str) -> None:
    if not interface.is_up:
        raise Unavailable(
            "interface-down",
            f"{given}: {interface.name} is down on {plan.node}: have it brought up, or leave that node out",
        )


def _listed(interfaces: Iterable[Interface]) -> str:
    return ", ".join(str(one) for one in interfaces if one.name != "lo") or "none but lo"


def _chosen(plan: LaunchPlan, env: Mapping[str, str], name: str) -> str:
    return plan.env.get(name) or env.get(name) or ""


def _given(plan: LaunchPlan, name: str, value: str) -> str:
    """How the user or the site asked for it."""
    source = plan.sources.get(f"env.{name}")
    if name == NCCL and source:
        value = value.removeprefix("=")  # ours, in front of an interface's name
    match source:
        case ValueSource(Origin.FLAG):
            return f"--interface {value}"
        case ValueSource(Origin.ENVIRONMENT, variable):
            return f"{variable}={value}"
        case ValueSource(Origin.PROFILE, file):
            return f"interface {value} of the profile {file}"
    return f"{name}={value}"


def _nccl_takes(spec: str, name: str) -> bool:
    """Whether NCCL uses an interface under this NCCL_SOCKET_IFNAME: beginnings of names, after `=` whole
    names, after `^` those that it leaves out."""
    excluding = spec.startswith("^")
    spec = spec.removeprefix("^")
    exact = spec.startswith("=")
    # What follows a colon is a port to it.
    parts = (part.partition(":")[0] for part in spec.removeprefix("=").split(",") if part)
    listed = any(name == part if exact else name.startswith(part) for part in parts)
    return listed != excluding


# --- ports --------------------------------------------------------------------------------------------------


def _holder(port: int) -> str:
    """` by process N (name)` or by whom a port is listened on; empty where that does not show."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":
                return _owner(int(fields[7]), fields[9])
    return ""


def _owner(uid: int, inode: str) -> str:
    """Processes of others do not show what they hold open."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(file.readlink()) == f"socket:[{inode}]" for file in (folder / "fd").iterdir()):
                return f" by process {folder.name} ({processes.name(int(folder.name))})"
        except OSError:
            continue
    return " by a process of yours" if uid == os.getuid() else " by another user's process"


# --- small ones ---------------------------------------------------------------------------------------------


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _is_address(name: str) -> bool:
    try:
        _parsed(name)
    except ValueError:
        return False
    return True


def _is_link_local(address: str) -> bool:
    return ":" in address and _parsed(address).is_link_local


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _reason(error: OSError) -> str:
    return str(error.strerror or error)
