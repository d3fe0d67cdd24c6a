"""What a node has, as its kernel and its file systems tell it: no torch, no job, and no judgement.

Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoint.core.frozen import dataclass
from entrypoint.node import memory

SYS = Path("/sys/class")
TRIAL = 1 << 20
"""Bytes of the file that is written to see whether a quota is used up: statvfs does not show every quota."""
LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
LOADING = 5.0
"""Seconds for that: a file system may be slow."""
OF_PLUGIN = ("slingshot", "efa")
"""Fabrics that NCCL uses through a plugin for libfabric."""
RUN_DIRECTORY, TEMPORARY, SHARED_MEMORY = "run directory", "TMPDIR", "/dev/shm"


@dataclass(frozen=True)
class Room:
    """What a directory takes."""

    path: str
    free: int
    """Bytes for this user, as far as the file system says."""
    inodes: int | None
    """Files for this user; None where the file system does not count them."""
    refused: str = ""
    """Why it does not take a file of TRIAL bytes; empty where it does."""


@dataclass(frozen=True)
class NodeFacts:
    """Of one node, for this user."""

    node: str
    cpus: int
    """That this process may use."""
    memory: int
    """Bytes that this process may use."""
    available: int
    """Bytes of them that are free, or can be freed."""
    rooms: Mapping[str, Room]
    limits: Mapping[str, int | None]
    """memlock in bytes, nproc, and the hard one of nofile, up to which launch goes; None: unlimited."""
    ports: tuple[str, ...] = ()
    """Ports of the fabric that are up."""
    unloadable: str = ""
    """Why the library with which NCCL speaks to the fabric does not load; empty where it does."""
    interface: str = ""
    """Gloo's."""
    speed: int | None = None
    """Bits per second of it; None where the kernel does not know."""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> NodeFacts:
        """From dataclasses.asdict's."""
        rooms = {name: Room(**room) for name, room in raw["rooms"].items()}
        return cls(**{**raw, "rooms": rooms, "ports": tuple(raw["ports"])})


def gather(node: str, folders: Mapping[str, str], fabric: str, env: Mapping[str, str]) -> NodeFacts:
    """All of it. `folders`: those whose room counts, by what they are for. `fabric`: what the site has; empty
    for unknown. `env`: the ranks'."""
    total, available = _memory()
    interface = env.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return NodeFacts(
        node=node,
        cpus=len(os.sched_getaffinity(0)),
        memory=total,
        available=available,
        rooms={name: room(path) for name, path in folders.items()},
        limits={name: _limit(name, hard=name == "nofile") for name in ("memlock", "nofile", "nproc")},
        ports=tuple(ports(fabric)),
        unloadable=_unloadable(libraries(fabric, env), env),
        interface=interface,
        speed=speed(interface),
    )


def _limit(name: str, *, hard: bool) -> int | None:
    found = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[hard]
    return None if found == resource.RLIM_INFINITY else found


def _memory() -> tuple[int, int]:
    """(all, free) in bytes, the limit of this process's group counted."""
    with Path("/proc/meminfo").open() as file:
        lines = dict(line.split(":", 1) for line in file)
    total, available = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit = memory.limit()
    return (total, available) if limit is None else (min(total, limit), min(available, limit))


def temporary(env: Mapping[str, str]) -> str:
    """TMPDIR as it is given: Python would take another where it is full or not there, and programs do not."""
    return env.get("TMPDIR") or "/tmp"


def room(path: str) -> Room:
    """What that directory takes, with a file that is written there and removed."""
    refused = ""
    probe = Path(path, f".room.{os.uname().nodename}.{os.getpid()}")
    try:
        with probe.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, TRIAL)
    except OSError as error:
        refused = error.strerror or str(error)
    with contextlib.suppress(OSError):
        probe.unlink()
    try:
        found = os.statvfs(path)
    except OSError as error:
        return Room(path=path, free=0, inodes=None, refused=error.strerror or str(error))
    inodes = found.f_favail if found.f_files else None
    return Room(path=path, free=found.f_bavail * found.f_frsize, inodes=inodes, refused=refused)


# --- the network --------------------------------------------------------------------------------------------


def ports(fabric: str, root: Path = SYS) -> Iterable[str]:
    """The ports of InfiniBand that are active, or the devices of Slingshot or EFA."""
    if fabric == "infiniband":
        for state in sorted(root.glob("infiniband/*/ports/*/state")):
            with contextlib.suppress(OSError):
                if "ACTIVE" in state.read_text():
                    yield f"{state.parents[2].name}:{state.parent.name}"
    elif fabric == "slingshot":
        yield from sorted(device.name for device in root.glob("cxi/*"))
    elif fabric == "efa":
        for device in sorted(root.glob("infiniband/*")):
            if (device / "device" / "driver").resolve().name == "efa":
                yield device.name


def libraries(fabric: str, env: Mapping[str, str]) -> Sequence[str]:
    """What NCCL opens for this fabric; one of them is enough."""
    if fabric == "infiniband":
        return ("libibverbs.so.1",)
    if fabric in OF_PLUGIN:
        plugin = env.get("NCCL_NET_PLUGIN")
        if plugin and "/" in plugin:
            return (plugin,)
        return (f"libnccl-net-{plugin}.so", plugin) if plugin else ("libnccl-net.so",)
    return ()


def _unloadable(names: Sequence[str], env: Mapping[str, str]) -> str:
    """In a process with the ranks' environment: the linker reads LD_LIBRARY_PATH at its start."""
    why = ""
    for name in names:
        line = [sys.executable, "-I", "-S", "-c", LOAD, name]
        try:
            done = subprocess.run(
                line,
                env=dict(env),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LOADING,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{name} does not load within {LOADING:.0f} s"
        if done.returncode == 0:
            return ""
        why = why or (done.stderr.strip().splitlines() or [name])[-1].removeprefix("OSError: ")
    return why


def speed(interface: str, root: Path = SYS) -> int | None:
    """Bits per second; the kernel knows none of some devices, and says so by -1 or an error."""
    with contextlib.suppress(OSError, ValueError):
        megabits = int((root / "net" / interface / "speed").read_text())
        return megabits * 10**6 if interface and megabits > 0 else None
    return None
