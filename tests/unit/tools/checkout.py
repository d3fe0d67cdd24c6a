"""`make` in a fresh checkout: what is refused before anything is created, what is made, what is never left.

The checkouts here are real ones with the real Makefile and tools, and locks of one tiny wheel each, so that
each venv is really filled, with pip, without a network. Python's venv module takes 5 s of a processor, so it makes
that of `ready` alone; the others are copies of it (`quick`, `made`).
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 120  # s, for anything that makes a venv
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
        shutil.copy(CHECKOUT / "apptrain", self.path)
        shutil.copytree(CHECKOUT / "tools", self.path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        for package in ("entrypoint", "src/train"):
            (self.path / package).mkdir(parents=True)
            (self.path / package / "__init__.py").touch()
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

    def compiled(self) -> list[str]:
        found = self.venv.glob("lib/python*/site-packages/__pycache__/probe*.pyc")
        return sorted(path.name.partition(".")[0] for path in found)

    def snapshot(self) -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in self.path.rglob("*")}


RUNNING = "{}.{}.{}".format(*sys.version_info)
