"""The scripts of docs/recipes.md that are in examples/, under the launcher."""

import json
import re
import shutil
import socket
import stat
import tarfile
from pathlib import Path

from tests.embedded.jobs import BOUND, CHECKOUT, Ended, run, start

EXAMPLES = CHECKOUT / "examples"
DEBUGGED = """\
import os

import attach

answer = 6 * 7
if os.environ["RANK"] == "1":
    attach.attach()
    print("goes on with", answer, flush=True)
"""


def steps(folder: Path, number: int) -> Ended:
    program = str(EXAMPLES / "fsdp2_dcp.py")
    ended = run(folder, "--nodes", "1", "--nproc-per-node", "2", "--", program, "--steps", str(number))
    assert ended.status == 0, ended.err
    return ended


def test_fsdp2_saves_and_goes_on(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    once, first, second = steps(whole, 20), steps(parts, 10), steps(parts, 20)
    assert re.findall("begins after step .*", once.out + first.out + second.out) == [
        "begins after step 0",
        "begins after step 0",
        "begins after step 10",
    ]
    losses = [re.findall(r"^step 20: loss .*", ended.out, re.M) for ended in (once, second)]
    assert len(losses[0]) == 1
    assert losses[0] == losses[1]
    saved = sorted(path.name for path in (second.run / "checkpoints").iterdir())
    assert saved == ["step-00000010", "step-00000020"]


def test_data_are_unpacked_once_on_each_node(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with tarfile.open(tmp_path / "data.tar", "w") as packed:
        for number in range(3):
            (tmp_path / f"{number}.txt").write_text("data")
            packed.add(tmp_path / f"{number}.txt", f"{number}.txt")
    words = ("--nodes", "2", "--nproc-per-node", "2", "--", str(EXAMPLES / "staged.py"), "data.tar")
    ended = run(tmp_path, *words, env={"TMPDIR": str(disk)})
    assert ended.status == 0, ended.err
    assert sorted(re.findall("rank .*", ended.out)) == [f"rank {rank} has 3 files" for rank in range(4)]
    folders = sorted(disk.glob("data-*"), key=lambda folder: folder.name.rpartition("-")[2])
    assert [folder.name.rpartition("-")[2] for folder in folders] == ["127.0.0.1", "127.0.0.2"]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700, 0o700]


def test_a_run_unpacks_its_own_data_beside_those_of_other_runs_and_of_its_last_start(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    for project, name in (("mine", "1.txt"), ("yours", "2.txt"), ("mine", "3.txt")):
        folder = tmp_path / project
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("data")
        with tarfile.open(folder / "data.tar", "w") as packed:
            packed.add(folder / name, name)
        words = ("--nodes", "1", "--", str(EXAMPLES / "staged.py"), "data.tar")
        ended = run(folder, *words, env={"TMPDIR": str(disk)})
        assert "rank 0 has 1 files" in ended.out, ended.err
        assert name in [path.name for path in disk.glob("data-*/*")]


def test_a_debugger_stops_one_rank_and_lets_it_go_on(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "attach.py", tmp_path)
    (tmp_path / "debugged.py").write_text(DEBUGGED)
    disk = tmp_path / ("d" * 100)  # too long for the path of a socket
    disk.mkdir()
    words = ("--nodes", "2", "--hang-timeout", "0", "--", "debugged.py")
    job = start(tmp_path, *words, env={"TMPDIR": str(disk)})
    job.until(lambda: "waits: nc -U " in job.text(), "a rank that waits for the debugger")
    (path,) = re.findall(r"rank 1 waits: nc -U (\S+)", job.text())
    with socket.socket(socket.AF_UNIX) as debugger:
        debugger.settimeout(BOUND)
        debugger.connect(path)
        debugger.sendall(b"p answer\nc\n")
        with debugger.makefile() as told:
            said = told.read()
    assert "debugged.py" in said
    assert "(Pdb) 42" in said
    ended = job.end()
    assert ended.status == 0, ended.err
    assert "goes on with 42\n" in ended.out


def test_a_profile_is_written_for_each_rank(tmp_path: Path) -> None:
    ended = run(tmp_path, "--nodes", "2", "--", str(EXAMPLES / "profiled.py"))
    assert ended.status == 0, ended.err
    for rank in range(2):
        events = json.loads((ended.run / f"trace.rank{rank}.json").read_text())["traceEvents"]
        assert {"ProfilerStep#2", "ProfilerStep#3"} <= {event.get("name") for event in events}
