"""The checkout that this is part of, where there is one: its folder, and how it is called from here.

Runs with Python 3.9.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
PACKAGES = HOME / "host" / "packages"
"""A folder with our two packages alone, for PYTHONPATH."""


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


def python_path(given: str) -> str:
    """The PYTHONPATH with which processes of this Python find our packages. `given` itself if they are
    installed there or it has them, else with their folder in front: `apptrain` alone has the checkout's on
    its own path, and in an image that is not ours the variable names them, which no job passes on."""
    paths = given.split(os.pathsep)
    alone = sys.path[:1] == [str(HOME / "src")] and sys.path.count(str(HOME)) == 1
    ours = str(PACKAGES if PACKAGES.is_dir() else HOME)
    if not (alone or _is_in(os.environ.get("PYTHONPATH", ""))) or ours in paths or _is_in(given):
        return given
    return os.pathsep.join(filter(None, [ours, given]))


def behind(paths: str) -> str:
    """This PYTHONPATH with our folder behind the user's own: what a script calls `train` may be theirs."""
    given = paths.split(os.pathsep)
    ours = [path for path in given if path in (str(PACKAGES), str(HOME))]
    return os.pathsep.join([*(path for path in given if path not in ours), *ours])


def _is_in(given: str) -> bool:
    """Whether this PYTHONPATH names the folder of ours, maybe by a link."""
    return str(HOME) in (os.path.realpath(path) for path in given.split(os.pathsep) if path)
