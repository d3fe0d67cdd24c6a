"""What the tests with real Apptainer share: images that are built once, and what is told of them at the end."""

from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

from tests.cluster.images import RECIPE, Built, built

HERE = Path(__file__).parent
LINES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> list[str]:
    """Lines for the end of the session."""
    return pytestconfig.stash.setdefault(LINES, [])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A build has a bound of its own: it does not count for the test that happens to need the image first."""
    seconds = float(config.getini("timeout"))
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(seconds, func_only=True))


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(LINES, []):
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
