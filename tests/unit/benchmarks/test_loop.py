"""`make bench ARGS=loop`: what it refuses, and what it makes of the script's lines."""

from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import loop

PRINTED = """\
Epoch: [0][ 1/16]	Time  1.500 ( 1.500)	Data  0.400 ( 0.400)	Loss 7.0e+00 (7.0e+00)
Epoch: [0][ 1/16]	Time  1.250 ( 1.250)	Data  0.400 ( 0.400)	Loss 7.0e+00 (7.0e+00)
Epoch: [0][16/16]	Time  0.500 ( 0.700)	Data  0.000 ( 0.100)	Loss 6.9e+00 (6.9e+00)
Epoch: [0][16/16]	Time  0.625 ( 0.700)	Data  0.000 ( 0.100)	Loss 6.9e+00 (6.9e+00)
Test: [1/1]	Time  0.100 ( 0.100)	Loss 6.9e+00 (6.9e+00)
"""


def test_a_step_takes_as_long_as_the_slower_rank() -> None:
    assert loop._of_slowest_rank(PRINTED) == [(1, 1.5), (16, 0.625)]


def test_without_the_checkout_it_is_refused_or_left_out_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EXAMPLES", raising=False)
    assert command.chosen([], ["loop", "output"]) == ["output"]
    with pytest.raises(SystemExit) as ended:
        command.chosen(["loop"], ["loop"])
    assert ended.value.code == 64
    assert "bench: loop: EXAMPLES is not set: " in capsys.readouterr().err
    assert f"EXAMPLES={tmp_path}: no imagenet/main.py there" in (
        loop.refusal({"EXAMPLES": str(tmp_path)}) or ""
    )
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet/main.py").touch()
    assert loop.refusal({"EXAMPLES": str(tmp_path)}) is None


def test_each_loader_has_ratios_of_its_own_to_torchrun_in_the_same_round() -> None:
    rounds = [
        {"torchrun": 10.0, "forks": 11.0},
        {"torchrun": 20.0, "forks": 18.0},
        {"torchrun": 4.0, "forks": 4.0},
    ]
    assert loop._spread(rounds, "forks") == {"median": 1.0, "min": 0.9, "max": 1.1}
