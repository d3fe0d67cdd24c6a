"""Whole runs of one process, in this process.

Torchvision's smallest models have a hundred layers, which take longer than all the rest of a run, so most runs are of
a model of our own; those of two parts show that one of torchvision's goes on as well.
"""

import errno
import gc
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from PIL import Image
from torch import nn

from entrypoint.core import files
from entrypoint.job.rundir import RunDirectory
from train import __main__ as program
from train import checkpoint, datasets, loop, metrics, report, resume, stop
from train.__main__ import run
from train.arguments import Asked
from train.config import Config, find, load
from train.distributed import World
from train.environment import RankInfo
from train.heartbeat import Heartbeat
from train.learner import Learner, weights_sha256
from train.loop import Diverged
from train.saver import Saver
from train.status import DONE, SAVED, TERMINATED, TrainingRefused
from train.stop import StopRequest

pytestmark = pytest.mark.xdist_group("train")  # that one worker may import torchvision, for 2 s, and no other
SMALL = [
    "model.name=tiny",
    "data.image_size=16",
    "batch_size=8",
    "steps=8",
    "evaluate.every=0",
    "checkpoint.every=0",
    "device=cpu",
]


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    """A model in torchvision's list that has what a state is made of: weights, statistics, draws in each step."""
    from torchvision.models import _api  # type: ignore[import-untyped]

    def build(*, weights: None, num_classes: int) -> nn.Module:
        assert weights is None
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Dropout(), nn.Linear(16, num_classes),
        )  # fmt: skip

    build.__module__ = "torchvision.models.tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_api.BUILTIN_MODELS, "tiny", build)
        yield


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    leave_group()


def leave_group() -> None:
    """What the end of the process does for a run of its own."""
    if dist.is_initialized():
        dist.destroy_process_group()


def small(*overrides: str) -> Config:
    return load(find("digits"), [*SMALL, *overrides])


def go(
    folder: Path,
    *overrides: str,
    resume: str = "auto",
    request: StopRequest | None = None,
    picture: bool = False,
    note: str = "",
    is_batch_given: bool = True,
    attempt: int = 0,
) -> int:
    place = RankInfo(node="here", run_dir=folder, attempt=attempt)
    leave_group()
    with pytest.MonkeyPatch.context() as patch:
        if not picture:  # It takes longer than all the rest of such a run.
            patch.setattr(report, "draw", lambda _, __, path: path.touch())
        asked = Asked(
            name="small", config=small(*overrides), resume=resume, note=note, is_batch_given=is_batch_given
        )
        return run(asked, place, request or StopRequest())


def is_drawn(folder: Path) -> bool:
    return (folder / "curves.png").stat().st_size > 10_000


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def began_at(folder: Path) -> int | None:
    """The step of the checkpoint from which the last attempt went on."""
    checkpoint = json.loads((folder / "config.json").read_text())["checkpoint"]
    return checkpoint and int(checkpoint["step"])


def trace(folder: Path) -> list[tuple[int, float, float]]:
    history = metrics.read(folder / "metrics.jsonl")
    return [(step, loss, history.lr[step]) for step, loss in history.loss.items()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert go(folder, picture=True) == DONE
    return folder


def test_a_run_leaves_metrics_checkpoint_result_picture_and_events(whole: Path) -> None:
    assert [step for step, _, _ in trace(whole)] == list(range(1, 9))
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [["step", "loss", "lr", "images_per_s"]] * 8 + [
        ["step", "accuracy", "correct", "total"]
    ]
    found = result(whole)
    assert (found["accuracy"], found["total"], found["steps"]) == (found["correct"] / 360, 360, 8)
    assert found["accuracy"] == rows[-1]["accuracy"]
    assert 0 < found["first_step_s"] < found["wall_s"]
    (rank,) = found["ranks"]
    assert (rank["node"], rank["images"], found["attempt"], found["job_id"]) == ("here", 64, 0, None)
    assert rank["images_per_s"] == found["images_per_s"]
    assert 0 < rank["input_wait_s"] < rank["train_s"] == found["train_s"]
    assert 0 <= rank["sync_wait_s"] < rank["train_s"] - rank["input_wait_s"]
    assert 0 < rank["first_step"]["train_s"] < rank["train_s"]
    assert found["train_samples"] == 1437
    assert found["tflop_per_s"] == pytest.approx(found["gflop_per_image"] * found["images_per_s"] / 1e3)
    assert found["peak_share"] is None
    assert rank["peak_memory_bytes"] == found["peak_memory_bytes"]
    saved = checkpoint.load(whole / "checkpoints" / "step-00000008")
    assert weights_sha256(saved.model) == found["weights_sha256"]
    assert saved.state["position"] == 64
    assert is_drawn(whole)
    assert len(list((whole / "tensorboard").iterdir())) == 1


def test_gloos_group_is_left_to_the_end_of_the_process_as_its_destructor_may_hang(tmp_path: Path) -> None:
    assert go(tmp_path / "run", "steps=1") == DONE
    assert dist.is_initialized()


def test_the_test_images_are_seen_once_at_the_end_where_evaluations_run_on_training_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    plain = datasets.InMemory.plain_batches

    def spy(self: Any, batches: Any, of: Any) -> Any:
        seen.append(of)
        return plain(self, batches, of)

    monkeypatch.setattr(datasets.InMemory, "plain_batches", spy)
    assert go(tmp_path / "run", "evaluate.every=4", "evaluate.split=train", "steps=9", picture=True) == DONE
    assert is_drawn(tmp_path / "run")
    assert seen == ["train", "train", "test"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["total"]) for row in rows if "total" in row] == [(4, 360), (8, 360), (9, 360)]
    assert result(tmp_path / "run")["evaluated_on"] == "train"


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["optimizer.name=adamw", "optimizer.lr=0.001", "precision=bf16", "accumulation=2"],
        ["precision=fp16", "optimizer.clip_norm=1.0"],
        ["channels_last=true"],
        ["model.name=shufflenet_v2_x0_5"],
    ],
)
def test_a_run_in_two_parts_equals_one_bit_for_bit(tmp_path: Path, whole: Path, options: list[str]) -> None:
    if options:
        whole = tmp_path / "whole"
        assert go(whole, *options) == DONE
    parts = tmp_path / "parts"
    assert go(parts, *options, "stop_at=5") == SAVED
    assert not (parts / "result.json").exists()
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 0.3, "l')
    assert go(parts, *options) == DONE
    assert trace(parts) == trace(whole)
    assert result(parts)["weights_sha256"] == result(whole)["weights_sha256"]
    assert result(parts)["correct"] == result(whole)["correct"]
    assert result(parts)["resumed_from"] == 5
    one, two = (checkpoint.load(run / "checkpoints" / "step-00000008") for run in (whole, parts))
    assert one.state["scaler"] == two.state["scaler"]


def test_an_evaluation_that_was_due_where_a_run_stopped_is_made_up_for(tmp_path: Path) -> None:
    assert go(tmp_path / "whole", "evaluate.every=2") == DONE
    assert go(tmp_path / "parts", "evaluate.every=2", "stop_at=4") == SAVED
    assert go(tmp_path / "parts", "evaluate.every=2") == DONE
    whole, parts = (metrics.read(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert list(whole.accuracy) == [2, 4, 6, 8]
    assert parts.accuracy == whole.accuracy


def test_a_finished_run_is_only_evaluated_again(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("curves.png"))
    assert go(folder, picture=True, note="small: batch_size 8 instead of 7") == DONE
    assert is_drawn(folder)
    said = capsys.readouterr().out
    assert f"resumed from {folder}/checkpoints/step-00000008: step 8 of 8\n" in said
    assert said.count("small: batch_size 8 instead of 7\n") == 1
    assert trace(folder) == trace(whole)
    assert result(folder)["correct"] == result(whole)["correct"]
    assert result(folder)["loss"] == trace(whole)[-1][1] == result(whole)["loss"]
    assert result(folder)["images_per_s"] is None  # of this attempt


def test_a_finished_run_without_metrics_has_no_loss(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("metrics.jsonl"))
    assert go(folder) == DONE
    assert result(folder)["loss"] is None


def test_checkpoints_by_time_change_nothing_and_are_whole(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Saver.due

    def due(self: Saver) -> bool:
        self._join()  # A save that goes on puts the next one off, for as long as the disk likes.
        return ask(self)

    monkeypatch.setattr(Saver, "due", due)
    assert go(tmp_path, "checkpoint.minutes=1e-6", "checkpoint.keep=0") == DONE
    saved = list(checkpoint.newest_first(tmp_path / "checkpoints"))
    assert [checkpoint.step_of(path) for path in saved] == [8, 6, 3]
    assert [checkpoint.load(path).step for path in saved] == [8, 6, 3]
    assert trace(tmp_path) == trace(whole)
    assert result(tmp_path)["weights_sha256"] == result(whole)["weights_sha256"]


def test_the_best_checkpoint_stays_over_an_interruption(tmp_path: Path) -> None:
    options = ["evaluate.every=2", "checkpoint.every=2", "checkpoint.keep=1", "steps=12"]
    assert go(tmp_path, *options, "stop_at=7") == SAVED
    assert go(tmp_path, *options) == DONE
    accuracy = metrics.read(tmp_path / "metrics.jsonl").accuracy
    best = max((value, step) for step, value in accuracy.items() if step < 12)[1]
    kept = [checkpoint.step_of(path) for path in checkpoint.newest_first(tmp_path / "checkpoints")]
    assert kept == [12, best]


def test_the_metrics_are_on_the_disk_before_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[str], int]] = []

    def spy(_: metrics.MetricsFile) -> None:
        names = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
        seen.append((sorted(names), max(metrics.read(tmp_path / "metrics.jsonl").loss)))

    monkeypatch.setattr(metrics.MetricsFile, "sync", spy)
    assert go(tmp_path, "checkpoint.every=4", "checkpoint.background=false") == DONE
    assert seen == [([], 4), (["step-00000004"], 8)]


def test_a_run_gives_a_sign_of_life_after_every_step_and_in_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signs: list[str] = []
    write = Path.write_text

    def spy(self: Path, text: str, **how: Any) -> int:
        if self == tmp_path / "0":
            signs.append(text)
        return write(self, text, **how)

    monkeypatch.setattr(Path, "write_text", spy)
    place = RankInfo(node="here", run_dir=tmp_path / "run", heartbeat=tmp_path / "0")
    asked = Asked(name="small", config=small(), resume="auto")
    assert run(asked, place, StopRequest()) == DONE
    assert signs[:8] == [str(step) for step in range(1, 9)]
    assert set(signs[8:]) == {"8"}
    assert len(signs[8:]) >= 360 // 64


def test_a_sign_of_life_before_the_first_step_says_0(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "0")
    heartbeat.beat()
    assert (tmp_path / "0").read_text() == "0"


def test_a_place_that_takes_no_sign_of_life_harms_nobody(tmp_path: Path) -> None:
    """Nor for ever: a launcher that hears no more of a rank takes it for stuck."""
    heartbeat = Heartbeat(tmp_path / "gone" / "0")
    heartbeat.step(1)
    (tmp_path / "gone").mkdir()
    heartbeat.beat()
    assert (tmp_path / "gone" / "0").read_text() == "1"


def test_a_run_has_an_id_for_all_its_attempts_and_remembers_where_it_began(tmp_path: Path) -> None:
    def pedigree(folder: Path, step: int) -> Any:
        return checkpoint.load(folder / "checkpoints" / f"step-{step:08d}").state["run"]

    a, b = tmp_path / "a", tmp_path / "b"
    assert go(a, "stop_at=3") == SAVED
    assert go(a, "stop_at=5") == SAVED
    assert go(b, resume=str(a)) == DONE
    assert pedigree(a, 3) == pedigree(a, 5)
    assert pedigree(b, 8) == {"id": result(b)["run"], "parent": {"run": pedigree(a, 5), "step": 5}}
    assert pedigree(b, 8)["id"] != pedigree(a, 5)["id"]


def test_another_seed_gives_another_run(tmp_path: Path, whole: Path) -> None:
    assert go(tmp_path, "seed=2") == DONE
    assert trace(tmp_path)[0][1] != trace(whole)[0][1]


@pytest.mark.parametrize(
    ("request_", "status"),
    [(StopRequest(planned=True), SAVED), (StopRequest(terminated=True), TERMINATED),
     (StopRequest(planned=True, terminated=True), TERMINATED)],
)  # fmt: skip
def test_a_wish_to_stop_saves_and_ends_with_its_status(
    tmp_path: Path, whole: Path, request_: StopRequest, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, request=request_) == status
    assert "stopped after step 2 of 8; --resume auto goes on from there\n" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert trace(tmp_path) == trace(whole)[:2]


def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, "checkpoint.every=3", "checkpoint.keep=0") == DONE
    (tmp_path / "checkpoints" / "step-00000008" / "complete.json").unlink()
    damaged = tmp_path / "checkpoints" / "step-00000006"
    (damaged / "model.safetensors").write_bytes(b"x")
    capsys.readouterr()
    assert go(tmp_path) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert [*lines[:2], *lines[3:5]] == [
        f"WARNING: skipped {tmp_path}/checkpoints/step-00000008: complete.json: No such file or directory",
        f"WARNING: skipped {damaged}: model.safetensors is not as it was written",
        f"resumed from {tmp_path}/checkpoints/step-00000003: step 3 of 8",
        f"moved step-00000008, step-00000006 to {tmp_path}/previous-1",
    ]
    assert trace(tmp_path) == trace(whole)
    assert result(tmp_path)["weights_sha256"] == result(whole)["weights_sha256"]


def test_a_file_system_that_gives_no_checkpoint_makes_no_run_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not give may be whole: one that can be read is taken, but nothing is redone from step 0."""
    for step in (3, 6):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "complete.json").write_text("{")
    said: list[str] = []
    assert resume.find_start(tmp_path, "auto", said.append, StopRequest(), goes_on=False) is None
    assert len(said) == 2
    read = files.read

    def fail(path: Path, *rest: Any) -> bytes:
        if path.name == "complete.json" and "0006" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return read(path, *rest)

    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    monkeypatch.setattr(files, "read", fail)
    with pytest.raises(
        TrainingRefused, match=r"can be read \(complete.json: Input/output error\): start it again"
    ):
        resume.find_start(tmp_path, "auto", said.append, StopRequest(), goes_on=False)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000006",
    ]
    assert sum(naps) == 60
    assert said[2] == (
        f"WARNING: {tmp_path}/checkpoints/step-00000006: complete.json: Input/output error: trying again in 1 s"
    )


def fail_to_read(patch: pytest.MonkeyPatch, step: int, name: str, error: OSError) -> list[float]:
    """The first read of this file of a checkpoint fails, or each if nothing is done about it; returns how long
    it was waited."""
    read, naps = files.read, list[float]()

    def fail(path: Path, *rest: Any) -> bytes:
        if not naps and path.name == name and path.parent.name == checkpoint.name_of(step):
            raise error
        return read(path, *rest)

    patch.setattr(files, "read", fail)
    patch.setattr(time, "sleep", naps.append)
    return naps


@pytest.mark.parametrize("name", ["complete.json", "model.safetensors"])
@pytest.mark.parametrize("given", ["auto", "checkpoints/step-00000006"])
def test_a_file_system_that_is_back_soon_costs_no_checkpoint(
    tmp_path: Path, name: str, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, "checkpoint.every=3", "checkpoint.keep=0", "stop_at=6") == SAVED
    asked = given if given == "auto" else str(tmp_path / given)
    with monkeypatch.context() as patch:
        naps = fail_to_read(patch, 6, name, OSError(errno.ESTALE, "Stale file handle"))
        assert go(tmp_path, "stop_at=7", resume=asked) == SAVED
    assert (began_at(tmp_path), naps[:1]) == (6, [1])
    newest = f"{tmp_path}/checkpoints/step-00000006"
    assert f"WARNING: {newest}: {name}: Stale file handle: trying again in 1 s\n" in capsys.readouterr().out
    assert not (tmp_path / "previous-1").exists()


def test_what_this_user_may_not_read_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert go(tmp_path, "checkpoint.every=3", "checkpoint.keep=0", "stop_at=6") == SAVED
    with monkeypatch.context() as patch:
        naps = fail_to_read(patch, 6, "state.json", PermissionError(errno.EACCES, "Permission denied"))
        start = resume.find_start(tmp_path, "auto", lambda _: None, StopRequest(), goes_on=False)
    assert (start and start.checkpoint.step, naps) == (3, [])


def test_a_planned_end_while_a_checkpoint_cannot_be_read_leaves_all_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, "checkpoint.every=3", "checkpoint.keep=0", "stop_at=6") == SAVED
    before = sorted(path for path in tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        naps = fail_to_read(patch, 6, "complete.json", OSError(errno.EIO, "Input/output error"))
        assert go(tmp_path, request=StopRequest(planned=True)) == SAVED
    assert naps == []
    assert sorted(path for path in tmp_path.rglob("*")) == before
    said = "stopped before the first step, as a checkpoint could not be read: the next attempt tries again\n"
    assert capsys.readouterr().out.endswith(said)


def test_never_begins_anew_and_moves_what_was_there_aside(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    assert go(folder, "steps=2", resume="never") == DONE
    moved = f"moved checkpoints, metrics.jsonl, tensorboard to {folder}/previous-1\n"
    assert moved in capsys.readouterr().out
    assert len(trace(folder)) == 2
    assert (folder / "previous-1" / "checkpoints" / "step-00000008").is_dir()
    assert go(folder, "steps=1", resume="never") == DONE
    assert (folder / "previous-1" / "checkpoints" / "step-00000008").is_dir()
    assert (folder / "previous-2" / "checkpoints" / "step-00000002").is_dir()


def test_a_given_checkpoint_begins_a_run_that_then_goes_on_from_its_own(tmp_path: Path, whole: Path) -> None:
    assert go(tmp_path / "a", "stop_at=3") == SAVED
    given = str(tmp_path / "a" / "checkpoints" / "step-00000003")
    assert go(tmp_path / "b", "stop_at=5", resume=given) == SAVED
    assert go(tmp_path / "b", resume=given) == DONE
    assert result(tmp_path / "b")["resumed_from"] == 5
    assert trace(tmp_path / "b") == trace(whole)[3:]
    assert result(tmp_path / "b")["weights_sha256"] == result(whole)["weights_sha256"]


def test_a_run_can_go_back_to_one_of_its_own_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, "checkpoint.every=3", "checkpoint.keep=0") == DONE
    before = trace(tmp_path)
    assert go(tmp_path, "stop_at=5", resume=str(tmp_path / "checkpoints" / "step-00000003")) == SAVED
    assert f"moved step-00000008, step-00000006 to {tmp_path}/previous-1\n" in capsys.readouterr().out
    assert trace(tmp_path) == before[:5]


def test_a_run_that_goes_back_to_an_earlier_past_leaves_none_of_the_later_one_to_go_on_from(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, "stop_at=5") == SAVED
    assert go(tmp_path, "seed=2", "stop_at=3", resume="never") == SAVED
    RunDirectory(tmp_path, 0).note_first()
    given = str(tmp_path / "previous-1")

    def die(**_: Any) -> None:
        raise Diverged

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", die)  # before its first save
        with pytest.raises(Diverged):
            go(tmp_path, resume=given)
    assert f"moved step-00000003 to {tmp_path}/previous-2\n" in capsys.readouterr().out
    assert go(tmp_path, resume=given, attempt=1) == DONE
    assert began_at(tmp_path) == 5
    assert result(tmp_path)["weights_sha256"] == result(whole)["weights_sha256"]


@pytest.mark.parametrize("resume", ["auto", "DIR"])
def test_a_checkpoint_that_is_linked_into_the_run_is_one_of_its_own(tmp_path: Path, resume: str) -> None:
    assert go(tmp_path / "a", "stop_at=3") == SAVED
    own = tmp_path / "b" / "checkpoints"
    own.mkdir(parents=True)
    link = own / "step-00000003"
    link.symlink_to(tmp_path / "a" / "checkpoints" / "step-00000003")
    given = str(link) if resume == "DIR" else resume
    assert go(tmp_path / "b", "stop_at=5", "checkpoint.keep=0", resume=given) == SAVED
    assert began_at(tmp_path / "b") == 3
    assert link.is_symlink()


def on_scratch(folder: Path, scratch: Path) -> Path:
    """Gives a run its checkpoints on another file system, by a link that is returned."""
    folder.mkdir(exist_ok=True)
    scratch.mkdir()
    link = folder / "checkpoints"
    link.symlink_to(scratch)
    return link


@pytest.mark.parametrize("given", ["run/checkpoints/step-00000003", "scratch/step-00000003"])
def test_a_run_with_linked_checkpoints_goes_back_and_leaves_the_later_ones_on_their_file_system(
    tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, scratch = tmp_path / "run", tmp_path / "scratch"
    on_scratch(run_dir, scratch)
    assert go(run_dir, "checkpoint.every=3", "checkpoint.keep=0") == DONE
    for number in (1, 2):
        assert go(run_dir, "stop_at=5", resume=str(tmp_path / given)) == SAVED
        assert began_at(run_dir) == 3
        place = run_dir / f"previous-{number}" / "checkpoints"
        moved = "step-00000008, step-00000006" if number == 1 else "step-00000005"
        assert f"moved {moved} to {place}\n" in capsys.readouterr().out
        assert place.resolve() == scratch / f"previous-{number}"
        assert ", ".join(path.name for path in checkpoint.newest_first(place)) == moved
    assert go(run_dir, "stop_at=7", resume=str(run_dir / "previous-2")) == SAVED
    assert began_at(run_dir) == 5


def test_a_run_can_go_back_to_a_checkpoint_of_its_own_that_is_a_link(tmp_path: Path) -> None:
    assert go(tmp_path / "run", "checkpoint.every=3", "checkpoint.keep=0") == DONE
    own, elsewhere = tmp_path / "run" / "checkpoints" / "step-00000003", tmp_path / "elsewhere"
    own.rename(elsewhere)
    own.symlink_to(elsewhere)
    assert go(tmp_path / "run", "stop_at=5", resume=str(own)) == SAVED
    assert began_at(tmp_path / "run") == 3


def test_a_run_that_begins_with_a_link_to_another_runs_checkpoint_is_another_run(tmp_path: Path) -> None:
    assert go(tmp_path / "a", "stop_at=3") == SAVED
    own = tmp_path / "b" / "checkpoints"
    own.mkdir(parents=True)
    (own / "step-00000003").symlink_to(tmp_path / "a" / "checkpoints" / "step-00000003")
    assert go(tmp_path / "b", "stop_at=5") == SAVED
    first = checkpoint.load(own / "step-00000003").state["run"]
    last = checkpoint.load(own / "step-00000005").state["run"]
    assert (last["id"] != first["id"], last["parent"]) == (True, {"run": first, "step": 3})


def test_a_run_with_linked_checkpoints_stays_the_same_run_in_all_its_attempts(tmp_path: Path) -> None:
    own = on_scratch(tmp_path / "run", tmp_path / "scratch")
    for step in (3, 5):
        assert go(tmp_path / "run", f"stop_at={step}") == SAVED
    first, last = (checkpoint.load(own / f"step-{step:08d}").state["run"] for step in (3, 5))
    assert (first["parent"], last) == (None, first)


def test_never_keeps_the_link_to_where_the_checkpoints_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, scratch = tmp_path / "run", tmp_path / "scratch"
    link = on_scratch(run_dir, scratch)
    assert go(run_dir, "stop_at=3") == SAVED
    assert go(run_dir, "stop_at=2", resume="never") == SAVED
    said = capsys.readouterr().out
    assert f"moved step-00000003 to {run_dir}/previous-1/checkpoints\n" in said
    assert f"moved metrics.jsonl, tensorboard to {run_dir}/previous-1\n" in said
    assert link.readlink() == scratch
    assert [path.name for path in checkpoint.newest_first(scratch)] == ["step-00000002"]
    assert (scratch / "previous-1" / "step-00000003").is_dir()


@pytest.mark.parametrize("given", ["never", "DIR"])
def test_a_run_that_goes_on_by_itself_takes_its_own_newest_checkpoint(
    tmp_path: Path, whole: Path, given: str
) -> None:
    folder = tmp_path / "run"
    assert go(folder, "stop_at=2", "checkpoint.keep=0") == SAVED
    asked = str(folder / "checkpoints" / "step-00000002") if given == "DIR" else given
    RunDirectory(folder, 1).note_first()
    # Nobody has obeyed it in attempt 1, which ended before it came to that.
    assert go(folder, "stop_at=3", "checkpoint.keep=0", resume=asked, attempt=2) == SAVED
    assert began_at(folder) == (2 if given == "DIR" else None)
    assert go(folder, "stop_at=5", "checkpoint.keep=0", resume=asked, attempt=3) == SAVED
    assert began_at(folder) == 3
    RunDirectory(folder, 4).note_first()  # somebody starts it once more
    assert go(folder, "checkpoint.keep=0", resume=asked, attempt=4) == DONE
    assert began_at(folder) == (2 if given == "DIR" else None)
    assert result(folder)["weights_sha256"] == result(whole)["weights_sha256"]


def test_a_run_that_is_started_once_more_by_hand_has_its_restarts_begin_there(tmp_path: Path) -> None:
    """Where nobody counts, each start is attempt 0."""
    assert go(tmp_path, "stop_at=2") == SAVED
    RunDirectory(tmp_path, 0).note_first()
    os.utime(tmp_path / "config.json", ns=(1, 1))  # of the start before
    assert go(tmp_path, "stop_at=3", resume="never", attempt=1) == SAVED
    assert began_at(tmp_path) is None
    assert go(tmp_path, "stop_at=4", resume="never", attempt=2) == SAVED
    assert began_at(tmp_path) == 3


@pytest.mark.parametrize("damage", ["first-attempt", "config.json"])
def test_what_an_earlier_attempt_left_unreadable_is_no_reason_to_go_on(tmp_path: Path, damage: str) -> None:
    assert go(tmp_path, "stop_at=2") == SAVED
    RunDirectory(tmp_path, 0).note_first()
    (tmp_path / damage).write_text("[]")
    assert go(tmp_path, "stop_at=3", resume="never", attempt=1) == SAVED
    assert began_at(tmp_path) is None


def test_a_given_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingRefused) as refusal:
        go(tmp_path / "run", resume=str(tmp_path))
    assert str(refusal.value) == (
        f"--resume {tmp_path}: no complete checkpoint there: give a step-... directory, or its parent"
    )


def test_a_refused_config_moves_nothing(tmp_path: Path) -> None:
    assert go(tmp_path, "checkpoint.every=3", "checkpoint.keep=0", "steps=4") == DONE
    with pytest.raises(TrainingRefused):
        go(tmp_path, "steps=4", "seed=2", resume=str(tmp_path / "checkpoints" / "step-00000003"))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004"]


def test_another_trajectory_is_refused_with_the_keys_that_differ(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    with pytest.raises(TrainingRefused) as refusal:
        go(folder, "seed=2", "optimizer.lr=0.5", "evaluate.every=3")
    lr = yaml.safe_load(find("digits").read_text())["optimizer"]["lr"]
    assert str(refusal.value) == (
        "the checkpoint of step 8 was made with another config: "
        f"seed (1 -> 2), optimizer.lr ({lr} -> 0.5): "
        "give the same, or another run directory, or --resume never"
    )


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of images for the run: 2 of each of the classes a to c in train/, 1 of each in val/."""
    folder = tmp_path / "pictures"
    for split, count in (("train", 2), ("val", 1)):
        for name in "abc":
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8)).save(folder / split / name / f"{number}.png")
    return folder


def go_with(pictures: Path, folder: Path, *overrides: str) -> int:
    data = ["data.name=imagefolder", f"data.path={pictures}", "data.workers=0", "data.image_size=8"]
    return go(folder, *data, "batch_size=2", *overrides)


def renamed(pictures: Path) -> None:
    for split in ("train", "val"):
        (pictures / split / "a").rename(pictures / split / "z")


def more(pictures: Path) -> None:
    for number in range(2, 6):
        shutil.copy(pictures / "train" / "b" / "0.png", pictures / "train" / "b" / f"{number}.png")


def both(pictures: Path) -> None:
    renamed(pictures)
    more(pictures)


def other_name(pictures: Path) -> None:
    (pictures / "train" / "b" / "1.png").rename(pictures / "train" / "b" / "0.jpg")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (renamed, "classes that are gone: a; classes that are new: z"),
        (more, "number: 6 -> 10"),
        (both, "number: 6 -> 10; classes that are gone: a; classes that are new: z"),
        (other_name, "files with other names"),
    ],
)
def test_other_training_images_are_refused_with_what_differs(
    tmp_path: Path, pictures: Path, change: Callable[[Path], None], told: str
) -> None:
    folder = tmp_path / "run"
    assert go_with(pictures, folder, "stop_at=2") == SAVED
    change(pictures)
    with pytest.raises(TrainingRefused) as refusal:
        go_with(pictures, folder)
    assert str(refusal.value) == (
        f"the checkpoint of step 2 was made with other training images ({told}): their order or labels "
        "would change: give the same images (data.path=DIR), or another run directory, or --resume never"
    )


@pytest.mark.parametrize("split", ["train", "val"])
def test_what_is_refused_in_the_middle_gets_a_line_after_the_bar(
    tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str], split: str
) -> None:
    damaged = pictures / split / "b" / "0.png"
    damaged.write_bytes(b"no image")
    with pytest.raises(TrainingRefused, match="no whole image") as refusal:
        go_with(pictures, tmp_path / "run", "steps=3")
    assert refusal.value.id == "image-damaged"  # its traceback keeps the bar, which ends its line if it goes
    assert capsys.readouterr().err.endswith("\n")


def test_many_other_classes_are_not_all_named() -> None:
    before = {"train_size": 9, "class_names": [f"n{number}" for number in range(9)]}
    told = datasets.difference(before, {"train_size": 9, "class_names": ["n8"]})
    assert told == "classes that are gone: n0, n1, n2, n3, n4 and 3 more"


def test_a_copy_of_the_images_elsewhere_is_as_good(tmp_path: Path, pictures: Path) -> None:
    assert go_with(pictures, tmp_path / "run", "stop_at=2") == SAVED
    assert go_with(pictures.rename(tmp_path / "elsewhere"), tmp_path / "run") == DONE
    assert result(tmp_path / "run")["resumed_from"] == 2


def test_a_checkpoint_of_a_version_that_kept_no_names_of_images_is_accepted(
    tmp_path: Path, pictures: Path
) -> None:
    assert go_with(pictures, tmp_path / "run", "stop_at=2") == SAVED
    (newest,) = checkpoint.newest_first(tmp_path / "run" / "checkpoints")
    loaded = checkpoint.load(newest)
    del loaded.state["data"]
    checkpoint.save(newest.parent, loaded)
    more(pictures)
    assert go_with(pictures, tmp_path / "run", "stop_at=3") == SAVED
    assert began_at(tmp_path / "run") == 2


def test_a_batch_that_nobody_gave_is_the_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This program fits that of a shipped config to the ranks; others of them can share it, too."""
    assert go(tmp_path / "whole", "batch_size=12") == DONE
    assert go(tmp_path / "run", "batch_size=12", "stop_at=3") == SAVED
    with pytest.raises(TrainingRefused, match=r"batch_size \(12 -> 16\): give the same"):
        go(tmp_path / "run", "batch_size=16")
    capsys.readouterr()
    for overrides, status in (["stop_at=4"], SAVED), ([], DONE):
        assert (
            go(tmp_path / "run", "batch_size=16", *overrides, note="fitted", is_batch_given=False) == status
        )
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "small: batch_size 12 as in the checkpoint, 12 a rank"
        assert lines[1].endswith("8 steps of 12 images on 1 x cpu (gloo)")
    assert trace(tmp_path / "run") == trace(tmp_path / "whole")
    assert result(tmp_path / "run")["weights_sha256"] == result(tmp_path / "whole")["weights_sha256"]
    assert result(tmp_path / "run")["batch_size"] == 12


def test_a_batch_of_a_checkpoint_that_these_ranks_cannot_share_is_refused_with_the_numbers(
    tmp_path: Path,
) -> None:
    assert go(tmp_path, "batch_size=9", "stop_at=3") == SAVED
    with pytest.raises(TrainingRefused) as refusal:
        go(tmp_path, "accumulation=2", is_batch_given=False)
    assert str(refusal.value) == (
        "batch_size is 9 in the checkpoint, no multiple of 1 ranks x accumulation 2 = 2: start a number of ranks "
        "that divides it, or give another run directory, or --resume never"
    )


def test_more_steps_go_on_and_say_so_but_fewer_are_refused(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    assert go(folder, "steps=10") == DONE
    assert "steps was 8, is 10: going on, not bit for bit\n" in capsys.readouterr().out
    assert trace(folder)[:8] == trace(whole)
    assert result(folder)["steps"] == 10
    with pytest.raises(TrainingRefused) as refusal:
        go(folder, "steps=9")
    assert (
        str(refusal.value) == "the checkpoint has 10 steps, the config 9: give more steps, or --resume never"
    )


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        Diverged, match=r"^the loss of step \d is nan: lower optimizer.lr or set optimizer.clip_norm$"
    ):
        go(tmp_path, "optimizer.lr=1e30", "optimizer.warmup_steps=0")
    assert all(math.isfinite(loss) for _, loss, _ in trace(tmp_path))


def test_accumulation_changes_the_memory_and_not_the_update() -> None:
    torch.manual_seed(1)
    images, labels = torch.randn(8, 1, 4, 4), torch.arange(8)
    weight = torch.randn(10, 16)
    world = World(RankInfo(node="here"), torch.device("cpu"))
    updated, losses = [], []
    for passes in (1, 4):
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 10, bias=False))
        model[1].weight = torch.nn.Parameter(weight.clone())
        learner = Learner(model, small(f"accumulation={passes}", "label_smoothing=0"), world)
        learner.start((1, 4, 4))
        batches = zip(images.chunk(passes), labels.chunk(passes), strict=True)
        losses.append(float(learner.advance(iter(batches), 0.5)))
        updated.append(learner.weights()["1.weight"])
    expected = weight.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(images.flatten(1) @ expected.t(), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    assert losses == pytest.approx([8 * float(loss.detach())] * 2)
    assert not torch.equal(updated[0], weight)
    assert torch.allclose(updated[0], updated[1], atol=1e-6)


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainingRefused) as refusal:
        go(tmp_path / "file" / "run")
    assert str(refusal.value) == (
        f"run directory {tmp_path}/file/run: Not a directory: give another in run_dir=DIR or APPTRAIN_RUN_DIR"
    )


def test_a_json_value_and_tensors_cross_without_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickled")

    for name in ("dumps", "loads", "dump", "load"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    world = World(RankInfo(node="here"), torch.device("cpu"))
    value = {"step": 3, "names": [["a", [1, 2], "float32"]], "text": "é\n", "none": None}
    assert world.broadcast_json(value) == value
    assert world.gather_json(value) == [value]
    transposed = torch.arange(6.0).reshape(2, 3).t()
    world.broadcast([transposed])
    assert transposed.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_handlers_only_set_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.update({number: handler}))
    request = stop.listen()
    assert request == StopRequest()
    handlers[signal.SIGUSR2](12, None)
    assert request == StopRequest(planned=True)
    handlers[signal.SIGTERM](15, None)
    assert request == StopRequest(planned=True, terminated=True)
    assert set(handlers) == {signal.SIGUSR2, signal.SIGTERM}


def test_garbage_is_sought_from_the_first_step_on_and_not_in_what_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool | int] = []

    def train(**_: Any) -> None:
        found.extend([gc.isenabled(), gc.get_freeze_count()])
        raise Diverged

    monkeypatch.setattr(program, "listen", lambda **_: StopRequest())
    monkeypatch.setattr(program, "die_of_interrupt", lambda: None)
    monkeypatch.setattr(program, "run", lambda *_: found.append(gc.isenabled()))
    monkeypatch.setattr(loop, "train", train)
    gc.unfreeze()
    try:
        assert program.main(["--config", "digits", *SMALL]) == DONE
        assert not gc.isenabled()
        with pytest.raises(Diverged):
            go(tmp_path)
    finally:
        gc.enable()
        gc.unfreeze()
    before, then, set_aside = found
    assert (before, then) == (False, True)
    assert set_aside > 100_000


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_wrong_is_said_by_one_rank_and_the_others_leave_it_the_word(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    before = [(number, signal.getsignal(number)) for number in (signal.SIGUSR2, signal.SIGINT)]
    try:
        assert program.main(["--config", "none"]) == 64
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    said = capsys.readouterr().err
    if rank == 0:
        assert said.startswith("train: --config none: no such file or shipped config: ")
        assert (said.count("\n"), naps) == (1, [])
    else:
        assert (said, naps) == ("", [program.HEAD_START_S])


def test_what_one_rank_alone_finds_wrong_is_said_by_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise TrainingRefused("some-id", "3.jpg: no whole image", rank=None)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(program, "read", refuse)
    monkeypatch.setattr(program, "read_rank_info", lambda _: RankInfo(node="here", run_dir=None))
    before = [(number, signal.getsignal(number)) for number in (signal.SIGUSR2, signal.SIGINT)]
    try:
        assert program.main([]) == 64
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert capsys.readouterr().err == "train: 3.jpg: no whole image\n"
