"""Reads the config of a run, strictly: YAML plus `key=value` overrides. `load` is the entry; the dataclasses
say each key's type, bounds and meaning, and whether a resumed run may change it.

Nothing here imports torch, so a mistake costs no time.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from entrypoint.core import spelling, strict_yaml
from entrypoint.core.files import Unfit, is_regular
from train.status import TrainingRefused

SHIPPED: Final = Path(__file__).parent / "configs"
_INT: Final = re.compile(r"-?[0-9]+(_[0-9]+)*")


@dataclass(frozen=True)
class ModelOptions:
    name: str = "resnet18"
    """Any classification model of torchvision by its name there, trained from scratch."""


@dataclass(frozen=True)
class Data:
    name: Literal["digits", "cifar10", "imagefolder", "synthetic"] = "digits"
    """`digits` comes with the program, `synthetic` is made on the device, the others are on disk."""
    path: str = ""
    """Folder of cifar10 (cifar-10-batches-bin or -py) or imagefolder (train/, val/); empty for the others."""
    image_size: int = 0
    """Height and width in pixels that the model sees; 0: the data set's own (imagefolder: 224)."""
    augment: bool = True
    """Vary the training images: shift, turn, scale and shear digits; crop and flip the others."""
    strength: float = 1.0
    """How far digits are varied; 1: up to 12 degrees, a tenth in size, in shear and in place."""
    folds: int = 0
    """Cut the training images into this many consecutive blocks, set one aside and evaluate on it instead
    of the test images; 0: no. For choosing settings; digits and cifar10 only."""
    fold: int = 0
    """The block that is set aside: 0 to folds - 1."""
    workers: int = 4
    """Processes a rank that read imagefolder; 0: the rank itself. The other data sets are in memory."""
    classes: int = 1000
    """Number of classes of synthetic data."""
    samples: int = 1_281_167
    """Number of training images of synthetic data."""


@dataclass(frozen=True)
class Optimizer:
    name: Literal["sgd", "adamw"] = "sgd"
    """`sgd` with momentum, or `adamw`."""
    lr: float = 0.1
    """Learning rate at the end of the warm-up; afterwards it follows half a cosine to 0."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises in proportion to the step; 0: none."""
    momentum: float = 0.9
    """Momentum of sgd."""
    nesterov: bool = False
    """Nesterov's momentum for sgd."""
    weight_decay: float = 0.0
    """Applied to tensors of two or more dimensions, so not to biases and normalisation."""
    clip_norm: float = 0.0
    """Scale the gradients down to this norm, taken over all of them; 0: leave them."""


@dataclass(frozen=True)
class Evaluate:
    every: int = 0
    """Steps between evaluations; 0: only at the end."""
    split: Literal["test", "train"] = "test"
    """What the evaluations before the last one run on: the test images, or as many of the first training
    images (unvaried), so that nobody looks at the test images before the end."""
    batch_size: int = 64
    """Images per rank and batch. Batches are the same for every number of ranks."""


@dataclass(frozen=True)
class CheckpointOptions:
    every: int = 0
    """Steps between checkpoints; 0: none by steps. There is always one at the end and at a planned end."""
    minutes: float = 10.0
    """Minutes after which one is written where none was written by steps; 0: none by time."""
    keep: int = 2
    """How many of the newest checkpoints stay; 0: all."""
    keep_best: bool = True
    """Keep the one with the highest accuracy too, of those whose step was evaluated."""
    background: bool = True
    """Go on training while a checkpoint is written; it takes the memory of a second copy of the state."""


@dataclass(frozen=True)
class Config:
    seed: int = 1
    """Start of everything random; 0 to 2**63-1."""
    epochs: int = 1
    """Times that every training image is seen; only used where `steps` is 0."""
    steps: int = 0
    """Optimizer steps; 0: as many as `epochs` takes, rounded up."""
    stop_at: int = 0
    """End after this step as at a planned end: save, exit 75; 0: never."""
    batch_size: int = 64
    """Images per step over all ranks; a multiple of ranks times `accumulation`."""
    accumulation: int = 1
    """Forward and backward passes per step on each rank: the memory of a smaller batch."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes; 0 to below 1."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the forward pass: fp32, or autocast to bf16 or fp16 (with loss scaling)."""
    channels_last: bool = False
    """Keep images and weights in NHWC order, which suits mixed precision on GPUs."""
    compile: bool = False
    """Compile the model with torch.compile."""
    deterministic: bool = True
    """Use deterministic kernels where there is a choice; false lets cuDNN pick the fastest by trial."""
    threads: int = 0
    """CPU threads of each rank, on which results on a CPU depend; 0: as OMP_NUM_THREADS says, else 1."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda where torch sees a GPU, else cpu."""
    run_dir: str = ""
    """Run directory where APPTRAIN_RUN_DIR is not set; empty: runs/NAME of the config here."""
    model: ModelOptions = field(default_factory=ModelOptions)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)


FREE_ON_RESUME: Final = frozenset(
    {
        "run_dir",
        "stop_at",
        "data.path",
        "data.workers",
        "evaluate.every",
        "evaluate.split",
        "evaluate.batch_size",
        "threads",
    }
    | {f"checkpoint.{item.name}" for item in fields(CheckpointOptions)}
)
"""Keys that change nothing about the weights that come out; of other threads the identity tells."""
SAID_ON_RESUME: Final = frozenset({"steps", "epochs", "accumulation", "device", "compile", "deterministic"})
"""Keys that a resumed run may change, and says so: the run goes on, though not bit for bit as before."""

MEANT: Final = {
    "learning_rate": "optimizer.lr",
    "lr_warmup": "optimizer.warmup_steps",
    "max_steps": "steps",
    "wd": "optimizer.weight_decay",
    "amp": "precision",
}
"""What other programs call it."""

_LEAST: Final[Mapping[str, float]] = {
    "seed": 0,
    "epochs": 1,
    "steps": 0,
    "stop_at": 0,
    "batch_size": 1,
    "accumulation": 1,
    "threads": 0,
    "label_smoothing": 0,
    "data.image_size": 0,
    "data.strength": 0,
    "data.folds": 0,
    "data.fold": 0,
    "data.workers": 0,
    "data.classes": 2,
    "data.samples": 1,
    "optimizer.lr": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.momentum": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_norm": 0,
    "evaluate.every": 0,
    "evaluate.batch_size": 1,
    "checkpoint.every": 0,
    "checkpoint.minutes": 0,
    "checkpoint.keep": 0,
}


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a shipped config's name or of a path. Raises TrainingRefused where there is none."""
    if name in shipped_names():
        return SHIPPED / f"{name}.yaml"
    if is_regular(Path(name)):
        return Path(name)
    near = spelling.near(name, shipped_names(), most=1)
    likely = f"did you mean {near[0]}? " if near else ""
    raise TrainingRefused(
        "config-missing",
        f"--config {name}: no such file or shipped config: {likely}give a path or one of "
        f"{_listed(shipped_names())}",
    )


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a config file and apply `key=value` overrides in order.

    Raises TrainingRefused for what is not YAML, an unknown key, a wrong type, or a value out of bounds.
    """
    try:
        content = strict_yaml.load(path)
    except OSError as error:
        raise TrainingRefused("config-unreadable", f"{path}: cannot be read: {error.strerror}") from None
    except Unfit as error:
        raise TrainingRefused("config-not-yaml", f"{path}: {error}") from None
    config: Config = _build(Config, {} if content is None else content, "", str(path))
    for override in overrides:
        config = _override(config, override)
    _check(config)
    return config


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys to values, sections opened, in the order of declaration."""
    flat: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        key = prefix + item.name
        flat.update(flatten(value, f"{key}.") if is_dataclass(value) else {key: value})
    return flat


def describe() -> Iterator[tuple[str, str, Any, str]]:
    """Each key with its type's name, its default and what its docstring says, for `--help`."""
    for cls, prefix in _sections(Config, ""):
        hints, defaults = get_type_hints(cls), cls()
        for name, doc in _field_docs(cls).items():
            yield prefix + name, _type_name(hints[name]), getattr(defaults, name), doc


def changed(before: Mapping[str, Any], now: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ from an earlier flattened config, with both values; None for an absent one."""
    after = flatten(now)
    return {
        key: (before.get(key), after.get(key))
        for key in [*after, *(key for key in before if key not in after)]
        if before.get(key) != after.get(key)
    }


def _build(cls: Any, content: object, prefix: str, origin: str) -> Any:
    if not isinstance(content, dict):
        raise TrainingRefused(
            "config-no-mapping",
            f"{origin}: {prefix.rstrip('.') or 'the file'} is {content!r}: give a mapping of keys",
        )
    hints = get_type_hints(cls)
    values = {}
    for name, value in content.items():
        if name not in hints:
            raise _unknown(f"{prefix}{name}", origin)
        key = f"{prefix}{name}"
        hint = hints[name]
        values[name] = (
            _build(hint, value, f"{key}.", origin) if is_dataclass(hint) else _typed(hint, value, key, origin)
        )
    return cls(**values)


def _override(config: Config, override: str) -> Config:
    key, equals, text = override.partition("=")
    if not equals:
        raise TrainingRefused("config-override", f"{override!r} is no override: write key=value")
    changed_config: Config = _replace(config, key.split("."), text, key)
    return changed_config


def _replace(section: Any, names: list[str], text: str, key: str) -> Any:
    hint = get_type_hints(type(section)).get(names[0])
    if hint is None or is_dataclass(hint) != (len(names) > 1):
        raise _unknown(key, "override")
    if is_dataclass(hint):
        value = _replace(getattr(section, names[0]), names[1:], text, key)
    else:
        value = _typed(hint, _parse(hint, text), key, "override")
    return replace(section, **{names[0]: value})


def _parse(hint: Any, text: str) -> object:
    """An override's text as the field's type where it can be, else the text, which `_typed` then refuses."""
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if hint is int and _INT.fullmatch(text) and len(text) <= strict_yaml.MOST_DIGITS:
        return int(text)
    return text


def _typed(hint: Any, value: object, key: str, origin: str) -> Any:
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise TrainingRefused(
            "config-choice", f"{origin}: {key} is {value!r}: give one of {_listed(get_args(hint))}"
        )
    if hint is float and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        # YAML 1.1 reads 1e-3, which has no point, as text.
        number = _finite(value)
        if number is not None:
            return number
    elif type(value) is hint:
        return value
    raise TrainingRefused(
        "config-type",
        f"{origin}: {key} is {_shown(value)} ({type(value).__name__}): "
        f"give a value of type {_type_name(hint)}",
    )


def _finite(value: float | str) -> float | None:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _check(config: Config) -> None:
    flat = flatten(config)
    for key, least in _LEAST.items():
        if flat[key] < least:
            raise TrainingRefused("config-too-small", f"{key} is {flat[key]}: give at least {least}")
    for key, value in flat.items():
        if isinstance(value, int) and value >= 2**63:
            raise TrainingRefused("config-too-large", f"{key} is {value}: give at most 2**63-1")
    if config.label_smoothing >= 1:
        raise TrainingRefused(
            "config-label-smoothing", f"label_smoothing is {config.label_smoothing}: give less than 1"
        )
    if config.optimizer.nesterov and not config.optimizer.momentum:
        raise TrainingRefused(
            "config-nesterov", "optimizer.nesterov is true with optimizer.momentum 0: give a momentum"
        )
    if config.data.folds and config.data.name not in ("digits", "cifar10"):
        raise TrainingRefused(
            "config-folds-data",
            f"data.folds is {config.data.folds} for {config.data.name}: only digits and cifar10 have them",
        )
    if config.data.folds == 1 or config.data.fold >= max(config.data.folds, 1):
        raise TrainingRefused(
            "config-fold",
            f"data.fold is {config.data.fold} of data.folds {config.data.folds}: "
            "give at least 2 folds, and a fold from 0 to folds - 1",
        )
    if config.data.name in ("cifar10", "imagefolder") and not config.data.path:
        raise TrainingRefused(
            "config-no-data-path",
            f"data.path is empty for {config.data.name}: give data.path=DIR, the folder that holds it",
        )


def check_batch(config: Config, world_size: int) -> None:
    """Refuse a global batch that does not fall into equal parts."""
    parts = world_size * config.accumulation
    if config.batch_size % parts:
        raise TrainingRefused(
            "config-batch-size",
            f"batch_size is {config.batch_size}, no multiple of {world_size} ranks x accumulation "
            f"{config.accumulation} = {parts}: give a multiple of {parts}",
        )


def _unknown(key: str, origin: str) -> TrainingRefused:
    known = list(flatten(Config()))
    last = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    sections = [name for name in known if name.startswith(f"{key}.")]
    other = [MEANT[key]] if key in MEANT else []
    near = (other or last or sections or spelling.near(key, known, most=3, alike=0.6))[:3]
    likely = f": did you mean {' or '.join(near)}?" if near else ""
    return TrainingRefused(
        "config-unknown-key", f"{origin}: unknown key {key!r}{likely} (python -m train --help lists the keys)"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= strict_yaml.SHOWN else f"{text[: strict_yaml.SHOWN]}..."


def _listed(names: Iterable[object]) -> str:
    return ", ".join(str(name) for name in names)


def as_text(value: object) -> str:
    """A value as an override would give it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "''"


def _type_name(hint: Any) -> str:
    return "|".join(get_args(hint)) if get_origin(hint) is Literal else str(hint.__name__)


def _sections(cls: Any, prefix: str) -> Iterator[tuple[Any, str]]:
    yield cls, prefix
    for name, hint in get_type_hints(cls).items():
        if is_dataclass(hint):
            yield from _sections(hint, f"{prefix}{name}.")


def _field_docs(cls: type) -> dict[str, str]:
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for at, following in enumerate(body[1:]):
        line = body[at]
        if isinstance(line, ast.AnnAssign) and isinstance(following, ast.Expr):
            docs[ast.unparse(line.target)] = " ".join(ast.literal_eval(following.value).split())
    return docs
