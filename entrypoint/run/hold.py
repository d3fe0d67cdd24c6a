"""Holds the run directory for all attempts of a launch, so that no other job writes into it. `RunDirHold` is
the entry; entrypoint/job/lock.py has the rules.
"""

import asyncio
import contextlib
import signal

from entrypoint.core.threads import run_in_thread
from entrypoint.job.lock import Lock
from entrypoint.ranks.output import Voice
from entrypoint.run.signals import Signals

RELEASE = 5.0
"""Seconds that the file system has to give the run directory free at the end."""

NOTE = 5.0
"""Seconds for it to say who has that. Without it a restart waits as for a stranger."""


class RunDirHold:
    """Of one launch."""

    def __init__(self, lock: Lock, voice: Voice, signals: Signals):
        self._lock = lock
        self._voice = voice
        self._signals = signals
        self._tasks: list[asyncio.Task[None]] = []

    async def take(self, *, is_restart: bool) -> None:
        """Raises InUse if another job has the run directory. Once it is held, this does nothing."""
        if not self._lock.is_held:
            await run_in_thread(self._lock.take, again=is_restart)
            self._tasks.append(asyncio.create_task(self._keep()))

    async def note_holder(self) -> None:
        """The nodes have met: whichever of them is first has the run directory."""
        with contextlib.suppress(OSError, TimeoutError):
            await run_in_thread(self._lock.note_holder, seconds=NOTE)

    async def release(self) -> None:
        with contextlib.suppress(TimeoutError):
            await run_in_thread(self._lock.release, seconds=RELEASE)

    async def _keep(self) -> None:
        """Ends the job if another one has taken the run directory, while this one was suspended or cut off
        from the file system."""
        if why := await run_in_thread(self._lock.keep):
            self._voice.say(f"{why}: this job ends")
            self._signals.take(signal.SIGTERM)
