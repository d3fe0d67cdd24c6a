"""What a run directory knows of its end."""

import json
import os
from pathlib import Path
from typing import NoReturn

import pytest

from entrypoint.explain import run
from entrypoint.explain.judge import Judgement
from entrypoint.job.outcome import Outcome


def outcome(status: int, time: float, *, rank: str = "1", node: str = "b", error: str = "no") -> str:
    return f"status={status}\nrank={rank}\nnode={node}\nsignal=0\ntime={time}\nerror={error}\n"


def directory(folder: Path, **outcomes: str) -> Path:
    (folder / "outcome").mkdir(parents=True)
    (folder / "logs").mkdir()
    for name, text in outcomes.items():
        (folder / "outcome" / name.lstrip("_").replace("_", ".")).write_text(text)
    return folder


def test_the_earliest_failure_of_the_last_attempt_counts(tmp_path: Path) -> None:
    path = directory(
        tmp_path,
        _0_0=outcome(9, 1.0),
        _10_0=outcome(1, 7.0, rank="0", node="a"),
        _10_1=outcome(2, 5.0, rank="3", error="boom"),
        _10_2=outcome(75, 3.0),
        _10_3=outcome(0, 2.0),
        _9_0=outcome(7, 0.5),
        x_0=outcome(8, 0.1),
        _1234567890_0=outcome(8, 0.1),
    )
    (path / "outcome" / "11.0").write_text("nothing")
    told = run.read(path)
    failure = Outcome(2, 3, "b", 0, 5.0, "boom")
    assert told == run.Told(attempt=10, failure=failure, file="outcome/10.1", stacks="")
    assert told.ended == "rank 3 on b: status 2: boom"
    (path / "stacks" / "10").mkdir(parents=True)
    again = run.read(path)
    assert again
    assert again.stacks == "stacks/10"


def test_a_run_that_ended_well_has_no_failure(tmp_path: Path) -> None:
    told = run.read(directory(tmp_path, _0_0=outcome(1, 1.0), _1_0=outcome(0, 9.0), _1_1=outcome(75, 9.0)))
    assert told == run.Told(attempt=1, failure=None, file="", stacks="")
    assert told.ended == "attempt 1 has no failure: it ended well, or still runs"


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({"0_0": 0, "0_1": 0, "0_2": 0}, "it ended well"),
        ({"0_0": 75, "0_1": 75, "0_2": 75}, "it has saved, and ended as planned (status 75)"),
        (
            {"0_0": 0, "0_2": 0},
            "1 of 3 nodes left no outcome that can be read, such as b: it still runs, or was killed",
        ),
        ({"0_0": 0, "0_1": 75, "0_2": 0}, "it ended well, or still runs"),
        # Of a node's tasks it is not known how many there are.
        ({"0_0_0": 0, "0_1_0": 0, "0_2_0": 0}, "it ended well, or still runs"),
    ],
)
def test_what_became_of_a_run_without_a_failure_is_what_all_its_nodes_left(
    tmp_path: Path, outcomes: dict[str, int], said: str
) -> None:
    path = directory(tmp_path, **{f"_{name}": outcome(status, 1.0) for name, status in outcomes.items()})
    attempts = [{"attempt": 0, "nodes": ["a", "b", "c"]}]
    (path / "manifest.json").write_text(json.dumps({"schema_version": 2, "attempts": attempts}))
    told = run.read(path)
    assert told
    assert told.ended == f"attempt 0 has no failure: {said}"


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ([0, 0, 0, 0], "it ended well"),
        ([75, 75, 75, 75], "it has saved, and ended as planned (status 75)"),
        ([0, 0, 0], "it ended well, or still runs"),
        ([0, 0, 75, 0], "it ended well, or still runs"),
    ],
)
def test_if_each_rank_is_a_task_the_manifest_tells_how_many_there_are(
    tmp_path: Path, statuses: list[int], said: str
) -> None:
    ends = {f"_0_{at // 2}_{at % 2}": outcome(status, 1.0) for at, status in enumerate(statuses)}
    path = directory(tmp_path, **ends)
    attempts = [{"attempt": 0, "nodes": ["a", "b"], "nproc_per_node": 2}]
    (path / "manifest.json").write_text(json.dumps({"schema_version": 2, "attempts": attempts}))
    told = run.read(path)
    assert told
    assert told.ended == f"attempt 0 has no failure: {said}"


def test_a_failure_of_no_rank_is_its_nodes(tmp_path: Path) -> None:
    told = run.read(directory(tmp_path, _0_1=outcome(69, 1.0, rank="", error="a\x1b is late")))
    assert told
    assert told.ended == "b: status 69: a? is late"


def lost(node: str, time: float, more: str = "") -> str:
    return outcome(1, time, rank="", node=node, error=f"lost: nothing was heard from it for 60 s{more}")


OF_TWO, OF_ALL = ": it is gone, or a is cut off", ", nor from any other node: a may be cut off"


@pytest.mark.parametrize(
    ("outcomes", "file", "loss"),
    [
        # Who has left nothing is gone.
        ({"0": lost("b", 1.0, OF_TWO)}, "0.0", "node-lost"),
        ({"1": lost("a", 1.0)}, "0.1", "node-lost"),
        # Both were there to the end: one of them was cut off, and nothing says which.
        ({"0": lost("b", 1.0, OF_TWO), "1": lost("a", 2.0)}, "0.0", "cut-off"),
        ({"0": lost("b", 2.0, OF_TWO), "1": lost("a", 1.0)}, "0.1", "cut-off"),
        # Several against one.
        ({"0": lost("b", 1.0, OF_ALL), "1": lost("a", 2.0), "2": lost("a", 3.0)}, "0.1", "node-lost"),
        ({"0": lost("b", 2.0), "1": lost("a", 1.0), "2": lost("b", 2.0)}, "0.0", "node-lost"),
        # Two against two.
        (
            {"0": lost("c", 1.0), "1": lost("c", 1.5), "2": lost("a", 2.0), "3": lost("a", 2.0)},
            *("0.0", "cut-off"),
        ),
    ],
)
@pytest.mark.parametrize("of", ["manifest", "claims"])
def test_a_node_is_gone_if_it_has_left_nothing_or_several_say_so(
    outcomes: dict[str, str], file: str, loss: str, of: str, tmp_path: Path
) -> None:
    path = directory(tmp_path, **{f"_0_{place}": text for place, text in outcomes.items()})
    if of == "manifest":
        attempts = [{"attempt": 0, "nodes": ["a", "b", "c", "d"]}]
        (path / "manifest.json").write_text(json.dumps({"schema_version": 2, "attempts": attempts}))
    else:
        (path / "outcome" / "0.nodes").write_text("0 a\n1 b\n2 c\n3 d\n")
    told = run.read(path)
    assert told
    assert (told.file, told.loss) == (f"outcome/{file}", loss)
    found = run.with_told(Judgement((), (), None), told)
    node = told.failure.node if told.failure else ""
    assert (found.causes[0].entry.id, found.causes[0].leave_out) == (
        loss,
        node if loss == "node-lost" else "",
    )


@pytest.mark.parametrize(("is_lost", "file", "loss"), [(True, "0.1", "node-lost"), (False, "0.0", "cut-off")])
def test_where_the_job_script_was_lost_too_the_first_node_was_gone(
    is_lost: bool, file: str, loss: str, tmp_path: Path
) -> None:
    path = directory(tmp_path, _0_0=lost("b", 1.0, OF_TWO), _0_1=lost("a", 2.0))
    (path / "outcome" / "0.nodes").write_text("0 a\n1 b\n")
    told = run.of_attempt(path, 0, script_is_lost=is_lost, most=9)
    assert told
    assert (told.file, told.loss) == (f"outcome/{file}", loss)
    assert run.of_attempt(path, 1, script_is_lost=is_lost, most=9) is None


def test_a_node_that_closed_its_connection_was_there_to_do_so(tmp_path: Path) -> None:
    closed = outcome(1, 2.0, rank="", node="a", error="lost: it closed the connection")
    path = directory(tmp_path, _0_1=closed)
    (path / "outcome" / "0.nodes").write_text("0 a\n1 b\n")
    told = run.read(path)
    assert told
    (found,) = run.with_told(Judgement((), (), None), told).causes
    assert (found.entry.id, found.node, found.leave_out) == ("launcher-killed", "a", "")


def test_a_node_whose_outcome_was_not_read_has_left_one(tmp_path: Path) -> None:
    path = directory(tmp_path, _0_0=lost("b", 1.0, OF_TWO), _0_1=lost("a", 2.0))
    (path / "outcome" / "0.nodes").write_text("0 a\n1 b\n")
    told = run.of_attempt(path, 0, script_is_lost=False, most=1)
    assert told
    assert told.loss == "cut-off"


def test_outcomes_that_may_not_be_listed_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory(tmp_path, _0_1=lost("a", 2.0))

    def denied(folder: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", denied)
    assert run.read(path) is None


def test_where_no_nodes_are_known_a_loss_that_one_tells_is_not_sure(tmp_path: Path) -> None:
    told = run.read(directory(tmp_path, _0_1=lost("a", 2.0)))
    assert told
    assert told.loss == "cut-off"


def test_a_rank_that_failed_comes_before_a_loss_that_is_not_sure(tmp_path: Path) -> None:
    path = directory(tmp_path, _0_0=outcome(9, 3.0), _0_1=lost("a", 1.0))
    (path / "outcome" / "0.nodes").write_text("0 a\n1 b\n")
    told = run.read(path)
    assert told
    assert (told.file, told.loss) == ("outcome/0.0", "")


def test_a_nodes_own_failure_is_not_doubtful_because_another_missed_it(tmp_path: Path) -> None:
    signal = outcome(143, 3.0, rank="", node="c", error="ended by SIGTERM")
    path = directory(tmp_path, _0_0=lost("b", 0.5), _0_1=outcome(1, 1.0, rank="3"), _0_2=signal)
    (path / "outcome" / "0.nodes").write_text("0 a\n1 b\n2 c\n")
    told = run.read(path)
    assert told
    assert (told.file, told.loss) == ("outcome/0.1", "")


@pytest.mark.parametrize(
    ("made", "is_one"),
    [
        (["outcome", "logs"], True),
        (["outcome", "manifest.json"], True),
        (["outcome"], False),
        (["logs", "manifest.json"], False),
        ([], False),
    ],
)
def test_a_run_directory_has_outcomes_and_logs_or_a_manifest(
    made: list[str], is_one: bool, tmp_path: Path
) -> None:
    for name in made:
        (tmp_path / name).mkdir()
    assert run.is_one(tmp_path) == is_one
    assert run.read(tmp_path) is None


def test_the_end_of_a_job_is_explained_in_two_lines(tmp_path: Path) -> None:
    failure = Outcome(
        1, 3, "b", 0, 1.0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    first, second = run.in_lines(failure, tmp_path / "my run")
    assert first.startswith("explain: the memory of a GPU is full: ")
    assert second == f"explain: more by `apptrain explain '{tmp_path}/my run'`"


def test_a_script_that_misses_its_rank_is_sent_to_what_sets_it_here_too(tmp_path: Path) -> None:
    first, _ = run.in_lines(Outcome(1, 0, "b", 0, 1.0, "KeyError: 'RANK'"), tmp_path)
    assert "(with apptrain: leave --mode exec out)" in first


@pytest.mark.parametrize(
    "error",
    [
        *("", "the frobnicator is upside down", "ValueError: boom", "RuntimeError: Connection reset by peer"),
        *("stuck, no step for 300 s", "b did not come within 300 s"),
        "train: /data/train/b/3.jpg: no whole image: Truncated File Read: copy it again, or take it out and give "
        "another run directory",
        "train: batch_size is 130, no multiple of 3 ranks x accumulation 1 = 3: give a multiple of 3",
    ],
)
def test_what_nothing_is_known_of_has_no_line(error: str, tmp_path: Path) -> None:
    assert run.in_lines(Outcome(1, 3, "b", 0, 1.0, error), tmp_path) == ()
