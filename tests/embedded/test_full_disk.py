"""Jobs whose run directory is on a disk without a byte left: how the ranks ended counts."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from entrypoint.job.rundir import RunDirectory, read_key
from tests.embedded import disks
from tests.embedded.jobs import Ended, Job, clean_env

MakeDisk = Callable[[Path, str], disks.Disk]


def run(tmp_path: Path, disk: disks.Disk, script: str) -> Ended:
    """One node whose run directory is on the disk; `script` is sh's."""
    inside = tmp_path / "disk" / "run"
    ours = [sys.executable, "-P", "-m", "entrypoint.cli.embedded", "--nodes", "1", "--run-dir", str(inside)]
    argv = [*disk.prefix, *ours, "--mode", "exec", "--no-python", "--", "sh", "-c", script]
    return Job(argv, tmp_path, disk.seen / "run", clean_env()).end()


@disks.marked
def test_a_rank_that_fills_the_disk_ends_the_job_with_its_own_status(
    tmp_path: Path, small_disk: MakeDisk
) -> None:
    disk = small_disk(tmp_path / "disk", "256k")
    ended = run(tmp_path, disk, 'cat /dev/zero > "$APPTRAIN_RUN_DIR/fill" 2>/dev/null; exit 75')
    assert ended.status == 75, ended.err
    outcome = ended.outcome("0.0")
    assert (outcome.status, outcome.rank, outcome.node) == (75, 0, "127.0.0.1")
    assert "cannot be written" not in ended.err
    assert "Traceback" not in ended.err
    assert [path.name for path in (ended.run / "outcome").iterdir()] == ["0.0"]


@disks.marked
def test_where_the_disk_takes_no_outcome_the_status_of_the_task_counts(
    tmp_path: Path, small_disk: MakeDisk
) -> None:
    """The folder with the space that was reserved vanishes, and the disk takes no other."""
    full = 'cd "$APPTRAIN_RUN_DIR"; rm -r outcome; n=0; while mkdir $n 2>/dev/null; do n=$((n + 1)); done'
    for status in (0, 75, 5):
        disk = small_disk(tmp_path / str(status) / "disk", "256k,nr_inodes=64")
        ended = run(tmp_path / str(status), disk, f"{full}; exit {status}")
        assert ended.status == status, ended.err
        assert f"apptrain: the outcome (status {status}) cannot be written: [Errno 28] No space" in ended.err
        assert "Traceback" not in ended.err


@disks.marked
def test_a_disk_that_is_full_from_the_start_is_one_line(tmp_path: Path, small_disk: MakeDisk) -> None:
    disk = small_disk(tmp_path / "disk", "256k")
    disk.fill()
    ended = run(tmp_path, disk, "exit 0")
    inside = tmp_path / "disk" / "run"
    assert ended.status == 64
    assert ended.err == (
        f"apptrain: the run directory {inside} is full on {os.uname().nodename} (No space left on device): remove "
        "what is not needed there (df -h, df -i, quota), or give another with --run-dir\n"
    )
    disk.free()
    key = RunDirectory(ended.run, 0)
    key.make_key()
    assert len(read_key(key.key)) == 64
