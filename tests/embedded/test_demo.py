"""The reference job under the launcher: what `make demo` promises, but for its accuracy (tests/cluster/test_clone.py)."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli import main as cli
from tests.embedded.jobs import Ended, gone, processes_with, run, start
from train import checkpoint, metrics

SMALL = ["model.name=shufflenet_v2_x0_5", "data.image_size=16", "batch_size=16", "evaluate.every=10"]
PROGRAM = ["--", "-m", "train", "--config", "digits-short", *SMALL]
PER_RANK = ["--mode", "rank", *PROGRAM]


def trace(ended: Ended) -> tuple[Any, ...]:
    """Losses, accuracies and the digest of the weights: equal for equal runs."""
    history = metrics.read(ended.run / "metrics.jsonl")
    return history.loss, history.accuracy, result(ended)["weights_sha256"]


def result(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ended.run / "result.json").read_text())
    return found


def job(folder: Path, *options: str) -> Ended:
    folder.mkdir()
    ended = start(folder, *options).end(240)
    assert ended.status == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """40 steps on two nodes under torchrun, without a disturbance."""
    return job(tmp_path_factory.mktemp("whole") / "2x1", *PROGRAM)


def test_every_way_to_start_the_same_world_gives_the_same_trace_bit_for_bit(
    tmp_path: Path, two_nodes: Ended
) -> None:
    """As forks, which is the default, as processes that torchrun starts afresh, and as tasks of a scheduler."""
    node = ("--nodes", "1", "--omp-num-threads", "1")
    afresh = job(tmp_path / "1x2", *node, "--nproc-per-node", "2", "--start-ranks", "spawn", *PROGRAM)
    per_rank = job(tmp_path / "rank", *node, "--tasks-per-node", "2", *PROGRAM)
    assert "imports torch for itself" not in two_nodes.err
    assert len(trace(two_nodes)[0]) == 40
    assert trace(two_nodes) == trace(afresh) == trace(per_rank)


def test_a_planned_end_loses_nothing(tmp_path: Path, two_nodes: Ended) -> None:
    """Nor does it when the other half has a task a rank."""
    folder = tmp_path / "parts"
    folder.mkdir()
    first = start(folder, *PROGRAM)
    steps = folder / "run" / "metrics.jsonl"
    first.until(lambda: steps.exists() and steps.read_text().count("\n") > 3, "some steps are done")
    (folder / "run" / "stop").touch()
    stopped = first.end()
    assert stopped.status == 75, stopped.err
    assert [stopped.outcome(f"0.{node}").status for node in (0, 1)] == [75, 75]
    (saved,) = checkpoint.newest_first(folder / "run" / "checkpoints")
    assert checkpoint.load(saved).step == max(metrics.read(steps).loss)
    second = run(folder, *PER_RANK)
    assert second.status == 0, second.err
    assert [second.outcome(f"1.{node}.0").status for node in (0, 1)] == [0, 0]
    assert trace(second) == trace(two_nodes)
    done = [(rank["node"], rank["images"]) for rank in result(second)["ranks"]]
    left = 8 * (40 - checkpoint.load(saved).step)
    assert done == [("127.0.0.1", left), ("127.0.0.2", left)]
    told = json.loads((second.run / "manifest.json").read_text())
    assert result(second)["job_id"] == told["attempts"][1]["job_id"]
    assert (result(second)["attempt"], told["results"]) == (1, result(second))


def test_interrupting_the_demo_ends_it_at_once(tmp_path: Path) -> None:
    demo = start(tmp_path, "--nodes", "1", *PROGRAM, "steps=100000")
    steps = demo.run / "metrics.jsonl"
    demo.until(lambda: steps.exists() and steps.stat().st_size, "a step is done")
    demo.signal(signal.SIGINT)
    ended = demo.end()
    assert ended.status == 130
    assert ended.seconds < 60
    assert "Traceback" not in ended.err
    assert gone(str(demo.run))
    assert not processes_with(str(demo.run))


def test_a_wrong_config_is_one_line_and_64_before_anything_starts(tmp_path: Path) -> None:
    ended = run(tmp_path, "--mode", "rank", "--", "-m", "train", "--config", "digits", "learning_rate=1")
    assert (ended.status, ended.err) == (
        64,
        "apptrain: train: override: unknown key 'learning_rate': did you mean optimizer.lr? (python -m train --help lists the keys)\n",
    )
    assert not ended.run.exists()


def test_check_tells_what_torch_offers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON through the command, and as text in this process, which has torch."""
    command = [sys.executable, "-P", "-m", "entrypoint", "check", "--json"]
    facts = json.loads(
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout
    )
    import torch

    assert facts["torch"] == torch.__version__
    assert facts["torch_git"] == torch.version.git_version
    assert len(facts["devices"]) == torch.cuda.device_count()
    assert {"python", "cuda", "cudnn", "nccl", "gloo", "cuda_available"} <= set(facts)
    assert cli.main(["check"]) == 0
    assert f"torch           {torch.__version__}\n" in capsys.readouterr().out
