"""Finds out from NCCL's own log which network it uses between the nodes. `watch` is what a launch runs beside
its ranks; `objection` is the rule for the doctor.

If InfiniBand's library does not load, or the plugin for Slingshot or EFA, NCCL silently uses sockets, and the
job trains many times slower. With NCCL_DEBUG=INFO it logs, once for each communicator and in all versions
since 2.4:

    node:1234:1260 [0] NCCL INFO NET/IB : No device found.
    node:1234:1260 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
    node:1234:1260 [0] NCCL INFO Using network Socket

or IB, IBext_v8, AWS Libfabric, Libfabric (its newer plugin), OFI ... in place of Socket.
"""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from entrypoint.core.files import Unfit, open_regular
from entrypoint.doctor.judge import Finding
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.plan.options import RDMA
from entrypoint.plan.sources import Settings

FILE, DEBUG, SUBSYSTEMS = "NCCL_DEBUG_FILE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS"
NAME = "nccl.%h.%p"
LOGS = NAME.replace("%h", "*").replace("%p", "*")
SOCKET = "Socket"
LACKS = {
    "infiniband": "libibverbs and the devices in /dev/infiniband",
    "slingshot": "the plugin libnccl-net.so and libfabric",
    "efa": "the plugin libnccl-net.so and libfabric, and the devices in /dev/infiniband",
}
_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_PLUGIN = re.compile(r"NCCL \w+ (NET/Plugin ?:.*libnccl-net.*)")
_WHY = {
    "infiniband": re.compile(r"NCCL \w+ (NET/IB ?: No device.*)"),
    "slingshot": _PLUGIN,
    "efa": _PLUGIN,
}
INTERVAL = 1.0
"""Seconds between two looks at the logs."""
READ = 1 << 20
"""Bytes of a log: what counts is said before any rank trains."""


def to_prove(plan: LaunchPlan, settings: Settings, env: Mapping[str, str]) -> str:
    """The fabric that NCCL must be seen to use, or the job ends; empty where it may take any network, or its
    log is the user's."""
    wanted = settings.value("fabric")
    is_free = settings.value("no-preflight") or settings.value("doctor") or is_users({**plan.env, **env})
    return wanted if wanted in RDMA and plan.nnodes > 1 and not is_free else ""


def variables(plan: LaunchPlan, settings: Settings, env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """What has NCCL write its log where we read it, if anybody will. `folder`: of this node, private."""
    if not to_prove(plan, settings, env) and (not settings.value("doctor") or is_users({**plan.env, **env})):
        return {}
    return {DEBUG: "INFO", SUBSYSTEMS: "INIT,NET", FILE: str(folder / NAME)}


def is_users(env: Mapping[str, str]) -> bool:
    """Whether the user or the site has NCCL write a log of their own."""
    return bool(env.get(DEBUG) or env.get(FILE)) and Path(env.get(FILE, "")).name != NAME


def network(log: str) -> str:
    """What a log says is used, in NCCL's words; empty where it does not say so yet."""
    found = _NETWORK.search(log)
    return found[1].strip() if found else ""


def networks(folder: Path) -> list[str]:
    """The logs in the folder that name a network, one of each process."""
    texts = []
    for path in sorted(folder.glob(LOGS)):
        with contextlib.suppress(OSError, Unfit), open_regular(path) as file:
            texts.append(file.read(READ).decode(errors="replace"))
    return [text for text in texts if network(text)]


def objection(log: str, wanted: str, node: str) -> Finding | None:
    """What is wrong where NCCL has not taken the network that it is to use; None where it has, or may take
    any."""
    if network(log) != SOCKET or wanted not in RDMA:
        return None
    why = _WHY[wanted].search(log)
    said = f" ({why[1].strip()})" if why else ""
    text = f"NCCL uses sockets between the nodes, and is to use {wanted}{said}"
    return Finding(
        node, "network", text, f"show the image {LACKS[wanted]} (APPTRAIN_BIND, binds of the profile)"
    )


async def watch(folder: Path, wanted: str, ranks: int) -> str:
    """Returns what is wrong as soon as the log of a rank shows it; empty once as many logs as there are ranks
    here say that they use the fabric."""
    while True:
        logs = networks(folder)
        for log in logs:
            if found := objection(log, wanted, ""):
                return f"{found}, or let it train so with --no-preflight"
        if len(logs) >= ranks:
            return ""
        await asyncio.sleep(INTERVAL)
