"""What the doctor calls wrong: tables of cases, whole texts."""

from dataclasses import replace

import pytest

from entrypoint.doctor import judge
from entrypoint.doctor.facts import NodeFacts
from entrypoint.doctor.judge import Clock, FarGpu, Finding, GpuSpeed, Speed, Way
from entrypoint.plan.profile import Nodes, Profile
from entrypoint.schedulers.known import cores_beside_gpus
from tests.unit.doctor.nodes import GIB, SITE, WHOLE, node, room

MAKE_ROOM = "remove what is not needed there (df -h, df -i, quota), or give another with --run-dir"
TO_ADMINISTRATORS = "leave the node out and tell its administrators"


def said(found: list[Finding]) -> list[str]:
    return [f"{one.node}: {one.check}: {one}" for one in found]


@pytest.mark.parametrize("fabric", ["", "ethernet", "infiniband", "slingshot", "efa"])
def test_a_node_that_has_all_that_its_profile_says_lacks_nothing(fabric: str) -> None:
    assert judge.of_facts(WHOLE, SITE, fabric) == []
    assert judge.of_facts(WHOLE, Profile(), fabric) == []


@pytest.mark.parametrize(
    ("found", "fabric", "text"),
    [
        (
            room("run directory", refused="Disk quota exceeded"),
            "",
            f"a: run directory: run directory /scratch/run takes no file of 1 MiB (Disk quota exceeded): {MAKE_ROOM}",
        ),
        (
            room("run directory", free=GIB - 1),
            "",
            f"a: run directory: run directory /scratch/run has 1024 MiB left: {MAKE_ROOM}",
        ),
        (
            room("run directory", inodes=999),
            "",
            f"a: run directory: run directory /scratch/run takes 999 more files: {MAKE_ROOM}",
        ),
        (
            room("TMPDIR", refused="No space left on device"),
            "",
            "a: TMPDIR: TMPDIR /tmp takes no file of 1 MiB (No space left on device): remove what is not needed there, or set TMPDIR to a directory of the node with room",
        ),
        (
            room("TMPDIR", free=256_000_000 - 1),
            "",
            "a: TMPDIR: TMPDIR /tmp has 244 MiB left: remove what is not needed there, or set TMPDIR to a directory of the node with room",
        ),
        (
            room("/dev/shm", free=1_000_000_000 - 1),
            "",
            "a: /dev/shm: /dev/shm has 954 MiB left: remove what ended jobs have left there, or have the administrators make it larger",
        ),
        (
            node(available=GIB // 2),
            "",
            "a: memory: 512 MiB of 256 GiB memory are free: ask for more (--mem), or end what takes it",
        ),
        (
            node(memory=128 * GIB),
            "",
            f"a: memory: it has 128 GiB memory, and lab.yaml says 256 GiB: {TO_ADMINISTRATORS}",
        ),
        (
            node(cpus=32),
            "",
            "a: cpus: 32 CPUs may be used, and lab.yaml says 64: ask for all of them (--cpus-per-task, --exclusive)",
        ),
        (
            node(limits={"memlock": 65536, "nofile": 1 << 20, "nproc": None}),
            "infiniband",
            "a: memlock: the limit memlock is 64 KiB, and infiniband needs its buffers locked: have it raised for the scheduler's daemon on the nodes (LimitMEMLOCK=infinity and the like)",
        ),
        (
            node(limits={"memlock": None, "nofile": 1024, "nproc": None}),
            "",
            "a: nofile: the limit nofile is 1024: have it raised for the scheduler's daemon on the nodes (LimitNOFILE=infinity and the like)",
        ),
        (
            node(limits={"memlock": GIB - 1, "nofile": 4095, "nproc": 1024}),
            "ethernet",
            "a: nofile: the limit nofile is 4095: have it raised for the scheduler's daemon on the nodes (LimitNOFILE=infinity and the like)",
        ),
        (
            node(limits={"memlock": None, "nofile": 4096, "nproc": 1023}),
            "",
            "a: nproc: the limit nproc is 1023: have it raised for the scheduler's daemon on the nodes (LimitNPROC=infinity and the like)",
        ),
        (
            node(ports=()),
            "infiniband",
            f"a: fabric: no port of infiniband is up here, and that is what NCCL is to use: {TO_ADMINISTRATORS} (ibstat)",
        ),
        (
            node(unloadable="libnccl-net.so: cannot open shared object file"),
            "slingshot",
            "a: plugin: what NCCL needs for slingshot does not load (libnccl-net.so: cannot open shared object file): bind it into the image (container: binds, APPTRAIN_BIND); it must find its own libraries by itself (ldd, in the image)",
        ),
    ],
)
def test_what_a_node_lacks_is_one_finding_with_its_remedy(found: NodeFacts, fabric: str, text: str) -> None:
    assert said(judge.of_facts(found, SITE, fabric)) == [text]


@pytest.mark.parametrize(
    ("found", "site", "fabric"),
    [
        (room("run directory", free=GIB, inodes=1000), SITE, ""),
        (room("run directory", inodes=None), SITE, ""),
        (room("TMPDIR", free=256_000_000), SITE, ""),
        (room("/dev/shm", free=1_000_000_000), SITE, ""),
        (node(limits={"memlock": 65536, "nofile": 4096, "nproc": 1024}), SITE, ""),
        (node(limits={"memlock": 65536, "nofile": 4096, "nproc": 1024}), SITE, "ethernet"),
        (node(limits={"memlock": GIB, "nofile": 4096, "nproc": 1024}), SITE, "infiniband"),
        (node(memory=231 * GIB, available=GIB), SITE, ""),
        (node(ports=(), unloadable="x"), SITE, "ethernet"),
        (node(cpus=4, memory=8 * GIB), Profile(nodes=Nodes(cpus=64, memory_gib=256)), ""),
    ],
)
def test_what_is_just_enough_or_not_told_of_is_no_finding(
    found: NodeFacts, site: Profile, fabric: str
) -> None:
    assert judge.of_facts(found, site, fabric) == []


@pytest.mark.parametrize(("name", "final"), [("run directory", True), ("TMPDIR", True), ("/dev/shm", False)])
def test_a_full_directory_that_every_job_writes_to_is_final(name: str, final: bool) -> None:
    (found,) = judge.of_facts(room(name, refused="No space left on device"), Profile(), "")
    assert found.is_final == final
    (low,) = judge.of_facts(room(name, free=0), Profile(), "")
    assert not low.is_final


@pytest.mark.parametrize(
    ("used", "ecc", "texts"),
    [
        (GIB // 2, 0, []),
        (2 * GIB, None, []),
        (
            5 * GIB // 2,
            None,
            [
                "a: gpu: the GPU of rank 3 (H100) has 2.5 GiB of 80 GiB taken by another process: leave the node out, or end that process (nvidia-smi)"
            ],
        ),
        (
            30 * GIB,
            0,
            [
                "a: gpu: the GPU of rank 3 (H100) has 30 GiB of 80 GiB taken by another process: leave the node out, or end that process (nvidia-smi)"
            ],
        ),
        (
            0,
            2,
            [f"a: gpu: the GPU of rank 3 (H100) has 2 uncorrected memory errors: {TO_ADMINISTRATORS}"],
        ),
    ],
)
def test_a_gpu_that_others_use_or_that_has_errors_is_named(
    used: int, ecc: int | None, texts: list[str]
) -> None:
    gpu = GpuSpeed(rank=3, node="a", name="H100", used=used, total=80 * GIB, ecc=ecc)
    assert said(judge.of_gpu(gpu)) == texts


def test_a_whole_node_with_fewer_gpus_than_its_site_says_is_named() -> None:
    gpus = [GpuSpeed(i, node, "H100", 0, 80 * GIB, None) for i, node in enumerate("aaaabbb")]
    assert said(judge.of_granted(gpus, SITE)) == [
        f"b: gpus: 3 GPUs may be used, and lab.yaml says 4: ask for all of them, or {TO_ADMINISTRATORS}"
    ]
    assert judge.of_granted(gpus, Profile()) == []
    assert judge.of_granted([replace(gpu, visible=4) for gpu in gpus], SITE) == [], "fewer ranks than GPUs"
    shared = Profile(name="lab.yaml", nodes=Nodes(gpus=4, whole=False))
    assert judge.of_granted(gpus, shared) == []


@pytest.mark.parametrize(
    ("ahead", "bound", "words"),
    [
        (5.0, 0.01, "5.00 s ahead of a's"),
        (-1.2, 0.1, "1.20 s behind a's"),
        (1.0, 0.0, None),
        (1.5, 0.6, None),
    ],
)
def test_a_clock_counts_as_wrong_by_what_is_certain(ahead: float, bound: float, words: str | None) -> None:
    found = judge.of_clocks([Clock("b", ahead, bound), Clock("c", 0.0, bound)], "a", 1.0)
    remedy = "have its administrators synchronize it (chronyc tracking, timedatectl)"
    assert said(found) == ([f"b: clock: its clock is {words}: {remedy}"] if words else [])


def speeds(*compute: float) -> list[Speed]:
    """Two ranks a node."""
    return [Speed(i, "abcdef"[i // 2], one, 10.0) for i, one in enumerate(compute)]


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ((10, 10), {}),
        ((10, 10, 10, 10), {}),
        ((10, 10, 6, 10), {}),
        ((10, 10, 5, 10), {"b": "0.50"}),
        ((10, 10, 10, 10, 10, 1), {"c": "0.10"}),
        ((10, 10, 10, 10, 16, 16), {}),
        ((4, 4, 4, 4, 10, 10, 10, 10, 10, 10), {"a": "0.40", "b": "0.40"}),
    ],
)
def test_a_node_stands_out_by_its_slowest_rank(values: tuple[float, ...], slow: dict[str, str]) -> None:
    found = judge.of_speeds(speeds(*values))
    remedy = "end what else runs there (top, nvidia-smi), or leave the node out: it holds up all others"
    assert said(found) == [
        f"{node}: compute: it computes at {share} of the median of the other nodes: {remedy}"
        for node, share in slow.items()
    ]


@pytest.mark.parametrize(("copied", "words"), [(5.0, []), (4.9, ["0.49"]), (2.0, ["0.20"])])
def test_a_node_that_copies_at_less_than_half_of_the_others_is_named(copied: float, words: list[str]) -> None:
    found = judge.of_speeds([Speed(0, "a", 1.0, 10.0), Speed(1, "b", 1.0, copied)])
    assert [(one.node, one.check, one.text) for one in found] == [
        ("b", "memory", f"it copies memory at {share} of the median of the other nodes") for share in words
    ]


def ways(table: dict[str, float]) -> list[Way]:
    return [Way(pair[0], pair[1], bandwidth) for pair, bandwidth in table.items()]


FAST = dict.fromkeys(("ab", "ba", "ac", "ca", "bc", "cb"), 1e9)


@pytest.mark.parametrize(
    ("table", "speed", "texts"),
    [
        (FAST, None, []),
        (FAST | {"ab": 1e6}, None, []),
        (FAST | {"ca": 6e6, "cb": 7e6}, None, ["c: it sends to no node more than 7.00 MB/s, 0.01 of the median of the others"]),
        (FAST | {"ac": 6e6, "bc": 7e6}, None, ["c: it gets from no node more than 7.00 MB/s, 0.01 of the median of the others"]),
        ({"ab": 1e9, "ba": 1e6}, None, []),
        ({"ab": 1e9, "ba": 2.5e8}, 100 * 10**9, []),
        ({"ab": 1e9, "ba": 2.4e8}, 100 * 10**9, ["b: it sends 0.24 GB/s to a, over an interface of 100 Gbit/s"]),
        ({"ab": 1e9, "ba": 1e-3}, None, []),
        ({}, None, []),
    ],
)  # fmt: skip
def test_a_link_is_slow_against_the_others_or_of_two_nodes_against_its_interface(
    table: dict[str, float], speed: int | None, texts: list[str]
) -> None:
    found = judge.of_ways(ways(table), speed)
    assert [f"{one.node}: {one.text}" for one in found] == texts
    assert {one.remedy for one in found} <= {
        "have its link and cable looked at (ethtool, ibstat, tc), or leave the node out"
    }


def test_the_same_finding_of_many_nodes_is_one_line() -> None:
    pairs = [("a", "x: y"), ("b", "z: y"), *((f"n{i}", "x: y") for i in range(5))]
    assert judge.by_nodes(pairs) == ["a, n0, n1, n2 and 2 more: x: y", "b: z: y"]
    assert judge.by_nodes(pairs[:5]) == ["a, n0, n1, n2: x: y", "b: z: y"]


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (10239, "10.0 KiB"),
        (10240, "10 KiB"),
        (65536, "64 KiB"),
        (1.5 * GIB, "1.5 GiB"),
        (2048 * GIB, "2.0 TiB"),
        (2**60, "1048576 TiB"),
    ],
)
def test_bytes_are_told_in_the_unit_that_fits(amount: float, text: str) -> None:
    assert judge.size(amount) == text


def test_nodes_that_one_machine_plays_do_not_differ() -> None:
    speeds = [
        Speed(rank, name, compute, 1e9) for rank, (name, compute) in enumerate([("a", 1e9), ("b", 1e8)])
    ]
    ways = [Way("a", "b", 1.0), Way("b", "a", 1.0)]
    assert judge.of_differences([node(interface="lo", speed=None)], speeds, ways) == []
    assert [(one.node, one.check) for one in judge.of_differences([node()], speeds, ways)] == [
        *(("b", "compute"), ("a", "link"), ("b", "link"))
    ]


def test_far_gpus_of_a_node_are_one_finding_with_the_schedulers_option() -> None:
    far = [
        FarGpu(node="a", local_rank=2, numa_node=1),
        FarGpu(node="b", local_rank=0, numa_node=0),
        FarGpu(node="a", local_rank=3, numa_node=1),
    ]
    remedy = cores_beside_gpus("slurm", one_task=True)
    assert said(judge.of_rank_cores(far, remedy)) == [
        "a: numa: no core was granted on NUMA node 1, where the GPUs of local ranks 2-3 are: request whole nodes "
        "(--exclusive) or cores beside the GPUs (--gres-flags=enforce-binding)",
        "b: numa: no core was granted on NUMA node 0, where the GPU of local rank 0 is: request whole nodes "
        "(--exclusive) or cores beside the GPUs (--gres-flags=enforce-binding)",
    ]
    assert judge.of_rank_cores([], remedy) == []
