"""The MoM of one host: scripts, tasks, signals and output. It starts and ends what jobs run.

Processes are found by session, as PBS finds them without the cgroup hook: one that has called setsid is nobody's.

Usage: python -m tests.pbs_double.mom CONFIG HOST
"""

import contextlib
import math
import os
import pwd
import resource
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.pbs_double import config as configs
from tests.pbs_double import serving, variables, wire
from tests.pbs_double.request import Chunk
from tests.pbs_double.variables import Job, Site
from tests.pbs_double.wire import Line, Lost, Message

CANNOT_EXECUTE = 254
BY_SIGNAL = 256
MEMLOCK = 8 << 20
WALLTIME, RERUN, SISTER_LOST = -29, -11, -14
PING = 3.0
"""Seconds for a host to answer that it is there."""
GONE = 5.0
"""Seconds allowed to killed processes."""
ON_ITS_WAY = 0.02
"""Seconds in which nothing more must come for a stream to be complete."""


@dataclass(kw_only=True, eq=False)
class Held:
    """A job on this host."""

    job: Job
    site: Site
    demux: tuple[str, int, int] | None
    """Where tasks send their output: address, port for stdout, port for stderr; None writes to `files`."""
    files: tuple[Path, Path]
    sessions: dict[int, int] = field(default_factory=dict)
    """Session of each task and of the script (0), to its task id."""
    spawned: int = 0
    ending: float = 0.0
    """When it was asked to end; 0 if it was not."""
    grace: float = 0.0
    """Seconds that tasks have even without a script."""
    status: int | None = None
    """The exit status that whoever ended it gave."""
    requeue: bool = False
    walltime: float = 0.0
    """On its first host."""
    lost: dict[str, float] = field(default_factory=dict)
    """When sisters that do not answer were first found so."""
    leaving: set[str] = field(default_factory=set)
    """Sisters that have not yet ended what is left of the job there."""


class Mom:
    def __init__(self, config: configs.Config, host: str):
        self.config = config
        self.host = host
        self.me = config.hosts[host]
        self.spool = config.spool_of(host)
        for part in ("aux", "spool", "mom_priv/jobs"):
            (self.spool / part).mkdir(parents=True, exist_ok=True)
        self.held: dict[str, Held] = {}
        self.lock = threading.RLock()

    def answer(self, line: Line, message: Message) -> None:
        operation = message.pop("op")
        if operation in ("init", "spawn", "task", "signal_task"):
            held = self.held.get(message.pop("job"))
            if held is None or message.pop("cookie") != held.job.cookie:
                line.send({"error": "bad environment"})
                return
            getattr(self, f"_{operation}")(line, held, **message)
            return
        line.send(getattr(self, f"_{operation}")(**message) or {})

    # --- from the server and from the first host ---------------------------------------------------------------

    def _ping(self) -> Message:
        return {"jobs": list(self.held)}

    def _run(self, job: dict[str, Any], script: str, how: dict[str, Any]) -> None:
        """Starts a job whose first host this is."""
        out = self.spool / "spool" / f"{job['id']}.OU"
        err = out if how["join"] else out.with_suffix(".ER")
        held = self._hold(job, None, (out, err))
        held.walltime = how["walltime"]
        for file in (out, err):
            file.touch(mode=0o600)
            _give(file, held.job.user)
        demux = None
        if len(held.job.hosts) > 1:
            demux = Demux(self.me.address, out, err)
            held.demux = (self.me.address, *demux.ports)
        for sister in held.job.hosts[1:]:
            self._call(sister, {"op": "join", "job": job, "demux": held.demux})
            threading.Thread(target=self._watch, args=(held, sister), daemon=True).start()
        threading.Thread(target=self._stay, args=(held, demux, script, how), daemon=True).start()

    def _join(self, job: dict[str, Any], demux: list[Any]) -> None:
        self._hold(job, (demux[0], demux[1], demux[2]), (Path("/dev/null"), Path("/dev/null")))

    def _leave(self, job: str, cookie: str = "") -> None:
        held = self.held.get(job)
        if held and cookie in ("", held.job.cookie):
            self._kill(held)
            self._forget(held)

    def _signal(self, job: str, signum: int) -> None:
        if held := self.held.get(job):
            signal_sessions(held.sessions, signum)

    def _alter(self, job: str, walltime: float) -> None:
        if held := self.held.get(job):
            held.walltime = walltime

    def _end(self, job: str, status: int | None, requeue: bool = False) -> None:
        if held := self.held.get(job):
            self._ask_to_end(held, status=status, requeue=requeue)

    # --- from pbsdsh and pbs_tmrsh --------------------------------------------------------------------------------

    def _init(self, line: Line, held: Held) -> None:
        addresses = {host.address: name for name, host in self.config.hosts.items()}
        line.send({"lines": list(held.job.lines), "addresses": addresses})

    def _spawn(self, line: Line, held: Held, at: int, argv: list[str]) -> None:
        host = held.job.lines[at]
        self._pass(line, held, host, {"op": "task", "at": at, "argv": argv})

    def _signal_task(self, line: Line, held: Held, task: int, at: int, signum: int) -> None:
        host = held.job.lines[at]
        if host != self.host:
            message = {"op": "signal_task", "task": task, "at": at, "signum": signum}
            self._pass(line, held, host, message)
            return
        signal_sessions([sid for sid, found in held.sessions.items() if found == task], signum)
        line.send({})

    def _pass(self, line: Line, held: Held, host: str, message: Message) -> None:
        """Lets the MoM of that host do it, and hands its answers on."""
        other = self.config.hosts[host]
        connection = wire.connect(other.address, other.port)
        try:
            connection.send({**message, "job": held.job.id, "cookie": held.job.cookie})
            while True:
                answer = connection.receive()
                line.send(answer)
                if "status" in answer or "error" in answer:
                    return
        except Lost:
            # Whoever asked is not told of a host's loss, and waits.
            while message["op"] == "task" and self.held.get(held.job.id) is held:
                time.sleep(0.1)
            raise
        finally:
            connection.close()

    def _task(self, line: Line, held: Held, at: int, argv: list[str]) -> None:
        host = held.job.hosts.index(self.host)
        with self.lock:
            held.spawned += 1
            number = held.spawned + (host == 0)  # the script is the first on its host
        task = variables.task_id(held.job, host, number)
        env = variables.task(held.job, held.site, line=at, number=number)
        streams = self._streams(held)
        try:
            process = self._start(held, argv, env, stdin=subprocess.DEVNULL, streams=streams)
        except OSError as error:
            os.write(streams[1].fileno(), f"{secrets.token_urlsafe(3)}: {error.strerror}\n".encode())
            line.send({"task": task})
            line.send({"status": CANNOT_EXECUTE})
            return
        finally:
            for stream in streams:
                stream.close()
        held.sessions[process.pid] = task
        with contextlib.suppress(Lost):
            line.send({"task": task})
        code = process.wait()
        signal_sessions([process.pid], signal.SIGKILL)
        held.sessions.pop(process.pid, None)
        line.send({"status": code if code >= 0 else BY_SIGNAL - code})

    def _streams(self, held: Held) -> tuple[Any, Any]:
        if held.demux is None:
            return held.files[0].open("ab"), held.files[1].open("ab")
        address, out, err = held.demux
        return socket.create_connection((address, out)), socket.create_connection((address, err))

    # --- the first host ---------------------------------------------------------------------------------------------

    def _stay(self, held: Held, demux: "Demux | None", script: str, how: dict[str, Any]) -> None:
        """Runs the script to its end and ends the job."""
        job = held.job
        file = self.spool / "mom_priv/jobs" / f"{job.id}.SC"
        file.write_text(script)
        file.chmod(0o700)
        _give(file, job.user)
        shell = how["shell"] or job.shell
        with held.files[0].open("ab") as out, held.files[1].open("ab") as err:
            process = self._start(
                held,
                [f"-{Path(shell).name}"],
                variables.script(job, held.site),
                stdin=subprocess.PIPE,
                streams=(out, err),
                executable=shell,
            )
        held.sessions[process.pid] = 0
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{file}\n".encode())
            process.stdin.close()
        code = self._until_ended(held, process, how)
        self._kill(held)
        held.leaving.update(job.hosts[1:])
        for sister in job.hosts[1:]:
            threading.Thread(target=self._dismiss, args=(held, sister), daemon=True).start()
        deadline = time.monotonic() + GONE
        while held.leaving - held.lost.keys() and time.monotonic() < deadline:
            time.sleep(0.01)
        if demux is not None:
            demux.close()
        file.unlink(missing_ok=True)
        self._forget(held)
        if not held.requeue:
            self._deliver(held, how)
        status = held.status if held.status is not None else code if code >= 0 else BY_SIGNAL - code
        message = {"op": "ended", "job": job.id, "status": status, "requeue": held.requeue, "run": how["run"]}
        with contextlib.suppress(Lost):
            wire.call(self.config.address, self.config.port, message)

    def _watch(self, held: Held, sister: str) -> None:
        """Notes since when a sister does not answer."""
        while self.held.get(held.job.id) is held:
            other = self.config.hosts[sister]
            try:
                wire.call(other.address, other.port, {"op": "ping"}, PING)
                held.lost.pop(sister, None)
            except Lost:
                held.lost.setdefault(sister, time.monotonic())
            time.sleep(self.config.look)

    def _dismiss(self, held: Held, sister: str) -> None:
        """Has a sister end what is left there, when it can be reached again."""
        while True:
            try:
                self._call(sister, {"op": "leave", "job": held.job.id, "cookie": held.job.cookie})
                break
            except Lost:
                time.sleep(self.config.look)
        held.leaving.discard(sister)

    def _until_ended(self, held: Held, shell: "subprocess.Popen[bytes]", how: dict[str, Any]) -> int:
        """Returns the shell's return code once the job's processes are to be killed."""
        sid, begin = shell.pid, time.monotonic()
        while True:
            now = time.monotonic()
            if any(now - since > self.config.sister_lost for since in list(held.lost.values())):
                held.status, held.requeue = SISTER_LOST, how["rerunnable"]
                signal_sessions([sid], signal.SIGKILL)
                return shell.wait()
            if now > begin + held.walltime and not held.ending:
                with held.files[1].open("ab") as err:
                    used, limit = int(now - begin) + 1, held.walltime
                    err.write(b"=>> PBS: job killed: walltime %d exceeded limit %d\n" % (used, limit))
                self._ask_to_end(held, status=WALLTIME, grace=how["kill_delay"])
            code = shell.poll()
            if held.ending:
                due = held.ending + how["kill_delay"]
                if code is not None and not alive([sid]):
                    due = held.ending + max(self.config.sweep, held.grace)
                if now >= due:
                    if code is None:
                        signal_sessions([sid], signal.SIGKILL)
                        code = shell.wait()
                    return code
            elif code is not None:
                return code
            time.sleep(0.02)

    def _ask_to_end(
        self, held: Held, *, status: int | None, requeue: bool = False, grace: float = 0.0
    ) -> None:
        held.status, held.requeue, held.grace = status, requeue, grace
        held.ending = time.monotonic()
        signal_sessions(held.sessions, signal.SIGTERM)

    def _deliver(self, held: Held, how: dict[str, Any]) -> None:
        for file, target in zip(held.files, (how["out"], how["err"]), strict=True):
            if file.exists():
                with contextlib.suppress(OSError):
                    with Path(target).open("ab") as copy:
                        copy.write(file.read_bytes())
                    Path(target).chmod(0o600)
                    _give(Path(target), held.job.user)
                file.unlink()

    # --- any host -------------------------------------------------------------------------------------------------

    def _hold(
        self, found: dict[str, Any], demux: tuple[str, int, int] | None, files: tuple[Path, Path]
    ) -> Held:
        job = Job(**{**found, "chunks": [Chunk(**chunk) for chunk in found["chunks"]]})
        nodefile, tmpdir = self.spool / "aux" / job.id, self.config.tmp_of(self.host) / f"pbs.{job.id}"
        if self.host == job.hosts[0] or self.config.nodefile_on_sisters:
            nodefile.write_text("".join(f"{name}\n" for name in job.lines))
            nodefile.chmod(0o644)
        for folder in [tmpdir, *([Path(job.directory)] if job.directory not in ("", job.home) else [])]:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _give(folder, job.user)
        site = Site(
            nodefile=str(nodefile),
            tmpdir=str(tmpdir),
            port=self.me.port,
            nodefile_on_sisters=self.config.nodefile_on_sisters,
            gpu_hook=self.config.gpu_hook,
        )
        held = self.held[job.id] = Held(job=job, site=site, demux=demux, files=files)
        return held

    def _start(
        self,
        held: Held,
        argv: list[str],
        env: dict[str, str],
        *,
        stdin: int,
        streams: tuple[Any, Any],
        executable: str | None = None,
    ) -> "subprocess.Popen[bytes]":
        """A process that leads a session of its own, in the user's home and with this environment alone."""
        user = pwd.getpwnam(held.job.user)
        become: dict[str, Any] = {}
        if os.geteuid() == 0 and user.pw_uid:
            groups = os.getgrouplist(user.pw_name, user.pw_gid)
            become = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
        return subprocess.Popen(
            argv,
            executable=executable,
            env=env,
            cwd=held.job.directory or held.job.home,
            stdin=stdin,
            stdout=streams[0],
            stderr=streams[1],
            umask=0o077,
            start_new_session=True,
            **become,
        )

    def _kill(self, held: Held) -> None:
        deadline = time.monotonic() + GONE
        while alive(sessions := list(held.sessions)) and time.monotonic() < deadline:
            signal_sessions(sessions, signal.SIGKILL)
            time.sleep(0.02)

    def _forget(self, held: Held) -> None:
        self.held.pop(held.job.id, None)
        Path(held.site.nodefile).unlink(missing_ok=True)
        shutil.rmtree(held.site.tmpdir, ignore_errors=True)
        if held.job.directory not in ("", held.job.home):
            shutil.rmtree(held.job.directory, ignore_errors=True)

    def _call(self, host: str, message: Message) -> Message:
        other = self.config.hosts[host]
        return wire.call(other.address, other.port, message)


class Demux:
    """Merges what tasks print, as it comes, into the job's files."""

    def __init__(self, address: str, out: Path, err: Path):
        self._streams = (Stream(address, out), Stream(address, err))

    @property
    def ports(self) -> tuple[int, int]:
        return self._streams[0].port, self._streams[1].port

    def close(self) -> None:
        """What tasks have sent before they ended is written, and nothing else."""
        for stream in self._streams:
            stream.end()
        for stream in self._streams:
            stream.thread.join()


class Stream:
    """What all tasks print on one of their streams, into one file."""

    def __init__(self, address: str, file: Path):
        self._listener = socket.create_server((address, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._ended, self._end = socket.socketpair()
        self.thread = threading.Thread(target=self._merge, args=(file,), daemon=True)
        self.thread.start()

    def end(self) -> None:
        self._end.close()

    def _merge(self, file: Path) -> None:
        with selectors.DefaultSelector() as selector, file.open("ab", buffering=0) as target:
            for waited_for in (self._listener, self._ended):
                selector.register(waited_for, selectors.EVENT_READ)
            tasks: list[socket.socket] = []
            wait, until = None, math.inf
            while (ready := {key.fileobj for key, _ in selector.select(wait)}) and time.monotonic() < until:
                if self._ended in ready:
                    selector.unregister(self._ended)
                    wait, until = ON_ITS_WAY, time.monotonic() + GONE
                if self._listener in ready:
                    connection, _ = self._listener.accept()
                    selector.register(connection, selectors.EVENT_READ)
                    tasks.append(connection)
                for connection in [task for task in tasks if task in ready]:
                    data = b""
                    with contextlib.suppress(OSError):
                        data = connection.recv(4096)
                    target.write(data)
                    if not data:
                        selector.unregister(connection)
                        connection.close()
                        tasks.remove(connection)
            for left in (*tasks, self._listener, self._ended):
                left.close()


def signal_sessions(sessions: Any, signum: int) -> None:
    """To every process of these sessions."""
    for pid in alive(sessions):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def alive(sessions: Any) -> list[int]:
    """The processes of these sessions that are more than zombies."""
    wanted, found = {b"%d" % session for session in sessions}, []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, _, session = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:4]
                if session in wanted and state not in b"ZX":
                    found.append(int(folder.name))
    return found


def _give(path: Path, user: str) -> None:
    if os.geteuid() == 0:
        entry = pwd.getpwnam(user)
        os.chown(path, entry.pw_uid, entry.pw_gid)


def to_message(job: Job) -> dict[str, Any]:
    return asdict(job)


def run(config: configs.Config, host: str, listener: socket.socket) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # and so in all that it starts
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    limit = MEMLOCK if hard == resource.RLIM_INFINITY else min(MEMLOCK, hard)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    os.umask(0o022)
    serving.serve(listener, Mom(config, host).answer)


def main(path: str, host: str) -> None:
    config = configs.read(path)
    run(config, host, serving.listen("0.0.0.0", config.hosts[host].port))


if __name__ == "__main__":
    main(*sys.argv[1:])
