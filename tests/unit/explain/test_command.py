"""`apptrain explain` as a user types it: statuses, words, JSON, and whatever a file may hold."""

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint.explain import catalogue, command, judge, logs
from entrypoint.explain.catalogue import Entry, Remedy
from entrypoint.explain.judge import CauseFound, Judgement
from entrypoint.explain.scan import Evidence, Index, Scan
from tests.unit.bounds import limited
from tests.unit.explain import good

INDEX = Index(catalogue.load())
CHECKOUT = Path(__file__).resolve().parents[3]
OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def explain(*words: str | Path, given: bytes = b"") -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, "-m", "entrypoint.cli.apptrain", "explain", *map(str, words)],
        cwd=CHECKOUT,
        input=given,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def as_json(*words: str | Path, given: bytes = b"") -> dict[str, Any]:
    return json.loads(explain(*words, "--json", given=given).stdout)


def test_a_known_cause_is_told_in_words_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text("step 1\n" + OOM)
    done = explain(tmp_path / "job.out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "the memory of a GPU is full (cuda-out-of-memory)\n  where:     rank 3\n  job.out:2: "
    )
    assert "expandable_segments:True" in done.stdout


def test_a_symptom_is_called_one() -> None:
    note = "note:      a symptom: what caused it is not in this log"
    watchdog = b"[Rank 1] Watchdog caught collective operation timeout: x\n"
    assert note in explain("-", given=watchdog).stdout
    assert note not in explain("-", given=watchdog + OOM.encode()).stdout


def test_json_has_the_keys_that_are_promised(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(OOM)
    (row,) = as_json(tmp_path / "job.out")["causes"]
    assert {"id", "title", "why", "remedy", "where", "rank", "node"} <= set(row)
    assert (row["id"], row["rank"], row["node"]) == ("cuda-out-of-memory", 3, None)
    assert row["where"] == {"file": "job.out", "line": 1}


def test_what_is_not_known_is_said_with_the_earliest_error(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text("ok\nERROR: the frobnicator is upside down\nChildFailedError: \n")
    done = explain(tmp_path / "job.out")
    assert done.returncode == 1
    assert done.stdout.startswith(
        "the cause is not known\n  the earliest error:\n  job.out:2: ERROR: the frob"
    )


def test_it_reads_what_is_piped_in_and_gzip() -> None:
    assert as_json("-", given=OOM.encode())["causes"][0]["where"] == {"file": "-", "line": 1}
    assert as_json("-", given=gzip.compress(OOM.encode()))["causes"][0]["rank"] == 3


def test_a_folder_is_read_without_fifos_checkpoints_and_loops(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "rank3.err").write_text(OOM)
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "x.pt").write_bytes(b"\0" * 100)
    (tmp_path / "core").write_bytes(b"\x7fELF" + b"\0" * 100)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "old.log.gz").write_bytes(gzip.compress(b"step 1\n"))
    found = as_json(tmp_path)
    assert found["causes"][0]["where"]["file"] == "a/rank3.err"
    assert found["read"]["files"] == 2
    assert found["read"]["not_read"] == ["core: it is no text"]


@pytest.mark.parametrize("what", ["missing.log", "empty.log", "pipe", "/dev/zero", "folder"])
def test_nothing_to_read_is_refused_at_once(what: str, tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    done = explain(tmp_path / what)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (64, "", 1)
    assert done.stderr.startswith("apptrain: explain: ")
    assert explain().returncode == 64


def test_binary_escapes_carriage_returns_and_endless_lines_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(
        b"\x1b[31m"
        + b"10%\r20%\r" * 100_000
        + b"x" * 5_000_000
        + b"\n\x1b[1;31m"
        + OOM.encode()
        + b"\xff\xfe\n"
    )
    (row,) = as_json(path)["causes"]
    assert (row["id"], row["where"]["line"]) == ("cuda-out-of-memory", 2)
    path.write_bytes(("\ufeff" + OOM).encode("utf-16-le"))
    assert as_json(path)["causes"][0]["id"] == "cuda-out-of-memory"


def test_memory_is_bounded_however_long_the_log_is(tmp_path: Path) -> None:
    """At most 200 MB of memory, by `make bench ARGS=explain` for 2 GB. Here 30 MB of 300,000 lines."""
    path = tmp_path / "x.log"
    path.write_text("\n".join(good.lines(300_000)) + "\n" + OOM)
    line = f"ulimit -d {100 << 10} && exec {sys.executable} -m entrypoint.cli.apptrain explain {path}"
    done = subprocess.run(["bash", "-c", line], cwd=CHECKOUT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"x.log:300001: " in done.stdout


def test_what_a_folder_takes_is_bounded_though_each_rank_has_many_errors(tmp_path: Path) -> None:
    """A quarter of an hour for 1,000 such ranks, if each line were looked at in full with those near it."""
    steps = "".join(f"step {at} loss 2.1\n" for at in range(300))
    noise = "".join(
        f"10:10:{at % 60:02} ERROR client: ConnectionResetError: try {at}\n" for at in range(1500)
    )
    for rank in range(100):
        (tmp_path / f"rank{rank}.log").write_text(steps + noise + OOM * (rank == 70))
    ended = limited(tmp_path, "explain", ".")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "rank70.log:1801: " in ended.stdout


def test_a_gzip_that_would_fill_the_memory_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_UNPACKED", 1 << 20)
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"step\n" * 10_000_000, 9))
    scan = Scan(INDEX)
    assert logs.read_all(path, scan).skipped == ["x.gz: only its beginning was read"]
    assert scan.size <= 1 << 20


# --- run directories of ours ----------------------------------------------------------------------------------


def ended(folder: Path, *, status: int, rank: str, error: str, log: str = "") -> None:
    (folder / "outcome").mkdir(parents=True)
    (folder / "logs" / "0").mkdir(parents=True)
    (folder / "outcome" / "0.1").write_text(
        f"status={status}\nrank={rank}\nnode=gpu-a02\nsignal=0\ntime=12.5\nerror={error}\n"
    )
    (folder / "outcome" / "0.0").write_text(
        "status=1\nrank=0\nnode=gpu-a01\nsignal=0\ntime=13.5\nerror=Broken pipe\n"
    )
    (folder / "logs" / "0" / "gpu-a02.rank3.err").write_text(log)


def test_a_run_is_explained_by_what_it_knows_before_any_pattern(tmp_path: Path) -> None:
    ended(
        tmp_path, status=124, rank="3", error="stuck, no step for 300 s: it is in train.py:88 load", log=OOM
    )
    (row,) = as_json(tmp_path)["causes"]
    assert (row["id"], row["rank"], row["node"]) == ("rank-stuck", 3, "gpu-a02")
    assert row["where"] == {"file": "outcome/0.1", "line": 6}


def test_the_log_of_the_rank_to_blame_says_more_than_its_status(tmp_path: Path) -> None:
    ended(tmp_path, status=1, rank="3", error="RuntimeError: worker died", log=OOM)
    row = as_json(tmp_path)["causes"][0]
    assert (row["id"], row["rank"], row["node"]) == ("cuda-out-of-memory", 3, "gpu-a02")


@pytest.mark.parametrize(
    ("who", "id"),
    [
        ("gpu-a02: ", "host-out-of-memory"),
        ("", "host-out-of-memory"),
        ("gpu-a09: ", "rank-failed"),
    ],
    ids=["its node", "no node", "another node"],
)
def test_an_end_that_names_no_rank_is_explained_by_what_its_own_node_said(
    who: str, id: str, tmp_path: Path
) -> None:
    ended(tmp_path, status=1, rank="", error="RuntimeError: worker died")
    (tmp_path / "job.log").write_text(f"{who}slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n")
    cause = as_json(tmp_path)["causes"][0]
    assert (cause["id"], cause["node"]) == (id, "gpu-a02")


def test_an_error_of_its_own_is_told_with_rank_and_node(tmp_path: Path) -> None:
    ended(tmp_path, status=1, rank="3", error="ValueError: no such tokenizer")
    row = as_json(tmp_path)["causes"][0]
    assert (row["id"], row["rank"], row["node"]) == ("rank-failed", 3, "gpu-a02")
    assert "no such tokenizer" in row["why"]
    assert row["leave_out"] is None


def test_a_node_to_blame_for_the_end_of_a_run_is_to_be_left_out(tmp_path: Path) -> None:
    ended(tmp_path, status=1, rank="3", error="RuntimeError: CUDA error: uncorrectable ECC error encountered")
    row = as_json(tmp_path)["causes"][0]
    assert (row["id"], row["leave_out"]) == ("gpu-ecc", "gpu-a02")


@pytest.mark.parametrize(
    ("status", "rank", "error", "id"),
    [
        (130, "", "interrupted", "interrupted"),
        (143, "", "ended by SIGTERM", "ended-by-signal"),
        (3, "3", "nothing on stderr", "rank-silent"),
    ],
)
def test_who_ended_it_is_told_apart_from_an_error_of_a_rank(
    status: int, rank: str, error: str, id: str, tmp_path: Path
) -> None:
    ended(tmp_path, status=status, rank=rank, error=error)
    assert as_json(tmp_path)["causes"][0]["id"] == id


def test_of_a_run_of_which_nothing_has_ended_that_is_said(tmp_path: Path) -> None:
    for folder in ("outcome", "logs/0"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "logs/0/a.rank0.out").write_text("step 1\n")
    done = explain(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "the cause is not known",
        "  no line of 1 line looks like an error",
        "  no node has left an outcome: the run is not over, or all of it was killed",
    ]


def killed(folder: Path, status: int, job_log: str) -> Path:
    """A run directory of which attempt 0 ended with this status, and attempt 1 was killed whole."""
    for name in ("outcome", "logs/0", "logs/1"):
        (folder / name).mkdir(parents=True)
    (folder / "outcome" / "0.1").write_text(
        f"status={status}\nrank=1\nnode=b\nsignal=0\ntime=1\nerror=KeyError: 'x'\n"
    )
    (folder / "job.log").write_text(f"apptrain: job 7, attempt 0: 2 nodes\n{job_log}")
    return folder


OWN = "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\nKeyError: 'x'\n"
AGAIN = "apptrain: restart 1 inside the allocation, as attempt 1\n"
UNENDED = "attempt 1: no node has left an outcome: the run is not over, or all of it was killed"


@pytest.mark.parametrize("job_log", [OWN + AGAIN, OWN + "apptrain: job 8, attempt 1: 2 nodes\n", OWN])
def test_of_an_attempt_that_left_no_outcome_no_earlier_one_is_told_as_the_cause(
    job_log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(str(killed(tmp_path, 1, job_log)), as_json=False) == 1
    said = "also seen:\n  outcome/0.1:6: a rank failed with an error of its own (rank-failed)"
    assert capsys.readouterr().out == f"{UNENDED}\n{said}\n"


@pytest.mark.parametrize("made", ["logs", "claim", "manifest"])
def test_a_planned_end_is_not_told_of_a_run_that_goes_on(
    made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = killed(tmp_path, 75, AGAIN)
    if made != "logs":
        (path / "logs" / "1").rmdir()
    if made == "claim":
        (path / "outcome" / "1.nodes").write_text("0 a\n1 b\n")
    if made == "manifest":
        attempts = [{"attempt": 1, "nodes": ["a", "b"]}]
        (path / "manifest.json").write_text(json.dumps({"schema_version": 2, "attempts": attempts}))
    assert command.main(str(path), as_json=False) == 1
    assert capsys.readouterr().out == f"{UNENDED}\n"


def test_what_the_logs_of_an_attempt_without_an_outcome_tell_is_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = killed(tmp_path, 1, OWN + AGAIN)
    (path / "logs" / "1" / "a.rank0.err").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to\n")
    assert command.main(str(path), as_json=False) == 0
    said = capsys.readouterr().out
    assert "logs/1/a.rank0.err:1: torch.OutOfMemoryError" in said
    assert f"  note:      {UNENDED}\n" in said


def test_a_python_script_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("print(1)\n")
    done = explain(tmp_path / "my.py")
    assert (done.returncode, done.stdout) == (64, "")
    assert f"{tmp_path}/my.py is a program: give the log of a run of it; of `" in done.stderr


def test_a_run_that_ended_well_has_no_cause(tmp_path: Path) -> None:
    (tmp_path / "logs" / "0").mkdir(parents=True)
    (tmp_path / "outcome").mkdir()
    (tmp_path / "outcome" / "0.0").write_text("status=0\nrank=\nnode=a\nsignal=0\ntime=1\nerror=\n")
    done = explain(tmp_path)
    assert (done.returncode, done.stdout) == (1, "attempt 0 has no failure: it ended well, or still runs\n")


# --- what is printed ------------------------------------------------------------------------------------------


def entry(id: str, kind: str = "cause", *remedies: Remedy) -> Entry:
    told = remedies or (Remedy("Mend it"),)
    return replace(
        catalogue.load()[0], id=id, kind=kind, title=f"the {id}", why="So.", remedies=told, source="docs"
    )


def seen(one: Entry | None, number: int, text: str = "it broke") -> Evidence:
    return Evidence(one, text, "a\x1b.log", number, (0, number), None, None, "", "")


def found(one: Entry, number: int, *, count: int = 1, leave_out: str = "") -> CauseFound:
    return CauseFound(one, seen(one, number), 3, "gpu1", "5", leave_out, count)


NOTHING = Judgement((), (), None)
OTHERS = tuple(found(entry(f"other{at}"), 10 + at, count=at) for at in range(1, 8))


@pytest.fixture
def said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Judgement], list[str]]:
    """What is printed for a log of two lines that is judged so."""
    (tmp_path / "x.log").write_text("step 1\nstep 2\n")

    def told(judgement: Judgement) -> list[str]:
        monkeypatch.setattr(judge, "of", lambda *_: judgement)
        status = command.main(str(tmp_path / "x.log"), as_json=False)
        assert status == (0 if judgement.causes else 1)
        return capsys.readouterr().out.splitlines()

    return told


def test_a_cause_is_told_with_all_that_may_be_done(said: Callable[[Judgement], list[str]]) -> None:
    cause = found(
        entry("bug", "cause", Remedy("Mend it."), Remedy("leave it", "it rains")), 7, leave_out="gpu\x1b1"
    )
    assert said(Judgement((cause,), (), None)) == [
        "the bug (bug)",
        "  where:     rank 3, node gpu1, GPU 5",
        "  a?.log:7: it broke",
        "  why:       So.",
        "  do:        Mend it.",
        "             if it rains: leave it",
        "  leave out: gpu?1",
        "  source:    docs",
    ]
    bare = replace(cause, entry=entry("bug", "symptom"), rank=None, node="", device="", leave_out="")
    assert said(Judgement((bare,), (), None)) == [
        "the bug (bug)",
        "  a?.log:7: it broke",
        "  note:      a symptom: what caused it is not in this log",
        "  why:       So.",
        "  do:        Mend it",
        "  source:    docs",
    ]


def test_five_further_things_are_listed(said: Callable[[Judgement], list[str]]) -> None:
    lines = said(Judgement((found(entry("bug"), 7), OTHERS[0]), OTHERS[1:], None))
    assert lines[lines.index("also seen:") :] == [
        "also seen:",
        "  a?.log:11: the other1 (other1)",
        *(f"  a?.log:{10 + at}: the other{at} (other{at}) ({at} lines)" for at in range(2, 6)),
        "  and 2 more (--json has all)",
    ]
    lines = said(Judgement((found(entry("bug"), 7),), OTHERS[:5], None))
    assert "more (--json" not in lines[-1]
    assert "also seen:" not in said(Judgement((found(entry("bug"), 7),), (), None))


def test_without_a_cause_the_earliest_error_is_told(said: Callable[[Judgement], list[str]]) -> None:
    echo = found(entry("echo", "echo"), 9)
    unknown = replace(seen(None, 4), rank=2)
    assert said(Judgement((), (echo, OTHERS[0]), unknown)) == [
        "the cause is not known",
        "  the earliest error:",
        "  a?.log:4 (rank 2): it broke",
        "  note:      the echo: Mend it",
        "also seen:",
        "  a?.log:11: the other1 (other1)",
    ]
    assert said(Judgement((), (), seen(entry("mild"), 4))) == [
        "the cause is not known",
        "  the earliest line that tells of one:",
        "  a?.log:4: it broke",
    ]
    assert said(NOTHING) == ["the cause is not known", "  no line of 2 lines looks like an error"]
    assert said(Judgement((), OTHERS[:1], None)) == [
        "nothing says that it failed: it went on after all that was seen",
        "also seen:",
        "  a?.log:11: the other1 (other1)",
    ]


def test_json_tells_causes_others_and_the_earliest_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.log").write_text("step 1\x7f\n")
    cause = found(
        entry("bug", "cause", Remedy("Mend it."), Remedy("leave it", "it rains")), 7, leave_out="gpu1"
    )
    monkeypatch.setattr(judge, "of", lambda *_: Judgement((cause,), OTHERS[:1], seen(None, 4)))
    assert command.main(str(tmp_path / "x.log"), as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    other = told.pop("also_seen")
    assert told == {
        "schema_version": 1,
        "causes": [
            {
                "id": "bug",
                "title": "the bug",
                "why": "So. The log says: it broke",
                "remedy": "Mend it. If it rains: leave it.",
                "where": {"file": "a?.log", "line": 7},
                "rank": 3,
                "node": "gpu1",
                "device": "5",
                "leave_out": "gpu1",
                "kind": "cause",
                "count": 1,
                "source": "docs",
            }
        ],
        "earliest_error": {
            "text": "it broke",
            "where": {"file": "a?.log", "line": 4},
            "rank": None,
            "node": None,
        },
        "read": {"files": 1, "bytes": 8, "not_read": []},
    }
    assert [one["id"] for one in other] == ["other1"]


def test_five_files_that_were_not_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text("step 1\n")
    for at in range(22):
        (tmp_path / f"core{at:02}").write_bytes(b"\x7fELF")
    assert command.main(str(tmp_path), as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5:] == [f"not read: core{at:02}: it is no text" for at in range(5)]
    assert lines[-6].startswith("  no line of 1 line")
    command.main(str(tmp_path), as_json=True)
    assert len(json.loads(capsys.readouterr().out)["read"]["not_read"]) == 20


# --- anything -------------------------------------------------------------------------------------------------

MUTANTS = 300
"""By hand: APPTRAIN_TEST_MUTANTS=10000 .venv/bin/python -m pytest tests/unit/explain/test_command.py -k mutated --timeout 3000"""
PIECES = (
    b"\0",
    b"\r",
    b"\n",
    b"\x1b[",
    b"'",
    b'"',
    b"$(",
    b"`",
    b"\\",
    b"<<E",
    b"#SBATCH -",
    b"\xff",
    b"[rank",
    b"9" * 400,
    b"((",
)


def test_mutated_inputs_end_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from entrypoint.cli import apptrain

    draw = random.Random(7)
    begin = [entry.example.encode() for entry in catalogue.load()]
    begin += [
        b"#!/bin/bash\n#SBATCH -N 2\nsrun apptainer exec x.sif torchrun --nnodes=2 --rdzv_id='$A' t.py\n"
    ]
    path = tmp_path / "x.log"
    for number in range(int(os.environ.get("APPTRAIN_TEST_MUTANTS", MUTANTS))):
        content = bytearray(b"\n".join(draw.sample(begin, 3)))
        for _ in range(draw.randrange(1, 12)):
            at = draw.randrange(len(content) + 1)
            if draw.random() < 0.5:
                content[at:at] = draw.choice(PIECES)
            else:
                del content[at : at + draw.randrange(1, 40)]
        path = tmp_path / f"x.{('log', 'sbatch', 'gz')[number % 3]}"
        path.write_bytes(
            gzip.compress(bytes(content))[: draw.randrange(20, 4000)] if number % 3 == 2 else bytes(content)
        )
        status = apptrain.main(["explain", str(path), *(["--json"] if number % 2 else [])])
        said = capsys.readouterr()
        assert status in (0, 1, 64), content
        assert (status == 64) == bool(said.err), content
        assert said.out.replace("\n", "").isprintable(), content
