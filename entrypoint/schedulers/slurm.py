"""Read a job's allocation from Slurm's environment. What the job script sees is
job/batch/slurm.py's.

A step's own variables speak of the step, which may be a part of the job on other nodes than the job's
first; the job's variables serve where there is no step yet: in the batch script, in salloc's command and
in an interactive shell, which is a step of its own on the first node alone.

What comes from where (step / before a step):
    nodes           SLURM_STEP_NODELIST / SLURM_JOB_NODELIST
    node_rank       SLURM_NODEID / 0. SLURM_PROCID follows the distribution and is not read
    tasks_per_node  SLURM_STEP_TASKS_PER_NODE / SLURM_TASKS_PER_NODE
    local_id        SLURM_LOCALID / 0
    gpus            SLURM_GPUS_ON_NODE, the step's / the job's on the first node; salloc's command has
                    only SLURM_GPUS_PER_NODE. SLURM_JOB_GPUS, the first node's everywhere, is not counted.
                    0 if another variable says that Slurm counts GPUs here; unknown if none does: a site
                    that gives out whole nodes may have no GRES
    gpus_visible    CUDA_VISIBLE_DEVICES, where it names fewer (--gpus-per-task)
    cpus            SLURM_CPUS_ON_NODE, the step's on this node / the first of SLURM_JOB_CPUS_PER_NODE;
                    SLURM_CPUS_PER_TASK x tasks where that is less (an exclusive node has more CPUs than
                    its tasks asked for, and a step does not always inherit the job's CPUs per task)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted
from entrypoint.schedulers import hostlist, variables
from entrypoint.schedulers.allocation import Allocation, JobName
from entrypoint.schedulers.request import PlacementRequest

NAME = "slurm"

_INTERACTIVE_STEP = "4294967290"
_CLEANED = "pass all of the step's variables on (a cleaned environment drops them)"
_CORRECT = "correct it, or unset it if you set it yourself"
_COUNTED = ("SLURM_GPU", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
"""Beginnings of variables that a job has only where Slurm counts GPUs."""
_REPEATED = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


@dataclass(frozen=True)
class _Scope:
    """The variables that speak of the nodes that this launch runs on."""

    nodelist: str
    num_nodes: str
    tasks: str
    where: str
    """Where a message says that a variable is missing."""


_JOB = _Scope(
    nodelist="SLURM_JOB_NODELIST", num_nodes="SLURM_JOB_NUM_NODES", tasks="SLURM_TASKS_PER_NODE", where=""
)


def present(env: Mapping[str, str]) -> bool:
    """Whether this environment belongs to a Slurm job."""
    return "SLURM_JOB_ID" in env


def allocation(env: Mapping[str, str], request: PlacementRequest) -> Allocation:  # noqa: ARG001
    """The step's part of the job, seen from this task; before a step the job's, seen from node 0.

    Raises BadInput for a variable that is missing, empty, malformed or at odds with another, for a
    heterogeneous job, and for GPUs that differ from node to node.
    """
    granted_to = job(env)
    refuse_heterogeneous(env)
    scope = _scope(env)
    nodes = _nodes(env, scope)
    tasks = _tasks(env, scope, nodes)
    node_rank, local_id = (0, 0) if scope is _JOB else _place(env, scope, nodes, tasks)
    gpus, gpus_from = _gpus(env)
    if gpus and env.get("SLURM_JOB_NUM_NODES") == str(len(nodes)):
        refuse_uneven_gpus(env, len(nodes), gpus, nodes[node_rank])
    gpus_visible = None if scope is _JOB else _visible(env, gpus)
    cpus, cpus_from = _cpus(env, scope, nodes, tasks[node_rank])
    visible_from = "" if gpus_visible is None else variables.CUDA_DEVICES
    return Allocation(
        scheduler=NAME,
        job_id=granted_to.id,
        job_number=granted_to.number,
        array_index=granted_to.array_index or 0,
        job_name=granted_to.name,
        run_id=granted_to.run_id,
        submit_dir=granted_to.submit_dir,
        step_id=env.get("SLURM_STEP_ID"),
        restart_count=variables.optional_number(env, "SLURM_RESTART_COUNT", _CORRECT) or 0,
        context="batch" if scope is _JOB else "task",
        nodes=nodes,
        node_rank=node_rank,
        tasks_per_node=tasks,
        local_id=local_id,
        gpus=gpus,
        gpus_unknown=f"{gpus_from} is not set" if gpus is None and gpus_from else "",
        gpus_unnamed=gpus is None and not gpus_from,
        gpus_visible=gpus_visible,
        # Each task has its own, where there are several; before the step that does not show.
        slices=0 if scope is _JOB and tasks[0] > 1 else variables.visible_slices(env),
        cpus=cpus,
        start_line="srun --ntasks-per-node=1 apptrain launch -- CMD",
        sources=_sources(env, scope, {"gpus": gpus_from, "gpus_visible": visible_from, "cpus": cpus_from}),
    )


def _sources(env: Mapping[str, str], scope: _Scope, found: Mapping[str, str]) -> dict[str, str]:
    """Field to variable; `found` are those that have a choice of variables, empty for none."""
    always = {"job_id": "SLURM_JOB_ID", "nodes": scope.nodelist, "tasks_per_node": scope.tasks}
    if_set = {
        "array_index": "SLURM_ARRAY_TASK_ID",
        "step_id": "SLURM_STEP_ID",
        "restart_count": "SLURM_RESTART_COUNT",
        "node_rank": "SLURM_NODEID",
        "local_id": "SLURM_LOCALID",
    }
    return (
        always
        | {name: variable for name, variable in if_set.items() if variable in env}
        | {name: variable for name, variable in found.items() if variable}
    )


def job(env: Mapping[str, str]) -> JobName:
    """Which job this is; of an array's element the number is the array's. Raises BadInput."""
    job_id = variables.text(env, "SLURM_JOB_ID", "start this inside a Slurm job, or give --scheduler")
    number, index = variables.whole(job_id, "SLURM_JOB_ID", _CORRECT), None
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    if any(name in env for name in names):
        number, index = (variables.number(env, name, _CLEANED, " in an array job") for name in names)
    return JobName(
        id=job_id,
        number=number,
        array_index=index,
        run_id=job_id if index is None else f"{number}_{index}",
        name=env.get("SLURM_JOB_NAME") or "job",
        submit_dir=env.get("SLURM_SUBMIT_DIR") or None,
    )


def refuse_heterogeneous(env: Mapping[str, str]) -> None:
    """For a task, and for the job script before it."""
    if "SLURM_HET_SIZE" in env:
        raise BadInput(
            "slurm-heterogeneous",
            f"{variables.shown('SLURM_HET_SIZE', env['SLURM_HET_SIZE'])}: a heterogeneous job, whose step "
            "may leave nodes out unseen: submit one component (no ':' between requests)",
        )


def _scope(env: Mapping[str, str]) -> _Scope:
    step_id = env.get("SLURM_STEP_ID")
    if step_id == _INTERACTIVE_STEP:
        return _JOB
    if step_id is not None:
        step = variables.number(env, "SLURM_STEP_ID", _CORRECT)
        return _Scope(
            nodelist="SLURM_STEP_NODELIST",
            num_nodes="SLURM_STEP_NUM_NODES",
            tasks="SLURM_STEP_TASKS_PER_NODE",
            where=f" in step {step}",
        )
    if "SLURM_STEP_NODELIST" in env:
        raise BadInput(
            "slurm-no-step-id", f"SLURM_STEP_NODELIST is set, but SLURM_STEP_ID is not: {_CLEANED}"
        )
    node_id = env.get("SLURM_NODEID", "0")
    if node_id != "0":
        raise BadInput(
            "slurm-nodeid-without-step",
            f"{variables.shown('SLURM_NODEID', node_id)}, but SLURM_STEP_ID is not set, and a batch script "
            f"runs on node 0: {_CLEANED}",
        )
    return _JOB


def _nodes(env: Mapping[str, str], scope: _Scope) -> tuple[str, ...]:
    text = variables.text(env, scope.nodelist, _CLEANED, scope.where)
    nodes = hostlist.distinct(hostlist.expand(text, scope.nodelist), scope.nodelist)
    number = variables.optional_number(env, scope.num_nodes, _CORRECT)
    if number not in (None, len(nodes)):
        raise BadInput(
            "slurm-nodelist-differs",
            f"{variables.shown(scope.nodelist, text)} names {counted(len(nodes), 'node')}, "
            f"but {scope.num_nodes}={number}: {_CLEANED}",
        )
    return nodes


def _tasks(env: Mapping[str, str], scope: _Scope, nodes: tuple[str, ...]) -> tuple[int, ...]:
    text = variables.text(env, scope.tasks, _CLEANED, scope.where)
    tasks = _repeated(text, scope.tasks, len(nodes))
    if 0 in tasks:
        raise BadInput(
            "slurm-node-without-task",
            f"{variables.shown(scope.tasks, text)} leaves {nodes[tasks.index(0)]} without a task: {_CORRECT}",
        )
    return tasks


def _place(
    env: Mapping[str, str], scope: _Scope, nodes: tuple[str, ...], tasks: tuple[int, ...]
) -> tuple[int, int]:
    """(node_rank, local_id) of this task, checked against each other and the node's name."""
    start = "start the entrypoint with srun, one task per node (see slurm/multinode.sbatch)"
    node_rank = variables.number(env, "SLURM_NODEID", start, scope.where)
    if node_rank >= len(nodes):
        raise BadInput(
            "slurm-nodeid-range",
            f"SLURM_NODEID={node_rank}, but {scope.nodelist} names {counted(len(nodes), 'node')}: {_CLEANED}",
        )
    name = env.get("SLURMD_NODENAME", nodes[node_rank])
    if name != nodes[node_rank]:
        raise BadInput(
            "slurm-nodeid-host",
            f"SLURM_NODEID={node_rank} is {nodes[node_rank]} in {scope.nodelist}, "
            f"but {variables.shown('SLURMD_NODENAME', name)}: {_CLEANED}",
        )
    local_id = variables.number(env, "SLURM_LOCALID", start, scope.where)
    if local_id >= tasks[node_rank]:
        raise BadInput(
            "slurm-localid-range",
            f"SLURM_LOCALID={local_id}, but {scope.tasks} gives {nodes[node_rank]} {tasks[node_rank]}: "
            f"{_CLEANED}",
        )
    return node_rank, local_id


def _gpus(env: Mapping[str, str]) -> tuple[int | None, str]:
    """The GPUs granted on this node and the variable that tells, or would have told. (None, ''): nothing
    says whether Slurm counts GPUs here at all."""
    granted = variables.optional_number(env, "SLURM_GPUS_ON_NODE", _CORRECT)
    if granted is not None:
        return granted, "SLURM_GPUS_ON_NODE"
    if "SLURM_NODEID" not in env:
        name = "SLURM_GPUS_PER_NODE"
        return (_typed(env, name) if name in env else None), name
    visible = variables.visible_devices(env)
    if visible:
        # Shared GPUs (shard, mps), old releases, and a number that the user set: devices that nobody counted.
        return None, "SLURM_GPUS_ON_NODE"
    if visible == 0:
        return 0, variables.CUDA_DEVICES
    counted = next((name for name in env if name.startswith(_COUNTED)), "")
    return (0 if counted else None), counted


def _visible(env: Mapping[str, str], gpus: int | None) -> int | None:
    """What CUDA_VISIBLE_DEVICES leaves to this task of the node's GPUs; None where that is all."""
    visible = variables.visible_devices(env)
    if visible is None or gpus in (None, visible, 0):
        return None
    if visible > gpus:
        raise BadInput(
            "slurm-devices-differ",
            f"{variables.shown(variables.CUDA_DEVICES, env[variables.CUDA_DEVICES])}, but "
            f"SLURM_GPUS_ON_NODE={gpus}: unset {variables.CUDA_DEVICES}, Slurm sets it for each task",
        )
    return visible


def refuse_uneven_gpus(env: Mapping[str, str], nnodes: int, gpus: int, node: str) -> None:
    """For a task, and for the job script before it. `--gpus` spreads a total over the nodes as it fits. Told
    only where all of the job's nodes take part, and nobody asked for a number a node. `gpus`: of `node`."""
    if not env.get("SLURM_GPUS") or (env.get("SLURM_GPUS_PER_NODE") or "0") != "0":
        return
    if _typed(env, "SLURM_GPUS") != gpus * nnodes:
        raise BadInput(
            "slurm-uneven-gpus",
            f"{variables.shown('SLURM_GPUS', env['SLURM_GPUS'])} on {counted(nnodes, 'node')}, but "
            f"SLURM_GPUS_ON_NODE={gpus} on {node}: every node needs the same number: "
            "request --gpus-per-node rather than --gpus",
        )


def _cpus(
    env: Mapping[str, str], scope: _Scope, nodes: tuple[str, ...], tasks: int
) -> tuple[int | None, str]:
    """The CPUs of this node's tasks together and the variable that tells."""
    if scope is _JOB and "SLURM_JOB_CPUS_PER_NODE" in env:
        name = "SLURM_JOB_CPUS_PER_NODE"
        granted = _repeated(variables.text(env, name, _CORRECT), name, len(nodes))[0]
    elif scope is not _JOB and "SLURM_CPUS_ON_NODE" in env:
        name = "SLURM_CPUS_ON_NODE"
        granted = variables.number(env, name, _CORRECT)
    else:
        return None, ""
    per_task = variables.optional_number(env, "SLURM_CPUS_PER_TASK", _CORRECT)
    if per_task is not None and per_task * tasks < granted:
        return per_task * tasks, "SLURM_CPUS_PER_TASK"
    return granted, name


def _repeated(text: str, name: str, nnodes: int) -> tuple[int, ...]:
    """`2(x3),1` as (2, 2, 2, 1): a number for every node."""
    numbers: list[int] = []
    for item in text.split(","):
        found = _REPEATED.fullmatch(item)
        if not found:
            raise BadInput(
                "slurm-repeated-number",
                f"{variables.shown(name, text)}: {item!r} is no number, nor one as in 2(x3): {_CORRECT}",
            )
        times = int(found[2] or 1)
        if times == 0 or len(numbers) + times > nnodes:
            break
        numbers += [int(found[1])] * times
    else:
        if len(numbers) == nnodes:
            return tuple(numbers)
    raise BadInput(
        "slurm-repeated-count",
        f"{variables.shown(name, text)} does not give {counted(nnodes, 'node')} a number each: {_CORRECT}",
    )


def _typed(env: Mapping[str, str], name: str) -> int:
    """The sum of numbers with or without a type: `4`, `a100:4`, `a100:2,h100:2`."""
    text = variables.text(env, name, _CORRECT)
    remedy = f"give a number, or TYPE:NUMBER between commas, in {variables.shown(name, text)}"
    return sum(variables.whole(item.rpartition(":")[2], name, remedy) for item in text.split(","))
