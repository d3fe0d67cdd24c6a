"""The way out: what `leave` waits for."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed  # noqa: F401 - what `leave` imports, so that it takes no time there

from train import stop

SOME = bytes(256 << 20)


@contextmanager
def busy(times: int | None) -> Iterator[threading.Thread]:
    """A thread that calculates without the interpreter's lock, for so long or until the end."""
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        digest, done = hashlib.sha256(), 0
        while not over.is_set() and done != times:
            digest.update(SOME)
            done += 1
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(10)
        yield thread
    finally:
        over.set()
        thread.join()


def test_who_leaves_waits_for_threads_that_have_something_to_do() -> None:
    with busy(2) as thread:
        with pytest.raises(SystemExit) as ended:
            stop.leave(75)
        assert not thread.is_alive()
    assert ended.value.code == 75


def test_who_leaves_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "REST_S", 0.05)
    with busy(None) as thread:
        with pytest.raises(SystemExit) as ended:
            stop.leave(0)
        assert thread.is_alive()
    assert ended.value.code == 0
