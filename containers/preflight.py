"""Checks that a build can work in its directories, before anything is fetched or written. `check` is the
entry.

It knows what file systems at computing centres refuse: too little room, a quota that only a write finds,
noexec, and network file systems on which a user's subordinate ids own nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from containers.stacks import BuildRefused

NETWORK: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "panfs", "fhgfs", "wekafs", "ceph", "afs"}
)
"""Types on which an unprivileged build cannot give files to other users."""
REMEDY: Final = {
    "target": "IMAGE=FILE on a larger file system",
    "temporary": "APPTAINER_TMPDIR=DIR, best a local disk of the node",
    "cache": "APPTRAIN_CACHE=DIR",
}


@dataclass(frozen=True)
class Places:
    """The three places that a build writes to."""

    target: Path
    """The image's own file."""
    temporary: Path
    """Where Apptainer unpacks the image while it is built: APPTAINER_TMPDIR, else TMPDIR, else /tmp."""
    cache: Path
    """Where downloads stay: APPTRAIN_CACHE, else XDG_CACHE_HOME/apptrain, else ~/.cache/apptrain."""

    @classmethod
    def of(cls, image: Path) -> Places:
        given = os.environ.get("APPTAINER_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        own = os.environ.get("APPTRAIN_CACHE")
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return cls(image, Path(given).resolve(), Path(own).resolve() if own else Path(home) / "apptrain")


@dataclass(frozen=True)
class Mount:
    """The mounted file system that a path is on."""

    point: str
    kind: str
    options: frozenset[str]

    @classmethod
    def of(cls, path: Path, table: str | None = None) -> Mount:
        """By the longest mount point above `path`; `table` is /proc/self/mountinfo's text."""
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape") if table is None else table
        best = cls("", "unknown", frozenset())
        for line in text.splitlines():
            fields, _, source = line.partition(" - ")
            point = fields.split()[4].replace("\\040", " ")
            above = Path(point) == path or Path(point) in path.parents
            if above and len(point) >= len(best.point):
                best = cls(point, source.split()[0], frozenset(fields.split()[5].split(",")))
        return best


def check(places: Places, megabytes: dict[str, int]) -> None:
    """Refuse a place that will not do, with the variable to set. Creates the cache's directory.

    `megabytes`: what "image", "work" and "download" need at the target, the temporary place and the cache.
    """
    for name, path in (("target", places.target.parent), ("temporary", places.temporary)):
        if not path.is_dir():
            raise BuildRefused(
                "build-no-directory", f"{path}: there is no such directory: make it, or set {REMEDY[name]}"
            )
    try:
        places.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BuildRefused(
            "build-cache-unusable", f"{places.cache}: {error.strerror}: set {REMEDY['cache']}"
        ) from None
    mount = Mount.of(places.temporary)
    if "noexec" in mount.options:
        raise BuildRefused(
            "build-noexec",
            f"{places.temporary} is on {mount.point}, which is mounted noexec: nothing can be run there "
            f"while the image is built: set {REMEDY['temporary']}",
        )
    if mount.kind in NETWORK:
        raise BuildRefused(
            "build-network-file-system",
            f"{places.temporary} is on {mount.point}, a network file system ({mount.kind}), on which a build "
            f"without root cannot own files as it must: set {REMEDY['temporary']}",
        )
    needs = {
        "target": (places.target.parent, megabytes["image"]),
        "temporary": (places.temporary, megabytes["work"]),
        "cache": (places.cache, megabytes["download"]),
    }
    for name, (path, _) in needs.items():
        device = path.stat().st_dev
        same = {other: need for other, (where, need) in needs.items() if where.stat().st_dev == device}
        need, free = sum(same.values()), shutil.disk_usage(path).free // 1_000_000
        if free < need:
            raise BuildRefused(
                "build-no-room",
                f"{path} has {free / 1000:.1f} GB free, {need / 1000:.1f} GB are needed ({', '.join(same)}): "
                f"set {REMEDY[name]}",
            )
        check_quota(path, name, needs[name][1])


def check_quota(path: Path, name: str, megabytes: int) -> None:
    """Reserve the room for a moment: what statvfs cannot tell of a quota, this does."""
    with tempfile.TemporaryDirectory(prefix=".apptrain-", dir=_writable(path, name)) as folder:
        fallocate = shutil.which("fallocate")
        if not fallocate or not megabytes:
            return
        done = subprocess.run(
            [fallocate, "-l", f"{megabytes}MB", str(Path(folder, "room"))],
            capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    if done.returncode and ("quota" in done.stderr or "No space" in done.stderr):
        raise BuildRefused(
            "build-no-quota",
            f"{path}: {megabytes / 1000:.1f} GB are needed and cannot be had: {done.stderr.strip()}: see "
            f"your quota, or set {REMEDY[name]}",
        )


def _writable(path: Path, name: str) -> Path:
    if not os.access(path, os.W_OK | os.X_OK):
        raise BuildRefused("build-unwritable", f"{path} is not writable: set {REMEDY[name]}")
    return path
