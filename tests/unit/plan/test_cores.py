"""The cores of each rank on machines that their owners have shown, against torch's own functions."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch.numa import binding as of_torch
from torch.numa.binding import AffinityMode, NumaOptions

from entrypoint.core.errors import BadInput
from entrypoint.node import numa
from entrypoint.plan import cores
from entrypoint.plan.cores import GpuPlace, RankCores, TaskRanks, Topology
from tests.unit.node.trees import MACHINES, Machine, built, show_to_torch

TORCH_FAILS = {
    ("Four GH200, whose GPUs' memory is NUMA nodes without cores", "socket"),
    ("One GH200", "socket"),
    *(
        (name, binding)
        for name in ("Eight A100 over PCIe, of which Slurm grants 32 cores beside four (a cpuset with gaps)",)
        for binding in ("node", "socket", "exclusive")
    ),
    ("The same job with the four GPUs beside its cores", "socket"),
}
"""There torch takes the lowest core of each NUMA node, also of one without granted cores, or binds to none."""
TWO = Topology(
    nodes={0: frozenset({0, 1, 4, 5}), 1: frozenset({2, 3, 6, 7})},
    physical={0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 1, 6: 2, 7: 3},
    sockets=dict.fromkeys(range(8), 0),
)
"""Two NUMA nodes of two physical cores each."""
FIRST, SECOND = GpuPlace(address="0000:01:00.0", numa_node=0), GpuPlace(address="0000:02:00.0", numa_node=1)
NOWHERE = GpuPlace(address="0000:03:00.0", numa_node=None)


def ranks(count: int) -> TaskRanks:
    return TaskRanks(local_ranks=tuple(range(count)), nproc_per_node=count)


def of_several(rank: int, count: int, *, has_own_cores: bool = False) -> TaskRanks:
    return TaskRanks(local_ranks=(rank,), nproc_per_node=count, has_own_cores=has_own_cores)


def shown(found: Sequence[RankCores]) -> list[str]:
    return [cores.listed(rank.cores) for rank in found]


@pytest.fixture(scope="module", params=MACHINES)
def shown_one(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Machine]:
    """A machine with its name."""
    return request.param, built(request.param, tmp_path_factory.mktemp("sys"))


@pytest.mark.parametrize("binding", cores.BINDINGS[:-1])
def test_a_machine_gives_each_rank_the_cores_written_for_it(
    shown_one: tuple[str, Machine], binding: str
) -> None:
    name, machine = shown_one
    expected, task = MACHINES[name]["bindings"][binding], ranks(MACHINES[name]["ranks"])
    topology = machine.topology
    if binding == "auto":
        found = cores.decide(binding, topology, machine.gpus, task, "n1").ranks
        assert (shown(found) or "none") == expected
        return
    if isinstance(expected, str):
        with pytest.raises(BadInput) as refused:
            cores.bind(binding, topology, machine.gpus, task)
        assert refused.value.id == expected
        return
    found = cores.bind(binding, topology, machine.gpus, task)
    assert shown(found) == expected
    assert all(set(rank.cores) <= machine.granted for rank in found)


@pytest.mark.parametrize("binding", ["node", "socket", "exclusive"])
def test_torch_gives_the_same_cores_if_it_gives_any(
    shown_one: tuple[str, Machine], binding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, machine = shown_one
    options = NumaOptions(affinity_mode=AffinityMode(binding))
    show_to_torch(machine, monkeypatch)
    told = []
    try:
        for rank in range(MACHINES[name]["ranks"]):
            told.append(
                of_torch._get_validated_logical_cpus_to_bind_to(device_index=rank, numa_options=options)
            )
    except (ValueError, RuntimeError):
        assert machine.gpus is None or (name, binding) in TORCH_FAILS
        return
    assert (name, binding) not in TORCH_FAILS
    assert [cores.listed(one) for one in told] == MACHINES[name]["bindings"][binding]


def test_each_rank_says_where_its_cores_are_and_beside_which_gpu() -> None:
    (found, _) = cores.bind("socket", TWO, [SECOND, FIRST], ranks(2))
    assert found.to_json() == {"local_rank": 0, "cores": "0-7", "numa_nodes": [0, 1], "gpu": "0000:02:00.0"}


@pytest.mark.parametrize(
    ("rank", "gpus", "found"),
    [(1, [SECOND], "2-3,6-7"), (0, [SECOND], "2-3,6-7"), (1, [FIRST, SECOND], "2-3,6-7")],
)
def test_a_task_that_is_one_rank_has_the_gpu_of_its_number_or_the_only_one(
    rank: int, gpus: list[GpuPlace], found: str
) -> None:
    assert shown(cores.bind("node", TWO, gpus, of_several(rank, 2))) == [found]


@pytest.mark.parametrize(
    ("binding", "gpus", "task", "refusal"),
    [
        ("node", [FIRST, NOWHERE], ranks(2), "numa-gpu-node"),
        ("node", [FIRST], ranks(2), "numa-rank-gpu"),
        ("node", [FIRST, SECOND], of_several(2, 4), "numa-rank-gpu"),
        ("exclusive", [SECOND], of_several(1, 2), "numa-exclusive-own-gpu"),
        ("exclusive", [FIRST, FIRST, FIRST], ranks(3), "numa-cores"),
        ("exclusive", None, ranks(5), "numa-ranks"),
        ("node", [replace(FIRST, numa_node=7)], ranks(1), "numa-cores"),
    ],
)
def test_nothing_is_guessed(binding: str, gpus: list[GpuPlace] | None, task: TaskRanks, refusal: str) -> None:
    with pytest.raises(BadInput) as refused:
        cores.bind(binding, TWO, gpus, task)
    assert refused.value.id == refusal
    assert cores.auto(TWO, [NOWHERE], ranks(1)) == cores.Binding(
        why_not="--numa-binding auto binds nothing: --numa-binding needs to know the NUMA node of the GPU at "
        "0000:03:00.0, and neither the driver nor the kernel says it: leave --numa-binding out"
    )


def test_a_gpu_without_a_known_node_is_on_the_only_one() -> None:
    whole = Topology(nodes={0: frozenset({0, 1})}, physical={0: 0, 1: 1}, sockets={0: 0, 1: 0}, is_whole=True)
    assert shown(cores.bind("exclusive", whole, [NOWHERE, NOWHERE], ranks(2))) == ["0", "1"]
    assert cores.decide("node", whole, [NOWHERE, NOWHERE], ranks(2), "n1") == cores.Binding(
        why_not="--numa-binding node changes nothing: n1 has one NUMA node"
    )


@pytest.mark.parametrize(
    ("binding", "gpus", "found"),
    [("exclusive", [SECOND], "2-3,6-7"), ("exclusive", None, "0-1,4-5"), ("socket", None, "0-7")],
)
def test_cores_that_the_scheduler_gave_a_task_alone_are_not_shared_out(
    binding: str, gpus: list[GpuPlace] | None, found: str
) -> None:
    assert shown(cores.bind(binding, TWO, gpus, of_several(1, 2, has_own_cores=True))) == [found]


def test_a_binding_that_changes_nothing_says_why() -> None:
    one = replace(TWO, nodes={0: TWO.nodes[0]})
    for task, why in (
        (ranks(2), "all cores granted on n1 are near"),
        (of_several(1, 2, has_own_cores=True), "each task has cores of its own"),
    ):
        assert cores.decide("node", one, [FIRST, FIRST], task, "n1") == cores.Binding(
            why_not=f"--numa-binding node changes nothing: {why}"
        )


@pytest.mark.parametrize("gpus", [None, [FIRST, SECOND]])
def test_auto_and_advice_count_the_ranks_of_the_nodes_other_tasks(gpus: list[GpuPlace] | None) -> None:
    """They share its cores in mode `rank`, where Slurm binds no task."""
    together = cores.auto(TWO, gpus, ranks(2)).ranks
    apart = [cores.auto(TWO, gpus, of_several(rank, 2)).ranks for rank in (0, 1)]
    assert together == tuple(rank for found in apart for rank in found) != ()
    said = cores.advice(TWO, [FIRST, SECOND], of_several(0, 2), "n1")
    assert said.endswith("--numa-binding node would keep local rank 0 on cores 0-1,4-5 (NUMA node 0)")


@pytest.mark.parametrize("numa_node", [9, None])
def test_no_advice_is_given_where_a_neighbours_rank_could_not_follow_it(numa_node: int | None) -> None:
    """Nor is it an error of who asked for nothing."""
    far = replace(SECOND, numa_node=numa_node)
    assert cores.advice(TWO, [FIRST, far], of_several(0, 2), "n1") == ""


def test_a_task_that_sees_only_its_own_gpu_does_not_say_where_others_run() -> None:
    apart = replace(TWO, sockets={core: core // 2 % 2 for core in range(8)})
    assert cores.auto(apart, [FIRST], of_several(0, 2)).why_not == (
        "--numa-binding auto binds nothing: this task sees only its own GPU, and not where the other ranks of the "
        "node would run: request GPUs per node rather than per task, or use node"
    )
    said = cores.advice(apart, [FIRST], of_several(0, 2), "n1")
    assert said.endswith("--numa-binding node would keep local rank 0 on cores 0-1,4-5 (NUMA node 0)")


def test_fewer_ranks_than_numa_nodes_leave_cores_idle_and_auto_does_not() -> None:
    apart = replace(TWO, sockets={core: core // 2 % 2 for core in range(8)})
    assert shown(cores.bind("node", apart, None, ranks(1))) == ["0-1,4-5"]
    assert cores.auto(apart, None, ranks(1)) == cores.Binding(
        why_not="--numa-binding auto binds nothing: it would leave granted cores without a rank"
    )


@pytest.mark.parametrize(
    ("held", "count"), [([(0, 1, 2, 3)] * 2, 2), ([(0, 1, 2), (4,)], 1), ([(0,)] * 3, 1)]
)
def test_no_more_threads_than_a_rank_has_cores(held: list[tuple[int, ...]], count: int) -> None:
    found = [RankCores(local_rank=rank, cores=its, numa_nodes=(0,)) for rank, its in enumerate(held)]
    assert cores.threads(found) == count


def test_ranks_with_the_same_cores_are_told_together() -> None:
    found = cores.bind("node", TWO, [FIRST, SECOND, FIRST], ranks(3))
    assert cores.in_words(found) == (
        "local ranks 0,2 on cores 0-1,4-5 (NUMA node 0); local rank 1 on cores 2-3,6-7 (NUMA node 1)"
    )


@pytest.mark.parametrize("text", ["0-x", "1-2-3", "70000", "0-999999999"])
def test_what_is_no_list_of_cores_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|no core's number"):
        numa.parse_list(text)


def test_granted_cores_are_those_that_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    assert numa.granted() == before
    os.sched_setaffinity(0, {max(before)})
    try:
        assert numa.granted() == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_a_kernel_that_knows_no_numa_nodes_has_one(tmp_path: Path) -> None:
    assert numa.topology({3, 1}, tmp_path) == Topology(
        nodes={0: frozenset({1, 3})}, physical={1: 1, 3: 3}, sockets={1: 0, 3: 0}, is_whole=True
    )
    assert numa.place("", tmp_path) == GpuPlace(address="", numa_node=None)


def test_advice_says_how_many_cores_would_have_no_rank(tmp_path: Path) -> None:
    machine = built("DGX A100, two EPYC 7742 with NPS4", tmp_path)
    assert cores.advice(machine.topology, machine.gpus or (), ranks(4), "n1") == (
        "each rank may use all 256 cores granted on n1, of 8 NUMA nodes: --numa-binding node would keep local "
        "ranks 0-1 on cores 48-63,176-191 (NUMA node 3); local ranks 2-3 on cores 16-31,144-159 (NUMA node 1), "
        "and leave 192 cores without a rank (socket: 128)"
    )
