"""Saves, loads and removes checkpoints: directories that are complete or not there, and that cannot execute
code when loaded. `save` and `load` are the entries.

CHECKPOINTS/step-00000040/ holds model.safetensors, optimizer.safetensors and state.json. complete.json,
written last, lists the SHA-256 and the size of each. Nothing else in it is ever opened. What is being
written, replaced or deleted has a name with a leading dot.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from entrypoint.core import files
from train.files import is_left_behind, make_directory, private, sync_directory, temporary, write_bytes
from train.staging import Buffer

SCHEMA_VERSION: Final = 1
MARKER: Final = "complete.json"
_FILES: Final = ("model.safetensors", "optimizer.safetensors", "state.json")
_NAME: Final = re.compile(r"step-(\d{8,})")
_REPLACED: Final = re.compile(r"\.(step-\d{8,})\.replaced\..+\.tmp")
_REHEARSAL: Final = "rehearsal"


class Damaged(Exception):
    """A directory is no complete checkpoint; the text says why."""


class Unreadable(Damaged):
    """The file system did not give it: it may be whole."""


class Forbidden(Unreadable):
    """This user may not read it, which no wait will change."""


class NotWorthKeeping(Exception):
    """A state is not worth keeping; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state after a step."""

    step: int
    model: Mapping[str, Tensor]
    """Parameters and buffers by name."""
    optimizer: Mapping[str, Tensor]
    """The optimizer's state as PARAMETER/NAME."""
    state: dict[str, Any]
    """Plain JSON: position, config, identity, scaler, and what else the writer wants to read again."""


class Draft:
    """A state copied to memory that is kept for the next one, so that training may go on changing it."""

    def __init__(self) -> None:
        self._model, self._optimizer = Buffer(), Buffer()
        self._state: dict[str, Any] = {}
        self.step = 0
        self.size = 0
        """Bytes that the last `write` wrote."""
        self.progress = 0
        """Bytes of tensors written so far, in all."""

    def take(self, checkpoint: Checkpoint) -> None:
        """Copy the tensors; `checkpoint.state` itself is kept."""
        self._model.take(checkpoint.model)
        self._optimizer.take(checkpoint.optimizer)
        self._state = {"schema_version": SCHEMA_VERSION, "step": checkpoint.step, **checkpoint.state}
        self.step = checkpoint.step

    def check(self) -> None:
        """Raise Unfit where the model is lost: training from such a state fails at once."""
        name = self._model.not_finite()
        if name is not None:
            raise NotWorthKeeping(f"{name} is not finite")

    def write(self, directory: Path, before_commit: Callable[[], None] = lambda: None) -> Path:
        """Write what was taken; when this returns it is on the disk under its final name.

        One of the same step that is there already is replaced. `before_commit` runs when all files are on
        the disk and the name is not given yet. Raises OSError; then nothing has changed.
        """
        make_directory(directory)
        clear_up(directory)
        final = directory / name_of(self.step)
        partial = temporary(final)
        try:
            self._fill(partial)
            before_commit()
            _put_in_place(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    def _fill(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        state = json.dumps(self._state, indent=2, allow_nan=False).encode()
        contents = (self._counted(self._model.chunks()), self._counted(self._optimizer.chunks()), [state])
        written = {
            name: _write(folder / name, content) for name, content in zip(_FILES, contents, strict=True)
        }
        marker = {
            "sha256": {name: digest for name, (digest, _) in written.items()},
            "bytes": {name: size for name, (_, size) in written.items()},
        }
        write_bytes(folder / MARKER, json.dumps(marker, indent=2).encode())
        sync_directory(folder)
        self.size = sum(size for _, size in written.values())

    def _counted(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk
            self.progress += len(chunk)


def save(directory: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint at once; see `Draft.write`."""
    draft = Draft()
    draft.take(checkpoint)
    return draft.write(directory)


def load(path: Path) -> Checkpoint:
    """Read and verify a checkpoint. Raises Damaged where it is not complete or not as it was written."""
    digests = _marked(path)["sha256"]
    contents = {}
    for name in _FILES:
        contents[name] = _read(path / name)
        if hashlib.sha256(contents[name]).hexdigest() != digests.get(name):
            raise Damaged(f"{name} is not as it was written")
    state = _checked_state(_json(contents["state.json"], "state.json"), path)
    try:
        model, optimizer = (safetensors.torch.load(contents[name]) for name in _FILES[:2])
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise Damaged(f"no safetensors: {error}") from None
    return Checkpoint(step=state["step"], model=model, optimizer=optimizer, state=state)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint directory's name; None for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def newest_first(directory: Path) -> Iterator[Path]:
    """The checkpoint directories, complete or not, the highest step first."""
    if directory.is_dir():
        steps = [(step, path) for path in directory.iterdir() if (step := step_of(path)) is not None]
        for _, path in sorted(steps, reverse=True):
            yield path


def newest_whole(directory: Path) -> int | None:
    """The step of the newest checkpoint by its looks, without reading it; None: there is none to be seen."""
    try:
        return next((step_of(path) for path in newest_first(directory) if _looks_whole(path)), None)
    except OSError:
        return None


def prune(directory: Path, keep: int, scores: Mapping[int, float] | None = None) -> None:
    """Delete all but the newest `keep` checkpoints and the one with the highest score; 0 keeps all.

    Of equal scores the later step counts. What does not look whole is not counted: a damaged checkpoint must
    not push out a good one. It is deleted once it is older than the newest `keep`.
    """
    every = list(newest_first(directory))
    whole = [path for path in every if _looks_whole(path)]
    if not keep or len(whole) < keep:
        return
    best = max(
        (path for path in whole if step_of(path) in (scores or {})),
        key=lambda path: ((scores or {})[step_of(path) or 0], step_of(path)),
        default=None,
    )
    for path in every[every.index(whole[keep - 1]) + 1 :]:
        if path != best:
            # Renamed first, so that a half-deleted one is not taken for a checkpoint.
            doomed = temporary(path, "deleted")
            try:
                path.rename(doomed)
            except FileNotFoundError:  # somebody else removes it at the same time
                continue
            _remove(doomed)


def clear_up(directory: Path) -> None:
    """Remove what a process that died has left, and give back the name of what it was about to replace.

    What another process is about to write, or may be, is left alone.
    """
    for leftover in filter(is_left_behind, directory.glob(".*.tmp")):
        replaced = _REPLACED.fullmatch(leftover.name)
        if replaced and not (directory / replaced[1]).exists():
            leftover.rename(directory / replaced[1])
        else:
            _remove(leftover, ignore_errors=True)


def rehearse(directory: Path) -> None:
    """Go through the motions of a save with nothing to save. Raises OSError where one would fail."""
    make_directory(directory)
    clear_up(directory)
    partial, final = temporary(directory / _REHEARSAL), temporary(directory / _REHEARSAL, "final")
    partial.mkdir(mode=0o700)
    try:
        _write(partial / _FILES[0], [bytes(8)])
        _put_in_place(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)


def _put_in_place(partial: Path, final: Path) -> None:
    replaced = temporary(final, "replaced")
    if not os.path.lexists(final):
        partial.rename(final)
    else:
        final.rename(replaced)
        try:
            partial.rename(final)
        except OSError:
            replaced.rename(final)
            raise
        _remove(replaced, ignore_errors=True)
    sync_directory(final.parent)


def _remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Delete a directory. Of a link the link alone: what it leads to may be another run's."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)


def _write(path: Path, content: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write a new file and bring it to the disk. Returns its SHA-256 and size."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", opener=private) as file:
        for chunk in content:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), size


def _marked(path: Path) -> dict[str, dict[str, Any]]:
    marker = _json(_read(path / MARKER), MARKER)
    if not isinstance(marker, dict) or not isinstance(marker.get("sha256"), dict):
        raise Damaged(f"{MARKER} lists no digests")
    return marker


def _looks_whole(path: Path) -> bool:
    try:
        sizes = _marked(path).get("bytes", {})
        return all((path / name).stat().st_size == sizes.get(name) for name in _FILES)
    except (Damaged, OSError, AttributeError):
        return False


def _checked_state(state: Any, path: Path) -> dict[str, Any]:
    if not isinstance(state, dict) or state.get("schema_version") != SCHEMA_VERSION:
        raise Damaged(f"state.json has no schema_version {SCHEMA_VERSION}")
    kinds = {"step": int, "position": int, "config": dict, "identity": dict, "scaler": dict}
    for key, kind in kinds.items():
        if type(state.get(key)) is not kind:
            raise Damaged(f"state.json has no {key}")
    if step_of(path) not in (None, state["step"]):
        raise Damaged(f"state.json is of step {state['step']}")
    return state


def _read(path: Path) -> bytes:
    try:
        return files.read(path, path.stat().st_size)
    except files.Unfit as error:
        raise Damaged(f"{path.name}: {error}") from None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None
    except PermissionError as error:
        raise Forbidden(f"{path.name}: {error.strerror}") from None
    except OSError as error:
        raise Unreadable(f"{path.name}: {error.strerror}") from None


def _json(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise Damaged(f"{name} is not JSON") from None
