"""The tools that build the image, without Apptainer: stacks, locks, Debian's index, places, refusals."""

import functools
import hashlib
import http.server
import json
import lzma
import re
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from containers import bom, build, builder, debian, download, preflight, registry, stacks, wheels
from containers.stacks import BadInput

ARCHITECTURES = ("amd64", "arm64")
BASE = stacks.find("").base


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A directory and the address under which it is served on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


# --- stacks and locks -----------------------------------------------------------------------------------------


def test_the_stacks_are_the_newest_cuda_13_and_a_cuda_12_for_older_gpus() -> None:
    found = stacks.read()
    assert {name: (stack.cuda, stack.is_default) for name, stack in found.items()} == {
        "cu132": ("13.2", True),
        "cu126": ("12.6", False),
    }
    assert stacks.find("").name == "cu132"
    assert stacks.find("cu126").image.name == "image-cu126.sif"
    assert stacks.find("cu132").image.name == "image.sif"
    assert "7.0" in stacks.find("cu126").compute_capability


def test_an_unknown_stack_is_refused() -> None:
    with pytest.raises(BadInput) as refusal:
        stacks.find("cu118")
    assert str(refusal.value) == "STACK=cu118: there is no such stack: give one of cu132, cu126"


@pytest.mark.parametrize(
    ("stack", "architecture"), [(s, a) for s in stacks.read().values() for a in s.architectures], ids=str
)
def test_an_images_lock_holds_its_stack_and_hashes_everything(stack: stacks.Stack, architecture: str) -> None:
    text = stack.lock(architecture).read_text()
    pins = wheels.pinned(stack.lock(architecture))
    assert (pins["torch"], pins["torchvision"]) == (stack.torch, stack.torchvision)
    assert pins[f"nvidia-nccl-cu{stack.cuda.split('.')[0]}"] == stack.nccl
    blocks = re.split(r"^(?=[^ #\n])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pins)
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_debians_lock_holds_the_base_with_a_hash_each_and_names_no_mirror(architecture: str) -> None:
    text = stacks.debian_lock(architecture).read_text()
    entries = debian.read_index(text)
    names = {entry["Package"] for entry in entries}
    assert set(BASE.packages) <= names
    assert {"libc6", "apt", "dpkg", "bash"} <= names
    for entry in entries:
        assert re.fullmatch("[0-9a-f]{64}", entry["SHA256"])
        assert entry["Filename"].startswith("pool/main/")
        assert entry["Architecture"] in (architecture, "all")
    assert "://" not in text
    assert debian.write_index(entries) == text


# --- Debian's packages ----------------------------------------------------------------------------------------


def package(folder: Path, name: str = "hello", version: str = "1.0-1") -> debian.Entry:
    """A file of a mirror at `folder`, and its entry."""
    content = f"{name} {version}".encode()
    path = folder / "pool" / "main" / f"{name}_{version}_all.deb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return {
        "Package": name,
        "Version": version,
        "Architecture": "all",
        "Filename": str(path.relative_to(folder)),
        "Size": str(len(content)),
        "SHA256": hashlib.sha256(content).hexdigest(),
    }


def test_a_repository_holds_the_locked_packages_and_an_index_of_them(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    entries = [package(folder), package(folder, "world")]
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index(entries))
    monkeypatch.setenv("DEBIAN_MIRROR", address + "/")
    debian.repository(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "repository")
    for entry in entries:
        assert (tmp_path / "repository" / entry["Filename"]).read_bytes() == (
            folder / entry["Filename"]
        ).read_bytes()
    index = tmp_path / "repository/dists/trixie/main/binary-amd64/Packages"
    assert index.read_text() == lock.read_text()
    release = (tmp_path / "repository/dists/trixie/Release").read_text()
    assert hashlib.sha256(index.read_bytes()).hexdigest() in release
    # What is in the cache is not asked for again.
    monkeypatch.setenv("DEBIAN_MIRROR", "http://127.0.0.1:9")
    debian.repository(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "again")
    assert (tmp_path / "again" / entries[0]["Filename"]).exists()


def test_a_mirror_that_moved_on_is_an_error_with_both_versions(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index([package(folder)]))
    (folder / "pool/main/hello_1.0-1_all.deb").unlink()
    index = folder / "dists/trixie/main/binary-amd64/Packages.xz"
    index.parent.mkdir(parents=True)
    index.write_bytes(lzma.compress(debian.write_index([package(folder, version="1.0-2")]).encode()))
    monkeypatch.setenv("DEBIAN_MIRROR", address)
    with pytest.raises(BadInput) as refusal:
        debian.repository(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "repository")
    assert str(refusal.value) == (
        "hello: the lock has 1.0-1, the mirror offers 1.0-2: take the mirror's with `make lock`, or give one "
        "that still has it: DEBIAN_MIRROR=URL (a snapshot of the day of the lock, or a site's own)"
    )


def test_a_changed_package_is_refused_and_not_kept(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    entry = package(folder)
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index([entry]))
    (folder / entry["Filename"]).write_bytes(b"something else")
    monkeypatch.setenv("DEBIAN_MIRROR", address)
    with pytest.raises(BadInput) as refusal:
        debian.repository(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "repository")
    other = hashlib.sha256(b"something else").hexdigest()
    assert str(refusal.value) == (
        f"hello 1.0-1: the lock has SHA-256 {entry['SHA256']}, {address}/{entry['Filename']} gave {other}: "
        "the mirror's file is not the locked one: use another mirror"
    )
    assert list((tmp_path / "cache" / "debs").iterdir()) == []


def test_an_offline_directory_is_all_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = package(tmp_path / "mirror")
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index([entry]))
    monkeypatch.setenv("DEBIAN_MIRROR", "http://127.0.0.1:9")
    offline = tmp_path / "offline"
    offline.mkdir()
    with pytest.raises(BadInput) as refusal:
        debian.repository(BASE, "amd64", lock, tmp_path / "c", tmp_path / "r", offline=offline)
    assert str(refusal.value) == (
        f"OFFLINE={offline}: hello_1.0-1_all.deb is not there: fill the directory anew, with the APPTRAIN_CACHE "
        "of `make image-fetch` on a machine that has a network"
    )
    deb = tmp_path / "mirror" / entry["Filename"]
    for number, name in enumerate(("hello_1.0-1_all.deb", f"debs/{entry['SHA256']}.deb")):
        given = offline / name
        given.parent.mkdir(exist_ok=True)
        given.write_bytes(deb.read_bytes())
        cache, repository = tmp_path / f"c{number}", tmp_path / f"r{number}"
        debian.repository(BASE, "amd64", lock, cache, repository, offline=offline)
        assert (repository / entry["Filename"]).read_bytes() == b"hello 1.0-1"
        given.unlink()


def test_a_server_that_does_not_answer_is_69(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index([package(tmp_path / "mirror")]))
    monkeypatch.setenv("DEBIAN_MIRROR", "http://127.0.0.1:9")
    with pytest.raises(
        download.Unavailable, match=r"^hello 1\.0-1 could not be fetched in 3 tries: "
    ) as refusal:
        debian.repository(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "repository")
    assert refusal.value.status == 69


# --- digests from a registry ----------------------------------------------------------------------------------


@pytest.fixture
def a_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, dict[str, str], bytes]]]:
    """What it answers: path to status, headers and body. It wants the token `t`, which it gives to anybody."""
    answers: dict[str, tuple[int, dict[str, str], bytes]] = {}

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answers.get(self.path, (404, {}, b""))
            if self.path.startswith("/token?"):
                status, headers, body = 200, {}, b'{"token": "t"}'
            elif self.headers["Authorization"] != "Bearer t":
                challenge = f'Bearer realm="http://127.0.0.1:{server.server_port}/token",scope="pull"'
                status, headers, body = 401, {"WWW-Authenticate": challenge}, b""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("REGISTRY", f"127.0.0.1:{server.server_port}/proxy/")
        monkeypatch.setenv("APPTAINER_NOHTTPS", "true")
        yield answers
        server.shutdown()
        thread.join(10)


def test_a_tag_gives_a_digest_for_each_architecture(
    a_registry: dict[str, tuple[int, dict[str, str], bytes]],
) -> None:
    manifests = [
        {"digest": f"sha256:{name}", "platform": {"os": system, "architecture": name}}
        for system, name in (("windows", "amd64-no"), ("linux", "amd64"), ("linux", "arm64"))
    ]
    body = json.dumps({"manifests": manifests}).encode()
    a_registry["/v2/proxy/debian/manifests/trixie-slim"] = (200, {"Content-Type": registry.LISTS[0]}, body)
    both = {"amd64": "sha256:amd64", "arm64": "sha256:arm64"}
    assert registry.digests("debian:trixie-slim", ["amd64", "arm64"]) == both
    with pytest.raises(BadInput) as refusal:
        registry.digests("debian:trixie-slim", ["riscv64"])
    assert str(refusal.value) == (
        f"REGISTRY={registry.address()}: debian:trixie-slim is not there for riscv64, only for amd64, arm64"
    )


def test_a_registry_without_the_image_is_refused(
    a_registry: dict[str, tuple[int, dict[str, str], bytes]],
) -> None:
    assert a_registry == {}
    with pytest.raises(BadInput) as refusal:
        registry.digests("debian:trixie-slim", ["amd64"])
    assert str(refusal.value) == (
        f"REGISTRY={registry.address()}: it does not give debian:trixie-slim (404 Not Found)"
    )


# --- wheels ---------------------------------------------------------------------------------------------------


def test_a_changed_wheel_hash_is_an_error_that_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "probe-1.0-py3-none-any.whl").write_bytes(b"no zip at all")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"probe==1.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(BadInput) as refusal:
        wheels.fetch(lock, "3.13", "amd64", tmp_path / "cache", folder)
    assert str(refusal.value) == (
        "probe==1.0: the index's wheel does not have the hash that lock.txt has: the file was changed "
        "there or on the way: use another index (PIP_INDEX_URL), or `make lock` if you trust it"
    )


def test_a_wheel_that_is_gone_is_an_error_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "probe-2.0-py3-none-any.whl").write_bytes(b"newer")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"probe==1.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(BadInput) as refusal:
        wheels.fetch(lock, "3.13", "amd64", tmp_path / "cache", folder)
    assert str(refusal.value) == (
        "probe==1.0: locked in lock.txt, the index offers 2.0: take what it offers with `make lock`, "
        "or give an index that still has it: PIP_INDEX_URL=URL"
    )


def test_an_extra_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refusal:
        wheels.lock_extra(stacks.find(""), "amd64", tmp_path / "my.txt")
    assert str(refusal.value) == f"EXTRA={tmp_path}/my.txt: there is no such file: give a requirements file"


def test_an_extra_that_conflicts_with_the_stack_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stacks.find("")
    extra = tmp_path / "my.txt"
    extra.write_text("torch==2.6.0  # the old one\n")
    # The pins contradict each other, so no index has to be asked.
    monkeypatch.setenv("UV_OFFLINE", "1")
    with pytest.raises(BadInput) as refusal:
        wheels.lock_extra(stack, "amd64", extra)
    assert str(refusal.value) == (
        f"EXTRA={extra}: torch==2.6.0 does not go with torch=={stack.torch} of stack cu132: "
        "ask for what the stack has, or choose another with STACK=NAME"
    )
    assert list(tmp_path.iterdir()) == [extra]


# --- places ---------------------------------------------------------------------------------------------------

MOUNTS = (
    "20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
    "21 20 0:5 / /home rw,nosuid - nfs4 server:/home rw\n"
    "22 20 0:6 / /scratch rw,noexec - lustre fs rw\n"
    "23 20 0:7 / /local\\040disk rw - xfs /dev/sdb rw\n"
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/alice/x", ("/home", "nfs4", {"rw", "nosuid"})),
        ("/homes", ("/", "ext4", {"rw", "relatime"})),
        ("/scratch", ("/scratch", "lustre", {"rw", "noexec"})),
        ("/local disk/a", ("/local disk", "xfs", {"rw"})),
    ],
)
def test_a_path_is_on_the_mount_that_is_nearest_above_it(
    path: str, expected: tuple[str, str, set[str]]
) -> None:
    mount = preflight.Mount.of(Path(path), MOUNTS)
    assert (mount.point, mount.kind, set(mount.options)) == expected


NOTHING = {"image": 0, "work": 0, "download": 0}


def places(folder: Path) -> preflight.Places:
    for name in ("images", "tmp"):
        (folder / name).mkdir()
    return preflight.Places(folder / "images/image.sif", folder / "tmp", folder / "cache")


def test_enough_room_everywhere_passes_and_leaves_nothing(tmp_path: Path) -> None:
    preflight.check(places(tmp_path), {"image": 1, "work": 1, "download": 1})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("ext4", {"rw", "noexec"},
         "{tmp} is on /mnt, which is mounted noexec: nothing can be run there while the image is built: "
         "set APPTAINER_TMPDIR=DIR, best a local disk of the node"),
        ("lustre", {"rw"},
         "{tmp} is on /mnt, a network file system (lustre), on which a build without root cannot own files as "
         "it must: set APPTAINER_TMPDIR=DIR, best a local disk of the node"),
    ],
)  # fmt: skip
def test_a_temporary_directory_that_will_not_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: set[str], message: str
) -> None:
    where = places(tmp_path)
    found = preflight.Mount("/mnt", kind, frozenset(options))
    monkeypatch.setattr(preflight.Mount, "of", lambda *_: found)
    with pytest.raises(BadInput) as refusal:
        preflight.check(where, NOTHING)
    assert str(refusal.value) == message.format(tmp=where.temporary)


def test_too_little_room_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    where = places(tmp_path)
    with pytest.raises(BadInput) as refusal:
        preflight.check(where, {"image": 3000, "work": 10**9, "download": 0})
    assert re.sub(r"has [0-9.]+ GB", "has N GB", str(refusal.value)) == (
        f"{tmp_path}/images has N GB free, 1000003.0 GB are needed (target, temporary, cache): "
        "set IMAGE=FILE on a larger file system"
    )


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    where = places(tmp_path)
    where.temporary.rmdir()
    with pytest.raises(BadInput) as refusal:
        preflight.check(where, NOTHING)
    assert str(refusal.value) == (
        f"{where.temporary}: there is no such directory: make it, or set APPTAINER_TMPDIR=DIR, best a local "
        "disk of the node"
    )


# --- the builder ----------------------------------------------------------------------------------------------


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
        "image: neither apptainer nor singularity is on PATH: load it (module avail apptainer), "
        "or build on a node that has it\n"
    )


def test_an_old_apptainer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(tmp_path, "apptainer", "echo apptainer version 1.1.9")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main(["build"]) == 64
    assert capsys.readouterr().err == (
        f"image: {tmp_path}/apptainer is apptainer version 1.1.9: 1.2 or newer is needed\n"
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
    monkeypatch.setattr(builder, "_tool", lambda name: f"/usr/sbin/{name}")
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
        "base": "debootstrap",
    }
    assert {name: said[name] for name in expected} == expected
    bill = json.loads(found["image.cdx.json"])
    assert {part["name"] for part in bill["components"]} == {"libc6", "torch", "torchvision"}
    partition = expected["partition_sha256"]
    assert (
        f"image: {target} is ready: 0.00 GB in {said['seconds']} s, identity {partition[:12]}\n"
        in capsys.readouterr().out
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
    assert capsys.readouterr().err == f"image: {error}\n"
    assert beside(tmp_path / "images") == before


def test_a_base_from_a_registry_needs_a_digest_in_the_lock() -> None:
    with pytest.raises(BadInput) as refusal:
        builder.Builder("/usr/bin/apptainer", "1.4").base("docker", stacks.find(""), "amd64")
    assert str(refusal.value) == (
        "BASE=docker: stacks.yaml has no digest of debian:trixie-slim for amd64: "
        "run `make lock` with REGISTRY=HOST, or take BASE=debootstrap"
    )


@pytest.mark.parametrize(
    ("here", "in_lock", "made_by"),
    [(True, True, "debootstrap"), (True, False, "debootstrap"), (False, True, "docker")],
)
def test_a_base_is_made_by_what_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, here: bool, in_lock: bool, made_by: str
) -> None:
    monkeypatch.setattr(builder, "_tool", lambda name: f"/usr/sbin/{name}" if here else None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    stack = stacks.find("")
    digest: dict[str, str | None] = {"amd64": f"sha256:{64 * '0'}" if in_lock else None}
    stack = replace(stack, base=replace(stack.base, digest=digest))
    assert builder.Builder("/usr/bin/apptainer", "1.4").base("auto", stack, "amd64") == made_by


def test_without_apt_get_no_debian_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(debian, "KEYRING", Path("/dev/null"))  # it exists
    with pytest.raises(
        BadInput, match=r"^apt-get and /dev/null are needed to lock Debian's packages: run .make lock."
    ):
        debian.resolve(stacks.find("").base, "amd64")


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
    assert capsys.readouterr().err == f"image: {tmp_path}/image.sif: there is no such image: make image\n"


def test_the_build_runs_anywhere_with_a_python_that_knows_nothing_of_the_checkout(tmp_path: Path) -> None:
    # -S: the .pth files of a venv, which may name the checkout, are not read.
    command = [sys.executable, "-S", build.__file__, "inspect", "--image", "image.sif"]
    packages = {"PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(command, cwd=tmp_path, env=packages, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        64,
        f"image: {tmp_path}/image.sif: there is no such image: make image\n",
    )


def test_the_recipe_gets_a_value_for_each_of_its_arguments() -> None:
    arguments = build.recipe_arguments(stacks.find(""), "amd64")
    builder.check_recipe(arguments)
    assert f"libc6={dict(locked())['libc6']}" in arguments["PACKAGES"].split()
    del arguments["DATE"]
    with pytest.raises(BadInput, match="its arguments are"):
        builder.check_recipe(arguments)


def locked() -> list[tuple[str, str]]:
    return [(entry["Package"], entry["Version"]) for entry in debian.packages(stacks.debian_lock("amd64"))]


def test_the_recipe_names_no_mirror_and_no_index() -> None:
    addresses = re.findall(r"[a-z+]+:/\S*", builder.RECIPE.read_text())
    assert addresses == ['file://$APPTRAIN_WORK/debian"', "file:/mnt/debian"]


def test_what_the_build_binds_holds_our_packages_and_the_stacks_facts(tmp_path: Path) -> None:
    stack = stacks.find("")
    build.lay_out(tmp_path, stack, [stack.lock("amd64"), stacks.debian_lock("amd64")])
    said = json.loads((tmp_path / "stack.json").read_text())
    assert said["name"] == "cu132"
    assert said["driver"] == "580"
    assert said["others"]["cu126"]["compute_capability"] == stacks.find("cu126").compute_capability
    assert len(said["lock_sha256"]) == 64
    assert (tmp_path / "source/entrypoint/cli.py").exists()
    assert (tmp_path / "source/src/train/data/digits.csv.gz").exists()
    assert (tmp_path / "source/trim.sh").stat().st_mode & 0o777 == 0o755


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
