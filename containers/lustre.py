"""Spreads an image over several disks of a Lustre file system, or all nodes read it at the speed of one.
`striped_folder` is for the build, `finding` for the doctor. Runs with Python 3.9.

Nothing is done, and nothing said, where the image is on another file system or there is no `lfs`.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from containers.preflight import Mount

STRIPES = 8
"""Servers' disks (OSTs) that share an image of some GB; Lustre takes fewer where it has fewer."""
BOUND = 30
"""Seconds for an answer of `lfs`."""


@contextmanager
def striped_folder(image: Path) -> Iterator[Path]:
    """A folder beside the image, whose new files are striped; on another file system the image's own. A file
    keeps its stripes when it is renamed, and gets none afterwards."""
    program = _program(image.parent)
    if program is None:
        yield image.parent
        return
    with tempfile.TemporaryDirectory(prefix=f".{image.name}.", dir=image.parent) as name:
        why = _run(program, "setstripe", "-c", str(STRIPES), name)[1]
        if why:
            print(
                f"apptrain: {image.parent} is on Lustre, but the image is not striped: lfs says: {why}",
                flush=True,
            )
        yield Path(name)


def finding(image: Path) -> tuple[str, str] | None:
    """What is wrong with where an image lies, and the remedy."""
    program = _program(image)
    if program is None:
        return None
    found, _ = _run(program, "getstripe", "-c", str(image))
    if found != "1":
        return None
    return (
        f"the image {image} is on one of Lustre's disks, from which all nodes read it",
        f"lfs migrate -c {STRIPES} IMAGE, or build it again: a build stripes it",
    )


def _program(path: Path) -> str | None:
    """`lfs`, if there is one and it is for this path."""
    return shutil.which("lfs") if Mount.of(path.resolve()).kind == "lustre" else None


def _run(*command: str) -> tuple[str, str]:
    """(what it prints; why it failed, empty if it did not)."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    why = " ".join(ended.stderr.split())[:200] or f"status {ended.returncode}"
    return ended.stdout.strip(), why if ended.returncode else ""
