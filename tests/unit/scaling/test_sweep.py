"""What a scaling measures: its sizes, the command of each, its directory, and the jobs that it submits."""

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import NoReturn

import pytest

from entrypoint.batch.login import JobStatus
from entrypoint.batch.slurm import login as slurm_login
from entrypoint.cli import submit
from entrypoint.core.errors import BadInput, Unavailable
from entrypoint.scaling import command, jobs, local, sweep
from entrypoint.scaling.sweep import NoSuchSize, Sweep, SweepFolder, of_size, open_folder, sizes
from entrypoint.schedulers.known import words_of

SWEEP = Sweep(
    kind="weak", nodes=(1, 2), repeats=2, command=("my.py", "--batch", "{64*nodes}"), options=(), cluster=""
)


def test_sizes_are_numbers_in_ascending_order() -> None:
    assert sizes("4,1,2,2") == (1, 2, 4)


@pytest.mark.parametrize(
    ("text", "id"),
    [
        *((text, "scaling-nodes") for text in ("", "0,1", "1,x", "-1,2", "1,,2", "1,100001", "1,٣", "1;2")),
        *((text, "scaling-nodes") for text in ("1,2,1234567", "1, 2", "1,²")),
        *((text, "scaling-sizes-count") for text in ("1", "3,3", ",".join(map(str, range(1, 22))))),
    ],
)
def test_what_is_no_list_of_sizes_is_refused(text: str, id: str) -> None:
    with pytest.raises(BadInput) as refusal:
        sizes(text)
    assert refusal.value.id == id


def test_there_may_be_20_sizes_of_up_to_100000_nodes() -> None:
    many = tuple(range(99_981, 100_001))
    assert sizes(",".join(map(str, many))) == many


def test_sizes_take_turns() -> None:
    assert list(SWEEP.order()) == [(1, 1), (2, 1), (1, 2), (2, 2)]


def test_numbers_of_nodes_in_the_command_are_worked_out() -> None:
    words = ["a.py", "--n={nodes}", "--batch={64*nodes}", "{256/nodes}", "{node}", "{nodes", '{"a": 1}']
    assert of_size(words, 4, batch=0) == [
        "a.py",
        "--n=4",
        "--batch=256",
        "64",
        "{node}",
        "{nodes",
        '{"a": 1}',
    ]
    with pytest.raises(NoSuchSize, match="256 is no multiple of 3 nodes"):
        of_size(words, 3, batch=0)


def test_the_batch_of_the_reference_program_grows_with_the_nodes_alone_in_weak_scaling() -> None:
    words = ["-m", "train", "batch_size=32", "steps=9"]
    assert of_size(words, 3, batch=32) == ["-m", "train", "steps=9", "batch_size=96"]
    assert of_size(words, 3, batch=0) == words


def test_a_directory_is_private_and_goes_on_with_the_same_sweep_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "s"
    folder = open_folder(path, SWEEP)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    run = folder.new_run(2, 1)
    assert run.name == "n2-r1"
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert folder.new_run(2, 1).name == "n2-r1.1"  # one that was broken off stays as it is
    folder.note("done", 2, 1, {"run": "n2-r1"})
    again = open_folder(path, SWEEP)
    assert again.noted("done") == {(2, 1): path / "runs" / "n2-r1"}
    assert stat.S_IMODE((path / "done").stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "done" / "2.1.json").stat().st_mode) == 0o600
    with pytest.raises(BadInput, match=r"repeats is 2 there and 3 here"):
        open_folder(path, replace(SWEEP, repeats=3))


def test_a_directory_that_is_there_and_empty_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o755)
    open_folder(tmp_path / "s", SWEEP)
    for path in (tmp_path / "s", tmp_path / "s" / "runs"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="Not a directory: give another") as refusal:
        open_folder(tmp_path / "file" / "s", SWEEP)
    assert refusal.value.id == "scaling-dir"


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(BadInput, match="holds something else"):
        open_folder(tmp_path, SWEEP)
    for content in ("{", "[]", '{"schema_version": 9}'):
        (tmp_path / sweep.PLAN).write_text(content)
        with pytest.raises(BadInput, match="damaged"):
            open_folder(tmp_path, SWEEP)
    with pytest.raises(BadInput, match="damaged"):
        command.main([str(tmp_path)], {})


@pytest.mark.parametrize("name", ["../../etc", "n1-r1/..", "", "n1", 7, None])
def test_a_note_that_names_no_run_directory_counts_for_nothing(tmp_path: Path, name: object) -> None:
    folder = open_folder(tmp_path / "s", SWEEP)
    folder.note("done", 1, 1, {"run": name})
    assert folder.noted("done") == {}


def submissions(monkeypatch: pytest.MonkeyPatch, says: Callable[[int], tuple[int, str]]) -> list[list[str]]:
    """The arguments of each one that is made. `says`: its (status, output), by its number from 1 on."""
    asked: list[list[str]] = []

    def submit(arguments: Sequence[str]) -> tuple[int, str]:
        asked.append(list(arguments))
        return says(len(asked))

    monkeypatch.setattr(jobs, "_submit", submit)
    return asked


def test_each_job_waits_for_the_end_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(number: int) -> tuple[int, str]:
        return (1, "") if number == 4 else (0, f"Submitted batch job {40 + number}\n")

    asked = submissions(monkeypatch, says)
    monkeypatch.setattr(slurm_login, "ask", lambda *_: JobStatus(state="PENDING"))
    folder = open_folder(tmp_path / "s", replace(SWEEP, cluster="site"))
    whole = replace(SWEEP, cluster="site")
    slurm = words_of("slurm")
    said: list[str] = []

    def go() -> int:
        return jobs.submit(
            folder, whole, whole.command, ["--time", "5"], slurm, batch=0, say=said.append, env={}
        )

    assert go() == 1
    runs = tmp_path / "s" / "runs"
    assert asked[0] == [
        *("--cluster", "site", "--nodes", "1", "--run-dir", str(runs / "n1-r1"), "--time", "5"),
        *("--", "my.py", "--batch", "64"),
    ]
    assert asked[1][4:7] == ["--dependency=afterany:41", "--run-dir", str(runs / "n2-r1")]
    assert said == ["job 41: 1 node, repeat 1", "job 42: 2 nodes, repeat 1", "job 43: 1 node, repeat 2"]
    assert go() == 0  # the one that could not be submitted, alone
    waits = "--dependency=afterany:41:43:42"
    assert (asked[4][3], asked[4][4:7]) == ("2", [waits, "--run-dir", str(runs / "n2-r2")])
    assert said[3] == "0 runs measured before, 3 jobs still to end"
    assert json.loads((tmp_path / "s" / "jobs" / "2.2.json").read_text()) == {"run": "n2-r2", "job": "45"}
    with pytest.raises(BadInput) as refusal:
        command.main([str(tmp_path / "s")], {})
    assert refusal.value.id == "scaling-nothing"
    assert "its job has not begun" in str(refusal.value)


def test_a_job_that_measured_nothing_and_is_over_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = submissions(
        monkeypatch, lambda number: (0, f"Submitted batch job {70 + number} on cluster west\n")
    )

    def ended(run: Path, status: int) -> None:
        steps = {"timed": 100, "seconds": 4.0}
        made = {"attempt": 0, "nodes": ["n"] * int(run.name[1]), "status": status, "steps": steps}
        (run / "manifest.json").write_text(json.dumps({"command": ["x"], "attempts": [made]}))

    told: dict[str, JobStatus | None] = {}
    monkeypatch.setattr(slurm_login, "ask", lambda job, _: told[job])
    monkeypatch.setattr(slurm_login, "has_forgotten", lambda job: told[job] is None)
    what = replace(SWEEP, nodes=(1, 2, 3, 4), repeats=1, cluster="site")
    folder = open_folder(tmp_path / "s", what)
    slurm = words_of("slurm")
    said: list[str] = []

    def go() -> int:
        return jobs.submit(folder, what, ["x"], [], slurm, batch=0, say=said.append, env={})

    assert go() == 0
    runs = tmp_path / "s" / "runs"
    ended(runs / "n1-r1", 0)
    ended(runs / "n2-r1", 1)
    ended(runs / "n4-r1", 1)  # the scheduler will try that again
    told |= {
        "72;west": JobStatus(state="FAILED", status=1),
        "73;west": None,
        "74;west": JobStatus(state="PENDING"),
    }
    asked.clear()
    said.clear()
    assert go() == 0
    assert [words[4:7] for words in asked] == [
        ["--dependency=afterany:74", "--run-dir", str(runs / "n2-r1.1")],
        ["--dependency=afterany:71", "--run-dir", str(runs / "n3-r1.1")],
    ]
    assert said[:3] == [
        "again: 2 nodes, repeat 1: job 72;west ended with status 1: it failed with status 1",
        "again: 3 nodes, repeat 1: nobody tells of job 73;west: it has left no manifest that can be read",
        "1 run measured before, 1 job still to end",
    ]
    for run in ("n2-r1.1", "n3-r1.1", "n4-r1"):
        ended(runs / run, 0)
    said.clear()
    assert go() == 0
    assert len(asked) == 2
    assert said[0] == "4 runs measured before, 0 jobs still to end"
    assert said[1].startswith("all have ended: ")


@pytest.mark.parametrize(
    ("scheduler", "job", "program", "forgets"),
    [
        ("slurm", "71;west", "scontrol", "slurm_load_jobs error: Invalid job id specified"),
        ("pbs", "71.server", "qstat", "qstat: Unknown Job Id 71.server"),
    ],
)
def test_nothing_is_submitted_beside_a_job_that_nobody_tells_of(
    scheduler: str, job: str, program: str, forgets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = submissions(monkeypatch, lambda _: (0, "72\n"))
    monkeypatch.setenv("PATH", str(tmp_path))
    answers = tmp_path / program
    what = replace(SWEEP, cluster="site")
    folder = open_folder(tmp_path / "s", what)
    folder.note("jobs", 1, 1, {"run": folder.new_run(1, 1).name, "job": job})

    def go() -> int:
        return jobs.submit(folder, what, ["x"], [], words_of(scheduler), batch=0, say=print, env={})

    for why in ("Unable to contact slurm controller (connect failure)", "cannot connect to server"):
        answers.write_text(f"#!/bin/sh\necho '{why}' >&2\nexit 1\n")
        answers.chmod(0o755)
        said = f"{program} does not tell whether job {job} has ended, .* once {program} answers$"
        with pytest.raises(Unavailable, match=said) as refused:
            go()
        assert (refused.value.id, asked) == ("scaling-job-unknown", [])
    answers.write_text(f"#!/bin/sh\necho '{forgets}' >&2\nexit 1\n")
    assert go() == 0
    assert len(asked) == len(list(what.order()))


@pytest.mark.parametrize("note", ["[]", "{", '{"run": "n1-r1"}', '{"run": "n1-r1", "job": "-x"}'])
def test_a_note_without_the_id_of_a_job_asks_nobody(
    note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_submit", lambda _: (0, "7\n"))
    monkeypatch.setattr(slurm_login, "ask", lambda *_: pytest.fail("asked"))
    folder = open_folder(tmp_path / "s", SWEEP)
    (folder.path / "jobs").mkdir()
    (folder.path / "jobs" / "1.1.json").write_text(note)
    assert jobs.submit(folder, SWEEP, ["x"], [], words_of("slurm"), batch=0, say=print, env={}) == 0
    assert json.loads((folder.path / "jobs" / "1.1.json").read_text())["job"] == "7"


@pytest.mark.parametrize(
    ("option", "id"),
    [
        (["--minutes", "5"], "scaling-cluster-minutes"),
        (["--json"], "scaling-cluster-result"),
        (["-o", "x.svg"], "scaling-cluster-result"),
    ],
)
def test_an_option_that_does_nothing_while_jobs_are_submitted_is_refused(option: list[str], id: str) -> None:
    with pytest.raises(BadInput) as refusal:
        command.main(["--cluster", "generic", *option, "--", "my.py"], {})
    assert refusal.value.id == id


@pytest.mark.parametrize(
    ("cluster", "scheduler", "wanted"),
    [("generic", "slurm", "--dependency=afterany:7"), ("generic-pbs", "pbs", "-W depend=afterany:7")],
)
def test_submit_hands_the_wait_on_to_the_scheduler(
    cluster: str, scheduler: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(job="7") for word in words_of(scheduler).after]
    asked = ["--cluster", cluster, "--dry-run", *words, "--run-dir", "/run", "--device", "cpu"]
    assert submit.main([*asked, "--", "-m", "train", "--config", "digits"]) == 0
    assert f" {wanted} " in capsys.readouterr().out


def test_a_scheduler_that_names_no_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_submit", lambda _: (0, "welcome\n"))
    folder = open_folder(tmp_path / "s", SWEEP)
    with pytest.raises(BadInput, match="welcome, which names no job"):
        jobs.submit(folder, SWEEP, SWEEP.command, [], words_of("slurm"), batch=0, say=print, env={})


def test_a_size_that_cmd_cannot_have_gets_no_job_and_the_next_one_waits_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = submissions(monkeypatch, lambda _: (0, "7;west\n"))
    odd = replace(SWEEP, nodes=(2, 3, 4), repeats=1, command=("my.py", "{64/nodes}"), cluster="site")
    said: list[str] = []
    folder = open_folder(tmp_path / "s", odd)
    assert jobs.submit(folder, odd, odd.command, [], words_of("slurm"), batch=0, say=said.append, env={}) == 0
    assert [(words[3], words[-1]) for words in asked] == [("2", "32"), ("4", "16")]
    assert asked[1][4] == "--dependency=afterany:7"
    assert said[1] == "left out: 3 nodes: 64 is no multiple of 3 nodes"


def test_the_submission_of_a_job_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "HOME", tmp_path)
    (tmp_path / "apptrain").write_text('#!/bin/sh\necho "$@"\n[ "$2" != wait ] || exec sleep 60\nexit 3\n')
    (tmp_path / "apptrain").chmod(0o755)
    assert jobs._submit(["--nodes", "2"]) == (3, "submit --nodes 2\n")
    monkeypatch.setattr(jobs, "SECONDS", 0.5)
    with pytest.raises(Unavailable, match="look which jobs are there"):
        jobs._submit(["wait"])


# --- the command line ---------------------------------------------------------------------------------------


class Local:
    """Stands for the runs: takes what it is to run, and runs nothing."""

    asked: tuple[Sweep, list[str], list[str], int]
    minutes: object

    def __init__(self, _: SweepFolder, asked: Sweep, words: list[str], options: list[str], **more: object):
        batch = more["batch"]
        assert isinstance(batch, int)
        Local.asked = (asked, words, options, batch)
        Local.minutes = more["minutes"]

    def run(self) -> list[local.FailedSize]:
        return [local.FailedSize(2, "status 1: boom")]


@pytest.fixture
def asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Sweep, list[str], list[str], int]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "LocalRuns", Local)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def call(
        *arguments: str, status: int = 1, env: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[Sweep, list[str], list[str], int]:
        assert command.main(arguments, env) == status
        return Local.asked

    return call


def test_a_script_is_measured_weakly_with_the_options_of_run(
    asked: Callable[..., tuple[Sweep, list[str], list[str], int]], capsys: pytest.CaptureFixture[str]
) -> None:
    what, words, options, batch = asked(
        "--device", "cpu", "--repeats=1", "--show-ranks=0", "--", "my.py", "-x"
    )
    assert (what.kind, what.nodes, what.repeats, batch) == ("weak", (1, 2, 4, 8), 1, 0)
    assert (words, options) == (
        ["my.py", "-x"],
        ["--device", "cpu", "--show-ranks=0", "--omp-num-threads", "1"],
    )
    said = capsys.readouterr().err
    assert "2 nodes: status 1: boom" in said
    assert stat.S_IMODE(next(Path("runs").iterdir()).stat().st_mode) == 0o700


def test_threads_that_somebody_has_chosen_stay(
    asked: Callable[..., tuple[Sweep, list[str], list[str], int]],
) -> None:
    assert asked("--dir", "a", "--omp_num_threads", "3", "--nodes", "1,2", "--", "my.py")[2] == [
        "--omp_num_threads",
        "3",
    ]
    assert asked("--nodes", "1,2", "--", "my.py")[2] == ["--omp-num-threads", "4"]
    ranks = ["--nproc-per-node", "2"]
    assert asked("--dir", "b", *ranks, "--nodes", "1,2", "--", "my.py")[2] == ranks
    for name in ("OMP_NUM_THREADS", "APPTRAIN_OMP_NUM_THREADS"):
        assert asked("--dir", name, "--nodes", "1,2", "--", "my.py", env={name: "3"})[2] == []


@pytest.mark.parametrize(
    ("given", "minutes", "repeats"),
    [
        ([], 30, 3),
        (["--minutes", "0.5", "--repeats", "50"], 0.5, 50),
        (["--minutes=100000", "--repeats=1"], 100_000, 1),
    ],
)
def test_runs_take_half_an_hour_and_each_size_three_if_nothing_else_is_said(
    given: list[str],
    minutes: float,
    repeats: int,
    asked: Callable[..., tuple[Sweep, list[str], list[str], int]],
) -> None:
    assert asked(*given, "--", "my.py")[0].repeats == repeats
    assert Local.minutes == minutes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--", "my.py"], "weak scaling on 1, 2 nodes, 1 run of each size: each rank has the same work in a step "
            "(--strong if your script divides its batch)"),
        (["--strong", "--", "my.py"], "strong scaling on 1, 2 nodes, 1 run of each size: taken at your word that a "
            "step has the same work on all"),
        ([], "strong scaling on 1, 2 nodes, 1 run of each size"),
        (["--weak"], "weak scaling on 1, 2 nodes, 1 run of each size: batch_size grows with the nodes"),
    ],
)  # fmt: skip
def test_what_will_be_measured_is_said_first(
    given: list[str],
    said: str,
    asked: Callable[..., tuple[Sweep, list[str], list[str], int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked("--nodes", "1,2", "--repeats", "1", *given)
    assert capsys.readouterr().err.splitlines()[0] == f"apptrain: {said}"


@pytest.mark.parametrize(
    "options",
    [
        ["--device", "cpu", "--show-ranks=0", "-x", "3"],
        ["--omp_num_threads", "-3", "--no-binding", "--a=b c"],
        ["--restart-on-failure", "--standalone"],
        ["--exclusive", "-p", "debug"],
        ["--options", "-p debug"],
    ],
)
def test_options_that_are_not_of_scaling_are_those_of_the_runs(
    options: list[str], asked: Callable[..., tuple[Sweep, list[str], list[str], int]]
) -> None:
    first, last = ["--nodes", "1,2", "--weak"], ["--repeats=1", "--dir", "a"]
    sweep, _, taken, _ = asked(*first, *options, *last, "--", "my.py")
    assert taken[: len(options)] == options
    assert (sweep.nodes, sweep.kind, sweep.repeats) == ((1, 2), "weak", 1)


@pytest.mark.parametrize(("nodes", "is_given"), [([], False), (["--nodes", "3,5"], True)])
def test_a_cluster_gets_1_2_and_4_nodes_if_no_sizes_are_given(
    nodes: list[str], is_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    submitted: list[tuple[Sweep, list[str], list[str]]] = []

    def submit(
        _: SweepFolder, what: Sweep, words: list[str], options: list[str], *__: object, **___: object
    ) -> int:
        submitted.append((what, words, options))
        return 5

    monkeypatch.setattr(jobs, "submit", submit)
    assert command.main(["--cluster", "generic", *nodes, "--time", "5", "--", "my.py"], {}) == 5
    ((what, words, options),) = submitted
    assert (what.nodes, what.cluster) == ((3, 5) if is_given else (1, 2, 4), "generic")
    assert (words, options) == (["my.py"], ["--time", "5"])


def test_a_disk_that_fails_ends_a_sweep_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> NoReturn:
        raise OSError(28, "No space left on device", "/x/n1-r1")

    monkeypatch.setattr(local.LocalRuns, "run", full)
    assert command.main(["--dir", str(tmp_path / "s"), "--nodes", "1,2", "--", "x"], {}) == 1
    assert capsys.readouterr().err.endswith("apptrain: No space left on device: /x/n1-r1\n")


def test_ranks_have_a_thread_at_least(
    asked: Callable[..., tuple[Sweep, list[str], list[str], int]],
) -> None:
    assert asked("--nodes", "1,20", "--", "my.py")[2] == ["--omp-num-threads", "1"]


@pytest.mark.parametrize(("cores", "nodes"), [(1, (1, 2)), (3, (1, 2)), (4, (1, 2, 4)), (64, (1, 2, 4, 8))])
def test_without_sizes_there_are_as_many_nodes_as_cores(
    cores: int,
    nodes: tuple[int, ...],
    asked: Callable[..., tuple[Sweep, list[str], list[str], int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert asked("--", "my.py")[0].nodes == nodes


def test_what_run_would_refuse_is_refused_before_a_directory_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checked: list[list[str]] = []

    def check(words: list[str]) -> None:
        checked.append(words)
        raise BadInput("id", "no")

    words = ["--nodes", "3,4,8", "--device", "cpu", "--", "my.py", "--batch={64/nodes}"]
    with pytest.raises(BadInput, match=r"^no$"):
        command.main(words, {}, check)
    assert checked == [["--nodes", "4", "--device", "cpu", "--", "my.py", "--batch=16"]]
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_leaves_its_result_and_picture_and_says_how_to_go_on_if_it_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local.LocalRuns, "_start", runs_of({}))
    monkeypatch.setattr(local, "HANDLED", ())
    words = ["--dir", str(tmp_path / "s"), "--nodes", "1,2", "--repeats", "1", "--strong", "--", "x"]
    assert command.main(words, {}) == 0
    out, err = capsys.readouterr()
    assert "strong scaling on 1, 2 nodes, 1 run of each size: taken at your word" in err
    assert (
        f"apptrain: directory {tmp_path}/s; broken off, the same line with --dir {tmp_path}/s goes on\n"
        in err
    )
    left = rf"{tmp_path}/s/result\.json and scaling\.svg beside it have it; a page: \S*apptrain report {tmp_path}/s$"
    assert re.search(left, err.rstrip("\n"))
    assert "strong scaling of x: the same total work a step" in out
    result = json.loads((tmp_path / "s" / command.RESULT).read_text())
    assert (result["kind"], len(result["points"])) == ("strong", 2)
    assert (tmp_path / "s" / command.PICTURE).read_text().startswith("<svg")
    assert command.main([str(tmp_path / "s"), "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == result

    def stop(_: object) -> NoReturn:
        raise local.BrokenOff(130)

    monkeypatch.setattr(local.LocalRuns, "run", stop)
    assert command.main(words, {}) == 130
    assert f"broken off; the same line with --dir {tmp_path}/s goes on\n" in capsys.readouterr().err


def test_the_reference_program_is_measured_strongly_or_with_a_batch_that_grows(
    asked: Callable[..., tuple[Sweep, list[str], list[str], int]],
) -> None:
    assert asked("--dir", "a")[0].kind == "strong"
    assert asked("--dir", "b", "--weak")[3] == 128
    assert asked("--dir", "c", "--weak", "--", "-m", "train", "--config", "digits", "batch_size=32")[3] == 32
    with pytest.raises(BadInput, match="batchsize"):
        asked("--weak", "--", "-m", "train", "--config", "digits", "batchsize=32")


def test_secrets_of_the_command_are_run_and_not_written(
    asked: Callable[..., tuple[Sweep, list[str], list[str], int]], tmp_path: Path
) -> None:
    secret = "hf_" + "abcdefghijklmnopqr" + "0123456789"
    _, words, _, _ = asked("--dir", "s", "--", "my.py", "--token", secret)
    assert words == ["my.py", "--token", secret]
    assert secret not in (tmp_path / "s" / sweep.PLAN).read_text()


@pytest.mark.parametrize(
    ("arguments", "id"),
    [
        (["my.py"], "scaling-no-dashes"),
        (["runs/a", "--", "my.py"], "scaling-run-and-cmd"),
        (["--nodes", "1", "--", "my.py"], "scaling-sizes-count"),
        (["--nodes", "2,3", "--", "my.py", "n={7/nodes}"], "scaling-division"),
        (["--nodes", "2,4", "--cluster", "lab", "--", "my.py", "n={6/nodes}"], "scaling-division"),
        (["--repeats", "0", "--", "my.py"], "scaling-number"),
        (["--repeats", "1.5", "--", "my.py"], "scaling-repeats"),
        (["--repeats", "51", "--", "my.py"], "scaling-repeats"),
        (["--repeats", "many", "--", "my.py"], "scaling-number"),
        (["--minutes", "nan", "--", "my.py"], "scaling-number"),
        (["--minutes", "0", "--", "my.py"], "scaling-number"),
        (["--minutes", "100001", "--", "my.py"], "scaling-number"),
        ([f"runs/{at}" for at in range(1001)], "scaling-too-many"),
        ([f"runs/{at}" for at in range(1000)], "run-missing"),
        (["--strong", "--weak", "--", "my.py"], "command-usage"),
        (["--cluster", "no_such", "--", "my.py"], "profile-missing"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as refusal:
        command.main(arguments, {})
    assert refusal.value.id == id


@pytest.mark.parametrize("env", [{"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "7.srv", "PBS_NODEFILE": "/x"}])
def test_inside_a_job_the_road_that_works_is_named(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="scaling --cluster NAME") as refusal:
        command.main(["--", "my.py"], env)
    assert refusal.value.id == "scaling-in-job"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of the signals that a sweep takes are put back."""
    before = {signum: signal.getsignal(signum) for signum in local.HANDLED}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def here(tmp_path: Path, said: list[str], *, minutes: float = 1) -> local.LocalRuns:
    folder = open_folder(tmp_path / "s", SWEEP)
    return local.LocalRuns(folder, SWEEP, ["x"], [], batch=0, minutes=minutes, say=said.append, env={})


def runs_of(statuses: dict[int, int]) -> Callable[..., tuple[int, bool]]:
    """Stands for the start of a run: one that ends with 0 has made a hundred steps in four seconds."""

    def start(_: object, nodes: int, run: Path, log: Path, words: Sequence[str]) -> tuple[int, bool]:
        assert list(words) == ["x"]
        log.write_text("step 1\napptrain: no luck\napptrain: the job ended with status 1\n\n")
        status = statuses.get(nodes, 0)
        if status == 0:
            made = {
                "attempt": 0,
                "nodes": ["n"] * nodes,
                "status": 0,
                "steps": {"timed": 100, "seconds": 4.0},
            }
            (run / "manifest.json").write_text(json.dumps({"command": ["x"], "attempts": [made]}))
        return status, nodes == 1

    return start


@pytest.mark.usefixtures("handlers")
def test_a_size_that_fails_is_not_tried_again_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.LocalRuns, "_start", runs_of({2: 1}))
    said: list[str] = []
    assert here(tmp_path, said).run() == [local.FailedSize(2, "status 1: no luck")]
    assert [line.partition(", about ")[0] for line in said] == [
        "run 1 of 4: 1 node",
        "   25 steps/s over 100 steps, ended after 1 min 00 s",
        "run 2 of 4: 2 nodes",
        "left out: 2 nodes: status 1: no luck",
        "run 3 of 4: 1 node",
        "   25 steps/s over 100 steps, ended after 1 min 00 s",
    ]
    monkeypatch.setattr(local.LocalRuns, "_start", runs_of({}))
    said.clear()
    assert here(tmp_path, said).run() == []
    assert said[:2] == ["2 of 4 runs are there already", "run 3 of 4: 2 nodes"]
    assert SweepFolder(tmp_path / "s").noted("done").keys() == set(SWEEP.order())


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("status", "last"), [(0, ""), (143, ": too short")])
def test_a_run_that_tells_no_rate_is_left_out_with_its_log(
    status: int, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose last line tells why if the run has not ended well."""

    def start(_: object, nodes: int, run: Path, log: Path, __: Sequence[str]) -> tuple[int, bool]:
        log.write_text("apptrain: too short\n")
        made = {"attempt": 0, "nodes": ["n"] * nodes, "status": status, "steps": {"timed": 3, "seconds": 1.0}}
        (run / "manifest.json").write_text(json.dumps({"command": ["x"], "attempts": [made]}))
        return status, False

    monkeypatch.setattr(local.LocalRuns, "_start", start)
    said: list[str] = []
    runs = tmp_path / "s" / "runs"
    assert here(tmp_path, said).run() == [
        local.FailedSize(at, f"it has 3 timed steps, and 5 are needed{last} ({runs}/n{at}-r1.log)")
        for at in (1, 2)
    ]
    assert len(said) == 4


@pytest.mark.usefixtures("handlers")
def test_the_signals_of_a_terminal_are_taken_while_runs_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = here(tmp_path, [])

    def start(*_: object) -> tuple[int, bool]:
        for signum in (signal.SIGHUP, signal.SIGINT):
            signal.raise_signal(signum)
        return 0, False

    monkeypatch.setattr(local.LocalRuns, "_start", start)
    with pytest.raises(local.BrokenOff) as broken:
        runs.run()
    assert (broken.value.status, runs.signals) == (129, [signal.SIGHUP, signal.SIGINT])


@pytest.mark.usefixtures("handlers")
def test_the_time_that_is_left_is_estimated_by_the_runs_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take 10, 30, 20 and 5 s."""
    clock = iter([0, 10, 10, 40, 40, 60, 60, 65])
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=clock.__next__))
    monkeypatch.setattr(local.LocalRuns, "_start", runs_of({}))
    said: list[str] = []
    here(tmp_path, said).run()
    assert said[::2] == [
        "run 1 of 4: 1 node",
        "run 2 of 4: 2 nodes, about 30 s to go",
        "run 3 of 4: 1 node, about 40 s to go",
        "run 4 of 4: 2 nodes, about 20 s to go",
    ]


@pytest.mark.usefixtures("handlers")
def test_if_the_first_run_is_refused_all_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.LocalRuns, "_start", runs_of({1: 64}))
    with pytest.raises(BadInput, match=r"^no luck$") as refusal:
        here(tmp_path, []).run()
    assert refusal.value.id == "scaling-run-refused"
    monkeypatch.setattr(local.LocalRuns, "_start", runs_of({2: 64}))
    assert here(tmp_path, []).run() == [local.FailedSize(2, "status 64: no luck")]


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("apptrain: a\ntraceback\napptrain: the job ended with status 1\n", "a"),
        ("ValueError: no\n\n", "ValueError: no"),
        ("apptrain: the job ended with status 9\n", "the job ended with status 9"),
        ("", "it said nothing"),
        (None, "it said nothing"),
    ],
)
def test_of_a_run_that_failed_the_launchers_own_last_words_count(
    log: str | None, line: str, tmp_path: Path
) -> None:
    if log is not None:
        (tmp_path / "log").write_text(log)
    assert local._last_line(tmp_path / "log") == line


def test_a_run_whose_time_is_over_is_asked_to_end(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert here(tmp_path, [], minutes=0.002)._wait(child) == (143, True)
    with subprocess.Popen(["true"]) as child:
        assert here(tmp_path, [])._wait(child) == (0, False)


def test_one_that_does_not_end_then_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "TO_END", 0.3)
    deaf = ["sh", "-c", "trap '' TERM; echo; exec sleep 60"]
    with subprocess.Popen(deaf, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert here(tmp_path, [], minutes=0.002)._wait(child) == (137, True)


@pytest.mark.usefixtures("handlers")
def test_a_signal_before_a_run_starts_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = here(tmp_path, [])
    monkeypatch.setattr(local, "sys", type("Sys", (), {"executable": "/bin/false"}))
    runs.signals.append(signal.SIGTERM)
    with pytest.raises(local.BrokenOff) as broken:
        runs.run()
    assert broken.value.status == 143
