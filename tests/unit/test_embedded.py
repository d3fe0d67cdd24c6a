"""The embedded scheduler: what it says before its nodes start; tests/embedded has its jobs."""

import subprocess
import sys
from pathlib import Path

import pytest

BOUND = 30  # s
OURS = """
import sys
from entrypoint import embedded
from entrypoint.job.outcome import Outcome
embedded._Nodes._attempt = lambda self, attempt: (Outcome(status=0), attempt)
sys.exit(embedded.main(sys.argv[1:]))
"""
"""With nodes that end at once."""
NO_CMD = "apptrain: no CMD given: trains the reference job, as apptrain demo; your own: apptrain run -- my_script.py"


def said(folder: Path, *arguments: str, **env: str) -> list[str]:
    """By `apptrain run` in this folder, where it succeeds."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", OURS, *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr.splitlines()


def started(folder: Path) -> list[str]:
    return [
        f"apptrain: 2 nodes on this machine, run directory {folder}/run",
        f"apptrain: to follow it from elsewhere: tail -f {folder}/run/job.log",
    ]


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ((), [NO_CMD]),
        (("--",), [NO_CMD]),
        (("--", "my_script.py"), []),
        (("--", "-m", "train", "--config", "digits"), []),
        (("--doctor",), []),
    ],
)
def test_without_a_cmd_the_reference_job_is_named_first(
    arguments: tuple[str, ...], first: list[str], tmp_path: Path
) -> None:
    (tmp_path / "my_script.py").touch()
    assert said(tmp_path, "--run-dir", "run", *arguments) == [*first, *started(tmp_path)]
