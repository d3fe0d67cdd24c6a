"""What nodes read of a shared file system that they share a bucket of bytes of, each with a mount of its own. Needs
root, for the test cluster.

Bytes are counted, and no time: `make bench ARGS=staging` compares the seconds with the model.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.staging import DISK, NAMES, PADDING, SOURCE, start, starts
from entrypoint.batch import staging
from entrypoint.batch.staging import Bandwidth
from entrypoint.cli import profiles
from tests.cluster.account import Account
from tests.vcluster.throttled import SharedFolder, throttled

MBIT = 400
HEADERS = 1.15
"""Most that is sent for a byte of a file: 54 bytes more in a packet of 1,460, and what SSH and SFTP add."""
PERCENT = 60
"""What the program reads of the smallest image."""
FIGURES = Bandwidth(shared=10e6, node=100e6)

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def mounted() -> Iterator[tuple[Account, SharedFolder, Path]]:
    with starts(PADDING[:2]) as (user, folder), throttled(user.cluster, SOURCE, mbit=MBIT) as shared:
        yield user, shared, folder


def test_each_node_reads_its_part_of_the_image_or_one_reads_it_once(
    mounted: tuple[Account, SharedFolder, Path],
) -> None:
    user, shared, folder = mounted
    size = (folder / f"{PADDING[1]}.sif").stat().st_size
    sent = {}
    for nodes, to in ((1, "off"), (3, "off"), (3, DISK)):
        shared.remount()
        found = start(user, shared, PADDING[1], nodes, "--stage", to)
        sent[nodes, to] = found.sent
    assert 0 < sent[1, "off"] < 0.6 * size
    assert sent[3, "off"] == pytest.approx(3 * sent[1, "off"], rel=0.05)
    assert size <= sent[3, DISK] <= HEADERS * size


def test_auto_stages_beyond_the_break_even_alone_and_says_so(
    mounted: tuple[Account, SharedFolder, Path],
) -> None:
    user, shared, folder = mounted
    size = (folder / f"{PADDING[0]}.sif").stat().st_size
    least = staging.break_even(size, FIGURES, read=PERCENT / 100)
    assert least == 4
    figures = "shared_mb_s: 10, node_mb_s: 100"
    profile = user.write("slow.yaml", f"scheduler: slurm\nstage: {{{figures}, read_percent: {PERCENT}}}\n")
    assert profiles.main([str(user.on_disk(profile))]) == 0
    said, images, sent = {}, {}, {}
    for nodes in (least - 1, least):
        shared.remount()
        found = start(user, shared, PADDING[0], nodes, "--profile", str(profile))
        said[nodes] = [line.partition(" in ")[0] for line in found.said if line.startswith("image: ")]
        images[nodes] = {line.split()[2].partition("/")[2].partition("/")[0] for line in found.printed}
        sent[nodes] = found.sent
    assert said == {least - 1: [], least: [f"image: copied to {DISK} on {least} of {len(NAMES)} nodes"]}
    assert images == {least - 1: {"shared"}, least: {"tmp"}}
    assert sent[least - 1] > HEADERS * size >= sent[least]
