"""The double on a test cluster: the server on its controller, a MoM on each GPU node. For tests.

The commands lie where OpenPBS has them, in /opt/pbs/bin, which login shells find and tasks do not.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.host import Bind, Host
from tests.pbs_double import commands
from tests.pbs_double import config as configs
from tests.pbs_double.config import Config, HostConfig
from tests.vcluster import Cluster
from tests.vcluster.layout import BY_NAME, MANAGEMENT

LIBRARY = Path("/opt/pbs/lib")
PROGRAMS = Path("/opt/pbs/bin")
BINDS = (Bind(source=Path(__file__).parent, target=LIBRARY / "tests/pbs_double"),)
"""What the cluster must show."""
HOSTS = ("gpu-a01", "gpu-a02", "gpu-b07")
PYTHON = ("env", f"PYTHONPATH={LIBRARY}", "PYTHONDONTWRITEBYTECODE=1", "python3", "-m")
INTERPRETER = "/usr/bin/env -S python3 -BIS"
LIMIT = 30.0


@dataclass(frozen=True, kw_only=True)
class Pbs:
    """OpenPBS on a cluster, as a user of its login host has it."""

    cluster: Cluster
    user: str = "alice"

    def run(
        self, *argv: Path | str, cwd: Path | str, env: Mapping[str, str] | None = None
    ) -> CompletedProcess[str]:
        """A command on the login host."""
        login = {"PATH": f"/usr/local/bin:/usr/bin:/bin:{PROGRAMS}", "PWD": str(cwd)}
        return self.cluster.login.run(argv, user=self.user, cwd=cwd, env={**login, **(env or {})})

    def submit(self, *argv: Path | str, cwd: Path | str, env: Mapping[str, str] | None = None) -> str:
        ended = self.run("qsub", *argv, cwd=cwd, env=env)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def attributes(self, id: str) -> dict[str, str]:
        """What `qstat -xf` says of a job."""
        text = self.cluster.controller.run([PROGRAMS / "qstat", "-x", "-f", id]).stdout.replace("\n\t", "")
        return dict(line.strip().partition(" = ")[::2] for line in text.splitlines() if " = " in line)

    def wait(self, id: str, state: str = "F", limit: float = 150.0) -> dict[str, str]:
        """The attributes once the job is in that state."""
        self.cluster.until(
            lambda: self.attributes(id).get("job_state") == state, f"{id} to be {state}", limit
        )
        return self.attributes(id)

    def printed(self, id: str) -> str:
        """The job's output, which is there once it has ended."""
        path = self.attributes(id)["Output_Path"].partition(":")[2]
        file = self.cluster.folder / path.lstrip("/")
        return file.read_text() if file.exists() else ""

    def delete(self, id: str, *options: str) -> None:
        assert self.run("qdel", *options, id, cwd="/").returncode == 0

    def limit(self, id: str, walltime: int) -> None:
        """Lowers the walltime of a running job of the user's, to so many seconds since its start."""
        assert self.run("qalter", "-l", f"walltime={walltime}", id, cwd="/").returncode == 0

    def rerun(self, id: str) -> None:
        """As an operator does."""
        self.cluster.controller.run([PROGRAMS / "qrerun", id]).check_returncode()


@contextmanager
def up(cluster: Cluster, **settings: Any) -> Iterator[Pbs]:
    """The double on a cluster that shows BINDS, with hosts of 16 CPUs and 4 GPUs; `settings` are of Config."""
    hosts = {name: HostConfig(address=BY_NAME[name].v4(MANAGEMENT), ngpus=4) for name in HOSTS}
    address = BY_NAME["ctl"].v4(MANAGEMENT)
    config = Config(address=address, hosts=hosts, **{"server": "pbssrv", **settings})
    for host in cluster.hosts.values():
        if host is not cluster.hosts["switch"]:
            install(host, config)
    started = [
        cluster[name].start([*PYTHON, "tests.pbs_double.mom", configs.DEFAULT, name]) for name in HOSTS
    ]
    try:
        for name in HOSTS:
            cluster.until(partial(_listens, cluster[name], hosts[name].port), f"PBS on {name}", LIMIT)
        # Not before: to the server, a host that does not answer yet is down.
        started.append(cluster.controller.start([*PYTHON, "tests.pbs_double.server", configs.DEFAULT]))
        cluster.until(partial(_listens, cluster.controller, config.port), "the server of PBS", LIMIT)
        yield Pbs(cluster=cluster)
    finally:
        for process in started:
            process.kill()
            process.wait()


def install(host: Host, config: Config) -> None:
    """Writes the configuration, the commands and the login profile of a host."""
    lines = [
        f"mkdir -p {PROGRAMS}",
        *(f"rm -f /usr/bin/{name}" for name in commands.COMMANDS),  # Slurm has some of the same names
        f"cat >{configs.DEFAULT}",
        f"echo 'PATH=$PATH:{PROGRAMS}' >/etc/profile.d/pbs.sh",
    ]
    for name, text in commands.programs(config, INTERPRETER, str(LIBRARY)).items():
        lines += [f"printf %s {shlex.quote(text)} >{PROGRAMS}/{name}", f"chmod 755 {PROGRAMS}/{name}"]
    host.run(["sh", "-c", "\n".join(lines)], input=configs.to_text(config)).check_returncode()


def left_behind(cluster: Cluster, user: str = "alice") -> dict[str, list[str]]:
    """The processes of the user on each host, without zombies."""
    found = {}
    for name in HOSTS:
        if name in cluster.hosts:
            lines = cluster[name].run(["ps", "-u", user, "-o", "stat=,args="]).stdout.splitlines()
            if alive := [line for line in lines if not re.match(r"\s*Z", line)]:
                found[name] = alive
    return found


def _listens(host: Host, port: int) -> bool:
    sockets = host.run(["ss", "-Hltn"], timeout=LIMIT)
    return sockets.returncode == 0 and f":{port} " in sockets.stdout
