"""The ranks' signs that they go on."""

import os
from pathlib import Path

import pytest

from entrypoint.ranks.heartbeat import Heartbeats


def beat(folder: Path, rank: int, text: str, at: int) -> None:
    (folder / str(rank)).write_text(text)
    os.utime(folder / str(rank), ns=(at, at))


def test_a_rank_that_never_gives_a_sign_is_not_watched(tmp_path: Path) -> None:
    beats = Heartbeats(tmp_path)
    beats.observe([0, 1], 100.0)
    beats.observe([0, 1], 100.0)
    assert (beats.quiet(0), beats.stalled(1.0)) == (None, False)


def test_a_rank_has_stalled_when_its_file_stays_as_it_is_for_longer_than_the_bound(tmp_path: Path) -> None:
    beats = Heartbeats(tmp_path)
    beat(tmp_path, 3, "7", 1)
    beats.observe([3], 5.0)
    assert (beats.quiet(3), beats.step(3)) == (0.0, 7)
    beats.observe([3], 5.0)
    assert (beats.quiet(3), beats.stalled(5.0)) == (5.0, False)
    beats.observe([3], 0.5)
    assert beats.stalled(5.0)


def test_a_file_that_changes_is_a_sign_whatever_the_clock_says(tmp_path: Path) -> None:
    beats = Heartbeats(tmp_path)
    beat(tmp_path, 0, "1", 2_000)
    beats.observe([0], 5.0)
    beats.observe([0], 5.0)
    beat(tmp_path, 0, "2", 1_000)
    beats.observe([0], 5.0)
    assert beats.quiet(0) == 0.0


def test_a_rank_that_is_started_anew_is_not_watched_until_its_first_sign(tmp_path: Path) -> None:
    beats = Heartbeats(tmp_path)
    beat(tmp_path, 0, "1", 1)
    beats.observe([0], 5.0)
    beats.forget(0)
    beats.observe([0], 50.0)
    assert (beats.quiet(0), beats.stalled(5.0)) == (None, False)
    beat(tmp_path, 0, "1", 2)
    beats.observe([0], 50.0)
    beats.observe([0], 50.0)
    assert beats.stalled(5.0)


def test_optimizer_steps_are_a_sign_of_a_rank_that_writes_none(tmp_path: Path) -> None:
    beats = Heartbeats(tmp_path)
    (tmp_path / "3.optimizer").write_text("7 4")
    beats.observe([3], 5.0)
    beats.observe([3], 5.5)
    assert (beats.quiet(3), beats.step(3), beats.trained_alone(3)) == (5.5, 7, False)
    assert (beats.stalled(5.0), beats.paused([3], 5.0), beats.paused([3], 5.5)) == (False, True, False)
    beats.forget(3)
    beats.observe([3], 50.0)
    assert (beats.quiet(3), beats.paused([3], 5.0)) == (None, False)


def test_who_writes_a_sign_is_not_watched_by_its_optimizer_steps(tmp_path: Path) -> None:
    beats = Heartbeats(tmp_path)
    (tmp_path / "0.optimizer").write_text("7 4")
    beats.observe([0], 5.0)
    beat(tmp_path, 0, "6", 1)
    for _ in range(3):
        beats.observe([0], 5.0)
    assert (beats.quiet(0), beats.step(0), beats.stalled(5.0), beats.paused([0], 5.0)) == (
        10.0,
        6,
        True,
        False,
    )


def test_a_rank_trained_alone_whose_steps_were_in_no_group_with_others(tmp_path: Path) -> None:
    for text, alone in (("7 1", True), ("7 2", False), ("7", False), ("", False), ("7 x", False)):
        (tmp_path / "0.optimizer").write_text(text)
        assert Heartbeats(tmp_path).trained_alone(0) == alone
    assert not Heartbeats(tmp_path).trained_alone(1)


@pytest.mark.parametrize(
    ("files", "apart"),
    [
        ({}, False),
        ({0: "9 2 2 700", 1: "9 2 2 701"}, True),
        ({0: "9 1 2 700"}, True),
        ({0: "9 4 2 700", 1: "9 4 2 701"}, False),  # the group has ranks of other nodes
        ({0: "9 2 2 700", 1: "9 4 2 701"}, False),
        ({0: "9 2 2 50"}, False),  # the rank itself
        ({0: "9 2 0 700"}, False),  # no launcher has started it
        ({0: "9 2"}, False),
        ({0: "9 2 2 700", 1: ""}, False),
    ],
)
def test_processes_that_ranks_have_started_train_apart_if_all_their_groups_end_at_the_node(
    tmp_path: Path, files: dict[int, str], *, apart: bool
) -> None:
    for rank, text in files.items():
        (tmp_path / f"{rank}.optimizer").write_text(text)
    assert Heartbeats(tmp_path).trained_apart([50, 51]) == apart


@pytest.mark.parametrize(
    ("files", "pace"),
    [
        ({}, None),
        ({0: "5 2 2 700"}, None),  # of an older version
        ({0: "1 2 2 700 2000000 2000000"}, None),
        ({0: "5 2 2 700 2000000 4500000", 1: "9 2 2 701 2000000 9500000"}, (4, 2.5)),
        ({4: "3 2 2 700 2000000 2500000"}, (2, 0.5)),
    ],
)
def test_the_pace_is_that_of_the_first_rank_without_its_first_step(
    tmp_path: Path, files: dict[int, str], pace: tuple[int, float] | None
) -> None:
    for rank, text in files.items():
        (tmp_path / f"{rank}.optimizer").write_text(text)
    assert Heartbeats(tmp_path).pace() == pace


def test_what_is_no_number_is_a_sign_without_a_step(tmp_path: Path) -> None:
    for text in ("", "epoch 3", "-1", "1" * 400, "٣"):
        beat(tmp_path, 0, text, 1)
        assert Heartbeats(tmp_path).step(0) is None
    beat(tmp_path, 0, " 12\n", 1)
    assert Heartbeats(tmp_path).step(0) == 12
    assert Heartbeats(tmp_path).step(1) is None
