"""The environments that PBS gives: little to the script, and less to tasks, which see none of its exports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.pbs_double.request import Chunk

TASK_PATH = "/bin:/usr/bin"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a MoM knows of a job."""

    id: str
    """10.pbssrv, or 10[3].pbssrv for an element of an array."""
    name: str
    user: str
    home: str
    shell: str
    queue: str
    cookie: str
    submitted: Mapping[str, str]
    """PBS_O_*."""
    given: Mapping[str, str]
    """qsub -v"""
    hosts: Sequence[str]
    """Each once, in order of first appearance in the node file."""
    lines: Sequence[str]
    """The node file."""
    chunks: Sequence[Chunk]
    """The chunk of each line."""
    array_id: str = ""
    array_index: str = ""
    directory: str = ""
    """Where script and tasks start."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """What differs between hosts and sites."""

    nodefile: str
    tmpdir: str
    port: int
    nodefile_on_sisters: bool = True
    """False before 22.05: the file is not there, though the variable is."""
    gpu_hook: bool = False
    """Whether the cgroup hook names the GPUs."""


def script(job: Job, site: Site) -> dict[str, str]:
    """Of the job script, before its login shell's profile."""
    array = {"PBS_ARRAY_ID": job.array_id, "PBS_ARRAY_INDEX": job.array_index} if job.array_id else {}
    return {
        **_common(job, site, job.chunks[0]),
        **array,
        "PBS_NODEFILE": site.nodefile,
        "PBS_NODENUM": "0",
        "PBS_TASKNUM": "1",
        "USER": job.user,
        "LOGNAME": job.user,
        "SHELL": job.shell,
        **_gpus(job, site, 0),
    }


def task(job: Job, site: Site, *, line: int, number: int) -> dict[str, str]:
    """Of the task on this line of the node file, the host's Nth in this job."""
    host = job.hosts.index(job.lines[line])
    return {
        **_common(job, site, job.chunks[line]),
        **({"PBS_NODEFILE": site.nodefile} if host else {}),
        "PBS_NODENUM": str(host),
        "PBS_TASKNUM": f"{task_id(job, host, number):08X}",
        **_gpus(job, site, host),
    }


def task_id(job: Job, host: int, number: int) -> int:
    return host << (32 - len(job.lines).bit_length()) | number


def _common(job: Job, site: Site, chunk: Chunk) -> dict[str, str]:
    threads = chunk.resources.get("ompthreads") or chunk.resources["ncpus"]
    return {
        "PATH": TASK_PATH,
        **job.given,
        "ENVIRONMENT": "BATCH",
        "HOME": job.home,
        "NCPUS": threads,
        "OMP_NUM_THREADS": threads,
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBCOOKIE": job.cookie,
        "PBS_JOBDIR": job.directory or job.home,
        "PBS_JOBID": job.id,
        "PBS_JOBNAME": job.name,
        "PBS_MOMPORT": str(site.port),
        "PBS_QUEUE": job.queue,
        "TMPDIR": site.tmpdir,
        **job.submitted,
    }


def _gpus(job: Job, site: Site, host: int) -> dict[str, str]:
    granted = sum(
        chunk.number("ngpus") for line, chunk in _chunks_once(job) if job.lines[line] == job.hosts[host]
    )
    if not site.gpu_hook or not granted:
        return {}
    uuids = ",".join(f"GPU-{host:08x}-0000-4000-8000-{gpu:012x}" for gpu in range(granted))
    return {"CUDA_VISIBLE_DEVICES": uuids, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _chunks_once(job: Job) -> list[tuple[int, Chunk]]:
    """The first line of each chunk."""
    found, line = [], 0
    while line < len(job.chunks):
        found.append((line, job.chunks[line]))
        line += job.chunks[line].processes
    return found
