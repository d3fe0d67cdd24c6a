"""What lies where in the run directory, and who may see it."""

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.job.rundir import RunDirectory, job_end, next_attempt, read_key, refuse_unwritable


@pytest.mark.parametrize(
    ("name", "part"), [("gpu-a01", "gpu-a01"), ("fd00::1", "fd00__1"), ("../räck 7/a", ".._r_ck_7_a")]
)
def test_each_rank_of_each_attempt_has_its_own_files(name: str, part: str) -> None:
    run = RunDirectory(Path("/run"), 2)
    assert run.stack(name, 13) == Path(f"/run/stacks/2/{part}.rank13.txt")
    assert run.log(name, "rank13", "out") == Path(f"/run/logs/2/{part}.rank13.out")


@pytest.mark.parametrize(("local_rank", "task"), [(None, "3"), (1, "3.1")])
def test_each_task_has_its_own_plan_and_outcome(local_rank: int | None, task: str) -> None:
    run = RunDirectory(Path("/run"), 2)
    assert run.plan(3, local_rank) == Path(f"/run/plan.{task}.json")
    assert run.outcome(3, local_rank) == Path(f"/run/outcome/2.{task}")


def test_a_run_directory_is_private_and_its_key_is_made_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "job", 2)
    run.create()
    run.make_key()
    key = read_key(run.key)
    run.make_key()
    assert read_key(run.key) == key
    assert len(key) == 64
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.key.stat().st_mode & 0o777 == 0o600
    assert run.log("fd00::1", "rank3", "err") == run.path / "logs" / "2" / "fd00__1.rank3.err"


def test_a_run_directory_that_stays_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    tmp_path.chmod(0o770)
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(BadInput) as refused:
        RunDirectory(tmp_path, 0).create()
    assert str(refused.value) == (
        f"the run directory {tmp_path} is open to others (mode 770) and not yours to close: give --run-dir a directory "
        "of your own"
    )


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput) as refused:
        RunDirectory(tmp_path / "file" / "run", 0).create()
    assert str(refused.value) == (
        f"the run directory {tmp_path}/file/run cannot be written (Not a directory): "
        "give --run-dir a directory that all nodes share and you may write"
    )


def test_a_key_that_is_missing_open_or_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(BadInput, match="cannot be read: No such file or directory"):
        read_key(path)
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    with pytest.raises(BadInput, match=r"is open to others \(mode 644\): chmod 600"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == b"0123456789abcdef"
    path.write_text("short\n")
    with pytest.raises(BadInput, match="holds 5 bytes, 16 at least"):
        read_key(path)


def test_an_attempt_that_nobody_may_begin_is_not_counted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 3)
    run.create()
    (tmp_path / "logs" / "3").rmdir()
    run.close()
    assert next_attempt(tmp_path) == 0
    run.claim([(1, "b")], exclusive=False)
    assert next_attempt(tmp_path) == 4


def test_of_two_that_claim_an_attempt_one_has_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 3)
    run.create()
    assert (run.crew(), run.is_closed()) == (None, False)
    run.claim([(2, "c"), (0, "a b")], exclusive=True)
    with pytest.raises(FileExistsError):
        run.claim([(1, "b")], exclusive=True)
    assert (run.crew(), run.is_closed()) == ([2, 0], False)
    assert (tmp_path / "outcome" / "3.nodes").read_text() == "2 c\n0 a b\n"
    run.close()
    assert run.crew() == [2, 0]
    run.claim([(1, "b")], exclusive=False)  # the first one of a job, whose attempts are counted
    assert run.crew() == [1]
    assert [path.name for path in (tmp_path / "outcome").iterdir()] == ["3.nodes"]


def test_an_attempt_that_is_closed_is_claimed_by_nobody(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 3)
    run.create()
    run.close()
    assert (run.crew(), run.is_closed()) == (None, True)
    with pytest.raises(FileExistsError):
        run.claim([(1, "b")], exclusive=True)
    run.forget_claims()
    assert not run.is_closed()


def test_the_attempts_that_followed_one_are_counted_up_to_the_first_that_nobody_began(tmp_path: Path) -> None:
    (tmp_path / "outcome").mkdir()
    for attempt, text in ((1, "0 a\n"), (2, "0 a\n1 b\n"), (3, ""), (4, "0 a\n")):
        (tmp_path / "outcome" / f"{attempt}.nodes").write_text(text)
    assert [RunDirectory(tmp_path, attempt).later_attempts() for attempt in (0, 1, 2, 3)] == [2, 2, 2, 4]


@pytest.mark.parametrize(
    ("restarts", "forgets"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_an_attempt_that_begins_forgets_what_was_meant_for_another(
    restarts: bool, forgets: bool, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path, 3)
    run.ask_to_stop()
    assert run.stop.stat().st_mode & 0o777 == 0o600
    run.begin(restarts=restarts, forgets_stop=forgets)
    assert run.stop.exists() == (not forgets)
    assert (run.unfinished(), run.has_claims(), run.is_closed()) == (None, restarts, restarts)
    run.note_begun()
    assert run.unfinished() == 3
    run.finish()
    run.finish()
    assert run.unfinished() is None


def test_a_wish_to_stop_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "gone", 0).ask_to_stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "x\n", "-1\n", "1 2\n", "1234567890\n"])
def test_what_names_no_attempt_is_no_unfinished_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "unfinished").write_text(text)
    assert RunDirectory(tmp_path, 0).unfinished() is None


def test_restarts_and_planned_ends_are_counted_apart_with_the_newest_checkpoint_of_then(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path, 3)
    run.add_restart()
    for name, written in (
        ("step-00000002", 1_000_000_001_000_000_500),
        ("step-00000001", 10**18),
        (".half.tmp", 2 * 10**18),
    ):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        os.utime(tmp_path / "checkpoints" / name, ns=(written, written))
    assert run.newest_checkpoint() == "1000000001.000000500"
    run.add_restart()
    run.add_planned_end()
    assert run.restarts() == ["0", "1000000001.000000500"]
    assert run.planned_ends() == ["1000000001.000000500"]
    assert (tmp_path / "restarts").read_text() == "3 0\n3 1000000001.000000500\n"
    assert (tmp_path / "restarts").stat().st_mode & 0o777 == 0o600
    run.forget_restarts()
    assert (run.restarts(), len(run.planned_ends())) == ([], 1)
    run.forget_planned_ends()
    run.forget_planned_ends()
    assert run.planned_ends() == []


def test_a_run_directory_takes_as_much_as_a_job_begins_with_before_anything_starts(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limit[1]))
    try:
        with pytest.raises(
            BadInput, match=rf"^the run directory {tmp_path}/run cannot be written \(File too large\)"
        ):
            RunDirectory(tmp_path / "run", 0).create()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    RunDirectory(tmp_path / "run", 0).create()
    assert not list((tmp_path / "run").glob(".*"))


def test_a_key_that_a_full_disk_has_left_empty_is_made_anew(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 0)
    run.key.touch(mode=0o600)
    run.make_key()
    assert len(read_key(run.key)) == 64


def test_a_run_directory_that_was_made_anew_is_another(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", 0)
    run.create()
    first = run.inode()
    assert run.inode() == first
    run.path.rename(tmp_path / "old")
    run.create()
    assert run.inode() != first


@pytest.mark.parametrize(
    ("path", "why"), [("file/run", "FOLDER/file is no directory"), ("gone/run", None), ("", None)]
)
def test_where_no_run_directory_can_be_made_is_seen_before(
    tmp_path: Path, path: str, why: str | None
) -> None:
    (tmp_path / "file").touch()
    if why is None:
        refuse_unwritable(tmp_path / path)
        return
    with pytest.raises(BadInput) as refused:
        refuse_unwritable(tmp_path / path)
    assert f"cannot be written ({why.replace('FOLDER', str(tmp_path))}): " in str(refused.value)


def test_the_next_attempt_counts_numbers_of_nine_digits_and_nothing_else(tmp_path: Path) -> None:
    assert next_attempt(tmp_path) == 0
    for name in ("outcome/2.0", "logs/7", "outcome/9999999999.0", "logs/12x"):
        (tmp_path / name).mkdir(parents=True)
    assert next_attempt(tmp_path) == 8
    (tmp_path / "logs/123456789").mkdir()
    assert next_attempt(tmp_path) == 123456790


def test_a_wish_to_stop_says_when_the_job_ends_or_nothing(tmp_path: Path) -> None:
    stop, soon = tmp_path / "stop", int(time.time()) + 60
    assert job_end(stop) == (None, "")
    for text, end in {"": None, f"end={soon}": soon, f"end={soon}.25\n": soon + 0.25}.items():
        stop.write_text(text)
        assert job_end(stop) == (end, "")


@pytest.mark.parametrize(
    "text",
    [
        "end=inf",
        "end=nan",
        "end=-1",
        "end=1e9",
        "end=0",
        "end=" + "9" * 12,
        "end=\x1b[2J",
        "now",
        "end=\u0661",
    ],
)
def test_any_other_wish_to_stop_counts_and_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "stop").write_text(text, encoding="utf-8")
    end, said = job_end(tmp_path / "stop")
    assert end is None
    assert said.startswith(f"{tmp_path}/stop was taken as a wish to stop, but it holds '{text[:3]}")
    assert said.isprintable()


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_a_wish_to_stop_may_be_no_file(tmp_path: Path, kind: str) -> None:
    stop = tmp_path / "stop"
    if kind == "fifo":
        os.mkfifo(stop)
    elif kind == "directory":
        stop.mkdir()
    else:
        stop.symlink_to("/dev/zero")
    end, said = job_end(stop)
    assert end is None
    assert said.startswith(f"{stop} was taken as a wish to stop, but it is a ")
    assert "regular file" in said


def test_a_directory_in_place_of_the_stop_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stop").mkdir()
    with pytest.raises(BadInput, match=r"/stop is a directory, not a wish to stop: remove it$"):
        RunDirectory(tmp_path, 0).begin(restarts=False, forgets_stop=True)


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_a_wish_to_stop_that_comes_once_the_attempts_folders_are_there_is_heeded(
    earlier: bool, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path, 0)
    if earlier:
        run.ask_to_stop()
        os.utime(run.stop, (1, 1))  # a file system's clock may tick 100 times a second
    make = Path.mkdir

    def seen(path: Path, *given: Any, **how: Any) -> None:
        make(path, *given, **how)
        if asked and path == run.logs:
            run.ask_to_stop()

    monkeypatch.setattr(Path, "mkdir", seen)
    run.begin(restarts=False, forgets_stop=True)
    assert run.stop.exists() == asked


def test_what_is_no_file_says_nothing_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "outcome").mkdir()
    for name in ("restarts", "unfinished", "outcome/0.nodes"):
        os.mkfifo(tmp_path / name)
    run = RunDirectory(tmp_path, 0)
    assert (run.restarts(), run.unfinished(), run.crew()) == ([], None, None)


def test_a_directory_that_others_could_write_is_refused_unless_it_is_empty(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    RunDirectory(tmp_path, 0).create()
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    tmp_path.chmod(0o770)
    with pytest.raises(
        BadInput, match=r"was writable by others \(mode 770\), who may have put files in it: "
    ):
        RunDirectory(tmp_path, 1).create()
    assert tmp_path.stat().st_mode & 0o777 == 0o770


def test_a_directory_with_folders_of_something_else_is_not_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "paper").mkdir()
    tmp_path.chmod(0o755)
    with pytest.raises(BadInput, match=r"has other folders \(paper\) and is no run directory"):
        RunDirectory(tmp_path, 0).create()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["logs", "checkpoints", "outcome", "logs/0"])
def test_a_project_that_has_something_of_a_name_of_ours_is_no_run_directory(
    tmp_path: Path, name: str
) -> None:
    for folder in ("src", name):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("manifest.json", "lock", "stop"):
        (tmp_path / file).touch()
    tmp_path.chmod(0o750)
    with pytest.raises(BadInput, match=r"has other folders \(src\) and is no run directory"):
        RunDirectory(tmp_path, 0).create()
    assert tmp_path.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("begun", ["create", "make_key", "note_first", "only checkpoints"])
def test_a_run_directory_is_known_by_what_an_attempt_begins_with(tmp_path: Path, begun: str) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    (run / "checkpoints").mkdir()
    if begun != "only checkpoints":
        (run / "paper").mkdir()
        getattr(RunDirectory(run, 0), begun)()
    run.chmod(0o755)
    RunDirectory(run, 1).create()
    assert run.stat().st_mode & 0o777 == 0o700


def test_a_directory_into_which_the_scheduler_has_begun_to_write_is_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "slurm-7.out").touch()
    tmp_path.chmod(0o755)
    RunDirectory(tmp_path, 0).create()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_link_to_ones_own_directory_is_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o755)
    (tmp_path / "run").symlink_to("scratch")
    for attempt in (0, 1):
        RunDirectory(tmp_path / "run", attempt).create()
    assert (tmp_path / "scratch" / "logs" / "1").is_dir()


@pytest.mark.parametrize(
    "name", ["outcome", "logs", "stacks", "tasks", "job.log", "join.key", "chain.env", "manifest.json"]
)
def test_a_planted_link_is_not_followed(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch() if "." in name else elsewhere.mkdir()
    (run / name).symlink_to(elsewhere)
    with pytest.raises(BadInput, match=rf"run/{name} is not a .* of yours: look at it and remove it"):
        RunDirectory(run, 0).create()
