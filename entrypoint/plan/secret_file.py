"""Reads the file that --secrets names: variables for the ranks that no scheduler, command line or log may
see. `added` is the entry.

Every `launch` reads it itself, so the values are in the environment of ranks alone. Runs with Python 3.9.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.plan import passed

MOST: Final = 1 << 16
"""Bytes of the file."""
NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")
NOT_HERE: Final = ("APPTRAIN_*", "LD_*", "PYTHON*", "PATH", "HOME", "TMPDIR", "SLURM_*", "PBS_*")
"""What steers the launch itself."""


def read(path: Path) -> dict[str, str]:
    """The variables: one NAME=VALUE a line, verbatim to the line's end; empty ones and those with # are
    skipped. Raises BadInput if the file cannot be read, is open to others, or holds anything else; no
    message has a value."""
    try:
        found = path.stat()
        lines = files.read_text(path, MOST).split("\n")
    except (OSError, ValueError) as error:
        why = "no text" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or error
        raise BadInput(
            "secrets-unreadable",
            f"--secrets {path} cannot be read ({why}): give a file with one NAME=VALUE a line, in your home "
            "or another folder that the image shows",
        ) from None
    if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
        raise BadInput(
            "secrets-open",
            f"--secrets {path} is open to others (mode {found.st_mode & 0o777:o}, user {found.st_uid}): "
            f"chmod 600 {path}",
        )
    values: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if why := _wrong(name, value if equals else None, values):
            raise BadInput("secrets-line", f"--secrets {path}, line {number}: {why}")
        values[name] = value
    return values


def _wrong(name: str, value: str | None, before: Mapping[str, str]) -> str:
    """What is wrong with a line; empty for nothing. It may be a secret, so only a name is shown."""
    if value is None or not NAME.fullmatch(name):
        return "it is not NAME=VALUE, without export and blanks before the ="
    if passed.matches(name, (*NOT_HERE, *passed.table("never"))):
        return f"{name} is not for ranks: leave it out"
    if name in before:
        return f"{name} stands twice: remove one"
    if not value.isprintable() or value != value.strip():
        return f"the value of {name} has blanks at an end, or characters that do not print: remove them"
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return f"the value of {name} stands in quotes, which would be part of it: remove them"
    return ""


def added(env: Mapping[str, str], path: Path | None) -> dict[str, str]:
    """The environment with these variables, which win. Raises BadInput."""
    if path is None:
        return dict(env)
    values = read(path)
    left_out = [name for name in env.get(passed.NOT_PASSED, "").split() if name not in values]
    told = {passed.NOT_PASSED: " ".join(left_out)} if passed.NOT_PASSED in env else {}
    return {**env, **values, **told}
