"""What several of these tests need."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.embedded.disks import Disk


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, str], Disk]]:
    """Makes a file system of so many bytes, as mount(8) takes them, at a path that is not there yet."""
    made: list[Disk] = []

    def make(mountpoint: Path, size: str) -> Disk:
        made.append(Disk(mountpoint, size))
        return made[-1]

    yield make
    for disk in made:
        disk.close()
