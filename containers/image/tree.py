"""Run in an image: every path of its file system with its mode and what it holds, as JSON on stdout."""

import hashlib
import json
import os
import stat
import sys
from pathlib import Path

# What is mounted over the image is not the image's. Devices do not tell: in an overlay, files and folders
# of one file system have different ones.
MOUNTED = {
    line.split()[4].replace("\\040", " ") for line in Path("/proc/self/mountinfo").read_text().splitlines()
} - {"/"}


def walk(folder: str, found: "dict[str, str]") -> None:
    for entry in os.scandir(folder):
        if entry.path in MOUNTED:
            continue
        mode = oct(stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode))
        if entry.is_symlink():
            found[entry.path] = "link " + str(Path(entry.path).readlink())
        elif entry.is_dir():
            found[entry.path] = mode
            walk(entry.path, found)
        else:
            with Path(entry.path).open("rb") as file:
                found[entry.path] = mode + " " + hashlib.file_digest(file, "sha256").hexdigest()


tree: "dict[str, str]" = {}
walk("/", tree)
json.dump(tree, sys.stdout)
