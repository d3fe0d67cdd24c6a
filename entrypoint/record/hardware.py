"""What this node is made of, as the kernel's files tell it: nothing is started and no driver asked."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

PROC = Path("/proc")


def look(proc: Path = PROC) -> dict[str, Any]:
    """CPU model and flags, memory in bytes, GPUs and the driver; None for what is not there."""
    cpu = _read(proc / "cpuinfo")
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read(proc / "meminfo"), re.M)
    driver = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", _read(proc / "driver/nvidia/version"))
    return {
        "cpu": {
            "model": _field(cpu, "model name") or os.uname().machine,
            "flags": sorted((_field(cpu, "flags") or _field(cpu, "Features") or "").split()),
            "usable": len(os.sched_getaffinity(0)),
        },
        "memory": int(memory[1]) << 10 if memory else None,
        "gpus": [
            _field(_read(path), "Model") or "unknown"
            for path in sorted((proc / "driver/nvidia/gpus").glob("*/information"))
        ],
        "driver": driver[1] if driver else None,
        "kernel": os.uname().release,
    }


def _field(text: str, name: str) -> str | None:
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.*\S)", text, re.M)
    return found[1] if found else None


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
