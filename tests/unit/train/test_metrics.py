import json
import stat
from io import StringIO
from pathlib import Path

import pytest

from train import metrics, report
from train.files import replace
from train.metrics import History, MetricsFile

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


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_line_is_whole_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
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
    tmp_path: Path, before: str, kept: list[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    MetricsFile(path).evaluation(2, accuracy=0.5, correct=1, total=2)
    assert lines(path) == [*kept, '{"step": 2, "accuracy": 0.5, "correct": 1, "total": 2}']


def test_where_a_run_was_resumed_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step, loss in [(1, 4.0), (2, 3.0), (3, 2.0)]:
        file.step(step, loss=loss, lr=0.1, images_per_s=10.0)
        file.evaluation(step, accuracy=step / 10, correct=step, total=10)
    file.step(2, loss=2.5, lr=0.2, images_per_s=20.0)
    with path.open("a") as stream:
        stream.write('{"step": 3, "loss": 9')
    assert metrics.read(path) == History(
        loss={1: 4.0, 2: 2.5}, lr={1: 0.1, 2: 0.2}, images_per_s={1: 10.0, 2: 20.0}, accuracy={1: 0.1}
    )


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        replace(path, fail)
    assert path.read_text() == "old"


def test_the_end_of_a_run_is_a_result_a_picture_and_a_table(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 30):
        file.step(step, loss=2.0 / step, lr=0.1, images_per_s=10.0)
    file.evaluation(29, accuracy=0.975, correct=351, total=360)
    out = StringIO()
    report.finish(tmp_path, RESULT, out)
    assert out.getvalue() == (
        "test accuracy       97.50% (351 of 360)\n"
        "images/s            412\n"
        "time to first step  5.2 s\n"
        "training time       48.0 s\n"
        "wall time           60.0 s\n"
        f"run directory       {tmp_path}\n"
    )
    assert json.loads((tmp_path / "result.json").read_text()) == RESULT
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl", "result.json"]


def test_a_constant_stays_itself_when_smoothed() -> None:
    smooth = report.smoothed({1: 2.0, 2: 2.0, 3: 2.0})
    assert smooth == pytest.approx({1: 2.0, 2: 2.0, 3: 2.0})
    assert report.smoothed({5: 1.0, 6: 3.0}, weight=0.5) == pytest.approx({5: 1.0, 6: 7 / 3})
