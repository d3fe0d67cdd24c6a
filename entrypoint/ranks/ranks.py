"""Starts this node's ranks, and says what becomes of them: through torchrun's agent in a child process, or
CMD itself. Begin at `Ranks`.

Starting takes two steps, so that the agent can import torch while the nodes still meet: `prepare` spawns what
takes time, `start` lets the ranks run.
"""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.core import files
from entrypoint.core.errors import BAD_INPUT, UNAVAILABLE, BadInput, of_returncode
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain
from entrypoint.doctor import fabric as proof
from entrypoint.job.rundir import RunDirectory
from entrypoint.meet.reports import Failure
from entrypoint.node import gpu, processes
from entrypoint.node.memory import Memory
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.ranks import forks
from entrypoint.ranks.output import Relay

COUNT_GPUS = "import sys, torch; count = torch.cuda.device_count(); print(count, file=open(sys.argv[1], 'w'))"
"""The answer goes into a file: anything may print while torch is imported."""
AGENT_STOPPED = 10.0
"""Seconds after which an agent that somebody has stopped is given up, once none of its ranks runs: it would
never say how they ended."""
MOST_RECORDED = 1 << 20
"""Bytes of a file of torch's @record."""
BACKLOG = 1 << 14
"""Connections to torch's store that may wait while torch is imported, one for each node; the kernel lets no
more wait than net.core.somaxconn says."""
COUNT = 300.0
"""Seconds for it: a slow file system takes minutes for torch."""


@dataclass(frozen=True, kw_only=True)
class RankStarted:
    """A rank is there."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class RankEnded:
    """A rank has ended, with any status."""

    rank: int
    status: int
    """128+N for a signal N."""
    signal: int
    time: float
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True)
class AgentEnded:
    """No further rank will be started: all have ended, or starting them failed."""

    error: str = ""
    status: int = 1
    """UNAVAILABLE: torch's store could not be had (a port, a peer). BAD_INPUT: the ranks may not go on so."""


@dataclass(frozen=True, kw_only=True)
class NetworkSeen:
    """NCCL's own log says what it uses."""

    network: str
    """In its words; several with commas between them; empty if it does not say."""


Event = RankStarted | RankEnded | AgentEnded | NetworkSeen


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """What is known once the ranks could start."""

    gpus: int | None = None
    """How many torch sees on this node; None if it cannot say, or nobody needs to know."""
    why_spawned: str = ""
    """Why ranks cannot be forks, which the plan wants them to be."""


class Ranks:
    """This node's ranks. `events` says what becomes of them; `pids` are the living and the dead, by rank."""

    def __init__(
        self,
        plan: LaunchPlan,
        env: Mapping[str, str],
        relay: Relay,
        run: RunDirectory,
        *,
        scratch: Path,
        show: set[int] | None,
        fabric: str = "",
    ):
        """`env`: the whole environment of the ranks. `scratch`: a directory of this node. `show`: whose
        output is shown; None for all. `fabric`: what NCCL's log in `scratch` must prove that it uses."""
        self.plan = plan
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.pids: dict[int, int] = {}
        self.started = asyncio.Event()
        """Set once all have."""
        self._env = dict(env)
        self._relay = relay
        self._run = run
        self._show = show
        self._fabric = fabric
        self._child: asyncio.subprocess.Process | None = None
        """The agent: torchrun's, or CMD itself."""
        self._ready: asyncio.Queue[Readiness] = asyncio.Queue()
        """The first one counts."""
        self._tasks: list[asyncio.Task[None]] = []
        self._scratch = scratch
        self._memory = Memory()
        self._ended: set[int] = set()
        self._terminated: list[int] = []
        """The ranks that got SIGTERM, by their process ids."""
        self._ending: list[int] = []
        """What of these was seen to run last, where the ranks themselves have ended."""
        self._names: dict[int, str] = {}
        """Rank to the name of its logs, which c10d's own numbering may set apart."""
        self._pipes = contextlib.ExitStack()
        """Our copies of the writing ends, and of what the agent alone needs."""
        self._streams = {rank: self._pipes_of(f"rank{rank}", rank) for rank in self.ranks}
        has_agent = plan.mode == "torchrun" and not plan.is_spare
        self._agent_streams = self._pipes_of("agent", None) if has_agent else None
        """What torchrun's agent writes into; None: there is none."""

    @property
    def ranks(self) -> list[int]:
        """Global ranks of this node (in `exec` mode the first one stands for CMD)."""
        plan = self.plan
        if plan.is_spare:
            return []
        if plan.rank is not None:
            return [plan.rank]
        first = plan.node_rank * plan.nproc_per_node
        return [first] if plan.mode == "exec" else list(range(first, first + plan.nproc_per_node))

    def _pipes_of(self, who: str, rank: int | None) -> tuple[int, int]:
        """The writing ends of its stdout and stderr."""
        show = rank is not None and (self._show is None or rank in self._show)
        out, err = (
            self._relay.add(who, stream, self._run.log(self.plan.node, who, stream), show=show)
            for stream in ("out", "err")
        )
        for fd in (out, err):
            self._pipes.callback(_close, fd)
        return out, err

    async def prepare(self) -> None:
        if self._agent_streams:
            await self._spawn_agent(*self._agent_streams)
        elif self.plan.is_spare:
            self._ready.put_nowait(Readiness())
        elif self._counts_gpus():
            self._tasks.append(asyncio.create_task(self._count_gpus()))
        else:
            self._ready.put_nowait(Readiness())

    def _counts_gpus(self) -> bool:
        """Whether anybody needs to know how many torch sees here."""
        return self.plan.device == "cuda" or (self.plan.device_is_default and gpu.can_be_there())

    async def ready(self) -> Readiness:
        """Waits until the ranks could start; to be asked once."""
        return await self._ready.get()

    def not_forked(self, ready: Readiness, asked: str) -> str:
        """Says so if the plan's forks cannot be; else empty. Raises BadInput if that is what was asked for,
        --start-ranks `fork`, or --preload is the reason."""
        why = ready.why_spawned
        if not why:
            return ""
        if asked == "fork":
            raise BadInput("fork-not-possible", f"--start-ranks fork, but {why}: leave it out")
        if why.startswith("--preload") and not self.plan.preload_is_derived:
            raise BadInput("preload-not-possible", why)
        return f"each rank imports torch for itself: {why}"

    async def start(self) -> None:
        if self.plan.is_spare:
            self.close_pipes()
        elif self.plan.mode == "torchrun":
            if self._child is None:
                return  # `events` says why
            assert self._child.stdin is not None
            with contextlib.suppress(ConnectionError):
                self._child.stdin.write(b"go\n")
                await self._child.stdin.drain()
        else:
            await self._spawn_command()
        if self._fabric and self.ranks:
            self._tasks.append(asyncio.create_task(self._prove_fabric()))

    async def _prove_fabric(self) -> None:
        why = await proof.watch(self._scratch, self._fabric, len(self.ranks))
        found = sorted({proof.network(log) for log in proof.networks(self._scratch)})
        self.events.put_nowait(NetworkSeen(network=", ".join(found)))
        if why:
            self.events.put_nowait(AgentEnded(error=why, status=BAD_INPUT))

    def alive(self) -> list[int]:
        """Process ids of the ranks that have not ended."""
        left = {rank: pid for rank, pid in self.pids.items() if rank not in self._ended}
        return [pid for pid in left.values() if processes.is_running(pid)]

    def terminate(self) -> None:
        """SIGTERM to the ranks that have not ended, and to what they have started."""
        self._terminated = self.alive()
        processes.signal_groups(self._terminated, signal.SIGTERM)

    def are_ending(self) -> bool:
        """Whether a rank runs, or something of one that got SIGTERM: a shell dies of it at once, and what it
        has started may still save."""
        if self.alive():
            return True
        self._ending = [pid for pid in self._ending if processes.is_running(pid)]
        self._ending = self._ending or processes.in_groups(self._terminated)
        return bool(self._ending)

    def first_error(self, rank: int) -> str:
        """The line on its stderr that tells best why a rank failed; empty where there is none."""
        return self._relay.first_error(self._names.get(rank, f"rank{rank}")) or self._recorded(rank)

    def _recorded(self, rank: int) -> str:
        """What torch's @record has written of the rank's exception, which counts if stderr has nothing."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            text = files.read(self._scratch / f"{self.ranks.index(rank)}.json", MOST_RECORDED)
            return str(plain(json.loads(text)["message"]["message"]))
        return ""

    def failed(self, failure: Failure) -> None:
        """What only follows from this failure, or repeats it, is not shown any more."""
        if failure.rank is not None and self._show is None:
            self._relay.failed(failure.error, self._names.get(failure.rank, f"rank{failure.rank}"))
        else:
            self._relay.failed()

    def shortage(self) -> str:
        """Says so if a process of this node was ended for want of memory; else empty."""
        return self._memory.shortage()

    def last_place(self, rank: int) -> str:
        """Where its script was when it failed, `in backward (train.py:31)`; empty where it did not say."""
        return self._relay.last_place(self._names.get(rank, f"rank{rank}"))

    def divert_errors(self, rank: int) -> None:
        """From now on, what the rank writes to stderr is kept for `diverted` alone."""
        self._relay.divert_errors(self._names.get(rank, f"rank{rank}"))

    def diverted(self, rank: int) -> str:
        """What the rank has written since then."""
        return self._relay.diverted(self._names.get(rank, f"rank{rank}")).decode(errors="replace")

    @property
    def heard(self) -> float:
        """When any rank of this node last wrote anything, on the monotonic clock."""
        return self._relay.heard

    def freeze_agent(self) -> None:
        """Stops torchrun's agent, which would end ranks as soon as one of them ends; `kill` still ends it."""
        if self.plan.mode == "torchrun" and self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        """Ends what is left: the ranks' groups, then the agent, which may wait for other nodes for ever."""
        processes.signal_groups(self.alive(), signal.SIGKILL)
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
        self.close_pipes()
        await self.wait(5.0)
        for task in self._tasks:
            task.cancel()

    async def wait(self, seconds: float) -> bool:
        """Waits for the agent to end; False when it has not in that time."""
        if self._child is None:
            return True
        try:
            await asyncio.wait_for(self._child.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def close_pipes(self) -> None:
        """Our copies of the writing ends: the relay sees the end of the output once the ranks are gone."""
        self._pipes.close()

    async def _spawn_agent(self, out: int, err: int) -> None:
        try:
            store = self._listen_for_store()
        except OSError as error:
            status = UNAVAILABLE if error.errno == errno.EADDRINUSE else 1
            self.events.put_nowait(AgentEnded(error=str(error.strerror), status=status))
            self._ready.put_nowait(Readiness())
            self.close_pipes()
            return
        reader, writer = os.pipe()
        fds = [fd for pair in self._streams.values() for fd in pair]
        argv, env = self._agent_line(writer)
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=out,
            stderr=err,
            env=env,
            pass_fds=[writer, *fds, *store],
            start_new_session=True,
        )
        os.close(writer)
        order = {
            "options": self.plan.argv[1 : -len(self.plan.command)],
            "command": self.plan.program,
            "master_addr": self.plan.rendezvous.master_addr,
            "master_port": self.plan.rendezvous.master_port,
            "listen": self._store_address(),
            "store": next(iter(store), None),
            "streams": {index: self._streams[rank] for index, rank in enumerate(self.ranks)},
            "errors": str(self._scratch),
            "counts_gpus": self._counts_gpus(),
            "preload": list(self.plan.preload),
            "cores": {rank.local_rank: rank.cores for rank in self.plan.cores},
        }
        self.close_pipes()
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(order).encode() + b"\n")
        self._tasks.append(asyncio.create_task(self._read_reports(reader)))
        self._tasks.append(asyncio.create_task(self._watch_agent(self._child.pid)))

    def _agent_line(self, report: int) -> tuple[list[str], dict[str, str]]:
        """(what the agent's Python is to run, its environment)."""
        if self.plan.start_ranks == "spawn":
            return ["-P", str(Path(__file__).with_name("agent.py")), str(report)], self._env
        folder = self._scratch / "template"
        forks.install(folder)
        return ["-u", *self.plan.program], forks.environment(self._env, folder, report)

    def _store_address(self) -> str:
        """Where torch's store listens on this node; empty where it does not, or chooses itself."""
        rendezvous = self.plan.rendezvous
        return rendezvous.local_addr if rendezvous.is_host and rendezvous.backend == "static" else ""

    def _listen_for_store(self) -> list[int]:
        """The socket of torch's store, where that is on this node; closed with the pipes. It listens before
        the nodes have met: a client that finds nobody there tries again after up to a second, and other nodes
        may have imported torch first. OSError: it cannot listen."""
        address = self._store_address()
        if not address:
            return []
        sock = listen(address, self.plan.rendezvous.master_port)
        self._pipes.callback(sock.close)
        return [sock.fileno()]

    async def _watch_agent(self, pid: int) -> None:
        stopped = 0.0
        while stopped < AGENT_STOPPED:
            await asyncio.sleep(1)
            idle = not any(processes.is_running(rank) for rank in self.pids.values())
            stopped = stopped + 1 if idle and processes.state(pid) in processes.STOPPED else 0.0
        error = f"torchrun's agent (process {pid}) was stopped by a signal"
        self.events.put_nowait(AgentEnded(error=error))
        self._ready.put_nowait(Readiness())

    async def _read_reports(self, fd: int) -> None:
        stream = asyncio.StreamReader(limit=1 << 20)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(fd, "rb"))
        finished = False
        while line := await stream.readline():
            finished |= self._reported(json.loads(line))
        if not finished:
            assert self._child is not None
            status = await self._child.wait()
            error = self._relay.first_error("agent") or f"torchrun's agent ended with status {status}"
            error += f": {shortage}" if (shortage := self.shortage()) else ""
            self.events.put_nowait(AgentEnded(error=error))
        self._ready.put_nowait(Readiness())

    def _reported(self, report: Mapping[str, Any]) -> bool:
        """Takes one line of the agent's; True for its last."""
        match report["event"]:
            case "ready":
                self._ready.put_nowait(Readiness(gpus=report["gpus"], why_spawned=report["why"]))
            case "started":
                self.pids[report["rank"]] = report["pid"]
                self._names[report["rank"]] = f"rank{self.ranks[report['local_rank']]}"
                self._ended.discard(report["rank"])
                if len(self.pids) == len(self.ranks):
                    self.started.set()
                self.events.put_nowait(RankStarted(rank=report["rank"]))
            case "ended":
                self._rank_ended(report["rank"], report["status"], report["signal"], report["time"])
            case "finished":
                status = UNAVAILABLE if report["unavailable"] else 1
                self.events.put_nowait(AgentEnded(error=report["error"], status=status))
                return True
        return False

    def _rank_ended(self, rank: int, status: int, signum: int, when: float) -> None:
        self._ended.add(rank)
        self.events.put_nowait(RankEnded(rank=rank, status=status, signal=signum, time=when))

    async def _spawn_command(self) -> None:
        rank = self.ranks[0]
        out, err = self._streams[rank]
        argv = self.plan.argv
        if not self.plan.no_python:
            argv = [sys.executable, *argv[1:]]
        try:
            self._child = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._env,
                start_new_session=True,
                preexec_fn=self._begin_command,
            )
        except OSError as error:
            self.close_pipes()
            status = 127 if isinstance(error, FileNotFoundError) else 126
            self._rank_ended(rank, status, 0, time.time())
            self.events.put_nowait(AgentEnded(error=f"{argv[0]} cannot be started: {error.strerror}"))
            return
        self.close_pipes()
        self.pids[rank] = self._child.pid
        self.started.set()
        self._tasks.append(asyncio.create_task(self._wait_for_command(rank)))

    def _begin_command(self) -> None:
        """In the process that CMD will be."""
        processes.die_with_parent()
        for rank in self.plan.cores:
            forks.run_on(list(rank.cores))

    async def _wait_for_command(self, rank: int) -> None:
        assert self._child is not None
        self._rank_ended(rank, *of_returncode(await self._child.wait()), time.time())
        self.events.put_nowait(AgentEnded())

    async def _count_gpus(self) -> None:
        """Says how many there are, or that it cannot say, whatever goes wrong: it is waited for."""
        count = None
        try:
            count = await self._counted()
        finally:
            self._ready.put_nowait(Readiness(gpus=count))

    async def _counted(self) -> int | None:
        answer = self._scratch / "gpus"
        answer.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", COUNT_GPUS, str(answer)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._env,
            )
            try:
                await asyncio.wait_for(child.wait(), COUNT)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
        said = answer.read_text() if answer.exists() else ""
        return int(said) if said.endswith("\n") else None


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on this address of ours alone. OSError: it is not ours, or the port is taken."""
    with contextlib.ExitStack() as undo:
        try:
            ((family, *_, where), *_) = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
        except (OSError, UnicodeError) as error:
            number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (0, error)
            text = f"torch's store cannot listen on {address}, port {port}: {why}: give --master-addr"
            raise OSError(number, text) from None
        undo.pop_all()
        return sock
