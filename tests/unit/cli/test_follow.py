"""Following a job from the queue to its end, with stand-ins for what schedulers are asked with."""

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from entrypoint.batch.pbs import login as pbs_login
from entrypoint.cli import follow
from entrypoint.core.errors import BadInput, Unavailable
from entrypoint.plan.profile import Profile, load
from tests.unit.cli.site import SIF

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 60  # s
STEPS = """#!/bin/sh
# Answers with the next file of its own, and with the last for ever; an empty one is a failure.
n=$(cat "$0.n" 2>/dev/null || echo 0)
if [ -e "$0.$((n + 1))" ]; then n=$((n + 1)); echo $n >"$0.n"; fi
[ -s "$0.$n" ] || exit 1
cat "$0.$n"
"""
SHOWN = "JobId=7 JobName=apptrain JobState={state} Reason={reason} Restarts=0 ExitCode={code} NodeList={nodes} StdOut={out} Power= "


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.out = folder / "apptrain 7.out"

    def answers(self, program: str, *texts: str) -> None:
        (self.bin / program).write_text(STEPS)
        (self.bin / program).chmod(0o755)
        for number, text in enumerate(texts, 1):
            (self.bin / f"{program}.{number}").write_text(text)

    def slurm(self, state: str, code: str = "0:0", reason: str = "None", nodes: str = "") -> str:
        return SHOWN.format(state=state, code=code, reason=reason, nodes=nodes, out=self.out)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    for name in ("LEAST", "MOST", "READ"):
        monkeypatch.setattr(follow, name, 0.01)
    return made


def test_the_queue_is_shown_then_the_output_then_the_jobs_status_is_ours(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.out.write_text("first line\nhalf of the second")
    cluster.answers(
        "scontrol",
        cluster.slurm("PENDING", reason="Priority"),
        cluster.slurm("PENDING", reason="Resources"),
        cluster.slurm("RUNNING", nodes="gpu-a[01-02]"),
        cluster.slurm("FAILED", code="3:0", reason="NonZeroExitCode"),
    )
    assert follow.follow("7", "slurm") == 3
    shown = capsys.readouterr()
    assert shown.out == "first line\nhalf of the second"
    assert shown.err.splitlines() == [
        "apptrain: job 7: PENDING (Priority)",
        "apptrain: job 7: PENDING (Resources)",
        "apptrain: job 7: RUNNING on gpu-a[01-02]",
        "apptrain: job 7: FAILED (NonZeroExitCode)",
        "apptrain: job 7 ended with status 3",
    ]


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "75:0", 75),
        ("FAILED", "0:9", 137),
        ("TIMEOUT", "0:0", 1),
        ("NODE_FAIL", "0:0", 1),
        ("CANCELLED", "0:15", 143),
        ("CANCELLED by 1000", "0:0", 143),
        ("COMPLETED", "", 0),
    ],
)
def test_each_end_of_slurm_has_its_status_also_once_only_the_accounting_knows_it(
    cluster: Cluster, state: str, code: str, status: int
) -> None:
    cluster.answers("scontrol", cluster.slurm(state, code))
    assert follow.follow("7", "slurm") == status
    cluster.answers("scontrol", "")
    cluster.answers("sacct", f"{state}|{code}\n")
    assert follow.follow("7_3", "slurm") == status


@pytest.mark.parametrize(
    ("ends", "status"), [(("0:0", "0:0"), 0), (("0:0", "3:0"), 3), (("0:9", "0:0"), 137)]
)
def test_an_array_has_ended_once_all_its_elements_have_and_with_the_first_that_failed(
    cluster: Cluster, ends: tuple[str, str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    over, other = (cluster.slurm("COMPLETED" if end == "0:0" else "FAILED", end) for end in ends)
    runs, waits = cluster.slurm("RUNNING", nodes="n1"), cluster.slurm("PENDING", reason="Resources")
    told = [f"{over}\n{waits}\n", f"{over}\n{runs}\n", f"{other}\n{over}\n"]
    numbered = [text.replace("JobName", f"ArrayTaskId={at} JobName") for at, text in enumerate(told)]
    cluster.answers("scontrol", *numbered)
    assert follow.follow("7", "slurm") == status
    said = capsys.readouterr().err
    assert "PENDING (Resources) (element 0)" in said
    assert "RUNNING on n1 (element 1)" in said
    cluster.answers("scontrol", "")
    cluster.answers("sacct", "".join(f"{'COMPLETED' if end == '0:0' else 'FAILED'}|{end}\n" for end in ends))
    assert follow.follow("7", "slurm") == status


def test_of_an_array_each_element_that_is_told_is_shown_and_one_that_was_forgotten_counts(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def element(number: int, state: str) -> str:
        out = f"{cluster.out}.{number}"
        Path(out).write_text(f"element {number} said this\n")
        record = cluster.slurm(state, nodes="n1").replace(str(cluster.out), out)
        return record.replace("JobName", f"ArrayTaskId={number} JobName") + "\n"

    told = (("RUNNING", "PENDING"), ("PENDING", "RUNNING"), ("RUNNING", "COMPLETED"))
    cluster.answers(
        "scontrol", *(element(0, one) + element(1, two) for one, two in told), element(0, "COMPLETED")
    )
    cluster.answers("sacct", "FAILED|3:0\nRUNNING|0:0\n", "FAILED|3:0\nCOMPLETED|0:0\nCOMPLETED|0:0\n")
    assert follow.follow("7", "slurm") == 3
    assert capsys.readouterr().out == "element 0 said this\nelement 1 said this\n"
    assert (cluster.bin / "sacct.n").read_text() == "2\n", "the accounts tell of an end later"


def test_a_job_that_is_requeued_is_followed_on(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [
        cluster.slurm("RUNNING"),
        cluster.slurm("PENDING", reason="BeginTime"),
        cluster.slurm("COMPLETED"),
    ]
    cluster.answers("scontrol", *texts)
    assert follow.follow("7", "slurm") == 0
    assert "PENDING (BeginTime)" in capsys.readouterr().err


def test_the_output_is_shown_byte_for_byte_though_a_character_was_half_written(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = tmp_path / "log"
    read: dict[Path, int] = {}
    for number in range(1, 5):
        log.write_bytes("█\n".encode()[:number])
        follow._show(log, read)
    log.write_bytes("█\n".encode() + b"\xff")
    follow._show(log, read)
    assert capfdbinary.readouterr().out == "█\n".encode() + b"\xff"


def test_a_long_output_is_never_in_memory_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, shown, size = tmp_path / "log", tmp_path / "shown", 24 << 20
    log.touch()
    os.truncate(log, size)
    with shown.open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        tracemalloc.start()
        try:
            follow._show(log, {})
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert shown.stat().st_size == size
    assert most < 4 * follow.PART


QSTAT = """Job Id: 10.server
    Job_Name = apptrain
    job_state = {state}
    Output_Path = login:{folder}/apptrain.o10
    Variable_List = PBS_O_HOME=/home/alice,PBS_O_WORKDIR={folder},
\tAPPTRAIN_PROFILE=lab
"""


def test_under_pbs_the_run_directorys_log_is_shown(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = QSTAT.format(state="Q", folder=tmp_path) + "    comment = Not Running: no nodes\n"
    over = QSTAT.format(state="F", folder=tmp_path) + "    Exit_status = 271\n"
    cluster.answers("qstat", queued, QSTAT.format(state="R", folder=tmp_path), over)
    log = tmp_path / "runs" / "apptrain-10" / "job.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    assert follow.follow("10.server", "pbs") == 143
    shown = capsys.readouterr()
    assert shown.out == "step 1\n"
    assert "apptrain: job 10.server: queued (Not Running: no nodes)\n" in shown.err


def ran_where(
    cluster: Cluster, variables: str, log: Path, name: str = "apptrain", site: Profile | None = None
) -> None:
    """Follows job 10 of PBS, which has these variables and wrote this log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("step 1\n")
    text = f"Job Id: 10.server\n    Job_Name = {name}\n    Job_Owner = alice@login\n    job_state = F\n    Exit_status = 0\n"
    cluster.answers("qstat", f"{text}    Variable_List = {variables}\n")
    assert follow.follow("10.server", "pbs", site) == 0


@pytest.mark.parametrize("how", ["given", "variable", "option", "path", "server"])
@pytest.mark.parametrize("known", ["to the job", "here"])
def test_under_pbs_the_log_is_looked_for_where_the_profile_has_run_directories(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
    known: str,
) -> None:
    site = tmp_path / "sites" / "lab.yaml"
    site.parent.mkdir()
    (tmp_path / "work").mkdir()
    site.write_text("scheduler: pbs\nclusters: [server]\nscratch: $SCRATCH/${USER}\n")
    monkeypatch.setattr(pbs_login, "CLUSTERS", site.parent if how == "server" else tmp_path)
    said = {
        "variable": f",APPTRAIN_PROFILE={site}",
        "path": ",APPTRAIN_PROFILE=../sites/lab.yaml",
        "option": f",APPTRAIN_ARGS=--profile {site} --device cpu -- x.py --run-dir /no",
    }
    if known == "here":
        monkeypatch.setenv("SCRATCH", f"{tmp_path}/large")
        monkeypatch.setenv("USER", "nobody")
    scratch = f",SCRATCH={tmp_path}/large" if known == "to the job" else ""
    given = f"PBS_O_WORKDIR={tmp_path}/work{scratch}{said.get(how, '')}"
    log = tmp_path / "large" / "alice" / "runs" / "my_job-10" / "job.log"
    ran_where(cluster, given, log, "my job", load(str(site)) if how == "given" else None)
    assert capsys.readouterr().out == "step 1\n"


@pytest.mark.parametrize(
    "given",
    [
        "APPTRAIN_RUN_DIR={run}",
        "APPTRAIN_RUN_DIR=run/x,y,z=1",
        "APPTRAIN_ARGS=--run-dir='{run}' -- x.py,APPTRAIN_RUN_DIR=/no",
        "APPTRAIN_ARGS_FILE={folder}/args",
        "APPTRAIN_CHAIN_FILE={folder}/chain.env",
    ],
    ids=["variable", "relative", "argument", "file", "chain"],
)
def test_under_pbs_a_run_directory_that_was_given_is_the_one(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    run = tmp_path / "run" / "x,y"
    (tmp_path / "args").write_text(f"--run-dir\0{run}\0--\0x.py\0")
    (tmp_path / "chain.env").write_text(f"APPTRAIN_CHAIN=2\0APPTRAIN_RUN_DIR={run}\0")
    variables = f"PBS_O_WORKDIR={tmp_path},{given.format(run=run, folder=tmp_path)}"
    ran_where(cluster, variables, run / "job.log")
    assert capsys.readouterr().out == "step 1\n"


@pytest.mark.parametrize(
    "given",
    [
        "APPTRAIN_PROFILE=/no/lab.yaml",
        "APPTRAIN_ARGS_FILE=/no/args",
        "APPTRAIN_ARGS=--no-such",
        "APPTRAIN_ARGS='",
        "APPTRAIN_CHAIN_FILE=/dev/zero",
    ],
)
def test_under_pbs_a_run_directory_that_cannot_be_told_costs_only_what_is_shown_meanwhile(
    cluster: Cluster, tmp_path: Path, given: str
) -> None:
    ran_where(cluster, f"PBS_O_WORKDIR={tmp_path}/work,{given}", tmp_path / "job.log")


def test_a_job_of_pbs_that_was_refused_shows_its_output_file(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answers("qstat", QSTAT.format(state="F", folder=tmp_path) + "    Exit_status = 64\n")
    (tmp_path / "apptrain.o10").write_text("apptrain: there is no profile\n")
    assert follow.follow("10.server", "pbs") == 64
    assert capsys.readouterr().out == "apptrain: there is no profile\n"


@pytest.mark.parametrize(
    ("said", "status"), [("0", 0), ("255", 255), ("256", 128), ("271", 143), ("-29", 1), ("none", 1)]
)
def test_the_status_of_a_job_of_pbs_is_that_of_a_shell(said: str, status: int) -> None:
    assert pbs_login.exit_status({"Exit_status": said}) == status


def test_a_scheduler_that_no_longer_answers_is_not_waited_for_for_ever(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follow, "SILENCE", 0.1)
    cluster.answers("scontrol", "")
    cluster.answers("sacct", "")
    with pytest.raises(
        Unavailable, match="nobody has told of job 7 for 0 s, it may go on: apptrain submit --follow 7"
    ):
        follow.follow("7", "slurm")
    assert capsys.readouterr().err == "apptrain: job 7: nobody tells of it yet\n"


def test_where_nobody_can_tell_of_a_job_that_is_said_at_once(cluster: Cluster) -> None:
    remedy = "follow a job on a login node of its cluster"
    with pytest.raises(BadInput, match=f"^--follow: neither scontrol nor qstat is in PATH: {remedy}$"):
        follow.follow("7")
    cluster.answers("qstat", "")
    assert follow.find() == "pbs"
    with pytest.raises(BadInput, match=f"^--follow: scontrol is not in PATH: {remedy}$"):
        follow.follow("7", "slurm")


@pytest.mark.parametrize("job", ["", "my_job", "7; rm", "7;", "-x", "7.", "$(id)"])
def test_what_is_no_job_is_refused(job: str) -> None:
    with pytest.raises(BadInput, match="give a job's id"):
        follow.follow(job, "slurm")


def test_a_job_of_another_cluster_goes_on_and_is_cancelled_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    cluster.answers("scontrol", "")
    monkeypatch.setattr(follow, "_follow", interrupted)
    assert follow.follow("7;other") == 130
    assert capsys.readouterr().err == (
        "apptrain: job 7;other goes on; again: apptrain submit --follow '7;other'; "
        "to cancel it: scancel -M other 7\n"
    )


def test_ctrl_c_leaves_the_job_running_and_says_how_to_go_on(cluster: Cluster, tmp_path: Path) -> None:
    """The real command, and the same job again."""
    cluster.answers("scontrol", cluster.slurm("RUNNING"))
    cluster.answers("scancel", "x")
    cluster.out.write_text("it trains\n")
    env = {
        "PATH": f"{cluster.bin}:/usr/bin:/bin",
        "VENV": sys.prefix,
        "HOME": str(tmp_path),
        "PYTHONUNBUFFERED": "1",
    }
    program = [str(CHECKOUT / "apptrain"), "submit", "--follow", "7"]
    with subprocess.Popen(
        program,
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as followed:
        assert followed.stdout is not None
        assert followed.stderr is not None
        assert followed.stdout.readline() == "it trains\n"
        os.killpg(followed.pid, signal.SIGINT)
        assert followed.wait(BOUND) == 130
        assert followed.stderr.read().splitlines() == [
            "apptrain: job 7: RUNNING on ",
            "apptrain: job 7 goes on; again: apptrain submit --follow 7; to cancel it: scancel 7",
        ]
    assert not (cluster.bin / "scancel.n").exists()


def submitted(cluster: Cluster, folder: Path) -> "subprocess.CompletedProcess[str]":
    """A script of that folder, submitted and followed."""
    (folder / "my.py").touch()
    (folder / "image.sif").write_bytes(SIF)
    env = {
        "PATH": f"{cluster.bin}:/usr/bin:/bin",
        "VENV": sys.prefix,
        "APPTRAIN_IMAGE": str(folder / "image.sif"),
    }
    program = [str(CHECKOUT / "apptrain"), "submit", "--cluster", "generic", "--follow", "--", "my.py"]
    return subprocess.run(
        program, cwd=folder, env=env, capture_output=True, text=True, timeout=BOUND, check=False
    )


def test_a_job_that_nobody_could_follow_is_not_submitted(cluster: Cluster, tmp_path: Path) -> None:
    cluster.answers("sbatch", "Submitted batch job 7\n")
    done = submitted(cluster, tmp_path)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("apptrain: --follow: scontrol is not in PATH: ")
    assert not (cluster.bin / "sbatch.n").exists()


def test_a_submission_is_followed_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    cluster.answers("sbatch", "Submitted batch job 7\n")
    cluster.answers("scontrol", cluster.slurm("COMPLETED"))
    cluster.out.write_text("done\n")
    began = time.monotonic()
    done = submitted(cluster, tmp_path)
    assert time.monotonic() - began < BOUND
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["Submitted batch job 7", "done"]
    assert done.stderr.endswith("apptrain: job 7: COMPLETED\napptrain: job 7 ended with status 0\n")
