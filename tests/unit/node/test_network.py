"""This node's address for the rendezvous and the interfaces of gloo and NCCL, chosen from tables of a machine."""

import dataclasses
import errno
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from entrypoint.cli import main as cli
from entrypoint.core.errors import Refusal
from entrypoint.node import network
from entrypoint.node.network import Endpoint, Interface, ThisMachine
from entrypoint.plan.launch_plan import LaunchPlan, with_local_addr, with_master_addr
from entrypoint.plan.origin import derived_from
from entrypoint.plan.resolve import resolve
from entrypoint.ranks import agent, ranks
from tests.ports import free_port

NODES = ("gpu-a01", "gpu-a02", "gpu-b07")


@dataclass(kw_only=True)
class Machine:
    """A machine that answers from tables."""

    names: Mapping[str, Sequence[str]]
    """Others do not resolve."""
    routes: Mapping[str, str]
    """The beginning of a destination to the address that it is reached from."""
    table: Sequence[Interface] = field(default_factory=list)

    def addresses_of(self, name: str) -> Sequence[str]:
        if name not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.names[name]

    def source_towards(self, address: str) -> str:
        for begin, source in self.routes.items():
            if address.startswith(begin):
                return source
        raise OSError(101, "Network is unreachable")

    def interfaces(self) -> Sequence[Interface]:
        return self.table


def interface(name: str, *addresses: str, is_up: bool = True) -> Interface:
    return Interface(name=name, addresses=addresses, is_up=is_up)


def host(last: int, **changes: Any) -> Machine:
    """The node with this last number in its addresses: eth0 and hsn0, names as on a well-kept cluster."""
    numbers = dict(zip(NODES, (11, 12, 27), strict=True))
    machine = Machine(
        names={name: [f"10.77.42.{number}"] for name, number in numbers.items()}
        | {f"{name}-hsn": [f"10.77.43.{number}"] for name, number in numbers.items()}
        | {f"{name}-hsn6": [f"fd77::{number}"] for name, number in numbers.items()},
        routes={
            "10.77.42.": f"10.77.42.{last}",
            "10.77.43.": f"10.77.43.{last}",
            "fd77::": f"fd77::{last}",
        },
        table=[
            interface("lo", "127.0.0.1", "::1"),
            interface("eth0", f"10.77.42.{last}"),
            interface("hsn0", f"10.77.43.{last}", f"fd77::{last}"),
        ],
    )
    return dataclasses.replace(machine, **changes)


def plan_of(node: str, *options: str, env: Mapping[str, str] | None = None, nodes: str = "") -> LaunchPlan:
    arguments = [
        "launch",
        "--nodes",
        nodes or ",".join(NODES),
        "--node-rank",
        str(NODES.index(node)),
        *options,
    ]
    return resolve(env or {}, vars(cli.parser().parse_args(arguments)), ["x.py"], hostname=node)[0]


def find(machine: Machine, node: str, *options: str, env: Mapping[str, str] | None = None) -> Endpoint:
    return network.find(plan_of(node, *options, env=env), env or {}, machine)


def refusal(
    machine: Machine, node: str, *options: str, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    with pytest.raises(Refusal) as refused:
        find(machine, node, *options, env=env)
    return refused.value.status, str(refused.value)


def seen(endpoint: Endpoint) -> tuple[str, str, str, str]:
    """(node 0's address, this node's, gloo's interface and address)."""
    return endpoint.first, endpoint.plan.rendezvous.local_addr, endpoint.interface, endpoint.address


def changed(machine: Machine, **names: Sequence[str]) -> Machine:
    """The machine with other addresses for these names, in which _ stands for -."""
    return dataclasses.replace(
        machine, names={**machine.names, **{name.replace("_", "-"): found for name, found in names.items()}}
    )


@pytest.fixture
def profile(tmp_path: Path) -> str:
    (tmp_path / "lab.yaml").write_text("host_suffix: -hsn\n")
    return str(tmp_path / "lab.yaml")


# --- the address --------------------------------------------------------------------------------------------


def test_a_nodes_address_is_its_names_on_the_first_and_that_of_the_route_to_it_on_the_others() -> None:
    endpoints = [find(host(11), "gpu-a01"), find(host(27), "gpu-b07")]
    assert [seen(endpoint) for endpoint in endpoints] == [
        ("10.77.42.11", "10.77.42.11", "eth0", "10.77.42.11"),
        ("10.77.42.11", "10.77.42.27", "eth0", "10.77.42.27"),
    ]
    plan = endpoints[1].plan
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [plan.env[name] for name in variables] == ["eth0", "=eth0"]
    assert [str(plan.sources[f"env.{name}"]) for name in variables] == ["derived:rendezvous.local_addr"] * 2


def test_under_a_host_suffix_it_is_the_address_of_the_longer_name_on_every_node(profile: str) -> None:
    # Four rails in one subnet: the route alone would always say the first.
    rails = [interface("hsn0", "10.77.43.200"), interface("hsn1", "10.77.43.27")]
    machine = host(27, table=rails, routes={"10.77.43.": "10.77.43.200"})
    endpoint = find(machine, "gpu-b07", "--profile", profile)
    assert seen(endpoint) == ("10.77.43.11", "10.77.43.27", "hsn1", "10.77.43.27")


def test_an_address_given_by_hand_wins_over_the_suffix_and_the_others_take_the_route(profile: str) -> None:
    options = ("--profile", profile, "--master-addr", "10.77.42.11")
    assert seen(find(host(11), "gpu-a01", *options))[:3] == ("10.77.42.11", "10.77.42.11", "eth0")
    assert seen(find(host(27), "gpu-b07", *options))[:3] == ("10.77.42.11", "10.77.42.27", "eth0")


def test_nodes_listed_by_address_need_no_resolver() -> None:
    plan = plan_of("gpu-a02", nodes="fd77::11,fd77::12")
    assert seen(network.find(plan, {}, host(12, names={}))) == ("fd77::11", "fd77::12", "hsn0", "10.77.43.12")


def test_of_several_addresses_all_nodes_take_the_same_whatever_the_resolvers_order() -> None:
    for found in (["fd77::11", "10.77.43.11", "10.77.42.11"], ["10.77.42.11", "fe80::1%eth0", "fd77::11"]):
        assert find(changed(host(27), gpu_a01=found), "gpu-b07").first == "10.77.42.11"


def test_a_name_with_an_ipv6_address_alone_is_taken_by_it() -> None:
    machine = changed(host(27), gpu_a01=["fd77::11"])
    assert seen(find(machine, "gpu-b07")) == ("fd77::11", "fd77::27", "hsn0", "10.77.43.27")


def test_a_loopback_address_beside_a_real_one_is_passed_over() -> None:
    machine = changed(host(11), gpu_a01=["127.0.1.1", "10.77.42.11"])
    assert seen(find(machine, "gpu-a01"))[:2] == ("10.77.42.11", "10.77.42.11")


def test_a_first_node_that_is_127_0_1_1_to_itself_takes_its_address_on_the_way_to_another() -> None:
    endpoint = find(changed(host(11), gpu_a01=["127.0.1.1"], gpu_a02=["127.0.1.1"]), "gpu-a01")
    assert seen(endpoint)[:3] == ("10.77.42.11", "10.77.42.11", "eth0")
    assert endpoint.plan.notes == (
        "gpu-a01 is 127.0.1.1 to itself: 10.77.42.11, on the way to gpu-b07, is taken instead",
    )


def test_under_a_suffix_that_way_leads_to_the_longer_name_of_another_node(profile: str) -> None:
    machine = changed(host(11), gpu_a01_hsn=["127.0.1.1"])
    endpoint = find(machine, "gpu-a01", "--profile", profile)
    assert seen(endpoint)[:3] == ("10.77.43.11", "10.77.43.11", "hsn0")


def test_a_first_node_that_is_127_0_1_1_to_all_is_refused() -> None:
    text = (
        "the first node's name 'gpu-a01' resolves to 127.0.1.1 on {}, which no other node can reach: correct "
        "/etc/hosts, or give --master-addr with an address of the network between the nodes"
    )
    alone = host(11, names={"gpu-a01": ["127.0.1.1"]})
    assert refusal(alone, "gpu-a01") == (64, text.format("gpu-a01"))
    assert refusal(changed(host(27), gpu_a01=["127.0.1.1"]), "gpu-b07") == (64, text.format("gpu-b07"))


def test_a_node_alone_may_have_a_loopback_name() -> None:
    plan = plan_of("gpu-a01", nodes="gpu-a01")
    endpoint = network.find(plan, {}, changed(host(11), gpu_a01=["127.0.1.1"]))
    assert endpoint == Endpoint(plan=plan, first="127.0.1.1", interface="", address="")
    assert not endpoint.joins_machines


def test_a_name_that_does_not_resolve_is_refused_and_never_becomes_localhost(profile: str) -> None:
    text = "name {!r} does not resolve on gpu-b07 (Name or service not known): check the name, DNS and /etc/hosts, or give --master-addr"
    first = host(27, names={})
    assert refusal(first, "gpu-b07") == (64, "the first node's " + text.format("gpu-a01"))
    own = host(27, names={"gpu-a01-hsn": ["10.77.43.11"]})
    found = refusal(own, "gpu-b07", "--profile", profile)
    assert found == (64, "this node's " + text.format("gpu-b07-hsn"))


def test_a_name_with_link_local_addresses_alone_is_refused() -> None:
    status, text = refusal(changed(host(27), gpu_a01=["fe80::1%eth0"]), "gpu-b07")
    assert (status, text.partition(": ")[0]) == (
        64,
        "the first node's name 'gpu-a01' does not resolve on gpu-b07 (link-local addresses only)",
    )


def test_an_address_that_no_interface_has_is_refused_with_those_that_there_are(profile: str) -> None:
    text = "{}, but no interface of {} has that: it has {}: check its network, /etc/hosts and --node-rank, or give --master-addr"
    both = "eth0 (10.77.42.12), hsn0 (10.77.43.12)"
    found = refusal(host(12), "gpu-a01")
    assert found == (64, text.format("gpu-a01 is 10.77.42.11", "gpu-a01", both))
    without = host(27, table=[interface("lo", "127.0.0.1"), interface("eth0", "10.77.42.27")])
    found = refusal(without, "gpu-b07", "--profile", profile)
    assert found == (64, text.format("gpu-b07-hsn is 10.77.43.27", "gpu-b07", "eth0 (10.77.42.27)"))


def test_a_node_without_a_route_to_the_first_is_not_available() -> None:
    assert refusal(host(27, routes={}), "gpu-b07") == (
        69,
        "gpu-b07 has no route to the first node's address 10.77.42.11 (Network is unreachable): check its "
        "network, or give --master-addr with an address of another",
    )


def test_slurm_has_the_address_of_a_node_whose_name_nobody_resolves() -> None:
    plan = plan_of("gpu-a02")
    plan = dataclasses.replace(plan, allocation=dataclasses.replace(plan.allocation, scheduler="slurm"))
    with pytest.raises(Refusal) as refused:
        network.find(plan, {}, host(12, names={"gpu-a02": ["10.77.42.12"]}))
    assert (refused.value.status, str(refused.value)) == (
        64,
        "the first node's name 'gpu-a01' does not resolve on gpu-a02 (Name or service not known): check the name, DNS and "
        "/etc/hosts, or give --master-addr with what scontrol show node gpu-a01 has as NodeAddr",
    )


# --- the interfaces -----------------------------------------------------------------------------------------


def test_an_interface_that_was_asked_for_is_gloos_and_ncclss_and_the_rendezvous_stays() -> None:
    endpoint = find(host(27), "gpu-b07", "--interface", "hsn0")
    assert seen(endpoint) == ("10.77.42.11", "10.77.42.27", "hsn0", "10.77.43.27")
    assert endpoint.plan.env["NCCL_SOCKET_IFNAME"] == "=hsn0"


LABELS = [interface("lo", "127.0.0.1"), interface("eth0"), interface("eth0:1", "10.77.42.27")]
SECOND = [interface("lo", "127.0.0.1"), interface("eth0", "10.0.0.27"), interface("eth0:1", "10.77.42.27")]
CUDA = ("--device", "cuda", "--nproc-per-node", "1")


@pytest.mark.parametrize("table", [LABELS, SECOND])
@pytest.mark.parametrize("options", [(), ("--interface", "eth0:1")])
def test_gloo_finds_an_address_by_its_label_and_nccl_by_leaving_out_all_others(
    table: list[Interface], options: tuple[str, ...]
) -> None:
    endpoint = find(host(27, table=table), "gpu-b07", *CUDA, *options)
    assert seen(endpoint) == ("10.77.42.11", "10.77.42.27", "eth0:1", "10.77.42.27")
    env = endpoint.plan.env
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth0:1", "^=lo,eth0")


def test_interfaces_beside_a_label_that_were_asked_for_are_not_left_out() -> None:
    table = [*SECOND, interface("hsn0", "10.77.43.27")]
    plan = find(host(27, table=table), "gpu-b07", *CUDA, "--interface", "hsn0,eth0:1").plan
    assert plan.env["NCCL_SOCKET_IFNAME"] == "^=lo,eth0"


def test_a_node_alone_may_name_a_label_too() -> None:
    plan = plan_of("gpu-a01", *CUDA, "--interface", "eth0:1", nodes="gpu-a01")
    assert network.find(plan, {}, host(11, table=LABELS)).plan.env["NCCL_SOCKET_IFNAME"] == "^=lo,eth0"


def test_what_the_user_tells_nccl_stays_unless_a_label_was_asked_for() -> None:
    env = {"NCCL_SOCKET_IFNAME": "eth"}
    machine = host(27, table=SECOND)
    assert "NCCL_SOCKET_IFNAME" not in find(machine, "gpu-b07", *CUDA, env=env).plan.env
    plan = find(machine, "gpu-b07", *CUDA, "--interface", "eth0:1", env=env).plan
    assert (plan.env["NCCL_SOCKET_IFNAME"], str(plan.sources["env.NCCL_SOCKET_IFNAME"])) == (
        "^=lo,eth0",
        "flag",
    )


@pytest.mark.parametrize(
    ("more", "has"),
    [
        (["ib0"], ""),
        (["eth0:2"], "eth0:2"),
        (["ib0", "ib0:1", "eth0:2"], "ib0:1, eth0:2"),
        ([f"ib{number}" for number in range(14)], ""),
        ([f"ib{number}" for number in range(15)], "17"),
    ],
)
def test_a_label_beside_more_than_nccl_can_leave_out_is_refused_on_gpus(more: list[str], has: str) -> None:
    machine = host(27, table=[*SECOND, *(interface(name, "10.1.0.1") for name in more)])
    assert find(machine, "gpu-b07", "--interface", "eth0:1").interface == "eth0:1"
    if not has:
        left_out = find(machine, "gpu-b07", *CUDA, "--interface", "eth0:1").plan.env["NCCL_SOCKET_IFNAME"]
        assert left_out == f"^=lo,eth0,{','.join(more)}"
        return
    assert refusal(machine, "gpu-b07", *CUDA, "--interface", "eth0:1") == (
        64,
        "--interface eth0:1: NCCL finds a label only if it leaves out all other interfaces, at most 16 and no "
        f"other label, and gpu-b07 has {has}: name an interface without a label",
    )


def test_a_device_whose_address_has_a_label_is_refused_with_that() -> None:
    assert refusal(host(27, table=LABELS), "gpu-b07", "--interface", "eth0") == (
        64,
        "--interface eth0: it has no address on gpu-b07, which has eth0 (without address), eth0:1 (10.77.42.27)",
    )
    found = refusal(
        host(27, table=LABELS),
        "gpu-b07",
        *("--device", "cuda", "--nproc-per-node", "1"),
        env={"NCCL_SOCKET_IFNAME": "=eth0:1"},
    )
    assert found[1].startswith("NCCL_SOCKET_IFNAME==eth0:1: gpu-b07 has no such interface, "), "1 is a port"


def test_variables_that_the_user_set_stay_and_the_other_is_still_set() -> None:
    env = {"GLOO_SOCKET_IFNAME": "hsn0,eth0"}
    endpoint = find(host(27), "gpu-b07", env=env)
    assert (endpoint.interface, endpoint.address) == ("hsn0", "10.77.43.27")
    assert "GLOO_SOCKET_IFNAME" not in endpoint.plan.env
    assert endpoint.plan.env["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert find(host(27), "gpu-b07", env={"GLOO_SOCKET_IFNAME": ""}).interface == "eth0"


@pytest.mark.parametrize(
    ("options", "env", "given"),
    [
        (("--interface", "ib0"), {}, "--interface ib0"),
        ((), {"APPTRAIN_INTERFACE": "ib0"}, "APPTRAIN_INTERFACE=ib0"),
        ((), {"GLOO_SOCKET_IFNAME": "ib0"}, "GLOO_SOCKET_IFNAME=ib0"),
        (("--profile", "launch: {interface: ib0}"), {}, "interface ib0 of the profile site.yaml"),
        (("--profile", "env: {GLOO_SOCKET_IFNAME: ib0}"), {}, "interface ib0 of the profile site.yaml"),
        (
            ("--device", "cuda", "--nproc-per-node", "1"),
            {"NCCL_SOCKET_IFNAME": "ib"},
            "NCCL_SOCKET_IFNAME=ib",
        ),
        (
            ("--device", "cuda", "--nproc-per-node", "1"),
            {"NCCL_SOCKET_IFNAME": "=ib0"},
            "NCCL_SOCKET_IFNAME==ib0",
        ),
    ],
)
def test_an_interface_that_is_not_there_is_refused_as_it_was_asked_for(
    tmp_path: Path, options: tuple[str, ...], env: Mapping[str, str], given: str
) -> None:
    if "--profile" in options:
        (tmp_path / "site.yaml").write_text(options[1])
        options = ("--profile", str(tmp_path / "site.yaml"))
    assert refusal(host(27), "gpu-b07", *options, env=env) == (
        64,
        f"{given}: gpu-b07 has no such interface, it has eth0 (10.77.42.27), hsn0 (10.77.43.27): name one that "
        "every node has, or none, to take the one on the way to the first node",
    )


def test_of_several_interfaces_the_one_that_is_not_there_is_named() -> None:
    status, said = refusal(host(27), "gpu-b07", env={"GLOO_SOCKET_IFNAME": "eth0,ib0"})
    assert status == 64
    assert said.startswith(
        "GLOO_SOCKET_IFNAME=eth0,ib0: gpu-b07 has no interface ib0, it has eth0 (10.77.42.27), hsn0 "
    )


RAILS = [interface("lo", "127.0.0.1"), interface("eth0", "10.77.42.27"), interface("hsn0", "10.77.43.27")]
RAILS += [interface("hsn1", "10.77.43.28"), interface("ib0")]


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("=hsn0", "hsn0"),
        ("=hsn0,hsn1", ""),
        ("hsn", ""),
        ("et", "eth0"),
        ("^lo,docker,veth,eni", ""),
        ("^lo,hsn", "eth0"),
        ("^=eth0,hsn1", "hsn0"),
        (",eth0", "eth0"),
        ("ib", ""),
    ],
)
def test_ncclss_own_way_to_name_interfaces_is_not_gloos_and_the_one_that_was_meant_is_named(
    tmp_path: Path, value: str, meant: str
) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text(f"env: {{GLOO_SOCKET_IFNAME: '{value}'}}\n")
    for options, env, given in (
        ((), {"GLOO_SOCKET_IFNAME": value}, "GLOO_SOCKET_IFNAME={}"),
        ((f"--interface={value}",), {}, "--interface {}"),
        (("--profile", str(profile)), {}, "interface {} of the profile site.yaml"),
    ):
        remedy = f"did you mean {given.format(meant)}?"
        if not meant:
            remedy = "name one that every node has, or none, to take the one on the way to the first node"
        assert refusal(host(27, table=RAILS), "gpu-b07", *options, env=env) == (
            64,
            f"{given.format(value)}: gloo takes whole names of interfaces alone (^, = and beginnings of names are NCCL's), "
            "and gpu-b07 has eth0 (10.77.42.27), hsn0 (10.77.43.27), hsn1 (10.77.43.28), ib0 (without address): "
            f"{remedy}",
        )


def test_a_node_alone_needs_the_interface_that_was_asked_for_too() -> None:
    plan = plan_of("gpu-a01", "--interface", "ib0", nodes="gpu-a01")
    with pytest.raises(Refusal, match=r"^--interface ib0: gpu-a01 has no such interface"):
        network.find(plan, {}, host(11))


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ("hsn", True),
        ("=hsn", False),
        ("=hsn0,x", True),
        ("x,eth", True),
        ("hsn00", False),
        ("^lo,docker", True),
        ("^eth,hsn,lo", False),
        ("^=eth,hsn", True),
        ("^=eth0,hsn0,lo", False),
    ],
)
def test_ncclss_own_way_to_name_interfaces_is_understood(spec: str, fits: bool) -> None:
    options = ("--device", "cuda", "--nproc-per-node", "1")
    env = {"NCCL_SOCKET_IFNAME": spec}
    if fits:
        assert find(host(27), "gpu-b07", *options, env=env).interface == "eth0"
    else:
        assert refusal(host(27), "gpu-b07", *options, env=env)[0] == 64
    assert find(host(27), "gpu-b07", "--device", "cpu", env=env).interface == "eth0"


def test_an_interface_that_is_down_or_has_no_address_is_refused(profile: str) -> None:
    down = [interface("eth0", "10.77.42.27"), interface("hsn0", "10.77.43.27", is_up=False)]
    text = "hsn0 is down on gpu-b07: have it brought up, or leave that node out"
    found = refusal(host(27, table=down), "gpu-b07", "--interface", "hsn0")
    assert found == (69, f"--interface hsn0: {text}")
    found = refusal(host(27, table=down), "gpu-b07", "--profile", profile)
    assert found == (69, f"gpu-b07-hsn is 10.77.43.27: {text}")
    bare = [interface("eth0", "10.77.42.27"), interface("ib0")]
    assert refusal(host(27, table=bare), "gpu-b07", "--interface", "ib0") == (
        64,
        "--interface ib0: it has no address on gpu-b07, which has eth0 (10.77.42.27), ib0 (without address)",
    )


# --- what is said -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "env", "elsewhere", "line"),
    [
        ((), {}, {}, "gpu-a01 (10.77.42.11) [derived:--nodes], gloo on eth0"),
        (
            ("--master-addr", "10.77.43.11", "--device", "cuda", "--nproc-per-node", "1"),
            {},
            {"gpu-b07": "ib0"},
            "10.77.43.11 [flag], gloo and NCCL on hsn0 (ib0 on gpu-b07)",
        ),
        (
            ("--interface", "hsn0"),
            {},
            {f"n{i}": "ib0" for i in range(6)},
            "gpu-a01 (10.77.42.11) [derived:--nodes], gloo on hsn0 (ib0 on n0, ib0 on n1, ib0 on n2, ib0 on n3 and 2 more) [flag]",
        ),
        *(
            (
                (),
                {},
                {f"n{i}": "ib0" for i in range(count)},
                f"gpu-a01 (10.77.42.11) [derived:--nodes], gloo on eth0 (ib0 on n0, ib0 on n1, ib0 on n2, ib0 on n3{more})",
            )
            for count, more in ((4, ""), (5, " and 1 more"))
        ),
        (
            ("--device", "cuda", "--nproc-per-node", "1"),
            {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "hsn"},
            {},
            "gpu-a01 (10.77.42.11) [derived:--nodes], gloo on eth0, NCCL on hsn [env:GLOO_SOCKET_IFNAME]",
        ),
    ],
)
def test_one_line_says_which_addresses_and_interfaces_are_used_and_why(
    options: tuple[str, ...], env: Mapping[str, str], elsewhere: Mapping[str, str], line: str
) -> None:
    endpoint = find(host(11), "gpu-a01", *options, env=env)
    assert network.summary(endpoint.plan, env, elsewhere) == f"network: rendezvous at {line}"


def test_where_the_first_node_waits_is_known_once_its_plan_of_this_attempt_is_there(tmp_path: Path) -> None:
    plan, file = plan_of("gpu-b07"), tmp_path / "plan.0.json"
    assert network.first_waits_at(plan, file) is None
    for attempt, found in ((1, None), (0, "10.77.42.11")):
        file.write_text(json.dumps({"attempt": attempt, "rendezvous": {"local_addr": "10.77.42.11"}}))
        assert network.first_waits_at(plan, file) == found
    file.write_text("{")
    assert network.first_waits_at(plan, file) is None


def test_the_others_find_a_node_by_a_name_unless_its_address_was_given() -> None:
    assert network.has_name(plan_of("gpu-a01"))
    assert network.has_name(plan_of("gpu-a02", "--master-addr", "10.77.42.11"))
    assert not network.has_name(plan_of("gpu-a01", "--master-addr", "10.77.42.11"))
    assert not network.has_name(plan_of("gpu-a01", "--master-addr", "[fd77::11]"))
    assert not network.has_name(plan_of("gpu-a02", nodes="10.77.42.11,10.77.42.12"))


def test_a_plan_with_another_address_of_node_0_tells_it_to_everyone() -> None:
    moved = with_master_addr(plan_of("gpu-b07", "--mode", "exec"), "10.77.43.11", derived_from("join"))
    assert (moved.rendezvous.master_addr, moved.rendezvous.endpoint) == ("10.77.43.11", "10.77.43.11:29500")
    assert (moved.env["MASTER_ADDR"], str(moved.sources["master_addr"])) == ("10.77.43.11", "derived:join")
    assert seen(network.find(moved, {}, host(27))) == ("10.77.43.11", "10.77.43.27", "hsn0", "10.77.43.27")
    torchrun = with_master_addr(plan_of("gpu-b07"), "10.77.43.11", derived_from("join"))
    assert "--rdzv-endpoint=10.77.43.11:29500" in torchrun.argv


# --- this machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_store_port_that_is_taken_at_any_address_is_refused_with_its_holder(address: str) -> None:
    port = free_port(address)
    with socket.create_server((address, port), family=network._family(address)):
        plan = plan_of("gpu-a01", "--master-port", str(port))
        with pytest.raises(Refusal) as refused:
            network.check_store_port(plan, "try another")
    name = Path("/proc/self/comm").read_text().strip()
    assert (refused.value.status, str(refused.value)) == (
        69,
        f"port {port} of torch's store is taken on gpu-a01 by process {os.getpid()} ({name}): try another",
    )
    network.check_store_port(plan, "try another")


@pytest.mark.parametrize(("address", "taken"), [("127.0.0.2", False), ("127.0.0.1", True), ("0.0.0.0", True)])
def test_a_store_port_is_taken_only_where_the_store_will_listen(address: str, taken: bool) -> None:
    with socket.create_server((address, free_port(address))) as stranger:
        port = str(stranger.getsockname()[1])
        plan = with_local_addr(plan_of("gpu-a01", "--master-port", port), "127.0.0.1")
        with pytest.raises(Refusal) if taken else nullcontext():
            network.check_store_port(plan, "try another")


def test_torchs_store_gets_a_socket_at_one_address() -> None:
    with ranks.listen("127.0.0.2", 0) as found:
        port = found.getsockname()[1]
        socket.create_connection(("127.0.0.2", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", port))
        with pytest.raises(OSError, match="in use") as taken:
            ranks.listen("127.0.0.2", port)
    assert (taken.value.errno, taken.value.strerror) == (
        errno.EADDRINUSE,
        f"torch's store cannot listen on 127.0.0.2, port {port}: Address already in use: give --master-addr",
    )


def test_the_stores_name_is_node_0s_where_that_leads_to_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"gpu-a01": ["10.77.42.11"], "itself": ["127.0.1.1"], "two": ["10.77.43.11", "10.77.42.11"]}

    def look_up(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name == "unknown":
            raise socket.gaierror
        return [(socket.AF_INET, 0, 0, "", (text, 0)) for text in known.get(name, [name])]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    names = ("gpu-a01", "itself", "two", "unknown", "10.77.42.11")
    assert [agent.name_of("10.77.42.11", name) for name in names] == ["gpu-a01", *["10.77.42.11"] * 4]


def test_an_address_with_a_label_goes_by_that_and_is_up_if_its_device_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def address(text: str) -> object:
        return SimpleNamespace(family=socket.AF_INET, address=text)

    found = {"eth0": [address("10.0.0.1")], "eth0:1": [address("10.0.0.2")], "ib0": [address("10.1.0.1")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True)})
    assert ThisMachine().interfaces() == [
        Interface(name="eth0", addresses=("10.0.0.1",), is_up=True),
        Interface(name="eth0:1", addresses=("10.0.0.2",), is_up=True),
        Interface(name="ib0", addresses=("10.1.0.1",), is_up=False),
    ]


def test_this_machine_knows_its_loopback_and_the_way_to_it() -> None:
    machine = ThisMachine()
    loopback = next(one for one in machine.interfaces() if one.name == "lo")
    assert (loopback.addresses[0], loopback.is_up) == ("127.0.0.1", True)
    assert machine.source_towards("127.0.0.1") == "127.0.0.1"
    assert list(machine.addresses_of("127.0.0.2")) == ["127.0.0.2"]
    for name in ("no-such-host.invalid", "a..b", "x" * 70 + ".org"):
        with pytest.raises(OSError):  # noqa: PT011
            machine.addresses_of(name)


# --- the plan before a node has looked ----------------------------------------------------------------------


def test_a_profiles_own_variables_win_over_its_interface_and_the_users_over_both(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("launch: {interface: hsn0}\nenv: {NCCL_SOCKET_IFNAME: hsn}\n")
    options = ("--profile", str(tmp_path / "site.yaml"))

    def interfaces(*more: str, env: Mapping[str, str] | None = None) -> list[str | None]:
        plan = plan_of("gpu-a01", *options, *more, env=env)
        return [plan.env.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]

    assert interfaces() == ["hsn0", "hsn"]
    assert interfaces("--interface", "eth0") == ["eth0", "=eth0"]
    assert interfaces(env={"APPTRAIN_INTERFACE": "eth0"}) == ["eth0", "=eth0"]
    assert interfaces(env={"NCCL_SOCKET_IFNAME": "=ib0"}) == ["hsn0", None]


def test_a_torch_that_takes_a_socket_only_without_libuv_gets_it_so() -> None:
    listening: list[tuple[bool, str]] = []

    def store(*where: Any, multi_tenant: bool, master_listen_fd: int, use_libuv: bool) -> tuple[Any, ...]:
        assert multi_tenant
        with socket.socket(fileno=master_listen_fd) as taken:
            listening.append((use_libuv, taken.getsockname()[0]))
        if use_libuv:
            raise NotImplementedError  # what torch 2.7 says
        return where

    fd = ranks.listen("127.0.0.2", 0).detach()
    assert agent.open_store(store, fd, "node", 7) == ("node", 7)
    assert listening == [(True, "127.0.0.2"), (False, "127.0.0.2")]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
