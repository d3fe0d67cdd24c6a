"""Unpacks Debian packages into a directory, with Python alone: `python unpack.py FOLDER ROOT`.

The recipe's %setup runs it, so that a machine that builds needs none of Debian's tools. What it lays out in
ROOT is enough to run dpkg there, which then installs all packages properly. FOLDER has a file `seed` with
their names.

A package is an `ar` archive whose member data.tar.* holds the files. They were checked against their hashes;
even so nothing is written outside of ROOT.
"""

from __future__ import annotations

import io
import lzma
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

MAGIC: Final = b"!<arch>\n"
HEADER: Final = 60
"""Bytes before each member of an `ar` archive: its name in the first 16, its size in the 10 from 48 on."""
LEFT_OUT: Final = ("usr/share/man/", "usr/share/info/", "usr/share/locale/", "usr/share/doc/")
"""What dpkg is told to leave out in the image too."""
SEED: Final = "seed"
"""The file of FOLDER that names the packages to unpack, one a line, in this order."""
STATUS: Final = ("status", "available")
"""Files without which dpkg does not begin."""


class Unpackable(Exception):
    """A package that this module cannot read."""


def main(arguments: Sequence[str]) -> int:
    folder, root = map(Path, arguments)
    os.umask(0o022)
    for name in (folder / SEED).read_text(encoding="utf-8").splitlines():
        unpack(folder / name, root)
    state = root / "var/lib/dpkg"
    for file in STATUS:
        (state / file).touch()
    return 0


def unpack(package: Path, root: Path) -> None:
    """Write the files of a package below `root`; what is there already is replaced. Raises Unpackable."""
    with package.open("rb") as file, tarfile.open(fileobj=_data(package, file), mode="r|") as files:
        for member in files:
            name = os.path.normpath(member.name).lstrip("/")
            if name != "." and not name.startswith(LEFT_OUT):
                _write(files, member, root, name)


def _data(package: Path, file: IO[bytes]) -> IO[bytes]:
    """The package's data.tar, uncompressed."""
    if file.read(len(MAGIC)) != MAGIC:
        raise Unpackable(f"{package} is not a Debian package")
    while len(header := file.read(HEADER)) == HEADER:
        name, size = header[:16].decode("ascii").strip().rstrip("/"), int(header[48:58])
        if name == "data.tar.xz":
            return io.BufferedReader(lzma.LZMAFile(io.BytesIO(file.read(size))))
        if name == "data.tar":
            return io.BytesIO(file.read(size))
        if name.startswith("data.tar"):
            raise Unpackable(f"{package}: {name} is packed in a way that Python 3.9 cannot read")
        file.seek(size + size % 2, os.SEEK_CUR)
    raise Unpackable(f"{package} holds no files")


def _write(files: tarfile.TarFile, member: tarfile.TarInfo, root: Path, name: str) -> None:
    path = _inside(root, name)
    if member.isdir():
        if not path.is_dir():  # A link to one, as /bin, stays.
            path.mkdir(parents=True)
            path.chmod(stat.S_IMODE(member.mode))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.exists():
        path.unlink()
    if member.issym():
        path.symlink_to(member.linkname)
    elif member.islnk():
        os.link(_inside(root, os.path.normpath(member.linkname).lstrip("/")), path)
    elif member.isreg():
        content = files.extractfile(member)
        assert content is not None
        with path.open("wb") as target:
            shutil.copyfileobj(content, target, 1 << 20)
        path.chmod(stat.S_IMODE(member.mode))
    else:
        raise Unpackable(f"{member.name} is neither a file, a directory nor a link")


def _inside(root: Path, name: str) -> Path:
    """`name` below `root`. Raises Unpackable if a link leads out of it."""
    path = root / name
    if not path.parent.resolve().is_relative_to(root.resolve()):
        raise Unpackable(f"{name} would be written outside of {root}")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
