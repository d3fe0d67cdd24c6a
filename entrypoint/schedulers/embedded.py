"""Read an allocation from the embedded scheduler's environment. The only module that names its variables.

The embedded scheduler starts nodes on this machine, each on a loopback address of its own, and tells each
the node list and its own name. The node resolves its rank as on any cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from entrypoint.core.errors import BadInput
from entrypoint.schedulers import hostlist, variables
from entrypoint.schedulers.allocation import Allocation
from entrypoint.schedulers.request import PlacementRequest

NAME = "embedded"

JOB_ID = "APPTRAIN_EMBEDDED_JOB_ID"
"""Any name; a number at its end tells jobs apart that run at the same time."""
NODELIST = "APPTRAIN_EMBEDDED_NODELIST"
"""The nodes in rank order, such as 127.0.0.[1-2]."""
NODENAME = "APPTRAIN_EMBEDDED_NODENAME"
"""This node, as the list spells it."""
TASKS_PER_NODE = "APPTRAIN_EMBEDDED_TASKS_PER_NODE"
"""Default 1."""
LOCALID = "APPTRAIN_EMBEDDED_LOCALID"
"""This task among those of its node, from 0; default 0."""
CPUS_ON_NODE = "APPTRAIN_EMBEDDED_CPUS_ON_NODE"
"""CPUs for the node's tasks together; unknown without."""
GPUS_ON_NODE = "APPTRAIN_EMBEDDED_GPUS_ON_NODE"
"""GPUs for the node's tasks together; default 0."""

_REMEDY = "start nodes with apptrain run, which sets it"
_LAST_NUMBER = re.compile(r"(\d{1,18})$", re.ASCII)


def present(env: Mapping[str, str]) -> bool:
    """Whether this process is a node of the embedded scheduler."""
    return JOB_ID in env


def allocation(env: Mapping[str, str], request: PlacementRequest) -> Allocation:  # noqa: ARG001
    """The nodes on this machine, seen from this one. Raises BadInput."""
    job_id = variables.text(env, JOB_ID, _REMEDY)
    number = _LAST_NUMBER.search(job_id)
    nodes = hostlist.distinct(hostlist.expand(variables.text(env, NODELIST, _REMEDY), NODELIST), NODELIST)
    name = variables.text(env, NODENAME, _REMEDY)
    if name not in nodes:
        raise BadInput(
            "demo-node-unknown",
            f"{variables.shown(NODENAME, name)} is not in {NODELIST}={env[NODELIST]}: {_REMEDY}",
        )
    tasks, local_id = _tasks(env)
    optional = {
        "tasks_per_node": TASKS_PER_NODE,
        "local_id": LOCALID,
        "cpus": CPUS_ON_NODE,
        "gpus": GPUS_ON_NODE,
    }
    return Allocation(
        scheduler=NAME,
        job_id=job_id,
        job_number=int(number[1]) if number else 0,
        run_id=job_id,
        nodes=nodes,
        node_rank=nodes.index(name),
        tasks_per_node=(tasks,) * len(nodes),
        local_id=local_id,
        gpus=variables.optional_number(env, GPUS_ON_NODE, _REMEDY) or 0,
        gpus_option="--gpus-per-node N",
        cpu_by_default=True,
        cpus=variables.optional_number(env, CPUS_ON_NODE, _REMEDY),
        sources={"job_id": JOB_ID, "nodes": NODELIST, "node_rank": NODENAME}
        | {field: variable for field, variable in optional.items() if variable in env},
    )


def _tasks(env: Mapping[str, str]) -> tuple[int, int]:
    """(tasks on every node, this one's number among them)."""
    tasks = variables.optional_number(env, TASKS_PER_NODE, _REMEDY)
    if tasks == 0:
        raise BadInput("demo-no-tasks", f"{TASKS_PER_NODE}=0 leaves no task to run: {_REMEDY}")
    tasks = tasks or 1
    local_id = variables.optional_number(env, LOCALID, _REMEDY) or 0
    if local_id >= tasks:
        raise BadInput(
            "demo-local-id", f"{LOCALID}={local_id}, but {TASKS_PER_NODE} gives {tasks}: {_REMEDY}"
        )
    return tasks, local_id
