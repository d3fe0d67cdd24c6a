"""What the tests with real Apptainer share: images that are built once, two lanes, and what is told at the end."""

from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

from tests.cluster.images import RECIPE, Built, built

HERE = Path(__file__).parent
SECOND_LANE = ("test_faults", "test_network", "test_pbs", "test_restart", "test_third_party")
"""Files whose tests run beside those of all the others if there are workers (`-n 2 --dist loadgroup`): two clusters at
once, each in namespaces of its own, are what two cores carry. Those named here take about half of the time."""
TOLD = "told at the end"


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Says a line at the end of the session."""
    return lambda line: record_property(TOLD, line)


@pytest.hookimpl(tryfirst=True)  # before xdist, which writes each test's group into its name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A build has a bound of its own: it does not count for the test that happens to need the image first."""
    seconds = float(config.getini("timeout"))
    for item in items:
        if item.path.is_relative_to(HERE):
            lane = 2 if item.path.stem in SECOND_LANE else 1
            item.add_marker(pytest.mark.xdist_group(f"cluster-{lane}"))
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
    return built("cu126", "STACK=cu126", inputs=RECIPE)


@pytest.fixture(scope="session")
def extended() -> Built:
    """The default stack with packages from PyPI, which themselves need torch."""
    packages = "accelerate\nlightning\ntransformers\n"
    return built("extra", "EXTRA=extra.txt", inputs=RECIPE, files={"extra.txt": packages})
