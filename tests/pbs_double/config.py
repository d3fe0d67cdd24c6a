"""One file that all daemons read: where the server and the hosts are, and what differs between sites."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.pbs_double.commands import QUEUE

DEFAULT = "/etc/pbs.json"
KILL_DELAY = 10.0
"""Seconds, where a queue sets none."""


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """One execution host."""

    address: str
    port: int = 15003
    ncpus: int = 16
    ngpus: int = 8


@dataclass(frozen=True, kw_only=True)
class Config:
    """The installation; times are in seconds."""

    server: str = "pbssrv"
    address: str
    port: int = 15001
    hosts: Mapping[str, HostConfig] = field(default_factory=dict)
    spool: str = "/var/spool/pbs"
    tmp: str = "/var/tmp"
    home: str = ""
    """The home of whoever submits; empty for that of the password file."""
    kill_delay: float = KILL_DELAY
    """From SIGTERM to SIGKILL while something of the script's session lives; the queue's own."""
    queues: Mapping[str, float] = field(default_factory=dict)
    """Further queues, and the kill_delay of each."""
    sweep: float = 0.15
    """The same once nothing of it does."""
    look: float = 1.0
    """Between two looks whether a host is there."""
    sister_lost: float = 433.0
    """From the loss of a sister to the end of its job."""
    first_lost: float = 310.0
    """From the loss of a job's first host to its end."""
    nodefile_on_sisters: bool = True
    gpu_hook: bool = False
    split: int = 0
    """CPUs of a node, where a hook splits `-l ncpus=` over nodes."""

    @property
    def kill_delays(self) -> Mapping[str, float]:
        """Of all queues."""
        return {QUEUE: self.kill_delay, **self.queues}

    def spool_of(self, host: str) -> Path:
        """A host's own spool. `{host}` in `spool` sets hosts apart that share a file tree."""
        return Path(self.spool.replace("{host}", host))

    def tmp_of(self, host: str) -> Path:
        return Path(self.tmp.replace("{host}", host))


def to_text(config: Config) -> str:
    return json.dumps(asdict(config))


def write(config: Config, path: Path) -> None:
    path.write_text(to_text(config))
    path.chmod(0o644)


def read(path: str) -> Config:
    found = json.loads(Path(path).read_text())
    hosts = {name: HostConfig(**host) for name, host in found.pop("hosts").items()}
    return Config(**found, hosts=hosts)
