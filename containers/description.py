"""Reads what the build wrote beside an image: of what it is made. `read` is the entry.

Runs with the Python of a login node, before the venv of the build is made.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, Final

from containers.stacks import BuildRefused
from entrypoint.core import files, image_header
from entrypoint.core.errors import BadInput

MOST: Final = 8 << 20
"""Bytes of it: a line for each of some hundred packages takes 30 kB."""


def read(image: Path) -> dict[str, Any]:
    """Raises BuildRefused if there is no image, or nothing describes it."""
    if not stat.S_ISREG(files.mode_at(image)):
        raise BuildRefused(
            "image-missing", f"{image}: there is no such image: make image, or give another with --image"
        )
    try:
        image_header.check(image)
    except BadInput as error:
        raise BuildRefused(error.id, str(error)) from None
    beside = image.with_suffix(".json")
    try:
        said = files.read_json(beside, MOST)
        if not isinstance(said, dict) or "sif_sha256" not in said:
            raise ValueError("it describes no image")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BuildRefused(
            "image-description-unreadable",
            f"{beside} cannot be read ({why}): the build writes it beside its image: build that anew (make "
            f"image); of an image from elsewhere `apptainer inspect {image}` tells what is in it",
        ) from None
    return said
