"""Measures the launcher's peak memory while its ranks print, for each kind of output. `output` is the entry.

The kernel keeps the peak of a process (VmHWM), which is read until the launcher ends. What the launcher
starts (torchrun's agent, the ranks) is not included. Each rank writes the same to stdout and to stderr.
"""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

LIMIT_S: Final = 600
GLANCE_S: Final = 0.02
KINDS: Final = {
    "no newline": (1 << 30, "tr '\\0' x"),
    "a progress bar without an end": (1 << 28, "tr '\\0' '\\r' | sed 's/\\r/step\\r/g'"),
    "empty lines": (1 << 21, "tr '\\0' '\\n'"),
    "a traceback without an end": (
        1 << 28,
        "{ echo 'Traceback (most recent call last):'; fold -w 100000 | sed 's/^/  /'; }",
    ),
}
"""What is printed: bytes in all, and the filter that makes it of zeros."""
WAYS: Final = {
    "mode exec, CMD alone": ("exec", 1),
    "mode torchrun, 8 ranks": ("torchrun", 8),
    "mode torchrun, 64 ranks": ("torchrun", 64),
}


def output(_: int) -> dict[str, Any]:
    """One run for each kind of output and each number of ranks; they share the bytes."""
    found = {}
    for kind, (size, made_by) in KINDS.items():
        for way, (mode, ranks) in WAYS.items():
            peak = _peak_mb(mode, ranks, f"head -c {size // ranks // 2} /dev/zero | {made_by}")
            found[f"{kind}: {way}"] = {"bytes": size, "peak_mb": peak}
            print(f"{kind}, {way}: {peak} MB at the most", flush=True)
    return {"launcher": found}


def _peak_mb(mode: str, ranks: int, command: str) -> float:
    with TemporaryDirectory() as folder:
        launch = [sys.executable, "-P", "-m", "entrypoint", "launch", "--nodes", "127.0.0.1"]
        options = ["--node-rank", "0", "--run-dir", f"{folder}/run", "--mode", mode, "--device", "cpu"]
        number = ["--nproc-per-node", str(ranks), "--no-python"]
        both = ["/bin/sh", "-c", f"{{ {command}; }} & {{ {command}; }} >&2 & wait"]
        null = subprocess.DEVNULL
        launcher = subprocess.Popen([*launch, *options, *number, "--", *both], stdout=null, stderr=null)
        peak, deadline = 0, time.monotonic() + LIMIT_S
        while launcher.poll() is None:
            peak = max(peak, _high_water_kib(launcher.pid))
            if time.monotonic() > deadline:
                launcher.terminate()
            time.sleep(GLANCE_S)
        if launcher.returncode:
            sys.exit(f"the launch ended with {launcher.returncode}: mode {mode}, {ranks} ranks, {command}")
        return round(peak * 1024 / 1e6, 1)


def _high_water_kib(pid: int) -> int:
    """0 for a process that has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
