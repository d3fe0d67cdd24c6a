"""Hosts of a test that are no more than network namespaces of this machine: two networks, and names of their own.

Needs root. Everything of them ends with the `with`; what runs there is bounded by who starts it.
"""

import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

MANAGEMENT, FAST = 42, 43
"""The third numbers of the networks' addresses: eth0 and hsn0 on every host."""
INTERFACES = {MANAGEMENT: "eth0", FAST: "hsn0"}
_NUMBERS = itertools.count(1)


def address(host: int, network: int) -> str:
    return f"10.77.{network}.{host + 1}"


@dataclass(frozen=True, kw_only=True)
class Host:
    number: int
    space: str
    hosts_file: Path

    def argv(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs there."""
        bind = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", self.space, "sh", "-c", bind, str(self.hosts_file), *argv]

    def name(self, names: Mapping[str, str]) -> None:
        """What names mean to it."""
        self.hosts_file.write_text("".join(f"{where} {name}\n" for name, where in names.items()))

    def cut(self, network: int) -> None:
        _ip("-n", self.space, "link", "set", INTERFACES[network], "down")


def listening(pid: int) -> set[int]:
    """The ports at which anything listens where this process runs."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return {int(fields[1].rpartition(":")[2], 16) for fields in sockets if fields[3] == "0A"}


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """Hosts n0, n1 ... in both networks, to which each other's names mean the management addresses."""
    key = f"at{os.getpid()}.{next(_NUMBERS)}"
    with ExitStack() as made:

        def space(name: str) -> str:
            _ip("netns", "add", name)
            made.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
            return name

        switch = space(f"{key}.s")
        for network in INTERFACES:
            _ip("-n", switch, "link", "add", f"br{network}", "type", "bridge")
            _ip("-n", switch, "link", "set", f"br{network}", "up")
        found = []
        for number in range(count):
            host = Host(number=number, space=space(f"{key}.{number}"), hosts_file=folder / f"hosts.{number}")
            for network, name in INTERFACES.items():
                port = f"p{number}.{network}"
                peer = ["type", "veth", "peer", "name", port, "netns", switch]
                _ip("link", "add", name, "netns", host.space, *peer)
                _ip("-n", switch, "link", "set", port, "master", f"br{network}", "up")
                _ip("-n", host.space, "address", "add", f"{address(number, network)}/24", "dev", name)
                _ip("-n", host.space, "link", "set", name, "up")
            host.name({f"n{other}": address(other, MANAGEMENT) for other in range(count)})
            found.append(host)
        yield found


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True)
