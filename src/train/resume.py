"""Decides where a run begins: anew, or at a checkpoint, and what may differ from the run that wrote it.
`find_start` has the rules of `--resume`, `check_same` compares.

Only rank 0 looks at the run directory; it tells the others (`share`).
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from entrypoint.core import files
from entrypoint.record import tokens
from train import checkpoint, datasets, metrics
from train.checkpoint import Checkpoint
from train.config import FREE_ON_RESUME, SAID_ON_RESUME, Config, changed, flatten
from train.distributed import World
from train.files import make_directory, replace_json
from train.learner import Learner
from train.saver import CHECKPOINTS
from train.status import TrainingRefused
from train.stop import StopRequest
from train.trouble import reason_of

Result = TypeVar("Result")
Say = Callable[[str], None]
FIRST: Final = "first-attempt"
"""The launcher's: the attempt with which somebody started the run last."""
TOLD: Final = "config.json"
MOST: Final = 1 << 20
"""Bytes of what earlier attempts have said that are read."""
WAITS_S: Final = (1, 2, 4, 8, 15, 30)
"""Pauses between the tries to read: a minute in all, in which another server of NFS or Lustre takes over."""


class StoppedWaiting(Exception):
    """A planned end was asked for while a checkpoint could not be read."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """What rank 0 found."""

    path: Path
    checkpoint: Checkpoint


def goes_on(run_dir: Path, attempt: int) -> bool:
    """Whether this attempt goes on by itself with a run that has begun: since somebody started the run, an
    earlier attempt has come to `tell`. It has obeyed `--resume`; if this one did too, a job would begin anew
    with each requeue or restart."""
    try:
        first = int(files.read_text(run_dir / FIRST, MOST))
        begun = int(files.read_json(run_dir / TOLD, MOST)["attempt"])
        # Launches by hand all begin with attempt 0.
        is_of_before = (run_dir / TOLD).stat().st_mtime_ns < (run_dir / FIRST).stat().st_mtime_ns
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return first <= begun < attempt and not is_of_before


class Patience:
    """Tries again what a file system refuses now and may give soon: the next best checkpoint costs the work
    since then."""

    def __init__(self, say: Say, request: StopRequest) -> None:
        self._say, self._request = say, request
        self._waits = list(WAITS_S)
        """Those that are left, for all that is tried."""

    def until_it_works(self, path: Path, action: Callable[[Path], Result]) -> Result:
        """What `action` makes of the path. Raises its error where no wait will help, or none is left, and
        StoppedWaiting."""
        while True:
            try:
                return action(path)
            except (OSError, checkpoint.Unreadable) as error:
                if isinstance(error, (PermissionError, checkpoint.Forbidden)) or not self._waits:
                    raise
                seconds = self._waits.pop(0)
                self._say(f"WARNING: {path}: {reason_of(error)}: trying again in {seconds} s")
            self._wait(seconds)

    def _wait(self, seconds: int) -> None:
        for _ in range(seconds):
            if self._request.planned:
                raise StoppedWaiting
            time.sleep(1)


def find_start(
    run_dir: Path, resume: str, say: Say, request: StopRequest, *, goes_on: bool
) -> ResumePoint | None:
    """Choose the checkpoint to begin from; None: begin anew.

    `auto`: the run directory's newest complete one, if any. `never`: none. A directory: that checkpoint,
    or the newest in it; but one outside the run directory only serves to begin with. A run that goes on by
    itself takes its own newest before all of these. Raises TrainingRefused where a given directory holds no
    complete checkpoint, and StoppedWaiting.
    """
    if resume == "never" and not goes_on:
        return None
    own = run_dir / CHECKPOINTS
    with suppress(OSError):  # A directory that cannot be written can still be read.
        checkpoint.clear_up(own)
    given = Path(resume) if resume not in ("auto", "never") else None
    start, patience = None, Patience(say, request)
    if given is None or goes_on or not _is_own(given, run_dir):
        start = _newest(own, say, patience)
    if start is None and given is not None:
        start = _given(given, say, patience)
    return start


def batch_size(start: ResumePoint | None, config: Config, world: World, *, is_given: bool) -> int:
    """The batch to train with: the checkpoint's where nobody gave one, as the one that this program chose
    depends on the number of ranks. Raises TrainingRefused where these ranks cannot share it."""
    saved = start.checkpoint.state["config"].get("batch_size") if start else None
    if is_given or type(saved) is not int:
        return config.batch_size
    parts = world.size * config.accumulation
    if saved % parts:
        raise TrainingRefused(
            "resume-batch-size",
            f"batch_size is {saved} in the checkpoint, no multiple of {world.size} ranks x accumulation "
            f"{config.accumulation} = {parts}: start a number of ranks that divides it, or give another run "
            "directory, or --resume never",
        )
    return saved


def clear_way(run_dir: Path, resume: str, start: ResumePoint | None, say: Say, *, goes_on: bool) -> None:
    """Move the checkpoints that do not lead to the start, whole or damaged, to RUN/previous-N/: those beyond
    it, and all where the start is none of them. A later attempt would take the newest for its own."""
    own = run_dir / CHECKPOINTS
    try:
        if resume == "never" and not goes_on:
            saved = checkpoint.newest_first(own) if own.is_symlink() else [own]
            _set_aside(run_dir, [*saved, run_dir / metrics.NAME, run_dir / "tensorboard"], say)
            return
        step = start.checkpoint.step if start and _is_in_checkpoints(start.path, run_dir) else -1
        beyond = [path for path in checkpoint.newest_first(own) if (checkpoint.step_of(path) or 0) > step]
        _set_aside(run_dir, beyond, say)
    except OSError as error:
        if resume != "auto":
            raise TrainingRefused(
                "resume-not-clear",
                f"--resume {resume}: what is in {own} cannot be moved out of the way: {error.strerror}: "
                "give another run directory",
            ) from None
        # All that stands in the way is damaged, and will be skipped the next time too.
        say(f"damaged checkpoints stay in {own}: {error.strerror}")


def check_same(
    before: Mapping[str, Any],
    config: Config,
    data: Mapping[str, Any],
    world: World,
    total_steps: int,
    say: Say,
) -> None:
    """Compare with the run that wrote the checkpoint. `data`: the fingerprint of its source. Says what may
    differ; raises TrainingRefused for the rest."""
    differences = changed(before["config"], config)
    refused = {
        key: values for key, values in differences.items() if key not in FREE_ON_RESUME | SAID_ON_RESUME
    }
    if refused:
        told = ", ".join(f"{key} ({was} -> {now})" for key, (was, now) in refused.items())
        raise TrainingRefused(
            "resume-other-config",
            f"the checkpoint of step {before['step']} was made with another config: {told}: "
            "give the same, or another run directory, or --resume never",
        )
    other = before.get("data")  # a checkpoint of an older version has none
    if isinstance(other, dict) and (told := datasets.difference(other, data)):
        raise TrainingRefused(
            "resume-other-data",
            f"the checkpoint of step {before['step']} was made with other training images ({told}): "
            "their order or labels would change: give the same images (data.path=DIR), or another run "
            "directory, or --resume never",
        )
    if total_steps < before["step"]:
        raise TrainingRefused(
            "resume-too-few-steps",
            f"the checkpoint has {before['step']} steps, the config {total_steps}: "
            "give more steps, or --resume never",
        )
    for key, (was, now) in differences.items():
        if key in SAID_ON_RESUME:
            say(f"{key} was {was}, is {now}: going on, not bit for bit")
    for key, now in identity(world).items():
        was = before["identity"].get(key)
        if was != now:
            say(f"{key} was {was}, is {now}: going on with the same order of samples, not bit for bit")


def identity(world: World) -> dict[str, Any]:
    """What the bits of a run depend on besides its config."""
    cuda = world.device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "world_size": world.size,
        "device": world.device.type,
        "processor": torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def tell(
    run_dir: Path, name: str, config: Config, world: World, start: ResumePoint | None, attempt: int
) -> None:
    """Write config.json: what this attempt does, for those who compare runs, and no secret. A disk that does
    not take it ends no run."""
    said = {
        "attempt": attempt,
        "name": name,
        "config": flatten(config),
        "identity": identity(world),
        "checkpoint": start and {"path": str(start.path), "step": start.checkpoint.step},
    }
    with suppress(OSError):
        replace_json(run_dir / TOLD, tokens.hide_values(said, os.environ))


def pedigree(start: ResumePoint | None, run_dir: Path) -> dict[str, Any]:
    """Which run this is: an id for all of its attempts, and the run that its first checkpoint is from."""
    before = start.checkpoint.state.get("run") if start else None
    is_own = start and _is_own(start.path, run_dir) and not _is_of_another(start.path, run_dir)
    if is_own and isinstance(before, dict):
        return dict(before)
    parent = {"run": before, "step": start.checkpoint.step} if start else None
    return {"id": uuid.uuid4().hex, "parent": parent}


def state_of(
    learner: Learner,
    config: Config,
    data: Mapping[str, Any],
    world: World,
    run: Mapping[str, Any],
    lr: float,
) -> Checkpoint:
    """All that a later run needs to go on from here. `data`: the fingerprint of its source.

    The learning rate and the random numbers are functions of the step, so they need no state; `schedule`
    and `rng` say what they are functions of, for those who read.
    """
    return Checkpoint(
        step=learner.step,
        model=learner.weights(),
        optimizer=learner.optimizer_tensors(),
        state={
            "position": learner.position,
            "run": dict(run),
            "config": flatten(config),
            "data": dict(data),
            "identity": identity(world),
            "scaler": learner.scaler_state(),
            "schedule": {"lr": lr},
            "rng": {"seed": config.seed, "step": learner.step},
        },
    )


def share(start: ResumePoint | None, learner: Learner, world: World) -> None:
    """Give every rank's learner the state that rank 0 has found."""
    found = start.checkpoint if start else None
    header = world.broadcast_json(
        found
        and {
            "step": found.step,
            "position": found.state["position"],
            "scaler": found.state["scaler"],
            "optimizer": [
                [name, list(value.shape), str(value.dtype)] for name, value in found.optimizer.items()
            ],
        }
    )
    if header is None:
        return
    weights = found.model if found else learner.weights()
    if found:
        optimizer = {name: value.to(world.device) for name, value in found.optimizer.items()}
    else:
        optimizer = {
            name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=world.device)
            for name, shape, dtype in header["optimizer"]
        }
    world.broadcast(list(optimizer.values()))
    # The weights of the other ranks follow when the learner starts.
    learner.load(
        step=header["step"],
        position=header["position"],
        weights=weights,
        optimizer=optimizer,
        scaler=header["scaler"],
    )


def loss(run_dir: Path, start: ResumePoint | None) -> float | None:
    """Of the start's step, as far as the metrics have it."""
    if start is None:
        return None
    try:
        return metrics.read(run_dir / metrics.NAME).loss.get(start.checkpoint.step)
    except OSError:
        return None


def scores(run_dir: Path, start: ResumePoint | None) -> dict[int, float]:
    """The accuracies of the steps up to the start, as far as the metrics have them."""
    if start is None:
        return {}
    try:
        accuracy = metrics.read(run_dir / metrics.NAME).accuracy
    except OSError:
        return {}
    return {step: value for step, value in accuracy.items() if step <= start.checkpoint.step}


def _newest(directory: Path, say: Say, patience: Patience) -> ResumePoint | None:
    try:
        paths = patience.until_it_works(directory, lambda path: list(checkpoint.newest_first(path)))
    except OSError as error:
        raise TrainingRefused(
            "checkpoints-unreadable",
            f"{directory} cannot be read: {error.strerror}: give another run directory",
        ) from None
    unreadable: checkpoint.Unreadable | None = None
    for path in paths:
        try:
            return _loaded(path, patience)
        except checkpoint.Damaged as damage:
            say(f"WARNING: skipped {path}: {damage}")
            if isinstance(damage, checkpoint.Unreadable):
                unreadable = damage
    if unreadable:  # nothing says that they are not whole
        raise TrainingRefused(
            "checkpoints-not-read",
            f"no checkpoint in {directory} can be read ({unreadable}): start it again once the file system "
            "answers, or give another run directory",
        )
    return None


def _given(given: Path, say: Say, patience: Patience) -> ResumePoint:
    if checkpoint.step_of(given) is not None:
        try:
            return _loaded(given, patience)
        except checkpoint.Damaged as damage:
            raise TrainingRefused(
                "resume-damaged", f"--resume {given}: {damage}: give a complete checkpoint"
            ) from None
    for directory in (given / "checkpoints", given):
        start = _newest(directory, say, patience)
        if start:
            return start
    raise TrainingRefused(
        "resume-none",
        f"--resume {given}: no complete checkpoint there: give a step-... directory, or its parent",
    )


def _loaded(path: Path, patience: Patience) -> ResumePoint:
    return ResumePoint(path=path, checkpoint=patience.until_it_works(path, checkpoint.load))


def _is_own(path: Path, run_dir: Path) -> bool:
    """Whether a path is of this run: in its directory, or in its checkpoints, wherever they are."""
    homes = run_dir.resolve(), (run_dir / CHECKPOINTS).resolve()
    return any(map(path.resolve().is_relative_to, homes)) or _is_in_checkpoints(path, run_dir)


def _is_of_another(path: Path, run_dir: Path) -> bool:
    """Whether it leads into the checkpoints of another run: a new run may begin with a link to such a one."""
    home = path.resolve().parent
    is_there = home.name == CHECKPOINTS and (home.parent / TOLD).is_file()
    return is_there and home != (run_dir / CHECKPOINTS).resolve()


def _is_in_checkpoints(path: Path, run_dir: Path) -> bool:
    """Whether it is a checkpoint of this run. It may be a link there, or be given by one, and its directory
    may be a link."""
    return (run_dir / CHECKPOINTS).resolve() in (path.parent.resolve(), path.resolve().parent)


def _set_aside(run_dir: Path, paths: list[Path], say: Say) -> None:
    """Move what exists of these to the first free RUN/previous-N/.

    Checkpoints in a `checkpoints/` that is a link stay on its file system, in previous-N/ there:
    RUN/previous-N/checkpoints becomes a link to that.
    """
    present = [path for path in paths if os.path.lexists(path)]
    if not present:
        return
    own, number = run_dir / CHECKPOINTS, 1
    while any(os.path.lexists(place / f"previous-{number}") for place in (run_dir, own)):
        number += 1
    target = run_dir / f"previous-{number}"
    make_directory(target)
    places = {own: target, run_dir: target}
    if own.is_symlink() and any(path.parent == own for path in present):
        make_directory(own / target.name)
        places[own] = target / CHECKPOINTS
        places[own].symlink_to(own.resolve() / target.name)
    for path in present:
        path.rename(places[path.parent] / path.name)
    for place in dict.fromkeys(places.values()):
        names = [path.name for path in present if places[path.parent] == place]
        if names:
            say(f"moved {', '.join(names)} to {place}")
