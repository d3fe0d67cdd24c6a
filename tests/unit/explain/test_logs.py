"""Which files are read as logs, in which order, and how much of them."""

import errno
import gzip
import io
import os
import random
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from entrypoint.core import files
from entrypoint.explain import logs
from entrypoint.explain.scan import Index, Scan

NO_CAUSES = Index([])


class Kept(Scan):
    """Keeps what is read, at most `most` bytes of each file."""

    def __init__(self) -> None:
        super().__init__(NO_CAUSES)
        self.texts: dict[str, bytes] = {}
        self.most: list[int] = []

    def read(self, file: BinaryIO, name: str, most: int) -> bool:
        self.most.append(most)
        content = b""
        while more := file.read(min(1000, most - len(content))):
            content += more
            self.texts[name] = content
        self.size += len(content)
        return len(content) < most


@pytest.fixture
def scan() -> Kept:
    return Kept()


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")


def test_a_folder_is_read_by_name_its_own_files_first(tmp_path: Path, scan: Kept) -> None:
    fill(tmp_path, "b/2", "b/1", "a/x/3.log", "z.out", "c.err", "b.tar.txt", "join.keys")
    (tmp_path / "d.log").symlink_to(tmp_path / "z.out")
    done = logs.read_all(tmp_path, scan)
    names = ["b.tar.txt", "c.err", "d.log", "join.keys", "z.out", "a/x/3.log", "b/1", "b/2"]
    assert list(scan.texts) == names
    assert scan.texts["b/1"] == b"b/1\n"
    assert (done.count, done.skipped) == (8, [])


def test_what_cannot_be_a_log_is_passed_over_in_silence(tmp_path: Path, scan: Kept) -> None:
    binaries = ["x.pt", "x.PTH", "x.safetensors", "x.tar", "x.zst", "x.zip", "x.py", "x.so"]
    fill(tmp_path, *binaries, "join.key", "a/join.key", "checkpoints/x", ".git/x", "__pycache__/x", "a/x")
    fill(tmp_path / "other", "x")
    (tmp_path / "linked").symlink_to(tmp_path / "other")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    done = logs.read_all(tmp_path, scan)
    assert list(scan.texts) == ["a/x", "other/x"]
    assert (done.count, done.skipped) == (2, [])


def test_folders_are_read_eight_deep(tmp_path: Path, scan: Kept) -> None:
    fill(tmp_path, "1/2/3/4/5/6/7/8/x", "1/2/3/4/5/6/7/8/9/x")
    logs.read_all(tmp_path, scan)
    assert list(scan.texts) == ["1/2/3/4/5/6/7/8/x"]


@pytest.mark.parametrize(("bound", "skipped"), [(4, []), (3, ["the rest: more than 3 files"])])
def test_no_more_than_so_many_files_are_read(
    bound: int, skipped: list[str], tmp_path: Path, scan: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_FILES", bound)
    fill(tmp_path, "1", "2", "3", "a/4", "5.pt")
    done = logs.read_all(tmp_path, scan)
    assert (done.count, done.skipped) == (bound, skipped)


@pytest.mark.parametrize(("bound", "count"), [(3, 1), (4, 2)])
def test_no_more_than_so_many_names_are_looked_at(
    bound: int, count: int, tmp_path: Path, scan: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_LOOKED_AT", bound)
    fill(tmp_path, "1.pt", "2.pt", "3", "4", "a/5")
    done = logs.read_all(tmp_path, scan)
    assert (done.count, done.skipped) == (count, [f"the rest: more than {bound} files"])


def test_a_folder_is_read_up_to_16_gib_of_all_its_files(tmp_path: Path, scan: Kept) -> None:
    fill(tmp_path, "a", "b", "c")
    scan.size = (16 << 30) - 4
    done = logs.read_all(tmp_path, scan)
    assert scan.texts == {"a": b"a\n", "b": b"b\n"}
    assert scan.most == [4, 2]
    assert (done.count, done.skipped) == (2, ["b: only its beginning was read", "the rest: more than 16 GiB"])


def test_a_file_beyond_that_is_read_a_byte_far(tmp_path: Path, scan: Kept) -> None:
    fill(tmp_path, "a")
    scan.size = 17 << 30
    assert logs.read_all(tmp_path / "a", scan).skipped == ["a: only its beginning was read"]
    assert scan.texts == {"a": b"a"}


def test_a_file_that_cannot_be_read_does_not_keep_others_from_it(tmp_path: Path, scan: Kept) -> None:
    fill(tmp_path, "a", "c")
    (tmp_path / "b").write_bytes(b"\x7fELF")
    done = logs.Read()
    logs.read_folder(tmp_path, "run/", scan, done)
    logs.read_file(tmp_path / "d", "the last", scan, done)
    logs.read_file(tmp_path, "a folder", scan, done)
    assert list(scan.texts) == ["run/a", "run/c"]
    assert done.count == 2
    assert done.skipped == [
        "run/b: it is no text",
        "the last: No such file or directory",
        "a folder: it is a directory, not a regular file",
    ]


def test_the_only_file_that_was_given_must_be_readable(tmp_path: Path, scan: Kept) -> None:
    (tmp_path / "x").write_bytes(b"PK\x03\x04")
    with pytest.raises(files.Unfit, match="it is no text"):
        logs.read_all(tmp_path / "x", scan)
    with pytest.raises(FileNotFoundError):
        logs.read_all(tmp_path / "y", scan)


TEXT = b"step 1\n" * 3000


@pytest.mark.parametrize(
    ("content", "read", "is_whole"),
    [
        (TEXT, TEXT, True),
        (b"", b"", True),
        (gzip.compress(TEXT), TEXT, True),
        (gzip.compress(TEXT)[:-1], TEXT, False),
        (gzip.compress(TEXT) + b"x", TEXT, False),
        (gzip.compress(TEXT)[:10] + b"\xff" * 9, b"", False),
        (b"\x1f\x8b\x00", b"", False),
    ],
    ids=["text", "empty", "gzip", "gzip that ends early", "gzip and more", "broken gzip", "no gzip"],
)
def test_a_gzip_is_read_as_far_as_it_can_be(
    content: bytes, read: bytes, is_whole: bool, tmp_path: Path, scan: Kept
) -> None:
    (tmp_path / "x").write_bytes(content)
    done = logs.read_all(tmp_path / "x", scan)
    assert scan.texts.get("x", b"") == read
    assert (done.count, done.skipped) == (1, [] if is_whole else ["x: only its beginning was read"])
    piped = logs.read_stream(io.BytesIO(content), "-", scan)
    assert scan.texts.get("-", b"") == read
    assert (piped.count, piped.skipped) == (1, [] if is_whole else ["-: more than is read"])


def test_what_comes_out_of_a_gzip_has_a_bound_of_its_own(tmp_path: Path, scan: Kept) -> None:
    (tmp_path / "x").write_bytes(gzip.compress(TEXT))
    logs.read_all(tmp_path / "x", scan)
    assert scan.most == [4 << 30]


class Slow(io.RawIOBase):
    """Gives a byte at a time, as a pipe may."""

    def __init__(self, content: bytes) -> None:
        self._rest = content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        given, self._rest = self._rest[:1], self._rest[1:]
        buffer[: len(given)] = given
        return len(given)


@pytest.mark.parametrize("content", [TEXT, gzip.compress(TEXT)], ids=["text", "gzip"])
def test_a_pipe_that_gives_little_at_a_time_is_read_to_its_end(content: bytes, scan: Kept) -> None:
    slow = logs.read_stream(cast(BinaryIO, Slow(content)), "-", scan)
    assert slow.skipped == []
    assert scan.texts == {"-": TEXT}


@pytest.mark.parametrize(
    ("head", "is_binary"),
    [
        (b"", False),
        (b"a line\n", False),
        (b"\0" + b"a" * 9, False),
        (b"\0" + b"a" * 8, True),
        (b"\x1f\x8b\0\0\0", False),
        ("\ufefftext".encode("utf-16-le"), False),
        ("\ufefftext".encode("utf-16-be"), False),
        (b"\x7fELF\1", True),
        (b"PK\x03\x04", True),
        (b"BZh9", True),
        (b"\xfd7zXZ", True),
        (b"\x28\xb5\x2f\xfd\x24", True),
        (random.Random(0).randbytes(1000), True),
        (b"\x01" * 16 + b"a" * 303, True),
        (b"\x01" * 16 + b"a" * 304, False),
        (b"\x01" * 12 + b"a", False),
        (b"\r\x1b[1m\b\b\b 7%\a\t\n", False),
        ("größer".encode("latin-1"), False),
    ],
)
def test_text_is_told_from_what_is_none_by_its_beginning(head: bytes, is_binary: bool) -> None:
    assert logs.is_binary(head) == is_binary


def test_what_is_closed_to_us_is_told(tmp_path: Path, scan: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a/x", "b/y", "z")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "b":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("none")
    assert logs.read_all(tmp_path, scan).skipped == [
        "loop: Too many levels of symbolic links",
        "b: Permission denied",
    ]
    assert list(scan.texts) == ["z", "a/x"]
    done = logs.Read()
    logs.read_folder(tmp_path, "run/", scan, done)
    assert done.skipped[1:] == ["run/b: Permission denied"]
    with pytest.raises(PermissionError):
        logs.read_all(tmp_path / "b", scan)


def test_a_page_of_ours_is_no_log(tmp_path: Path, scan: Kept) -> None:
    fill(tmp_path, "a/report.html", "report.html", "other.html")
    assert (logs.read_all(tmp_path, scan).skipped, list(scan.texts)) == ([], ["other.html"])
