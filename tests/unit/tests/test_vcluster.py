"""The parts of the test cluster that need neither root nor Slurm; tests/cluster/test_cluster.py has the rest."""

from pathlib import Path

import pytest

from tests.host import Refused, cgroups
from tests.vcluster import slurm


def test_settings_come_instead_of_those_that_a_cluster_has_and_beside_them() -> None:
    text = slurm.files("linuxproc", {"KillWait": "5", "WaitTime": "7"})["slurm.conf"]
    assert [line for line in text.splitlines() if line.startswith(("KillWait", "WaitTime"))] == [
        "KillWait=5",
        "WaitTime=7",
    ]
    assert slurm.changed("A=1\nB=2\nA_B=3\n", {"A": "x=y", "C": ""}) == "B=2\nA_B=3\nA=x=y\nC=\n"


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
