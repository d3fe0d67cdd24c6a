"""The cheap part of the doctor, before each launch of several nodes: no torch, no NCCL, no packet. `look`
examines this node, `in_words` sums up what many nodes found. On a node with several NUMA nodes the driver
says where the GPUs are.

It runs while torch is imported and the nodes meet.
"""

import asyncio
import time
from collections.abc import Mapping

from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted
from entrypoint.core.threads import run_in_thread
from entrypoint.doctor import facts, judge
from entrypoint.doctor.judge import Finding
from entrypoint.node import binding
from entrypoint.node.gpu import DriverReport
from entrypoint.plan import cores
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.plan.profile import Profile
from entrypoint.plan.sources import Settings

BOUND = 5.0
"""Seconds for all that is looked at: a file system may hold whoever asks."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What one node has found of itself."""

    seconds: float
    findings: Mapping[str, str]
    """By what was looked at."""
    advice: str = ""
    """What --numa-binding would change; empty if nothing, or if somebody chose."""


def folders(run_dir: str, device: str, env: Mapping[str, str]) -> dict[str, str]:
    """The directories whose room counts for a job. `env`: the ranks'."""
    found = {facts.RUN_DIRECTORY: run_dir, facts.TEMPORARY: facts.temporary(env)}
    return found | ({facts.SHARED_MEMORY: facts.SHARED_MEMORY} if device == "cuda" else {})


async def look(
    plan: LaunchPlan, settings: Settings, env: Mapping[str, str], driver: DriverReport | None = None
) -> Preflight | None:
    """None where nobody asks. `driver`: what it said if it was asked before. Of the tasks of a node, others
    than the first look at their cores alone. BadInput: this node cannot train."""
    if plan.nnodes == 1 or settings.value("no-preflight") or settings.value("doctor"):
        return None
    began = time.monotonic()
    of_cores = _look_at_cores(plan, settings, env, driver)
    of_node, (far, advice) = await asyncio.gather(_look_at_node(plan, settings, env), of_cores)
    found = {one.check: str(one) for one in (*of_node, *far)}
    return Preflight(seconds=time.monotonic() - began, findings=found, advice=advice)


async def _look_at_node(plan: LaunchPlan, settings: Settings, env: Mapping[str, str]) -> list[Finding]:
    if plan.local_rank:
        return []
    fabric = (settings.value("fabric") or "") if plan.device == "cuda" else ""

    of_ranks = {**env, **plan.env}

    def gather() -> list[Finding]:
        where = folders(plan.run_dir, plan.device, of_ranks)
        return judge.of_facts(facts.gather(plan.node, where, fabric, of_ranks), Profile(), fabric)

    try:
        found = await run_in_thread(gather, seconds=BOUND)
    except TimeoutError:
        found = [Finding(plan.node, "room", f"no answer in {BOUND:.0f} s", "look at its file systems")]
    for one in found:
        if one.is_final:
            raise BadInput("preflight-finding", f"{one.node}: {one} (--no-preflight goes on)")
    return found


async def _look_at_cores(
    plan: LaunchPlan, settings: Settings, env: Mapping[str, str], driver: DriverReport | None
) -> tuple[list[Finding], str]:
    """(what is wrong, what --numa-binding would change). What the kernel or the driver does not say is no
    fault."""
    if plan.device != "cuda" or plan.is_spare:
        return [], ""
    try:
        async with asyncio.timeout(BOUND):
            machine = await binding.read_topology()
            gpus = None if machine.is_whole else await binding.places(plan, {**env, **plan.env}, driver)
    except (TimeoutError, OSError, BadInput):
        return [], ""
    if gpus is None:
        return [], ""
    task = binding.ranks_of(plan, machine)
    is_chosen = settings.given("numa-binding") or plan.mode == "exec"
    advice = "" if is_chosen else cores.advice(machine, gpus, task, plan.node)
    return judge.of_cores(plan.node, machine, gpus, task), advice


def in_words(
    found: Mapping[str, Mapping[str, str]], nodes: int, seconds: float, advice: str = ""
) -> list[str]:
    """For the job: what was found, by node, each finding once; the advice; and what it took."""
    lines = judge.by_nodes((node, text) for node, findings in found.items() for text in findings.values())
    what = counted(len(lines), "finding") if lines else "nothing found"
    lines += [advice] if advice else []
    return [*(f"preflight: {line}" for line in lines), f"preflight: {nodes} nodes, {what}, {seconds:.2f} s"]
