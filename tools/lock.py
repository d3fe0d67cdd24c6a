"""Writes all hash locks anew: requirements/*.txt, and containers/locks/ for the images. Begin at `main`; uv
is called so that a lock names no index.

Usage: `python tools/lock.py [--upgrade | --upgrade-package NAME ...]`; without arguments the Python packages
that still fit stay. Debian's packages are always the mirror's newest. UV, if set, is the uv to use; indexes,
proxies and certificates come from uv's and apt's own settings, the mirror from DEBIAN_MIRROR or from apt's.
"""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from containers import debian, stacks, wheels  # noqa: E402
from containers.download import NoAnswer  # noqa: E402

STACKS = stacks.FILE.relative_to(CHECKOUT)
LOCKS = Path("containers/locks")
UNIVERSAL = {"run": "", "dev": "", "image": "3.9", "site": "3.11"}
"""The locks that serve every Python from a version on ('' means that of stacks.yaml) and every machine."""
PLATFORMS = {"amd64": "x86_64-manylinux_2_28", "arm64": "aarch64-manylinux_2_28"}
COMPILE = (
    "pip",
    "compile",
    "--quiet",
    "--generate-hashes",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--custom-compile-command=make lock",
)


class Unresolved(stacks.BuildRefused):
    """uv found no set of versions; it has said why."""


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copytree(CHECKOUT / "requirements", work / "requirements")
        shutil.copytree(CHECKOUT / LOCKS, work / LOCKS)
        try:
            lock_python(work, arguments)
            lock_debian(work)
            text = dated(stacks.FILE.read_text(encoding="utf-8"))
        except (stacks.BuildRefused, NoAnswer) as error:
            print(f"apptrain: {error}: nothing was changed", file=sys.stderr)
            return error.status
        for part in (Path("requirements"), LOCKS):
            for file in (work / part).iterdir():
                replace(CHECKOUT / part / file.name, file.read_bytes())
    replace(stacks.FILE, text.encode())
    return 0


def lock_python(work: Path, arguments: Sequence[str]) -> None:
    """All locks of Python packages, below `work`."""
    known = stacks.read()
    lowest = yaml.safe_load(stacks.FILE.read_text(encoding="utf-8"))["venv_python"]
    default = next(stack for stack in known.values() if stack.is_default)
    for lock, python in UNIVERSAL.items():
        pins = default.pins if lock == "run" else []
        options = ["--universal", f"--python-version={python or lowest}", *arguments]
        compile_one(work, f"requirements/{lock}.in", f"requirements/{lock}.txt", pins, options)
    for stack in known.values():
        for architecture in stack.architectures:
            options = [
                f"--python-version={stack.base.python}",
                f"--python-platform={PLATFORMS[architecture]}",
            ]
            target = stack.lock(architecture).relative_to(CHECKOUT)
            compile_one(work, "requirements/run.in", str(target), stack.pins, [*options, *arguments])


def compile_one(work: Path, source: str, target: str, pins: list[str], options: list[str]) -> None:
    # Under the name of their source, which uv writes beside each pin as its reason.
    (work / STACKS).write_text("\n".join(pins) + "\n")
    constraint = ["--constraint", str(STACKS)] if pins else []
    command = [str(wheels.uv()), *COMPILE, *options, *constraint, source, "-o", target]
    if subprocess.run(command, cwd=work, check=False).returncode:
        raise Unresolved("lock-unresolved", f"{target} cannot be resolved")


def lock_debian(work: Path) -> None:
    base = next(iter(stacks.read().values())).base
    for architecture in PLATFORMS:
        target = stacks.debian_lock(architecture).relative_to(CHECKOUT)
        (work / target).write_text(debian.resolve(base, architecture), encoding="utf-8")


def dated(text: str) -> str:
    """stacks.yaml with today's date."""
    today = datetime.datetime.now(datetime.timezone.utc).date()  # noqa: UP017
    return re.sub(r"^date: \S+", f"date: {today}", text, flags=re.MULTILINE)


def replace(file: Path, content: bytes) -> None:
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_bytes(content)
    fresh.replace(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
