"""Which lines of a trace count, and where two of them part."""

import json
from pathlib import Path

import pytest

from entrypoint.record import traces


def written(folder: Path, *rows: object) -> traces.Trace:
    path = folder / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 9, "lo')
    return traces.read(path)


def loss(step: int, value: float) -> dict[str, float]:
    return {"step": step, "loss": value, "lr": 0.1, "images_per_s": 7.0 * value}


def test_the_last_line_of_a_step_counts_and_what_was_beyond_is_forgotten(tmp_path: Path) -> None:
    rows = [loss(1, 2.0), loss(2, 1.5), {"step": 2, "accuracy": 0.5}, loss(3, 1.0), loss(2, 1.25), "no line"]
    assert written(tmp_path, *rows) == {
        "loss": {1: 2.0, 2: 1.25},
        "lr": {1: 0.1, 2: 0.1},
        "accuracy": {},
    }


@pytest.mark.parametrize(
    ("rows", "first", "series", "identical"),
    [
        ([loss(1, 2.0), loss(2, 1.5)], None, "", True),
        ([loss(1, 2.0), loss(2, 1.5000000000000002)], 2, "loss", False),
        ([loss(1, 2.0), loss(2, 1.5) | {"lr": 0.2}], 2, "lr", False),
        ([loss(1, 2.0)], None, "", False),
        ([loss(1, -2.0), loss(2, 1.6)], 1, "loss", False),
    ],
)
def test_traces_part_at_the_first_other_bit(
    tmp_path: Path, rows: list[object], first: int | None, series: str, identical: bool
) -> None:
    one = written(tmp_path, loss(1, 2.0), loss(2, 1.5))
    found = traces.compare(one, written(tmp_path, *rows))
    assert (found.first, found.series, found.identical) == (first, series, identical)


def test_zero_and_its_negative_are_other_bits(tmp_path: Path) -> None:
    found = traces.compare(written(tmp_path, loss(1, 0.0)), written(tmp_path, loss(1, -0.0)))
    assert (found.first, found.values, found.within) == (1, (0.0, -0.0), 0.0)
