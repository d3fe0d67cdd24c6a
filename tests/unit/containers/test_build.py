"""The order of a build, over what stands for Apptainer."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from containers import bom, build, builder, debian, stacks
from containers.stacks import BuildRefused


def tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_without_apptainer_the_build_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main(["build"]) == 64
    assert capsys.readouterr().err == (
        "apptrain: neither apptainer nor singularity is on PATH: load it (module avail apptainer), "
        "or build on a node that has it\n"
    )


def test_an_old_apptainer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(tmp_path, "apptainer", "echo apptainer version 1.1.9")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main(["build"]) == 64
    assert capsys.readouterr().err == (
        f"apptrain: {tmp_path}/apptainer is apptainer version 1.1.9: 1.2 or newer is needed\n"
    )


BUILDS = """case $1 in
--version) echo apptainer version 1.4.5 ;;
build)
    while [ $# -gt 2 ]; do shift; done
    [ "$2" = "$RECIPE" ] && cp "$MADE/python.installed" "$MADE/debian.installed" "$APPTRAIN_WORK" || exit
    printf header.squashfs.end >"$1"
    ;;
sif) echo "4    |1       |NONE    |7-15                      |FS (Squashfs/*System/amd64)" ;;
esac"""
"""Stands in for Apptainer: what a build leaves, and where the file system is in it."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-in puts into an image; everything is fetched already, and there is room."""
    stack, folder = stacks.find(""), tmp_path / "made"
    folder.mkdir()
    packages = {name: getattr(stack, name) for name in ("torch", "torchvision")}
    versions = packages | {name: getattr(stack, name) for name in ("cuda", "cudnn", "nccl")}
    (folder / "python.installed").write_text(json.dumps({"versions": versions, "python_packages": packages}))
    (folder / "debian.installed").write_text(f"libc6 {dict(locked())['libc6']}\n")
    tool(tmp_path / "bin", "apptainer", BUILDS)
    for name, value in (("MADE", folder), ("RECIPE", builder.RECIPE), ("APPTAINER_TMPDIR", tmp_path)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(build, "check", lambda *_: None)
    locks = [stack.lock("amd64"), stacks.debian_lock("amd64")]
    monkeypatch.setattr(build, "fetch", lambda *_: build.Fetched("amd64", locks, []))
    return folder


def beside(folder: Path) -> dict[str, str]:
    """Name to content of everything there."""
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_an_image_comes_with_what_describes_it(
    tmp_path: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, stack = tmp_path / "images" / "image.sif", stacks.find("")
    target.parent.mkdir()
    assert build.main(["build", "--image", str(target)]) == 0, capsys.readouterr().err
    found = beside(target.parent)
    assert found.keys() == {"image.sif", "image.json", "image.cdx.json"}
    assert found["image.sif"] == "header.squashfs.end"
    said = json.loads(found["image.json"])
    installed = json.loads((made / "python.installed").read_text())
    expected = {
        "stack": "cu132",
        "versions": installed["versions"],
        "driver": stack.driver,
        "sif_sha256": hashlib.sha256(b"header.squashfs.end").hexdigest(),
        "partition_sha256": hashlib.sha256(b"squashfs").hexdigest(),
        "bytes": len("header.squashfs.end"),
        "builder": "apptainer version 1.4.5",
        "debian_packages": {"libc6": dict(locked())["libc6"]},
        "python_packages": installed["python_packages"],
    }
    assert {name: said[name] for name in expected} == expected
    bill = json.loads(found["image.cdx.json"])
    assert {part["name"] for part in bill["components"]} == {"libc6", "torch", "torchvision"}
    partition, printed = expected["partition_sha256"], capsys.readouterr().out
    assert printed.startswith(
        f"apptrain: stack cu132: torch {stack.torch}, CUDA {stack.cuda}\n"
        f"apptrain: target {target}\napptrain: temporary files in {tmp_path} (APPTAINER_TMPDIR)\n"
        "apptrain: downloads in "
    )
    assert (
        f"apptrain: {target} is ready: 0.00 GB in {said['seconds']} s, identity {partition[:12]}\n" in printed
    )


@pytest.mark.parametrize(
    ("versions", "error"),
    [
        (None, "the build failed; the reason stands above. The image of before is untouched"),
        (
            {"torch": "1.0"},
            f"torch is 1.0 in the image, {stacks.find('').torch} in stacks.yaml: correct the entry cu132 there",
        ),
    ],
    ids=["by Apptainer", "another torch"],
)
def test_a_build_that_fails_leaves_the_image_of_before(
    tmp_path: Path,
    made: Path,
    capsys: pytest.CaptureFixture[str],
    versions: dict[str, str] | None,
    error: str,
) -> None:
    before = {"image.sif": "old", "image.json": "{}", "image.cdx.json": "{}"}
    (tmp_path / "images").mkdir()
    for name, text in before.items():
        (tmp_path / "images" / name).write_text(text)
    (made / "python.installed").unlink()
    if versions:
        (made / "python.installed").write_text(json.dumps({"versions": versions}))
    assert build.main(["build", "--image", str(tmp_path / "images" / "image.sif")]) == 1
    assert capsys.readouterr().err == f"apptrain: {error}\n"
    assert beside(tmp_path / "images") == before


def test_an_image_and_its_partition_are_hashed_in_one_reading(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000  # more than two blocks
    (tmp_path / "image").write_bytes(content)
    for begin, end in ((0, len(content)), (5, 9_000_000), (4_194_304, 8_388_608), (7, 7)):
        assert build.sha256(tmp_path / "image", begin, end) == (
            hashlib.sha256(content).hexdigest(),
            hashlib.sha256(content[begin:end]).hexdigest(),
        )


def test_an_image_that_is_not_there_cannot_be_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["inspect", "--image", str(tmp_path / "image.sif")]) == 64
    assert (
        capsys.readouterr().err
        == f"apptrain: {tmp_path}/image.sif: there is no such image: make image, or give another with --image\n"
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"stack": "cu132"}', None])
def test_an_image_is_not_inspected_by_what_does_not_describe_it(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "image.sif").write_bytes(b"hsqs")
    if text is not None:
        (tmp_path / "image.json").write_text(text)
    assert build.main(["inspect", "--image", str(tmp_path / "image.sif")]) == 64
    said = capsys.readouterr().err
    assert said.startswith(f"apptrain: {tmp_path}/image.json cannot be read (")
    assert said.endswith(f"`apptainer inspect {tmp_path}/image.sif` tells what is in it\n")


def test_the_build_runs_anywhere_with_a_python_that_knows_nothing_of_the_checkout(tmp_path: Path) -> None:
    # -S: the .pth files of a venv, which may name the checkout, are not read.
    command = [sys.executable, "-S", build.__file__, "inspect", "--image", "image.sif"]
    packages = {"PYTHONPATH": str(Path(yaml.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=packages, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        64,
        f"apptrain: {tmp_path}/image.sif: there is no such image: make image, or give another with --image\n",
    )


def test_the_recipe_gets_a_value_for_each_of_its_arguments() -> None:
    arguments = build.recipe_arguments(stacks.find(""))
    builder.check_recipe(arguments)
    del arguments["DATE"]
    with pytest.raises(BuildRefused, match="its arguments are"):
        builder.check_recipe(arguments)


def locked() -> list[tuple[str, str]]:
    return [(entry["Package"], entry["Version"]) for entry in debian.packages(stacks.debian_lock("amd64"))]


def test_the_recipe_names_no_mirror_and_no_index() -> None:
    assert re.findall(r"[a-z+]+:/\S*", builder.RECIPE.read_text()) == []


def test_what_the_build_binds_holds_our_packages_and_the_stacks_facts(tmp_path: Path) -> None:
    stack = stacks.find("")
    of_user = os.umask(0o077)
    try:
        build.lay_out(tmp_path, stack, [stack.lock("amd64"), stacks.debian_lock("amd64")])
    finally:
        os.umask(of_user)
    said = json.loads((tmp_path / "stack.json").read_text())
    assert said["name"] == "cu132"
    assert said["driver"] == "580"
    assert said["others"]["cu126"]["compute_capability"] == stacks.find("cu126").compute_capability
    assert len(said["lock_sha256"]) == 64
    assert (tmp_path / "source/entrypoint/cli/main.py").exists()
    assert (tmp_path / "source/src/train/data/digits.csv.gz").exists()
    modes = {"source/trim.sh": 0o755, "source/entrypoint": 0o755, "stack.json": 0o644}
    assert {name: (tmp_path / name).stat().st_mode & 0o777 for name in modes} == modes


def test_bytecode_beside_what_goes_into_an_image_stays_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python leaves it there, unless it is told not to."""
    containers, stack = tmp_path / "containers", stacks.find("")
    shutil.copytree(Path(build.__file__).parent / "image", containers / "image")
    (containers / "image" / "__pycache__").mkdir(exist_ok=True)
    (containers / "image" / "__pycache__" / "tree.pyc").write_bytes(b"x")
    monkeypatch.setattr(build, "CONTAINERS", containers)
    (tmp_path / "work").mkdir()
    build.lay_out(tmp_path / "work", stack, [stack.lock("amd64"), stacks.debian_lock("amd64")])
    source = tmp_path / "work" / "source"
    assert (source / "tree.py").read_bytes() == (containers / "image" / "tree.py").read_bytes()
    assert not list(source.rglob("__pycache__"))


def test_the_bill_of_materials_names_packages_of_both_kinds_with_their_hashes() -> None:
    stack = stacks.find("")
    locks = [stack.lock("amd64"), stacks.debian_lock("amd64")]
    libc = next(entry for entry in debian.packages(locks[1]) if entry["Package"] == "libc6")
    said = {
        "stack": "cu132",
        "sif_sha256": "0" * 64,
        "debian_packages": {"libc6": libc["Version"]},
        "python_packages": {"torchvision": stack.torchvision},
    }
    found = json.loads(bom.text(said, locks))
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["name"]: part for part in found["components"]}
    assert parts["libc6"]["hashes"] == [{"alg": "SHA-256", "content": libc["SHA256"]}]
    assert parts["libc6"]["purl"].startswith("pkg:deb/debian/libc6@")
    assert parts["torchvision"]["purl"] == f"pkg:pypi/torchvision@{stack.torchvision}"
