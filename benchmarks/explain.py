"""Measures `apptrain explain` with logs of 2 GB: processor time, and the most memory. Begin at `explain`.

Three logs: lines of good runs, which repeat but for their numbers; text that never repeats; errors that all
differ. Each ends with a GPU whose memory is full, which must be found. Needs 2 GB in TMPDIR.
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
END: Final = b"\n[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
LETTERS: Final = bytes(32 if byte < 36 else 10 if byte < 39 else 97 + byte % 26 for byte in range(256))
"""Makes words and lines of random bytes."""


def explain(_: int) -> dict[str, Any]:
    """Each log once."""
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
            one = _measured(path)
        found[name] = one
        print(
            f"{name}: {one['cpu_s']:.0f} s of a processor, {one['seconds']:.0f} s, {one['memory_mb']:.0f} MB",
            flush=True,
        )
    return {"bytes": SIZE, "logs": found}


def _write(path: Path, blocks: Iterator[bytes]) -> None:
    with path.open("wb") as file:
        while file.tell() < SIZE:
            file.write(next(blocks))
        file.write(END)


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


def _measured(path: Path) -> dict[str, Any]:
    before, begin = os.getloadavg()[0], time.perf_counter()
    command = [sys.executable, "-m", "entrypoint.cli.apptrain", "explain", "--json", str(path)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert b'"cuda-out-of-memory"' in said, said[:500]
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_s": used.ru_utime + used.ru_stime,
        "memory_mb": used.ru_maxrss / 1024,
        "load_before": before,
    }
