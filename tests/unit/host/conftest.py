"""What the tests of the host's bash share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.host.node import Node


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This machine's programs, without what could run an image."""
    folder = tmp_path_factory.mktemp("tools")
    for tool in Path("/usr/bin").iterdir():
        if not tool.name.startswith(("apptainer", "singularity", "squashfuse")):
            (folder / tool.name).symlink_to(tool)
    return folder


@pytest.fixture
def node(tmp_path: Path, tools: Path) -> Iterator[Node]:
    cache = Path.home() / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="apptrain-test-", dir=cache) as folder:
        yield Node(tmp_path, tools, Path(folder).resolve())
