"""Compares other ways to pack the image: size, what a first import reads of it, and `import torch` through
FUSE against the unpacked tree. `packing` is the entry.

Each way holds the same tree, repacked by the same ordinary user on a test host, and is removed after its
rounds, since a machine may not have room for all.
"""

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.image import BARE, IMPORT, LIMIT
from containers.builder import PACKING
from tests.cluster.images import built
from tests.host import Bind, Host, up

WAYS: Final = {
    "as built": PACKING,
    "blocks of 32 KiB": f"{PACKING} -b 32K",
    "blocks of 1 MiB": f"{PACKING} -b 1M",
    "lz4": "-comp lz4 -all-root",
    "lz4, packed hard": "-comp lz4 -Xhc -all-root",
    "nothing compressed": f"{PACKING} -noI -noD -noF",
}
"""Name to the options of mksquashfs."""
SHOWN: Final = Path("/scratch/image.sif")
OUT: Final = Path("/scratch/out")


def packing(pairs: int) -> dict[str, Any]:
    """Needs root, for the test host, and room for 12 GB; APPTRAIN_TEST_IMAGE as in the tests."""
    given = os.environ.get("APPTRAIN_TEST_IMAGE")
    image = Path(given) if given else built("default").image
    found = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        out = Path(folder)
        out.chmod(0o777)
        binds = [Bind(source=out, target=OUT, mode="rw"), Bind(source=image, target=SHOWN)]
        with up("packing", binds=binds) as host:
            host.run(["mkdir", "--mode=777", "/scratch/tmp"]).check_returncode()
            _run(host, "build", "--sandbox", f"{OUT}/unpacked", str(SHOWN))
            for name, options in WAYS.items():
                packed = out / "packed.sif"
                begin = time.perf_counter()
                _run(host, "build", f"--mksquashfs-args={options}", f"{OUT}/packed.sif", f"{OUT}/unpacked")
                seconds = time.perf_counter() - begin
                rounds = [(_import(host, "packed.sif"), _import(host, "unpacked")) for _ in range(pairs + 1)][
                    1:
                ]
                ratios = [one / other for one, other in rounds]
                size, read = packed.stat().st_size, statistics.median(_read(host, packed) for _ in range(3))
                found[name] = {
                    "bytes": size,
                    "bytes_read_by_import": read,
                    "pack_s": seconds,
                    "rounds_s": rounds,
                    "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
                }
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                told = f"{size / 1e9:.2f} GB, import reads {read / 1e9:.2f} GB and takes {spread}"
                print(f"{name}, packed in {seconds:.0f} s: {told}", flush=True)
                packed.unlink()
    return {"ways": found}


def _read(host: Host, packed: Path) -> int:
    """Bytes of the file that the kernel has in memory after an import, what it reads ahead among them, and
    had not before it."""
    os.sync()
    with packed.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = _in_memory(packed)
    _import(host, packed.name)
    return _in_memory(packed) - before


def _in_memory(file: Path) -> int:
    words = ["fincore", "--bytes", "--noheadings", "--output=RES", str(file)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def _import(host: Host, name: str) -> float:
    return float(_run(host, *BARE[2:], f"{OUT}/{name}", "python", "-c", IMPORT))


def _run(host: Host, *words: str) -> str:
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "APPTAINER_TMPDIR": "/scratch/tmp"}
    ended = host.run(["apptainer", "-q", *words], user="alice", cwd=OUT, env=env, timeout=LIMIT)
    if ended.returncode:
        raise RuntimeError(
            f"apptainer {' '.join(words)} ended with {ended.returncode}:\n{ended.stderr[-3000:]}"
        )
    return ended.stdout
