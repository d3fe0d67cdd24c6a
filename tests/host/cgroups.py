"""Directories of a host's own in this machine's cgroup hierarchies (version 1). The only module that touches those."""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from tests.host.places import Refused

ROOT = Path("/sys/fs/cgroup")


def make(folder: Path, controllers: Sequence[str]) -> dict[Path, Path]:
    """Makes one for the host of that folder in each controller's hierarchy; returns where it sees each."""
    for controller in controllers:
        if not (ROOT / controller / "cgroup.procs").exists():
            raise Refused(
                f"{ROOT / controller} is no cgroup hierarchy: this needs version 1, which this machine does not"
                f" mount (systemd.unified_cgroup_hierarchy=0 on the kernel's command line): do without cgroups"
            )
    made = {ROOT / controller / _name(folder): ROOT / controller for controller in controllers}
    for directory in made:
        directory.mkdir()
    return made


def thaw(folder: Path) -> None:
    """Lets the processes in them run on: one that is frozen does not end when it is killed."""
    for directory in _existing(folder):
        for state in directory.rglob("freezer.state"):
            state.write_text("THAWED")


def remove(folder: Path) -> None:
    """Removes them with all below, once their processes have ended."""
    for directory in _existing(folder):
        for parent, _, _ in os.walk(directory, topdown=False):
            Path(parent).rmdir()


def _existing(folder: Path) -> list[Path]:
    return [directory for directory in ROOT.glob(f"*/{_name(folder)}") if not directory.parent.is_symlink()]


def _name(folder: Path) -> str:
    return f"apptrain.{folder.name}.{zlib.crc32(os.fsencode(folder)):08x}"
