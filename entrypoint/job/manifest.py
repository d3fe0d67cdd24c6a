"""What ran: `manifest.json` of the run directory, with an entry for each attempt that started its ranks.

The secret: the file's format. It has what tells two runs apart and what it takes to do one again, from the
plan and the identity that all nodes agreed on. Of the environment it has nothing, so none of its secrets.
"""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from entrypoint.aside import aside
from entrypoint.job.rundir import RunDirectory, write_private
from entrypoint.node.gpu import Stack
from entrypoint.plan.launch_plan import LaunchPlan

FORMAT = 1
RECORD = 10.0
"""Seconds for the file system to take it."""

NOT_PROMISED = (
    "the image's packages are locked",
    "driver and GPUs were checked against the image",
)
"""What does not hold in an image that was not made here: it has no description of its stack."""


class Manifest:
    """Of one run. Where the file system does not take it in time, or what is there is no manifest, that is
    said, the file stays as it is, and the run goes on."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]):
        self._run = run
        self._say = say

    async def record(
        self, plan: LaunchPlan, stack: Stack | None, *, image_id: str, versions: Mapping[str, str]
    ) -> None:
        """Adds this attempt. `stack`: of the image; None outside one."""
        await self._change(lambda attempts: [*attempts, _entry(plan, stack, image_id, versions)])

    async def note(self, **found: object) -> None:
        """Says of the last attempt what was found out later: `start`, seconds by the names of watch/start.py,
        or `process_group`, None where no rank joined one."""
        await self._change(lambda attempts: [*attempts[:-1], _last(attempts) | found])

    async def _change(self, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        try:
            await aside(lambda: _write(self._run, change(_earlier(self._run))), RECORD)
        except (OSError, ValueError) as error:
            self._say(f"{self._run.manifest} does not tell of this attempt: {error}: going on")


def _last(attempts: list[dict[str, Any]]) -> dict[str, Any]:
    if not attempts:
        raise ValueError("it has no attempts")
    return attempts[-1]


def _write(run: RunDirectory, attempts: list[dict[str, Any]]) -> None:
    write_private(run.manifest, json.dumps({"format": FORMAT, "attempts": attempts}, indent=2) + "\n")


def _earlier(run: RunDirectory) -> list[dict[str, Any]]:
    try:
        found = json.loads(run.manifest.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    attempts = found.get("attempts") if isinstance(found, dict) else None
    if not isinstance(attempts, list) or not all(isinstance(one, dict) for one in attempts):
        raise ValueError("it has no attempts")
    return attempts


def _entry(
    plan: LaunchPlan, stack: Stack | None, image_id: str, versions: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "attempt": plan.attempt,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "scheduler": plan.allocation.scheduler,
        "job_id": plan.allocation.job_id,
        "nodes": list(plan.nodes),
        "nproc_per_node": plan.nproc_per_node,
        "world_size": plan.world_size,
        "mode": plan.mode,
        "device": plan.device,
        "command": list(plan.command),
        "venv": plan.venv,
        "image": _image(stack, image_id),
        "versions": dict(versions),
    }


def _image(stack: Stack | None, image_id: str) -> dict[str, Any] | None:
    if stack:
        return {"id": image_id, "stack": stack.name, "cuda": stack.cuda, "lock_sha256": stack.lock}
    return {"id": image_id, "not_promised": list(NOT_PROMISED)} if image_id else None
