"""What several of these tests need, and that they run in three lanes: each has several processes that compute."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.embedded import jobs
from tests.embedded.disks import Disk

HERE = Path(__file__).parent
LANES = {
    "test_checkpoints": 1,
    "test_compare": 1,
    "test_train_torchrun": 1,
    "test_launch": 3,
    "test_restart": 3,
}
"""By file; all others are in lane 2. Each lane computes for about as long."""


@pytest.hookimpl(tryfirst=True)  # before xdist, which writes each test's group into its name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            lane = LANES.get(item.path.stem, 2)
            item.add_marker(pytest.mark.xdist_group(f"embedded-{lane}"))


@pytest.fixture(autouse=True)
def no_job_stays() -> Iterator[None]:
    """A test that fails while its job runs leaves none to the tests after it."""
    yield
    jobs.give_up_all()


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
