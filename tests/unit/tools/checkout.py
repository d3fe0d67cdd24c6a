"""`make` in a fresh checkout: what is refused before anything is created, what is made, what is never left.

The checkouts here are real ones with the real Makefile and tools, and locks of one tiny wheel each, so that
each venv is really filled, with pip, without a network. Python's venv module takes 5 s of a processor, so it makes
that of `ready` alone; the others are copies of it (`quick`, `made`).
"""

import copy
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 120  # s, for anything that makes a venv
NEED = "Python 3.11 to 3.14 with venv and pip is needed"
BASE_PYTHON = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
VENV = pytest.mark.xdist_group("make-venv")
"""Those that need `ready`, which is worth making once."""


def write_wheel(folder: Path, name: str) -> str:
    """A wheel with one module; returns the line of a lock that names it."""
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    members = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in members.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # without the time, so that the hash stays
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


class Checkout:
    """A checkout with tiny locks, and the environment of a new user in it."""

    def __init__(self, folder: Path, tools: Path) -> None:
        self.path = folder / "check out"
        self.path.mkdir(parents=True)
        shutil.copy(CHECKOUT / "Makefile", self.path)
        shutil.copytree(CHECKOUT / "tools", self.path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        for package in ("entrypoint", "src/train"):
            (self.path / package).mkdir(parents=True)
            (self.path / package / "__main__.py").write_text("print(__file__)\n")
        (self.path / "containers").mkdir()
        shutil.copy(CHECKOUT / "containers" / "stacks.yaml", self.path / "containers")
        (self.path / "requirements").mkdir()
        for lock in ("run", "dev"):
            self.lock(lock).write_text(write_wheel(folder / "wheels", f"probe{lock}"))
        self.sizes(1)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.add_python("python3")
        home = folder / "home"
        home.mkdir()
        self.env = {
            "PATH": f"{self.bin}:{tools}",
            "HOME": str(home),
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(folder / "wheels"),
        }
        self.venv = self.path / ".venv"

    def lock(self, name: str) -> Path:
        return self.path / "requirements" / f"{name}.txt"

    def sizes(self, megabytes: int) -> None:
        text = f"# a comment\nrun {megabytes} {megabytes}\ndev 1 1\n"
        (self.path / "requirements" / "sizes").write_text(text)

    def add_tool(self, name: str, script: str) -> None:
        """A `name` that is found first on PATH."""
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def add_python(self, name: str, changes: str = "", before: str = "") -> None:
        """This Python, which first runs `changes`, after the line `before` of the shell."""
        arguments = '"$@"'
        if changes:
            arguments = f"-c 'import sys; {changes}; exec(sys.stdin.read())'"
        self.add_tool(name, f"{before}\nexec '{BASE_PYTHON}' {arguments}")

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("make", "--no-print-directory", *arguments)

    def script(self, level: str, venv: str = ".venv", **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("tools/venv.sh", venv, level, **env)

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.path,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )

    def start(self, level: str, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["tools/venv.sh", ".venv", level],
            cwd=self.path,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def packages(self) -> list[str]:
        return sorted(path.stem for path in self.venv.glob("lib/python*/site-packages/probe*.py"))

    def snapshot(self) -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in self.path.rglob("*")}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of this machine without its Pythons, for the end of PATH."""
    folder = tmp_path_factory.mktemp("tools")
    for tool in Path("/usr/bin").iterdir():
        if not tool.name.startswith(("python", "pip")):
            (folder / tool.name).symlink_to(tool)
    return folder


@pytest.fixture
def checkout(tmp_path: Path, tools: Path) -> Checkout:
    return Checkout(tmp_path, tools)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what Python's venv module made for `ready` is kept, as it was then."""
    return tmp_path_factory.mktemp("pristine")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, tools: Path, pristine: Path) -> Checkout:
    """A checkout whose venv is there; tests leave it as it is, or copy it."""
    made = Checkout(tmp_path_factory.mktemp("ready"), tools)
    keep = f"""cp -a "$4"/* '{pristine}' && rm '{pristine}/apptrain.venv'"""
    made.add_tool("python3", f"""'{BASE_PYTHON}' "$@" || exit\nif [ "$2 $3" = "-m venv" ]; then {keep}; fi""")
    done = made.make("venv-dev")
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def quick(checkout: Checkout, ready: Checkout, pristine: Path) -> Checkout:
    """A checkout whose Python makes a venv by copying one."""
    assert ready.venv.exists()
    take = f"""exec cp -a '{pristine}/.' "$4\""""
    checkout.add_python("python3", before=f"""if [ "$2 $3" = "-m venv" ]; then {take}; fi""")
    return checkout


@pytest.fixture
def made(quick: Checkout, ready: Checkout) -> Checkout:
    """A checkout with the venv of `ready`, as if it had been made here."""
    subprocess.run(["cp", "-a", ready.venv, quick.venv], check=True, timeout=BOUND)
    for path in (quick.venv / "apptrain.venv", *quick.venv.glob("lib/*/site-packages/apptrain.pth")):
        path.write_text(path.read_text().replace(str(ready.path), str(quick.path)))
    return quick


def test_make_alone_lists_every_target(checkout: Checkout) -> None:
    makefile = (CHECKOUT / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    listed = checkout.make().stdout.splitlines()
    assert [line.split()[1] for line in listed] == targets.split()
    assert all(len(line.split()) > 3 for line in listed)


# --- refusals: one message, exit 64, nothing created -----------------------------------------------------


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
UNLUCKY = 'sys.modules["lzma"] = sys.modules["ssl"] = None'
RUNNING = "{}.{}.{}".format(*sys.version_info)
ADVICE = "make PYTHON=/path/to/python3.11 (on a cluster see: module avail python)"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (OLD, "3.9.18"),
        (NEW, "3.15.0"),
        (BARE, f"{RUNNING} without ensurepip"),
        (UNLUCKY, f"{RUNNING} without ssl, lzma"),
        ('sys.implementation.name = "pypy"', f"{RUNNING}, not a 64-bit CPython"),
    ],
)
def test_a_python_that_cannot_be_used_is_refused(checkout: Checkout, changes: str, found: str) -> None:
    checkout.add_python("python3", changes)
    assert refused(checkout) == f"venv: TMP/bin/python3 is {found}: {NEED}: {ADVICE}"


def test_each_python_that_was_looked_at_is_named(checkout: Checkout) -> None:
    checkout.add_python("python3", OLD)
    checkout.add_python("python3.12", BARE)
    found = f"TMP/bin/python3 is 3.9.18; TMP/bin/python3.12 is {RUNNING} without ensurepip"
    assert refused(checkout) == f"venv: {found}: {NEED}: {ADVICE}"


def test_a_python_given_by_name_is_the_only_one_looked_at(checkout: Checkout) -> None:
    checkout.add_python("python3.9", OLD)
    assert refused(checkout, PYTHON="python3.9") == (
        f"venv: PYTHON=python3.9: TMP/bin/python3.9 is 3.9.18: {NEED}: make PYTHON=/path/to/python3.11"
    )
    assert refused(checkout, PYTHON="/no/python3") == (
        f"venv: PYTHON=/no/python3: not found: {NEED}: make PYTHON=/path/to/python3.11"
    )


@VENV
def test_another_python_on_path_serves_where_python3_is_too_old(quick: Checkout) -> None:
    (quick.bin / "python3").rename(quick.bin / "python3.12")
    quick.add_python("python3", OLD)
    assert quick.script("run").returncode == 0
    assert quick.packages() == ["proberun"]


NAMESPACE = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
DEBIAN = Path("/etc/debian_version").exists() and Path("/usr/bin/python3").exists()


@pytest.mark.ci_may_skip("needs a Debian with its own Python and the right to a mount namespace")
@pytest.mark.skipif(
    not (NAMESPACE and DEBIAN), reason="no mount namespace, or no Debian with /usr/bin/python3"
)
def test_on_a_debian_without_its_venv_package_that_package_is_named(
    checkout: Checkout, tmp_path: Path
) -> None:
    which = "import sys; print('%d.%d' % sys.version_info[:2], '%d.%d.%d' % sys.version_info[:3])"
    minor, version = subprocess.check_output(["/usr/bin/python3", "-I", "-c", which], text=True).split()
    if not (3, 11) <= tuple(map(int, minor.split("."))) <= (3, 14):
        pytest.skip(f"this Debian's Python is {version}")
    (tmp_path / "empty").mkdir()
    (checkout.bin / "python3").unlink()
    (checkout.bin / "python3").symlink_to("/usr/bin/python3")
    library = f"/usr/lib/python{minor}/ensurepip"
    hide = f'test ! -d {library} || mount --bind "$1" {library}; shift; exec "$@"'
    done = checkout.run(
        "unshare", "-rm", "sh", "-c", hide, "sh", str(tmp_path / "empty"), "tools/venv.sh", ".venv", "run"
    )
    assert (done.returncode, done.stderr.replace(str(tmp_path), "TMP")) == (
        64,
        f"venv: TMP/bin/python3 is {version} without ensurepip: {NEED}: "
        f"apt install python{minor}-venv (without root: make PYTHON=/path/to/another/python3)\n",
    )
    assert not checkout.venv.exists()


@pytest.mark.parametrize(
    ("tool", "says", "message"),
    [
        (
            "uname",
            "ppc64le",
            "this machine is ppc64le: the locked wheels are for x86_64 and aarch64; use such a machine",
        ),
        (
            "getconf",
            "glibc 2.17",
            "this system has glibc 2.17: the locked wheels need 2.28 or newer; "
            "use a newer system (Debian 10, Ubuntu 20.04, RHEL 8 or later)",
        ),
        (
            "getconf",
            "",
            "this system has no glibc: the locked wheels need glibc 2.28 or newer; "
            "use a Debian, Ubuntu or RHEL of 2019 or later",
        ),
    ],
)
def test_a_system_that_no_wheel_serves_is_refused(
    checkout: Checkout, tool: str, says: str, message: str
) -> None:
    checkout.add_tool(tool, f'[ "$1" = -s ] && echo Linux || echo "{says}"' if says else "exit 1")
    assert refused(checkout) == f"venv: {message}"


ELSEWHERE = "choose another place, make VENV=DIR"


@pytest.mark.parametrize(
    ("venv", "message"),
    [
        (
            "mine",
            f"VENV=TMP/check out/mine: this exists and was not made here, so it is left alone: {ELSEWHERE}",
        ),
        ("mine/kept", f"VENV=TMP/check out/mine/kept: this is not a directory: {ELSEWHERE}"),
        (
            "no/venv",
            r"VENV=TMP/check out/no/venv: there is no directory TMP/check out/no: mkdir -p TMP/check\ out/no",
        ),
        (
            "a:b",
            "VENV=TMP/check out/a:b: a venv's path cannot have a colon or a line break: "
            "choose another, make VENV=DIR",
        ),
        ("~/venv", 'VENV=~/venv: the shell did not expand ~: make VENV="$HOME/venv"'),
        ("", "VENV is empty: make VENV=DIR"),
    ],
)
def test_a_place_that_cannot_be_the_venvs_is_refused(checkout: Checkout, venv: str, message: str) -> None:
    (checkout.path / "mine").mkdir()
    (checkout.path / "mine" / "kept").write_text("precious")
    assert refused(checkout, venv) == f"venv: {message}"


@pytest.mark.ci_may_skip("root may write everywhere")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_is_not_writable_is_refused(checkout: Checkout) -> None:
    (checkout.path / "shut").mkdir(mode=0o555)
    assert refused(checkout, "shut/venv") == (
        f"venv: VENV=TMP/check out/shut/venv: TMP/check out/shut is not writable: {ELSEWHERE}"
    )


def test_too_little_space_is_refused_before_the_download(checkout: Checkout) -> None:
    checkout.sizes(10**9)
    message = refused(checkout)
    assert re.sub(r"has \d+\.\d GB", "has N GB", message) == (
        "venv: TMP/check out has N GB free: 2000000.0 GB are needed (1000000.0 GB installed, 1000000.0 GB of "
        "downloads meanwhile): make VENV=DIR, on a larger file system"
    )


@pytest.mark.ci_may_skip("needs the right to a mount namespace")
@pytest.mark.skipif(not NAMESPACE, reason="no right to a mount namespace")
def test_a_small_file_system_for_pips_cache_is_refused(checkout: Checkout) -> None:
    checkout.sizes(10)
    small = 'mount -t tmpfs -o size=1m none "$HOME" && exec tools/venv.sh .venv run'
    done = checkout.run("unshare", "-rm", "sh", "-c", small)
    assert (done.returncode, done.stderr.replace(str(checkout.path.parent), "TMP")) == (
        64,
        "venv: TMP/home has 0.0 GB free: pip's cache TMP/home/.cache/pip takes 0.0 GB: "
        "make PIP_NO_CACHE_DIR=1, which keeps no copy\n",
    )
    assert not checkout.venv.exists()


# --- what is made ----------------------------------------------------------------------------------------


@VENV
def test_making_it_says_what_comes_and_where_to(quick: Checkout) -> None:
    done = quick.make("venv")
    said = [line for line in done.stderr.splitlines() if line.startswith("venv: ")]
    tmp = quick.path.parent
    assert [line.replace(str(tmp), "TMP") for line in said] == [
        f"venv: making TMP/check out/.venv with Python {RUNNING} (TMP/bin/python3)",
        "venv: pip downloads up to 0.0 GB and installs 0.0 GB there; it keeps a copy of the downloads in "
        "TMP/home/.cache/pip (PIP_NO_CACHE_DIR=1: none)",
        "venv: TMP/check out/.venv is ready",
    ]
    assert "Successfully installed proberun-1.0" in done.stdout
    assert (quick.packages(), (quick.venv / ".tmp").exists()) == (["proberun"], False)

    added = quick.make("venv-dev")
    assert added.stderr.startswith(f"venv: adding requirements/dev.txt to {quick.venv}\n")
    assert quick.packages() == ["probedev", "proberun"]


@VENV
def test_a_second_make_does_and_says_nothing(ready: Checkout) -> None:
    before = ready.snapshot()
    for target in ("venv", "venv-dev"):
        done = ready.make(target)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for lock in ("run", "dev"):
        os.utime(ready.lock(lock))
    assert ready.make("venv-dev").stderr == ""
    after = ready.snapshot()
    for lock in ("run", "dev"):
        after[str(ready.lock(lock))] = before[str(ready.lock(lock))]
    assert after == before


@VENV
@pytest.mark.parametrize(("module", "file"), [("entrypoint", "entrypoint"), ("train", "src/train")])
def test_our_modules_are_found_from_any_folder(
    ready: Checkout, tmp_path: Path, module: str, file: str
) -> None:
    (tmp_path / module).mkdir()
    (tmp_path / module / "__main__.py").write_text("print('the user has one too')")
    command = [str(ready.venv / "bin" / "python"), "-P", "-m", module]
    found = subprocess.check_output(command, cwd=tmp_path, text=True, env=ready.env, timeout=BOUND)
    assert found == f"{ready.path / file / '__main__.py'}\n"


def copy_of(original: Checkout, folder: Path) -> Checkout:
    """The checkout, its venv too, copied to another place as a user would."""
    copied = copy.copy(original)
    copied.path = folder / "copied"
    copied.venv = copied.path / ".venv"
    subprocess.run(["cp", "-a", original.path, copied.path], check=True, timeout=BOUND)
    return copied


@VENV
def test_a_copied_checkout_gets_a_venv_of_its_own(made: Checkout, tmp_path: Path) -> None:
    copied = copy_of(made, tmp_path)
    done = copied.script("run")
    assert done.stderr.startswith(
        f"venv: {copied.venv} is made anew: it was made as {made.venv}, and a venv cannot be moved\n"
    )
    found = subprocess.check_output([str(copied.venv / "bin/python"), "-P", "-m", "entrypoint"], text=True)
    assert found == f"{copied.path}/entrypoint/__main__.py\n"


@VENV
def test_a_venv_shared_by_two_checkouts_serves_the_last_one_that_asked(
    quick: Checkout, tmp_path: Path
) -> None:
    shared = str(tmp_path / "shared venv")
    first, second = quick, copy_of(quick, tmp_path)
    assert first.script("run", shared).returncode == 0
    done = second.script("run", shared)
    assert done.stderr == (
        f"venv: {shared} served {first.path} until now; it serves {second.path} from here on\n"
        f"venv: {shared} is ready\n"
    )
    found = subprocess.check_output([f"{shared}/bin/python", "-P", "-m", "train"], text=True)
    assert found == f"{second.path}/src/train/__main__.py\n"


@VENV
def test_a_changed_lock_is_followed(made: Checkout, tmp_path: Path) -> None:
    made.lock("run").write_text(write_wheel(tmp_path / "wheels", "probenext"))
    done = made.script("run")
    assert done.stderr.startswith(f"venv: {made.venv} is made anew: requirements/run.txt has changed\n")
    assert made.packages() == ["probenext"]


@VENV
def test_settings_of_pip_that_install_elsewhere_do_not_count(quick: Checkout, tmp_path: Path) -> None:
    done = quick.script("run", PIP_TARGET=str(tmp_path / "target"), PIP_USER="1")
    assert (done.returncode, quick.packages(), (tmp_path / "target").exists()) == (0, ["proberun"], False)


@VENV
def test_two_makes_at_once_make_one_venv(quick: Checkout) -> None:
    both = [quick.start("run"), quick.start("run")]
    said = [process.communicate(timeout=BOUND)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("is ready" in text for text in said) == 1, said
    assert sum("waiting for it, at most 30 min" in text for text in said) == 1, said
    assert quick.packages() == ["proberun"]


@VENV
def test_removing_it_takes_only_what_was_made_here(made: Checkout) -> None:
    (made.path / "mine").mkdir()
    refusal = made.make("clean-venv", "VENV=mine")
    assert refusal.stderr.splitlines()[0] == (
        f"venv: VENV={made.path}/mine: this was not made here, so it is left alone"
    )
    assert made.make("clean-venv").returncode == 0
    assert ((made.path / "mine").exists(), made.venv.exists()) == (True, False)


@VENV
def test_clean_leaves_the_venv_and_the_runs(made: Checkout) -> None:
    for folder in ("runs/job-1", ".mypy_cache", "build", "entrypoint/__pycache__", "tests", "benchmarks"):
        (made.path / folder).mkdir(parents=True, exist_ok=True)
    assert made.make("clean").returncode == 0
    gone = (".mypy_cache", "build", "entrypoint/__pycache__")
    assert [folder for folder in gone if (made.path / folder).exists()] == []
    assert all((made.path / folder).exists() for folder in (".venv/bin/python", "runs/job-1"))


# --- what is never left ----------------------------------------------------------------------------------


@VENV
def test_a_package_with_another_hash_is_refused_and_nothing_is_left(quick: Checkout) -> None:
    text = quick.lock("run").read_text()
    quick.lock("run").write_text(text[:-65] + "0" * 64 + "\n")
    done = quick.script("run")
    assert done.returncode == 69
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert done.stderr.endswith(
        "venv: pip could not install requirements/run.txt; the reason stands above\n"
        f"venv: removing the unfinished {quick.venv}\n"
    )
    assert not quick.venv.exists()


@VENV
def test_a_lock_without_hashes_is_refused(quick: Checkout) -> None:
    quick.lock("run").write_text("proberun==1.0\n")
    done = quick.script("run")
    assert (done.returncode, quick.venv.exists()) == (69, False)
    assert "Hashes are required in --require-hashes mode" in done.stderr


@VENV
def test_a_failed_addition_leaves_what_was_finished_and_is_made_up_for(made: Checkout) -> None:
    good = made.lock("dev").read_text()
    made.lock("dev").write_text("nowhere==1.0 --hash=sha256:" + "0" * 64 + "\n")
    assert [made.script("dev").returncode for _ in range(2)] == [69, 69]
    run = made.script("run")
    assert (run.returncode, run.stderr, "proberun" in made.packages()) == (0, "", True)
    made.lock("dev").write_text(good)
    assert made.script("dev").stderr.startswith(f"venv: adding requirements/dev.txt to {made.venv}\n")


@pytest.fixture
def silence() -> Iterator[tuple[str, Callable[[], None]]]:
    """An index that takes connections and never answers: its address, and a wait until pip has come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(BOUND)
        taken = []
        yield f"http://127.0.0.1:{server.getsockname()[1]}/", lambda: taken.append(server.accept())
        for connection, _ in taken:
            connection.close()


@VENV
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_make_leaves_nothing(
    quick: Checkout, silence: tuple[str, Callable[[], None]], signum: signal.Signals
) -> None:
    url, pip_has_come = silence
    process = quick.start("run", PIP_FIND_LINKS=url)
    pip_has_come()
    os.killpg(process.pid, signum)
    stderr = process.communicate(timeout=BOUND)[1]
    assert process.returncode == 128 + signum
    assert stderr.endswith(f"venv: stopped\nvenv: removing the unfinished {quick.venv}\n")
    assert not quick.venv.exists()


@VENV
def test_a_killed_make_is_noticed_by_the_next_one(
    quick: Checkout, silence: tuple[str, Callable[[], None]]
) -> None:
    url, pip_has_come = silence
    process = quick.start("run", PIP_FIND_LINKS=url)
    pip_has_come()
    (pip,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait(BOUND)
    waiting = quick.start("run")
    assert waiting.stderr is not None
    assert waiting.stderr.readline() == (
        f"venv: another make is at work on {quick.venv}: waiting for it, at most 30 min\n"
    )
    os.killpg(int(pip), signal.SIGKILL)
    stderr = waiting.communicate(timeout=BOUND)[1]
    assert waiting.returncode == 0
    assert stderr.startswith(
        f"venv: {quick.venv} is made anew: an earlier make was cut off before it was finished\n"
    )
    assert quick.packages() == ["proberun"]


# --- the locks -------------------------------------------------------------------------------------------


def pins(lock: str) -> dict[str, set[str]]:
    """Every pinned name with its versions (several where they differ by Python)."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9._-]+)==(\S+)", lock_text(lock), re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


def lock_text(lock: str) -> str:
    return (CHECKOUT / "requirements" / f"{lock}.txt").read_text()


def asked_for(lock: str) -> set[str]:
    lines = (CHECKOUT / "requirements" / f"{lock}.in").read_text().splitlines()
    return {re.split("[<# ]", line)[0] for line in lines if line and not line.startswith(("#", "-"))}


@pytest.mark.parametrize("lock", ["run", "dev", "image"])
def test_a_lock_was_made_from_its_input(lock: str) -> None:
    reason = re.escape(f"-r requirements/{lock}.in")
    blocks = re.split(r"^(?=[a-z])", lock_text(lock), flags=re.MULTILINE)[1:]
    direct = {
        block.split("==")[0] for block in blocks if re.search(rf"# +(via )?{reason}$", block, re.MULTILINE)
    }
    assert direct == asked_for(lock)


@pytest.mark.parametrize("lock", ["run", "dev", "image"])
def test_a_lock_pins_and_hashes_everything_and_names_no_index(lock: str) -> None:
    blocks = re.split(r"^(?=[^ #\n])", lock_text(lock), flags=re.MULTILINE)[1:]
    assert blocks
    for block in blocks:
        assert re.match(r"[a-z0-9._-]+==\S+ (; .* )?\\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+", block), (
            block
        )
    assert "://" not in lock_text(lock)
    assert "index-url" not in lock_text(lock)


def test_the_two_locks_agree() -> None:
    run, dev = pins("run"), pins("dev")
    assert {name: dev[name] for name in run.keys() & dev} == {name: run[name] for name in run.keys() & dev}


def test_the_run_lock_holds_the_default_stack() -> None:
    stack = yaml.safe_load((CHECKOUT / "containers" / "stacks.yaml").read_text())
    stack = stack["stacks"][stack["default"]]
    run = pins("run")
    assert (run["torch"], run["torchvision"]) == ({stack["torch"]}, {stack["torchvision"]})
    major = stack["cuda"].split(".")[0]
    brought = (f"nvidia-nccl-cu{major}", f"nvidia-cudnn-cu{major}", "cuda-toolkit")
    (nccl,), (cudnn,), (cuda,) = (run[name] for name in brought)
    assert nccl == stack["nccl"]
    assert cudnn.rsplit(".", 1)[0] == stack["cudnn"]
    assert cuda.rsplit(".", 1)[0] == stack["cuda"]


# --- CI --------------------------------------------------------------------------------------------------


PLUGINS = ("-p", "pytest_timeout", "-p", "xdist.plugin")  # no others, which take a second to load


@pytest.mark.parametrize(
    ("test", "ci", "workers", "status"),
    [
        ("@pytest.mark.skip(reason='too slow')", "true", 0, 1),
        ("@pytest.mark.skip(reason='too slow')", "true", 1, 1),
        ("@pytest.mark.skip(reason='too slow')", "", 0, 0),
        ("@pytest.mark.ci_may_skip('no GPU there')\n@pytest.mark.skip(reason='no GPU')", "true", 0, 0),
        ("", "true", 0, 0),
    ],
    ids=["skip in CI", "skip in CI in a worker", "skip elsewhere", "excused skip in CI", "no skip"],
)
def test_ci_fails_on_a_skip_that_nobody_excused(
    tmp_path: Path, test: str, ci: str, workers: int, status: int
) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    for name in ("conftest.py", "loud.py"):
        shutil.copy(CHECKOUT / "tests" / name, tmp_path / "tests")
    text = (
        f"import pytest\n\n{test}\ndef test_one() -> None:\n    pass\n\ndef test_two() -> None:\n    pass\n"
    )
    (tmp_path / "tests" / "test_it.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "--color=no", *PLUGINS, "-n", str(workers)],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert done.returncode == status, done.stdout
    unexcused = "this fails the session" in done.stdout
    assert unexcused == bool(status)
    assert ("tests/test_it.py::test_one: Skipped: too slow" in done.stdout) == bool(status)
    skipped = "1 passed, 1 skipped" if "skip(" in test else "2 passed"
    assert re.fullmatch(rf"=+ {skipped} in .*=+", done.stdout.splitlines()[-1])
