"""How long a participant waits for the others before the start, and what it says meanwhile."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from entrypoint.errors import Unavailable
from entrypoint.meet.terms import Timeouts


class Waiting:
    """The bounds of waiting for others, the same for hub and spokes."""

    def __init__(
        self,
        timeouts: Timeouts,
        say: Callable[[str], None],
        never_started: Callable[[], str | None] | None,
        begun: Callable[[], str | None] | None,
    ) -> None:
        self._timeouts, self._say, self._never_started, self._begun = timeouts, say, never_started, begun
        self._gone: str | None = None
        self._seen: float | None = None
        self.begun_at: str | None = None
        """Where node 0 is about to listen; None where it was not seen to have begun."""
        self._began = time.monotonic()
        self._deadline = self._began + timeouts.join
        self._remind = self._began + timeouts.remind

    async def ask(self) -> None:
        """Ask who never started, and whether node 0 has begun: in threads, for the file system that knows
        may stall."""
        with contextlib.suppress(OSError):
            if self._never_started:
                self._gone = await asyncio.to_thread(self._never_started)
            if self._begun and self._seen is None:
                self.begun_at = await asyncio.to_thread(self._begun)
                self._seen = None if self.begun_at is None else time.monotonic()

    def check(self, who: Callable[[], str]) -> None:
        """Say who is missing when it is time. Unavailable: the time is up, or someone never started."""
        now = time.monotonic()
        if self._gone:
            raise Unavailable(self._gone)
        if now >= self._deadline:
            bound = f"{self._timeouts.join:g} s (--join-timeout)"
            raise Unavailable(f"{who()} within {bound}: see the output of what is missing")
        if now >= self._remind:
            self._remind = now + self._timeouts.remind
            self._say(f"{who()} after {now - self._began:.0f} s: waiting {self._deadline - now:.0f} s more")

    def since_begun(self) -> float:
        """Seconds since node 0 was seen to have begun."""
        return 0.0 if self._seen is None else time.monotonic() - self._seen

    def left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def shorten(self, left: float) -> None:
        """Wait no longer than someone who began earlier."""
        self._deadline = min(self._deadline, time.monotonic() + left)

    def nap(self) -> float:
        """Seconds until something may be due."""
        due = min(self._deadline, self._remind) - time.monotonic()
        return max(0.0, min(due, self._timeouts.poll / 4))
