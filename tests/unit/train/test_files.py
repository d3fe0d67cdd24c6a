"""Files that are whole or absent, on file systems of all kinds."""

import errno
import os
import stat
import time
from pathlib import Path

import pytest

from train import files


def refuse_names(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Has directories not brought to the disk, with this error; returns their descriptors to be."""
    descriptors: list[int] = []
    fsync = os.fsync

    def of_files_alone(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            descriptors.append(descriptor)
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    return descriptors


def test_a_file_system_that_cannot_bring_names_to_the_disk_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = refuse_names(monkeypatch, errno.EINVAL)
    files.replace_json(tmp_path / "result.json", {"steps": 40})
    assert (tmp_path / "result.json").read_text() == '{\n  "steps": 40\n}\n'
    assert len(descriptors) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_a_file_system_that_fails_while_it_brings_them_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = refuse_names(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_directory(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_what_another_hosts_process_writes_is_left_behind_once_it_is_old(tmp_path: Path) -> None:
    folder = tmp_path / ".step-00000040.elsewhere.7.tmp"
    assert not files.is_left_behind(folder)  # its owner has just removed it
    folder.mkdir()
    (folder / "model.safetensors").touch()
    old = time.time() - files.OLD_S - 60
    os.utime(folder, (old, old))
    assert not files.is_left_behind(folder)
    os.utime(folder / "model.safetensors", (old, old))
    assert files.is_left_behind(folder)


@pytest.mark.parametrize("begun", [False, True])
def test_a_file_that_cannot_be_written_leaves_the_one_before_and_says_why(
    tmp_path: Path, begun: bool
) -> None:
    path = tmp_path / "result.json"
    files.replace_json(path, 1)
    assert path.stat().st_mode & 0o777 == 0o600

    def write(partial: Path) -> None:
        if begun:
            partial.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left on device"):
        files.replace(path, write)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("result.json", "1\n")]
