"""The doctor on a real Slurm cluster: healthy as it is, and each fault by its node and its remedy.

Needs root. The nodes share the cores of this machine with other tests: a test that compares their speeds gives them
shares of its own (cgroups of version 1, if this machine has them), so that a node has what its own hogs leave.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoint.cli import profiles as render
from tests.cluster.account import HOME, SCRIPT, SOFTWARE, Ran, account, clear
from tests.cluster.test_network import FABRIC, Site
from tests.vcluster.shares import shares

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]

DOCTOR = ("-c1", SCRIPT, "--device", "cpu", "--doctor")
PINNED = ["gpu-a01", "gpu-a02"]
TWO = ("-N2", "--nodelist=gpu-a01,gpu-a02")
RUNS = 10
"""Of 12 s each."""
SLOWEST = 30.0
"""Seconds that the doctor may take once its ranks run."""
SKEWED = """\
import os, sys, time
if os.environ["APPTRAIN_NODE"] == "gpu-a02":
    real = time.time
    time.time = lambda: real() + 5
os.environ["APPTRAIN_DEVICE"] = "cpu"
from entrypoint.doctor.__main__ import main
sys.exit(main([]))
"""
"""A clock of its own for one node: a namespace cannot have one."""


@pytest.fixture(scope="module")
def all_tests_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with account(request) as user:
        user.write("doctor/skewed.py", SKEWED)
        file = user.write("app train/clusters/ib.yaml", "scheduler: slurm\nlaunch: {fabric: infiniband}\n")
        render.render(user.on_disk(file), write=True)
        yield Site(user=user)


@pytest.fixture
def site(all_tests_site: Site) -> Iterator[Site]:
    clear(all_tests_site.user)
    yield all_tests_site
    clear(all_tests_site.user)
    all_tests_site.repair()


def examine(site: Site, *request: str, options: tuple[str | Path, ...] = ()) -> Ran:
    return site.user.ran(*(request or ("-N3",)), *DOCTOR, *options)


def seconds(ran: Ran) -> float:
    found = re.search(r"^doctor: .* ([0-9.]+) s$", ran.text, re.MULTILINE)
    assert found, ran.text
    return float(found[1])


def wrong(ran: Ran, node: str, words: str) -> str:
    """The line below the table that says so of the node."""
    assert ran.ended == ("FAILED", 1), ran.text
    (line,) = (line for line in ran.lines if line.startswith(node) and words in line)
    return line


def refused(ran: Ran, status: int = 64) -> str:
    """Why the nodes could not even meet, in one line."""
    assert ran.ended == ("FAILED", status), ran.text
    said = [line for line in ran.lines if line.startswith("apptrain: ")]
    return "\n".join(said)


def give_each_a_core(site: Site) -> str:
    """Pins the first two nodes to a core each; the second one's."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    for node, core in zip(PINNED, (second, first), strict=True):
        site.sh(node, f"for pid in $(pgrep -x slurmd); do taskset -a -c -p {core} $pid; done")
    return str(first)


@pytest.mark.timeout(900, func_only=True)
def test_nodes_that_have_a_core_each_are_healthy_each_time(site: Site) -> None:
    give_each_a_core(site)
    took = []
    with shares(site.user.cluster, *([node] for node in PINNED)):
        for _ in range(RUNS):
            ran = examine(site, *TWO)
            assert ran.ended == ("COMPLETED", 0), ran
            table = [line.split()[0] for line in ran.printed if line.startswith(("gpu-", "node "))]
            assert table == [*PINNED, "node"]
            assert "healthy" in ran.printed
            took.append(seconds(ran))
    assert min(took) < SLOWEST, took


def test_the_preflight_of_a_launch_finds_nothing_and_tells_how_long_it_took(site: Site) -> None:
    ran = site.user.ran(
        "-N3", "-c1", SCRIPT, "--device", "cpu", "--no-python", "--mode", "exec", "--", "true"
    )
    assert ran.ended == ("COMPLETED", 0), ran
    (line,) = (line for line in ran.launched if line.startswith("preflight: "))
    assert re.fullmatch(r"preflight: 3 nodes, nothing found, [0-9.]+ s", line), line


# --- before the nodes meet ----------------------------------------------------------------------------------------


def test_another_image_on_one_node(site: Site) -> None:
    image = SOFTWARE / "image.sif"
    site.sh("gpu-a02", "mkdir /tmp/other")
    # The id of an image stands in its header, of which the other one has another.
    site.sh(
        "gpu-a02",
        f"cp {image} /tmp/other/image.sif; head -c 16 /dev/urandom | dd of=/tmp/other/image.sif bs=1 seek=48 conv=notrunc; "
        f"mount --bind /tmp/other/image.sif {image}",
    )
    said = refused(examine(site))
    assert "the nodes do not agree: image_id is " in said
    assert " on node 1 (gpu-a02): start every node with the same options, profile and image" in said


def test_a_full_run_directory(site: Site) -> None:
    folder = site.user.folder("full")
    site.sh(
        "gpu-a01",
        f"mount -t tmpfs -o size=64k,uid=2001,mode=700 small '{folder}'; cat /dev/zero >'{folder}/x' || :",
    )
    said = refused(examine(site, options=("--run-dir", folder / "run")))
    assert f"the run directory {folder / 'run'} is full on gpu-a01 (No space left on device): " in said
    assert said.endswith("(df -h, df -i, quota), or give another with --run-dir")


def test_a_wrong_interface(site: Site) -> None:
    said = refused(examine(site, options=("--interface", "hsn9")))
    assert "--interface hsn9: gpu-" in said
    assert "has no such interface, it has eth0 (10.77.42." in said


def test_a_way_that_passes_in_one_direction_only(site: Site) -> None:
    site.drop("gpu-a02", "input", "ip saddr 10.77.42.27")
    said = refused(examine(site, options=("--master-port", "29500")), 69)
    assert re.search("gpu-(a02|b07) cannot reach gpu-(a02|b07) at 10.77.42.[0-9]+ \\(eth0\\): ", said)
    assert FABRIC in said


def test_gpu_variables_without_devices(site: Site) -> None:
    said = refused(site.user.ran("-N2", "--gpus-per-node=2", "-c1", SCRIPT, "--doctor"))
    assert re.search("gpu-[ab]0[0-9]", said)
    assert "request GPUs, leave the node out if they were granted, or give --device cpu" in said


# --- in the table -------------------------------------------------------------------------------------------------


def test_a_clock_that_is_five_seconds_off(site: Site) -> None:
    ran = site.user.ran("-N3", "-c1", SCRIPT, "--device", "cpu", "--", HOME / "doctor/skewed.py")
    line = wrong(ran, "gpu-a02: its clock is ", "s ahead of gpu-a01's")
    assert abs(float(line.split()[4]) - 5) < 0.5
    assert line.endswith(": have its administrators synchronize it (chronyc tracking, timedatectl)")


def test_a_link_that_is_throttled(site: Site) -> None:
    site.sh("gpu-b07", "tc qdisc add dev eth0 root tbf rate 40mbit burst 64kb latency 100ms")
    line = wrong(examine(site), "gpu-b07: it sends to no node more than ", " of the median of the others")
    assert line.endswith(": have its link and cable looked at (ethtool, ibstat, tc), or leave the node out")


def test_another_program_that_takes_the_cpu_of_a_node(site: Site) -> None:
    core = give_each_a_core(site)
    site.sh(
        "gpu-a02",
        f"for _ in 1 2 3; do setsid taskset -c {core} sh -c 'while :; do :; done' >/dev/null 2>&1 & done",
    )
    with shares(site.user.cluster, *([node] for node in PINNED)):
        ran = examine(site, *TWO)
        line = wrong(ran, "gpu-a02: it computes at ", " of the median of the other nodes")
    assert line.endswith("or leave the node out: it holds up all others")


def test_a_limit_of_locked_memory_that_is_too_small(site: Site) -> None:
    site.sh("gpu-a02", "for pid in $(pgrep -x slurmd); do prlimit --pid $pid --memlock=65536:65536; done")
    ran = examine(site, options=("--profile", "ib"))
    line = wrong(ran, "gpu-a02: the limit memlock is 64 KiB, ", "infiniband needs its buffers locked")
    assert line.endswith("(LimitMEMLOCK=infinity and the like)")
