"""Run in an image: every path of its file system with its mode and what it holds, as JSON on stdout."""

import hashlib
import json
import os
import stat
import sys
from pathlib import Path

SKIPPED = {"/proc", "/sys", "/dev", "/.singularity.d/libs", "/run"}


def walk(folder: str, device: int, found: "dict[str, str]") -> None:
    for entry in os.scandir(folder):
        status = entry.stat(follow_symlinks=False)
        if status.st_dev != device or entry.path in SKIPPED:
            continue
        mode = oct(stat.S_IMODE(status.st_mode))
        if entry.is_symlink():
            found[entry.path] = "link " + str(Path(entry.path).readlink())
        elif entry.is_dir():
            found[entry.path] = mode
            walk(entry.path, device, found)
        else:
            with Path(entry.path).open("rb") as file:
                found[entry.path] = mode + " " + hashlib.file_digest(file, "sha256").hexdigest()


tree: "dict[str, str]" = {}
walk("/", Path("/usr").stat().st_dev, tree)
json.dump(tree, sys.stdout)
