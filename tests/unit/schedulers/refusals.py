"""Refusals as values, for the tests: what Slurm says, what is changed in it, and the one line that must come."""

from dataclasses import dataclass, field

CLEANED = "pass all of the step's variables on (a cleaned environment drops them)"
CORRECT = "correct it, or unset it if you set it yourself"
SRUN = "start the entrypoint with srun, one task per node (see slurm/multinode.sbatch)"
NAMES = "give names such as gpu-a[01-02,07],b1"
ONE_A_LINE = "give a file with one host name a line"
HOSTNAME = "give this host's name as it stands there in APPTRAIN_HOSTNAME (plan: --hostname)"
OWN = "start nodes with apptrain run, which sets it"
TO_GPUS_OR_CPU = "request GPUs, or give --device cpu to train on CPUs"

SLURM_TASK = "slurm/gpus-per-node.task2"
SLURM_BATCH = "slurm/gpus-per-node.batch"
SLURM_ARRAY = "slurm/array.task0"
SALLOC = "slurm/salloc.command"
PBS_TASK = "openpbs/sel2_scatter/pbsdsh-n1.pbsn2"
PBS_SCRIPT = "openpbs/sel2_scatter/script.pbsn1"
NO_JOB = "slurm/apptainer-cleanenv.task"
EMBEDDED = {
    "APPTRAIN_EMBEDDED_JOB_ID": "embedded-4242",
    "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.[1-2]",
    "APPTRAIN_EMBEDDED_NODENAME": "127.0.0.2",
}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    name: str
    """A sentence."""
    recording: str
    says: str
    """The whole line behind `apptrain: `; `--nodefile NODEFILE` stands for the node file's path."""
    change: dict[str, str | None] = field(default_factory=dict)
    """Variables set in the recording; None takes one away."""
    options: tuple[str, ...] = ()
    nodefile: bytes | None = None
    """Its content; given with --nodefile."""


def slurm(name: str, says: str, *options: str, recording: str = SLURM_TASK, **change: str | None) -> Refusal:
    return Refusal(name=name, recording=recording, says=says, change=change, options=options)


def pbs(
    name: str,
    says: str,
    *options: str,
    recording: str = PBS_TASK,
    nodefile: bytes = b"pbsn1\npbsn2\n",
    **change: str | None,
) -> Refusal:
    return Refusal(
        name=name, recording=recording, says=says, change=change, options=options, nodefile=nodefile
    )


def embedded(name: str, says: str, **change: str | None) -> Refusal:
    return Refusal(name=name, recording=NO_JOB, says=says, change={**EMBEDDED, **change})


def manual(name: str, says: str, *options: str, **change: str | None) -> Refusal:
    return Refusal(name=name, recording=NO_JOB, says=says, change=change, options=options)


CHOICE = [
    Refusal(
        name="an environment without a job and no list of nodes",
        recording=NO_JOB,
        says="no scheduler's job id is in the environment: on this machine: apptrain run -- CMD; from a login node: apptrain submit; inside a job "
        "whose variables a cleaned environment has dropped: --scheduler NAME; on machines of your own: --nodes a,b --node-rank I",
    ),
    slurm(
        "a scheduler that is named but not there",
        "PBS_JOBID is not set: start this inside a PBS job, or give --scheduler",
        "--scheduler",
        "pbs",
    ),
    slurm(
        "nodes by hand that are not the scheduler's",
        "--nodes gpu-a01,gpu-a02 is not what slurm granted (gpu-a01,gpu-a02,gpu-b07): leave it out, or add "
        "--scheduler manual",
        "--nodes",
        "gpu-a01,gpu-a02",
    ),
    slurm(
        "a node rank by hand that is not the scheduler's",
        "--node-rank 1 is not what slurm says of this node (2): leave it out, or add --scheduler manual",
        "--node-rank",
        "1",
    ),
]

SLURM_PLACE = [
    slurm(
        "a step without SLURM_NODEID",
        f"SLURM_NODEID is not set in step 0: {SRUN}",
        SLURM_NODEID=None,
    ),
    slurm("an empty SLURM_NODEID", f"SLURM_NODEID is empty in step 0: {SRUN}", SLURM_NODEID=""),
    slurm(
        "a SLURM_NODEID that is no number",
        f"SLURM_NODEID=-1 is not a whole number: {SRUN}",
        SLURM_NODEID="-1",
    ),
    slurm(
        "a SLURM_NODEID in digits of another script",
        f"SLURM_NODEID=\u0662 is not a whole number: {SRUN}",
        SLURM_NODEID="\u0662",
    ),
    slurm(
        "a SLURM_NODEID beyond the node list",
        f"SLURM_NODEID=3, but SLURM_STEP_NODELIST names 3 nodes: {CLEANED}",
        SLURM_NODEID="3",
    ),
    slurm(
        "a SLURM_NODEID at odds with the node's name",
        f"SLURM_NODEID=1 is gpu-a02 in SLURM_STEP_NODELIST, but SLURMD_NODENAME=gpu-b07: {CLEANED}",
        SLURM_NODEID="1",
    ),
    slurm("a step without SLURM_LOCALID", f"SLURM_LOCALID is not set in step 0: {SRUN}", SLURM_LOCALID=None),
    slurm(
        "a SLURM_LOCALID beyond the node's tasks",
        f"SLURM_LOCALID=1, but SLURM_STEP_TASKS_PER_NODE gives gpu-b07 1: {CLEANED}",
        SLURM_LOCALID="1",
    ),
    slurm(
        "a step's node list without the step's number",
        f"SLURM_STEP_NODELIST is set, but SLURM_STEP_ID is not: {CLEANED}",
        SLURM_STEP_ID=None,
    ),
    slurm(
        "a batch script that is not on node 0",
        f"SLURM_NODEID=2, but SLURM_STEP_ID is not set, and a batch script runs on node 0: {CLEANED}",
        SLURM_STEP_ID=None,
        SLURM_STEP_NODELIST=None,
    ),
    slurm(
        "a step number that is none",
        f"SLURM_STEP_ID=batch is not a whole number: {CORRECT}",
        SLURM_STEP_ID="batch",
    ),
]

SLURM_NODES = [
    slurm(
        "a step without its node list",
        f"SLURM_STEP_NODELIST is not set in step 0: {CLEANED}",
        SLURM_STEP_NODELIST=None,
    ),
    slurm(
        "an empty node list",
        f"SLURM_STEP_NODELIST is empty in step 0: {CLEANED}",
        SLURM_STEP_NODELIST="",
    ),
    slurm(
        "a batch script without the job's node list",
        f"SLURM_JOB_NODELIST is not set: {CLEANED}",
        recording=SLURM_BATCH,
        SLURM_JOB_NODELIST=None,
    ),
    slurm(
        "a node list with a syntax error",
        f"SLURM_STEP_NODELIST='gpu-a[01-02' is not a node list: '[' without ']' at character 6: {NAMES}",
        SLURM_STEP_NODELIST="gpu-a[01-02",
    ),
    slurm(
        "a node list that names a node twice",
        "SLURM_STEP_NODELIST names gpu-a02 twice: give every node once",
        SLURM_STEP_NODELIST="gpu-a[01-02],gpu-a02",
    ),
    slurm(
        "a node list of another length than the step",
        f"SLURM_STEP_NODELIST=gpu-a[01-02] names 2 nodes, but SLURM_STEP_NUM_NODES=3: {CLEANED}",
        SLURM_STEP_NODELIST="gpu-a[01-02]",
    ),
]

SLURM_TASKS = [
    slurm(
        "a step without its tasks per node",
        f"SLURM_STEP_TASKS_PER_NODE is not set in step 0: {CLEANED}",
        SLURM_STEP_TASKS_PER_NODE=None,
    ),
    slurm(
        "tasks per node that are no numbers",
        f"SLURM_STEP_TASKS_PER_NODE=1(y3): '1(y3)' is no number, nor one as in 2(x3): {CORRECT}",
        SLURM_STEP_TASKS_PER_NODE="1(y3)",
    ),
    slurm(
        "tasks for fewer nodes than there are",
        f"SLURM_STEP_TASKS_PER_NODE=1(x2) does not give 3 nodes a number each: {CORRECT}",
        SLURM_STEP_TASKS_PER_NODE="1(x2)",
    ),
    slurm(
        "tasks for more nodes than there can be",
        f"SLURM_STEP_TASKS_PER_NODE=1(x999999999) does not give 3 nodes a number each: {CORRECT}",
        SLURM_STEP_TASKS_PER_NODE="1(x999999999)",
    ),
    slurm(
        "a repetition of nothing",
        f"SLURM_STEP_TASKS_PER_NODE=1(x0),1(x3) does not give 3 nodes a number each: {CORRECT}",
        SLURM_STEP_TASKS_PER_NODE="1(x0),1(x3)",
    ),
    slurm(
        "a node without a task",
        f"SLURM_STEP_TASKS_PER_NODE=1,0,1 leaves gpu-a02 without a task: {CORRECT}",
        SLURM_STEP_TASKS_PER_NODE="1,0,1",
    ),
    slurm(
        "uneven tasks",
        "SLURM_STEP_TASKS_PER_NODE gives 1,2,1 tasks on the 3 nodes: start the same number on every node, "
        "one for torchrun or one for each rank",
        SLURM_STEP_TASKS_PER_NODE="1,2,1",
    ),
    slurm(
        "two tasks per node in torchrun mode",
        "--mode torchrun needs one task on every node, but SLURM_STEP_TASKS_PER_NODE gives 2: start one "
        "task per node, or use --mode rank",
        "--mode",
        "torchrun",
        recording="slurm/two-tasks-gpus-per-node.task5",
    ),
]

SLURM_JOB = [
    slurm(
        "an empty job id",
        "SLURM_JOB_ID is empty: start this inside a Slurm job, or give --scheduler",
        SLURM_JOB_ID="",
    ),
    slurm(
        "a job id that is no number", f"SLURM_JOB_ID=2a is not a whole number: {CORRECT}", SLURM_JOB_ID="2a"
    ),
    slurm(
        "an array element without its index",
        f"SLURM_ARRAY_TASK_ID is not set in an array job: {CLEANED}",
        recording=SLURM_ARRAY,
        SLURM_ARRAY_TASK_ID=None,
    ),
    slurm(
        "an array element without its array",
        f"SLURM_ARRAY_JOB_ID is not set in an array job: {CLEANED}",
        recording=SLURM_ARRAY,
        SLURM_ARRAY_JOB_ID=None,
    ),
    slurm(
        "a restart count that is no number",
        f"SLURM_RESTART_COUNT=often is not a whole number: {CORRECT}",
        SLURM_RESTART_COUNT="often",
    ),
    slurm(
        "a part of a heterogeneous job",
        "SLURM_HET_SIZE=2: a heterogeneous job, whose step may leave nodes out unseen: "
        "submit one component (no ':' between requests)",
        SLURM_HET_SIZE="2",
    ),
]

SLURM_DEVICES = [
    slurm(
        "a job without GPUs",
        f"job 12 was granted no GPU on this node that slurm tells of: {TO_GPUS_OR_CPU}; if slurm does not count GPUs at "
        "this site, give --device cuda --nproc-per-node N, or --profile with one that has nodes: {gpus: N, whole: true}",
        recording="slurm/cpu-only.task2",
    ),
    slurm(
        "zero GPUs",
        f"job 2 was granted no GPU on this node: {TO_GPUS_OR_CPU}",
        SLURM_GPUS_ON_NODE="0",
        CUDA_VISIBLE_DEVICES=None,
    ),
    slurm(
        "a number of GPUs that is none",
        f"SLURM_GPUS_ON_NODE=two is not a whole number: {CORRECT}",
        SLURM_GPUS_ON_NODE="two",
    ),
    slurm(
        "GPUs that differ from node to node",
        "SLURM_GPUS=6 on 2 nodes, but SLURM_GPUS_ON_NODE=2 on gpu-a02: every node needs the same number: "
        "request --gpus-per-node rather than --gpus",
        recording="slurm/gpus-total.task1",
    ),
    slurm(
        "more visible devices than GPUs granted",
        "CUDA_VISIBLE_DEVICES=0,1,2, but SLURM_GPUS_ON_NODE=2: unset CUDA_VISIBLE_DEVICES, Slurm sets it "
        "for each task",
        CUDA_VISIBLE_DEVICES="0,1,2",
    ),
    slurm(
        "GPUs hidden from the task that has them",
        "2 ranks on a node, but this task sees 0 GPUs (CUDA_VISIBLE_DEVICES): request GPUs per node rather "
        "than per task (under srun also --gpu-bind=none), or start fewer ranks",
        CUDA_VISIBLE_DEVICES="",
    ),
    slurm(
        "slices of GPUs, of which each rank would see the same one",
        "the 2 devices in CUDA_VISIBLE_DEVICES are slices of GPUs (MIG), and a process sees one of them: start one rank on "
        "each node (--nproc-per-node 1), or request whole GPUs",
        CUDA_VISIBLE_DEVICES="MIG-11111111-0000-0000-0000-000000000001,MIG-11111111-0000-0000-0000-000000000002",
    ),
    slurm(
        "slices of GPUs in the job script, before there are tasks",
        "the 2 devices in CUDA_VISIBLE_DEVICES are slices of GPUs (MIG), and a process sees one of them: start one rank on "
        "each node (--nproc-per-node 1), or request whole GPUs",
        recording=SLURM_BATCH,
        CUDA_VISIBLE_DEVICES="MIG-11111111-0000-0000-0000-000000000001,MIG-11111111-0000-0000-0000-000000000002",
    ),
    slurm(
        "slices of GPUs that all tasks of a node see",
        "the 2 devices in CUDA_VISIBLE_DEVICES are slices of GPUs (MIG), and a process sees one of them: start one task "
        "on each node, or give each its own (srun --gpus-per-task=1), or request whole GPUs",
        recording="slurm/two-tasks-gpus-per-node.task0",
        CUDA_VISIBLE_DEVICES="MIG-11111111-0000-0000-0000-000000000001,MIG-11111111-0000-0000-0000-000000000002",
    ),
    slurm(
        "a visible device that is none",
        "CUDA_VISIBLE_DEVICES=0,all: 'all' is no device: give numbers or UUIDs between commas, or unset it",
        CUDA_VISIBLE_DEVICES="0,all",
    ),
    slurm(
        "an empty place among the visible devices",
        "CUDA_VISIBLE_DEVICES=0,,1: '' is no device: give numbers or UUIDs between commas, or unset it",
        CUDA_VISIBLE_DEVICES="0,,1",
    ),
    slurm(
        "a visible device twice",
        "CUDA_VISIBLE_DEVICES=1,1: device 1 twice: give each once, or unset it",
        CUDA_VISIBLE_DEVICES="1,1",
    ),
    slurm(
        "a typed number of GPUs that is none",
        "SLURM_GPUS_PER_NODE=x is not a whole number: give a number, or TYPE:NUMBER between commas, in "
        "SLURM_GPUS_PER_NODE=a100:x",
        recording=SALLOC,
        SLURM_GPUS_PER_NODE="a100:x",
    ),
    slurm(
        "an empty number of CPUs",
        f"SLURM_CPUS_ON_NODE is empty: {CORRECT}",
        SLURM_CPUS_ON_NODE="",
    ),
    slurm(
        "CPUs per node that are no numbers",
        f"SLURM_JOB_CPUS_PER_NODE=many: 'many' is no number, nor one as in 2(x3): {CORRECT}",
        recording=SLURM_BATCH,
        SLURM_JOB_CPUS_PER_NODE="many",
    ),
    slurm(
        "CPUs per task that are no number",
        f"SLURM_CPUS_PER_TASK=4.5 is not a whole number: {CORRECT}",
        SLURM_CPUS_PER_TASK="4.5",
    ),
]
