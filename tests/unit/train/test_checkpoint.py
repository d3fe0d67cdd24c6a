import hashlib
import json
import os
import pickle
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from train import checkpoint
from train.checkpoint import Checkpoint, Damaged


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
        state={"position": 2560, "config": {"lr": 0.1 + 0.2}, "scaler": {}},
    )


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
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
    assert not (tmp_path / "ran").exists()


def test_a_crash_while_saving_leaves_no_checkpoint_and_the_next_save_clears_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        if path.name == "state.json":
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(tmp_path, sample())
    assert list(checkpoint.newest_first(tmp_path)) == []
    checkpoint.save(tmp_path, sample(41))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000041"]


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
