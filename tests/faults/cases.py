"""What can break, how it is broken, and what must show it: each subclass of `Fault` is a case.

A fault is real: a signal to a process that is there, a host without power, a switch that drops packets, a
file system without room. `inflict` returns when it has happened, with a few words on what.
"""

import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from entrypoint.plan.rendezvous import port_pair
from tests.cluster.account import SOFTWARE, UID
from tests.faults import nodes
from tests.faults.nodes import Process
from tests.faults.run import EVERY, STEPS, Moment, Run
from tests.faults.run import run as new_run
from train import checkpoint

RUNNING = (Moment.START, Moment.STEP, Moment.SAVE)


class Fault(ABC):
    name: ClassVar[str]
    policies: ClassVar[tuple[str, ...]] = ("requeue",)
    """The --on-failure under which it is tried."""
    after: ClassVar[int] = 0
    before: ClassVar[int] = STEPS
    """The steps between which it can happen."""
    moments: ClassVar[tuple[Moment, ...]] = RUNNING
    planned: ClassVar[bool] = False
    """It is announced, and no step may be lost."""
    survives: ClassVar[bool] = False
    """The ranks go on."""
    ends_job: ClassVar[bool] = False
    """The job ends for good; the user mends what is to mend and submits again."""
    intervals: ClassVar[int] = 1
    """How many of the checkpoints' intervals may be lost."""
    bound: ClassVar[float] = 600.0
    """Seconds until the run goes on."""
    said: ClassVar[str]
    """Matches the line of the job's output that shows it."""
    explained: ClassVar[tuple[str, ...]] = ()
    """What `apptrain explain` makes of the job's output, one of these; empty if that has nothing of it."""
    repair_takes_time: ClassVar[bool] = False
    """The training could be over before it is repaired: the job waits meanwhile."""
    starts: ClassVar[bool] = False
    """`inflict` has the waiting job start."""
    request: ClassVar[tuple[str, ...]] = ()
    """Further options of sbatch, where it is the first of a run."""

    def prepare(self, run: Run) -> None:
        """What must be there before the run's first job starts."""

    @abstractmethod
    def inflict(self, run: Run) -> str:
        """Has it happen; returns a few words on what did."""

    def evidence(self, run: Run) -> str:
        """What shows it where the job's output does not; empty where nothing does."""
        return ""

    def survived(self, run: Run) -> bool:
        """Whether the ranks have gone on after it."""
        return False

    def waiting(self, run: Run) -> None:
        """What happens while the job waits after it."""

    def mend(self, run: Run) -> None:
        """What the user does before submitting again."""

    def repair(self, run: Run) -> None:
        """Makes the cluster whole again, once the run has gone on; under `restart` once the run is over."""

    def close(self, run: Run) -> None:
        """Takes away what is left of it, once the run is over, however that was."""


# --- processes ------------------------------------------------------------------------------------------------------


def found(run: Run, what: str, look: Callable[[], Process | None]) -> Process:
    """A process, once it is there."""
    seen: list[Process] = []

    def there() -> bool:
        seen[:] = [one for one in (look(),) if one]
        return bool(seen)

    run.until(there, what)
    return seen[0]


def a_rank(run: Run, rank: int, names: list[str]) -> tuple[Process, str]:
    """A rank of the run, and its node."""
    node = names[rank // 2]
    return found(run, f"rank {rank}", lambda: nodes.ranks(run.host(node), str(run.folder)).get(rank)), node


class KilledRank(Fault):
    name = "kill -9 of a rank"
    policies: ClassVar[tuple[str, ...]] = ("requeue", "restart")
    said = r"rank \d+ on \S+(:| failed first,).*SIGKILL"
    explained = ("rank-killed",)
    among: ClassVar[int] = 4

    def inflict(self, run: Run) -> str:
        rank = run.random.randrange(self.among)
        process, node = a_rank(run, rank, run.nodes())
        os.kill(process.pid, signal.SIGKILL)
        return f"killed rank {rank} on {node}"


class KilledFirstNodesRank(KilledRank):
    among = 2


class KilledAgent(Fault):
    name = "kill -9 of torchrun's agent"
    said = r"torchrun's agent ended with status -9"
    explained = ("launcher-killed",)

    def inflict(self, run: Run) -> str:
        node = run.random.choice(run.nodes())
        process = found(run, "an agent", lambda: nodes.agent(run.host(node), str(run.folder)))
        os.kill(process.pid, signal.SIGKILL)
        return f"killed the agent on {node}"


class KilledLauncher(Fault):
    name = "kill -9 of the launcher"
    said = r"status 137|was lost|: lost: "
    explained = ("launcher-killed", "node-lost")

    def inflict(self, run: Run) -> str:
        node = run.random.choice(run.nodes())
        process = found(run, "a launcher", lambda: nodes.launcher(run.host(node), str(run.folder)))
        os.kill(process.pid, signal.SIGKILL)
        return f"killed the entrypoint on {node}"


class StoppedRank(Fault):
    name = "SIGSTOP of a rank"
    moments = (Moment.STEP, Moment.SAVE)
    said = r"stopped by a signal"
    explained = ("rank-stuck",)

    def inflict(self, run: Run) -> str:
        rank = run.random.randrange(4)
        process, node = a_rank(run, rank, run.nodes())
        os.kill(process.pid, signal.SIGSTOP)
        return f"stopped rank {rank} on {node}"


# --- nodes and networks ------------------------------------------------------------------------------------------


class DeadNode(Fault):
    """Slurm gives the node up and starts the job elsewhere."""

    name = "power off a node"
    policies: ClassVar[tuple[str, ...]] = ("requeue", "restart")
    said = r"[Nn]ode failure|was lost|: lost: "
    explained: ClassVar[tuple[str, ...]] = ("node-lost", "slurm-node-failure")
    repair_takes_time = True
    place: ClassVar[int] = -1

    def __init__(self) -> None:
        self.node = ""

    def inflict(self, run: Run) -> str:
        self.node = run.nodes()[self.place]
        run.account.cluster.power_off(self.node)
        return f"powered off {self.node}"

    def evidence(self, run: Run) -> str:
        return in_controllers_log(run, rf"failure of node {self.node}|{self.node} not responding")

    def repair(self, run: Run) -> None:
        run.account.cluster.power_on(self.node)
        run.account.cluster.until(lambda: self._is_up(run), f"{self.node} to be used again", 60)

    def _is_up(self, run: Run) -> bool:
        return run.account.cluster.node_states()[self.node] in ("idle", "mix", "mixed", "alloc", "allocated")


class DeadFirstNode(DeadNode):
    name = "power off the first node"
    explained: ClassVar[tuple[str, ...]] = ("node-lost", "job-script-lost")
    policies: ClassVar[tuple[str, ...]] = ("requeue",)
    place = 0


class CutNode(DeadNode):
    """Longer than --peer-timeout; the cut node must end its own ranks."""

    name = "cut a node off the network"
    explained: ClassVar[tuple[str, ...]] = (
        *("node-lost", "cut-off", "slurm-node-failure", "slurm-launch-failed"),
        *("join-out-of-reach", "job-script-lost"),
    )
    policies: ClassVar[tuple[str, ...]] = ("requeue",)

    def inflict(self, run: Run) -> str:
        self.node = run.random.choice(run.nodes())
        run.account.cluster.cut(self.node)
        return f"cut {self.node} off both networks"

    def repair(self, run: Run) -> None:
        host = run.host(self.node)
        folder = str(
            run.folder
        )  # a job script that ran there is Slurm's to end, once it reaches the node again
        run.until(lambda: not nodes.ranks(host, folder), f"the ranks on {self.node} to end by themselves", 60)
        run.account.cluster.heal(self.node)
        run.account.cluster.power_off(self.node)  # Slurm takes a minute or two to trust it again
        super().repair(run)


class RankAndNode(DeadNode):
    """A rank on the first node, and a moment later the power of the last."""

    name = "kill -9 of a rank, power off another node"
    explained: ClassVar[tuple[str, ...]] = ("rank-killed", "slurm-node-failure", "node-lost")
    policies: ClassVar[tuple[str, ...]] = ("requeue",)

    def inflict(self, run: Run) -> str:
        return f"{KilledFirstNodesRank().inflict(run)}, {super().inflict(run)}"


class ShortCut(Fault):
    """Shorter than --peer-timeout; nobody needs to notice."""

    name = "cut a node off for 5 s"
    moments = (Moment.STEP, Moment.SAVE)
    survives = True
    planned = True  # no step is lost
    said = r"$nothing"
    seconds: ClassVar[float] = 5.0

    def inflict(self, run: Run) -> str:
        cluster, node = run.account.cluster, run.random.choice(run.nodes())
        cluster.cut(node)
        self.cut, step = time.time(), run.watch.step
        time.sleep(self.seconds)
        cluster.heal(node)
        self.healed = time.time()
        return f"cut {node} off both networks after step {step} for {self.seconds:g} s"

    def evidence(self, run: Run) -> str:
        done = [at for at, _ in run.watch.steps if self.cut + 1.0 < at < self.healed]
        return "" if done else "no step was done meanwhile"

    def survived(self, run: Run) -> bool:
        return sum(at > self.healed for at, _ in run.watch.steps) >= 2


# --- the scheduler ------------------------------------------------------------------------------------------------


class Warned(Fault):
    name = "scancel --batch --signal=USR2, a warning"
    planned = True
    said = r"warned of the end"
    explained = ("planned-end",)

    def inflict(self, run: Run) -> str:
        run.account.run("scancel", "--batch", "--signal=USR2", str(run.number)).check_returncode()
        return f"warned job {run.number}"


class Cancelled(Fault):
    name = "scancel, without a warning"
    ends_job = True
    said = r"ended by a signal \(status 143\)|CANCELLED"
    explained = ("slurm-job-cancelled",)

    def inflict(self, run: Run) -> str:
        run.account.run("scancel", str(run.number)).check_returncode()
        return f"cancelled job {run.number}"


class Walltime(Fault):
    """Slurm warns the job before its time is over, when it looks at all jobs' times, every half a minute."""

    name = "walltime"
    moments = (Moment.WAITING,)
    planned = True
    starts = True
    request = ("--time=5", "--signal=B:USR2@295")
    said = r"warned of the end"
    explained = ("planned-end",)

    def inflict(self, run: Run) -> str:
        """Waits for such a look, starts the job so that the next one falls into it, and waits for the warning."""
        cluster, log = run.account.cluster, run.account.cluster.folder / "log/slurmctld.log"
        since = log.stat().st_size
        cluster.controller.run(["scontrol", "setdebug", "debug2"]).check_returncode()
        run.until(
            lambda: b"Testing job time limits" in log.read_bytes()[since:], "Slurm to look at times", 70
        )
        cluster.controller.run(["scontrol", "setdebug", "info"]).check_returncode()
        ahead = (0.4 + 0.6 * run.random.random()) * run.start_s
        time.sleep(max(0.0, 30.0 - ahead))
        run.let_start()
        run.until(lambda: "warned of the end" in run.watch.text(run.begun), "Slurm's warning", 90)
        run.since, self.warning = next(line for line in run.watch.lines if "warned of the end" in line[1])
        return "the time limit was 5 minutes, with a warning 295 s before"

    def evidence(self, run: Run) -> str:
        return self.warning

    def waiting(self, run: Run) -> None:
        update = ["scontrol", "update", f"JobId={run.number}", "TimeLimit=60"]
        run.account.cluster.controller.run(update).check_returncode()


class Requeued(Fault):
    name = "scontrol requeue, as a preemption does"
    said = r"REQUEUE|ended by a signal \(status 143\)|ended by SIGTERM|CANCELLED|PREEMPT"
    explained = ("slurm-requeued",)

    def inflict(self, run: Run) -> str:
        run.account.run("scontrol", "requeue", str(run.number)).check_returncode()
        return f"requeued job {run.number}"


class SharedNodes(Fault):
    """A second run of the same training starts on the same nodes at the same time."""

    name = "two jobs on the same nodes"
    moments = (Moment.WAITING,)
    survives = True
    planned = True
    said = r"$nothing"

    def inflict(self, run: Run) -> str:
        self.seen = ""
        on_nodes(run, names := gpu_nodes(run, 2))
        self.context = new_run(run.account, f"{run.name}-beside", policy=run.policy)
        self.other = self.context.__enter__()
        run.others.append(self.other)
        on_nodes(self.other, names)
        self.other.let_start()
        return f"job {self.other.number} on {','.join(names)} too"

    def survived(self, run: Run) -> bool:
        mine, other = run.job, self.other.job
        if mine.nodes == other.nodes and {mine.state, other.state} == {"RUNNING"}:
            self.seen = f"jobs {mine.id} and {other.id} ran on {mine.nodes} at once"
        if other.ended and other.state != "COMPLETED":
            raise RuntimeError(f"{self.name}: the other job ended {other.state}\n{self.other.report()}")
        return all(any(at > run.since for at, _ in one.watch.steps) for one in (run, self.other))

    def evidence(self, run: Run) -> str:
        return self.seen

    def close(self, run: Run) -> None:
        if hasattr(self, "context"):
            self.context.__exit__(None, None, None)


# --- what is there before the start ------------------------------------------------------------------------------

LISTEN = """\
import socket, sys
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("listens", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"220 mail.example.org ready\\r\\n")
"""


class TakenPort(Fault):
    name = "a stranger holds the port"
    moments = (Moment.WAITING,)
    planned = True
    said = r"attempt \d+: .*(taken|no apptrain hub)"
    explained = ("store-port-taken", "join-port-taken", "join-no-hub")

    def inflict(self, run: Run) -> str:
        store, join = port_pair(job_number=run.number, array_index=0, step=0, attempt=run.watch.attempt + 1)
        port = run.random.choice((store, join))
        self.strangers = []
        for name, host in run.account.cluster.nodes.items():
            argv = ["python3", "-c", LISTEN, str(port)]
            process = host.start(argv, user="bob", cwd="/", stdout=subprocess.PIPE)
            assert process.stdout
            assert process.stdout.readline(), name
            self.strangers.append(process)
        return f"bob listens on port {port} of every node, torch's store's" + (
            " neighbour" if port == join else ""
        )

    def repair(self, run: Run) -> None:
        for process in self.strangers:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


class MissingImage(Fault):
    name = "the image is missing on one node"
    moments = (Moment.WAITING,)
    planned = True
    ends_job = True
    said = r"there is no image"
    explained = ("image-missing",)

    def inflict(self, run: Run) -> str:
        on_nodes(run, names := gpu_nodes(run, 2))
        self.node = run.random.choice(names)
        self._sh(run, f"mount -t tmpfs nothing {SOFTWARE}")
        return f"no image on {self.node}"

    def mend(self, run: Run) -> None:
        self._sh(run, f"umount {SOFTWARE}")

    def _sh(self, run: Run, line: str) -> None:
        ended = run.host(self.node).run(["sh", "-c", line])
        assert ended.returncode == 0, ended.stderr


class DamagedCheckpoint(Fault):
    name = "the newest checkpoint is damaged"
    after = 2 * EVERY + 2
    moments = (Moment.WAITING,)
    intervals = 2
    said = r"WARNING: skipped .*is not as it was written"
    explained = ("checkpoint-skipped",)

    def inflict(self, run: Run) -> str:
        newest = next(iter(checkpoint.newest_first(run.watch.checkpoints)))
        file = newest / run.random.choice(("model.safetensors", "optimizer.safetensors"))
        content = bytearray(file.read_bytes())
        at = run.random.randrange(len(content))
        content[at] ^= 1 << run.random.randrange(8)
        file.write_bytes(content)
        return f"changed a bit of {newest.name}/{file.name}"


# --- the disk ---------------------------------------------------------------------------------------------------------


class FullDisk(Fault):
    """The checkpoints lie on a small file system of the first node, which somebody fills and later empties."""

    name = "the disk is full while saving"
    moments = (Moment.SAVE,)
    before = STEPS // 2
    survives = True
    planned = True
    said = r"No space left on device"
    explained = ("disk-full",)
    size: ClassVar[int] = 64 << 20

    def prepare(self, run: Run) -> None:
        on_nodes(run, names := gpu_nodes(run, 2))
        self.host, self.folder, self.emptied = run.host(names[0]), run.folder / "checkpoints", False
        account = run.account
        account.folder(self.folder)
        for folder in (account.on_disk(run.folder), account.on_disk(self.folder)):
            folder.chmod(0o700)
        options = f"size={self.size},uid={UID},gid={UID},mode=700"
        mounted = self.host.run(["mount", "-t", "tmpfs", "-o", options, "small", self.folder])
        assert mounted.returncode == 0, mounted.stderr
        run.watch.checkpoints = Path(f"/proc/{self.host.pid}/root{self.folder}")

    def inflict(self, run: Run) -> str:
        room = os.statvfs(run.watch.checkpoints)
        assert room.f_blocks * room.f_frsize <= self.size, "this is not the small file system"
        self.ballast = run.watch.checkpoints / "ballast"
        self._fill()
        return f"filled the file system of {self.folder.name}"

    def _fill(self) -> None:
        with self.ballast.open("ab") as file:
            for size in (1 << 20, 1 << 16, 1 << 12):
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)

    def survived(self, run: Run) -> bool:
        """What an older checkpoint leaves when it is removed is taken too: else the next save may find room."""
        text = run.watch.text(run.since)
        if not self.emptied and "No space left on device" in text:
            self.ballast.unlink()
            self.emptied = True
        elif not self.emptied:
            self._fill()
        return "works again" in text

    def close(self, run: Run) -> None:
        if hasattr(self, "host"):
            self.host.run(["umount", "--lazy", self.folder])


# --- for several of them ---------------------------------------------------------------------------------------------


def gpu_nodes(run: Run, number: int) -> list[str]:
    """Some that are on, in their order."""
    names = sorted(name for name in run.account.cluster.nodes if name.startswith("gpu-"))
    return sorted(run.random.sample(names, number))


def on_nodes(run: Run, names: list[str]) -> None:
    """Has the waiting job start on these nodes."""
    update = ["scontrol", "update", f"JobId={run.number}", f"ReqNodeList={','.join(names)}"]
    run.account.cluster.controller.run(update).check_returncode()


def in_controllers_log(run: Run, pattern: str) -> str:
    """The last line of slurmctld's log that matches; empty where none does."""
    lines = (run.account.cluster.folder / "log/slurmctld.log").read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if re.search(pattern, line)), "")


Plan = tuple[str, tuple[type[Fault], ...]]
"""A run: --on-failure, and the faults in their order."""
ROUND: tuple[Plan, ...] = (
    ("requeue", (FullDisk,)),
    ("restart", (KilledRank, DeadNode)),
    ("requeue", (Warned, RankAndNode, SharedNodes)),
    ("requeue", (DeadFirstNode, CutNode, ShortCut)),
    ("requeue", (MissingImage, KilledLauncher, Cancelled, DamagedCheckpoint)),
    ("requeue", (TakenPort, KilledAgent, StoppedRank, Requeued)),
    ("requeue", (Walltime, KilledRank, DeadNode)),
)
"""Every fault once. Some only come first: see `request` and `prepare`."""
ALL = {
    re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower(): kind for policy, kinds in ROUND for kind in kinds
}
"""By the names that the command line has for them."""
