"""Where an image is built: room, and file systems that do not do."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from containers import preflight
from containers.stacks import BuildRefused

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
    with pytest.raises(BuildRefused) as refusal:
        preflight.check(where, NOTHING)
    assert str(refusal.value) == message.format(tmp=where.temporary)


def test_too_little_room_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    where = places(tmp_path)
    with pytest.raises(BuildRefused) as refusal:
        preflight.check(where, {"image": 3000, "work": 10**9, "download": 0})
    assert re.sub(r"has [0-9.]+ GB", "has N GB", str(refusal.value)) == (
        f"{tmp_path}/images has N GB free, 1000003.0 GB are needed (target, temporary, cache): "
        "set IMAGE=FILE on a larger file system"
    )


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    where = places(tmp_path)
    where.temporary.rmdir()
    with pytest.raises(BuildRefused) as refusal:
        preflight.check(where, NOTHING)
    assert str(refusal.value) == (
        f"{where.temporary}: there is no such directory: make it, or set APPTAINER_TMPDIR=DIR, best a local "
        "disk of the node"
    )


@pytest.mark.parametrize(
    ("env", "temporary", "cache"),
    [
        ({}, "/tmp", "{home}/.cache/apptrain"),
        ({"TMPDIR": "/var/tmp"}, "/var/tmp", "{home}/.cache/apptrain"),
        ({"TMPDIR": "/var/tmp", "APPTAINER_TMPDIR": "/opt"}, "/opt", "{home}/.cache/apptrain"),
        ({"XDG_CACHE_HOME": "/x"}, "/tmp", "/x/apptrain"),
        ({"XDG_CACHE_HOME": "/x", "APPTRAIN_CACHE": "mine"}, "/tmp", "{here}/mine"),
    ],
)
def test_the_places_of_a_build_are_those_of_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], temporary: str, cache: str
) -> None:
    for name in ("TMPDIR", "APPTAINER_TMPDIR", "XDG_CACHE_HOME", "APPTRAIN_CACHE"):
        monkeypatch.setenv(name, env.get(name, ""))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    found = preflight.Places.of(Path("image.sif"))
    expected = cache.format(home=tmp_path / "home", here=tmp_path)
    assert (str(found.target), str(found.temporary), str(found.cache)) == ("image.sif", temporary, expected)


def test_of_mounts_at_one_point_the_last_counts_and_above_none_it_is_unknown() -> None:
    again = MOUNTS + "24 20 0:8 / /home ro - xfs /dev/sdc rw\n"
    assert preflight.Mount.of(Path("/home/x"), again).kind == "xfs"
    assert preflight.Mount.of(Path("/home/x"), "") == preflight.Mount("", "unknown", frozenset())
    assert preflight.Mount.of(Path("/proc")).kind == "proc"


def test_the_cache_is_made_for_its_owner_alone_and_may_be_there(tmp_path: Path) -> None:
    where = places(tmp_path)
    where = preflight.Places(where.target, where.temporary, tmp_path / "new/cache")
    for _ in range(2):
        preflight.check(where, NOTHING)
    assert oct(where.cache.stat().st_mode & 0o777) == "0o700"


def test_a_cache_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    where = places(tmp_path)
    (tmp_path / "cache").touch()
    with pytest.raises(BuildRefused) as refusal:
        preflight.check(where, NOTHING)
    assert str(refusal.value) == f"{where.cache}: File exists: set APPTRAIN_CACHE=DIR"


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (6_000_000, ""),
        (
            5_999_999,
            "has 0.0 GB free, 0.0 GB are needed (target, temporary, cache): set IMAGE=FILE on a larger file system",
        ),
    ],
)
def test_room_is_needed_for_all_that_is_on_one_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, said: str
) -> None:
    where = places(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    monkeypatch.setattr(preflight, "check_quota", lambda *_: None)
    needs = {"image": 1, "work": 2, "download": 3}
    if not said:
        preflight.check(where, needs)
        return
    with pytest.raises(BuildRefused) as refusal:
        preflight.check(where, needs)
    assert str(refusal.value) == f"{tmp_path}/images {said}"


def test_a_quota_is_looked_for_at_each_place_with_what_that_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, asked = places(tmp_path), list[tuple[Path, str, int]]()
    monkeypatch.setattr(preflight, "check_quota", lambda *call: asked.append(call))
    preflight.check(where, {"image": 1, "work": 2, "download": 3})
    assert asked == [
        (tmp_path / "images", "target", 1),
        (where.temporary, "temporary", 2),
        (where.cache, "cache", 3),
    ]


@pytest.mark.parametrize(
    ("script", "megabytes", "said"),
    [
        ("echo 'fallocate failed: Disk quota exceeded' >&2; exit 1", 1500, "1.5 GB are needed and cannot be had: fallocate failed: Disk quota exceeded: see your quota, or set APPTRAIN_CACHE=DIR"),
        ("echo 'fallocate failed: No space left on device' >&2; exit 1", 1500, "1.5 GB are needed and cannot be had: fallocate failed: No space left on device: see your quota, or set APPTRAIN_CACHE=DIR"),
        ("echo 'fallocate failed: Operation not supported' >&2; exit 1", 1500, ""),
        ("echo 'a word about your quota' >&2", 1500, ""),
        ("echo 'Disk quota exceeded' >&2; exit 1", 0, ""),
        ('[ "$LC_ALL $1 $2" = "C -l 3MB" ] || { echo quota >&2; exit 1; }', 3, ""),
        (None, 1500, ""),
    ],
)  # fmt: skip
def test_a_quota_is_found_by_reserving_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, megabytes: int, said: str
) -> None:
    folder = tmp_path / "place"
    folder.mkdir()
    if script is not None:
        (tmp_path / "fallocate").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "fallocate").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if said:
        with pytest.raises(BuildRefused) as refusal:
            preflight.check_quota(folder, "cache", megabytes)
        assert str(refusal.value) == f"{folder}: {said}"
    else:
        preflight.check_quota(folder, "cache", megabytes)
    assert list(folder.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK | os.X_OK)
    with pytest.raises(BuildRefused) as refusal:
        preflight.check_quota(tmp_path, "temporary", 1)
    assert str(refusal.value) == (
        f"{tmp_path} is not writable: set APPTAINER_TMPDIR=DIR, best a local disk of the node"
    )
