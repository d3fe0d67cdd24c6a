"""What the tests of the job script for Slurm share."""

from pathlib import Path

import pytest

from tests.unit.slurm.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)
