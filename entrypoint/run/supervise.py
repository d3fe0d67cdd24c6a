"""Stays with the ranks of one node until the job has ended.

`Supervisor.run` is the entry. What follows from what is decided in node_state.py; this is the shell around
it, which owns the event loop, timers, threads and files: it turns what happens into events, looks at the
ranks when a timer asks for it, and carries out what is to be done.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from entrypoint.core.bitset import Bits
from entrypoint.core.threads import run_in_thread
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import job_end
from entrypoint.meet import job_state
from entrypoint.meet.job_state import JobState, Now, Say, StartTimer, TellAll
from entrypoint.meet.link import Link
from entrypoint.meet.messages import AllDone, Failed, Report
from entrypoint.meet.terms import JobBounds
from entrypoint.node import processes
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.ranks.ranks import RankEnded, Ranks
from entrypoint.ranks.stacks import StackCollector
from entrypoint.run import node_state
from entrypoint.run.endings import RankTrace
from entrypoint.run.node_state import (
    PLANNED,
    AgentLeft,
    AwaitAgent,
    Catching,
    CollectPeek,
    CollectStacks,
    Effect,
    Event,
    Exited,
    Finish,
    ForgetBeats,
    HangPolicy,
    HangWatch,
    KeepSignal,
    KeepStacks,
    KillRanks,
    LookAfter,
    NodeState,
    PeekCollected,
    RanksKilled,
    RanksSeen,
    Settled,
    ShowFailure,
    Signalled,
    SignalRank,
    Signs,
    StacksCollected,
    StacksKept,
    StopAsked,
    TellHub,
    TerminateRanks,
    VerdictIsLate,
)
from entrypoint.run.signals import Signals

REAP = 10.0
"""Seconds between two looks for orphans that have ended."""
WORKERS_LOOKS = 3
"""How often, at growing intervals, a rank is looked at that has never made a step."""


class Supervisor:
    """Stays with the ranks of one node until the job has ended. `state` is remade for each event, and nothing
    else changes but the queue and the background tasks."""

    def __init__(
        self,
        plan: LaunchPlan,
        ranks: Ranks,
        link: Link | None,
        signals: Signals,
        say: Callable[[str], None],
        stop_signal: signal.Signals,
        policy: HangPolicy,
        stacks: StackCollector,
        term_grace: float,
    ):
        """`link` is None for a single participant. `term_grace`: seconds that ranks have to save after a
        SIGTERM of our own."""
        self._plan = plan
        self._ranks = ranks
        self._link = link
        self._signals = signals
        self._say = say
        self._stop_signal = stop_signal
        self._stacks = stacks
        self._look = stacks.last_look()
        self._events: asyncio.Queue[object] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._kept: list[int] = []
        """Signals that ask for a planned end, for the attempt that may follow."""
        self._is_over = threading.Event()
        self._hub = link or Alone(
            plan.node, len(ranks.ranks), events=self._events, say=say, again=policy.again
        )
        self.state = NodeState(
            node=plan.node,
            place=plan.place,
            ranks=tuple(ranks.ranks),
            is_alone=link is None,
            may_restart=plan.max_restarts > 0,
            stop_signal=stop_signal.name,
            term_grace=term_grace,
            verdict_bound=(link.timeouts.look if link else 0.0) + node_state.LOOK,
            watch=HangWatch(policy=policy),
        )

    async def run(self, stop_file: Path | None, interval: float = 1.0) -> Outcome:
        """Returns this node's outcome. `stop_file`: looked for every `interval` seconds if it is given."""
        self._start(self._pass_on(self._ranks.events.get))
        self._start(self._pass_on(self._signals.next))
        if self._link is not None:
            self._start(self._pass_on(self._link.next))
        if stop_file is not None:
            self._watch_for(stop_file, interval)
        if (between := self.state.watch.policy.interval) is not None:
            self._start(self._watch_for_hang(between))
        if self._plan.mode == "torchrun" and self._plan.node_rank == 0:
            self._start(self._watch_for_workers())
        self._start(self._reap_orphans())
        try:
            while True:
                event = self._observed(await self._events.get())
                self.state, effects = node_state.step(self.state, event, self._now())
                for effect in effects:
                    if isinstance(effect, Finish):
                        return effect.outcome
                    self._carry_out(effect)
        finally:
            self._is_over.set()
            for task in self._tasks:
                task.cancel()
            while not self._events.empty():
                left = self._events.get_nowait()
                if isinstance(left, Signalled) and left.signum in PLANNED:
                    self._kept.append(left.signum)
            for signum in self._kept:
                self._signals.take(signum)

    def _now(self) -> Now:
        return Now(wall=time.time(), steady=asyncio.get_running_loop().time())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    # --- what happens ---------------------------------------------------------------------------------------

    async def _pass_on(self, source: Callable[[], Awaitable[object]]) -> None:
        while True:
            event = await source()
            self._events.put_nowait(event)
            if isinstance(event, Failed | AllDone):
                return

    def _watch_for(self, stop_file: Path, interval: float) -> None:
        """Looks in a thread: a shared file system that stalls must not stall heartbeats. A file made by hand
        may say later when the job ends."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            told: tuple[float | None, str] | None = None
            while told is None or told[0] is None:
                if _is_there(stop_file) and (found := job_end(stop_file)) != told:
                    told = end, wrong = found
                    left = None if end is None else max(0.0, end - time.time())
                    with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
                        loop.call_soon_threadsafe(self._take_stop, StopAsked(left), wrong)
                elif self._is_over.wait(interval):
                    return

        threading.Thread(target=look, daemon=True).start()

    def _take_stop(self, stop: StopAsked, wrong: str) -> None:
        if wrong:
            self._say(wrong)
        self._events.put_nowait(stop)

    async def _watch_for_hang(self, interval: float) -> None:
        loop = asyncio.get_running_loop()
        beats, step = self._stacks.heartbeats, self.state.watch.policy.step
        before = loop.time()
        while not self.state.watch.is_over:
            await asyncio.sleep(interval)
            now = loop.time()
            passed = min(now - before, 2 * interval)
            before = now
            watched = [rank for rank in self._ranks.pids if rank not in self.state.ended]
            beats.observe(watched, passed)
            signs = Signs(
                passed=passed,
                is_stalled=bool(step) and beats.stalled(step),
                is_paused=bool(step) and beats.paused(watched, step),
                heard=self._ranks.heard,
                any_ended=bool(self.state.ended),
            )
            self._events.put_nowait(signs)

    async def _reap_orphans(self) -> None:
        """What a rank's own processes leave behind comes to the launcher, and would stay there as zombies."""
        before: frozenset[int] = frozenset()
        while True:
            await asyncio.sleep(REAP)
            before = await run_in_thread(processes.reap, before)

    async def _watch_for_workers(self) -> None:
        """A rank that starts its workers itself waits for ever: torchrun has them look for its own store."""
        nap = self.state.watch.policy.start
        for _ in range(WORKERS_LOOKS):
            await asyncio.sleep(nap)
            if any(
                self._stacks.heartbeats.step(rank) is not None
                for rank in self._ranks.pids or self._ranks.ranks
            ):
                return
            if what := await self._stacks.workers():
                why = "torchrun starts one process for each rank, and a script that starts its own (mp.spawn)"
                self._say(f"{what}: {why} needs --mode exec")
                return
            nap *= 2

    @property
    def trained_alone(self) -> bool:
        """Whether all ranks here, of a job that has more than one, have made steps, and each of them for
        itself, however they ended."""
        has_several = self._link is not None or len(self._ranks.ranks) > 1
        return has_several and all(map(self._trained_alone, self._ranks.ranks))

    def _trained_alone(self, rank: int) -> bool:
        beats = self._stacks.heartbeats
        apart = self._plan.nnodes > 1 and beats.trained_apart(self._ranks.pids.values())
        return apart or beats.trained_alone(rank)

    def _observed(self, event: object) -> Event:
        """The event with what is to be seen now; a timer asks for a look by the kind of its event."""
        if isinstance(event, RankEnded):
            step = self._stacks.heartbeats.step(event.rank)
            return Exited(ended=event, step=step, alone=self._trained_alone(event.rank))
        if event is Settled:
            return Settled({one.rank: self._said(one.rank) for one in self.state.failures})
        if event is RanksSeen:
            return RanksSeen(alive=self._ranks.are_ending())
        if event is Catching:
            return Catching(self._heeding(self._left()))
        if event is VerdictIsLate:
            return VerdictIsLate()
        return event  # type: ignore[return-value]

    def _left(self) -> dict[int, int | None]:
        """The process of each rank that has not ended; None until it is known. c10d numbers the ranks itself:
        the plan's numbers stand for them as long as not all are known."""
        pids, planned = self._ranks.pids, self._ranks.ranks
        known = pids if len(pids) == len(planned) else dict.fromkeys(planned) | pids
        return {rank: pid for rank, pid in known.items() if rank not in self.state.ended}

    def _said(self, rank: int) -> RankTrace:
        return RankTrace(
            error=self._ranks.first_error(rank),
            at=self._ranks.last_place(rank),
            shortage=self._ranks.shortage(),
        )

    def _heeding(self, ranks: Mapping[int, int | None]) -> dict[int, tuple[int | None, tuple[int, ...]]]:
        told = self.state.stop.told if self.state.stop else frozenset()
        pids = [pid for pid in ranks.values() if pid is not None]
        found = processes.heeding(pids, self._stop_signal, told)
        return {rank: (pid, () if pid is None else found[pid]) for rank, pid in ranks.items()}

    # --- what is to be done ---------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case TellHub(report):
                self._report(report)
            case Say(text):
                self._say(text)
            case LookAfter(seconds, kind) if seconds:
                asyncio.get_running_loop().call_later(seconds, self._events.put_nowait, kind)
            case LookAfter(_, kind):
                self._events.put_nowait(kind)
            case SignalRank(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, self._stop_signal)
            case KeepSignal(signum):
                self._kept.append(signum)
            case TerminateRanks():
                self._ranks.terminate()
            case ForgetBeats(rank):
                self._stacks.heartbeats.forget(rank)
            case ShowFailure(failure):
                self._ranks.failed(failure)
            case _:
                self._start(self._carry_out_slowly(effect))

    async def _carry_out_slowly(self, effect: Effect) -> None:
        """What takes time, and ends with an event."""
        match effect:
            case KillRanks():
                await self._ranks.kill()
                self._events.put_nowait(RanksKilled())
            case AwaitAgent(seconds):
                await self._ranks.wait(seconds)
                self._events.put_nowait(AgentLeft())
            case CollectPeek():
                self._events.put_nowait(PeekCollected(tuple(await self._stacks.peek())))
            case CollectStacks(closer):
                found = await (self._look.closer() if closer else self._look.first())
                self._events.put_nowait(StacksCollected(tuple(found)))
            case KeepStacks():
                await self._look.keep(self._say)
                self._events.put_nowait(StacksKept())

    def _report(self, report: Report) -> None:
        self._hub.report(report)


class Alone:
    """What stands for the link of a single participant: the same rules for one node, and no network."""

    def __init__(
        self,
        node: str,
        world: int,
        *,
        events: asyncio.Queue[object],
        say: Callable[[str], None],
        again: float,
    ):
        """`events` gets what a link would have been told. `again`: as of HangPolicy."""
        self._events = events
        self._say = say
        self._job = JobState(
            nodes=[node],
            hub=0,
            local_ranks=1,
            bounds=JobBounds(again=again),
            present=Bits.of([0]),
            active=Bits.of([0]),
            world=world,
        )

    def report(self, report: Report) -> None:
        self._step(report)

    def _step(self, event: job_state.Event) -> None:
        loop = asyncio.get_running_loop()
        now = Now(wall=time.time(), steady=loop.time())
        self._job, effects = job_state.step(self._job, (0, None), event, now)
        for effect in effects:
            match effect:
                case TellAll(message):
                    self._events.put_nowait(message)
                case Say(text):
                    self._say(text)
                case StartTimer(seconds, timer):
                    loop.call_later(seconds, self._step, timer)


def _is_there(path: Path) -> bool:
    """False as well if a shared file system cannot tell at the moment (ESTALE, EIO)."""
    with contextlib.suppress(OSError):
        return path.exists()
    return False
