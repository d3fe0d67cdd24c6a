"""Where an image is built: room, and file systems that do not do."""

import re
from pathlib import Path

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
