"""Finds what a misspelled word was probably meant to be. `near` is the rule; the launcher and the commands of
a login node use it. Runs with Python 3.9.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

GPUS = ("--gpus-per-node", "--gpus", "--nproc-per-node")
MEANT = {
    "gpu": ("cuda",),
    "--gpu": ("--gpus-per-node", "--gpus", "--device cuda"),
    "--cpu": ("--device cpu",),
    **dict.fromkeys(("--gpus", "--gpus-per-node", "--ngpus", "--num-gpus"), GPUS),
    **dict.fromkeys(("--ranks", "-np", "--np", "--nprocs", "--num-processes"), ("--nproc-per-node",)),
    "--ntasks-per-node": ("--nproc-per-node",),
    "--num-machines": ("--nodes",),
    "--image": ("APPTRAIN_IMAGE",),
    "--cluster": ("--profile",),
    "--output": ("--run-dir",),
    "--cwd": ("--run-dir",),
    "-N": ("--nodes",),
    "-n": ("--nodes", "--nproc-per-node"),
    **dict.fromkeys(("-p", "-q"), ("--partition",)),
    "-A": ("--account",),
    "-t": ("--time",),
    **dict.fromkeys(("-v", "-V"), ("--version",)),
}
"""What other programs call it: the first that is known here; of a short option, all."""
LITERAL, VAGUE = 0.85, 0.7
"""How alike two words are: a letter apart; perhaps the same."""


def meant(word: str, known: Iterable[str]) -> str:
    """`: did you mean X?` with the known name (two, where they are as near), or nothing."""
    found = guesses(word, known)
    return f": did you mean {' or '.join(found)}?" if found else ""


def guesses(word: str, known: Iterable[str]) -> list[str]:
    """The known names, the most probable first."""
    names = list(dict.fromkeys(known))
    others = [
        other
        for other in MEANT.get(word.replace("_", "-"), ())
        if other.startswith("APPTRAIN_") or other.partition(" ")[0] in names
    ]
    if word.startswith("-") and not word.startswith("--"):
        return others or near(word, names, alike=LITERAL)
    return near(word, names, alike=LITERAL) or others[:1] or near(word, names)


def near(word: str, known: Iterable[str], most: int = 2, alike: float = VAGUE) -> list[str]:
    """The known names that this is probably one of, the nearest first."""
    names = {_plain(name): name for name in known}
    plain = _plain(word)
    if plain in names:
        return [names[plain]]
    import difflib  # no start without a mistake needs it

    begun = [name for name in names if len(plain) > 2 and name.startswith(plain)]
    close = difflib.get_close_matches(plain, names, n=most, cutoff=alike)
    found = list(dict.fromkeys([*close[:1], *begun, *close]))
    return [names[name] for name in found[:most]]


def _plain(word: str) -> str:
    return word.lower().replace("_", "-").lstrip("-")


if __name__ == "__main__":
    print(meant(sys.argv[1], sys.argv[2:]))
