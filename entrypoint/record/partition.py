"""Reads which contents an image has, from the JSON that `make image` writes beside it. `partition` is the
entry. Runs on a login node, with Python 3.9.
"""

from __future__ import annotations

from pathlib import Path

from entrypoint.core import files

VARIABLE = "APPTRAIN_IMAGE_PARTITION"
"""Takes the digest to the ranks' launchers, for the manifest."""
MOST = 8 << 20
"""Bytes of that file."""


def partition(image: Path) -> str:
    """The SHA-256 of the file system in it; empty where nothing beside the image says it. A JSON of another
    length's image is an older one's."""
    return _said(image, "partition_sha256")


def whole_file(image: Path) -> str:
    """The SHA-256 of the SIF file, likewise."""
    return _said(image, "sif_sha256")


def _said(image: Path, name: str) -> str:
    try:
        found = files.read_json(image.with_suffix(".json"), MOST)
        return str(found[name]) if found["bytes"] == image.stat().st_size else ""
    except (OSError, ValueError, LookupError, TypeError):
        return ""
