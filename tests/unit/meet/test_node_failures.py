"""What srun says of lost nodes in the job's output."""

import os
from pathlib import Path

import pytest

from entrypoint.meet import node_failures
from entrypoint.meet.node_failures import NodeFailures

NODES = ("gpu-a01", "gpu-a02", "gpu-b07")
LINE = "srun: error: Node failure on {}\n"


def add(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def test_a_node_that_slurm_gives_up_is_told_once(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(LINE.format("gpu-a01"))  # of the attempt before
    failures = NodeFailures(log, NODES)
    assert failures.look() == []
    add(log, "step 7\n" + LINE.format("gpu-a02") + "step 8\n")
    assert [failures.look(), failures.look()] == [[1], []]


def test_nodes_that_are_listed_as_slurm_does_are_told(tmp_path: Path) -> None:
    failures = NodeFailures(tmp_path / "job.log", NODES)
    assert failures.look() == []  # there is no log yet
    add(tmp_path / "job.log", LINE.format("gpu-a[01-02],gpu-b07"))
    assert failures.look() == [0, 1, 2]


def test_a_line_that_comes_in_pieces_is_read_as_one(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    failures = NodeFailures(log, NODES)
    failures.look()
    found = []
    for piece in ("x\nsrun: err", "or: Node failure", " on gpu-", "b07", "\n"):
        add(log, piece)
        found.append(failures.look())
    assert found == [[], [], [], [], [2]]


@pytest.mark.parametrize(
    "text",
    [
        LINE.format("gpu-a03"),
        LINE.format("gpu-a02: at 08:00"),
        LINE.format("gpu-a[01-02"),
        LINE.format("x[0-999999999]"),
        LINE.format("gpu-a02" * 200),
        "rank 1: " + LINE.format("gpu-a02"),
        "srun: Node failure on gpu-a02\n",
        "srun: error: Node failure on gpu-a02",
    ],
)
def test_what_is_no_such_line_of_srun_means_nothing(tmp_path: Path, text: str) -> None:
    failures = NodeFailures(tmp_path / "job.log", NODES)
    failures.look()
    add(tmp_path / "job.log", text)
    assert failures.look() == []


def test_of_much_output_only_the_end_is_read_and_a_log_that_shrinks_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_failures, "CHUNK", 1000)
    log = tmp_path / "job.log"
    failures = NodeFailures(log, NODES)
    failures.look()
    add(log, LINE.format("gpu-a01") + 5000 * "x" + "\n" + LINE.format("gpu-a02"))
    assert failures.look() == [1]
    log.write_text(LINE.format("gpu-b07"))
    assert failures.look() == [2]


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.log")
    failures = NodeFailures(tmp_path / "job.log", NODES)
    assert [failures.look(), failures.look()] == [[], []]
