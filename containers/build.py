"""Builds, verifies and inspects the image: `make image`, `make image-verify`, `make image-inspect`.

Begin at `main`; `build` has the order of things. Everything from the network is fetched and checked against
the locks before a build begins, so a build itself needs none. builder.py calls Apptainer.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from containers import bom, debian, description, lustre, stacks, unpack, wheels
from containers.builder import EXTRA_WHEELS, RECIPE, STOPS, WHEELS, Builder, BuildFailed
from containers.download import NoAnswer
from containers.preflight import Places, check
from containers.stacks import CONTAINERS, BuildRefused, Stack

CHECKOUT: Final = CONTAINERS.parent
SOURCES: Final = ("entrypoint", "src/train", "pyproject.toml", "requirements/run.in", "LICENSE")


OF_WRITING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors that a place is full, or not the user's to write."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="containers/build.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("build", "fetch", "verify", "inspect"))
    parser.add_argument("--stack", default="", metavar="NAME", help="of containers/stacks.yaml (its default)")
    parser.add_argument("--extra", default="", metavar="FILE", help="further packages, a requirements file")
    parser.add_argument("--image", default="", metavar="FILE", help="instead of containers/image*.sif")
    parser.add_argument("--offline", default="", metavar="DIR", help="a directory with all wheels and .debs")
    options = parser.parse_args(arguments)
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as below nohup
            signal.signal(number, _stop)
    try:
        stack = stacks.find(options.stack)
        if options.what in stacks.WRITES:
            stacks.check_target(options.image)
        image = stacks.image_here(options.stack, options.image)
        if options.what == "inspect":
            return inspect(image)
        extra = Path(options.extra).resolve() if options.extra else None
        if extra:
            stacks.check_extra(extra)
        offline = Path(options.offline).resolve() if options.offline else None
        if options.what == "verify":
            return verify(stack, extra, image, offline)
        if options.what == "fetch":
            fetch_only(stack, extra, image, offline)
        else:
            build(stack, extra, image, offline)
    except (BuildRefused, NoAnswer, BuildFailed) as error:
        say(str(error), file=sys.stderr)
        return error.status
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        advice = ": see that there is room, and that you may write" if error.errno in OF_WRITING else ""
        say(f"{place}{error.strerror or error}{advice}", file=sys.stderr)
        return NoAnswer.status
    except KeyboardInterrupt:
        say("stopped; nothing was changed", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _stop(signum: int, _frame: object) -> NoReturn:
    """End as an exit does. A terminal that closes, or a login that ends, sends more than one signal: those
    that follow would break off the removal of what is unfinished."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + signum)


def say(text: str, file: TextIO | None = None) -> None:
    """A line for the user, on stdout if no other file is given."""
    print(f"apptrain: {text}", file=file, flush=True)


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
    """Have all that the locks name, checked against them, Debian's packages below `work`.

    EXTRA gets its lock if it has none that fits.
    """
    architecture = stacks.debian_architecture()
    locks = [stack_lock(stack), stacks.debian_lock(architecture)]
    # First, as it may ask for a mirror, and EXTRA may not fit: nobody should wait for 3 GB of wheels to be
    # told so.
    debian.lay_out(stack.base, architecture, locks[1], cache, work / "debian", offline=offline)
    if extra:
        locks.append(wheels.lock_extra(stack, architecture, extra))
    found = [wheels.fetch(locks[0], stack.base.python, architecture, cache, offline)]
    if extra and wheels.pinned(locks[2]):
        found.append(wheels.fetch(locks[2], stack.base.python, architecture, cache, offline))
    return Fetched(architecture, locks, found)


def stack_lock(stack: Stack) -> Path:
    """The lock of its Python packages for this machine. Raises BuildRefused if it has none."""
    architecture = stacks.debian_architecture()
    if architecture not in stack.architectures:
        raise BuildRefused(
            "stack-architecture",
            f"stack {stack.name} is for {', '.join(stack.architectures)}, this machine {architecture}",
        )
    lock = stack.lock(architecture)
    if not lock.is_file():
        raise BuildRefused("stack-no-lock", f"stack {stack.name} has no lock yet, {lock}: type `make lock`")
    return lock


def needed(stack: Stack, cache: Path, offline: Path | None) -> dict[str, int]:
    """The megabytes that a build takes at its places."""
    download = wheels.room(stack_lock(stack), cache, stack.megabytes["download"], offline)
    return {**stack.megabytes, "download": download}


def fetch_only(stack: Stack, extra: Path | None, image: Path, offline: Path | None) -> None:
    """What a login node with a network can do for a compute node without one."""
    places = Places.of(image)
    check(places, {**needed(stack, places.cache, offline), "work": 0, "image": 0})
    with tempfile.TemporaryDirectory(dir=places.cache) as folder:
        fetch(stack, extra, offline, places.cache, Path(folder))
    say(f"what stack {stack.name} is made from is in {places.cache}: `make image` needs no network now")


def build(stack: Stack, extra: Path | None, image: Path, offline: Path | None) -> dict[str, Any]:
    """Build to a temporary name; rename the image and what lies beside it once all of it is there."""
    begin = time.time()
    builder = Builder.find()
    builder.check()
    places = Places.of(image)
    say(f"stack {stack.name}: torch {stack.torch}, CUDA {stack.cuda}")
    say(f"target {places.target}")
    say(f"temporary files in {places.temporary} (APPTAINER_TMPDIR)")
    say(f"downloads in {places.cache} (APPTRAIN_CACHE)")
    check(places, needed(stack, places.cache, offline))
    temporary = tempfile.TemporaryDirectory(prefix="apptrain-build-", dir=places.temporary)
    with temporary as folder, lustre.striped_folder(image) as target:
        work = Path(folder)
        fetched = fetch(stack, extra, offline, places.cache, work)
        sources = lay_out(work, stack, fetched.locks)
        part = target / f".{image.name}.{os.getpid()}.sif"
        try:
            builder.build(part, recipe_arguments(stack), work, fetched.wheels)
            found = facts(stack, part, work, builder)
            said = {
                **found,
                "lock_sha256": wheels.digest(*fetched.locks),
                "source_sha256": sources,
                "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
                "seconds": round(time.time() - begin),
            }
            _write(image.with_suffix(".json"), json.dumps(said, indent=2) + "\n")
            _write(image.with_suffix(".cdx.json"), bom.text(said, fetched.locks))
            part.replace(image)
        finally:
            part.unlink(missing_ok=True)
    say(
        f"{image} is ready: {said['bytes'] / 1e9:.2f} GB in {said['seconds']} s, "
        f"identity {said['partition_sha256'][:12]}"
    )
    return said


def lay_out(work: Path, stack: Stack, locks: list[Path]) -> str:
    """What the recipe finds at /mnt beside packages; the digest of the recipe and of our own sources."""
    shutil.copyfile(locks[0], work / "lock.txt")
    (work / "extra.txt").write_text("".join(lock.read_text() for lock in locks[2:]))
    others = stacks.others(stack, stacks.debian_architecture())
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
    shutil.copy(unpack.__file__, work)
    shutil.copytree(CONTAINERS / "image", source, ignore=skip, copy_function=shutil.copy, dirs_exist_ok=True)
    ahead = locks[0].with_suffix(".ahead")
    (source / "ahead").write_text(ahead.read_text() if ahead.exists() else "")
    for wheel in (WHEELS, EXTRA_WHEELS):
        (work / wheel).mkdir()
    shutil.copy(wheels.uv(), work / "uv")
    for path in [work, *work.rglob("*")]:
        if not path.is_symlink() and not path.is_relative_to(work / "debian"):
            executable = path.is_dir() or os.access(path, os.X_OK)
            path.chmod(0o755 if executable else 0o644)
    return wheels.digest(RECIPE, *sorted(path for path in source.rglob("*") if path.is_file()))


def recipe_arguments(stack: Stack) -> dict[str, str]:
    return {"DATE": stack.date, "STACK": stack.name}


def facts(stack: Stack, image: Path, work: Path, builder: Builder) -> dict[str, Any]:
    """What is in the image. Raises BuildFailed where it is not what stacks.yaml says."""
    found = json.loads((work / "python.installed").read_text())
    for name in ("torch", "torchvision", "cuda", "cudnn", "nccl"):
        if found["versions"][name] != getattr(stack, name):
            raise BuildFailed(
                "image-version-differs",
                f"{name} is {found['versions'][name]} in the image, {getattr(stack, name)} in "
                f"{stacks.FILE.name}: correct the entry {stack.name} there",
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


def verify(stack: Stack, extra: Path | None, image: Path, offline: Path | None) -> int:
    """Build a second time, elsewhere and under another umask, and compare the two."""
    first = description.read(image)
    with tempfile.TemporaryDirectory(prefix="apptrain-verify-", dir=Places.of(image).temporary) as folder:
        os.umask(0o077)
        again = Path(folder) / "a second build" / "again.sif"
        again.parent.mkdir()
        second = build(stack, extra, again, offline)
        for name, what in (("lock_sha256", "locks"), ("source_sha256", "files of this checkout")):
            if first.get(name) != second[name]:
                raise BuildRefused(
                    "image-outdated",
                    f"{image} was built from other {what} than those here: build it anew: make image",
                )
        if first["partition_sha256"] == second["partition_sha256"]:
            say(f"the second build is identical, partition {first['partition_sha256']}")
            return 0
        builder = Builder.find()
        trees = [builder.tree(one) for one in (image, again)]
    differing = [path for path in sorted({*trees[0], *trees[1]}) if trees[0].get(path) != trees[1].get(path)]
    for path in differing[:50]:
        say(f"{path}: {trees[0].get(path, 'absent')} | {trees[1].get(path, 'absent')}")
    if differing:
        say(f"the second build differs in {len(differing)} of {len(trees[0])} files", file=sys.stderr)
        return 1
    say(f"the second build has the same {len(trees[0])} files; its partition is packed differently")
    return 0


def inspect(image: Path) -> int:
    """Print what is known of the image, and whether it is still the one that the JSON describes."""
    said = description.read(image)
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
        raise BuildRefused(
            "image-not-described",
            f"{image} is not the file that {image.with_suffix('.json')} describes: build it anew",
        )
    return 0


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
