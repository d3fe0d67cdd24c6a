"""Which scheduler an environment belongs to, and that options do not contradict it."""

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.schedulers import choice
from entrypoint.schedulers.request import PlacementRequest

NODES = 9
RUN = {
    "APPTRAIN_EMBEDDED_JOB_ID": "7",
    "APPTRAIN_EMBEDDED_NODELIST": f"127.0.0.[1-{NODES}]",
    "APPTRAIN_EMBEDDED_NODENAME": "127.0.0.2",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-8]",
    "SLURM_TASKS_PER_NODE": "1(x8)",
}


def refusal(env: dict[str, str], request: PlacementRequest) -> str:
    with pytest.raises(BadInput) as refused:
        choice.allocation(env, "auto", request)
    return str(refused.value)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (RUN, "embedded"),
        (SLURM, "slurm"),
        ({"PBS_JOBID": "7"}, "pbs"),
        ({"PBS_JOBID": "7", **SLURM}, "slurm"),
        ({**SLURM, **RUN}, "embedded"),
        ({}, "manual"),
    ],
)
def test_the_first_whose_variables_are_there_is_taken(env: dict[str, str], name: str) -> None:
    found = choice.find(env, "auto", PlacementRequest(nodes="a"))
    assert found.__name__ == f"entrypoint.schedulers.{name}"  # type: ignore[attr-defined]
    assert choice.find(env, "pbs", PlacementRequest()).__name__ == "entrypoint.schedulers.pbs"  # type: ignore[attr-defined]


def test_nodes_that_a_job_has_not_are_refused_with_the_first_eight_of_those_it_has() -> None:
    remedy = "leave it out, or add --scheduler manual"
    of_run = ",".join(f"127.0.0.{number}" for number in range(1, 9))
    assert refusal(RUN, PlacementRequest(nodes="a")) == (
        f"--nodes a is not what embedded granted ({of_run},... 9 in all): {remedy}"
    )
    of_slurm = ",".join(f"n{number}" for number in range(1, 9))
    assert refusal(SLURM, PlacementRequest(nodes="n[1-7]")) == (
        f"--nodes n[1-7] is not what slurm granted ({of_slurm}): {remedy}"
    )
    assert choice.allocation(SLURM, "auto", PlacementRequest(nodes="n[1-8]")).nnodes == 8


def test_a_rank_that_a_node_has_not_is_refused() -> None:
    assert refusal(SLURM, PlacementRequest(node_rank=1)) == (
        "--node-rank 1 is not what slurm says of this node (0): leave it out, or add --scheduler manual"
    )
    assert refusal(RUN, PlacementRequest(node_rank=0)).startswith(
        "--node-rank 0: apptrain run starts all nodes, "
    )
    for env, rank in ((SLURM, 0), (RUN, 1)):
        assert choice.allocation(env, "auto", PlacementRequest(node_rank=rank)).node_rank == rank
