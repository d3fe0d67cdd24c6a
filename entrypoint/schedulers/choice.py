"""Chooses the scheduler that an environment belongs to, and reads what it granted. `allocation` is the entry;
`NAMES` is the list, in the order in which `auto` tries them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Protocol

from entrypoint.core.errors import BadInput
from entrypoint.schedulers import hostlist
from entrypoint.schedulers.allocation import Allocation
from entrypoint.schedulers.known import KNOWN
from entrypoint.schedulers.request import PlacementRequest

NAMES = (
    "embedded",
    *(known.name for known in KNOWN),
    "manual",
)
"""Module names; `auto` takes the first whose variables are there."""


class Scheduler(Protocol):
    """What a scheduler's module offers."""

    NAME: str

    def present(self, env: Mapping[str, str]) -> bool:
        """Whether this environment belongs to a job of this scheduler."""

    def allocation(self, env: Mapping[str, str], request: PlacementRequest) -> Allocation:
        """What the job was granted, seen from this task. Raises BadInput."""


def allocation(env: Mapping[str, str], choice: str, request: PlacementRequest) -> Allocation:
    """What the scheduler called `choice`, or the one found with `auto`, granted.

    Raises BadInput: naming the variable or option, what was found and what to do.
    """
    scheduler = find(env, choice, request)
    granted = scheduler.allocation(env, request)
    if granted.scheduler == "manual":
        return granted
    _agree(granted, request)
    return dataclasses.replace(granted, notes=(*_ignored(env, choice, granted, request), *granted.notes))


def find(env: Mapping[str, str], choice: str, request: PlacementRequest) -> Scheduler:
    """The module for `--scheduler choice`. Raises BadInput where `auto` finds none."""
    if choice != "auto":
        return _module(choice)
    for scheduler in map(_module, NAMES):
        if scheduler.present(env):
            return scheduler
    if request.nodes is not None:
        return _module("manual")
    raise BadInput(
        "no-job",
        "no scheduler's job id is in the environment: on this machine: apptrain run -- CMD; from a login "
        "node: apptrain submit; inside a job whose variables a cleaned environment has dropped: --scheduler "
        "NAME; on machines of your own: --nodes a,b --node-rank I",
    )


def _module(name: str) -> Scheduler:
    if name not in NAMES:
        raise BadInput(
            "scheduler-unknown", f"--scheduler {name} is unknown: choose from auto, {', '.join(NAMES)}"
        )
    module: Scheduler = importlib.import_module(f"{__package__}.{name}")
    return module


def _agree(granted: Allocation, request: PlacementRequest) -> None:
    """`--nodes` and `--node-rank` may repeat what a scheduler says, not contradict it."""
    remedy = "leave it out, or add --scheduler manual"
    if request.nodes is not None and hostlist.expand(request.nodes, "--nodes") != granted.nodes:
        raise BadInput(
            "nodes-not-granted",
            f"--nodes {request.nodes} is not what {granted.scheduler} granted "
            f"({_listed(granted.nodes)}): {remedy}",
        )
    if request.node_rank not in (None, granted.node_rank) and granted.scheduler == "embedded":
        raise BadInput(
            "node-rank-of-run",
            f"--node-rank {request.node_rank}: apptrain run starts all nodes, on this machine: leave it out; "
            "on machines of your own: apptrain launch --nodes LIST --node-rank I",
        )
    if request.node_rank not in (None, granted.node_rank):
        raise BadInput(
            "node-rank-not-granted",
            f"--node-rank {request.node_rank} is not what {granted.scheduler} says of this node "
            f"({granted.node_rank}): {remedy}",
        )


def _ignored(
    env: Mapping[str, str], choice: str, granted: Allocation, request: PlacementRequest
) -> tuple[str, ...]:
    """One line for everything that speaks of another scheduler than the one taken."""
    taken = granted.scheduler
    notes = []
    if choice == "auto":
        others = [name for name in NAMES if name != taken and _module(name).present(env)]
        notes += [
            f"taking {taken}: the variables of {name} are there too (--scheduler chooses)" for name in others
        ]
    if request.nodefile is not None and taken != "pbs":
        notes.append(f"--nodefile {request.nodefile} is ignored: {taken} tells its nodes itself")
    return tuple(notes)


def _listed(names: tuple[str, ...], most: int = 8) -> str:
    return ",".join(names[:most]) + (f",... {len(names)} in all" if len(names) > most else "")
