"""`python -m train` in processes that find torch imported, which is most of what a short training computes.

They are forked from one process that imports it once; all else is as in a process of their own.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests import spaces

PRELOAD = [
    *("torchvision.models", "torch.distributed.elastic.multiprocessing.errors", "train.report"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
]


class Training:
    """A process of its own. `inside`: a process whose mount namespace it enters."""

    def __init__(self, *arguments: str, cwd: Path, env: Mapping[str, str], inside: int | None = None) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(PRELOAD)
        with pytest.MonkeyPatch.context() as patch:  # read where torch is loaded
            patch.setenv("OMP_NUM_THREADS", "1")
            forkserver.ensure_running()
        self._texts = [_empty_file(), _empty_file()]
        given = (arguments, cwd, dict(env), inside, self._texts)
        self._process = forks.Process(target=_train, args=given, daemon=True)  # ends with the tests
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self, seconds: float) -> tuple[int, str, str]:
        """Its status, negative for a signal, and what it said; kills it after the bound."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        status = self._process.exitcode
        assert status is not None
        out, err = (path.read_text(errors="replace") for path in self._texts)
        for path in self._texts:
            path.unlink()
        return status, out, err


def _empty_file() -> Path:
    number, name = tempfile.mkstemp()
    os.close(number)
    return Path(name)


def _train(
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str], inside: int | None, texts: Sequence[Path]
) -> None:
    for number, path in enumerate(texts, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    if inside is not None:
        spaces.enter(inside)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["train", *arguments]
    runpy.run_module("train", run_name="__main__", alter_sys=True)
