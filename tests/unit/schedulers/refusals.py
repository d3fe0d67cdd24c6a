"""What is refused, listed like features: every mistake ends with exit 64 and one line that names the input,
what was found and what to do. Each starts from a recorded environment and changes it."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from entrypoint.cli import main
from tests.unit import plans

CLEANED = "pass all of the step's variables on (a cleaned environment drops them)"
CORRECT = "correct it, or unset it if you set it yourself"
SRUN = "start the entrypoint with srun, one task per node (see slurm/multinode.sbatch)"
NAMES = "give names such as gpu-a[01-02,07],b1"
ONE_A_LINE = "give a file with one host name a line"
HOSTNAME = "give this host's name as it stands there in APPTRAIN_HOSTNAME (plan: --hostname)"
OWN = "start nodes with python -m entrypoint.embedded, which sets it"
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
    """The whole line behind `entrypoint: `; `--nodefile NODEFILE` stands for the node file's path."""
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
        says="no scheduler's job id is in the environment: start this inside a job (a cleaned environment "
        "drops the variables), name it with --scheduler, or list the machines with --nodes a,b --node-rank "
        "I",
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
        "SLURM_HET_SIZE=2: this is a part of a heterogeneous job, whose step may leave nodes out unseen: "
        "submit one component (no ':' between requests)",
        SLURM_HET_SIZE="2",
    ),
]

SLURM_DEVICES = [
    slurm(
        "a job without GPUs",
        f"job 12 was granted no GPU on this node: {TO_GPUS_OR_CPU}",
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

PBS_FILE = [
    Refusal(
        name="a task on the first host without the node file",
        recording="openpbs/sel2_scatter/pbsdsh-n0.pbsn1",
        says="PBS_NODEFILE is not set: PBS leaves it out of tasks on the job's first host: copy the file "
        "in the job script and name the copy in APPTRAIN_NODEFILE (plan: --nodefile)",
    ),
    Refusal(
        name="a node file that is not there",
        recording=PBS_TASK,
        says="--nodefile /nonexistent/nodefile cannot be read (No such file or directory): copy the file "
        "in the job script to where this node and container see it, and name the copy in APPTRAIN_NODEFILE "
        "(plan: --nodefile)",
        options=("--nodefile", "/nonexistent/nodefile"),
    ),
    Refusal(
        name="a node file that is a directory",
        recording=PBS_TASK,
        says="PBS_NODEFILE / cannot be read (Is a directory): copy the file in the job script to where "
        "this node and container see it, and name the copy in APPTRAIN_NODEFILE (plan: --nodefile)",
        change={"PBS_NODEFILE": "/"},
    ),
    pbs("an empty node file", f"--nodefile NODEFILE has no host in it: {ONE_A_LINE}", nodefile=b"\n \n"),
    pbs(
        "a node file with more than names",
        f"--nodefile NODEFILE, line 2: 'pbsn2 slots=4' is not one host name: {ONE_A_LINE}",
        nodefile=b"pbsn1\npbsn2 slots=4\n",
    ),
    pbs(
        "a node file with control characters",
        f"--nodefile NODEFILE, line 1: 'pbsn1\\x07' is not one host name: {ONE_A_LINE}",
        nodefile=b"pbsn1\x07\npbsn2\n",
    ),
    pbs(
        "a node file that is no text",
        f"--nodefile NODEFILE is no text: {ONE_A_LINE}",
        nodefile=b"\xff\xfe\x00",
    ),
    pbs(
        "a short name beside two hosts of that name",
        "--nodefile NODEFILE: pbsn2 may be pbsn2.cluster.org or pbsn2.old.org: use full names throughout",
        nodefile=b"pbsn1\npbsn2.cluster.org\npbsn2.old.org\npbsn2\n",
    ),
]

PBS_PLACE = [
    pbs(
        "a host that is not in the node file",
        "host login1 is not in --nodefile NODEFILE (pbsn1,pbsn2): start this on the job's hosts, or "
        + HOSTNAME,
        "--hostname",
        "login1",
    ),
    pbs(
        "a host that is another than PBS_NODENUM says",
        "PBS_NODENUM=1 is pbsn2 in --nodefile NODEFILE, but this host is pbsn1: give the node file of this "
        "very "
        "job, or " + HOSTNAME,
        "--hostname",
        "pbsn1",
    ),
    pbs(
        "a host of the right name in another domain",
        "host pbsn2.old.org is not in --nodefile NODEFILE (pbsn1.cluster.org,pbsn2.cluster.org): start this "
        "on the "
        "job's hosts, or " + HOSTNAME,
        "--hostname",
        "pbsn2.old.org",
        nodefile=b"pbsn1.cluster.org\npbsn2.cluster.org\n",
    ),
    pbs(
        "a short host name that fits two hosts",
        "host pbsn2 may be pbsn2.cluster.org or pbsn2.old.org in --nodefile NODEFILE: " + HOSTNAME,
        "--hostname",
        "pbsn2",
        nodefile=b"pbsn2.cluster.org\npbsn2.old.org\n",
    ),
    pbs(
        "neither PBS_NODENUM nor a host name",
        "PBS_NODENUM is not set: start this with pbsdsh or pbs_tmrsh, which set it",
        PBS_NODENUM=None,
    ),
    pbs(
        "a PBS_NODENUM that is no number",
        "PBS_NODENUM=one is not a whole number: start this with pbsdsh or pbs_tmrsh, which set it",
        PBS_NODENUM="one",
    ),
    pbs(
        "a PBS_NODENUM beyond the node file",
        "PBS_NODENUM=1, but --nodefile NODEFILE has 1 host: give the node file of this very job",
        nodefile=b"pbsn1\npbsn1\n",
    ),
    pbs(
        "a task number that is none",
        "PBS_TASKNUM=first is no task number: unset it if you set it yourself",
        PBS_TASKNUM="first",
    ),
    pbs(
        "a job script that is not on the first host",
        "PBS_TASKNUM=1 is the job script, which runs on the first host, but node rank is 1: start tasks "
        "with pbsdsh or pbs_tmrsh, which number them",
        PBS_TASKNUM="1",
    ),
]

PBS_JOB = [
    pbs(
        "a job id without a number",
        "PBS_JOBID=pbssrv is no job id such as 10.server or 10[3].server: unset it if you set it yourself",
        PBS_JOBID="pbssrv",
    ),
    pbs(
        "a whole array in place of an element",
        "PBS_JOBID=10[].pbssrv is no job id such as 10.server or 10[3].server: unset it if you set it "
        "yourself",
        PBS_JOBID="10[].pbssrv",
    ),
    pbs(
        "an empty PBS job id",
        "PBS_JOBID is empty: start this inside a PBS job, or give --scheduler",
        PBS_JOBID="",
    ),
    pbs("GPUs that nothing tells of", plans.UNKNOWN_GPUS),
    pbs(
        "zero GPUs under PBS",
        f"job 3.pbssrv was granted no GPU on this node: {TO_GPUS_OR_CPU}",
        APPTRAIN_NGPUS="0",
    ),
    pbs(
        "a number of GPUs from qstat that is none",
        "APPTRAIN_NGPUS=8gb is not a whole number: give the number of GPUs of each host, or unset it",
        APPTRAIN_NGPUS="8gb",
    ),
    pbs(
        "an NCPUS that is no number",
        "NCPUS=all is not a whole number: unset it, PBS sets it for each task",
        NCPUS="all",
    ),
    pbs(
        "unequal lines per host on CPUs",
        "--nodefile lists 1,2 processes on the 2 nodes: give --nproc-per-node N",
        "--device",
        "cpu",
        nodefile=b"pbsn1\npbsn2\npbsn2\n",
    ),
]

OTHERS = [
    embedded(
        "an embedded job without a name",
        f"APPTRAIN_EMBEDDED_JOB_ID is empty: {OWN}",
        APPTRAIN_EMBEDDED_JOB_ID="",
    ),
    embedded(
        "an embedded node without the list",
        f"APPTRAIN_EMBEDDED_NODELIST is not set: {OWN}",
        APPTRAIN_EMBEDDED_NODELIST=None,
    ),
    embedded(
        "an embedded node list with a syntax error",
        "APPTRAIN_EMBEDDED_NODELIST='127.0.0.[2-1]' is not a node list: range 2-1 that runs backwards at "
        f"character 10: {NAMES}",
        APPTRAIN_EMBEDDED_NODELIST="127.0.0.[2-1]",
    ),
    embedded(
        "an embedded node without a name",
        f"APPTRAIN_EMBEDDED_NODENAME is not set: {OWN}",
        APPTRAIN_EMBEDDED_NODENAME=None,
    ),
    embedded(
        "an embedded node that is not in the list",
        f"APPTRAIN_EMBEDDED_NODENAME=127.0.0.3 is not in APPTRAIN_EMBEDDED_NODELIST=127.0.0.[1-2]: {OWN}",
        APPTRAIN_EMBEDDED_NODENAME="127.0.0.3",
    ),
    embedded(
        "embedded nodes without tasks",
        f"APPTRAIN_EMBEDDED_TASKS_PER_NODE=0 leaves no task to run: {OWN}",
        APPTRAIN_EMBEDDED_TASKS_PER_NODE="0",
    ),
    embedded(
        "an embedded task beyond those of its node",
        f"APPTRAIN_EMBEDDED_LOCALID=1, but APPTRAIN_EMBEDDED_TASKS_PER_NODE gives 1: {OWN}",
        APPTRAIN_EMBEDDED_LOCALID="1",
    ),
    embedded(
        "embedded CPUs that are no number",
        f"APPTRAIN_EMBEDDED_CPUS_ON_NODE=all is not a whole number: {OWN}",
        APPTRAIN_EMBEDDED_CPUS_ON_NODE="all",
    ),
    manual(
        "no list of nodes by hand",
        "--nodes is not given: --scheduler manual needs --nodes a,b and --node-rank I on each node",
        "--scheduler",
        "manual",
    ),
    manual(
        "a list of nodes by hand with a syntax error",
        f"--nodes='a,,b' is not a node list: empty name at character 3: {NAMES}",
        "--nodes",
        "a,,b",
    ),
    manual(
        "a node twice in a list by hand",
        "--nodes names a twice: give every node once",
        "--nodes",
        "a,b,a",
        "--node-rank",
        "0",
    ),
    manual(
        "a list by hand without this node's rank",
        "--node-rank is not given: give this node's place in --nodes a,b, from 0",
        "--nodes",
        "a,b",
    ),
    manual(
        "a host that is none of the list by hand",
        "--node-rank is not given, and host c is none of --nodes a,b: give --node-rank, this node's place "
        "in the list from 0",
        "--nodes",
        "a,b",
        "--hostname",
        "c",
    ),
    manual(
        "a host that is more than one of the list by hand",
        "--node-rank is not given, and host a is more than one of --nodes a.x.org,a.y.org: give "
        "--node-rank, this node's place in the list from 0",
        "--nodes",
        "a.x.org,a.y.org",
        "--hostname",
        "a",
    ),
    manual(
        "a rank by hand beyond the list",
        "--node-rank 2, but --nodes a,b has 2 nodes: give a number from 0 to 1",
        "--nodes",
        "a,b",
        "--node-rank",
        "2",
    ),
]

REFUSALS = [
    *CHOICE,
    *SLURM_PLACE,
    *SLURM_NODES,
    *SLURM_TASKS,
    *SLURM_JOB,
    *SLURM_DEVICES,
    *PBS_FILE,
    *PBS_PLACE,
    *PBS_JOB,
    *OTHERS,
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refused_with_one_line(refusal: Refusal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env_file, nodefile = tmp_path / "changed.env", tmp_path / "nodefile"
    env_file.write_text(changed(refusal))
    options = [*refusal.options]
    if refusal.nodefile is not None:
        nodefile.write_bytes(refusal.nodefile)
        options += ["--nodefile", str(nodefile)]
    status = main(["plan", "--env-file", str(env_file), "--json", *options, "--", "train.py"])
    captured = capsys.readouterr()
    says = refusal.says.replace("--nodefile NODEFILE", f"--nodefile {nodefile}")
    assert (status, captured.out, captured.err) == (64, "", f"entrypoint: {says}\n")


def test_every_refusal_has_a_name_of_its_own() -> None:
    names = [refusal.name for refusal in REFUSALS]
    assert sorted(set(names)) == sorted(names)


def changed(refusal: Refusal) -> str:
    """The recording with its change, as an --env-file holds it."""
    recorded = (plans.RECORDINGS / f"{refusal.recording}.env").read_text().splitlines()
    kept = [line for line in recorded if line.partition("=")[0] not in refusal.change]
    added = [f"{name}={value}" for name, value in refusal.change.items() if value is not None]
    return "\n".join([*kept, *added, ""])
