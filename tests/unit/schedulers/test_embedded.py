"""The embedded scheduler's environment as an allocation: a node resolves its rank, nobody hands it over."""

import pytest

from entrypoint.cli.embedded import own_number
from entrypoint.core.errors import BadInput
from entrypoint.plan import rendezvous
from entrypoint.schedulers import choice, embedded
from entrypoint.schedulers.allocation import Allocation
from entrypoint.schedulers.request import PlacementRequest

NODE = {
    embedded.JOB_ID: "embedded-20261121-101500-4242",
    embedded.NODELIST: "127.0.0.[1-2]",
    embedded.NODENAME: "127.0.0.2",
}
NOTHING = PlacementRequest()


def test_the_least_that_a_node_is_told_is_read_whole() -> None:
    assert choice.allocation(NODE, "auto", NOTHING) == Allocation(
        scheduler="embedded",
        job_id="embedded-20261121-101500-4242",
        job_number=4242,
        run_id="embedded-20261121-101500-4242",
        nodes=("127.0.0.1", "127.0.0.2"),
        node_rank=1,
        tasks_per_node=(1, 1),
        gpus=0,
        gpus_option="--gpus-per-node N",
        cpu_by_default=True,
        sources={
            "job_id": "APPTRAIN_EMBEDDED_JOB_ID",
            "nodes": "APPTRAIN_EMBEDDED_NODELIST",
            "node_rank": "APPTRAIN_EMBEDDED_NODENAME",
        },
    )


def test_all_that_a_node_can_be_told_is_read_whole() -> None:
    env = NODE | {
        embedded.TASKS_PER_NODE: "2",
        embedded.LOCALID: "1",
        embedded.CPUS_ON_NODE: "4",
        embedded.GPUS_ON_NODE: "2",
    }
    task = embedded.allocation(env, NOTHING)
    assert (task.tasks_per_node, task.local_id, task.cpus, task.gpus) == ((2, 2), 1, 4, 2)
    assert {name: task.sources[name] for name in ("tasks_per_node", "local_id", "cpus", "gpus")} == {
        "tasks_per_node": "APPTRAIN_EMBEDDED_TASKS_PER_NODE",
        "local_id": "APPTRAIN_EMBEDDED_LOCALID",
        "cpus": "APPTRAIN_EMBEDDED_CPUS_ON_NODE",
        "gpus": "APPTRAIN_EMBEDDED_GPUS_ON_NODE",
    }


def test_the_rank_is_the_names_place_whatever_the_order() -> None:
    assert embedded.allocation(NODE | {embedded.NODELIST: "127.0.0.2,127.0.0.1"}, NOTHING).node_rank == 0


@pytest.mark.parametrize(("job_id", "number"), [("test", 0), ("7", 7), ("a-1-22", 22)])
def test_a_number_at_the_names_end_counts_the_jobs(job_id: str, number: int) -> None:
    assert embedded.allocation(NODE | {embedded.JOB_ID: job_id}, NOTHING).job_number == number


@pytest.mark.parametrize(
    ("tasks", "local_id", "said"),
    [
        ("2", "1", ""),
        ("2", "2", "APPTRAIN_EMBEDDED_LOCALID=2"),
        ("0", "0", "APPTRAIN_EMBEDDED_TASKS_PER_NODE=0 leaves no task to run"),
        (None, "0", ""),
        (None, "1", "APPTRAIN_EMBEDDED_LOCALID=1"),
    ],
)
def test_a_task_is_one_of_those_of_its_node(tasks: str | None, local_id: str, said: str) -> None:
    env = NODE | {embedded.LOCALID: local_id} | ({embedded.TASKS_PER_NODE: tasks} if tasks else {})
    if not said:
        assert embedded.allocation(env, NOTHING).local_id == int(local_id)
        return
    with pytest.raises(BadInput, match=f"^{said}"):
        embedded.allocation(env, NOTHING)


def test_an_embedded_node_inside_another_schedulers_job_is_embedded() -> None:
    taken = choice.allocation(NODE | {"SLURM_JOB_ID": "1"}, "auto", NOTHING)
    assert taken.scheduler == "embedded"
    assert taken.notes == ("taking embedded: the variables of slurm are there too (--scheduler chooses)",)


def test_jobs_of_one_machine_have_numbers_that_give_other_ports() -> None:
    with own_number() as one, own_number() as other, own_number() as third:
        assert len({number % rendezvous.JOBS for number in (one, other, third)}) == 3
    with own_number() as again:
        assert again <= third
