"""What is read of a file that may be anything, and how it is refused."""

import os
from pathlib import Path

import pytest

from entrypoint import files


def test_a_regular_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert files.read(path, 5) == b"12345"
    with pytest.raises(files.Unfit, match=r"^it has more than 4 bytes$"):
        files.read(path, 4)


def test_what_has_no_size_of_its_own_is_read_too() -> None:
    assert files.read_text(Path("/proc/self/stat"), 4096).startswith(f"{os.getpid()} ")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    kinds = {tmp_path / "fifo": "a FIFO", tmp_path: "a directory", Path("/dev/zero"): "a character device"}
    for path, kind in kinds.items():
        with pytest.raises(files.Unfit, match=rf"^it is {kind}, not a regular file$"):
            files.read(path, 5)


def test_a_text_that_is_no_utf_8_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        files.read_text(tmp_path / "file", 5)
