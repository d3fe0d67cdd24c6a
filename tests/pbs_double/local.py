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

from tests.pbs_double import commands, wire
from tests.pbs_double import config as configs
from tests.pbs_double.config import Config, HostConfig

CHECKOUT = Path(__file__).resolve().parents[2]
TRIES = 3
LIMIT = 60.0
"""Seconds for daemons to answer."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """One that is up."""

    folder: Path
    config: Config
    moms: Mapping[str, "subprocess.Popen[bytes]"]

    def crash(self, host: str) -> None:
        """Every process of that host is gone at once; those of its tasks are known by the port of its MoM."""
        self.moms[host].kill()
        self.moms[host].wait()
        mark = f"PBS_MOMPORT={self.config.hosts[host].port}".encode()
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in file.read_bytes().split(b"\0"):
                    os.kill(int(file.parent.name), signal.SIGKILL)

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
            time.sleep(0.05)
        return found


@contextmanager
def up(folder: Path, hosts: Sequence[str], **settings: Any) -> Iterator[Local]:
    """The double with hosts of 16 CPUs and 8 GPUs; `settings` are of Config."""
    for name in ("bin", "home"):
        (folder / name).mkdir()
    for _ in range(TRIES):
        ports = _free_ports(len(hosts) + 1)
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
        _install(folder, file)
        with ExitStack() as stack:
            moms = {host: _start(stack, "mom", file, host) for host in hosts}
            ready = all(_answers(config.hosts[host].port, mom) for host, mom in moms.items())
            # Not before: to the server, a host that does not answer yet is down.
            if ready and _answers(config.port, _start(stack, "server", file)):
                yield Local(folder=folder, config=config, moms=moms)
                return
    raise wire.Lost(f"no free ports in {TRIES} tries")


def _start(stack: ExitStack, module: str, *arguments: Path | str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.pbs_double.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _install(folder: Path, file: Path) -> None:
    """The commands, and a login profile that finds them."""
    for name in commands.COMMANDS:
        words = ["env", f"PYTHONPATH={CHECKOUT}", f"{configs.VARIABLE}={file}", sys.executable, "-m"]
        line = shlex.join([*words, "tests.pbs_double.commands", name])
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    (folder / "home/.profile").write_text(f"PATH=$PATH:{shlex.quote(str(folder / 'bin'))}\n")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _answers(port: int, daemon: "subprocess.Popen[bytes]") -> bool:
    """Whether the daemon listens there in the end; not where somebody else took the port first."""
    deadline = time.monotonic() + LIMIT
    while daemon.poll() is None:
        with suppress(wire.Lost):
            wire.connect("127.0.0.1", port, 1.0).close()
            return daemon.poll() is None
        assert time.monotonic() < deadline, f"the daemon at port {port} does not answer"
        time.sleep(0.05)
    return False
