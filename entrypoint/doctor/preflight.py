"""The cheap part of the doctor, before each launch of several nodes: no torch, no NCCL, no packet. `look`
examines this node, `in_words` sums up what many nodes found.

It runs while torch is imported and the nodes meet.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

from entrypoint.core.errors import BadInput
from entrypoint.core.plain import counted
from entrypoint.core.threads import run_in_thread
from entrypoint.doctor import facts, judge
from entrypoint.doctor.judge import Finding
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


def folders(run_dir: str, device: str) -> dict[str, str]:
    """The directories whose room counts for a job."""
    found = {facts.RUN_DIRECTORY: run_dir, facts.TEMPORARY: tempfile.gettempdir()}
    return found | ({facts.SHARED_MEMORY: facts.SHARED_MEMORY} if device == "cuda" else {})


async def look(plan: LaunchPlan, settings: Settings, env: Mapping[str, str]) -> Preflight | None:
    """None where nobody asks. BadInput: this node cannot train."""
    if plan.nnodes == 1 or plan.local_rank or settings.value("no-preflight") or settings.value("doctor"):
        return None
    fabric = (settings.value("fabric") or "") if plan.device == "cuda" else ""
    began = time.monotonic()

    def gather() -> list[Finding]:
        where = folders(plan.run_dir, plan.device)
        return judge.of_facts(facts.gather(plan.node, where, fabric, env), Profile(), fabric)

    try:
        found = await run_in_thread(gather, seconds=BOUND)
    except TimeoutError:
        found = [Finding(plan.node, "room", f"no answer in {BOUND:.0f} s", "look at its file systems")]
    for one in found:
        if one.is_final:
            raise BadInput("preflight-finding", f"{one.node}: {one} (--no-preflight goes on)")
    return Preflight(seconds=time.monotonic() - began, findings={one.check: str(one) for one in found})


def in_words(found: Mapping[str, Mapping[str, str]], nodes: int, seconds: float) -> list[str]:
    """For the job: what was found, by node, each finding once; and what it took."""
    lines = judge.by_nodes((node, text) for node, findings in found.items() for text in findings.values())
    what = counted(len(lines), "finding") if lines else "nothing found"
    return [*(f"preflight: {line}" for line in lines), f"preflight: {nodes} nodes, {what}, {seconds:.2f} s"]
