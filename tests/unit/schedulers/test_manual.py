"""Nodes listed by hand as an allocation."""

import pytest

from entrypoint.schedulers import choice, manual
from entrypoint.schedulers.allocation import Allocation
from entrypoint.schedulers.request import PlacementRequest


def test_a_list_and_a_rank_are_read_whole() -> None:
    request = PlacementRequest(nodes="a,n[08-10]", node_rank=3)
    assert choice.allocation({}, "auto", request) == Allocation(
        scheduler="manual",
        job_id="manual",
        job_number=None,
        run_id="manual",
        nodes=("a", "n08", "n09", "n10"),
        node_rank=3,
        tasks_per_node=(1, 1, 1, 1),
        gpus=None,
        cpu_by_default=True,
        sources={"nodes": "--nodes", "node_rank": "--node-rank"},
    )


@pytest.mark.parametrize("hostname", ["b", "b.cluster.org"])
def test_without_a_rank_the_hosts_name_tells_its_place(hostname: str) -> None:
    node = manual.allocation({}, PlacementRequest(nodes="a,b", hostname=hostname))
    assert (node.node_rank, node.sources["node_rank"]) == (1, "--hostname")


def test_a_rank_by_hand_goes_before_the_hosts_name() -> None:
    assert manual.allocation({}, PlacementRequest(nodes="a,b", node_rank=0, hostname="b")).node_rank == 0


@pytest.mark.parametrize(("devices", "gpus"), [(None, None), ("", 0), ("-1", 0), ("0", 1), ("2,3", 2)])
def test_gpus_are_the_visible_devices(devices: str | None, gpus: int | None) -> None:
    env = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    assert manual.allocation(env, PlacementRequest(nodes="a", node_rank=0)).gpus == gpus


def test_inside_a_job_the_list_by_hand_serves_where_it_is_named() -> None:
    env = {"SLURM_JOB_ID": "1", "PBS_JOBID": "1"}
    taken = choice.allocation(env, "manual", PlacementRequest(nodes="a,b", node_rank=1))
    assert (taken.scheduler, taken.nodes, taken.notes) == ("manual", ("a", "b"), ())
