"""Build, verify and inspect the image: `make image`, `make image-verify`, `make image-inspect`.

The secret: spython and Apptainer's build command. spython calls a binary named `singularity`, wants sudo,
reports no status and ends the process on its own; all of that is held in `Builder`. Everything from the
network has been fetched and checked against the locks before a build begins, so a build itself needs none.
"""

from __future__ import annotations

import argparse
import calendar
import contextlib
import getpass
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from containers import bom, debian, registry, stacks, wheels
from containers.download import Unavailable
from containers.preflight import Places, check
from containers.stacks import CONTAINERS, BadInput, Base, Stack

CHECKOUT: Final = CONTAINERS.parent
RECIPE: Final = CONTAINERS / "apptrain.def"
LEAST: Final = (1, 2)
PACKING: Final = "-comp zstd -Xcompression-level 3 -all-root"
BASE: Final = "base"
WHEELS: Final = "wheels"
EXTRA_WHEELS: Final = "extra-wheels"
COVERED: Final = ("/tmp", "/var/tmp", "/dev/shm")
"""Where Apptainer shows a build the host's own directories, and we an empty one."""
SOURCES: Final = ("entrypoint", "src/train", "pyproject.toml", "requirements/run.in", "LICENSE")


class BuildFailed(Exception):
    """Apptainer could not build; its own words stand above."""

    status = 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="containers/build.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("build", "fetch", "verify", "inspect"))
    parser.add_argument("--stack", default="", metavar="NAME", help="of containers/stacks.yaml (its default)")
    parser.add_argument("--base", default="auto", choices=("auto", "debootstrap", "docker"))
    parser.add_argument("--extra", default="", metavar="FILE", help="further packages, a requirements file")
    parser.add_argument("--image", default="", metavar="FILE", help="instead of containers/image*.sif")
    parser.add_argument("--offline", default="", metavar="DIR", help="a directory with all wheels and .debs")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        stack = stacks.find(options.stack)
        image = Path(options.image).resolve() if options.image else stack.image
        if options.what == "inspect":
            return inspect(image)
        extra = Path(options.extra).resolve() if options.extra else None
        offline = Path(options.offline).resolve() if options.offline else None
        if options.what == "verify":
            return verify(stack, options.base, extra, image, offline)
        if options.what == "fetch":
            fetch_only(stack, extra, image, offline)
        else:
            build(stack, options.base, extra, image, offline)
    except (BadInput, Unavailable, BuildFailed) as error:
        print(f"image: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("image: stopped; nothing was changed", file=sys.stderr)
        return 130
    return 0


# --- the order of things --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fetched:
    """The locks of an image, and where everything that they name lies on this machine."""

    architecture: str
    locks: list[Path]
    """That of the stack, of Debian, and of EXTRA if there is any."""
    wheels: list[Path]
    """The directory of the stack's wheels, and that of EXTRA's."""


def fetch(stack: Stack, extra: Path | None, offline: Path | None, cache: Path, work: Path) -> Fetched:
    """Have all that the locks name, checked against them, Debian's packages as a mirror below `work`.

    EXTRA gets its lock if it has none that fits.
    """
    architecture = stacks.debian_architecture()
    if architecture not in stack.architectures:
        raise BadInput(
            f"stack {stack.name} is for {', '.join(stack.architectures)}, this machine {architecture}"
        )
    locks = [stack.lock(architecture), stacks.debian_lock(architecture)]
    found = [wheels.fetch(locks[0], stack.base.python, architecture, cache, offline)]
    if extra:
        locks.append(wheels.lock_extra(stack, architecture, extra))
        if wheels.pinned(locks[2]):
            found.append(wheels.fetch(locks[2], stack.base.python, architecture, cache, offline))
    debian.repository(stack.base, architecture, locks[1], cache, work / "debian", offline=offline)
    return Fetched(architecture, locks, found)


def fetch_only(stack: Stack, extra: Path | None, image: Path, offline: Path | None) -> None:
    """What a login node with a network can do for a compute node without one."""
    places = Places.of(image)
    check(places, {**stack.megabytes, "work": 0, "image": 0})
    with tempfile.TemporaryDirectory(dir=places.cache) as folder:
        fetch(stack, extra, offline, places.cache, Path(folder))
    print(
        f"image: what stack {stack.name} is made from is in {places.cache}: `make image` needs no network now"
    )


def build(stack: Stack, base: str, extra: Path | None, image: Path, offline: Path | None) -> dict[str, Any]:
    """Build to a temporary name; rename the image and what lies beside it once all of it is there."""
    begin = time.time()
    builder = Builder.find()
    base = builder.base(base, stack, stacks.debian_architecture())
    places = Places.of(image)
    print(
        f"image: stack {stack.name}: torch {stack.torch}, CUDA {stack.cuda}; base by {base}\n"
        f"image: target {places.target}\nimage: temporary files in {places.temporary} (APPTAINER_TMPDIR)\n"
        f"image: downloads in {places.cache} (APPTRAIN_CACHE)",
        flush=True,
    )
    check(places, stack.megabytes)
    with tempfile.TemporaryDirectory(prefix="apptrain-build-", dir=places.temporary) as folder:
        work = Path(folder)
        fetched = fetch(stack, extra, offline, places.cache, work)
        sources = lay_out(work, stack, fetched.locks)
        part = image.with_name(f".{image.name}.{os.getpid()}.sif")
        try:
            if base == "docker":
                builder.unpack(stack.base, fetched.architecture, work)
            builder.build(part, recipe_arguments(stack, fetched.architecture), work, fetched.wheels)
            found = facts(stack, part, work, builder)
            said = {
                **found,
                "lock_sha256": wheels.digest(*fetched.locks),
                "source_sha256": sources,
                "base": base,
                "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
                "seconds": round(time.time() - begin),
            }
            _write(image.with_suffix(".json"), json.dumps(said, indent=2) + "\n")
            _write(image.with_suffix(".cdx.json"), bom.text(said, fetched.locks))
            part.replace(image)
        finally:
            part.unlink(missing_ok=True)
    print(
        f"image: {image} is ready: {said['bytes'] / 1e9:.2f} GB in {said['seconds']} s, "
        f"identity {said['partition_sha256'][:12]}"
    )
    return said


def lay_out(work: Path, stack: Stack, locks: list[Path]) -> str:
    """What the recipe finds at /mnt beside packages; the digest of the recipe and of our own sources."""
    shutil.copyfile(locks[0], work / "lock.txt")
    (work / "extra.txt").write_text("".join(lock.read_text() for lock in locks[2:]))
    others = {other.name: other.facts() for other in stacks.read().values() if other.name != stack.name}
    said = {**stack.facts(), "lock_sha256": wheels.digest(*locks), "others": others}
    (work / "stack.json").write_text(json.dumps(said, indent=2) + "\n")
    source = work / "source"
    skip = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        origin, target = CHECKOUT / name, source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            shutil.copytree(origin, target, ignore=skip)
        else:
            shutil.copyfile(origin, target)
    for file in (CONTAINERS / "image").iterdir():
        shutil.copy(file, source)
    for wheel in (WHEELS, EXTRA_WHEELS):
        (work / wheel).mkdir()
    shutil.copy(wheels.uv(), work / "uv")
    for path in [work, *work.rglob("*")]:
        if not path.is_symlink() and not path.is_relative_to(work / "debian"):
            executable = path.is_dir() or os.access(path, os.X_OK)
            path.chmod(0o755 if executable else 0o644)
    return wheels.digest(RECIPE, *sorted(path for path in source.rglob("*") if path.is_file()))


def recipe_arguments(stack: Stack, architecture: str) -> dict[str, str]:
    entries = debian.packages(stacks.debian_lock(architecture))
    return {
        "SUITE": stack.base.suite,
        "PACKAGES": " ".join(f"{entry['Package']}={entry['Version']}" for entry in entries),
        "DATE": stack.date,
        "STACK": stack.name,
    }


def facts(stack: Stack, image: Path, work: Path, builder: Builder) -> dict[str, Any]:
    """What is in the image. Raises BuildFailed where it is not what stacks.yaml says."""
    found = json.loads((work / "python.installed").read_text())
    for name in ("torch", "torchvision", "cuda", "cudnn", "nccl"):
        if found["versions"][name] != getattr(stack, name):
            raise BuildFailed(
                f"{name} is {found['versions'][name]} in the image, {getattr(stack, name)} in "
                f"{stacks.FILE.name}: correct the entry {stack.name} there"
            )
    lines = (work / "debian.installed").read_text().split("\n")
    whole, partition = sha256(image, *builder.partition(image))
    commit = subprocess.run(
        ["git", "-C", str(CHECKOUT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()  # fmt: skip
    return {
        "stack": stack.name,
        "versions": found["versions"],
        "driver": stack.driver,
        "compute_capability": stack.compute_capability,
        "sif_sha256": whole,
        "partition_sha256": partition,
        "bytes": image.stat().st_size,
        "build_host": platform.node(),
        "builder": builder.version,
        "git_commit": commit or None,
        "debian_packages": dict(line.split() for line in lines if line),
        "python_packages": found["python_packages"],
    }


def verify(stack: Stack, base: str, extra: Path | None, image: Path, offline: Path | None) -> int:
    """Build a second time, elsewhere and under another umask, and compare the two."""
    first = described(image)
    if base == "auto":
        base = first["base"]
    with tempfile.TemporaryDirectory(prefix="apptrain-verify-", dir=Places.of(image).temporary) as folder:
        os.umask(0o077)
        again = Path(folder) / "a second build" / "again.sif"
        again.parent.mkdir()
        second = build(stack, base, extra, again, offline)
        for name, what in (("lock_sha256", "locks"), ("source_sha256", "files of this checkout")):
            if first.get(name) != second[name]:
                raise BadInput(
                    f"{image} was built from other {what} than those here: build it anew: make image"
                )
        if first["partition_sha256"] == second["partition_sha256"]:
            print(f"image: the second build is identical, partition {first['partition_sha256']}")
            return 0
        builder = Builder.find()
        trees = [builder.tree(one) for one in (image, again)]
    differing = [path for path in sorted({*trees[0], *trees[1]}) if trees[0].get(path) != trees[1].get(path)]
    for path in differing[:50]:
        print(f"image: {path}: {trees[0].get(path, 'absent')} | {trees[1].get(path, 'absent')}")
    if differing:
        print(
            f"image: the second build differs in {len(differing)} of {len(trees[0])} files", file=sys.stderr
        )
        return 1
    print(f"image: the second build has the same {len(trees[0])} files; its partition is packed differently")
    return 0


def inspect(image: Path) -> int:
    """Print what is known of the image, and whether it is still the one that the JSON describes."""
    said = described(image)
    builder = Builder.find()
    labels = builder.labels(image)
    same = sha256(image)[0] == said["sif_sha256"]
    for name, value in said.items():
        if name.endswith("_packages"):
            print(f"{name:20} {len(value)}")
        elif isinstance(value, dict):
            print(
                f"{name:20} {', '.join(f'{key} {one}' for key, one in value.items() if isinstance(one, str))}"
            )
        else:
            print(f"{name:20} {', '.join(value) if isinstance(value, list) else value}")
    for name, value in sorted(labels.items()):
        print(f"label {name:14} {value}")
    if not same:
        raise BadInput(f"{image} is not the file that {image.with_suffix('.json')} describes: build it anew")
    return 0


def described(image: Path) -> dict[str, Any]:
    """The JSON beside an image."""
    if not image.is_file():
        raise BadInput(f"{image}: there is no such image: make image")
    try:
        said: dict[str, Any] = json.loads(image.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{image.with_suffix('.json')}: {error}: build the image anew: make image") from None
    return said


# --- Apptainer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Builder:
    """An installed Apptainer (or Singularity), as spython and as this module call it."""

    path: str
    version: str

    @classmethod
    def find(cls) -> Builder:
        for name in ("apptainer", "singularity"):
            path = shutil.which(name)
            if path:
                break
        else:
            raise BadInput(
                "neither apptainer nor singularity is on PATH: load it (module avail apptainer), "
                "or build on a node that has it"
            )
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
        number = re.search(r"(\d+)\.(\d+)", said)
        least = LEAST if "apptainer" in said else (4, 0)
        if not number or (int(number[1]), int(number[2])) < least:
            raise BadInput(
                f"{path} is {said or 'silent about its version'}: {least[0]}.{least[1]} or newer is needed"
            )
        return cls(path, said)

    def base(self, asked: str, stack: Stack, architecture: str) -> str:
        """How the base is made here: what was asked for, or for `auto` what this machine can do."""
        if os.geteuid() and not _has_subordinate_ids() and not shutil.which("fakeroot"):
            raise BadInput(
                f"{getpass.getuser()} has no subordinate ids (/etc/subuid) and fakeroot is not installed: "
                "Debian's packages cannot be set up: ask for one of the two, or build where one is there"
            )
        debootstrap = _tool("debootstrap")
        digest = stack.base.digest[architecture]
        if asked == "debootstrap" and not debootstrap:
            raise BadInput("BASE=debootstrap: debootstrap is not installed here: install it, or BASE=docker")
        if asked == "docker" and not digest:
            raise BadInput(
                f"BASE=docker: {stacks.FILE.name} has no digest of {stack.base.image} for {architecture}: "
                "run `make lock` with REGISTRY=HOST, or take BASE=debootstrap"
            )
        if asked != "auto":
            return asked
        if not debootstrap and not digest:
            raise BadInput(
                f"no base can be made here: debootstrap is not installed, and {stacks.FILE.name} has no "
                f"digest of {stack.base.image} for {architecture}: install debootstrap, or run `make lock` "
                "with REGISTRY=HOST"
            )
        return "debootstrap" if debootstrap else "docker"

    def unpack(self, base: Base, architecture: str, work: Path) -> None:
        """Put the base where %setup finds it: the recipe, which the image keeps, names no registry."""
        name = f"{base.image.partition(':')[0]}@{base.digest[architecture]}"
        source = "docker://" + "/".join(part for part in (registry.address(), name) if part)
        with self._client(work) as client:
            client.build(source, str(work / BASE), sudo=False, options=["--sandbox"])
        if not (work / BASE / "bin").exists():
            raise Unavailable(f"BASE=docker: {source} could not be had; the reason stands above")

    def build(self, image: Path, arguments: dict[str, str], work: Path, wheel_folders: list[Path]) -> None:
        """Build RECIPE to `image`."""
        check_recipe(arguments)
        values = work / "arguments"
        values.write_text("".join(f"{name}={value}\n" for name, value in arguments.items()), encoding="utf-8")
        # --force: else Apptainer's own time of the build wins over the recipe's label.
        options = [
            "--force",
            "--mksquashfs-args",
            PACKING,
            "--build-arg-file",
            str(values),
            *_mount(work, "/mnt"),
            *_cover(work),
        ]
        for index, folder in enumerate(wheel_folders):
            options += _mount(folder, f"/mnt/{EXTRA_WHEELS if index else WHEELS}")
        epoch = str(calendar.timegm(time.strptime(arguments["DATE"], "%Y-%m-%d")))
        with self._client(work, APPTRAIN_WORK=str(work), SOURCE_DATE_EPOCH=epoch) as client:
            client.build(str(RECIPE), str(image), sudo=False, options=options)
        if not image.is_file():
            raise BuildFailed("the build failed; the reason stands above. The image of before is untouched")

    def labels(self, image: Path) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder, self._client(Path(folder)) as client:
            said = client.inspect(str(image), quiet=True)
        try:
            labels: dict[str, str] = said["attributes"]["labels"]
        except (KeyError, TypeError):
            raise BadInput(f"{image}: {self.path} cannot inspect it: build it anew: make image") from None
        return labels

    def partition(self, image: Path) -> tuple[int, int]:
        """Begin and end in bytes of the file system in the image."""
        listed = subprocess.run(
            [self.path, "sif", "list", str(image)], capture_output=True, text=True, check=False
        )
        found = re.search(r"(\d+)-(\d+)\s*\|FS \(Squashfs", listed.stdout)
        if not found:
            raise BuildFailed(f"{image}: no file system was found in it: {listed.stderr.strip()}")
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
            raise BuildFailed(f"{image}: its files could not be read: {done.stderr.strip()}")
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
        before = dict(os.environ)
        for name in [name for name in os.environ if name.startswith(("APPTAINERENV_", "SINGULARITYENV_"))]:
            del os.environ[name]
        os.environ.update(variables, PATH=f"{tools}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        try:
            from spython.main import Client

            yield Client
        except SystemExit as error:
            if error.code == 128 + signal.SIGTERM:
                raise
            raise BuildFailed(f"spython gave up: {error}") from None
        finally:
            os.environ.clear()
            os.environ.update(before)


def check_recipe(arguments: dict[str, str]) -> None:
    """The recipe reads as one, and each of its arguments has a value."""
    from spython.logger.message import QUIET, bot
    from spython.main.parse.parsers import SingularityParser

    text = RECIPE.read_text(encoding="utf-8")
    used = set(re.findall(r"\{\{ *(\w+) *\}\}", text))
    if used != set(arguments):
        raise BadInput(f"{RECIPE}: its arguments are {sorted(used)}, {sorted(arguments)} are given")
    # spython knows the header of registries only, looks for it in every line, and warns of %setup.
    bot.level = QUIET
    known = re.sub("^Bootstrap: .*", "Bootstrap: docker\nFrom: none", text, flags=re.MULTILINE)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as copy:
        copy.write(known.replace("debootstrap", ""))
        copy.flush()
        recipe = SingularityParser(copy.name).parse()["spython-base"]
    if not recipe.install or not recipe.test:
        raise BadInput(f"{RECIPE}: it has no %post or no %test")


# --- files ----------------------------------------------------------------------------------------------


def sha256(file: Path, begin: int = 0, end: int = 0) -> tuple[str, str]:
    """Of the whole file, and of its bytes from `begin` to before `end`; it is read once."""
    whole, part, at = hashlib.sha256(), hashlib.sha256(), 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            whole.update(block)
            part.update(block[max(begin - at, 0) : max(end - at, 0)])
            at += len(block)
    return whole.hexdigest(), part.hexdigest()


def _write(file: Path, text: str) -> None:
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)


def _has_subordinate_ids() -> bool:
    """As Apptainer looks for them; a directory service answers through getsubids."""
    names = {getpass.getuser(), str(os.getuid())}
    try:
        lines = Path("/etc/subuid").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    if any(line.partition(":")[0] in names for line in lines):
        return True
    getsubids = shutil.which("getsubids")
    asked = [getsubids, getpass.getuser()] if getsubids else ["false"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


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


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
