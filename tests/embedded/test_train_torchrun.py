"""The training program under real torchrun processes on this machine, gloo on the CPU."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from entrypoint.node import processes
from tests.embedded.ready import Training
from tests.ports import free_port
from train import checkpoint, metrics

SHIPPED = ["--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16", "device=cpu"]
"""Without a batch size that somebody gave."""
SMALL = [*SHIPPED, "batch_size=16"]
BOUND_S = 150


def environment(run_dir: Path) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("APPTRAIN_", "PET_"))
    }
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "APPTRAIN_RUN_DIR": str(run_dir),
        "APPTRAIN_NODE": "node-a",
    }


class Started(ABC):
    """Processes on this machine; started at once, ended in any case."""

    @abstractmethod
    def is_running(self) -> bool:
        """Whether none of them has ended."""

    @abstractmethod
    def wait(self) -> list[subprocess.CompletedProcess[str]]:
        """How each of them ends."""

    @abstractmethod
    def rank_pids(self) -> list[int]:
        """Of those that run."""

    @abstractmethod
    def give_up(self) -> None:
        """End those that run."""


class Torchrun(Started):
    """Agents, one a node."""

    def __init__(self, run_dir: Path, *command: str, nodes: int = 1, ranks: int = 2) -> None:
        self.agents: list[subprocess.Popen[str]] = []
        port = str(free_port())
        for node in range(nodes):
            options = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--node-rank", str(node)]
            options += ["--master-addr", "127.0.0.1", "--master-port", port]
            self.agents.append(
                subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *options, *command],
                    env=environment(run_dir),
                    cwd=run_dir.parent,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def is_running(self) -> bool:
        return all(agent.poll() is None for agent in self.agents)

    def wait(self) -> list[subprocess.CompletedProcess[str]]:
        ends = [agent.communicate(timeout=BOUND_S) for agent in self.agents]
        return [
            subprocess.CompletedProcess(agent.args, agent.returncode, *output)
            for agent, output in zip(self.agents, ends, strict=True)
        ]

    def rank_pids(self) -> list[int]:
        found = []
        for agent in self.agents:
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            found += [int(child) for child in children]
        return found

    def give_up(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
                agent.communicate(timeout=60)


class Ranks(Started):
    """Ranks without an agent, as where a scheduler starts a task for each; so many on each node."""

    def __init__(
        self,
        run_dir: Path,
        *arguments: str,
        nodes: int = 1,
        ranks: int = 2,
        base: Sequence[str] = SMALL,
    ) -> None:
        self.ranks: list[Training] = []
        world = {"WORLD_SIZE": str(nodes * ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(nodes * ranks):
            node, local_rank = divmod(rank, ranks)
            here = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "APPTRAIN_NODE": f"node-{node}"}
            env = environment(run_dir) | world | here
            self.ranks.append(Training(*base, *arguments, cwd=run_dir.parent, env=env))

    def is_running(self) -> bool:
        return all(rank.is_running() for rank in self.ranks)

    def wait(self) -> list[subprocess.CompletedProcess[str]]:
        return [subprocess.CompletedProcess(SMALL, *rank.end(BOUND_S)) for rank in self.ranks]

    def rank_pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    def give_up(self) -> None:
        for rank in self.ranks:
            if rank.is_running():
                rank.end(0)


class Alone(Ranks):
    """A process that is told of no others."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.ranks = [Training(*SMALL, *arguments, cwd=run_dir.parent, env=environment(run_dir))]


@pytest.fixture
def started() -> Iterator[list[Started]]:
    """Whatever a test leaves running is ended here."""
    runs: list[Started] = []
    yield runs
    for run in runs:
        run.give_up()


def finished(run_dir: Path, *command: str, nodes: int = 1, ranks: int = 2, status: int = 0) -> list[Any]:
    done = Torchrun(run_dir, *command, nodes=nodes, ranks=ranks).wait()
    for agent in done:
        assert agent.returncode == status, agent.stdout + agent.stderr
    return done


def train(run_dir: Path, *overrides: str, **shape: int) -> list[Any]:
    return finished(run_dir, "-m", "train", *SMALL, *overrides, **shape)


def alone(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (done,) = Alone(run_dir, *arguments).wait()
    return done


def result(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return found


def rank_statuses(stderr: str) -> list[int]:
    return [int(status) for status in re.findall(r"exitcode\s+: (-?\d+) ", stderr)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 steps on one node with two ranks."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    (done,) = train(run_dir)
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "digits-short: shufflenet_v2_x0_5 (0.4 M parameters), digits (1437 train, 360 test), "
        "40 steps of 16 images on 2 x cpu (gloo)"
    )
    assert [line[:18] for line in lines if line.startswith("test accuracy")] == ["test accuracy     "]
    return run_dir


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 20 of these steps, on two nodes with a rank each, with checkpoints by time."""
    run_dir = tmp_path_factory.mktemp("runs") / "half"
    for rank in Ranks(run_dir, "stop_at=20", "checkpoint.minutes=0.005", nodes=2, ranks=1).wait():
        assert rank.returncode == 75, rank.stderr
    return run_dir


def test_20_steps_on_two_nodes_and_20_more_on_one_equal_40_bit_for_bit(
    whole: Path, half: Path, tmp_path: Path
) -> None:
    parts = shutil.copytree(half, tmp_path / "parts")
    expected = metrics.read(whole / "metrics.jsonl")
    assert list(expected.loss) == list(range(1, 41))
    first = metrics.read(parts / "metrics.jsonl")
    assert first.loss == {step: expected.loss[step] for step in range(1, 21)}
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": 1.2, "lr"')
    second, other = Ranks(parts).wait()
    assert (second.returncode, other.returncode) == (0, 0), second.stderr
    assert f"resumed from {parts}/checkpoints/step-00000020: step 20 of 40\n" in second.stdout
    found = metrics.read(parts / "metrics.jsonl")
    assert (found.loss, found.lr, found.accuracy) == (expected.loss, expected.lr, expected.accuracy)
    assert result(parts)["weights_sha256"] == result(whole)["weights_sha256"]


def test_in_two_parts_it_is_the_same_among_three_ranks_too(tmp_path: Path) -> None:
    """Where the order in which gradients are summed counts."""
    one, part = tmp_path / "one", tmp_path / "part"
    short = ["steps=5", "batch_size=15", "checkpoint.every=2", "checkpoint.keep=0"]
    middle = one / "checkpoints" / "step-00000002"
    for ended in (
        Ranks(one, *short, ranks=3).wait() + Ranks(part, *short, f"--resume={middle}", ranks=3).wait()
    ):
        assert ended.returncode == 0, ended.stderr
    expected = metrics.read(one / "metrics.jsonl").loss
    assert metrics.read(part / "metrics.jsonl").loss == {step: expected[step] for step in (3, 4, 5)}
    assert result(part)["weights_sha256"] == result(one)["weights_sha256"]


def test_one_process_evaluates_to_the_same_figure_and_says_what_changed(whole: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(whole, tmp_path / "copy")
    done = alone(copy, "evaluate.batch_size=64")
    assert done.returncode == 0, done.stderr
    assert "world_size was 2, is 1: going on with the same order of samples, not bit for bit\n" in done.stdout
    assert result(copy)["correct"] == result(whole)["correct"]
    assert result(copy)["total"] == 360
    assert result(copy)["weights_sha256"] == result(whole)["weights_sha256"]


def test_another_number_of_ranks_goes_on_with_the_same_samples_and_says_what_changed(
    whole: Path, half: Path, tmp_path: Path
) -> None:
    parts = shutil.copytree(half, tmp_path / "parts")
    saved, *_ = checkpoint.newest_first(parts / "checkpoints")
    assert checkpoint.load(saved).state["position"] == 20 * 16
    # Two passes of one rank see the batches of one pass of two: what is left of the difference is rounding.
    done = alone(parts, "accumulation=2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1:4] == [
        "accumulation was 1, is 2: going on, not bit for bit",
        "world_size was 2, is 1: going on with the same order of samples, not bit for bit",
        f"resumed from {parts}/checkpoints/step-00000020: step 20 of 40",
    ]
    expected, found = (metrics.read(run / "metrics.jsonl").loss for run in (whole, parts))
    assert list(found) == list(range(1, 41))
    assert found == pytest.approx(expected, rel=1e-3)
    runs = [
        checkpoint.load(run / "checkpoints" / "step-00000040").state["run"]["id"] for run in (whole, parts)
    ]
    assert runs[1] == checkpoint.load(saved).state["run"]["id"] != runs[0]


def test_the_batch_that_was_fitted_to_the_ranks_stays_where_others_can_share_it(tmp_path: Path) -> None:
    """Of 128 images three ranks make 129, which one rank can train on, and two cannot."""
    run_dir = tmp_path / "run"
    for ended in Ranks(run_dir, "stop_at=1", ranks=3, base=SHIPPED).wait():
        assert ended.returncode == 75, ended.stderr
    refused = Ranks(run_dir, ranks=2, base=SHIPPED).wait()
    assert [rank.returncode for rank in refused] == [64, 64]
    assert [line for rank in refused for line in rank.stderr.splitlines() if line.startswith("train: ")] == [
        "train: batch_size is 129 in the checkpoint, no multiple of 2 ranks x accumulation 1 = 2: start a number "
        "of ranks that divides it, or give another run directory, or --resume never"
    ]
    (done,) = Ranks(run_dir, "stop_at=2", ranks=1, base=SHIPPED).wait()
    assert done.returncode == 75, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "digits-short: batch_size 129 as in the checkpoint, 129 a rank"
    assert lines[1].endswith("40 steps of 129 images on 1 x cpu (gloo)")
    (newest, *_) = checkpoint.newest_first(run_dir / "checkpoints")
    assert checkpoint.load(newest).state["position"] == 2 * 129


def wait_for_a_step(run_dir: Path, run: Started) -> None:
    deadline = time.monotonic() + BOUND_S
    path = run_dir / "metrics.jsonl"
    while not (path.exists() and path.stat().st_size):
        assert run.is_running(), run.wait()
        assert time.monotonic() < deadline, "no step was done"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "status", "agent"), [(signal.SIGUSR2, 75, True), (signal.SIGTERM, 143, False)]
)
def test_a_signal_to_one_rank_ends_all_ranks_after_the_same_saved_step(
    number: signal.Signals, status: int, agent: bool, tmp_path: Path, started: list[Started]
) -> None:
    """With torchrun's agent, which ends the others when a rank has ended, and without."""
    run_dir = tmp_path / "run"
    endless = "steps=100000"
    run = Torchrun(run_dir, "-m", "train", *SMALL, endless) if agent else Ranks(run_dir, endless)
    started.append(run)
    wait_for_a_step(run_dir, run)
    os.kill(run.rank_pids()[1], number)
    done = run.wait()
    statuses = rank_statuses(done[0].stderr) if agent else [rank.returncode for rank in done]
    assert set(statuses) == {status}, done[0].stderr
    last = max(metrics.read(run_dir / "metrics.jsonl").loss)
    (saved,) = checkpoint.newest_first(run_dir / "checkpoints")
    assert checkpoint.load(saved).step == last
    assert f"stopped after step {last} of 100000; --resume auto goes on from there\n" in done[0].stdout


def test_a_process_alone_ends_at_a_signal_with_its_status(tmp_path: Path, started: list[Started]) -> None:
    run_dir = tmp_path / "run"
    run = Alone(run_dir, "steps=100000")
    started.append(run)
    wait_for_a_step(run_dir, run)
    os.kill(run.rank_pids()[0], signal.SIGUSR2)
    (done,) = run.wait()
    assert done.returncode == 75, done.stderr


def test_sigterm_ends_a_process_that_has_nothing_to_save_at_once_and_silently(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "train", *SMALL],
        env=environment(tmp_path / "run"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + BOUND_S
        while not processes.catches(process.pid, signal.SIGUSR2):  # listens already, and imports torch
            assert process.poll() is None
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=BOUND_S)
    finally:
        process.kill()
    assert (process.returncode, said) == (-signal.SIGTERM, ("", ""))
    assert not (tmp_path / "run").exists()


def test_data_that_are_missing_end_all_ranks_with_64_and_one_line(tmp_path: Path) -> None:
    options = ["data.name=cifar10", f"data.path={tmp_path}/none"]
    done = Ranks(tmp_path / "run", *options).wait()
    assert [rank.returncode for rank in done] == [64, 64]
    said = [line for rank in done for line in rank.stderr.splitlines() if line.startswith("train: ")]
    assert said == [
        f"train: data.path={tmp_path}/none: no CIFAR-10 there: expected "
        "cifar-10-batches-bin/data_batch_1.bin to _5.bin and test_batch.bin (binary version), "
        "or cifar-10-batches-py/ (Python version)"
    ]
    assert not (tmp_path / "run").exists()


def test_a_class_that_is_renamed_between_two_parts_ends_all_ranks_with_64_and_one_line(
    tmp_path: Path,
) -> None:
    for folder in ("train/ant", "train/bee", "val/ant", "val/bee"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(8):
            Image.effect_noise((16, 16), 20 * number + 20).save(tmp_path / folder / f"{number}.png")
    options = ["data.name=imagefolder", f"data.path={tmp_path}", "data.workers=0", "stop_at=1"]
    assert [rank.returncode for rank in Ranks(tmp_path / "run", *options).wait()] == [75, 75]
    for split in ("train", "val"):
        (tmp_path / split / "ant").rename(tmp_path / split / "cat")
    done = Ranks(tmp_path / "run", *options).wait()
    assert [rank.returncode for rank in done] == [64, 64]
    said = [line for rank in done for line in rank.stderr.splitlines() if line.startswith("train: ")]
    assert said == [
        "train: the checkpoint of step 1 was made with other training images (classes that are gone: ant; "
        "classes that are new: cat): their order or labels would change: give the same images "
        "(data.path=DIR), or another run directory, or --resume never"
    ]


def test_images_that_differ_between_two_ranks_end_both_with_64_and_one_line(tmp_path: Path) -> None:
    for folder in ("train/ant", "train/bee", "val/ant", "val/bee"):
        for rank, count in ((0, 4), (1, 3 if folder.startswith("train") else 4)):
            (tmp_path / str(rank) / folder).mkdir(parents=True)
            for number in range(count):
                (tmp_path / str(rank) / folder / f"{number}.png").touch()
    program = [
        sys.executable,
        "-m",
        "train",
        *SMALL,
        "data.name=imagefolder",
        "data.path=.",
        "data.workers=0",
    ]
    in_its_own = ["bash", "-c", 'cd "$RANK" && exec "$@"', "bash", *program]
    (done,) = Torchrun(tmp_path / "run", "--no-python", *in_its_own).wait()
    assert 64 in rank_statuses(done.stderr)  # torchrun may end the other one first
    said = [line for line in done.stderr.splitlines() if line.startswith("train: ")]
    assert said == [
        "train: data.path=.: the images differ between rank 0 on node-a and rank 1 on node-a "
        "(number: 8 -> 6): give each node the same images"
    ]
    assert not (tmp_path / "run").exists()


def test_an_error_in_a_rank_ends_with_its_traceback(tmp_path: Path) -> None:
    (done,) = train(tmp_path / "run", "optimizer.lr=1e30", "optimizer.warmup_steps=0", ranks=1, status=1)
    assert re.search(r"train\.loop\.Diverged: the loss of step \d+ is nan: lower optimizer\.lr", done.stderr)
    assert 1 in rank_statuses(done.stderr)


def test_hello_greets_from_every_rank_of_every_node(tmp_path: Path) -> None:
    done = finished(tmp_path / "run", "-m", "train.hello", nodes=2, ranks=1)
    said = sorted(line for agent in done for line in agent.stdout.splitlines())
    port = said[0].split("]")[0].rsplit(":", 1)[1]
    assert said == [
        f"[tcp://127.0.0.1:{port}] hello from [node-a:gloo] process {rank}/2" for rank in range(2)
    ]


def test_hello_alone_is_a_world_of_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "train.hello"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert (done.returncode, done.stdout) == (
        0,
        "[tcp://127.0.0.1:0] hello from [node-a:gloo] process 0/1\n",
    ), done.stderr


def test_no_scheduler_is_named_in_the_training_program() -> None:
    import train

    sources = Path(train.__file__).parent.rglob("*.py")
    naming = [path.name for path in sources if re.search(r"SLURM|PBS_", path.read_text())]
    assert naming == []
