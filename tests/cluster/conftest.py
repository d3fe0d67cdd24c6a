"""What the tests with real Apptainer share: images that are built once, four lanes, and what is told at the end."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

from tests.cluster import images
from tests.cluster.account import Account, clear
from tests.cluster.images import RECIPE, Built, built
from tests.host.places import cache

HERE = Path(__file__).parent
LANES = (
    ("test_cluster", "test_host", "test_clone", "test_own_image", "test_torque", "test_pages", "test_site"),
    ("test_faults", "test_restart", "test_network", "test_doctor", "test_compare"),
    ("test_image_build", "test_third_party", "test_stage", "test_image", "test_throttled"),
    ("test_run_sh", "test_pbs", "test_slurm"),
)
"""Files whose tests run one after another, beside those of the other lanes if there are workers (`-n 4 --dist
loadgroup`), on clusters in namespaces of their own. They wait half of their time: four keep two cores busy, and each
takes about a quarter. The second builds the image of `make image` at once; the others begin with what does without."""
TOLD = "told at the end"


def pytest_sessionstart(session: pytest.Session) -> None:
    """At once, and not after half an hour."""
    config = session.config
    if hasattr(config, "workerinput") or HERE not in [Path(name).resolve() for name in config.args]:
        return
    folder = next(path for path in (cache(), *cache().parents) if path.exists())
    if why := images.lack_of_room(shutil.disk_usage(folder).free):
        raise pytest.UsageError(why)


@pytest.fixture
def user(all_tests_account: Account) -> Iterator[Account]:
    """The account of a file's tests, on a cluster that is idle before and after each."""
    clear(all_tests_account)
    yield all_tests_account
    clear(all_tests_account)


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Says a line at the end of the session."""
    return lambda line: record_property(TOLD, line)


@pytest.hookimpl(tryfirst=True)  # before xdist, which writes each test's group into its name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A build has a bound of its own: it does not count for the test that happens to need the image first. A test may
    run several jobs, each with a bound of its own."""
    seconds = 4 * float(config.getini("timeout"))
    lanes = {file: lane for lane, files in enumerate(LANES, 1) for file in files}
    places = {file: place for place, file in enumerate(lanes)}
    if "APPTRAIN_TEST_ORDER" not in os.environ:
        items.sort(
            key=lambda item: places.get(item.path.stem, len(places)) if item.path.is_relative_to(HERE) else -1
        )
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.xdist_group(f"cluster-{lanes.get(item.path.stem, 1)}"))
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(seconds, func_only=True))


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    for report in reports:
        if getattr(report, "when", "") == "call":
            for name, line in report.user_properties:
                if name == TOLD:
                    terminalreporter.line(line)


@pytest.fixture(scope="session")
def default() -> Built:
    """`make image`."""
    return built("default")


@pytest.fixture(scope="session")
def older() -> Built:
    """The stack for older drivers."""
    return built("cu128", "STACK=cu128", inputs=RECIPE)


@pytest.fixture(scope="session")
def own() -> Built:
    """One that apptrain did not make."""
    return images.own()
