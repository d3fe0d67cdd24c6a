"""What is read of a file that may be anything, and how it is refused."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from entrypoint.core import files
from entrypoint.core.errors import BadInput


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


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (stat.S_IFDIR, "a directory"),
        (stat.S_IFIFO, "a FIFO"),
        (stat.S_IFCHR, "a character device"),
        (stat.S_IFBLK, "a block device"),
        (stat.S_IFSOCK, "a socket"),
        (0o070000, "a special file"),
    ],
)
def test_each_kind_of_file_has_a_name(kind: int, name: str) -> None:
    assert files.kind(kind | 0o644) == name


def test_what_no_file_can_be_called_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("none")
    for name, found in (
        ("file", (True, True)),
        ("", (True, False)),
        ("none", (False, False)),
        ("link", (False, False)),
        ("file/more", (False, False)),
        ("a" * 5000, (False, False)),
        ("a\0", (False, False)),
    ):
        assert (files.exists(tmp_path / name), files.is_regular(tmp_path / name)) == found


def test_a_text_that_is_no_utf_8_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        files.read_text(tmp_path / "file", 5)


def test_json_is_read_as_it_was_written() -> None:
    text = '{"a": [1, -2.5, true, null, "é\\u001b"], "n": 340282366920938463463374607431768211455}'
    assert files.parse_json(text) == {"a": [1, -2.5, True, None, "é\x1b"], "n": 2**128 - 1}
    assert files.parse_json("[" * 32 + "]" * 32) == json.loads("[" * 32 + "]" * 32)
    assert files.parse_json('{"a":' * 32 + "1" + "}" * 32) == json.loads('{"a":' * 32 + "1" + "}" * 32)
    assert files.parse_json("9" * 300) == 10**300 - 1
    assert len(files.parse_json("[" + "0," * 399_999 + "0]")) == 400_000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is no JSON: Expecting value"),
        ('{"a": 1}x', "it is no JSON: Extra data"),
        ("[" * 33 + "]" * 33, "it is nested more than 32 deep"),
        ('{"a":' * 33 + "1" + "}" * 33, "it is nested more than 32 deep"),
        ("[" + "0," * 400_000 + "0]", "it has more than 400000 values"),
        ('{"a":' * 300_000 + "1" + "}" * 300_000, "it is nested more than 32 deep"),
        ("[" + "[]," * 400_000 + "0]", "it has more than 400000 values"),
        ("9" * 301, "a number in it has 301 digits"),
        ("1e999", "a number in it is too large: 1e999"),
        ("-1.00000000000000000000000e999", "a number in it is too large: -1.00000000000000000"),
        ("NaN", "it has NaN, which is no JSON"),
        ("-Infinity", "it has -Infinity, which is no JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_json_is_refused_with_a_short_reason(text: str, why: str) -> None:
    with pytest.raises(files.Unfit) as refused:
        files.parse_json(text)
    assert str(refused.value).startswith(why)
    assert len(str(refused.value)) < 100


def test_a_file_of_json_is_bounded_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("[1, 2]")
    assert files.read_json(path, 6) == [1, 2]
    with pytest.raises(files.Unfit, match="more than 5 bytes"):
        files.read_json(path, 5)


def test_what_is_at_a_path_is_told_also_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("none")
    kinds = {"": stat.S_IFDIR, ".": stat.S_IFDIR, "file": stat.S_IFREG, "none": 0, "link": 0, "file/more": 0}
    kinds |= {"a\0": 0}
    for name, kind in kinds.items():
        assert (stat.S_IFMT(files.mode_at(f"{tmp_path}/{name}")), name) == (kind, name)
        assert files.is_there(tmp_path / name) == (kind != 0)
        assert files.is_directory(tmp_path / name) == (kind == stat.S_IFDIR)


def test_what_cannot_be_seen_of_a_path_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    long = "a" * 300
    for name, why in ((long, "File name too long"), ("loop", "Too many levels of symbolic links")):
        for look in (files.mode_at, files.is_there):
            with pytest.raises(BadInput) as refused:
                look(tmp_path / name)
            assert refused.value.id == "path-unreadable"
            assert str(refused.value) == (
                f"{tmp_path}/{name} cannot be read ({why}): check the path, and that you may read it"
            )
        assert not files.is_directory(tmp_path / name)

    def closed(path: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "stat", closed)
    with pytest.raises(BadInput, match=r"^a/b cannot be read \(Permission denied\): "):
        files.mode_at("a/b/.")


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR]
)
def test_an_error_of_a_path_is_refused_by_the_command_and_no_other(number: int) -> None:
    with pytest.raises(BadInput) as refused, files.refused_if_not_reached():
        raise OSError(number, os.strerror(number), "a\nb")
    assert str(refused.value) == (
        f"a b cannot be read ({os.strerror(number)}): check the path, and that you may read it"
    )
    with pytest.raises(OSError, match=os.strerror(number)), files.refused_if_not_reached():
        raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match="No space"), files.refused_if_not_reached():
        raise OSError(errno.ENOSPC, "No space", "a")


def test_a_file_that_has_nothing_for_now_is_an_error_and_not_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /proc/kmsg is, which is a regular file."""
    os.mkfifo(tmp_path / "kmsg")
    writer = os.open(tmp_path / "kmsg", os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setattr(stat, "S_ISREG", lambda _: True)
    with pytest.raises(BlockingIOError, match="Resource temporarily unavailable"):
        files.read(tmp_path / "kmsg", 5)
    os.write(writer, b"123")
    with files.open_regular(tmp_path / "kmsg") as file:
        assert file.read(3) == b"123"
    os.close(writer)
