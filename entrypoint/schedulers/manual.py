"""Makes an allocation of `--nodes` and `--node-rank`, for machines that are reached by ssh. `allocation` is
the entry.

There is no scheduler that counts jobs, so every run is the job `manual`.
"""

from __future__ import annotations

from collections.abc import Mapping

from entrypoint.core.errors import BadInput
from entrypoint.core.plain import counted
from entrypoint.schedulers import hostlist, hostnames, variables
from entrypoint.schedulers.allocation import Allocation
from entrypoint.schedulers.request import PlacementRequest

NAME = "manual"
NODES = "--nodes"
NODE_RANK = "--node-rank"


def present(env: Mapping[str, str]) -> bool:  # noqa: ARG001
    """Never: no variable tells, `--nodes` chooses it."""
    return False


def allocation(env: Mapping[str, str], request: PlacementRequest) -> Allocation:
    """One task on each of the nodes listed. Raises BadInput."""
    if request.nodes is None:
        raise BadInput(
            "manual-no-nodes",
            f"{NODES} is not given: --scheduler manual needs {NODES} a,b and {NODE_RANK} I on each node",
        )
    if request.nodes.strip().isdecimal():
        raise BadInput(
            "manual-nodes-number",
            f"{NODES} {request.nodes}: give a list of names, such as a,b; the number of nodes is "
            "--nnodes (on this machine: apptrain run --nodes N)",
        )
    nodes = hostlist.distinct(hostlist.expand(request.nodes, NODES), NODES)
    node_rank, rank_from = _node_rank(request, nodes)
    gpus = variables.visible_devices(env)
    sources = {"nodes": NODES, "node_rank": rank_from}
    if gpus is not None:
        sources["gpus"] = variables.CUDA_DEVICES
    return Allocation(
        scheduler=NAME,
        job_id=NAME,
        job_number=None,
        run_id=NAME,
        nodes=nodes,
        node_rank=node_rank,
        tasks_per_node=(1,) * len(nodes),
        gpus=gpus,
        slices=variables.visible_slices(env),
        cpu_by_default=True,
        sources=sources,
    )


def _node_rank(request: PlacementRequest, nodes: tuple[str, ...]) -> tuple[int, str]:
    """This node's place, and the option that told."""
    if request.node_rank is not None:
        if request.node_rank >= len(nodes):
            raise BadInput(
                "manual-node-rank-range",
                f"{NODE_RANK} {request.node_rank}, but {NODES} {request.nodes} has "
                f"{counted(len(nodes), 'node')}: give a number from 0 to {len(nodes) - 1}",
            )
        return request.node_rank, NODE_RANK
    if request.hostname is None:
        raise BadInput(
            "manual-no-node-rank",
            f"{NODE_RANK} is not given: give this node's place in {NODES} {request.nodes}, from 0",
        )
    found = hostnames.find(request.hostname, nodes)
    if len(found) != 1:
        what = "more than one" if found else "none"
        raise BadInput(
            "manual-no-node-rank",
            f"{NODE_RANK} is not given, and host {request.hostname} is {what} of {NODES} {request.nodes}: "
            f"give {NODE_RANK}, this node's place in the list from 0",
        )
    return found[0], "--hostname"
