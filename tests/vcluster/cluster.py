"""A cluster of test hosts: brings them up in order, starts one again, and finds and ends them all.

A cluster NAME is the hosts NAME.switch, NAME.ctl and so on. What the hosts share (homes, /scratch, Slurm's
configuration, logs) lies in the switch's folder, and is gone when that host is.
"""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from tests import host
from tests.host import Bind, Host, Refused, root
from tests.vcluster import jobs, slurm, switch
from tests.vcluster.jobs import Job
from tests.vcluster.layout import BY_NAME, MEMBERS, NETWORKS, Member, Network, Style, hosts_file
from tests.vcluster.slurm import Proctrack

SERVICES = Path(__file__).with_name("services.sh")
LIMIT = 60.0
"""Seconds allowed for daemons to start and for nodes to become idle, which normally takes two."""
SHARED = {"home": "/home", "scratch": "/scratch", "slurm": slurm.FOLDER, "log": slurm.LOGS}
LAST_LINES = 15
NUMBERS = itertools.count(1)
"""They tell clusters of one process apart."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the hosts of a cluster have in common. It is kept, so that one of them can be started again."""

    name: str
    online: bool
    binds: tuple[Bind, ...]
    proctrack: Proctrack
    owned: bool

    def key(self, name: str) -> str:
        return f"{self.name}.{name}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster that is up."""

    plan: Plan
    hosts: dict[str, Host]
    """Those that are up, and the switch."""

    def __getitem__(self, name: str) -> Host:
        """One of its hosts; Refused if that is off."""
        return self.hosts[self._on(name).name]

    @property
    def folder(self) -> Path:
        """Where home, scratch, slurm and log lie on this machine: what all hosts share."""
        return self.hosts["switch"].folder / "shared"

    @property
    def login(self) -> Host:
        return self["login1"]

    @property
    def controller(self) -> Host:
        return self["ctl"]

    @property
    def nodes(self) -> dict[str, Host]:
        """The compute nodes that are up."""
        return {name: node for name, node in self.hosts.items() if name in BY_NAME and _is_compute(name)}

    def submit(self, argv: Sequence[str], *, user: str = "alice", cwd: str = "/scratch") -> int:
        """Submits with `sbatch ARGV` on the login host; returns the job's number."""
        return jobs.submit(self.login, list(argv), user=user, cwd=cwd)

    def job(self, number: int | str) -> Job:
        return jobs.show(self.controller, number)

    def wait(self, number: int | str, timeout: float = 120.0) -> Job:
        """The job, once it has ended and all its processes are gone."""
        self.until(lambda: self.job(number).ended, f"job {number} to end", timeout)
        return self.job(number)

    def start_requeued(self, number: int | str, timeout: float = LIMIT) -> None:
        """Has a job that was requeued start in two seconds; Slurm would wait for two minutes."""
        self.until(lambda: self.job(number).state == "PENDING", f"job {number} to wait", timeout)
        jobs.start_soon(self.controller, number)

    def node_states(self) -> dict[str, str]:
        """What sinfo calls each compute node: idle, mixed, allocated, down* ..."""
        return jobs.node_states(self.controller)

    def wait_idle(self, timeout: float = LIMIT) -> None:
        """Waits until Slurm could use all compute nodes at once."""
        everywhere = {member.name: "idle" for member in MEMBERS if member.role == "compute"}

        def idle() -> bool:
            with suppress(Refused):  # the controller has not begun to answer
                return self.node_states() == everywhere
            return False

        self.until(idle, "all nodes to be idle", timeout)

    def until(self, condition: Callable[[], object], what: str, timeout: float) -> None:
        """Waits until the condition is true; after that time TimeoutError with the ends of Slurm's logs.

        Asked often, Slurm's commands would cost what waits for them a third of a core: the longer it takes, the
        less often.
        """
        begin = time.monotonic()
        while not condition():
            waited = time.monotonic() - begin
            if waited > timeout:
                raise TimeoutError(f"waited {timeout:g} s for {what}\n{self.logs()}")
            time.sleep(min(max(0.1, waited / 20), 0.5))

    def logs(self) -> str:
        """The last lines of each of Slurm's logs."""
        ends = []
        for file in sorted((self.folder / "log").glob("*.log")):
            lines = file.read_text(errors="replace").splitlines()[-LAST_LINES:]
            ends.append("\n".join([f"==> {file} <==", *lines]))
        return "\n\n".join(ends)

    def cut(self, name: str, *networks: Network) -> None:
        """Drops all packets from and to a host on these networks, or on both; neither side is told."""
        switch.drop(self.hosts["switch"], self._on(name), networks or NETWORKS)

    def heal(self, name: str, *networks: Network) -> None:
        """Lets them through again."""
        switch.forward(self.hosts["switch"], self._on(name), networks or NETWORKS)

    def power_off(self, name: str) -> None:
        """Ends a host as a power cut does: first it is unplugged, so that nobody is told, then its processes end."""
        switch.unplug(self.hosts["switch"], self._on(name))
        self.hosts.pop(name).down()

    def power_on(self, name: str) -> None:
        """Starts a host anew, with a fresh file tree; a compute node is known to the controller again."""
        member, before = BY_NAME[name], int(time.time())
        self._start(member)
        self._serve([member])
        if member.role == "compute":
            self.until(
                lambda: jobs.slurmd_started(self.controller, name) >= before, f"{name} to register", LIMIT
            )

    def name_hosts(self, name: str, style: Style) -> None:
        """Writes /etc/hosts of one host in one of the ways that sites do."""
        self[name].run(["tee", "/etc/hosts"], input=hosts_file(BY_NAME[name], style))

    def configure(self, settings: Mapping[str, str]) -> None:
        """Sets lines of slurm.conf, for as long as the cluster is up, and has all daemons read it again."""
        file = self.folder / "slurm/slurm.conf"
        file.write_text(slurm.changed(file.read_text(), settings))
        self.controller.run(["scontrol", "reconfigure"]).check_returncode()

    def down(self) -> None:
        """Ends all hosts, and removes what belongs to them."""
        for name in reversed(list(self.hosts)):  # the switch, whose folder all others show, was the first
            self.hosts.pop(name).down()

    def _on(self, name: str) -> Member:
        if name not in self.hosts:
            raise Refused(f"host {name} of cluster {self.plan.name} is off: turn it on")
        return BY_NAME[name]

    def _start(self, member: Member) -> None:
        shared = [
            Bind(source=self.folder / part, target=Path(target), mode="rw") for part, target in SHARED.items()
        ]
        plan = self.plan
        self.hosts[member.name] = node = host.boot(
            member.name,
            key=plan.key(member.name),
            online=plan.online and member.role == "login",
            binds=[*shared, *plan.binds],
            controllers=slurm.CONTROLLERS[plan.proctrack] if member.role == "compute" else (),
            owned=plan.owned,
        )
        switch.plug(self.hosts["switch"], node, member)
        self.name_hosts(member.name, "management")

    def _serve(self, members: Sequence[Member]) -> None:
        """Starts the daemons of some hosts at once."""
        started = []
        for member in members:
            with SERVICES.open() as script:
                argv = ["bash", "-s", "--", member.role, str(member.gpus)]
                process = self[member.name].start(
                    argv, stdin=script, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                )
            started.append((member, process))
        for member, process in started:
            _, said = process.communicate(timeout=LIMIT)
            if process.returncode:
                raise Refused(f"the daemons of {member.name} did not start: {said.strip()}\n{self.logs()}")


@contextmanager
def up(
    name: str = "test",
    *,
    online: bool = False,
    binds: Sequence[Bind] = (),
    proctrack: Proctrack = "linuxproc",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Cluster]:
    """A cluster for the length of a `with`; it ends with the calling thread, too, however that ends."""
    name = f"{name}.{os.getpid()}.{next(NUMBERS)}"
    cluster = boot(name, online=online, binds=binds, proctrack=proctrack, settings=settings, owned=True)
    try:
        yield cluster
    finally:
        cluster.down()


def boot(
    name: str,
    *,
    online: bool = False,
    binds: Sequence[Bind] = (),
    proctrack: Proctrack = "linuxproc",
    settings: Mapping[str, str] = MappingProxyType({}),
    owned: bool = False,
) -> Cluster:
    """Brings up a cluster whose nodes are idle.

    `online` gives the login host the way out that this machine has. All hosts show `binds`. `settings` are lines of
    slurm.conf, beside or instead of those that a cluster has. One that is not `owned` stays until someone takes it
    down.
    """
    plan = Plan(name=name, online=online, binds=tuple(binds), proctrack=proctrack, owned=owned)
    cluster = Cluster(plan=plan, hosts={"switch": host.boot("switch", key=plan.key("switch"), owned=owned)})
    with ExitStack() as failed:
        failed.callback(cluster.down)
        _share(cluster.folder, slurm.files(proctrack, settings))
        switch.install(cluster.hosts["switch"])
        for member in MEMBERS:
            cluster._start(member)
        # The controller first: a node that does not find it waits for seconds before it tries again.
        cluster._serve([BY_NAME["ctl"]])
        cluster._serve([member for member in MEMBERS if member.name != "ctl"])
        cluster.wait_idle()
        (cluster.folder / "plan.json").write_text(_to_json(plan))
        failed.pop_all()
    return cluster


def find(name: str) -> Cluster | None:
    """The cluster of that name, if it is up."""
    first = host.find(f"{name}.switch")
    try:
        plan = _from_json((first.folder / "shared/plan.json").read_text()) if first else None
    except FileNotFoundError:
        return None
    if not first or not plan:
        return None
    members = {member.name: host.find(plan.key(member.name)) for member in MEMBERS}
    return Cluster(
        plan=plan, hosts={"switch": first, **{name: node for name, node in members.items() if node}}
    )


def down(name: str) -> None:
    """Ends what there is of the cluster of that name, also one that did not come up whole."""
    for member in (*BY_NAME, "switch"):
        if found := host.find(f"{name}.{member}"):
            found.down()


def _share(folder: Path, config: Mapping[str, str]) -> None:
    """Makes what all hosts see: homes and /scratch as they are in the root, and Slurm's configuration."""
    folder.mkdir()
    for part in ("home", "scratch"):
        subprocess.run(["cp", "--archive", root.path() / part, folder / part], check=True)
    (folder / "log").mkdir()
    shutil.copytree(root.path() / "etc/slurm", folder / "slurm")
    for name, text in config.items():
        (folder / "slurm" / name).write_text(text)
    for file in [folder, *folder.glob("slurm"), *folder.glob("slurm/*"), folder / "log"]:
        file.chmod(0o755 if file.is_dir() else 0o644)  # whatever the umask


def _to_json(plan: Plan) -> str:
    return json.dumps(asdict(plan), default=os.fspath)


def _from_json(text: str) -> Plan:
    found = json.loads(text)
    binds = [
        Bind(source=Path(bind["source"]), target=Path(bind["target"]), mode=bind["mode"])
        for bind in found["binds"]
    ]
    return Plan(**{**found, "binds": tuple(binds)})


def _is_compute(name: str) -> bool:
    return BY_NAME[name].role == "compute"
