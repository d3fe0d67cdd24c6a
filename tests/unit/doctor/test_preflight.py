"""The cheap part before a launch: who looks, what is refused, and how it is said."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.doctor import facts, preflight
from entrypoint.node import binding
from entrypoint.node.gpu import DriverReport
from entrypoint.plan.cores import GpuPlace, Topology
from tests.unit.doctor.nodes import WHOLE, node, room


def plan(**changes: Any) -> Any:
    values = {"node": "a", "nnodes": 2, "local_rank": None, "device": "cuda", "run_dir": "/scratch/run"}
    values |= {
        "nproc_per_node": 2,
        "mode": "torchrun",
        "is_spare": False,
        "env": {"NCCL_NET_PLUGIN": "/ofi.so"},
    }
    values |= {"allocation": SimpleNamespace(cpus=8, scheduler="slurm")}
    return SimpleNamespace(**{**values, **changes})


def settings(**values: Any) -> Any:
    known = {"fabric": None, "no-preflight": False, "doctor": False, **values}
    return SimpleNamespace(value=known.__getitem__, given=known.__contains__)


def look(monkeypatch: pytest.MonkeyPatch, found: facts.NodeFacts, plan: Any, settings: Any) -> Any:
    asked: list[object] = []

    def gather(*arguments: object) -> facts.NodeFacts:
        asked.append(arguments)
        return found

    monkeypatch.setattr(facts, "gather", gather)
    if not hasattr(binding.read_topology, "stands_in"):
        cores_are(monkeypatch, {0: {0, 1}}, is_whole=True)
    result = asyncio.run(preflight.look(plan, settings, {"TMPDIR": "/full"}))
    return result, asked


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (plan(nnodes=1), settings()),
        (plan(), settings(**{"no-preflight": True})),
        (plan(), settings(doctor=True)),
    ],
)
def test_nobody_looks(monkeypatch: pytest.MonkeyPatch, plan: Any, settings: Any) -> None:
    assert look(monkeypatch, WHOLE, plan, settings) == (None, [])


def test_a_node_without_a_fault_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = look(monkeypatch, WHOLE, plan(local_rank=0), settings(fabric="infiniband"))
    assert found.findings == {}
    assert 0 <= found.seconds < 60
    ((name, folders, fabric, env),) = asked
    assert (name, fabric, env) == ("a", "infiniband", {"TMPDIR": "/full", "NCCL_NET_PLUGIN": "/ofi.so"})
    assert list(folders) == ["run directory", "TMPDIR", "/dev/shm"]
    assert folders["TMPDIR"] == "/full"


def test_on_cpus_neither_the_fabric_nor_shared_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = node(ports=(), limits={**WHOLE.limits, "memlock": 1})
    found, ((_, folders, fabric, _),) = look(
        monkeypatch, lacking, plan(device="cpu"), settings(fabric="infiniband")
    )
    assert (found.findings, fabric, list(folders)) == ({}, "", ["run directory", "TMPDIR"])


def test_another_task_of_a_node_looks_at_its_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = look(monkeypatch, WHOLE, plan(local_rank=1), settings())
    assert (found.findings, asked) == ({}, [])


# --- cores --------------------------------------------------------------------------------------------------------


def cores_are(patch: pytest.MonkeyPatch, nodes: dict[int, set[int]], *, is_whole: bool = False) -> None:
    """Those that were granted, by their NUMA nodes, of two each."""
    every = sorted(core for cores in nodes.values() for core in cores)
    machine = Topology(
        nodes={node: frozenset(cores) for node, cores in nodes.items()},
        physical={core: core for core in every},
        sockets={core: core // 2 for core in every},
        is_whole=is_whole,
    )

    async def read() -> Topology:
        return machine

    read.stands_in = True  # type: ignore[attr-defined]
    patch.setattr(binding, "read_topology", read)


def gpus_are(patch: pytest.MonkeyPatch, *nodes: int, silent: bool = False) -> None:
    """The NUMA nodes of the GPUs that this task sees."""

    async def places(_: object, __: object, driver: DriverReport | None) -> list[GpuPlace]:
        assert driver is None
        if silent:
            raise BadInput("numa-gpu-unknown", "it does not say")
        return [GpuPlace(address=f"0000:0{node}:00.0", numa_node=node) for node in nodes]

    patch.setattr(binding, "places", places)


FAR = "request whole nodes (--exclusive) or cores beside the GPUs (--gres-flags=enforce-binding)"


@pytest.mark.parametrize(
    ("nodes", "gpus", "changes", "findings"),
    [
        ({0: {0, 1}}, (0, 0), {}, {}),
        (
            {0: {0, 1}},
            (0, 1),
            {},
            {"numa": f"no core was granted on NUMA node 1, where the GPU of local rank 1 is: {FAR}"},
        ),
        (
            {0: {0, 1}},
            (2, 1),
            {},
            {"numa": f"no core was granted on NUMA nodes 1-2, where the GPUs of local ranks 0-1 are: {FAR}"},
        ),
        (
            {0: {0, 1}},
            (0, 1),
            {"mode": "rank", "local_rank": 1},
            {
                "numa 1": "no core was granted on NUMA node 1, where the GPU of local rank 1 is: start one task on "
                "each node, or tasks in the order of the GPUs (--distribution=block:block), or with srun "
                "--gpu-bind=closest or --cpu-bind=none"
            },
        ),
        ({0: {0, 1}}, (0,), {}, {}),
        ({0: {0, 1}}, (0, 1), {"device": "cpu"}, {}),
        ({0: {0, 1}}, (0, 1), {"is_spare": True}, {}),
    ],
)
def test_cores_far_from_the_gpus_are_a_finding_with_the_schedulers_option(
    monkeypatch: pytest.MonkeyPatch,
    nodes: dict[int, set[int]],
    gpus: tuple[int, ...],
    changes: dict[str, Any],
    findings: dict[str, str],
) -> None:
    cores_are(monkeypatch, nodes)
    gpus_are(monkeypatch, *gpus)
    found, _ = look(monkeypatch, WHOLE, plan(**changes), settings())
    assert (found.findings, found.advice) == (findings, "")


def test_a_driver_that_does_not_say_where_gpus_are_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    cores_are(monkeypatch, {0: {0, 1}})
    gpus_are(monkeypatch, silent=True)
    found, _ = look(monkeypatch, WHOLE, plan(), settings())
    assert (found.findings, found.advice) == ({}, "")


BOTH = "local rank 0 on cores 0-1 (NUMA node 0); local rank 1 on cores 2-3 (NUMA node 1)"


@pytest.mark.parametrize(
    ("gpus", "mode", "given", "advice"),
    [
        ((0, 1), "torchrun", {}, f"--numa-binding node would keep {BOTH}"),
        (
            (0, 0),
            "torchrun",
            {},
            "--numa-binding node would keep local ranks 0-1 on cores 0-1 (NUMA node 0), and leave 2 cores without a "
            "rank",
        ),
        ((0, 1), "torchrun", {"numa-binding": "none"}, ""),
        ((0, 1), "exec", {}, ""),
        ((0, 5), "torchrun", {}, ""),
    ],
)
def test_what_binding_would_change_is_said_unless_somebody_chose(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...], mode: str, given: dict[str, Any], advice: str
) -> None:
    cores_are(monkeypatch, {0: {0, 1}, 1: {2, 3}})
    gpus_are(monkeypatch, *gpus)
    found, _ = look(monkeypatch, WHOLE, plan(mode=mode), settings(**given))
    before = "each rank may use all 4 cores granted on a, of 2 NUMA nodes: "
    assert found.advice == (before + advice if advice else "")


def test_a_full_run_directory_is_refused_with_the_node_and_the_way_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(BadInput) as refused:
        look(monkeypatch, room("run directory", refused="No space left on device"), plan(), settings())
    assert str(refused.value) == (
        "a: run directory /scratch/run takes no file of 1 MiB (No space left on device): remove what is not needed "
        "there (df -h, df -i, quota), or give another with --run-dir (--no-preflight goes on)"
    )


def test_what_holds_the_look_is_a_finding_and_holds_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def held(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(preflight, "run_in_thread", held)
    found = asyncio.run(preflight.look(plan(), settings(), {}))
    assert found is not None
    assert found.findings == {"room": "no answer in 5 s: look at its file systems"}


def test_findings_are_told_by_node_and_the_last_line_says_what_it_took() -> None:
    assert preflight.in_words({}, 3, 0.044) == ["preflight: 3 nodes, nothing found, 0.04 s"]
    assert preflight.in_words({}, 3, 0.044, "bind") == [
        "preflight: bind",
        "preflight: 3 nodes, nothing found, 0.04 s",
    ]
    found = {"a": {"nofile": "x: y"}, "b": {"nofile": "x: y", "memlock": "z"}}
    assert preflight.in_words(found, 3, 0.5) == [
        "preflight: a, b: x: y",
        "preflight: b: z",
        "preflight: 3 nodes, 2 findings, 0.50 s",
    ]
