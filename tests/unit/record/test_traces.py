"""Which lines of a trace count, and where two of them part."""

import json
import math
import tracemalloc
from collections.abc import Iterator
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
        ([loss(2, 1.5)], None, "", False),
        ([loss(1, 2.0), loss(2, 1.5), {"step": 2, "accuracy": 0.5}], None, "", False),
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


def of(folder: Path, text: str) -> traces.Trace:
    path = folder / "metrics.jsonl"
    path.write_text(text)
    return traces.read(path)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"step": 1, "loss": 1' + 400 * "0" + "}", "line 2: a number has 401 digits"),
        ('{"step": 9' + 18 * "9" + ', "loss": 1}', "line 2: step has more than 63 bits"),
        ('{"step": -9' + 18 * "9" + ', "loss": 1}', "line 2: step has more than 63 bits"),
    ],
)
def test_a_number_that_nothing_can_hold_is_no_trace(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        of(tmp_path, f'{{"step": 1, "loss": 1}}\n{line}\n')


@pytest.mark.parametrize(
    "line",
    ["", "7", "[" * 100_000, '{"step": true}', '{"step": 1.5}', "\x00", '{"loss": 1}', "x" * (3 << 20)],
)
def test_a_line_without_a_step_is_skipped(tmp_path: Path, line: str) -> None:
    assert of(tmp_path, f'{{"step": 1, "loss": 1}}\n{line}\n{{"step": 2, "loss": 2}}\n')["loss"] == {
        1: 1.0,
        2: 2.0,
    }


def test_a_file_with_nothing_but_such_lines_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "MOST_ODD", 3)
    with pytest.raises(ValueError, match=r"^line 4: more than 3 lines have no step$"):
        of(tmp_path, "\n\n\n\n\n")


def test_values_of_earlier_steps_take_their_place(tmp_path: Path) -> None:
    found = of(
        tmp_path, "".join(f'{{"step": {step}, "lr": {value}}}\n' for value, step in enumerate((5, 2, 9, 2)))
    )
    assert found["lr"] == {2: 3.0, 5: 0.0, 9: 2.0}


def test_steps_in_no_order_at_all_are_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_MOVED", 10)
    with pytest.raises(ValueError, match=r"^line 6: its steps are in no order$"):
        of(tmp_path, "".join(f'{{"step": {step}, "lr": 1}}\n' for step in range(9, 0, -1)))


def test_numbers_that_are_none_are_compared_too(tmp_path: Path) -> None:
    rows = [[loss(1, math.nan), loss(2, math.inf)], [loss(1, math.nan), loss(2, 1.0)]]
    one, other = (written(tmp_path, *some) for some in rows)
    found = traces.compare(one, other)
    assert (found.first, found.values, found.within) == (2, (math.inf, 1.0), math.inf)
    assert traces.compare(one, one).identical


def test_a_resume_does_no_work_for_the_steps_before_it(tmp_path: Path) -> None:
    """Copying them at each line took minutes for 100,000 steps."""
    copied = 0

    class Watched(traces.Series):
        def __iter__(self) -> Iterator[int]:
            nonlocal copied
            copied += 1
            return super().__iter__()

    text = "".join(f'{{"step": {step}, "loss": 1}}\n' for step in (*range(1, 200), *range(100, 300)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traces, "Series", Watched)
        found = of(tmp_path, text)
    assert copied == 0
    assert list(found["loss"]) == list(range(1, 300))


def test_a_million_steps_take_little_memory(tmp_path: Path) -> None:
    text = "".join(f'{{"step": {step}, "loss": {step / 7}, "lr": 0.1}}\n' for step in range(1, 100_001))
    (tmp_path / "metrics.jsonl").write_text(text)
    del text
    tracemalloc.start()
    found = traces.read(tmp_path / "metrics.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found["loss"]) == 100_000
    assert peak < 60 * 100_000


def test_a_series_is_a_mapping_in_ascending_order() -> None:
    series = traces.Series()
    assert (series.last, list(series)) == (0, [])
    for step, value in ((3, 0.5), (7, 1.5), (5, 1.0), (1, 0.0), (5, 2.0)):
        series.put(step, value)
    assert (series.last, len(series), dict(series)) == (7, 4, {1: 0.0, 3: 0.5, 5: 2.0, 7: 1.5})
    for missing in (0, 2, 4, 6, 8):
        with pytest.raises(KeyError):
            series[missing]
    series.forget_from(8)
    assert list(series) == [1, 3, 5, 7]
    series.forget_from(7)
    assert list(series) == [1, 3, 5]
    series.forget_from(2)
    assert (list(series), series.last) == ([1], 1)


@pytest.mark.parametrize("step", [2**63 - 1, -(2**63 - 1), 0])
def test_a_step_has_up_to_63_bits(step: int, tmp_path: Path) -> None:
    assert of(tmp_path, f'{{"step": {step}, "loss": 1}}\n')["loss"] == {step: 1.0}


@pytest.mark.parametrize(("digits", "is_fine"), [(300, True), (301, False)])
def test_a_number_has_up_to_300_digits(digits: int, is_fine: bool, tmp_path: Path) -> None:
    line = f'{{"step": 1, "loss": 1{"0" * (digits - 1)}}}\n'
    if is_fine:
        assert of(tmp_path, line)["loss"] == {1: 1e299}
        return
    with pytest.raises(ValueError, match=r"^line 1: a number has 301 digits$"):
        of(tmp_path, line)


def test_the_steps_that_both_have_are_compared(tmp_path: Path) -> None:
    one = written(tmp_path, loss(1, 2.0), loss(2, 1.0), loss(4, 3.0))
    other = written(tmp_path, loss(2, 1.5), loss(3, 9.0), loss(4, 1.0), loss(5, 1.0))
    assert traces.compare(one, other) == traces.Parting(
        steps=2,
        first=2,
        series="loss",
        values=(1.0, 1.5),
        within=2.0,
        lengths=(4, 5),
        uneven="loss",
        counts=(3, 4),
    )
    assert traces.compare(one, one) == traces.Parting(
        steps=3,
        first=None,
        series="",
        values=None,
        within=0.0,
        lengths=(4, 4),
        uneven="",
        counts=(0, 0),
    )


def test_of_what_parts_the_earliest_is_told(tmp_path: Path) -> None:
    one = written(tmp_path, loss(1, 2.0), loss(2, 1.0))
    other = written(tmp_path, loss(1, 2.0) | {"lr": 0.2}, loss(2, 5.0))
    found = traces.compare(one, other)
    assert (found.first, found.series, found.values) == (1, "lr", (0.1, 0.2))
    assert found.within == 4.0


def test_a_line_of_a_mebibyte_is_read_and_a_longer_one_is_not(tmp_path: Path) -> None:
    for size, steps in ((1 << 20, [1, 2]), ((1 << 20) + 1, [2])):
        begin, end = '{"step": 1, "loss": 1, "x": "', '"}\n'
        line = begin + "x" * (size - len(begin) - len(end)) + end
        assert list(of(tmp_path, line + '{"step": 2, "loss": 1}\n')["loss"]) == steps
