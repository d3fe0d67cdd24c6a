"""The reference training on this machine, twice and with one thing changed: `apptrain compare` names it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.jobs import BOUND, CHECKOUT, clean_env, run

SMALL = (
    *("-m", "train", "--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16"),
    *("batch_size=16", "steps=2", "evaluate.every=0"),
)


def trained(folder: Path, *changes: str, nodes: int = 1, threads: int = 1) -> Path:
    folder.mkdir()
    options = ("--nodes", str(nodes), "--omp-num-threads", str(threads), "--", *SMALL, *changes)
    ended = run(folder, *options)
    assert ended.status == 0, ended.err
    return ended.run


def compared(*runs: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [CHECKOUT / "apptrain", "compare", *runs, "--json"],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    (pair,) = json.loads(done.stdout)["pairs"]
    return done.returncode, pair


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("first") / "job")


def test_the_same_training_twice_is_identical(first: Path, tmp_path: Path) -> None:
    status, pair = compared(first, trained(tmp_path / "job"))
    assert (status, pair["verdict"]) == (0, "identical")
    assert {one["name"] for one in pair["differ"]} <= {"began"}


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("seed", ["seed=2"], {}),
        ("batch per step", ["batch_size=24"], {}),
        ("optimizer.lr", ["optimizer.lr=0.01"], {}),
        ("world size", [], {"nodes": 2}),
    ],
)
def test_what_was_changed_is_named_as_the_cause(
    first: Path, tmp_path: Path, name: str, changes: list[str], options: dict[str, int]
) -> None:
    status, pair = compared(first, trained(tmp_path / "job", *changes, **options))
    assert (status, pair["verdict"]) == (1, "explained")
    assert pair["causes"] == [name]


def test_another_number_of_threads_is_named_where_the_numbers_part(first: Path, tmp_path: Path) -> None:
    """So few steps of so small a model may agree all the same."""
    status, pair = compared(first, trained(tmp_path / "job", threads=2))
    assert "threads" in [one["name"] for one in pair["differ"]]
    assert (status, pair["causes"]) in ((0, []), (1, ["threads"]))


def test_another_line_of_code_is_the_cause(tmp_path: Path) -> None:
    runs = []
    for number, text in enumerate(("1.0", "2.0")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "script.py").write_text(
            "import json, os\n"
            "with open(os.environ['APPTRAIN_RUN_DIR'] + '/metrics.jsonl', 'w') as file:\n"
            f"    print(json.dumps({{'step': 1, 'loss': {text}}}), file=file)\n"
        )
        ended = run(folder, "--nodes", "1", "--", "script.py")
        assert ended.status == 0, ended.err
        runs.append(ended.run)
    status, pair = compared(*runs)
    assert (status, pair["causes"]) == (1, ["code"])
