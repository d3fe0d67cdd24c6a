"""The doctor on nodes of this machine, and the proof of the fabric on ranks that write NCCL's log themselves."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.embedded import disks
from tests.embedded.jobs import Ended, Job, clean_env, run
from tests.unit.doctor.test_fabric import IB, SOCKETS


def test_two_nodes_of_this_machine_are_healthy(tmp_path: Path) -> None:
    ended = run(tmp_path, "--nodes", "2", "--doctor")
    assert ended.status == 0, ended.out + ended.err
    lines = ended.out.splitlines()
    assert lines[0].startswith("doctor: 2 nodes, 2 ranks, gloo on lo, ")
    assert lines[1].split()[:3] == ["node", "cpus", "memory"]
    assert [line.split()[0] for line in lines[2:4]] == ["127.0.0.1", "127.0.0.2"]
    assert lines[4].startswith("all_reduce, bus bandwidth: 64 KiB ")
    assert lines[5].startswith("all_gather, bus bandwidth: 64 KiB ")
    assert lines[6].startswith("slowest pair: 127.0.0.")
    assert lines[7:] == ["healthy"]


def report(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_the_same_is_one_json_object_and_knows_all_ranks(tmp_path: Path) -> None:
    ended = run(tmp_path, "--nodes", "2", "--nproc-per-node", "2", "--doctor", "--", "--json")
    assert ended.status == 0, ended.out + ended.err
    found = report(ended)
    assert (found["healthy"], found["ranks"], found["findings"]) == (True, 4, [])
    assert [one["rank"] for one in found["speeds"]] == [0, 1, 2, 3]
    assert [one["node"] for one in found["clocks"]] == ["127.0.0.2"]
    assert abs(found["clocks"][0]["ahead"]) <= max(found["clocks"][0]["bound"], 0.1)
    assert [(one["source"], one["target"]) for one in found["ways"]] == [
        ("127.0.0.1", "127.0.0.2"),
        ("127.0.0.2", "127.0.0.1"),
    ]
    assert [one["name"] for one in found["collectives"]].count("all_reduce") == 3


def test_a_node_alone_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    ended = run(tmp_path, "--nodes", "1", "--doctor", "--", "--json")
    assert ended.status == 0, ended.out + ended.err
    found = report(ended)
    assert (found["healthy"], found["ways"], found["clocks"], found["collectives"]) == (True, [], [], [])


def test_what_the_profile_says_and_no_node_has_is_not_healthy(tmp_path: Path) -> None:
    profile = tmp_path / "lab.yaml"
    profile.write_text("nodes: {memory_gib: 1048576, whole: true}\nlaunch: {fabric: infiniband}\n")
    ended = run(tmp_path, "--nodes", "2", "--profile", str(profile), "--doctor", "--", "--json")
    assert ended.status == 1, ended.out + ended.err
    found = report(ended)["findings"]
    assert {one["node"] for one in found} == {"127.0.0.1", "127.0.0.2"}
    assert {"memory", "fabric"} <= {one["check"] for one in found}
    assert "status 1: doctor: not healthy: " in ended.err


def test_without_ranks_there_is_nothing_to_examine(tmp_path: Path) -> None:
    ended = run(tmp_path, "--mode", "exec", "--doctor")
    assert (ended.status, ended.err) == (
        64,
        "apptrain: --doctor starts a rank on each device, and --mode exec does not: leave --mode exec out\n",
    )


# --- before and during any launch ---------------------------------------------------------------------------------


@disks.marked
def test_a_run_directory_that_is_full_ends_a_launch_with_what_to_do(tmp_path: Path, small_disk: Any) -> None:
    disk = small_disk(tmp_path / "disk", "256k")
    disk.fill()
    ended = disk_job(tmp_path, disk, "2")
    (line,) = ended.err.splitlines()
    assert ended.status == 64
    assert line.startswith(f"apptrain: the run directory {tmp_path / 'disk' / 'run'} is full on ")
    assert line.endswith(
        " (No space left on device): remove what is not needed there (df -h, df -i, quota), or give another with "
        "--run-dir"
    )


@disks.marked
def test_what_leaves_no_room_for_training_is_refused_unless_asked_for(
    tmp_path: Path, small_disk: Any
) -> None:
    disk = small_disk(tmp_path / "disk", "512k")
    ended = disk_job(tmp_path, disk, "2")
    assert ended.status == 64, ended.err
    assert "takes no file of 1 MiB (No space left on device): " in ended.err
    assert "(--no-preflight goes on)" in ended.err
    assert disk_job(tmp_path, disk, "2", "--no-preflight").status == 0


def disk_job(tmp_path: Path, disk: disks.Disk, nodes: str, *options: str) -> Ended:
    inside = tmp_path / "disk" / "run"
    ours = [sys.executable, "-P", "-m", "entrypoint.cli.embedded", "--nodes", nodes, "--run-dir", str(inside)]
    argv = [*disk.prefix, *ours, *options, "--mode", "exec", "--no-python", "--", "true"]
    return Job(argv, tmp_path, disk.seen / "run", clean_env()).end()


RANK = """\
import os, pathlib, sys, time
where = os.environ.get("NCCL_DEBUG_FILE")
print("log", bool(where), os.environ.get("NCCL_DEBUG"), flush=True)
if where:
    text = pathlib.Path(sys.argv[1 + int(os.environ["RANK"] == "1")]).read_text()
    pathlib.Path(where.replace("%h", "node").replace("%p", str(os.getpid()))).write_text(text)
    time.sleep(float(sys.argv[3]))
print("trained", flush=True)
"""


def train(tmp_path: Path, second: str, seconds: str, *options: str, **env: str) -> Ended:
    """Two ranks that write these logs where NCCL would, and train for so long; no launcher imports torch for them."""
    (tmp_path / "rank.py").write_text(RANK)
    for name, text in {"first": IB, "second": second}.items():
        (tmp_path / name).write_text(text)
    passed = {"APPTRAIN_PASS": "PYTHONPATH NCCL_DEBUG"} | env
    return run(tmp_path, "--mode", "rank", *options, "--", "rank.py", "first", "second", seconds, env=passed)


def test_sockets_where_the_site_has_infiniband_end_the_job_before_it_trains(tmp_path: Path) -> None:
    ended = train(tmp_path, SOCKETS, "100", "--fabric", "infiniband")
    assert ended.status == 64, ended.err
    assert "trained" not in ended.out
    assert ended.err.count("NCCL uses sockets") == 1
    assert (
        "apptrain: 127.0.0.2: NCCL uses sockets between the nodes, and is to use infiniband (NET/IB : No device "
        "found.): show the image libibverbs and the devices in /dev/infiniband (APPTRAIN_BIND, binds of the "
        "profile), or let it train so with --no-preflight" in ended.err
    )


@pytest.mark.parametrize(
    ("options", "env", "has_log"),
    [
        (("--fabric", "infiniband", "--no-preflight"), {}, "log False None"),
        (("--fabric", "infiniband"), {"NCCL_DEBUG": "WARN"}, "log False WARN"),
        (("--fabric", "ethernet"), {}, "log False None"),
        ((), {}, "log False None"),
    ],
)
def test_nobody_looks_where_nobody_asks_or_the_log_is_the_users(
    tmp_path: Path, options: tuple[str, ...], env: dict[str, str], has_log: str
) -> None:
    ended = train(tmp_path, SOCKETS, "0", *options, **env)
    assert ended.status == 0, ended.err
    assert sorted(ended.out.splitlines()) == [has_log] * 2 + ["trained"] * 2


def test_a_job_that_uses_the_fabric_trains(tmp_path: Path) -> None:
    ended = train(tmp_path, IB, "3", "--fabric", "infiniband")
    assert ended.status == 0, ended.err
    (attempt,) = json.loads((ended.run / "manifest.json").read_text())["attempts"]
    assert attempt["transport"] == "nccl over IB"
    assert sorted(ended.out.splitlines()) == ["log True INFO"] * 2 + ["trained"] * 2
