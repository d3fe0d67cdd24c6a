import hashlib
import json
import os
import pickle
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from train import checkpoint
from train.checkpoint import Checkpoint, Damaged, Draft


def sample(step: int = 40) -> Checkpoint:
    shared = torch.arange(6.0)
    return Checkpoint(
        step=step,
        model={
            "weight": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
            "column": torch.arange(6.0).reshape(2, 3).t(),
            "head": shared[:3],
            "tail": shared[1:],
            "tracked": torch.tensor(7),
            "half": torch.tensor([1.5], dtype=torch.bfloat16),
        },
        optimizer={"weight/momentum_buffer": torch.tensor([0.1, -0.0, float("inf")])},
        state={"position": 2560, "config": {"lr": 0.1 + 0.2}, "identity": {"world_size": 2}, "scaler": {}},
    )


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "checkpoints", sample())
    assert path == tmp_path / "checkpoints" / "step-00000040"
    assert sorted(file.name for file in path.iterdir()) == [
        "complete.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    found, expected = checkpoint.load(path), sample()
    assert found.step == 40
    assert_equal(found.model, expected.model)
    assert_equal(found.optimizer, expected.optimizer)
    assert found.state == {"schema_version": 1, "step": 40, **expected.state}


def test_only_the_owner_can_read_a_checkpoint(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = checkpoint.save(tmp_path / "checkpoints", sample())
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_one_changed_byte_is_noticed(tmp_path: Path, name: str) -> None:
    path = checkpoint.save(tmp_path, sample())
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(Damaged, match=f"^{name} is not as it was written$"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("complete.json", None, "complete.json: No such file or directory"),
        ("complete.json", b"{", "complete.json is not JSON"),
        ("complete.json", b"[]", "complete.json lists no digests"),
        ("model.safetensors", None, "model.safetensors: No such file or directory"),
        ("optimizer.safetensors", b"", "optimizer.safetensors is not as it was written"),
    ],
)
def test_an_incomplete_checkpoint_is_noticed(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = checkpoint.save(tmp_path, sample())
    (path / name).unlink()
    if content is not None:
        (path / name).write_bytes(content)
    with pytest.raises(Damaged) as damage:
        checkpoint.load(path)
    assert str(damage.value) == message


class Planted:
    """Pickled, it makes a directory where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", ".metadata"])
def test_a_planted_pickle_does_not_run_even_with_a_right_digest(tmp_path: Path, name: str) -> None:
    evil = pickle.dumps(Planted(tmp_path / "ran"))
    pickle.loads(evil)
    (tmp_path / "ran").rmdir()

    path = checkpoint.save(tmp_path / "checkpoints", sample())
    (path / name).write_bytes(evil)
    marker = json.loads((path / "complete.json").read_bytes())
    marker["sha256"][name] = hashlib.sha256(evil).hexdigest()
    (path / "complete.json").write_text(json.dumps(marker))
    if name == ".metadata":
        assert checkpoint.load(path).step == 40
    else:
        with pytest.raises(Damaged):
            checkpoint.load(path)
    checkpoint.prune(tmp_path / "checkpoints", 1)
    checkpoint.clear_up(tmp_path / "checkpoints")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"position": "2560"}, "state.json has no position"),
        ({"config": None}, "state.json has no config"),
        ({"identity": []}, "state.json has no identity"),
        ({"scaler": 1}, "state.json has no scaler"),
        ({"schema_version": 2}, "state.json has no schema_version 1"),
        ({"step": 39}, "state.json is of step 39"),
        ({"step": True}, "state.json has no step"),
    ],
)
def test_a_state_that_is_not_ours_is_refused_even_with_a_right_digest(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = checkpoint.save(tmp_path, sample())
    content = json.dumps(json.loads((path / "state.json").read_bytes()) | changed).encode()
    (path / "state.json").write_bytes(content)
    marker = json.loads((path / "complete.json").read_bytes())
    marker["sha256"]["state.json"] = hashlib.sha256(content).hexdigest()
    (path / "complete.json").write_text(json.dumps(marker))
    with pytest.raises(Damaged) as damage:
        checkpoint.load(path)
    assert str(damage.value) == message


HOST = os.uname().nodename


def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def ours() -> int:
    """Our own id, which in a container may have been another process's before."""
    return os.getpid()


def leave_behind(directory: Path, *names: str) -> None:
    """What a process that was killed in a save leaves."""
    for name in names:
        (directory / name).mkdir(parents=True)
        (directory / name / "model.safetensors").write_bytes(b"half")


def test_what_a_killed_save_left_is_no_checkpoint_and_the_next_save_clears_it_away(tmp_path: Path) -> None:
    names = (".step-00000040{}", ".step-00000020.deleted{}", ".rehearsal{}", ".rehearsal.final{}")
    leave_behind(
        tmp_path, *(name.format(f".{HOST}.{dead}.tmp") for name in names for dead in (gone(), ours()))
    )
    assert list(checkpoint.newest_first(tmp_path)) == []
    checkpoint.save(tmp_path, sample(41))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000041"]


def test_what_another_process_is_about_to_write_is_left_alone(tmp_path: Path) -> None:
    alive, elsewhere = f"{HOST}.{os.getppid()}.tmp", f"gpu-a09.{gone()}.tmp"
    checkpoint.save(tmp_path, sample()).rename(tmp_path / f".step-00000040.replaced.{alive}")
    leave_behind(tmp_path, *(f".step-00000040.{theirs}" for theirs in (alive, elsewhere)), ".other.tmp")
    before = sorted(tmp_path.iterdir())
    checkpoint.save(tmp_path, sample(41))
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "step-00000041"])


def test_what_was_left_on_another_host_is_cleared_away_when_nothing_was_written_for_an_hour(
    tmp_path: Path,
) -> None:
    leave_behind(tmp_path, ".step-00000040.gpu-a09.99.tmp", ".step-00000041.gpu-a09.99.tmp")
    then = time.time() - 3700
    for path in (
        ".step-00000040.gpu-a09.99.tmp",
        *(f".step-0000004{step}.gpu-a09.99.tmp" for step in (0, 1)),
    ):
        os.utime(tmp_path / path, (then, then))
    os.utime(tmp_path / ".step-00000040.gpu-a09.99.tmp" / "model.safetensors", (then, then))
    checkpoint.clear_up(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".step-00000041.gpu-a09.99.tmp"]


def test_a_checkpoint_that_was_about_to_be_replaced_gets_its_name_back(tmp_path: Path) -> None:
    ended = f"{HOST}.{gone()}.tmp"
    checkpoint.save(tmp_path, sample()).rename(tmp_path / f".step-00000040.replaced.{ended}")
    leave_behind(tmp_path, f".step-00000040.{ended}")
    checkpoint.clear_up(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000040"]
    assert checkpoint.load(tmp_path / "step-00000040").step == 40


def test_what_was_replaced_is_cleared_away(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, sample())
    leave_behind(tmp_path, f".step-00000040.replaced.{HOST}.{gone()}.tmp")
    checkpoint.clear_up(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000040"]


def test_a_save_that_fails_before_its_name_is_given_changes_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, sample())
    before = (tmp_path / "step-00000040" / "complete.json").stat()

    def fail() -> None:
        (temporary,) = (path for path in tmp_path.iterdir() if path.name.startswith("."))
        assert len(list(temporary.iterdir())) == 4
        raise OSError(5, "Input/output error")

    for step in (40, 41):
        draft = Draft()
        draft.take(sample(step))
        with pytest.raises(OSError, match="Input/output error"):
            draft.write(tmp_path, before_commit=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000040"]
    assert (tmp_path / "step-00000040" / "complete.json").stat() == before


def test_files_and_directories_are_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sizes: dict[str, int] = {}
    fsync, rename = os.fsync, Path.rename

    def spy(descriptor: int) -> None:
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(f"sync {file.name}")
        sizes[file.name] = os.fstat(descriptor).st_size
        fsync(descriptor)

    def name(self: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(Path, "rename", name)
    draft = Draft()
    draft.take(sample())
    draft.write(tmp_path / "checkpoints", before_commit=lambda: events.append("commit"))
    assert events == [
        f"sync {tmp_path.name}",
        "sync model.safetensors",
        "sync optimizer.safetensors",
        "sync state.json",
        "sync complete.json",
        f"sync .step-00000040.{HOST}.{os.getpid()}.tmp",
        "commit",
        "rename step-00000040",
        "sync checkpoints",
    ]
    files = list((tmp_path / "checkpoints/step-00000040").iterdir())
    assert len(files) == 4
    assert {file.name: file.stat().st_size for file in files}.items() <= sizes.items()


def test_a_rehearsal_leaves_nothing_and_fails_where_a_save_would(tmp_path: Path) -> None:
    checkpoint.rehearse(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        checkpoint.rehearse(tmp_path / "file" / "checkpoints")


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, sample())
    shutil.rmtree(path)
    path.mkdir()
    (path / "junk").touch()
    checkpoint.save(tmp_path, sample())
    assert checkpoint.load(path).step == 40
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000040"]


def test_the_newest_comes_first_and_pruning_keeps_as_many_as_asked(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        checkpoint.save(tmp_path, sample(step))
    (tmp_path / "step-x").mkdir()
    names = ["step-00000100", "step-00000020", "step-00000009"]
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == names
    checkpoint.prune(tmp_path, 0)
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == names
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000100", "step-x"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_linked_checkpoint_is_replaced_pruned_and_cleared_away_and_its_target_stays(
    tmp_path: Path, is_there: bool
) -> None:
    directory, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    directory.mkdir()
    if is_there:
        checkpoint.save(elsewhere, sample(40))
    (directory / "step-00000020").symlink_to(elsewhere / "step-00000040")
    (directory / "step-00000040").symlink_to(elsewhere / "step-00000040")
    (directory / f".step-00000010.deleted.{HOST}.{gone()}.tmp").symlink_to(elsewhere / "step-00000040")
    checkpoint.save(directory, sample(40))
    assert not (directory / "step-00000040").is_symlink()
    checkpoint.prune(directory, 1)
    assert [path.name for path in directory.iterdir()] == ["step-00000040"]
    assert elsewhere.exists() == is_there
    if is_there:
        assert checkpoint.load(elsewhere / "step-00000040").step == 40


def test_pruning_keeps_the_best_beside_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        checkpoint.save(tmp_path, sample(step))
    checkpoint.prune(tmp_path, 2, {5: 1.0, 10: 0.7, 20: 0.9, 30: 0.9, 50: 0.1})
    names = ["step-00000050", "step-00000040", "step-00000030"]
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == names
    checkpoint.prune(tmp_path, 1, {40: 0.5})
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == names[:2]
    checkpoint.prune(tmp_path, 1, {})
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == names[:1]


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        checkpoint.save(tmp_path, sample(step))
    os.truncate(tmp_path / "step-00000040" / "model.safetensors", 100)
    (tmp_path / "step-00000030" / "complete.json").unlink()
    assert checkpoint.newest_whole(tmp_path) == 20
    checkpoint.prune(tmp_path, 1)
    names = ["step-00000040", "step-00000030", "step-00000020"]
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == names


def test_a_damaged_checkpoint_is_deleted_once_it_is_older_than_those_that_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        checkpoint.save(tmp_path, sample(step))
    for step in (10, 30):
        (tmp_path / f"step-000000{step}" / "complete.json").unlink()
    checkpoint.prune(tmp_path, 3)
    assert len(list(tmp_path.iterdir())) == 4
    checkpoint.prune(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 3
    checkpoint.prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000040"]


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "complete.json"])
def test_what_is_no_file_in_a_checkpoint_is_damage_and_not_waited_for(tmp_path: Path, name: str) -> None:
    path = checkpoint.save(tmp_path, sample())
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(Damaged, match=f"^{name}: it is a FIFO, not a regular file$"):
        checkpoint.load(path)
    checkpoint.prune(tmp_path, 1)
    assert path.exists()


def test_what_another_process_removes_meanwhile_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, sample(step))
    listed = list(checkpoint.newest_first(tmp_path))
    monkeypatch.setattr(checkpoint, "newest_first", lambda _: iter(listed))
    shutil.rmtree(listed[1])
    checkpoint.prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [listed[0].name]
