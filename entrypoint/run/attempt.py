"""One attempt on this node, from the plan to the outcome. Begin at `Attempt.run`.

It has three parts. `_meet` finds the addresses, asks the driver and prepares the ranks while the nodes meet.
`_get_ready` has the ranks fit the nodes that came, and starts them. `_stay` stays with them (supervise.py).
Whatever a part finds out is a value that the next one takes. Then what is left is ended, the outcome is
written, and it is known how the attempt ended (finished.py).
"""

import asyncio
import contextlib
import dataclasses
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from entrypoint.core.errors import DONE, SAVED, BadInput, Refusal
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain
from entrypoint.core.private import write_private
from entrypoint.core.threads import run_in_thread
from entrypoint.doctor import fabric
from entrypoint.job import outcome
from entrypoint.job.lock import InUse
from entrypoint.job.outcome import Outcome
from entrypoint.meet.messages import Fail
from entrypoint.meet.node_failures import NodeFailures
from entrypoint.node import binding, gpu
from entrypoint.node.gpu import DriverReport
from entrypoint.node.network import Endpoint
from entrypoint.plan import mistakes, passed
from entrypoint.plan.launch_plan import LaunchPlan, in_brief, with_env
from entrypoint.plan.origin import derived_from
from entrypoint.ranks import heartbeat, stacks
from entrypoint.ranks import hooks as inside
from entrypoint.ranks.output import Console, Relay, Voice
from entrypoint.ranks.ranks import Ranks
from entrypoint.record import source
from entrypoint.record.manifest import Manifest, kept_plan
from entrypoint.run import meeting, start
from entrypoint.run.endings import asked_to_end, to_failure
from entrypoint.run.finished import FinishedAttempt
from entrypoint.run.given import Given, identity, version_of_torch
from entrypoint.run.hold import RunDirHold
from entrypoint.run.meeting import Meeting
from entrypoint.run.node_state import PLANNED, NodeState
from entrypoint.run.signals import Signals
from entrypoint.run.supervise import Supervisor

OUTCOME = 60.0
"""Seconds for the file system to take how this node ended."""
LAST_OUTPUT = 2.0, 6.0
"""Seconds in which nothing comes any more of what the ranks wrote before they ended; seconds in all."""
T = TypeVar("T")


class AskedToEnd(Exception):
    """A signal has asked this process to end, while no rank runs."""


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Ranks that may start, for the nodes of the plan."""

    plan: LaunchPlan
    """With all that the ranks need."""
    endpoint: Endpoint
    ranks: Ranks
    relay: Relay
    driver: DriverReport | None
    """What it said if it was asked."""


@dataclass(frozen=True, kw_only=True)
class _Met:
    """The nodes have met, and these ranks were prepared meanwhile."""

    meeting: Meeting
    prepared: _Prepared


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """How far the attempt has come, and how it ended."""

    outcome: Outcome
    refusal: Refusal | None = None
    meeting: Meeting | None = None
    """None if the nodes have not met."""
    prepared: _Prepared | None = None
    """With the ranks if they were started."""
    state: NodeState | None = None
    """The last one, if they were."""
    telling: asyncio.Task[None] | None = None
    """Tells of the start."""
    pace: tuple[int, float] | None = None
    """As `Heartbeats.pace` has it."""
    trained_alone: bool = False
    """As `Supervisor.trained_alone` has it."""


class Attempt:
    def __init__(self, given: Given, signals: Signals, hold: RunDirHold, consoles: Mapping[str, Console]):
        self.scratch = tempfile.TemporaryDirectory(prefix="apptrain-", ignore_cleanup_errors=True)
        """A directory of this node, as long as ranks may run."""
        self._given = given
        self._signals = signals
        self._hold = hold
        self._consoles = consoles
        self._voice = Voice(console=consoles["err"])
        self._manifest = Manifest(given.run_dir.path, given.env, self._voice.once, given.wished)
        self._start = start.StartTimes(time.time()) if given.before else start.of_launch(given.env)
        self._earlier_wish: tuple[int, int] | None = None

    async def run(self) -> FinishedAttempt:
        """Returns once this node's outcome is written."""
        given = self._given
        planned: list[int] = []  # no stop file can be there before its directory
        try:
            made = await self._unless_signalled(run_in_thread(self._make_run_dir), planned.append)
        except (Refusal, AskedToEnd) as error:
            broken = self._broken_off(error, None)  # It is not written: there is no place that takes it.
            return FinishedAttempt(
                plan=given.plan,
                run_dir=given.run_dir,
                outcome=broken.outcome,
                refusal=broken.refusal,
                has_met=False,
            )
        for signum in planned:
            self._signals.take(signum)
        return await self._finish(await self._run(), made)

    async def _finish(self, ended: _Ended, made: tuple[int, int]) -> FinishedAttempt:
        """Writes and tells how this node ended. `made`: what its run directory was known by."""
        given, met, state = self._given, ended.meeting, ended.state
        plan = met.plan if met else given.plan
        mine = dataclasses.replace(ended.outcome, error=plain(ended.outcome.error))  # it may quote a rank
        misfit = ""
        if given.before and given.restarts and met:
            misfit = given.restarts.met(plan.members).misfit(mine)
            mine = given.before.outcome if misfit else mine
        await self._end_of_start(ended)
        is_gone = met is not None and plan.is_first and await self._lost_run_dir(made)
        is_written = await self._write(mine, plan, ended)
        if met and met.link:
            if state is None:
                met.link.report(Fail(to_failure(plan.place, mine)))
            await met.link.close()
        if plan.is_first and not is_gone:
            network = state.network if state else ""
            # The nodes tell each other of ranks that end well, and steps count of those that are ended too.
            alone = mine.alone if mine.status in (DONE, SAVED) else ended.trained_alone
            await self._manifest.end(plan, mine.status, alone=alone, network=network, pace=ended.pace)
        return FinishedAttempt(
            plan=plan,
            run_dir=given.run_dir,
            outcome=mine,
            refusal=ended.refusal,
            has_met=met is not None,
            lost=state.lost if state else (),
            why_final=state.why_final if state else "",
            misfit=misfit,
            is_unwritten=not is_written,
            has_echoes=ended.prepared is not None and ended.prepared.relay.echoes > 0,
        )

    def _make_run_dir(self) -> tuple[int, int]:
        """Returns what it is known by."""
        run_dir = self._given.run_dir
        if self._given.before and not run_dir.path.exists():
            raise BadInput("run-dir-gone", f"the run directory {run_dir.path} is gone")
        self._earlier_wish = run_dir.create()
        return run_dir.inode()

    async def _lost_run_dir(self, made: tuple[int, int]) -> bool:
        """Says so if somebody removed the run directory while the job ran; another node may have made it anew
        for its outcome."""
        run_dir = self._given.run_dir
        try:
            is_gone = await run_in_thread(run_dir.inode, seconds=OUTCOME) != made
        except FileNotFoundError:
            is_gone = True
        except OSError:
            is_gone = False
        if is_gone:
            self._voice.say(
                f"the run directory {run_dir.path} was removed while the job ran: its logs, "
                "its manifest and what else was there are gone"
            )
        return is_gone

    async def _write(self, ended: Outcome, plan: LaunchPlan, how: _Ended) -> bool:
        """Writes this node's outcome if it takes part; false if it could not."""
        given = self._given
        file = given.run_dir.outcome(plan.place, plan.local_rank)
        if self._takes_part(plan, how):
            try:
                await run_in_thread(outcome.write, file, ended, seconds=OUTCOME)
            except OSError as error:
                self._voice.say(f"the outcome (status {ended.status}) cannot be written: {error}")
                return False
            return True
        with contextlib.suppress(TimeoutError):
            await run_in_thread(outcome.release, file, seconds=OUTCOME)
            if given.before and not how.meeting:  # no rank has run
                await run_in_thread(given.run_dir.release_logs, plan.node, seconds=OUTCOME)
        return True

    def _takes_part(self, plan: LaunchPlan, ended: _Ended) -> bool:
        """Whether this node writes an outcome: not as a spare, of a restart that was not begun, nor in a run
        directory that another job has, if nobody counts the attempts."""
        if isinstance(ended.refusal, InUse) and not self._given.counts_attempts:
            return False
        if ended.meeting:
            return not plan.is_spare
        return self._given.before is None

    async def _run(self) -> _Ended:
        breaks = (Refusal, OSError, AskedToEnd)
        with self.scratch:
            async with contextlib.AsyncExitStack() as until_ended:
                try:
                    met = await self._unless_signalled(self._meet(until_ended))
                except breaks as error:
                    return self._broken_off(error, None)
                try:
                    ready = await self._unless_signalled(self._get_ready(met, until_ended))
                except breaks as error:
                    return self._broken_off(error, met.meeting)
                return await self._stay(met.meeting, ready)

    def _broken_off(self, error: Exception, met: Meeting | None) -> _Ended:
        """Before ranks have run. `met`: if the nodes have."""
        if isinstance(error, Refusal):
            return _Ended(outcome=self._outcome(error.status, str(error)), refusal=error, meeting=met)
        if isinstance(error, OSError):
            return _Ended(outcome=self._of_file_system(error), meeting=met)
        assert self._signals.end is not None
        asked = asked_to_end(self._given.plan.node, self._signals.end, time.time())
        return _Ended(outcome=asked, meeting=met)

    def _outcome(self, status: int, error: str) -> Outcome:
        return Outcome(status=status, node=self._given.plan.node, time=time.time(), error=error)

    def _of_file_system(self, error: OSError) -> Outcome:
        return self._outcome(1, f"{error.strerror}: {error.filename or self._given.run_dir.path}")

    async def _unless_signalled(
        self, work: Coroutine[Any, Any, T], planned: Callable[[int], object] | None = None
    ) -> T:
        """What the work returns. AskedToEnd: a signal that asks for that came first, and ended the work.
        `planned`: gets one that asks for a planned end, in place of the stop file."""
        if self._signals.end is not None:
            work.close()
            raise AskedToEnd
        task = asyncio.create_task(work)
        heeding = asyncio.create_task(self._heed(task, planned or self._ask_to_stop))
        try:
            return await task
        except asyncio.CancelledError:
            if self._signals.end is None:
                raise
            raise AskedToEnd from None
        finally:
            heeding.cancel()

    async def _heed(self, work: asyncio.Task[Any], planned: Callable[[int], object]) -> None:
        """Takes signals while no rank runs: `planned` those that ask for a planned end; others end the
        work."""
        while True:
            signum = (await self._signals.next()).signum
            if work.done():  # It is for what comes next.
                self._signals.take(signum)
                return
            if signum in PLANNED:
                planned(signum)
            else:
                work.cancel()

    def _ask_to_stop(self, _: int) -> None:
        """Leaves the ranks the wish, in the stop file."""
        threading.Thread(target=self._given.run_dir.ask_to_stop, daemon=True).start()

    # --- until the nodes have met ---------------------------------------------------------------------------

    async def _meet(self, until_ended: contextlib.AsyncExitStack) -> _Met:
        plan = self._given.plan
        await self._hold_run_dir(plan)
        await run_in_thread(self._forget_earlier_runs)
        prepared = await until_ended.enter_async_context(self._prepared(plan))
        self._start.mark("plan")
        voice = self._voice.of(plan)
        met = await meeting.meet(self._given, prepared.plan, prepared.endpoint, voice, prepared.driver)
        self._start.mark("nodes")
        return _Met(meeting=met, prepared=prepared)

    async def _hold_run_dir(self, plan: LaunchPlan) -> None:
        """The first node has it for all."""
        if plan.is_first:
            await self._hold.take(is_restart=self._given.before is not None)

    def _forget_earlier_runs(self) -> None:
        given, plan, run_dir = self._given, self._given.plan, self._given.run_dir
        file = run_dir.outcome(plan.place, plan.local_rank)
        file.unlink(missing_ok=True)
        outcome.reserve(file)
        if plan.is_first and not given.before and not given.counts_attempts:  # Nobody else does.
            run_dir.forget_stop(self._earlier_wish)
            run_dir.forget_claims()
            run_dir.forget_restarts()
            if not plan.attempt:  # Slurm's count, where it runs a script of the user's again
                run_dir.note_first()

    @contextlib.asynccontextmanager
    async def _prepared(self, plan: LaunchPlan) -> AsyncIterator[_Prepared]:
        """What the ranks need and takes time, for the nodes of the plan. At the end they are ended, and what
        they have written is passed on."""
        given, voice = self._given, self._voice.of(plan)
        endpoint = await meeting.find_endpoint(given, plan)
        plan = self._watchable(endpoint.plan)
        await run_in_thread(given.run_dir.write_plan, kept_plan(plan, given.env), plan.place)
        await self._manifest.tell_node(plan)
        if given.before is None:
            left_out = mistakes.own_module_left_out(plan.command, Path.cwd())
            for note in filter(None, (*plan.notes, left_out)):
                voice.once(note)
        plan, driver = await self._bound(plan, voice)
        relay = Relay(self._consoles)
        ranks = await run_in_thread(  # it opens the logs, in the run directory
            Ranks,
            plan,
            given.rank_env(plan, self._hooks),
            relay,
            given.run_dir,
            scratch=self._scratch,
            show={0} if given.settings.value("show-ranks") == "0" else None,
            fabric=fabric.to_prove(plan, given.settings, given.env),
        )
        try:
            relay.start()
            await ranks.prepare()
            yield _Prepared(plan=plan, endpoint=endpoint, ranks=ranks, relay=relay, driver=driver)
        finally:
            try:
                await ranks.kill()
            finally:
                await _finish_output(relay)

    async def _bound(self, plan: LaunchPlan, voice: Voice) -> tuple[LaunchPlan, DriverReport | None]:
        """(the plan with the cores of its ranks, what this node's driver said) once the stack fits that."""
        given = self._given
        env = given.rank_env(plan, self._hooks)
        driver = await gpu.check_stack(plan, env, voice.say)
        bound = await binding.with_cores_of_ranks(plan, env, driver, voice.once)
        if bound.cores:
            await run_in_thread(given.run_dir.write_plan, kept_plan(bound, given.env), bound.place)
        return bound, driver

    @property
    def _scratch(self) -> Path:
        return Path(self.scratch.name)

    @property
    def _beats(self) -> Path:
        """Where ranks leave their signs of life."""
        return self._scratch / "heartbeat"

    @property
    def _hooks(self) -> Path:
        """What the ranks' Python imports, so that they can be looked at."""
        return self._scratch / "inside"

    def _watchable(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan with what the ranks need to say that they go on, and for their stacks to be seen."""
        given, scratch = self._given, self._scratch
        self._beats.mkdir(exist_ok=True)
        if not self._hooks.exists():
            inside.install(self._hooks)
        added = {heartbeat.VARIABLE: str(self._beats)}
        added |= {"APPTRAIN_ATTEMPT": str(plan.attempt), "APPTRAIN_JOB_ID": plan.allocation.job_id}
        added |= fabric.variables(plan, given.settings, given.env, scratch)
        added |= stacks.variables(plan.device, scratch, given.run_dir, given.env, version_of_torch())
        return with_env(plan, added, derived_from("hang-timeout"))

    # --- until the ranks run --------------------------------------------------------------------------------

    async def _get_ready(self, met: _Met, until_ended: contextlib.AsyncExitStack) -> _Prepared:
        """Has the ranks fit the nodes that have met, says what is going to run, and starts them."""
        prepared, given, plan = met.prepared, self._given, met.meeting.plan
        if plan != prepared.plan:
            await until_ended.aclose()
            prepared = await until_ended.enter_async_context(self._prepared(plan))
            await self._hold_run_dir(plan)
        plan, ranks, voice = prepared.plan, prepared.ranks, self._voice.of(plan)
        for line in self._about_restart(plan):
            voice.once(line)
        if plan.is_first and given.before is None:
            await self._tell_not_passed()
        ready = await ranks.ready()
        gpu.check_gpus(plan, ready.gpus, voice.once)
        if said := ranks.not_forked(ready, given.settings.value("start-ranks")):
            voice.once(said)
        voice.once(in_brief(plan))
        for line in met.meeting.in_words(prepared.endpoint, given.env):
            voice.once(line)
        self._start.mark("torch")
        if plan.is_first:
            await self._record(plan)
        elif given.restarts is not None:
            await self._hold.note_holder()
        await ranks.start()
        return prepared

    def _about_restart(self, plan: LaunchPlan) -> list[str]:
        """Why this attempt follows another, and what has changed."""
        given = self._given
        if given.before is None or given.restarts is None:
            return []
        names = ", ".join(given.restarts.met(plan.members).lost_names[:4])
        without = f", without {names}" if names else ""
        count = given.restarts.count
        return [
            *given.before.in_words(),
            f"restart {count} inside the allocation, as attempt {plan.attempt}{without}",
        ]

    async def _tell_not_passed(self) -> None:
        """Says which variables of the user do not reach the ranks; a file has all of their names."""
        if self._given.not_passed:
            with contextlib.suppress(OSError, TimeoutError):
                if line := await run_in_thread(self._note_not_passed, seconds=OUTCOME):
                    self._voice.say(line)

    def _note_not_passed(self) -> str:
        given = self._given
        file = given.run_dir.path / passed.FILE
        write_private(file, "\n".join([*given.not_passed, ""]))
        script = source.script(given.plan.command, Path.cwd())
        return passed.said(passed.meant(given.not_passed), script, file)

    async def _record(self, plan: LaunchPlan) -> None:
        env = self._given.env
        stack, mine = gpu.stack_of_image(env), identity(plan, env, "")
        await self._manifest.record(plan, stack, image_id=mine.image_id, versions=mine.versions)

    # --- until they have ended ------------------------------------------------------------------------------

    async def _stay(self, met: Meeting, ready: _Prepared) -> _Ended:
        given, plan, link = self._given, ready.plan, met.link
        supervisor = Supervisor(
            plan,
            ready.ranks,
            link,
            self._signals,
            self._voice.say,
            signal.Signals["SIG" + given.settings.value("stop-signal")],
            given.hang_policy,
            stacks.StackCollector(ready.ranks, given.run_dir, self._scratch, self._beats),
            given.settings.value("term-grace"),
        )
        telling = asyncio.create_task(self._tell_start(ready)) if plan.is_first else None
        if link and plan.is_first and plan.allocation.scheduler == "slurm":
            log = given.run_dir.path / "job.log"  # of a job script, else srun's words are not there
            link.watch(NodeFailures(log, plan.allocation.nodes))
        try:
            ended = await supervisor.run(given.run_dir.stop if plan.is_first else None)
        except OSError as error:
            ended = self._of_file_system(error)
        if ended.status not in (DONE, SAVED):
            ready.relay.failed()
        return _Ended(
            outcome=ended,
            meeting=met,
            prepared=ready,
            state=supervisor.state,
            telling=telling,
            pace=heartbeat.Heartbeats(self._beats).pace() if plan.is_first else None,
            trained_alone=supervisor.trained_alone,
        )

    async def _tell_start(self, ready: _Prepared) -> None:
        await ready.ranks.started.wait()
        self._start.mark("ranks")
        self._voice.say(self._start.in_words())
        queued = {} if self._start.queued is None else {"queued_s": self._start.queued}
        await self._manifest.note(ready.plan, start=self._start.parts, **queued)

    async def _end_of_start(self, ended: _Ended) -> None:
        """What is being told of it is told to the end."""
        if ended.telling is not None:
            if ended.prepared is not None and not ended.prepared.ranks.started.is_set():
                ended.telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ended.telling


async def _finish_output(relay: Relay) -> None:
    """As far as whoever reads it, and the file system of the logs, let us."""
    with contextlib.suppress(TimeoutError):
        await run_in_thread(relay.finish, *LAST_OUTPUT, seconds=LAST_OUTPUT[1] + 2)
