"""Finds out what a PBS job script must know: its hosts, how their tasks start, its end, and how another job
follows it. `granted` is the entry.

pbsdsh runs one task for each line of the node file, so each host gets one task, by the index of its first
line. qstat -f has what no variable tells: the chunks with their GPUs, the walltime, when the job began, and
what was asked for. A job that follows by itself is submitted anew with the same.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from entrypoint.batch.granted import Granted
from entrypoint.batch.pbs.qstat import attributes
from entrypoint.core.errors import BadInput
from entrypoint.core.plain import plain
from entrypoint.job import handover
from entrypoint.job.handover import Facts
from entrypoint.plan import mistakes
from entrypoint.plan.profile import Profile
from entrypoint.plan.sources import Settings
from entrypoint.schedulers import hostlist, hostnames, pbs
from entrypoint.schedulers.allocation import JobName

STOP_BEFORE = 300
"""Seconds before the end of the walltime at which ranks are asked to save, and at most a tenth of it."""
KILL_DELAY = 10
"""Seconds from SIGTERM to SIGKILL where a queue sets none."""
TO_CONCLUDE = 5
"""Seconds of these for what follows the ranks' end, but at most a fifth."""
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_OWN = (
    *("PBS_JOBCOOKIE", "PBS_TASKNUM", "PBS_NODENUM", "PBS_NODEFILE", "PBS_MOMPORT", "SLURM_JWT"),
    *("TMPDIR", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "APPTRAIN_ARGS", "APPTRAIN_ARGS_FILE"),
)
_OPTIONS = {"Mail_Points": "-m", "Mail_Users": "-M", "Priority": "-p", "Join_Path": "-j", "Keep_Files": "-k"}
"""Attributes of a job that have the very text of an option of qsub."""
SHOWN = 8
"""Hosts that are named of many."""


def granted(env: Mapping[str, str], facts: Facts, settings: Settings, site: Profile) -> Granted:
    """What this job script has to start. Raises BadInput."""
    mistakes.check_job(settings, "pbs")
    start = settings.value("start")
    # Slurm's own qsub sets some of PBS's variables, but not this one.
    if env.get("SLURM_JOB_ID") and not env.get("PBS_ENVIRONMENT"):
        raise BadInput(
            "slurm-under-pbs",
            "this is a job of Slurm, even where its qsub has started it: sbatch (or that qsub) "
            "slurm/multinode.sbatch, in salloc bash slurm/multinode.sbatch",
        )
    if not env.get("PBS_JOBID"):
        return _by_hand(env, settings, site, facts)
    if env.get("PBS_TASKNUM", "1") != "1":
        raise BadInput(
            "pbs-script-as-task",
            f"job {env['PBS_JOBID']}: this is a task: start this script once, not with pbsdsh",
        )
    lines = _lines(env, facts)
    hosts, _ = hostnames.merge(lines, f"PBS_NODEFILE {env.get('PBS_NODEFILE', '')}")
    told = attributes(facts.one("told"))
    notes = []
    if not told:
        notes.append(f"qstat -f {env['PBS_JOBID']} does not answer: walltime and GPUs are unknown")
    gpus, shared = _gpus(env, told, hosts, len(lines))
    added = {} if gpus is None else {"APPTRAIN_NGPUS": str(gpus)}
    added |= _of_ompthreads(told, hosts, settings)
    if not settings.given("term-grace"):
        added["APPTRAIN_TERM_GRACE"] = str(_grace(attributes(facts.one("queue"))))
    if runs_again := told.get("run_count", "0").isdecimal() and int(told.get("run_count", "0")) > 1:
        shared.append(f"PBS runs this job again (run_count is {told['run_count']})")
    job, starter = pbs.job(env), start or site.start or "pbsdsh"
    return Granted(
        job=job,
        hosts=hosts,
        nodelist=_shown(hosts),
        env=added,
        ran_before=runs_again or bool(facts.all("carried")),
        queued=_queued(told, facts) if facts.one("batch") and not runs_again else None,
        start=(*_mpiexec(starter, hosts, facts), *site.launcher_args),
        host_side=(
            ("starter", starter),
            *(("line", str(lines.index(host))) for host in hosts),
            *_end(settings, told, facts),
        ),
        notes=(*notes, *shared),
    )


def _by_hand(env: Mapping[str, str], settings: Settings, site: Profile, facts: Facts) -> Granted:
    """The hosts of --nodes, where there is no scheduler."""
    names, start = settings.value("nodes"), settings.value("start")
    if not names:
        raise BadInput(
            "pbs-no-job", "this is no PBS job: qsub pbs/multinode.pbs, or give --start ssh and --nodes a,b"
        )
    if start not in ("ssh", "mpiexec"):
        raise BadInput(
            "pbs-no-job-to-start",
            f"there is no PBS job whose tasks {start or 'pbsdsh'} could start: give --start ssh (or mpiexec) "
            "with --nodes",
        )
    hosts = hostlist.distinct(hostlist.expand(names, "--nodes"), "--nodes")
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Granted(
        job=JobName(id="manual", number=None, name="apptrain", run_id=run_id, submit_dir=env.get("PWD")),
        hosts=hosts,
        nodelist=_shown(hosts),
        env={"APPTRAIN_NODES": ",".join(hosts)},
        start=(*_mpiexec(start, hosts, facts), *site.launcher_args),
        host_side=(("starter", start),),
    )


def _mpiexec(starter: str, hosts: Sequence[str], facts: Facts) -> list[str]:
    """The options by which an mpiexec of its kind starts one task on each host; none for another starter."""
    says, listed = facts.one("mpiexec"), ",".join(hosts)
    if starter != "mpiexec" or not facts.all("mpiexec"):  # One that is not in PATH, the host half refuses.
        return []
    words = ["-n", str(len(hosts))]
    if re.search("Open MPI|OpenRTE|PRRTE", says):
        return [*words, "--host", listed, "--map-by", "ppr:1:node", "--bind-to", "none"]
    if re.search(r"HYDRA|MPICH|Intel\(R\) MPI", says):
        return [*words, "-ppn", "1", "-hosts", listed]
    # PALS may leave out its name: `mpiexec version 1.8.0 revision ...`.
    if re.search(r"\bPALS\b|^mpiexec version \d", says, re.IGNORECASE | re.MULTILINE):
        return [*words, "--ppn", "1", "--hosts", listed, "--cpu-bind", "none"]
    raise BadInput(
        "mpiexec-unknown",
        f"mpiexec says of itself: {' '.join(says.split()) or 'nothing'}: Open MPI, MPICH or PALS is needed: "
        "load its module, or use another --start",
    )


def _shown(hosts: Sequence[str]) -> str:
    return ",".join(hosts[:SHOWN]) + (",..." if len(hosts) > SHOWN else "")


def _lines(env: Mapping[str, str], facts: Facts) -> list[str]:
    """The host of each line of the node file."""
    name = f"PBS_NODEFILE={env.get('PBS_NODEFILE', '')}"
    if not facts.all("nodefile"):
        raise BadInput(
            "pbs-nodefile-unreadable",
            f"{name} cannot be read: it lists the job's hosts: unset it if you set it yourself",
        )
    lines = ["".join(line.split()) for line in facts.one("nodefile").splitlines()]
    if not any(lines):
        raise BadInput("pbs-nodefile-empty", f"{name} has no host in it: ask the administrator")
    return [line for line in lines if line]


def _gpus(
    env: Mapping[str, str], told: Mapping[str, str], hosts: Sequence[str], lines: int
) -> tuple[int | None, list[str]]:
    """(how many GPUs each host has for us, None where PBS does not say; what to say of it)."""
    places = told.get("exec_host", "").split("+")
    notes = []
    if lines > len(hosts) and len(places) > len(hosts):
        where = "one host" if len(hosts) == 1 else f"{len(hosts)} hosts"
        notes.append(
            f"{len(places)} chunks share {where}, as they may without -l place=scatter: each host gets one "
            "task, with the GPUs of all its chunks"
        )
    sums, why_unknown = _gpus_by_host(told, places, hosts)
    if not sums:
        return None, [*notes, *why_unknown]
    each = sums[hosts[0]]
    if any(sums[host] != each for host in hosts):
        listed = ", ".join(f"{sums[host]} on {host}" for host in hosts)
        raise BadInput(
            "pbs-uneven-gpus",
            f"PBS granted GPUs unevenly ({listed}): every host needs the same number: one chunk a host "
            "(-l place=scatter), all alike",
        )
    if env.get("APPTRAIN_NGPUS") not in (None, "", str(each)):
        raise BadInput(
            "pbs-gpus-differ",
            f"APPTRAIN_NGPUS={env['APPTRAIN_NGPUS']}, but PBS granted {each} GPUs on each host: leave it out",
        )
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    if visible and len(visible.split(",")) != each:
        raise BadInput(
            "pbs-devices-differ",
            f"CUDA_VISIBLE_DEVICES={visible} names other than the {each} GPUs that PBS granted on each host: "
            "leave it out",
        )
    return each, notes


def _gpus_by_host(
    told: Mapping[str, str], places: Sequence[str], hosts: Sequence[str]
) -> tuple[Mapping[str, int], list[str]]:
    """(the GPUs of each host, by name; empty: unknown, then with what to say of it)."""
    # A chunk may span vnodes, with a + between them: (a[0]:ngpus=2+a[1]:ngpus=2)+(b[0]:ngpus=4)
    chunks = told.get("exec_vnode", "").split(")+(")
    counted = [name for name in pbs.COUNTED if any(f":{name}=" in chunk for chunk in chunks)]
    requested = [name for name in pbs.COUNTED if f"Resource_List.{name}" in told]
    if not (counted or requested):
        return {}, []
    name = (counted or requested)[0]
    sums = _sums(name, places, chunks, hosts)
    is_told = counted or told[f"Resource_List.{name}"] == "0"
    if is_told and all(host in sums for host in hosts):
        return sums, []
    host, vnode = (plain(told.get(name, ""))[:200] for name in ("exec_host", "exec_vnode"))
    what = f"qstat -f says exec_host={host} and exec_vnode={vnode}, and the node file {_shown(hosts)}"
    return {}, [f"how many GPUs each host has is unknown: {what}"]


def _sums(name: str, places: Sequence[str], chunks: Sequence[str], hosts: Sequence[str]) -> Counter[str]:
    """How much of a resource the chunks of each host have, by its name; without hosts that are unknown."""
    sums: Counter[str] = Counter()
    for place, chunk in zip(places, chunks, strict=False):
        found = hostnames.find_interface(place.partition("/")[0], hosts)
        if len(found) == 1:
            sums[hosts[found[0]]] += sum(int(n) for n in re.findall(rf":{name}=(\d{{1,9}})", chunk))
    return sums


def _of_ompthreads(told: Mapping[str, str], hosts: Sequence[str], settings: Settings) -> dict[str, str]:
    """Where chunks name `ompthreads`, PBS sets both OMP_NUM_THREADS and NCPUS to it: the threads of each
    process, and no longer the CPUs of the chunk."""
    asked = set(re.findall(r":ompthreads=(\d{1,6})", told.get("Resource_List.select", "")))
    if not asked:
        return {}
    places, chunks = told.get("exec_host", "").split("+"), told.get("exec_vnode", "").split(")+(")
    sums = _sums("ncpus", places, chunks, hosts)
    cpus = {sums[host] for host in hosts}
    added = {pbs.CPUS: str(cpus.pop())} if len(cpus) == 1 and cpus != {0} else {}
    if len(asked) == 1 and not settings.given("omp-num-threads"):
        added["APPTRAIN_OMP_NUM_THREADS"] = asked.pop()
    return added


def _grace(queue: Mapping[str, str]) -> int:
    """Seconds that ranks may save once the job was deleted. What follows needs no more than a second where
    the nodes are well, and should it be cut off, pbs/keep.sh cleans up and PBS has the status anyway; so of
    PBS's own short delay, the ranks get most: SIGKILL never came before it was over, but up to 12 s later."""
    text = queue.get("kill_delay", "")
    delay = int(text) if re.fullmatch(r"\d{1,6}", text) else KILL_DELAY
    return max(1, delay - max(1, min(delay // 5, TO_CONCLUDE)))


def _end(settings: Settings, told: Mapping[str, str], facts: Facts) -> Iterator[tuple[str, str]]:
    """When the ranks are asked to stop and when the walltime ends, in Unix seconds, where that is known."""
    asked = settings.value("stop-before")
    text = told.get("Resource_List.walltime", "")
    walltime = 0
    if re.fullmatch(r"(\d{1,9}:)*\d{1,9}", text):
        for part in text.split(":"):
            walltime = walltime * 60 + int(part)
    if walltime and (asked or 0) >= walltime:
        raise BadInput(
            "stop-before-too-long",
            f"--stop-before {asked}, but the walltime is {walltime} s: give less, or request more",
        )
    if not walltime or asked == 0:
        return
    began = int(facts.one("began"))
    # Before the job script, a prologue may have taken some of it.
    stime = _unix(told.get("stime", ""), facts.one("zone"))
    if stime is not None and began - walltime < stime < began:
        began = stime
    end = began + walltime
    yield "stop_at", str(end - (asked if asked is not None else min(walltime // 10, STOP_BEFORE)))
    yield "end_at", str(end)


def _queued(told: Mapping[str, str], facts: Facts) -> float | None:
    """Seconds; of a job that PBS runs again, nothing says when it took it back."""
    submitted, started = (_unix(told.get(name, ""), facts.one("zone")) for name in ("ctime", "stime"))
    return None if submitted is None or started is None else max(0.0, float(started - submitted))


def _unix(text: str, zone: str) -> int | None:
    """`Sat Nov 21 09:00:00 2026` in this zone, as `+0100`; None where it is not like that."""
    try:
        return int(datetime.strptime(f"{text} {zone}", "%a %b %d %H:%M:%S %Y %z").timestamp())
    except ValueError:
        return None


# --- a task -------------------------------------------------------------------------------------------------


def task_environment(env: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """What a task gets beside what PBS gives it: the job script's variables without those that a task has of
    its own, or must not have. The GPUs are each host's own if it is PBS that grants them."""
    dropped = {*_OWN, *(("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if "PBS_JOBID" in env else ())}
    kept = {name: value for name, value in env.items() if name not in dropped and _NAME.fullmatch(name)}
    return {**kept, **added}


def as_task(env: Mapping[str, str], added: Mapping[str, str], rank: int, host: str) -> dict[str, str]:
    """What the entrypoint of a task finds, for a plan."""
    found = {name: value for name, value in env.items() if name != "PBS_TASKNUM"} | dict(added)
    place = "PBS_NODENUM" if "PBS_JOBID" in env else "APPTRAIN_NODE_RANK"
    for name in ("APPTRAIN_ARGS", "APPTRAIN_ARGS_FILE", "PBS_NODENUM", "APPTRAIN_NODE_RANK"):
        found.pop(name, None)
    return {**found, place: str(rank), "APPTRAIN_HOSTNAME": host}


# --- another job ------------------------------------------------------------------------------------------


def why_no_chain(env: Mapping[str, str], told: Mapping[str, str]) -> str:
    """Why no job follows this one by itself; empty where one may. `told`: what qstat says of this one."""
    left = env.get("APPTRAIN_CHAIN", "")
    if not re.fullmatch(r"[0-9]{1,4}", left) or int(left) == 0:
        return f"APPTRAIN_CHAIN, how many jobs may follow, is {left or 'not set'}"
    if env.get("PBS_ARRAY_INDEX"):
        return "an element of a job array cannot be submitted by itself"
    if not told:  # another would ask for what the job script's own lines say
        return "qstat did not say what this job has asked for"
    return ""


def qsub(env: Mapping[str, str], told: Mapping[str, str], job: JobName) -> list[str]:
    """qsub's options for another job that asks for what this one has."""
    words = ["-N", job.name]
    # PBS sums up what the chunks name, and refuses the sums beside select.
    sums = {word.partition("=")[0] for word in re.split("[:+]", told.get("Resource_List.select", ""))}
    sums |= {"ncpus", "ngpus", "mem", "nodect", "nodes", "mpiprocs"}
    for name, value in told.items():
        resource = name.removeprefix("Resource_List.")
        if resource != name and resource not in sums:
            words += ["-l", f"{resource}={value}"]
        elif name == "queue":  # qsub's own may route to this one, and alone take jobs
            words += ["-q", env.get("PBS_O_QUEUE") or value]
        elif name == "project" and value != "_pbs_project_default":
            words += ["-P", value]
        elif name == "Account_Name":
            words += ["-A", value]
        elif name in ("sandbox", "group_list"):
            words += ["-W", f"{name}={value}"]
        elif name in _OPTIONS:
            words += [_OPTIONS[name], value]
        elif name == "Rerunable":
            words += ["-r", "y" if value == "True" else "n"]
    return [*words, *_outputs(told, job)]


def _outputs(told: Mapping[str, str], job: JobName) -> Iterator[str]:
    """qsub's options for where the output goes, where this job's own were given some."""
    for name, option in (("Output_Path", "-o"), ("Error_Path", "-e")):
        folder, slash, file = told.get(name, "").rpartition("/")
        if file.startswith(f"{job.id}."):  # a directory was given, in which PBS names it after the job
            file = ""
        if slash and not file.endswith(f".{option[1]}{job.number}"):
            yield from (option, f"{folder}/{file}")


def write_chain(
    where: Path,
    env: Mapping[str, str],
    facts: Facts,
    arguments: Sequence[str],
    added: Mapping[str, str],
) -> None:
    """Leaves the next job's arguments and variables for the host half: our own, and those of this job's own
    qsub -v, which may hold what -v cannot."""
    told = attributes(facts.one("told"))
    listed = "".join(
        f",{item}" for item in (told.get("Variable_List", ""), *(f"{n}=" for n in facts.all("carried")))
    )
    left = str(int(env["APPTRAIN_CHAIN"]) - 1)
    dropped = (
        "APPTRAIN_ATTEMPT",
        "APPTRAIN_NODEFILE",
        "APPTRAIN_ARGS",
        "APPTRAIN_ARGS_FILE",
        "APPTRAIN_HAND",
    )
    kept = {
        name: value
        for name, value in env.items()
        if name not in dropped
        and (name.startswith("APPTRAIN_") or (f",{name}=" in listed and not name.startswith("PBS_")))
    }
    handover.write(where / "chain.env", {**kept, **added, "APPTRAIN_CHAIN": left}.items())
    handover.write_list(where / "chain.args", arguments)
