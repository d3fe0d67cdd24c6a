"""Site profiles: what may stand in one, the host file that is made of it, and the line that submits.

tests/unit/slurm/ has what a job makes of a profile, tests/unit/cli/test_main.py what the entrypoint does.
"""

import ast
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((CHECKOUT / "clusters").glob("*.yaml"))
FORKS = """
import marshal, os, runpy, signal, sys
import argparse, dataclasses, hashlib, json, pathlib, re, shlex, shutil, subprocess, typing, yaml
requests, answers = sys.stdin.buffer, sys.stdout.buffer
while length := requests.read(4):
    program, arguments, cwd, env, files = marshal.loads(requests.read(int.from_bytes(length, "big")))
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        for number, file in enumerate(files):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.argv = [program, *arguments]
        checkout, _, name = program.rpartition("/entrypoint/cli/")
        sys.path.insert(0, checkout)  # as python -m does for who is there
        runpy.run_module("entrypoint.cli." + name.removesuffix(".py"), run_name="__main__", alter_sys=True)
        sys.exit(0)
    answers.write(bytes([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) % 256]))
    answers.flush()
"""
"""Runs one script after the other, each in a process that has imported already what takes long: none of it is ours."""
SCHEDULER = """#!{python} -IS
import os, sys
with open("{here}/calls", "a") as calls:
    print({{"argv": sys.argv, "cwd": os.getcwd()}}, file=calls)
print("job 7")
sys.exit(int(os.environ.get("FAKE_STATUS", "0")))
"""
PBS_SCRIPT = """#!/bin/bash
#PBS -N apptrain
#PBS -l select=2:ncpus=8:ngpus=1:mem=32gb
#PBS -l place=scatter
#PBS -j oe                # one file
#PBS -S /bin/bash
##PBS -q gpu
"""
SIF = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\x0001\x0002\0"
"""How an image for x86_64 begins."""
Forks = Callable[[Path, Sequence[str], Path, dict[str, str]], "subprocess.CompletedProcess[str]"]
"""Runs a program with these arguments, in this directory, with this environment."""


class Site:
    """A checkout of what submits, stand-ins for sbatch and qsub, and a profile named lab."""

    def __init__(self, folder: Path, checkout: Path, forks: Forks) -> None:
        self.folder = folder
        self.forks = forks
        self.checkout = folder / "check out"
        shutil.copytree(checkout, self.checkout, ignore=shutil.ignore_patterns("entrypoint"))
        # The code, which no test changes, in a tenth of the time of a copy.
        shutil.copytree(checkout / "entrypoint", self.checkout / "entrypoint", copy_function=os.link)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("sbatch", "qsub"):
            (self.bin / name).write_text(SCHEDULER.format(python=sys.executable, here=folder))
            (self.bin / name).chmod(0o755)
        self.lab = self.checkout / "clusters" / "lab.yaml"

    def write(self, text: str) -> None:
        """The profile lab, and its shell file."""
        self.lab.write_text(text)
        made = self.run("profiles.py", str(self.lab))
        assert (made.returncode, made.stderr) == (0, "")

    def run(
        self, program: str, *arguments: str, cwd: Path | None = None, **env: Any
    ) -> "subprocess.CompletedProcess[str]":
        return self.forks(
            self.checkout / "entrypoint" / "cli" / program,
            arguments,
            cwd or self.checkout,
            {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.folder), **env},
        )

    def submit(self, *arguments: str, cwd: Path | None = None, **env: Any) -> list[str]:
        """The line that is printed, without a submission."""
        done = self.run("submit.py", "--cluster", "lab", "--dry-run", *arguments, cwd=cwd, **env)
        assert done.returncode == 0, done.stderr
        assert self.calls() == []
        return shlex.split(done.stdout)

    def refused(self, *arguments: str, program: str = "submit.py", **env: Any) -> str:
        done = self.run(program, *arguments, **env)
        assert (done.returncode, done.stdout, self.calls()) == (64, "", [])
        assert done.stderr.count("\n") == 1
        return done.stderr.removesuffix("\n")

    def calls(self) -> list[dict[str, object]]:
        file = self.folder / "calls"
        return [ast.literal_eval(line) for line in file.read_text().splitlines()] if file.exists() else []
