"""Which hosts a test cluster has, and their names and addresses on its two networks."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["controller", "login", "compute"]
Style = Literal["management", "loopback", "high-speed"]
"""What a host's own name and those of the others mean to it: their management addresses; the same, but its own name
is 127.0.1.1, as Debian's installer writes; or their high-speed addresses."""


@dataclass(frozen=True, kw_only=True)
class Network:
    name: str
    """The interface on each host."""
    number: int
    """The third of its IPv4 addresses' four."""
    v6: str = ""
    """The first 64 bits of its IPv6 addresses, less the colons that follow; empty if it has none."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A host of the cluster."""

    name: str
    number: int
    """The last number of its addresses."""
    role: Role
    gpus: int = 0

    def v4(self, network: Network) -> str:
        return f"10.77.{network.number}.{self.number}"

    def v6(self, network: Network) -> str:
        return f"{network.v6}::{self.number}"

    def mac(self, network: Network) -> str:
        """The same whenever it starts, so that what its neighbours have learnt stays true."""
        return f"02:00:00:00:{network.number:02x}:{self.number:02x}"


MANAGEMENT = Network(name="eth0", number=42)
HIGH_SPEED = Network(name="hsn0", number=43, v6="fd77:0:0:43")
NETWORKS = (MANAGEMENT, HIGH_SPEED)
MEMBERS = (
    Member(name="ctl", number=1, role="controller"),
    Member(name="login1", number=2, role="login"),
    Member(name="gpu-a01", number=11, role="compute", gpus=4),
    Member(name="gpu-a02", number=12, role="compute", gpus=4),
    Member(name="gpu-b07", number=27, role="compute", gpus=4),
    Member(name="cpu-c01", number=31, role="compute"),
)
BY_NAME = {member.name: member for member in MEMBERS}


def hosts_file(own: Member, style: Style) -> str:
    """The text of /etc/hosts on a host: NAME, NAME-hsn, and NAME-hsn6 for the IPv6 address."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for member in MEMBERS:
        address = member.v4(HIGH_SPEED if style == "high-speed" else MANAGEMENT)
        if style == "loopback" and member == own:
            address = "127.0.1.1"
        lines += [
            f"{address} {member.name}",
            f"{member.v4(HIGH_SPEED)} {member.name}-hsn",
            f"{member.v6(HIGH_SPEED)} {member.name}-hsn6",
        ]
    return "".join(f"{line}\n" for line in lines)
