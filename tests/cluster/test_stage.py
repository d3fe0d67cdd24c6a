"""The image on the nodes' own disks, under real Slurm with its sbcast. Needs root, for the test cluster.

tests/unit/slurm/test_stage.py has what may go wrong, with a stand-in for sbcast.
"""

import os
from collections.abc import Iterator

import pytest

from entrypoint.cli import profiles
from tests.cluster.account import HOME, REPOSITORY, SCRIPT, Account, Ran, account, clear
from tests.unit.bounds import shorten

NODES = ("gpu-a01", "gpu-a02", "gpu-b07")
DISK = "/var/local"
TELL = """\
import os
print(os.environ["APPTRAIN_NODE"], os.environ["APPTAINER_CONTAINER"])
"""
ONCE = ("--device", "cpu", "--mode", "exec")
TELLING = ("--", HOME / "else where/tell.py")

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def all_tests_account(request: pytest.FixtureRequest) -> Iterator[Account]:
    with account(request) as found:
        found.write("else where/tell.py", TELL)
        shorten(found.on_disk(REPOSITORY / "host/stage.sh"), STALE=-1)
        yield found


@pytest.fixture
def user(all_tests_account: Account) -> Iterator[Account]:
    """The account, with a directory of each node's own, in which there is nothing else."""
    clear(all_tests_account)
    for node in NODES:
        on_node(
            all_tests_account, node, f"mkdir -p {DISK} && mount -t tmpfs -o mode=1777,size=9g disk {DISK}"
        )
    yield all_tests_account
    clear(all_tests_account)
    for node in NODES:
        on_node(all_tests_account, node, f"umount -l {DISK}")


def on_node(user: Account, node: str, line: str) -> str:
    """What root says there."""
    ended = user.cluster[node].run(["sh", "-c", line])
    assert ended.returncode == 0, ended.stderr
    return str(ended.stdout)


def left(user: Account) -> list[str]:
    """What lies in the directories of the nodes."""
    return [on_node(user, node, f"ls {DISK}") for node in NODES]


def staged(user: Account, *options: str, nodes: int = 3) -> Ran:
    words = (
        "--partition=all",
        f"--nodes={nodes}",
        f"--nodelist={','.join(NODES[:nodes])}",
        "--cpus-per-task=1",
    )
    return user.ran(*words, SCRIPT, *ONCE, *options, *TELLING)


def test_each_node_runs_from_its_own_copy_and_keeps_nothing(user: Account) -> None:
    ran = staged(user, "--stage", DISK)
    assert ran.ended == ("COMPLETED", 0), ran
    folder = f"{DISK}/apptrain-image-2001.slurm-{ran.job.id}"
    assert ran.printed == [f"{node} {folder}/image.sif" for node in NODES]
    assert any(
        line.startswith(f"image: copied to {DISK} on 3 of 3 nodes in ") for line in ran.said("apptrain")
    )
    assert left(user) == ["", "", ""]


def test_a_node_that_may_not_write_there_ends_the_job_or_is_left_out(user: Account) -> None:
    on_node(user, NODES[1], f"mount -o remount,ro {DISK}")
    ran = staged(user, "--stage", DISK)
    assert ran.ended == ("FAILED", 64), ran
    assert f"--stage {DISK}: {NODES[1]} (cannot create directory" in ran.text
    assert ran.printed == []
    ran = staged(user, "--stage", DISK, "--nnodes", "2:3")
    assert ran.ended == ("COMPLETED", 0), ran
    assert [line.split()[0] for line in ran.printed] == [NODES[0], NODES[2]]
    assert left(user) == ["", "", ""]


def test_a_disk_that_fills_while_it_is_written_leaves_the_other_nodes_their_copies(user: Account) -> None:
    """The room that a node has found is gone by then: the node is named, and reads the shared image."""
    on_node(user, NODES[1], f"mount -o remount,size=1g {DISK}")
    profile = user.write("fills.yaml", f"scheduler: slurm\nstage: {{to: {DISK}}}\n")
    assert profiles.main([str(user.on_disk(profile))]) == 0
    script = user.on_disk(REPOSITORY / "host/stage.sh")
    text = script.read_text()
    try:
        script.write_text(
            text.replace(
                "    ((free >= needs)) ||", f"    [[ $(uname -n) == {NODES[1]}* ]] || ((free >= needs)) ||"
            )
        )
        ran = staged(user, "--profile", str(profile))
    finally:
        script.write_text(text)
    assert ran.ended == ("COMPLETED", 0), ran
    told = [line for line in ran.said("apptrain") if "is read where it is" in line]
    assert len(told) == 1, ran
    assert f"by {NODES[1]} (its copy is not whole" in told[0]
    assert [f" {DISK}/" in line for line in ran.printed] == [True, False, True]


def test_what_a_job_leaves_that_is_killed_while_it_copies_the_next_one_removes(user: Account) -> None:
    words = ("--partition=all", "--nodes=3", f"--nodelist={','.join(NODES)}", "--cpus-per-task=1")
    number = user.submit(*words, SCRIPT, *ONCE, "--stage", DISK, *TELLING)
    user.cluster.until(lambda: "image.sif" in on_node(user, NODES[2], f"find {DISK}"), "a copy", 120)
    user.cluster.controller.run(["scancel", "--full", "--signal=KILL", str(number)])
    user.end(number)
    assert any(left(user))
    ran = staged(user, "--stage", DISK)
    assert ran.ended == ("COMPLETED", 0), ran
    assert left(user) == ["", "", ""]
