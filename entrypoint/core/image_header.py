"""Reads the first bytes of an image, to see before a job waits that it is one. `check` is the entry.

Runs with Python 3.9.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

from entrypoint.core import files
from entrypoint.core.errors import BadInput

MAGIC: Final = b"SIF_MAGIC\0"
AT: Final = 32
"""Where it stands, behind the line that lets a kernel start the file. Then 3 bytes for the version, and 3 for
the processor (SIF's own documentation, version 1)."""
LENGTH: Final = 48
WHOLE: Final = 64
"""Bytes with the image's id, a UUID, in the last 16 of them."""
PROCESSORS: Final = {b"02\0": "x86_64", b"04\0": "aarch64", b"06\0": "ppc64le"}
"""As `uname -m` has them."""


def check(image: Path) -> str:
    """The processor that a SIF is for, empty if it does not say; of a folder or another image empty. Raises
    BadInput for what is no image."""
    if stat.S_ISDIR(files.mode_at(image)):
        if files.is_directory(image / ".singularity.d"):
            return ""  # unpacked
        raise BadInput(
            "image-not-unpacked",
            f"{image} is a directory, but no unpacked image (it has no .singularity.d): give a SIF file",
        )
    try:
        with files.open_regular(image) as file:
            head = file.read(LENGTH)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput("image-head-unreadable", f"the image {image} cannot be read: {why}") from None
    if head[:4] == b"hsqs":
        return ""  # a bare squashfs
    if head[AT : AT + len(MAGIC)] != MAGIC:
        size = image.stat().st_size
        raise BadInput(
            "image-no-sif",
            f"the image {image} ({size} bytes) does not begin as one: it was not copied or built to its end",
        )
    return PROCESSORS.get(head[AT + 13 : AT + 16], "")


def sif_id(head: bytes) -> str:
    """The id of a SIF with these first WHOLE bytes, as a UUID is written; empty if it is none."""
    if len(head) < WHOLE or not head[AT:].startswith(MAGIC):
        return ""
    import uuid  # it loads a library of C, which few commands need

    return str(uuid.UUID(bytes=head[WHOLE - 16 : WHOLE]))
