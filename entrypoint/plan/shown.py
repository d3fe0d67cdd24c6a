"""Foretells on a login node whether the image will show the paths that CMD names. `check` is the entry.

host/binds.sh decides it on the node, and the image has the last word; what may be in either is let pass. Runs
with Python 3.9.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from entrypoint.core.checkout import HOME
from entrypoint.core.errors import BadInput
from entrypoint.plan.profile import VARIABLE, Profile
from entrypoint.plan.sources import Settings

OF_IMAGE: Final = (
    "bin",
    "sbin",
    "lib",
    "lib64",
    "opt",
    "var",
    "run",
    "boot",
    "usr",
    "etc",
    "dev",
    "proc",
    "sys",
)
"""Top-level directories that an image has itself."""
EVERYWHERE: Final = (Path("/tmp"), Path("/var/tmp"))
"""What each container shows."""


def check(settings: Settings, profile: Profile, env: Mapping[str, str], cwd: Path) -> None:
    """Raises BadInput for a path among CMD's arguments that is here, and that the image will not show."""
    if profile.container.obey_binds or any(
        word.startswith(("--bind", "-B")) for word in profile.container.options
    ):
        return  # the site's modules, or Apptainer's own words, show more
    roots = [root.resolve() for root in _roots(settings, profile, env, cwd)]
    for path in _named(settings.command, cwd):
        real = path.resolve()
        is_of_image = any(part in OF_IMAGE for part in (*path.parts[1:2], *real.parts[1:2]))
        if is_of_image or real == Path("/") or any(root in (real, *real.parents) for root in roots):
            continue
        folder = real if real.is_dir() else real.parent
        raise BadInput(
            "cmd-will-not-show",
            f"the image will not show {path}, which CMD names: give --bind {shlex.quote(str(folder))}, or a "
            "line of APPTRAIN_BIND",
        )


def _named(command: Sequence[str], cwd: Path) -> Iterator[Path]:
    """Paths that are here: words of CMD, what stands behind their =, and the folder of a file to come."""
    for word in command:
        for text in {word, word.partition("=")[2]} - {""}:
            path = cwd / text
            try:
                if not path.exists() and text.startswith("/") and text.count("/") > 1:
                    path = path.parent
                if path.exists():
                    yield path
            except (OSError, ValueError):
                continue  # no path: too long, or with a NUL


def _roots(settings: Settings, profile: Profile, env: Mapping[str, str], cwd: Path) -> Iterator[Path]:
    """What is shown with all that is in it, as host/binds.sh has it."""
    yield from (cwd, HOME, *EVERYWHERE, Path(env.get("HOME") or "/tmp"))
    script = cwd / settings.command[0]
    yield from (script.parent, script.resolve().parent)
    for name in ("run-dir", "venv"):
        if settings.value(name):
            yield cwd / settings.value(name)
    binds = env.get("APPTRAIN_BIND", "").split("\n")
    for bind in [*binds, *profile.container.binds]:
        text = VARIABLE.sub(lambda found: env.get(found[1] or found[2], found[0]), bind)
        source, _, rest = text.partition(":")
        for shown in (text, source, rest.partition(":")[0]):
            if shown.startswith("/"):
                yield Path(shown)
