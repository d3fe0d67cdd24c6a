"""Runs torchrun's agent in a process of our own, with the plan's options read by torchrun's own parser. Begin
at `main`; ranks.py starts it and reads its reports.

Beyond what torchrun does, it reports each rank's pid when it starts and its status at the moment when it
ends, and connects its output to pipes. It runs in one of two ways: as a file, started by ranks.py, which
imports no torch; or as the template of forks.py, which imports torch, forks the ranks, and then becomes the
agent.

    stdin   one JSON line (options, command, master_addr, master_port, listen, store, streams, errors,
            counts_gpus, preload, cores); then `go`; closed: end the ranks
    report  JSON lines: ready, started, ended, finished
"""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SAVED = 75
NAME = "torchrun"
"""Of this process, where ps and top show no arguments; a template has those of its ranks."""
ORPHANS_GRACE = 3.0
"""Seconds that the ranks have after SIGTERM when our parent is gone."""


class Reporter:
    """Writes events to the parent; whole lines from any thread."""

    def __init__(self, fd: int):
        self._fd = fd
        self._lock = threading.Lock()

    def __call__(self, event: str, **fields: Any) -> None:
        data = json.dumps({"event": event, **fields}).encode() + b"\n"
        with self._lock:
            os.write(self._fd, data)


def main() -> None:
    report = Reporter(int(sys.argv[1]))
    control = _take_stdin()
    order = json.loads(_line(control))
    _import([])
    import torch

    report("ready", gpus=torch.cuda.device_count() if order["counts_gpus"] else None, why="")
    _act(order, report, control, {})


def start_of_template(at_start: dict[str, Any]) -> None:
    """What a template does while its interpreter starts. Returns in the ranks alone, which go on then."""
    forks = _load_forks()
    report = Reporter(forks.leave_hook())
    control = _take_stdin()
    order = json.loads(_line(control))
    heartbeat = os.environ.pop(forks.HEARTBEAT, None)
    why, seen = _fit_for_forks(forks, order, at_start)
    waiting = {}
    for local_rank, (out, err) in ({} if why else order["streams"]).items():
        rank = forks.fork_rank(out, err, order["cores"].get(local_rank, []))
        if rank is None:
            return
        waiting[int(local_rank)] = rank
    if heartbeat is not None:
        os.environ[forks.HEARTBEAT] = heartbeat
    report("ready", gpus=int(seen) if seen else None, why=why)
    _act(order, report, control, waiting)
    end(0)


def _load_forks() -> Any:
    """The module, by its path: in a template no folder of ours is in Python's path."""
    import importlib.util

    file = Path(__file__).with_name("forks.py")
    spec = importlib.util.spec_from_file_location("apptrain_forks", file)
    assert spec
    assert spec.loader
    forks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forks)
    return forks


def _fit_for_forks(forks: Any, order: dict[str, Any], at_start: dict[str, Any]) -> tuple[str, str]:
    """(why the ranks cannot be forks of this process, how many GPUs torch sees), once torch is imported. The
    number is empty where it was not asked for: a fork takes 20 ms, for which all nodes would wait."""
    _import([])
    import torch

    seen = ""
    if order["counts_gpus"]:
        seen = forks.asked_in_fork(torch.cuda.device_count, order["store"])
    elif order["preload"]:
        forks.asked_in_fork(os.getpid, order["store"])
    of_torch = forks.threads()  # numpy's own have ended with the fork
    try:
        _import(order["preload"])
    except ImportError as error:
        return f"--preload {','.join(order['preload'])}: {error}: correct it", seen
    loaded = {name.partition(".")[0] for name in sys.modules.keys() - at_start.keys()}
    if why := forks.why_not(order["command"], loaded):
        return why, seen
    if order["cores"] and (found := [name for name in forks.PLACES if name in os.environ]):
        return f"{found[0]} is set, and OpenMP has counted cores as torch was imported", seen
    if order["preload"] and forks.threads() > of_torch:
        forks.asked_in_fork(os.getpid, order["store"])  # those that their library ends before a fork may stay
        if forks.threads() > of_torch:
            return f"--preload {','.join(order['preload'])} starts threads: leave it out", seen
    if seen not in ("", "0") and forks.asked_in_fork(_open_cuda, order["store"]) != "open":
        return "a fork of a process that has imported torch cannot open CUDA here", seen
    return "", seen


def _open_cuda() -> str:
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    return "open"


def _import(names: list[str]) -> None:
    """torch, and these. What they make stays, so the search for garbage leaves it out: now, when it would
    take a seventh of torch's import, and later, when forks would have to copy what it writes to."""
    import importlib

    if imports := sys.modules.get("apptrain_imports"):  # of the image: its launcher has begun to read ahead
        vars(imports)["read_ahead"] = lambda: None
    gc.disable()
    for name in ("torch", *names):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _act(order: dict[str, Any], report: Reporter, control: int, waiting: dict[int, Any]) -> None:
    """Runs the ranks once it is told to. `waiting`: those that are there already, by local rank."""
    Path("/proc/self/comm").write_text(NAME)
    import torch
    import torch.distributed.run  # with all that `_run` needs, while other nodes may still import torch
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    # CMD has lost the `--` that torchrun's parser drops. Without a folder for logs torch would make one in
    # TMPDIR, and leave it there.
    words = ["--log-dir", order["errors"], *order["options"], "CMD"]
    options = torch.distributed.run.parse_args(words)  # type: ignore[no-untyped-call]
    if _line(control) != b"go":
        return
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # a scheduler's warning to all processes of the job
        signal.signal(signum, _take_no_notice)
    pids: dict[int, int] = {}
    threading.Thread(target=_end_with_parent, args=(control, pids), daemon=True).start()
    try:
        _run(order, options, report, pids, waiting)
    except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError, RendezvousError) as error:
        report("finished", error=_one_line(error), unavailable=True)
        raise
    except Exception as error:
        report("finished", error=_one_line(error), unavailable=False)
        raise
    report("finished", error="", unavailable=False)


def _take_no_notice(_signum: int, _frame: Any) -> None:
    """A handler of Python's: one that ignores would be inherited by the ranks."""


def _take_stdin() -> int:
    """The control pipe; the ranks inherit /dev/null instead of it."""
    control = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return control


def _line(fd: int) -> bytes:
    """Up to the end of the line, or of the pipe. No file object: a fork would have it too."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _end_with_parent(control: int, pids: dict[int, int]) -> None:
    """Ranks outlive their agent; without our parent nobody would end them."""
    _line(control)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in list(pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signum)
        time.sleep(ORPHANS_GRACE if signum == signal.SIGTERM else 0)
    os._exit(1)


class Watched:
    """A rank's process; for torch's agent the same as a subprocess.Popen.

    How and when it ended is told as soon as it has, and at the latest when the agent, which looks ten times a
    second, reaps it: else a rank that the agent ends because of this one would seem to be the first."""

    def __init__(self, process: Any, rank: int, report: Reporter):
        """`process`: a subprocess.Popen or a Fork."""
        self.pid: int = process.pid
        self._process = process
        self._rank = rank
        self._report = report
        self._lock = threading.Lock()
        self._told = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def poll(self) -> int | None:
        if not self._told.is_set():
            self._look(os.WNOHANG)
        return self._reap() if self._told.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if not self._told.wait(timeout):
            raise subprocess.TimeoutExpired(f"rank {self._rank}", timeout or 0)
        return self._reap()

    def _reap(self) -> int:
        status: int = self._process.poll()
        return status

    def _watch(self) -> None:
        with contextlib.suppress(ChildProcessError):  # the agent has seen it first
            self._look(0)

    def _look(self, flags: int) -> None:
        """Tells the end where there is one; without WNOHANG it waits for it."""
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | flags)
        with self._lock:
            if end is None or self._told.is_set():
                return
            signum = 0 if end.si_code == os.CLD_EXITED else end.si_status
            status = 128 + signum if signum else end.si_status
            self._report("ended", rank=self._rank, status=status, signal=signum, time=time.time())
            self._told.set()


@contextlib.contextmanager
def _on_cores(cores: list[int]) -> Iterator[None]:
    """What this thread starts meanwhile runs on these cores; empty: on any."""
    before = os.sched_getaffinity(0)
    _load_forks().run_on(cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _run(
    order: dict[str, Any], options: Any, report: Reporter, running: dict[int, int], waiting: dict[int, Any]
) -> None:
    """Runs the ranks to their end, their pids in `running`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.run import config_from_args

    class Pipes(LogsSpecs):
        """Every rank's output goes into the parent's pipes."""

        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            streams = {int(local_rank): fds for local_rank, fds in order["streams"].items()}
            files = {local_rank: f"{order['errors']}/{local_rank}.json" for local_rank in envs}
            for local_rank, file in files.items():
                Path(file).unlink(missing_ok=True)  # of a rank that torchrun starts again
                envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = file
            return LogsDest(
                stdouts={local_rank: f"/proc/self/fd/{out}" for local_rank, (out, _) in streams.items()},
                stderrs={local_rank: f"/proc/self/fd/{err}" for local_rank, (_, err) in streams.items()},
                tee_stdouts=dict.fromkeys(envs, ""),
                tee_stderrs=dict.fromkeys(envs, ""),
                error_files=files,
            )

        @property
        def root_log_dir(self) -> str:
            return str(order["errors"])

    class OneAddress(StaticTCPRendezvous):
        """Node 0's store listens with our parent's socket, on the rendezvous's address alone. torch's own
        would on all of the node's, and let in whoever reaches any."""

        def next_rendezvous(self) -> Any:
            if self._store is None:
                self.master_addr = name_of(order["listen"], self.master_addr)
                where = (self.master_addr, self.master_port, self.world_size, True, self.timeout)
                self._store = open_store(TCPStore, order["store"], *where)
            return super().next_rendezvous()

    class Agent(LocalElasticAgent):
        """torchrun's agent, which starts no rank again once one has saved."""

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if any(failure.exitcode == SAVED for failure in result.failures.values()):
                self._remaining_restarts = 0
            return result

    fresh = SubprocessHandler._popen

    def popen(handler: Any, argv: tuple[str, ...], env: dict[str, str]) -> Any:
        """The rank that is there already; one that torchrun starts again is started afresh."""
        process = waiting.pop(handler.local_rank_id, None)
        if process is None:
            with _on_cores(order["cores"].get(str(handler.local_rank_id), [])):
                process = fresh(handler, argv, env)
        else:
            process.begin(env)
        running[handler.local_rank_id] = process.pid
        rank = int(env["RANK"])
        report("started", rank=rank, local_rank=handler.local_rank_id, pid=process.pid)
        return Watched(process, rank, report)

    SubprocessHandler._popen = popen  # type: ignore[method-assign,assignment]
    config, program, _ = config_from_args(options)
    words = [word.replace("$", "$$") for word in order["command"]]  # its macros get it escaped
    arguments = ["-u", *words]
    if options.no_python:
        program, arguments = order["command"][0], words[1:]
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    static = config.rdzv_backend == "static"
    rendezvous = rendezvous_registry.get_rendezvous_handler(parameters)
    master_addr = order["master_addr"]
    if isinstance(rendezvous, StaticTCPRendezvous) and order["listen"]:
        seconds = int(rendezvous.timeout.total_seconds())
        who = (rendezvous.rank, rendezvous.world_size, rendezvous.run_id, seconds)
        rendezvous = OneAddress(rendezvous.master_addr, rendezvous.master_port, *who)
        master_addr = name_of(order["listen"], master_addr)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=rendezvous,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr if static else None,
        master_port=order["master_port"] if static else None,
        local_addr=config.local_addr,
    )
    # The parents know when every node is done and end agents that wait for one another in vain.
    agent = Agent(spec, logs_specs=Pipes(), exit_barrier_timeout=7 * 86400)
    agent.run()


def open_store(store: Callable[..., Any], fd: int, *where: Any) -> Any:
    """A store that takes over this listening socket. torch 2.7 takes one only without libuv, and says so."""
    try:
        return store(*where, multi_tenant=True, master_listen_fd=os.dup(fd), use_libuv=True)
    except NotImplementedError:
        return store(*where, multi_tenant=True, master_listen_fd=os.dup(fd), use_libuv=False)
    finally:
        os.close(fd)


def name_of(address: str, name: str) -> str:
    """The name where it leads here to this address first; else the address: node 0's name may be 127.0.1.1
    to itself, or have several."""
    with contextlib.suppress(OSError):
        found, wanted = (socket.getaddrinfo(text, 0, type=socket.SOCK_STREAM) for text in (name, address))
        if found[0][4] == wanted[0][4]:
            return name
    return address


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking torch's modules down in order would take long, and serves nobody


if __name__ == "__main__":
    main()
    end(0)
