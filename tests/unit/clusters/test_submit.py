"""Site profiles: what may stand in one, the host file that is made of it, and the line that submits.

tests/unit/slurm/test_slurm_job.py has what a job makes of a profile, tests/unit/test_cli.py what the entrypoint does.
"""

import ast
import compileall
import hashlib
import marshal
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusters import render, submit
from entrypoint.errors import BadInput
from entrypoint.plan import profile
from entrypoint.plan.options import OPTIONS

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 60  # s, for anything started here
SHIPPED = sorted((CHECKOUT / "clusters").glob("*.yaml"))
GENERIC = ("generic", "generic-pbs")
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
        checkout, _, name = program.rpartition("/clusters/")
        sys.path.insert(0, checkout)  # as python -m does for who is there
        runpy.run_module("clusters." + name.removesuffix(".py"), run_name="__main__", alter_sys=True)
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


Forks = Callable[[Path, Sequence[str], Path, dict[str, str]], "subprocess.CompletedProcess[str]"]
"""Runs a program with these arguments, in this directory, with this environment."""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    folder = tmp_path_factory.mktemp("forks")
    files = ["/dev/null", str(folder / "out"), str(folder / "err")]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", FORKS],
        env={"PATH": "/usr/bin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:

        def run(
            program: Path, arguments: Sequence[str], cwd: Path, env: dict[str, str]
        ) -> "subprocess.CompletedProcess[str]":
            assert server.stdin is not None
            assert server.stdout is not None
            request = marshal.dumps((str(program), list(arguments), str(cwd), env, files))
            server.stdin.write(len(request).to_bytes(4, "big") + request)
            server.stdin.flush()
            (status,) = server.stdout.read(1)
            out, err = (Path(file).read_text() for file in files[1:])
            return subprocess.CompletedProcess(arguments, status, out, err)

        yield run


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What submits, compiled."""
    folder = tmp_path_factory.mktemp("checkout") / "check out"
    shutil.copytree(CHECKOUT / "clusters", folder / "clusters")
    for name in ("entrypoint/plan", "containers"):
        (folder / name).mkdir(parents=True)
    for name in ("entrypoint/__init__.py", "entrypoint/errors.py", "entrypoint/plan/__init__.py",
                 "entrypoint/plan/profile.py",
                 "containers/__init__.py", "containers/stacks.py", "containers/stacks.yaml"):  # fmt: skip
        shutil.copy(CHECKOUT / name, folder / name)
    for name, text in (("slurm/multinode.sbatch", "#!/bin/bash\n"), ("pbs/multinode.pbs", PBS_SCRIPT)):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    (folder / "containers" / "image.sif").touch()
    assert compileall.compile_dir(folder, quiet=1)
    return folder


class Site:
    """A checkout of what submits, stand-ins for sbatch and qsub, and a profile named lab."""

    def __init__(self, folder: Path, checkout: Path, forks: Forks) -> None:
        self.folder = folder
        self.forks = forks
        self.checkout = folder / "check out"
        shutil.copytree(checkout, self.checkout)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("sbatch", "qsub"):
            (self.bin / name).write_text(SCHEDULER.format(python=sys.executable, here=folder))
            (self.bin / name).chmod(0o755)
        self.lab = self.checkout / "clusters" / "lab.yaml"

    def write(self, text: str) -> None:
        """The profile lab, and its shell file."""
        self.lab.write_text(text)
        made = self.run("render.py", str(self.lab))
        assert (made.returncode, made.stderr) == (0, "")

    def run(
        self, program: str, *arguments: str, cwd: Path | None = None, **env: Any
    ) -> "subprocess.CompletedProcess[str]":
        return self.forks(
            self.checkout / "clusters" / program,
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


@pytest.fixture
def site(tmp_path: Path, checkout: Path, forks: Forks) -> Site:
    return Site(tmp_path, checkout, forks)


# --- what may stand in a profile ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler: lsf", "scheduler is 'lsf': give one of slurm, pbs"),
        ("scheduler: slurm\nstart: mpiexec", "start is 'mpiexec': give under slurm srun"),
        ("scheduler: pbs\nstart: srun", "start is 'srun': give under pbs pbsdsh or pbs_tmrsh or mpiexec or ssh"),
        ("launcher_args: --cpu-bind", "launcher_args is '--cpu-bind': give a list, as in [a, b]"),
        ("clusters: [a b]", "clusters, entry 1, is 'a b': give one word, without blanks"),
        ("clusters: [a, 7]", "clusters, entry 2, is 7: give text, in quotes where YAML takes it for something else"),
        ("title: \"a\\nb\"", "title is 'a\\nb': give one line of printable characters"),
        ("request: {stop_before: 0}", "request stop_before is 0: give a whole number from 1"),
        ("request: {stop_before: true}", "request stop_before is True: give a whole number from 1"),
        ("host_suffix: '.hsn; x'", "host_suffix is '.hsn; x': give the end of a host's name, such as -hsn"),
        ("scratch: work", "scratch is 'work': give a path from /, or one that begins with a variable"),
        ("scratch: /data/$(id)", "scratch is '/data/$(id)': give $ only in front of a variable's name, as $NAME or ${NAME}"),
        ("scratch: /data/${A", "scratch is '/data/${A': give $ only in front of a variable's name, as $NAME or ${NAME}"),
        ("nodes: {gpus: four}", "nodes gpus is 'four': give a whole number from 0"),
        ("nodes: {whole: maybe}", "nodes whole is 'maybe': give true or false"),
        ("nodes: [4]", "nodes must be a mapping, found [4]"),
        ("nodes: {gpu: 4}", "nodes: unknown key gpu: valid are gpus, cpus, memory_gib, whole"),
        ("request: {time: 10:00:00}", "request time is 36000: give text, in quotes where YAML takes it for something else"),
        ("request: {time: '60'}", "request time is '60': give HH:MM:SS in quotes, as in \"01:00:00\""),
        ("request: {account_option: --project}", "request account_option is '--project': give one of -A, -P"),
        ("request: {chunk: ['a=b:c=d']}", "request chunk, entry 1, is 'a=b:c=d': give NAME=VALUE, a resource of a chunk"),
        ("scheduler: slurm\nrequest: {chunk: [a=b]}", "request chunk is for pbs, and scheduler is slurm: leave it out"),
        ("scheduler: slurm\nrequest: {form: totals}", "request form totals is for pbs, and scheduler is slurm: leave it out"),
        ("scheduler: pbs\nrequest: {form: totals, chunk: [a=b]}", "request chunk has no place beside form totals: use options"),
        ("scheduler: slurm\nrequest: {nodes_only: true}", "request nodes_only goes only with whole nodes: set whole under nodes"),
        ("scheduler: slurm\nrequest: {gpus: --gres=gpu:4}", "request gpus is '--gres=gpu:4': give it as in --gpus-per-node={gpus}, or nodes_only: true instead"),
        ("scheduler: pbs\nnodes: {whole: true}\nrequest: {gpus: 'ngpus={gpus}', nodes_only: true}", "request gpus is 'ngpus={gpus}': give it as in ngpus={gpus}, or nodes_only: true instead"),
        ("container: {program: 'a b'}", "container program is 'a b': give a program's name, or a path from /"),
        ("container: {binds: [data]}", "container binds, entry 1, is 'data': give SRC[:DST[:ro]] with paths from /"),
        ("container: {binds: ['/a:/b:no']}", "container binds, entry 1, is '/a:/b:no': give SRC[:DST[:ro]] with paths from /"),
        ("container: {pass: ['A B']}", "container pass, entry 1, is 'A B': give NAME or PREFIX_*"),
        ("container: {modules: [7]}", "container modules, entry 1, is 7: give text, in quotes where YAML takes it for something else"),
        ("launch: {join_timeout: -1}", "launch join-timeout is -1: give seconds, more than 0 and less than a week"),
        ("launch: {rdzv_backend: etcd}", "launch rdzv-backend is 'etcd': give one of static, c10d"),
        ("env: {A-B: x}", "env has 'A-B': give a variable's name, letters, digits and _"),
        ("env: {A: [x]}", "env A is ['x']: give text in quotes, or a number"),
        ("env: {A: x, B: y, A: z}", "the key A stands twice, and only the last would count: make it one"),
        ("env: {A: x}\nnodes: {gpus: 1}\nenv: {B: y}", "the key env stands twice, and only the last would count: make it one"),
    ],
)  # fmt: skip
def test_what_may_not_stand_in_a_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(text)
    with pytest.raises(BadInput) as refusal:
        profile.load(str(file))
    assert str(refusal.value) == f"{file}: {message}"


def test_every_key_is_optional_and_an_empty_one_counts_as_absent(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    sections: Mapping[str, Mapping[str, object]] = {
        "nodes": profile.NODES,
        "request": profile.REQUEST,
        "container": profile.CONTAINER,
        "launch": profile.LAUNCH,
    }
    empty: dict[str, object] = dict.fromkeys(profile.KEYS)
    file.write_text(
        yaml.safe_dump({**empty, **{name: dict.fromkeys(keys) for name, keys in sections.items()}})
    )
    assert profile.load(str(file)) == profile.Profile(name="lab.yaml", path=str(file))


def test_the_options_that_a_profile_may_set_are_those_of_the_entrypoint() -> None:
    assert list(profile.LAUNCH) == [option.name for option in OPTIONS if option.in_profile]


@pytest.mark.parametrize(
    "name",
    [
        "clusters/render.py",
        "clusters/submit.py",
        "entrypoint/plan/profile.py",
        "entrypoint/errors.py",
        "containers/stacks.py",
    ],
)
def test_what_runs_on_a_login_node_is_python_3_9(name: str) -> None:
    text = (CHECKOUT / name).read_text()
    ast.parse(text, feature_version=(3, 9))
    assert "kw_only" not in text


# --- the profiles that are there ------------------------------------------------------------------------------


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_committed_host_file_is_the_one_that_its_profile_makes(file: Path) -> None:
    assert file.with_suffix(".host").read_text() == render.load_checked(file)[1]


def test_every_host_file_has_its_profile() -> None:
    assert [file.with_suffix(".host") for file in SHIPPED] == sorted((CHECKOUT / "clusters").glob("*.host"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_profile_of_a_public_cluster_names_its_pages_and_that_it_was_not_run_there(file: Path) -> None:
    site = profile.load(str(file))
    if file.stem in GENERIC:
        assert (site.documented, site.clusters) == ((), ())
        return
    assert site.tested == ""
    assert "not run there" in file.read_text().split("\n\n")[0]
    assert site.documented
    assert all(page.startswith("https://") for page in site.documented)


def test_the_script_of_pbs_is_read_for_its_directives() -> None:
    words = submit._directives(CHECKOUT / submit.SCRIPTS["pbs"])
    assert words[:2] == ["-N", "apptrain"]
    assert {"-N", "-S", "-j"} <= set(words)
    assert "-l" not in words


def test_no_cluster_has_two_profiles() -> None:
    names = [name for file in SHIPPED for name in profile.load(str(file)).clusters]
    assert sorted(names) == sorted(set(names))


def test_the_template_shows_every_key() -> None:
    content = yaml.safe_load((CHECKOUT / "clusters" / "generic.yaml").read_text())
    under_pbs = {"chunk"}
    assert set(content) == set(profile.KEYS)
    assert set(content["nodes"]) == set(profile.NODES)
    assert set(content["request"]) == set(profile.REQUEST) - under_pbs
    assert set(content["container"]) == set(profile.CONTAINER)
    assert {name.replace("_", "-") for name in content["launch"]} == set(profile.LAUNCH)
    pbs = yaml.safe_load((CHECKOUT / "clusters" / "generic-pbs.yaml").read_text())
    assert under_pbs <= set(pbs["request"])


# --- the shell file -------------------------------------------------------------------------------------------

WHOLE = """\
title: The lab
scheduler: pbs
clusters: [lab, lab.example.org]
start: mpiexec
launcher_args: [--cpu-bind, none]
scratch: $WORK/runs
host_suffix: -hsn
nodes: {gpus: 4, cpus: 64, whole: true}
request: {partition: gpu}
container:
  module_paths: [/soft/modules]
  modules: [spack/1, apptainer]
  program: $HOME/bin/apptainer
  stack: cu126
  binds: [/data, '/a:/b:ro']
  pass: [MY_*, TOKEN]
env: {NCCL_DEBUG: INFO}
"""
HOST_FILE = """\
# Made from lab.yaml by `make profiles`: change that file, not this one.
digest={digest}
cluster=lab
cluster=lab.example.org
module_path=/soft/modules
module=spack/1
module=apptainer
apptainer=$HOME/bin/apptainer
image=image-cu126.sif
"""


def test_the_host_file_has_all_that_a_job_script_reads(site: Site) -> None:
    site.write(WHOLE)
    digest = subprocess.run(
        ["sha256sum", site.lab], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    assert site.lab.with_suffix(".host").read_text() == HOST_FILE.format(digest=digest)


READ = """\
set -euo pipefail
source "$APPTRAIN_HOME/host/job.sh"
profile=$1 given_image=
load_modules() {
    printf 'module_path=%s\\0' ${paths[@]+"${paths[@]}"}
    printf 'module=%s\\0' "${modules[@]}"
}
use_site
printf 'apptainer=%s\\0image=%s\\0' "${APPTRAIN_APPTAINER:-}" "${APPTRAIN_IMAGE##*/}"
"""


def read_by_bash(file: Path) -> "subprocess.CompletedProcess[str]":
    """What job.sh takes from the host file of a profile, each NAME=VALUE with a NUL behind it."""
    return subprocess.run(
        ["bash", "-c", READ, "bash", file],
        cwd=file.parent,
        env={"PATH": "/usr/bin:/bin", "APPTRAIN_HOME": str(CHECKOUT), "HOME": "$HOME", "PROJECT": "$PROJECT"},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_job_script_takes_all_of_a_host_file_but_whom_it_is_for(file: Path) -> None:
    lines = file.with_suffix(".host").read_text().splitlines()[1:]
    done = read_by_bash(file)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.split("\0") if line.partition("=")[2]]
    assert sorted(found) == sorted(line for line in lines if not line.startswith(("cluster=", "digest=")))


HOSTILE = [
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "a'b\"c",
    "\\",
    "!x",
    "*",
    "~",
    "a  b",
    "-n",
    "a\u00a0b" "ü",
    ")",
    "# no",
    "${IFS}",
]  # fmt: skip


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_value_is_what_it_says_whatever_it_holds_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    words = [word for word in HOSTILE if word.isprintable()]
    file = tmp_path / "x.yaml"
    file.touch()
    container = profile.Container(program=words[1], modules=tuple(words))
    made = profile.Profile(name="x.yaml", title=words[0], scheduler="slurm", container=container)
    (tmp_path / "x.host").write_text(render.lines(made, digest(file)))
    done = read_by_bash(file)
    assert done.returncode == 0, done.stderr
    found = done.stdout.split("\0")
    assert f"apptainer={words[1]}" in found
    assert [line.partition("=")[2] for line in found if line.startswith("module=")] == words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.host", "x.yaml"]


@pytest.mark.parametrize(
    "line", ["touch pwned", "site_digest=$(touch pwned)", "digest", "PATH=/tmp", "digest[$(touch pwned)]=1"]
)
def test_a_host_file_is_data_and_a_line_that_has_no_meaning_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.yaml"
    file.touch()
    (tmp_path / "x.host").write_text(f"# x\n{line}\ndigest=$(touch pwned)\n")
    done = read_by_bash(file)
    assert (done.returncode, done.stderr) == (
        64,
        f"apptrain: {tmp_path}/x.host: {line} has no meaning here: make profiles PROFILE={file}\n",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.host", "x.yaml"]


def test_making_a_host_file_says_what_was_made_and_twice_changes_nothing(site: Site) -> None:
    site.lab.write_text("scheduler: slurm\ntitle: The lab\n")
    first = site.run("render.py", "clusters/lab.yaml")
    second = site.run("render.py", "clusters/lab.yaml")
    assert (first.returncode, first.stdout) == (
        0,
        "profiles: lab: The lab (never run there): lab.host written\n",
    )
    assert (second.returncode, second.stdout) == (0, "profiles: lab: The lab (never run there): unchanged\n")


def test_without_a_name_all_profiles_are_made(site: Site) -> None:
    (site.checkout / "clusters" / "gadi.host").unlink()
    site.lab.write_text("scheduler: slurm\ntitle: The lab\ntested: on two nodes\n")
    lines = site.run("render.py").stdout.splitlines()
    assert [line.split(": ")[1] for line in lines] == sorted(
        ["lab", *(file.stem for file in SHIPPED)], key=lambda name: f"{name}.yaml"
    )
    assert "profiles: lab: The lab (on two nodes): lab.host written" in lines
    assert (site.checkout / "clusters" / "gadi.host").read_text() == (
        CHECKOUT / "clusters" / "gadi.host"
    ).read_text()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("lab.yaml", "title: x", "lab.yaml: scheduler is missing: give slurm or pbs"),
        ("lab.yaml", "scheduler: slurm\ncontainer: {stack: cu118}", "lab.yaml: container stack is 'cu118': give one of cu132, cu126"),
        ("lab.yml", "scheduler: slurm", "lab.yml: a profile is named NAME.yaml, of letters, digits, _ . and -: rename it"),
        ("a b.yaml", "scheduler: slurm", "a b.yaml: a profile is named NAME.yaml, of letters, digits, _ . and -: rename it"),
        ("no.yaml", None, "PROFILE=no.yaml: no.yaml cannot be read: No such file or directory"),
        ("lab.yaml", "{", "PROFILE=lab.yaml: lab.yaml is not YAML: while parsing a flow node expected the node content, but found '<stream end>' in \"<unicode string>\", line 1, column 2: { ^"),
    ],
)  # fmt: skip
def test_what_makes_no_host_file_is_refused(site: Site, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (site.checkout / name).write_text(text)
    assert site.refused(name, program="render.py") == f"profiles: {message}"
    assert not (site.checkout / name).with_suffix(".host").exists()


def test_a_check_writes_nothing_and_names_the_remedy(site: Site) -> None:
    site.lab.write_text("scheduler: slurm")
    other = site.folder / "it's mine.yaml"
    shown = site.checkout / "clusters" / "lab.host"
    message = site.refused("--check", "clusters/lab.yaml", program="render.py")
    assert message == "profiles: clusters/lab.host is missing: make profiles"
    assert not shown.exists()
    shown.write_text("digest=\n")
    message = site.refused("--check", "clusters/lab.yaml", program="render.py")
    assert (
        message
        == "profiles: clusters/lab.host is not made from clusters/lab.yaml as that is now: make profiles"
    )
    other = site.folder / "mine.yaml"
    other.write_text("scheduler: slurm")
    message = site.refused("--check", str(other), program="render.py")
    assert message == f"profiles: {site.folder}/mine.host is missing: make profiles PROFILE='{other}'"


# --- the line that submits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "env", "expected"),
    [
        (
            "generic",
            {},
            "sbatch --nodes=3 --gpus-per-node=1 --cpus-per-task=8 --mem=32G --time=01:00:00 "
            "slurm/multinode.sbatch --profile generic -- my.py --lr 0.1",
        ),
        (
            "gwdg-grete",
            {},
            "sbatch --nodes=3 --partition=grete --gpus-per-node=A100:4 --cpus-per-task=64 --mem=0 --time=01:00:00 "
            "slurm/multinode.sbatch --profile gwdg-grete -- my.py --lr 0.1",
        ),
        (
            "perlmutter",
            {},
            "sbatch --nodes=3 --gpus-per-node=4 --cpus-per-task=128 --mem=0 --time=01:00:00 --constraint=gpu "
            "--qos=regular slurm/multinode.sbatch --profile perlmutter -- my.py --lr 0.1",
        ),
        (
            "delta",
            {},
            "sbatch --nodes=3 --partition=gpuA100x4 --gpus-per-node=4 --cpus-per-task=64 --mem=240G --time=01:00:00 "
            "slurm/multinode.sbatch --profile delta -- my.py --lr 0.1",
        ),
        (
            "generic-pbs",
            {},
            "qsub -l select=3:ncpus=8:ngpus=1:mem=32gb -l place=scatter -l walltime=01:00:00 "
            "-v 'APPTRAIN_ARGS=-- my.py --lr 0.1,APPTRAIN_PROFILE=generic-pbs' pbs/multinode.pbs",
        ),
        (
            "gadi",
            {"PROJECT": "ab12"},
            "qsub -C '' -N apptrain -j oe -S /bin/bash -l ncpus=144 -l ngpus=12 -l mem=1140gb -l walltime=01:00:00 "
            "-q gpuvolta -P ab12 -l storage=scratch/ab12 "
            "-v 'APPTRAIN_ARGS=-- my.py --lr 0.1,APPTRAIN_PROFILE=gadi,PROJECT=ab12' pbs/multinode.pbs",
        ),
        (
            "polaris",
            {},
            "qsub -l select=3:system=polaris -l place=scatter -l walltime=00:30:00 -q debug "
            "-l filesystems=home:eagle -v 'APPTRAIN_ARGS=-- my.py --lr 0.1,APPTRAIN_PROFILE=polaris' pbs/multinode.pbs",
        ),
        (
            "derecho",
            {},
            "qsub -l select=3:ncpus=64:ngpus=4 -l place=scatter -l walltime=01:00:00 -q main "
            "-v 'APPTRAIN_ARGS=-- my.py --lr 0.1,APPTRAIN_PROFILE=derecho' pbs/multinode.pbs",
        ),
    ],
)  # fmt: skip
def test_each_site_has_its_line(site: Site, name: str, env: dict[str, Any], expected: str) -> None:
    done = site.run(
        "submit.py", "--cluster", name, "--nodes", "3", "--dry-run", "--", "--", "my.py", "--lr", "0.1", **env
    )
    assert (done.returncode, done.stdout) == (0, expected + "\n")
    assert done.stderr == f"submit: {name}.yaml was never run there (tested is empty): check this:\n"


def test_every_site_has_its_line_above() -> None:
    mark = next(mark for mark in test_each_site_has_its_line.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == {file.stem for file in SHIPPED}


SLURM = """\
scheduler: slurm
tested: on two nodes
nodes: {gpus: 4, cpus: 64, memory_gib: 400}
request: {partition: gpu, account: $PROJECT, time: "02:00:00", stop_before: 300, gpus: '--gres=gpu:a100:{gpus}', options: [--qos=short]}
"""
PBS = """\
scheduler: pbs
tested: on two nodes
scratch: ${WORK}/$USER
nodes: {gpus: 4, cpus: 48, memory_gib: 380}
request: {partition: gpu, account: ab12, time: "02:00:00", stop_before: 600, gpus: 'ngpus={gpus}:gpu_type=v100'}
container: {binds: ['$DATA:/data:ro'], program: $HOME/bin/apptainer}
"""


def test_what_is_wished_for_wins_over_the_profile(site: Site) -> None:
    site.write(SLURM)
    wishes = ["--partition", "big", "--account", "other", "--time", "00:10:00"]
    line = site.submit(
        "--nodes", "8", *wishes, "--options", "--qos=long --comment='two words'", "--", "--device=cuda"
    )
    assert line == [
        *("sbatch", "--nodes=8", "--partition=big", "--account=other"),
        *("--gpus-per-node=0", "--gres=gpu:a100:4", "--cpus-per-task=64", "--mem=400G"),
        *("--time=00:10:00", "--signal=B:USR2@300", "--qos=short", "--qos=long", "--comment=two words"),
        *("slurm/multinode.sbatch", "--profile", "lab", "--device=cuda"),
    ]


def test_an_empty_wish_is_none(site: Site) -> None:
    """As make passes on what was not set."""
    site.write(SLURM)
    empty = ["--gpus", "", "--partition", "", "--account", "", "--time", "", "--options", ""]
    assert site.submit(*empty, PROJECT="ab12") == site.submit(PROJECT="ab12")


def test_fewer_gpus_of_a_shared_node_come_with_their_share_of_it(site: Site) -> None:
    site.write(SLURM)
    line = site.submit("--gpus", "1", PROJECT="ab12")
    assert line[4:8] == ["--gpus-per-node=0", "--gres=gpu:a100:1", "--cpus-per-task=16", "--mem=100G"]
    site.write(PBS)
    line = site.submit("--gpus", "1", WORK="/w", DATA="/d")
    assert line[:3] == ["qsub", "-l", "select=2:ncpus=12:ngpus=1:gpu_type=v100:mem=95gb"]


def test_where_sbatch_knows_no_gpus_per_node_the_script_is_wrapped_without_its_line(site: Site) -> None:
    directives = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=1  # SITE\n##SBATCH -p gpu\n#SBATCH --requeue\n"
    (site.checkout / "slurm/multinode.sbatch").write_text(directives)
    site.write("scheduler: slurm\nnodes: {gpus: 4}\nrequest: {form: wrapped, gpus: '--gres=gpu:{gpus}'}\n")
    line = site.submit("--", "--device=cuda", "--", "my script.py")
    inside = [*("exec", "bash", f"{site.checkout}/slurm/multinode.sbatch", "--profile", "lab")]
    assert line[:-1] == ["sbatch", "--requeue", "--nodes=2", "--gres=gpu:4"]
    assert shlex.split(line[-1].removeprefix("--wrap=")) == [*inside, "--device=cuda", "--", "my script.py"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "scheduler: pbs\nrequest: {form: wrapped}",
            "request form wrapped is for slurm, and scheduler is pbs: leave it out",
        ),
        (
            "scheduler: slurm\nrequest: {form: totals}",
            "request form totals is for pbs, and scheduler is slurm: leave it out",
        ),
        (
            "scheduler: slurm\nrequest: {form: wrapped}",
            "request form wrapped needs request gpus, such as --gres=gpu:{gpus}",
        ),
    ],
)
def test_a_form_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lab.yaml").write_text(text)
    with pytest.raises(BadInput) as refused:
        profile.load(str(tmp_path / "lab.yaml"))
    assert str(refused.value) == f"{tmp_path}/lab.yaml: {message}"


def test_nodes_without_gpus_are_asked_for_without(site: Site) -> None:
    site.write("scheduler: slurm\nnodes: {gpus: 0, cpus: 64}\n")
    assert site.submit()[:4] == ["sbatch", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=64"]


def test_whole_nodes_that_a_request_must_not_describe_are_only_counted(site: Site) -> None:
    site.write("scheduler: slurm\nnodes: {gpus: 4, cpus: 16, whole: true}\nrequest: {nodes_only: true}\n")
    assert site.submit()[:5] == ["sbatch", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=16", "--mem=0"]


def test_the_line_that_is_printed_is_the_one_that_is_run(site: Site) -> None:
    site.write(SLURM)
    arguments = ["--", "my script.py", "it's", "", "a\nb", "$HOME", "--", "--nodes=9"]
    done = site.run("submit.py", "--cluster", "lab", "--", *arguments, PROJECT="ab12", FAKE_STATUS="3")
    line, answer = done.stdout.rsplit("job 7", 1)
    assert (done.returncode, answer, done.stderr) == (3, "\n", "")
    (call,) = site.calls()
    assert call["cwd"] == str(site.checkout)
    assert shlex.split(line)[1:] == call["argv"][1:]  # type: ignore[index]
    assert shlex.split(line)[-len(arguments) :] == arguments


def test_from_elsewhere_the_checkout_is_named(site: Site) -> None:
    site.write(SLURM)
    assert site.submit(cwd=site.folder, PROJECT="x")[-3] == f"{site.checkout}/slurm/multinode.sbatch"
    site.write(PBS)
    line = site.submit(cwd=site.folder, WORK="/w", DATA="/d")
    assert line[-1] == f"{site.checkout}/pbs/multinode.pbs"
    assert f"APPTRAIN_HOME={site.checkout}" in line[-2].split(",")


def test_a_profile_of_ones_own_is_named_by_its_path(site: Site) -> None:
    mine = site.folder / "mine.yaml"
    mine.write_text(SLURM)
    assert site.run("render.py", str(mine)).returncode == 0
    done = site.run("submit.py", "--dry-run", APPTRAIN_PROFILE="../mine.yaml", PROJECT="x")
    assert shlex.split(done.stdout)[-2:] == ["--profile", str(mine)]


def test_a_job_of_pbs_is_told_the_variables_that_its_profile_and_its_user_name(site: Site) -> None:
    site.write(PBS)
    line = site.submit(WORK="/w", DATA="/d", USER="alice", APPTRAIN_IMAGE="/i.sif", OTHER="x")
    assert line[-3:-1] == [
        "-v",
        "APPTRAIN_IMAGE=/i.sif,APPTRAIN_PROFILE=lab,APPTRAIN_STOP_BEFORE=600,DATA=/d,WORK=/w",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device=cuda", "--", "a,b.py"],
        ["--", "my script.py"],
        ["--", "a,b"],
        ["--", 'say "no"', "it's", "two\nlines", ""],
    ],
)
def test_arguments_that_qsub_cannot_carry_go_through_a_file(site: Site, arguments: list[str]) -> None:
    site.write(PBS)
    paths: dict[str, Any] = {"WORK": "/w", "DATA": "/d"}
    line = site.submit("--", *arguments, APPTRAIN_ARGS="-- old.py", **paths)
    carried = dict(word.split("=", 1) for word in line[-2].split(","))
    file = Path(carried.pop("APPTRAIN_ARGS_FILE"))
    assert carried == {"APPTRAIN_PROFILE": "lab", "APPTRAIN_STOP_BEFORE": "600", **paths}
    assert file.parent == site.checkout / "runs" / "arguments"
    assert not file.parent.exists()
    (site.checkout / "containers" / "image.sif").touch()
    done = site.run("submit.py", "--cluster", "lab", "--", *arguments, **paths)
    assert (done.returncode, site.calls()[0]["argv"]) == (0, [str(site.bin / "qsub"), *line[1:]])
    assert file.read_bytes() == b"".join(word.encode() + b"\0" for word in arguments)
    assert oct(file.stat().st_mode & 0o777) == "0o600"


def test_a_file_of_arguments_that_the_user_gave_stays_as_it_is(site: Site) -> None:
    site.write(PBS)
    file = site.folder / "arguments"
    file.write_text("--\0my.py\0")
    done = site.run("submit.py", "--cluster", "lab", WORK="/w", DATA="/d", APPTRAIN_ARGS_FILE=str(file))
    assert (done.returncode, file.read_text()) == (0, "--\0my.py\0")
    assert f"APPTRAIN_ARGS_FILE={file}," in done.stdout


# --- refusals -------------------------------------------------------------------------------------------------


KNOWN = "delta, derecho, gadi, generic, generic-pbs, gwdg-grete, lab, perlmutter, polaris, or the path of a profile"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", ""], f"CLUSTER is missing: give one of {KNOWN}"),
        (
            ["--cluster", "nowhere"],
            f"CLUSTER=nowhere: there is no {{clusters}}/nowhere.yaml: give one of {KNOWN}",
        ),
        (["--cluster", "./no.yaml"], "CLUSTER=./no.yaml: no.yaml cannot be read: No such file or directory"),
        (["--nodes", "0"], "NODES=0: give a whole number from 1"),
        (["--nodes", "2:4"], "NODES=2:4: give a whole number from 1"),
        (["--gpus", "8"], "GPUS=8: a node of lab.yaml has 4: ask for more nodes"),
        (["--time", "90"], "TIME=90: give HH:MM:SS"),
        (["--partition", "a b"], "PARTITION=a b: give one word"),
        (["--options=--comment='x"], "OPTIONS=--comment='x: No closing quotation: quote it as for a shell"),
        ([], "lab.yaml: request account names $PROJECT, which is not set here: set it"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(site: Site, arguments: list[str], message: str) -> None:
    site.write(SLURM)
    text = site.refused("--cluster", "lab", *arguments)
    assert text == "submit: " + message.format(clusters=site.checkout / "clusters")


def test_a_part_of_a_whole_node_is_refused(site: Site) -> None:
    site.write("scheduler: slurm\nnodes: {gpus: 4, whole: true}")
    assert site.refused("--cluster", "lab", "--gpus", "2") == (
        "submit: GPUS=2: nodes of lab.yaml come whole, with 4: leave GPUS out (fewer ranks: ARGS='--nproc-per-node 2')"
    )


def test_a_profile_that_does_not_describe_its_nodes_is_refused(site: Site) -> None:
    site.write("scheduler: slurm")
    assert site.refused("--cluster", "lab") == (
        "submit: lab.yaml: nodes gpus is missing: say how many GPUs a node has, or 0"
    )


def test_a_profile_that_was_changed_since_is_refused(site: Site) -> None:
    site.write(SLURM)
    site.lab.write_text(SLURM + "title: changed\n")
    assert site.refused("--cluster", "lab") == (
        f"submit: CLUSTER=lab: {site.lab.with_suffix('.host')} is not made from lab.yaml as that is now: make profiles"
    )


def test_a_job_that_could_not_start_is_not_submitted(site: Site) -> None:
    site.write(SLURM + "container: {stack: cu126}\n")
    assert site.refused("--cluster", "lab", PROJECT="x") == (
        f"submit: there is no image {site.checkout}/containers/image-cu126.sif: "
        "make image STACK=cu126, or give another in APPTRAIN_IMAGE"
    )
    (site.bin / "sbatch").unlink()
    image = str(site.checkout / "containers" / "image.sif")
    assert site.refused("--cluster", "lab", PROJECT="x", APPTRAIN_IMAGE=image) == (
        "submit: sbatch is not in PATH: submit on a login node of that cluster"
    )


def test_what_qsub_cannot_carry_is_refused(site: Site) -> None:
    site.write(PBS)
    binds = "/a\n/b"
    assert site.refused("--cluster", "lab", WORK="/w", DATA="/d", APPTRAIN_BIND=binds) == (
        "submit: APPTRAIN_BIND='/a\\n/b': qsub -v carries no commas, quotes, backslashes and line breaks: "
        "use a path without them, or the profile"
    )


@pytest.mark.parametrize("program", ["submit.py", "render.py"])
def test_wrong_options_end_with_64_and_help_with_0(site: Site, program: str) -> None:
    name = program.removesuffix(".py").replace("render", "profiles")
    message = f"{name}: unrecognized arguments: --wrong (see clusters/{program} --help)"
    assert site.refused("--wrong", program=program) == message
    shown = site.run(program, "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"usage: clusters/{program}")
