"""Work in a thread beside the event loop, with a bound."""

import asyncio
import errno
import threading

import pytest

from entrypoint.core.threads import run_in_thread


def told(*args: object, **options: object) -> tuple[object, ...]:
    return *args, options, threading.current_thread().daemon


def test_it_gives_what_the_work_returns_from_a_thread_that_keeps_no_process() -> None:
    for seconds in (None, 30):
        assert asyncio.run(run_in_thread(told, 1, seconds=seconds, option=2)) == (1, {"option": 2}, True)


@pytest.mark.parametrize(
    "error", [ValueError("x"), TimeoutError("of the work itself"), SystemExit(3)], ids=repr
)
def test_what_the_work_raises_is_raised_as_it_is(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def meet() -> BaseException | None:
        try:
            await run_in_thread(fail, seconds=30)
        except BaseException as raised:
            return raised
        return None

    assert asyncio.run(meet()) is error


def test_after_its_bound_nobody_waits_for_it_and_its_result_is_dropped() -> None:
    release, ended = threading.Event(), threading.Event()

    def hold() -> None:
        release.wait(30)
        ended.set()

    async def bounded() -> TimeoutError:
        with pytest.raises(TimeoutError) as late:
            await run_in_thread(hold, seconds=0.02)
        release.set()
        while not ended.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)  # in which the loop would hear of a result
        return late.value

    error = asyncio.run(bounded())
    assert (error.errno, error.strerror) == (errno.ETIMEDOUT, "no answer within 0.02 s")


def test_work_that_ends_after_the_loop_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()
    before = set(threading.enumerate())

    async def give_up() -> list[threading.Thread]:
        with pytest.raises(TimeoutError):
            await run_in_thread(release.wait, 30, seconds=0.01)
        return [thread for thread in threading.enumerate() if thread not in before]

    threads = asyncio.run(give_up())
    release.set()
    for thread in threads:
        thread.join(30)
    assert (len(threads), capsys.readouterr().err) == (1, "")
