"""What is read of a node, from files as kernels have them and from this machine."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from entrypoint.doctor import facts
from entrypoint.doctor.facts import NodeFacts
from tests.unit.doctor.nodes import WHOLE


def test_facts_travel_as_json() -> None:
    assert NodeFacts.from_json(json.loads(json.dumps(dataclasses.asdict(WHOLE)))) == WHOLE


def test_this_machine_has_what_its_kernel_says(tmp_path: Path) -> None:
    found = facts.gather("here", {"run directory": str(tmp_path)}, "", {"GLOO_SOCKET_IFNAME": "lo"})
    assert (found.node, found.cpus) == ("here", len(os.sched_getaffinity(0)))
    assert 0 < found.available <= found.memory
    room = found.rooms["run directory"]
    assert (room.path, room.refused) == (str(tmp_path), "")
    assert room.free > facts.TRIAL
    assert found.limits.keys() == {"memlock", "nofile", "nproc"}
    assert (found.ports, found.unloadable, found.interface, found.speed) == ((), "", "lo", None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/proc", "/nowhere"])
def test_a_directory_that_takes_no_file_says_why(path: str) -> None:
    assert facts.room(path).refused


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


@pytest.mark.parametrize(("text", "speed"), [("100000\n", 10**11), ("-1\n", None), (None, None)])
def test_the_speed_of_an_interface_is_the_kernels(
    tmp_path: Path, text: str | None, speed: int | None
) -> None:
    (tmp_path / "net/eth0").mkdir(parents=True)
    if text is not None:
        (tmp_path / "net/eth0/speed").write_text(text)
    assert facts.speed("eth0", tmp_path) == speed
