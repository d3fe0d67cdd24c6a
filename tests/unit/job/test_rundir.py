"""What lies where in the run directory, and who may see it."""

import os
import time
from pathlib import Path

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.job.rundir import RunDirectory, job_end, next_attempt, read_key


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
        RunDirectory(tmp_path, 0).forget_stop()


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
    (tmp_path / "manifest.json").touch()
    RunDirectory(tmp_path, 0).create()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


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
