"""What becomes of ranks, as torchrun's agent tells it. A program that tells what a test wants stands for it."""

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import BAD_INPUT
from entrypoint.doctor import fabric
from entrypoint.job.rundir import RunDirectory
from entrypoint.ranks.output import Relay, own_consoles
from entrypoint.ranks.ranks import AgentEnded, Event, NetworkSeen, RankEnded, Ranks, RankStarted
from tests.unit.scene import planned

AGENT = """#!/bin/bash
read -r order
cat "$0.says" >&"$3"
"""


async def tell(folder: Path, reports: Sequence[dict[str, Any]]) -> tuple[list[Event], list[int]]:
    """What becomes of the ranks of which an agent reports this, and which processes are left."""
    program = folder / "agent"
    program.write_text(AGENT)
    program.chmod(0o700)
    Path(f"{program}.says").write_text("".join(json.dumps(report) + "\n" for report in reports))
    run = RunDirectory(folder / "run", 0)
    run.create()
    relay = Relay(own_consoles({}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        plan = dataclasses.replace(planned(), start_ranks="spawn")
        ranks = Ranks(plan, os.environ, relay, run, scratch=folder, show=None)
        relay.start()
        await ranks.prepare()
        found: list[Event] = []
        async with asyncio.timeout(30):
            while not found or not isinstance(found[-1], AgentEnded):
                found.append(await ranks.events.get())
        left = ranks.alive()
        await ranks.wait(30)
    relay.finish(5, 5)
    return found, left


def started(rank: int, pid: int) -> dict[str, Any]:
    return {"event": "started", "rank": rank, "local_rank": rank, "pid": pid}


def ended(rank: int, status: int) -> dict[str, Any]:
    return {"event": "ended", "rank": rank, "status": status, "signal": 0, "time": 1000.0}


FINISHED = {"event": "finished", "error": "", "unavailable": False}


def test_a_rank_that_was_started_again_ends_again(tmp_path: Path) -> None:
    reports = [started(0, 5_000_001), ended(0, 9), started(0, 5_000_002), ended(0, 139), FINISHED]
    found, left = asyncio.run(tell(tmp_path, reports))
    assert found == [
        RankStarted(rank=0),
        RankEnded(rank=0, status=9, signal=0, time=1000.0),
        RankStarted(rank=0),
        RankEnded(rank=0, status=139, signal=0, time=1000.0),
        AgentEnded(),
    ]
    assert left == []


def test_what_was_started_and_has_not_ended_since_is_left(tmp_path: Path) -> None:
    mine = os.getpid()
    reports = [started(0, mine), started(1, mine), ended(0, 9), ended(1, 9), started(1, mine)]
    _, left = asyncio.run(tell(tmp_path, reports))
    assert left == [mine]


def test_an_agent_that_ends_before_it_has_told_all_is_the_error(tmp_path: Path) -> None:
    found, _ = asyncio.run(tell(tmp_path, []))
    assert found == [AgentEnded(error="torchrun's agent ended with status 0")]


@pytest.mark.parametrize(
    ("asked", "why", "events"),
    [
        ("", "not looked at", []),
        ("infiniband", "", [NetworkSeen(network="IB")]),
        (
            "infiniband",
            "NCCL uses Socket",
            [NetworkSeen(network="IB"), AgentEnded(error="NCCL uses Socket", status=BAD_INPUT)],
        ),
    ],
)
def test_ranks_that_have_to_prove_their_network_do_and_others_need_not(
    asked: str, why: str, events: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks wait; what NCCL's log says is made up."""

    async def watch(scratch: Path, wanted: str, ranks: int) -> str:
        assert (scratch, wanted, ranks) == (tmp_path, "infiniband", 2)
        return why

    monkeypatch.setattr(fabric, "watch", watch)
    monkeypatch.setattr(fabric, "networks", lambda _: ["a log"])
    monkeypatch.setattr(fabric, "network", lambda _: "IB")

    async def go() -> list[Event]:
        program = tmp_path / "agent"
        program.write_text("#!/bin/bash\nexec sleep 60\n")
        program.chmod(0o700)
        run = RunDirectory(tmp_path / "run", 0)
        run.create()
        relay = Relay(own_consoles({}))
        monkeypatch.setattr(sys, "executable", str(program))
        plan = dataclasses.replace(planned(), start_ranks="spawn")
        ranks = Ranks(plan, os.environ, relay, run, scratch=tmp_path, show=None, fabric=asked)
        relay.start()
        await ranks.prepare()
        await ranks.start()
        await asyncio.sleep(0.1)
        found = [ranks.events.get_nowait() for _ in range(ranks.events.qsize())]
        await ranks.kill()
        relay.finish(5, 5)
        return found

    assert asyncio.run(go()) == events
