"""The groups of processes that bound the test cluster's nodes: they are removed, in a bounded time."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.vcluster import shares


def test_each_group_that_was_made_is_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []
    monkeypatch.setattr(shares, "CGROUPS", tmp_path)
    monkeypatch.setattr(shares, "_remove", removed.append)
    with ExitStack() as undo:
        group = shares._group("c.n1", undo)
        with pytest.raises(FileExistsError):
            shares._group("c.n1", undo)
        assert removed == []
    assert removed == [group] == [tmp_path / "apptrain.c.n1"]


def test_a_process_that_cannot_be_moved_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "CGROUPS", tmp_path)
    monkeypatch.setattr(shares, "BOUND", 0.1)
    group = tmp_path / "apptrain.c.n1"
    group.mkdir()
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n")  # a plain file: nothing leaves it
    with pytest.raises(TimeoutError, match=f"still has the processes {os.getpid()}"):
        shares._remove(group)
    assert (tmp_path / "cgroup.procs").read_text() == str(os.getpid())
