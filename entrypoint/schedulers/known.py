"""What each scheduler that has jobs of its own calls things: `KNOWN`, an entry for each. Begin at
`SchedulerWords`.

`words_of` finds an entry by its name. What a scheduler does differently is code: its file here for what a
task sees, its package in entrypoint/batch for a job script and a login node. Runs with Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from entrypoint.core.frozen import dataclass


@dataclass(frozen=True)
class SchedulerWords:
    """What is said of one scheduler, and its programs."""

    name: str
    """As in a profile and in --scheduler; its file here and its package in entrypoint/batch are called so."""
    title: str
    """In messages."""
    job_script: str
    """Its path in the checkout."""
    starters: tuple[str, ...]
    """What may start the tasks of a job, as --start."""
    submits: str
    """The program that submits a job."""
    tells: str
    """The program that tells of a job."""
    lists: str
    """The program with which its users see their jobs."""
    cancels: str
    """The program that ends a job."""
    surveyed_with: tuple[str, ...]
    """Programs of which one must be there for `apptrain site`; empty if that does not know this scheduler."""
    launchers: tuple[str, ...]
    """Programs that start a job or its tasks, which no CMD begins with."""
    of_cluster: tuple[str, ...]
    """Words with which its users bring a job to a cluster."""
    gpus: str
    """How a request asks for the {gpus} of a node."""
    warns_later: str
    """What to do if its warning comes before the job begins."""
    after: tuple[str, ...] = ()
    """Words of a request that let it wait for the end of another {job}, however that ends; of several, with a
    colon between them."""
    cores_beside_gpus: str = ""
    """How a request gets cores on the NUMA nodes of its GPUs."""
    task_cores_beside_gpus: str = ""
    """The same if it has a task for each GPU, which the scheduler binds to cores."""
    warning: str = ""
    """Who warns a job before its end, if the scheduler does. Empty: the job script does, by --stop-before."""
    forms: tuple[str, ...] = ()
    """Of a profile's request, those that it has."""
    has_chunks: bool = False
    """Whether a request is made of chunks, to which a profile may add resources."""
    memory_words: tuple[str, ...] = ()
    """Words that ask for memory in different ways, if it has several."""
    asks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What `apptrain submit` has an option for, with the words and variables that ask for it too."""
    short_options: Mapping[str, str] = field(default_factory=dict)
    """Short options of `of_cluster`, with the long ones that they stand for."""
    job_id: str = r"[0-9]+(\[\d*\]|_\d+)?(\.[\w.-]+)?"
    """A pattern for the id of a job."""


KNOWN = (
    SchedulerWords(
        name="slurm",
        title="Slurm",
        job_script="slurm/multinode.sbatch",
        starters=("srun",),
        submits="sbatch",
        tells="scontrol",
        lists="squeue",
        cancels="scancel",
        surveyed_with=("sinfo",),
        launchers=("srun", "sbatch"),
        of_cluster=("slurm", "srun", "salloc", "sbatch"),
        gpus="--gpus-per-node={gpus}",
        after=("--dependency=afterany:{job}",),
        warns_later="warn later with --options=--signal=B:USR2@SECONDS",
        cores_beside_gpus="request whole nodes (--exclusive) or cores beside the GPUs "
        "(--gres-flags=enforce-binding)",
        task_cores_beside_gpus="start one task on each node, or tasks in the order of the GPUs "
        "(--distribution=block:block), or with srun --gpu-bind=closest or --cpu-bind=none",
        warning="sbatch --signal=B:USR2@SECONDS",
        forms=("wrapped",),
        memory_words=("--mem", "--mem-per-cpu", "--mem-per-gpu"),
        asks={
            "account": ("-A", "--account", "SBATCH_ACCOUNT"),
            "partition": ("-p", "--partition", "SBATCH_PARTITION"),
            "time": ("-t", "--time", "SBATCH_TIMELIMIT"),
        },
        job_id=r"[0-9]+(_\d+)?(\.[\w.-]+)?(;[\w.-]+)?",
        short_options={"-N": "--nodes", "-p": "--partition", "-A": "--account", "-t": "--time"},
    ),
    SchedulerWords(
        name="pbs",
        title="PBS",
        job_script="pbs/multinode.pbs",
        starters=("pbsdsh", "pbs_tmrsh", "mpiexec", "ssh"),
        submits="qsub",
        tells="qstat",
        lists="qstat",
        cancels="qdel",
        surveyed_with=("qstat", "pbsnodes"),
        launchers=("qsub", "pbsdsh"),
        of_cluster=("pbs", "qsub"),
        gpus="ngpus={gpus}",
        after=("-W", "depend=afterany:{job}"),
        warns_later="give a smaller --stop-before",
        cores_beside_gpus="request whole hosts (-l place=scatter:excl)",
        forms=("select", "totals"),
        has_chunks=True,
        short_options={"-q": "--partition"},
        asks={"account": ("-A", "-P"), "partition": ("-q",), "time": ("-l walltime",)},
    ),
)
"""In the order in which they are looked for."""


def words_of(name: str) -> SchedulerWords:
    """The entry of that name. Raises KeyError if there is none."""
    return {words.name: words for words in KNOWN}[name]


def cores_beside_gpus(name: str, *, one_task: bool) -> str:
    """What helps if the granted cores are not on the NUMA nodes of the GPUs. `one_task`: of a node."""
    found = next((words for words in KNOWN if words.name == name), None)
    if found is None:
        return "allow this process cores there (taskset, numactl, the container's cpuset)"
    return found.cores_beside_gpus if one_task else found.task_cores_beside_gpus or found.cores_beside_gpus
