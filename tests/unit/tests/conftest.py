"""What the tests of the double of OpenPBS share."""

from collections.abc import Iterator

import pytest

from tests.pbs_double import local
from tests.pbs_double.local import Local
from tests.unit.tests.double import HOSTS, KILL_DELAY, PATIENT


@pytest.fixture(scope="module")
def pbs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("pbs")
    with local.up(folder, HOSTS, kill_delay=PATIENT, queues={"hasty": KILL_DELAY}) as found:
        yield found
