"""What the ranks of a doctor's job tell rank 0, and what that makes of it; the measurements are given."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from entrypoint.doctor import __main__ as doctor
from entrypoint.doctor import fabric, facts, probes
from entrypoint.doctor.judge import Clock, Collective, FarGpu, GpuSpeed, Speed, Way
from tests.unit.doctor.nodes import GIB, WHOLE, node

CPU = torch.device("cpu")
A, B = node(node="a"), node(node="b")
COLLECTIVES = [Collective("all_reduce", 1 << 20, 1e9)]


class Store(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()


def gpu(rank: int, where: str, used: int = 0) -> dict[str, Any]:
    return asdict(GpuSpeed(rank, where, "H100", used, 80 * GIB, None))


def told(rank: int, where: str, **more: object) -> dict[str, Any]:
    """What a rank has told, of two on each node."""
    found = {"a": A, "b": B}[where] if rank % 2 == 0 else None
    return {
        "rank": rank,
        "node": where,
        "gpu": None,
        "far": [],
        "cores": [rank],
        "facts": found and asdict(found),
        "speed": asdict(Speed(rank, where, 5.0, 7.0)),
        "ways": [],
        "network": "",
        "misused": [],
        **more,
    }


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The measurements take no time; whose first ranks were given to them."""
    asked: list[object] = []

    def ways(_: torch.device, firsts: dict[int, str]) -> list[Way]:
        asked.append(firsts)
        return [Way("a", "b", 1e9)]

    def clocks(_: object, firsts: dict[int, str]) -> list[Clock]:
        asked.append(firsts)
        return [Clock("b", 9.0, 0.0)]

    def settled(measure: object, nodes: list[str], _: torch.device) -> float:
        asked.append(nodes)
        return {"compute": 5.0, "copy": 7.0}[str(measure)]

    monkeypatch.setattr(probes, "compute", lambda _: "compute")
    monkeypatch.setattr(probes, "copy", lambda _: "copy")
    monkeypatch.setattr(probes, "settled", settled)
    monkeypatch.setattr(probes, "clocks", clocks)
    monkeypatch.setattr(probes, "collectives", lambda _: COLLECTIVES)
    monkeypatch.setattr(probes, "ways", ways)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for name in ("APPTRAIN_PROFILE", "APPTRAIN_FABRIC", "APPTRAIN_SCHEDULER", fabric.FILE):
        monkeypatch.delenv(name, raising=False)
    return asked


def others(*reports: dict[str, Any]) -> Store:
    """Of ranks 1 to 3."""
    store = Store()
    for one in reports:
        store.set(f"node/{one['rank']}", json.dumps(one["node"]))
        store.set(f"report/{one['rank']}", json.dumps(one))
    return store


def test_rank_0_puts_together_what_all_have_told(
    measured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    far = [asdict(FarGpu("b", 0, 1))]
    wrong = {"node": "b", "check": "network", "text": "x", "remedy": "y", "is_final": False}
    store = others(
        told(1, "a", gpu=gpu(1, "a", 30 * GIB)),
        told(
            2, "b", gpu=gpu(2, "b"), far=far, ways=[asdict(Way("b", "a", 2e9))], network="IB", misused=[wrong]
        ),
        told(3, "b", gpu=gpu(3, "b")),
    )
    mine = {"rank": 0, "node": "a", "gpu": gpu(0, "a"), "far": [], "cores": [0, 1], "facts": asdict(A)}
    report = doctor._examine(store, mine, CPU, 0.0)
    assert report
    # The cores of all ranks of a node together, which overlap on a.
    assert report.nodes == [replace(A, cpus=2), replace(B, cpus=2)]
    assert (report.ranks, report.transport) == (4, "NCCL over IB")
    assert report.clocks == [Clock("b", 9.0, 0.0)]
    assert report.speeds == [Speed(rank, "aabb"[rank], 5.0, 7.0) for rank in range(4)]
    assert [one.used for one in report.gpus] == [0, 30 * GIB, 0, 0]
    assert report.ways == [Way("a", "b", 1e9), Way("b", "a", 2e9)]
    assert report.collectives == COLLECTIVES
    assert report.seconds > 0
    assert [(one.node, one.check) for one in report.findings] == [
        *(("a", "gpu"), ("b", "numa"), ("b", "clock"), ("b", "network"))
    ]
    nodes = ["a", "a", "b", "b"]
    assert measured == [nodes, nodes, {0: "a", 2: "b"}, {0: "a", 2: "b"}]


@pytest.mark.usefixtures("measured")
def test_another_rank_tells_and_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    store = others(told(1, "a"), told(3, "b"))
    store.set("node/0", '"a"')
    mine = {"rank": 2, "node": "b", "gpu": None, "far": [], "cores": [2], "facts": asdict(B)}
    assert doctor._examine(store, mine, CPU, 0.0) is None
    assert json.loads(store["node/2"]) == "b"
    assert json.loads(store["report/2"]) == json.loads(
        json.dumps(told(2, "b", ways=[asdict(Way("a", "b", 1e9))]))
    )


@pytest.mark.parametrize(("local_rank", "has_facts"), [("0", True), ("1", False)])
def test_the_first_rank_of_a_node_gathers_its_facts(
    local_rank: str, has_facts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def gather(*words: object) -> facts.NodeFacts:
        asked.append(words)
        return WHOLE

    monkeypatch.setattr(facts, "gather", gather)
    env = {"LOCAL_RANK": local_rank, "APPTRAIN_RUN_DIR": str(tmp_path), "APPTRAIN_FABRIC": "efa"}
    found = doctor._of_rank(5, "a", CPU, env)
    assert found == {
        "rank": 5,
        "node": "a",
        "gpu": None,
        "far": [],
        "cores": sorted(os.sched_getaffinity(0)),
        "facts": asdict(WHOLE) if has_facts else None,
    }
    assert [(words[0], words[2], words[3]) for words in asked] == [("a", "efa", env)] * has_facts


def test_a_rank_with_a_gpu_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "gpu", lambda rank, where, _: GpuSpeed(rank, where, "H100", 0, 8, 0))
    monkeypatch.setattr(probes, "far_gpu", lambda where, local, _: [FarGpu(where, local, 1)])
    found = doctor._of_rank(5, "a", torch.device("cuda", 3), {"LOCAL_RANK": "3"})
    assert found["gpu"] == asdict(GpuSpeed(5, "a", "H100", 0, 8, 0))
    assert found["far"] == [{"node": "a", "local_rank": 3, "numa_node": 1}]


SOCKETS = "a:1:2 [0] NCCL INFO Using network Socket\n"


@pytest.mark.parametrize(
    ("name", "first", "wanted", "network", "misused"),
    [
        ("nccl.%h.%p", True, "infiniband", "Socket", ["network"]),
        ("nccl.%h.%p", True, "ethernet", "Socket", []),
        ("nccl.%h.%p", False, "infiniband", "", []),
        ("mine.%h", True, "infiniband", "", []),
        ("", True, "infiniband", "", []),
    ],
)
def test_the_network_of_a_node_is_read_from_nccls_log_if_that_is_ours(
    name: str,
    first: bool,
    wanted: str,
    network: str,
    misused: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "nccl.a.1").write_text(SOCKETS)
    (tmp_path / "nccl.a.2").write_text(SOCKETS)
    monkeypatch.setenv(fabric.FILE, str(tmp_path / name) if name else "")
    monkeypatch.setenv("APPTRAIN_FABRIC", wanted)
    found = doctor._network({"facts": {} if first else None, "node": "a"})
    assert (found["network"], [one["check"] for one in found["misused"]]) == (network, misused)


@pytest.mark.parametrize(
    ("on_gpus", "networks", "transport"),
    [
        (False, ["", ""], "gloo on ib0"),
        (True, ["IB", "", "IB"], "NCCL over IB"),
        (True, ["IB", "Socket"], "NCCL over IB and Socket"),
        (True, ["", ""], "NCCL over what its log does not say"),
    ],
)
def test_the_transport_is_what_the_nodes_logs_say(on_gpus: bool, networks: list[str], transport: str) -> None:
    reports = [{"gpu": {"rank": 0} if on_gpus else None, "network": one} for one in networks]
    assert doctor._transport(reports, WHOLE) == transport
