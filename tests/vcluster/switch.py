"""The networks of the test cluster: one bridge for each on a host that is nothing but the switch. Says who is plugged in.

It makes, cuts and heals the links. All of it is in network namespaces of the cluster's own.
"""

import subprocess
from collections.abc import Iterable

from tests.host import Host, Refused
from tests.vcluster.layout import NETWORKS, Member, Network

FORWARDING = 3
DROPPING = 0
"""States of a bridge's port. A dropping port loses packets without a word, like a dead switch; both ends stay up."""


def install(switch: Host) -> None:
    """Makes the bridges. They learn nothing of multicast, which IPv6 needs to find its neighbours."""
    for network in NETWORKS:
        options = ["type", "bridge", "stp_state", "0", "forward_delay", "0", "mcast_snooping", "0"]
        _do(switch, ["ip", "link", "add", network.name, *options])
        _do(switch, ["ip", "link", "set", network.name, "up"])


def plug(switch: Host, node: Host, member: Member) -> None:
    """Connects a host to each network and gives it its addresses."""
    for network in NETWORKS:
        port = _port(member, network)
        peer = ["name", network.name, "address", member.mac(network), "netns", str(node.pid)]
        # This machine's `ip`: only here has the other host a process id. The switch's namespace is where it works.
        _check(
            [
                "nsenter",
                f"--target={switch.pid}",
                "--net",
                "--",
                "ip",
                "link",
                "add",
                "name",
                port,
                "type",
                "veth",
                "peer",
                *peer,
            ]
        )
        _do(switch, ["ip", "link", "set", port, "master", network.name, "up"])
        _do(node, ["ip", "link", "set", network.name, "up"])
        _do(node, ["ip", "address", "add", f"{member.v4(network)}/24", "dev", network.name])
        if network.v6:
            _do(node, ["ip", "address", "add", f"{member.v6(network)}/64", "dev", network.name, "nodad"])


def unplug(switch: Host, member: Member) -> None:
    """Removes both ends of its links; what it still sends is lost."""
    for network in NETWORKS:
        _do(switch, ["ip", "link", "delete", _port(member, network)])


def drop(switch: Host, member: Member, networks: Iterable[Network]) -> None:
    """From now on no packet reaches or leaves that host; neither side is told."""
    _set_ports(switch, member, networks, DROPPING)


def forward(switch: Host, member: Member, networks: Iterable[Network]) -> None:
    _set_ports(switch, member, networks, FORWARDING)


def _set_ports(switch: Host, member: Member, networks: Iterable[Network], state: int) -> None:
    for network in networks:
        _do(switch, ["bridge", "link", "set", "dev", _port(member, network), "state", str(state)])


def _port(member: Member, network: Network) -> str:
    return f"{member.name}.{network.name}"  # at most 15 characters


def _do(host: Host, argv: list[str]) -> None:
    _check(host.command(argv)[0])


def _check(line: list[str]) -> None:
    ended = subprocess.run(line, capture_output=True, text=True)
    if ended.returncode:
        raise Refused(f"the cluster's network: {' '.join(line)}: {ended.stderr.strip()}")
