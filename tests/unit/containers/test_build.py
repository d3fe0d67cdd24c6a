"""The order of a build, over what stands for Apptainer."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from containers import bom, build, builder, debian, description, stacks, wheels
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


@pytest.mark.parametrize("what", ["build", "fetch"])
@pytest.mark.parametrize(
    ("image", "found"),
    [
        ("d", "it is a directory"),
        ("d.sif/", "it is a directory"),
        ("v1.2", "its name does not end with .sif"),
        ("image.json", "its name does not end with .sif"),
    ],
)
def test_an_image_that_could_not_be_written_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str, image: str, found: str
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for folder in ("d", "d.sif"):
        (tmp_path / folder).mkdir()
    for name in ("build", "fetch_only"):
        monkeypatch.setattr(build, name, None)
    assert build.main([what, "--image", image]) == 64
    said = f"apptrain: IMAGE={image}: {found}: give the file to build, NAME.sif\n"
    assert capsys.readouterr().err == said


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
    for name in ("pyproject.toml", "requirements/run.in", "LICENSE"):
        assert (tmp_path / "source" / name).read_text() == (build.CHECKOUT / name).read_text()
    assert (tmp_path / "lock.txt").read_text() == stack.lock("amd64").read_text()
    assert (tmp_path / "extra.txt").read_text() == ""
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


def test_a_python_package_has_its_hash_in_the_bill_if_its_lock_has_a_single_one(tmp_path: Path) -> None:
    lock, extra = tmp_path / "lock", tmp_path / "extra"
    lock.write_text(
        f"A_b==1 \\\n    --hash=sha256:{'1' * 64}\nc==2 \\\n    --hash=sha256:{'2' * 64} \\\n    --hash=sha256:{'3' * 64}\n"
    )
    extra.write_text(f"d==3 \\\n    --hash=sha256:{'4' * 64}\n")
    packages = {"a-b": "1", "c": "2", "d": "3", "e": "4"}
    said = {"stack": "cu132", "sif_sha256": "0" * 64, "debian_packages": {}, "python_packages": packages}
    found = json.loads(bom.text(said, [lock, stacks.debian_lock("amd64"), extra]))
    hashes = {
        part["name"]: [one["content"] for one in part.get("hashes", [])] for part in found["components"]
    }
    assert hashes == {"a-b": ["1" * 64], "c": [], "d": ["4" * 64], "e": []}
    assert found["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": "0" * 64}]


# --- what each command does ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (["build"], ("build", "cu132", None, None)),
        (["fetch", "--stack", "cu128"], ("fetch_only", "cu128", None, None)),
        (["verify", "--extra", "e", "--offline", "d"], ("verify", "cu132", "e", "d")),
    ],
)
def test_each_command_gets_its_stack_and_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], call: tuple[str | None, ...]
) -> None:
    calls: list[tuple[str | None, ...]] = []

    def tells(name: str) -> Any:
        def called(stack: stacks.Stack, extra: Path | None, image: Path, offline: Path | None) -> int:
            assert image == tmp_path / "i.sif"
            given = [str(one.relative_to(tmp_path)) if one else None for one in (extra, offline)]
            calls.append((name, stack.name, *given))
            return 5

        return called

    monkeypatch.chdir(tmp_path)
    (tmp_path / "e").touch()
    for name in ("build", "fetch_only", "verify"):
        monkeypatch.setattr(build, name, tells(name))
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        assert build.main([*words, "--image", "i.sif"]) == (5 if words[0] == "verify" else 0)
        for number, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
            handler = signal.getsignal(number)
            assert callable(handler)
            with pytest.raises(SystemExit) as ended:
                handler(number, None)
            assert ended.value.code == status
            others = {signal.getsignal(one) for one, _ in before}
            assert others == {signal.SIG_IGN}, "a second one would break off the removal"
            for one, _ in before:
                signal.signal(one, handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        build.main([*words, "--image", "i.sif"])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "nohup"
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert calls == [call, call]


def test_a_build_that_is_stopped_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build", stopped)
    assert build.main(["build"]) == 130
    assert capsys.readouterr().err == "apptrain: stopped; nothing was changed\n"


ROOM = "see that there is room, and that you may write"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), f"No space left on device: {ROOM}"),
        (PermissionError(13, "Permission denied", "/x/y"), f"/x/y: Permission denied: {ROOM}"),
        (FileNotFoundError(2, "No such file or directory", "/x/y"), "/x/y: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_or_written_ends_a_build_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, said: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(build, "build", fails)
    assert build.main(["build"]) == 69
    assert capsys.readouterr().err == f"apptrain: {said}\n"


def test_a_stack_without_a_lock_is_refused_with_what_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stacks, "CONTAINERS", tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("APPTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "check", lambda *_: None)
    (tmp_path / "cache").mkdir()
    assert build.main(["fetch"]) == 64
    lock = tmp_path / "locks/cu132-amd64.txt"
    said = f"apptrain: stack cu132 has no lock yet, {lock}: type `make lock`\n"
    assert capsys.readouterr().err == said


def test_what_cannot_be_built_ends_with_64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for option, said in (
        ("--stack", "STACK=no: there is no such stack"),
        ("--extra", f"EXTRA={tmp_path}/no: there is no such file"),
    ):
        assert build.main(["build", option, "no"]) == 64
        assert capsys.readouterr().err.startswith(f"apptrain: {said}: give ")


class Fetches:
    """What is fetched, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.extra = "einops==1\n"
        patch.setattr(stacks, "debian_architecture", lambda: "amd64")
        patch.setattr(debian, "lay_out", self._lay_out)
        patch.setattr(wheels, "fetch", self._fetch)
        patch.setattr(wheels, "lock_extra", self._lock_extra)

    def _lay_out(
        self, _base: object, architecture: str, lock: Path, cache: Path, folder: Path, *, offline: Path | None
    ) -> None:
        self.calls.append(("debian", architecture, lock.name, cache.name, folder.name, offline))

    def _fetch(self, lock: Path, python: str, architecture: str, cache: Path, offline: Path | None) -> Path:
        self.calls.append(("wheels", lock.name, python, architecture, cache.name, offline))
        return Path(f"wheels of {lock.name}")

    def _lock_extra(self, stack: stacks.Stack, _architecture: str, extra: Path) -> Path:
        self.calls.append("lock of extra")
        lock = extra.with_name(f"extra.{stack.name}.lock")
        lock.write_text(self.extra)
        return lock


def test_debians_packages_and_extras_lock_come_before_the_wheels_and_those_of_extra_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches, stack = Fetches(monkeypatch), stacks.find("")
    fetched = build.fetch(stack, tmp_path / "extra", Path("off"), Path("cache"), Path("work"))
    python = stack.base.python
    assert fetches.calls == [
        ("debian", "amd64", "debian-amd64", "cache", "debian", Path("off")),
        "lock of extra",
        ("wheels", "cu132-amd64.txt", python, "amd64", "cache", Path("off")),
        ("wheels", "extra.cu132.lock", python, "amd64", "cache", Path("off")),
    ]
    assert [lock.name for lock in fetched.locks] == ["cu132-amd64.txt", "debian-amd64", "extra.cu132.lock"]
    assert [str(folder) for folder in fetched.wheels] == [
        "wheels of cu132-amd64.txt",
        "wheels of extra.cu132.lock",
    ]
    assert fetched.architecture == "amd64"
    fetches.extra = "# all of it is in the stack\n"
    again = build.fetch(stack, tmp_path / "extra", None, Path("cache"), Path("work"))
    assert (len(again.locks), len(again.wheels)) == (3, 1)
    alone = build.fetch(stack, None, None, Path("cache"), Path("work"))
    assert (len(alone.locks), len(alone.wheels)) == (2, 1)


def test_a_stack_without_builds_for_this_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    monkeypatch.setattr(stacks, "debian_architecture", lambda: "arm64")
    with pytest.raises(BuildRefused, match=r"^stack cu128 is for amd64, this machine arm64$"):
        build.fetch(stacks.find("cu128"), None, None, tmp_path, tmp_path)
    assert fetches.calls == []


def test_a_fetch_needs_room_for_downloads_alone_and_leaves_only_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs: list[dict[str, int]] = []
    monkeypatch.setattr(build, "check", lambda _places, megabytes: needs.append(megabytes))
    monkeypatch.setenv("APPTRAIN_CACHE", str(tmp_path))
    fetches, stack = Fetches(monkeypatch), stacks.find("")
    build.fetch_only(stack, None, tmp_path / "i.sif", None)
    assert needs == [{"work": 0, "image": 0, "download": 2 * stack.megabytes["download"]}]
    assert len(fetches.calls) == 2
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == (
        f"apptrain: what stack cu132 is made from is in {tmp_path}: `make image` needs no network now\n"
    )


class Again:
    """A second build, and what both images hold."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.first = {"lock_sha256": "l", "source_sha256": "s", "partition_sha256": "p"}
        self.second = dict(self.first)
        self.trees: list[dict[str, str]] = [{"/a": "1"}, {"/a": "1"}]
        self.umask = 0
        patch.setenv("APPTAINER_TMPDIR", str(folder))
        patch.setattr(description, "read", lambda _image: self.first)
        patch.setattr(build, "build", self._build)
        patch.setattr(builder.Builder, "find", lambda: SimpleNamespace(tree=self._tree))

    def _build(self, _stack: object, _extra: object, image: Path, _offline: object) -> dict[str, str]:
        assert image.parent.is_dir()
        os.umask(umask := os.umask(0))
        self.umask = umask
        return self.second

    def _tree(self, image: Path) -> dict[str, str]:
        return self.trees[image.name == "again.sif"]


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Again]:
    before = os.umask(0o022)
    yield Again(tmp_path, monkeypatch)
    os.umask(before)


def verified() -> int:
    return build.verify(stacks.find(""), None, Path("image.sif"), None)


def test_a_second_build_under_another_umask_is_the_same(
    again: Again, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verified() == 0
    assert (capsys.readouterr().out, again.umask) == (
        "apptrain: the second build is identical, partition p\n",
        0o077,
    )


@pytest.mark.parametrize(
    ("name", "what"), [("lock_sha256", "locks"), ("source_sha256", "files of this checkout")]
)
def test_an_image_of_other_sources_is_not_compared(again: Again, name: str, what: str) -> None:
    again.second[name] = "other"
    with pytest.raises(BuildRefused) as refusal:
        verified()
    assert str(refusal.value) == (
        f"image.sif was built from other {what} than those here: build it anew: make image"
    )


def test_files_that_differ_are_named_and_others_are_only_packed_otherwise(
    again: Again, capsys: pytest.CaptureFixture[str]
) -> None:
    again.second["partition_sha256"] = "q"
    assert verified() == 0
    packed = "apptrain: the second build has the same 1 files; its partition is packed differently\n"
    assert capsys.readouterr() == (packed, "")
    again.trees = [{"/a": "1", "/b": "2", "/c": "3"}, {"/a": "1", "/b": "4", "/d": "5"}]
    assert verified() == 1
    assert capsys.readouterr() == (
        "apptrain: /b: 2 | 4\napptrain: /c: 3 | absent\napptrain: /d: absent | 5\n",
        "apptrain: the second build differs in 3 of 3 files\n",
    )
    again.trees = [{f"/{number:02}": "1" for number in range(60)}, {}]
    assert verified() == 1
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (50, "apptrain: the second build differs in 60 of 60 files\n")


@pytest.mark.parametrize("same", [True, False])
def test_an_image_is_inspected_with_its_labels_and_compared_with_what_describes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], same: bool
) -> None:
    image = tmp_path / "image.sif"
    image.write_bytes(b"hsqs")
    digest = hashlib.sha256(b"hsqs" if same else b"other").hexdigest()
    said = {"sif_sha256": digest, "stack": "cu132", "versions": {"torch": "2", "x": None}, "compute_capability": ["8.0", "9.0"], "debian_packages": {"a": "1", "b": "2"}}  # fmt: skip
    image.with_suffix(".json").write_text(json.dumps(said))
    labels = {"b": "2", "a": "1"}
    monkeypatch.setattr(builder.Builder, "find", lambda: SimpleNamespace(labels=lambda _image: labels))
    assert build.main(["inspect", "--image", str(image)]) == (0 if same else 64)
    out, err = capsys.readouterr()
    assert [line.split(maxsplit=1) for line in out.splitlines()] == [
        ["sif_sha256", digest], ["stack", "cu132"], ["versions", "torch 2"], ["compute_capability", "8.0, 9.0"],
        ["debian_packages", "2"], ["label", "a              1"], ["label", "b              2"],
    ]  # fmt: skip
    other = f"apptrain: {image} is not the file that {image.with_suffix('.json')} describes: build it anew\n"
    assert err == ("" if same else other)


# --- Apptainer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said", "packer", "found"),
    [
        ("apptainer", "apptainer version 1.4.0", True, None),
        ("apptainer", "apptainer version 1.3.9", True, "{}/mksquashfs"),
        ("apptainer", "apptainer version 1.2.0", False, ""),
        ("apptainer", "apptainer version 2.0.0", False, None),
        ("singularity", "singularity-ce version 4.0.0", True, None),
        ("singularity", "apptainer version 1.3.0", False, ""),
        ("apptainer", "apptainer version 1.1.9", True, "is apptainer version 1.1.9: 1.2 or newer is needed"),
        (
            "singularity",
            "singularity version 3.8.7",
            True,
            "is singularity version 3.8.7: 4.0 or newer is needed",
        ),
        ("apptainer", "", True, "is silent about its version: 4.0 or newer is needed"),
    ],
)
def test_an_apptainer_that_is_new_enough_packs_as_it_is_told_or_by_a_program_of_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str, packer: bool, found: str | None
) -> None:
    tool(tmp_path, name, f"echo {said}")
    if packer:
        tool(tmp_path, "mksquashfs", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(builder, "_search", lambda: os.environ["PATH"])
    if found and found.startswith("is "):
        with pytest.raises(BuildRefused) as refusal:
            builder.Builder.find()
        assert str(refusal.value) == f"{tmp_path}/{name} {found}"
        return
    made = builder.Builder.find()
    assert (made.path, made.version) == (f"{tmp_path}/{name}", said)
    assert made.mksquashfs == (found.format(tmp_path) if found else found)
    if found == "":
        with pytest.raises(
            BuildRefused, match=r"packs an image with the mksquashfs of PATH, and there is none: "
        ):
            made.check()
    else:
        made.check()


def test_where_the_file_system_is_in_an_image_is_asked(tmp_path: Path) -> None:
    line = "2    |1       |NONE    |32768-3000000             |FS (Squashfs/*System/amd64)"
    tool(tmp_path, "a", f'[ "$*" = "sif list i.sif" ] && echo "1 |1 |NONE |3-9 |Def.FILE" && echo "{line}"')
    assert builder.Builder(f"{tmp_path}/a", "").partition(Path("i.sif")) == (32768, 3_000_000)
    tool(tmp_path, "b", "echo no image >&2; exit 1")
    with pytest.raises(builder.BuildFailed, match=r"^i.sif: no file system was found in it: no image$"):
        builder.Builder(f"{tmp_path}/b", "").partition(Path("i.sif"))


def test_the_files_of_an_image_are_listed_inside(tmp_path: Path) -> None:
    tool(tmp_path, "a", 'echo "{\\"/x\\": \\"$3 $6\\"}"')
    assert builder.Builder(f"{tmp_path}/a", "").tree(Path("i.sif")) == {"/x": "--cleanenv i.sif"}
    tool(tmp_path, "b", "echo broken >&2; exit 1")
    with pytest.raises(builder.BuildFailed, match=r"^i.sif: its files could not be read: broken$"):
        builder.Builder(f"{tmp_path}/b", "").tree(Path("i.sif"))


def test_apptainer_is_called_by_its_other_name_with_its_tools_and_nothing_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTAINERENV_X", "1")
    monkeypatch.setenv("SINGULARITYENV_X", "1")
    before = dict(os.environ)
    with builder.Builder("/opt/app tainer", "1", "/opt/mksquashfs")._client(tmp_path, MINE="1"):
        assert os.environ["PATH"] == f"{tmp_path}/bin:{before['PATH']}:/usr/sbin:/sbin"
        assert os.environ["MINE"] == "1"
        assert not {"APPTAINERENV_X", "SINGULARITYENV_X"} & set(os.environ)
    assert dict(os.environ) == before
    assert "exec '/opt/app tainer' \"$@\"" in (tmp_path / "bin/singularity").read_text()
    assert 'exec /opt/mksquashfs "$@" -comp zstd' in (tmp_path / "bin/mksquashfs").read_text()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "bin").iterdir()} == {0o755}
    for code, error in ((1, builder.BuildFailed), (143, SystemExit), (129, SystemExit)):
        with pytest.raises(error), builder.Builder("/a", "1")._client(tmp_path):
            raise SystemExit(code)
    assert dict(os.environ) == before


def test_folders_of_the_host_are_covered_by_empty_ones_that_nobody_else_reaches(tmp_path: Path) -> None:
    words = builder._cover(tmp_path)
    assert words == [
        word
        for name in ("tmp", "var-tmp", "dev-shm")
        for word in (
            "--mount",
            f'type=bind,"source={tmp_path}/private/{name}",destination=/{name.replace("-", "/")}',
        )
    ]
    assert (tmp_path / "private").stat().st_mode & 0o7777 == 0o700
    assert {path.stat().st_mode & 0o7777 for path in (tmp_path / "private").iterdir()} == {0o1777}
    assert builder._mount(Path('/a"b'), "/c") == ["--mount", 'type=bind,"source=/a""b",destination=/c']
