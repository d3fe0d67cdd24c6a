"""Debian's packages, unpacked by Python alone."""

import io
import lzma
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from containers import unpack

Member = tuple[str, bytes, str, int]
"""Its name, type, text or target, and mode."""


def deb(path: Path, *members: Member, data: str = "data.tar.xz") -> Path:
    """A package with these files, whose name has an odd number of characters in front of it."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as files:
        for name, kind, text, mode in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, mode
            if kind == tarfile.REGTYPE:
                info.size = len(text)
            else:
                info.linkname = text
            files.addfile(info, io.BytesIO(text.encode()) if kind == tarfile.REGTYPE else None)
    content = tar.getvalue()
    parts = {"debian-binary": b"2.0", "control.tar.gz": b"odd", data: lzma.compress(content)}
    if data == "data.tar":
        parts[data] = content
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, body in parts.items():
            file.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode())
            file.write(body + b"\n" * (len(body) % 2))
    return path


DIR, FILE, LINK, HARD = tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize("data", ["data.tar.xz", "data.tar"])
def test_files_links_and_modes_are_the_packages(tmp_path: Path, data: str) -> None:
    members: list[Member] = [
        ("./", DIR, "", 0o755),
        ("./usr/", DIR, "", 0o755),
        ("./usr/bin/", DIR, "", 0o700),
        ("./usr/bin/tool", FILE, "first", 0o4755),
        ("./usr/bin/same", HARD, "./usr/bin/tool", 0o4755),
        ("./bin", LINK, "usr/bin", 0o777),
        ("./bin/late", FILE, "behind a link", 0o644),
        ("/opt/deep/absolute", FILE, "its folders are in no package", 0o644),
        ("./usr/share/man/man1/tool.1", FILE, "a manual", 0o644),
    ]
    root = tmp_path / "root"
    root.mkdir()
    unpack.unpack(deb(tmp_path / "a.deb", *members, data=data), root)
    assert (root / "usr/bin/tool").read_text() == "first"
    assert (root / "usr/bin/tool").stat().st_mode & 0o7777 == 0o4755
    assert (root / "usr/bin").stat().st_mode & 0o7777 == 0o700
    assert (root / "usr/bin/same").samefile(root / "usr/bin/tool")
    assert (root / "bin").readlink() == Path("usr/bin")
    assert (root / "usr/bin/late").read_text() == "behind a link"
    assert (root / "opt/deep/absolute").is_file()
    assert not (root / "usr/share/man").exists()


def test_a_later_package_replaces_files_and_leaves_a_link_to_a_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (tmp_path / "outside").write_text("of the machine that builds")
    (root / "usr/bin/sh").symlink_to(tmp_path / "outside")
    (root / "usr/bin/awk").write_text("old")
    members: list[Member] = [
        ("./bin/", DIR, "", 0o755),
        ("./bin/sh", FILE, "dash", 0o755),
        ("./bin/awk", LINK, "mawk", 0o777),
    ]
    unpack.unpack(deb(tmp_path / "a.deb", *members), root)
    assert (root / "bin").is_symlink()
    assert (root / "usr/bin/sh").read_text() == "dash"
    assert (tmp_path / "outside").read_text() == "of the machine that builds"
    assert (root / "usr/bin/awk").readlink() == Path("mawk")


@pytest.mark.parametrize(
    ("members", "why"),
    [
        (
            [("./out", LINK, "/tmp", 0o777), ("./out/file", FILE, "x", 0o644)],
            "out/file would be written outside of ",
        ),
        ([("../file", FILE, "x", 0o644)], "../file would be written outside of "),
        ([("./same", HARD, "../file", 0o644)], "../file would be written outside of "),
        ([("./fifo", tarfile.FIFOTYPE, "", 0o644)], "fifo is neither a file, a directory nor a link"),
    ],
)
def test_nothing_is_written_outside_of_the_root(tmp_path: Path, members: list[Member], why: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(unpack.Unpackable, match=why):
        unpack.unpack(deb(tmp_path / "a.deb", *members), root)
    assert not (tmp_path / "file").exists()


def test_what_is_no_package_or_is_packed_otherwise_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.deb").write_bytes(b"PK")
    with pytest.raises(unpack.Unpackable, match="is not a Debian package"):
        unpack.unpack(tmp_path / "no.deb", tmp_path)
    with pytest.raises(unpack.Unpackable, match="holds no files"):
        unpack.unpack(deb(tmp_path / "empty.deb", data="other"), tmp_path)
    other = deb(tmp_path / "a.deb", data="data.tar.zst")
    with pytest.raises(
        unpack.Unpackable, match=r"data\.tar\.zst is packed in a way that Python 3\.9 cannot read"
    ):
        unpack.unpack(other, tmp_path)


def test_the_program_unpacks_what_is_listed_and_prepares_dpkgs_state(tmp_path: Path) -> None:
    folder, root = tmp_path / "debian", tmp_path / "root"
    folder.mkdir()
    root.mkdir()
    state: list[Member] = [
        ("./var/", DIR, "", 0o755),
        ("./var/lib/", DIR, "", 0o755),
        ("./var/lib/dpkg/", DIR, "", 0o755),
    ]
    deb(folder / "dpkg.deb", *state)
    deb(folder / "other.deb", ("./other", FILE, "x", 0o644))
    (folder / unpack.SEED).write_text("dpkg.deb\n")
    subprocess.run([sys.executable, "-I", unpack.__file__, folder, root], check=True, umask=0o077)
    state_files = {path.name: path.stat().st_mode & 0o777 for path in (root / "var/lib/dpkg").iterdir()}
    assert state_files == {"status": 0o644, "available": 0o644}
    assert not (root / "other").exists()
