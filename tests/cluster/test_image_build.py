"""How an image is built, on a stack without torch (small.py), which takes a minute. Needs root, for the test hosts.

`make image` of an ordinary user who has set nothing: it changes nothing on its host, and nothing of the host changes it,
whether /tmp, where Apptainer works by default, is a folder of the root's file system, as on most machines, or a file
system of its own; whoever builds, and wherever the base comes from. And what is refused before a build begins.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from containers import debian, stacks
from tests.cluster import small
from tests.cluster.images import (
    BUILD_LIMIT,
    DOWNLOADS,
    HOME,
    IMAGE,
    OUT,
    TEMPORARY,
    VENV,
    WAIT_LIMIT,
    Built,
    builder,
    checkout_of,
    digest,
    kept,
    make,
    take,
)
from tests.cluster.images import INPUTS as SOURCES
from tests.host import Bind, Host
from tests.host.places import cache

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users"),
    pytest.mark.timeout(WAIT_LIMIT),
]
BOUND = 300.0  # s, for what takes some seconds
LINKS = Path("/scratch/links")
STACK = f"STACK={small.NAME}"
INPUTS = digest(*SOURCES, "tests/cluster/small.py", "tests/cluster/test_image_build.py")
OTHERS = """
cd "$1"
mkdir -p other/lib/python3/__pycache__ other/usr/lib/python3.13/__pycache__
echo kept >other/lib/python3/__pycache__/module.cpython-313.pyc
echo kept >other/usr/lib/python3.13/__pycache__/module.cpython-313.pyc
ln -s /tmp other/around
chmod 600 other/lib/python3/__pycache__/module.cpython-313.pyc
"""
"""What other programs of the user keep in such a directory: Python's caches, and a link that leads back."""
LISTING = """
import hashlib, os, sys
for top in sys.argv[1:]:
    for folder, folders, files in os.walk(top):
        for path in sorted(os.path.join(folder, name) for name in [*folders, *files]):
            at = os.lstat(path)
            text = open(path, "rb").read() if os.path.isfile(path) else b""
            print(path, oct(at.st_mode), at.st_uid, at.st_mtime_ns, hashlib.sha256(text).hexdigest())
"""
SHARED = ("/tmp", "/var/tmp", "/dev/shm")


def listing(host: Host) -> list[str]:
    """Every file below SHARED with its mode, owner, time and content."""
    ended = host.run(["python3", "-I", "-c", LISTING, *SHARED])
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


@contextmanager
def small_builder(name: str, out: Path, binds: Sequence[Bind] = (), *, online: bool = True) -> Iterator[Host]:
    """A builder whose checkout has the stack, on a host where other programs keep files in SHARED."""
    links = cache() / "images/.links"
    links.mkdir(parents=True, exist_ok=True)
    with builder(name, out, online=online, binds=[*binds, Bind(source=links, target=LINKS)]) as host:
        small.lay_out(checkout_of(name), links)
        yield host


def wheels_of(host: Host) -> dict[str, str]:
    """What the site sets, so that pip finds the stack's wheels."""
    return {"PIP_FIND_LINKS": f"{host.env.get('PIP_FIND_LINKS', '')} {LINKS}"}


def make_and_watch(host: Host, folder: Path, *words: str) -> None:
    """Makes in a checkout on a host where others keep files in SHARED; notes what was there before and after."""
    for place in SHARED:
        host.run(["bash", "-euc", OTHERS, "bash", place], user="alice").check_returncode()
    before = listing(host)
    status, said = make(host, *words, transcript=folder / "transcript.txt", env=wheels_of(host))
    (folder / "shared.json").write_text(json.dumps({"before": before, "after": listing(host)}))
    assert status == 0, said[-3000:]


def assert_nothing_was_changed(folder: Path) -> None:
    found = json.loads((folder / "shared.json").read_text())
    assert len(found["before"]) >= 8 * len(SHARED)
    assert found["after"] == found["before"]


@pytest.fixture(scope="module")
def first() -> Built:
    """The image that the others are compared with; on its host /tmp is a folder of the root's file system."""

    def build(folder: Path) -> None:
        with small_builder("build-small", folder) as host:
            assert (
                host.run(["findmnt", "--noheadings", "--target", "/tmp", "--output", "TARGET"]).stdout
                == "/\n"
            )
            make_and_watch(host, folder, "image", STACK)
            take(checkout_of("build-small"), folder)

    return Built(folder=kept("small", INPUTS, build))


# --- the same, and without a trace, wherever it is built -------------------------------------------------------


def test_with_nothing_set_it_is_built_in_the_hosts_tmp_and_leaves_all_there_as_it_was(first: Built) -> None:
    assert f"apptrain: temporary files in {TEMPORARY} (APPTAINER_TMPDIR)\n" in first.transcript
    assert f"apptrain: downloads in {DOWNLOADS} (APPTRAIN_CACHE)\n" in first.transcript
    assert "apptrain: selftest: small\n" in first.transcript
    assert_nothing_was_changed(first.folder)
    left = {path.name for path in first.folder.iterdir()}
    assert left == {"image.sif", "image.json", "image.cdx.json", "transcript.txt", "shared.json", "complete"}


def test_a_second_build_elsewhere_with_tmp_apart_is_identical(first: Built) -> None:
    """`make image-verify`: another path, umask and time, and another host."""

    def verify(folder: Path) -> None:
        shown = Bind(source=first.folder, target=IMAGE.parent)
        with small_builder("verify", folder, [shown]) as host:
            host.run(["mount", "-t", "tmpfs", "-o", "mode=1777,size=3g", "tmp", "/tmp"]).check_returncode()
            make_and_watch(host, folder, "image-verify", STACK, f"IMAGE={IMAGE}")

    again = Built(folder=kept("verify", INPUTS, verify))
    ours = [line for line in again.transcript.splitlines() if line.startswith("apptrain: ")]
    assert (
        ours[-1] == f"apptrain: the second build is identical, partition {first.said['partition_sha256']}"
    ), ours
    assert_nothing_was_changed(again.folder)


def test_a_user_without_subordinate_ids_and_network_builds_the_same(first: Built) -> None:
    """bob, on another host, from a copy of the downloads."""

    def build(folder: Path) -> None:
        copy = Bind(source=cache() / "images/.downloads", target=Path("/scratch/downloads"))
        with small_builder("bobs-host", folder, [copy], online=False) as host:
            line: list[str | Path] = [
                VENV / "bin/python",
                HOME / "containers/build.py",
                "build",
                "--stack",
                small.NAME,
            ]
            line += ["--offline", copy.target, "--image", OUT / "image.sif"]
            with (folder / "transcript.txt").open("w") as log:
                process = host.start(line, user="bob", stdout=log, stderr=log)
                assert process.wait(BUILD_LIMIT) == 0, (folder / "transcript.txt").read_text()[-3000:]

    same = Built(folder=kept("bob", INPUTS, build)).said
    assert same["partition_sha256"] == first.said["partition_sha256"]
    assert (same["build_host"], first.said["build_host"]) == ("bobs-host", "build-small")


GONE = """
cd /usr
rm -f bin/apt* bin/ar bin/dpkg* bin/fake* bin/mmdebstrap bin/perl* bin/wget sbin/debootstrap lib/*/libfakeroot/*
rm -r /etc/apt
! command -v apt ar debootstrap dpkg fakeroot perl wget
"""
"""Takes away what a Debian has, and most login nodes have not."""


def test_a_login_node_with_none_of_debians_tools_builds_the_same(first: Built) -> None:
    """bob, who has no subordinate ids either: all that he sets is a mirror."""

    def build(folder: Path) -> None:
        with small_builder("rhel", folder) as host:
            source = host.run(
                ["sed", "-n", r"s/^deb \(\[.*\] \)\?\([^ ]*\) .*/\2/p", "/etc/apt/sources.list"]
            ).stdout
            host.run(["bash", "-euc", GONE]).check_returncode()
            line: list[str | Path] = [
                VENV / "bin/python",
                HOME / "containers/build.py",
                "build",
                "--stack",
                small.NAME,
            ]
            line += ["--image", OUT / "image.sif"]
            env = {**wheels_of(host), "DEBIAN_MIRROR": source.split()[0], "APPTRAIN_CACHE": "/scratch/bob"}
            with (folder / "transcript.txt").open("w") as log:
                process = host.start(line, user="bob", env=env, stdout=log, stderr=log)
                assert process.wait(BUILD_LIMIT) == 0, (folder / "transcript.txt").read_text()[-3000:]

    made = Built(folder=kept("rhel", INPUTS, build)).said
    assert made["partition_sha256"] == first.said["partition_sha256"]
    assert set(made["python_packages"]) == {"apptrain", "setuptools", "torch", "torchvision"}
    locked = debian.packages(stacks.debian_lock("amd64"))
    assert made["debian_packages"] == {entry["Package"]: entry["Version"] for entry in locked}


OLDER = """
mv /usr/bin/apptainer /usr/bin/apptainer.newer
cat >/usr/bin/apptainer <<'END'
#!/bin/sh
case "$*" in
    --version) echo "apptainer version 1.2.5" ;;
    *--mksquashfs-args*) echo "Error for command \\"build\\": unknown flag: --mksquashfs-args" >&2; exit 1 ;;
    *) exec /usr/bin/apptainer.newer "$@" ;;
esac
END
chmod 755 /usr/bin/apptainer
"""
"""Debian has the newest Apptainer alone: this one refuses what 1.2 and 1.3 do not have, as their source says."""


def test_an_apptainer_that_cannot_be_told_how_to_pack_builds_the_same(first: Built) -> None:
    def build(folder: Path) -> None:
        with small_builder("older", folder) as host:
            host.run(["bash", "-euc", OLDER]).check_returncode()
            image = (STACK, f"IMAGE={OUT}/image.sif")
            status, said = make(
                host, "image", *image, transcript=folder / "transcript.txt", env=wheels_of(host)
            )
            assert status == 0, said[-3000:]

    made = Built(folder=kept("older", INPUTS, build)).said
    assert made["builder"] == "apptainer version 1.2.5"
    assert made["partition_sha256"] == first.said["partition_sha256"]


def test_extra_packages_get_a_lock_and_leave_the_stack_alone(first: Built) -> None:
    """One of them needs torch, of any version; the other comes from PyPI."""

    def build(folder: Path) -> None:
        with small_builder("extra", folder) as host:
            host.run(["tee", HOME / "mine.txt"], input="needs-torch\neinops\n", user="alice")
            words = (STACK, "EXTRA=mine.txt", f"IMAGE={OUT}/image.sif")
            log = folder / "transcript.txt"
            env = {**wheels_of(host), "UV_FIND_LINKS": str(LINKS)}
            status, said = make(host, "image", *words, transcript=log, env=env)
            assert status == 0, said[-3000:]
            (checkout_of("extra") / f"mine.{small.NAME}-amd64.lock").rename(folder / "mine.lock")

    made = Built(folder=kept("extra", INPUTS, build))
    found, stack = made.said["python_packages"], first.said["python_packages"]
    assert {name: version for name, version in found.items() if name not in stack} == {
        "needs-torch": "1.0",
        "einops": found["einops"],
    }
    assert {name: found[name] for name in stack} == stack
    lock = (made.folder / "mine.lock").read_text()
    assert "needs-torch==1.0 " in lock
    assert "--hash=sha256:" in lock


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(first: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host where nothing is built to the end, with the tools and downloads of the first build."""
    assert first.image.exists()
    out = tmp_path_factory.mktemp("out")
    out.chmod(0o777)
    with small_builder("refusals", out) as host:
        yield host


def refused(host: Host, *words: str, user: str = "alice", **env: str) -> str:
    """The one line of a build that says no, before it has begun."""
    line: list[str | Path] = [VENV / "bin/python", HOME / "containers/build.py", *words]
    ended = host.run(line, user=user, cwd=HOME, env=env, timeout=BOUND)
    assert ended.returncode == 64, ended.stdout + ended.stderr
    assert not host.run(["find", OUT, "-name", "*.sif*"]).stdout
    return ended.stderr.splitlines()[-1]


def test_extra_packages_that_do_not_go_with_the_stack_are_refused(host: Host) -> None:
    host.run(["tee", HOME / "old.txt"], input="einops\ntorch<2.10\n", user="alice")
    assert refused(host, "build", "--extra", "old.txt", "--image", f"{OUT}/x.sif") == (
        f"apptrain: EXTRA={HOME}/old.txt: torch<2.10 does not go with torch==2.15.0 of stack cu132: ask for what "
        "the stack has, or choose another with STACK=NAME"
    )


def test_a_wheel_that_is_not_the_locked_one_is_refused(host: Host) -> None:
    lock = HOME / "containers/locks/cu132-amd64.txt"
    before = host.run(["cat", lock]).stdout
    # The one package, so that not all are fetched again.
    block = re.search(r"^(absl-py==\S+) \\\n(?: +--hash=sha256:\w+(?: \\)?\n)+", before, re.MULTILINE)
    assert block
    host.run(["tee", lock], input=re.sub("sha256:....", "sha256:0000", block[0]), user="alice")
    try:
        said = refused(host, "build", "--image", f"{OUT}/x.sif")
    finally:
        host.run(["tee", lock], input=before, user="alice")
    assert said == (
        f"apptrain: {block[1]}: the index's wheel does not have the hash that cu132-amd64.txt has: the file was "
        "changed there or on the way: use another index (PIP_INDEX_URL), or `make lock` if you trust it"
    )


def test_places_that_will_not_do_are_refused(host: Host) -> None:
    small, noexec = Path("/scratch/small"), Path("/scratch/noexec")
    for place, options in ((small, "size=64m,mode=1777"), (noexec, "noexec,mode=1777")):
        host.run(["mkdir", place])
        assert host.run(["mount", "-t", "tmpfs", "-o", options, "t", place]).returncode == 0
    image = ["--image", f"{OUT}/x.sif"]
    assert refused(host, "build", *image, APPTAINER_TMPDIR=str(noexec)) == (
        f"apptrain: {noexec} is on {noexec}, which is mounted noexec: nothing can be run there while the image is "
        "built: set APPTAINER_TMPDIR=DIR, best a local disk of the node"
    )
    assert refused(host, "build", *image, APPTAINER_TMPDIR=str(small)) == (
        f"apptrain: {small} has 0.1 GB free, 9.5 GB are needed (temporary): "
        "set APPTAINER_TMPDIR=DIR, best a local disk of the node"
    )
    assert refused(host, "build", "--image", f"{small}/x.sif") == (
        f"apptrain: {small} has 0.1 GB free, 3.1 GB are needed (target): set IMAGE=FILE on a larger file system"
    )


def test_a_machine_without_the_tools_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with builder("bare", tmp_path) as host:
        status, said = make(host, "venv-image")
        assert status == 0, said
        image = ["build", "--image", f"{OUT}/x.sif"]
        host.run(["bash", "-euc", GONE]).check_returncode()
        assert refused(host, *image, APPTRAIN_CACHE="/scratch/nothing-yet") == (
            "apptrain: no Debian mirror is known here: give one near you, DEBIAN_MIRROR=URL (Debian's web site lists its "
            "mirrors; a site may have its own), or take an image that exists: apptainer pull FILE.sif docker://NAME, "
            "then APPTRAIN_IMAGE=FILE.sif"
        )
        host.run(["bash", "-euc", OLDER + "rm /usr/bin/mksquashfs"]).check_returncode()
        assert refused(host, *image) == (
            "apptrain: /usr/bin/apptainer is apptainer version 1.2.5, which packs an image with the mksquashfs of PATH, and "
            "there is none: add its folder to PATH (package squashfs-tools), or load Apptainer 1.4 or newer"
        )
        host.run(["rm", "/usr/bin/apptainer", "/usr/bin/singularity"])
        assert refused(host, *image) == (
            "apptrain: neither apptainer nor singularity is on PATH: load it (module avail apptainer), "
            "or build on a node that has it"
        )


def test_a_build_that_fails_keeps_the_image_of_before(host: Host) -> None:
    host.run(["bash", "-c", f"echo before >{OUT}/x.sif; chown alice {OUT}/x.sif"])
    recipe = HOME / "containers/apptrain.def"
    before = host.run(["cat", recipe]).stdout
    broken = before.replace('    say "Debian packages"\n', "    exit 3\n", 1)
    assert broken != before
    host.run(["tee", recipe], input=broken, user="alice")
    try:
        status, said = make(host, "image", STACK, f"IMAGE={OUT}/x.sif", env=wheels_of(host))
    finally:
        host.run(["tee", recipe], input=before, user="alice")
    assert status == 2
    assert "apptrain: the build failed; the reason stands above. The image of before is untouched" in said
    assert host.run(["cat", OUT / "x.sif"]).stdout == "before\n"
    assert host.run(["ls", "-A", OUT, TEMPORARY]).stdout.split() == [f"{OUT}:", "x.sif", f"{TEMPORARY}:"]
    host.run(["rm", OUT / "x.sif"])
