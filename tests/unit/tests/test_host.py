"""The parts of the test host that need neither root nor Apptainer; tests/cluster/test_host.py has the rest."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import images
from tests.host import Refused, root, site
from tests.host.places import locked

Stub = Callable[[str, str], None]
INDEXES = """\
Other:Debian:http://other.example/debian/
Debian:Debian-Security:http://security.example/
Debian:Debian:http://mirror.example/debian/
Debian:Debian:http://second.example/debian/
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Puts a shell script before all programs of that name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def write(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return write


@pytest.fixture
def machine(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with apt and an mmdebstrap that notes its arguments and makes one file; returns the cache."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("APPTRAIN_TEST_CACHE", str(tmp_path / "cache"))
    stub("apt-get", f"cat <<'END'\n{INDEXES}END")
    stub("apt-config", "echo 'Acquire::http::Proxy \"http://proxy.example\";'; echo 'APT::Get \"\";'")
    stub(
        "mmdebstrap",
        f'printf "%s\\n" "$@" >>{tmp_path}/argv; for last; do case $last in /*) mkdir "$last";; esac; done',
    )
    return tmp_path / "cache"


def test_the_settings_of_pip_proxies_and_certificates_are_taken_over_with_the_files_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, index, bundle = tmp_path / "wheels", tmp_path / "index", tmp_path / "ca.crt"
    for folder in (wheels, index / "simple"):
        folder.mkdir(parents=True)
    bundle.touch()
    monkeypatch.setattr(site, "BUNDLE", tmp_path / "none.crt")
    (tmp_path / "global.conf").write_text(
        f"[global]\ntimeout = 5\nfind-links = {tmp_path}/missing {wheels}\n"
    )
    (tmp_path / "user.conf").write_text("[global]\ntimeout = 6\n[install]\nno-compile = true\n")
    taken = {
        "PIP_EXTRA_INDEX_URL": f"file://{index}/simple https://index.example",
        "https_proxy": "http://proxy.example",
    }
    other = {
        "PIP_CONFIG_FILE": f"{tmp_path}/user.conf",
        "PATH": "/bin",
        "MY_PIP_CACHE": "x",
        "SLURM_JOB_ID": "1",
    }
    found = site.read({**taken, "SSL_CERT_FILE": str(bundle), **other}, (f"{tmp_path}/global.conf",))
    assert found == site.Site(
        env={**taken, "SSL_CERT_FILE": str(bundle)},
        pip_conf=f"[global]\ntimeout = 6\nfind-links = {tmp_path}/missing {wheels}\n\n[install]\nno-compile = true\n\n",
        files=(bundle, index, wheels),
    )


def test_another_recipe_is_another_root(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = root.make()
    monkeypatch.setattr(root, "RECIPE", (*root.RECIPE[:-1], "forky"))
    assert root.path().parent == made.parent == machine
    assert root.path() != made


@pytest.mark.usefixtures("machine")
def test_a_build_that_fails_or_is_cut_off_leaves_no_root(stub: Stub) -> None:
    stub(
        "mmdebstrap",
        'for last; do case $last in /*) mkdir "$last"; touch "$last/half";; esac; done; echo why >&2; exit 5',
    )
    for _ in range(2):
        with pytest.raises(Refused, match=r"^mmdebstrap ended with 5:\nwhy$"):
            root.make()
        assert not root.path().exists()
    stub("mmdebstrap", 'for last; do case $last in /*) mkdir "$last"; touch "$last/whole";; esac; done')
    assert [file.name for file in root.make().iterdir()] == ["whole"]


def test_a_lock_is_held_by_a_child_that_inherits_it_and_free_when_the_child_ends(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with locked(file, 0) as lock:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock])
    message = f"^another process has held {file} for 0.1 s: wait for it, or end it$"
    with pytest.raises(Refused, match=message), locked(file, 0.1):
        pass
    child.communicate(timeout=30)
    with locked(file, 0):
        pass


def test_too_little_disk_for_a_first_run_of_all_tests_is_said_before_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTRAIN_TEST_CACHE", str(tmp_path))
    assert "20 GB free, and the tests with real Apptainer take 33 GB" in images.lack_of_room(20 * 10**9)
    assert images.lack_of_room(40 * 10**9) == ""
    kept = tmp_path / "images/default.0123456789abcdef"
    kept.mkdir(parents=True)
    (kept / "complete").touch()
    assert images.lack_of_room(20 * 10**9) == ""
