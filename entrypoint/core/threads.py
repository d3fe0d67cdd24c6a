"""Runs work in a thread beside the event loop, with a bound: a shared file system can hold whoever touches
it. `run_in_thread` is the entry.

The thread is a daemon. So the process ends even if the work never does; asyncio's own threads would keep it.
"""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_thread(
    work: Callable[..., T], *args: Any, seconds: float | None = None, **options: Any
) -> T:
    """What `work(*args, **options)` returns or raises, in a thread. TimeoutError: not within `seconds`; it
    goes on then, and nobody hears of it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work(*args, **options)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="run_in_thread").start()
    try:
        async with asyncio.timeout(seconds):
            return await done
    except TimeoutError:
        if done.done() and not done.cancelled():
            raise
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:g} s") from None
