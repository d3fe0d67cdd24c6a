"""Checkpoints when things break: kills at drawn moments, real small disks, and scripts of other people."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.embedded import disks
from tests.embedded.jobs import CHECKOUT, Ended, Job, clean_env, processes_with, run, start
from tests.embedded.ready import Training
from train import checkpoint, metrics

BOUND_S = 120.0
SMALL = ["--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16", "batch_size=16"]


def trace(run_dir: Path) -> dict[int, float]:
    return metrics.read(run_dir / "metrics.jsonl").loss


def digest(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["weights_sha256"])


def until(condition: Callable[[], Any], what: str, pause: float = 0.02) -> Any:
    deadline = time.monotonic() + BOUND_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {BOUND_S} s for {what}"
        time.sleep(pause)
    return found


def step_after(run_dir: Path, step: int) -> Callable[[], bool]:
    """Whether a step beyond this one is in the metrics."""

    def reached() -> bool:
        path = run_dir / "metrics.jsonl"
        return path.exists() and max(trace(run_dir), default=0) > step

    return reached


# --- a process alone, on disks that can be broken ---------------------------------------------------------


class Alone:
    """`python -m train` as one process."""

    def __init__(self, run_dir: Path, *overrides: str, disk: disks.Disk | None = None) -> None:
        env = clean_env(APPTRAIN_RUN_DIR=str(run_dir), OMP_NUM_THREADS="1")
        arguments = [*SMALL, "device=cpu", *overrides]
        self.process = Training(*arguments, cwd=run_dir.parent, env=env, inside=disk.keeper if disk else None)

    def stop(self) -> subprocess.CompletedProcess[str]:
        self.process.send_signal(signal.SIGUSR2)
        return self.end()

    def end(self) -> subprocess.CompletedProcess[str]:
        status, out, err = self.process.end(BOUND_S)
        return subprocess.CompletedProcess(SMALL, status, out, err)


def warnings(err: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", err) if line.startswith("train: ")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 steps of one process without a disturbance."""
    run_dir = tmp_path_factory.mktemp("alone") / "whole"
    done = Alone(run_dir).end()
    assert done.returncode == 0, done.stderr
    assert len(trace(run_dir)) == 40
    return run_dir


@disks.marked
def test_a_disk_that_fills_up_ends_no_training_and_harms_no_checkpoint(
    tmp_path: Path, whole: Path, small_disk: Callable[[Path, str], disks.Disk]
) -> None:
    disk = small_disk(tmp_path / "scratch", "12m")
    run_dir, seen = tmp_path / "scratch" / "run", disk.seen / "run"
    done = Alone(run_dir, "checkpoint.every=5", "checkpoint.keep=0", disk=disk).end()
    assert done.returncode == 74, done.stderr
    good = [path.name for path in checkpoint.newest_first(seen / "checkpoints")]
    newest = checkpoint.newest_whole(seen / "checkpoints")
    assert newest is not None
    assert 5 <= newest < 40
    assert [checkpoint.load(seen / "checkpoints" / name).step for name in good] == list(range(newest, 0, -5))
    assert trace(seen) == trace(whole)
    assert digest(seen) == digest(whole)
    failed = 8 - len(good)
    said = [line for line in warnings(done.stderr) if "checkpoints" in line or "done" in line]
    assert said == [
        f"train: WARNING: checkpoints: No space left on device: step {newest + 5} is not saved to "
        f"{run_dir}/checkpoints; training goes on; the newest is that of step {newest}",
        f"train: WARNING: checkpoints: No space left on device ({failed} times, and to the end)",
        "train: the run is done, but its last state is not saved: No space left on device",
    ]
    for name in good[1:]:
        shutil.rmtree(seen / "checkpoints" / name)
    again = Alone(run_dir, disk=disk).end()
    assert again.returncode == 0, again.stderr
    assert f"resumed from {run_dir}/checkpoints/step-{newest:08d}: step {newest} of 40\n" in again.stdout
    assert trace(seen) == trace(whole)
    assert digest(seen) == digest(whole)


@disks.marked
def test_on_a_disk_without_a_byte_left_metrics_wait_and_a_planned_end_is_no_75(
    tmp_path: Path, small_disk: Callable[[Path, str], disks.Disk]
) -> None:
    disk = small_disk(tmp_path / "scratch", "24m")
    run_dir, seen = tmp_path / "scratch" / "run", disk.seen / "run"
    endless = ["steps=100000", "checkpoint.every=5"]
    first = Alone(run_dir, *endless, disk=disk)
    until(step_after(seen, 12), "steps")

    def stands_still() -> bool:
        disk.fill()  # again: a save that failed has given up what it had written
        return bool(step_after(seen, 0)()) and not _grows(seen / "metrics.jsonl")

    until(stands_still, "a log that stands still")
    last = max(trace(seen))
    disk.free()
    until(step_after(seen, last + 20), "a log that goes on")

    def no_save_goes_on() -> bool:
        disk.fill()
        return not list((seen / "checkpoints").glob(".*.tmp"))

    until(no_save_goes_on, "the end of the save that had its blocks")
    newest = until(lambda: checkpoint.newest_whole(seen / "checkpoints"), "a checkpoint")
    stopped = first.stop()
    assert stopped.returncode == 74, stopped.stderr
    assert newest == checkpoint.newest_whole(seen / "checkpoints")
    assert checkpoint.load(seen / "checkpoints" / f"step-{newest:08d}").step == newest
    final = warnings(stopped.stderr)[-1]
    assert re.fullmatch(
        r"train: stopped after step \d+ of 100000, which is not saved: No space left on device: "
        r"--resume auto goes on from the newest checkpoint",
        final,
    )
    told = [line for line in warnings(stopped.stderr) if line.startswith("train: WARNING: metrics.jsonl: ")]
    assert told[0] == (
        f"train: WARNING: metrics.jsonl: No space left on device: {run_dir}/metrics.jsonl takes no lines; "
        "training goes on, they wait"
    )
    disk.free()
    size = (seen / "metrics.jsonl").stat().st_size
    second = Alone(run_dir, *endless, disk=disk)
    until(lambda: (seen / "metrics.jsonl").stat().st_size > size, "a step")
    ended = second.stop()
    assert ended.returncode == 75, ended.stderr
    steps = list(trace(seen))
    assert steps == list(range(1, steps[-1] + 1))


def _grows(path: Path) -> bool:
    size = path.stat().st_size
    time.sleep(2.0)  # several steps, also on a busy machine
    return path.stat().st_size > size


@disks.marked
def test_checkpoints_on_a_file_system_that_turns_read_only_are_missed_loudly_until_it_is_back(
    tmp_path: Path, small_disk: Callable[[Path, str], disks.Disk]
) -> None:
    run_dir = tmp_path / "run"
    disk = small_disk(run_dir / "checkpoints", "64m")
    alone = Alone(run_dir, "steps=100000", "checkpoint.every=5", disk=disk)
    before = until(lambda: checkpoint.newest_whole(disk.seen), "a checkpoint")
    until(lambda: not list(disk.seen.glob(".*.tmp")) and _read_only(disk), "a moment between two saves")
    until(step_after(run_dir, max(trace(run_dir)) + 12), "steps")
    frozen = checkpoint.newest_whole(disk.seen)
    assert frozen is not None
    assert frozen >= before
    disk.remount("rw")
    until(lambda: (checkpoint.newest_whole(disk.seen) or 0) > frozen, "another checkpoint")
    done = alone.stop()
    assert done.returncode == 75, done.stderr
    assert any(
        re.fullmatch(
            r"train: WARNING: checkpoints: Read-only file system: step \d+ is not saved to "
            rf"{run_dir}/checkpoints; training goes on; the newest is that of step {frozen}",
            line,
        )
        for line in warnings(done.stderr)
    ), done.stderr
    assert any(line.startswith("train: checkpoints: works again") for line in warnings(done.stderr))
    saved = checkpoint.load(disk.seen / f"step-{max(trace(run_dir)):08d}")
    assert saved.step == max(trace(run_dir))


def _read_only(disk: disks.Disk) -> bool:
    try:
        disk.remount("ro")
    except subprocess.CalledProcessError:  # A save has just begun: files are open for writing.
        return False
    return True


@disks.marked
def test_a_directory_that_is_read_only_from_the_start_is_said_before_the_first_save(
    tmp_path: Path, whole: Path, small_disk: Callable[[Path, str], disks.Disk]
) -> None:
    run_dir = tmp_path / "run"
    disk = small_disk(run_dir / "checkpoints", "64m")
    disk.remount("ro")
    done = Alone(run_dir, disk=disk).end()
    assert done.returncode == 74, done.stderr
    directory = run_dir / "checkpoints"
    assert warnings(done.stderr) == [
        f"train: WARNING: rehearsal of a save: Read-only file system: no checkpoint can be written to {directory}; "
        "training goes on",
        f"train: WARNING: checkpoints: Read-only file system: step 40 is not saved to {directory}; training goes on; "
        "there is none",
        "train: WARNING: rehearsal of a save: Read-only file system (once, and to the end)",
        "train: WARNING: checkpoints: Read-only file system (once, and to the end)",
        "train: the run is done, but its last state is not saved: Read-only file system",
    ]
    assert digest(run_dir) == digest(whole)


def test_a_run_directory_that_vanishes_is_made_anew_and_the_end_is_saved(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    alone = Alone(run_dir, "steps=100000", "checkpoint.every=5")
    until(step_after(run_dir, 12), "steps")
    gone = tmp_path / "gone"
    run_dir.rename(gone)
    shutil.rmtree(gone)
    until(step_after(run_dir, 0), "a new log")
    done = alone.stop()
    assert done.returncode == 75, done.stderr
    steps = list(trace(run_dir))
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert checkpoint.load(run_dir / "checkpoints" / f"step-{steps[-1]:08d}").step == steps[-1]
    assert any("it has vanished" in line for line in warnings(done.stderr))


def truncate(checkpoint: Path) -> None:
    model = checkpoint / "model.safetensors"
    os.truncate(model, model.stat().st_size // 2)


def change(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff")


def remove_the_marker(checkpoint: Path) -> None:
    (checkpoint / "complete.json").unlink()


def empty(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()


def test_damaged_checkpoints_and_a_cut_log_cost_the_steps_since_the_one_before(
    tmp_path: Path, whole: Path
) -> None:
    run_dir = tmp_path / "run"
    first = Alone(run_dir, "checkpoint.every=4", "checkpoint.keep=0", "stop_at=25").end()
    assert first.returncode == 75, first.stderr

    def plant(checkpoint: Path) -> None:
        pickled = b"cos\nmkdir\n(V" + str(tmp_path / "ran").encode() + b"\ntR."
        (checkpoint / "model.safetensors").write_bytes(pickled)

    damage = {25: truncate, 24: change, 20: remove_the_marker, 16: empty, 12: plant}
    for step, harm in damage.items():
        harm(run_dir / "checkpoints" / f"step-{step:08d}")
    log = run_dir / "metrics.jsonl"
    os.truncate(log, log.stat().st_size - 7)
    done = Alone(run_dir).end()
    assert done.returncode == 0, done.stderr
    for step in damage:
        assert f"WARNING: skipped {run_dir}/checkpoints/step-{step:08d}: " in done.stdout
        assert (run_dir / "previous-1" / f"step-{step:08d}").is_dir()
    assert f"resumed from {run_dir}/checkpoints/step-00000008: step 8 of 40\n" in done.stdout
    assert not (tmp_path / "ran").exists()
    assert trace(run_dir) == trace(whole)
    assert digest(run_dir) == digest(whole)


# --- under the launcher -----------------------------------------------------------------------------------

TWO_RANKS = ("--nodes", "1", "--nproc-per-node", "2")
"""Of one node: forks of one process, which has imported torch for both."""
JOB = [*TWO_RANKS, "--", "-m", "train", *SMALL, "checkpoint.every=5", "checkpoint.keep=2"]


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 steps of two ranks without a disturbance."""
    folder = tmp_path_factory.mktemp("job")
    ended = run(folder, *JOB)
    assert ended.status == 0, ended.err
    return ended.run


def rank_process(run_dir: Path, rank: int) -> int | None:
    """The process of a rank: the one whose command is the training program."""
    for pid in processes_with(f"APPTRAIN_RUN_DIR={run_dir}"):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment and b"train" in words and b"launch" not in words:
            return pid
    return None


def at_start_up(run_dir: Path, done: int, seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed from now on, or the first step is over."""
    late = time.monotonic() + seconds
    began = step_after(run_dir, done)
    return lambda: time.monotonic() > late or began()


def saving(run_dir: Path) -> list[Path]:
    return list((run_dir / "checkpoints").glob(".step-*.tmp"))


def stopped_in_a_save(pid: int, run_dir: Path) -> bool:
    """Whether the process could be stopped while it saves; if the save was over, it goes on."""
    if not saving(run_dir):
        return False
    os.kill(pid, signal.SIGSTOP)
    until(
        lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T",
        "a stopped process",
    )
    if saving(run_dir):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def test_killed_workers_cost_no_more_than_the_steps_since_the_last_save(
    tmp_path: Path, whole_job: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    done = 0
    for attempt, moment in enumerate(["in a step", "at start-up", "during a save"]):
        victim = draw.randrange(2) if moment != "during a save" else 0
        job = start(tmp_path, *JOB)
        run_dir = job.run
        pid = until(partial(rank_process, run_dir, victim), "a rank")
        if moment == "at start-up":
            job.until(at_start_up(run_dir, done, draw.uniform(0, 2)), "a drawn moment")
        else:
            begin = max(done, 5) + 1
            last = begin + 1 if moment == "during a save" else max(begin + 1, 12)  # of 40: some are left
            job.until(step_after(run_dir, draw.randrange(begin, last)), "a drawn step")
        if moment == "during a save":
            until(partial(stopped_in_a_save, pid, run_dir), "a save", pause=0.001)
        os.kill(pid, signal.SIGKILL)
        ended = job.end()
        assert ended.status == 137, ended.err
        found = ended.outcome(f"{attempt}.0")
        assert (found.rank, found.signal) == (victim, 9)
        if moment == "during a save":
            assert saving(run_dir), "the save was over before the kill"
            assert done - resumed_from(ended) <= 2 * 5, "more than the interval and the steps during one save"
        done = max(trace(run_dir))
    again = run(tmp_path, *JOB)
    assert again.status == 0, again.err
    assert done - resumed_from(again) <= 2 * 5, "more than the interval and the steps during one save"
    assert saving(run_dir) == []
    assert trace(run_dir) == trace(whole_job)
    assert digest(run_dir) == digest(whole_job)


def resumed_from(ended: Ended) -> int:
    """The step from which a job went on."""
    said = re.search(r"resumed from .*: step (\d+) of 40\n", ended.out)
    return int(said[1]) if said else 0


@disks.marked
def test_a_planned_end_that_cannot_be_saved_is_a_failure_of_the_job_that_says_why(
    tmp_path: Path, small_disk: Callable[[Path, str], disks.Disk]
) -> None:
    run_dir = tmp_path / "run"
    disk = small_disk(run_dir / "checkpoints", "64m")
    options = ["--run-dir", str(run_dir), "--mode", "rank", "--", "-m", "train", *SMALL]
    argv = [*disk.prefix, sys.executable, "-P", "-m", "entrypoint.cli.embedded", *options]
    argv += ["steps=100000", "checkpoint.every=5"]
    job = Job(argv, tmp_path, run_dir, clean_env(APPTRAIN_PASS="PYTHONPATH"))
    job.until(lambda: checkpoint.newest_whole(disk.seen), "a checkpoint")
    disk.fill()
    newest = checkpoint.newest_whole(disk.seen)
    job.until(step_after(run_dir, max(trace(run_dir))), "another step")
    (run_dir / "stop").touch()
    ended: Ended = job.end()
    assert ended.status == 74, ended.err
    assert [ended.outcome(f"0.{node}.0").status for node in (0, 1)] == [74, 74]
    assert ended.outcome("0.0.0").error.startswith("train: stopped after step ")
    assert ended.outcome("0.0.0").error.endswith(
        "which is not saved: No space left on device: --resume auto goes on from the newest checkpoint"
    )
    assert (checkpoint.newest_whole(disk.seen) or 0) >= (newest or 0) > 0


# --- a script of somebody else ----------------------------------------------------------------------------


def documented(folder: Path, script: str = "ddp.py") -> Path:
    """A script of examples/, with the copy beside it that it asks for."""
    folder.mkdir()
    for name in (script, "stop.py"):
        shutil.copy(CHECKOUT / "examples" / name, folder)
    return folder / script


def sums(ended: Ended) -> set[str]:
    """What each rank printed in the end: its number, the steps, and the sum of the weights, exactly."""
    return set(re.findall(r"rank \d: \d+ steps, -?0x\S+", ended.out))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = documented(tmp_path_factory.mktemp("home") / "mine")
    # A program of the user's own that is called as ours is must not be in the way.
    (found.parent / "train.py").write_text("raise SystemExit('the wrong train')\n")
    return found


@pytest.fixture(scope="module")
def whole_script(script: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    ended = run(tmp_path_factory.mktemp("script"), *TWO_RANKS, "--", str(script), "--steps", "200")
    assert ended.status == 0, ended.err
    assert len(sums(ended)) == 2
    return sums(ended)


def test_the_documented_script_loses_nothing_at_planned_ends(
    tmp_path: Path, script: Path, whole_script: set[str]
) -> None:
    """The first under torchrun by the stop file, the second with a task a rank by a signal to one of them."""
    first = start(tmp_path, "--", str(script), "--steps", "200")
    until(lambda: listening(script, first.run), "two ranks that listen")
    (first.run / "stop").touch()
    stopped = first.end()
    assert stopped.status == 75, stopped.err
    assert [stopped.outcome(f"0.{node}").status for node in (0, 1)] == [75, 75]
    assert [path.name for path in (first.run / "checkpoints").iterdir()] == ["state.pt"]
    second = start(tmp_path, "--mode", "rank", "--", str(script), "--steps", "200")
    pids = until(lambda: listening(script, second.run), "two ranks that listen")
    os.kill(pids[1], signal.SIGUSR2)
    stopped = second.end()
    assert stopped.status == 75, stopped.err
    assert [stopped.outcome(f"1.{node}.0").status for node in (0, 1)] == [75, 75]
    last = run(tmp_path, *TWO_RANKS, "--", str(script), "--steps", "200")
    assert last.status == 0, last.err
    assert sums(last) == whole_script


def test_an_element_of_a_sweep_has_the_same_result_over_a_planned_end(tmp_path: Path) -> None:
    script = documented(tmp_path / "mine", "sweep.py")
    words = ("--", str(script), "--element", "3")
    apart = tmp_path / "apart"
    apart.mkdir()
    whole = run(apart, *TWO_RANKS, *words)
    assert whole.status == 0, whole.err
    first = start(tmp_path, *words)
    until(lambda: listening(script, first.run), "two ranks that listen")
    (first.run / "stop").touch()
    stopped = first.end()
    assert stopped.status == 75, stopped.err
    assert not (first.run / "sweep.json").exists()
    last = run(tmp_path, *TWO_RANKS, *words)
    assert last.status == 0, last.err
    results = [json.loads((ended.run / "sweep.json").read_text()) for ended in (whole, last)]
    assert results[0] == results[1]
    assert (results[0]["index"], results[0]["steps"]) == (3, 200)


@pytest.mark.parametrize(
    ("words", "said"), [((), "no job array, and no --element"), (("--element", "4"), "element 4")]
)
def test_a_sweep_without_an_element_of_its_grid_says_which_there_are(words: Sequence[str], said: str) -> None:
    script = CHECKOUT / "examples/sweep.py"
    ended = subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, env={}, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"{said}: GRID has the elements 0 to 3; this file's first lines start them\n"


def test_the_results_of_a_sweep_are_listed_without_one_that_is_cut(tmp_path: Path) -> None:
    for name, text in (("0", '{"index": 0, "loss": 0.5}'), ("1", ""), ("2", '{"index": 2, "lo'), ("3", None)):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "sweep.json").write_text(text)
    script = CHECKOUT / "examples/sweep.py"
    (tmp_path / "job.out").touch()
    line = [sys.executable, str(script), "0", "1", "2", "3", "job.out"]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "index=0\tloss=0.5\n")
    assert ended.stderr == "no result yet: 1 2 3 job.out\n"


def listening(script: Path, run_dir: Path) -> dict[int, int]:
    """Ranks and processes, once both ranks of the script catch the signal; empty before."""
    found = {}
    for pid in processes_with(f"APPTRAIN_RUN_DIR={run_dir}"):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            rank = re.findall(rb"(?<=\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
            caught = int(re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())[0], 16)
        except OSError:
            continue
        if rank and str(script).encode() in words and caught >> (signal.SIGUSR2 - 1) & 1:
            found[int(rank[0])] = pid
    return found if len(found) == 2 else {}
