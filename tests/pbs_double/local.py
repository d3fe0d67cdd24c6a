"""The double on this machine: a server and hosts that share its file tree, each at a port of its own. For tests."""

import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import procs
from tests.pbs_double import commands, serving, wire
from tests.pbs_double import config as configs
from tests.pbs_double.config import Config, HostConfig

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Local:
    """One that is up."""

    folder: Path
    config: Config
    pids: Mapping[str, int]
    """Of the server and of each host's MoM."""

    def crash(self, host: str) -> None:
        """Every process of that host is gone at once; those of its tasks are known by the port of its MoM."""
        pid = self.pids[host]
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.005)  # or it could still tell the others how its tasks end
        mark = f"PBS_MOMPORT={self.config.hosts[host].port}".encode()
        for task, environment in procs.files("environ"):
            if mark in environment.split(b"\0"):
                with suppress(ProcessLookupError):
                    os.kill(task, signal.SIGKILL)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def run(
        self, *argv: str, cwd: Path | None = None, input: str | None = None, env: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """A command as on the login host."""
        return subprocess.run(
            argv,
            cwd=cwd or self.home,
            env={
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "HOME": str(self.home),
                "LOGNAME": "someone",
                "PWD": str(cwd or self.home),
                **(env or {}),
            },
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def submit(self, script: str, *options: str, **how: Any) -> str:
        """The id of a job of this text."""
        ended = self.run("qsub", *options, input=script, **how)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def attributes(self, id: str) -> dict[str, str]:
        """What `qstat -xf` prints, asked of the server itself."""
        answer = wire.call(self.config.address, self.config.port, {"op": "stat", "id": id})
        found: dict[str, str] = answer["jobs"][0]
        return found

    def wait(self, id: str, state: str = "F", limit: float = 60.0) -> dict[str, str]:
        """The attributes once the job is in that state."""
        deadline = time.monotonic() + limit
        while (found := self.attributes(id)).get("job_state") != state:
            assert time.monotonic() < deadline, (id, found)
            time.sleep(0.02)
        return found


@contextmanager
def up(folder: Path, hosts: Sequence[str], **settings: Any) -> Iterator[Local]:
    """The double with hosts of 16 CPUs and 8 GPUs; `settings` are of Config."""
    for name in ("bin", "home"):
        (folder / name).mkdir()
    with ExitStack() as stack:
        listeners = [stack.enter_context(serving.listen("127.0.0.1", 0)) for _ in ("the server", *hosts)]
        ports = [listener.getsockname()[1] for listener in listeners]
        config = Config(
            address="127.0.0.1",
            port=ports[0],
            hosts={
                name: HostConfig(address="127.0.0.1", port=port)
                for name, port in zip(hosts, ports[1:], strict=True)
            },
            spool=f"{folder}/spool/{{host}}",
            tmp=f"{folder}/tmp/{{host}}",
            home=f"{folder}/home",
        )
        config = dataclasses.replace(config, **settings)
        file = folder / "pbs.json"
        configs.write(config, file)
        _install(folder, config)
        with _daemons(file, dict(zip((config.server, *hosts), listeners, strict=True))) as pids:
            yield Local(folder=folder, config=config, pids=pids)


@contextmanager
def _daemons(file: Path, listeners: Mapping[str, socket.socket]) -> Iterator[dict[str, int]]:
    """The process of each that answers at one of these sockets, which are closed here; they end with this context."""
    numbers = {name: listener.fileno() for name, listener in listeners.items()}
    places = [f"{name}={number}" for name, number in numbers.items()]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.pbs_double.daemons", file, *places],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=tuple(numbers.values()),
    ) as daemons:
        for listener in listeners.values():
            listener.close()
        assert daemons.stdout is not None
        lines = [daemons.stdout.readline().split() for _ in listeners]
        yield {name: int(pid) for name, pid in lines}


def _install(folder: Path, config: Config) -> None:
    """The commands, and a login profile that finds them."""
    for name, text in commands.programs(config, f"{sys.executable} -IS", str(CHECKOUT)).items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "home/.profile").write_text(f"PATH=$PATH:{shlex.quote(str(folder / 'bin'))}\n")
