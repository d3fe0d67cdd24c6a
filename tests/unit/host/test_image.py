"""`containers/run.sh` with a stand-in for Apptainer: what crosses, what is bound, what is refused, how it ends.

The stand-in records how it was called and runs the command on this machine, with the variables that it was handed
and no others. tests/cluster/test_run_sh.py has the real Apptainer; it holds what the stand-in takes for granted.
"""

import getpass
import itertools
import json
import marshal
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome

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
if os.environ.get("FAKE_MOUNT") == "fails" and "--unsquash" not in argv:
    print("FATAL:   container creation failed: image driver mount failure: squashfuse_ll exited: fuse: no luck", file=sys.stderr)
    sys.exit(255)
if "FAKE_STATUS" in os.environ:
    print("FATAL:   something of Apptainer's own", file=sys.stderr)
    sys.exit(int(os.environ["FAKE_STATUS"]))
env = {b"PATH": os.environb[b"PATH"], b"HOME": b"/of/the/password/file", **given}
if stack := os.environb.get(b"FAKE_STACK"):
    env[b"APPTRAIN_STACK"] = stack
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
        assert words[-1] == CHECKOUT
        return words[len(self.always()) : -1]

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


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def said(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr, without the node's name."""
    found = re.fullmatch(rf"run\.sh: {re.escape(NODE)}: (.*)\n", ended.stderr)
    assert found, ended.stderr
    return found[1]


def bound(path: Path | str, target: Path | str | None = None) -> str:
    return f'type=bind,"source={path}","destination={target or path}"'


CHECKOUT = bound(RUN_SH.parents[1]) + ",ro"


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This machine's programs, without what could run an image."""
    folder = tmp_path_factory.mktemp("tools")
    for tool in Path("/usr/bin").iterdir():
        if not tool.name.startswith(("apptainer", "singularity", "squashfuse")):
            (folder / tool.name).symlink_to(tool)
    return folder


@pytest.fixture
def node(tmp_path: Path, tools: Path) -> Iterator[Node]:
    cache = Path.home() / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="apptrain-test-", dir=cache) as folder:
        yield Node(tmp_path, tools, Path(folder).resolve())


# --- what passes -----------------------------------------------------------------------------------------------


def test_only_what_the_table_names_passes(node: Node) -> None:
    host = {
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": NODE,
        "PBS_NODENUM": "0",
        "NCPUS": "4",
        "APPTRAIN_ATTEMPT": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "3",
        "TORCH_LOGS": "x",
        "http_proxy": "a",
        "NO_PROXY": "b",
        "WANDB_MODE": "offline",
        "TZ": "UTC",
    }
    kept_out = {
        "PBS_JOBCOOKIE": "secret",
        "SLURM_JWT": "secret",
        "PYTHONPATH": "/x",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": "/x",
        "VIRTUAL_ENV": "/x",
        "CONDA_PREFIX": "/x",
        "LANG": "de_DE.UTF-8",
        "LC_ALL": "C",
        "CUDA_HOME": "/x",
        "APPTRAIN_STACK": "/x",
        "APPTRAIN_IMAGE_ID": "another's",
        "APPTRAIN_OUTCOME": "/x",
        "PYTHON_EXEC": "/x",
        "SHELL": "/bin/tcsh",
        "ANYTHING": "else",
    }
    inside = node.inside(**host, **kept_out)
    tmp = Path(inside["TMPDIR"])
    assert tmp.parent == node.disk
    assert inside == host | {
        "PATH": str(node.env["PATH"]),
        "PWD": str(node.work),
        "HOME": str(node.home),
        "USER": "alice",
        "LOGNAME": "alice",
        "PYTHONPATH": f"{tmp}/.packages",  # this image is not ours
        "TMPDIR": str(tmp),
        "TRITON_CACHE_DIR": f"{tmp}/triton_cache_dir",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp}/torchinductor_cache_dir",
        "MPLCONFIGDIR": f"{tmp}/mplconfigdir",
        "XDG_CACHE_HOME": f"{tmp}/xdg_cache_home",
        "HF_HOME": f"{node.home}/.cache/huggingface",
        "TORCH_HOME": f"{node.home}/.cache/torch",
        "PYTHONNOUSERSITE": "1",
        "APPTRAIN_IMAGE_ID": IMAGE_ID,
    }


VALUES = (
    "",
    "two words ",
    "a,b:c=d",
    "$HOME $(id) `id`",
    "'\"\\",
    "end\\",
    "line\nline\n",
    "\t\r*~#%",
    "é€😀",
    "x" * 100_000,
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value[:20]))
def test_values_and_arguments_arrive_as_they_are(node: Node, value: str) -> None:
    script = "import json, os, sys; print(json.dumps([os.environ['HF_X'], sys.argv[1]]))"
    ended = node.run(sys.executable, "-c", script, value, HF_X=value)
    assert (ended.returncode, ended.stderr, json.loads(ended.stdout)) == (0, "", [value, value])


def test_the_user_adds_names_and_prefixes(node: Node) -> None:
    host = {"MY_NAME": "1", "MY_OTHER": "2", "COMET_KEY": "3", "COMETS": "4"}
    inside = node.inside(APPTRAIN_PASS="MY_NAME\n COMET_* NOT_SET", **host)
    assert {name: inside.get(name) for name in host} == host | {"MY_OTHER": None, "COMETS": None}


@pytest.mark.parametrize(
    "name", ["PYTHONPATH", "LD_PRELOAD", "PBS_JOBCOOKIE", "SLURM_JWT", "PATH", "CONDA_PREFIX", "LC_ALL"]
)
def test_what_never_passes_is_refused_by_name(node: Node, name: str) -> None:
    ended = node.run("true", APPTRAIN_PASS=f"A {name}")
    assert node.refused(ended) == f"APPTRAIN_PASS: {name} never passes: set it in CMD, with env NAME=VALUE"


def test_what_never_passes_is_left_out_of_a_prefix(node: Node) -> None:
    assert "SLURM_JWT" not in node.inside(APPTRAIN_PASS="S*", SLURM_JWT="secret")


@pytest.mark.parametrize("word", ["*", "A-B", "A=1", "1A", "*_A", "A*B"])
def test_a_malformed_name_is_refused(node: Node, word: str) -> None:
    ended = node.run("true", APPTRAIN_PASS=f"X {word}")
    assert (
        node.refused(ended)
        == f"APPTRAIN_PASS: {word} is not NAME or PREFIX_*: give names with blanks between them"
    )


def test_names_that_are_no_identifiers_are_skipped(node: Node) -> None:
    inside = node.inside(**{"SLURM_A-B": "1", "SLURM_a.b": "2", "SLURM_C": "3"})
    assert [name for name in inside if name.startswith("SLURM")] == ["SLURM_C"]


def test_a_value_that_is_not_utf_8_is_said_and_left_out(node: Node) -> None:
    ended = node.run("sh", "-c", 'echo "${HF_X-none} $HF_Y"', HF_X=b"caf\xe9", HF_Y="here")
    assert (ended.returncode, ended.stdout) == (0, "none here\n")
    assert said(ended) == "not passed, the value is not UTF-8: HF_X"


def test_an_argument_that_is_not_utf_8_is_refused(node: Node) -> None:
    ended = node.run("true", b"caf\xe9")
    assert node.refused(ended) == (
        "an argument is not UTF-8, which would arrive changed: rename or encode it otherwise"
    )


def test_what_steers_apptainer_from_outside_is_said_once_and_not_obeyed(node: Node) -> None:
    ours = {"APPTAINER_CACHEDIR": "/c", "SINGULARITY_TMPDIR": "/t", "APPTAINER_CONFIGDIR": "/d"}
    foreign = {
        "APPTAINER_BIND": "/none",
        "APPTAINERENV_X": "1",
        "APPTAINERENV_OMP_NUM_THREADS": "9",
        "APPTAINERENV_A-B": "1",
        "SINGULARITYENV_Y": "2",
        "SINGULARITY_BIND": "/none",
        "APPTAINER_NV": "1",
    }
    ended = node.run("sh", "-c", "echo $OMP_NUM_THREADS", OMP_NUM_THREADS="2", **ours, **foreign)
    assert (ended.returncode, ended.stdout) == (0, "2\n")
    listed = (
        said(ended)
        .removeprefix("not obeyed: ")
        .removesuffix(" (APPTRAIN_BIND and APPTRAIN_PASS are for that)")
    )
    assert sorted(listed.split()) == sorted(foreign)
    own = node.calls()[0]["own"]
    given = {name for name in own if name.startswith("APPTAINERENV_")}
    assert own.keys() - given == ours.keys()
    assert given & foreign.keys() == {"APPTAINERENV_OMP_NUM_THREADS"}


@pytest.mark.parametrize(
    "task", [{"SLURM_NODEID": "1"}, {"SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, {"PBS_NODENUM": "2"}]
)
def test_what_is_the_same_for_all_tasks_is_said_by_the_first(node: Node, task: dict[str, str]) -> None:
    assert node.run("true", APPTAINER_BIND="/none", **task).stderr == ""


def test_directories_of_caches_are_replaced_unless_they_are_asked_for(node: Node) -> None:
    mine = {"TRITON_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}
    ended = node.run("sh", "-c", "echo $TRITON_CACHE_DIR $HF_HOME", **mine)
    assert re.fullmatch(rf"{node.disk}/apptrain\.\w{{6}}/triton_cache_dir /b/huggingface\n", ended.stdout)
    said_so = said(ended).split(":")
    assert said_so[0] == "set to directories on each node's disk"
    assert sorted(said_so[1].removesuffix(" (APPTRAIN_PASS keeps yours)").split()) == sorted(mine)
    assert node.inside(APPTRAIN_PASS="TRITON_CACHE_DIR XDG_*", **mine).items() >= mine.items()


def test_a_task_without_a_user_name_gets_one(node: Node) -> None:
    inside = node.inside(USER=None, LOGNAME=None)
    assert (inside["USER"], inside["LOGNAME"]) == (getpass.getuser(), getpass.getuser())


# --- what is shown ---------------------------------------------------------------------------------------------


def test_home_the_temporary_directories_and_the_working_directory_are_shown(node: Node) -> None:
    ended = node.run("pwd")
    assert (ended.stdout, node.binds()) == (f"{node.work}\n", [bound(node.work)])


def test_each_path_of_the_job_is_shown_once(node: Node) -> None:
    names = ("checkout", "submit", "scripts", "run", "disk", "spool")
    folders = {name: node.path / name for name in names}
    for folder in folders.values():
        folder.mkdir()
    script = folders["scripts"] / "train.py"
    nodefile = folders["spool"] / "10[3].server"
    script.touch()
    nodefile.touch()
    node.python("exit 0")
    ended = node.task(
        *(
            "--script",
            script,
            "--bind",
            "the run directory",
            folders["run"],
            "--bind",
            "the same",
            folders["run"],
        ),
        APPTRAIN_HOME=str(folders["checkout"]),
        SLURM_SUBMIT_DIR=str(folders["submit"]),
        SLURM_TMPDIR=str(folders["disk"]),
        PBS_NODEFILE=str(nodefile),
    )
    assert ended.returncode == 0, ended.stderr
    binds = node.binds()
    tmp = re.search(r'"source=([^"]*)"', binds[5])
    assert tmp
    assert Path(tmp[1]).parent == folders["disk"]
    assert binds == [
        bound(folders["checkout"]),
        bound(folders["submit"]),
        bound(node.work),
        bound(folders["scripts"]),
        bound(folders["run"]),
        bound(tmp[1]),
        bound(nodefile),
    ]


def test_what_lies_in_a_shown_directory_is_not_bound_again(node: Node) -> None:
    below = node.home / "deep" / "er"
    below.mkdir(parents=True)
    assert node.run("true", cwd=below, SLURM_SUBMIT_DIR=str(node.home / "deep")).returncode == 0
    assert node.binds() == []


def test_odd_names_are_quoted(node: Node) -> None:
    odd = node.path / "a,b \"c\" 'd' $e\\ :f=\ng*"
    odd.mkdir()
    ended = node.run("sh", "-c", 'printf %s "$PWD"', cwd=odd)
    assert (ended.returncode, ended.stdout) == (0, str(odd))
    assert node.binds() == [bound(str(odd).replace('"', '""'))]


def test_a_name_that_is_not_utf_8_is_refused(node: Node) -> None:
    odd = node.path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    ended = node.run("true", APPTRAIN_HOME=os.fsencode(odd))
    assert node.refused(ended) == (
        f"APPTRAIN_HOME {odd}: the name is not UTF-8, which apptainer cannot bind: rename it"
    )


def test_a_working_directory_behind_a_symlink_is_shown_as_spelled_and_as_resolved(node: Node) -> None:
    real = node.path / "disk1" / "project"
    real.mkdir(parents=True)
    link = node.path / "project"
    link.symlink_to(real)
    ended = node.run("sh", "-c", "pwd; pwd -P", cwd=link, PWD=str(link))
    assert (ended.stdout, node.binds()) == (f"{link}\n{real}\n", [bound(real), bound(link)])


def test_what_a_symlink_in_a_shown_directory_leads_to_is_shown(node: Node) -> None:
    real = node.path / "disk1"
    real.mkdir()
    (node.home / "link").symlink_to(real)
    assert node.run("true", cwd=node.home / "link", PWD=str(node.home / "link")).returncode == 0
    assert node.binds() == [bound(real)]


def test_directories_of_the_image_are_not_hidden(node: Node) -> None:
    ended = node.run("pwd", cwd=Path("/usr/bin"), PWD="/usr/bin")
    assert (ended.stdout, node.binds()) == ("/usr/bin\n", [])


def test_what_the_user_asks_for_is_bound_first_and_as_asked(node: Node) -> None:
    plain, other, read_only, colon = (node.path / name for name in ("plain", "other", "ro", "with:colon"))
    for path in (plain, other, read_only, colon):
        path.mkdir()
    asked = f"{plain}\n{other}:/data/set\n\n{read_only}::ro\n{other}:/more:ro\n{colon}\n"
    assert node.run("true", APPTRAIN_BIND=asked).returncode == 0
    argv = node.argv()
    words = [word for option, word in itertools.pairwise(argv) if option == "--mount"]
    assert words == [
        bound(plain),
        bound(other, "/data/set"),
        bound(read_only) + ",ro",
        bound(other, "/more") + ",ro",
        bound(colon),
        *node.always(),
        bound(node.work),
        CHECKOUT,
    ]


def test_what_is_asked_for_read_only_does_not_make_the_working_directory_so(node: Node) -> None:
    assert node.run("true", APPTRAIN_BIND=f"{node.path}::ro").returncode == 0
    assert bound(node.work) in node.argv()


@pytest.mark.parametrize("line", ["data", "/tmp:data", "/tmp:/", "/tmp:/x:rx", "/tmp:/x:ro:y", ":/x"])
def test_a_malformed_bind_is_refused(node: Node, line: str) -> None:
    ended = node.run("true", APPTRAIN_BIND=line)
    assert node.refused(ended) == (
        f"APPTRAIN_BIND: {line} is not SRC[:DST[:ro]] with paths from /: give one bind a line"
    )


@pytest.mark.parametrize(
    "name", ["APPTRAIN_BIND", "HOME", "APPTRAIN_HOME", "SLURM_SUBMIT_DIR", "PBS_O_WORKDIR"]
)
def test_a_path_that_is_not_on_this_node_is_refused(node: Node, name: str) -> None:
    ended = node.run("true", **{name: f"{node.path}/no where"})
    assert node.refused(ended) == (
        f"{name} {node.path}/no where is not there on this node: correct it, or use a directory that all nodes share"
    )


def test_a_bind_elsewhere_of_what_is_not_there_is_refused(node: Node) -> None:
    ended = node.run("true", APPTRAIN_BIND="/no/where:/data")
    assert node.refused(ended) == (
        "APPTRAIN_BIND /no/where is not there on this node: correct it, or use a directory that all nodes share"
    )


def test_a_pbs_task_starts_where_the_job_was_submitted(node: Node) -> None:
    ended = node.run("pwd", cwd=node.home, PBS_O_WORKDIR=str(node.work))
    assert ended.stdout == f"{node.work}\n"
    elsewhere = node.path / "elsewhere"
    elsewhere.mkdir()
    ended = node.run("pwd", cwd=elsewhere, PBS_O_WORKDIR=str(node.work))
    assert ended.stdout == f"{elsewhere}\n"


def test_a_current_directory_that_was_removed_is_refused(node: Node) -> None:
    gone = node.path / "gone"
    script = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec {RUN_SH} {node.image} true"
    ended = subprocess.run(
        ["bash", "-c", script],
        env=node.environment({}),
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert ended.returncode == 64
    assert ended.stderr.splitlines()[-1] == (
        f"run.sh: {NODE}: the current directory is not there any more: change to one that is"
    )


ARGUMENTS = (
    "--device cpu -- train.py --lr 0.1",
    "-- 'my script.py' \"a b\" c\\ d e'f'\"g\"h",
    '-- "a\\"b\\\\c\\d" \'x"y\\\' ""',
    " \t--\n'two\nlines'  ",
    "",
)


HIDDEN = (
    (("--data", "{x}/set"), "{x}/set", "{x}/set"),
    (("--data={x}/set",), "{x}/set", "{x}/set"),
    (("{x}/set/a file",), "{x}/set/a file", "{x}/set"),
    (("--out", "{x}/set/new"), "{x}/set", "{x}/set"),
    (("link",), "link", "{x}/set"),
    (("./link/a file",), "./link/a file", "{x}/set"),
)


@pytest.mark.parametrize(("arguments", "named", "bind"), HIDDEN)
def test_a_path_that_the_image_does_not_show_is_refused_with_the_bind_to_add(
    node: Node, arguments: tuple[str, ...], named: str, bind: str
) -> None:
    data = node.path / "disk" / "set"
    data.mkdir(parents=True)
    (data / "a file").touch()
    (node.work / "link").symlink_to(data)
    words = [word.format(x=data.parent) for word in arguments]
    ended = node.run("touch", "made", *words, FAKE_HIDDEN=str(data))
    assert ended.returncode == 64
    assert said(ended) == (
        f"CMD names {named.format(x=data.parent)}, which this node has but the image does not show: "
        f"add a line to APPTRAIN_BIND: {bind.format(x=data.parent)}"
    )
    assert not (node.work / "made").exists()
    assert node.left() == []


def test_arguments_that_are_no_paths_of_this_node_are_left_alone(node: Node) -> None:
    words = ["/no/where/at/all", "--x=/no/where", "https://host/path", "", "=", "/", "-", "a=b=c", "x" * 5000]
    ended = node.run("printf", "%s\\n", *words)
    assert (ended.returncode, ended.stdout.split("\n")) == (0, [*words, ""])


def test_a_program_that_the_image_lacks_is_refused(node: Node) -> None:
    ended = node.run("no such program")
    assert (ended.returncode, said(ended)) == (
        64,
        "CMD no such program is no program in the image: check the spelling, or bind it: APPTRAIN_BIND",
    )


# --- the program and the image -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [True, False])
def test_an_image_that_is_not_ours_finds_our_packages_in_the_checkout_and_nothing_else_of_it(
    node: Node, ours: bool
) -> None:
    code = """import importlib.util
print(*[name for name in ("entrypoint", "train", "tests", "tools") if importlib.util.find_spec(name)])"""
    ended = node.run(
        sys.executable, "-P", "-S", "-c", code, **({"FAKE_STACK": "/opt/stack.json"} if ours else {})
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "\n" if ours else "entrypoint train\n", "")


def test_the_command_line_is_this(node: Node) -> None:
    assert node.run("python3", "-V").returncode == 0
    argv = node.argv()
    tmp = argv[-3]
    assert re.fullmatch(rf"{node.disk}/apptrain\.\w{{6}}/\.start", tmp)
    assert argv == [
        *("-q", "exec", "--cleanenv", "--no-eval", "--no-mount", "home,cwd,tmp"),
        *NV,
        *(word for mount in [*node.always(), bound(node.work), CHECKOUT] for word in ("--mount", mount)),
        *("--pwd", str(node.work), str(node.image), "/bin/sh", tmp, "python3", "-V"),
    ]


def test_without_apptainer_it_is_refused(node: Node) -> None:
    node.apptainer.unlink()
    assert node.refused(node.run("true")) == (
        "neither apptainer nor singularity is in PATH: load the site's module, or set APPTRAIN_APPTAINER"
    )


def test_apptainer_may_be_named(node: Node) -> None:
    elsewhere = node.programs / "opt" / "app tainer"
    elsewhere.parent.mkdir()
    node.apptainer.rename(elsewhere)
    (node.programs / "opt" / "libexec").symlink_to(node.programs / "libexec")
    assert node.run("true", APPTRAIN_APPTAINER=str(elsewhere)).returncode == 0
    ended = node.run("true", APPTRAIN_APPTAINER="/no/such")
    assert (
        said(ended)
        == "APPTRAIN_APPTAINER=/no/such is no program here: give apptainer's or singularity's path"
    )


def test_another_program_of_that_name_is_refused(node: Node) -> None:
    ended = node.run("true", APPTRAIN_APPTAINER="/bin/true")
    assert node.refused(ended) == (
        "/bin/true does not say what it is (`buildcfg`): set APPTRAIN_APPTAINER to apptainer or singularity"
    )


@pytest.mark.parametrize(
    ("name", "version", "least"), [("apptainer", "1.1.9-1.el8", "1.2"), ("singularity-ce", "3.9.9", "3.10")]
)
def test_an_old_version_is_refused(node: Node, name: str, version: str, least: str) -> None:
    package = name.removesuffix("-ce")
    assert node.refused(node.run("true", FAKE_NAME=name, FAKE_VERSION=version)) == (
        f"{node.apptainer} is {package} {version}: {least} or newer is needed, for --no-eval: load a newer module, "
        "or give another in APPTRAIN_APPTAINER"
    )


@pytest.mark.parametrize(("version", "options"), [("4.1.0", ["--tmp-sandbox"]), ("3.11.4-1.el8", [])])
def test_singularity_is_used_with_its_own_names(node: Node, version: str, options: list[str]) -> None:
    node.setuid("singularity")
    node.apptainer.rename(node.bin / "singularity")
    how = {"FAKE_NAME": "singularity-ce", "FAKE_VERSION": version, "APPTRAIN_UNPACK": "1"}
    ended = node.run("sh", "-c", "echo $HF_X", HF_X="a b", **how)
    assert (ended.returncode, ended.stdout) == (0, "a b\n")
    assert node.argv()[6 + len(NV) : 6 + len(NV) + len(options) + 1] == [*options, "--mount"]
    assert not any(name.startswith("APPTAINER") for name in node.calls()[0]["own"])


def test_singularity_without_setuid_unpacks_before_4_1(node: Node) -> None:
    squashfuse = node.programs / "libexec" / "singularity" / "bin" / "squashfuse_ll"
    squashfuse.parent.mkdir(parents=True)
    squashfuse.touch(mode=0o755)
    ended = node.run("true", FAKE_NAME="singularity-ce", FAKE_VERSION="4.0.3")
    if "/dev/fuse may not be opened" not in ended.stderr:
        assert said(ended).startswith(
            "this node does not mount the image (singularity 4.0.3 mounts only where it is setuid): unpacking it to "
        )


def test_a_missing_image_is_refused(node: Node) -> None:
    ended = node.run("true", image=node.path / "none.sif")
    assert node.refused(ended) == (
        f"there is no image {node.path}/none.sif on this node, or its directory may not be searched: make image, or "
        "give a path that all nodes share"
    )


def test_an_image_that_is_a_fifo_is_refused_at_once(node: Node) -> None:
    os.mkfifo(node.path / "pipe")
    ended = node.run("true", image=node.path / "pipe")
    assert node.refused(ended) == f"the image {node.path}/pipe is no file: give a SIF file"


@pytest.mark.parametrize(
    "content", [b"", b"short", b"#!/bin/sh\n" * 100, bytes(1000), bytes(32) + b"SIF_MAGIC\0" + bytes(85)]
)
def test_an_image_that_is_no_sif_is_refused(node: Node, content: bytes) -> None:
    file = node.path / "file"
    file.write_bytes(content)
    ended = node.run("true", image=file)
    assert node.refused(ended) == f"{file} is no SIF file: give one, such as make image makes"


def test_an_image_for_another_processor_is_refused(node: Node) -> None:
    image = sif(node.path / "other.sif", arch=b"11")
    ended = node.run("true", image=image)
    assert node.refused(ended) == (
        f"the image {image} is for another kind of processor than this node's {os.uname().machine}: "
        "make one on such a node"
    )


def test_an_image_of_no_said_processor_is_left_to_apptainer(node: Node) -> None:
    assert node.run("true", image=sif(node.path / "unknown.sif", arch=b"00")).returncode == 0


def test_an_image_that_was_cut_off_is_refused(node: Node) -> None:
    image = sif(node.path / "cut.sif", missing=1)
    ended = node.run("true", image=image)
    assert (
        node.refused(ended)
        == f"the image {image} is cut off: it has 1127 of 1128 bytes: copy or make it again"
    )


def test_an_unpacked_image_is_taken_and_another_directory_refused(node: Node) -> None:
    folder = node.path / "unpacked"
    folder.mkdir()
    ended = node.run("true", image=folder)
    assert node.refused(ended) == (
        f"{folder} is a directory, but no unpacked image (it has no .singularity.d): give a SIF file"
    )
    (folder / ".singularity.d").mkdir()
    ended = node.run("sh", "-c", 'echo "${APPTRAIN_IMAGE_ID-none}"', image=folder, APPTRAIN_UNPACK="1")
    assert (ended.stdout, ended.stderr) == ("none\n", "")
    assert "--unsquash" not in node.argv()


def test_the_image_is_unpacked_on_request(node: Node) -> None:
    ended = node.run("true", APPTRAIN_UNPACK="1")
    assert ended.returncode == 0
    assert re.fullmatch(
        rf"this node does not mount the image \(APPTRAIN_UNPACK=1\): unpacking it to {node.disk}/apptrain\.\w{{6}}, "
        "about 1 MB, for this run",
        said(ended),
    )
    assert "--unsquash" in node.argv()
    assert node.calls()[0]["own"]["APPTAINER_TMPDIR"].startswith(f"{node.disk}/apptrain.")


def test_what_is_neither_a_wish_to_unpack_nor_not_is_refused(node: Node) -> None:
    assert node.refused(node.run("true", APPTRAIN_UNPACK="yes")) == "APPTRAIN_UNPACK=yes: must be 1 or 0"


def test_the_users_own_place_for_unpacking_is_kept(node: Node) -> None:
    assert node.run("true", APPTRAIN_UNPACK="1", APPTAINER_TMPDIR=str(node.home)).returncode == 0
    assert node.calls()[0]["own"]["APPTAINER_TMPDIR"] == str(node.home)
    ended = node.run("true", APPTRAIN_UNPACK="1", APPTAINER_TMPDIR="/no/where")
    assert (ended.returncode, said(ended)) == (
        64,
        "APPTAINER_TMPDIR /no/where is no directory that may be written: correct it, or use a directory that all "
        "nodes share",
    )


def test_without_room_to_unpack_it_is_refused(node: Node) -> None:
    size = shutil.disk_usage(node.disk).free
    image = sif(node.path / "large.sif", data=0)
    with image.open("r+b") as file:
        file.seek(112)
        file.write(struct.pack("<qq", 128, size - 128))
        file.truncate(size)
    ended = node.run("true", image=image, APPTRAIN_UNPACK="1")
    text = node.refused(ended)
    free = re.search(r"has (\d+) MB free", text)
    assert free
    place = re.search(rf"{node.disk}/apptrain\.\w{{6}}", text)
    assert place
    assert text == (
        f"this node does not mount the image (APPTRAIN_UNPACK=1), and {place[0]}, where it would be unpacked, has "
        f"{free[1]} MB free of the {size * 2 // 10**6 + 1} MB needed: give a larger node-local directory in "
        "APPTAINER_TMPDIR"
    )


def test_a_mount_that_fails_is_followed_by_unpacking(node: Node) -> None:
    ended = node.run("echo", "it ran", FAKE_MOUNT="fails")
    assert (ended.returncode, ended.stdout) == (0, "it ran\n")
    assert re.fullmatch(
        "FATAL:   container creation failed: image driver mount failure: squashfuse_ll exited: fuse: no luck\n"
        rf"run\.sh: {NODE}: this node does not mount the image \(fuse: no luck\): unpacking it to \S+, about 1 MB, for this run\n",
        ended.stderr,
    )
    assert ["--unsquash" in call["argv"] for call in node.calls()] == [False, False, True]


def test_apptainers_own_failure_keeps_its_status(node: Node) -> None:
    ended = node.run("true", FAKE_STATUS="255")
    assert ended.returncode == 255
    assert ended.stderr == (
        "FATAL:   something of Apptainer's own\n"
        f"run.sh: {NODE}: apptainer ended with status 255 before CMD began: its own message stands above\n"
    )


@pytest.mark.parametrize("arguments", [[], ["image.sif"], ["--show", "image.sif"]])
def test_the_usage_is_said(node: Node, arguments: list[str]) -> None:
    ended = node.call(arguments)
    assert (ended.returncode, said(ended)) == (
        64,
        "usage: containers/run.sh [--show] [OPTION...] IMAGE CMD [ARG...]",
    )


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has an NVIDIA driver")
@pytest.mark.ci_may_skip("a machine with an NVIDIA driver; tests/cluster has the same on a node of its own")
def test_forward_compatibility_without_a_driver_is_said_and_not_used(node: Node) -> None:
    ended = node.run("sh", "-c", 'echo "${LD_LIBRARY_PATH-none}"', APPTRAIN_CUDA_COMPAT="/no/where")
    assert (ended.returncode, ended.stdout) == (0, "none\n")
    assert said(ended) == "APPTRAIN_CUDA_COMPAT=/no/where is not used: no NVIDIA driver here"


def test_gpus_without_a_driver_are_said_unless_the_run_is_on_cpus(node: Node) -> None:
    node.python("true")
    warning = (
        f"run.sh: {NODE}: GPUs were granted (CUDA_VISIBLE_DEVICES=0,1), but this node has no NVIDIA driver "
        "(/proc/driver/nvidia/version): CMD will see none\n"
    )
    for options, text in (((), warning), (("--cpu",), ""), (("--quiet",), "")):
        ended = node.task(*options, CUDA_VISIBLE_DEVICES="0,1")
        assert (ended.returncode, ended.stderr) == (0, text)


@pytest.mark.parametrize("option", ["--bnid", "--run-dir", "--bind"])
def test_an_unknown_option_is_refused_and_one_without_its_value_is_the_usage(node: Node, option: str) -> None:
    said_of = node.refused(node.call([option]))
    if option == "--bind":
        assert said_of == "usage: containers/run.sh [--show] [OPTION...] IMAGE CMD [ARG...]"
    else:
        assert said_of == f"{option} is no option of run.sh: an option of CMD comes behind it"


def test_a_quiet_run_says_only_why_it_cannot_run(node: Node) -> None:
    node.python("true")
    folder = node.path / "not here"
    assert node.task("--quiet", TRITON_CACHE_DIR="/x").stderr == ""
    ended = node.task("--quiet", "--bind", "the data", folder)
    assert said(ended).startswith(f"the data {folder} is not there on this node: ")


def test_all_of_the_host_is_what_the_image_lacks_and_no_automounter(node: Node, tmp_path: Path) -> None:
    copy = tmp_path / "check" / "containers" / "run.sh"
    shutil.copytree(RUN_SH.parents[1] / "host", tmp_path / "check" / "host")
    copy.parent.mkdir()
    shutil.copy(RUN_SH, copy)
    binds = tmp_path / "check" / "host" / "binds.sh"
    binds.write_text(binds.read_text().replace("/proc/self/mountinfo", f"{tmp_path}/mounts"))
    top = [
        str(path)
        for path in Path("/").iterdir()
        if path.is_dir() and path.name in ("work", "srv", "data", "root")
    ]
    (tmp_path / "mounts").write_text("")

    def shown() -> set[str]:
        line: list[str | Path] = [copy, "--all-of-host", node.image, "true"]
        ended = subprocess.run(
            line, cwd=node.work, env=node.env, capture_output=True, text=True, timeout=BOUND
        )
        assert ended.returncode == 0, ended.stderr
        words = [word for option, word in itertools.pairwise(node.argv()) if option == "--mount"]
        return {found[1] for word in words if (found := re.search(r'destination=([^"]*)"', word))}

    everything = shown()
    assert "/home" in everything
    of_image = {"/usr", "/etc", "/bin", "/lib", "/opt", "/var", "/run", "/boot", "/dev", "/proc", "/sys"}
    assert not of_image & everything
    assert {path for path in top if path == "/work"} <= everything
    (tmp_path / "mounts").write_text(
        "36 35 98:0 / /home rw,relatime shared:1 - autofs systemd-1 rw\n37 35 98:0 / /work rw - autofs auto.work rw\n"
    )
    assert not {"/home", "/work"} & shown()


def test_further_variables_pass_as_the_job_script_says(node: Node) -> None:
    node.python("env")
    ended = node.task("--pass", "MY_*", "--pass", "ONE", MY_X="1", ONE="2", TWO="3")
    lines = ended.stdout.splitlines()
    assert ({"MY_X=1", "ONE=2"} <= set(lines), "TWO=3" in lines) == (True, False)


# --- the node's disk ---------------------------------------------------------------------------------------------


def test_the_temporary_directory_is_private_and_goes_with_the_run(node: Node) -> None:
    ended = node.run(
        "sh", "-c", 'stat -c "%a %n" "$TMPDIR"; mkdir -p "$TMPDIR/a/b"; chmod 500 "$TMPDIR/a"; exit 3'
    )
    assert re.fullmatch(rf"700 {node.disk}/apptrain\.\w{{6}}\n", ended.stdout)
    assert (ended.returncode, ended.stderr, node.left()) == (3, "", [])


def test_a_temporary_directory_that_does_not_serve_is_passed_over(node: Node) -> None:
    ended = node.run("true", SLURM_TMPDIR="/no/where")
    assert said(ended) == f"/no/where is no directory that may be written: temporary files go to {node.disk}"
    assert node.run("true", SLURM_TMPDIR="relative").stderr == ""


# --- a venv ------------------------------------------------------------------------------------------------------


def make_venv(folder: Path, python: Path, packages: str = "true") -> None:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(python)
    version = ".".join(map(str, sys.version_info[:2]))
    (folder / "pyvenv.cfg").write_text(
        f"home = {python.parent}\ninclude-system-site-packages = {packages}\nversion = {version}.7\n"
    )


IMAGE_PYTHON = Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def test_a_venv_comes_first_in_path(node: Node) -> None:
    venv = node.path / "my venv"
    make_venv(venv, IMAGE_PYTHON)
    ended = node.run("sh", "-c", 'command -v python; echo "$VIRTUAL_ENV"', APPTRAIN_VENV=str(venv))
    assert (ended.stdout, ended.stderr) == (f"{venv}/bin/python\n{venv}\n", "")
    assert node.binds() == [bound(node.work), bound(venv)]
    node.task("--venv", venv)
    assert node.binds() == [bound(node.work), bound(venv)]


def test_a_venv_of_another_image_is_refused(node: Node) -> None:
    venv = node.path / "my venv"
    make_venv(venv, Path("/opt/other/bin/python"))
    ended = node.run("true", APPTRAIN_VENV=str(venv))
    bash_quoted = str(venv).replace(" ", "\\ ")
    version = ".".join(map(str, sys.version_info[:2]))
    assert (ended.returncode, said(ended)) == (
        64,
        f"APPTRAIN_VENV={venv} was made with /opt/other/bin/python{version}, which the image lacks: remove "
        f"it, make venv DIR={bash_quoted}",
    )


def test_what_is_no_venv_is_refused(node: Node) -> None:
    venv = node.path / "venv"
    venv.mkdir()
    assert node.refused(node.run("true", APPTRAIN_VENV=str(venv))) == (
        f"APPTRAIN_VENV={venv} is no venv, it has no pyvenv.cfg or no bin/python: make venv DIR={venv}"
    )


def test_a_venv_that_does_not_see_the_images_packages_is_refused(node: Node) -> None:
    venv = node.path / "venv"
    make_venv(venv, IMAGE_PYTHON, packages="false")
    assert node.refused(node.run("true", APPTRAIN_VENV=str(venv))) == (
        f"APPTRAIN_VENV={venv} does not see the image's packages: make venv DIR={venv}"
    )


def test_a_venv_with_a_colon_in_its_path_is_refused(node: Node) -> None:
    venv = node.path / "a:b"
    make_venv(venv, IMAGE_PYTHON)
    assert node.refused(node.run("true", APPTRAIN_VENV=str(venv))) == (
        f"APPTRAIN_VENV={venv} has a colon in it, which PATH cannot hold: make it elsewhere"
    )


# --- how it ends ---------------------------------------------------------------------------------------------------

SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
CATCHING = """
import os, signal, sys, time
seen = []
def note(signum, frame):
    seen.append(signum)
for signum in map(int, sys.argv[1:]):
    signal.signal(signum, note)
print("ready", signal.getsignal(signal.SIGINT) != signal.SIG_IGN, flush=True)
while not seen:
    time.sleep(0.02)
time.sleep(0.2)  # for a second one
print(*seen)
sys.exit(7)
"""


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_reaches_the_command_once_and_its_status_comes_back(
    node: Node, signum: signal.Signals
) -> None:
    with node.start(sys.executable, "-c", CATCHING, str(int(signum))) as process:
        assert first_line(process) == "ready True\n"
        process.send_signal(signum)
        out, err = process.communicate(timeout=BOUND)
    assert (process.returncode, out, err, node.left()) == (7, f"{int(signum)}\n", "", [])


@pytest.mark.parametrize("signum", [*SIGNALS, signal.SIGKILL, signal.SIGSEGV])
def test_death_by_a_signal_is_128_and_its_number(node: Node, signum: signal.Signals) -> None:
    ended = node.run("sh", "-c", f"kill -{int(signum)} $$")
    assert (ended.returncode, ended.stderr, node.left()) == (128 + signum, "", [])


def test_a_signal_that_ends_the_command_leaves_nothing(node: Node) -> None:
    with node.start("sh", "-c", "echo ready; exec sleep 60") as process:
        assert first_line(process) == "ready\n"
        process.terminate()
        _, err = process.communicate(timeout=BOUND)
    assert (process.returncode, err, node.left()) == (143, "", [])


def test_a_signal_before_the_start_ends_it(node: Node) -> None:
    gate = node.programs / "gate"
    os.mkfifo(gate)
    node.program("od", f'#!/bin/sh\nread line <{gate}\nexec /usr/bin/od "$@"\n')
    with node.start("true") as process:
        writer = gate.open("w")
        process.terminate()
        writer.close()
        _, err = process.communicate(timeout=BOUND)
    assert (process.returncode, err, node.calls(), node.left()) == (143, "", [], [])


def test_standard_input_reaches_the_command(node: Node) -> None:
    assert node.call([node.image, "cat"], text="line\n").stdout == "line\n"


def test_off_a_terminal_the_command_has_a_process_group_of_its_own(node: Node) -> None:
    assert node.run("true").returncode == 0
    (call,) = node.calls()
    assert call["group"] == call["pid"]


def test_at_a_terminal_ctrl_c_reaches_the_command_once(node: Node) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        command = [str(RUN_SH), str(node.image), sys.executable, "-c", CATCHING, "2"]
        os.chdir(node.work)
        os.execve(
            RUN_SH, command, {os.fsencode(name): os.fsencode(value) for name, value in node.env.items()}
        )
    said_there = b""
    asked = False
    while select.select([terminal], [], [], BOUND)[0]:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:
            break
        said_there += chunk
        if not asked and b"ready" in said_there:
            os.write(terminal, b"\x03")
            asked = True
    _, status = os.waitpid(pid, 0)
    lines = [line for line in said_there.decode().splitlines() if "/dev/shm" not in line]
    assert (os.waitstatus_to_exitcode(status), lines) == (7, ["ready True", "^C2"])
    assert node.left() == []


# --- outcomes ---------------------------------------------------------------------------------------------------------

TASK = {"SLURM_NODEID": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "APPTRAIN_ATTEMPT": "2"}


def named(run: Path) -> str:
    """Where outcomes go, as `prepare` says it."""
    return f"{run}/outcome/%a.%n"


def outcomes(run: Path) -> dict[str, Outcome | None]:
    return {path.name: outcome.read(path) for path in (run / "outcome").iterdir()}


def check_outcome(run: Path, name: str, status: int, error: str, signum: int = 0) -> None:
    """There is this outcome and no other, written within the test's time."""
    (found,) = outcomes(run).items()
    assert found[1] is not None
    assert abs(found[1].time - time.time()) < BOUND
    expected = Outcome(status=status, node=NODE, signal=signum, time=found[1].time, error=error)
    assert found == (name, expected)
    assert (run / "outcome" / name).stat().st_mode & 0o777 == 0o600
    assert run.stat().st_mode & 0o777 == 0o700


def test_a_node_without_its_image_leaves_an_outcome(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    missing = node.path / "none.sif"
    ended = node.call(["--outcome", named(run), missing, "python"], env=TASK)
    assert ended.returncode == 64
    check_outcome(run, "2.3", 64, said(ended))


def test_apptainers_own_failure_leaves_an_outcome(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    ended = node.task("--outcome", named(run), FAKE_STATUS="255", **TASK)
    assert ended.returncode == 255
    check_outcome(run, "2.3", 255, "apptainer ended with status 255 before CMD began")


def test_an_entrypoint_that_was_killed_leaves_an_outcome(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    node.python("kill -9 $$")
    assert node.task("--outcome", named(run), **TASK).returncode == 137
    check_outcome(run, "2.3", 137, "the entrypoint ended with status 137 and left no outcome", signum=9)


def test_an_outcome_that_the_entrypoint_writes_where_it_is_told_to_is_kept(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    node.python('echo status=5 >"$APPTRAIN_OUTCOME"; exit 5')
    assert node.task("--outcome", named(run), **TASK).returncode == 5
    assert outcomes(run) == {"2.3": Outcome(status=5)}


def test_a_good_end_and_other_commands_leave_none(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    node.python("exit 0")
    assert node.task("--outcome", named(run), **TASK).returncode == 0
    assert node.run("false", **TASK).returncode == 1
    assert outcomes(run) == {}


def test_an_earlier_runs_outcome_of_the_same_attempt_goes_at_the_start(node: Node) -> None:
    run = node.path / "runs" / "job-1"
    (run / "outcome").mkdir(parents=True)
    for name in ("2.3", "2.4", "1.3"):
        (run / "outcome" / name).write_text("status=1\n")
    node.python("exit 0")
    assert node.task("--outcome", named(run), **TASK).returncode == 0
    assert sorted(outcomes(run)) == ["1.3", "2.4"]


@pytest.mark.parametrize(
    ("task", "name", "found"),
    [
        ({"PBS_NODENUM": "1"}, "%a.%n", "0.1"),
        ({"APPTRAIN_NODE_RANK": "4"}, "%a.%n", "0.4"),
        ({"SLURM_NODEID": "1", "APPTRAIN_ATTEMPT": "2"}, "%a.%n", "2.1"),
        ({"SLURM_NODEID": "1", "SLURM_LOCALID": "3"}, "%a.%n.%t", "0.1.3"),
    ],
)
def test_the_outcome_has_the_name_that_the_job_script_says(
    node: Node, task: dict[str, str], name: str, found: str
) -> None:
    run = node.path / "runs" / "100%n of it"
    node.python("exit 9")
    assert node.task("--outcome", f"{run}/outcome/{name}", **task).returncode == 9
    assert list(outcomes(run)) == [found]


def test_a_run_directory_that_cannot_be_made_is_refused(node: Node) -> None:
    (node.work / "file").touch()
    ended = node.task("--outcome", named(node.work / "file" / "run"), **TASK)
    assert node.refused(ended) == (
        f"the run directory {node.work}/file/run cannot be made: give another in APPTRAIN_RUN_DIR, which all nodes share"
    )


# --- what is shown of it ---------------------------------------------------------------------------------------------


def test_show_prints_what_would_run_and_starts_nothing(node: Node) -> None:
    read_only = node.path / "set"
    read_only.mkdir()
    run = node.path / "runs" / "job-1"
    command = ("python", "-P", "-m", "entrypoint", "launch", "--", "a b.py")
    env = {
        "HF_TOKEN": "secret",
        "APPTRAIN_BIND": f"{read_only}:/data:ro",
        "APPTRAIN_RUN_DIR": str(run),
        **TASK,
    }
    ended = node.call(["--show", node.image, *command], env=env)
    assert (ended.returncode, ended.stderr, node.calls(), node.left(), run.exists()) == (0, "", [], [], False)
    tmp = re.search(rf"{node.disk}/apptrain\.\w{{6}}", ended.stdout)
    assert tmp
    given = [
        *(
            "APPTRAIN_ATTEMPT",
            "APPTRAIN_BIND",
            "APPTRAIN_IMAGE_ID",
            "APPTRAIN_RUN_DIR",
            "HF_HOME",
            "HF_TOKEN",
            "LOGNAME",
            "MPLCONFIGDIR",
        ),
        *(
            "PYTHONNOUSERSITE",
            "SLURM_NODEID",
            "SLURM_STEP_TASKS_PER_NODE",
            "TMPDIR",
            "TORCHINDUCTOR_CACHE_DIR",
        ),
        *("TORCH_HOME", "TRITON_CACHE_DIR", "USER", "XDG_CACHE_HOME"),
    ]
    binds = [
        (f"{read_only}:/data", "ro", "APPTRAIN_BIND"),
        (node.home, "rw", "HOME"),
        ("/tmp", "rw", "the node's"),
        ("/var/tmp", "rw", "the node's"),
        (node.work, "rw", "the working directory"),
        (RUN_SH.parents[1], "ro", "the checkout"),
    ]
    mounts = [bound(read_only, "/data") + ",ro", *node.always(), bound(node.work), CHECKOUT]
    line = [
        *(str(node.apptainer), "-q", "exec", "--cleanenv", "--no-eval", "--no-mount", "home,cwd,tmp", *NV),
        *(word for mount in mounts for word in ("--mount", mount)),
        *("--pwd", str(node.work), str(node.image), "/bin/sh", f"{tmp[0]}/.start", *command),
    ]
    *shown, last = ended.stdout.splitlines()
    assert shown == [
        f"image    {node.image} (sif {IMAGE_ID})",
        f"with     {node.apptainer} (apptainer 1.4.5)",
        f"starts   in {node.work}",
        "",
        "binds",
        *(f"  {path}, {mode}  [{reason}]" for path, mode, reason in binds),
        "",
        "variables",
        *(f"  {name}" for name in sorted(given)),
        "",
        "command",
    ]
    assert shlex.split(last) == line


def test_the_documentation_names_what_passes_and_what_never_does() -> None:
    script = f"""source <(sed -n '/^readonly [A-Z]*=($/,/^)/p; /^readonly CACHES/p' '{RUN_SH.parents[1]}/host/environment.sh')
        printf '%s\\n' "${{PASSED[@]}}" "${{NEVER[@]}}" "${{CACHES[@]}}" """
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    names = ended.stdout.split()
    assert len(names) > 60
    text = (RUN_SH.parents[1] / "docs" / "run.md").read_text()
    assert [name for name in names if f"`{name}`" not in text] == []
