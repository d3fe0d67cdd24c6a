"""An image on Lustre is striped by the build, and the doctor says if it is not. `lfs` is a stand-in."""

import os
from pathlib import Path

import pytest

from containers import lustre
from containers.preflight import Mount

LFS = """#!/bin/sh
echo "$*" >>"{calls}"
case $1 in
    getstripe) echo {stripes} ;;
    setstripe) if [ -n "{error}" ]; then printf "{error}" >&2; exit 22; fi ;;
esac
"""


class Lustre:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.image = folder / "containers/image.sif"
        self.image.parent.mkdir()
        self.calls = folder / "calls"
        self.patch = patch
        patch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        self.has("lustre")

    def has(self, kind: str) -> None:
        self.patch.setattr(Mount, "of", lambda _: Mount("/work", kind, frozenset()))

    def lfs(self, stripes: str = "1", error: str = "") -> None:
        (self.folder / "bin").mkdir()
        program = self.folder / "bin/lfs"
        program.write_text(LFS.format(calls=self.calls, stripes=stripes, error=error))
        program.chmod(0o755)

    def asked(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lustre:
    return Lustre(tmp_path, monkeypatch)


def test_a_build_writes_into_a_folder_beside_the_image_that_is_striped(site: Lustre) -> None:
    site.lfs()
    with lustre.striped_folder(site.image) as folder:
        assert folder.parent == site.image.parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert site.asked() == [f"setstripe -c 8 {folder}"]
        (folder / "part.sif").write_text("image")
        (folder / "part.sif").replace(site.image)
    assert list(site.image.parent.iterdir()) == [site.image]


@pytest.mark.parametrize("kind", ["nfs4", "ext4", "unknown"])
def test_elsewhere_nothing_is_striped_and_nothing_said(
    site: Lustre, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    site.lfs()
    site.has(kind)
    with lustre.striped_folder(site.image) as folder:
        assert folder == site.image.parent
    assert lustre.finding(site.image) is None
    assert (site.asked(), capsys.readouterr().out) == ([], "")


def test_without_lfs_neither(site: Lustre) -> None:
    with lustre.striped_folder(site.image) as folder:
        assert folder == site.image.parent
    assert lustre.finding(site.image) is None


@pytest.mark.parametrize(
    ("error", "said"),
    [("error on ioctl:\\nPermission denied", "error on ioctl: Permission denied"), ("\\n", "status 22")],
)
def test_if_lfs_refuses_the_build_goes_on_and_says_so(
    site: Lustre, capsys: pytest.CaptureFixture[str], error: str, said: str
) -> None:
    site.lfs(error=error)
    with lustre.striped_folder(site.image) as folder:
        assert folder.is_dir()
    assert capsys.readouterr().out == (
        f"apptrain: {site.image.parent} is on Lustre, but the image is not striped: lfs says: {said}\n"
    )


def test_the_doctor_says_if_an_image_is_on_one_disk(site: Lustre) -> None:
    site.lfs(stripes="1")
    assert lustre.finding(site.image) == (
        f"the image {site.image} is on one of Lustre's disks, from which all nodes read it",
        "lfs migrate -c 8 IMAGE, or build it again: a build stripes it",
    )
    assert site.asked() == [f"getstripe -c {site.image}"]


def test_it_says_nothing_of_one_that_is_striped(site: Lustre) -> None:
    site.lfs(stripes="8")
    assert lustre.finding(site.image) is None
