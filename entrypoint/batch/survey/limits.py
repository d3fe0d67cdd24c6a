"""Numbers: times and sizes as schedulers spell them, and counts for people."""

from __future__ import annotations

import re

HOUR = 3600
TESTING = re.compile(
    r"debug|test|dev|inter|preempt|scav|requeue|low|idle|short|express|educ|class|mig|jupyter"
)
"""In the name of a partition that is for something else than long runs."""


def seconds(text: str) -> int | None:
    """Of [D-]HH:MM:SS, MM:SS, or seconds; None for `infinite` and anything else."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if not found:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def asked(limit: str) -> str:
    """What a first job asks for under this limit: an hour, or less where that is the limit."""
    whole = seconds(limit)
    most = min(HOUR, whole) if whole else HOUR
    return f"{most // 3600:02}:{most // 60 % 60:02}:{most % 60:02}"


def gib(text: str) -> int | None:
    """Of PBS's sizes, 527835988kb; rounded down. None for what is none."""
    found = re.fullmatch(r"(\d+)([kmgt]?)b?", text.lower())
    if not found:
        return None
    return int(found[1]) * (1 << 10 * " kmgt".index(found[2] or " ")) >> 30
