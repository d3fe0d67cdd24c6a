"""This node's addresses: names looked up, and the interface that has an address.

The secret: the resolver and the interface table. Everything here asks the machine; nothing falls back to
localhost.
"""

import ipaddress
import socket

from entrypoint.errors import BadInput


def resolve(name: str, *, of: str, alone: bool = False) -> str:
    """The address of `name`. `of` says in messages whose name it is.

    A name that Debian's /etc/hosts maps to 127.0.1.1 is refused, unless the node is alone: no other node
    can reach that. Raises BadInput when there is no address or only such a one.
    """
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise BadInput(
            f"{of} {name!r} does not resolve on {socket.gethostname()} ({_reason(error)}): "
            "check the name, DNS and /etc/hosts, or give --master-addr"
        ) from None
    usable = [address for address in found if alone or not _is_loopback(address)]
    if not usable:
        raise BadInput(
            f"{of} {name!r} resolves to {found[0]} on {socket.gethostname()}, which no other node can reach: "
            "correct /etc/hosts, or give --master-addr with an address of the network between the nodes"
        )
    return usable[0]


def source_towards(address: str) -> str:
    """This machine's own address on the route to `address`. Raises BadInput where there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # A datagram socket: nothing is sent.
        except OSError as error:
            raise BadInput(
                f"{socket.gethostname()} has no route to the first node's address {address} "
                f"({_reason(error)}): check --master-addr and the network"
            ) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Name of the interface that has the address; None where this machine has no such address."""
    import psutil

    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv4Address) and wanted.is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found = ipaddress.ip_address(entry.address.partition("%")[0])
                if found == wanted:
                    return name
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _reason(error: Exception) -> str:
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)
