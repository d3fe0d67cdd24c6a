"""entrypoint/cli/profiles.py: the shell's file of a profile."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.cli import profiles as render
from entrypoint.core.errors import BadInput
from entrypoint.plan import profile
from tests.unit.cli.site import CHECKOUT, SHIPPED, Site

BOUND = 60  # s, for anything started here
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
  options: [--fakeroot, --userns]
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
option=--fakeroot
option=--userns
image=image-cu126.sif
profile={{"title": "The lab", "scheduler": "pbs", "clusters": ["lab", "lab.example.org"], "start": "mpiexec", \
"launcher_args": ["--cpu-bind", "none"], "scratch": "$WORK/runs", "host_suffix": "-hsn", \
"nodes": {{"gpus": 4, "cpus": 64, "whole": true}}, "request": {{"partition": "gpu"}}, \
"container": {{"module_paths": ["/soft/modules"], "modules": ["spack/1", "apptainer"], \
"program": "$HOME/bin/apptainer", "stack": "cu126", \
"options": ["--fakeroot", "--userns"], "binds": ["/data", "/a:/b:ro"], "pass": ["MY_*", "TOKEN"]}}, \
"env": {{"NCCL_DEBUG": "INFO"}}}}
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
for ((i = 1; i < ${#container_words[@]}; i += 2)); do
    printf 'option=%s\\0' "${container_words[i]}"
done
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
    assert sorted(found) == sorted(line for line in lines if not line.startswith(NOT_OF_BASH))


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


NOT_OF_BASH = ("cluster=", "digest=", "profile=")


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_value_is_what_it_says_whatever_it_holds_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    words = [word for word in HOSTILE if word.isprintable()]
    file = tmp_path / "x.yaml"
    file.touch()
    container = profile.Container(program=words[1], modules=tuple(words))
    made = profile.Profile(name="x.yaml", title=words[0], scheduler="slurm", container=container)
    content = {"title": " ".join(words), "env": dict.fromkeys(HOSTILE, "\n")}
    (tmp_path / "x.host").write_text(render.lines(made, content, digest(file)))
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


def test_making_a_host_file_says_what_was_made_and_twice_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("scheduler: slurm\ntitle: The lab\n")
    assert [render.main([str(file)]) for _ in range(2)] == [0, 0]
    assert capsys.readouterr().out.splitlines() == [
        "apptrain: lab: The lab (never run there): lab.host written",
        "apptrain: lab: The lab (never run there): unchanged",
    ]


def test_without_a_name_all_profiles_are_made(site: Site) -> None:
    (site.checkout / "clusters" / "gadi.host").unlink()
    site.lab.write_text("scheduler: slurm\ntitle: The lab\ntested: on two nodes\n")
    lines = site.run("profiles.py").stdout.splitlines()
    assert [line.split(": ")[1] for line in lines] == sorted(
        ["lab", *(file.stem for file in SHIPPED)], key=lambda name: f"{name}.yaml"
    )
    assert "apptrain: lab: The lab (on two nodes): lab.host written" in lines
    assert (site.checkout / "clusters" / "gadi.host").read_text() == (
        CHECKOUT / "clusters" / "gadi.host"
    ).read_text()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("lab.yaml", "title: x", "lab.yaml: scheduler is missing: give slurm or pbs"),
        ("lab.yaml", "scheduler: slurm\ncontainer: {stack: cu118}", "lab.yaml: container stack is 'cu118': give one of cu132, cu128, cu126"),
        ("lab.yml", "scheduler: slurm", "lab.yml: a profile is named NAME.yaml, of letters, digits, _ . and -: rename it"),
        ("a b.yaml", "scheduler: slurm", "a b.yaml: a profile is named NAME.yaml, of letters, digits, _ . and -: rename it"),
        ("no.yaml", None, "PROFILE=no.yaml: no.yaml cannot be read: No such file or directory"),
        ("lab.yaml", "{", "lab.yaml: line 1: it is not YAML: while parsing a flow node expected the node content, but found '<stream end>'"),
    ],
)  # fmt: skip
def test_what_makes_no_host_file_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    assert render.main([name]) == 64
    assert tuple(capsys.readouterr()) == ("", f"apptrain: {message}\n")
    assert not Path(name).with_suffix(".host").exists()


def test_a_host_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.yaml").write_text("scheduler: slurm")
    (tmp_path / "lab.host").mkdir()
    assert render.main([str(tmp_path / "lab.yaml")]) == 64
    _, err = capsys.readouterr()
    assert err.startswith(f"apptrain: {tmp_path}/lab.host cannot be written: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lab.host", "lab.yaml"]


def test_options_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert render.main(["--chekc"]) == 64
    assert tuple(capsys.readouterr()) == (
        "",
        "apptrain: unrecognized arguments: --chekc: did you mean --check?\n",
    )


def test_without_pyyaml_what_it_needs_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "entrypoint.core.strict_yaml", raising=False)
    monkeypatch.delattr("entrypoint.core.strict_yaml", raising=False)
    file = tmp_path / "lab.yaml"
    file.write_text("scheduler: slurm")
    assert render.main([str(file)]) == 64
    _, err = capsys.readouterr()
    assert err.startswith(
        f"apptrain: PROFILE={file} needs the Python package pyyaml: use the project's venv (make "
    )


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_without_pyyaml_a_profile_is_read_from_its_host_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = profile.load(file.stem)
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "entrypoint.core.strict_yaml", raising=False)
    monkeypatch.delattr("entrypoint.core.strict_yaml", raising=False)
    assert profile.load(file.stem) == expected
    assert profile.load(str(file)) == expected


def test_what_a_host_file_has_of_a_profile_is_checked_as_the_profile_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(f"{WHOLE}launch: {{omp_num_threads: 3, join-timeout: 12.5}}\n")
    expected = render.render(file, write=True)[0]
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "entrypoint.core.strict_yaml", raising=False)
    monkeypatch.delattr("entrypoint.core.strict_yaml", raising=False)
    assert profile.load(str(file)) == expected
    made = file.with_suffix(".host")
    made.write_text(made.read_text().replace('"whole": true', '"whole": "yes"'))
    with pytest.raises(BadInput, match=r"lab.yaml: nodes whole is 'yes': give true or false"):
        profile.load(str(file))


@pytest.mark.parametrize(
    "text",
    [None, "", "digest={digest}\n", "digest={digest}\nprofile=\n", "digest={digest}\nprofile=[]\n",
     "digest={digest}\nprofile={{\n", 'digest=0\nprofile={{"scheduler": "slurm"}}\n', "\udcff",
     "digest={digest}\nprofile=" + 100_000 * "["],
    ids=["missing", "empty", "older", "none", "list", "cut", "stale", "bytes", "deep"],
)  # fmt: skip
def test_without_pyyaml_and_a_host_file_of_this_profile_what_helps_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("scheduler: slurm")
    made = file.with_suffix(".host")
    if text is not None:
        made.write_bytes(text.format(digest=digest(file)).encode(errors="surrogateescape"))
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "entrypoint.core.strict_yaml", raising=False)
    monkeypatch.delattr("entrypoint.core.strict_yaml", raising=False)
    with pytest.raises(BadInput) as caught:
        profile.load(str(file))
    needs, helps, image = str(caught.value).split("; ")[0], "pip install --user pyyaml", str(caught.value)
    assert needs.startswith(
        f"--profile {file} needs the Python package pyyaml: use the project's venv (make "
    )
    assert needs.endswith(helps)
    assert f"; an image without it needs {made}, made from lab.yaml as that is now: make " in image
    assert image.endswith(f"profiles PROFILE='{file}'")


def test_without_pyyaml_a_profile_that_is_no_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "entrypoint.core.strict_yaml", raising=False)
    monkeypatch.delattr("entrypoint.core.strict_yaml", raising=False)
    os.mkfifo(tmp_path / "lab.yaml")
    with pytest.raises(BadInput, match="cannot be read: it is a FIFO, not a regular file"):
        profile.load(str(tmp_path / "lab.yaml"))
    with pytest.raises(BadInput, match="cannot be read: No such file or directory"):
        profile.load(str(tmp_path / "no.yaml"))


def test_a_check_writes_nothing_and_names_the_remedy(site: Site) -> None:
    site.lab.write_text("scheduler: slurm")
    other = site.folder / "it's mine.yaml"
    shown = site.checkout / "clusters" / "lab.host"
    message = site.refused("--check", "clusters/lab.yaml", program="profiles.py")
    assert message == "apptrain: clusters/lab.host is missing: make profiles"
    assert not shown.exists()
    shown.write_text("digest=\n")
    message = site.refused("--check", "clusters/lab.yaml", program="profiles.py")
    assert (
        message
        == "apptrain: clusters/lab.host is not made from clusters/lab.yaml as that is now: make profiles"
    )
    other = site.folder / "mine.yaml"
    other.write_text("scheduler: slurm")
    message = site.refused("--check", str(other), program="profiles.py")
    assert message == f"apptrain: {site.folder}/mine.host is missing: make profiles PROFILE='{other}'"
