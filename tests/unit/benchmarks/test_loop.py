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
        {way: loop.LoopRun(images_per_s=rate, launcher=0.0) for way, rate in ways.items()}
        for ways in (
            {"torchrun": 10.0, "forks": 11.0},
            {"torchrun": 20.0, "forks": 18.0},
            {"torchrun": 4.0, "forks": 4.0},
        )
    ]
    ratios = loop._ratios(rounds, "forks")
    assert ratios == [1.1, 0.9, 1.0]
    spread = loop._spread(ratios)
    assert (spread["median"], spread["min"], spread["max"]) == (1.0, 0.9, 1.1)
    assert spread["mean"] == pytest.approx(1.0)
    assert spread["standard_error"] == pytest.approx(0.1 / 3**0.5)


def test_a_launcher_is_what_works_beside_the_ranks_and_their_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    launcher, agent, rank0, rank1, loader, late = range(10, 16)
    parents = {launcher: 1, agent: launcher, rank0: agent, rank1: agent, loader: rank1, late: launcher}

    def look(at: float, **cpu: float) -> loop.Look:
        names = {"launcher": launcher, "agent": agent, "rank0": rank0, "rank1": rank1, "loader": loader}
        pids = {(names | {"late": late})[name]: seconds for name, seconds in cpu.items()}
        return at, {pid: (parents[pid], seconds) for pid, seconds in pids.items()}

    first = look(0.0, launcher=9.0, agent=1.0, rank0=2.0, rank1=2.0, loader=0.5)
    begin = look(10.0, launcher=9.5, agent=1.5, rank0=10.0, rank1=10.0, loader=1.0)
    end = look(20.0, launcher=9.9, agent=1.6, rank0=19.0, rank1=18.0, loader=8.0, late=7.0)
    # Of four cores for ten seconds, 0.4 and 0.1 of the launcher and the agent; what came later had no beginning.
    looks = [first, first, first, first, begin, end, end, end]
    assert loop._beside_ranks(looks) == pytest.approx(0.5 / 40)
    with pytest.raises(SystemExit, match="over after 7 looks"):
        loop._beside_ranks(looks[1:])
