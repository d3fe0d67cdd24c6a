"""Hosts with two networks, to which a name does not mean one address: whose is the rendezvous, and who says so.

The real command on network namespaces of this machine. Each host has its own /etc/hosts.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.embedded.hosts import FAST, MANAGEMENT, Host, address, hosts
from tests.embedded.jobs import Ended, Job, clean_env

TELL = ("--mode", "exec", "--no-python", "--", "sh", "-c")
ADDRESSES = 'echo "$APPTRAIN_NODE: node 0 is $MASTER_ADDR, gloo on $GLOO_SOCKET_IFNAME"'
SUM = """\
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
found = torch.ones(1 << 20)
dist.all_reduce(found)
print(f"rank {dist.get_rank()} has {int(found[-1])}", flush=True)
dist.destroy_process_group()
os._exit(0)  # sooner than torch is taken down
"""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: network namespaces of its own"),
]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(3, tmp_path) as found:
        yield found


def mean(host: Host, **networks: int) -> None:
    """What names mean to a host: nodes' addresses in these networks, of the others the management ones."""
    names = {f"n{number}": address(number, networks.get(f"n{number}", MANAGEMENT)) for number in range(3)}
    host.name(names)


def run(folder: Path, on: Sequence[Host], *arguments: str, attempt: str = "0") -> list[Ended]:
    """How a job of these nodes ends on each of them, as under a job script that counts the attempts."""
    (folder / "key").write_text("0123456789abcdef0123456789abcdef\n")
    (folder / "key").chmod(0o600)
    jobs = []
    for host in on:
        argv = [sys.executable, "-P", "-m", "entrypoint", "launch", "--device", "cpu"]
        argv += ["--nodes", ",".join(f"n{one.number}" for one in on), "--node-rank", str(host.number)]
        argv += ["--join-key-file", str(folder / "key"), "--run-dir", str(folder / "run"), *arguments]
        here = folder / f"n{host.number}"
        here.mkdir()
        env = clean_env(APPTRAIN_ATTEMPT=attempt)
        jobs.append(Job(host.argv(argv), here, folder / "run", env))
    return [job.end() for job in jobs]


def lines(ended: Sequence[Ended]) -> list[str]:
    return [line for one in ended for line in one.out.splitlines()]


def said(one: Ended) -> list[str]:
    """Without torch's own warning of an address that has no name."""
    return [line for line in one.err.splitlines() if line.startswith("apptrain: ")]


def test_a_host_whose_own_name_means_another_address_to_it_than_to_the_others(
    tmp_path: Path, three: list[Host]
) -> None:
    """As where a site puts a fast network's address beside each host's own name, in its own file."""
    both = three[:2]
    for host in both:
        mean(host, **{f"n{host.number}": FAST})
    script = 'echo "rank $RANK: the store is at $MASTER_ADDR, gloo on $GLOO_SOCKET_IFNAME"'
    ended = run(tmp_path, both, "--no-python", "--", "sh", "-c", script)
    assert [one.status for one in ended] == [0, 0], [one.err for one in ended]
    *found, preflight, _ = said(ended[0])
    assert preflight.startswith("apptrain: preflight: 2 nodes, nothing found, ")
    assert found == [
        "apptrain: n0 is 10.77.43.1 on n0, and 10.77.42.1 on n1: 10.77.42.1 is taken",
        "apptrain: job manual, attempt 0: 2 nodes x 1 rank on cpu, mode torchrun, rendezvous 10.77.42.1:29500, "
        "OMP_NUM_THREADS=1",
        "apptrain: network: rendezvous at 10.77.42.1 [derived:join], gloo on eth0",
    ]
    assert lines(ended) == [
        "rank 0: the store is at 10.77.42.1, gloo on eth0",
        "rank 1: the store is at n0, gloo on eth0",
    ]


def test_the_ranks_of_such_hosts_add_up(tmp_path: Path, three: list[Host]) -> None:
    both = three[:2]
    for host in both:
        mean(host, **{f"n{host.number}": FAST})
    (tmp_path / "sum.py").write_text(SUM)
    ended = run(tmp_path, both, "--mode", "rank", "--", str(tmp_path / "sum.py"))
    assert [one.status for one in ended] == [0, 0], [one.err for one in ended]
    assert lines(ended) == ["rank 0 has 2", "rank 1 has 2"]


def test_a_host_to_which_node_0s_name_means_another_address_than_to_most(
    tmp_path: Path, three: list[Host]
) -> None:
    mean(three[2], n0=FAST)
    ended = run(tmp_path, three, *TELL, ADDRESSES)
    assert [one.status for one in ended] == [0, 0, 0], [one.err for one in ended]
    assert said(ended[0])[0] == "apptrain: n0 is 10.77.43.1 on n2, and 10.77.42.1 on n0: 10.77.42.1 is taken"
    assert lines(ended) == [
        "n0: node 0 is n0, gloo on eth0",
        "n1: node 0 is n0, gloo on eth0",
        "n2: node 0 is 10.77.42.1, gloo on eth0",
    ]


def test_node_0_alone_to_which_its_name_means_another_address_moves_to_the_others(
    tmp_path: Path, three: list[Host]
) -> None:
    mean(three[0], n0=FAST)
    ended = run(tmp_path, three, *TELL, ADDRESSES)
    assert [one.status for one in ended] == [0, 0, 0], [one.err for one in ended]
    assert lines(ended) == [
        "n0: node 0 is 10.77.42.1, gloo on eth0",
        "n1: node 0 is n0, gloo on eth0",
        "n2: node 0 is n0, gloo on eth0",
    ]


def test_a_host_that_cannot_use_the_address_that_most_reach_is_named_to_everyone(
    tmp_path: Path, three: list[Host]
) -> None:
    mean(three[2], n0=FAST)
    three[2].cut(MANAGEMENT)
    ended = run(tmp_path, three, *TELL, ADDRESSES)
    text = (
        "n0 is 10.77.43.1 on n2, and 10.77.42.1 on n0, which n2 cannot use: Network is unreachable: correct DNS or "
        "/etc/hosts, so that it is the same on all nodes, or give --master-addr with an address that all nodes reach"
    )
    assert [one.status for one in ended] == [64, 64, 64], [one.err for one in ended]
    assert [said(one)[-1] for one in ended] == [f"apptrain: {text}"] * 3


def test_an_address_that_was_given_is_the_only_one(tmp_path: Path, three: list[Host]) -> None:
    for host in three:
        mean(host, **{f"n{host.number}": FAST})
    ended = run(tmp_path, three, "--master-addr", address(0, FAST), *TELL, ADDRESSES)
    assert [one.status for one in ended] == [0, 0, 0], [one.err for one in ended]
    assert lines(ended) == [f"n{number}: node 0 is 10.77.43.1, gloo on hsn0" for number in range(3)]
