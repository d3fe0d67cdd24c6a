"""Read a job's allocation from PBS's environment and node file. What the job script sees is
job/batch/pbs.py's.

A task knows its host's place among the job's hosts, and on the first host not even the node file. Of the
GPUs PBS tells nothing: they come from CUDA_VISIBLE_DEVICES where a site's hook sets it, else from
APPTRAIN_NGPUS, which the job script reads from qstat.

What comes from where:
    nodes           the node file's hosts in order of first appearance; spellings of one host are one
    slots_per_node  its lines per host: processes asked for (mpiprocs, or chunks on one host), not tasks
    node_rank       PBS_NODENUM, which counts hosts in that same order; the host's name must agree
    context         PBS_TASKNUM, which is 1 in the job script. Otherwise it is no rank
    cpus            NCPUS, of this task's chunk. A host with several chunks has more, but no variable tells
                    several chunks from several lines of one. Where chunks name ompthreads, NCPUS is that:
                    then APPTRAIN_NCPUS, which the job script reads from qstat
    omp_num_threads OMP_NUM_THREADS where it equals NCPUS: PBS sets both, over what the user set
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from entrypoint.core import files
from entrypoint.core.errors import BadInput
from entrypoint.core.plain import counted
from entrypoint.schedulers import hostnames, variables
from entrypoint.schedulers.allocation import Allocation, Context, JobName
from entrypoint.schedulers.request import PlacementRequest

NAME = "pbs"
MOST = 1 << 23
"""Bytes of a node file: 100,000 lines of 80."""
GPUS = "APPTRAIN_NGPUS"
CPUS = "APPTRAIN_NCPUS"
COUNTED = ("ngpus", "naccelerators", "gpus", "ngpu")
"""Resources by which sites count GPUs; the first is the usual one."""

_JOB_ID = re.compile(r"(\d{1,18})(?:\[(\d{1,9})\])?(?:\.\S+)?", re.ASCII)
_TASK = re.compile(r"[0-9A-Fa-f]{1,8}", re.ASCII)
_NO_NODEFILE = (
    "PBS leaves it out of tasks on the job's first host: copy the file in the job script and name the copy "
    "in APPTRAIN_NODEFILE (plan: --nodefile)"
)
_HOSTNAME = "give this host's name as it stands there in APPTRAIN_HOSTNAME (plan: --hostname)"
_NO_NODENUM = "start this with pbsdsh or pbs_tmrsh, which set it"
_FORMAT = "give a file with one host name a line"


def present(env: Mapping[str, str]) -> bool:
    """Whether this environment belongs to a PBS job."""
    return "PBS_JOBID" in env


def allocation(env: Mapping[str, str], request: PlacementRequest) -> Allocation:
    """The job's hosts, seen from this task.

    Raises BadInput for a variable that is missing, empty, malformed or at odds with another, for a node
    file that cannot be read, and for a host that is not in it.
    """
    granted_to = job(env)
    path, nodes_from = _nodefile(env, request)
    nodes, slots = hostnames.merge(_lines(path, nodes_from), f"{nodes_from} {path}")
    node_rank, rank_from = _node_rank(env, request, nodes, f"{nodes_from} {path}")
    context = _context(env, node_rank)
    gpus, gpus_from = _gpus(env)
    cpus_from = CPUS if CPUS in env else "NCPUS"
    cpus = variables.optional_number(env, cpus_from, "unset it, PBS sets it for each task")
    threads = env.get("OMP_NUM_THREADS")
    sources = {
        "job_id": "PBS_JOBID",
        "array_index": "PBS_JOBID",
        "nodes": nodes_from,
        "node_rank": rank_from,
        "slots_per_node": nodes_from,
        "gpus": gpus_from,
        "cpus": cpus_from if cpus is not None else "",
    }
    return Allocation(
        scheduler=NAME,
        job_id=granted_to.id,
        job_number=granted_to.number,
        array_index=granted_to.array_index or 0,
        job_name=granted_to.name,
        run_id=granted_to.run_id,
        submit_dir=granted_to.submit_dir,
        context=context,
        nodes=nodes,
        node_rank=node_rank,
        tasks_per_node=(1,) * len(nodes),
        slots_per_node=slots,
        gpus=gpus,
        gpus_unknown=f"neither {variables.CUDA_DEVICES} nor {GPUS} is set" if gpus is None else "",
        slices=variables.visible_slices(env),
        cpus=cpus,
        start_line="pbsdsh -n I -- apptrain launch -- CMD, I being the line of the node file, "
        "from 0, on which a host first stands",
        omp_num_threads=threads if threads == env.get("NCPUS") else None,
        sources={name: variable for name, variable in sources.items() if variable},
    )


def job(env: Mapping[str, str]) -> JobName:
    """Which job this is. Raises BadInput."""
    job_id = variables.text(env, "PBS_JOBID", "start this inside a PBS job, or give --scheduler")
    found = _JOB_ID.fullmatch(job_id)
    if not found:
        raise BadInput(
            "pbs-job-id",
            f"{variables.shown('PBS_JOBID', job_id)} is no job id such as 10.server or 10[3].server: "
            "unset it if you set it yourself",
        )
    return JobName(
        id=job_id,
        number=int(found[1]),
        array_index=None if found[2] is None else int(found[2]),
        run_id=found[1] if found[2] is None else f"{int(found[1])}_{int(found[2])}",
        name=env.get("PBS_JOBNAME") or "job",
        submit_dir=env.get("PBS_O_WORKDIR") or None,
    )


def _nodefile(env: Mapping[str, str], request: PlacementRequest) -> tuple[Path, str]:
    """The node file, and the option or variable that names it."""
    if request.nodefile is not None:
        return request.nodefile, "--nodefile"
    return Path(variables.text(env, "PBS_NODEFILE", _NO_NODEFILE)), "PBS_NODEFILE"


def _lines(path: Path, source: str) -> list[str]:
    """The host of every line that is not blank."""
    try:
        lines = files.read_text(path, MOST).splitlines()
    except (OSError, files.Unfit) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadInput(
            "nodefile-unreadable",
            f"{source} {path} cannot be read ({why}): copy the file in the job script to where "
            "this node and container see it, and name the copy in APPTRAIN_NODEFILE (plan: --nodefile)",
        ) from None
    except UnicodeError:
        raise BadInput("nodefile-not-text", f"{source} {path} is no text: {_FORMAT}") from None
    for number, line in enumerate(lines, 1):
        if len(line.split()) > 1 or not line.isprintable():
            raise BadInput(
                "nodefile-line",
                f"{source} {path}, line {number}: {line[:80]!r} is not one host name: {_FORMAT}",
            )
    hosts = [line.strip() for line in lines if line.strip()]
    if not hosts:
        raise BadInput("nodefile-empty", f"{source} {path} has no host in it: {_FORMAT}")
    return hosts


def _node_rank(
    env: Mapping[str, str], request: PlacementRequest, nodes: tuple[str, ...], file: str
) -> tuple[int, str]:
    """This host's place, and the variable or option that told."""
    here = None if request.hostname is None else _place(request.hostname, nodes, file)
    if "PBS_NODENUM" not in env and here is not None:
        return here, "--hostname"
    number = variables.number(env, "PBS_NODENUM", _NO_NODENUM)
    if number >= len(nodes):
        raise BadInput(
            "pbs-nodenum-range",
            f"PBS_NODENUM={number}, but {file} has {counted(len(nodes), 'host')}: "
            "give the node file of this very job",
        )
    if here not in (None, number):
        raise BadInput(
            "pbs-nodenum-host",
            f"PBS_NODENUM={number} is {nodes[number]} in {file}, but this host is {request.hostname}: "
            f"give the node file of this very job, or {_HOSTNAME}",
        )
    return number, "PBS_NODENUM"


def _place(hostname: str, nodes: tuple[str, ...], file: str) -> int:
    found = hostnames.find(hostname, nodes)
    if len(found) > 1:
        listed = " or ".join(nodes[at] for at in found)
        raise BadInput("pbs-host-ambiguous", f"host {hostname} may be {listed} in {file}: {_HOSTNAME}")
    if not found:
        listed = ",".join(nodes[:8]) + (",..." if len(nodes) > 8 else "")
        raise BadInput(
            "pbs-host-not-in-job",
            f"host {hostname} is not in {file} ({listed}): start this on the job's hosts, or {_HOSTNAME}",
        )
    return found[0]


def _context(env: Mapping[str, str], node_rank: int) -> Context:
    task = env.get("PBS_TASKNUM")
    if task is not None and not _TASK.fullmatch(task):
        raise BadInput(
            "pbs-tasknum",
            f"{variables.shown('PBS_TASKNUM', task)} is no task number: unset it if you set it yourself",
        )
    if task != "1":
        return "task"
    if node_rank != 0:
        raise BadInput(
            "pbs-script-not-first",
            f"PBS_TASKNUM=1 is the job script, which runs on the first host, but node rank is {node_rank}: "
            "start tasks with pbsdsh or pbs_tmrsh, which number them",
        )
    return "batch"


def _gpus(env: Mapping[str, str]) -> tuple[int | None, str]:
    """This host's GPUs and the variable that tells; None where neither does."""
    visible = variables.visible_devices(env)
    if visible is not None:
        return visible, variables.CUDA_DEVICES
    granted = variables.optional_number(env, GPUS, "give the number of GPUs of each host, or unset it")
    return granted, GPUS if granted is not None else ""
