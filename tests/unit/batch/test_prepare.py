"""What a job's arguments, files, variables and profile become, before it starts."""

import hashlib
import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from entrypoint.batch import staging
from entrypoint.batch.pbs import job as pbs
from entrypoint.batch.prepare import GOES_ON, UNTOLD, prepare
from entrypoint.batch.prepared import PreparedJob
from entrypoint.batch.staging import Bandwidth
from entrypoint.core.errors import BadInput
from entrypoint.job import handover, lock, outcome
from entrypoint.job.handover import Facts
from entrypoint.job.lock import InUse, Lock
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.node import processes
from entrypoint.plan import mistakes
from entrypoint.plan.resolve import resolve
from entrypoint.record.partition import VARIABLE
from entrypoint.run import launch
from tests.unit.host.node import IMAGE_ID, sif

ANSWERED = (
    *(
        "run_dir",
        "attempt",
        "profile",
        "goes_on",
        "tells_end",
        "over",
        "dry_run",
        "starter",
        "stop_at",
        "end_at",
    ),
    *(
        "by_hand",
        "outcome",
        "no_chain",
        "host",
        "line",
        "start",
        "plan",
        "run",
        "launch",
        "chain",
        "export",
        "say",
        "tell",
    ),
    *("stage", "stage_bytes", "stage_needs", "stage_least", "stage_id", "stage_digest"),
    *("stage_by_name", "stage_named", "each_node"),
)
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "apptrain",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "a,b",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
}
PBS = {
    "PBS_JOBID": "10.srv",
    "PBS_JOBNAME": "apptrain",
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_TASKNUM": "1",
    "PBS_NODEFILE": "/spool/10",
    "PBS_QUEUE": "workq",
}
TOLD = """Job Id: 10.srv
    Resource_List.ngpus = 4
    Resource_List.select = 2:ncpus=2:ngpus=2
    Resource_List.walltime = 01:00:00
    queue = workq
    project = _pbs_project_default
    Account_Name = lab
    exec_host = n1/0*2+n2/0*2
    exec_vnode = (n1:ncpus=2:ngpus=2)+(n2:ncpus=2:ngpus=2)
    stime = Sat Nov 21 09:00:00 2026
    Variable_List = GIVEN=a,MORE=
\tb,PBS_O_HOME=/h
"""
BEGAN = 1795251600  # Sat Nov 21 09:00:00 2026, UTC


class Host:
    """The host's half of what is asked."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.inside = {"APPTRAIN_STACK": "/opt/apptrain/stack.json"}
        self.hand = folder / "hand"
        self.work = folder / "work"
        self.home = folder / "home"
        for path in (self.hand, self.work, self.home / "clusters"):
            path.mkdir(parents=True)
        for script in ("train.py", "x.py", "my.py", "a.py", "b.py", "a b.py", "a b"):
            (self.work / script).touch()

    def ask(self, *arguments: str, env: Mapping[str, str] | None = None, **facts: str) -> Facts:
        """What `prepare` answers."""
        known = {"scheduler": "slurm", "home": str(self.home), "image": "/image.sif", "batch": "yes", **facts}
        entries = [*known.items(), *(("arg", word) for word in arguments)]
        handover.write(self.hand / handover.ASK, entries)
        base = SLURM if known["scheduler"] == "slurm" else PBS
        given = {**base, "PWD": str(self.work), **(env or {})}
        handover.write(self.hand / handover.ENVIRONMENT, given.items())
        (self.hand / handover.ANSWER).unlink(missing_ok=True)
        assert prepare(self.hand, self.inside) == 0
        return handover.read(self.hand / handover.ANSWER, ANSWERED)

    def ask_pbs(self, *arguments: str, env: Mapping[str, str] | None = None, **facts: str) -> Facts:
        known = {"told": TOLD, "nodefile": "n1\nn1\nn2\nn2\n", "began": str(BEGAN + 60), "zone": "+0000"}
        return self.ask(*arguments, env=env, **{"scheduler": "pbs", **known, **facts})

    def profile(self, text: str, name: str = "lab") -> str:
        path = self.home / "clusters" / f"{name}.yaml"
        path.write_text(text)
        return str(path)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


OPTIONS: list[tuple[str, str, Any]] = [
    ("run-dir", "{x}/r", lambda answer, host: answer.one("run_dir") == f"{host.folder}/r"),
    ("on-failure", "restart", lambda answer, _: answer.one("goes_on") == "yes"),
    ("max-restarts", "7", lambda _, host: PreparedJob.read(host.hand, 0).bound == 7),
    ("venv", "/venv", lambda answer, _: "/venv" in answer.all("run")),
    ("device", "cpu", lambda answer, _: "--cpu" in answer.all("run")),
    ("master-port", "29500", lambda _, host: PreparedJob.read(host.hand, 0).port_by_hand),
]


def test_an_image_that_is_not_ours_has_to_have_what_we_need(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.inside = {}
    monkeypatch.setattr(mistakes, "NEEDED", ("torch", "no_such_package"))
    with pytest.raises(
        BadInput, match=r"the image /image.sif is not apptrain's and lacks no_such_package \(its Python is "
    ):
        host.ask()


def test_that_the_image_is_not_ours_is_said(host: Host) -> None:
    host.inside = {}
    assert host.ask().all("say") == [
        f"the image is not apptrain's, so apptrain itself comes from {host.home}: no lock says what is in it, driver and "
        "GPUs are not checked against it, and it may lack InfiniBand's libraries"
    ]


@pytest.mark.parametrize(("name", "text", "has"), OPTIONS, ids=[name for name, _, _ in OPTIONS])
@pytest.mark.parametrize("way", ["argument", "two words", "APPTRAIN_ARGS", "APPTRAIN_ARGS_FILE", "variable"])
def test_an_option_means_the_same_whichever_way_it_comes(
    host: Host, name: str, text: str, has: Any, way: str
) -> None:
    text = text.format(x=host.folder)
    arguments: tuple[str, ...] = ()
    env = {}
    if way == "argument":
        arguments = (f"--{name}={text}",)
    elif way == "two words":
        arguments = (f"--{name.replace('-', '_')}", text)
    elif way == "APPTRAIN_ARGS":
        env[way] = shlex.join([f"--{name}", text, "--", "x.py"])
    elif way == "APPTRAIN_ARGS_FILE":
        (host.folder / "args").write_text(f"--{name}\0{text}\0")
        env[way] = str(host.folder / "args")
    else:
        env["APPTRAIN_" + name.upper().replace("-", "_")] = text
    assert has(host.ask(*arguments, env=env), host)


def test_arguments_beat_the_inherited_ones_and_those_the_variables(host: Host) -> None:
    env = {"APPTRAIN_MAX_RESTARTS": "1", "APPTRAIN_ARGS": "--max-restarts 2 --interface eth0"}
    answer = host.ask("--max-restarts=3", env=env)
    assert PreparedJob.read(host.hand, 0).bound == 3
    assert sorted(answer.all("launch")) == ["--interface=eth0", "--max-restarts=3"]
    host.ask(env=env)
    assert PreparedJob.read(host.hand, 1).bound == 2


def test_the_launch_gets_what_is_its_own_word_for_word(host: Host) -> None:
    cmd = ["a b.py", "--lr", "", "--", "--run-dir", "two\nlines"]
    answer = host.ask("--start", "srun", "--run-dir", "r", "--no-python", "--", *cmd)
    assert answer.all("launch") == ["--no-python", "--", *cmd]
    words = answer.all("run")
    assert words[words.index("--script") + 1] == "a b.py"
    assert answer.all("export") == [f"APPTRAIN_RUN_DIR={host.work}/r"]


def test_the_environment_is_read_once_and_removed(host: Host) -> None:
    host.ask()
    assert not (host.hand / handover.ENVIRONMENT).exists()
    with pytest.raises(BadInput, match="environment cannot be read"):
        prepare(host.hand, host.inside)


def test_attempts_go_on_and_the_run_directory_is_made_ready(host: Host) -> None:
    answer = host.ask("--on-failure=restart")
    run = Path(answer.one("run_dir"))
    assert (answer.one("attempt"), run) == ("0", host.work / "runs/apptrain-7")
    assert sorted(path.name for path in run.iterdir()) == [
        "first-attempt",
        "join.key",
        "logs",
        "outcome",
        "unfinished",
    ]
    assert run.stat().st_mode & 0o777 == 0o700
    key = (run / "join.key").read_text()
    assert RunDirectory(run, 0).is_closed(), "to nodes of an earlier attempt"
    (run / "stop").touch()
    RunDirectory(run, 1).close()
    answer = host.ask("--on-failure=restart")
    assert (answer.one("attempt"), (run / "join.key").read_text(), (run / "stop").exists()) == (
        "1",
        key,
        False,
    )
    assert "this run directory has been used before: the run goes on there" in answer.all("tell")


def test_a_wish_to_stop_that_came_while_the_image_was_copied_is_kept(host: Host) -> None:
    """If a node could not have it, the job is prepared once more, without that node."""
    run = Path(host.ask("--nnodes=1:2").one("run_dir"))
    (run / "stop").touch()
    host.ask("--nnodes=1:2", left_out="b", again="0")
    assert (run / "stop").exists()


def test_a_job_that_is_prepared_without_a_node_is_at_the_same_attempt(host: Host) -> None:
    before = host.ask("--nnodes=1:2")
    again = host.ask("--nnodes=1:2", left_out="b", again="0")
    assert (before.one("attempt"), again.one("attempt")) == ("0", "0")
    assert GOES_ON not in again.all("tell")
    assert host.ask("--nnodes=1:2").one("attempt") == "1"
    again = host.ask("--nnodes=1:2", left_out="b", again="1")
    assert again.one("attempt") == "1"
    assert [line for line in again.all("tell") if line.startswith("attempt")] == [], "which was said before"


def test_what_came_to_its_end_without_its_job_script_is_over(host: Host) -> None:
    run = RunDirectory(Path(host.ask("--on-failure=restart").one("run_dir")), 0)
    for place in (0, 1):
        outcome.write(run.outcome(place, None), Outcome(status=0))
    answer = host.ask("--on-failure=restart")
    assert (answer.one("over"), answer.all("tell")[-1]) == ("yes", f"done: {run.path}")
    assert run.unfinished() is None
    assert host.ask("--on-failure=restart").one("over") == ""
    assert run.unfinished() == 1, "which has no outcomes"
    answer = host.ask("--on-failure=restart")
    assert (answer.one("over"), answer.one("attempt"), run.unfinished()) == ("", "2", 2)


LOST_BEFORE = "(the job script was lost before it could say so)"


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (
            {"0.1": Outcome(status=1, node="a", time=2.0, error="lost: nothing was heard from it for 60 s")},
            [f"attempt 0: a: lost: nothing was heard from it for 60 s {LOST_BEFORE}"],
        ),
        (
            {
                "0.0": Outcome(status=9, rank=1, node="a", time=1.0, error="ValueError: x"),
                "0.1": Outcome(status=1, node="a", time=2.0, error="lost: it closed the connection"),
            },
            [f"attempt 0: rank 1 on a: ValueError: x {LOST_BEFORE}"],
        ),
        (
            {},
            [
                f"attempt 0 {UNTOLD}: probably its first node was lost, or its job script was killed",
            ],
        ),
        ({"0.0": Outcome(status=75), "0.1": Outcome(status=75)}, []),
    ],
)
def test_how_an_attempt_ended_whose_job_script_was_lost_is_said_by_the_next_one(
    outcomes: dict[str, Outcome], said: list[str], host: Host
) -> None:
    run = Path(host.ask().one("run_dir"))
    for name, one in outcomes.items():
        outcome.write(run / "outcome" / name, one)
    assert host.ask().all("tell")[3:] == [
        *said,
        "this run directory has been used before: the run goes on there",
    ]
    RunDirectory(run, 1).finish()
    assert len(host.ask().all("tell")) == 4


def test_of_a_job_that_went_on_inside_its_allocation_the_last_attempt_is_told(host: Host) -> None:
    run = Path(host.ask("--on-failure=restart").one("run_dir"))
    killed = Outcome(status=137, rank=1, node="b", error="killed by SIGKILL")
    outcome.write(run / "outcome" / "0.0", killed)
    RunDirectory(run, 1).claim([(0, "a"), (1, "b")], exclusive=True)
    line, _ = host.ask("--on-failure=restart").all("tell")[3:]
    assert line.startswith(f"attempt 1 {UNTOLD}: ")
    outcome.write(
        run / "outcome" / "2.1", Outcome(status=1, node="a", error="lost: it closed the connection")
    )
    line, _ = host.ask("--on-failure=restart").all("tell")[3:]
    assert line == f"attempt 2: a: lost: it closed the connection {LOST_BEFORE}"


def test_what_another_job_has_begun_here_since_is_not_finished_by_the_one_before(tmp_path: Path) -> None:
    RunDirectory(tmp_path, 4).note_begun()
    RunDirectory(tmp_path, 3).finish()
    assert RunDirectory(tmp_path, 3).unfinished() == 4
    RunDirectory(tmp_path, 5).finish()
    assert RunDirectory(tmp_path, 3).unfinished() is None


def test_outcomes_that_cannot_be_read_keep_no_job_from_going_on(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(host.ask().one("run_dir"))
    outcome.write(run / "outcome" / "0.0", Outcome(status=1, node="a", error="no\0thing\x1b"))
    assert f"attempt 0: a: no?thing? {LOST_BEFORE}" in host.ask().all("tell")

    def unreadable(*_: object) -> NoReturn:
        raise OSError

    monkeypatch.setattr(outcome, "of_attempt", unreadable)
    assert len(host.ask().all("tell")) == 4


def test_a_dry_run_makes_nothing(host: Host) -> None:
    answer = host.ask("--dry-run")
    assert (answer.one("dry_run"), answer.one("attempt")) == ("yes", "0")
    assert "--kill-on-bad-exit=0" in answer.all("plan")
    assert "--kill-on-bad-exit=1" in answer.all("start")
    assert not Path(answer.one("run_dir")).exists()
    assert not list(host.hand.glob(f"{handover.STATE}.*"))


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "apptrain-5_3"),
        ({"SLURM_JOB_NAME": "größe/a b;$(x)"}, "gr__e_a_b___x_-7"),
        ({"SLURM_JOB_NAME": ""}, "job-7"),
    ],
)
def test_the_run_directory_is_named_after_the_job(host: Host, env: dict[str, str], name: str) -> None:
    assert host.ask(env=env).one("run_dir") == f"{host.work}/runs/{name}"


def test_a_requeued_job_whose_run_directory_is_gone_begins_anew_and_says_so(host: Host) -> None:
    again = {"SLURM_RESTART_COUNT": "1"}
    answer = host.ask(env=again)
    gone = f"its run directory {answer.one('run_dir')} is not there: it begins anew"
    assert answer.all("say") == [f"WARNING: this job has run before, but {gone}"]
    assert host.ask(env=again).all("say") == []


def test_a_run_directory_says_with_which_attempt_somebody_started_the_run(host: Host) -> None:
    run = host.work / "run"

    def first_after(ask: Callable[..., Facts], restarts: str = "0", **facts: str) -> str:
        ask("--run-dir", str(run), env={"SLURM_RESTART_COUNT": restarts}, **facts)
        return (run / "first-attempt").read_text()

    assert first_after(host.ask, "1", told=" Restarts=1 ") == "0\n"  # its folder was gone
    assert first_after(host.ask, "2", told=" Restarts=2 ") == "0\n"
    assert first_after(host.ask_pbs, told=TOLD.replace("stime", "run_count = 2\n    stime")) == "0\n"
    assert first_after(host.ask_pbs, carried="APPTRAIN_RUN_DIR") == "0\n"
    assert first_after(host.ask, "2", told=" Restarts=0 ") == "4\n"
    assert first_after(host.ask_pbs) == "5\n"


def test_an_array_without_its_index_is_refused_by_name(host: Host) -> None:
    with pytest.raises(BadInput, match="SLURM_ARRAY_TASK_ID is not set in an array job"):
        host.ask(env={"SLURM_ARRAY_JOB_ID": "5"})


# --- Slurm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, ["--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--cpu-bind=none"]),
        (
            {"SLURM_CPUS_PER_TASK": "3", "SLURM_NTASKS_PER_NODE": "", "SLURM_NTASKS": "2"},
            ["--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=3", "--cpu-bind=none"],
        ),
        (
            {"SLURM_JOB_CPUS_PER_NODE": "64(x3),32", "SLURM_NTASKS_PER_NODE": ""},
            ["--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--cpu-bind=none"],
        ),
        (
            {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": ""},
            ["--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=4", "--cpu-bind=cores"],
        ),
        (
            {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "2"},
            ["--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=2", "--cpu-bind=cores"],
        ),
    ],
)
def test_tasks_and_their_cores_come_from_whichever_variables_the_job_has(
    host: Host, env: dict[str, str], words: list[str]
) -> None:
    answer = host.ask(env=env)
    assert answer.all("start")[2:6] == words
    assert answer.one("outcome").endswith("/outcome/%a.%n.%t" if "cores" in words[3] else "/outcome/%a.%n")


@pytest.mark.parametrize(
    ("env", "are_there"),
    [
        ({}, False),
        ({"SLURM_GPUS_PER_NODE": "0"}, False),
        ({"SLURM_GPUS_PER_NODE": "4"}, True),
        ({"SLURM_GPUS_ON_NODE": "1"}, True),
        ({"SLURM_JOB_GPUS": "0,1"}, True),
    ],
)
def test_gpus_are_bound_to_no_task_if_there_are_any(host: Host, env: dict[str, str], are_there: bool) -> None:
    """A Slurm that counts none refuses that word."""
    assert ("--gpu-bind=none" in host.ask(env=env).all("start")) == are_there


@pytest.mark.parametrize(
    ("policy", "goes_on", "tells_end"), [("stop", "", ""), ("requeue", "", "yes"), ("restart", "yes", "yes")]
)
def test_a_step_whose_nodes_go_on_is_not_ended_by_one_that_fails_or_is_lost(
    host: Host, policy: str, goes_on: str, tells_end: str
) -> None:
    answer = host.ask(f"--on-failure={policy}")
    assert (answer.one("goes_on"), answer.one("tells_end")) == (goes_on, tells_end)
    words, survivor = answer.all("start"), f"{host.home}/slurm/survivor.sh"
    assert [word for word in ("--kill-on-bad-exit=0", "--no-kill", survivor) if word in words] == (
        ["--kill-on-bad-exit=0", "--no-kill", survivor] if goes_on else []
    )
    assert ("--kill-on-bad-exit=1" in words) == (not goes_on)
    by_hand = host.ask(f"--on-failure={policy}", batch="")
    assert (by_hand.one("tells_end"), survivor in by_hand.all("start")) == ("", False)


def test_a_file_of_nodes_is_not_used_and_that_is_said(host: Host) -> None:
    answer = host.ask(env={"SLURM_HOSTFILE": "/of the user/hosts"})
    assert answer.all("say") == [
        "SLURM_HOSTFILE=/of the user/hosts is not used: nodes are numbered in the order of SLURM_JOB_NODELIST"
    ]
    assert answer.all("start")[1] == "--nodes=2"


@pytest.mark.parametrize(
    ("told", "queued"),
    [
        (" SubmitTime=2026-11-21T08:00:00 EligibleTime=Unknown StartTime=2026-11-21T09:30:05 ", 5405.0),
        (" SubmitTime=2026-11-21T09:00:01 EligibleTime=Unknown StartTime=2026-11-21T09:00:00 ", 0.0),
        (" SubmitTime=2026-11-21T08:00:00 StartTime=Unknown EndTime=Unknown ", None),
        (" SubmitTime=2026-11-21T99:00:00 StartTime=2026-11-21T09:00:00 ", None),
        ("", None),
    ],
)
def test_how_long_slurms_job_waited(host: Host, told: str, queued: float | None) -> None:
    host.ask(told=told)
    assert PreparedJob.read(host.hand, 0).queued == queued


@pytest.mark.parametrize(
    ("more", "queued"),
    [("", None), ("ctime = Sat Nov 21 08:58:30 2026", 90.0), ("ctime = long ago", None)],
)
def test_how_long_a_job_of_pbs_waited(host: Host, more: str, queued: float | None) -> None:
    host.ask_pbs(told=TOLD.replace("stime", f"{more}\n    stime"))
    assert PreparedJob.read(host.hand, 0).queued == queued


def test_how_long_an_allocation_waited_is_none_of_a_script_by_hand(host: Host) -> None:
    host.ask(told=" SubmitTime=2026-11-21T08:00:00 StartTime=2026-11-21T09:30:05 ", batch="")
    assert PreparedJob.read(host.hand, 0).queued is None
    host.ask_pbs(told=TOLD.replace("stime", "ctime = Sat Nov 21 08:58:30 2026\n    stime"), batch="")
    assert PreparedJob.read(host.hand, 0).queued is None


def test_how_long_a_job_waited_that_pbs_runs_again_is_not_known(host: Host) -> None:
    host.ask_pbs(told=TOLD.replace("stime", "run_count = 2\n    ctime = Sat Nov 21 08:58:30 2026\n    stime"))
    assert PreparedJob.read(host.hand, 0).queued is None


@pytest.mark.parametrize(("told", "restarts"), [(" Restarts=0 ", 0), (" Restarts=3 ", 3), ("", 2)])
def test_how_often_slurm_has_run_the_job_is_what_slurm_says(host: Host, told: str, restarts: int) -> None:
    """The variable may be that of a job from which this one was submitted."""
    host.ask(env={"SLURM_RESTART_COUNT": "2"}, told=told)
    assert PreparedJob.read(host.hand, 0).restarts == restarts


@pytest.mark.parametrize(
    ("arguments", "env", "text"),
    [
        (
            [],
            {"SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2,1"},
            "3 tasks on 2 nodes (2,1): every node needs the same number: --ntasks-per-node=1, or one for each rank",
        ),
        (
            [],
            {"SLURM_GPUS": "a100:6", "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "0"},
            "SLURM_GPUS=a100:6 on 2 nodes, but SLURM_GPUS_ON_NODE=4 on a: every node needs the same number: request --gpus-per-node rather than --gpus",
        ),
        ([], {"SLURM_NTASKS": "two"}, "SLURM_NTASKS=two: must be a number: unset it if you set it yourself"),
        (["--start", "ssh"], {}, "--start ssh: under Slurm tasks start with srun: leave it out"),
        (["--stop-before=60"], {}, "--stop-before 60: under Slurm it is sbatch --signal=B:USR2@SECONDS"),
        (["--on-failure", "retry"], {}, "--on-failure=retry: must be one of stop, requeue, restart"),
        (["--run-dir="], {}, "--run-dir is empty: give DIR or leave it out"),
        ([], {"APPTRAIN_DRY_RUN": "yes"}, "APPTRAIN_DRY_RUN=yes: must be 1 or 0"),
    ],
)
def test_what_cannot_run_under_slurm_is_refused(
    host: Host, arguments: list[str], env: dict[str, str], text: str
) -> None:
    with pytest.raises(BadInput) as refused:
        host.ask(*arguments, env=env)
    assert str(refused.value) == text


# --- where nodes meet whose names resolve to nothing --------------------------------------------------------------

NODE = "NodeName=slinky-0 Arch=x86_64 NodeAddr={} NodeHostName=slinky-0 Version=24.11 "
PODS = {"SLURM_JOB_NODELIST": "slinky-[0-1]"}


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names that resolve."""
    known: set[str] = set()

    def look(name: str, _: object) -> list[object]:
        if name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [name]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    return known


def test_pods_meet_at_slurms_address_of_the_first(host: Host, resolver: set[str]) -> None:
    resolver.add("slinky-0")  # by its own /etc/hosts
    answer = host.ask(env=PODS, first_node=NODE.format("10.0.3.17"))
    assert "APPTRAIN_MASTER_ADDR=10.0.3.17" in answer.all("export")
    said = "slinky-1 does not resolve here: the nodes meet at 10.0.3.17, Slurm's NodeAddr of slinky-0"
    assert said in answer.all("say")
    alone = host.ask(
        "--nnodes=1:2", env=PODS, first_node=NODE.format("10.0.3.17"), left_out="slinky-1", again="0"
    )
    assert (alone.all("host"), [line for line in alone.all("say") if "resolve" in line]) == (["slinky-0"], [])


@pytest.mark.parametrize(
    ("resolved", "told", "env", "arguments"),
    [
        pytest.param(["slinky-1"], NODE.format("10.0.3.17"), {}, [], id="names resolve"),
        pytest.param([], NODE.format("slinky-0"), {}, [], id="the address is the name"),
        pytest.param(
            [], NODE.format("10.0.3.17").replace("=slinky-0 A", "=slinky-7 A"), {}, [], id="another node"
        ),
        pytest.param([], "", {}, [], id="Slurm does not answer"),
        pytest.param([], NODE.format("10.0.3.17"), {"APPTRAIN_MASTER_ADDR": "n"}, [], id="by variable"),
        pytest.param([], NODE.format("10.0.3.17"), {}, ["--master-addr=n"], id="by option"),
        pytest.param(
            [],
            NODE.format("10.0.3.17"),
            {"SLURM_JOB_NODELIST": "slinky-0", "SLURM_JOB_NUM_NODES": "1"},
            [],
            id="alone",
        ),
    ],
)
def test_they_meet_by_the_first_ones_name_or_as_they_were_told_where(
    host: Host,
    resolver: set[str],
    resolved: list[str],
    told: str,
    env: dict[str, str],
    arguments: list[str],
) -> None:
    resolver.update(resolved)
    answer = host.ask(*arguments, env=PODS | env, first_node=told)
    assert [one for one in answer.all("export") if one.startswith("APPTRAIN_MASTER_ADDR")] == []
    assert not [one for one in answer.all("say") if "NodeAddr" in one]


def test_a_profiles_host_suffix_comes_before_slurms_address(host: Host, resolver: set[str]) -> None:
    assert not resolver
    path = host.profile("scheduler: slurm\nhost_suffix: -hsn\n")
    answer = host.ask(env=PODS, first_node=NODE.format("10.0.3.17"), profile=path)
    assert not [one for one in answer.all("export") if one.startswith("APPTRAIN_MASTER_ADDR")]


# --- the profile ------------------------------------------------------------------------------------------------


def test_another_profile_than_the_hosts_is_answered_alone_and_asked_for_again(host: Host) -> None:
    path = host.profile("scheduler: slurm\nscratch: $SCRATCH\n")
    env = {"APPTRAIN_ARGS": "--pro'file' lab", "SCRATCH": str(host.folder / "scratch")}
    answer = host.ask(env=env)
    assert (answer.one("profile"), answer.one("run_dir")) == (path, "")
    answer = host.ask(env=env, profile=path)
    assert answer.one("run_dir") == f"{host.folder}/scratch/runs/apptrain-7"
    assert f"APPTRAIN_PROFILE={path}" in answer.all("export")


@pytest.mark.parametrize("text", ["scratch: $SCRATCH/x", "container: {binds: ['${SCRATCH}:/x']}"])
def test_a_variable_of_the_profile_that_is_not_set_is_refused_by_name(host: Host, text: str) -> None:
    path = host.profile(f"scheduler: slurm\n{text}\n")
    with pytest.raises(BadInput, match="SCRATCH is not set here: set it, or correct the profile"):
        host.ask(profile=path)


def test_a_profile_for_another_scheduler_is_refused(host: Host) -> None:
    path = host.profile("scheduler: pbs\n")
    with pytest.raises(BadInput) as refused:
        host.ask(profile=path)
    assert str(refused.value) == (
        f"the profile {path} is for pbs, and this is a job of slurm: choose another with --profile"
    )


def test_a_profile_of_ones_own_is_shown_inside(host: Host) -> None:
    mine = host.work / "mine.yaml"
    mine.write_text("scheduler: slurm\n")
    words = host.ask("--profile", "mine.yaml", profile=str(mine)).all("run")
    assert words[words.index("the profile") + 1] == str(mine)
    assert words[words.index("the profile's host file") + 1] == str(mine.with_suffix(".host"))
    linked = host.home / "clusters" / "lab.yaml"
    linked.symlink_to(mine)
    words = host.ask("--profile", "lab", profile=str(linked)).all("run")
    assert words[words.index("the profile") + 1] == str(mine)
    assert "the profile's host file" not in words, "it is beside the link, in the checkout"


@pytest.mark.parametrize(
    ("given", "cwd", "found"),
    [
        ("lab", "/w", "{home}/clusters/lab.yaml"),
        ("a/lab", "/w", "/w/a/lab"),
        ("lab.yaml", "/w", "/w/lab.yaml"),
        ("lab.yaml", "/", "/lab.yaml"),
        ("/x/lab.yaml", "/w", "/x/lab.yaml"),
    ],
)
def test_a_profile_is_a_name_in_the_checkout_or_a_path_from_where_the_script_runs(
    host: Host, given: str, cwd: str, found: str
) -> None:
    path = found.format(home=host.home)
    assert host.ask(env={"APPTRAIN_PROFILE": given, "PWD": cwd}).one("profile") == path
    assert host.ask("--profile", given, env={"APPTRAIN_PROFILE": "other", "PWD": cwd}).one("profile") == path


def test_what_a_profile_and_options_name_is_shown_in_the_container(host: Host) -> None:
    path = host.profile(
        "scheduler: slurm\ncontainer: {binds: ['$DATA:/data'], obey_binds: true, wrappers: [/w1, /w2], pass: [A, B_*]}\n"
    )
    words = host.ask(
        "--secrets", "s", "--join-key-file", "/k", "--", "my.py", env={"DATA": "/d"}, profile=path
    ).all("run")
    assert words == [
        *(
            "--bind",
            "the profile's",
            "/d:/data",
            "--bind",
            "the run directory",
            f"{host.work}/runs/apptrain-7",
        ),
        *("--bind", "--join-key-file", "/k", "--bind", "--secrets", f"{host.work}/s", "--obey-binds"),
        *("--wrapper", "/w1", "--wrapper", "/w2", "--pass", "A", "--pass", "B_*", "--script", "my.py"),
    ]
    assert host.ask("--", "-m", "mod").all("run")[3:] == []
    assert "the run directory" not in host.ask("--dry-run", "--run-dir", "new").all("run")
    (host.work / "there").mkdir()
    assert "the run directory" in host.ask("--dry-run", "--run-dir", "there").all("run")


@pytest.mark.parametrize(
    ("arguments", "task"), [((), ""), (("--mode", "rank"), ".%t"), (("--mode", "torchrun"), "")]
)
def test_a_task_has_an_outcome_of_its_own_if_it_is_a_rank(
    host: Host, arguments: tuple[str, ...], task: str
) -> None:
    answer = host.ask(*arguments)
    assert answer.one("outcome") == f"{answer.one('run_dir')}/outcome/%a.%n{task}"


def test_the_contents_of_an_image_are_told_to_its_tasks(host: Host) -> None:
    image = sif(host.folder / "i.sif")
    assert not [word for word in host.ask(image=str(image)).all("export") if VARIABLE in word]
    image.with_suffix(".json").write_text(f'{{"partition_sha256": "abc", "bytes": {image.stat().st_size}}}')
    assert f"{VARIABLE}=abc" in host.ask(image=str(image)).all("export")


def test_a_job_script_is_as_old_as_its_process(host: Host) -> None:
    host.ask(script=str(os.getpid()))
    begun = PreparedJob.read(host.hand, 0).script
    assert begun is not None
    assert abs(begun - time.time() + (processes.age(os.getpid()) or 0)) < 5
    for number, pid in enumerate(("0", "x", ""), 1):
        host.ask(script=pid)
        assert PreparedJob.read(host.hand, number).script is None


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("--", "nothere.py"), "CMD nothere.py does not exist in "),
        (("--", "torchrun", "x.py"), "CMD begins with torchrun: "),
        (("--", "-m", "train", "step=2"), "train: the following arguments are required: --config"),
        (("--run-dir", "of-another", "--", "my.py"), "the run directory .* is that of x.py, not of my.py: "),
        (("--secrets", "open", "--", "my.py"), "--secrets .*/open is open to others "),
        (("--secrets", "/no/such", "--", "my.py"), ""),
        (("--", "/no/such/x.py"), ""),
        (("--no-python", "--", "no-such-program"), ""),
        (("--", "-m", "train", "--config", "digits", "batch_size=7"), ""),
    ],
)
def test_what_no_node_could_run_is_refused_before_any_starts(
    host: Host, command: tuple[str, ...], said: str
) -> None:
    (host.work / "of-another").mkdir()
    (host.work / "of-another/manifest.json").write_text('{"attempts": [{"command": ["x.py"]}]}')
    (host.work / "open").write_text("A=1\n")
    (host.work / "open").chmod(0o644)
    if not said:
        host.ask(*command)
        return
    with pytest.raises(BadInput, match=f"^{said}"):
        host.ask(*command)


# --- copies of the image ----------------------------------------------------------------------------------------


def test_an_image_is_copied_to_where_the_user_says(host: Host) -> None:
    image = sif(host.folder / "i.sif")
    answer = host.ask("--stage", "/fast/", image=str(image))
    size = image.stat().st_size
    assert {name: answer.one(f"stage{name}") for name in ("", "_bytes", "_needs", "_least", "_id", "_digest", "_by_name", "_named")} == {
        "": f"/fast/apptrain-image-{os.getuid()}.slurm-7", "_bytes": str(size), "_needs": str(size + (4 << 30)), "_least": "2",
        "_id": IMAGE_ID, "_digest": "", "_by_name": "yes", "_named": "yes",
    }  # fmt: skip
    assert answer.all("each_node")[-1]
    assert (host.hand / handover.COPIES).read_text() == "0\0\0a\x000\0\0b\0"
    for arguments in ((), ("--stage", "off"), ("--dry-run", "--stage", "/fast")):
        assert host.ask(*arguments, image=str(image)).one("stage") == ""


def test_a_site_says_where_to_and_what_is_compared(host: Host) -> None:
    image = sif(host.folder / "i.sif")
    path = host.profile("scheduler: slurm\nstage: {to: $DISK/x, digest: true}\n")
    ask: dict[str, Any] = {"image": str(image), "profile": path}
    answer = host.ask("--nnodes", "1:2", env={"DISK": "/d"}, **ask)
    assert answer.one("stage").startswith("/d/x/apptrain-image-")
    assert (answer.one("stage_by_name"), answer.one("stage_named"), answer.one("stage_least")) == (
        "",
        "yes",
        "1",
    )
    assert answer.one("stage_digest") == hashlib.sha256(image.read_bytes()).hexdigest()
    image.with_suffix(".json").write_text(f'{{"sif_sha256": "abc", "bytes": {image.stat().st_size}}}')
    assert host.ask(env={"DISK": "/d"}, **ask).one("stage_digest") == "abc"
    assert host.ask("--stage", "off", **ask).one("stage") == ""


@pytest.mark.parametrize(
    ("stage", "figures"),
    [
        ("", (5e9, 1e9, 16, 0.09)),
        ("shared_mb_s: 1", (1e6, 1e9, 16, 0.09)),
        ("node_mb_s: 2, read_percent: 50", (5e9, 2e6, 16, 0.5)),
    ],
)
@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({}, "/tmp/"),
        ({"TMPDIR": "/t"}, "/t/"),
        ({"TMPDIR": "/t", "SLURM_TMPDIR": "/s"}, "/s/"),
        ({"TMPDIR": "t"}, "/tmp/"),
    ],
)
def test_whether_copies_pay_follows_from_the_sites_figures_and_where_they_go_from_the_node(
    host: Host, monkeypatch: pytest.MonkeyPatch, stage: str, figures: Any, env: dict[str, str], folder: str
) -> None:
    asked: list[Any] = []

    def pays(nodes: int, size: int, bandwidth: Bandwidth, width: int, read: float) -> bool:
        asked.append((nodes, size, bandwidth.shared, bandwidth.node, width, read))
        return True

    image = sif(host.folder / "i.sif")
    monkeypatch.setattr(staging, "pays", pays)
    path = host.profile(f"scheduler: slurm\nstage: {{{stage}}}\n")
    answer = host.ask(profile=path, env=env, image=str(image))
    assert answer.one("stage").rpartition("apptrain-image-")[0] == folder
    assert (answer.one("stage_by_name"), answer.one("stage_named")) == ("", "")
    assert asked == [(2, image.stat().st_size, *figures)]


def test_the_newest_checkpoint_of_the_run_has_room_beside_the_image(host: Host) -> None:
    image = sif(host.folder / "i.sif")
    run = host.work / "r/checkpoints"
    for name, size in (("step-00000001", 9 << 30), ("step-00000002", 3 << 30), ("tmp-00000003", 9 << 30)):
        (run / name).mkdir(parents=True)
        with (run / name / "data").open("wb") as file:
            file.truncate(size)
    (run / "step-00000002/folder").mkdir()
    answer = host.ask("--stage", "/fast", "--run-dir", "r", image=str(image))
    assert int(answer.one("stage_needs")) == image.stat().st_size + (6 << 30)


# --- PBS --------------------------------------------------------------------------------------------------------


def test_a_pbs_job_is_what_qstat_says(host: Host) -> None:
    answer = host.ask_pbs()
    assert (answer.all("host"), answer.all("line"), answer.one("starter")) == (
        ["n1", "n2"],
        ["0", "2"],
        "pbsdsh",
    )
    assert "APPTRAIN_NGPUS=2" in answer.all("export")
    assert (int(answer.one("end_at")), int(answer.one("stop_at"))) == (BEGAN + 3600, BEGAN + 3300)
    assert answer.one("run_dir") == f"{host.work}/runs/apptrain-10"
    assert answer.one("no_chain") == "APPTRAIN_CHAIN, how many jobs may follow, is not set"


@pytest.mark.parametrize(
    ("asked", "options", "exported"),
    [
        ("2:ncpus=2:ngpus=2", (), []),
        ("2:ncpus=2:ngpus=2:ompthreads=1", (), ["APPTRAIN_NCPUS=2", "APPTRAIN_OMP_NUM_THREADS=1"]),
        ("2:ncpus=2:ompthreads=1", ("--omp-num-threads=2",), ["APPTRAIN_NCPUS=2"]),
        ("1:ncpus=2:ompthreads=1+1:ncpus=2:ompthreads=2", (), ["APPTRAIN_NCPUS=2"]),
    ],
)
def test_threads_that_chunks_name_are_each_ranks_and_not_the_chunks_cpus(
    host: Host, asked: str, options: tuple[str, ...], exported: list[str]
) -> None:
    """PBS has NCPUS say the same then."""
    told = TOLD.replace("2:ncpus=2:ngpus=2\n", f"{asked}\n")
    answer = host.ask_pbs(*options, told=told)
    assert [word for word in answer.all("export") if "NCPUS" in word or "OMP" in word] == exported


@pytest.mark.parametrize(
    ("stime", "zone", "end"),
    [
        ("Sat Nov 21 10:00:00 2026", "+0100", BEGAN + 3600),
        ("Sat Nov 21 10:00:00 2026", "+0000", BEGAN + 60 + 3600),  # after the script began: of no use
        ("Sat Nov 20 10:00:00 2026", "+0000", BEGAN + 60 + 3600),
        ("soon", "+0000", BEGAN + 60 + 3600),
    ],
)
def test_the_walltime_counts_from_where_the_job_began(host: Host, stime: str, zone: str, end: int) -> None:
    told = TOLD.replace("Sat Nov 21 09:00:00 2026", stime)
    assert int(host.ask_pbs(told=told, zone=zone).one("end_at")) == end


@pytest.mark.parametrize(("gpus", "ranks"), [("ngpus", "2"), ("nothing", "4")])
def test_whole_nodes_come_with_the_gpus_of_the_profile_if_pbs_names_none(
    host: Host, gpus: str, ranks: str
) -> None:
    path = host.profile("scheduler: pbs\nnodes: {gpus: 4, whole: true}\n")
    nodefile = host.work / "nodefile"
    nodefile.write_text("n1\nn2\n")
    env = {"PBS_NODEFILE": str(nodefile)}
    answer = host.ask_pbs("--dry-run", told=TOLD.replace("ngpus", gpus), profile=path, env=env)
    source = "profile:lab.yaml" if gpus == "nothing" else "derived:APPTRAIN_NGPUS"
    for rank in (0, 1):
        assert f"{rank}: {'nproc_per_node':<24} {ranks}  [{source}]" in answer.all("plan")


@pytest.mark.parametrize(
    ("exec_host", "exec_vnode", "gpus"),
    [
        ("n1/0*2+n2/0*2", "(n1:ncpus=2:naccelerators=2)+(n2:ncpus=2:naccelerators=2)", "2"),
        ("n1/0*2+n2/0*2", "(n1:ncpus=2:ngpus=8)+(n2:ncpus=2:ngpus=8)", "8"),
        ("n1-ib0/0*2+n2-ib0/0*2", "(n1:ngpus=2)+(n2:ngpus=2)", "2"),
        ("n1-ib0.x.org/0*2+n2-ib0.x.org/0*2", "(n1:ngpus=2)+(n2:ngpus=2)", "2"),
        ("n1/0*2+n2/0*2", "(n1:ncpus=2)+(n2:ncpus=2)", None),
    ],
)
def test_gpus_are_counted_by_what_was_granted_also_if_the_request_names_none(
    host: Host, exec_host: str, exec_vnode: str, gpus: str | None
) -> None:
    told = f"Job Id: 10.srv\n    exec_host = {exec_host}\n    exec_vnode = {exec_vnode}\n"
    answer = host.ask_pbs(told=told)
    assert [word for word in answer.all("export") if "NGPUS" in word] == [f"APPTRAIN_NGPUS={gpus}"] * bool(
        gpus
    )
    assert answer.all("say") == []


@pytest.mark.parametrize(
    ("exec_host", "exec_vnode"),
    [
        ("a1/0*2+a2/0*2", "(a1:ncpus=2:ngpus=2)+(a2:ncpus=2:ngpus=2)"),
        ("n1/0*2+n2/0*2", "(n1:ncpus=2)+(n2:ncpus=2)"),
        ("n1/0*2", "(n1:ncpus=2:ngpus=2)"),
        ("", ""),
    ],
)
def test_gpus_that_qstat_gives_to_none_of_the_hosts_are_unknown_not_none(
    host: Host, exec_host: str, exec_vnode: str
) -> None:
    told = f"Job Id: 10.srv\n    Resource_List.ngpus = 4\n    exec_host = {exec_host}\n    exec_vnode = {exec_vnode}\n"
    answer = host.ask_pbs(told=told)
    assert [word for word in answer.all("export") if "NGPUS" in word] == []
    assert answer.all("say") == [
        f"how many GPUs each host has is unknown: qstat -f says exec_host={exec_host} and exec_vnode={exec_vnode}, and the "
        "node file n1,n2"
    ]


def test_packed_chunks_are_said_and_their_gpus_added(host: Host) -> None:
    told = "Job Id: 10.srv\n    exec_host = n1/0+n1/1\n    exec_vnode = (n1:ncpus=1:ngpus=2)+(n1:ncpus=1:ngpus=2)\n"
    answer = host.ask_pbs(told=told, nodefile="n1\nn1\n")
    assert "APPTRAIN_NGPUS=4" in answer.all("export")
    assert answer.all("say") == [
        "2 chunks share one host, as they may without -l place=scatter: each host gets one task, with the GPUs of all its chunks"
    ]


@pytest.mark.parametrize(
    ("queue", "grace"),
    [
        ("", "8"),
        ("    kill_delay = 1\n", "1"),
        ("    kill_delay = 4\n", "3"),
        ("    kill_delay = 25\n", "20"),
        ("    kill_delay = 60\n", "55"),
    ],
)
def test_ranks_may_save_until_5_s_before_the_queues_kill_delay_is_over_or_a_fifth_of_it(
    host: Host, queue: str, grace: str
) -> None:
    answer = host.ask_pbs(queue=f"Queue: workq\n{queue}")
    assert f"APPTRAIN_TERM_GRACE={grace}" in answer.all("export")


@pytest.mark.parametrize(
    ("arguments", "env", "text"),
    [
        (
            [],
            {"APPTRAIN_NGPUS": "4"},
            "APPTRAIN_NGPUS=4, but PBS granted 2 GPUs on each host: leave it out",
        ),
        (
            [],
            {"CUDA_VISIBLE_DEVICES": "0,1,2"},
            "CUDA_VISIBLE_DEVICES=0,1,2 names other than the 2 GPUs that PBS granted on each host: leave it out",
        ),
        (["--start=srun"], {}, "--start srun: must be one of pbsdsh, pbs_tmrsh, mpiexec, ssh"),
        (
            [],
            {"APPTRAIN_STOP_BEFORE": "soon"},
            "APPTRAIN_STOP_BEFORE=soon: must be seconds; 0 leaves it out",
        ),
        (
            ["--stop-before=3600"],
            {},
            "--stop-before 3600, but the walltime is 3600 s: give less, or request more",
        ),
        (
            [],
            {"APPTRAIN_ON_FAILURE": "pray"},
            "APPTRAIN_ON_FAILURE=pray: must be one of stop, requeue, restart",
        ),
    ],
)
def test_what_cannot_run_under_pbs_is_refused(
    host: Host, arguments: list[str], env: dict[str, str], text: str
) -> None:
    with pytest.raises(BadInput) as refused:
        host.ask_pbs(*arguments, env=env)
    assert str(refused.value) == text


def test_a_request_for_no_gpus_gets_none(host: Host) -> None:
    told = "Job Id: 10.srv\n    Resource_List.ngpus = 0\n    exec_host = n1/0+n2/0\n    exec_vnode = (n1:ncpus=2)+(n2:ncpus=2)\n"
    assert "APPTRAIN_NGPUS=0" in host.ask_pbs(told=told).all("export")


def test_a_server_that_does_not_answer_is_said(host: Host) -> None:
    answer = host.ask_pbs(told="")
    assert answer.all("say") == ["qstat -f 10.srv does not answer: walltime and GPUs are unknown"]
    assert (answer.one("end_at"), [w for w in answer.all("export") if "NGPUS" in w]) == ("", [])


def test_a_task_of_pbs_runs_where_the_job_was_submitted(host: Host) -> None:
    """PBS itself starts the job script in HOME."""
    (host.folder / "submitted").mkdir()
    (host.folder / "submitted/there.py").touch()
    env = {"PBS_O_WORKDIR": str(host.folder / "submitted")}
    host.ask_pbs("--", "there.py", env=env)
    with pytest.raises(BadInput, match=rf"^CMD x.py does not exist in {host.folder}/submitted: "):
        host.ask_pbs("--", "x.py", env=env)
    with pytest.raises(BadInput, match=rf"^CMD there.py does not exist in {host.work}: "):
        host.ask("--", "there.py", env={**env, "PBS_JOBID": "7"})


def test_the_next_job_of_a_chain_asks_for_the_same_and_gets_what_this_one_got(host: Host) -> None:
    env = {
        "APPTRAIN_CHAIN": "2",
        "GIVEN": "a",
        "MORE": "b",
        "OWN": "c",
        "EARLIER": "d",
        "APPTRAIN_DEVICE": "cpu",
    }
    answer = host.ask_pbs("--start", "ssh", "--no-python", "--", "x.py", "a,b", env=env, carried="EARLIER")
    assert answer.all("chain") == [
        *(
            "-N",
            "apptrain",
            "-l",
            "select=2:ncpus=2:ngpus=2",
            "-l",
            "walltime=01:00:00",
            "-q",
            "workq",
            "-A",
            "lab",
        )
    ]
    assert (host.hand / "chain.args").read_text().split("\0") == [
        "--no-python",
        "--start=ssh",
        "--",
        "x.py",
        "a,b",
        "",
    ]
    entries = dict(entry.split("=", 1) for entry in (host.hand / "chain.env").read_text().split("\0")[:-1])
    run = answer.one("run_dir")
    assert entries == {
        "APPTRAIN_CHAIN": "1",
        "APPTRAIN_DEVICE": "cpu",
        "APPTRAIN_RUN_DIR": run,
        "APPTRAIN_ARGS_FILE": f"{run}/chain.args",
        "GIVEN": "a",
        "MORE": "b",
        "EARLIER": "d",
    }
    assert (host.hand / "chain.env").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("Output_Path = n0:/work/apptrain.o10\n    Error_Path = n0:/work/apptrain.e10", []),
        ("Output_Path = n0:/work/logs/10.srv.OU", ["-o", "n0:/work/logs/"]),
        ("Output_Path = n0:/work/logs/of this run", ["-o", "n0:/work/logs/of this run"]),
        ("Error_Path = n0:/work/logs/errors", ["-e", "n0:/work/logs/errors"]),
    ],
)
def test_the_next_job_has_an_output_of_its_own_or_the_one_that_was_given(
    host: Host, told: str, words: list[str]
) -> None:
    answer = host.ask_pbs(env={"APPTRAIN_CHAIN": "1"}, told=f"{TOLD}    {told}\n")
    assert [word for word in answer.all("chain") if word in ("-o", "-e") or "n0:" in word] == words


def test_the_next_job_asks_for_no_sum_of_what_its_chunks_name(host: Host) -> None:
    """qsub refuses these beside select, also of resources that only this site has."""
    told = TOLD.replace("2:ncpus=2:ngpus=2\n", "1:ncpus=2:gpus_a=2:jobfs=1gb+1:ncpus=2\n")
    sums = "".join(
        f"    Resource_List.{one}\n" for one in ("gpus_a = 2", "jobfs = 1gb", "filesystems = home")
    )
    answer = host.ask_pbs(env={"APPTRAIN_CHAIN": "1"}, told=told.replace("    queue", f"{sums}    queue"))
    asked = [word for word in answer.all("chain") if "=" in word]
    assert asked == ["select=1:ncpus=2:gpus_a=2:jobfs=1gb+1:ncpus=2", "walltime=01:00:00", "filesystems=home"]


@pytest.mark.parametrize(
    ("env", "told", "why"),
    [
        ({"APPTRAIN_CHAIN": "0"}, TOLD, "APPTRAIN_CHAIN, how many jobs may follow, is 0"),
        ({"APPTRAIN_CHAIN": "x"}, TOLD, "APPTRAIN_CHAIN, how many jobs may follow, is x"),
        (
            {"APPTRAIN_CHAIN": "1", "PBS_ARRAY_INDEX": "3"},
            TOLD,
            "an element of a job array cannot be submitted by itself",
        ),
        ({"APPTRAIN_CHAIN": "1"}, "", "qstat did not say what this job has asked for"),
    ],
)
def test_why_no_job_follows(host: Host, env: dict[str, str], told: str, why: str) -> None:
    answer = host.ask_pbs(env=env, told=told)
    assert (answer.one("no_chain"), answer.all("chain"), (host.hand / "chain.env").exists()) == (
        why,
        [],
        False,
    )


def test_hosts_of_different_spelling_are_one(host: Host) -> None:
    answer = host.ask_pbs(nodefile="n1\nn1.lab.org\nN2\nn2\n")
    assert (answer.all("host"), answer.all("line")) == (["n1", "N2"], ["0", "2"])


@pytest.mark.parametrize(("job", "kept"), [("10.srv", False), ("", True)])
def test_a_task_has_the_scripts_environment_and_pbs_own_gpus_of_its_host(job: str, kept: bool) -> None:
    own = {
        "PBS_JOBCOOKIE": "secret",
        "PBS_TASKNUM": "1",
        "TMPDIR": "/t",
        "APPTRAIN_ARGS": "-- x",
        "A-B": "no",
    }
    env = {"PATH": "/bin", "OF_LOGIN": "two\nlines", "CUDA_VISIBLE_DEVICES": "1", **own}
    env |= {"PBS_JOBID": job} if job else {}
    found = pbs.task_environment(env, {"APPTRAIN_RUN_DIR": "/r"})
    expected = {"PATH": "/bin", "OF_LOGIN": "two\nlines", "APPTRAIN_RUN_DIR": "/r"}
    expected |= {"PBS_JOBID": job} if job else {}
    assert found == expected | ({"CUDA_VISIBLE_DEVICES": "1"} if kept else {})


def used(host: Host) -> tuple[RunDirectory, Lock]:
    """A run directory in which job 7 runs, and its lock."""
    host.ask("--on-failure=restart", "--run-dir", str(host.folder / "r"))
    run = RunDirectory(host.folder / "r", 0)
    run.claim([(0, "a"), (1, "b")], exclusive=False)
    run.add_restart()
    run.add_planned_end()
    run.ask_to_stop()
    said: list[str] = []
    holder = Lock(run.path, lock.this_process("7"), said.append)
    holder.take()
    return run, holder


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_a_second_job_changes_nothing_in_the_run_directory_of_one_that_runs(host: Host) -> None:
    run, holder = used(host)
    before = files_in(run.path)
    again = ("--on-failure=restart", "--run-dir", str(run.path))
    with pytest.raises(InUse, match=f"^the run directory {run.path} is in use by job 7 ") as refused:
        host.ask(*again, env={"SLURM_JOB_ID": "8"})
    assert refused.value.status == 64
    with pytest.raises(InUse):
        host.ask_pbs(*again)
    host.ask("--dry-run", *again, env={"SLURM_JOB_ID": "8"})
    assert files_in(run.path) == before
    assert host.ask(*again).one("attempt") == "1", "the same job, which the scheduler runs again"
    holder.release()
    assert host.ask(*again, env={"SLURM_JOB_ID": "8"}).one("attempt") == "2"


def test_a_job_follows_one_that_was_lost_with_its_node_and_says_so(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = used(host)
    there = json.loads((run.path / "lock").read_text())
    (run.path / "lock").write_text(json.dumps(there | {"where": "another boot", "node": "a"}))
    monkeypatch.setattr(lock, "LEASE", 0.1)
    monkeypatch.setattr(lock, "GLANCE", 0.01)
    answer = host.ask("--run-dir", str(run.path), env={"SLURM_JOB_ID": "8"})
    (line,) = answer.all("say")
    assert line.startswith(f"job 7 (process {os.getpid()} on a, since ")
    assert line.endswith(f" has the run directory {run.path}: waiting 0.1 s for a sign of life")
    assert not (run.path / "lock").exists()


def test_a_dry_run_of_pbs_shows_each_hosts_plan(host: Host) -> None:
    nodefile = host.folder / "nodes"
    nodefile.write_text("n1\nn2\n")
    env = {"PBS_NODEFILE": str(nodefile), "CUDA_VISIBLE_DEVICES": "0,1"}
    lines = host.ask_pbs("--dry-run", "--", "x.py", env=env, nodefile="n1\nn2\n").all("plan")
    for rank, name in enumerate(("n1", "n2")):
        mine = [line.removeprefix(f"{rank}: ") for line in lines if line.startswith(f"{rank}: ")]
        assert f"{'rendezvous.local_addr':<24} {name}  [derived:PBS_NODEFILE]" in mine
        assert mine[-1].endswith(" x.py")


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (
            "mpiexec (OpenRTE) 4.1.4",
            ["-n", "2", "--host", "n1,n2", "--map-by", "ppr:1:node", "--bind-to", "none"],
        ),
        ("HYDRA build details:\n    Version: 4.2.1", ["-n", "2", "-ppn", "1", "-hosts", "n1,n2"]),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", ["-n", "2", "-ppn", "1", "-hosts", "n1,n2"]),
        (
            "a module says hello\nmpiexec version 1.8.0 revision 0",
            ["-n", "2", "--ppn", "1", "--hosts", "n1,n2", "--cpu-bind", "none"],
        ),
        ("PALS 1.4.0", ["-n", "2", "--ppn", "1", "--hosts", "n1,n2", "--cpu-bind", "none"]),
    ],
)
def test_each_mpiexec_has_its_own_words(host: Host, says: str, words: list[str]) -> None:
    assert host.ask_pbs("--start=mpiexec", mpiexec=says).all("start") == words
    with pytest.raises(
        BadInput, match="mpiexec says of itself: slurm-wlm: Open MPI, MPICH or PALS is needed"
    ):
        host.ask_pbs("--start=mpiexec", mpiexec="slurm-wlm")
    assert host.ask_pbs(mpiexec="slurm-wlm").all("start") == []


@pytest.mark.parametrize(
    ("nodes", "refused"),
    [(("{here}", "other"), True), (("{here}.a.org", "{here}.b.org"), False), (("far", "away"), False)],
)
def test_a_task_that_mpiexec_started_on_the_host_of_another_is_refused(
    tmp_path: Path, nodes: tuple[str, str], refused: bool
) -> None:
    here = os.uname().nodename.partition(".")[0]
    names = [name.format(here=here) for name in nodes]
    (tmp_path / "nodes").write_text("\n".join(names))
    env = {**PBS, "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_NODENUM": "1", "PBS_TASKNUM": "2"}
    env |= {"APPTRAIN_HOSTNAME": names[1], "APPTRAIN_DEVICE": "cpu"}
    found, _ = resolve(env, {}, ["-m", "x"], hostname=None)
    launch.check_place(found, env)  # which pbsdsh has checked itself
    with pytest.raises(BadInput, match=f"node 1, on {here}, which is node 0") if refused else nullcontext():
        launch.check_place(found, {**env, "APPTRAIN_PLACE": "1"})
