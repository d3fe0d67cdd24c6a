"""Files that only their owner can read: whole, or not there."""

import os
from pathlib import Path

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.core.private import write_output, write_private


@pytest.mark.parametrize(("content", "raw"), [("é\n", b"\xc3\xa9\n"), (b"\xff\0", b"\xff\0"), ("", b"")])
def test_it_holds_just_the_content_for_its_owner_alone(
    tmp_path: Path, content: str | bytes, raw: bytes
) -> None:
    file = tmp_path / "file"
    for _ in range(2):  # the second time it is there already
        write_private(file, content)
        assert (file.read_bytes(), oct(file.stat().st_mode & 0o777)) == (raw, "0o600")
        file.write_bytes(b"much longer than before")
        file.chmod(0o644)
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_written_leaves_nothing_of_it_and_what_was_there(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    (taken / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_private(taken, "x")
    assert list(tmp_path.iterdir()) == [taken]
    with pytest.raises(FileNotFoundError):
        write_private(tmp_path / "none/file", "x")


@pytest.mark.parametrize("planted", ["link", "file"])
def test_nothing_that_another_user_has_planted_is_written_to(
    tmp_path: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious, names, real = tmp_path / "precious", [], os.open
    precious.write_text("kept")

    def plant(path: Path, *more: int) -> int:
        names.append(path)
        path.symlink_to(precious) if planted == "link" else path.hardlink_to(precious)
        return real(path, *more)

    monkeypatch.setattr("os.open", plant)
    for _ in range(2):
        with pytest.raises(FileExistsError):
            write_private(tmp_path / "report.html", "private")
    assert precious.read_text() == "kept"
    assert len(set(names)) == 2  # no name that can be foreseen


@pytest.mark.parametrize(
    ("name", "why"),
    [("", "Is a directory"), ("none/a\nb", "No such file or directory")],
)
def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(BadInput) as refused:
        write_output(tmp_path / name, "x", "report")
    shown = str(tmp_path / name).replace("\n", " ")
    assert str(refused.value) == f"report: {shown} cannot be written: {why}: give another file with -o"


def test_the_current_directory_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"^report: \. cannot be written: Is a directory: "):
        write_output(Path(), "x", "report")


def test_an_output_is_the_content(tmp_path: Path) -> None:
    write_output(tmp_path / "page.html", "<p>", "report")
    assert (tmp_path / "page.html").read_text() == "<p>"


@pytest.mark.parametrize("follow", [True, False])
def test_what_is_no_regular_file_stays_what_it_is(tmp_path: Path, follow: bool) -> None:
    """As root a rename puts a file into the place of /dev/null."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BadInput) as refused:
        write_output(tmp_path / "fifo", "x", "report", follow=follow)
    why = "it is a FIFO, not a regular file"
    assert str(refused.value) == (
        f"report: {tmp_path}/fifo cannot be written: {why}: give another file with -o"
    )
    assert (tmp_path / "fifo").is_fifo()


def test_an_output_goes_through_a_link_to_what_that_leads_to(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/page").write_text("before")
    for name, target in (("link", "there/page"), ("new", "there/new"), ("twice", "link")):
        (tmp_path / name).symlink_to(target)
        write_output(tmp_path / name, name, "report")
        assert (str((tmp_path / name).readlink()), (tmp_path / target).read_text()) == (target, name)
    os.mkfifo(tmp_path / "there/fifo")
    for name, target, why in (
        ("pipe", "there/fifo", "it is a FIFO, not a regular file"),
        ("loop", "loop", "Too many levels of symbolic links"),
    ):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(BadInput, match=rf"^report: {tmp_path}/{name} cannot be written: {why}: "):
            write_output(tmp_path / name, "x", "report")
        assert (tmp_path / name).is_symlink()


def test_a_link_that_nobody_named_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("before")
    (tmp_path / "report.html").symlink_to("mine")
    write_output(tmp_path / "report.html", "x", "report", follow=False)
    assert ((tmp_path / "mine").read_text(), (tmp_path / "report.html").is_symlink()) == ("before", False)
