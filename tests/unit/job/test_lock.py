"""The lock of a run directory: who has it, who may follow, and who notices that it is gone."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.private import write_private
from entrypoint.job import lock
from entrypoint.job.lock import Holder, InUse, Lock
from entrypoint.node import processes

HERE: dict[str, Any] = {
    "job": "7",
    "is_unique": True,
    "node": "gpu-a01",
    "pid": os.getpid(),
    "where": lock._where(),
    "begun": processes.begun(os.getpid()),
    "since": "2026-11-22 18:30:00",
}
ELSEWHERE = HERE | {"node": "gpu-a02", "where": "another boot", "pid": 3}


def locked(run: Path, said: list[str] | None = None, **changed: Any) -> Lock:
    """The lock as somebody has it who is like this process but for some facts."""
    mine = Holder(**{**HERE, "token": changed.get("job", "7"), **changed})
    return Lock(run, mine, (said if said is not None else []).append)


def has(run: Path) -> str:
    return str(json.loads((run / "lock").read_text())["token"])


def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture(autouse=True)
def in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT": 0.05, "LEASE": 0.3, "GLANCE": 0.01, "SETTLE": 0.02}.items():
        monkeypatch.setattr(lock, name, seconds)


def test_another_job_on_this_host_is_refused_at_once_and_told_who_has_it(tmp_path: Path) -> None:
    locked(tmp_path).take()
    said: list[str] = []
    with pytest.raises(InUse) as refused:
        locked(tmp_path, said, job="8").take()
    assert str(refused.value) == (
        f"the run directory {tmp_path} is in use by job 7 (process {os.getpid()} on gpu-a01, since "
        "2026-11-22 18:30:00): wait for its end, or give --run-dir another"
    )
    assert (said, has(tmp_path)) == ([], "7")
    with pytest.raises(InUse):
        lock.refuse_if_in_use(tmp_path)


def test_it_is_free_again_when_it_is_released_and_leaves_nothing(tmp_path: Path) -> None:
    first = locked(tmp_path)
    first.take()
    first.release()
    assert list(tmp_path.iterdir()) == []
    locked(tmp_path, job="8").take()
    first.release()
    assert has(tmp_path) == "8"


def test_a_job_that_ends_while_it_takes_it_leaves_none(tmp_path: Path) -> None:
    one = locked(tmp_path)
    one.release()
    one.take()
    assert list(tmp_path.iterdir()) == []


def test_who_waits_for_a_holder_elsewhere_may_be_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LEASE", 60.0)
    locked(tmp_path, token="held", **ELSEWHERE).take()
    said: list[str] = []
    waiting = locked(tmp_path, said, job="8")
    thread = threading.Thread(target=waiting.take)
    thread.start()
    while not said:
        thread.join(0.01)
    waiting.release()
    thread.join(10)
    assert not thread.is_alive()
    assert has(tmp_path) == "held"


@pytest.mark.parametrize(
    "changed", [{"pid": -1}, {"begun": "1"}], ids=["it has ended", "its id was given anew"]
)
def test_who_was_killed_on_this_host_is_followed_at_once(tmp_path: Path, changed: dict[str, object]) -> None:
    locked(tmp_path, **(changed if "begun" in changed else {"pid": gone()})).take()
    said: list[str] = []
    locked(tmp_path, said, job="8").take()
    assert (said, has(tmp_path)) == ([], "8")


def test_a_job_that_the_scheduler_runs_again_elsewhere_has_it_at_once(tmp_path: Path) -> None:
    locked(tmp_path, token="first", **ELSEWHERE).take()
    said: list[str] = []
    locked(tmp_path, said, token="again").take()
    assert (said, has(tmp_path)) == ([], "again")


def test_a_holder_elsewhere_that_touches_it_is_alive(tmp_path: Path) -> None:
    holder = locked(tmp_path, **ELSEWHERE)
    holder.take()
    threading.Thread(target=holder.keep, daemon=True).start()
    said: list[str] = []
    with pytest.raises(InUse, match=r"job 7 \(process 3 on gpu-a02"):
        locked(tmp_path, said, job="8").take()
    holder.release()
    (line,) = said
    assert line.startswith("job 7 (process 3 on gpu-a02, since 2026-11-22 18:30:00) has the run directory")


def test_time_in_which_the_file_system_hangs_is_not_the_holders_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked(tmp_path, **ELSEWHERE).take()
    looked, looks = lock._read, iter(["first", "hangs", "touched"])

    def look(path: Path) -> Holder | None:
        look = next(looks, "")
        if look == "hangs":
            time.sleep(2 * lock.LEASE)
        if look == "touched":
            os.utime(path)
        return looked(path)

    monkeypatch.setattr(lock, "_read", look)
    with pytest.raises(InUse):
        locked(tmp_path, job="8").take()


@pytest.mark.parametrize("job", ["8", "7"])
def test_a_holder_elsewhere_that_gives_no_sign_is_followed(tmp_path: Path, job: str) -> None:
    locked(tmp_path, token="dead", **ELSEWHERE | {"is_unique": job != "7"}).take()
    said: list[str] = []
    locked(tmp_path, said, job=job, token="next").take()
    assert (len(said), has(tmp_path)) == (1, "next")


def test_the_same_job_does_not_follow_its_own_process_that_lives_unless_it_restarts(tmp_path: Path) -> None:
    locked(tmp_path, token="one step").take()
    with pytest.raises(InUse):
        locked(tmp_path, token="another").take()
    locked(tmp_path, token="restart").take(again=True)
    assert has(tmp_path) == "restart"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"job": 7}', "\xff", "[" * 200_000, " " * 200_000])
def test_a_file_that_is_no_lock_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text, encoding="latin-1")
    locked(tmp_path, job="8").take()
    assert has(tmp_path) == "8"


@pytest.mark.parametrize("kind", ["fifo", "socket", "/dev/zero", "/nowhere", "lock"])
def test_what_is_no_file_is_replaced_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to(kind)
    done = threading.Thread(target=locked(tmp_path, job="8").take, daemon=True)
    done.start()
    done.join(30)
    assert not done.is_alive()
    assert has(tmp_path) == "8"
    assert not path.is_symlink()


def test_a_value_of_another_kind_is_no_lock(tmp_path: Path) -> None:
    fields = dataclasses.asdict(Holder(**HERE, token="7"))
    (tmp_path / "lock").write_text(json.dumps(fields | {"pid": "1"}))
    locked(tmp_path, job="8").take()
    assert has(tmp_path) == "8"


@pytest.mark.parametrize("job", ["7", "8"])
@pytest.mark.parametrize("holder", [HERE, ELSEWHERE], ids=["here", "elsewhere"])
def test_a_job_script_that_asks_first_is_refused_as_its_launch_would_be_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: dict[str, Any], job: str
) -> None:
    monkeypatch.setattr(lock, "LEASE", 60.0)
    first = locked(tmp_path, **{**holder, "token": "first"})
    first.take()
    keeping = threading.Thread(target=first.keep)
    keeping.start()
    with nullcontext() if job == "7" else pytest.raises(InUse, match="in use by job 7"):
        locked(tmp_path, job=job).await_free()
    assert has(tmp_path) == "first"
    first.release()
    keeping.join()
    locked(tmp_path, job="8").await_free()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_elsewhere_that_gave_no_sign_is_watched_once(tmp_path: Path) -> None:
    locked(tmp_path, token="dead", **ELSEWHERE).take()
    said: list[str] = []
    locked(tmp_path, said, job="8").await_free()
    locked(tmp_path, said, job="8").take()
    assert (len(said), has(tmp_path)) == (1, "8")


def test_who_was_suspended_hears_that_another_job_has_it(tmp_path: Path) -> None:
    suspended = locked(tmp_path)
    suspended.take()
    (tmp_path / "lock").unlink()
    locked(tmp_path, job="8").take()
    assert suspended.keep() == (
        f"the run directory {tmp_path} was taken by job 8 (process {os.getpid()} on gpu-a01, since "
        "2026-11-22 18:30:00)"
    )
    suspended.release()
    assert has(tmp_path) == "8"


def test_without_a_scheduler_a_restart_follows_only_who_was_met_as_of_this_job(tmp_path: Path) -> None:
    """Its job has the same name as any other; the holder was lost with its node."""
    by_hand = {"job": "manual", "is_unique": False}
    locked(tmp_path, **ELSEWHERE | by_hand, token="first").take()
    said: list[str] = []
    other = locked(tmp_path, said, **by_hand, token="second")
    other.note_holder()
    other.take(again=True)
    assert (has(tmp_path), said) == ("second", [])
    other.release()
    locked(tmp_path, **ELSEWHERE | by_hand, token="stranger").take()
    other = locked(tmp_path, said, **by_hand, token="third")
    other.take(again=True)
    assert (has(tmp_path), len(said)) == ("third", 1), "after a while without a sign of life"


def test_a_lock_that_is_made_between_two_looks_is_somebodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = lock._read
    looks: list[Holder | None] = []

    def look(path: Path) -> Holder | None:
        looks.append(looked(path))
        if len(looks) == 1:
            locked(tmp_path, job="9").take()
        return looks[-1]

    with monkeypatch.context() as patch:
        patch.setattr(lock, "_read", look)
        with pytest.raises(InUse):
            locked(tmp_path, job="8").take()
    assert (looks[0], has(tmp_path)) == (None, "9")


def test_of_two_that_follow_a_dead_one_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked(tmp_path, pid=gone()).take()
    refused: list[str] = []
    both = threading.Barrier(2)

    def at_once(path: Path, text: str) -> None:
        both.wait(10)
        write_private(path, text)
        both.wait(10)

    monkeypatch.setattr(lock, "write_private", at_once)

    def follow(job: str) -> None:
        try:
            locked(tmp_path, job=job).take()
        except InUse:
            refused.append(job)

    threads = [threading.Thread(target=follow, args=(job,)) for job in ("8", "9")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [*refused, has(tmp_path)] in (["8", "9"], ["9", "8"])
