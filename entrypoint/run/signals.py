"""The signals that a launch heeds: which they are, and which have come. `Signals` is the entry.

One object serves all attempts of a launch. Whoever is at work takes the next signal from it; that the process
was asked to end stays known.
"""

import asyncio
import signal

from entrypoint.run.node_state import PLANNED, Signalled

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *PLANNED)
"""All but PLANNED end the launch."""


def handled_signals() -> list[signal.Signals]:
    """HANDLED without SIGHUP where that is ignored, as under nohup and in PBS."""
    return [s for s in HANDLED if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


class Signals:
    """Those that have come, in their order."""

    def __init__(self) -> None:
        self.end: int | None = None
        """The last one that asked this process to end; `take` sets it."""
        self._come: asyncio.Queue[Signalled] = asyncio.Queue()

    def catch(self) -> None:
        """Takes all that come from now on, in the running loop."""
        loop = asyncio.get_running_loop()
        for signum in handled_signals():
            loop.add_signal_handler(signum, self.take, int(signum))
        # Whoever started us may have held signals back until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def take(self, signum: int) -> None:
        if signum not in PLANNED:
            self.end = signum
        self._come.put_nowait(Signalled(signum=signum))

    async def next(self) -> Signalled:
        return await self._come.get()
