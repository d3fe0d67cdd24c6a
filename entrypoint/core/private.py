"""Files that only their owner can read, whole or not there."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, by rename."""
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{threading.get_native_id()}")
    try:
        with os.fdopen(
            os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(text)
        partial.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
