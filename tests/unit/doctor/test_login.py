"""`apptrain doctor` on a login node: what a submission lacks there."""

import json
from pathlib import Path

import pytest

from entrypoint.doctor import login
from tests.unit.cli.site import SIF


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with an image on a login node that has all it needs."""
    programs, home = tmp_path / "bin", tmp_path / "home"
    (home / "containers").mkdir(parents=True)
    (home / "containers/image.sif").write_bytes(SIF)
    (home / "containers/image.json").touch()
    programs.mkdir()
    for name in ("apptainer", "sbatch"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.chdir(tmp_path)
    return home


def texts(home: Path, capsys: pytest.CaptureFixture[str], profile: str = "", **env: str) -> list[str]:
    status = login.main(home, profile, env, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert status == int(not found["healthy"])
    return [f"{one['check']}: {one['text']}" for one in found["findings"]]


def test_a_node_that_can_submit_is_healthy_and_the_next_step_is_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert login.main(home, "", {}, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("doctor: 1 node, ")
    assert lines[-2:] == ["healthy", login.NEXT]


def test_where_no_job_can_be_submitted_the_next_step_is_this_machine(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.parent / "bin/sbatch").unlink()
    assert login.main(home, "", {}, as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[-1] == login.HERE


def test_what_is_not_there_is_named_with_its_remedy(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "containers/image.json").unlink()
    image = home / "containers/image.sif"
    assert texts(home, capsys) == [f"image: no lock says what is in {image}: image.json is not beside it"]
    image.unlink()
    (home.parent / "bin/sbatch").unlink()
    (home.parent / "bin/apptainer").unlink()
    assert texts(home, capsys) == [
        "program: neither apptainer nor singularity is in PATH",
        f"image: there is no image {image}",
        "scheduler: neither sbatch nor qsub is in PATH",
    ]


def test_an_image_that_the_user_chose_needs_no_lock(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site's, or NVIDIA's: jobs run in it."""
    image = tmp_path / "site.sif"
    missing = texts(home, capsys, APPTRAIN_IMAGE=str(image))
    assert missing == [f"image: there is no image {image}"]
    image.write_bytes(SIF)
    assert texts(home, capsys, APPTRAIN_IMAGE=str(image)) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cut.sif", "the image {} (10 bytes) does not begin as one: it was not copied or built to its end"),
        ("none", "{} is a directory, but no unpacked image (it has no .singularity.d): give a SIF file"),
        ("loop/x.sif", "{} cannot be read (Too many levels of symbolic links): check the path, and that you may read it"),
        ("x" * 300, "{} cannot be read (File name too long): check the path, and that you may read it"),
        ("unpacked", ""),
    ],
)  # fmt: skip
def test_an_image_that_jobs_would_be_refused_for_is_a_finding(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    (tmp_path / "cut.sif").write_bytes(SIF[:10])
    (tmp_path / "none").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "unpacked/.singularity.d").mkdir(parents=True)
    image = tmp_path / name
    found = [f"image: {said.format(image)}"] if said else []
    assert texts(home, capsys, APPTRAIN_IMAGE=str(image)) == found


def test_an_image_of_another_processor_than_the_nodes_is_a_finding(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, image = home / "site.yaml", home / "containers/image.sif"
    profile.write_text("scheduler: slurm\nnodes: {architecture: aarch64}\n")
    found = texts(home, capsys, str(profile), APPTRAIN_IMAGE=str(image))
    assert found == [f"image: the image {image} is for x86_64, and the nodes have aarch64"]


def test_a_program_that_is_not_there_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["program: /nowhere/apptainer is no program here"]
    assert texts(home, capsys, APPTRAIN_APPTAINER="/nowhere/apptainer") == wrong
    profile = home / "site.yaml"
    profile.write_text("scheduler: slurm\ncontainer: {program: $WHERE/apptainer}\n")
    assert texts(home, capsys, str(profile), WHERE="/nowhere") == wrong
    profile.write_text("scheduler: slurm\ncontainer: {program: singularity, modules: [singularity-ce]}\n")
    assert texts(home, capsys, str(profile)) == [], "the module brings it"


@pytest.mark.parametrize(
    ("stack", "driver", "image"),
    [("cu132", "", "image.sif"), ("", "530.30.02", "image-cu128.sif"), ("", "610.0", "image.sif")],
)
def test_the_image_is_that_of_the_stack_that_jobs_of_the_profile_take(
    home: Path, capsys: pytest.CaptureFixture[str], stack: str, driver: str, image: str
) -> None:
    profile = home / "site.yaml"
    profile.write_text(f"scheduler: slurm\nnodes: {{driver: '{driver}'}}\ncontainer: {{stack: {stack}}}\n")
    for path in (home / "containers").iterdir():
        path.unlink()
    assert texts(home, capsys, str(profile)) == [f"image: there is no image {home}/containers/{image}"]


def test_a_profile_says_which_image_and_program_and_where_runs_lie(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.parent / "bin/apptainer").unlink()
    profile = home / "site.yaml"
    profile.write_text(
        "scheduler: slurm\nscratch: /nowhere/$WHO\ncontainer: {stack: cu126, modules: [apptainer]}\n"
    )
    assert texts(home, capsys, str(profile), WHO="me") == [
        "run directory: run directory /nowhere/me takes no file of 1 MiB (No such file or directory)",
        f"image: there is no image {home}/containers/image-cu126.sif",
    ]
