"""Where the tool keeps things between calls, and who may touch them now."""

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Refused(Exception):
    """A test host cannot be had or used; the text is one line that says what to do."""


def cache() -> Path:
    """APPTRAIN_TEST_CACHE, else `apptrain` in the user's cache directory. Needs a local file system (overlayfs)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("APPTRAIN_TEST_CACHE") or f"{base}/apptrain").expanduser().absolute()


@contextmanager
def locked(file: Path, seconds: float) -> Iterator[int]:
    """Holds the lock of `file`; yields its descriptor. A child that inherits it holds the lock, too, until it ends."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + seconds
        while not _take(descriptor):
            if time.monotonic() > deadline:
                raise Refused(f"another process has held {file} for {seconds:g} s: wait for it, or end it")
            time.sleep(0.05)
        yield descriptor
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove(folder: Path) -> None:
    """Removes a tree, whatever its modes; never anything that is mounted in it."""
    subprocess.run(["rm", "-rf", "--one-file-system", "--", folder], check=True)
