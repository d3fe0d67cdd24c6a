"""An installed Apptainer that builds images, and spython, through which it is called.

spython calls a binary named `singularity`, wants sudo, reports no status and ends the process on its own; all
of that is held here.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from containers.stacks import CONTAINERS, BuildError, BuildRefused

RECIPE: Final = CONTAINERS / "apptrain.def"
LEAST: Final = (1, 2)
TOLD: Final = (1, 4)
"""Since when Apptainer can be told how to pack (--mksquashfs-args); SingularityCE can since 4.0."""
FILE_SYSTEM: Final = re.compile(r"(\d+)-(\d+)\s*\|FS \(Squashfs")
"""Begin and end of an image's, in bytes, in what `apptainer sif list` prints."""
PACKING: Final = "-comp zstd -Xcompression-level 3 -all-root"
WHEELS: Final = "wheels"
EXTRA_WHEELS: Final = "extra-wheels"
COVERED: Final = ("/tmp", "/var/tmp", "/dev/shm")
"""Where Apptainer shows a build the host's own directories, and we an empty one."""


STOPS: Final = (signal.SIGTERM, signal.SIGHUP)
"""They end a build as an exit does, so that nothing unfinished stays. SIGHUP: a terminal that closes."""


class BuildFailed(BuildError):
    """Apptainer could not build; its own words stand above."""

    status = 1


PACKER: Final = """#!/bin/sh
# Apptainer tries with a single file which compression mksquashfs takes by default: that stays as it is.
[ -d "$1" ] || exec {mksquashfs} "$@"
left=$#
while [ "$left" -gt 0 ]; do
    word=$1
    shift
    left=$((left - 1))
    if [ "$word" = -comp ]; then
        shift
        left=$((left - 1))
    else
        set -- "$@" "$word"
    fi
done
exec {mksquashfs} "$@" {packing}
"""
"""A `mksquashfs` that packs as PACKING says, for an Apptainer that cannot be told."""


@dataclass(frozen=True)
class Builder:
    """An installed Apptainer (or Singularity), as spython and as this module call it."""

    path: str
    version: str
    mksquashfs: str | None = None
    """What an Apptainer that cannot be told how to pack packs with, empty if it has nothing; else None."""

    @classmethod
    def find(cls) -> Builder:
        for name in ("apptainer", "singularity"):
            path = shutil.which(name)
            if path:
                break
        else:
            raise BuildRefused(
                "apptainer-missing",
                "neither apptainer nor singularity is on PATH: load it (module avail apptainer), "
                "or build on a node that has it",
            )
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
        number = re.search(r"(\d+)\.(\d+)", said)
        apptainer = "apptainer" in said
        least = LEAST if apptainer else (4, 0)
        found = (int(number[1]), int(number[2])) if number else (0, 0)
        if found < least:
            raise BuildRefused(
                "apptainer-too-old",
                f"{path} is {said or 'silent about its version'}: {least[0]}.{least[1]} or newer is needed",
            )
        if not apptainer or found >= TOLD:
            return cls(path, said)
        return cls(path, said, shutil.which("mksquashfs", path=_search()) or "")

    def check(self) -> None:
        """Refuse what could not pack the image at the end of a build."""
        if self.mksquashfs == "":
            raise BuildRefused(
                "mksquashfs-missing",
                f"{self.path} is {self.version}, which packs an image with the mksquashfs of PATH, and there "
                "is none: add its folder to PATH (package squashfs-tools), or load Apptainer 1.4 or newer",
            )

    def build(self, image: Path, arguments: dict[str, str], work: Path, wheel_folders: list[Path]) -> None:
        """Build RECIPE to `image`."""
        check_recipe(arguments)
        values = work / "arguments"
        values.write_text("".join(f"{name}={value}\n" for name, value in arguments.items()), encoding="utf-8")
        # --force: else Apptainer's own time of the build wins over the recipe's label.
        options = [
            "--force",
            *([] if self.mksquashfs else ["--mksquashfs-args", PACKING]),
            "--build-arg-file",
            str(values),
            *_mount(work, "/mnt"),
            *_cover(work),
        ]
        for index, folder in enumerate(wheel_folders):
            options += _mount(folder, f"/mnt/{EXTRA_WHEELS if index else WHEELS}")
        epoch = str(calendar.timegm(time.strptime(arguments["DATE"], "%Y-%m-%d")))
        of_setup = {"APPTRAIN_WORK": str(work), "APPTRAIN_PYTHON": sys.executable}
        with self._client(work, **of_setup, SOURCE_DATE_EPOCH=epoch) as client:
            client.build(str(RECIPE), str(image), sudo=False, options=options)
        if not image.is_file():
            raise BuildFailed(
                "build-failed", "the build failed; the reason stands above. The image of before is untouched"
            )

    def labels(self, image: Path) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder, self._client(Path(folder)) as client:
            said = client.inspect(str(image), quiet=True)
        try:
            labels: dict[str, str] = said["attributes"]["labels"]
        except (KeyError, TypeError):
            raise BuildRefused(
                "image-not-inspectable", f"{image}: {self.path} cannot inspect it: build it anew: make image"
            ) from None
        return labels

    def partition(self, image: Path) -> tuple[int, int]:
        """Begin and end in bytes of the file system in the image."""
        listed = subprocess.run(
            [self.path, "sif", "list", str(image)], capture_output=True, text=True, check=False
        )
        found = FILE_SYSTEM.search(listed.stdout)
        if not found:
            raise BuildFailed(
                "image-no-file-system", f"{image}: no file system was found in it: {listed.stderr.strip()}"
            )
        return int(found[1]), int(found[2])

    def tree(self, image: Path) -> dict[str, str]:
        """Path to mode, link or content's digest, of everything in the image."""
        script = (CONTAINERS / "image" / "tree.py").read_text(encoding="utf-8")
        done = subprocess.run(
            [self.path, "-q", "exec", "--cleanenv", "--no-mount", "home,cwd,tmp,bind-paths", str(image),
             "python", "-I", "-c", script],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BuildFailed(
                "image-files-unreadable", f"{image}: its files could not be read: {done.stderr.strip()}"
            )
        files: dict[str, str] = json.loads(done.stdout)
        return files

    @contextlib.contextmanager
    def _client(self, work: Path, **variables: str) -> Iterator[Any]:
        """spython's client, where it finds this binary as `singularity` and Apptainer finds its tools."""
        tools = work / "bin"
        tools.mkdir(exist_ok=True)
        # spython keeps what goes to stderr, the progress of a build, until the end.
        line = f'#!/bin/sh\n[ "$1" != build ] || exec 2>&1\nexec {shlex.quote(self.path)} "$@"\n'
        (tools / "singularity").write_text(line, encoding="utf-8")
        (tools / "singularity").chmod(0o755)
        if self.mksquashfs:
            packer = PACKER.format(mksquashfs=shlex.quote(self.mksquashfs), packing=PACKING)
            (tools / "mksquashfs").write_text(packer, encoding="utf-8")
            (tools / "mksquashfs").chmod(0o755)
        before = dict(os.environ)
        for name in [name for name in os.environ if name.startswith(("APPTAINERENV_", "SINGULARITYENV_"))]:
            del os.environ[name]
        os.environ.update(variables, PATH=f"{tools}:{_search()}")
        try:
            from spython.main import Client

            yield Client
        except SystemExit as error:
            if error.code in [128 + number for number in STOPS]:
                raise
            raise BuildFailed("spython-failed", f"spython gave up: {error}") from None
        finally:
            os.environ.clear()
            os.environ.update(before)


def _search() -> str:
    """PATH, and where a Debian keeps what only root has in it."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def check_recipe(arguments: dict[str, str]) -> None:
    """The recipe reads as one, and each of its arguments has a value."""
    from spython.logger.message import QUIET, bot
    from spython.main.parse.parsers import SingularityParser

    text = RECIPE.read_text(encoding="utf-8")
    used = set(re.findall(r"\{\{ *(\w+) *\}\}", text))
    if used != set(arguments):
        raise BuildRefused(
            "recipe-arguments", f"{RECIPE}: its arguments are {sorted(used)}, {sorted(arguments)} are given"
        )
    # spython knows the header of registries only, looks for it in every line, and warns of %setup.
    bot.level = QUIET
    known = re.sub("^Bootstrap: .*", "Bootstrap: docker\nFrom: none", text, flags=re.MULTILINE)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as copy:
        copy.write(known)
        copy.flush()
        recipe = SingularityParser(copy.name).parse()["spython-base"]
    if not recipe.install or not recipe.test:
        raise BuildRefused("recipe-no-section", f"{RECIPE}: it has no %post or no %test")


def _mount(source: Path, target: str) -> list[str]:
    """Apptainer's option for showing `source`; its value is one line of CSV."""
    quoted = str(source).replace('"', '""')
    return ["--mount", f'type=bind,"source={quoted}",destination={target}']


def _cover(work: Path) -> list[str]:
    """Options that put an empty directory over each of COVERED."""
    private = work / "private"  # Theirs are open to everybody: nobody else may come by on the host.
    private.mkdir(mode=0o700)
    options = []
    for target in COVERED:
        empty = private / target.strip("/").replace("/", "-")
        empty.mkdir()
        empty.chmod(0o1777)
        options += _mount(empty, target)
    return options
