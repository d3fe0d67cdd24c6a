"""One attempt on this node, from the plan to the outcome. Begin at `Attempt.run`; the order of its steps
before the ranks start is in `_get_ready`.

It finds the addresses, asks the driver, prepares the ranks while the nodes meet, starts them and stays with
them (supervise.py). Then it ends what is left, writes the outcome, and says once what happened.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from entrypoint.doctor import fabric
from entrypoint.errors import DONE, SAVED, BadInput, Refusal
from entrypoint.job import outcome
from entrypoint.job.handover import has_host_half
from entrypoint.job.lock import InUse
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.meet import terms
from entrypoint.meet.link import Link
from entrypoint.meet.messages import Fail
from entrypoint.node import gpu, network
from entrypoint.plain import plain
from entrypoint.plan import mistakes, passed
from entrypoint.plan.launch_plan import LaunchPlan, in_brief, with_env
from entrypoint.plan.origin import derived_from
from entrypoint.plan.sources import Settings
from entrypoint.private import write_private
from entrypoint.record import source
from entrypoint.record.manifest import Manifest, kept_plan
from entrypoint.run import stacks
from entrypoint.run.endings import asked_to_end, to_failure
from entrypoint.run.finished import FinishedAttempt
from entrypoint.run.node_state import PLANNED, HangPolicy
from entrypoint.run.peers import Peers, identity, version
from entrypoint.run.ranks import Ranks
from entrypoint.run.restart import Restarts
from entrypoint.run.supervise import Supervisor
from entrypoint.threads import run_in_thread
from entrypoint.watch import heartbeat, inside, output, start
from entrypoint.watch.node_failures import NodeFailures

OUTCOME = 60.0
"""Seconds for the file system to take how this node ended."""
FIRST_STEP = 60.0
"""Seconds after which a rank without a step is looked at for processes of its own that wait."""
LAST_OUTPUT = 2.0, 6.0
"""Seconds in which nothing comes any more of what the ranks wrote before they ended; seconds in all."""


class Attempt:
    def __init__(
        self,
        plan: LaunchPlan,
        settings: Settings,
        env: Mapping[str, str],
        consoles: dict[str, output.Console],
        restarts: Restarts | None,
        before: FinishedAttempt | None,
        hold_run_dir: Callable[..., Awaitable[None]],
    ):
        """`restarts`: where they may follow. `before`: the attempt that this one restarts. `hold_run_dir`
        raises InUse where another job has the run directory; `again`: the attempt is a restart."""
        self.plan = plan
        """Completed step by step."""
        self.settings = settings
        names = env.get(passed.NOT_PASSED, "").split()
        self.env = env = {name: value for name, value in env.items() if name != passed.NOT_PASSED}
        self._not_passed = sorted(set(names))
        self.run_dir = RunDirectory(Path(plan.run_dir), plan.attempt)
        self._manifest = Manifest(self.run_dir.path, env, self._say_once)
        self.restarts = restarts
        self.before = before
        self._hold_run_dir = hold_run_dir
        self.consoles = consoles
        self.relay = output.Relay(self.consoles)
        self.said: set[str] = set()
        self.link: Link | None = None
        self.has_met = False
        self.asked: int | None = None
        """The signal by which this process was asked to end."""
        self.ranks: Ranks | None = None
        self.getting_ready: asyncio.Task[Ranks] | None = None
        self.supervisor: Supervisor | None = None
        self._start = start.of_launch(env) if before is None else start.StartTimes(time.time())
        self._telling: asyncio.Task[None] | None = None
        self.scratch = tempfile.TemporaryDirectory(prefix="apptrain-", ignore_cleanup_errors=True)
        self.heartbeats = Path(self.scratch.name, "heartbeat")
        self.inside = Path(self.scratch.name, "inside")
        self.peers = Peers(
            granted=plan,
            settings=settings,
            env=env,
            run_dir=self.run_dir,
            restarts=restarts,
            is_restart=before is not None,
            again=self._again,
            say=self._say,
            say_once=self._say_once,
            find=self._find_endpoint,
        )

    async def run(self) -> FinishedAttempt:
        """Returns once this node's outcome is written."""
        try:
            made = await run_in_thread(self._make_run_dir)
        except Refusal as refusal:
            return self._finished(self._outcome(refusal.status, str(refusal)), refusal=refusal)
        refused = None
        try:
            ended = await self._run()
        except Refusal as refusal:
            refused = refusal
            ended = self._outcome(refusal.status, str(refusal))
        except OSError as error:
            ended = self._outcome(1, f"{error.strerror}: {error.filename or self.run_dir.path}")
        ended, misfit = dataclasses.replace(ended, error=plain(ended.error)), ""  # it may quote a rank
        if self.before is not None and self.restarts is not None:
            misfit = self.restarts.misfit(ended)
            ended = self.before.outcome if misfit else ended
        await self._end_of_start()
        is_gone = self.has_met and self.plan.is_first and await self._lost_run_dir(made)
        is_written = await self._write(ended, is_elsewhere=isinstance(refused, InUse))
        if self.link is not None:
            if self.supervisor is None:
                self.link.report(Fail(to_failure(self.plan.place, ended)))
            await self.link.close()
        if self.plan.is_first and self.ranks and not is_gone:
            await self._manifest.end(self.plan, ended.status, alone=ended.alone, network=self.ranks.network)
        return self._finished(ended, refusal=refused, misfit=misfit, is_unwritten=not is_written)

    def _finished(
        self, ended: Outcome, *, refusal: Refusal | None, misfit: str = "", is_unwritten: bool = False
    ) -> FinishedAttempt:
        state = self.supervisor.state if self.supervisor else None
        return FinishedAttempt(
            plan=self.plan,
            run_dir=self.run_dir,
            outcome=ended,
            refusal=refusal,
            has_met=self.has_met,
            lost=state.lost if state else (),
            why_final=state.why_final if state else "",
            misfit=misfit,
            is_unwritten=is_unwritten,
            has_echoes=self.relay.echoes > 0,
        )

    def _make_run_dir(self) -> tuple[int, int]:
        """Returns what it is known by."""
        if self.before is not None and not self.run_dir.path.exists():
            raise BadInput(f"the run directory {self.run_dir.path} is gone")
        self.run_dir.create()
        return self.run_dir.inode()

    async def _lost_run_dir(self, made: tuple[int, int]) -> bool:
        """Says so if somebody removed the run directory while the job ran; another node may have made it anew
        for its outcome."""
        try:
            is_gone = await run_in_thread(self.run_dir.inode, seconds=OUTCOME) != made
        except FileNotFoundError:
            is_gone = True
        except OSError:
            is_gone = False
        if is_gone:
            self._say(
                f"the run directory {self.run_dir.path} was removed while the job ran: its logs, "
                "its manifest and what else was there are gone"
            )
        return is_gone

    async def _write(self, ended: Outcome, *, is_elsewhere: bool) -> bool:
        """Writes this node's outcome if it takes part; false where it could not. `is_elsewhere`: another job
        has the run directory."""
        file = self.run_dir.outcome(self.plan.place, self.plan.local_rank)
        if self._takes_part(is_elsewhere):
            try:
                await run_in_thread(outcome.write, file, ended, seconds=OUTCOME)
            except OSError as error:
                self._say(f"the outcome (status {ended.status}) cannot be written: {error}")
                return False
            return True
        with contextlib.suppress(TimeoutError):
            await run_in_thread(outcome.release, file, seconds=OUTCOME)
        return True

    def _takes_part(self, is_elsewhere: bool) -> bool:
        """Whether this node writes an outcome: not as a spare, of a restart that was not begun, nor in the
        place of another job's, where nobody counts the attempts."""
        if is_elsewhere and not has_host_half(self.env):
            return False
        if self.has_met:
            return not self.plan.is_spare
        return self.before is None

    async def _run(self) -> Outcome:
        if self.asked is not None:
            return asked_to_end(self.plan.node, self.asked, time.time())
        try:
            self.getting_ready = asyncio.create_task(self._get_ready())
            try:
                ranks = await self.getting_ready
            except asyncio.CancelledError:
                if self.asked is None:
                    raise
                return asked_to_end(self.plan.node, self.asked, time.time())
            stop_signal = signal.Signals["SIG" + self.settings.value("stop-signal")]
            self.supervisor = Supervisor(
                self.plan,
                ranks,
                self.link,
                self._say,
                stop_signal,
                self._hang_policy(),
                stacks.StackCollector(ranks, self.run_dir, Path(self.scratch.name), self.heartbeats),
                self.settings.value("term-grace"),
            )
            if self.asked is not None:
                self.supervisor.signalled(self.asked)
            if self.link and self.plan.is_first and self.plan.allocation.scheduler == "slurm":
                log = self.run_dir.path / "job.log"  # of a job script, else srun's words are not there
                self.link.watch(NodeFailures(log, self.plan.allocation.nodes).look)
            ended = await self.supervisor.run(self.run_dir.stop if self.plan.is_first else None)
            if ended.status not in (DONE, SAVED):
                self.relay.failed()
            return ended
        finally:
            if self.ranks is not None:
                await self.ranks.kill()
            await self._finish_output()
            self.scratch.cleanup()

    async def _finish_output(self) -> None:
        """As far as whoever reads it, and the file system of the logs, let us."""
        with contextlib.suppress(TimeoutError):
            await run_in_thread(self.relay.finish, *LAST_OUTPUT, seconds=LAST_OUTPUT[1] + 2)

    async def _get_ready(self) -> Ranks:
        """Everything up to the start of the ranks; a signal cancels it."""
        await self._hold()
        await run_in_thread(self._forget_earlier_runs)
        endpoint, ranks = await self._prepare()
        self._start.mark("plan")
        self.link = await self.peers.meet(self.plan, endpoint)
        self._start.mark("nodes")
        self.has_met = True
        members = self.link.members if self.link is not None else self.plan.members
        moved = self.link.moved if self.link is not None else ""
        if self.restarts is not None:
            self.restarts.went(members)
        if members != self.plan.members or moved:
            await ranks.kill()
            await self._finish_output()
            self.plan = self.peers.planned(members, moved)
            endpoint, ranks = await self._prepare()
            await self._hold()
        self._tell_restart()
        if self.plan.is_first and self.before is None:
            await self._tell_not_passed()
        gpu.check_gpus(self.plan, await ranks.gpus_seen(), self._say_once)
        if said := ranks.not_forked(self.settings.value("start-ranks")):
            self._say_once(said)
        self._say_once(in_brief(self.plan))
        if self.link is not None:
            for line in self.peers.found(self.plan, self.link, endpoint):
                self._say_once(line)
        self._start.mark("torch")
        if self.plan.is_first:
            await self._record()
            self._telling = asyncio.create_task(self._tell_start(ranks))
        await ranks.start()
        return ranks

    async def _tell_not_passed(self) -> None:
        """Says which variables of the user do not reach the ranks; a file has all of their names."""
        if self._not_passed:
            with contextlib.suppress(OSError, TimeoutError):
                if line := await run_in_thread(self._note_not_passed, seconds=OUTCOME):
                    self._say(line)

    def _note_not_passed(self) -> str:
        file = self.run_dir.path / passed.FILE
        write_private(file, "\n".join([*self._not_passed, ""]))
        script = source.script(self.plan.command, Path.cwd())
        return passed.said(passed.meant(self._not_passed), script, file)

    async def _tell_start(self, ranks: Ranks) -> None:
        await ranks.started.wait()
        self._start.mark("ranks")
        self._say(self._start.in_words())
        await self._manifest.note(self.plan, start=self._start.parts)

    async def _end_of_start(self) -> None:
        """What is being told of it is told to the end."""
        if self._telling is not None:
            if self.ranks is not None and not self.ranks.started.is_set():
                self._telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._telling

    async def _hold(self) -> None:
        """The first node has the run directory for all."""
        if self.plan.is_first:
            await self._hold_run_dir(again=self.before is not None)

    async def _record(self) -> None:
        stack, mine = gpu.stack_of_image(self.env), identity(self.plan, self.env, "")
        await self._manifest.record(self.plan, stack, image_id=mine.image_id, versions=mine.versions)

    def _forget_earlier_runs(self) -> None:
        file = self.run_dir.outcome(self.plan.place, self.plan.local_rank)
        file.unlink(missing_ok=True)
        outcome.reserve(file)
        if self.plan.is_first and self.before is None and not has_host_half(self.env):  # Nobody else does.
            self.run_dir.forget_stop()
            self.run_dir.forget_claims()
            self.run_dir.forget_restarts()

    async def _prepare(self) -> tuple[network.Endpoint, Ranks]:
        """What the ranks need and takes time, for the nodes of the plan."""
        endpoint = await self._find_endpoint(self.plan)
        self.plan = self._watchable(endpoint.plan)
        await run_in_thread(self.run_dir.write_plan, kept_plan(self.plan, self.env), self.plan.place)
        await self._manifest.tell_node(self.plan)
        if self.before is None:
            for note in self.plan.notes:
                self._say_once(note)
        shown = {0} if self.settings.value("show-ranks") == "0" else None
        env = self._rank_env()
        await gpu.check_stack(self.plan, env, self._say)
        self.relay = output.Relay(self.consoles)
        scratch, proven = Path(self.scratch.name), fabric.to_prove(self.plan, self.settings, self.env)
        self.ranks = Ranks(
            self.plan, env, self.relay, self.run_dir, scratch=scratch, show=shown, fabric=proven
        )
        self.relay.start()
        await self.ranks.prepare()
        return endpoint, self.ranks

    def _tell_restart(self) -> None:
        """Says why this attempt follows another, and what has changed."""
        if self.before is None or self.restarts is None:
            return
        for line in self.before.in_words():
            self._say_once(line)
        names = ", ".join(self.restarts.lost[:4])
        without = f", without {names}" if names else ""
        self._say_once(
            f"restart {self.restarts.count} inside the allocation, as attempt {self.plan.attempt}{without}"
        )

    def _watchable(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan with what the ranks need to say that they go on, and for their stacks to be seen."""
        scratch = Path(self.scratch.name)
        self.heartbeats.mkdir(exist_ok=True)
        if not self.inside.exists():
            inside.install(self.inside)
        added = {heartbeat.VARIABLE: str(self.heartbeats)}
        added |= {"APPTRAIN_ATTEMPT": str(plan.attempt), "APPTRAIN_JOB_ID": plan.allocation.job_id}
        added |= fabric.variables(plan, self.settings, self.env, scratch)
        added |= stacks.variables(plan.device, scratch, self.run_dir, self.env, version("torch"))
        return with_env(plan, added, derived_from("hang-timeout"))

    def _hang_policy(self) -> HangPolicy:
        return HangPolicy(
            step=self.settings.value("hang-timeout"),
            silence=self.settings.value("silence-timeout"),
            start=FIRST_STEP,
            is_chosen=self.settings.given("hang-timeout"),
            again=self._again,
        )

    @property
    def _again(self) -> float:
        """Seconds between the first two looks at ranks that make no step."""
        return float(self.settings.value("hang-timeout")) / 5 or terms.Timeouts.again

    def _outcome(self, status: int, error: str) -> Outcome:
        return Outcome(status=status, node=self.plan.node, time=time.time(), error=error)

    async def _find_endpoint(self, plan: LaunchPlan) -> network.Endpoint:
        """What only this node knows of the network; the store's port is still free there."""
        endpoint = await asyncio.to_thread(network.find, plan, self.env)
        if self.plan.is_first:
            network.check_store_port(endpoint.plan, terms.PORT_ADVICE)
        return endpoint

    def _rank_env(self) -> dict[str, str]:
        dropped = passed.stale(self.env)
        env = {name: value for name, value in self.env.items() if name not in dropped} | dict(self.plan.env)
        env["PATH"] = mistakes.search_path(env)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(self.inside)]))
        return env

    def signalled(self, signum: int) -> None:
        if signum not in PLANNED:
            self.asked = signum
        if self.supervisor is not None:
            self.supervisor.signalled(signum)
        elif signum in PLANNED:  # read once there are ranks to stop
            threading.Thread(target=self.run_dir.ask_to_stop, daemon=True).start()
        elif self.getting_ready is not None:
            self.getting_ready.cancel()

    def _say(self, text: str) -> None:
        self.consoles["err"].say(f"apptrain: {text}")

    def _say_once(self, text: str) -> None:
        """Says what is the same for all nodes: on the first only."""
        if self.plan.is_first and text not in self.said:
            self.said.add(text)
            self._say(text)
