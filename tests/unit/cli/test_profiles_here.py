"""entrypoint/cli/profiles.py in this process: what is written, and which profile has no host file."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from entrypoint.cli import profiles
from entrypoint.plan import profile

TEXT = "scheduler: slurm\ntitle: A lab\nclusters: [a, b]\ncontainer: {modules: [m1, m2], program: /x/apptainer, options: [--fakeroot]}\n"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "lab.yaml"
    file.write_text(TEXT)
    return file


def test_a_host_file_has_what_is_needed_before_an_image_and_all_as_json(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profiles.main([str(lab)]) == 0
    assert capsys.readouterr() == ("apptrain: lab: A lab (never run there): lab.host written\n", "")
    head, *found, whole = lab.with_suffix(".host").read_text().splitlines()
    assert head.startswith("# Made from lab.yaml by `make profiles`")
    assert found == [
        f"digest={hashlib.sha256(TEXT.encode()).hexdigest()}",
        *("cluster=a", "cluster=b", "module=m1", "module=m2", "apptainer=/x/apptainer", "option=--fakeroot"),
        "image=image.sif",
    ]
    name, _, content = whole.partition("=")
    assert (name, json.loads(content)["container"]["modules"]) == ("profile", ["m1", "m2"])
    assert sorted(file.name for file in lab.parent.iterdir()) == ["lab.host", "lab.yaml"]


def test_one_that_is_right_stays_as_it_is(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab.write_text(TEXT + "tested: on two nodes\n")
    for state in ("lab.host written", "unchanged"):
        assert profiles.main([str(lab)]) == 0
        assert capsys.readouterr().out == f"apptrain: lab: A lab (on two nodes): {state}\n"
    assert profiles.main(["--check", str(lab)]) == 0


@pytest.fixture
def clusters(lab: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the profiles, with the one of the lab."""
    for module in (profile, profiles):
        monkeypatch.setattr(module, "CLUSTERS", lab.parent)
    return lab.parent


@pytest.mark.parametrize("given", [[], ["big.yaml"]], ids=["all", "one"])
def test_two_profiles_for_one_cluster_are_told_as_a_job_would_find_them(
    given: list[str], clusters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (clusters / "big.yaml").write_text("scheduler: slurm\nclusters: [b, c]\n")
    assert profiles.main([str(clusters / "lab.yaml")]) == 0
    assert capsys.readouterr().err == ""
    assert profiles.main(given) == 0
    assert capsys.readouterr().err == (
        "apptrain: big.yaml lab.yaml are all for the cluster b: a job there without --profile is refused: leave "
        "the name in one of them\n"
    )
    (clusters / "big.yaml").write_text("scheduler: slurm\nclusters: [c]\n")
    (clusters / "lost.host").write_bytes(b"\xff")
    assert profiles.main(given) == 0
    assert capsys.readouterr().err == ""


def test_a_profile_elsewhere_may_have_the_same_cluster(
    clusters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profiles.main([]) == 0
    own = clusters / "own/lab.yaml"
    own.parent.mkdir()
    own.write_text(TEXT)
    assert profiles.main([str(own)]) == 0
    assert capsys.readouterr().err == ""


def test_a_check_writes_nothing(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = lab.with_suffix(".host")
    assert profiles.main(["--check", str(lab)]) == 64
    assert capsys.readouterr().err.startswith(f"apptrain: {made} is missing: make ")
    assert not made.exists()
    made.write_text("old")
    assert profiles.main(["--check", str(lab)]) == 64
    assert capsys.readouterr().err.startswith(
        f"apptrain: {made} is not made from {lab} as that is now: make "
    )
    assert made.read_text() == "old"


@pytest.mark.parametrize("spoiled", ["no text", "FIFO"])
def test_a_host_file_that_cannot_be_read_is_written_anew(lab: Path, spoiled: str) -> None:
    made = lab.with_suffix(".host")
    os.mkfifo(made) if spoiled == "FIFO" else made.write_bytes(b"\xff\xfe")
    assert profiles.main(["--check", str(lab)]) == 64
    assert profiles.main([str(lab)]) == 0
    assert made.read_text().startswith("# Made from lab.yaml ")


def test_without_a_file_all_that_come_with_the_program_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert profiles.main(["--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(": ")[1] for line in lines]
    assert names == sorted(names, key="{}.yaml".format)
    assert {"generic", "perlmutter"} <= set(names)
    assert all(line.endswith(": unchanged") for line in lines)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("my lab.yaml", TEXT, "my lab.yaml: a profile is named NAME.yaml, of letters, digits, _ . and -: rename it"),
        (".lab.yaml", TEXT, ".lab.yaml: a profile is named NAME.yaml, of letters, digits, _ . and -: rename it"),
        ("lab.yml", TEXT, "lab.yml: a profile is named NAME.yaml, of letters, digits, _ . and -: rename it"),
        ("x.yaml", "title: x\n", "x.yaml: scheduler is missing: give slurm or pbs"),
        ("x.yaml", "[]", "PROFILE=x.yaml: x.yaml must hold a mapping with the keys title, "),
        ("x.yaml", "scheduler: slurm\ncontainer: {stack: cu1}", "x.yaml: container stack is 'cu1': give one of cu132, cu128, cu126"),
        ("x.yaml", "scheduler: slurm\nnodes: {architecture: aarch64}\ncontainer: {stack: cu128}", "x.yaml: container stack is cu128, which has no builds for aarch64: give cu132, or leave it out"),
        ("x.yaml", "scheduler: lsf", "x.yaml: scheduler is 'lsf': give one of slurm, pbs"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("lab")
def test_what_job_scripts_cannot_use_is_refused(
    name: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_text(text)
    assert profiles.main([name]) == 64
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"apptrain: {said}"), err.count("\n")) == ("", True, 1), err
    assert not Path(name).with_suffix(".host").exists()


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("container: {stack: cu126}", "image-cu126.sif"),
        ("nodes: {driver: '550'}", "image-cu128.sif"),
        ("nodes: {architecture: aarch64}\ncontainer: {stack: cu132}", "image.sif"),
        ("nodes: {architecture: aarch64, driver: '550'}", "image.sif"),
    ],
)
def test_the_image_is_that_of_the_stack_which_fits(lab: Path, text: str, image: str) -> None:
    lab.write_text(f"scheduler: slurm\n{text}\n")
    assert profiles.main([str(lab)]) == 0
    assert f"\nimage={image}\n" in lab.with_suffix(".host").read_text()


def test_a_host_file_that_cannot_be_written_is_refused(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = lab.with_suffix(".host")
    made.mkdir()
    assert profiles.main([str(lab)]) == 64
    assert capsys.readouterr().err.startswith(f"apptrain: {made} cannot be written: ")


def test_keys_that_are_no_text_become_text_in_the_json(lab: Path) -> None:
    lab.write_text("scheduler: slurm\nenv: {A: 1}\nlaunch: {preload: [a]}\n")
    assert profiles.main([str(lab)]) == 0
    content = lab.with_suffix(".host").read_text().rpartition("profile=")[2]
    assert json.loads(content) == {"scheduler": "slurm", "env": {"A": 1}, "launch": {"preload": ["a"]}}
    assert profiles._named({1: [{True: "x"}]}) == {"1": [{"True": "x"}]}
