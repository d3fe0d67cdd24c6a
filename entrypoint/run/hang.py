"""Whether the ranks of this node go on: what counts as a hang, and whom it is told.

It knows how long each silence may last, and that the seconds in which nothing of ours ran do not count.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from entrypoint.bitset import Bits
from entrypoint.meet import job_state
from entrypoint.meet.job_state import After, JobState, Now, Say, Tell
from entrypoint.meet.messages import Ended, Paused, Peeked, Silent, Stalled, Stopped, Told
from entrypoint.meet.terms import Timeouts
from entrypoint.run.ranks import Ranks
from entrypoint.run.stacks import LastLook
from entrypoint.watch.heartbeat import Heartbeats
from entrypoint.watch.reports import End, Sighting

WORKERS_LOOKS = 3
"""How often, at growing intervals, a rank is looked at that has never made a step."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """What counts as a hang."""

    heartbeats: Heartbeats
    step: float
    """Seconds without a step of a rank that tells its steps; 0: any."""
    silence: float
    """Seconds in which no rank of the job writes anything; 0: any."""
    look: Callable[[], LastLook]
    """Finds out where the ranks of this node are, for the end of the job."""
    peek: Callable[[], Awaitable[list[Sighting]]]
    """Finds out where they are, and lets them go on."""
    workers: Callable[[], Awaitable[str]]
    """Finds out whether a rank has started processes that wait for a process group."""
    start: float
    """Seconds without a step after which that is asked for the first time."""
    is_chosen: bool
    """Whether the user set `step`: then it counts for scripts that tell nothing of evaluations too."""
    again: float
    """Seconds between the first two looks at ranks that make no step."""


class Reports(Protocol):
    """Whom it is told: the link to all others, or who stands for it."""

    def stalled(self, why: str) -> None: ...

    def silent(self, why: str) -> None: ...

    def paused(self, why: str | None) -> None: ...


class Alone:
    """What stands for the link of a single participant: the same rules for one node, and no network."""

    def __init__(
        self, node: str, world: int, *, post: Callable[[Told], None], say: Callable[[str], None], again: float
    ):
        """`post` takes what a link would have been told. `again`: as of Patience."""
        self._post = post
        self._say = say
        self._job = JobState(
            nodes=[node],
            hub=0,
            local_ranks=1,
            bounds=Timeouts(again=again),
            present=Bits.of([0]),
            active=Bits.of([0]),
            world=world,
        )

    def stop(self, left: float | None) -> None:
        self._step(Stopped(left))

    def ended(self, end: End) -> None:
        self._step(Ended(end))

    def stalled(self, why: str) -> None:
        self._step(Stalled(why))

    def silent(self, why: str) -> None:
        self._step(Silent(why))

    def paused(self, why: str | None) -> None:
        self._step(Paused(why))

    def peeked(self, sightings: Sequence[Sighting]) -> None:
        self._step(Peeked(tuple(sightings), last=True))

    def _step(self, event: job_state.Event) -> None:
        loop = asyncio.get_running_loop()
        now = Now(wall=time.time(), steady=loop.time())
        self._job, effects = job_state.step(self._job, (0, None), event, now)
        for effect in effects:
            match effect:
                case Tell(message):
                    self._post(message)
                case Say(text):
                    self._say(text)
                case After(seconds, timer):
                    loop.call_later(seconds, self._step, timer)


async def watch_for_hang(patience: Patience, ranks: Ranks, ended: Collection[int], tell: Reports) -> None:
    """Tells of ranks that do not go on, those in `ended` left out. Counts the seconds in which this process
    ran, so that a suspended job does not seem to hang."""
    loop = asyncio.get_running_loop()
    why_silent = f"no rank has written anything for {patience.silence:g} s (--silence-timeout)"
    interval = min([1.0, *(bound / 4 for bound in (patience.step, patience.silence) if bound)])
    before, heard, silence, since_end, pause = loop.time(), 0.0, 0.0, 0.0, None
    while True:
        await asyncio.sleep(interval)
        now = loop.time()
        passed = min(now - before, 2 * interval)
        before = now
        watched = [rank for rank in ranks.pids if rank not in ended]
        patience.heartbeats.observe(watched, passed)
        is_paused = bool(patience.step) and patience.heartbeats.paused(watched, patience.step)
        if patience.step and (
            patience.heartbeats.stalled(patience.step) or (is_paused and patience.is_chosen)
        ):
            return tell.stalled(f"no step for {patience.step:g} s")
        # Whoever has ended well may be needed by others, who perhaps have never made a step.
        since_end = since_end + passed if ended else 0.0
        was_paused, pause = pause, "" if patience.step and since_end > patience.step else None
        if is_paused:
            pause = f"no step for {patience.step:g} s"
        if pause != was_paused:
            tell.paused(pause)
        was_silent = silence > patience.silence
        silence = silence + passed if ranks.heard == heard else 0.0
        heard = ranks.heard
        if patience.silence and was_silent != (silence > patience.silence):
            tell.silent("" if was_silent else why_silent)


async def watch_for_workers(patience: Patience, ranks: Ranks, say: Callable[[str], None]) -> None:
    """A rank that starts its workers itself waits for ever: torchrun has them look for its own store."""
    nap, beats = patience.start, patience.heartbeats
    for _ in range(WORKERS_LOOKS):
        await asyncio.sleep(nap)
        if any(beats.step(rank) is not None for rank in ranks.ranks):
            return
        if what := await patience.workers():
            why = "torchrun starts one process for each rank, and a script that starts its own (mp.spawn)"
            say(f"{what}: {why} needs --mode exec")
            return
        nap *= 2
