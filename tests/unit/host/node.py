"""`containers/run.sh` with a stand-in for Apptainer: what crosses, what is bound, what is refused, how it ends.

The stand-in records how it was called and runs the command on this machine, with the variables that it was handed
and no others. tests/cluster/test_run_sh.py has the real Apptainer; it holds what the stand-in takes for granted.
"""

import itertools
import marshal
import os
import re
import struct
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

RUN_SH = Path(__file__).resolve().parents[3] / "containers" / "run.sh"
BOUND = 60  # s, for anything started here
NODE = os.uname().nodename.split(".")[0]
Value = str | bytes
HAS_DRIVER = Path("/proc/driver/nvidia/version").exists()
NV = ["--nv"] if HAS_DRIVER else []
ARCHITECTURES = {"x86_64": b"02", "aarch64": b"04"}
IMAGE_ID = "7be444fb-7079-41ed-aa18-98fba119ebfb"
STAND_IN = """#!/bin/bash -p
# Not sh, which hands on no variables whose names are no identifiers.
here=${{0%/*}} here=${{here%/*}} name=${{FAKE_NAME-apptainer}} version=${{FAKE_VERSION-1.4.5}}
if [[ $* != buildcfg ]]; then exec {python} -ISs "$here/exec" "$@"; fi
printf '%s\\n' "PACKAGE_NAME=$name" "PACKAGE_VERSION=$version" "LIBEXECDIR=$here/libexec"
"""
EXEC = """
import marshal, os, sys  # which take no time to import
here, argv = os.path.dirname(os.path.abspath(__file__)), sys.argv[1:]
prefix = os.environ.get("FAKE_NAME", "apptainer").split("-")[0].upper()
own = {k: v for k, v in os.environb.items() if k.startswith((b"APPTAINER", b"SINGULARITY"))}
given = {k.split(b"ENV_", 1)[1]: v for k, v in own.items() if k.startswith(prefix.encode() + b"ENV_")}
command = argv[argv.index("/bin/sh"):] if "/bin/sh" in argv else ["true"]
with open(here + "/calls", "ab") as calls:
    decoded = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in own.items()}
    marshal.dump({"argv": argv, "own": decoded, "pid": os.getpid(), "group": os.getpgrp()}, calls)
if (mount := os.environ.get("FAKE_MOUNT")) and "--unsquash" not in argv:  # "1,3": the first and the third fail
    with open(here + "/calls", "rb") as calls:
        number = 0
        while calls.peek(1):
            marshal.load(calls)
            number += 1
    if str(number) in mount.split(",") or mount == "fails":
        if takes := os.environ.get("FAKE_TAKES"):
            import time
            time.sleep(float((takes.split(",") * 9)[number - 1]))
        no_luck = "FATAL:   container creation failed: image driver mount failure: squashfuse_ll exited: fuse: no luck"
        print(os.environ.get("FAKE_SAYS", no_luck), file=sys.stderr)
        sys.exit(255)
if "FAKE_STATUS" in os.environ:
    print("FATAL:   something of Apptainer's own", file=sys.stderr)
    sys.exit(int(os.environ["FAKE_STATUS"]))
env = {b"PATH": os.environb.get(b"FAKE_PATH", os.environb[b"PATH"]), b"HOME": b"/of/the/password/file", **given}
if stack := os.environb.get(b"FAKE_STACK"):
    env[b"APPTRAIN_STACK"] = stack
if "--pwd" not in argv:  # whether the image is mounted
    sys.exit(0)
env[b"PWD"] = os.fsencode(argv[argv.index("--pwd") + 1])
os.chdir(env[b"PWD"])
if hidden := os.environ.get("FAKE_HIDDEN"):
    os.rename(hidden, hidden + ".hidden")
    status = os.spawnve(os.P_WAIT, command[0], command, env)
    os.rename(hidden + ".hidden", hidden)
    sys.exit(status)
os.execve(command[0], command, env)
"""


def sif(path: Path, *, arch: bytes | None = None, missing: int = 0, data: int = 1000) -> Path:
    """A file with a SIF's header and IMAGE_ID, `missing` bytes short of what that says."""
    machine = ARCHITECTURES[os.uname().machine] if arch is None else arch
    head = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + machine + b"\0"
    head = (head + uuid.UUID(IMAGE_ID).bytes).ljust(112, b"\0") + struct.pack("<qq", 128, data)
    path.write_bytes(head + bytes(data - missing))
    return path


class Node:
    """A node with the stand-in first in PATH and nothing else of the kind, and a user's directories.

    They are outside /tmp, which is always shown.
    """

    def __init__(self, programs: Path, tools: Path, folder: Path) -> None:
        self.programs = programs
        self.bin = programs / "bin"
        self.bin.mkdir()
        self.apptainer = self.program("apptainer", STAND_IN.format(python=sys.executable))
        (programs / "exec").write_text(EXEC)
        self.setuid("apptainer")
        self.path = folder
        self.home, self.work, self.disk = folder / "home", folder / "work", programs / "disk"
        for path in (self.home, self.work, self.disk):
            path.mkdir()
        self.image = sif(folder / "image.sif")
        self.env: dict[str, Value] = {
            "PATH": f"{self.bin}:{tools}",
            "HOME": str(self.home),
            "TMPDIR": str(self.disk),
            "LOGNAME": "alice",
            "USER": "alice",
        }

    def setuid(self, package: str) -> None:
        """Makes the installation setuid, so that it does not matter whether this machine has FUSE."""
        starter = self.programs / "libexec" / package / "bin" / "starter-suid"
        starter.parent.mkdir(parents=True, exist_ok=True)
        starter.touch()
        starter.chmod(0o4755)

    def program(self, name: str, text: str) -> Path:
        """Puts it before all others of its name."""
        file = self.bin / name
        file.write_text(text)
        file.chmod(0o755)
        return file

    def python(self, script: str) -> None:
        """What `python` does: these lines of shell."""
        self.program("python", f"#!/bin/sh\n{script}\n")

    def image_has(self, **programs: str) -> None:
        """The image has these programs and no others: lines of shell."""
        self.of_image = self.programs / "of image"
        self.of_image.mkdir()
        for name, script in programs.items():
            (self.of_image / name).write_text(f"#!/bin/sh\n{script}\n")
            (self.of_image / name).chmod(0o755)
        self.env["FAKE_PATH"] = str(self.of_image)

    def run(
        self,
        *command: Value,
        image: Value | Path | None = None,
        cwd: Value | Path | None = None,
        **env: Value | None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command with changes to the environment; None takes a variable away."""
        return self.call([image or self.image, *command], cwd, env)

    def call(
        self,
        arguments: Sequence[Value | Path],
        cwd: Value | Path | None = None,
        env: Mapping[str, Value | None] | None = None,
        text: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Runs run.sh with these arguments, and `text` on its standard input."""
        ended = subprocess.run(
            [RUN_SH, *arguments],
            cwd=cwd or self.work,
            env=self.environment(env or {}),
            input=text,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=BOUND,
            check=False,
        )
        # What this machine's /dev/shm has is not these tests' subject.
        lines = [line for line in ended.stderr.splitlines(keepends=True) if f"{NODE}: /dev/shm" not in line]
        ended.stderr = "".join(lines)
        return ended

    def start(self, *command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [RUN_SH, self.image, *command],
            cwd=self.work,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def environment(self, changes: Mapping[str, Value | None]) -> dict[str, Value]:
        return {name: value for name, value in {**self.env, **changes}.items() if value is not None}

    def task(self, *options: Value | Path, **env: Value | None) -> subprocess.CompletedProcess[str]:
        """Runs `python` with options of run.sh, as a job script does for each task."""
        return self.call([*options, self.image, "python"], env=env)

    def calls(self) -> list[dict[str, Any]]:
        """How the stand-in was called."""
        found, file = [], self.programs / "calls"
        if file.exists():
            with file.open("rb") as records, suppress(EOFError):
                while True:
                    found.append(marshal.load(records))
        return found

    def argv(self) -> list[str]:
        return list(self.calls()[-1]["argv"])

    def binds(self) -> list[str]:
        """What was bound beside what always is."""
        argv = self.argv()
        words = [word for option, word in itertools.pairwise(argv) if option == "--mount"]
        assert words[: len(self.always())] == self.always()
        assert words[-2:] == OF_CHECKOUT
        return words[len(self.always()) : -2]

    def always(self) -> list[str]:
        return [bound(self.home), bound("/tmp"), bound("/var/tmp")]

    def inside(self, **env: Value | None) -> dict[str, str]:
        """The environment of a command inside."""
        ended = self.run("env", "-0", **env)
        assert (ended.returncode, ended.stderr) == (0, "")
        return dict(line.split("=", 1) for line in ended.stdout.split("\0") if line)

    def refused(self, ended: subprocess.CompletedProcess[str]) -> str:
        """What is said where nothing was started, without the node's name."""
        assert (ended.returncode, ended.stdout, self.calls()) == (64, "", [])
        return said(ended)

    def left(self) -> list[str]:
        """What is left on the node's disk."""
        return [path.name for path in self.disk.iterdir()]


def said(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr, without the node's name."""
    found = re.fullmatch(rf"apptrain: {re.escape(NODE)}: (.*)\n", ended.stderr)
    assert found, ended.stderr
    return found[1]


def bound(path: Path | str, target: Path | str | None = None) -> str:
    return f'type=bind,"source={path}","destination={target or path}"'


OF_CHECKOUT = [
    bound(RUN_SH.parents[1] / "entrypoint", "/.apptrain/entrypoint") + ",ro",
    bound(RUN_SH.parents[1] / "src/train", "/.apptrain/train") + ",ro",
]
"""What is bound of this checkout, at the end."""


def named(run: Path) -> str:
    """Where outcomes go, as `prepare` says it."""
    return f"{run}/outcome/%a.%n"
