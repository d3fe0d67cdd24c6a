"""What is refused, listed like features: every mistake ends with exit 64 and one line that names the input,
what was found and what to do. Each starts from a recorded environment and changes it."""

from pathlib import Path

import pytest

from entrypoint.cli.main import main
from tests.unit import plans
from tests.unit.schedulers.refusals import (
    CHOICE,
    HOSTNAME,
    NAMES,
    ONE_A_LINE,
    OWN,
    PBS_TASK,
    SLURM_DEVICES,
    SLURM_JOB,
    SLURM_NODES,
    SLURM_PLACE,
    SLURM_TASKS,
    TO_GPUS_OR_CPU,
    Refusal,
    embedded,
    manual,
    pbs,
)

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
        says="PBS_NODEFILE / cannot be read (it is a directory, not a regular file): copy the file in the job script to where "
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
        "cuda on an embedded node without GPUs",
        "--device cuda, but job embedded-4242 was granted no GPU on this node: give --gpus-per-node N, or give "
        "--device cpu to train on CPUs",
        APPTRAIN_DEVICE="cuda",
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
    assert (status, captured.out, captured.err) == (64, "", f"apptrain: {says}\n")


def test_every_refusal_has_a_name_of_its_own() -> None:
    names = [refusal.name for refusal in REFUSALS]
    assert sorted(set(names)) == sorted(names)


def changed(refusal: Refusal) -> str:
    """The recording with its change, as an --env-file holds it."""
    recorded = (plans.RECORDINGS / f"{refusal.recording}.env").read_text().splitlines()
    kept = [line for line in recorded if line.partition("=")[0] not in refusal.change]
    added = [f"{name}={value}" for name, value in refusal.change.items() if value is not None]
    return "\n".join([*kept, *added, ""])
