"""The command that does a run again, and what is said where something cannot be had."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from entrypoint.errors import BadInput
from entrypoint.record import rerun

ID = "01234567-89ab-cdef-0123-456789abcdef"
LAST: dict[str, Any] = {
    "attempt": 0,
    "nodes": ["a", "b"],
    "nproc_per_node": 2,
    "device": "cpu",
    "mode": "torchrun",
    "threads": "1",
    "checkpoint": None,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the image of the run, on a machine without a scheduler."""
    (tmp_path / "home/containers").mkdir(parents=True)
    (tmp_path / "home/containers/image.sif").write_bytes(bytes(48) + uuid.UUID(ID).bytes + bytes(64))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


class Started:
    words: list[str]

    def start(self, words: list[str]) -> int:
        self.words = words
        return 7


def run(**keys: object) -> Path:
    path = Path("run")
    path.mkdir()
    manifest = {"schema_version": 2, "command": ["-m", "train", "--config", "digits"], "attempts": [LAST]}
    (path / "manifest.json").write_text(json.dumps(manifest | keys))
    return path


def test_the_same_again_is_one_command(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = Started()
    assert rerun.main(run(image={"id": ID}), home, "", {}, started.start) == 7
    line = (
        f"apptrain run --nodes 2 --image {home}/containers/image.sif --nproc-per-node 2 --device cpu "
        "--omp-num-threads 1 -- -m train --config digits"
    )
    assert capsys.readouterr() == (f"{line}\n", "")
    assert started.words == line.split()[1:]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"image": {"id": "other"}}, f"image: {{home}}/containers/image.sif is {ID}, the run had other: built anew since"),
        ({"code": {"repository": {"commit": "c0ffee", "remote": "https://x/y"}}}, "code: {here} lacks commit c0ffee: git fetch https://x/y"),
        ({"code": {"repository": {"commit": None, "diff": "code.diff"}}}, "code: the run had changes that no commit has: code.diff"),
        ({"config": {"data.path": "/not/here"}}, "data: /not/here is not here: add data.path=DIR, where it is now"),
        ({"attempts": [LAST | {"checkpoint": {"path": "/not/here"}}]}, "checkpoint: /not/here, from which the run began, is not here"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_a_line(home: Path, keys: dict[str, object], said: str) -> None:
    found = rerun.plan(run(**keys), home, "", {})
    assert found.lacks == [said.format(home=home, here=home.parent)]


def test_secrets_are_asked_for_by_name_and_never_shown(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {
        "command": ["my.py", "--hub=<secret HUB_TOKEN>"],
        "environment": {"values": {}, "names": ["HOME", "HF_TOKEN"]},
    }
    path = run(**keys)
    with pytest.raises(BadInput, match="the command needs HUB_TOKEN: set it here"):
        rerun.main(path, home, "", {}, lambda _: 0)
    shown = capsys.readouterr()
    assert shown.out.endswith("-- my.py '--hub=<secret HUB_TOKEN>'\n")
    assert [line.split()[1] for line in shown.err.splitlines()] == ["HUB_TOKEN", "HF_TOKEN"]
    started = Started()
    rerun.main(path, home, "", {"HUB_TOKEN": "x y", "HF_TOKEN": "z"}, started.start)
    assert started.words[-1] == "--hub=x y"
    assert "x y" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"attempts": []}, "its manifest has no attempt with a command"),
        ({"command": ["my.py", "<secret>"]}, "a secret that no variable had: <secret>"),
    ],
)
def test_what_cannot_be_started_again_is_refused(home: Path, keys: dict[str, object], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        rerun.plan(run(**keys), home, "", {})


def test_a_cluster_needs_a_scheduler_here(home: Path) -> None:
    with pytest.raises(BadInput, match="--cluster generic: neither sbatch nor qsub is in PATH"):
        rerun.plan(run(), home, "generic", {})
