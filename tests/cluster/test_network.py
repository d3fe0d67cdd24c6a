"""The network between the nodes of a Slurm job: what is chosen, and what is refused within seconds.

Real interfaces, names, firewalls and cuts on the test cluster, under the real job script and image. Needs root. A job
whose ranks need no torch starts a script of a few lines once on each node (`--mode exec`).
"""

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli import profiles as render
from entrypoint.job import outcome
from entrypoint.plan.rendezvous import port_pair
from tests.cluster.account import BOUND, HOME, REPOSITORY, SCRIPT, SOFTWARE, Account, Ran, account, clear
from tests.vcluster.layout import HIGH_SPEED, Network

NODES = ("gpu-a01", "gpu-a02", "gpu-b07")
ONCE = ("--device", "cpu", "--mode", "exec")
AT_ONCE = 150.0
"""Seconds from the start to a refusal that needs no waiting, on two busy cores; the nodes' own wait would be 300 s."""
UNANSWERED = 165.0
"""The same where a node waits for an answer that never comes, for 15 s at most."""
ATTEMPTS = 3
FABRIC = "is this a network that joins the nodes (--interface), or is a firewall between them?"
PORTS = "the next attempt uses another port"

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@dataclass(kw_only=True)
class Site:
    """The cluster as a user has it, and what a test breaks of it."""

    user: Account
    touched: set[str] = field(default_factory=set)

    def sh(self, node: str, line: str) -> str:
        """Runs a line as root on a node, which is a fresh one for the next test."""
        self.touched.add(node)
        ended = self.user.cluster[node].run(["bash", "-euo", "pipefail", "-c", line], timeout=BOUND)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def cut(self, node: str, network: Network) -> None:
        self.touched.add(node)
        self.user.cluster.cut(node, network)

    def drop(self, node: str, chain: str, rule: str, verdict: str = "drop") -> None:
        """Has a node's firewall drop packets of its `input` or `output`, or answer them."""
        make = f"add table inet t; add chain inet t c {{ type filter hook {chain} priority 0; }}"
        self.sh(node, f"nft '{make}; add rule inet t c {rule} {verdict}'")

    def name_hosts(self, node: str, style: Any) -> None:
        self.touched.add(node)
        self.user.cluster.name_hosts(node, style)

    def repair(self) -> None:
        cluster = self.user.cluster
        for node in self.touched:
            cluster.power_off(node)
        for node in sorted(self.touched):
            cluster.power_on(node)
        self.touched.clear()
        cluster.wait_idle()

    def start(self, *options: Path | str, script: str = "else where/tell.py") -> Ran:
        return self.user.ran("--nodes=3", "-c1", SCRIPT, *options, "--", HOME / script)


TELL = """\
import os
print(os.environ["APPTRAIN_NODE"], os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
"""
SUM = """\
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
found = torch.ones(1 << 20)
for _ in range(8):
    dist.all_reduce(found)
print(f"rank {dist.get_rank()} has {int(found[-1])}")
dist.destroy_process_group()
"""
SUMS = [f"rank {rank} has {3**8}" for rank in range(3)]


@pytest.fixture(scope="module")
def all_tests_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with account(request) as user:
        user.write("else where/tell.py", TELL)
        user.write("else where/sum.py", SUM)
        for name, text in {
            "fast": "host_suffix: -hsn",
            "six": "host_suffix: -hsn6",
            "mixed": "host_suffix: -hsn\nlaunch: {interface: eth0}\nenv: {NCCL_SOCKET_IFNAME: hsn}",
        }.items():
            file = user.write(f"app train/clusters/{name}.yaml", f"scheduler: slurm\n{text}\n")
            render.render(user.on_disk(file), write=True)
        yield Site(user=user)


@pytest.fixture
def site(all_tests_site: Site) -> Iterator[Site]:
    """A cluster that is idle and whole before and after a test."""
    clear(all_tests_site.user)
    yield all_tests_site
    clear(all_tests_site.user)
    all_tests_site.repair()


def done(ran: Ran) -> Ran:
    assert ran.ended == ("COMPLETED", 0), ran
    return ran


def network(ran: Ran) -> str:
    """The line about it."""
    (line,) = (line for line in ran.launched if line.startswith("network: "))
    return line


def addresses(ran: Ran) -> list[str]:
    """The nodes' own, as their plans have them."""
    plans = [json.loads((ran.folder / f"plan.{node}.json").read_text()) for node in range(len(NODES))]
    return [plan["rendezvous"]["local_addr"] for plan in plans]


def all_on(gloo: str, nccl: str) -> list[str]:
    return [f"{node} {gloo} {nccl}" for node in NODES]


# --- what is chosen -----------------------------------------------------------------------------------------


def test_by_default_it_is_the_network_of_the_nodes_names(site: Site) -> None:
    ran = done(site.start(*ONCE))
    assert network(ran) == (
        "network: rendezvous at gpu-a01 (10.77.42.11) [derived:SLURM_STEP_NODELIST], gloo on eth0"
    )
    assert addresses(ran) == ["10.77.42.11", "10.77.42.12", "10.77.42.27"]
    assert ran.printed == all_on("eth0", "=eth0")


def test_an_interface_that_was_asked_for_is_gloos_and_ncclss(site: Site) -> None:
    ran = done(site.start(*ONCE, "--interface", "hsn0"))
    assert network(ran) == (
        "network: rendezvous at gpu-a01 (10.77.42.11) [derived:SLURM_STEP_NODELIST], gloo on hsn0 [flag]"
    )
    assert ran.printed == all_on("hsn0", "=hsn0")


def test_a_profile_names_interfaces_and_its_own_variables_win(site: Site) -> None:
    ran = done(site.start(*ONCE, "--profile", "mixed"))
    assert network(ran) == (
        "network: rendezvous at gpu-a01-hsn (10.77.43.11) [profile:mixed.yaml], gloo on eth0 [profile:mixed.yaml]"
    )
    assert addresses(ran) == ["10.77.43.11", "10.77.43.12", "10.77.43.27"]
    assert ran.printed == all_on("eth0", "hsn")


def sent(site: Site, interface: str) -> list[int]:
    """Bytes that each node has sent there."""
    file = f"/sys/class/net/{interface}/statistics/tx_bytes"
    return [int(site.user.cluster[node].run(["cat", file]).stdout) for node in NODES]


def test_under_a_host_suffix_all_data_goes_over_that_network(site: Site) -> None:
    before = {name: sent(site, name) for name in ("eth0", "hsn0")}
    ran = done(site.start("--device", "cpu", "--profile", "fast", script="else where/sum.py"))
    assert network(ran) == (
        "network: rendezvous at gpu-a01-hsn (10.77.43.11) [profile:fast.yaml], gloo on hsn0"
    )
    assert ran.printed == SUMS
    grown = {
        name: [now - then for now, then in zip(sent(site, name), before[name], strict=True)]
        for name in before
    }
    assert min(grown["hsn0"]) > 8 * 4 << 20, grown  # eight sums of 4 MiB
    assert max(grown["eth0"]) < 2 << 20, grown  # Slurm's own


def test_nodes_that_have_ipv6_addresses_alone_work_too(site: Site) -> None:
    for node in NODES:
        site.sh(node, "ip -4 address flush dev hsn0")
    ran = done(site.start("--device", "cpu", "--profile", "six", script="else where/sum.py"))
    assert network(ran) == (
        "network: rendezvous at gpu-a01-hsn6 (fd77:0:0:43::11) [profile:six.yaml], gloo on hsn0"
    )
    assert ran.printed == SUMS


def test_nodes_that_are_127_0_1_1_to_themselves_work_too(site: Site) -> None:
    for node in NODES:
        site.name_hosts(node, "loopback")
    ran = done(site.start("--device", "cpu", script="else where/sum.py"))
    assert [ran.launched[0], network(ran)] == [
        "gpu-a01 is 127.0.1.1 to itself: 10.77.42.11, on the way to gpu-a02, is taken instead",
        "network: rendezvous at gpu-a01 (10.77.42.11) [derived:SLURM_STEP_NODELIST], gloo on eth0",
    ]
    # torch warns on node 0, whose address has no name there, and goes on.
    assert [line for line in ran.printed if "hostname of the client socket" not in line] == SUMS


def test_an_interface_may_have_another_name_on_one_node(site: Site) -> None:
    site.sh("gpu-b07", "ip link set hsn0 down; ip link set hsn0 name ib0; ip link set ib0 up")
    ran = done(site.start(*ONCE, "--profile", "fast"))
    assert network(ran) == (
        "network: rendezvous at gpu-a01-hsn (10.77.43.11) [profile:fast.yaml], gloo on hsn0 (ib0 on gpu-b07)"
    )
    assert ran.printed == ["gpu-a01 hsn0 =hsn0", "gpu-a02 hsn0 =hsn0", "gpu-b07 ib0 =ib0"]


def test_a_name_that_means_another_network_on_one_node_is_one_address_for_all(site: Site) -> None:
    site.name_hosts("gpu-b07", "high-speed")
    ran = done(site.start(*ONCE))
    assert [ran.launched[0], network(ran)] == [
        "gpu-a01 is 10.77.43.11 on gpu-b07, and 10.77.42.11 on gpu-a01: 10.77.42.11 is taken",
        "network: rendezvous at gpu-a01 (10.77.42.11) [derived:SLURM_STEP_NODELIST], gloo on eth0",
    ]
    assert addresses(ran) == ["10.77.42.11", "10.77.42.12", "10.77.42.27"]
    assert ran.printed == all_on("eth0", "=eth0")


# --- what is refused ----------------------------------------------------------------------------------------


def refusal(ran: Ran, attempts: int = 1) -> str:
    """The text that ended every attempt, as `refusals` has it."""
    (text,) = refusals(ran, attempts)
    return text


def refusals(ran: Ran, attempts: int = 1) -> set[str]:
    """The texts that ended the attempts, without the node that told it first, and with PORT for ports."""
    folder = f"(logs: {HOME}/my work/runs/apptrain-{ran.job.id}/logs/{attempts - 1})"
    ours = re.compile(r"(attempt \d|status \d+|trying again): ")
    said = [line for line in ran.launched if ours.match(line)]  # of the job script
    told = [re.fullmatch(r"(?:attempt (\d)|status (\d+)): gpu-[ab]0\d: (.*)", line) for line in said[::2]]
    assert all(told), ran.text
    expected = [(str(attempt), None) for attempt in range(attempts - 1)] + [(None, str(ran.job.status))]
    assert [one.group(1, 2) for one in told if one] == expected, ran.text
    again = [f"trying again: attempt {attempt}, with other ports" for attempt in range(1, attempts)]
    assert said[1::2] == again, ran.text
    assert said[-1].endswith(f" {folder}"), ran.text
    return {re.sub(r"\b6[1-5]\d{3}\b", "PORT", one[3].removesuffix(f" {folder}")) for one in told if one}


def took(ran: Ran) -> float:
    """Seconds from the start of the first attempt to its first refusal."""
    started = (ran.folder / "join.key").stat().st_mtime
    files = (ran.folder / "outcome").glob("0.*")
    return min(one.time for one in map(outcome.read, files) if one and one.status in (64, 69)) - started


def test_an_interface_that_no_node_has(site: Site) -> None:
    ran = site.user.ran(
        "--nodes=3", SCRIPT, *ONCE, "--", HOME / "else where/tell.py", env={"GLOO_SOCKET_IFNAME": "ib0"}
    )
    assert ran.ended == ("FAILED", 64), ran.text
    text = refusal(ran)
    number = {"gpu-a01": 11, "gpu-a02": 12, "gpu-b07": 27}
    node = text.removeprefix("GLOO_SOCKET_IFNAME=ib0: ").partition(" ")[0]
    has = f"eth0 (10.77.42.{number[node]}), hsn0 (10.77.43.{number[node]})"
    others = "name one that every node has, or none, to take the one on the way to the first node"
    assert text == f"GLOO_SOCKET_IFNAME=ib0: {node} has no such interface, it has {has}: {others}"
    assert took(ran) < AT_ONCE


def test_an_address_that_one_node_lost(site: Site) -> None:
    site.sh("gpu-b07", "ip -4 address flush dev hsn0; ip -6 address flush dev hsn0")
    ran = site.start(*ONCE, "--profile", "fast")
    assert ran.ended == ("FAILED", 64), ran.text
    assert refusal(ran) == (
        "gpu-b07-hsn is 10.77.43.27, but no interface of gpu-b07 has that: it has eth0 (10.77.42.27), "
        "hsn0 (without address): check its network, /etc/hosts and --node-rank, or give --master-addr"
    )
    assert took(ran) < AT_ONCE


def test_an_interface_that_is_down_on_one_node(site: Site) -> None:
    site.sh("gpu-b07", "ip link set hsn0 down")
    ran = site.start(*ONCE, "--profile", "fast")
    assert ran.ended == ("FAILED", 69), ran.text
    text = "gpu-b07-hsn is 10.77.43.27: hsn0 is down on gpu-b07: have it brought up, or leave that node out"
    assert refusal(ran, ATTEMPTS) == text
    assert took(ran) < AT_ONCE


def test_a_node_without_a_route(site: Site) -> None:
    site.sh("gpu-b07", "ip link set hsn0 down")
    ran = site.start(*ONCE, "--master-addr", "10.77.43.11")
    assert ran.ended == ("FAILED", 69), ran.text
    assert refusal(ran, ATTEMPTS) == (
        "gpu-b07 has no route to the first node's address 10.77.43.11 (Network is unreachable): check its "
        "network, or give --master-addr with an address of another"
    )
    assert took(ran) < AT_ONCE


def test_a_name_that_does_not_resolve_on_one_node(site: Site) -> None:
    site.sh("gpu-b07", "grep -v gpu-a01 /etc/hosts >/tmp/hosts; cat /tmp/hosts >/etc/hosts")
    ran = site.start(*ONCE)
    assert ran.ended == ("FAILED", 64), ran.text
    assert refusal(ran) == (
        "the first node's name 'gpu-a01' does not resolve on gpu-b07 (Temporary failure in name resolution): "
        "check the name, DNS and /etc/hosts, or give --master-addr with what scontrol show node gpu-a01 has as NodeAddr"
    )
    assert took(ran) < AT_ONCE


def test_nodes_that_know_only_their_own_names_meet_at_slurms_address_of_the_first(site: Site) -> None:
    """As pods of Slurm on Kubernetes."""
    for node in NODES:
        site.sh(
            node,
            f"grep -v -e gpu- -e '^$' /etc/hosts >/tmp/hosts; grep -w {node} /etc/hosts >>/tmp/hosts || true;"
            "cat /tmp/hosts >/etc/hosts",
        )
    ran = site.start(*ONCE)
    assert ran.ended == ("COMPLETED", 0), ran
    said = "gpu-a02 does not resolve here: the nodes meet at 10.77.42.11, Slurm's NodeAddr of gpu-a01"
    assert said in ran.said("apptrain")


def test_a_node_that_is_cut_off_from_the_first(site: Site) -> None:
    site.cut("gpu-b07", HIGH_SPEED)
    ran = site.start(*ONCE, "--profile", "fast")
    assert ran.ended == ("FAILED", 69), ran.text
    text = refusal_without_answer(ran)
    assert text == (
        "node 2 (gpu-b07) cannot reach node 0 (gpu-a01) at 10.77.43.11:PORT: NO ANSWER: is this a network that "
        "joins the nodes (--master-addr), or is a firewall between them?"
    )
    assert took(ran) < UNANSWERED


def refusal_without_answer(ran: Ran) -> str:
    """The refusal of every attempt; whether the neighbour's address was still known decides which it is."""
    text = ran.text
    for found in ("no answer in 8 s", "no answer", os.strerror(113)):
        text = text.replace(f": {found}", ": NO ANSWER")
    return refusal(Ran(job=ran.job, text=text, folder=ran.folder), ATTEMPTS)


def test_a_node_that_is_cut_off_on_the_network_of_gloo_alone(site: Site) -> None:
    site.cut("gpu-b07", HIGH_SPEED)
    ran = site.start(*ONCE, "--interface", "hsn0")
    assert ran.ended == ("FAILED", 69), ran.text
    assert refusal_without_answer(ran) == (
        "gpu-a01 cannot reach gpu-b07 at 10.77.43.27 (hsn0): NO ANSWER, nor gpu-a02 to gpu-b07, gpu-b07 to gpu-a01, "
        f"gpu-b07 to gpu-a02: {FABRIC}"
    )
    assert took(ran) < UNANSWERED


def test_a_firewall_that_lets_one_node_call_but_not_be_called(site: Site) -> None:
    site.drop("gpu-b07", "input", "iifname hsn0 tcp dport 1024-60999 ct state new")
    ran = site.start(*ONCE, "--profile", "fast")
    assert ran.ended == ("FAILED", 69), ran.text
    assert refusal(ran, ATTEMPTS) == (
        f"gpu-a01 cannot reach gpu-b07 at 10.77.43.27 (hsn0): no answer in 8 s, nor gpu-a02 to gpu-b07: {FABRIC}"
    )
    assert took(ran) < UNANSWERED


def test_a_firewall_that_answers_for_the_first_node(site: Site) -> None:
    site.drop("gpu-b07", "output", "oifname hsn0 tcp dport 61000-65535", "reject with tcp reset")
    ran = site.start(*ONCE, "--profile", "fast", "--master-port", "61500")  # by hand: one attempt
    assert ran.ended == ("FAILED", 69), ran.text
    assert refusal(ran) == (
        "node 2 (gpu-b07) cannot reach node 0 (gpu-a01) at 10.77.43.11:PORT: Connection refused, 45 s after it began: "
        "is this a network that joins the nodes (--master-addr), or is a firewall between them?"
    )
    assert took(ran) < 45 + AT_ONCE


def test_a_network_that_loses_large_packets(site: Site) -> None:
    site.drop("gpu-b07", "output", "oifname hsn0 meta length gt 1400")
    ran = site.start(*ONCE, "--interface", "hsn0")
    assert ran.ended == ("FAILED", 69), ran.text
    assert refusal(ran, ATTEMPTS) == (
        "gpu-a01 cannot reach gpu-b07 at 10.77.43.27 (hsn0): small packets pass, large ones do not (is the MTU the "
        f"same everywhere?), nor gpu-a02 to gpu-b07, gpu-b07 to gpu-a01, gpu-b07 to gpu-a02: {FABRIC}"
    )
    assert took(ran) < UNANSWERED


def test_an_image_that_one_node_lacks(site: Site) -> None:
    site.sh("gpu-b07", f"umount {SOFTWARE}/image.sif; rm {SOFTWARE}/image.sif")
    ran = site.start(*ONCE)
    assert ran.ended == ("FAILED", 64), ran.text
    assert refusal(ran) == (
        f"there is no image {REPOSITORY}/containers/image.sif on this node, or its directory may not be searched: "
        "correct the path (all nodes must share it), give another in APPTRAIN_IMAGE, or build one (make image); for a URL "
        "give the file that apptainer pull makes"
    )
    assert ran.said("apptrain")[-1].startswith("status 64: gpu-b07: ")
    assert took(ran) < AT_ONCE


# --- ports --------------------------------------------------------------------------------------------------

LISTEN = """\
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"220 mail.example.org ready\\r\\n")
"""
CALL = """\
import socket, sys, time
print("calls", flush=True)
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2]))).sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    except OSError:
        pass
    time.sleep(0.1)
"""


TAKEN = {
    f"the join port of 10.77.42.11:PORT is taken on node 0 (gpu-a01): {PORTS}",
    "something that is no apptrain hub answers on 10.77.42.11:PORT, where node 0 (gpu-a01) should: it does not speak "
    f"apptrain-join/1: {PORTS}",
}
"""What node 0 finds, and what the others find; who is first tells it."""


@contextmanager
def running(site: Site, host: str, user: str, script: str, *argv: object) -> Iterator[None]:
    """A Python script of someone on a host, once it has printed a line."""
    process = site.user.cluster[host].start(
        ["python3", "-c", script, *map(str, argv)], user=user, cwd="/", stdout=subprocess.PIPE
    )
    try:
        assert process.stdout
        assert process.stdout.readline()
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def held(site: Site) -> tuple[int, list[tuple[int, int]]]:
    """A job that waits, and its attempts' ports: of torch's store and of the join."""
    script = HOME / "else where/tell.py"
    number = site.user.submit("--hold", "--nodes=3", "-c1", SCRIPT, *ONCE, "--", script)
    ports = [
        port_pair(job_number=number, array_index=0, step=attempt, attempt=attempt)
        for attempt in range(ATTEMPTS)
    ]
    return number, ports


def released(site: Site, number: int) -> Ran:
    site.user.cluster.controller.run(["scontrol", "release", str(number)]).check_returncode()
    return site.user.end(number, BOUND)


@pytest.mark.parametrize(
    ("holder", "address", "by"),
    [("alice", "0.0.0.0", "a process of yours"), ("bob", "127.0.0.1", "another user's process")],
)
def test_a_store_port_that_is_taken_is_met_with_the_next_attempts(
    site: Site, holder: str, address: str, by: str
) -> None:
    number, ports = held(site)
    with running(site, "gpu-a01", holder, LISTEN, address, ports[0][0]):
        ran = done(released(site, number))
    assert ran.said("apptrain")[3:5] == [
        f"attempt 0: gpu-a01: port {ports[0][0]} of torch's store is taken on gpu-a01 by {by}: {PORTS}",
        "trying again: attempt 1, with other ports",
    ]
    assert took(ran) < AT_ONCE
    assert f"rendezvous gpu-a01:{ports[1][0]}, " in ran.text
    assert ran.printed == all_on("eth0", "=eth0")


def test_a_strangers_service_on_the_join_port_of_every_attempt_ends_the_job(site: Site) -> None:
    number, ports = held(site)
    with (
        running(site, "gpu-a01", "bob", LISTEN, "0.0.0.0", ports[0][1]),
        running(site, "gpu-a01", "bob", LISTEN, "0.0.0.0", ports[1][1]),
        running(site, "gpu-a01", "bob", LISTEN, "0.0.0.0", ports[2][1]),
    ):
        ran = released(site, number)
    assert ran.ended == ("FAILED", 69), ran.text
    assert refusals(ran, ATTEMPTS) <= TAKEN
    assert took(ran) < AT_ONCE


def test_a_stranger_who_calls_while_the_nodes_meet_is_named_and_changes_nothing(site: Site) -> None:
    late = '#!/bin/sh\nsleep 3\nexec /usr/bin/apptainer "$@"\n'
    site.sh("gpu-b07", f"printf %s {shlex.quote(late)} >/usr/local/bin/apptainer")
    site.sh("gpu-b07", "chmod 755 /usr/local/bin/apptainer")
    number, ports = held(site)
    with running(site, "login1", "bob", CALL, "10.77.42.11", ports[0][1]):
        ran = done(released(site, number))
    stranger = (
        f"refused a stranger from 10.77.42.2 on 10.77.42.11:{ports[0][1]}: it does not speak apptrain-join/1"
    )
    assert ran.launched[0] == stranger
    assert ran.printed == all_on("eth0", "=eth0")
