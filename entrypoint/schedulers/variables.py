"""Reads a variable of a scheduler, or refuses it with its name and value. Each scheduler's module uses it;
`text` and `number` are where to begin.

A missing, an empty and a malformed variable are three different mistakes, and are told apart. It names no
scheduler's variable, only CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from entrypoint.core.errors import BadInput

CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"\d{1,9}|(?:GPU|MIG)-[0-9A-Za-z/-]+", re.ASCII)
_NO_DEVICE = ("-1", "NoDevFiles")


def shown(name: str, value: str) -> str:
    """`NAME=value` on one line, the middle of a long value left out."""
    if not value.isprintable():
        value = repr(value)
    return f"{name}={value}" if len(value) <= 120 else f"{name}={value[:80]}...{value[-30:]}"


def text(env: Mapping[str, str], name: str, remedy: str, where: str = "") -> str:
    """The value of a variable that must be there; `where` goes on from "is not set"."""
    value = env.get(name)
    if value is None:
        raise BadInput("variable-not-set", f"{name} is not set{where}: {remedy}")
    if not value.strip():
        raise BadInput("variable-empty", f"{name} is empty{where}: {remedy}")
    return value


def number(env: Mapping[str, str], name: str, remedy: str, where: str = "") -> int:
    """The same for a whole number from 0."""
    return whole(text(env, name, remedy, where), name, remedy)


def optional_number(env: Mapping[str, str], name: str, remedy: str) -> int | None:
    """None where the variable is not set; empty and malformed are refused."""
    return None if name not in env else number(env, name, remedy)


def whole(value: str, name: str, remedy: str) -> int:
    """`value` as a whole number from 0."""
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise BadInput("variable-not-whole", f"{shown(name, value)} is not a whole number: {remedy}")
    return int(value)


def visible_devices(env: Mapping[str, str]) -> int | None:
    """How many devices CUDA_VISIBLE_DEVICES names (numbers, GPU-UUID or MIG-UUID); None: it is not set."""
    names = devices(env)
    return None if names is None else len(names)


def visible_slices(env: Mapping[str, str]) -> int:
    """How many of them are slices of GPUs (MIG): of several, CUDA shows a process the first one alone."""
    return sum(name.startswith("MIG-") for name in devices(env) or ())


def devices(env: Mapping[str, str]) -> list[str] | None:
    """Those that CUDA_VISIBLE_DEVICES names, as CUDA reads it: nothing behind -1 counts. None: it is not set.
    Raises BadInput."""
    value = env.get(CUDA_DEVICES)
    if value is None:
        return None
    names: list[str] = []
    for name in (item.strip() for item in value.split(",") if value.strip()):
        if name in _NO_DEVICE:
            break
        if not _DEVICE.fullmatch(name):
            raise BadInput(
                "device-malformed",
                f"{shown(CUDA_DEVICES, value)}: {name!r} is no device: "
                "give numbers or UUIDs between commas, or unset it",
            )
        if name in names:
            raise BadInput(
                "device-twice",
                f"{shown(CUDA_DEVICES, value)}: device {name} twice: give each once, or unset it",
            )
        names.append(name)
    return names
