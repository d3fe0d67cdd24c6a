"""A plan that is completed with the cores of its ranks: what is asked, and what is said."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.node import binding, gpu, numa
from entrypoint.node.gpu import DriverReport, Gpu
from entrypoint.plan import cores
from entrypoint.plan.cores import Binding, GpuPlace, Topology
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.plan.origin import FLAG, derived_from
from tests.unit.scene import planned

TWO = Topology(
    nodes={0: frozenset({0, 1}), 1: frozenset({2, 3})},
    physical={core: core for core in range(4)},
    sockets={0: 0, 1: 0, 2: 1, 3: 1},
)
SEEN = DriverReport(gpus=(Gpu(name="a", capability=(9, 0), address="1"), Gpu(name="b", capability=(9, 0))))


def completed(
    patch: pytest.MonkeyPatch, plan: LaunchPlan, found: DriverReport | None = None, asked: Any = None
) -> tuple[LaunchPlan, list[str]]:
    """The plan on a node of two NUMA nodes with two cores each, and what was said."""

    async def ask(_: object) -> DriverReport:
        assert asked is not None, "the driver is asked"
        return DriverReport(**asked)

    def place(address: str) -> GpuPlace:
        return GpuPlace(address=address, numa_node=1 if address else 0)

    patch.setattr(numa, "topology", lambda _: TWO)
    patch.setattr(numa, "place", place)
    patch.setattr(gpu, "ask_driver", ask)
    said: list[str] = []
    return asyncio.run(binding.with_cores_of_ranks(plan, {}, found, said.append)), said


def bound(**changes: Any) -> LaunchPlan:
    return replace(planned(), **{"numa_binding": "node", **changes})


def test_ranks_on_cpus_are_spread_and_the_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, said = completed(monkeypatch, bound())
    assert plan.to_json()["cores"] == [
        {"local_rank": 0, "cores": "0-1", "numa_nodes": [0], "gpu": None},
        {"local_rank": 1, "cores": "2-3", "numa_nodes": [1], "gpu": None},
    ]
    assert str(plan.sources["cores"]) == "derived:numa_binding"
    assert said == [
        "--numa-binding node: local rank 0 on cores 0-1 (NUMA node 0); local rank 1 on cores 2-3 (NUMA node 1)"
    ]


@pytest.mark.parametrize("found", [SEEN, None])
def test_ranks_on_gpus_get_the_cores_beside_the_gpus_that_cuda_shows(
    monkeypatch: pytest.MonkeyPatch, found: DriverReport | None
) -> None:
    plan, _ = completed(monkeypatch, bound(device="cuda"), found, {"gpus": SEEN.gpus})
    assert [(rank.cores, rank.gpu) for rank in plan.cores] == [((2, 3), "1"), ((0, 1), "")]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"silent": True}, "it does not answer"),
        ({"failed": "status 1"}, "status 1"),
        ({"error": (100, "no device")}, "CUDA does not start: no device"),
    ],
)
def test_a_driver_that_does_not_say_is_a_refusal_or_for_auto_a_line(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], why: str
) -> None:
    text = (
        "--numa-binding needs to know where the GPUs of 127.0.0.2 are, and NVIDIA's driver does not say it "
        f"({why}): leave --numa-binding out"
    )
    with pytest.raises(BadInput) as refused:
        completed(monkeypatch, bound(device="cuda"), asked=answer)
    assert str(refused.value) == text
    plan, said = completed(monkeypatch, bound(device="cuda", numa_binding="auto"), asked=answer)
    assert (plan.cores, said) == ((), [f"--numa-binding auto binds nothing: {text}"])


@pytest.mark.parametrize("changes", [{"numa_binding": "none"}, {"mode": "exec"}, {"members": (0, 2)}])
def test_nobody_is_bound(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    plan = bound(device="cuda", **changes)
    assert completed(monkeypatch, plan) == (plan, [])


def test_why_a_binding_changes_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "decide", lambda *_: Binding(why_not="--numa-binding node changes nothing: x"))
    plan = bound()
    assert completed(monkeypatch, plan) == (plan, ["--numa-binding node changes nothing: x"])


@pytest.mark.parametrize(
    ("threads", "source", "found"),
    [
        ("8", derived_from("SLURM_CPUS_ON_NODE"), ("2", "derived:numa_binding")),
        ("1", derived_from("CMD"), ("1", "derived:CMD")),
        ("8", FLAG, ("8", "flag")),
    ],
)
def test_derived_threads_are_no_more_than_the_cores_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, threads: str, source: Any, found: tuple[str, str]
) -> None:
    plan, name = bound(), "OMP_NUM_THREADS"
    plan = replace(plan, env={**plan.env, name: threads}, sources={**plan.sources, f"env.{name}": source})
    plan, _ = completed(monkeypatch, plan)
    assert (plan.env[name], str(plan.sources[f"env.{name}"])) == found


@pytest.mark.parametrize(("cpus", "own"), [(8, True), (7, False), (None, False)])
def test_a_task_has_its_own_cores_if_those_of_all_tasks_were_granted(cpus: int | None, own: bool) -> None:
    allocation = replace(planned().allocation, cpus=cpus, local_id=1)
    task = binding.ranks_of(bound(mode="rank", allocation=allocation), TWO)
    assert (task.local_ranks, task.nproc_per_node, task.has_own_cores) == ((1,), 2, own)
    assert not binding.ranks_of(bound(allocation=allocation), TWO).has_own_cores
