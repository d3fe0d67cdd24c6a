"""The parts of the test cluster that need neither root nor Slurm; tests/cluster/test_cluster.py has the rest."""

import argparse
from pathlib import Path

import pytest

from tests.host import Refused, cgroups
from tests.vcluster import slurm
from tests.vcluster.__main__ import setting
from tests.vcluster.layout import BY_NAME, HIGH_SPEED, MANAGEMENT, MEMBERS, Style, hosts_file


def test_every_host_knows_all_hosts_by_their_names_on_both_networks() -> None:
    text = hosts_file(BY_NAME["gpu-a01"], "management")
    assert text.splitlines()[:5] == [
        "127.0.0.1 localhost",
        "::1 localhost ip6-localhost ip6-loopback",
        "10.77.42.1 ctl",
        "10.77.43.1 ctl-hsn",
        "fd77:0:0:43::1 ctl-hsn6",
    ]
    assert len(text.splitlines()) == 2 + 3 * len(MEMBERS)


@pytest.mark.parametrize(
    ("style", "own", "other"),
    [
        ("management", "10.77.42.27", "10.77.42.11"),
        ("loopback", "127.0.1.1", "10.77.42.11"),
        ("high-speed", "10.77.43.27", "10.77.43.11"),
    ],
)
def test_what_a_name_means_is_a_matter_of_style(style: Style, own: str, other: str) -> None:
    names = {line.split()[1]: line.split()[0] for line in hosts_file(BY_NAME["gpu-b07"], style).splitlines()}
    assert [names[name] for name in ("gpu-b07", "gpu-a01", "gpu-b07-hsn")] == [own, other, "10.77.43.27"]


def test_no_two_hosts_share_an_address_and_ports_have_names_that_linux_takes() -> None:
    for network in (MANAGEMENT, HIGH_SPEED):
        assert len({member.v4(network) for member in MEMBERS}) == len(MEMBERS)
    macs = {member.mac(network) for member in MEMBERS for network in (MANAGEMENT, HIGH_SPEED)}
    assert len(macs) == 2 * len(MEMBERS)
    assert max(len(f"{member.name}.{HIGH_SPEED.name}") for member in MEMBERS) <= 15


def test_settings_come_instead_of_those_that_a_cluster_has_and_beside_them() -> None:
    text = slurm.files("linuxproc", {"KillWait": "5", "WaitTime": "7"})["slurm.conf"]
    assert [line for line in text.splitlines() if line.startswith(("KillWait", "WaitTime"))] == [
        "KillWait=5",
        "WaitTime=7",
    ]
    assert slurm.changed("A=1\nB=2\nA_B=3\n", {"A": "x=y", "C": ""}) == "B=2\nA_B=3\nA=x=y\nC=\n"


def test_nodes_have_gpus_in_each_file_and_partitions_by_what_they_have() -> None:
    files = slurm.files("cgroup", {})
    assert [
        line.split(" DefaultTime")[0] for line in files["slurm.conf"].splitlines() if "Nodes=" in line
    ] == [
        "PartitionName=gpu Nodes=gpu-a01,gpu-a02,gpu-b07 Default=YES",
        "PartitionName=cpu Nodes=cpu-c01",
        "PartitionName=all Nodes=gpu-a01,gpu-a02,gpu-b07,cpu-c01",
    ]
    assert files["gres.conf"] == (
        "AutoDetect=off\n"
        "NodeName=gpu-a01 Name=gpu Type=a100 File=/dev/nvidia[0-3]\n"
        "NodeName=gpu-a02 Name=gpu Type=a100 File=/dev/nvidia[0-3]\n"
        "NodeName=gpu-b07 Name=gpu Type=a100 File=/dev/nvidia[0-3]\n"
    )
    assert files["cgroup.conf"] == "CgroupPlugin=cgroup/v1\nConstrainDevices=yes\n"


@pytest.mark.parametrize("text", ["KillWait", "=5"])
def test_a_setting_is_a_name_and_a_value(text: str) -> None:
    assert setting("SchedulerParameters=a=1,b") == ("SchedulerParameters", "a=1,b")
    with pytest.raises(argparse.ArgumentTypeError, match=r"^.*: give NAME=VALUE, a line of slurm\.conf$"):
        setting(text)


def test_a_host_has_cgroups_of_its_own_which_go_with_all_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    for controller in ("freezer", "devices"):
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "cgroup.procs").touch()
    (tmp_path / "alias").symlink_to("freezer")
    made = cgroups.make(Path("/cache/hosts/a"), ["freezer", "devices"])
    other = cgroups.make(Path("/elsewhere/hosts/a"), ["freezer"])
    assert list(made.values()) == [tmp_path / "freezer", tmp_path / "devices"]
    for directory in made:
        (directory / "slurm/job").mkdir(parents=True)
    cgroups.remove(Path("/cache/hosts/a"))
    assert [directory.exists() for directory in (*made, *other)] == [False, False, True]


def test_cgroups_are_refused_where_the_machine_has_no_hierarchy_of_that_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    (tmp_path / "freezer").mkdir()
    (tmp_path / "freezer/cgroup.procs").touch()
    with pytest.raises(Refused) as error:
        cgroups.make(Path("/cache/hosts/a"), ["freezer", "devices"])
    assert str(error.value) == (
        f"{tmp_path}/devices is no cgroup hierarchy: this needs version 1, which this machine does not mount"
        " (systemd.unified_cgroup_hierarchy=0 on the kernel's command line): do without cgroups"
    )
    assert [file.name for file in (tmp_path / "freezer").iterdir()] == ["cgroup.procs"]
