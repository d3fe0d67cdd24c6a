"""A trial, and the bench that it is made on: its commands, their bounds, and what counts as wrong."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import bounded, device
from benchmarks.bounded import CommandResult

SCRIPTS = Path(__file__).with_name("scripts")
PYTHON = (sys.executable, "-P")


class Wrong(Exception):
    """What should not be so; with the end of what the command printed."""


def expect(holds: object, what: str, ended: CommandResult | None = None) -> None:
    """Raises Wrong, with the command's output, unless it holds."""
    if not holds:
        raise Wrong(what + (f"\n{ended.tail()}" if ended else ""))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A machine and a folder to work in. Commands end with the trial's time at the latest."""

    device: Literal["cuda", "cpu"]
    """`cpu` is for the tests of the trials themselves."""
    facts: Mapping[str, Any]
    """What benchmarks/device.py finds."""
    ranks: int
    """One for each GPU."""
    folder: Path
    env: Mapping[str, str]
    end: float
    """When the trial's time is over, on the monotonic clock."""
    steps: int = 40
    overrides: tuple[str, ...] = ()
    """Of every training."""

    @property
    def gpus(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.facts["gpus"]
        return found

    def run(self, *argv: str, **env: str | None) -> CommandResult:
        """A command in the folder; a variable that is None is not set. Raises Wrong where it overran."""
        given = device.environment(self.env) | env
        ended = bounded.run(
            argv,
            cwd=self.folder,
            env={name: value for name, value in given.items() if value is not None},
            seconds=self.end - time.monotonic(),
        )
        expect(ended.status is not None, f"{' '.join(argv)} was ended after {ended.seconds:.0f} s", ended)
        return ended

    def ask(self, script: str, *arguments: str, **env: str | None) -> Any:
        """What a script of scripts/ prints as JSON."""
        ended = self.run(*PYTHON, str(SCRIPTS / script), *arguments, **env)
        expect(ended.status == 0, f"{script} ended with {ended.status}", ended)
        return json.loads(ended.out)

    def launch(
        self, run: str, *command: str, options: Sequence[str] | None = None, **env: str | None
    ) -> CommandResult:
        """The launcher on this node with a rank for each GPU, or with other options; `run` names its directory."""
        ranks = ["--device", self.device, "--nproc-per-node", str(self.ranks)]
        given = ranks if options is None else options
        return self.run(*device.launcher(self.folder / run), *given, "--", *command, **env)

    def train(self, run: str, *overrides: str, status: int = 0) -> dict[int, float]:
        """The reference training; its losses by step."""
        settings = (f"steps={self.steps}", *self.overrides, *overrides)
        ended = self.launch(run, "-m", "train", "--config", "digits-short", *settings)
        expect(ended.status == status, f"the training ended with {ended.status}, not {status}", ended)
        backend = "nccl" if self.device == "cuda" else "gloo"
        expect(f"on {self.ranks} x {self.device} ({backend})" in ended.out, "it trained elsewhere", ended)
        return losses(self.folder / run)

    def result(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / run / "result.json").read_text())
        return found

    def forget(self, run: str) -> None:
        """A run directory's space is needed."""
        shutil.rmtree(self.folder / run)


@dataclass(frozen=True, kw_only=True)
class Trial:
    name: str
    """A sentence."""
    seconds: float
    """Its bound."""
    run: Callable[[Bench], str]
    """Returns what it found and in which form it ran. Raises Wrong."""


def losses(run: Path) -> dict[int, float]:
    """By step, of a run directory; the last line of a step counts."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def environment() -> dict[str, str]:
    return dict(os.environ)
