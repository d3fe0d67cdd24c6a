"""One launch on this node, from the plan to the outcome.

The secret: the order of things. Check; find the addresses; ask the driver; prepare the ranks while the nodes
meet; start them; stay with them (supervise.py); end what is left; write the outcome; say once what happened.
"""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import shlex
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from entrypoint import (
    __version__,
    blame,
    gpu,
    heartbeat,
    join,
    network,
    outcome,
    output,
    processes,
    reach,
    stacks,
)
from entrypoint import plan as plans
from entrypoint.errors import DONE, SAVED, BadInput, Refusal
from entrypoint.heartbeat import Heartbeats
from entrypoint.options import Settings
from entrypoint.outcome import Outcome
from entrypoint.plan import LaunchPlan
from entrypoint.ranks import Ranks
from entrypoint.rundir import RunDirectory, read_key
from entrypoint.supervise import Patience, Supervisor, asked_to_end, to_failure

STALE = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    "PYTHON_EXEC",
)
"""With TORCHELASTIC_* and PET_*: what an outer torchrun left behind, or was told. An inherited
TORCHELASTIC_USE_AGENT_STORE hangs every rank, PET_* change torchrun's options unseen, PYTHON_EXEC the Python
of its ranks."""
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
"""SIGUSR2 asks for a planned end, the others end the launch."""
LAST_OUTPUT = 2.0
"""Seconds to read what the ranks wrote before they ended."""


def launch(plan: LaunchPlan, settings: Settings, env: Mapping[str, str]) -> int:
    """Runs this node's part and returns its exit status. Before ranks start: BadInput, Unavailable."""
    check(plan, settings)
    run = RunDirectory(Path(plan.run_dir).absolute(), plan.attempt)
    run.create()
    plan = dataclasses.replace(
        plan, run_dir=str(run.path), env={**plan.env, "APPTRAIN_RUN_DIR": str(run.path)}
    )
    processes.adopt_orphans()
    processes.allow_open_files(256 + 8 * plan.nproc_per_node)
    try:
        ended = asyncio.run(_Launch(plan, settings, env, run).run())
    finally:
        processes.kill_descendants()
    # The host half reads the file; with another status here the scheduler would kill nodes that still save.
    return DONE if ended.status == SAVED and _has_host_half(env) else ended.status


def check(plan: LaunchPlan, settings: Settings) -> None:
    """Raises BadInput for what `plan` can show but `launch` cannot run."""
    _check_venv(plan)
    if plan.context == "batch" and plan.nnodes > 1:
        raise BadInput(
            f"this is the batch script or interactive shell of job {plan.allocation.job_id}, on one of its "
            f"{plan.nnodes} nodes only: start one task per node with {plan.allocation.start_line}"
        )
    if settings.value("on-failure") == "restart":
        raise BadInput("--on-failure restart is not available in this version: use stop or requeue")
    if plan.mode != "torchrun" and plan.max_restarts:
        raise BadInput(
            f"--max-restarts {plan.max_restarts} needs --mode torchrun, this is {plan.mode}: leave it out"
        )
    program = plan.command[0]
    if plan.mode == "torchrun" and program.startswith("-") and (program != "-m" or len(plan.command) < 2):
        raise BadInput(
            f"CMD begins with {program}: give a script with its arguments, or -m NAME; options come before --"
        )
    if plan.no_python and not shutil.which(program):
        raise BadInput(f"CMD {program} is no program in PATH: check the spelling, or give its path")
    if not plan.no_python and not program.startswith("-") and not Path(program).exists():
        raise BadInput(
            f"CMD {program} does not exist in {Path.cwd()}: check the spelling; a module is given as "
            "-m NAME, a program that is no Python script needs --no-python"
        )


def _check_venv(plan: LaunchPlan) -> None:
    """The ranks run under this process's Python, which must be the venv's."""
    if plan.venv is None:
        return
    venv = Path(plan.venv)
    by_variable = plan.sources["venv"].startswith("env:")
    given = f"APPTRAIN_VENV={venv}" if by_variable else f"--venv {venv}"
    make = f"make venv DIR={shlex.quote(plan.venv)}"
    if not (venv / "pyvenv.cfg").exists():
        raise BadInput(f"{given} is no venv, it has no pyvenv.cfg: make it with {make}")
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv)}))
    if not (venv / "bin" / "python").exists() or not packages.exists():
        raise BadInput(
            f"{given} was made by another Python than this one, {sys.version.split()[0]}: remove it, and "
            f"make it again with {make}"
        )
    if Path(sys.prefix).resolve() != venv.resolve():
        raise BadInput(
            f"{given}, but this is the Python of {sys.prefix}: start it through a job script or "
            f"containers/run.sh, or put {venv}/bin first in PATH"
        )


def handled_signals() -> list[signal.Signals]:
    """HANDLED without SIGHUP where that is ignored, as under nohup and in PBS."""
    return [s for s in HANDLED if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


def _has_host_half(env: Mapping[str, str]) -> bool:
    """Whether a job script started us: it counts the attempts."""
    return "APPTRAIN_ATTEMPT" in env


class _Launch:
    def __init__(self, plan: LaunchPlan, settings: Settings, env: Mapping[str, str], run: RunDirectory):
        self.plan = plan
        self.settings = settings
        self.env = env
        self.run_dir = run
        self.consoles = output.own_consoles(env)
        self.relay = output.Relay(self.consoles)
        self.link: join.Link | None = None
        self.asked: int | None = None
        self.ranks: Ranks | None = None
        self.getting_ready: asyncio.Task[Ranks] | None = None
        self.supervisor: Supervisor | None = None
        self.scratch = tempfile.TemporaryDirectory(prefix="apptrain-", ignore_cleanup_errors=True)
        self.heartbeats = Path(self.scratch.name, "heartbeat")

    @property
    def is_first(self) -> bool:
        """Whether this is the one that speaks for all: node 0, in `rank` mode its first task."""
        return self.plan.node_rank == 0 and not self.plan.local_rank

    async def run(self) -> Outcome:
        self._catch_signals()
        refused = None
        try:
            ended = await self._run()
        except Refusal as refusal:
            refused = refusal
            ended = self._outcome(refusal.status, str(refusal))
        except OSError as error:
            ended = self._outcome(1, f"{error.strerror}: {error.filename or self.run_dir.path}")
        try:
            outcome.write(self.run_dir.outcome(self.plan.node_rank, self.plan.local_rank), ended)
        except OSError as error:
            self._say(f"the outcome (status {ended.status}) cannot be written: {error}")
        if self.link is not None:
            if self.supervisor is None:
                self.link.fail(to_failure(self.plan, ended))
            await self.link.close()
        if refused:
            raise refused
        self._conclude(ended)
        return ended

    async def _run(self) -> Outcome:
        try:
            self.getting_ready = asyncio.create_task(self._get_ready())
            try:
                ranks = await self.getting_ready
            except asyncio.CancelledError:
                if self.asked is None:
                    raise
                return asked_to_end(self.plan, self.asked)
            stop_signal = signal.Signals["SIG" + self.settings.value("stop-signal")]
            self.supervisor = Supervisor(
                self.plan,
                ranks,
                self.link,
                self._say,
                stop_signal,
                self._patience(ranks),
                self.settings.value("term-grace"),
            )
            if self.asked is not None:
                self.supervisor.signalled(self.asked)
            return await self.supervisor.run(self.run_dir.stop if self.is_first else None)
        finally:
            if self.ranks is not None:
                await self.ranks.kill()
            self.relay.finish(LAST_OUTPUT)
            self.scratch.cleanup()

    async def _get_ready(self) -> Ranks:
        """Everything up to the start of the ranks; a signal cancels it."""
        self.run_dir.outcome(self.plan.node_rank, self.plan.local_rank).unlink(missing_ok=True)
        if self.is_first and not _has_host_half(self.env):
            self.run_dir.stop.unlink(missing_ok=True)  # An earlier run's: nobody else removes it.
        place = await self._find_place()
        self.plan = self._watchable(place.plan)
        self.run_dir.write_plan(self.plan.to_json())
        for note in self.plan.notes:
            self._say_once(note)
        shown = {0} if self.settings.value("show-ranks") == "0" else None
        env = self._rank_env()
        await self._check_stack(env)
        self.ranks = Ranks(
            self.plan, env, self.relay, self.run_dir, scratch=Path(self.scratch.name), show=shown
        )
        self.relay.start()
        await self.ranks.prepare()
        self.link = await self._meet(place)
        check_gpus(self.plan, await self.ranks.gpus_seen())
        self._say_once(_headline(self.plan))
        if place.joins_machines and self.link is not None:
            self._say_once(network.summary(self.plan, env, self.link.elsewhere))
        await self.ranks.start()
        return self.ranks

    def _watchable(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan with what the ranks need to say that they go on, and for their stacks to be seen."""
        self.heartbeats.mkdir()
        added = {heartbeat.VARIABLE: str(self.heartbeats)}
        added |= stacks.variables(plan, Path(self.scratch.name), self.run_dir, self.env)
        return plans.with_env(plan, added, "derived:hang-timeout")

    def _patience(self, ranks: Ranks) -> Patience:
        beats = Heartbeats(self.heartbeats)
        return Patience(
            heartbeats=beats,
            step=self.settings.value("hang-timeout"),
            silence=self.settings.value("silence-timeout"),
            look=lambda: stacks.look(ranks, self.run_dir, Path(self.scratch.name), beats),
        )

    def _outcome(self, status: int, error: str) -> Outcome:
        return Outcome(status=status, node=self.plan.node, time=time.time(), error=error)

    async def _find_place(self) -> network.Place:
        """What only this node knows of the network; the store's port is still free there."""
        loop = asyncio.get_running_loop()
        place = await loop.run_in_executor(None, network.find, self.plan, self.env)
        if self.is_first:
            network.check_store_port(self.plan, join.PORT_ADVICE)
        return place

    def _rank_env(self) -> dict[str, str]:
        dropped = sorted(n for n in self.env if n in STALE or n.startswith(("TORCHELASTIC_", "PET_")))
        if dropped:
            self._say_once(f"not passed on to the ranks, meant for another torchrun: {', '.join(dropped)}")
        return {name: value for name, value in self.env.items() if name not in dropped} | dict(self.plan.env)

    async def _check_stack(self, env: Mapping[str, str]) -> None:
        """Raises BadInput where the image's CUDA would fail on this node's driver or GPUs."""
        stack = gpu.stack_of_image(env) if self.plan.device == "cuda" else None
        if stack is None:
            return
        node = self.plan.node
        found = await gpu.look(env)
        if found.failed:
            self._say(f"the NVIDIA driver on {node} could not be asked ({found.failed}): going on without")
        visible = env.get("CUDA_VISIBLE_DEVICES")
        if why := gpu.misfit(stack, found, node=node, visible=visible, ranks=self.plan.nproc_per_node):
            raise BadInput(why)

    async def _meet(self, place: network.Place) -> join.Link | None:
        """Meets the other nodes (in `rank` mode tasks); a single participant has nobody to meet."""
        plan = self.plan
        if plan.nnodes == 1 and (plan.local_rank is None or plan.nproc_per_node == 1):
            return None
        key_file = self.settings.value("join-key-file") or self.run_dir.key
        has_key = self.settings.given("join-key-file") or key_file.exists()
        if not has_key:
            self._say_once(
                f"there is no {key_file}: the nodes join by what they say they are, without a secret"
            )
        async with contextlib.AsyncExitStack() as listening:
            contact = ""
            if place.joins_machines and not plan.local_rank:
                listener = reach.Listener(place.interface, place.address)
                contact = str(await listening.enter_async_context(listener))
            return await join.meet(
                _identity(plan, self.env, contact),
                nodes=plan.allocation.nodes,
                address=place.first,
                port=plan.rendezvous.join_port,
                key=read_key(key_file) if has_key else None,
                say=self._say,
                timeouts=join.Timeouts(
                    join=self.settings.value("join-timeout"), peer=self.settings.value("peer-timeout")
                ),
                never_started=lambda: self._never_started(place),
            )

    def _never_started(self, place: network.Place) -> str | None:
        """A node whose outcome stands there before all have met will not come, and a first node that waits
        elsewhere is not found. Without a job script that counts the attempts, the files may be older."""
        if not _has_host_half(self.env):
            return None
        network.check_meeting_place(place, self.run_dir.plan(0, None if self.plan.local_rank is None else 0))
        for path in (self.run_dir.path / "outcome").glob(f"{self.plan.attempt}.*"):
            if (ended := outcome.read(path)) is not None:
                return (
                    f"{ended.node or path.name} ended before it joined, status {ended.status}: {ended.error}"
                )
        return None

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in handled_signals():
            loop.add_signal_handler(signum, self._signalled, signum)
        # Whoever started us may have held signals back until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def _signalled(self, signum: int) -> None:
        if self.supervisor is not None:
            self.supervisor.signalled(signum)
        elif signum == signal.SIGUSR2:
            self.run_dir.stop.touch(mode=0o600)  # read once there are ranks to stop
        else:
            self.asked = int(signum)
            if self.getting_ready is not None:
                self.getting_ready.cancel()

    def _say(self, text: str) -> None:
        self.consoles["err"].line(f"entrypoint: {text}\n".encode(errors="backslashreplace"))

    def _say_once(self, text: str) -> None:
        """Says what is the same for all nodes: on the first only."""
        if self.is_first:
            self._say(text)

    def _conclude(self, ended: Outcome) -> None:
        """One message for the whole job: node 0's, unless node 0 is what was lost."""
        lost_first = ended.rank is None and not ended.signal and ended.node == self.plan.allocation.nodes[0]
        if ended.status == DONE or not (self.is_first or lost_first):
            return
        if ended.status == SAVED:
            self._say("saved at a planned end: the same run directory continues")
        elif ended.rank is None:
            self._say(f"{ended.node + ': ' if ended.node else ''}{ended.error}")
        elif ended.status == blame.STUCK:
            self._say(f"rank {ended.rank} on {ended.node}, status {ended.status}: {ended.error}")
            self._say(f"where each rank was: {self.run_dir.stacks}")
        else:
            log = self.run_dir.log(ended.node, f"rank{ended.rank}", "err")
            failed = f"rank {ended.rank} on {ended.node} failed first, status {ended.status}"
            self._say(f"{failed}: {ended.error or 'nothing on stderr'} ({log})")


def check_gpus(plan: LaunchPlan, seen: int | None) -> None:
    """Refuses what would train on the wrong device for a week; `seen`: GPUs that torch sees here, None where
    it could not say (the ranks will)."""
    if seen is None:
        return
    source = plan.sources["nproc_per_node"]
    if plan.device == "cpu":
        if seen and plan.sources["device"] == "default":
            raise BadInput(f"torch sees {seen} GPUs on {plan.node}: choose --device cuda or --device cpu")
    elif seen == 0:
        raise BadInput(
            f"torch sees no GPU on {plan.node}, but the plan is for cuda: run `python -m entrypoint check` "
            "there (driver, --nv, CUDA_VISIBLE_DEVICES), or give --device cpu"
        )
    elif seen < plan.nproc_per_node or (source.startswith("derived") and seen != plan.nproc_per_node):
        if plan.mode == "rank" and seen > plan.nproc_per_node:
            return
        raise BadInput(
            f"nproc_per_node is {plan.nproc_per_node} ({source}), but torch sees {seen} GPUs on {plan.node}: "
            "give --nproc-per-node N, or correct the request"
        )


def _identity(plan: LaunchPlan, env: Mapping[str, str], contact: str) -> join.Identity:
    stack = gpu.stack_of_image(env)
    return join.Identity(
        job_id=plan.allocation.job_id,
        attempt=plan.attempt,
        node_rank=plan.node_rank,
        local_rank=plan.local_rank,
        name=plan.node,
        nnodes=plan.nnodes,
        nproc_per_node=plan.nproc_per_node,
        mode=plan.mode,
        device=plan.device,
        image_id=env.get("APPTRAIN_IMAGE_ID", ""),
        lock_digest=stack.lock if stack else "",
        versions={"python": sys.version.split()[0], "apptrain": __version__, "torch": _version("torch")},
        contact=contact,
    )


def _version(package: str) -> str:
    """From the package's metadata: nothing is imported. Empty where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def _headline(plan: LaunchPlan) -> str:
    nodes = f"{plan.nnodes} node{'s' * (plan.nnodes > 1)}"
    ranks = f"{plan.nproc_per_node} rank{'s' * (plan.nproc_per_node > 1)}"
    return (
        f"job {plan.allocation.job_id}, attempt {plan.attempt}: {nodes} x {ranks} on {plan.device}, "
        f"mode {plan.mode}, rendezvous {plan.rendezvous.endpoint}, "
        f"OMP_NUM_THREADS={plan.env['OMP_NUM_THREADS']}"
    )
