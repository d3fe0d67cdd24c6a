"""Reads the command line of a training, and makes the config of it. `read` is the entry, for the training
itself and for whoever checks a line before a job is submitted.

A shipped config runs on any number of ranks. Imports no torch, and needs Python 3.9 alone, so that a mistake
is told at once.
"""

from __future__ import annotations

import argparse
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from entrypoint.core import files, spelling
from train import config as configs
from train.status import TrainingRefused


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message[len("unrecognized arguments: ") :].split()[:1]
        near = spelling.near("".join(unknown), self._option_string_actions, most=1)
        likely = f" (did you mean {near[0]}?)" if message.startswith("unrecognized") and near else ""
        raise TrainingRefused("train-command-usage", f"{message}{likely}: see python -m train --help")

    def format_help(self) -> str:
        self.epilog = _key_help()  # made of the config's source: each rank would wait for it
        return super().format_help()


@dataclass(frozen=True)
class Asked:
    """What a command line asks for."""

    name: str
    """Of the config."""
    config: configs.Config
    resume: str
    note: str = ""
    """What was changed of the config; empty for nothing."""
    is_batch_given: bool = True
    """Whether somebody chose the batch size, by a file of their own or on the command line."""


def read(arguments: Sequence[str], world_size: int) -> Asked:
    """What to train on so many ranks. Raises TrainingRefused."""
    options = parse(arguments)
    path = configs.find(options.config)
    config = configs.load(path, options.overrides)
    chosen = {override.partition("=")[0] for override in options.overrides}
    is_given = path.parent != configs.SHIPPED or "batch_size" in chosen
    asked = Asked(name=path.stem, config=config, resume=options.resume, is_batch_given=is_given)
    if is_given:
        configs.check_batch(config, world_size)
        return asked
    return _fitted(asked, world_size)


def check(arguments: Sequence[str], world_size: int, folder: Path) -> None:
    """Raises TrainingRefused if ranks that start in this folder would; a config that lies nowhere here is
    left to them."""
    overrides = [word for word in arguments if "=" in word and not word.startswith("-")]
    name = parse(arguments).config
    if name in configs.shipped_names():
        read(arguments, world_size)
    elif stat.S_ISREG(files.mode_at(folder / name)):
        read(["--config", str(folder / name), *overrides], world_size)
    elif "/" not in name:
        configs.find(name)


def _fitted(asked: Asked, world_size: int) -> Asked:
    """The same with a batch that falls into equal parts, for a config that nobody wrote for these ranks."""
    config, parts = asked.config, world_size * asked.config.accumulation
    size = -(-config.batch_size // parts) * parts
    if size == config.batch_size:
        return asked
    note = (
        f"{asked.name}: batch_size {size} instead of {config.batch_size}, {size // world_size} for each of "
        f"the {world_size} ranks (batch_size=N chooses)"
    )
    return replace(asked, config=replace(config, batch_size=size), note=note)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m train",
        description="Train an image classifier; under torchrun, on all of its ranks together.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", required=True, metavar="NAME|FILE", help="a shipped config or a YAML file"
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|DIR",
        help="auto: go on from the newest complete checkpoint of the run directory, if there is one "
        "(default); never: begin anew; DIR: begin from this checkpoint. After a restart or a "
        "requeue the newest of its own counts",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the config")
    return parser.parse_intermixed_args(arguments)


def _key_help() -> str:
    lines = [f"shipped configs: {', '.join(configs.shipped_names())}", "", "keys, with their defaults:"]
    for key, kind, default, doc in configs.describe():
        lines += [f"  {key}={configs.as_text(default)}  ({kind})", f"      {doc}"]
    return "\n".join(lines)
