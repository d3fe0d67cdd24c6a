"""Where the ranks of a run find each other: the store's address and port, the join's port, the id.
`port_pair` has the formula for ports.

Ports lie above Linux's default ephemeral range (32768-60999) and come in pairs: torch's store, and the join
on the next higher one. A pair's number is

    ((job number + 37 * array index) mod 94) * 24 + (step mod 8) * 3 + attempt mod 3

So within 94 neighbouring job ids, or 94 neighbouring elements of an array, no two combinations of job, step
(0 to 7) and attempt (three in a row) share a port. 37 is coprime to 94, and far from 1, so that small
differences of both do not cancel out.
"""

from __future__ import annotations

from entrypoint.core.frozen import dataclass

FIRST_PORT = 61000
LAST_PORT = 65535
JOBS, STEPS, ATTEMPTS = 94, 8, 3
MANUAL_PORT = 29500


@dataclass(frozen=True)
class Rendezvous:
    """torchrun's rendezvous, as one node sees it."""

    backend: str
    master_addr: str
    """Name or address of node 0, without brackets."""
    master_port: int
    join_port: int
    id: str
    """Job id and attempt. No secret: anybody who reaches the store can list it."""
    is_host: bool
    """Whether torch's store runs on this node."""
    local_addr: str
    """This node's name; after `launch` has looked it up, its address."""
    host_suffix: str
    """The profile's, if node 0 is found by its name with that. Empty if the profile has none, or if node 0's
    address was given or found in another way."""

    @property
    def endpoint(self) -> str:
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"{host}:{self.master_port}"


def port_pair(*, job_number: int, array_index: int, step: int, attempt: int) -> tuple[int, int]:
    """(master_port, join_port) by the formula above; negative numbers are taken modulo as well."""
    slot = (job_number + 37 * array_index) % JOBS
    pair = (slot * STEPS + step % STEPS) * ATTEMPTS + attempt % ATTEMPTS
    return FIRST_PORT + 2 * pair, FIRST_PORT + 2 * pair + 1
