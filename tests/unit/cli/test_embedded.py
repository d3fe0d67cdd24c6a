"""The embedded scheduler: what it says before its nodes start and after they end; tests/embedded has its jobs."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.cli import embedded
from entrypoint.core import checkout
from entrypoint.core.errors import BadInput
from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome
from entrypoint.job.rundir import RunDirectory
from entrypoint.plan import passed
from entrypoint.ranks import output

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 30  # s
OURS = """
import sys
from entrypoint.cli import embedded
from entrypoint.job.outcome import Outcome
embedded._Nodes._attempt = lambda self, attempt: (Outcome(status=0), attempt)
sys.exit(embedded.main(sys.argv[1:]))
"""
"""With nodes that end at once."""
NEXT = f"apptrain: next: {CHECKOUT}/apptrain run -- my_script.py"
NO_CMD = "apptrain: no CMD given: trains the reference job, as apptrain demo; your own: apptrain run -- my_script.py"


def said(folder: Path, *arguments: str, status: int = 0, **env: str) -> list[str]:
    """By `apptrain run` in this folder, whose nodes end with this status."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", OURS.replace("status=0", f"status={status}"), *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    return done.stderr.splitlines()


def started(folder: Path) -> list[str]:
    return [
        f"apptrain: 2 nodes on this machine, run directory {folder}/run",
        f"apptrain: to follow it from elsewhere: tail -f {folder}/run/job.log",
    ]


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        ((), [NO_CMD], [NEXT]),
        (("--",), [NO_CMD], [NEXT]),
        (("--", "my_script.py"), [], []),
        (("--", "-m", "train", "--config", "digits", "steps=2"), [], [NEXT]),
        (("--doctor",), [], []),
    ],
)
def test_the_reference_job_is_named_where_nobody_said_what_to_run_and_the_next_step_behind_it(
    arguments: tuple[str, ...], first: list[str], last: list[str], tmp_path: Path
) -> None:
    (tmp_path / "my_script.py").touch()
    assert said(tmp_path, "--run-dir", "run", *arguments) == [*first, *started(tmp_path), *last]


class Task:
    """A process that ends with this status when it has been asked `polls` times, or is killed."""

    def __init__(self, polls: int, status: int = 0, state: str = "S") -> None:
        self.polls, self.status, self.state = polls, status, state
        self.pid = id(self)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.polls -= 1
        if self.returncode is None and self.polls < 0:
            self.returncode = self.status
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9

    def wait(self, seconds: float) -> None:
        assert (self.returncode, seconds) == (-9, embedded.TO_DIE)


class Clock:
    """One that never waits."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


NEVER = 10**9
LOST = "the launch of 127.0.0.1 (process {}) "


@pytest.mark.parametrize(
    ("tasks", "signals", "may_restart", "seconds", "why"),
    [
        ([Task(6000)], [], False, 300, ""),
        ([Task(6000), Task(6000)], [], False, 300, ""),
        ([Task(NEVER)], [15], False, 35, "did not end with the job"),
        ([Task(NEVER), Task(20, status=1)], [], False, 206, "did not end with the job"),
        ([Task(6000), Task(20, status=1)], [], True, 300, ""),
        ([Task(NEVER), Task(20)], [], True, 206, "did not end with the job"),
        ([Task(NEVER, state="T"), Task(20, status=1)], [], True, 11, "was stopped by a signal"),
        ([Task(NEVER, state="T")], [2], False, 10, "was stopped by a signal"),
        ([Task(6000, state="T")], [], False, 300, ""),
    ],
    ids=[
        "one",
        "two",
        "signal",
        "failure",
        "restart",
        "restart-done",
        "stopped",
        "stopped-signal",
        "all-stopped",
    ],
)
def test_tasks_are_killed_that_do_not_end_with_the_job(
    tasks: list[Task],
    signals: list[int],
    may_restart: bool,
    seconds: float,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    clock, lines = Clock(), list[str]()
    monkeypatch.setattr(embedded, "time", clock)
    states = {task.pid: task.state for task in tasks}
    monkeypatch.setattr("entrypoint.node.processes.state", states.__getitem__)
    job = embedded.LocalJob(
        nodes=2,
        tasks_per_node=1,
        gpus_per_node=None,
        run_dir=tmp_path,
        job_id="1",
        launch=(),
        may_restart=may_restart,
    )
    nodes: Any = embedded._Nodes(job)
    nodes.tasks, nodes.signals, nodes._say = tasks, signals, lines.append
    nodes._wait([tmp_path / f"outcome/0.{index}" for index in range(len(tasks))])
    killed = LOST.format(tasks[0].pid) + f"{why}, and was killed"
    assert lines == ([killed] if why else [])
    assert clock.now == pytest.approx(seconds, abs=1)
    assert (nodes.ended["0"].status, nodes.ended["0"].error) == ((1, killed) if why else (0, ""))


def test_a_task_that_could_say_nothing_is_named_with_what_ended_it() -> None:
    told = [embedded._of_task("the launch of 127.0.0.1", code) for code in (-9, 3, 0)]
    assert [(ended.status, ended.error) for ended in told] == [
        (137, "the launch of 127.0.0.1 was killed by SIGKILL"),
        (3, "the launch of 127.0.0.1 ended with status 3"),
        (0, ""),
    ]


def test_the_line_that_follows_a_job_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "-x y'\"$(touch pwn)`id`\nz"
    folder.mkdir()
    (line,) = (line for line in said(folder, "--run-dir", "run") if "to follow" in line)
    pasted = ["bash", "-c", f"printf %s {line.partition('tail -f ')[2]}"]
    assert subprocess.check_output(pasted, text=True, timeout=BOUND) == f"{folder}/run/job.log"


def test_after_a_failure_no_next_step_is_named(tmp_path: Path) -> None:
    ended = ["apptrain: the job ended with status 3"]
    assert said(tmp_path, "--run-dir", "run", status=3) == [NO_CMD, *started(tmp_path), *ended]


def test_the_next_step_is_spelled_as_it_works_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(CHECKOUT)
    assert checkout.apptrain() == "./apptrain"
    (tmp_path / "apptrain").symlink_to(CHECKOUT / "apptrain")
    assert checkout.apptrain() == "apptrain"


def test_each_node_gets_gpus_of_its_own(tmp_path: Path) -> None:
    job = embedded.LocalJob(
        nodes=2, tasks_per_node=1, gpus_per_node=2, run_dir=tmp_path, job_id="embedded-1", launch=()
    )
    envs = [embedded.node_env(job, node, 0, 0, {}, progress=False) for node in (0, 1)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["0,1", "2,3"]
    theirs = {"CUDA_VISIBLE_DEVICES": "3, 5,GPU-a,7,8"}
    envs = [embedded.node_env(job, node, 0, 0, theirs, progress=False) for node in (0, 1)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["3,5", "GPU-a,7"]
    embedded._check_devices(job, theirs)
    for few, count in (("3,5,6", 3), ("3,-1,5,6,7", 1), ("", 0)):
        with pytest.raises(
            BadInput, match=f"^--gpus-per-node 2 on 2 nodes, and .* names {count} of the 4 GPUs"
        ):
            embedded._check_devices(job, {"CUDA_VISIBLE_DEVICES": few})


def test_a_signal_reaches_the_tasks_that_run() -> None:
    got: dict[str, list[int]] = {"runs": [], "has ended": []}
    tasks = [
        SimpleNamespace(poll=lambda: None, send_signal=got["runs"].append),
        SimpleNamespace(poll=lambda: 0, send_signal=got["has ended"].append),
    ]
    nodes: Any = SimpleNamespace(tasks=tasks)
    embedded._Nodes._pass_on(nodes, 15)
    assert got == {"runs": [15], "has ended": []}


# --- what is asked for --------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with my.py, and no variable that chooses."""
    for name in [name for name in os.environ if name.startswith(("APPTRAIN_", "SLURM_", "PBS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").touch()
    return tmp_path


def asked(*argv: str, **env: str) -> embedded.LocalJob:
    return embedded._job(argv, {"PATH": "/usr/bin:/bin", **env}, 42)


def test_what_is_asked_for_without_a_word_is_the_reference_job_on_two_nodes(bare: Path) -> None:
    job = asked()
    assert (job.nodes, job.names, job.tasks_per_node, job.gpus_per_node) == (
        2,
        ["127.0.0.1", "127.0.0.2"],
        1,
        None,
    )
    assert re.fullmatch(r"\d{8}-\d{6}-42", job.job_id)
    assert (job.run_dir, job.launch) == (bare / f"runs/embedded-{job.job_id}", ("--",))
    assert (job.outcome_per_task, job.may_restart, job.port_by_hand) == (False, False, False)
    assert (job.without_cmd, job.is_demo, job.term_grace) == (True, True, 25.0)


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        ("--nodes 254 -- my.py", {"nodes": 254, "without_cmd": False, "is_demo": False}),
        ("--nodes 1 --device cpu -- my.py --nodes 3", {"nodes": 1, "launch": ("--device", "cpu", "--", "my.py", "--nodes", "3")}),
        ("--tasks-per-node 2 -- my.py", {"tasks_per_node": 2, "outcome_per_task": True}),
        ("--gpus-per-node 0 -- my.py", {"gpus_per_node": 0}),
        ("--gpus-per-node 3 -- my.py", {"gpus_per_node": 3}),
        ("--term-grace 3 --on-failure restart -- my.py", {"term_grace": 3.0, "may_restart": True}),
        ("--on-failure requeue --master-port 29500 -- my.py", {"may_restart": False, "port_by_hand": True}),
        ("-- -m train --config digits", {"without_cmd": False, "is_demo": True}),
        ("-- -m train --config digits steps=2", {"without_cmd": False, "is_demo": True}),
        ("--doctor", {"without_cmd": False, "is_demo": False}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("bare")
def test_a_job_is_what_its_options_say(argv: str, values: dict[str, Any]) -> None:
    job = asked(*argv.split())
    assert {name: getattr(job, name) for name in values} == values


def test_the_run_directory_is_that_of_the_option_else_of_the_variable(bare: Path) -> None:
    assert asked("--run-dir", "a", "--", "my.py", APPTRAIN_RUN_DIR="b").run_dir == bare / "a"
    assert asked("--", "my.py", APPTRAIN_RUN_DIR="b").run_dir == bare / "b"
    assert asked("--run-dir", "/x", "--", "my.py").run_dir == Path("/x")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--nodes 255", "--nodes 255: 254 at most on one machine"),
        ("--nodes 0", "--nodes=0: must be a number from 1"),
        ("--nodes=-1", "--nodes=-1: must be a number from 1"),
        ("--nodes a,b", "--nodes=a,b: apptrain run takes a number, its nodes are on this machine; on others: apptrain launch --nodes a,b --node-rank I on each"),
        ("--nodes n[1]", "--nodes=n[1]: apptrain run takes a number, its nodes are on this machine; on others: apptrain launch --nodes n[1] --node-rank I on each"),
        ("--tasks-per-node 0", "--tasks-per-node=0: must be a number from 1"),
        ("--tasks-per-node a,b", "--tasks-per-node=a,b: must be a number from 1"),
        ("--gpus-per-node x", "--gpus-per-node=x: must be a number from 0"),
        ("--node 3 -- my.py", "unrecognized arguments: --node 3: did you mean --nodes or --node-rank?"),
        ("-- nothere.py", "CMD nothere.py does not exist in {}: did you mean my.py?"),
        ("-- -m train step=2", "train: the following arguments are required: --config: see python -m train --help"),
        ("--secrets no -- my.py", "--secrets no cannot be read (No such file or directory): give a file with one NAME=VALUE a line, in your home or another folder that the image shows"),
        ("--run-dir of-another -- my.py", "the run directory {}/of-another is that of x.py, not of my.py: give another with --run-dir, or, where that is its new name, remove {}/of-another/manifest.json"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_before_anything_is_made(bare: Path, argv: str, said: str) -> None:
    (bare / "of-another").mkdir()
    (bare / "of-another/manifest.json").write_text('{"attempts": [{"command": ["x.py"]}]}')
    before = sorted(bare.rglob("*"))
    with pytest.raises(BadInput) as refused:
        embedded.check(argv.split())
    assert str(refused.value) == said.replace("nothere.py does not exist in {}: did you mean my.py?", f"nothere.py does not exist in {bare}: check the spelling; a module is given as -m NAME, a program that is no Python script needs --no-python").replace("{}", str(bare))  # fmt: skip
    assert sorted(bare.rglob("*")) == before


@pytest.mark.usefixtures("bare")
def test_a_variable_that_no_node_would_get_since_it_is_misspelled_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^APPTRAIN_NPROC_PER_NOD is no variable of apptrain: did you mean "):
        asked("--", "my.py", APPTRAIN_NPROC_PER_NOD="2")


@pytest.mark.usefixtures("bare")
def test_a_malformed_name_of_what_is_to_pass_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^APPTRAIN_PASS: A,B is not NAME or PREFIX_\*: "):
        asked("--", "my.py", APPTRAIN_PASS="A,B")


@pytest.mark.parametrize("variable", ["APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"])
def test_what_an_image_of_others_lacks_is_told_before_anything_is_made(tmp_path: Path, variable: str) -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'src'}", variable: "/own.sif"}
    module = ("-m", "entrypoint.cli.embedded", "--device", "cpu", "--", "-m", "mine")
    argv = [sys.executable, "-S", "-P", *module]
    ended = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 64
    begin, _, rest = ended.stderr.partition("make one that has them")
    assert begin == (
        "apptrain: the image /own.sif is not apptrain's and lacks torch, psutil (its Python is "
        f"{sys.executable}): "
    )
    assert rest.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("bare")
def test_all_options_are_in_the_whole_help(capsys: pytest.CaptureFixture[str]) -> None:
    for word, there in (("--help-all", True), ("--help", False)):
        with pytest.raises(SystemExit) as ended:
            asked("--nodes", "x", word)
        shown = capsys.readouterr().out
        assert (ended.value.code, "--hang-timeout S" in shown, "--tasks-per-node N" in shown) == (
            0,
            there,
            True,
        )


# --- the environment of a task ------------------------------------------------------------------------------


def local_job(folder: Path, **changes: Any) -> embedded.LocalJob:
    given = {
        "nodes": 2,
        "tasks_per_node": 1,
        "gpus_per_node": None,
        "run_dir": folder,
        "job_id": "e-1",
        "launch": (),
    }
    return embedded.LocalJob(**{**given, **changes})


def test_a_task_is_told_its_place_and_gets_what_passes_and_our_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(9)))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    env = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "APPTRAIN_DEVICE": "cpu",
        "APPTRAIN_RUN_DIR": "x",
        "MINE": "1",
        "SLURM_JWT": "s",
    }
    job = local_job(tmp_path, nodes=3, tasks_per_node=2, launch=("--",))
    assert embedded.node_env(job, 1, 1, 4, env, progress=False) == {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "APPTRAIN_DEVICE": "cpu",
        "APPTRAIN_EMBEDDED_JOB_ID": "e-1",
        "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.[1-3]",
        "APPTRAIN_EMBEDDED_NODENAME": "127.0.0.2",
        "APPTRAIN_EMBEDDED_TASKS_PER_NODE": "2",
        "APPTRAIN_EMBEDDED_LOCALID": "1",
        "APPTRAIN_EMBEDDED_CPUS_ON_NODE": "3",
        "APPTRAIN_RUN_DIR": str(tmp_path),
        "APPTRAIN_ATTEMPT": "4",
        passed.NOT_PASSED: "MINE SLURM_JWT",
    }


def test_a_node_knows_by_whose_wish_variables_pass(tmp_path: Path) -> None:
    env = {"MINE": "1", "APPTRAIN_PASS": "MINE", passed.PASSED: "OMP_X"}
    assert env.items() <= embedded.node_env(local_job(tmp_path), 0, 0, 0, env, progress=False).items()


def test_a_single_node_has_all_cpus_and_each_of_many_has_one_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    found = {}
    for nodes in (1, 2, 4):
        env = embedded.node_env(local_job(tmp_path, nodes=nodes), 0, 0, 0, {}, progress=False)
        found[nodes] = (env["APPTRAIN_EMBEDDED_NODELIST"], env["APPTRAIN_EMBEDDED_CPUS_ON_NODE"])
    assert found == {1: ("127.0.0.1", "3"), 2: ("127.0.0.[1-2]", "1"), 4: ("127.0.0.[1-4]", "1")}


@pytest.mark.parametrize(("gpus", "told"), [(None, (None, None)), (0, ("0", None)), (1, ("1", "1"))])
def test_gpus_are_told_if_somebody_said_how_many(
    tmp_path: Path, gpus: int | None, told: tuple[str | None, ...]
) -> None:
    env = embedded.node_env(local_job(tmp_path, gpus_per_node=gpus), 1, 0, 0, {}, progress=False)
    assert (env.get("APPTRAIN_EMBEDDED_GPUS_ON_NODE"), env.get("CUDA_VISIBLE_DEVICES")) == told


@pytest.mark.parametrize("progress", [False, True])
def test_a_task_knows_whether_a_terminal_shows_its_progress(tmp_path: Path, progress: bool) -> None:
    env = embedded.node_env(local_job(tmp_path), 0, 0, 0, {}, progress=progress)
    assert (env.get(output.TERMINAL_BEHIND_PIPE) == "1") is progress


# --- its attempts and its end -------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this process is changed: its signals, its children, its limits."""
    monkeypatch.setattr(embedded, "handled_signals", lambda: ())
    monkeypatch.setattr("entrypoint.node.processes.adopt_orphans", lambda: None)
    monkeypatch.setattr("entrypoint.node.processes.allow_open_files", lambda _count: 0)
    monkeypatch.setattr("entrypoint.node.guardian.end_all_below", lambda: None)


def run_of(
    job: embedded.LocalJob, *ends: tuple[Outcome, int], signals: tuple[int, ...] = ()
) -> tuple[int, list[str], list[int]]:
    """(status, lines, the attempts that were made): each ends so, and tells which attempt was its last."""
    nodes: Any = embedded._Nodes(job)
    lines: list[str] = []
    made: list[int] = []
    ending = iter(ends)

    def attempt(number: int) -> tuple[Outcome, int]:
        made.append(number)
        ended, further = next(ending)
        return ended, number + further

    nodes._attempt, nodes._say = attempt, lines.append
    nodes.signals.extend(signals)
    return nodes.run(), lines[2:], made


def goes_on(run_dir: Path) -> str:
    return f"to go on from the last checkpoint: the same command with --run-dir {run_dir}"


TAKEN = Outcome(status=69, error="the port is taken")


@pytest.mark.usefixtures("alone")
def test_a_port_that_is_taken_has_three_tries_unless_it_was_chosen(tmp_path: Path) -> None:
    failed = ["the job ended with status 69: the port is taken"]
    one, other, third = (tmp_path / name for name in "abc")
    assert run_of(local_job(one), (TAKEN, 0), (TAKEN, 2), (TAKEN, 0)) == (69, failed, [0, 1, 4])
    assert run_of(local_job(other, port_by_hand=True), (TAKEN, 0)) == (69, failed, [0])
    assert run_of(local_job(third), (TAKEN, 0), (Outcome(status=0), 0)) == (0, [], [0, 1])
    assert (third / "first-attempt").read_text() == "0\n", "the second goes on by itself"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("ended", "lines"),
    [
        (Outcome(status=0), []),
        (Outcome(status=3), ["the job ended with status 3"]),
        (Outcome(status=3, error="no space"), ["the job ended with status 3: no space"]),
        (Outcome(status=3, error="no space", node="127.0.0.1"), ["the job ended with status 3"]),
    ],
)
def test_the_end_is_told_unless_it_is_good_and_its_reason_unless_a_node_has_told_it(
    tmp_path: Path, ended: Outcome, lines: list[str]
) -> None:
    assert run_of(local_job(tmp_path / "run"), (ended, 0)) == (ended.status, lines, [0])


@pytest.mark.usefixtures("alone")
def test_an_end_that_was_wanted_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for status, told in ((75, []), (130, ["130"]), (143, ["143"])):
        ends = [f"the job ended with status {text}" for text in told]
        assert run_of(local_job(run), (Outcome(status=status), 0))[1] == [*ends, goes_on(run)]


@pytest.mark.usefixtures("alone")
def test_the_next_step_is_told_to_who_tries_it_out_and_has_had_luck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    told = [f"next: {checkout.apptrain()} run -- my_script.py"]
    for status, is_demo, lines in (
        (0, True, told),
        (0, False, []),
        (3, True, ["the job ended with status 3"]),
    ):
        job = local_job(tmp_path / "run", is_demo=is_demo)
        assert run_of(job, (Outcome(status=status), 0))[1] == lines


@pytest.mark.usefixtures("alone")
def test_a_failed_rank_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "entrypoint.explain.run.in_lines", lambda ended, _folder: (f"why {ended.rank}", "then")
    )
    for rank, lines in ((None, []), (0, ["why 0", "then"])):
        ended = Outcome(status=3, rank=rank)
        assert run_of(local_job(tmp_path / "run"), (ended, 0))[1] == ["the job ended with status 3", *lines]


@pytest.mark.usefixtures("alone")
def test_a_signal_before_the_first_attempt_is_the_end(tmp_path: Path) -> None:
    job = local_job(tmp_path / "run")
    lines = ["the job ended with status 130: interrupted", goes_on(tmp_path / "run")]
    assert run_of(job, signals=(15,)) == (130, lines, [])


@pytest.mark.usefixtures("alone")
def test_a_run_directory_of_before_goes_on_with_the_next_attempt_and_no_wish_to_stop(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunDirectory(run, 2).create()
    RunDirectory(run, 0).stop.touch()
    assert run_of(local_job(run), (Outcome(status=0), 0))[2] == [3]
    assert not RunDirectory(run, 0).stop.exists()
    assert RunDirectory(run, 0).key.exists()


def test_a_planned_end_is_a_file_that_only_the_user_can_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    nodes: Any = embedded._Nodes(local_job(tmp_path / "run"))
    passed_on: list[int] = []
    nodes._pass_on = passed_on.append
    nodes._signalled(signal.SIGUSR2, None)
    stop = RunDirectory(tmp_path / "run", 0).stop
    assert (oct(stop.stat().st_mode & 0o777), nodes.signals, passed_on) == ("0o600", [], [])
    nodes._signalled(signal.SIGTERM, None)
    assert (nodes.signals, passed_on) == ([signal.SIGTERM], [signal.SIGTERM])


def test_a_planned_end_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    nodes: Any = embedded._Nodes(local_job(tmp_path / "none"))
    lines: list[str] = []
    nodes._say = lines.append
    nodes._signalled(signal.SIGUSR2, None)
    stop = RunDirectory(tmp_path / "none", 0).stop
    assert lines == [f"{stop} cannot be written (No such file or directory): no rank is asked to stop"]


@pytest.mark.parametrize(
    ("per_task", "tasks", "names"),
    [
        (False, 1, ["0.0", "0.1"]),
        (True, 1, ["0.0.0", "0.1.0"]),
        (True, 2, ["0.0.0", "0.0.1", "0.1.0", "0.1.1"]),
    ],
)
def test_each_node_writes_an_outcome_or_each_task(
    tmp_path: Path, per_task: bool, tasks: int, names: list[str]
) -> None:
    nodes: Any = embedded._Nodes(local_job(tmp_path, outcome_per_task=per_task, tasks_per_node=tasks))
    files = nodes._files(RunDirectory(tmp_path, 0))
    assert [file.name for file in files] == names
    assert nodes._who(files[-1]) == "the launch of 127.0.0.2" + (f", task {tasks - 1}" if per_task else "")


def test_what_a_task_wrote_counts_and_else_its_status(tmp_path: Path) -> None:
    RunDirectory(tmp_path, 0).create()
    nodes: Any = embedded._Nodes(local_job(tmp_path))
    first, second = nodes._files(RunDirectory(tmp_path, 0))
    outcome.write(first, Outcome(status=7, node="x", time=1.0))
    for file in (first, second):
        nodes._complete(file, Outcome(status=9, time=2.0, error="killed"))
    assert [nodes._outcome(file).status for file in (first, second)] == [7, 9]
    assert outcome.read(second) == Outcome(status=9, time=2.0, error="killed")
    second.unlink()
    nodes._complete(second, Outcome(status=0, time=2.0))
    assert (second.exists(), nodes._outcome(second).status) == (False, 0)


# --- how the command ends -----------------------------------------------------------------------------------


def test_the_python_is_asked_for_after_all_that_can_be_wrong_and_gets_the_note(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "_run", lambda _job: 5)
    notes: list[str] = []
    assert embedded.main(["--", "nothere.py"], notes.append) == 64
    (bare / "file").touch()
    assert embedded.main(["--run-dir", "file/run", "--", "my.py"], notes.append) == 64
    assert notes == []
    capsys.readouterr()
    assert embedded.main(["--", "my.py"], notes.append) == 5
    assert (notes, capsys.readouterr().err) == ([""], "")
    assert embedded.main([], notes.append) == 5
    assert (notes[1], capsys.readouterr().err) == (f"{NO_CMD}\n", f"{NO_CMD}\n")
    assert embedded.main([]) == 5

    def refuse(_note: str) -> None:
        raise BadInput("a-b", "no torch")

    capsys.readouterr()
    assert embedded.main([], refuse) == 64
    assert capsys.readouterr().err == "apptrain: no torch\n"


@pytest.mark.parametrize("name", ["/x/job.log", None])
def test_a_disk_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str | None
) -> None:
    def fail(_nodes: object) -> int:
        raise OSError(28, "No space left on device", name)

    monkeypatch.setattr(embedded._Nodes, "run", fail)
    assert embedded._run(local_job(tmp_path)) == 1
    assert capsys.readouterr().err == f"apptrain: No space left on device: {name or tmp_path}\n"
