"""What ranks print, through a real launch: nothing that they do with it harms the launcher."""

import _ctypes
import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.embedded.jobs import BOUND, CHECKOUT, Job, clean_env, master_port

TOUCHES = 'touch "$APPTRAIN_RUN_DIR/begun"'
ONE_NODE = ("--nodes", "127.0.0.1", "--node-rank", "0", "--nproc-per-node", "1")
PRINTS = """
head -c 64M /dev/zero | tr '\\0' x >&2
awk '/VmHWM/ { print "peak", $2 }' "/proc/$PPID/status"
"""


def launch(tmp_path: Path, *arguments: str, env: dict[str, str] | None = None) -> Job:
    """`launch` itself on one node; on CPUs, unless the environment says something else."""
    run = tmp_path / "run"
    argv = [sys.executable, "-P", "-m", "entrypoint", "launch", *ONE_NODE, "--master-port", master_port()]
    argv += ["--run-dir", str(run), *arguments]
    return Job(argv, tmp_path, run, clean_env(**(env or {"APPTRAIN_DEVICE": "cpu"})))


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
    command = [sys.executable, "-P", "-m", "entrypoint", "launch", *ONE_NODE, "--master-port", master_port()]
    command += ["--run-dir", "run", "--mode", "exec", "--no-python"]
    process = subprocess.Popen(
        [*command, "--", "/bin/sh", "-c", TOUCHES],
        cwd=tmp_path,
        env=clean_env(PYTHONPATH=str(CHECKOUT), APPTRAIN_DEVICE="cpu"),
        stderr=writer,
    )
    os.close(writer)
    deadline = time.monotonic() + BOUND
    while not (ended := (tmp_path / "run/outcome/0.0").exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    assert process.wait(BOUND) == 0
    assert (ended, (tmp_path / "run/begun").exists()) == (True, True)
    assert text[filled:].startswith(b"apptrain: job manual, attempt 0: 1 node x 1 rank")


@pytest.mark.parametrize(
    ("gpus", "status", "says"),
    [
        (0, 0, "apptrain: job manual, attempt 0"),
        (2, 64, "apptrain: torch sees 2 GPUs on 127.0.0.1: choose --device"),
    ],
)
def test_what_prints_while_torch_is_imported_does_not_hide_its_answer(
    tmp_path: Path, gpus: int, status: int, says: str
) -> None:
    (tmp_path / "torch").mkdir()
    fake = f"import types; print('noise'); cuda = types.SimpleNamespace(device_count=lambda: {gpus})"
    (tmp_path / "torch" / "__init__.py").write_text(fake)
    shutil.copy(_ctypes.__file__, tmp_path / "libcuda.so.1")  # any library: without one nobody asks torch
    path = {
        "PYTHONPATH": f"{tmp_path}:{CHECKOUT}",
        "APPTRAIN_DEVICE": "auto",
        "LD_LIBRARY_PATH": str(tmp_path),
    }
    job = launch(tmp_path, "--mode", "exec", "--no-python", "--", "/bin/sh", "-c", TOUCHES, env=path)
    ended = job.end()
    assert (ended.status, ended.err.startswith(says)) == (status, True), ended.err
    assert (ended.run / "begun").exists() == (status == 0)


def test_the_launchers_memory_does_not_grow_with_a_line_that_has_no_end(tmp_path: Path) -> None:
    ended = launch(tmp_path, "--mode", "exec", "--no-python", "--", "/bin/sh", "-c", PRINTS).end()
    assert ended.status == 0, ended.err[-1000:]
    name, kibibytes = ended.out.split()
    assert (name, int(kibibytes) * 1024 < 64e6) == ("peak", True), ended.out
    size = (ended.run / "logs/0/127.0.0.1.rank0.err").stat().st_size
    # A newline follows, unless the last piece that was passed on happens to be the line's end.
    assert size - (64 << 20) in (0, 1)
