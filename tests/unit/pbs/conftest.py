"""What the tests of the job script for PBS share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pbs_double import local
from tests.pbs_double.local import Local
from tests.unit.pbs.site import HOSTS, KILL_DELAY, QUEUES, Site


@pytest.fixture(scope="module")
def pbs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    with local.up(tmp_path_factory.mktemp("pbs"), HOSTS, kill_delay=KILL_DELAY, queues=QUEUES) as found:
        yield found


@pytest.fixture
def site(pbs: Local, tmp_path: Path) -> Site:
    return Site(pbs, tmp_path)


@pytest.fixture
def login(site: Site) -> Iterator[Callable[[str], None]]:
    """Sets what the login shell of the user runs at last."""
    profile = site.pbs.home / ".profile"
    before = profile.read_text()

    def add(text: str) -> None:
        profile.write_text(f"{before}{text}\n")

    yield add
    profile.write_text(before)
