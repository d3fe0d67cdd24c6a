"""Checkpoints: directories that are complete or not there, and that cannot execute code when loaded.

The secret: the layout. CHECKPOINTS/step-00000040/ holds model.safetensors, optimizer.safetensors and
state.json; complete.json, written last, lists the SHA-256 of each. Nothing else in it is ever opened.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from train.files import make_directory, sync_directory, write_bytes

SCHEMA_VERSION: Final = 1
MARKER: Final = "complete.json"
_FILES: Final = ("model.safetensors", "optimizer.safetensors", "state.json")
_NAME: Final = re.compile(r"step-(\d{8,})")


class Damaged(Exception):
    """A directory is no complete checkpoint; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state after a step."""

    step: int
    model: dict[str, Tensor]
    """Parameters and buffers by name."""
    optimizer: dict[str, Tensor]
    """The optimizer's state as PARAMETER/NAME."""
    state: dict[str, Any]
    """Plain JSON: position, config, identity, scaler."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint directory's name; None for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def save(directory: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint; when this returns it is on the disk under its final name.

    One of the same step that is there already is replaced.
    """
    make_directory(directory)
    for leftover in directory.glob(".step-*.tmp"):
        shutil.rmtree(leftover)
    final = directory / name_of(checkpoint.step)
    temporary = directory / f".{final.name}.{os.getpid()}.tmp"
    temporary.mkdir(mode=0o700)
    state = {"schema_version": SCHEMA_VERSION, "step": checkpoint.step, **checkpoint.state}
    contents = (
        safetensors.torch.save(_plain(checkpoint.model)),
        safetensors.torch.save(_plain(checkpoint.optimizer)),
        json.dumps(state, indent=2, allow_nan=False).encode(),
    )
    digests = {}
    for name, content in zip(_FILES, contents, strict=True):
        write_bytes(temporary / name, content)
        digests[name] = hashlib.sha256(content).hexdigest()
    write_bytes(temporary / MARKER, json.dumps({"sha256": digests}, indent=2).encode())
    sync_directory(temporary)
    if final.exists():
        old = directory / f".{final.name}.old.tmp"
        final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old)
    else:
        temporary.rename(final)
    sync_directory(directory)
    return final


def load(path: Path) -> Checkpoint:
    """Read and verify a checkpoint. Raises Damaged where it is not complete or not as it was written."""
    marker = _json(_read(path / MARKER), MARKER)
    digests = marker.get("sha256") if isinstance(marker, dict) else None
    if not isinstance(digests, dict):
        raise Damaged(f"{MARKER} lists no digests")
    contents = {}
    for name in _FILES:
        contents[name] = _read(path / name)
        if hashlib.sha256(contents[name]).hexdigest() != digests.get(name):
            raise Damaged(f"{name} is not as it was written")
    state = _json(contents["state.json"], "state.json")
    if not isinstance(state, dict) or state.get("schema_version") != SCHEMA_VERSION:
        raise Damaged(f"state.json has no schema_version {SCHEMA_VERSION}")
    try:
        model, optimizer = (safetensors.torch.load(contents[name]) for name in _FILES[:2])
    except SafetensorError as error:
        raise Damaged(f"no safetensors: {error}") from None
    return Checkpoint(step=state["step"], model=model, optimizer=optimizer, state=state)


def newest_first(directory: Path) -> Iterator[Path]:
    """The checkpoint directories, complete or not, the highest step first."""
    if directory.is_dir():
        steps = [(step, path) for path in directory.iterdir() if (step := step_of(path)) is not None]
        for _, path in sorted(steps, reverse=True):
            yield path


def prune(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints; 0 keeps all."""
    for path in list(newest_first(directory))[keep:] if keep else ():
        # Renamed first, so that a half-deleted one is not taken for a checkpoint.
        doomed = path.with_name(f".{path.name}.old.tmp")
        path.rename(doomed)
        shutil.rmtree(doomed)


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in row-major order with memory of their own: safetensors refuses shared and other layouts."""
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None


def _json(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        raise Damaged(f"{name} is not JSON") from None
