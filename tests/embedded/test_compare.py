"""The reference training on this machine, twice and with one thing changed: `apptrain compare` names it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.jobs import BOUND, CHECKOUT, clean_env, run

SMALL = (
    *("-m", "train", "--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=32"),
    *("batch_size=64", "steps=3", "evaluate.every=0"),
)
"""With less work for each thread, one and two agree."""
PATIENT = {"OMP_WAIT_POLICY": "passive", "APPTRAIN_PASS": "OMP_WAIT_POLICY"}
"""Threads that wait for one another do not compute meanwhile: other tests have these cores too."""


def trained(folder: Path, *changes: str, nodes: int = 1, threads: int = 1) -> Path:
    folder.mkdir()
    options = ("--nodes", str(nodes), "--omp-num-threads", str(threads), "--", *SMALL, *changes)
    ended = run(folder, *options, env=PATIENT)
    assert ended.status == 0, ended.err
    return ended.run


def compare(*words: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CHECKOUT / "apptrain", "compare", *words],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )


def compared(*runs: Path) -> tuple[int, dict[str, Any]]:
    done = compare(*runs, "--json")
    (pair,) = json.loads(done.stdout)["pairs"]
    return done.returncode, pair


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("first") / "job")


def test_the_same_training_twice_is_identical(first: Path, tmp_path: Path) -> None:
    status, pair = compared(first, trained(tmp_path / "job"))
    assert (status, pair["verdict"]) == (0, "identical")
    assert {one["name"] for one in pair["differ"]} <= {"began"}
    assert {"code", "config", "seed", "threads", "CPU"} <= {*pair["equal"]}


def first_difference(*runs: Path) -> int:
    """The first step whose loss or learning rate differs. With other threads it depends on the CPU: 1 on some,
    2 on others."""
    traces = [
        {
            row["step"]: (row["loss"], row["lr"])
            for row in map(json.loads, (run / "metrics.jsonl").open())
            if "loss" in row
        }
        for run in runs
    ]
    return next(step for step in sorted(traces[0]) if traces[0][step] != traces[1][step])


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("seed", ["seed=2"], {}),
        ("batch per step", ["batch_size=96"], {}),
        ("optimizer.lr", ["optimizer.lr=0.01"], {}),
        ("world size", [], {"nodes": 2}),
        ("threads", [], {"threads": 2}),
    ],
)
def test_what_was_changed_is_the_cause_from_the_first_step_that_differs(
    first: Path, tmp_path: Path, name: str, changes: list[str], options: dict[str, int]
) -> None:
    other = trained(tmp_path / "job", *changes, **options)
    status, pair = compared(first, other)
    assert (status, pair["verdict"], pair["causes"]) == (1, "explained", [name])
    assert pair["traces"]["first"] == first_difference(first, other)


LINE = """\
import json, os, random
random.seed({seed})
weight = random.random()
with open(os.environ["APPTRAIN_RUN_DIR"] + "/metrics.jsonl", "w") as file:
    for step in (1, 2, 3):
        print(json.dumps({{"step": step, "loss": (weight - 2) ** 2}}), file=file)
        weight -= {lr} * 2 * (weight - 2)
"""


def ran(folder: Path, **parts: str) -> Path:
    """The run directory of a script of somebody else's."""
    folder.mkdir()
    (folder / "script.py").write_text(LINE.format(**{"seed": "1", "lr": "0.1"} | parts))
    ended = run(folder, "--nodes", "1", "--mode", "rank", "--", "script.py")
    assert ended.status == 0, ended.err
    return ended.run


def test_another_line_of_code_is_the_cause(tmp_path: Path) -> None:
    status, pair = compared(ran(tmp_path / "a"), ran(tmp_path / "b", lr="0.2"))
    assert (status, pair["verdict"], pair["causes"]) == (1, "explained", ["code"])
    assert pair["traces"]["first"] == 2


def test_runs_that_differ_in_nothing_stated_and_part_all_the_same_are_unexplained(tmp_path: Path) -> None:
    drawn = "int.from_bytes(os.urandom(4), 'big')"
    status, pair = compared(ran(tmp_path / "a", seed=drawn), ran(tmp_path / "b", seed=drawn))
    assert (status, pair["verdict"], pair["causes"]) == (1, "unexplained", [])
    assert pair["traces"]["first"] == 1


def test_runs_of_different_programs_cannot_be_compared(first: Path, tmp_path: Path) -> None:
    other = ran(tmp_path / "a")
    done = compare(first, other)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == (
        f"apptrain: {first} ran -m train and {other} ran script.py: give runs of the same program\n"
    )
