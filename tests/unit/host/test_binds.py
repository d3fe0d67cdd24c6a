"""host/binds.sh, through containers/run.sh: what of the host is shown in the image."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.host.node import BOUND, NODE, OF_CHECKOUT, RUN_SH, Node, bound, said


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
        *OF_CHECKOUT,
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
    ended = node.run("pwd", cwd=node.home, PBS_ENVIRONMENT="PBS_BATCH", PBS_O_WORKDIR=str(node.work))
    assert ended.stdout == f"{node.work}\n"
    elsewhere = node.path / "elsewhere"
    elsewhere.mkdir()
    ended = node.run("pwd", cwd=elsewhere, PBS_ENVIRONMENT="PBS_BATCH", PBS_O_WORKDIR=str(node.work))
    assert ended.stdout == f"{elsewhere}\n"


def test_a_shell_of_an_interactive_pbs_job_stays_where_it_is(node: Node) -> None:
    ended = node.run("pwd", cwd=node.home, PBS_ENVIRONMENT="PBS_INTERACTIVE", PBS_O_WORKDIR=str(node.work))
    assert ended.stdout == f"{node.home}\n"


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
        f"apptrain: {NODE}: the current directory is not there any more: change to one that is"
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


# --- one function at a time -----------------------------------------------------------------------------------


def bash(script: str, *arguments: object) -> str:
    """What these lines print, with nothing shown yet."""
    start = 'set -euo pipefail; source "$1/host/binds.sh"; sources=() targets=() modes=() reasons=() package=apptainer; '
    start += 'is_utf8() { :; }; refuse() { shift; echo "$*"; exit 0; }; '
    return subprocess.run(
        ["bash", "-c", start + script, "bash", str(RUN_SH.parents[1]), *map(str, arguments)],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("path", "is_the_images"),
    [
        *((path, True) for path in ("/", "/bin", "/lib64", "/opt", "/var", "/run", "/home", "/boot")),
        *(
            (path, True)
            for path in ("/usr", "/usr/local", "/etc", "/etc/slurm", "/dev/shm", "/proc/1", "/sys/fs")
        ),
        *(
            (path, False)
            for path in ("/home/alice", "/opt/site", "/var/tmp", "/run/user", "/scratch", "/tmp", "/users")
        ),
        *((path, False) for path in ("/etcetera", "/user", "/library", "/binaries")),
    ],
)
def test_what_belongs_to_the_image_is_not_hidden_by_the_hosts(path: str, is_the_images: bool) -> None:
    assert bash('if is_of_image "$2"; then echo yes; fi', path) == "yes\n" * is_the_images


SHOWN = """
bind /a /a rw x; bind /b /c rw x; bind /d /d ro x; bind "/e f" "/e f" rw x
if is_shown "$2"; then echo yes; fi
"""


@pytest.mark.parametrize(
    ("path", "is_shown"),
    [
        *((path, True) for path in ("/a", "/a/b/c", "/c", "/d", "/e f/g")),
        *((path, False) for path in ("/ab", "/c/d", "/b", "/d/e", "/", "/e")),
    ],
)
def test_what_is_shown_is_what_was_bound_and_what_lies_in_a_directory_that_may_be_written(
    path: str, is_shown: bool
) -> None:
    """Elsewhere it has other contents, and in one that is read-only a wish to write would be lost."""
    assert bash(SHOWN, path) == "yes\n" * is_shown


@pytest.mark.parametrize(
    ("path", "leads"),
    [("real/deep", False), ("link", True), ("link/deep", True), ("real/below/x", True), ("none/x", False)],
)
def test_a_symlink_anywhere_on_the_way_leads_elsewhere(tmp_path: Path, path: str, leads: bool) -> None:
    real = tmp_path.resolve() / "real"
    (real / "deep").mkdir(parents=True)
    (real.parent / "link").symlink_to("real")
    (real / "below").symlink_to("deep")
    assert bash('if leads_elsewhere "$2"; then echo yes; fi', real.parent / path) == "yes\n" * leads
    assert bash('if leads_elsewhere "$2"; then echo yes; fi', "/") == ""


@pytest.mark.parametrize(
    ("spec", "bound_as"),
    [
        ("FOLDER/a", "FOLDER/a FOLDER/a rw"),
        ("FOLDER/a:/x", "FOLDER/a /x rw"),
        ("FOLDER/a:/x:ro", "FOLDER/a /x ro"),
        ("FOLDER/a::ro", "FOLDER/a FOLDER/a ro"),
        ("FOLDER/a:FOLDER/a:ro", "FOLDER/a FOLDER/a ro"),
        ("FOLDER/a:b", "FOLDER/a:b FOLDER/a:b rw"),
        ("FOLDER/none:/x", "why FOLDER/none is not there on this node: use another"),
        ("a", "why: a is not SRC[:DST[:ro]] with paths from /: give one bind a line"),
        (
            "FOLDER/a:/x:rx",
            "why: FOLDER/a:/x:rx is not SRC[:DST[:ro]] with paths from /: give one bind a line",
        ),
    ],
)
def test_a_bind_says_what_is_shown_where_and_whether_it_may_be_written(
    tmp_path: Path, spec: str, bound_as: str
) -> None:
    folder = tmp_path.resolve()
    for name in ("a", "a:b"):
        (folder / name).mkdir()
    script = 'SHARED="use another"; bind_one why "$2"; echo "${sources[*]} ${targets[*]} ${modes[*]}"'
    assert bash(script, spec.replace("FOLDER", str(folder))) == bound_as.replace("FOLDER", str(folder)) + "\n"
