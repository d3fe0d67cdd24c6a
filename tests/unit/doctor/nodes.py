"""Nodes for the doctor's tests: one without a fault, to be changed."""

from dataclasses import replace
from typing import Any

from entrypoint.doctor.facts import NodeFacts, Room
from entrypoint.plan.profile import Nodes, Profile

GIB = 1 << 30
ROOM = Room(path="/scratch/run", free=100 * GIB, inodes=10**6)
WHOLE = NodeFacts(
    node="a",
    cpus=64,
    memory=256 * GIB,
    available=250 * GIB,
    rooms={
        "run directory": ROOM,
        "TMPDIR": replace(ROOM, path="/tmp"),
        "/dev/shm": replace(ROOM, path="/dev/shm"),
    },
    limits={"memlock": None, "nofile": 1 << 20, "nproc": None},
    ports=("mlx5_0:1",),
    interface="ib0",
    speed=100 * 10**9,
)
SITE = Profile(name="lab.yaml", nodes=Nodes(gpus=4, cpus=64, memory_gib=256, whole=True))


def node(**changes: Any) -> NodeFacts:
    return replace(WHOLE, **changes)


def room(name: str, **changes: Any) -> NodeFacts:
    """The node with another room of that name."""
    return node(rooms={**WHOLE.rooms, name: replace(WHOLE.rooms[name], **changes)})
