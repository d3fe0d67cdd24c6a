"""The doctor on each rank of a job: `--doctor` launches this as it launches any training. Begin at `main`,
which has the order in which ranks measure.

Their reports meet on rank 0 as JSON in torch's store: nothing here unpickles what came over a network.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from entrypoint.doctor import fabric, facts, judge, preflight, probes
from entrypoint.doctor.facts import NodeFacts
from entrypoint.doctor.judge import FarGpu, Finding, GpuSpeed, Speed, Way
from entrypoint.doctor.table import Report
from entrypoint.meet.hub import CLOCKS
from entrypoint.plan.profile import Profile, load
from entrypoint.schedulers.known import cores_beside_gpus


def main(argv: Sequence[str]) -> int:
    """One rank's part; on rank 0 the report. 0: healthy, 1: not."""
    parser = argparse.ArgumentParser(prog="apptrain run --doctor --", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args(argv).json
    began = time.monotonic()
    device = torch.device("cpu")
    if os.environ["APPTRAIN_DEVICE"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store, rank, world = next(rendezvous("env://"))
    mine = _of_rank(rank, os.environ["APPTRAIN_NODE"], device, os.environ)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        device_id=device if on_gpu else None,
    )
    try:
        report = _examine(store, mine, device, began)
    finally:
        dist.destroy_process_group()
    if report is None:
        return 0
    print(json.dumps(report.to_json(), indent=2) if as_json else report.in_words(), flush=True)
    if report.findings:
        print(f"doctor: {report.verdict}, the first on {report.findings[0].node}", file=sys.stderr)
    return int(bool(report.findings))


def _of_rank(rank: int, node: str, device: torch.device, env: Mapping[str, str]) -> dict[str, Any]:
    """What a rank tells of its node and its GPU, before any rank measures."""
    gpu, far, local_rank = None, [], int(env["LOCAL_RANK"])
    if device.type == "cuda":
        gpu = asdict(probes.gpu(rank, node, device))
        far = [asdict(one) for one in probes.far_gpu(node, local_rank, device)]
    found = None
    if local_rank == 0:
        folders = preflight.folders(env["APPTRAIN_RUN_DIR"], device.type, env)
        found = asdict(facts.gather(node, folders, env.get("APPTRAIN_FABRIC", ""), env))
    # --numa-binding narrows the rank's cores, and not those of what has started it.
    granted = os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())
    return {"rank": rank, "node": node, "gpu": gpu, "far": far, "cores": sorted(granted), "facts": found}


def _examine(store: probes.Store, mine: dict[str, Any], device: torch.device, began: float) -> Report | None:
    """All that is measured, in one order on all ranks; on rank 0 the report."""
    _tell(store, "node", mine["node"])
    nodes_of = _told(store, "node")
    firsts = {nodes_of.index(node): node for node in dict.fromkeys(nodes_of)}
    compute = probes.settled(probes.compute(device), nodes_of, device)
    copied = probes.settled(probes.copy(device), nodes_of, device)
    speed = Speed(rank=mine["rank"], node=mine["node"], compute=compute, memory=copied)
    clocks = probes.clocks(store, firsts)
    collectives = probes.collectives(device)
    ways = probes.ways(device, firsts)
    _tell(
        store,
        "report",
        mine | {"speed": asdict(speed), "ways": [asdict(way) for way in ways]} | _network(mine),
    )
    if mine["rank"]:
        return None
    reports = _told(store, "report")
    site = load(os.environ["APPTRAIN_PROFILE"]) if os.environ.get("APPTRAIN_PROFILE") else Profile()
    granted = {node: set[int]() for node in firsts.values()}
    for one in reports:
        granted[one["node"]] |= {*one["cores"]}
    nodes = [
        NodeFacts.from_json({**one["facts"], "cpus": len(granted[one["node"]])})
        for one in reports
        if one["facts"]
    ]
    speeds = [Speed(**one["speed"]) for one in reports]
    gpus = [GpuSpeed(**one["gpu"]) for one in reports if one["gpu"]]
    far = [FarGpu(**gpu) for one in reports for gpu in one["far"]]
    scheduler = os.environ.get("APPTRAIN_SCHEDULER", "")  # --doctor sets it; a script may call this, too
    one_task = "TORCHELASTIC_RUN_ID" in os.environ  # which torchrun sets: it starts all ranks of a node
    all_ways = [Way(**way) for one in reports for way in one["ways"]]
    wanted = os.environ.get("APPTRAIN_FABRIC", "")
    findings: list[Finding] = [
        *(finding for one in nodes for finding in judge.of_facts(one, site, wanted)),
        *(finding for gpu in gpus for finding in judge.of_gpu(gpu)),
        *judge.of_granted(gpus, site),
        *judge.of_rank_cores(far, cores_beside_gpus(scheduler, one_task=one_task)),
        *judge.of_clocks(clocks, mine["node"], CLOCKS),
        *judge.of_differences(nodes, speeds, all_ways),
        *(Finding(**finding) for one in reports for finding in one["misused"]),
    ]
    return Report(
        nodes=nodes,
        findings=findings,
        seconds=time.monotonic() - began,
        ranks=len(reports),
        transport=_transport(reports, nodes[0]),
        clocks=clocks,
        speeds=speeds,
        gpus=gpus,
        collectives=collectives,
        ways=all_ways,
    )


def _tell(store: probes.Store, what: str, mine: object) -> None:
    store.set(f"{what}/{dist.get_rank()}", json.dumps(mine))


def _told(store: probes.Store, what: str) -> list[Any]:
    """What each rank has told, by rank."""
    return [json.loads(store.get(f"{what}/{rank}")) for rank in range(dist.get_world_size())]


def _network(mine: Mapping[str, Any]) -> dict[str, Any]:
    """What NCCL has taken on this node, by its own log, and what is wrong with that; empty without NCCL, and
    where its log is the user's."""
    log = Path(os.environ.get(fabric.FILE, ""))
    if mine["facts"] is None or log.name != fabric.NAME:
        return {"network": "", "misused": []}
    logs = fabric.networks(log.parent)
    wanted = os.environ.get("APPTRAIN_FABRIC", "")
    found = [fabric.objection(text, wanted, mine["node"]) for text in logs[:1]]
    return {
        "network": "".join(map(fabric.network, logs[:1])),
        "misused": [asdict(one) for one in found if one],
    }


def _transport(reports: Sequence[Mapping[str, Any]], first: NodeFacts) -> str:
    if not reports[0]["gpu"]:
        return f"gloo on {first.interface}"
    networks = dict.fromkeys(one["network"] for one in reports if one["network"])
    return f"NCCL over {' and '.join(networks) or 'what its log does not say'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
