"""What a measured command leaves is ended, and what ran before it is not."""

import os
import subprocess
from pathlib import Path

import psutil

from benchmarks import bounded


def test_what_ran_before_stays_and_what_the_command_leaves_is_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as before:
        leaves = "setsid sleep 60 >/dev/null 2>&1 & echo $!"
        ended = bounded.run(["sh", "-c", leaves], cwd=tmp_path, env=dict(os.environ), seconds=30)
        assert ended.status == 0
        assert before.poll() is None
        assert not psutil.pid_exists(int(ended.out))
        before.kill()


def test_a_command_that_overruns_has_no_status(tmp_path: Path) -> None:
    ended = bounded.run(["sleep", "60"], cwd=tmp_path, env=dict(os.environ), seconds=0.2)
    assert ended.status is None
    assert 0.2 <= ended.seconds < 30
