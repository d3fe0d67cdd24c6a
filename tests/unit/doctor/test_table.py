"""The report as it is printed, and as JSON."""

import json
from dataclasses import replace

from entrypoint.doctor.judge import Clock, Collective, Finding, GpuSpeed, Speed, Way
from entrypoint.doctor.table import Report
from tests.unit.doctor.nodes import GIB, WHOLE, room

TWO = Report(
    nodes=[WHOLE, replace(room("TMPDIR", refused="No space left on device"), node="b")],
    findings=[],
    seconds=6.25,
    ranks=4,
    transport="NCCL over IB",
    clocks=[Clock("b", 0.0123, 0.0001)],
    speeds=[
        Speed(0, "a", 6e14, 2e12),
        Speed(1, "a", 5e14, 2.1e12),
        Speed(2, "b", 6e14, 2e12),
        Speed(3, "b", 6e14, 2e12),
    ],
    gpus=[GpuSpeed(rank, "ab"[rank // 2], "A100", 0, 80 * GIB, 0) for rank in range(4)],
    collectives=[Collective("all_reduce", 1 << 20, 2e9), Collective("all_reduce", 1 << 24, 4e10)],
    ways=[Way("a", "b", 2e10), Way("b", "a", 1e10)],
)


def test_a_report_is_one_table_with_a_line_for_each_node() -> None:
    assert TWO.in_words().splitlines() == [
        "doctor: 2 nodes, 4 ranks, NCCL over IB, 6.2 s",
        "node  cpus  memory   run directory  TMPDIR                   /dev/shm  memlock    nofile   nproc      gpus      clock     compute      copy",
        "a     64    250 GiB  100 GiB        100 GiB                  100 GiB   unlimited  1048576  unlimited  2 x A100            500 Tflop/s  2000.00 GB/s",
        "b     64    250 GiB  100 GiB        No space left on device  100 GiB   unlimited  1048576  unlimited  2 x A100  +0.012 s  600 Tflop/s  2000.00 GB/s",
        "all_reduce, bus bandwidth: 1.0 MiB 2.00 GB/s, 16 MiB 40.00 GB/s",
        "slowest pair: b to a, 10.00 GB/s",
        "healthy",
    ]


def test_what_is_wrong_stands_below_with_its_nodes_and_the_verdict_last() -> None:
    findings = [Finding(node, "clock", "it is late", "wait") for node in "ab"] + [Finding("a", "x", "y", "z")]
    alone = Report(nodes=[replace(WHOLE, rooms={}, limits={})], findings=findings, seconds=0)
    assert alone.in_words().splitlines() == [
        "doctor: 1 node, 0.0 s",
        "node  cpus  memory",
        "a     64    250 GiB",
        "a, b: it is late: wait",
        "a: y: z",
        "not healthy: 3 findings",
    ]


def test_each_node_has_its_own_gpus_and_speed() -> None:
    nodes = [replace(WHOLE, rooms={}, limits={}, node=name) for name in "abc"]
    gpus = [GpuSpeed(0, "a", "A100", 0, 80 * GIB, 0), GpuSpeed(1, "b", "H100", 0, 80 * GIB, 0)]
    speeds = [Speed(0, "a", 1e13, 1e9), Speed(1, "b", 9.99e12, 1e9), Speed(2, "c", 2e12, 1e9)]
    report = Report(nodes=nodes, findings=[], seconds=0, gpus=gpus, speeds=speeds)
    assert [line.split("250 GiB  ")[-1] for line in report.in_words().splitlines()[2:5]] == [
        "1 x A100         10 Tflop/s    1.00 GB/s",
        "1 x H100         9990 Gflop/s  1.00 GB/s",
        "none             2000 Gflop/s  1.00 GB/s",
    ]


def test_json_has_all_of_it() -> None:
    found = json.loads(json.dumps(replace(TWO, findings=[Finding("a", "x", "y", "z", True)]).to_json()))
    assert (found["schema_version"], found["healthy"], found["ranks"]) == (1, False, 4)
    assert found["findings"] == [{"node": "a", "check": "x", "text": "y", "remedy": "z", "is_final": True}]
    assert found["nodes"][0]["rooms"]["TMPDIR"]["path"] == "/tmp"
    assert found["ways"][1] == {"source": "b", "target": "a", "bandwidth": 1e10}
    assert TWO.to_json()["healthy"]
