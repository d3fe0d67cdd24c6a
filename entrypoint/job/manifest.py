"""What ran: `manifest.json` of the run directory, with an entry for each attempt that started its ranks.

The secret: the file's format. It has what tells two runs apart and what it takes to do one again, from the
plan and the identity that all nodes agreed on. Of the environment it has nothing, so none of its secrets.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from entrypoint.job.rundir import RunDirectory, write_private
from entrypoint.node.gpu import Stack
from entrypoint.plan.launch_plan import LaunchPlan

FORMAT = 1


NOT_PROMISED = (
    "the image's packages are locked",
    "driver and GPUs were checked against the image",
)
"""What does not hold in an image that was not made here: it has no description of its stack."""


def record(
    run: RunDirectory, plan: LaunchPlan, stack: Stack | None, *, image_id: str, versions: Mapping[str, str]
) -> None:
    """Adds this attempt. `stack`: of the image; None outside one. Raises OSError where it cannot be written,
    ValueError where the file that is there is no manifest, which stays."""
    _write(run, [*_earlier(run), _entry(plan, stack, image_id, versions)])


def note_alone(run: RunDirectory) -> None:
    """Says of the last attempt that no rank of it joined a process group. Raises what `record` does."""
    attempts = _earlier(run)
    if not attempts:
        raise ValueError("it has no attempts")
    _write(run, [*attempts[:-1], attempts[-1] | {"process_group": None}])


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
