"""Collects what goes wrong without ending the run. Each cause (what could not be done, and the error) is
printed when it first happens, counted, and printed again at the end. Begin at `Troubles`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class _Tally:
    times: int = 0
    reasons: list[str] = field(default_factory=list)
    over: bool = False


class Troubles:
    """The list. Threads may share it."""

    def __init__(self, out: Callable[[str], None]) -> None:
        """`out` is given each line, without its newline."""
        self._out = out
        self._tallies: dict[str, _Tally] = {}
        self._lock = threading.Lock()

    def tell(self, what: str, error: Exception, then: str, *, passing: bool = False) -> None:
        """`what` failed; `then` says where, and what follows from it. `passing`: an event, not a state."""
        with self._lock:
            tally = self._tallies.setdefault(what, _Tally())
            tally.times += 1
            tally.over = passing
            known, reason = tally.reasons, reason_of(error)
            if reason in known:
                return
            known.append(reason)
        self._out(f"train: WARNING: {what}: {reason}: {then}")

    def over(self, what: str) -> None:
        """`what` works; said if it had failed before."""
        with self._lock:
            tally = self._tallies.get(what)
            if tally is None or tally.over:
                return
            tally.over = True
        self._out(f"train: {what}: works again, after it failed {_times(tally.times)}")

    def summarise(self) -> None:
        """Say a line for each thing that failed."""
        with self._lock:
            tallies = list(self._tallies.items())
        for what, tally in tallies:
            still = "" if tally.over else ", and to the end"
            self._out(f"train: WARNING: {what}: {'; '.join(tally.reasons)} ({_times(tally.times)}{still})")


def reason_of(error: Exception) -> str:
    """An error in a few words, the same for every file that it strikes."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
