"""`apptrain run`: runs a job of one or more nodes on this machine, without a cluster. Begin at `main`;
`_Nodes` starts the nodes and waits for them.

It does what a scheduler and a job script do elsewhere. Each node is a process with a loopback address of its
own and an environment of its own (`node_env`), and resolves its plan as on any cluster.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from entrypoint.cli import main as cli
from entrypoint.core import checkout, files, streams
from entrypoint.core.errors import DONE, INTERRUPTED, SAVED, BadInput, Refusal, of_returncode
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted, shell_word
from entrypoint.job import lock, outcome, rundir
from entrypoint.job.again import another_port_may_help
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.node import guardian, processes
from entrypoint.plan import commands, mistakes, options, passed, rendezvous, secret_file, sources
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.plan.resolve import resolve
from entrypoint.ranks import output
from entrypoint.record import reading
from entrypoint.run import endings, launch
from entrypoint.run.node_state import PLANNED
from entrypoint.run.signals import HANDLED, handled_signals
from entrypoint.schedulers import embedded as variables
from entrypoint.schedulers import variables as visible

ENTRYPOINT: Sequence[str] = (sys.executable, "-P", "-m", "entrypoint")
"""What is run on a node."""
OF_LAUNCH = """options of launch, such as
  --device cpu --nproc-per-node 2 --mode exec --no-python --on-failure restart
  `apptrain run --help-all` has them all.
--image [FILE]: in the image (default: APPTRAIN_IMAGE, else the checkout's).
Python: that of the active venv or conda environment if it has torch 2.7 or more
and psutil, else that of .venv, made if missing (3.1 GB). VENV=DIR chooses.
Example: apptrain run --nodes 2 -- my_script.py --lr 0.1

Then, on a cluster: apptrain submit --cluster NAME --nodes 2 -- my_script.py

"""
WITHOUT_CMD = (
    "no CMD given: trains the reference job, as apptrain demo; your own: apptrain run -- my_script.py"
)
AFTER_SIGNAL = 10.0
"""Seconds, beyond those in which ranks may save, that tasks have to end after a signal."""
AFTER_END = 180.0
"""The same after the end of a task with which all others end: a slow file system may hold their outcome."""
GOES_ON = (SAVED, INTERRUPTED, 128 + signal.SIGTERM)
"""Ends that somebody wanted."""
STOPPED = 10.0
"""Seconds after which tasks are killed that somebody has stopped (SIGSTOP), if all others have ended."""
TO_DIE = 5.0
"""Seconds that the kernel has to end a task that was killed: one in the middle of I/O may not end at all."""


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """What is asked of the embedded scheduler."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int | None
    """None: nobody said."""
    run_dir: Path
    job_id: str
    launch: tuple[str, ...]
    """Arguments of `entrypoint launch`."""
    outcome_per_task: bool = False
    """Whether every task writes an outcome (mode `rank`), instead of every node."""
    term_grace: float = 25.0
    """Seconds that ranks have to save after SIGTERM."""
    may_restart: bool = False
    """Whether tasks may go on after one has failed."""
    port_by_hand: bool = False
    """A taken port that was chosen is not tried again."""
    without_cmd: bool = False
    """Nobody said what to run."""
    is_demo: bool = False
    """Of somebody who tries this out, and may be told what comes next."""

    @property
    def names(self) -> list[str]:
        return [f"127.0.0.{number}" for number in range(1, self.nodes + 1)]


def main(argv: Sequence[str], check_python: Callable[[str], None] = lambda _: None) -> int:
    """Runs one job and returns its status. `check_python` may raise BadInput, or make a venv: what is wrong
    with `argv` is said before, and it gets what else has to be."""
    streams.make_usable()
    try:
        cli.check_here()
        with files.refused_if_not_reached(), own_number() as number:
            job = _job(argv, os.environ, number)
            rundir.refuse_unwritable(job.run_dir)
            lock.refuse_if_in_use(job.run_dir)
            note = f"apptrain: {WITHOUT_CMD}\n" if job.without_cmd else ""
            check_python(note)
            print(note, end="", file=sys.stderr, flush=True)
            return _run(job)
    except Refusal as refusal:
        print(f"apptrain: {refusal}", file=sys.stderr)
        return refusal.status


def check(argv: Sequence[str]) -> None:
    """Raises BadInput for what can be known to be wrong with these arguments, before anything is made."""
    _job(argv, os.environ, os.getpid())


@contextlib.contextmanager
def own_number() -> Iterator[int]:
    """A number that gives other ports than that of any job of this machine has. It is ours as long as a
    socket with its name is, which the kernel takes back from whoever ends."""
    with socket.socket(socket.AF_UNIX) as mine:
        for number in range(os.getpid(), os.getpid() + rendezvous.JOBS):
            with contextlib.suppress(OSError):
                mine.bind(f"\0apptrain-embedded-{number % rendezvous.JOBS}")
                break
        else:  # So many at once may meet a taken port, and go on with the next attempt's.
            number = os.getpid()
        yield number


def _run(job: LocalJob) -> int:
    try:
        nodes = _Nodes(job)
        try:
            return nodes.run()
        finally:
            nodes.consoles["err"].flush(launch.LAST_WORDS)
    except OSError as error:
        print(f"apptrain: {error.strerror}: {error.filename or job.run_dir}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = sources.parser_class()(
        prog="apptrain run",
        usage="apptrain run [options] [options of launch] [-- CMD ...]",
        description="Run the nodes of a job on this machine. CMD is a script with arguments, or -m MODULE; "
        "without one, the reference job.",
        epilog=OF_LAUNCH + cli.EXIT_STATUS,
        formatter_class=sources.HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", default="2", metavar="N", help="nodes to start (default: 2)")
    add("--tasks-per-node", default="1", metavar="N", help="tasks on each node (default: 1, a torchrun)")
    add("--gpus-per-node", metavar="N", help="GPUs of this machine for each node (default: 0)")
    add("--run-dir", metavar="DIR", help="run directory (default: runs/embedded-ID) [APPTRAIN_RUN_DIR]")
    return parser


def _job(argv: Sequence[str], env: Mapping[str, str], number: int) -> LocalJob:
    before, command = commands.split_command(argv)
    if cli.HELP_ALL in before:
        cli.print_all_options(_parser())
        sys.exit(0)
    given, others = _parser().parse_known_args(before)
    nodes = _number("--nodes", given.nodes, at_least=1)
    gpus = given.gpus_per_node
    if nodes > 254:
        raise BadInput("demo-too-many-nodes", f"--nodes {nodes}: 254 at most on one machine")
    job_id = time.strftime("%Y%m%d-%H%M%S-") + str(number)
    run_dir = given.run_dir or env.get("APPTRAIN_RUN_DIR") or f"runs/embedded-{job_id}"
    job = LocalJob(
        nodes=nodes,
        tasks_per_node=_number("--tasks-per-node", given.tasks_per_node, at_least=1),
        gpus_per_node=None if gpus is None else _number("--gpus-per-node", gpus, at_least=0),
        run_dir=Path(run_dir).absolute(),
        job_id=job_id,
        launch=(*others, "--", *command),
    )
    _check_devices(job, env)
    plan, settings = _plan(job, env)
    return dataclasses.replace(
        job,
        outcome_per_task=plan.mode == "rank",
        term_grace=settings.value("term-grace"),
        may_restart=settings.on_failure.restarts_in_place,
        port_by_hand=settings.given("master-port"),
        without_cmd=not command and plan.command == sources.REFERENCE_JOB,
        is_demo=plan.command[: len(sources.REFERENCE_JOB)] == sources.REFERENCE_JOB,
    )


def _check_devices(job: LocalJob, env: Mapping[str, str]) -> None:
    """Raises BadInput if CUDA_VISIBLE_DEVICES names fewer GPUs than the nodes are to have."""
    wanted, devices = job.nodes * (job.gpus_per_node or 0), visible.devices(env)
    if devices is not None and len(devices) < wanted:
        raise BadInput(
            "run-too-few-devices",
            f"--gpus-per-node {job.gpus_per_node} on {counted(job.nodes, 'node')}, and "
            f"{visible.CUDA_DEVICES}={env[visible.CUDA_DEVICES]} names {len(devices)} of the {wanted} GPUs "
            "that these need: ask for fewer, or name more",
        )


def _plan(job: LocalJob, env: Mapping[str, str]) -> tuple[LaunchPlan, sources.Settings]:
    """The first node's plan: a wrong option is one message before anything starts. Raises BadInput."""
    before, command = commands.split_command(job.launch)
    sources.check_spelling(env)  # a node gets none that is misspelled
    passed.check(env)
    node = node_env(job, 0, 0, 0, env, progress=False)
    plan, settings = resolve(node, sources.of_launch(before, _parser()), command, hostname=None)
    launch.check(plan)
    mistakes.check_training(plan.program, plan.world_size, Path.cwd())
    mistakes.check_run_dir(job.run_dir, plan.command)
    if secrets := settings.value("secrets"):
        secret_file.read(secrets)
    return plan, settings


def _number(name: str, text: str, *, at_least: int) -> int:
    if name == "--nodes" and ("," in text or "[" in text):
        raise BadInput(
            "run-nodes-names",
            f"--nodes={text}: apptrain run takes a number, its nodes are on this machine; on others: "
            f"apptrain launch --nodes {text} --node-rank I on each",
        )
    if not text.isdecimal() or int(text) < at_least:
        raise BadInput("demo-number", f"{name}={text}: must be a number from {at_least}")
    return int(text)


def node_env(
    job: LocalJob, index: int, local_id: int, attempt: int, env: Mapping[str, str], *, progress: bool
) -> dict[str, str]:
    """The whole environment of one task of node `index`."""
    reached = passed.reaches(env, env)
    kept = {name: value for name, value in env.items() if name in reached or _is_option(name)}
    given = {
        variables.JOB_ID: job.job_id,
        variables.NODELIST: f"127.0.0.[1-{job.nodes}]" if job.nodes > 1 else "127.0.0.1",
        variables.NODENAME: job.names[index],
        variables.TASKS_PER_NODE: str(job.tasks_per_node),
        variables.LOCALID: str(local_id),
        variables.CPUS_ON_NODE: str(max(1, len(os.sched_getaffinity(0)) // job.nodes)),
        "APPTRAIN_RUN_DIR": str(job.run_dir),
        "APPTRAIN_ATTEMPT": str(attempt),
        passed.NOT_PASSED: " ".join(passed.left_out(env)),
        **{name: env[name] for name in ("APPTRAIN_PASS", passed.PASSED) if name in env},
    }
    if path := checkout.python_path(kept.get("PYTHONPATH", "")):
        given["PYTHONPATH"] = path
    if job.gpus_per_node is not None:
        given[variables.GPUS_ON_NODE] = str(job.gpus_per_node)
    if job.gpus_per_node:
        first, named = index * job.gpus_per_node, visible.devices(env)
        devices = named if named is not None else list(map(str, range(job.nodes * job.gpus_per_node)))
        given[visible.CUDA_DEVICES] = ",".join(devices[first : first + job.gpus_per_node])
    if progress:
        given[output.TERMINAL_BEHIND_PIPE] = "1"
    return {**kept, **given}


def _is_option(name: str) -> bool:
    return any(name == option.variable for option in options.OPTIONS)


class _Nodes:
    """The running tasks of one job."""

    def __init__(self, job: LocalJob):
        self.job = job
        self.consoles = output.own_consoles(os.environ)
        self.tasks: list[subprocess.Popen[bytes]] = []
        self.signals: list[int] = []
        self.ended: dict[str, Outcome] = {}
        """What each task's own status says, by its place in the outcomes' names."""

    def run(self) -> int:
        job = self.job
        first = rundir.next_attempt(job.run_dir)
        run = RunDirectory(job.run_dir, 0)
        earlier = run.create()
        for signum in handled_signals():  # of which one is a wish to stop
            signal.signal(signum, self._signalled)
        run.make_key()
        run.forget_restarts()
        run.forget_stop(earlier)
        RunDirectory(job.run_dir, first).note_first()
        self._say(f"{counted(job.nodes, 'node')} on this machine, run directory {job.run_dir}")
        self._say(f"to follow it from elsewhere: tail -f {shell_word(str(job.run_dir / 'job.log'))}")
        processes.adopt_orphans()
        processes.allow_open_files(256 + 8 * job.nodes * job.tasks_per_node)
        ended = Outcome(status=INTERRUPTED, error="interrupted")
        for tries in itertools.count(1):
            if self.signals:
                break
            ended, last = self._attempt(first)
            first = last + 1
            if not another_port_may_help(ended, tries, port_by_hand=job.port_by_hand):
                break
        guardian.end_all_below()
        if ended.status not in (DONE, SAVED):
            # What a node says of its end, it has said.
            error = f": {ended.error}" if ended.error and not ended.node else ""
            self._say(f"the job ended with status {ended.status}{error}")
            if ended.rank is not None:
                from entrypoint.explain.run import in_lines  # which no run needs that goes well

                for line in in_lines(ended, job.run_dir):
                    self._say(line)
        if ended.status in GOES_ON:
            self._say(f"to go on from the last checkpoint: the same command with --run-dir {job.run_dir}")
        if job.is_demo and ended.status == DONE:
            self._say(f"next: {checkout.apptrain()} run -- my_script.py")
        return ended.status

    def _attempt(self, attempt: int) -> tuple[Outcome, int]:
        """(how it ended, the last attempt: nodes may have gone on without a pause)."""
        run = RunDirectory(self.job.run_dir, attempt)
        run.create()
        relay = output.Relay(self.consoles)
        self.tasks = []
        writers = []
        for index, name in enumerate(self.job.names):
            for local_id in range(self.job.tasks_per_node):
                pipes = [
                    relay.add(f"{name}.{local_id}", stream, self.job.run_dir / "job.log", show=True)
                    for stream in ("out", "err")
                ]
                self.tasks.append(self._start(index, local_id, attempt, *pipes))
                writers += pipes
        for writer in writers:
            os.close(writer)
        relay.start()
        for signum in self.signals:  # It came while tasks were being started.
            self._pass_on(signum)
        files = self._files(run)
        self._wait(files)
        relay.finish(5.0, 10.0)
        last = run.later_attempts()
        files = self._files(RunDirectory(self.job.run_dir, last))
        names = [self.job.names[int(_place(file).partition(".")[0])] for file in files]
        found = [self._outcome(file) for file in files]
        ended = outcome.of_job(zip(names, found, strict=True), first=self.job.names[0])
        reading.close(self.job.run_dir, last, ended.status)
        return ended, last

    def _outcome(self, file: Path) -> Outcome | None:
        """What the task left, or what its status says where the disk did not take that."""
        return outcome.read(file) or self.ended.get(_place(file))

    def _files(self, run: RunDirectory) -> list[Path]:
        """Where each task writes its outcome, in the order of the tasks."""
        return [
            run.outcome(index, local_id if self.job.outcome_per_task else None)
            for index in run.crew() or range(self.job.nodes)
            for local_id in range(self.job.tasks_per_node)
        ]

    def _complete(self, file: Path, ended: Outcome) -> None:
        """Writes the outcome of a task that ended before it could write its own: the others wait for it."""
        self.ended[_place(file)] = ended
        if ended.status and outcome.read(file) is None:
            with contextlib.suppress(OSError):
                outcome.write(file, ended)

    def _who(self, file: Path) -> str:
        """Whose outcome this is, as a message names it."""
        index, _, local_id = _place(file).partition(".")
        return f"the launch of {self.job.names[int(index)]}" + (f", task {local_id}" if local_id else "")

    def _start(self, index: int, local_id: int, attempt: int, out: int, err: int) -> subprocess.Popen[bytes]:
        progress = self.consoles["err"].progress
        return subprocess.Popen(
            [*ENTRYPOINT, "launch", *self.job.launch],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=node_env(self.job, index, local_id, attempt, os.environ, progress=progress),
            start_new_session=True,
            preexec_fn=_before_exec,
        )

    def _wait(self, files: Sequence[Path]) -> None:
        """Waits for all tasks. They have a bound from the moment on at which the job is decided: after a
        signal, and after the end of a task with which the others end. One that was stopped by SIGSTOP would
        never end by itself."""
        running = dict(zip(files, self.tasks, strict=True))
        deadline, stopped_until = float("inf"), 0.0
        while running:
            now = time.monotonic()
            for file, task in list(running.items()):
                if task.poll() is not None:
                    self._complete(file, _of_task(self._who(file), running.pop(file).returncode))
                    if task.returncode == DONE or not self.job.may_restart:
                        deadline = min(deadline, now + self.job.term_grace + AFTER_END)
            if self.signals:
                deadline = min(deadline, now + self.job.term_grace + AFTER_SIGNAL)
            is_decided = bool(self.signals) or len(running) < len(files)
            if not (stopped_until and is_decided and all(_is_stopped(task) for task in running.values())):
                stopped_until = now + STOPPED
            if now > min(deadline, stopped_until):
                self._kill(running)
                return
            time.sleep(0.05)

    def _kill(self, running: Mapping[Path, subprocess.Popen[bytes]]) -> None:
        """Ends tasks that do not end with the job."""
        errors = {}
        for file, task in running.items():
            why = "was stopped by a signal" if _is_stopped(task) else "did not end with the job"
            errors[file] = f"{self._who(file)} (process {task.pid}) {why}, and was killed"
            self._say(errors[file])
            task.kill()
        deadline = time.monotonic() + TO_DIE
        for file, task in running.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                task.wait(max(0.0, deadline - time.monotonic()))
            self._complete(file, Outcome(status=1, time=time.time(), error=errors[file]))

    def _signalled(self, signum: int, _frame: object) -> None:
        if signum in PLANNED:
            try:
                RunDirectory(self.job.run_dir, 0).stop.touch(mode=0o600)
            except OSError as error:
                self._say(f"{error.filename} cannot be written ({error.strerror}): no rank is asked to stop")
            return
        self.signals.append(signum)
        self._pass_on(signum)

    def _pass_on(self, signum: int) -> None:
        for task in self.tasks:
            if task.poll() is None:
                task.send_signal(signum)

    def _say(self, text: str) -> None:
        self.consoles["err"].say(f"apptrain: {text}")


def _before_exec() -> None:
    """In a node's process: signals wait until the entrypoint handles them, so that none is a traceback."""
    processes.die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


def _of_task(who: str, returncode: int) -> Outcome:
    """What the status of a task says, where it could say nothing itself."""
    status, signum = of_returncode(returncode)
    how = f"was killed by {endings.signal_name(signum)}" if signum else f"ended with status {status}"
    return Outcome(status=status, time=time.time(), error=f"{who} {how}" if status else "")


def _is_stopped(task: subprocess.Popen[bytes]) -> bool:
    return processes.state(task.pid) in processes.STOPPED


def _place(file: Path) -> str:
    """NODE_RANK or NODE_RANK.LOCAL_RANK of an outcome's name."""
    return file.name.partition(".")[2]


def _check_image(_: str) -> None:
    """Of an image that was not made here: what it lacks is told before anything is made."""
    image = os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER")
    if image and "APPTRAIN_STACK" not in os.environ:
        mistakes.check_image(image)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _check_image))
