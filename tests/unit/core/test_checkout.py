"""The checkout: how it is called from here, and how other processes find our packages."""

import sys
from pathlib import Path

import pytest

from entrypoint.core import checkout

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a blank in its path, and a PATH with nothing."""
    folder = tmp_path / "check out"
    folder.mkdir()
    for name in ("Makefile", "apptrain"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr(checkout, "HOME", folder)
    monkeypatch.setenv("PATH", "")
    return folder


def test_a_command_is_shown_as_it_works_in_the_current_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    assert (checkout.make("image"), checkout.apptrain()) == ("make image", "./apptrain")
    monkeypatch.chdir(home.parent)
    assert (checkout.make("image"), checkout.apptrain()) == (f"make -C '{home}' image", f"'{home}/apptrain'")


def test_outside_of_a_checkout_a_command_is_its_bare_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image, which has the packages alone."""
    for name in ("Makefile", "apptrain"):
        (home / name).unlink()
    for folder in (home, home.parent):
        monkeypatch.chdir(folder)
        assert (checkout.make("image"), checkout.apptrain()) == ("make image", "apptrain")


def test_an_apptrain_that_is_in_path_is_called_by_its_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home))
    for folder in (home, home.parent):
        monkeypatch.chdir(folder)
        assert checkout.apptrain() == "apptrain"


@pytest.mark.parametrize("given", ["", "/elsewhere"])
def test_packages_that_are_installed_are_not_put_in_front(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, home = f"{CHECKOUT}/src", str(CHECKOUT)
    for path, expected in (
        ([src, home, "/lib"], ":".join(filter(None, [f"{CHECKOUT}/host/packages", given]))),
        ([src, home, "/lib", src, home], given),  # by tools/venv.sh
        (["/lib", "/dist-packages"], given),
    ):
        monkeypatch.setattr(sys, "path", path)
        assert checkout.python_path(given) == expected
    assert {path.name for path in checkout.PACKAGES.iterdir()} == {"entrypoint", "train"}
    assert (checkout.PACKAGES / "train/stop.py").samefile(CHECKOUT / "src/train/stop.py")


def test_an_image_that_is_not_ours_gets_our_packages_for_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its PYTHONPATH, which passes to no node, names the folder that has them."""
    monkeypatch.setattr(sys, "path", ["/shown", "/lib"])
    monkeypatch.setattr(checkout, "HOME", Path("/shown"))
    monkeypatch.setattr(checkout, "PACKAGES", Path("/shown/host/packages"))
    for whole, given, expected in (
        ("/shown", "", "/shown"),
        ("/shown:/more", "/more", "/shown:/more"),
        ("/shown/", "", "/shown"),
        ("/usr/../shown", "", "/shown"),
        ("/shown", "/shown", "/shown"),
        ("/elsewhere", "", ""),
        ("", "", ""),
    ):
        monkeypatch.setenv("PYTHONPATH", whole)
        assert checkout.python_path(given) == expected
