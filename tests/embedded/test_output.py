"""What ranks print, through a real launch: nothing that they do with it harms the launcher."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.embedded.jobs import CHECKOUT, Job, clean_env

TOUCHES = 'touch "$APPTRAIN_RUN_DIR/begun"'
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


def test_a_reader_who_has_stopped_keeps_no_rank_from_starting_and_no_outcome_from_being_written(
    tmp_path: Path,
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    command = [
        sys.executable,
        "-P",
        "-m",
        "entrypoint",
        "launch",
        *ONE_NODE,
        "--run-dir",
        "run",
        "--mode",
        "exec",
    ]
    process = subprocess.Popen(
        [*command, "--no-python", "--", "/bin/sh", "-c", TOUCHES],
        cwd=tmp_path,
        env=clean_env(PYTHONPATH=str(CHECKOUT)),
        stderr=writer,
    )
    os.close(writer)
    deadline = time.monotonic() + 20
    while not (ended := (tmp_path / "run/outcome/0.0").exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    assert process.wait(20) == 0
    assert (ended, (tmp_path / "run/begun").exists()) == (True, True)
    assert text[filled:].startswith(b"entrypoint: job manual, attempt 0: 1 node x 1 rank")


def test_the_launchers_memory_does_not_grow_with_a_line_that_has_no_end(tmp_path: Path) -> None:
    ended = launch(tmp_path, "--mode", "exec", "--no-python", "--", "/bin/sh", "-c", PRINTS).end()
    assert ended.status == 0, ended.err[-1000:]
    name, kibibytes = ended.out.split()
    assert (name, int(kibibytes) * 1024 < 64e6) == ("peak", True), ended.out
    assert (ended.run / "logs/0/127.0.0.1.rank0.err").stat().st_size == 1 + (64 << 20)
