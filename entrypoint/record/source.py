"""Which code a command runs: the bytes of its program, and the state of the repositories that it lies in.

What it alone knows: how git is asked, and that an image has no git; `.git` itself then still says the commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoint import __version__
from entrypoint.plan.rules import OURS
from entrypoint.record import tokens

HOME = Path(__file__).resolve().parents[2]
"""The checkout, where this is one."""
DIFF, OUR_DIFF = "code.diff", "apptrain.diff"
MOST_DIFF, MOST_PROGRAM = 1 << 20, 16 << 20
"""Bytes of a diff that is kept, and of a program that is read."""
GIT = 5.0
"""Seconds for one question to git."""


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
    return path.parent if path and path.is_file() else path or begin


def is_ours(command: Sequence[str]) -> bool:
    """Whether it is a module of this project."""
    return command[0] == "-m" and len(command) > 1 and command[1].partition(".")[0] in OURS


def _program(command: Sequence[str], begin: Path) -> Path | None:
    """The script, or the folder of the package behind `-m`; None for what is neither."""
    if command[0] == "-m" and len(command) > 1:
        name = command[1].partition(".")[0]
        for path in (begin / name, begin / f"{name}.py"):
            if name not in OURS and path.exists():  # as Python's own -m finds it
                return path
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(name)
            if found and found.submodule_search_locations:
                return Path(next(iter(found.submodule_search_locations)))
            if found and found.origin:
                return Path(found.origin)
        return None
    for word in command:
        path = begin / word
        if path.suffix in (".py", ".sh") and path.is_file():
            return path.resolve()
    return None


def _digest(path: Path) -> str | None:
    """SHA-256 of a file, or of all Python files of a folder with their names; None for too much."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    digest, left = hashlib.sha256(), MOST_PROGRAM
    for file in files:
        left -= file.stat().st_size
        if left < 0:
            return None
        name = "" if file == path else str(file.relative_to(path))
        digest.update(f"{name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _repository(
    folder: Path, env: Mapping[str, str], name: str, diffs: dict[str, str]
) -> dict[str, Any] | None:
    """What is known of the repository that a folder lies in; None where it lies in none. Its changes are
    added to `diffs`, under this name."""
    root = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), None)
    if root is None:
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        status = _git(root, "status", "--porcelain", "-z").split("\0")
        remote = _git(root, "config", "--get", "remote.origin.url", may_fail=True).strip()
        changes = _git(root, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--")
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
    """What git prints. It takes no lock and asks nobody. Raises OSError or SubprocessError."""
    done = subprocess.run(
        ["git", "-C", str(root), "-c", "core.fsmonitor=false", *words],
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=GIT,
        check=not may_fail,
    )
    return done.stdout.decode(errors="replace")


def _commit(root: Path) -> str | None:
    """HEAD's, from git's own files."""
    with contextlib.suppress(OSError):
        git = root / ".git"
        if git.is_file():  # a worktree: it names its folder
            git = root / git.read_text().partition(":")[2].strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        common = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        with contextlib.suppress(OSError):
            return (common / head[5:]).read_text().strip()
        return _packed((common / "packed-refs").read_text().splitlines(), head[5:])
    return None


def _packed(lines: Iterable[str], name: str) -> str | None:
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
