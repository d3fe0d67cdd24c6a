"""How long a participant waits for the others before the start, and what it says meanwhile."""

import contextlib
import time

from entrypoint.core.errors import Unavailable
from entrypoint.core.frozen import dataclass
from entrypoint.core.threads import run_in_thread
from entrypoint.meet.terms import LocalNode, Timeouts


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Node 0 was seen to have begun."""

    where: str
    """It is about to listen there."""
    seen: float
    """On the monotonic clock."""


class Waiting:
    """The bounds of waiting for others, the same for hub and spokes."""

    def __init__(self, timeouts: Timeouts, local: LocalNode) -> None:
        self._timeouts = timeouts
        self._local = local
        self._gone: str | None = None
        self.begun: Begun | None = None
        """None if node 0 was not seen to have begun; `ask` finds it."""
        self._began = time.monotonic()
        self._deadline = self._began + timeouts.join
        self._remind = self._began + timeouts.remind

    async def ask(self) -> None:
        """Ask who never started, and whether node 0 has begun: in threads, for the file system that knows
        may stall: then this does, and nobody who leaves waits for them."""
        with contextlib.suppress(OSError):
            self._gone = await run_in_thread(self._local.never_started)
            if self.begun is None and (where := await run_in_thread(self._local.begun)) is not None:
                self.begun = Begun(where=where, seen=time.monotonic())

    def is_due(self) -> bool:
        """Whether it is time to `tell` who is missing. Unavailable: someone never started."""
        if self._gone:
            raise Unavailable("node-never-started", self._gone)
        return time.monotonic() >= min(self._deadline, self._remind)

    def tell(self, who: str) -> None:
        """Says who is missing. Unavailable: the time is up."""
        now = time.monotonic()
        if now >= self._deadline:
            bound = f"{self._timeouts.join:g} s (--join-timeout)"
            raise Unavailable("join-timeout", f"{who} within {bound}: see the output of what is missing")
        self._remind = now + self._timeouts.remind
        self._local.say(f"{who} after {now - self._began:.0f} s: waiting {self._deadline - now:.0f} s more")

    def since_begun(self) -> float:
        """Seconds since node 0 was seen to have begun."""
        return 0.0 if self.begun is None else time.monotonic() - self.begun.seen

    def left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def shorten(self, left: float) -> None:
        """Wait no longer than someone who began earlier."""
        self._deadline = min(self._deadline, time.monotonic() + left)

    def nap(self) -> float:
        """Seconds until something may be due."""
        due = min(self._deadline, self._remind) - time.monotonic()
        return max(0.0, min(due, self._timeouts.poll / 4))
