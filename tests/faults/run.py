"""Takes one run of the reference training through faults, with the job script that users submit. `go_through`
is the entry.

It reaches the moment that was drawn, breaks something, and sees the run go on; it notes how long that took,
what it cost and what was said. Every wait has a bound. In the end the run is compared with one that met no
fault.
"""

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.schedulers.hostlist import expand
from tests.cluster.account import SCRIPT, UID, WORK, Account
from tests.faults import nodes
from tests.faults.watch import PERIOD, Watch
from tests.host import Host
from tests.vcluster import Job
from train import metrics

if TYPE_CHECKING:
    from tests.faults.cases import Fault

STEPS, EVERY = 96, 8
"""Of the run, and between its checkpoints."""
NODES, RANKS = 2, 2
"""Nodes that train, and ranks on each."""
TRAINING = (
    *("-m", "train", "--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16"),
    *("batch_size=32", f"steps={STEPS}", f"checkpoint.every={EVERY}"),
)
"""The reference job's data and program with a network so small that a step takes a tenth of a second."""
PEER_TIMEOUT, HANG_TIMEOUT = 10, 30
POLICIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "requeue": (("--nodes=2",), ("--on-failure", "requeue")),
    "restart": (("--nodes=3", "--no-kill"), ("--on-failure", "restart", "--nnodes", "2")),
}
"""(sbatch's options, ours): what follows a failure. For a restart inside the allocation a node is spare."""
BOUND = 600.0
"""Seconds for whatever takes 20 where two idle cores start four ranks, 100 where they are busy, or 60 until Slurm
gives up a node."""
NOTICED = 90.0
"""Seconds in which whatever is noticed must be: the longest of the times above, and Slurm's for a node, on busy cores."""
WARNED = 3 * EVERY
"""Steps that a run has left, at least, when it is warned: its ranks go on until they have heard of it."""
ASKED = 0.2
"""Seconds between two questions to Slurm, each of which costs a tenth of that on a busy core."""
ROUTINE = re.compile(
    r"apptrain: (run directory|to follow it|job \d|this run directory has been used|the job will run again|done)"
    r"|apptrain: (job \d|network: rendezvous|preflight: \d+ nodes, nothing found)|digits-short: |resumed from |step \d+: (saved|test)|moved step-"
    r"|.*\d%\||(test accuracy|images/s|time to first step|training time|wall time|run directory) |$"
)
"""Lines that a run prints without a fault too."""


class Moment(Enum):
    """When something breaks."""

    WAITING = "before the start"
    """The job waits for its start, its first or the one after a requeue."""
    START = "start-up"
    STEP = "a step"
    SAVE = "a save"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The run that nothing happened to."""

    loss: dict[int, float]
    lr: dict[int, float]
    digest: str
    start_s: float
    """From the batch script's start to the first step."""


@dataclass(frozen=True, kw_only=True)
class Suffered:
    """What a fault did to a run. Times are in seconds from the fault."""

    case: str
    seed: str
    moment: str
    where: str
    """Where the run really was: its attempt, and step, save or start-up."""
    what: str
    """What was done to whom."""
    evidence: str
    """The line that shows it."""
    then: str
    """What became of the job."""
    noticed_s: float | None
    """Until the job said something of it, or a node left its outcome; None where nobody noticed."""
    first_step_s: float | None
    """Until the first new step; None where the run was over but for its results. Slurm's 120 s before a requeued job are
    not in it."""
    lost: int
    """Steps that were done twice."""
    bound: int
    """Steps that may be lost: the checkpoints' interval and the steps during one save."""
    said: tuple[str, ...]
    """Lines other than a run's usual ones, until it went on."""
    planned: bool

    @property
    def problems(self) -> list[str]:
        """What is not as promised."""
        found = []
        if self.planned and self.lost:
            found.append(f"{self.lost} steps lost at a planned end")
        if self.lost > self.bound:
            found.append(f"{self.lost} steps lost, at most {self.bound} may be")
        if self.noticed_s is not None and self.noticed_s > NOTICED:
            found.append(f"noticed after {self.noticed_s:.0f} s")
        if not self.evidence:
            found.append("nothing shows that it happened")
        return [f"{self.case} ({self.where}: {self.what}): {one}" for one in found]


@dataclass(kw_only=True)
class Run:
    """A run of the training, over all its jobs."""

    account: Account
    name: str
    policy: str
    """--on-failure."""
    random: random.Random
    watch: Watch
    request: tuple[str, ...] = ()
    number: int = 0
    """The job that it is, at present."""
    started: set[tuple[int, int]] = field(default_factory=set)
    """(job, restarts) of those that were let start."""
    begun: float = 0.0
    """When the last of them was."""
    since: float = 0.0
    """When the last fault happened."""
    start_s: float = 15.0
    others: "list[Run]" = field(default_factory=list)
    """Further runs that a fault has brought."""
    _seen: tuple[int, float, Job | None] = (0, 0.0, None)
    """(number, when, what) was asked last of a job."""

    # --- what a fault looks at -----------------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        """As it was at most ASKED seconds ago."""
        number, asked, found = self._seen
        if found is None or number != self.number or time.monotonic() > asked + ASKED:
            found = self.account.cluster.job(self.number)
            self._seen = self.number, time.monotonic(), found
        return found

    @property
    def folder(self) -> Path:
        """The run directory as the nodes have it."""
        return WORK / "runs" / self.name

    @property
    def on_disk(self) -> Path:
        """The same on this machine."""
        return self.account.on_disk(self.folder)

    def nodes(self) -> list[str]:
        """Those that train, in node-rank order."""
        taking_part = self.on_disk / f"outcome/{self.watch.attempt}.nodes"
        if taking_part.exists() and (lines := taking_part.read_text().splitlines()):
            return [line.split()[1] for line in lines]
        return list(expand(self.job.nodes, f"job {self.number}"))[:NODES]

    def host(self, node: str) -> Host:
        return self.account.cluster[node]

    def until(
        self, condition: Callable[[], object], what: str, bound: float = BOUND, period: float = 0.02
    ) -> None:
        deadline = time.monotonic() + bound
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {bound:g} s for {what}\n{self.report()}")
            time.sleep(period)

    def report(self) -> str:
        """For whoever has to find out why something failed."""
        cluster = self.account.cluster
        outcomes = [
            f"{path.name}: {path.read_text()}" for path in sorted((self.on_disk / "outcome").glob("[0-9]*"))
        ]
        return "\n".join(
            [
                f"{self.name}, job {self.job}",
                "--- output",
                self.watch.text(),
                "--- outcomes",
                *outcomes,
                cluster.logs(),
            ]
        )

    # --- the job -------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Submits it, held."""
        output = (
            "--open-mode=append",
            f"--output={WORK / self.name}.out",
            f"--job-name={self.name}",
            "--hold",
        )
        request, follows = POLICIES[self.policy]
        options = (
            *("--run-dir", str(self.folder), "--device", "cpu", "--nproc-per-node", str(RANKS), *follows),
            *("--peer-timeout", str(PEER_TIMEOUT), "--hang-timeout", str(HANG_TIMEOUT)),
        )
        request = (*request, "--cpus-per-task=1", *self.request)
        self.number = self.account.submit(*request, *output, SCRIPT, *options, "--", *TRAINING)

    def let_start(self) -> None:
        """Has the waiting job start."""
        cluster, job = self.account.cluster, self.job
        self.started.add((job.id, job.restarts))
        if job.restarts:
            cluster.start_requeued(job.id)
        else:
            cluster.controller.run(["scontrol", "release", str(job.id)]).check_returncode()
        self.begun = time.time()

    def waits(self) -> bool:
        """Whether the job waits for `let_start`."""
        job = self.job
        return job.state == "PENDING" and (job.id, job.restarts) not in self.started

    def reach(self, moment: Moment, fraction: float, step: int) -> None:
        """Waits for a moment. `fraction`: of a start-up or a step."""
        if moment is Moment.WAITING or (moment is Moment.START and not self.waits()):
            if not self.waits():
                self._until_step(min(step, STEPS - WARNED))
                self.rest()
            if moment is Moment.WAITING:
                return
        if self.waits():
            self.let_start()
        if moment is Moment.START:
            self.until(lambda: self.job.state == "RUNNING", "the job to run")
            deadline = time.monotonic() + fraction * self.start_s
            steps = len(self.watch.steps)
            while time.monotonic() < deadline and len(self.watch.steps) == steps:
                time.sleep(PERIOD)  # a machine that is idle again may be at its steps before
            return
        self._until_step(step)
        if moment is Moment.SAVE:
            self.until(self.watch.saving, "a save", period=0.001)
        else:
            time.sleep(fraction * 0.1)

    def rest(self) -> None:
        """Warns the job of its end, and waits until it waits for `let_start`."""
        warning = ("scancel", "--batch", "--signal=USR2", str(self.number))
        self.account.run(*warning).check_returncode()

        def waits() -> bool:
            if self.job.ended:
                raise RuntimeError(f"{self.name}: the job ended before it was warned\n{self.report()}")
            return self.waits()

        self.until(waits, "the job to wait")

    def _until_step(self, step: int) -> None:
        before = self.watch.attempt

        def reached() -> bool:
            if self.waits():  # a planned end of its own, such as the walltime's
                self.let_start()
            elif self.job.ended:
                raise RuntimeError(f"{self.name}: the job ended before step {step}\n{self.report()}")
            return self.watch.step >= step and self.watch.attempt >= before

        self.until(reached, f"step {step}", period=0.05)

    def whereabouts(self) -> str:
        """Where the run is."""
        watch = self.watch
        if self.job.state == "PENDING":
            return f"before attempt {watch.attempt + 1}"
        here = f"attempt {watch.attempt}, "
        if not watch.steps or watch.steps[-1][0] < watch.begun(watch.attempt):
            return here + "start-up"
        saving = watch.saving()
        return here + (
            f"saving step {saving.split('-')[1].split('.')[0].lstrip('0')}"
            if saving
            else f"step {watch.step}"
        )

    # --- a fault ---------------------------------------------------------------------------------------------------

    def suffer(self, fault: "Fault", moment: Moment, step: int) -> Suffered:
        """Goes through one fault."""
        seed = f"{self.name}/{fault.name}"
        self.reach(moment, self.random.random(), step)
        if fault.starts:
            what = fault.inflict(self)
        where, attempt, steps = self.whereabouts(), self.watch.attempt, len(self.watch.steps)
        job = self.job
        if not fault.starts:
            self.since = time.time()
            what = fault.inflict(self)
        if self.waits() and moment is Moment.WAITING:
            self.let_start()
            self.since = time.time()
        begin = self.since
        ends = self._go_on(fault, attempt)
        time.sleep(3 * PERIOD)  # what was written before the first new step has been read
        new = self._first_new_step(fault, attempt)
        until = time.time() if new is None or fault.survives else new
        said = tuple(
            line for at, line in self.watch.lines if begin <= at <= until and not ROUTINE.match(line)
        )
        evidence = next((line for line in said if re.search(fault.said, line)), "") or fault.evidence(self)
        lost, during = self.watch.lost(steps, EVERY)
        return Suffered(
            case=fault.name,
            seed=seed,
            moment=moment.value,
            where=where,
            what=what,
            evidence=evidence,
            then=self._then(fault, job, attempt, ends),
            noticed_s=self._noticed(begin, until, attempt),
            first_step_s=None if new is None else new - begin,
            lost=lost,
            bound=EVERY * fault.intervals + during,
            said=said,
            planned=fault.planned,
        )

    def _go_on(self, fault: "Fault", attempt: int) -> list[str]:
        """Waits until the run has gone on, and has Slurm start the job again as a user or time would."""
        ends: list[str] = []

        def gone_on() -> bool:
            if fault.survived(self) if fault.survives else self._first_new_step(fault, attempt):
                return True
            job = self.job
            if self.waits():
                fault.waiting(self)
                self.let_start()
            elif job.ended:
                ends.append(job.state)
                if job.state == "COMPLETED":
                    return True
                if not fault.ends_job:
                    raise RuntimeError(f"{fault.name}: the job ended {job.state}\n{self.report()}")
                fault.mend(self)
                self.submit()
                self.let_start()
            return False

        self.until(gone_on, f"the run to go on after: {fault.name}", fault.bound, 0.1)
        return ends

    def _first_new_step(self, fault: "Fault", attempt: int) -> float | None:
        """When a step was first done after the fault, by ranks that it has not ended."""
        since = self.since if fault.survives else max(self.since, self.watch.begun(attempt + 1))
        return next((at for at, _ in self.watch.steps if at > since), None)

    def _noticed(self, begin: float, until: float, attempt: int) -> float | None:
        """Seconds until the launcher said a word, or a node left its outcome."""
        signs = [at for at, line in self.watch.lines if _is_of_launcher(line)]
        signs += [at for name, at in self.watch.outcomes.items() if int(name.partition(".")[0]) >= attempt]
        return min((at - begin for at in signs if begin <= at <= until), default=None)

    def _then(self, fault: "Fault", before: Job, attempt: int, ends: list[str]) -> str:
        if ends and ends[0] != "COMPLETED":
            return f"{ends[0]}, submitted again"
        if before.state == "PENDING":
            return "went on once it started"
        if fault.survives or self.watch.attempt == attempt:
            return "went on"
        if self.job.restarts > before.restarts:
            return "requeued"
        return "started again in the same job"

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self, reference: Reference | None) -> list[str]:
        """Sees the run to its end; returns what is not as in the run that met no fault."""

        def ended() -> bool:
            if self.waits():
                self.let_start()
            return self.job.ended

        self.until(ended, "the job to end", period=0.1)
        problems = []
        if self.job.state != "COMPLETED":
            return [f"{self.name}: the job ended {self.job.state}\n{self.report()}"]
        if reference:
            found = self.result()
            steps = range(1, STEPS + 1)
            apart = [
                n
                for n in steps
                if (found.loss.get(n), found.lr.get(n)) != (reference.loss[n], reference.lr[n])
            ]
            if apart:
                problems.append(
                    f"{self.name}: the loss differs from step {apart[0]} on, at {len(apart)} steps"
                )
            if found.digest != reference.digest:
                problems.append(f"{self.name}: the weights differ from those of the run without a fault")
        return problems + self.left_over() + [one for other in self.others for one in other.finish(reference)]

    def result(self) -> Reference:
        history = metrics.read(self.on_disk / "metrics.jsonl")
        result = json.loads((self.on_disk / "result.json").read_text())
        return Reference(
            loss=history.loss,
            lr=history.lr,
            digest=result["weights_sha256"],
            start_s=self.watch.steps[0][0] - self.begun,
        )

    def left_over(self) -> list[str]:
        """Processes of the user that are still on a node some seconds after the end."""
        problems = []
        for name, host in self.account.cluster.nodes.items():
            deadline = time.monotonic() + 60.0
            while left := nodes.of_user(host, UID):
                if time.monotonic() > deadline:
                    lines = [" ".join(one.argv)[:100] for one in left]
                    problems.append(f"{self.name}: left on {name}: {lines}")
                    break
                time.sleep(0.1)
        return problems


def _is_of_launcher(line: str) -> bool:
    return not ROUTINE.match(line) and bool(
        re.match(r"(apptrain|entrypoint|run\.sh|srun|slurmstepd|train|WARNING)\b", line)
    )


@contextmanager
def run(
    account: Account, name: str, *, policy: str = "requeue", seed: str = "", request: tuple[str, ...] = ()
) -> Iterator[Run]:
    """A run whose job waits to be let start."""
    watch = Watch(run_dir=account.on_disk(WORK / "runs" / name), output=account.on_disk(WORK / f"{name}.out"))
    with watch:
        found = Run(
            account=account,
            name=name,
            policy=policy,
            random=random.Random(seed or name),
            watch=watch,
            request=request,
        )
        found.submit()
        yield found


def reference(account: Account) -> Reference:
    """Trains without a fault."""
    with run(account, "reference") as one:
        one.let_start()
        problems = one.finish(None)
        if problems:
            raise RuntimeError("\n".join(problems))
        return one.result()


def go_through(
    account: Account,
    name: str,
    faults: "Sequence[Fault]",
    reference: Reference,
    *,
    policy: str,
    seed: str,
    on_fault: Callable[[Suffered], object] = lambda _: None,
) -> tuple[list[Suffered], list[str]]:
    """One run through these faults, each at a moment that the seed draws: what they did, and what is not as promised."""
    suffered: list[Suffered] = []
    problems: list[str] = []
    with run(account, name, policy=policy, seed=seed, request=faults[0].request) as one, ExitStack() as last:
        one.start_s = reference.start_s
        for fault in faults:
            last.callback(fault.close, one)
            fault.prepare(one)
        for number, fault in enumerate(faults):
            part = STEPS / len(faults)
            step = int((number + 0.1 + 0.7 * one.random.random()) * part)
            step = max(min(step, fault.before), fault.after, min(one.watch.step + 1, STEPS - 2))
            suffered.append(one.suffer(fault, one.random.choice(moments(fault, policy, number)), step))
            problems += suffered[-1].problems
            on_fault(suffered[-1])
            if policy != "restart":  # there the job still has the node that it does without
                if fault.repair_takes_time and fault is not faults[-1]:
                    one.rest()
                fault.repair(one)
        problems += one.finish(reference)
        if policy == "restart":
            for fault in faults:
                fault.repair(one)
    return suffered, problems


def moments(fault: "Fault", policy: str, number: int) -> list[Moment]:
    """Those at which it can happen as the run's fault of this number; a restart comes in a job that runs on."""
    if policy == "restart" and number:
        return [one for one in fault.moments if one in (Moment.STEP, Moment.SAVE)]
    return list(fault.moments)
