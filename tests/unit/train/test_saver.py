"""Who waits for whom, and what happens where a disk refuses."""

import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from train import checkpoint
from train.checkpoint import Checkpoint
from train.config import CheckpointOptions as Settings
from train.saver import Saver
from train.trouble import Troubles

BOUND_S = 60.0


def state(step: int, value: float = 1.0) -> Checkpoint:
    return Checkpoint(
        step=step,
        model={"weight": torch.full((1000,), value)},
        optimizer={"weight/exp_avg": torch.full((1000,), -value)},
        state={"position": step * 8, "config": {}, "identity": {}, "scaler": {}},
    )


class Desk:
    """A saver and what it has said."""

    def __init__(self, run_dir: Path, **changes: Any) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(exist_ok=True)
        self.lines: list[str] = []
        self.warnings: list[str] = []
        self.troubles = Troubles(self.warnings.append)
        settings = {
            name: changes.pop(name)
            for name in ("keep", "minutes", "background", "keep_best")
            if name in changes
        }
        self.saver = Saver(
            run_dir, Settings(**settings), say=self.lines.append, troubles=self.troubles, **changes
        )

    @property
    def steps(self) -> list[int | None]:
        return [checkpoint.step_of(path) for path in checkpoint.newest_first(self.run_dir / "checkpoints")]

    def said(self) -> list[str]:
        """The lines without their sizes and times."""
        return [line.partition(" (")[0] for line in self.lines]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def closed(gate: threading.Event) -> Callable[[], None]:
    """A file system that takes its time until the gate is opened."""

    def wait() -> None:
        assert gate.wait(BOUND_S)

    return wait


def test_training_goes_on_while_a_state_is_written_and_may_change_it(
    run_dir: Path, gate: threading.Event
) -> None:
    desk = Desk(run_dir, before_commit=closed(gate))
    now = state(20)
    desk.saver.start(now)
    for tensor in (*now.model.values(), *now.optimizer.values()):
        tensor.zero_()
    assert desk.steps == []
    gate.set()
    assert desk.saver.wait()
    found = checkpoint.load(run_dir / "checkpoints" / "step-00000020")
    assert torch.equal(found.model["weight"], torch.ones(1000))
    assert torch.equal(found.optimizer["weight/exp_avg"], -torch.ones(1000))
    assert desk.said() == ["step 20: saved step-00000020"]


def test_the_next_save_waits_for_the_one_before(run_dir: Path, gate: threading.Event) -> None:
    waits = threading.Event()
    desk = Desk(run_dir, before_commit=closed(gate), beat=waits.set, keep=0)
    desk.saver.start(state(20))
    second = threading.Thread(target=desk.saver.start, args=(state(40),))
    second.start()
    assert waits.wait(BOUND_S)
    second.join(0.2)
    assert second.is_alive()
    assert desk.steps == []
    gate.set()
    second.join(BOUND_S)
    assert desk.saver.wait()
    assert desk.said() == ["step 20: saved step-00000020", "step 40: saved step-00000040"]
    assert desk.saver.saved == 2
    assert desk.saver.held_s >= 0.2


def test_a_wait_that_a_user_would_notice_is_said(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.saver._SLOW_S", 0.05)
    waits = threading.Event()

    def slow() -> None:
        assert waits.wait(BOUND_S)
        time.sleep(0.3)

    desk = Desk(run_dir, before_commit=slow, beat=waits.set)
    desk.saver.start(state(20))
    desk.saver.start(state(40))
    desk.saver.wait()
    [line] = [line for line in desk.said() if "waited" in line]
    waited = re.fullmatch(r"step 40: waited (\d+\.\d) s for the save of step 20", line)
    assert waited
    assert 0.05 < float(waited[1]) <= desk.saver.held_s + 0.05, "what both calls of start took, or less"


def test_a_wait_for_the_rehearsal_is_no_wait_for_a_save(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.saver._SLOW_S", -1.0)  # any wait is worth a line
    desk = Desk(run_dir)
    desk.saver.rehearse()
    desk.saver.finish_before(10)
    assert desk.lines == []


def test_a_save_that_is_waited_for_gives_signs_of_life_only_while_it_makes_progress(
    run_dir: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.saver._GLANCE_S", 0.01)
    signs: list[float] = []
    desk = Desk(run_dir, before_commit=closed(gate), beat=lambda: signs.append(time.monotonic()))
    desk.saver.start(state(20))
    waiting = threading.Thread(target=desk.saver.wait)
    waiting.start()
    while not signs:
        waiting.join(0.01)
    waiting.join(0.5)
    assert 1 <= len(signs) <= 3, "the two files, at most"
    gate.set()
    waiting.join(BOUND_S)


def test_without_the_background_a_save_is_on_the_disk_when_it_has_begun(run_dir: Path) -> None:
    desk = Desk(run_dir, background=False, before_commit=lambda: time.sleep(0.2))
    desk.saver.start(state(20))
    assert desk.steps == [20]
    assert desk.saver.held_s >= 0.2


def test_the_newest_and_the_best_stay(run_dir: Path) -> None:
    desk = Desk(run_dir, keep=1, scores={10: 0.9})
    for step, accuracy in ((10, 0.9), (20, 0.5), (30, 0.95), (40, 0.1), (50, 0.2)):
        desk.saver.start(state(step))
        desk.saver.scored(step, accuracy)
    desk.saver.wait()
    assert desk.steps == [50, 30]


def test_a_disk_that_refuses_is_told_of_once_and_leaves_the_good_ones(run_dir: Path) -> None:
    desk = Desk(run_dir)
    desk.saver.start(state(10))
    assert desk.saver.wait()
    directory = run_dir / "checkpoints"
    hidden = run_dir / "hidden"
    directory.rename(hidden)
    directory.touch()
    for step in (20, 30):
        desk.saver.start(state(step))
        assert not desk.saver.wait()
    assert desk.saver.failure == "Not a directory"
    directory.unlink()
    hidden.rename(directory)
    desk.saver.start(state(40))
    assert desk.saver.wait()
    assert desk.steps == [40, 10]
    assert (desk.saver.saved, desk.saver.failed) == (2, 2)
    assert desk.warnings == [
        "train: WARNING: checkpoints: Not a directory: "
        f"step 20 is not saved to {directory}; training goes on; there is none",
        "train: checkpoints: works again, after it failed twice",
    ]


def test_weights_that_are_lost_never_take_the_place_of_good_ones(run_dir: Path) -> None:
    desk = Desk(run_dir, keep=1)
    desk.saver.start(state(10))
    desk.saver.start(state(20, float("nan")))
    assert not desk.saver.wait()
    assert desk.steps == [10]
    assert desk.warnings == [
        "train: WARNING: checkpoints: weight is not finite: "
        f"step 20 is not saved to {run_dir}/checkpoints; training goes on; the newest is that of step 10"
    ]


def test_a_run_directory_that_vanished_is_made_anew(run_dir: Path) -> None:
    desk = Desk(run_dir)
    desk.saver.start(state(10))
    desk.saver.wait()
    shutil.rmtree(run_dir)
    desk.saver.start(state(20))
    assert desk.saver.wait()
    assert desk.steps == [20]
    assert desk.warnings == [
        f"train: WARNING: directory of checkpoints: it has vanished: made {run_dir}/checkpoints anew; training goes on"
    ]


def test_a_file_system_that_is_gone_is_not_made_up_for(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    desk = Desk(scratch / "run")
    desk.saver.rehearse()
    assert desk.saver.wait()
    shutil.rmtree(scratch)
    desk.saver.start(state(10))
    assert not desk.saver.wait()
    assert not scratch.exists()
    assert desk.saver.failure == "No such file or directory"


def test_a_directory_that_takes_no_checkpoint_is_told_of_before_there_is_one(run_dir: Path) -> None:
    desk = Desk(run_dir)
    (run_dir / "checkpoints").touch()
    desk.saver.rehearse()
    desk.saver.wait()
    desk.saver.start(state(10))
    assert not desk.saver.wait()
    assert desk.warnings == [
        "train: WARNING: rehearsal of a save: Not a directory: "
        f"no checkpoint can be written to {run_dir}/checkpoints; training goes on",
        "train: WARNING: checkpoints: Not a directory: "
        f"step 10 is not saved to {run_dir}/checkpoints; training goes on; there is none",
    ]


def test_a_save_is_due_when_the_minutes_have_passed_and_none_goes_on(
    run_dir: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("train.saver.time.monotonic", lambda: now[0])
    desk = Desk(run_dir, minutes=0.5, before_commit=closed(gate))
    now[0] += 29
    assert not desk.saver.due()
    now[0] += 1
    assert desk.saver.due()
    desk.saver.start(state(1))
    now[0] += 31
    assert not desk.saver.due()
    gate.set()
    desk.saver.wait()
    assert desk.saver.due()
    desk.saver.start(state(2))
    desk.saver.wait()
    now[0] += 29
    assert not desk.saver.due(), "the minutes count from the save before"
    assert not Desk(run_dir, minutes=0.0).saver.due()


def test_a_bug_in_the_thread_ends_the_run(run_dir: Path) -> None:
    def bug() -> None:
        raise ZeroDivisionError

    desk = Desk(run_dir, before_commit=bug)
    desk.saver.start(state(10))
    with pytest.raises(ZeroDivisionError):
        desk.saver.wait()
    assert desk.steps == []


def test_a_rank_that_does_not_save_does_nothing() -> None:
    warnings: list[str] = []
    saver = Saver(None, Settings(minutes=1e-9), say=warnings.append, troubles=Troubles(warnings.append))
    saver.rehearse()
    assert not saver.due()
    assert saver.wait()
    saver.abandon(1.0)
    assert warnings == []


def test_what_is_being_saved_gets_a_moment_before_the_end_but_no_more(
    run_dir: Path, gate: threading.Event
) -> None:
    desk = Desk(run_dir, before_commit=closed(gate))
    desk.saver.start(state(10))
    desk.saver.abandon(0.1)
    assert desk.steps == []
    gate.set()
    desk.saver.abandon(BOUND_S)
    assert desk.steps == [10]
