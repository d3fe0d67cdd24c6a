"""Files that only their owner can read, whole or not there."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from entrypoint.core.errors import BadInput
from entrypoint.core.plain import plain


def write_private(path: Path, content: str | bytes) -> None:
    """Writes a file that only its owner can read, by rename. Raises OSError."""
    raw = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{threading.get_native_id()}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(raw)
        partial.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_output(path: Path, content: str | bytes, command: str) -> None:
    """Writes what a command makes, where -o says. Raises BadInput if that cannot be."""
    try:
        if path.is_dir():
            raise IsADirectoryError(21, os.strerror(21))
        write_private(path, content)
    except OSError as error:
        raise BadInput(
            "output-unwritable",
            f"{command}: {plain(str(path))} cannot be written: {error.strerror}: give another file with -o",
        ) from None
