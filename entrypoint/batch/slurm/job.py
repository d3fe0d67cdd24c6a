"""Finds out what a Slurm job script must know: its nodes and tasks, srun's words, and what scontrol says of
the job. `granted` is the entry.

srun takes from variables what was asked of sbatch or salloc, also what was asked of a job from which this one
was submitted: so every word is given. A step then has all that the job has.
"""

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from entrypoint.batch.granted import Granted
from entrypoint.core.errors import BadInput
from entrypoint.core.plain import plain
from entrypoint.job.handover import Facts
from entrypoint.plan import mistakes
from entrypoint.plan.profile import Profile
from entrypoint.plan.sources import Settings
from entrypoint.schedulers import hostlist, slurm

_NUMBERS = (
    *("SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"),
    "SLURM_RESTART_COUNT",
)


def granted(env: Mapping[str, str], facts: Facts, settings: Settings, site: Profile) -> Granted:
    """What this job script has to start. Raises BadInput."""
    _check(env, facts, settings)
    hosts = hostlist.expand(env.get("SLURM_JOB_NODELIST", ""), "SLURM_JOB_NODELIST")
    tasks = _tasks(env, len(hosts))
    address = _meeting_address(facts, settings, site, hosts)
    here = env.get("SLURM_GPUS_ON_NODE", "")
    if here.isdecimal():
        slurm.refuse_uneven_gpus(env, len(hosts), int(here), hosts[0])
    # The variable may be that of a job from which this one was submitted.
    count = int(env.get("SLURM_RESTART_COUNT") or 0)
    restarts = _restarts(facts.one("told"), count) if count else 0
    left_out = facts.all("left_out")
    cpus = _cpus(env, tasks)
    hosts = tuple(host for host in hosts if host not in left_out)
    on_batch, goes_on = bool(facts.one("batch")), settings.on_failure.restarts_in_place
    words = [
        "--export=ALL",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts) * tasks}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cpus}",
        # Each rank its own cores; a torchrun all of the job's, for its ranks to share.
        f"--cpu-bind={'cores' if tasks > 1 else 'none'}",
        "--mem=0",
    ]
    gpus = (env.get(name) for name in ("SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"))
    if any(found not in (None, "", "0") for found in gpus):  # a Slurm that counts no GPUs refuses the word
        words.append("--gpu-bind=none")
    if facts.one("runs_in") == "shell" and env.get("SLURM_STEP_ID"):
        words.append("--overlap")  # the shell's own step holds all
    # The nodes that are left go on; in a plan each task says its own.
    launch = [f"--kill-on-bad-exit={0 if goes_on else 1}", "--wait=0", *(["--no-kill"] if goes_on else [])]
    plan = ["--kill-on-bad-exit=0", "--wait=0"]
    after = ["--quit-on-interrupt", *site.launcher_args]
    if left_out:
        words.append(f"--exclude={','.join(left_out)}")
    each_node = [word for word in words if not word.startswith(("--ntasks", "--cpus-per-task", "--gpu-bind"))]
    each_node += [f"--ntasks={len(hosts)}", "--ntasks-per-node=1", "--cpus-per-task=1", *plan]
    survivor = [f"{facts.one('home')}/slurm/survivor.sh"] if goes_on and on_batch else []
    return Granted(
        job=slurm.job(env),
        hosts=hosts,
        nodelist=env["SLURM_JOB_NODELIST"],
        tasks=tasks,
        ran_before=restarts > 0,
        restarts=restarts,
        queued=_queued(facts.one("told")) if on_batch else None,
        start=(*words, *launch, *after, *survivor),
        plan=(*words, *plan, *after),
        each_node=(*each_node, *after),
        env={"APPTRAIN_MASTER_ADDR": address} if address else {},
        notes=tuple(_notes(env, hosts, address)),
    )


def _notes(env: Mapping[str, str], hosts: Sequence[str], address: str) -> Iterator[str]:
    """Of what the user set and we do not use. srun refuses --nodes beside a file of nodes."""
    if file := env.get("SLURM_HOSTFILE"):
        yield (
            f"SLURM_HOSTFILE={plain(file)} is not used: nodes are numbered in the order of SLURM_JOB_NODELIST"
        )
    if address and len(hosts) > 1:
        yield f"{hosts[1]} does not resolve here: the nodes meet at {address}, Slurm's NodeAddr of {hosts[0]}"


def is_requeued(told: str, restarts: int) -> bool:
    """Whether Slurm is about to run this job once more by itself: then it counts that already."""
    return _restarts(told, restarts) > restarts


def is_preempted(told: str) -> bool:
    """Whether it wants the nodes for another job: it sends the tasks SIGTERM when the grace time begins, and
    the job script nothing."""
    return re.search(r" PreemptTime=\d", told) is not None


def _queued(told: str) -> float | None:
    """Seconds; Slurm counts the submission anew when it requeues a job. Both times are in one zone."""
    time = r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)"
    found = [re.search(rf" {name}={time} ", told) for name in ("SubmitTime", "StartTime")]
    try:
        submitted, started = (datetime.fromisoformat(match[1]) for match in found if match)
    except ValueError:
        return None
    return max(0.0, (started - submitted).total_seconds())


def _meeting_address(facts: Facts, settings: Settings, site: Profile, hosts: Sequence[str]) -> str:
    """By which address Slurm itself reaches the first node, where names of nodes resolve to nothing here, as
    those of pods; else empty. Where they do, they decide: NodeAddr may be in the slow network."""
    if len(hosts) == 1 or settings.given("master-addr") or site.host_suffix:
        return ""
    told = facts.one("first_node")
    name = re.match(r"NodeName=(\S{1,255}) ", told)
    address = re.search(r" NodeAddr=(\S{1,255}) ", told)
    if not name or not address or not name[1] == hosts[0] != address[1]:
        return ""
    try:
        socket.getaddrinfo(hosts[1], None)  # a pod knows its own name, whoever else does not
    except (OSError, UnicodeError):
        return address[1]
    return ""


def _restarts(told: str, unknown: int) -> int:
    found = re.search(r" Restarts=(\d{1,9}) ", told)
    return int(found[1]) if found else unknown


def _check(env: Mapping[str, str], facts: Facts, settings: Settings) -> None:
    if facts.one("runs_in") == "step":
        step = f"job {env['SLURM_JOB_ID']}, step {env.get('SLURM_STEP_ID', '')}"
        raise BadInput("slurm-script-as-task", f"{step}: start this script once, not with srun")
    slurm.refuse_heterogeneous(env)
    mistakes.check_job(settings, "slurm")
    for name in _NUMBERS:
        if not re.fullmatch(r"[0-9]{1,9}", env.get(name) or "1"):
            raise BadInput(
                "slurm-number", f"{name}={env[name]}: must be a number: unset it if you set it yourself"
            )


def _tasks(env: Mapping[str, str], nnodes: int) -> int:
    """How many of each node."""
    total = int(env.get("SLURM_NTASKS") or 0)
    tasks = int(env.get("SLURM_NTASKS_PER_NODE") or 0) or (total or nnodes) // nnodes
    if tasks == 0 or (total or nnodes * tasks) != nnodes * tasks:
        raise BadInput(
            "slurm-uneven-tasks",
            f"{total} tasks on {nnodes} nodes ({env.get('SLURM_TASKS_PER_NODE', '')}): every node needs "
            "the same number: --ntasks-per-node=1, or one for each rank",
        )
    return tasks


def _cpus(env: Mapping[str, str], tasks: int) -> int:
    """Of each task."""
    if asked := env.get("SLURM_CPUS_PER_TASK"):
        return int(asked)
    parts = (part.partition("(")[0] for part in env.get("SLURM_JOB_CPUS_PER_NODE", "").split(","))
    return min((int(part) for part in parts if part.isdecimal()), default=1) // tasks
