"""Which network NCCL has taken, from logs in NCCL's own words, and whether that ends a job."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.doctor import fabric, facts
from entrypoint.job.rundir import RunDirectory
from entrypoint.plan.options import RDMA
from entrypoint.ranks import stacks

PREFIX = "gpu-a01:1234:1260 [0] NCCL INFO "


def log(*lines: str) -> str:
    first = "NCCL version 2.27.3+cuda12.9"
    return "\n".join([first, *(PREFIX + line for line in lines), ""])


SOCKETS = log(
    "Bootstrap: Using eth0:10.77.42.11<0>",
    "NET/Plugin: Could not find: libnccl-net.so",
    "NET/IB : No device found.",
    "NET/Socket : Using [0]eth0:10.77.42.11<0>",
    "Initialized NET plugin Socket",
    "Assigned NET plugin Socket to comm",
    "Using network Socket",
    "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
)
OLDER_SOCKETS = log(
    "Bootstrap : Using ens7:10.128.0.31<0>",
    "NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared object file: No such file or directory",
    "NET/IB : No device found.",
    "NET/Socket : Using [0]ens7:10.128.0.31<0>",
    "Using non-device net plugin version 0",
    "Using network Socket",
)
IB = log(
    "Bootstrap: Using ib0:10.149.0.32<0>",
    "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.149.0.32<0>",
    "Using network IB",
    "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA",
)
OFI = log("NET/OFI Selected Provider is cxi (found 4 nics)", "Using network AWS Libfabric")
NEWER_OFI = log("NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)", "Using network Libfabric")
HALF = log("Bootstrap: Using eth0:10.77.42.11<0>", "NET/Socket : Using [0]eth0:10.77.42.11<0>")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (SOCKETS, "Socket"),
        (OLDER_SOCKETS, "Socket"),
        (IB, "IB"),
        (OFI, "AWS Libfabric"),
        (NEWER_OFI, "Libfabric"),
        (HALF, ""),
        ("", ""),
    ],
)
def test_the_network_is_the_one_that_nccl_says_it_uses(text: str, name: str) -> None:
    assert fabric.network(text) == name


@pytest.mark.parametrize(
    ("text", "wanted", "said"),
    [
        (SOCKETS, "infiniband", "NCCL uses sockets between the nodes, and is to use infiniband (NET/IB : No device found.): show the image libibverbs and the devices in /dev/infiniband (APPTRAIN_BIND, binds of the profile)"),
        (SOCKETS, "slingshot", "NCCL uses sockets between the nodes, and is to use slingshot (NET/Plugin: Could not find: libnccl-net.so): show the image the plugin libnccl-net.so and libfabric (APPTRAIN_BIND, binds of the profile)"),
        (SOCKETS, "efa", "NCCL uses sockets between the nodes, and is to use efa (NET/Plugin: Could not find: libnccl-net.so): show the image the plugin libnccl-net.so and libfabric, and the devices in /dev/infiniband (APPTRAIN_BIND, binds of the profile)"),
        (NEWER_OFI, "efa", None),
        (log("Using network Socket"), "infiniband", "NCCL uses sockets between the nodes, and is to use infiniband: show the image libibverbs and the devices in /dev/infiniband (APPTRAIN_BIND, binds of the profile)"),
        (SOCKETS, "ethernet", None),
        (SOCKETS, "", None),
        (IB, "infiniband", None),
        (OFI, "slingshot", None),
        (NEWER_OFI, "slingshot", None),
        (HALF, "infiniband", None),
    ],
)  # fmt: skip
def test_sockets_are_wrong_where_the_site_has_a_fabric(text: str, wanted: str, said: str | None) -> None:
    found = fabric.objection(text, wanted, "a")
    assert (found and str(found)) == said


def test_what_is_no_log_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nccl.a.1")  # open() would wait for one who writes, and the launcher with it
    (tmp_path / "nccl.a.2").write_text(IB)
    assert fabric.networks(tmp_path) == [IB]


def test_the_recorders_pipe_is_not_taken_for_a_log(tmp_path: Path) -> None:
    named = stacks.variables("cuda", tmp_path, RunDirectory(tmp_path, 0), {}, "2.15.0")
    pipe = Path(named["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe")
    assert pipe.parent == tmp_path
    assert not pipe.match(fabric.LOGS)


def plan(nnodes: int = 2, **env: str) -> Any:
    return SimpleNamespace(nnodes=nnodes, env=env)


def settings(**values: Any) -> Any:
    known = {"fabric": "infiniband", "no-preflight": False, "doctor": False, **values}
    return SimpleNamespace(value=known.__getitem__)


WRITES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": "/node/nccl.%h.%p"}


@pytest.mark.parametrize(
    ("plan", "settings", "env", "wanted", "writes"),
    [
        (plan(), settings(), {}, "infiniband", True),
        (plan(), settings(fabric="slingshot"), {}, "slingshot", True),
        (plan(), settings(fabric="efa"), {}, "efa", True),
        (plan(), settings(fabric="ethernet"), {}, "", False),
        (plan(), settings(fabric=None), {}, "", False),
        (plan(nnodes=1), settings(), {}, "", False),
        (plan(), settings(**{"no-preflight": True}), {}, "", False),
        (plan(), settings(), {"NCCL_DEBUG": "WARN"}, "", False),
        (plan(), settings(), {"NCCL_DEBUG_FILE": "/mine"}, "", False),
        (plan(NCCL_DEBUG="WARN"), settings(), {}, "", False),
        (plan(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="/node/nccl.%h.%p"), settings(), {}, "infiniband", True),
        (plan(), settings(doctor=True), {}, "", True),
        (plan(nnodes=1), settings(doctor=True, fabric=None), {}, "", True),
        (plan(), settings(doctor=True), {"NCCL_DEBUG": "WARN"}, "", False),
    ],
)
def test_nccl_writes_a_log_where_somebody_reads_it_and_the_user_has_none(
    plan: Any, settings: Any, env: dict[str, str], wanted: str, writes: bool
) -> None:
    assert fabric.to_prove(plan, settings, env) == wanted
    assert fabric.variables(plan, settings, env, Path("/node")) == (WRITES if writes else {})


def watched(folder: Path, ranks: int, *later: tuple[str, str]) -> str | None:
    """What comes of a watch while these logs are written one after another; None: it goes on."""

    async def watch() -> str | None:
        task = asyncio.create_task(fabric.watch(folder, "infiniband", ranks))
        for name, text in later:
            await asyncio.sleep(0.01)
            (folder / name).write_text(text)
        done, _ = await asyncio.wait([task], timeout=0.3)
        task.cancel()
        return task.result() if done else None

    return asyncio.run(watch())


def test_a_watch_ends_with_the_first_log_that_says_sockets_or_when_all_say_the_fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fabric, "INTERVAL", 0.01)
    folders = [tmp_path / name for name in "abcde"]
    for folder in folders:
        folder.mkdir()
    assert watched(folders[0], 2) is None
    assert watched(folders[1], 2, ("nccl.a.1", HALF), ("nccl.a.2", IB)) is None
    assert watched(folders[2], 2, ("nccl.a.1", IB), ("nccl.a.2", IB)) == ""
    assert watched(folders[3], 1, ("gpus", SOCKETS)) is None
    found = watched(folders[4], 2, ("nccl.a.1", IB), ("nccl.a.2", SOCKETS))
    assert found is not None
    assert found.startswith("NCCL uses sockets between the nodes, and is to use infiniband")
    assert found.endswith(", or let it train so with --no-preflight")


def test_of_each_fabric_without_sockets_is_known_what_proves_it_and_what_a_node_must_have() -> None:
    assert set(fabric.LACKS) == set(fabric._WHY) == set(RDMA)
    assert [name for name in RDMA if not facts.libraries(name, {})] == []
