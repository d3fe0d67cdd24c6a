"""The picture of a comparison, and what is said where there can be none."""

import importlib.util
import math
import os
from pathlib import Path

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.record import compare, picture
from tests.unit.record.test_compare import run

PNG = b"\x89PNG"


def test_the_runs_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        run(tmp_path / name, losses) for name, losses in (("a", [2.0, 1.0]), ("b", [2.0, 1.5]), ("c", [2.0]))
    ]
    file = tmp_path / "compare.png"
    assert compare.main([*runs, runs[0]], as_json=False, image=str(file)) == 1
    assert file.read_bytes().startswith(PNG)
    out, err = capsys.readouterr()
    assert "they part at step 2" in out
    assert err == f"apptrain: {file} is drawn\n"


def test_runs_that_have_no_step_in_common_are_drawn_too(tmp_path: Path) -> None:
    paths = [run(tmp_path / name, [2.0]) for name in "ab"]
    (tmp_path / "b/metrics.jsonl").write_text('{"step": 2, "loss": 2.0}\n')
    picture.draw(["a", "b"], [compare.load(Path(path)).trace for path in paths], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.7e308])
def test_numbers_that_no_axis_has_and_names_like_formulas_are_drawn_too(tmp_path: Path, value: float) -> None:
    runs = [run(tmp_path / name, losses) for name, losses in (("$a^", [2.0, 1e308]), ("$b_", [1.0, value]))]
    compare.main(runs, as_json=False, image=str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_without_matplotlib_the_line_says_what_to_do_before_anything_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match="compare -o: this Python has no matplotlib: give PYTHON=FILE"):
        compare.main(["/nonexistent", "/nonexistent"], as_json=False, image="a.png")


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, [2.0]) for name in "ab"]
    os.mkfifo(tmp_path / "pipe.png")
    for file, why in (
        ("/nonexistent/a.png", "No such file or directory"),
        (f"{tmp_path}/pipe.png", "it is a FIFO, not a regular file"),
    ):
        with pytest.raises(BadInput) as refused:
            compare.main(runs, as_json=False, image=file)
        assert str(refused.value) == f"compare: {file} cannot be written: {why}: give another file with -o"


def test_a_picture_of_another_kind_is_refused_before_anything_is_compared() -> None:
    with pytest.raises(BadInput) as refused:
        compare.main(["/nonexistent", "/nonexistent"], as_json=False, image="a.svg")
    assert str(refused.value) == "compare -o a.svg: the picture is PNG: give a name with .png"
