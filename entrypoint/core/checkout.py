"""The checkout that this is part of, where there is one: its folder, and how it is called from here.

Runs with Python 3.9.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]


def make(words: str) -> str:
    """`make WORDS`, as it works in the current directory too."""
    if Path.cwd() == HOME or not (HOME / "Makefile").exists():
        return f"make {words}"
    return f"make -C {shlex.quote(str(HOME))} {words}"


def apptrain() -> str:
    """The command `apptrain`, as it works in the current directory too."""
    if shutil.which("apptrain") or not (HOME / "apptrain").exists():
        return "apptrain"
    return "./apptrain" if Path.cwd() == HOME else shlex.quote(str(HOME / "apptrain"))
