"""A launch on one node: which signals it heeds, what it refuses, and its last word to the host half."""

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrypoint.batch import conclude
from entrypoint.cli import main as cli
from entrypoint.core.errors import BadInput
from entrypoint.plan.resolve import resolve
from entrypoint.run import launch
from entrypoint.run.signals import handled_signals
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
