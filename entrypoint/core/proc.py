"""What the kernel says of a process in /proc/PID/stat. `stat_fields` is the entry."""

from __future__ import annotations

from pathlib import Path


def stat_fields(pid: int | str = "self") -> list[str]:
    """From the state on: number N of proc(5) is at N - 3. One empty field if the process is gone.

    A process chooses its name, which stands in parentheses before them and may hold any bytes.
    """
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        content = b""
    return content.rpartition(b")")[2].decode("ascii").split() or [""]
