"""A launch on one node: which signals it heeds, what it refuses, and its last word to the host half."""

import asyncio
import dataclasses
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from entrypoint import batch, report
from entrypoint.batch import conclude
from entrypoint.cli import main as cli
from entrypoint.core.errors import BadInput, Unavailable
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.node import processes
from entrypoint.plan.launch_plan import with_members
from entrypoint.plan.resolve import resolve
from entrypoint.run import launch
from entrypoint.run.finished import FinishedAttempt
from entrypoint.run.given import Given
from entrypoint.run.signals import Signals, handled_signals
from tests.ports import free_port
from tests.unit.scene import planned


@pytest.fixture(autouse=True)
def signals_stay() -> Iterator[None]:
    """The tests' own handlers are back in place."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("handler", "heeded"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_a_terminal_that_goes_away_ends_a_launch_but_under_nohup(
    handler: signal.Handlers, heeded: bool
) -> None:
    signal.signal(signal.SIGHUP, handler)
    always = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
    assert set(handled_signals()) == always | ({signal.SIGHUP} if heeded else set())


def test_signals_that_were_held_back_come_in_their_order_and_one_that_ends_it_is_known() -> None:
    usual = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in (*usual, signal.SIGINT, signal.SIGHUP)}

    async def go() -> tuple[list[int], int | None]:
        signal.pthread_sigmask(signal.SIG_BLOCK, usual)
        signals = Signals()
        signals.catch()
        found = []
        for number in usual:
            os.kill(os.getpid(), number)
            found.append((await signals.next()).signum)
            assert signals.end == (signal.SIGTERM if number == signal.SIGTERM else None)
        return found, signals.end

    try:
        assert asyncio.run(asyncio.wait_for(go(), 10)) == ([*usual], signal.SIGTERM)
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, usual)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_a_shell_starts_in_the_background_heeds_the_keyboard() -> None:
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    launch._heed_keyboard()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL


def settings() -> Any:
    given = vars(cli.parser().parse_args(["launch", "--nodes", "127.0.0.1", "--node-rank", "0"]))
    return resolve({}, given, ["script.py"], hostname=None)[1]


def test_the_batch_script_of_several_nodes_is_no_task() -> None:
    plan = planned()
    plan = dataclasses.replace(plan, allocation=dataclasses.replace(plan.allocation, context="batch"))
    with pytest.raises(BadInput, match=r"this is the batch script .* on one of its \d nodes only"):
        launch.check(plan)


def test_more_ranks_than_the_launcher_can_read_from_are_refused() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    plan = dataclasses.replace(planned(), nproc_per_node=most // 2 + 1)
    with pytest.raises(BadInput, match=rf"--nproc-per-node \d+: .* may have {most} \(ulimit -Hn\)"):
        launch.check(plan)


@pytest.mark.parametrize(
    "error", [None, OSError(28, "No space left on device"), BadInput("some-cause", "no")]
)
def test_what_the_host_half_cannot_be_told_is_said_and_harms_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception | None,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def leave(*given: Any) -> None:
        calls.append(given)
        if error:
            raise error

    monkeypatch.setattr(conclude, "leave", leave)
    hand = tmp_path / f"apptrain.{os.uname().nodename}.7"
    hand.mkdir()
    plan = dataclasses.replace(planned(), run_dir=str(tmp_path))
    for env in ({}, {"APPTRAIN_HAND": str(hand)}):
        session = launch._Session(plan, settings(), env, None)  # type: ignore[arg-type]  # it starts nothing
        session.signals.take(signal.SIGUSR2)
        session.signals.take(signal.SIGTERM)
        session.leave(None)
        session._consoles["err"].flush(5)
    ((where, attempt, run, place, asked, lost),) = calls
    assert (where, run.path) == (hand, tmp_path)
    assert (attempt, place, asked, lost) == (plan.attempt, plan.place, 143, ())
    told = f"apptrain: what follows is left to the job script: {error}\n"
    assert capfd.readouterr().err == (told if error else "")


def test_modules_that_cannot_be_read_at_the_end_do_not_change_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Days may have passed, and a checkout was changed or a mount has gone meanwhile."""
    for package, name in ((batch, "conclude"), (report, "command")):
        monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", None)
        monkeypatch.delattr(package, name, raising=False)
    hand = tmp_path / f"apptrain.{os.uname().nodename}.7"
    hand.mkdir()
    plan = dataclasses.replace(planned(), run_dir=str(tmp_path))
    session = launch._Session(plan, settings(), {"APPTRAIN_HAND": str(hand)}, None)  # type: ignore[arg-type]
    session.leave(None)
    session._report(Mock())
    session._consoles["err"].flush(5)
    said = capfd.readouterr().err
    assert "what follows is left to the job script: import of entrypoint.batch.conclude halted" in said
    assert "no report of the run was written: import of entrypoint.report.command halted" in said


ENDED = """
import os, subprocess, sys
from entrypoint.cli import main
from entrypoint.run import launch
both = f"kill -USR1 {os.getpid()} && kill -USR2 {os.getpid()}"

def leave(*_):
    line = ["sh", "-c", f"{both}; echo begun; exec >&-; while {both}; do :; done"]
    subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.readline()

launch._Session.leave = leave
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_stop_that_is_asked_for_when_all_has_ended_does_not_change_the_status(tmp_path: Path) -> None:
    """To the last moment of the process, when Python takes its own handlers back."""
    words = ["launch", "--nodes", "localhost", "--node-rank", "0", "--master-port", str(free_port())]
    words += ["--mode", "exec", "--no-python", "--device", "cpu", "--run-dir", str(tmp_path), "--", "true"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", ENDED, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# --- the attempts of a launch -------------------------------------------------------------------------------

CRASH = Outcome(status=9, rank=1, node="127.0.0.2", error="ValueError: x")
DONE = Outcome(status=0)
FAILED_FIRST = "rank 1 on 127.0.0.2 failed first, status 9: ValueError: x (RUN/logs/{}/127.0.0.2.rank1.err)"


class Scripted(launch._Session):
    """A session whose attempts end as a test says."""

    def __init__(self, run_dir: Path, on_failure: str, ends: list[dict[str, Any]], **env: str) -> None:
        env = {
            "APPTRAIN_EMBEDDED_JOB_ID": "7",
            "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.[1-3]",
            "APPTRAIN_EMBEDDED_NODENAME": "127.0.0.1",
            **env,
        }
        words = ["launch", "--device", "cpu", "--run-dir", str(run_dir), "--on-failure", on_failure]
        given = vars(
            cli.parser().parse_args([*words, "--nnodes", "2:3"] if on_failure == "restart" else words)
        )
        given.pop("command_name")
        plan, settings = resolve(env, given, ["script.py"], hostname=None)
        nobody: Any = SimpleNamespace(pids=())
        super().__init__(plan, settings, env, nobody)
        self.ends = ends
        self.given: list[Given] = []

    async def _attempt(self, given: Given) -> FinishedAttempt:
        self.given.append(given)
        how: dict[str, Any] = {"outcome": CRASH, "has_met": True, **self.ends.pop(0)}
        return FinishedAttempt(plan=given.plan, run_dir=given.run_dir, **how)

    def play(self) -> tuple[FinishedAttempt, list[tuple[int, ...]]]:
        """(the launch's end, who was to take part in each attempt)."""
        last = asyncio.run(self._run())
        self._consoles["err"].flush(5)
        assert self.ends == []
        return last, [given.plan.members for given in self.given]


@pytest.fixture
def said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[], list[str]]:
    """What the session has said; nothing of these tests' own is ended."""
    monkeypatch.setattr(processes, "kill_descendants", lambda spare: None)  # noqa: ARG005
    (tmp_path / "outcome").mkdir()

    def lines() -> list[str]:
        text = capfd.readouterr().err.replace(str(tmp_path), "RUN")
        return [line.removeprefix("apptrain: ") for line in text.splitlines()]

    return lines


def test_without_restarts_the_first_attempt_is_the_last(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    last, members = Scripted(tmp_path, "stop", [{}]).play()
    assert (last.outcome, members, said()) == (CRASH, [(0, 1, 2)], [FAILED_FIRST.format(0)])


@pytest.mark.parametrize("ended", [DONE, Outcome(status=75)])
def test_an_attempt_that_ended_well_is_the_last(
    ended: Outcome, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    last, members = Scripted(tmp_path, "restart", [{"outcome": ended}]).play()
    assert (last.outcome, members) == (ended, [(0, 1, 2)])
    assert said() == (["saved at a planned end: the same run directory continues"] if ended.status else [])


def test_a_failure_is_followed_by_the_nodes_that_are_left(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    session = Scripted(tmp_path, "restart", [{"lost": (1,)}, {}, {"outcome": DONE}])
    last, members = session.play()
    assert (last.outcome, members) == (DONE, [(0, 1, 2), (0, 2), (0, 2)])
    assert [given.plan.attempt for given in session.given] == [0, 1, 2]
    assert [given.restarts.count for given in session.given if given.restarts] == [0, 1, 2]
    assert said() == []


@pytest.mark.parametrize(
    "ended",
    [replace(CRASH, status=137, signal=9), Outcome(status=1, node="127.0.0.2", error="lost: it is silent")],
)
def test_a_killed_rank_and_a_lost_node_are_failures_too(
    ended: Outcome, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    last, members = Scripted(tmp_path, "restart", [{"outcome": ended}, {"outcome": DONE}]).play()
    assert (last.outcome, len(members), said()) == (DONE, 2, [])


def test_a_node_that_came_again_is_not_lost_any_more(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    session = Scripted(tmp_path, "restart", [{"lost": (1,)}, {}, {}])
    session.ends += [{"outcome": DONE}]
    back = with_members(session._given.plan, (0, 1, 2), 1)
    attempts = session._attempt

    async def all_come(given: Given) -> FinishedAttempt:
        ended = await attempts(given)
        return dataclasses.replace(ended, plan=back) if given.plan.attempt == 1 else ended

    session._attempt = all_come  # type: ignore[method-assign]
    assert session.play()[1] == [(0, 1, 2), (0, 2), (0, 1, 2), (0, 1, 2)]
    assert said() == []


NO_RESTART = "no restart inside the allocation: "


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ({"lost": (1, 2)}, "1 of 3 nodes are left, without 127.0.0.2, 127.0.0.3, and --nnodes asks for 2"),
        ({"why_final": "a planned end was asked for"}, "a planned end was asked for"),
        ({"outcome": replace(CRASH, rank=None, signal=15)}, "the job was asked to end"),
    ],
)
@pytest.mark.parametrize(
    ("scheduler", "env", "more"),
    [
        ("slurm", {"APPTRAIN_ATTEMPT": "0"}, "; the job script decides what follows"),
        ("embedded", {"APPTRAIN_ATTEMPT": "0"}, ""),
        ("slurm", {}, ""),
    ],
    ids=["in a job script", "apptrain run", "by hand"],
)
def test_why_no_restart_follows_is_said(
    scheduler: str,
    env: dict[str, str],
    more: str,
    end: dict[str, Any],
    why: str,
    tmp_path: Path,
    said: Callable[[], list[str]],
) -> None:
    session = Scripted(tmp_path, "restart", [end], **env)
    plan = session._given.plan
    plan = replace(plan, allocation=replace(plan.allocation, scheduler=scheduler))
    session._given = replace(session._given, plan=plan)
    last, members = session.play()
    assert (last.outcome.status, members) == (9, [(0, 1, 2)])
    assert said()[-1] == f"{NO_RESTART}{why}{more}"
    is_ruled_out = not end.get("lost")
    assert [RunDirectory(tmp_path, number).is_closed() for number in (0, 1)] == [is_ruled_out] * 2


def test_a_program_that_refuses_so_few_ranks_leaves_the_failure_before(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    last, _ = Scripted(tmp_path, "restart", [{"lost": (1,)}, {"misfit": "with 2 ranks it refuses"}]).play()
    assert (last.outcome, said()) == (CRASH, [f"{NO_RESTART}with 2 ranks it refuses"])


@pytest.mark.parametrize(
    ("told", "why"), [(False, ["nobody came"]), (True, [])], ids=["its own", "another node's"]
)
def test_a_restart_that_does_not_come_about_leaves_the_attempt_before(
    told: bool, why: list[str], tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    refusal = Unavailable("some-cause", "nobody came")
    refusal.told = told
    ends = [{}, {"has_met": False, "refusal": refusal, "outcome": Outcome(status=69)}]
    last, _ = Scripted(tmp_path, "restart", ends).play()
    assert (last.outcome, last.plan.attempt) == (CRASH, 0)
    assert said() == [FAILED_FIRST.format(0), *(NO_RESTART + one for one in why)]


def test_a_refusal_of_the_first_attempt_is_the_launchs(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    refused = {"has_met": False, "refusal": Unavailable("some-cause", "nobody came")}
    with pytest.raises(Unavailable, match="nobody came"):
        Scripted(tmp_path, "restart", [refused]).play()
    assert said() == []


@pytest.mark.parametrize(
    ("here", "place", "is_refused"),
    [("n1", "1", False), ("n0", "1", True), ("elsewhere", "1", False), ("n0", None, False)],
)
def test_a_task_that_mpiexec_has_started_on_another_host_than_its_own_is_refused(
    here: str, place: str | None, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    granted = dataclasses.replace(plan.allocation, nodes=("n0", "n1"), node_rank=1)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=here))
    env = {} if place is None else {"APPTRAIN_PLACE": place}
    plan = dataclasses.replace(plan, allocation=granted)
    if not is_refused:
        launch.check_place(plan, env)
        return
    with pytest.raises(
        BadInput, match=r"^mpiexec has started the task of n1, node 1, on n0, which is node 0: "
    ):
        launch.check_place(plan, env)
