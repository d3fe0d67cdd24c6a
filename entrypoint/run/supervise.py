"""From started ranks to this node's outcome: what follows from what.

The secret: the answers to everything that can happen while ranks run (one ends, another node fails, a stop
is asked for, a signal comes). It all arrives in one queue and is answered here and nowhere else. Seconds are
counted on the event loop's clock.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entrypoint.errors import DONE, SAVED, STUCK
from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import job_end
from entrypoint.meet.link import Link
from entrypoint.meet.messages import AllDone, Failed, Look, LookCloser, Peek, Stopped
from entrypoint.node import processes
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.run.endings import asked_to_end, failure_of, listed, to_failure, to_outcome
from entrypoint.run.hang import Alone, Patience, watch_for_hang, watch_for_workers
from entrypoint.run.ranks import RankEnded, Ranks, RankStarted, StarterEnded
from entrypoint.run.stacks import LastLook
from entrypoint.watch import blame
from entrypoint.watch.reports import NO_ENDS, End, Ends, Failure

FAILURE_GRACE = 3.0
"""Seconds from SIGTERM to SIGKILL for ranks whose job has failed: a failure ends all within 5 s."""
SETTLE = 0.25
"""Seconds in which the ranks of a node that fail together are told apart by their times."""
SETTLE_ECHO = 1.25
"""Seconds more where a rank has only lost another one, and nobody else is asked."""
VERDICT = 10.0
"""Seconds for all nodes to agree on the first failure; their ranks are ended meanwhile."""
AGENT_EXIT = 10.0
"""Seconds for torchrun's agents to leave their exit barrier once every node is done."""
LOOK = 5.0
"""Seconds beyond the hub's own bound for its verdict on a hang."""
SILENT_STOP = 10.0
"""Seconds after which a rank that does not catch the stop signal is told to the user."""
LAST_CALL = 30.0
"""Seconds before the end of a job that is to go on as another, at which ranks that catch no stop signal are
ended: the scheduler's own end would be the last. Half of what is left, where that is less."""


@dataclass(frozen=True, kw_only=True)
class Signalled:
    """Somebody signalled this process."""

    signum: int


@dataclass(frozen=True, kw_only=True)
class TimeUp:
    """The job is about to end, and these ranks of this node were never asked to stop."""

    ranks: list[int]


class Supervisor:
    """Stays with the ranks of one node until the job has ended."""

    def __init__(
        self,
        plan: LaunchPlan,
        ranks: Ranks,
        link: Link | None,
        say: Callable[[str], None],
        stop_signal: signal.Signals,
        patience: Patience,
        term_grace: float,
    ):
        """`link` is None for a single participant. `term_grace`: seconds that ranks have to save after a
        SIGTERM of our own."""
        self._plan = plan
        self._ranks = ranks
        self._link = link
        self._say = say
        self._stop_signal = stop_signal
        self._patience = patience
        self._term_grace = term_grace
        self._events: asyncio.Queue[object] = asyncio.Queue()
        self._begun: set[int] = set()
        self._ended: dict[int, RankEnded] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.lost: tuple[int, ...] = ()
        """Nodes that are known to be lost, by their places in the allocation."""
        self._stopping = False
        self._ending = False
        self._at_once = False
        self._over = False
        self._tell = link or Alone(
            plan.node, len(ranks.ranks), post=self._events.put_nowait, say=say, again=patience.again
        )

    def signalled(self, signum: int) -> None:
        """A signal to this process; Ctrl-C a second time ends the grace of the first."""
        self._at_once |= self._ending and signum == signal.SIGINT
        self._events.put_nowait(Signalled(signum=int(signum)))

    @property
    def why_final(self) -> str:
        """Why nothing may follow in this allocation, whatever has failed; empty where something may."""
        if any(ended.status == SAVED for ended in self._ended.values()):
            return "a rank has saved at a planned end"
        return "a planned end was asked for" if self._stopping else ""

    async def run(self, stop_file: Path | None, interval: float = 1.0) -> Outcome:
        """Returns this node's outcome. `stop_file`: looked for every `interval` seconds where it is given."""
        self._watch(self._pass_on(self._ranks.events.get))
        if self._link is not None:
            self._watch(self._pass_on(self._link.next))
        if stop_file is not None:
            self._watch_for(stop_file, interval)
        if self._patience.step or self._patience.silence:
            self._watch(watch_for_hang(self._patience, self._ranks, self._ended, self._tell))
        if self._plan.mode == "torchrun" and self._plan.node_rank == 0:
            self._watch(watch_for_workers(self._patience, self._ranks, self._say))
        try:
            return await self._stay()
        finally:
            self._over = True
            for task in self._tasks:
                task.cancel()

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _pass_on(self, source: Callable[[], Awaitable[object]]) -> None:
        while True:
            event = await source()
            self._events.put_nowait(event)
            if isinstance(event, Failed | AllDone):
                return

    def _watch_for(self, stop_file: Path, interval: float) -> None:
        """Looks in a thread: a shared file system that stalls must not stall heartbeats."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            while not _is_there(stop_file):
                if self._over:
                    return
                time.sleep(interval)
            end = job_end(stop_file)
            with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
                loop.call_soon_threadsafe(self._ask_all_to_stop, end)

        threading.Thread(target=look, daemon=True).start()

    def _ask_all_to_stop(self, end: float | None = None) -> None:
        """`end`: of the job, in Unix seconds."""
        left = None if end is None else max(0.0, end - time.time())
        self._tell.stop(left)

    async def _stay(self) -> Outcome:
        done = False
        while True:
            match await self._events.get():
                case RankStarted() as started:
                    self._ended.pop(started.rank, None)
                    if started.rank in self._begun:  # else its first sign may be there already
                        self._patience.heartbeats.forget(started.rank)
                    self._begun.add(started.rank)
                case RankEnded() as ended:
                    self._take_end(ended)
                    # With restarts left, torchrun's agent decides what a failure means.
                    if self._plan.max_restarts == 0 and ended in self._failures():
                        return await self._failed(await self._first_failure())
                case StarterEnded() as starter if not done:
                    return await self._failed(await self._first_failure(starter))
                case Failed() as failed:
                    self.lost = failed.lost
                    return await self._end_with(failed.failure)
                case Peek():
                    self._watch(self._peek())
                case Look() as look:
                    return await self._hung(look.why)
                case AllDone() as all_done:
                    return replace(await self._ended_well(), alone=all_done.alone)
                case Stopped() as stopped if not self._stopping:
                    self._stopping = True
                    self._watch(self._stop_ranks(stopped.left))
                case TimeUp() as up:
                    return await self._time_up(up.ranks)
                case Signalled(signum=signal.SIGUSR2):
                    self._ask_all_to_stop()
                case Signalled() as signalled:
                    return await self._asked_to_end(signalled.signum)
            if not done and self._all_ended() and not self._failures():
                done = True
                if self._link is None:
                    alone = [self._end_of(ended).alone for ended in self._ended.values()]
                    return replace(await self._ended_well(), alone=len(alone) > 1 and all(alone))
                self._link.done()

    def _take_end(self, ended: RankEnded) -> None:
        self._ended[ended.rank] = ended
        if self._plan.max_restarts == 0 and ended.status in (DONE, SAVED):
            self._tell.ended(self._end_of(ended))

    def _end_of(self, ended: RankEnded) -> End:
        return End(
            rank=ended.rank,
            node_rank=self._plan.place,
            node=self._plan.node,
            status=ended.status,
            time=ended.time,
            step=self._patience.heartbeats.step(ended.rank),
            alone=self._patience.heartbeats.trained_alone(ended.rank),
        )

    def _ends(self) -> Ends:
        """Of the ranks here that have ended well."""
        return Ends.of(self._end_of(ended) for ended in self._ended.values() if ended.status in (DONE, SAVED))

    def _all_ended(self) -> bool:
        return len(self._ended) == len(self._ranks.ranks)

    def _failures(self) -> list[RankEnded]:
        """Failed ranks, the first one first; a rank ended by signal after another's 75 has saved too."""
        saved = min((ended.time for ended in self._ended.values() if ended.status == SAVED), default=None)
        failed = [
            ended
            for ended in self._ended.values()
            if ended.status not in (DONE, SAVED)
            and not (saved is not None and ended.signal and ended.time >= saved)
        ]
        return sorted(failed, key=lambda ended: ended.time)

    async def _first_failure(self, starter: StarterEnded | None = None) -> Failure:
        """The failure of this node: its first failed rank's, else what kept the ranks from starting."""
        late = await self._settled(SETTLE)
        starter = starter or late
        failures = [failure_of(self._plan, self._ranks, ended) for ended in self._failures()]
        if failures and self._link is None and blame.is_consequence(blame.first(failures).error):
            await self._settled(SETTLE_ECHO)
            failures = [failure_of(self._plan, self._ranks, ended) for ended in self._failures()]
        starter = starter or StarterEnded()
        if failures:
            ends = self._ends() if self._link is None else NO_ENDS
            first = blame.first(failures, ends, world=len(self._ranks.ranks))
            return replace(first, error=first.error or starter.error)
        error = starter.error or "the ranks ended without a status"
        ended = Outcome(status=starter.status, node=self._plan.node, time=time.time(), error=error)
        return to_failure(self._plan, ended)

    async def _settled(self, seconds: float) -> StarterEnded | None:
        """Takes what is said of the ranks meanwhile; other events stay. Returns the end of the starter."""
        await asyncio.sleep(seconds)
        starter, others = None, []
        while not self._events.empty():
            match self._events.get_nowait():
                case RankEnded() as ended:
                    self._take_end(ended)
                case StarterEnded() as late:
                    starter = starter or late
                case other:
                    others.append(other)
        for other in others:
            self._events.put_nowait(other)
        return starter

    async def _ended_well(self) -> Outcome:
        await self._ranks.wait(AGENT_EXIT)
        if not self._ended:
            return Outcome(status=DONE, node=self._plan.node, time=time.time())
        return outcome.of_job((f"rank {rank}", self._well(ended)) for rank, ended in self._ended.items())

    def _well(self, ended: RankEnded) -> Outcome:
        status = DONE if ended.status == DONE else SAVED
        return Outcome(status=status, rank=ended.rank, node=self._plan.node, time=ended.time)

    async def _failed(self, mine: Failure) -> Outcome:
        """Tells the others, ends our ranks, and returns the failure that all nodes call the first."""
        if self._link is not None:
            self._link.fail(mine)
        ending = asyncio.ensure_future(self._end_ranks(FAILURE_GRACE))
        first = (await self._told(self._link, VERDICT) if self._link is not None else None) or mine
        self._ranks.failed(first)
        await ending
        return to_outcome(first)

    async def _told(self, link: Link, bound: float, look: LastLook | None = None) -> Failure | None:
        """The first failure as all nodes are told it; None where nothing is told in `bound` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound):
                while True:
                    match await self._events.get():
                        case Failed() as failed:
                            self.lost = failed.lost
                            return failed.failure
                        case LookCloser() if look is not None:
                            link.seen(await look.closer())
        return None

    async def _peek(self) -> None:
        sightings = [] if self._all_ended() else await self._patience.peek()
        self._tell.peeked(sightings)

    async def _hung(self, why: str) -> Outcome:
        """Tells where our ranks are, and ends them with what all nodes say of it."""
        look, link = self._patience.look(), self._link
        found = [] if self._all_ended() else await look.first()
        if link is None and found:
            found = await look.closer()
        failure = blame.verdict(found, why, unseen=(), now=time.time())
        if link is not None:
            link.seen(found)
            failure = await self._told(link, link.timeouts.look + LOOK, look) or failure
        await self._end_ranks(0)
        await look.keep(self._say)
        if failure is None:
            return Outcome(status=STUCK, node=self._plan.node, time=time.time(), error=f"stuck, {why}")
        return to_outcome(failure)

    async def _end_with(self, failure: Failure) -> Outcome:
        self._ranks.failed(failure)
        terminated = failure.rank is None and failure.signal == signal.SIGTERM
        await self._end_ranks(self._term_grace if terminated else FAILURE_GRACE)
        return to_outcome(failure)

    async def _asked_to_end(self, signum: int) -> Outcome:
        """SIGTERM (scancel, qdel) lets ranks save if time allows, Ctrl-C does not; no requeue follows."""
        return await self._end_for(asked_to_end(self._plan, signum))

    async def _time_up(self, ranks: list[int]) -> Outcome:
        """The job goes on as another: this one ends as by SIGTERM before the scheduler ends it for good."""
        name = self._stop_signal.name
        why = f"the job's time is up, and {listed(ranks)} on {self._plan.node} catches no {name}"
        mine = asked_to_end(self._plan, int(signal.SIGTERM))
        return await self._end_for(replace(mine, error=f"{why}: {mine.error}"))

    async def _end_for(self, mine: Outcome) -> Outcome:
        self._ending = True
        if self._link is not None:
            self._link.fail(to_failure(self._plan, mine))
        await self._end_ranks(self._term_grace if mine.signal == signal.SIGTERM else FAILURE_GRACE)
        return mine

    async def _end_ranks(self, grace: float) -> None:
        processes.signal_groups(self._ranks.alive(), signal.SIGTERM)
        deadline = _now() + grace
        while self._ranks.alive() and _now() < deadline and not self._at_once:
            await asyncio.sleep(0.02)
        await self._ranks.kill()

    async def _stop_ranks(self, left: float | None) -> None:
        """Sends the stop signal to each rank once it catches it, never to torchrun's agent: it would die. A
        rank that torchrun starts anew has another process id, and is told too."""
        since = _now()
        time_up = since + left - min(LAST_CALL, left / 2) if left is not None else float("inf")
        told: set[int | None] = set()
        while True:
            pids = {rank: self._ranks.pids.get(rank) for rank in self._ranks.ranks if rank not in self._ended}
            for pid in pids.values():
                if pid is not None and pid not in told and processes.catches(pid, self._stop_signal):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, self._stop_signal)
                    told.add(pid)
            untold = [rank for rank, pid in pids.items() if pid not in told]
            now = _now()
            if not untold:
                since = now
            elif now > time_up:
                self._events.put_nowait(TimeUp(ranks=untold))
                return
            elif now - since > SILENT_STOP:
                since = float("inf")
                name = self._stop_signal.name
                silent = listed(untold)
                self._say(
                    f"a stop was asked for, but {silent} on {self._plan.node} catches no {name} and runs on"
                )
            await asyncio.sleep(0.2)


def _is_there(path: Path) -> bool:
    """False as well where a shared file system cannot tell at the moment (ESTALE, EIO)."""
    with contextlib.suppress(OSError):
        return path.exists()
    return False


def _now() -> float:
    return asyncio.get_running_loop().time()
