"""Reads containers/stacks.yaml: the pinned sets of CUDA and torch, and where their locks and images lie.
`find` and `read` are the entries.
"""

from __future__ import annotations

import platform
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from entrypoint.core import files

CONTAINERS: Final = Path(__file__).resolve().parent
FILE: Final = CONTAINERS / "stacks.yaml"
OTHER_ROAD: Final = (
    "or take an image that exists: apptainer pull FILE.sif docker://NAME, then APPTRAIN_IMAGE=FILE.sif"
)
"""What a refusal names if an image cannot be built here."""
WRITES: Final = ("build", "fetch")
"""Actions whose IMAGE is the file to be built."""
PLAIN: Final = "x86_64"
"""The processor whose images have its name not in theirs."""
DEBIAN_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


class BuildError(Exception):
    """An end with one line for the user."""

    status: int

    def __init__(self, id: str, text: str) -> None:
        super().__init__(text)
        self.id = id
        """As that of `Refusal` in entrypoint."""


class BuildRefused(BuildError):
    """What was asked for cannot be; the message says what was given, what was found and what to do."""

    status = 64


def lacking(offline: Path, file: str, state: str) -> BuildRefused:
    """The refusal of an OFFLINE directory that does not have a locked file."""
    return BuildRefused(
        "offline-file-missing",
        f"OFFLINE={offline}: {file} {state}: fill the directory anew, with the APPTRAIN_CACHE of "
        "`make image-fetch` on a machine that has a network",
    )


@dataclass(frozen=True)
class Base:
    """The Debian below every stack."""

    suite: str
    python: str
    packages: list[str]


@dataclass(frozen=True)
class Stack:
    """One entry, with what all of them share."""

    name: str
    torch: str
    torchvision: str
    cuda: str
    cudnn: str
    nccl: str
    driver: str
    compute_capability: list[str]
    architectures: list[str]
    megabytes: dict[str, int]
    date: str
    base: Base
    is_default: bool

    def lock(self, architecture: str) -> Path:
        """Names, versions and hashes of all Python packages of the image, as pip reads them."""
        return CONTAINERS / "locks" / f"{self.name}-{architecture}.txt"

    @property
    def image(self) -> Path:
        """The image's file on the usual processor; `image_on` has that of others."""
        return image_of(self.name)

    def fits(self, driver: str, machine: str) -> bool:
        """Whether it runs with this driver, on a processor that has builds of it; '': unknown."""
        is_new = not driver or _numbers(driver) >= _numbers(self.driver)
        return is_new and DEBIAN_ARCHITECTURES.get(machine, machine) in ("", *self.architectures)

    @property
    def pins(self) -> list[str]:
        return [f"torch=={self.torch}", f"torchvision=={self.torchvision}"]

    def facts(self) -> dict[str, Any]:
        """What the image says of itself: the entry's own keys."""
        names = ("torch", "torchvision", "cuda", "cudnn", "nccl", "driver", "compute_capability")
        return {"name": self.name, **{name: getattr(self, name) for name in names}}


def image_here(name: str, given: str) -> Path:
    """The file `given`, or if that is empty the image of this stack ('': the default) on this machine."""
    if given:
        return Path(given).resolve()
    check_name(name)
    return image_on(image_of(name), platform.machine())


def image_of(name: str) -> Path:
    """The image of this stack ('': the default) on the usual processor; all it reads are the names."""
    return CONTAINERS / ("image.sif" if name in ("", names()[0]) else f"image-{name}.sif")


def image_on(image: Path, machine: str) -> Path:
    """This image's file for a machine of that kind: a home may be shared by two kinds. On all but the usual
    one the processor is in the file's name. host/job.sh does the same."""
    return image if machine == PLAIN else image.with_stem(f"{image.stem}-{machine}")


def debian_lock(architecture: str) -> Path:
    """Debian's own index entries of all packages of the base, with their hashes."""
    return CONTAINERS / "locks" / f"debian-{architecture}"


def debian_architecture() -> str:
    """This machine's, as Debian calls it."""
    machine = platform.machine()
    if machine not in DEBIAN_ARCHITECTURES:
        raise BuildRefused(
            "build-architecture",
            f"this machine is {machine}: the locks are for {' and '.join(DEBIAN_ARCHITECTURES)}: "
            "build on such a machine",
        )
    return DEBIAN_ARCHITECTURES[machine]


def read(file: Path = FILE) -> dict[str, Stack]:
    """All stacks by name, in the file's order. Raises BuildRefused for a file that is wrong."""
    # A login node may lack PyYAML, and ask for no more than the names.
    from entrypoint.core import strict_yaml

    try:
        content = strict_yaml.load(file)
        _check(content)
        _check_names(list(content["stacks"]), names(file))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BuildRefused("stacks-wrong", f"{file} does not describe stacks: {why}") from None
    base = Base(**content["base"])
    return {
        name: Stack(
            name=name, date=str(content["date"]), base=base, is_default=name == content["default"], **entry
        )
        for name, entry in content["stacks"].items()
    }


def _check(content: Any) -> None:
    """Raises ValueError, naming the key, for what is no list of stacks."""
    _has_shape(
        "", content, {"default": _TEXT, "date": _DAY, "venv_python": _TEXT, "base": _BASE, "stacks": {}}
    )
    for name, entry in content["stacks"].items():
        _has_shape(f"stacks {name} ", entry, _ENTRY)
    if content["default"] not in content["stacks"]:
        raise ValueError(f"default is {content['default']!r}: give one of {', '.join(content['stacks'])}")


def _check_names(listed: list[Any], read: list[str]) -> None:
    """Raises ValueError where `names` reads other stacks than these."""
    for name in listed:
        if name not in read:
            raise ValueError(
                f"stacks {name!r} cannot be read as a name: give a line `  NAME:` with two blanks and no "
                "quotes, NAME no number, below a line `stacks:` without more"
            )


_TEXT, _TEXTS, _DAY, _MEGABYTES = "text in quotes", "a list of texts", "a day, YYYY-MM-DD", "megabytes"
_BASE: Final = {"suite": _TEXT, "python": _TEXT, "packages": _TEXTS}
_ENTRY: Final = {
    **dict.fromkeys(("torch", "torchvision", "cuda", "cudnn", "nccl", "driver"), _TEXT),
    **dict.fromkeys(("compute_capability", "architectures"), _TEXTS),
    "megabytes": dict.fromkeys(("download", "work", "image"), _MEGABYTES),
}


def _has_shape(where: str, value: Any, shape: Any) -> None:
    """Raises ValueError. `shape`: what to give, or that of each key; {}: any keys."""
    if not isinstance(shape, dict):
        if not _is(shape, value):
            raise ValueError(f"{where.strip()} is {value!r}: give {shape}")
        return
    if not isinstance(value, dict):
        raise ValueError(f"{where.strip() or 'it'} is no mapping: give keys with values")
    for key in value:
        if shape and key not in shape:
            raise ValueError(f"{where}{key} is no key: give {', '.join(shape)}")
    for key, inner in shape.items():
        if key not in value:
            raise ValueError(
                f"{where}{key} is missing: give {inner if isinstance(inner, str) else 'its keys'}"
            )
        _has_shape(f"{where}{key} ", value[key], inner)


def _is(what: str, value: Any) -> bool:
    if what == _TEXTS:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if what == _DAY:
        return re.fullmatch(r"\d{4}-\d\d-\d\d", str(value)) is not None
    if what == _MEGABYTES:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str)


def names(file: Path = FILE) -> list[str]:
    """Of all stacks, in the file's order, without the package that reads the rest."""
    _, _, listed = file.read_text(encoding="utf-8").partition("\nstacks:\n")
    return re.findall(r"^  ([\w.-]+):", listed, re.MULTILINE)


def check_name(name: str) -> None:
    """Raises BadInput for one that no stack has."""
    if name and name not in names():
        raise BuildRefused(
            "stack-unknown", f"STACK={name}: there is no such stack: give one of {', '.join(names())}"
        )


def check_extra(extra: Path) -> None:
    """Raises BuildRefused before anything is fetched."""
    if not stat.S_ISREG(files.mode_at(extra)):
        raise BuildRefused("extra-missing", f"EXTRA={extra}: there is no such file: give a requirements file")
    try:
        extra.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8"
        raise BuildRefused(
            "extra-unreadable", f"EXTRA={extra} cannot be read ({why}): give a text file that you may read"
        ) from None


def check_target(given: str) -> None:
    """Raises BuildRefused for an IMAGE that a build could not write, or not its description beside it."""
    if not given:
        return
    is_directory = stat.S_ISDIR(files.mode_at(given))
    if is_directory or Path(given).suffix != ".sif":
        found = "it is a directory" if is_directory else "its name does not end with .sif"
        raise BuildRefused("image-target", f"IMAGE={given}: {found}: give the file to build, NAME.sif")


def find(name: str) -> Stack:
    """The stack of this name, or the default for ''."""
    check_name(name)
    stacks = read()
    return stacks[name] if name else next(stack for stack in stacks.values() if stack.is_default)


def choose(name: str, driver: str, machine: str) -> Stack:
    """The stack of this name; for '' the default, or if that does not fit this driver and processor, the
    newest that does. Raises BuildRefused if none fits. '' as the driver or processor: unknown."""
    if name:
        return find(name)
    fitting = [stack for stack in read().values() if stack.fits(driver, machine)]
    if not fitting:
        needed = ", ".join(
            f"{stack.name} needs {stack.driver}" for stack in read().values() if stack.fits("", machine)
        )
        raise BuildRefused(
            "stack-none-fits",
            f"no stack has CUDA builds for {machine} and NVIDIA driver {driver} ({needed}): "
            f"have the driver updated, {OTHER_ROAD}, one of NVIDIA's own for this driver",
        )
    return max(fitting, key=lambda stack: (stack.is_default, _numbers(stack.cuda)))


def of_site(name: str, driver: str, machine: str) -> str:
    """The name of the stack whose image the jobs of a site take. If none fits its driver, which
    `apptrain submit` says, the default: a job may have an image of its own. ImportError: it depends on the
    driver or the processor, and there is no PyYAML."""
    known = names()
    if not name and (driver or machine):
        try:
            return choose("", driver, machine).name
        except BuildRefused:
            pass
    return name if name in known else known[0]


def others(stack: Stack, architecture: str) -> dict[str, dict[str, Any]]:
    """What an image says of the stacks that could be built in its place, on such a processor."""
    every = read().values()
    return {
        one.name: one.facts() for one in every if one.name != stack.name and architecture in one.architectures
    }


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
