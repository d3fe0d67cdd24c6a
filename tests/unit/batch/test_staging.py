"""Whether the nodes get copies of the image, and who copies from whom."""

import itertools
from pathlib import Path

import pytest

from entrypoint.batch import staging
from entrypoint.batch.staging import Bandwidth, Copy, Image
from entrypoint.core.errors import BadInput
from tests.unit.host.node import IMAGE_ID, sif

SIZE = 3_000_000_000
SLOW = Bandwidth(shared=50e6, node=1e9)
IMAGE = Image(path="/image.sif", bytes=SIZE, id=IMAGE_ID)


def decided(asked: str, nodes: int = 4, **how: object) -> staging.Staging | None:
    given = {
        "place": "/tmp/",
        "key": "key",
        "least": nodes,
        "image": IMAGE,
        "bandwidth": SLOW,
        "by_name": True,
        **how,
    }
    return staging.decide(asked, hosts=[f"n{i}" for i in range(nodes)], **given)  # type: ignore[arg-type]


def test_the_models_terms_are_these() -> None:
    assert staging.unstaged(100, SIZE, SLOW) == pytest.approx(100 * 0.09 * 3e9 / 50e6)
    assert staging.staged(100, SIZE, SLOW, 8) == pytest.approx(3e9 / 50e6 + 24 * 3e9 / 1e9)
    assert staging.waves(100, SIZE, SLOW) == pytest.approx(100 * 3e9 / 50e6)


@pytest.mark.parametrize(
    ("nodes", "sent"), [(1, 0), (2, 1), (9, 8), (10, 9), (17, 16), (81, 16), (82, 17), (729, 24)]
)
def test_a_tree_of_eight_sends_so_many_one_behind_another(nodes: int, sent: int) -> None:
    assert staging.sent(nodes, 8) == sent


def test_with_3_gb_and_50_mb_a_second_the_break_even_is_a_few_more_than_eleven_nodes() -> None:
    """60 s for one copy are as long as eleven nodes read an eleventh of it each; the tree and the gain come on top."""
    assert staging.break_even(SIZE, SLOW) == 28
    assert not staging.pays(27, SIZE, SLOW)
    assert all(staging.pays(nodes, SIZE, SLOW) for nodes in range(28, 5000))


def test_the_more_of_the_image_a_start_reads_the_fewer_nodes_stage() -> None:
    """A fifth of 3 GB from 50 MB/s takes 12 s a node; the copies take 60 s, and 6 s for each further node here."""
    fast = Bandwidth(shared=50e6, node=500e6)
    assert staging.break_even(SIZE, fast, read=0.2) == 11
    assert decided("auto", 10, bandwidth=fast, read=0.2) is None
    assert decided("auto", 11, bandwidth=fast, read=0.2) is not None


def test_without_figures_of_the_site_only_thousands_of_nodes_stage() -> None:
    assert 1000 < staging.break_even(SIZE, Bandwidth()) < 4000


def test_a_small_image_is_never_staged_by_itself() -> None:
    assert staging.break_even(1_000_000, Bandwidth()) == staging.MOST + 1


def test_waves_are_always_slower_than_to_read_the_image_where_it_is() -> None:
    for nodes, shared in itertools.product((2, 100, 10_000), (1e6, 1e12)):
        bandwidth = Bandwidth(shared=shared)
        assert staging.waves(nodes, SIZE, bandwidth) > staging.unstaged(nodes, SIZE, bandwidth)


# --- whether ------------------------------------------------------------------------------------------------------


def test_auto_stages_beyond_the_break_even_alone() -> None:
    assert decided("auto", 27) is None
    assert decided("auto", 28) == staging.Staging(
        folder="/tmp/key", image=IMAGE, needs=SIZE + (4 << 30), by_name=False, named=False, least=28
    )


def test_a_directory_that_the_user_names_is_used_on_any_number_of_nodes() -> None:
    found = decided("/local/", 1)
    assert found is not None
    assert (found.folder, found.file) == ("/local/key", "/local/key/image.sif")
    assert (found.by_name, found.named, found.least) == (True, True, 1)


def test_one_that_the_site_names_may_fail() -> None:
    found = decided("/local", by_name=False)
    assert found is not None
    assert (found.by_name, found.named) == (False, True)


def test_auto_stages_if_it_saves_ten_seconds_or_more_and_never_on_one_node() -> None:
    one = Bandwidth(shared=100.0, node=100.0)
    assert staging.staged(2, 1000, one) == 20
    for read, pays in ((1.5, True), (1.49, False)):  # 20 s and 10 s are 30 s: 2 nodes read 3000 bytes
        assert staging.pays(2, 1000, one, read=read) is pays
    assert decided("auto", 1, bandwidth=Bandwidth(shared=1e3)) is None
    assert decided("auto", 2, bandwidth=Bandwidth(shared=1e3), read=9.0) is not None


def test_a_slow_node_reads_the_image_at_its_own_speed() -> None:
    assert staging.staged(1, 1000, Bandwidth(shared=100.0, node=10.0)) == 100
    assert staging.staged(1, 1000, Bandwidth(shared=10.0, node=100.0)) == 100


def test_a_small_checkpoint_needs_no_more_room_than_none() -> None:
    for checkpoint, room in ((0, 4 << 30), (2 << 30, 4 << 30), ((2 << 30) + 1, (4 << 30) + 2)):
        found = decided("/local", checkpoint=checkpoint)
        assert found is not None
        assert found.needs == SIZE + room


def test_off_stages_nothing() -> None:
    assert decided("off", 5000) is None


def test_there_must_be_room_for_two_checkpoints_of_this_run() -> None:
    found = decided("/local", checkpoint=10 << 30)
    assert found is not None
    assert found.needs == SIZE + (20 << 30)


def test_an_image_that_is_no_file_is_not_staged() -> None:
    assert decided("auto", 5000, image=None) is None
    assert decided("/local", image=None, by_name=False) is None
    with pytest.raises(BadInput, match=r"^--stage /local: the image is not one SIF file"):
        decided("/local", image=None)


def test_what_an_image_is_stands_in_its_header(tmp_path: Path) -> None:
    path = sif(tmp_path / "image.sif")
    assert staging.of_file(str(path)) == Image(path=str(path), bytes=1128, id=IMAGE_ID)
    path.write_bytes(b"no image" * 20)
    assert staging.of_file(str(path)) is None
    assert staging.of_file(str(tmp_path)) is None
    assert staging.of_file(str(tmp_path / "none")) is None


# --- who copies from whom -----------------------------------------------------------------------------------------


def test_under_slurm_one_program_brings_it_to_all() -> None:
    assert list(staging.copies("slurm", ["a", "b"])) == [
        Copy(wave=0, source="", target="a"),
        Copy(wave=0, source="", target="b"),
    ]


def test_who_has_it_sends_it_to_eight() -> None:
    hosts = [f"n{i}" for i in range(20)]
    found = list(staging.copies("pbs", hosts))
    assert found[0] == Copy(wave=0, source="", target="n0")
    assert [copy for copy in found if copy.wave == 1] == [
        Copy(wave=1, source="n0", target=f"n{i}") for i in range(1, 9)
    ]
    assert found[9] == Copy(wave=2, source="n0", target="n9")
    assert found[10] == Copy(wave=2, source="n1", target="n10")


@pytest.mark.parametrize("nodes", [1, 2, 9, 10, 1000, 16384])
def test_every_node_gets_one_copy_from_one_that_has_it(nodes: int) -> None:
    hosts = [f"n{i}" for i in range(nodes)]
    have = {""}
    targets = []
    for _, copies in itertools.groupby(staging.tree(hosts), lambda copy: copy.wave):
        wave = list(copies)
        sent = [copy.source for copy in wave]
        assert set(sent) <= have
        assert max(sent.count(source) for source in set(sent)) <= staging.WIDTH
        assert len(set(sent)) <= staging.SENDERS
        targets += [copy.target for copy in wave]
        have |= set(targets)
    assert targets == hosts


def test_from_the_shared_file_system_so_many_copy_at_once() -> None:
    waves = [copy.wave for copy in staging.from_shared([f"n{i}" for i in range(20)])]
    assert [waves.count(wave) for wave in range(3)] == [8, 8, 4]
