"""entrypoint/batch/survey/host.py: networks, the program that starts images, scratch."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from entrypoint.batch.survey import host
from entrypoint.batch.survey.draft import Line
from tests.unit.batch.survey.login import Login, address, addresses

ETH0 = address("eth0", "10.1.0.1/16")


def told(lines: Iterable[Line]) -> list[tuple[str, object, str]]:
    return [(line.key, line.value, line.why) for line in lines if line.value is not None]


def asked(lines: Iterable[Line]) -> dict[str, str]:
    return {line.key: line.questions[0] for line in lines if line.questions}


def network(login: Login, *interfaces: dict[str, object], node: str = "", switch: str = "") -> list[Line]:
    login.has({"ip -j addr": addresses(*interfaces)})
    return list(host.network(login.machine(), node, switch))


def port(login: Login, device: str, layer: str = "InfiniBand", state: str = "4: ACTIVE") -> None:
    at = f"sys/class/infiniband/{device}/ports/1"
    login.file(f"{at}/link_layer", layer)
    login.file(f"{at}/state", state)
    login.file(f"{at}/rate", "200 Gb/sec (4X HDR)")


# --- Slingshot ------------------------------------------------------------------------------------------------


def test_slingshot_is_known_by_its_devices(login: Login) -> None:
    login.file("sys/class/cxi/cxi0/device/x")
    login.file("sys/class/cxi/cxi1/device/x")
    for name in ("hsn0", "hsn1"):
        login.file(f"sys/class/net/{name}/speed", "200000")
    lines = network(login, ETH0, address("hsn0", "10.2.0.1/16"), address("hsn1", "10.2.0.2/16"))
    why = "Slingshot: cxi0, cxi1; hsn0 200 Gbit/s, hsn1 200 Gbit/s here"
    assert told(lines) == [("env.NCCL_SOCKET_IFNAME", "hsn", why)]
    assert asked(lines) == {"launch.fabric": host.PLUGIN}


def test_slingshot_is_known_by_slurms_plugin(login: Login) -> None:
    lines = network(login, ETH0, switch="switch/hpe_slingshot")
    assert told(lines) == [
        ("env.NCCL_SOCKET_IFNAME", "hsn", "Slingshot: SwitchType switch/hpe_slingshot here")
    ]
    assert asked(lines) == {"launch.fabric": host.PLUGIN}


def test_a_name_of_slingshots_alone_is_asked_about(login: Login) -> None:
    lines = network(login, ETH0, address("hsn0", "10.2.0.1/16"), switch="switch/none")
    assert told(lines) == [("env.NCCL_SOCKET_IFNAME", "hsn", "Slingshot: hsn0 here")]
    assert asked(lines)["env.NCCL_SOCKET_IFNAME"] == (
        "hsn0 is Slingshot's name, but no cxi device is here: `ip -br addr` on a compute node says"
    )


# --- InfiniBand -----------------------------------------------------------------------------------------------


def test_infiniband_is_known_by_an_active_port(login: Login) -> None:
    port(login, "mlx5_0")
    port(login, "mlx5_1", state="1: DOWN")
    lines = network(login, ETH0, address("ib0", "10.2.0.1/16", kind="infiniband"))
    assert told(lines) == [
        ("launch.fabric", "infiniband", "active here: mlx5_0 port 1 200 Gb/sec (4X HDR)"),
        ("launch.interface", "ib0", "InfiniBand with 10.2.0.1/16 here"),
    ]
    assert asked(lines) == {
        "launch.interface": "do the compute nodes have ib0 too? (`ip -br addr` on a compute node says; without it leave this out)"
    }


def test_infiniband_without_addresses_needs_no_interface(login: Login) -> None:
    port(login, "mlx5_0")
    assert [line.key for line in network(login, ETH0, address("ib0", kind="infiniband"))] == ["launch.fabric"]


# --- Ethernet -------------------------------------------------------------------------------------------------


def test_one_interface_of_ethernet_is_the_default(login: Login) -> None:
    login.file("sys/class/net/eth0/speed", "25000")
    lines = network(
        login,
        ETH0,
        address("eth1"),
        address("eth2", "10.9.0.1/16", state="DOWN"),
        address("docker0", "172.17.0.1/16"),
    )
    why = "no InfiniBand and no Slingshot here: eth0 25 Gbit/s, eth1"
    assert told(lines) == [("launch.fabric", "ethernet", why)]
    assert asked(lines) == {}


def test_the_fastest_interface_of_ethernet_is_taken(login: Login) -> None:
    login.file("sys/class/net/eth0/speed", "1000")
    login.file("sys/class/net/eth1/speed", "100000")
    lines = network(login, ETH0, address("eth1", "10.2.0.1/16"))
    assert told(lines)[1] == ("launch.interface", "eth1", "the fastest here: eth0 1 Gbit/s, eth1 100 Gbit/s")
    assert "do the compute nodes have eth1 too?" in asked(lines)["launch.interface"]


def test_of_equally_fast_interfaces_none_is_guessed(login: Login) -> None:
    login.file("sys/class/net/eth0/speed", "-1")
    lines = network(login, ETH0, address("eth1", "10.2.0.1/16"))
    assert [key for key, _, _ in told(lines)] == ["launch.fabric"]
    assert asked(lines)["launch.interface"].startswith(
        "is one faster than that of the node's name, the default?"
    )


def test_rdma_over_ethernet_is_asked_about(login: Login) -> None:
    port(login, "mlx5_0", layer="Ethernet")
    lines = network(login, ETH0)
    assert [value for _, value, _ in told(lines)] == ["ethernet"]
    assert asked(lines) == {"launch.fabric": host.ROCE}


def test_without_ip_the_kernels_files_tell(login: Login) -> None:
    for name, kind in (("lo", "772"), ("eth0", "1"), ("ib0", "32"), ("eth1", "1")):
        login.file(f"sys/class/net/{name}/type", kind)
    login.file("sys/class/net/eth1/operstate", "down")
    found = host.interfaces(login.machine())
    assert [(one.name, one.is_infiniband) for one in found] == [("eth0", False), ("ib0", True)]


@pytest.mark.parametrize("answer", ["", "not JSON", "{}", '[{"name": 1}]', "[1]"])
def test_what_ip_should_not_say_is_no_end(answer: str, login: Login) -> None:
    login.has({"ip -j addr": answer})
    login.file("sys/class/net/eth0/type", "1")
    assert [one.name for one in host.interfaces(login.machine())] == ["eth0"]


# --- a node's other name ------------------------------------------------------------------------------------------


def test_a_name_on_a_network_of_this_host_gives_the_suffix_and_no_interface(login: Login) -> None:
    login.has(
        {
            "ip -j addr": addresses(ETH0, address("ib0", "10.2.0.1/16", kind="infiniband")),
            "getent ahostsv4 g1-ib0": "10.2.0.11 STREAM g1-ib0",
            "getent ahostsv4 g1-opa": "10.1.0.12 STREAM g1-opa",
            "getent ahostsv4 g1": "10.1.0.11 STREAM g1\n10.1.0.11 DGRAM",
        }
    )
    port(login, "mlx5_0")
    machine = login.machine()
    lines = list(host.network(machine, "g1", ""))
    assert [key for key, _, _ in told(lines)] == ["host_suffix", "launch.fabric"]
    assert told(lines)[0][1:] == ("-ib0", "g1-ib0 is 10.2.0.11, on the network of ib0 here")
    assert machine.told == ["ip -j addr: 1 line"]


def test_a_name_that_means_anything_gives_no_suffix(login: Login) -> None:
    """A resolver that answers for every name, and one whose networks this host is not on."""
    login.has({"ip -j addr": addresses(ETH0), "getent ahostsv4 g1": "10.1.0.11 STREAM g1"})
    assert [line.key for line in host.network(login.machine(), "g1", "")] == ["launch.fabric"]
    login.has({"getent ahostsv4 g1-ib": "192.168.0.1 x", "getent ahostsv4 g1": "10.1.0.11 STREAM g1"})
    assert [line.key for line in host.network(login.machine(), "g1", "")] == ["launch.fabric"]


# --- what starts the image ----------------------------------------------------------------------------------------


def test_a_program_in_path_is_asked_about_and_no_module_is_loaded(login: Login) -> None:
    login.has({"singularity": ""})
    assert [(line.value, line.questions) for line in host.program(login.machine())] == [
        (
            None,
            (
                f"singularity is {login.bin}/singularity here. Do the compute nodes have it in PATH too? Else name its module",
            ),
        )
    ]


@pytest.mark.parametrize(
    ("avail", "name", "why"),
    [
        ("/sw/modules:\napptainer/1.3.6\ngcc/13\n", "apptainer", "module avail"),
        (
            "/sw:\nsingularity/3.11(default)\napptainer(default)",
            "apptainer",
            "module avail; there is also singularity",
        ),
        ("/sw/apptainer:\nsingularity-ce/4.1\n", "singularity-ce", "module avail"),
        ("gcc/12\nApptainer/1.3.4\nApptainer/1.4.1 <L>\n", "Apptainer", "module avail"),
        (
            "gcc/12\ntools/Singularity/3.8 (D)\nSingularity/4.1\ntools/apptainer\n",
            "tools/apptainer",
            "module avail; there is also Singularity, tools/Singularity",
        ),
    ],
)
def test_a_module_is_named_without_its_version(avail: str, name: str, why: str, login: Login) -> None:
    login.has({"bash module -t avail 2>&1": f"{host.MODULES}{avail}"})
    assert told(host.program(login.machine())) == [("container.modules", (name,), why)]


def test_a_real_shell_is_asked_for_its_modules(login: Login, tmp_path: Path) -> None:
    """As a site defines them for its users' shells; they answer on stderr."""
    (tmp_path / ".bash_profile").write_text('module() { [ "$*" = "-t avail" ] && echo apptainer/1.4 >&2; }\n')
    (login.bin / "bash").symlink_to("/bin/bash")
    assert told(host.program(login.machine())) == [("container.modules", ("apptainer",), "module avail")]


def test_what_a_login_shell_prints_is_no_module(login: Login, tmp_path: Path) -> None:
    news = "printf 'NEWS:\napptainer\nsingularity is gone'"
    (tmp_path / ".bash_profile").write_text(f"{news}\nmodule() {{ printf '/sw:\ngcc/12\n'; }}\n")
    (login.bin / "bash").symlink_to("/bin/bash")
    machine = login.machine()
    assert asked(host.program(machine)) == {"container.modules": host.NO_PROGRAM}
    assert machine.told == ["module avail: 2 lines"]


@pytest.mark.parametrize(
    "avail", ["/sw/apptainer:\ngcc/13\n", "apptainer-tools/1", "singularity is gone", ""]
)
def test_without_any_the_program_is_asked_for(avail: str, login: Login) -> None:
    login.has({"bash module -t avail 2>&1": f"{host.MODULES}{avail}"})
    assert asked(host.program(login.machine())) == {"container.modules": host.NO_PROGRAM}


# --- scratch ------------------------------------------------------------------------------------------------------


def test_scratch_is_the_variable_that_is_set_here(login: Login) -> None:
    login.env.update(WORK="/work/alice", PSCRATCH="/pscratch/a/alice")
    why = "PSCRATCH is /pscratch/a/alice here; also set: WORK"
    assert told(host.scratch(login.machine())) == [("scratch", "$PSCRATCH", why)]


def test_without_any_scratch_is_asked_for(login: Login) -> None:
    login.env.update(SCRATCH="", WORK="relative")
    assert asked(host.scratch(login.machine())) == {"scratch": host.NO_SCRATCH}
