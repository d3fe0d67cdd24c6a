"""Decides everything about a job before its first attempt, in the image on the first node. `prepare` is the
entry; the job script starts it and reads its answer.

From the job script's arguments, files and variables, the profile, and what the scheduler says, it makes the
run directory, the command that starts the tasks, and what each task is shown and gets.
"""

import contextlib
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from entrypoint.batch import granted as grants
from entrypoint.batch import staging
from entrypoint.batch.conclude import DONE_LINE, came_to_its_end
from entrypoint.batch.granted import Granted
from entrypoint.batch.pbs import job as pbs
from entrypoint.batch.pbs.qstat import attributes
from entrypoint.batch.prepared import PreparedJob
from entrypoint.batch.staging import Bandwidth, Copy, Staging
from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import file_part, plain
from entrypoint.job import handover, lock, rundir
from entrypoint.job.handover import Facts
from entrypoint.job.lock import Lock
from entrypoint.job.rundir import RunDirectory
from entrypoint.node import processes
from entrypoint.plan import commands, mistakes, options, profile, rules, secret_file, sources
from entrypoint.plan.failure_policy import FailurePolicy
from entrypoint.plan.launch_plan import describe
from entrypoint.plan.profile import Profile
from entrypoint.plan.resolve import resolve
from entrypoint.plan.sources import Settings
from entrypoint.record.partition import VARIABLE, partition, whole_file

Entries = Iterator[tuple[str, str]]
GOES_ON = "this run directory has been used before: the run goes on there"
MOST_READ = 1000
"""Outcomes of an attempt before that are read, those of its first nodes."""
OVER = ("over", "yes")
UNTOLD = "left no word of how it ended"
NODE_DISKS = ("SLURM_TMPDIR", "TMPDIR")
"""Variables that name a directory of the node's own; else /tmp."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What is asked for, from all ways to ask."""

    facts: Facts
    env: Mapping[str, str]
    """The job script's."""
    flags: Mapping[str, str]
    """Options that are no variables."""
    command: Sequence[str]
    """CMD; empty for the reference job."""
    settings: Settings
    site: Profile
    granted: Granted
    run: RunDirectory
    staging: Staging | None
    """How the nodes get the image; None: they read it where it is."""

    @property
    def policy(self) -> FailurePolicy:
        return self.settings.on_failure

    @property
    def exported(self) -> dict[str, str]:
        """Variables for the tasks."""
        of_site = {"APPTRAIN_PROFILE": self.site.path} if self.site.path else {}
        contents = partition(Path(self.facts.one("image")))
        of_image = {VARIABLE: contents} if contents else {}
        return {**self.granted.env, "APPTRAIN_RUN_DIR": str(self.run.path), **of_site, **of_image}

    @property
    def is_batch(self) -> bool:
        return bool(self.facts.one("batch"))


def prepare(where: Path, inside: Mapping[str, str]) -> int:
    """Answers what the host half has asked in this directory. `inside`: the image's variables. Raises
    BadInput."""
    facts = handover.asked(where)
    env = handover.environment(where)
    flags, command = sources.merged(*sources.texts(facts.all("arg"), job=True), env, job=True)
    path = _profile(flags.get("profile") or env.get("APPTRAIN_PROFILE") or "", env, facts)
    if path != facts.one("profile"):  # Its modules come before this image: it is asked again with them.
        handover.answer(where / handover.ANSWER, [("profile", path)])
        return 0
    site = profile.load(path) if path else Profile()
    if path and site.scheduler != facts.one("scheduler"):
        raise BadInput(
            "profile-other-scheduler",
            f"the profile {path} is for {site.scheduler or 'no scheduler'}, and this is a job of "
            f"{facts.one('scheduler')}: choose another with --profile",
        )
    settings = sources.resolve(flags, env, site.launch, site.name, command)
    granted = grants.of(facts.one("scheduler")).granted(env, facts, settings, site)
    folder = _run_dir(env, settings, granted, site)
    _check(env, facts, settings, granted, folder)
    notes = [] if settings.value("dry-run") else _await_run_dir(folder, granted)
    again = facts.one("again")
    run = RunDirectory(folder, int(again) if again else rundir.next_attempt(folder))
    asked = _Request(
        facts=facts,
        env=env,
        flags=flags,
        command=command,
        settings=settings,
        site=site,
        granted=granted,
        run=run,
        staging=_staging(env, facts, settings, site, granted, run),
    )
    answer = [*_answer(asked), *(("say", note) for note in notes)]
    if settings.value("dry-run"):
        answer += [("dry_run", "yes"), *(("plan", word) for word in granted.plan or _plans(asked))]
    else:
        of_image = list(_of_image(asked, inside))
        answer += [*_begin(where, asked), *of_image, *_stage(where, asked), *_chain(where, asked)]
        if OVER not in answer:
            run.note_begun()
    handover.answer(where / handover.ANSWER, answer)
    return 0


def _check(env: Mapping[str, str], facts: Facts, settings: Settings, granted: Granted, run_dir: Path) -> None:
    """Raises BadInput where no node could run CMD or take its secrets, or the run directory is another
    program's."""
    command = settings.command
    # PBS starts tasks in HOME, and containers/run.sh goes to where the job was submitted.
    is_pbs_job = facts.one("scheduler") == "pbs" and "PBS_JOBID" in env
    folder = Path((granted.job.submit_dir if is_pbs_job else None) or env["PWD"])
    mode, no_python = settings.value("mode"), settings.value("no-python")
    mistakes.check_command(command, folder, mode=mode, no_python=no_python, here=False)
    program = commands.program(command, mode=mode, no_python=no_python)
    mistakes.check_training(program, 1, folder)
    mistakes.check_run_dir(run_dir, command)
    secrets = settings.value("secrets")
    if secrets and files.is_there(folder / secrets):  # else only the nodes see it
        secret_file.read(folder / secrets)


def _await_run_dir(run_dir: Path, granted: Granted) -> list[str]:
    """Raises InUse if another job has the run directory: nothing in it is changed then. Otherwise returns
    what is said of a holder that was watched."""
    notes: list[str] = []
    with contextlib.suppress(OSError):  # `_begin` refuses what cannot be used; the launch looks once more
        Lock(run_dir, lock.this_process(granted.job.id), notes.append).await_free()
    return notes


def _profile(name: str, env: Mapping[str, str], facts: Facts) -> str:
    """The profile's file; where none is named, the one that the host half found for this cluster, or ''."""
    if not name:
        return facts.one("profile")
    if "/" in name or name.endswith(".yaml"):
        return _absolute(name, env)
    return f"{facts.one('home')}/clusters/{name}.yaml"


def _absolute(path: str, env: Mapping[str, str]) -> str:
    return path if path.startswith("/") else f"{env['PWD'].rstrip('/')}/{path}"


def _run_dir(env: Mapping[str, str], settings: Settings, granted: Granted, site: Profile) -> Path:
    if (given := settings.value("run-dir")) is not None:
        return Path(_absolute(str(given), env))
    job = granted.job
    return Path(rules.run_directory(env, job.name, job.run_id, job.submit_dir or env["PWD"], site))


def _staging(
    env: Mapping[str, str],
    facts: Facts,
    settings: Settings,
    site: Profile,
    granted: Granted,
    run: RunDirectory,
) -> Staging | None:
    """How the nodes get the image. Raises BadInput."""
    asked = settings.value("stage")
    if not settings.given("stage") and site.stage.to:
        asked = profile.expanded(site.stage.to, env, site.path)
    path = facts.one("image")
    default = Bandwidth()
    is_slurm = facts.one("scheduler") == "slurm"
    # Of PBS's hosts none can be left out: each task counts them itself.
    fewest = (settings.value("nnodes") or (len(granted.hosts),))[0] if is_slurm else len(granted.hosts)
    found = staging.decide(
        asked,
        by_name=settings.given("stage"),
        place=next((value for name in NODE_DISKS if (value := env.get(name, "")).startswith("/")), "/tmp"),
        key=f"apptrain-image-{os.getuid()}.{facts.one('scheduler')}-{file_part(granted.job.run_id)}",
        hosts=granted.hosts,
        least=fewest,
        width=staging.SBCAST_WIDTH if is_slurm else staging.WIDTH,
        image=staging.of_file(path),
        bandwidth=Bandwidth(
            shared=(site.stage.shared_mb_s or 0) * 1e6 or default.shared,
            node=(site.stage.node_mb_s or 0) * 1e6 or default.node,
        ),
        checkpoint=_newest_checkpoint(run.path),
        read=site.stage.read_percent / 100 if site.stage.read_percent else staging.READ,
    )
    if found is None or not site.stage.digest:
        return found
    return replace(found, image=replace(found.image, sha256=whole_file(Path(path)) or _digest(path)))


def _digest(path: str) -> str:
    """The SHA-256 of the image, where no JSON beside it says it. Raises BadInput."""
    import hashlib  # OpenSSL, which few jobs need here

    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(
            "stage-image-unreadable", f"the image {path} cannot be read: {error.strerror}"
        ) from None


def _newest_checkpoint(run_dir: Path) -> int:
    """Bytes of the newest checkpoint of this run; 0 where there is none."""
    try:
        newest = max(path for path in (run_dir / "checkpoints").iterdir() if path.name.startswith("step-"))
        return sum(path.stat().st_size for path in newest.iterdir() if path.is_file())
    except (OSError, ValueError):
        return 0


def _stage(where: Path, asked: _Request) -> Entries:
    """What the host half is told of the copies; who copies from whom is left in a file."""
    found = asked.staging
    if found is None:
        return
    scheduler, hosts = asked.facts.one("scheduler"), asked.granted.hosts
    handover.write_list(where / handover.COPIES, _rows(staging.copies(scheduler, hosts)))
    if scheduler == "pbs":
        handover.write_list(where / handover.SHARED_COPIES, _rows(staging.from_shared(hosts)))
    yield ("stage", found.folder)
    yield ("stage_bytes", str(found.image.bytes))
    yield ("stage_needs", str(found.needs))
    yield ("stage_least", str(found.least))
    yield ("stage_id", found.image.id)
    yield ("stage_digest", found.image.sha256)
    yield ("stage_by_name", "yes" if found.by_name else "")
    yield ("stage_named", "yes" if found.named else "")
    yield from (("each_node", word) for word in asked.granted.each_node)


def _rows(copies: Iterable[Copy]) -> Iterator[str]:
    return (field for copy in copies for field in (str(copy.wave), copy.source, copy.target))


def _answer(asked: _Request) -> Entries:
    """What the host half is told of every attempt."""
    granted, run = asked.granted, asked.run
    yield from (("run_dir", str(run.path)), ("attempt", str(run.attempt)))
    if asked.policy.restarts_in_place:
        yield ("goes_on", "yes")
    if asked.policy.requeues and asked.is_batch:
        yield ("tells_end", "yes")
    yield from (("host", host) for host in granted.hosts)
    yield from granted.host_side
    yield from (("start", word) for word in granted.start)
    yield from (("export", f"{name}={value}") for name, value in asked.exported.items())
    task = ".%t" if granted.tasks > 1 or asked.settings.value("mode") == "rank" else ""
    yield ("outcome", f"{run.path}/outcome/%a.%n{task}")
    yield from (("run", word) for word in _run_words(asked))
    yield from (("launch", word) for word in sources.words(_not_exported(asked), asked.command))


def _not_exported(asked: _Request) -> dict[str, str]:
    """The options that go on as such."""
    return {name: text for name, text in asked.flags.items() if name not in ("profile", "run-dir")}


def _run_words(asked: _Request) -> Iterator[str]:
    """What containers/run.sh is to do for each task: its options."""
    settings, site, run = asked.settings, asked.site, asked.run.path
    for bind in site.container.binds:
        yield from ("--bind", "the profile's", profile.expanded(bind, asked.env, site.path))
    if run.is_dir() or not settings.value("dry-run"):
        yield from ("--bind", "the run directory", str(run))
    if site.path:
        yaml = Path(site.path)
        shown = {str(yaml.resolve()): "the profile", site.path: "the profile"}  # it may be a link
        shown[str(profile.host_file(yaml))] = "the profile's host file"
        home = f"{asked.facts.one('home')}/"
        for outside in [path for path in shown if not path.startswith(home)]:
            yield from ("--bind", shown[outside], outside)
    for name in ("join-key-file", "secrets"):
        if file := asked.flags.get(name):
            yield from ("--bind", f"--{name}", _absolute(file, asked.env))
    if site.container.obey_binds:
        yield "--obey-binds"
    for program in site.container.wrappers:
        yield from ("--wrapper", program)
    for name in site.container.passed:
        yield from ("--pass", name)
    if venv := settings.value("venv"):
        yield from ("--venv", venv)
    if settings.value("device") == "cpu":
        yield "--cpu"
    if not settings.command[0].startswith("-"):
        yield from ("--script", settings.command[0])


def _of_image(asked: _Request, inside: Mapping[str, str]) -> Entries:
    """What is said of an image that was not made here; containers/run.sh gave it our packages. Raises
    BadInput where it lacks what these need."""
    if "APPTRAIN_STACK" in inside:
        return
    mistakes.check_image(asked.facts.one("image"))
    home = asked.facts.one("home")
    lost = (
        "no lock says what is in it, driver and GPUs are not checked against it, "
        "and it may lack InfiniBand's libraries"
    )
    yield ("say", f"the image is not apptrain's, so apptrain itself comes from {home}: {lost}")


def _begin(where: Path, asked: _Request) -> Entries:
    """Makes the run directory, and yields what is said of it."""
    granted, run, settings = asked.granted, asked.run, asked.settings
    yield from (("say", note) for note in granted.notes)
    if granted.ran_before and not run.path.is_dir():
        gone = f"its run directory {run.path} is not there: it begins anew"
        yield ("say", f"WARNING: this job has run before, but {gone}")
    job = PreparedJob(
        run_dir=run.path,
        attempt=run.attempt,
        hosts=granted.hosts,
        tasks=granted.tasks,
        policy=asked.policy,
        bound=settings.value("max-restarts"),
        port_by_hand=settings.given("master-port"),
        scheduler=asked.facts.one("scheduler"),
        batch=asked.is_batch,
        restarts=granted.restarts,
        script=_begun(asked.facts),
        began=time.time(),
        queued=granted.queued,
    )
    is_again = bool(asked.facts.one("again"))
    of_before = run.unfinished()
    has_claims = of_before is not None and RunDirectory(run.path, of_before).has_claims()
    is_over = of_before is not None and has_claims and came_to_its_end(job, of_before)
    if is_over:
        run.finish()
    else:
        run.begin(restarts=asked.policy.restarts_in_place, forgets_stop=not is_again)
        if not granted.ran_before or not run.attempt:
            run.note_first()
    run.make_key()
    job.write(where)
    if job.scheduler == "pbs":
        tasks = pbs.task_environment(asked.env, asked.exported)
        handover.write(where / "tasks.env", tasks.items())
    yield ("by_hand", job.by_hand)
    nodes = f"{len(granted.hosts)} nodes ({granted.nodelist})"
    with_ = f"profile {asked.site.path or 'none'}, image {asked.facts.one('image')}"
    yield ("tell", f"run directory {run.path}")
    yield ("tell", f"to follow it: tail -f {shlex.quote(f'{run.path}/job.log')}")
    yield ("tell", f"job {granted.job.id}, attempt {run.attempt}, {nodes}, {with_}")
    if of_before is not None and not is_over and not is_again:
        yield from (("tell", line) for line in [_end_nobody_told(run)] if line)
    if run.attempt:
        yield ("tell", GOES_ON)
    if is_over:
        yield from (("tell", DONE_LINE.format(run.path)), OVER)


def _end_nobody_told(run: RunDirectory) -> str:
    """How the attempt before this one ended, by what its nodes have left: its job script was lost before it
    could say so. Empty where nothing failed, or cannot be read."""
    from entrypoint.explain.run import of_attempt  # which no other start needs

    attempt = run.attempt - 1
    try:
        told = of_attempt(run.path, attempt, script_is_lost=True, most=MOST_READ)
    except (OSError, ValueError):
        return ""
    if told is None:
        return f"attempt {attempt} {UNTOLD}: probably its first node was lost, or its job script was killed"
    if told.failure is None:
        return ""
    why = "(the job script was lost before it could say so)"
    return str(plain(f"attempt {attempt}: {told.failure.whose}{told.failure.reason} {why}"))


def _begun(facts: Facts) -> float | None:
    """When the job script did, in Unix seconds; None where its process cannot be seen from inside."""
    pid = facts.one("script")
    age = processes.age(int(pid)) if pid.isdecimal() else None
    return time.time() - age if age is not None else None


def _plans(asked: _Request) -> Iterator[str]:
    """The plan of each task where it has no other place to be made, each line behind the node's rank."""
    added = {**asked.exported, "APPTRAIN_ATTEMPT": str(asked.run.attempt)}
    given = {name: text for name, text in asked.flags.items() if not options.BY_NAME[name].job_only}
    for rank, host in enumerate(asked.granted.hosts):
        env = pbs.as_task(asked.env, added, rank, host)
        found, _ = resolve(env, given, asked.command, hostname=None)
        yield from (f"{rank}: apptrain: {note}" for note in found.notes)
        yield from (f"{rank}: {line}" for line in describe(found).splitlines())


def _chain(where: Path, asked: _Request) -> Entries:
    """How another job of PBS follows this one by itself."""
    if asked.facts.one("scheduler") != "pbs" or not asked.is_batch:
        return
    told = attributes(asked.facts.one("told"))
    if why := pbs.why_no_chain(asked.env, told):
        yield ("no_chain", why)
        return
    run = str(asked.run.path)
    added = {"APPTRAIN_RUN_DIR": run, "APPTRAIN_ARGS_FILE": f"{run}/chain.args"}
    if asked.site.path:
        added["APPTRAIN_PROFILE"] = asked.site.path
    arguments = sources.words(_not_exported(asked), asked.command, job=True)
    pbs.write_chain(where, asked.env, asked.facts, arguments, added)
    yield from (("chain", word) for word in pbs.qsub(asked.env, told, asked.granted.job))
