"""What becomes of ranks, as torchrun's agent tells it. A program that tells what a test wants stands for it."""

import asyncio
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from entrypoint.cli import main as cli
from entrypoint.core.errors import BAD_INPUT, UNAVAILABLE, BadInput
from entrypoint.doctor import fabric
from entrypoint.job.rundir import RunDirectory
from entrypoint.node import gpu
from entrypoint.plan.launch_plan import LaunchPlan, with_local_addr
from entrypoint.plan.origin import DEFAULT, FLAG, ValueSource
from entrypoint.plan.resolve import resolve
from entrypoint.ranks import ranks as ranks_module
from entrypoint.ranks.output import Relay, own_consoles
from entrypoint.ranks.ranks import AgentEnded, Event, NetworkSeen, RankEnded, Ranks, RankStarted, Readiness
from tests.ports import free_port
from tests.unit.scene import planned

AGENT = """#!/bin/bash
read -r order
cat "$0.says" >&"$3"
"""


AT = "127.0.0.2"


def hosting(folder: Path, port: int, fabric: str = "") -> tuple[Ranks, Relay]:
    """Of a node that has torch's store, on this port."""
    plan = with_local_addr(planned(), AT)
    rendezvous = dataclasses.replace(plan.rendezvous, is_host=True, backend="static", master_port=port)
    plan = dataclasses.replace(plan, start_ranks="spawn", rendezvous=rendezvous)
    run = RunDirectory(folder / "run", 0)
    run.create()
    relay = Relay(own_consoles({}))
    ranks = Ranks(plan, os.environ, relay, run, scratch=folder, show=None, fabric=fabric)
    relay.start()
    return ranks, relay


async def tell(folder: Path, reports: Sequence[dict[str, Any]]) -> tuple[list[Event], list[int]]:
    """What becomes of the ranks of which an agent reports this, and which processes are left."""
    program = folder / "agent"
    program.write_text(AGENT)
    program.chmod(0o700)
    Path(f"{program}.says").write_text("".join(json.dumps(report) + "\n" for report in reports))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        ranks, relay = hosting(folder, 0)
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
        monkeypatch.setattr(sys, "executable", str(program))
        ranks, relay = hosting(tmp_path, 0, fabric=asked)
        await ranks.prepare()
        await ranks.start()
        await asyncio.sleep(0.1)
        found = [ranks.events.get_nowait() for _ in range(ranks.events.qsize())]
        await ranks.kill()
        relay.finish(5, 5)
        return found

    assert asyncio.run(go()) == events


def test_torchs_store_can_be_reached_before_any_node_starts_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, port = tmp_path / "agent", free_port(AT)
    program.write_text(f"#!{sys.executable}\nimport json, os\n{TELLS}")
    program.chmod(0o700)

    async def go() -> list[Event]:
        monkeypatch.setattr(sys, "executable", str(program))
        ranks, relay = hosting(tmp_path, port)
        await ranks.prepare()
        with socket.create_connection((AT, port), timeout=5):
            pass
        async with asyncio.timeout(30):
            event = await ranks.events.get()
        await ranks.kill()
        relay.finish(5, 5)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((AT, port), timeout=5)
        return [event]

    assert asyncio.run(go()) == [AgentEnded(error=f"('{AT}', {port})")]


TELLS = """\
import socket, sys
store = socket.socket(fileno=json.loads(sys.stdin.readline())["store"])
said = {"event": "finished", "error": str(store.getsockname()), "unavailable": False}
os.write(int(sys.argv[-1]), json.dumps(said).encode() + b"\\n")
sys.stdin.read()
"""
"""Has the socket, and keeps it until it is ended."""


def test_a_port_that_was_taken_meanwhile_ends_the_attempt_before_torch_is_imported(tmp_path: Path) -> None:
    async def go(port: int) -> list[Event]:
        ranks, relay = hosting(tmp_path, port)
        await ranks.prepare()
        assert await ranks.ready() == Readiness()
        await ranks.start()
        await ranks.kill()
        relay.finish(5, 5)
        return [ranks.events.get_nowait() for _ in range(ranks.events.qsize())]

    with socket.create_server((AT, free_port(AT))) as stranger:
        port = stranger.getsockname()[1]
        (event,) = asyncio.run(go(port))
    text = f"torch's store cannot listen on {AT}, port {port}: Address already in use: give --master-addr"
    assert event == AgentEnded(error=text, status=UNAVAILABLE)


def of_one_node(*options: str, command: Sequence[str]) -> LaunchPlan:
    """Of a job of one node."""
    env = {
        "APPTRAIN_EMBEDDED_JOB_ID": "7",
        "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.1",
        "PATH": os.environ["PATH"],
    }
    given = vars(cli.parser().parse_args(["launch", "--device", "cpu", *options]))
    given.pop("command_name")
    return resolve(env | {"APPTRAIN_EMBEDDED_NODENAME": "127.0.0.1"}, given, list(command), hostname=None)[0]


async def run_command(folder: Path, *command: str, no_python: bool) -> tuple[list[Event], Path]:
    """What becomes of a CMD in mode `exec`, and its log."""
    run = RunDirectory(folder / "run", 0)
    run.create()
    relay = Relay(own_consoles({}))
    options = ["--mode", "exec", *(["--no-python"] if no_python else [])]
    plan = of_one_node(*options, command=command)
    ranks = Ranks(plan, os.environ, relay, run, scratch=folder, show=set())
    relay.start()
    await ranks.prepare()
    assert await ranks.ready() == Readiness()
    await ranks.start()
    found: list[Event] = []
    async with asyncio.timeout(30):
        while not found or not isinstance(found[-1], AgentEnded):
            found.append(await ranks.events.get())
    await ranks.kill()
    relay.finish(5, 5)
    return found, run.log(plan.node, "rank0", "out")


@pytest.mark.parametrize(
    ("mode", "status", "why"), [(None, 127, "No such file or directory"), (0o600, 126, "Permission denied")]
)
def test_a_program_that_cannot_be_started_has_a_shells_status(
    mode: int | None, status: int, why: str, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    if mode is not None:
        program.touch(mode)
    found, _ = asyncio.run(run_command(tmp_path, str(program), no_python=True))
    rank, agent = found
    assert isinstance(rank, RankEnded)
    assert (rank.rank, rank.status, rank.signal) == (0, status, 0)
    assert agent == AgentEnded(error=f"{program} cannot be started: {why}")


@pytest.mark.parametrize(
    ("script", "status", "signum"), [("exit 3", 3, 0), ("kill -9 $$", 137, 9), ("exit 0", 0, 0)]
)
def test_how_a_program_ended_is_told(script: str, status: int, signum: int, tmp_path: Path) -> None:
    (rank, agent), _ = asyncio.run(run_command(tmp_path, "sh", "-c", script, no_python=True))
    assert isinstance(rank, RankEnded)
    assert (rank.rank, rank.status, rank.signal, agent) == (0, status, signum, AgentEnded())


def test_a_script_runs_under_this_python_whatever_the_plan_calls_it(tmp_path: Path) -> None:
    says = "import sys; print(sys.executable, sys.argv)"
    _, log = asyncio.run(run_command(tmp_path, "-c", says, "a b", no_python=False))
    assert log.read_text() == f"{sys.executable} ['-c', 'a b']\n"


@pytest.mark.parametrize(
    ("why", "asked", "told"),
    [
        ("", "fork", ""),
        (
            "x.py, line 3: it binds itself to CPUs",
            "auto",
            "each rank imports torch for itself: x.py, line 3: it binds",
        ),
        ("x.py is no file", "fork", "--start-ranks fork, but x.py is no file: leave it out"),
        ("--preload a: no module: correct it", "auto", "--preload a: no module: correct it"),
    ],
)
def test_ranks_that_cannot_be_forks_are_told_or_refused_if_that_was_asked_for(
    why: str, asked: str, told: str, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run", 0)
    run.create()
    plan = of_one_node("--preload=a", command=["x.py"])
    ranks = Ranks(plan, {}, Relay(own_consoles({})), run, scratch=tmp_path, show=None)
    try:
        said = ranks.not_forked(Readiness(why_spawned=why), asked)
    except BadInput as refused:
        said = str(refused)
        assert asked == "fork" or why.startswith("--preload")
    assert said.startswith(told)
    ranks.close_pipes()


@pytest.mark.parametrize(
    ("does", "gpus"),
    [
        ("printf '2\\n' >\"$4\"", 2),
        ("printf '0\\n' >\"$4\"", 0),
        ('printf 2 >"$4"', None),  # it was cut off
        ("exit 1", None),
        ("exec sleep 50", None),
        ("", None),  # and may not be started
    ],
)
def test_how_many_gpus_torch_sees_is_asked_before_a_program_begins(
    does: str, gpus: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, which may hang."""
    monkeypatch.setattr(ranks_module, "COUNT", 1.0)
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program if does else tmp_path / "none"))
    (tmp_path / "gpus").write_text("9\n")  # of an attempt before

    async def go() -> Readiness:
        run = RunDirectory(tmp_path / "run", 0)
        run.create()
        plan = dataclasses.replace(
            of_one_node("--mode", "exec", "--no-python", command=["true"]), device="cuda"
        )
        ranks = Ranks(plan, {}, Relay(own_consoles({})), run, scratch=tmp_path, show=None)
        await ranks.prepare()
        async with asyncio.timeout(30):
            found = await ranks.ready()
        ranks.close_pipes()
        return found

    assert asyncio.run(go()) == Readiness(gpus=gpus)


@pytest.mark.parametrize(
    ("device", "source", "driver", "counts"),
    [
        ("cuda", FLAG, False, True),
        ("cpu", FLAG, True, False),
        ("cpu", DEFAULT, True, True),  # somebody may have forgotten to choose
        ("cpu", DEFAULT, False, False),
    ],
)
def test_the_agent_counts_gpus_where_somebody_needs_to_know(
    device: Literal["cpu", "cuda"],
    source: ValueSource,
    driver: bool,
    counts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nhead -n 1 >{tmp_path}/order\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(gpu, "can_be_there", lambda: driver)

    async def go() -> None:
        run = RunDirectory(tmp_path / "run", 0)
        run.create()
        plan = of_one_node("--master-port", str(free_port()), command=["x.py"])
        plan = dataclasses.replace(plan, device=device, sources={**plan.sources, "device": source})
        ranks = Ranks(plan, dict(os.environ), Relay(own_consoles({})), run, scratch=tmp_path, show=None)
        await ranks.prepare()
        assert await ranks.wait(30)
        await ranks.kill()

    asyncio.run(go())
    assert json.loads((tmp_path / "order").read_text())["counts_gpus"] is counts


def test_a_spare_has_no_ranks_and_is_ready_at_once(tmp_path: Path) -> None:
    async def go() -> tuple[list[int], Readiness, bool]:
        run = RunDirectory(tmp_path / "run", 0)
        run.create()
        plan = planned()
        spare = dataclasses.replace(plan, allocation=dataclasses.replace(plan.allocation, node_rank=0))
        assert spare.is_spare
        ranks = Ranks(
            spare, {}, Relay(own_consoles({})), run, scratch=tmp_path, show=None, fabric="infiniband"
        )
        await ranks.prepare()
        ready = await ranks.ready()
        await ranks.start()
        return ranks.ranks, ready, ranks.events.empty()

    assert asyncio.run(go()) == ([], Readiness(), True)
