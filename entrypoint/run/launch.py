"""Runs this node's part of a job. `launch` is the entry: it refuses what cannot run, then goes through the
attempts, one after another.

attempt.py is one attempt, restart.py has the rules for the next one. A signal reaches whichever is running.
"""

import asyncio
import contextlib
import dataclasses
import gc
import os
import shlex
import signal
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from entrypoint.core import files
from entrypoint.core.errors import DONE, SAVED, BadInput, Refusal, of_signal
from entrypoint.core.threads import run_in_thread
from entrypoint.job import handover
from entrypoint.job.handover import has_host_half
from entrypoint.job.lock import Lock, holder_of
from entrypoint.job.rundir import RunDirectory
from entrypoint.node import processes
from entrypoint.node.guardian import Guardian
from entrypoint.plan import mistakes
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.plan.sources import Settings
from entrypoint.ranks import output
from entrypoint.ranks.output import Voice
from entrypoint.run.attempt import Attempt
from entrypoint.run.finished import FinishedAttempt
from entrypoint.run.given import Given
from entrypoint.run.hold import RunDirHold
from entrypoint.run.node_state import PLANNED
from entrypoint.run.signals import Signals
from entrypoint.schedulers import hostnames

LAST_WORDS = 30.0
"""Seconds at the end for a reader who has stopped to take what was said."""
FILES_OF_RANK = 2
"""Pipes from each rank, at least."""
CLOSE = 5.0
"""Seconds that the file system has to take that no attempt may follow."""


def launch(plan: LaunchPlan, settings: Settings, env: Mapping[str, str]) -> int:
    """Runs this node's part and returns its exit status. Before ranks start: BadInput, Unavailable."""
    gc.freeze()  # the modules
    gc.enable()
    _heed_keyboard()
    check(plan)
    check_place(plan, env)
    run = Path(plan.run_dir).absolute()
    plan = dataclasses.replace(plan, run_dir=str(run), env={**plan.env, "APPTRAIN_RUN_DIR": str(run)})
    processes.adopt_orphans()
    processes.allow_open_files(256 + 8 * plan.nproc_per_node)
    guardian = Guardian()
    session = _Session(plan, settings, env, guardian)
    last = None
    try:
        last = asyncio.run(session.run())
    finally:
        # Nobody heeds them any more, and they would end this process. A handler of ours would not last to its
        # end: Python takes it back.
        for signum in PLANNED:
            signal.signal(signum, signal.SIG_IGN)
        processes.kill_descendants(spare=guardian.pids)
        guardian.dismiss()
        session.leave(last)
    # The host half reads the file; with another status here the scheduler would kill nodes that still save.
    is_told = has_host_half(env) and not last.is_unwritten
    return DONE if last.outcome.status == SAVED and is_told else last.outcome.status


def _heed_keyboard() -> None:
    """bash has what it starts in the background ignore these, as every task under PBS; ranks would inherit
    that, and how depends on what starts them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def check(plan: LaunchPlan) -> None:
    """Raises BadInput for what `plan` can show but `launch` cannot run."""
    _check_venv(plan)
    if plan.context == "batch" and plan.nnodes > 1:
        raise BadInput(
            "not-a-task",
            f"this is the batch script or interactive shell of job {plan.allocation.job_id}, on one of its "
            f"{plan.nnodes} nodes only: start one task per node with {plan.allocation.start_line}",
        )
    may_be_open = processes.most_open_files()
    if FILES_OF_RANK * plan.nproc_per_node > may_be_open:
        raise BadInput(
            "ranks-open-files",
            f"--nproc-per-node {plan.nproc_per_node}: each rank takes {FILES_OF_RANK} open files of the "
            f"launcher, which may have {may_be_open} (ulimit -Hn): start fewer ranks",
        )
    mistakes.check_command(plan.command, Path.cwd(), mode=plan.mode, no_python=plan.no_python)


def check_place(plan: LaunchPlan, env: Mapping[str, str]) -> None:
    """Where an mpiexec says which task this is, this must not be the host of another; a name that is too
    short to tell counts for nothing."""
    here, nodes = os.uname().nodename, plan.allocation.nodes
    found = hostnames.find(here, nodes)
    if "APPTRAIN_PLACE" in env and len(found) == 1 and found[0] != plan.place:
        raise BadInput(
            "mpiexec-order",
            f"mpiexec has started the task of {plan.node}, node {plan.place}, on {here}, which is node "
            f"{found[0]}: use another --start, or have it keep to the order of its hosts",
        )


def _check_venv(plan: LaunchPlan) -> None:
    """The ranks run under this process's Python, which must be the venv's."""
    if plan.venv is None:
        return
    venv = Path(plan.venv)
    given = f"APPTRAIN_VENV={venv}" if plan.venv_is_by_variable else f"--venv {venv}"
    make = f"make venv DIR={shlex.quote(plan.venv)}"
    if not files.is_there(venv / "pyvenv.cfg"):
        raise BadInput("venv-not-a-venv", f"{given} is no venv, it has no pyvenv.cfg: make it with {make}")
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv)}))
    if not (files.is_there(venv / "bin" / "python") and files.is_there(packages)):
        raise BadInput(
            "venv-other-python",
            f"{given} was made by another Python than this one, {sys.version.split()[0]}: remove it, and "
            f"make it again with {make}",
        )
    if Path(sys.prefix).resolve() != venv.resolve():
        raise BadInput(
            "venv-not-active",
            f"{given}, but this is the Python of {sys.prefix}: start it through a job script or "
            f"containers/run.sh, or put {venv}/bin first in PATH",
        )


class _Session:
    """The attempts of one launch on this node: one, and those that `--on-failure restart` lets follow."""

    def __init__(self, plan: LaunchPlan, settings: Settings, env: Mapping[str, str], guardian: Guardian):
        self._given = Given.of_launch(plan, settings, env)
        self._guardian = guardian
        self._consoles = output.own_consoles(env)
        self._voice = Voice(console=self._consoles["err"])
        self.signals = Signals()
        lock = Lock(Path(plan.run_dir), holder_of(plan), self._voice.say)
        self._hold = RunDirHold(lock, self._voice, self.signals)

    async def run(self) -> FinishedAttempt:
        """Returns the attempt whose end is the launch's."""
        self.signals.catch()
        try:
            return await self._run()
        finally:
            await self._hold.release()
            await run_in_thread(self._consoles["err"].flush, LAST_WORDS)

    async def _run(self) -> FinishedAttempt:
        given = self._given
        while True:
            ended, before = await self._attempt(given), given.before
            if before is not None and not ended.has_met and self.signals.end is None:
                refusal = ended.refusal
                self._tell(before, "" if refusal and refusal.told else str(refusal or ended.outcome.error))
                return before
            if ended.refusal:
                raise ended.refusal
            if given.restarts is None or ended.outcome.status in (DONE, SAVED):
                self._tell(ended)
                return ended
            restarts = given.restarts.met(ended.plan.members) if ended.has_met else given.restarts
            restarts = restarts.without(ended.lost)
            why = ended.misfit or await self._why_final(ended)
            if why := why or restarts.why_not(ended.outcome):
                self._tell(ended, why if ended.speaks else "")
                return ended
            given = given.following(ended, restarts.begun())
            await run_in_thread(processes.kill_descendants, spare=self._guardian.pids)

    async def _attempt(self, given: Given) -> FinishedAttempt:
        attempt = Attempt(given, self.signals, self._hold, self._consoles)
        self._guardian.watch(Path(attempt.scratch.name))
        return await attempt.run()

    def _tell(self, ended: FinishedAttempt, why_no_restart: str = "") -> None:
        """Says how the attempt ended, and why that is the end."""
        for line in ended.in_words() if ended.speaks else []:
            self._voice.say(line)
        if why_no_restart:
            more = "; the job script decides what follows" if self._given.has_job_script else ""
            self._voice.say(f"no restart inside the allocation: {why_no_restart}{more}")

    def leave(self, last: FinishedAttempt | None) -> None:
        """The very last act: the host half learns what follows. Whatever keeps us from it, it finds out
        itself."""
        given = self._given
        is_first = not given.plan.place and not given.plan.local_rank
        if last is not None and is_first and self.signals.end is None:
            self._report(last)
        where = handover.folder(given.env)
        if where is None or given.plan.local_rank:
            return
        asked = of_signal(self.signals.end) if self.signals.end is not None else None
        run = last.run_dir if last is not None else given.run_dir
        lost = last.lost if last is not None else ()
        try:
            from entrypoint.batch import conclude  # ranks need not wait for it at the start

            conclude.leave(where, given.plan.attempt, run, given.plan.place, asked, lost)
        except (ImportError, OSError, Refusal, ValueError) as error:
            self._voice.say(f"what follows is left to the job script: {error}")

    def _report(self, last: FinishedAttempt) -> None:
        """Leaves the page about a run of the reference program. How the job ends does not depend on it."""
        try:
            from entrypoint.report import command  # not before the ranks start: nothing else needs it

            why = command.leave(last.run_dir.path, last.plan.attempt, self._given.env)
        except (ImportError, OSError) as error:
            why = str(error)
        if why:
            self._voice.say(f"no report of the run was written: {why}: apptrain report writes it")

    async def _why_final(self, ended: FinishedAttempt) -> str:
        """Why nothing may follow this failure; empty where something may. This node may be the only one that
        knows: the others find the next attempt closed."""
        was_asked = self.signals.end is not None or (ended.outcome.rank is None and ended.outcome.signal)
        why = "the job was asked to end" if was_asked else ended.why_final
        if why:
            for number in (ended.plan.attempt, ended.plan.attempt + 1):
                with contextlib.suppress(TimeoutError):
                    await run_in_thread(RunDirectory(ended.run_dir.path, number).close, seconds=CLOSE)
        return why
