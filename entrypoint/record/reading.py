"""The manifest's format: where it lies, how each of its versions is read, and how an end is added later.

Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.core.plain import plain
from entrypoint.core.private import write_private
from entrypoint.record import shape

NAME = "manifest.json"
MOST = 8 << 20
"""Bytes of a manifest, and of each other JSON file of a run directory."""
MOST_BESIDE = 10_000
"""Entries of a folder that are looked at."""
SCHEMA_VERSION = 2
"""1 was called `format` and had nothing but attempts."""


def check_folder(run: Path) -> None:
    """Raises BadInput where there is no such directory, or it is closed to us."""
    if not stat.S_ISDIR(files.mode_at(run)):
        raise BadInput(
            "run-missing",
            f"there is no directory {plain(str(run))}: give a run directory, such as runs/NAME-ID",
        )
    files.mode_at(f"{run}/.")


def such_as(folder: Path) -> str:
    """The newest run directory in a folder, for a message."""
    with contextlib.suppress(OSError):
        beside = (one / NAME for one in itertools.islice(folder.iterdir(), MOST_BESIDE))
        times = {one.parent: one.stat().st_mtime for one in beside if files.is_regular(one)}
        if times:
            return str(plain(str(max(times, key=times.__getitem__))))
    return "runs/NAME-ID"


def of_run(run: Path, cannot: str) -> dict[str, Any]:
    """The manifest of a run directory. `cannot`: what is not possible without one. Raises BadInput."""
    check_folder(run)
    name = plain(str(run))
    try:
        return read(run / NAME)
    except OSError as error:
        raise BadInput(
            "manifest-unreadable",
            f"{name} cannot be {cannot}: {NAME}: {error.strerror}: "
            f"give a run directory, such as {such_as(run)}",
        ) from None
    except ValueError as error:
        raise BadInput(
            "manifest-damaged",
            f"{name}/{NAME} is no manifest: {plain(str(error))}: take it from a copy, or give another run",
        ) from None


def read(path: Path) -> dict[str, Any]:
    """A manifest in today's shape, whatever wrote it; None and empty for what it did not know.

    Raises OSError where it cannot be read and ValueError where it is none.
    """
    return in_todays_shape(files.read_json(path, MOST))


def of_last_attempt(manifest: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """What the reference program left in result.json; empty if that is of an attempt before, which another
    has followed. Launches by hand all have the number 0: then the times tell. An older one says neither."""
    if not manifest["attempts"]:
        return result
    last = manifest["attempts"][-1]
    began, ended = last.get("began"), result.get("ended")
    if isinstance(began, str) and isinstance(ended, str) and ended < began:  # both as `now` has it
        return {}
    return result if result.get("attempt", last.get("attempt")) == last.get("attempt") else {}


def trained_alone(attempt: Mapping[str, Any]) -> bool:
    """Whether its ranks, of which there are several, trained without a process group."""
    return attempt.get("process_group", "") is None


def in_todays_shape(found: Any) -> dict[str, Any]:
    """The same of what was read. Raises ValueError where it is no manifest."""
    if not isinstance(found, dict) or "attempts" not in found:
        raise ValueError("it has no attempts")
    newest = found.get("schema_version", SCHEMA_VERSION)
    if type(newest) is int and newest > SCHEMA_VERSION:
        raise ValueError(
            f"it is of format {shape.shown(newest)}, and this apptrain reads up to {SCHEMA_VERSION}"
        )
    shape.check(found)
    attempts = found["attempts"]
    last = attempts[-1] if attempts else {}
    empty: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "image": last.get("image"),
        "code": None,
        "command": list(last.get("command", [])),
        "config": None,
        "nodes": [{"name": name, "plan": None} for name in last.get("nodes", [])],
        "environment": {"values": {}, "names": []},
        "hardware": [],
        "seeds": {},
        "attempts": attempts,
        "results": None,
    }
    found = {name: value for name, value in found.items() if name != "schema_version"}
    return {name: found.get(name, value) for name, value in empty.items()}


def close(folder: Path, attempt: int, status: int) -> None:
    """Says of an attempt how it ended, if its first node could not. A file system that does not take it, and
    a manifest that is none, are left as they are."""
    path = folder / NAME
    with contextlib.suppress(OSError, ValueError):
        manifest = read(path)
        for one in manifest["attempts"]:
            if one.get("attempt") == attempt and one.get("ended", "") is None:
                one |= {"ended": now(), "status": status}
                write_private(path, json.dumps(manifest, indent=2) + "\n")


def now() -> str:
    """The time, in UTC, as the manifest has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
