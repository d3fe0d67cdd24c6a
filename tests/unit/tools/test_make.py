"""make: its targets, what it refuses, and CI."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.tools.checkout import BOUND, CHECKOUT, RUNNING, VENV, Checkout

NEED = "Python 3.11 to 3.14 with venv and pip is needed"


def test_make_alone_lists_every_target(checkout: Checkout) -> None:
    makefile = (CHECKOUT / "Makefile").read_text()
    (targets,) = re.findall(r"^targets = (.*)$", makefile, re.MULTILINE)
    users, _, developers = checkout.make().stdout.partition(
        "\n\nfor those who build, test or change apptrain\n"
    )
    first, others = ([line.split() for line in part.splitlines()] for part in (users, developers))
    assert [words[1] for words in first] == ["demo", "test", "venv", "image", "shell", "submit"]
    assert sorted(words[1] for words in first + others) == sorted(targets.split())
    assert all(len(words) > 3 for words in first + others)


def refused(checkout: Checkout, *arguments: str, **env: str) -> str:
    """The one message of a refused `tools/venv.sh`, the test's folder written as TMP."""
    before = checkout.snapshot()
    done = checkout.script("run", *arguments, **env)
    assert (done.returncode, done.stdout, checkout.snapshot() == before) == (64, "", True), done
    (line,) = done.stderr.splitlines()
    return line.replace(str(checkout.path.parent), "TMP")


OLD = "sys.version_info = (3, 9, 18)"
NEW = "sys.version_info = (3, 15, 0)"
BARE = 'sys.modules["ensurepip"] = None'
UNLUCKY = 'sys.modules["lzma"] = None'
ADVICE = (
    "make PYTHON=/path/to/python3.11 (on a cluster see: module avail python; "
    "on Debian: apt install python3-venv)"
)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (OLD, "3.9.18"),
        (NEW, "3.15.0"),
        (BARE, f"{RUNNING} without ensurepip"),
        (UNLUCKY, f"{RUNNING} without lzma"),
    ],
)
def test_a_python_that_cannot_be_used_is_refused(checkout: Checkout, changes: str, found: str) -> None:
    checkout.add_python("python3", changes)
    assert refused(checkout) == f"apptrain: TMP/bin/python3 is {found}; {NEED}: {ADVICE}"


def test_the_first_page_names_the_pythons_that_fit() -> None:
    assert NEED.partition(" with ")[0] in (CHECKOUT / "README.md").read_text()


def test_each_python_that_was_looked_at_is_named(checkout: Checkout) -> None:
    checkout.add_python("python3", OLD)
    checkout.add_python("python3.12", BARE)
    found = f"TMP/bin/python3 is 3.9.18; TMP/bin/python3.12 is {RUNNING} without ensurepip"
    assert refused(checkout) == f"apptrain: {found}; {NEED}: {ADVICE}"


def test_a_python_given_by_name_is_the_only_one_looked_at(checkout: Checkout) -> None:
    checkout.add_python("python3.9", OLD)
    assert refused(checkout, PYTHON="python3.9") == f"apptrain: TMP/bin/python3.9 is 3.9.18; {NEED}: {ADVICE}"
    assert refused(checkout, PYTHON="/no/python3") == f"apptrain: /no/python3 not found; {NEED}: {ADVICE}"


@VENV
def test_another_python_on_path_serves_where_python3_is_too_old(quick: Checkout) -> None:
    (quick.bin / "python3").rename(quick.bin / "python3.12")
    quick.add_python("python3", OLD)
    assert quick.script("run").returncode == 0
    assert quick.packages() == ["proberun"]


NAMESPACE = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("tool", "script", "found"),
    [
        (
            "uname",
            "echo Linux ppc64le",
            "Linux ppc64le, glibc [0-9.]+",
        ),
        ("getconf", "echo glibc 2.17", "Linux [a-z0-9_]+, glibc 2.17"),
        ("getconf", "exit 1", "Linux [a-z0-9_]+, no glibc"),
    ],
)
def test_a_system_that_no_wheel_serves_is_refused(
    checkout: Checkout, tool: str, script: str, found: str
) -> None:
    checkout.add_tool(tool, script)
    assert re.fullmatch(
        f"apptrain: this is {found}: the locked wheels are for Linux on x86_64 and aarch64 with glibc 2.28 or "
        r"newer \(Debian 10, Ubuntu 20.04, RHEL 8 or later\)",
        refused(checkout),
    )


ELSEWHERE = "choose another place, make VENV=DIR"
UNFIT = "is no directory that you may write to"


@pytest.mark.parametrize(
    ("venv", "message"),
    [
        (
            "mine",
            f"VENV=TMP/check out/mine: this exists and was not made here, so it is left alone: {ELSEWHERE}",
        ),
        (
            "mine/kept",
            f"VENV=TMP/check out/mine/kept: TMP/check out/mine/kept {UNFIT}: {ELSEWHERE}",
        ),
        ("no/venv", f"VENV=TMP/check out/no/venv: TMP/check out/no {UNFIT}: {ELSEWHERE}"),
        ("~/venv", 'VENV=~/venv: the shell did not expand ~: make VENV="$HOME/venv"'),
        ("", "usage: tools/venv.sh DIR run|dev|image|remove"),
    ],
)
def test_a_place_that_cannot_be_the_venvs_is_refused(checkout: Checkout, venv: str, message: str) -> None:
    (checkout.path / "mine").mkdir()
    (checkout.path / "mine" / "kept").write_text("precious")
    assert refused(checkout, venv) == f"apptrain: {message}"


@pytest.mark.ci_may_skip("needs the right to a mount namespace")
@pytest.mark.skipif(not NAMESPACE, reason="no right to a mount namespace")
def test_a_place_that_is_not_writable_is_refused(checkout: Checkout) -> None:
    (checkout.path / "shut").mkdir()
    read_only = (
        "mount --bind shut shut && mount -o remount,bind,ro shut"  # root may write wherever a mode forbids it
    )
    done = checkout.run("unshare", "-rm", "sh", "-c", f"{read_only} && exec tools/venv.sh shut/venv run")
    assert (done.returncode, done.stderr.replace(str(checkout.path.parent), "TMP")) == (
        64,
        f"apptrain: VENV=TMP/check out/shut/venv: TMP/check out/shut {UNFIT}: {ELSEWHERE}\n",
    )


def test_too_little_space_is_refused_before_the_download(checkout: Checkout) -> None:
    checkout.sizes(10**9)
    message = refused(checkout)
    assert re.sub(r"has [0-9.]+[GTP]B", "has N", message) == (
        "apptrain: TMP/check out has N free: 2.0PB are needed (1.0PB installed, 1.0PB of downloads meanwhile): "
        "make VENV=DIR, on a larger file system"
    )


PLUGINS = ("-p", "pytest_timeout", "-p", "xdist.plugin")  # no others, which take a second to load

WIRE = """
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item):
    report = yield
    data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
    return item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
"""
"""A conftest.py that does with each report what xdist does between a worker and the session.

A real worker would be one more pytest that is left to end by itself, which execnet, rarely, waits for without end.
"""


def session(folder: Path, text: str, conftest: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """One session of pytest, with our conftest.py, of a file with this text."""
    (folder / "tests").mkdir(exist_ok=True)
    shutil.copy(CHECKOUT / "pyproject.toml", folder)
    for name in ("conftest.py", "loud.py"):
        shutil.copy(CHECKOUT / "tests" / name, folder / "tests")
    (folder / "tests" / "test_it.py").write_text(text)
    (folder / "conftest.py").write_text(conftest)
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "--color=no", *PLUGINS],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )


@pytest.mark.parametrize(
    ("test", "ci", "conftest", "status"),
    [
        ("@pytest.mark.skip(reason='too slow')", "true", "", 1),
        ("@pytest.mark.skip(reason='too slow')", "true", WIRE, 1),
        ("@pytest.mark.skip(reason='too slow')", "", "", 0),
        ("@pytest.mark.ci_may_skip('no GPU there')\n@pytest.mark.skip(reason='no GPU')", "true", "", 0),
        ("@pytest.mark.ci_may_skip('no GPU there')\n@pytest.mark.skip(reason='no GPU')", "true", WIRE, 0),
        ("", "true", "", 0),
    ],
    ids=[
        "skip in CI",
        "skip in CI in a worker",
        "skip elsewhere",
        "excused skip in CI",
        "excused skip in CI in a worker",
        "no skip",
    ],
)
def test_ci_fails_on_a_skip_that_nobody_excused(
    tmp_path: Path, test: str, ci: str, conftest: str, status: int
) -> None:
    text = (
        f"import pytest\n\n{test}\ndef test_one() -> None:\n    pass\n\ndef test_two() -> None:\n    pass\n"
    )
    done = session(tmp_path, text, conftest, CI=ci)
    assert done.returncode == status, done.stdout
    unexcused = "this fails the session" in done.stdout
    assert unexcused == bool(status)
    assert ("tests/test_it.py::test_one: Skipped: too slow" in done.stdout) == bool(status)
    skipped = "1 passed, 1 skipped" if "skip(" in test else "2 passed"
    assert re.fullmatch(rf"=+ {skipped} in .*=+", done.stdout.splitlines()[-1])


def test_what_fails_in_two_sessions_is_kept_for_the_end_of_both(tmp_path: Path) -> None:
    kept = tmp_path / "failed"
    for text in (
        "def test_good() -> None:\n    pass\n\ndef test_bad() -> None:\n    assert 'this' == 'that'\n",
        "import pytest\n\n@pytest.fixture\ndef none():\n    1 / 0\n\ndef test_ugly(none) -> None:\n    pass\n",
        "import pytest\n\n@pytest.mark.skip(reason='too slow')\ndef test_slow() -> None:\n    pass\n",
    ):
        assert session(tmp_path, text, CI="true", APPTRAIN_TEST_FAILED=str(kept)).returncode == 1
    told = kept.read_text().splitlines()
    assert told[0] == "FAILED tests/test_it.py::test_bad"
    assert told[1].startswith("    AssertionError: assert 'this' == 'that'")
    assert told[2:] == [
        "FAILED tests/test_it.py::test_ugly",
        "    ZeroDivisionError: division by zero",
        "SKIPPED tests/test_it.py::test_slow: Skipped: too slow",
    ]
