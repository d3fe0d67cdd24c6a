"""Measures `apptrain explain` with logs of 2 GB: processor time, and the most memory. Begin at `explain`.

Three logs: lines of good runs, which repeat but for their numbers; text that never repeats; errors that all
differ. And a folder with the log of each rank, 100 kB: steps, errors that repeat but for their numbers, and
some that differ. A log, one of the folder, ends with a GPU whose memory is full, which must be found. Needs
2 GB in TMPDIR.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tests.unit.explain import good

CHECKOUT: Final = Path(__file__).resolve().parent.parent
SIZE: Final = 2_000_000_000
BLOCK: Final = 20_000_000
RANKS: Final = 1000
RANK_STEPS: Final = 300
RANK_ERRORS: Final = 1200
END: Final = b"\n[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
LETTERS: Final = bytes(32 if byte < 36 else 10 if byte < 39 else 97 + byte % 26 for byte in range(256))
"""Makes words and lines of random bytes."""


def explain(_: int) -> dict[str, Any]:
    """Each log once, and the folder."""
    found = {}
    kinds: dict[str, Callable[[], Iterator[bytes]]] = {
        "lines of good runs": _good,
        "text that never repeats": _text,
        "errors that all differ": _errors,
    }
    for name, blocks in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "job.log"
            _write(path, blocks())
            found[name] = _measured(name, path)
    with tempfile.TemporaryDirectory() as folder:
        _write_ranks(Path(folder))
        ranks = _measured(f"a folder of {RANKS} logs", Path(folder))
    return {"bytes": SIZE, "logs": found, "ranks": RANKS, "folder": ranks}


def _write(path: Path, blocks: Iterator[bytes]) -> None:
    with path.open("wb") as file:
        while file.tell() < SIZE:
            file.write(next(blocks))
        file.write(END)


def _write_ranks(folder: Path) -> None:
    steps = b"".join(b"step %d loss 2.1\n" % step for step in range(RANK_STEPS))
    again = b"2026-03-02 10:10:21,123 ERROR client: ConnectionResetError: [Errno 104] try %d\n"
    differing = b"ERROR: ".join(next(_text())[:10_000].splitlines(keepends=True)[:50])
    errors = b"".join(again % at for at in range(RANK_ERRORS)) + differing
    for rank in range(RANKS):
        (folder / f"rank{rank}.log").write_bytes(steps + errors + END * (rank == RANKS // 2))


def _good() -> Iterator[bytes]:
    block = "\n".join(good.lines(150_000)).encode() + b"\n"
    while True:
        yield block


def _text() -> Iterator[bytes]:
    source = random.Random(1)
    while True:
        yield source.randbytes(BLOCK).translate(LETTERS)


def _errors() -> Iterator[bytes]:
    for block in _text():
        yield block.replace(b"\n", b"\nERROR: RuntimeError: ")


def _measured(name: str, path: Path) -> dict[str, Any]:
    before, begin = os.getloadavg()[0], time.perf_counter()
    command = [sys.executable, "-m", "entrypoint.cli.apptrain", "explain", "--json", str(path)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert b'"cuda-out-of-memory"' in said, said[:500]
    seconds, cpu_s = time.perf_counter() - begin, used.ru_utime + used.ru_stime
    memory_mb = used.ru_maxrss / 1024
    print(f"{name}: {cpu_s:.0f} s of a processor, {seconds:.0f} s, {memory_mb:.0f} MB", flush=True)
    return {"seconds": seconds, "cpu_s": cpu_s, "memory_mb": memory_mb, "load_before": before}
