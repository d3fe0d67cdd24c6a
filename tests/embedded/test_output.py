"""What ranks print, through a real launch: nothing that they do with it harms the launcher."""

import sys
from pathlib import Path

from tests.embedded.jobs import Job, clean_env

ONE_NODE = ("--nodes", "127.0.0.1", "--node-rank", "0", "--device", "cpu", "--nproc-per-node", "1")
PRINTS = """
head -c 64M /dev/zero | tr '\\0' x >&2
awk '/VmHWM/ { print "peak", $2 }' "/proc/$PPID/status"
"""


def launch(tmp_path: Path, *arguments: str) -> Job:
    """`launch` itself on one node."""
    run = tmp_path / "run"
    argv = [sys.executable, "-P", "-m", "entrypoint", "launch", *ONE_NODE, "--run-dir", str(run), *arguments]
    return Job(argv, tmp_path, run, clean_env())


def test_the_launchers_memory_does_not_grow_with_a_line_that_has_no_end(tmp_path: Path) -> None:
    ended = launch(tmp_path, "--mode", "exec", "--no-python", "--", "/bin/sh", "-c", PRINTS).end()
    assert ended.status == 0, ended.err[-1000:]
    name, kibibytes = ended.out.split()
    assert (name, int(kibibytes) * 1024 < 64e6) == ("peak", True), ended.out
    assert (ended.run / "logs/0/127.0.0.1.rank0.err").stat().st_size == 1 + (64 << 20)
