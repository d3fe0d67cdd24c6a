import json
import os
import shutil
import stat
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from train import metrics, report
from train.board import Board, Scalar
from train.evaluate import Score
from train.files import replace
from train.metrics import History, MetricsFile
from train.report import Recorder
from train.trouble import Troubles

RESULT = {
    "accuracy": 0.975,
    "correct": 351,
    "total": 360,
    "split": "test",
    "evaluated_on": "test",
    "steps": 29,
    "images_per_s": 412.4,
    "first_step_s": 5.25,
    "train_s": 48.0,
    "wall_s": 60.04,
    "config": "digits",
    "model": "resnet18",
    "world_size": 2,
    "device": "cpu",
}


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def troubles(said: list[str]) -> Troubles:
    return Troubles(said.append)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_line_is_whole_in_the_file_as_soon_as_it_is_written(tmp_path: Path, troubles: Troubles) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, troubles)
    file.step(1, loss=0.1 + 0.2, lr=1e-05, images_per_s=512.25)
    assert lines(path) == ['{"step": 1, "loss": 0.30000000000000004, "lr": 1e-05, "images_per_s": 512.25}']
    file.evaluation(1, accuracy=1 / 3, correct=1, total=3)
    assert lines(path)[1:] == ['{"step": 1, "accuracy": 0.3333333333333333, "correct": 1, "total": 3}']
    assert json.loads(lines(path)[1])["accuracy"] == 1 / 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ('{"step": 1}\n{"step": 2, "lo', ['{"step": 1}']),
        ('{"ste', []),
        ('{"step": 1}\n', ['{"step": 1}']),
        ("", []),
    ],
)
def test_an_unfinished_last_line_is_removed_before_going_on(
    tmp_path: Path, troubles: Troubles, before: str, kept: list[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    MetricsFile(path, troubles).evaluation(2, accuracy=0.5, correct=1, total=2)
    assert lines(path) == [*kept, '{"step": 2, "accuracy": 0.5, "correct": 1, "total": 2}']


def test_where_a_run_was_resumed_the_last_line_of_a_step_counts(tmp_path: Path, troubles: Troubles) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, troubles)
    for step, loss in [(1, 4.0), (2, 3.0), (3, 2.0)]:
        file.step(step, loss=loss, lr=0.1, images_per_s=10.0)
        file.evaluation(step, accuracy=step / 10, correct=step, total=10)
    file.step(2, loss=2.5, lr=0.2, images_per_s=20.0)
    with path.open("a") as stream:
        stream.write('{"step": 3, "loss": 9')
    assert metrics.read(path) == History(
        loss={1: 4.0, 2: 2.5}, lr={1: 0.1, 2: 0.2}, images_per_s={1: 10.0, 2: 20.0}, accuracy={1: 0.1}
    )


@pytest.mark.parametrize(
    "junk",
    [
        b'{"step": 2, "lo{"step": 2}',
        b"\0\0\0\0",
        b"[2]",
        b"null",
        b'{"loss": 1.0}',
        b'{"step": "2"}',
        b"[" * 9000,
    ],
)
def test_a_line_that_is_none_of_ours_is_skipped(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 3.0}\n' + junk + b'\n{"step": 3, "loss": 1.0}\n')
    assert metrics.read(path) == History(loss={1: 3.0, 3: 1.0})


def test_a_file_that_vanished_is_begun_anew_and_its_directory_with_it(
    tmp_path: Path, troubles: Troubles, said: list[str]
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path, troubles)
    for step in range(1, 4):
        file.evaluation(step, accuracy=0.5, correct=1, total=2)
        if step == 1:
            shutil.rmtree(path.parent)
    assert lines(path) == [
        f'{{"step": {step}, "accuracy": 0.5, "correct": 1, "total": 2}}' for step in (2, 3)
    ]
    assert said == [
        f"train: WARNING: metrics file: it has vanished: made {path} anew, without its earlier lines"
    ]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_where_the_parent_is_gone_too_lines_wait_until_it_is_back(
    tmp_path: Path, troubles: Troubles, said: list[str]
) -> None:
    path = tmp_path / "scratch" / "run" / "metrics.jsonl"
    path.parent.parent.mkdir()
    file = MetricsFile(path, troubles)
    shutil.rmtree(tmp_path / "scratch")
    for step in (1, 2):
        file.evaluation(step, accuracy=0.5, correct=1, total=2)
    assert not path.parent.parent.exists()
    assert said == [
        f"train: WARNING: metrics.jsonl: No such file or directory: {path} takes no lines; training goes on, they wait"
    ]
    path.parent.parent.mkdir()
    file.evaluation(3, accuracy=0.5, correct=1, total=2)
    assert list(metrics.read(path).accuracy) == [1, 2, 3]
    assert said[-1] == "train: metrics.jsonl: works again, after it failed twice"


@pytest.mark.parametrize("left", [0, 10])
def test_a_file_that_was_cut_goes_on_with_whole_lines(
    tmp_path: Path, troubles: Troubles, said: list[str], left: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, troubles)
    file.evaluation(1, accuracy=0.5, correct=1, total=2)
    size = path.stat().st_size
    os.truncate(path, left)
    file.evaluation(2, accuracy=0.5, correct=1, total=2)
    assert lines(path) == ['{"step": 2, "accuracy": 0.5, "correct": 1, "total": 2}']
    assert said == [f"train: WARNING: metrics file: something has cut it: {path} has {left} bytes of {size}"]


def test_lines_that_never_found_a_disk_are_counted_at_the_end(
    tmp_path: Path, troubles: Troubles, said: list[str]
) -> None:
    path = tmp_path / "none" / "run" / "metrics.jsonl"
    file = MetricsFile(path, troubles)
    file.evaluation(1, accuracy=0.5, correct=1, total=2)
    file.sync()
    file.close()
    assert said[1:] == [f"train: WARNING: metrics file: lines are lost: {path} lacks the last 1"]
    troubles.summarise()
    assert said[2:] == [
        "train: WARNING: metrics.jsonl: No such file or directory (3 times, and to the end)",
        "train: WARNING: metrics file: lines are lost (once)",
    ]


def test_a_trouble_is_said_once_for_each_cause_and_again_at_the_end(
    troubles: Troubles, said: list[str]
) -> None:
    full, stale = OSError(28, "No space left on device", "/a"), OSError(116, "Stale file handle")
    for error in (full, full, stale, OSError(28, "No space left on device", "/b")):
        troubles.tell("checkpoints", error, "training goes on")
    troubles.over("metrics.jsonl")
    troubles.tell("curves.png", ValueError(), "it is missing", passing=True)
    assert said == [
        "train: WARNING: checkpoints: No space left on device: training goes on",
        "train: WARNING: checkpoints: Stale file handle: training goes on",
        "train: WARNING: curves.png: ValueError: it is missing",
    ]
    summary = ["train: WARNING: curves.png: ValueError (once)"]
    reasons = "No space left on device; Stale file handle"
    troubles.summarise()
    assert said[3:] == [f"train: WARNING: checkpoints: {reasons} (4 times, and to the end)", *summary]
    troubles.over("checkpoints")
    troubles.over("checkpoints")
    assert said[5:] == ["train: checkpoints: works again, after it failed 4 times"]
    troubles.summarise()
    assert said[6:] == [f"train: WARNING: checkpoints: {reasons} (4 times)", *summary]


def test_events_are_what_tensorboard_reads(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    def scalar(step: int, value: float) -> Scalar:
        return Scalar(tag="train/loss", value=value, step=step, time=float(step))

    Board(tmp_path).write([scalar(step, 9.0) for step in (1, 2, 3)])
    board = Board(tmp_path)
    board.write([scalar(2, 1.5), scalar(3, 1.25)])
    board.write([])
    shutil.rmtree(tmp_path)
    board.write([scalar(4, 1.0)])
    (again,) = tmp_path.iterdir()
    assert stat.S_IMODE(again.stat().st_mode) == 0o600
    Board(tmp_path).write([scalar(5, 0.5)])
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(4, 1.0), (5, 0.5)]


def test_what_an_earlier_attempt_logged_beyond_is_hidden(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, value in (((1, 2, 3), 9.0), ((2, 3), 1.5)):
        Board(tmp_path).write([Scalar(tag="a", value=value, step=step, time=0.0) for step in steps])
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("a")] == [(1, 9.0), (2, 1.5), (3, 1.5)]


def test_events_that_a_disk_did_not_take_are_written_once_it_does(
    tmp_path: Path, troubles: Troubles, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of very many the oldest are dropped."""
    written: list[list[tuple[str, int]]] = []
    full = True

    def write(_: Board, scalars: Sequence[Scalar]) -> None:
        if full:
            raise OSError(28, "No space left on device")
        written.append([(scalar.tag, scalar.step) for scalar in scalars])

    monkeypatch.setattr(Board, "write", write)
    monkeypatch.setattr(report, "_MOST_SCALARS", 4)
    recorder = Recorder(tmp_path, troubles, step=0, total_steps=3)
    for step in (1, 2):
        recorder.step(step, loss=1.0, lr=0.1, images_per_s=100.0)
    recorder.evaluation(2, Score(correct=1, total=2), "fold")
    full = False
    recorder.step(3, loss=1.0, lr=0.1, images_per_s=100.0)
    recorder.close()
    names = ("loss", "lr", "images_per_s")
    second, third = ([(f"train/{name}", step) for name in names] for step in (2, 3))
    assert written == [[*second, ("fold/accuracy", 2), *third]]
    assert said == [
        f"train: WARNING: tensorboard: No space left on device: {tmp_path}/tensorboard takes no events as yet",
        "train: tensorboard: works again, after it failed once",
    ]


@pytest.mark.parametrize(("waited", "count"), [(60.0, 0), (60.5, 1)])
def test_events_are_written_once_a_minute_between_evaluations(
    waited: float, count: int, tmp_path: Path, troubles: Troubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    now = [1000.0]
    monkeypatch.setattr(Board, "write", lambda _, scalars: written.append(len(scalars)))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    recorder = Recorder(tmp_path, troubles, step=0, total_steps=3)
    now[0] += waited
    recorder.step(1, loss=1.0, lr=0.1, images_per_s=100.0)
    recorder.step(2, loss=1.0, lr=0.1, images_per_s=100.0)
    assert written == [3] * count
    recorder.close()


def test_results_that_cannot_be_written_are_told_and_the_table_is_printed_all_the_same(
    tmp_path: Path, troubles: Troubles, said: list[str]
) -> None:
    run_dir, out = tmp_path / "file" / "run", StringIO()
    (tmp_path / "file").touch()
    assert not report.finish(run_dir, RESULT, troubles, out)
    assert said == [
        f"train: WARNING: {name}: Not a directory: {run_dir} does not take it"
        for name in ("result.json", "curves.png")
    ]
    assert out.getvalue().startswith("test accuracy       97.50% (351 of 360)\n")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        replace(path, fail)
    assert path.read_text() == "old"


def test_the_end_of_a_run_is_a_result_a_picture_and_a_table(tmp_path: Path, troubles: Troubles) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", troubles)
    for step in range(1, 30):
        file.step(step, loss=2.0 / step, lr=0.1, images_per_s=10.0)
    file.evaluation(29, accuracy=0.975, correct=351, total=360)
    out = StringIO()
    assert report.finish(tmp_path, RESULT, troubles, out)
    assert out.getvalue() == (
        "test accuracy       97.50% (351 of 360)\n"
        "images/s            412 (mean without the first step)\n"
        "time to first step  5.2 s\n"
        "training time       48.0 s\n"
        "wall time           60.0 s\n"
        f"run directory       {tmp_path}\n"
    )
    assert json.loads((tmp_path / "result.json").read_text()) == RESULT
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl", "result.json"]


@pytest.mark.parametrize(
    ("series", "smooth"),
    [
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0]),
        ([9.0, 7.0, 5.0, 3.0, 1.0], [9.0, 7.0, 5.0, 3.0, 1.0]),
        ([1.0, 7.0, 1.0, 1.0, 6.0, 2.0], [1.0, 3.0, 3.2, 3.4, 3.0, 2.0]),
        ([], []),
    ],
    ids=["a constant", "a slope", "around each step", "nothing"],
)
def test_a_smoothed_curve_is_the_mean_around_each_step_and_does_not_lag(
    series: list[float], smooth: list[float]
) -> None:
    given = dict(enumerate(series, start=5))
    assert list(report.smoothed(given, 5).values()) == pytest.approx(smooth)
    assert [report.window_of(range(steps)) for steps in (0, 39, 90, 4000)] == [3, 3, 7, 203]


def test_the_speed_that_the_bar_shows_is_the_one_of_the_result(
    tmp_path: Path, troubles: Troubles, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path, troubles, step=0, total_steps=3)
    for step, images_per_s in enumerate((10.0, 300.0, 150.0), start=1):
        recorder.step(step, loss=1.0, lr=0.1, images_per_s=images_per_s)
    recorder.close()
    # 100 images a step: the second took 1/3 s, the third 2/3 s.
    assert "loss 1.0000, 200 images/s]" in capsys.readouterr().err


def test_what_happens_is_said_by_rank_0_alone(
    tmp_path: Path, troubles: Troubles, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, run_dir in enumerate((tmp_path, None)):
        recorder = Recorder(run_dir, troubles, step=0, total_steps=1)
        recorder.say(f"of rank {rank}")
        recorder.close()
    assert capsys.readouterr().out == "of rank 0\n"


def test_a_picture_says_what_is_pale_and_what_is_bold_and_how_fast_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, list[str]]] = []

    def keep(figure: Figure, *_: object, **__: object) -> None:
        for axes in figure.axes:
            legend = axes.get_legend()
            texts = legend.get_texts() if legend else []
            drawn.append((axes.get_title("left"), [text.get_text() for text in texts]))

    monkeypatch.setattr(Figure, "savefig", keep)
    history = History(loss={1: 2.0, 2: 1.0}, images_per_s={1: 10.0, 2: 420.0}, accuracy={1: 0.5})
    report.draw(history, RESULT, tmp_path / "curves.png")
    shown = ["each step", "mean of the 3 around"]
    assert drawn == [
        ("Training loss", shown),
        ("Accuracy", ["test", "test 97.50%"]),
        ("Throughput in images/s", [*shown, "result: 412"]),
    ]
