"""What is read of a node, from files as kernels have them and from this machine."""

import dataclasses
import json
import os
import resource
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from entrypoint.doctor import facts
from entrypoint.doctor.facts import NodeFacts, Room
from entrypoint.node import memory
from tests.unit.doctor.nodes import WHOLE


def test_facts_travel_as_json() -> None:
    assert NodeFacts.from_json(json.loads(json.dumps(dataclasses.asdict(WHOLE)))) == WHOLE


def test_this_machine_has_what_its_kernel_says(tmp_path: Path) -> None:
    found = facts.gather("here", {"run directory": str(tmp_path)}, "", {"GLOO_SOCKET_IFNAME": "lo"})
    assert (found.node, found.cpus) == ("here", len(os.sched_getaffinity(0)))
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.memory == min(physical, memory.limit() or physical)
    assert 0 < found.available <= found.memory
    room = found.rooms["run directory"]
    assert (room.path, room.refused) == (str(tmp_path), "")
    assert room.free > facts.TRIAL
    assert found.limits.keys() == {"memlock", "nofile", "nproc"}
    assert (found.ports, found.unloadable, found.interface, found.speed) == ((), "", "lo", None)
    assert list(tmp_path.iterdir()) == []


def test_of_the_open_files_the_hard_limit_counts_and_of_others_the_soft_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {
        resource.RLIMIT_MEMLOCK: (65536, resource.RLIM_INFINITY),
        resource.RLIMIT_NOFILE: (1024, 4096),
        resource.RLIMIT_NPROC: (resource.RLIM_INFINITY, 5),
    }
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert facts.gather("a", {}, "", {}).limits == {"memlock": 65536, "nofile": 4096, "nproc": None}


def test_a_directory_that_takes_no_file_says_why() -> None:
    assert facts.room("/nowhere") == Room(
        "/nowhere", free=0, inodes=None, refused="No such file or directory"
    )
    assert facts.room("/proc").refused == "No such file or directory"


@pytest.mark.parametrize(("files", "inodes"), [(0, None), (9, 5)])
def test_a_file_system_may_count_no_inodes(
    files: int, inodes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SimpleNamespace(f_files=files, f_favail=5, f_bavail=3, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: told)
    assert facts.room(str(tmp_path)) == Room(str(tmp_path), free=12288, inodes=inodes)


def test_a_directory_must_take_a_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, *where: asked.append(where))
    facts.room(str(tmp_path))
    assert asked == [(0, 1 << 20)]


def test_a_full_device_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert facts.room(str(tmp_path)).refused == "No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_ports_are_those_that_are_up(tmp_path: Path) -> None:
    for name, state in {
        "mlx5_0/ports/1": "4: ACTIVE",
        "mlx5_0/ports/2": "1: DOWN",
        "mlx5_1/ports/1": "4: ACTIVE",
    }.items():
        folder = tmp_path / "infiniband" / name
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
    (tmp_path / "cxi/cxi0").mkdir(parents=True)
    for name, driver in {"mlx5_0": "mlx5_core", "rdmap16s27": "efa"}.items():
        folder = tmp_path / "infiniband" / name / "device"
        folder.mkdir(parents=True)
        (folder / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
    assert list(facts.ports("infiniband", tmp_path)) == ["mlx5_0:1", "mlx5_1:1"]
    assert list(facts.ports("slingshot", tmp_path)) == ["cxi0"]
    assert list(facts.ports("efa", tmp_path)) == ["rdmap16s27"]
    assert list(facts.ports("", tmp_path)) == []


@pytest.mark.parametrize(
    ("fabric", "env", "names"),
    [
        ("infiniband", {}, ["libibverbs.so.1"]),
        ("slingshot", {}, ["libnccl-net.so"]),
        ("efa", {}, ["libnccl-net.so"]),
        ("slingshot", {"NCCL_NET_PLUGIN": "ofi"}, ["libnccl-net-ofi.so", "ofi"]),
        ("efa", {"NCCL_NET_PLUGIN": "/opt/ofi/libnccl-net.so"}, ["/opt/ofi/libnccl-net.so"]),
        ("ethernet", {}, []),
        ("", {}, []),
    ],
)
def test_what_nccl_loads_is_the_fabrics(fabric: str, env: dict[str, str], names: list[str]) -> None:
    assert list(facts.libraries(fabric, env)) == names


def test_a_library_that_does_not_load_says_why_and_one_that_does_nothing() -> None:
    env = {"NCCL_NET_PLUGIN": "none-such"}
    found = facts.gather("a", {}, "slingshot", env).unloadable
    assert found == "libnccl-net-none-such.so: cannot open shared object file: No such file or directory"
    assert facts.gather("a", {}, "slingshot", {"NCCL_NET_PLUGIN": "libc.so.6"}).unloadable == ""


def test_a_library_that_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(line: list[str], **more: float) -> None:
        raise subprocess.TimeoutExpired(line, more["timeout"])

    monkeypatch.setattr(subprocess, "run", slow)
    found = facts.gather("a", {}, "infiniband", {}).unloadable
    assert found == f"libibverbs.so.1 does not load within {facts.LOADING:.0f} s"


@pytest.mark.parametrize(
    ("text", "speed"),
    [("100000\n", 10**11), ("1\n", 10**6), ("0\n", None), ("-1\n", None), ("\n", None), (None, None)],
)
def test_the_speed_of_an_interface_is_the_kernels(
    tmp_path: Path, text: str | None, speed: int | None
) -> None:
    (tmp_path / "net/eth0").mkdir(parents=True)
    if text is not None:
        (tmp_path / "net/eth0/speed").write_text(text)
    assert facts.speed("eth0", tmp_path) == speed
