"""Which contents an image has, by the JSON that `make image` writes beside it.

It knows that file's words. Runs on a login node, with Python 3.9.
"""

from __future__ import annotations

import json
from pathlib import Path

VARIABLE = "APPTRAIN_IMAGE_PARTITION"
"""Takes the digest to the ranks' launchers, for the manifest."""


def partition(image: Path) -> str:
    """The SHA-256 of the file system in it; empty where nothing beside the image says it. A JSON of another
    length's image is an older one's."""
    try:
        found = json.loads(image.with_suffix(".json").read_text(encoding="utf-8"))
        return str(found["partition_sha256"]) if found["bytes"] == image.stat().st_size else ""
    except (OSError, ValueError, LookupError, TypeError):
        return ""
