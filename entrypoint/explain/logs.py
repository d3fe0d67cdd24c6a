"""Which files are read as logs, and how: `read_all` reads what was given, bounded in files, depth and bytes.

No device, FIFO or link to a folder is opened, and no file that is no text. gzip is read with a bound on what
comes out of it.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import BinaryIO, cast

from entrypoint.core import files
from entrypoint.core.frozen import dataclass
from entrypoint.explain.scan import Scan

MOST_FILES, MOST_DEEP = 20_000, 8
MOST_LOOKED_AT = 200_000
"""Names in folders."""
MOST_BYTES = 16 << 30
"""Of all logs together; and of what comes out of one gzip:"""
MOST_UNPACKED = 4 << 30
HEAD = 1 << 13
SHORT = 1 << 8
"""A beginning of fewer bytes counts as one of so many: a few CONTROLS there are no sign."""
CONTROLS = bytes({*range(1, 32), 127} - set(b"\a\b\t\n\v\f\r\x1b"))
"""Characters that a terminal's output does not have; of compressed bytes they are a tenth."""
NO_LOGS = {
    *(".pt", ".pth", ".safetensors", ".bin", ".ckpt", ".npz", ".npy", ".sif", ".sqsh", ".tar", ".so", ".whl"),
    *(".png", ".jpg", ".pdf", ".parquet", ".arrow", ".h5", ".pyc", ".py", ".zip", ".bz2", ".xz", ".zst"),
}

OWN = ("join.key", "report.html")
"""What we leave in a run directory that is no log: the page quotes those that are."""


@dataclass
class Read:
    """What became of the files; grows while they are read."""

    count: int = 0
    skipped: list[str] = field(default_factory=list)
    """Why a file was not read, or not to its end."""


def read_all(path: Path, scan: Scan) -> Read:
    """Reads a file or all logs of a folder. Raises OSError and files.Unfit where it is one file, and OSError
    for a folder that is closed to us."""
    done = Read()
    if stat.S_ISDIR(path.stat().st_mode):
        os.scandir(path).close()
        read_folder(path, "", scan, done)
    else:
        _one(path, path.name, scan, done)
    return done


def read_folder(path: Path, prefix: str, scan: Scan, done: Read) -> None:
    """Reads all logs of a folder. `prefix`: of their names, as they are shown."""
    for one in _in_folder(path, prefix, done):
        if scan.size >= MOST_BYTES:
            done.skipped.append(f"the rest: more than {MOST_BYTES >> 30} GiB")
            return
        read_file(one, f"{prefix}{one.relative_to(path)}", scan, done)


def read_file(path: Path, name: str, scan: Scan, done: Read) -> None:
    """Reads one of several: what cannot be read is told, and does no harm."""
    try:
        _one(path, name, scan, done)
    except (OSError, ValueError) as error:
        done.skipped.append(f"{name}: {getattr(error, 'strerror', None) or error}")


def read_stream(stream: BinaryIO, name: str, scan: Scan) -> Read:
    """Reads what is piped in."""
    done = Read(count=1)
    head = _peek(stream)
    if not _read(cast(BinaryIO, _Joined(head, stream)), name, head, scan):
        done.skipped.append(f"{name}: more than is read")
    return done


def _peek(stream: BinaryIO) -> bytes:
    head = b""
    while len(head) < HEAD:
        more = stream.read(HEAD - len(head))
        if not more:
            break
        head += more
    return head


class _Joined(io.RawIOBase):
    """A stream with its beginning put back."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._head:
            cut = len(self._head) if size < 0 else size
            head, self._head = self._head[:cut], self._head[cut:]
            return head
        return self._rest.read(size)


def _in_folder(top: Path, prefix: str, done: Read) -> Iterator[Path]:
    """Regular files, sorted, of this folder and those in it."""

    def miss(error: OSError) -> None:
        done.skipped.append(f"{prefix}{os.path.relpath(error.filename, top)}: {error.strerror}")

    found, looked = 0, 0
    for folder, folders, names in os.walk(top, onerror=miss, followlinks=False):
        depth = len(Path(folder).relative_to(top).parts)
        folders[:] = sorted(name for name in folders if name not in ("checkpoints", ".git", "__pycache__"))
        if depth >= MOST_DEEP:
            folders[:] = []
        for name in sorted(names):
            looked += 1
            if looked > MOST_LOOKED_AT or found >= MOST_FILES:
                most = MOST_FILES if found >= MOST_FILES else MOST_LOOKED_AT
                done.skipped.append(f"the rest: more than {most} files")
                return
            path = Path(folder, name)
            if path.suffix.lower() in NO_LOGS or name in OWN:
                continue
            try:
                if not stat.S_ISREG(path.stat().st_mode):
                    continue
            except FileNotFoundError:  # a link to nowhere
                continue
            except OSError as error:
                miss(error)
                continue
            found += 1
            yield path


def _one(path: Path, name: str, scan: Scan, done: Read) -> None:
    with files.open_regular(path) as file:
        head = file.read(HEAD)
        file.seek(0)
        if is_binary(head):
            raise files.Unfit("it is no text")
        done.count += 1
        if not _read(file, name, head, scan):
            done.skipped.append(f"{name}: only its beginning was read")


def is_binary(head: bytes) -> bool:
    """Whether this beginning of a file is no text, nor gzip. Text in UTF-16 is one."""
    if head.startswith((b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")):
        return False
    return (
        head.count(b"\0") * 10 > len(head)
        or (len(head) - len(head.translate(None, CONTROLS))) * 20 > max(len(head), SHORT)
        or head.startswith((b"\x7fELF", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))
    )


def _read(file: BinaryIO, name: str, head: bytes, scan: Scan) -> bool:
    """Whether it was read to its end."""
    if not head.startswith(b"\x1f\x8b"):
        return scan.read(file, name, max(1, MOST_BYTES - scan.size))
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            return scan.read(cast(BinaryIO, unpacked), name, MOST_UNPACKED)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return False  # what came out so far was read
