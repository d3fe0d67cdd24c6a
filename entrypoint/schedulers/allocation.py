"""What a scheduler granted, in one vocabulary: `Allocation` is what each scheduler's module returns, and what
the plan is made of.

Slurm, PBS and the others say the same few things in different words. `sources` keeps the scheduler's own
names, for messages and for what depends on where a value comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from entrypoint.core.frozen import dataclass

Context = Literal["task", "batch"]


@dataclass(frozen=True)
class JobName:
    """Which job this is, in the scheduler's own words; each field as in Allocation."""

    id: str
    number: int | None
    run_id: str
    array_index: int | None = None
    """None outside arrays."""
    name: str = "job"
    submit_dir: str | None = None


@dataclass(frozen=True)
class Allocation:
    """The part of a cluster on which this launch runs, seen from one task.

    Raises nothing: the scheduler's module refuses what does not fit together.
    """

    scheduler: str
    job_id: str
    """The scheduler's own, verbatim."""
    job_number: int | None
    """The number in the job id that neighbouring jobs count up; for an array, the array's. None: there are
    no jobs, and ports are the fixed ones."""
    run_id: str
    """What tells this run from others of the same name, the same over requeues (for an array element
    `ARRAY_INDEX`, under PBS without the server)."""
    nodes: tuple[str, ...]
    """Names as the scheduler lists them, in node-rank order."""
    node_rank: int
    tasks_per_node: tuple[int, ...]
    """How many of the step's tasks run on each node, in the order of `nodes`."""
    array_index: int = 0
    """The element's index; 0 outside arrays."""
    job_name: str = "job"
    """As the user named the job; part of the run directory's name."""
    submit_dir: str | None = None
    """Where the user submitted from; None where the scheduler does not tell."""
    step_id: str | None = None
    """Slurm's step, verbatim; None where there is no such thing."""
    restart_count: int = 0
    """How often the scheduler has started this job anew; 0 in its first run, or where it does not tell."""
    context: Context = "task"
    """`task`: one of the processes that the scheduler started on the nodes. `batch`: the one place
    before them (batch script, salloc's command, interactive shell): the plan shown is node 0's."""
    local_id: int = 0
    """This task's number among those of its node, from 0."""
    slots_per_node: tuple[int, ...] | None = None
    """Processes that the user asked the scheduler to place on each node, where it lists them
    without starting them (PBS's node file lines); None elsewhere."""
    gpus: int | None = None
    """GPUs granted to this node's tasks together. 0: none. None: the scheduler does not tell."""
    gpus_unknown: str = ""
    """Why `gpus` is None: which variables would have told."""
    gpus_unnamed: bool = False
    """Of `gpus` None: no variable names a GPU. Either none was requested, or this site's scheduler does not
    count them."""
    gpus_of_site: str = ""
    """The profile whose word for its whole nodes `gpus` is; empty: the scheduler's own word."""
    gpus_visible: int | None = None
    """GPUs that this task sees, where the scheduler limits it to fewer than `gpus`; else None."""
    slices: int = 0
    """Of the devices that this task sees, those that are slices of GPUs (MIG). A process sees one of them."""
    gpus_option: str = ""
    """The option that asks for GPUs on each node, where it is one of ours; else the scheduler's words do."""
    cpu_by_default: bool = False
    """Whether a run without GPUs is meant for CPUs. On a cluster it is more likely a forgotten request."""
    cpus: int | None = None
    """CPUs granted to this node's tasks together; None where unknown."""
    omp_num_threads: str | None = None
    """OMP_NUM_THREADS as the scheduler itself set it, whoever the user is; None where it does not."""
    start_line: str = ""
    """In the context `batch`: the command that starts one task on every node."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field name to the name of the variable (or file) that it came from."""
    notes: tuple[str, ...] = ()
    """What was overridden or ignored: each said once to the user."""

    @property
    def nnodes(self) -> int:
        return len(self.nodes)
