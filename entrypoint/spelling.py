"""What a misspelled word was probably meant to be.

What it alone knows, of the launcher and a login node: when two names are near enough to be taken for each
other. Runs with Python 3.9.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

MEANT = {
    "gpu": "cuda",
    "--gpu": "--device cuda",
    "--cpu": "--device cpu",
    "--gpus": "--nproc-per-node",
    "--ranks": "--nproc-per-node",
    "--np": "--nproc-per-node",
    "--ntasks-per-node": "--nproc-per-node",
    "--image": "APPTRAIN_IMAGE",
    "--output": "--run-dir",
    "--cwd": "--run-dir",
}
"""What other programs call it."""


def meant(word: str, known: Iterable[str]) -> str:
    """`: did you mean X?` with the known name (two, where they are as near), or nothing."""
    names = list(dict.fromkeys(known))
    found = near(word, names)
    other = MEANT.get(word, "")
    if other.startswith("APPTRAIN_") or other.partition(" ")[0] in names:
        found = [other]
    return f": did you mean {' or '.join(found)}?" if found else ""


def near(word: str, known: Iterable[str], most: int = 2) -> list[str]:
    """The known names that this is probably one of, the nearest first."""
    names = {_plain(name): name for name in known}
    plain = _plain(word)
    if plain in names:
        return [names[plain]]
    last = [name for name in names if "." in name and name.rpartition(".")[2] == plain]
    begun = [name for name in names if len(plain) > 2 and name.startswith(plain)]
    alike = difflib.get_close_matches(plain, names, n=most, cutoff=0.7)
    found = list(dict.fromkeys([*last, *alike[:1], *begun, *alike]))
    return [names[name] for name in found[:most]]


def _plain(word: str) -> str:
    return word.lower().replace("_", "-").lstrip("-")


if __name__ == "__main__":
    print(meant(sys.argv[1], sys.argv[2:]))
