"""Small file systems that can be broken, for tests: each in a mount namespace of its own."""

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

BOUND_S = 120.0
NAMESPACE = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0


class Disk:
    """A small file system in a mount namespace of its own, kept by a process that sleeps."""

    def __init__(self, mountpoint: Path, size: str) -> None:
        mountpoint.mkdir(parents=True)
        self._mountpoint = mountpoint
        mount = 'mount -t tmpfs -o size="$1" none "$2" && echo mounted && exec sleep 900'
        self._keeper = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", mount, "sh", size, str(mountpoint)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "mounted\n"
        self.keeper = self._keeper.pid
        self.prefix = ("nsenter", "-t", str(self._keeper.pid), "-U", "-m", "--preserve-credentials")
        self.seen = Path(f"/proc/{self._keeper.pid}/root{mountpoint}")
        """The file system from outside."""

    def remount(self, option: str) -> None:
        command = [*self.prefix, "mount", "-o", f"remount,{option}", str(self._mountpoint)]
        subprocess.run(command, check=True, timeout=BOUND_S)

    def fill(self) -> None:
        """Takes the last byte, as of now: what others give up later is free."""
        with (self.seen / "filler").open("ab", 0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(4096))

    def free(self) -> None:
        (self.seen / "filler").unlink()

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()


def marked(test: Any) -> Any:
    """The test needs a `Disk`."""
    test = pytest.mark.ci_may_skip("needs the right to a mount namespace")(test)
    return pytest.mark.skipif(not NAMESPACE, reason="no right to a mount namespace")(test)
