"""Finds which code a command runs: the bytes of its program, and the state of the repositories that it lies
in. `look` is the entry.

It asks git. An image has no git; then `.git` itself still says the commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoint import __version__
from entrypoint.core import files
from entrypoint.plan.commands import OURS
from entrypoint.record import tokens

HOME = Path(__file__).resolve().parents[2]
"""The checkout, where this is one."""
DIFF, OUR_DIFF = "code.diff", "apptrain.diff"
MOST_DIFF, MOST_PROGRAM = 1 << 20, 16 << 20
"""Bytes of a diff that is kept, and of a program that is read."""
MOST_FILES = 100_000
"""Files of any kind in the folder of a package that is looked through."""
MOST_LINE, MOST_REFS = 4096, 64 << 20
"""Bytes that are read of a file of git that has one line, and of its packed references."""
GIT = 5.0
"""Seconds for one question to git."""
NO_DRIVERS = ("--no-ext-diff", "--no-textconv", "--no-color")
NO_SUBMODULES = ("--ignore-submodules=dirty",)
"""Their commits are compared; git would be started again in each to look for changes."""
_NO_PROGRAMS = (
    *("--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"),
    *("-c", "core.sshCommand=false", "-c", "credential.helper=", "-c", "diff.external=", "-c", "gc.auto=0"),
    *("-c", "diff.submodule=short"),  # else `git diff` starts git in each submodule, without these options
)
_NOTHING_FETCHED = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # also for a git that does not know the line above (before 2.44)
}


def look(
    command: Sequence[str], begin: Path, env: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What the manifest says of the code, and files with the changes since the commits: those that are kept,
    by their names. `begin`: where the ranks do."""
    diffs: dict[str, str] = {}
    state = _repository(folder(command, begin), env, DIFF, diffs)
    ours = _repository(HOME, env, OUR_DIFF, diffs) if (HOME / "Makefile").exists() else None
    code = {
        "program": program(command, begin),
        "repository": state,
        "apptrain": {"version": __version__, "repository": ours},
    }
    return code, diffs


def program(command: Sequence[str], begin: Path) -> dict[str, Any] | None:
    """Its name and SHA-256; None for what is neither script nor module."""
    path = _program(command, begin)
    return {"name": path.name, "sha256": _digest(path)} if path else None


def folder(command: Sequence[str], begin: Path) -> Path:
    """Where the program lies; where the ranks `begin`, if it is not found."""
    path = _program(command, begin)
    return path.parent if path and not path.is_dir() else path or begin


def _program(command: Sequence[str], begin: Path) -> Path | None:
    """The script, or the folder of the package behind `-m`; None for what is neither."""
    if command[0] == "-m" and len(command) > 1:
        name = command[1].partition(".")[0]
        if not name or "/" in name:  # such as all of the file system
            return None
        for path in (begin / name, begin / f"{name}.py"):
            if name not in OURS and files.exists(path):  # as Python's own -m finds it
                return path
        with contextlib.suppress(ImportError, ValueError, OSError):
            found = importlib.util.find_spec(name)
            if found and found.submodule_search_locations:
                return Path(next(iter(found.submodule_search_locations)))
            if found and found.origin:
                return Path(found.origin)
        return None
    for word in command:
        path = begin / word
        if path.suffix in (".py", ".sh") and files.is_regular(path):
            return path.resolve()
    return None


def script(command: Sequence[str], begin: Path) -> Path | None:
    """The file that Python runs, of a package's module too; None for what is no Python."""
    path = _program(command, begin)
    if path is None or not path.is_dir():
        return path
    inside = path.joinpath(*command[1].split(".")[1:])
    for file in (inside / "__main__.py", inside.with_name(f"{inside.name}.py")):
        if file.is_file():
            return file
    return None


def _digest(path: Path) -> str | None:
    """SHA-256 of a file, or of all Python files of a folder with their names; None for too much, and if one
    of them cannot be read as a regular file."""
    digest, left = hashlib.sha256(), MOST_PROGRAM
    try:
        for file in sorted(_python_files(path)) if path.is_dir() else [path]:
            content = files.read(file, left)
            left -= len(content)
            name = "" if file == path else str(file.relative_to(path))
            digest.update(f"{name}\0{len(content)}\0".encode("utf-8", "surrogateescape") + content)
    except (OSError, ValueError, RecursionError):
        return None
    return digest.hexdigest()


def _python_files(folder: Path) -> list[Path]:
    """All below a folder. Raises ValueError if it holds too many files of any kind."""
    found: list[Path] = []
    seen = 0
    for at, folders, names in os.walk(folder):
        seen += len(folders) + len(names)
        if seen > MOST_FILES:
            raise ValueError(f"more than {MOST_FILES} files")
        found += [Path(at, name) for name in names if name.endswith(".py")]
    return found


def _repository(
    folder: Path, env: Mapping[str, str], name: str, diffs: dict[str, str]
) -> dict[str, Any] | None:
    """What is known of the repository that a folder lies in; None where it lies in none. Its changes are
    added to `diffs`, under this name."""
    root = root_of(folder)
    if root is None:
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        plain = _without_filters(root)
        status = _git(root, *plain, "status", "--porcelain", "-z", *NO_SUBMODULES).split("\0")
        remote = _git(root, "config", "--get", "remote.origin.url", may_fail=True).strip()
        changes = _git(root, *plain, "diff", *NO_DRIVERS, *NO_SUBMODULES, "HEAD", "--")
    except (OSError, subprocess.SubprocessError):
        return {"commit": _commit(root), "state": "unknown: git could not be asked where it ran"}
    why_not = _why_not(changes, env)
    if changes and not why_not:
        diffs[name] = changes
    return {
        "commit": commit,
        "remote": tokens.hide(remote, env) or None,
        "changed": sum(not entry.startswith("??") for entry in status if len(entry) > 3 and entry[2] == " "),
        "untracked": sum(entry.startswith("??") for entry in status),
        "diff_sha256": hashlib.sha256(changes.encode()).hexdigest() if changes else None,
        "diff": (why_not or name) if changes else None,
    }


def _why_not(changes: str, env: Mapping[str, str]) -> str:
    """Why the changes are not kept; empty where they are."""
    if len(changes) > MOST_DIFF:
        return f"not kept: {len(changes)} characters, more than {MOST_DIFF}"
    return "not kept: it seems to hold a secret" if tokens.found_in(changes, env) else ""


def _git(root: Path, *words: str, may_fail: bool = False) -> str:
    """What git prints. It takes no lock, starts no program that the repository's configuration names, and
    fetches nothing. Raises OSError or SubprocessError."""
    done = subprocess.run(
        ["git", "-C", str(root), *_NO_PROGRAMS, *words],
        env={**os.environ, **_NOTHING_FETCHED},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=GIT,
        check=not may_fail,
    )
    return done.stdout.decode(errors="replace")


def _without_filters(root: Path) -> list[str]:
    """Options of git that turn off the filters of the repository's own configuration: `git status` and `git
    diff` would run them. Those of the user's configuration (Git LFS) stay.

    Raises SubprocessError if one has a name that -c cannot hand over as it is.
    """
    drivers = _filters(root)
    if not all(driver.isascii() and "=" not in driver for driver in drivers):
        raise subprocess.SubprocessError("a filter cannot be turned off")
    keys = ("clean=", "smudge=", "process=", "required=false")
    return [word for driver in sorted(drivers) for key in keys for word in ("-c", f"{driver}.{key}")]


def _filters(root: Path) -> set[str]:
    """As `filter.NAME`, those of the repository's own configuration, wherever that lies; all that there are
    from a git before 2.26, which does not tell whose they are."""
    ask = ("--includes", "--null", "--get-regexp", r"^filter\..*")
    told = _git(root, "config", "--show-scope", *ask, may_fail=True).split("\0")
    own = [told[at + 1] for at, scope in enumerate(told) if scope in ("local", "worktree")]
    if len(told) == 1:
        own = _git(root, "config", *ask, may_fail=True).split("\0")[:-1]
    return {entry.partition("\n")[0].rpartition(".")[0] for entry in own}


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in the repository that a folder lies in; None if none can be read.

    It is read from git's own files. git is not started, as the repository's configuration can name programs.
    """
    root = root_of(folder)
    return _commit(root) if root else None


def root_of(folder: Path) -> Path | None:
    """The top folder of the repository that a folder lies in; None outside any."""
    return next((one for one in (folder, *folder.parents) if files.exists(one / ".git")), None)


def _commit(root: Path) -> str | None:
    """HEAD's, from git's own files."""
    with contextlib.suppress(OSError, ValueError):
        git = root / ".git"
        if git.is_file():  # a worktree: it names its folder
            git = root / _line(git).partition(":")[2].strip()
        head = _line(git / "HEAD")
        if not head.startswith("ref: "):
            return _hash(head)
        common = git / _line(git / "commondir") if (git / "commondir").exists() else git
        with contextlib.suppress(OSError):
            return _hash(_line(common / head[5:]))
        return _packed(files.read_text(common / "packed-refs", MOST_REFS).splitlines(), head[5:])
    return None


def _line(path: Path) -> str:
    return files.read_text(path, MOST_LINE).strip()


def _hash(text: str) -> str | None:
    """The text, if it is the name of a commit: a planted file must not bring anything else into a message."""
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def _packed(lines: Iterable[str], name: str) -> str | None:
    return next((_hash(line.split()[0]) for line in lines if line.endswith(f" {name}")), None)
