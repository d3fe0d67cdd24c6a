"""What one attempt on a node tells the meeting of the nodes, and how it ends before any rank has started."""

import asyncio
import errno
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from entrypoint.cli import main as cli
from entrypoint.core.errors import BadInput, Unavailable
from entrypoint.job import outcome
from entrypoint.job.lock import InUse
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.meet import join
from entrypoint.meet.identity import Identity
from entrypoint.meet.terms import LocalNode
from entrypoint.plan.resolve import resolve
from entrypoint.ranks.output import Voice, own_consoles
from entrypoint.ranks.ranks import Ranks
from entrypoint.run.attempt import Attempt
from entrypoint.run.finished import FinishedAttempt
from entrypoint.run.given import Given
from entrypoint.run.hold import RunDirHold
from entrypoint.run.signals import Signals
from tests.ports import free_port

JOB = {"APPTRAIN_EMBEDDED_JOB_ID": "7", "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.[1-2]"}


class Full:
    """What is to hold a run directory that takes nothing more."""

    async def take(self, *, is_restart: bool) -> None:
        assert not is_restart
        raise OSError(errno.ENOSPC, "No space left on device", "lock")


class SignalledAttempt(Attempt):
    """One that signals may come to."""

    def __init__(self, given: Given) -> None:
        self.signals = Signals()
        hold: Any = Full()
        super().__init__(given, self.signals, hold, own_consoles({}))


class Free:
    """What is to hold a run directory that nobody else has."""

    async def take(self, *, is_restart: bool) -> None:
        pass


def attempt(
    run_dir: Path, counted: dict[str, str], *more: str, node: int = 1, before: FinishedAttempt | None = None
) -> SignalledAttempt:
    """Of one of two nodes, of which the first is to hold a run directory that takes nothing more."""
    env = JOB | {"APPTRAIN_EMBEDDED_NODENAME": f"127.0.0.{1 + node}"} | counted
    words = ["launch", "--mode", "exec", "--no-python", "--device", "cpu", "--run-dir", str(run_dir), *more]
    given = vars(cli.parser().parse_args(words))
    given.pop("command_name")
    plan, settings = resolve(env, given, ["true"], hostname=None)
    return SignalledAttempt(replace(Given.of_launch(plan, settings, env), before=before))


def where_node_0_waits(one: SignalledAttempt, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """As the meeting is told it."""
    found = []

    async def meet(*_: object, local: LocalNode, **__: Any) -> None:
        found.append(local.begun())
        raise Unavailable("some-cause", "nobody came")

    monkeypatch.setattr(join, "meet", meet)
    assert str(asyncio.run(one.run()).refusal) == "nobody came"
    return found[0]


def test_where_node_0_waits_is_read_from_its_plan_unless_that_may_be_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.0.json").write_text(
        json.dumps({"attempt": 0, "rendezvous": {"local_addr": "127.0.0.9"}})
    )
    counted = {"APPTRAIN_ATTEMPT": "0"}
    assert where_node_0_waits(attempt(tmp_path, counted), monkeypatch) == "127.0.0.9"
    assert where_node_0_waits(attempt(tmp_path, {}), monkeypatch) is None
    before = asyncio.run(attempt(tmp_path, counted).run())
    again = attempt(tmp_path, counted, before=before)
    assert where_node_0_waits(again, monkeypatch) is None


@pytest.mark.parametrize(
    ("number", "counted", "noted"), [(0, {}, True), (1, {}, False), (0, {"APPTRAIN_ATTEMPT": "0"}, False)]
)
def test_where_nobody_counts_attempts_the_first_of_them_is_noted(
    tmp_path: Path, number: int, counted: dict[str, str], noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1: Slurm runs a script of the user's again."""
    one = attempt(tmp_path, counted, node=0)
    one._given = replace(one._given, plan=replace(one._given.plan, attempt=number))
    monkeypatch.setattr(one, "_hold", Free())
    signalled_while_meeting(one, signal.SIGTERM, monkeypatch)
    assert (tmp_path / "first-attempt").exists() == noted


def test_a_file_system_that_fails_is_the_outcome_of_the_node(tmp_path: Path) -> None:
    ended = asyncio.run(attempt(tmp_path, {}, node=0).run()).outcome
    written = outcome.read(tmp_path / "outcome" / "0.0")
    assert written is not None
    for one in (ended, written):
        assert (one.status, one.node, one.error) == (1, "127.0.0.1", "No space left on device: lock")


def signalled_while_meeting(
    one: SignalledAttempt, signum: int, monkeypatch: pytest.MonkeyPatch
) -> FinishedAttempt:
    """How it ends if this signal comes then, and the others do not."""

    async def meet(*_: object, **__: Any) -> None:
        one.signals.take(signum)
        await asyncio.sleep(2.0)
        raise Unavailable("some-cause", "nobody came")

    monkeypatch.setattr(join, "meet", meet)
    return asyncio.run(one.run())


def test_a_stop_that_comes_while_the_nodes_meet_is_kept_for_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attempt(tmp_path, {})
    assert str(signalled_while_meeting(one, signal.SIGUSR2, monkeypatch).refusal) == "nobody came"
    deadline = time.monotonic() + 30
    while not (tmp_path / "stop").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "stop").exists()


def test_a_stop_that_comes_before_there_is_a_run_directory_is_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    one = attempt(run_dir, {})
    create = RunDirectory.create

    def slowly(self: RunDirectory) -> tuple[int, int] | None:
        loop.call_soon_threadsafe(one.signals.take, signal.SIGUSR2)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), loop).result(30)  # it is taken meanwhile
        return create(self)

    async def meet(*_: object, **__: Any) -> None:
        while not (run_dir / "stop").exists():
            await asyncio.sleep(0.01)
        raise Unavailable("some-cause", "asked to stop")

    monkeypatch.setattr(RunDirectory, "create", slowly)
    monkeypatch.setattr(join, "meet", meet)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        ended = runner.run(asyncio.wait_for(one.run(), 30))
    assert str(ended.refusal) == "asked to stop"


@pytest.mark.parametrize("is_asked", [True, False])
def test_only_a_wish_to_stop_from_before_the_launch_is_forgotten(
    is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of this attempt's logs tells everybody that it has begun."""

    class Asked:
        async def take(self, *, is_restart: bool) -> None:
            assert not is_restart
            assert (tmp_path / "logs/0").is_dir()
            if is_asked:
                (tmp_path / "stop").touch()

    (tmp_path / "stop").touch()
    os.utime(tmp_path / "stop", (1, 1))  # a file system's clock may tick 100 times a second
    one = attempt(tmp_path, {}, node=0)
    monkeypatch.setattr(one, "_hold", Asked())
    signalled_while_meeting(one, signal.SIGTERM, monkeypatch)
    assert (tmp_path / "stop").exists() == is_asked


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_comes_while_the_nodes_meet_ends_this_one_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int, status: int
) -> None:
    ended = signalled_while_meeting(attempt(tmp_path, {}), signum, monkeypatch)
    assert (ended.outcome.status, ended.outcome.signal, ended.refusal) == (status, signum, None)


def alone(run_dir: Path, *command: str) -> tuple[FinishedAttempt, list[dict[str, Any]]]:
    """How an attempt with this command on the one node of a job ends, and the attempts of its manifest."""
    env = {"APPTRAIN_EMBEDDED_JOB_ID": "7", "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.1"}
    env |= {"APPTRAIN_EMBEDDED_NODENAME": "127.0.0.1", "PATH": os.environ["PATH"]}
    words = ["launch", "--mode", "exec", "--no-python", "--device", "cpu", "--run-dir", str(run_dir)]
    words += ["--master-port", str(free_port())]  # the job number's may be another test's
    given = vars(cli.parser().parse_args(words))
    given.pop("command_name")
    plan, settings = resolve(env, given, list(command), hostname=None)
    hold: Any = Free()
    consoles = own_consoles({})
    ended = asyncio.run(Attempt(Given.of_launch(plan, settings, env), Signals(), hold, consoles).run())
    consoles["err"].flush(10)
    manifest = run_dir / "manifest.json"
    return ended, json.loads(manifest.read_text())["attempts"] if manifest.exists() else []


def test_an_attempt_records_the_parts_of_its_start_and_how_it_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended, (recorded,) = alone(tmp_path, "sh", "-c", "exit 7")
    assert (ended.outcome.status, ended.is_unwritten, ended.has_met) == (7, False, True)
    assert list(recorded["start"]) == ["task", "plan", "nodes", "torch", "ranks"]
    assert recorded["status"] == 7
    written = outcome.read(tmp_path / "outcome" / "0.0")
    assert written is not None
    assert (written.status, written.node) == (7, "127.0.0.1")
    assert "apptrain: the ranks started after " in "".join(capfd.readouterr())


@pytest.mark.parametrize("on_failure", ["stop", "restart"])
def test_a_node_of_a_job_that_may_restart_notes_whose_run_directory_it_is(
    tmp_path: Path, on_failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, lock = attempt(tmp_path, {"PATH": os.environ["PATH"]}, "--on-failure", on_failure), Mock()
    monkeypatch.setattr(one, "_hold", RunDirHold(lock, one._voice, one.signals))

    async def meet(me: Identity, *_: object, **__: Any) -> Mock:
        return Mock(members=tuple(range(me.nnodes)), moved="", findings={}, elsewhere={}, close=AsyncMock())

    async def start(_: Ranks) -> None:
        raise OSError(errno.EIO, "no rank starts")

    monkeypatch.setattr(join, "meet", meet)
    monkeypatch.setattr(Ranks, "start", start)
    assert asyncio.run(one.run()).outcome.error.startswith("no rank starts: ")
    assert [call[0] for call in lock.method_calls] == ["note_holder"] * (on_failure == "restart")


def test_a_job_whose_run_directory_another_has_taken_ends(capfd: pytest.CaptureFixture[str]) -> None:
    signals, consoles = Signals(), own_consoles({})
    lock = Mock(is_held=False)
    lock.keep.return_value = "it was taken by job 8"

    async def take() -> int:
        await RunDirHold(lock, Voice(console=consoles["err"]), signals).take(is_restart=False)
        return (await asyncio.wait_for(signals.next(), 10)).signum

    assert asyncio.run(take()) == signals.end == signal.SIGTERM
    consoles["err"].flush(10)
    assert capfd.readouterr().err == "apptrain: it was taken by job 8: this job ends\n"


def test_a_run_directory_that_is_removed_while_the_job_runs_is_said_to_be_gone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    ended, recorded = alone(run_dir, "rm", "-rf", str(run_dir))
    assert (ended.outcome.status, recorded) == (0, [])
    assert f"the run directory {run_dir} was removed while the job ran" in "".join(capfd.readouterr())


def test_a_run_directory_that_cannot_be_made_is_the_refusal(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = asyncio.run(attempt(tmp_path / "file" / "run", {}).run())
    assert isinstance(ended.refusal, BadInput)
    assert str(ended.refusal).startswith(
        f"the run directory {tmp_path}/file/run cannot be written (Not a directory)"
    )
    assert (ended.outcome.status, ended.outcome.error, ended.has_met) == (64, str(ended.refusal), False)


def test_a_signal_ends_the_wait_for_a_file_system_that_makes_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls = threading.Event()

    def stall(_: RunDirectory) -> None:
        stalls.wait(60)

    monkeypatch.setattr(RunDirectory, "create", stall)
    one = attempt(tmp_path / "run", {}, node=0)

    async def go() -> FinishedAttempt:
        asyncio.get_running_loop().call_later(0.1, one._signals.take, signal.SIGTERM)
        return await asyncio.wait_for(one.run(), 30)

    try:
        ended = asyncio.run(go())
    finally:
        stalls.set()
    assert (ended.outcome.signal, ended.refusal, ended.has_met) == (signal.SIGTERM, None, False)
    assert not (tmp_path / "run").exists()


def test_a_signal_ends_the_wait_for_a_file_system_that_opens_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, ended, late = attempt(tmp_path, {}), threading.Event(), threading.Event()

    async def go() -> FinishedAttempt:
        loop = asyncio.get_running_loop()

        def stall(*_: object, **__: object) -> None:
            loop.call_soon_threadsafe(one.signals.take, signal.SIGTERM)
            if not ended.wait(30):
                late.set()

        monkeypatch.setattr("entrypoint.run.attempt.Ranks", stall)
        return await one.run()

    assert (asyncio.run(go()).outcome.signal, late.is_set()) == (signal.SIGTERM, False)
    ended.set()


def test_a_run_directory_that_is_gone_before_a_restart_is_the_refusal(tmp_path: Path) -> None:
    before = asyncio.run(attempt(tmp_path / "run", {}, node=0).run())
    shutil.rmtree(tmp_path / "run")
    ended = asyncio.run(attempt(tmp_path / "run", {}, node=0, before=before).run())
    assert str(ended.refusal) == f"the run directory {tmp_path}/run is gone"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_restart", [True, False])
def test_a_restart_that_does_not_come_about_leaves_no_logs(
    is_restart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def meet(*_: object, **__: object) -> None:
        (tmp_path / "logs" / "1" / "127.0.0.2.rank1.err").write_text("a warning\n")
        raise Unavailable("some-cause", "nobody came")

    monkeypatch.setattr(join, "meet", meet)
    before = asyncio.run(attempt(tmp_path, {"APPTRAIN_ATTEMPT": "0"}, node=0).run()) if is_restart else None
    assert str(asyncio.run(attempt(tmp_path, {"APPTRAIN_ATTEMPT": "1"}, before=before).run()).refusal)
    assert (tmp_path / "logs" / "1").exists() != is_restart


class Taken:
    """What is to hold a run directory that another job has."""

    async def take(self, *, is_restart: bool) -> None:
        assert not is_restart
        raise InUse("run-dir-in-use", "it is in use by job 8")


@pytest.mark.parametrize(("counted", "is_written"), [({}, False), ({"APPTRAIN_ATTEMPT": "0"}, True)])
def test_in_another_jobs_run_directory_an_outcome_is_written_only_if_it_cannot_be_taken_for_that_jobs(
    counted: dict[str, str], is_written: bool, tmp_path: Path
) -> None:
    one = attempt(tmp_path, counted, node=0)
    hold: Any = Taken()
    one._hold = hold
    ended = asyncio.run(one.run())
    assert str(ended.refusal) == "it is in use by job 8"
    assert (ended.outcome.status, ended.has_met, ended.is_unwritten) == (64, False, False)
    assert (outcome.read(tmp_path / "outcome" / "0.0") is not None) == is_written


def test_an_outcome_that_cannot_be_written_is_said_and_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(outcome, "write", refuse)
    ended, _ = alone(tmp_path, "sh", "-c", "exit 7")
    assert (ended.outcome.status, ended.is_unwritten) == (7, True)
    said = "".join(capfd.readouterr())
    assert "apptrain: the outcome (status 7) cannot be written: [Errno 122] Disk quota exceeded" in said


def test_an_attempt_begins_without_what_an_earlier_launch_by_hand_has_left(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 0)
    run.create()
    run.ask_to_stop()
    run.claim([(0, "other")], exclusive=False)
    run.add_restart()
    outcome.write(run.outcome(0, None), Outcome(status=9))
    ended, (recorded,) = alone(tmp_path, "true")
    assert (ended.outcome.status, recorded["status"]) == (0, 0)
    assert (run.stop.exists(), run.crew(), run.restarts()) == (False, None, [])
    written = outcome.read(run.outcome(0, None))
    assert written is not None
    assert written.status == 0
    assert [path.name for path in (tmp_path / "outcome").iterdir()] == ["0.0"]
