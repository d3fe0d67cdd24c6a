"""`apptrain scaling` as a user types it: runs on this machine, broken off and gone on with."""

import json
import signal
import stat
import sys
import time
from pathlib import Path

from tests.embedded.jobs import BOUND, CHECKOUT, Job, clean_env

SCALING = (sys.executable, "-P", "-m", "entrypoint.cli.apptrain", "scaling")


def begin(folder: Path, *words: str) -> Job:
    folder.mkdir(exist_ok=True)
    return Job([*SCALING, *words], folder, folder, clean_env())


def test_a_script_of_somebody_else_is_measured_and_goes_on_after_an_interruption(tmp_path: Path) -> None:
    words = ["--nodes", "1,2", "--repeats", "1", "--dir", str(tmp_path / "s"), "--json"]
    words += ["--", str(CHECKOUT / "examples/ddp.py"), "--steps", "30"]
    first = begin(tmp_path / "first", *words)
    deadline = time.monotonic() + BOUND
    while "run 2 of 2" not in (tmp_path / "first" / "stderr.txt").read_text():
        assert time.monotonic() < deadline, (tmp_path / "first" / "stderr.txt").read_text()
        time.sleep(0.1)
    first.process.send_signal(signal.SIGINT)
    ended = first.end()
    assert ended.status == 130, ended.err
    assert ended.out == ""
    assert "broken off; the same line with --dir" in ended.err
    second = begin(tmp_path / "second", *words).end()
    assert second.status == 0, second.err
    assert "apptrain: 1 of 2 runs are there already\napptrain: run 2 of 2: 2 nodes\n" in second.err
    found = json.loads(second.out)
    assert (found["kind"], found["differs"]) == ("weak", {})
    points = [(one["nodes"], one["ranks"], one["unit"], one["repeats"]) for one in found["points"]]
    assert points == [(1, 1, "steps/s", 1), (2, 2, "steps/s", 1)]
    assert all(one["rate"] > 0 for one in found["points"])
    assert found == json.loads((tmp_path / "s" / "result.json").read_text())
    names = sorted(path.name for path in (tmp_path / "s" / "runs").iterdir() if path.is_dir())
    assert names[0] == "n1-r1"
    assert len(names) in (2, 3)  # one that was broken off before it made its directory has left none
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in (tmp_path / "s").rglob("*.json"))


def test_a_size_that_fails_is_said_and_left_out(tmp_path: Path) -> None:
    """Three ranks cannot share a batch of eight."""
    words = ["--nodes", "1,2,3", "--repeats", "1", "--dir", str(tmp_path / "s"), "--"]
    words += [
        "-m",
        "train",
        "--config",
        "digits-short",
        "model.name=shufflenet_v2_x0_5",
        "data.image_size=16",
    ]
    ended = begin(tmp_path / "a", *words, "batch_size=8", "steps=8").end()
    assert ended.status == 0, ended.err
    assert "left out: 3 nodes: status 64: train: batch_size is 8, no multiple of 3" in ended.err
    assert "left out: 3 nodes: status 64" in ended.out
    assert "communication" in ended.out
    assert "CPU hours per epoch" in ended.out


ALONE = """
import time
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in range(9):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def test_ranks_that_each_train_for_themselves_are_not_measured(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    words = ["--nodes", "1,2", "--repeats", "1", "--dir", str(tmp_path / "s"), "--", str(script)]
    ended = begin(tmp_path / "a", *words).end()
    assert (ended.status, ended.out) == (1, ""), ended.err
    assert (
        "left out: 2 nodes: no rank joined a process group: each of the 2 ranks trained for itself"
        in ended.err
    )
    assert "scaling: all runs that can be measured are on 1 node" in ended.err
    read = begin(tmp_path / "b", str(tmp_path / "s")).end()
    assert read.status == 64
    assert f"; left out: {tmp_path}/s/runs/n2-r1: no rank joined a process group" in read.err


def test_a_run_that_is_refused_ends_it_with_its_own_words(tmp_path: Path) -> None:
    ended = begin(tmp_path / "a", "--dir", str(tmp_path / "s"), "--", "no_such.py").end()
    assert ended.status == 64
    assert "no_such.py" in ended.err.splitlines()[-1]
