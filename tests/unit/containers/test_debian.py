"""Debian's packages: their lock, and how they are fetched."""

import errno
import functools
import hashlib
import http.server
import lzma
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from containers import debian, download, stacks, unpack
from containers.stacks import BuildRefused

BASE = stacks.find("").base


@contextmanager
def serving(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A directory and the address under which it is served on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with serving(functools.partial(Quiet, directory=str(folder))) as address:
        yield folder, address


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


def test_the_locked_packages_are_laid_out_with_those_that_come_before_dpkg(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    entries = [package(folder, name) for name in ("base-files", "bash", "hello")]
    for entry in entries[:2]:
        entry["Priority"] = "required"
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index(entries))
    monkeypatch.setenv("DEBIAN_MIRROR", address + "/")
    debian.lay_out(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "debian")
    for entry in entries:
        name = Path(entry["Filename"]).name
        assert (tmp_path / "debian" / name).read_bytes() == (folder / entry["Filename"]).read_bytes()
    assert (tmp_path / "debian" / debian.LISTED).read_text() == "base-files\nbash\nhello\n"
    assert (tmp_path / "debian" / unpack.SEED).read_text() == "base-files_1.0-1_all.deb\nbash_1.0-1_all.deb\n"
    # What is in the cache is not asked for again.
    monkeypatch.setenv("DEBIAN_MIRROR", "http://127.0.0.1:9")
    debian.lay_out(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "again")
    assert (tmp_path / "again" / "hello_1.0-1_all.deb").exists()


def test_what_the_mirror_has_dropped_comes_from_the_second_one(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    entries = [package(folder / "old", name) for name in ("bash", "hello", "world")]
    package(folder / "new", "bash")
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index(entries))
    monkeypatch.setenv("DEBIAN_MIRROR", f"{address}/new")
    monkeypatch.setenv("DEBIAN_SNAPSHOT", f"{address}/old/")
    debian.lay_out(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "debian")
    assert (tmp_path / "debian" / "world_1.0-1_all.deb").read_text() == "world 1.0-1"


def test_the_packages_that_come_first_are_those_that_are_required_and_what_they_depend_on() -> None:
    index = """
Package: base-files
Essential: yes
Pre-Depends: awk

Package: mawk
Provides: awk, other
Depends: libc6 (>= 2.41)

Package: libc6
Depends: gone | libgcc-s1 (>= 1)

Package: libgcc-s1

Package: dpkg
Priority: required
Depends: tar:any (>= 1), python3 | mawk

Package: tar

Package: python3

Package: gcc
Depends: libc6
"""
    found = debian.seed(debian.read_index(index))
    assert found == {"base-files", "mawk", "libc6", "libgcc-s1", "dpkg", "tar", "python3"}


@pytest.mark.parametrize(
    "text",
    [
        "deb-src http://no/debian trixie main\n# deb http://no/debian trixie main\ndeb [signed-by=/k] http://m/debian/ trixie main\n",
        "Types: deb\nURIs: http://no/debian-security http://m/debian\nSuites: trixie\n",
    ],
)
def test_the_mirror_is_that_of_the_machines_apt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.delenv("DEBIAN_MIRROR", raising=False)
    monkeypatch.setattr(debian, "APT", tmp_path)
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "debian.sources").write_text(text)
    assert debian.mirror() == "http://m/debian"


def test_without_a_mirror_the_way_to_give_one_and_the_other_road_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DEBIAN_MIRROR", raising=False)
    monkeypatch.setattr(debian, "APT", Path("/nowhere"))
    with pytest.raises(BuildRefused) as refusal:
        debian.mirror()
    assert str(refusal.value) == (
        "no Debian mirror is known here: give one near you, DEBIAN_MIRROR=URL (Debian's web site lists its mirrors; "
        "a site may have its own), or take an image that exists: apptainer pull FILE.sif docker://NAME, then "
        "APPTRAIN_IMAGE=FILE.sif"
    )


def locked_and_gone(tmp_path: Path, folder: Path) -> tuple[Path, Path]:
    """The lock of a package that the mirror no longer has, and where the mirror's index is to be."""
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index([package(folder)]))
    (folder / "pool/main/hello_1.0-1_all.deb").unlink()
    index = folder / "dists/trixie/main/binary-amd64/Packages.xz"
    index.parent.mkdir(parents=True)
    return lock, index


def test_a_mirror_that_moved_on_is_an_error_with_both_versions(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    lock, index = locked_and_gone(tmp_path, folder)
    index.write_bytes(lzma.compress(debian.write_index([package(folder, version="1.0-2")]).encode()))
    monkeypatch.setenv("DEBIAN_MIRROR", address)
    with pytest.raises(BuildRefused) as refusal:
        debian.lay_out(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "repository")
    assert str(refusal.value) == (
        "hello: the lock has 1.0-1, the mirror offers 1.0-2: give a second mirror that still has it, "
        "DEBIAN_SNAPSHOT=URL (a snapshot of the day of the lock, or a site's own), or take the mirror's with `make lock`"
    )


def test_a_mirror_whose_index_is_none_offers_none(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    lock, index = locked_and_gone(tmp_path, folder)
    index.write_text("<html>log in</html>")
    monkeypatch.setenv("DEBIAN_MIRROR", address)
    with pytest.raises(BuildRefused, match=r"^hello: the lock has 1.0-1, the mirror offers none: "):
        debian.lay_out(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "repository")


@pytest.mark.parametrize("name", ["DEBIAN_MIRROR", "DEBIAN_SNAPSHOT"])
@pytest.mark.parametrize("given", ["mirror.example/debian", "ftp://m/debian", "file:///srv/debian"])
def test_a_mirror_that_is_no_address_of_the_web_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, given: str
) -> None:
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index([package(tmp_path)]))
    monkeypatch.setenv("DEBIAN_MIRROR", "http://127.0.0.1:1/debian")
    monkeypatch.setenv(name, given)
    with pytest.raises(BuildRefused) as refusal:
        debian.lay_out(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "repository")
    assert str(refusal.value) == f"{name}={given}: give an address that begins with http:// or https://"


def test_a_cache_that_fills_up_is_named_with_what_to_set(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index([package(folder)]))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("DEBIAN_MIRROR", address)
    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(download.NoAnswer) as refusal:
        download.fetch("x", [download.Download(urls=[f"{address}/pool/main/hello_1.0-1_all.deb"], path=tmp_path / "cache/x", size=1, sha256="", name="hello 1.0-1", missing=str)])  # fmt: skip
    assert str(refusal.value) == (
        f"hello 1.0-1 cannot be written to {tmp_path}/cache: No space left on device: make room there, or set "
        "APPTRAIN_CACHE=DIR"
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
    with pytest.raises(BuildRefused) as refusal:
        debian.lay_out(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "repository")
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
    (offline / "hello_1.0-1_all.deb").symlink_to("nowhere")
    with pytest.raises(BuildRefused) as refusal:
        debian.lay_out(BASE, "amd64", lock, tmp_path / "c", tmp_path / "r", offline=offline)
    (offline / "hello_1.0-1_all.deb").unlink()
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
        debian.lay_out(BASE, "amd64", lock, cache, repository, offline=offline)
        assert (repository / "hello_1.0-1_all.deb").read_bytes() == b"hello 1.0-1"
        given.unlink()


def test_a_copy_that_was_cut_is_not_taken_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offline directory lies on another file system, and the disk is full."""
    entry = package(tmp_path / "mirror")
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index([entry]))
    copy = shutil.copyfile

    def link(*_: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def cut(origin: Path, target: Path) -> None:
        target.write_bytes(origin.read_bytes()[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(shutil, "copyfile", cut)
    cache, repository = tmp_path / "cache", tmp_path / "repository"
    with pytest.raises(OSError, match="No space left on device"):
        debian.lay_out(BASE, "amd64", lock, cache, repository, offline=tmp_path / "mirror")
    assert list((cache / "debs").iterdir()) == []
    monkeypatch.setattr(shutil, "copyfile", copy)
    debian.lay_out(BASE, "amd64", lock, cache, repository, offline=tmp_path / "mirror")
    (kept,) = (cache / "debs").iterdir()
    assert kept.read_bytes() == b"hello 1.0-1"


def test_a_server_that_does_not_answer_is_69(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    lock.write_text(debian.write_index([package(tmp_path / "mirror")]))
    monkeypatch.setenv("DEBIAN_MIRROR", "http://127.0.0.1:9")
    with pytest.raises(
        download.NoAnswer, match=r"^hello 1\.0-1 could not be fetched in 3 tries: "
    ) as refusal:
        debian.lay_out(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "repository")
    assert refusal.value.status == 69


@pytest.mark.parametrize("trouble", ["busy", "cut"])
def test_what_fails_for_a_while_is_tried_again(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = package(tmp_path / "mirror")
    content = (tmp_path / "mirror" / entry["Filename"]).read_bytes()
    asked: list[str] = []

    class Flaky(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            is_well = len(asked) == download.TRIES
            self.send_response(503 if trouble == "busy" and not is_well else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content if is_well else content[: -1 if trouble == "cut" else None])

        def log_message(self, *_: object) -> None:
            pass

    lock = tmp_path / "lock"
    lock.write_text(debian.write_index([entry]))
    with serving(Flaky) as address:
        monkeypatch.setenv("DEBIAN_MIRROR", address)
        debian.lay_out(BASE, "amd64", lock, tmp_path / "cache", tmp_path / "repository")
    assert asked == [f"/{entry['Filename']}"] * download.TRIES
    assert [path.name for path in (tmp_path / "cache" / "debs").iterdir()] == [f"{entry['SHA256']}.deb"]


def test_without_apt_get_no_debian_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(debian, "KEYRING", Path("/dev/null"))  # it exists
    with pytest.raises(
        BuildRefused, match=r"^apt-get and /dev/null are needed to lock Debian's packages: run .make lock."
    ):
        debian.resolve(stacks.find("").base, "amd64")


PACKED = {"Priority": "required", "Architecture": "amd64", "Version": "1", "Description": "left out"}


def test_the_lock_has_the_packages_that_apt_would_fetch_and_no_field_that_nobody_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """apt-get and apt-helper answer here as they do on a Debian."""
    entries = {name: {"Package": name, **PACKED} for name in ("dash", "libc6", "torque")}
    del entries["torque"]["Priority"]
    text = "\n".join("".join(f"{k}: {v}\n" for k, v in one.items()) for one in entries.values())
    asked = []

    def answers(command: list[str], *, text: bool, **_: object) -> subprocess.CompletedProcess[Any]:
        root = next((Path(word[4:]) for word in command if word.startswith("Dir=")), Path())
        words = [word for word in command[1:] if "=" not in word and word not in ("-o", "-qq")]
        asked.append([Path(command[0]).name, *words])
        said = ""
        if words[0] == "update":
            (root / "var/lib/apt/lists/mirror_main_binary-amd64_Packages.lz4").touch()
        elif words[0] == "cat-file":
            said = index
            asked[-1][-1] = "FILE"
        else:
            said = "".join(
                f"'http://mirror/{name}.deb' {name}_1_amd64.deb 9 SHA256:aa\n" for name in ("libc6", "dash")
            )
        return subprocess.CompletedProcess(command, 0, said if text else said.encode(), "")

    index = text
    monkeypatch.setenv("DEBIAN_MIRROR", "http://mirror")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(debian, "KEYRING", Path("/dev/null"))  # it exists
    monkeypatch.setattr(subprocess, "run", answers)
    base = replace(BASE, packages=["python3"])
    lines = ["Architecture: amd64", "Priority: required"]
    assert debian.resolve(base, "amd64") == "\n".join(
        f"Package: {name}\nVersion: 1\n" + "".join(f"{line}\n" for line in lines)
        for name in ("dash", "libc6")
    )
    assert asked == [
        ["apt-get", "update"],
        ["apt-helper", "cat-file", "FILE"],
        ["apt-get", "install", "--print-uris", "apt", "dash", "libc6", "python3", "fakeroot", "libfakeroot"],
    ]
