"""entrypoint/cli/apptrain.py in this process: what each command starts, with which arguments. test_apptrain.py has the
command as a user starts it."""

import errno
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import train.__main__
from containers import stacks
from entrypoint import __version__
from entrypoint.cli import apptrain, embedded, site, submit
from entrypoint.cli import main as cli
from entrypoint.core import checkout
from entrypoint.core.errors import BadInput, Unavailable
from entrypoint.doctor import login as doctor
from entrypoint.explain import command as explain
from entrypoint.plan import mistakes
from entrypoint.record import compare, rerun
from entrypoint.record.partition import VARIABLE
from entrypoint.report import command as report
from entrypoint.scaling import command as scaling
from entrypoint.scaling import sweep
from tests.unit.cli.site import SIF

FIRST = ["-m", "train", "--config"]


class Became(BaseException):
    """The process would be this program now."""


class User:
    """Who types `apptrain`: the commands only tell how they are called."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self.calls: list[Any] = []
        self._capsys = capsys

    def tells(self, name: str, status: int = 5) -> Callable[..., int]:
        def called(*arguments: Any, **options: Any) -> int:
            shown = [one for one in arguments if not callable(one) and one is not os.environ]
            options.pop("env", None)
            self.calls.append((name, *shown, *([options] if options else [])))
            return status

        return called

    def types(self, line: str) -> tuple[int, str, str]:
        """(status, stdout, stderr); of what it becomes, the words are the last call."""
        try:
            status = apptrain.main(shlex.split(line))
        except Became as became:
            self.calls.append(list(became.args[0]))
            status = 0
        return status, *self._capsys.readouterr()

    def refusal(self, line: str) -> str:
        status, out, err = self.types(line)
        assert (status, out, err.count("\n"), self.calls) == (64, "", 1, [])
        return err.removeprefix("apptrain: ").removesuffix("\n")


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> User:
    """In a folder beside a checkout that is named `home`, with a Python that has torch."""
    found = User(tmp_path / "home", capsys)
    for name in ("containers", "tools"):
        (found.home / name).mkdir(parents=True)
    for name in ("Makefile", "apptrain", "tools/venv.sh"):
        (found.home / name).touch(mode=0o755)
    for module in (apptrain, checkout, mistakes):
        monkeypatch.setattr(module, "HOME", found.home)
    for name in ("APPTRAIN_IMAGE", "APPTRAIN_PROFILE", "VENV", "IMAGE_VENV", VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(apptrain, "AT_HAND", None)
    monkeypatch.setattr(mistakes, "has_torch", lambda: True)
    monkeypatch.chdir(tmp_path)
    for module, name in (
        (cli, "main"), (embedded, "main"), (submit, "main"), (site, "main"), (doctor, "main"), (compare, "main"),
        (rerun, "main"), (report, "main"), (scaling, "main"), (explain, "main"), (train.__main__, "main"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, found.tells(module.__name__.removeprefix("entrypoint.")))

    def become(program: str, words: list[str]) -> NoReturn:
        assert program == words[0]
        raise Became(words)

    monkeypatch.setattr(os, "execvp", become)
    return found


# --- which command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "call"),
    [
        *((f"{name} --x y", ("cli.main", [name, "--x", "y"])) for name in ("plan", "launch", "check", "prepare", "conclude")),
        ("help plan", ("cli.main", ["plan", "--help"])),
        ("help plan more", ("cli.main", ["plan", "--help"])),
        ("run --nodes 3 -- my.py --image", ("cli.embedded", ["--nodes", "3", "--", "my.py", "--image"])),
        ("run --help-all --image", ("cli.embedded", ["--help-all", "--image"])),
        ("submit a b", ("cli.submit", ["a", "b"])),
        ("site -o x", ("cli.site", ["-o", "x"])),
        ("scaling --nodes 1,2 -- x.py", ("scaling.command", ["--nodes", "1,2", "--", "x.py"])),
        ("demo", ("cli.embedded", ["--nodes", "2", "--", *FIRST, "digits"])),
        ("demo --nodes 3 epochs=2 --device cpu", ("cli.embedded", ["--nodes", "3", "--device", "cpu", "--", *FIRST, "digits", "epochs=2"])),
        ("demo --config mine --preload=a -- lr=1", ("cli.embedded", ["--nodes", "2", "--preload=a", "--", *FIRST, "mine", "lr=1"])),
        ("demo -- --help", ("train.__main__", ["--help"])),
        ("demo -- -h", ("train.__main__", ["--help"])),
        ("compare a b c", ("record.compare", ["a", "b", "c"], {"as_json": False, "image": ""})),
        ("compare --json a b -o x.png", ("record.compare", ["a", "b"], {"as_json": True, "image": "x.png"})),
        ("explain -", ("explain.command", "-", {"as_json": False})),
        ("explain --json log", ("explain.command", "log", {"as_json": True})),
        ("report r", ("report.command", Path("r"), "", {"bundled": False, "other": ""})),
        ("report r -o x --compare s --bundle", ("report.command", Path("r"), "x", {"bundled": True, "other": "s"})),
    ],
)  # fmt: skip
def test_a_command_starts_its_part_with_its_arguments_and_ends_with_its_status(
    user: User, line: str, call: Any
) -> None:
    assert user.types(line) == (5, "", "")
    assert user.calls == [call]


def test_doctor_and_rerun_are_told_where_the_checkout_is(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPTRAIN_PROFILE", "lab")
    for line, call in (
        ("doctor", ("doctor.login", user.home, "lab", {"as_json": False})),
        ("doctor --profile x --json", ("doctor.login", user.home, "x", {"as_json": True})),
        ("rerun r", ("record.rerun", Path("r"), user.home, "", None)),
        ("rerun r --cluster lab", ("record.rerun", Path("r"), user.home, "lab", None)),
        ("rerun r --go", ("record.rerun", Path("r"), user.home, "")),  # and what it runs the line with
    ):
        user.calls.clear()
        assert user.types(line) == (5, "", "")
        assert user.calls == [call]


def test_a_run_that_is_done_again_is_a_line_of_apptrain(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    def go(*arguments: Any) -> int:
        status: int = arguments[-1](["submit", "x"])
        return status

    monkeypatch.setattr(rerun, "main", go)
    assert user.types("rerun r --go")[0] == 5
    assert user.calls == [("cli.submit", ["x"])]


def test_without_arguments_those_of_the_process_are_taken(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["apptrain", "submit", "x"])
    assert apptrain.main() == 5
    assert user.calls == [("cli.submit", ["x"])]


@pytest.mark.parametrize("line", ["", "help", "-h", "--help", "--help-all"])
def test_the_help_names_the_first_step_that_works_here(
    user: User, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    us = user.home / "apptrain"
    monkeypatch.setenv("PATH", "")
    image = f"on a cluster with `{us} image build`.\n"
    status, out, err = user.types(line)
    assert (status, err) == (0, "")
    assert out.startswith("usage: apptrain COMMAND ")
    assert out.endswith(f"\nBegin with `{us} demo`; {image}")
    monkeypatch.setattr(mistakes, "has_torch", lambda: False)
    assert user.types(line)[1].endswith(f"\nBegin with `make -C {user.home} demo`; {image}")
    for name in ("Makefile", "apptrain"):
        (user.home / name).unlink()
    end = "\nBegin with `apptrain demo`; on a cluster with `apptrain image build`.\n"
    assert user.types(line)[1].endswith(end)


def test_the_version_is_printed(user: User) -> None:
    assert user.types("--version") == (0, f"{__version__}\n", "")


def test_a_word_that_is_no_command_is_refused(user: User) -> None:
    assert user.refusal("frobnicate --x").startswith("frobnicate is no command: give one of demo, run, ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("compare", "compare: give two run directories or more: apptrain compare RUN RUN"),
        ("compare a", "compare: give two run directories or more: apptrain compare RUN RUN"),
        ("explain", "explain: give a log, a folder of logs, a run directory, a job script, or -"),
        ("rerun", "the following arguments are required: RUN: see `apptrain rerun --help`"),
        ("report", "the following arguments are required: RUN: see `apptrain report --help`"),
        *(
            (f"{line} {option}", f"unrecognized arguments: {option}: did you mean {option}{rest}?")
            for line, option, rest in (
                ("doctor", "--jso", "n"), ("compare a b", "--jso", "n"), ("rerun r", "--cluste", "r"),
                ("report r", "--bundl", "e"), ("explain x", "--jso", "n"), ("image build", "--stac", "k"),
            )
        ),
        *(
            (line, f"{name} is empty: give {what}")
            for line, name, what in (
                ("compare '' ''", "RUN", "a run directory"), ("rerun ''", "RUN", "a run directory"),
                ("report ''", "RUN", "a run directory, or that of apptrain scaling"),
                ("explain ''", "WHAT", "what to read"), ("compare a b -o ''", "-o", "FILE.png or leave it out"),
                ("report r -o ''", "-o", "FILE or leave it out"),
                ("doctor --profile ''", "--profile", "NAME or leave it out"),
            )
        ),
        ("image pull", "image pull: apptainer does it: apptainer pull image.sif URL && export APPTRAIN_IMAGE=$PWD/image.sif"),
        ("image pull x 'docker://a b'", "image pull: apptainer does it: apptainer pull image.sif 'docker://a b' && export APPTRAIN_IMAGE=$PWD/image.sif"),
        ("image buildd", "image buildd: give one of build, fetch, verify, inspect: did you mean build?"),
        ("image zzz", "image zzz: give one of build, fetch, verify, inspect"),
    ],
)  # fmt: skip
def test_what_a_command_lacks_or_does_not_take_is_refused(user: User, line: str, said: str) -> None:
    assert user.refusal(line) == said


def test_a_scaling_has_a_report_of_its_own(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "is_one", lambda path: path == Path("s"))
    monkeypatch.setattr(scaling, "report", user.tells("scaling", 6))
    for option in ("--bundle", "--compare=r"):
        assert user.refusal(f"report s {option}") == (
            "report: s is that of a scaling: leave --bundle and --compare out"
        )
    assert user.types("report s -o x")[0] == 6
    assert user.types("report r")[0] == 5
    of_run = ("report.command", Path("r"), "", {"bundled": False, "other": ""})
    assert user.calls == [("scaling", Path("s"), "x"), of_run]


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ("submit", True), ("site", True), ("doctor", True), ("image build", True), ("run --image", True),
        ("scaling --cluster lab", True), ("scaling --cluster=lab", True),
        ("scaling -- x.py --cluster lab", False), ("run", False), ("demo", False), ("compare a b", False),
    ],
)  # fmt: skip
def test_what_is_for_a_login_node_needs_a_checkout(user: User, line: str, needs: bool) -> None:
    (user.home / "Makefile").unlink()
    name = {"image build": "image", "run --image": "run --image"}.get(line, line.split()[0])
    if needs:
        assert user.refusal(line) == (
            f"apptrain {name} is for a login node: run the apptrain of a checkout there; this one has none"
        )
    else:
        assert user.types(line)[0] == 5


# --- how it ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (BadInput("a-b", "wrong"), 64, "apptrain: wrong\n"),
        (Unavailable("a-b", "wrong"), 69, "apptrain: wrong\n"),
        (KeyboardInterrupt(), 130, ""),
        (OSError(errno.ENOSPC, "full"), 1, "apptrain: stdout cannot be written: full\n"),
    ],
    ids=repr,
)
def test_each_end_has_its_status_and_at_most_a_line(
    user: User, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    def fail(_arguments: object) -> int:
        raise error

    monkeypatch.setattr(submit, "main", fail)
    assert user.types("submit") == (status, "", said)


# --- which Python -------------------------------------------------------------------------------------------

HAS = "Python of X, /x, with torch 2.9"
LACKS = "X, /x, is not taken: torch 2.9 is there, but not psutil (pip install them)"


@pytest.mark.parametrize(
    ("line", "at_hand", "told"),
    [
        ("launch", LACKS, True), ("check", LACKS, True), ("launch", HAS, False), ("check", "", False),
        ("launch", None, False), ("plan", LACKS, False), ("submit", LACKS, False),
    ],
)  # fmt: skip
def test_an_environment_that_is_not_taken_is_told_by_what_needs_torch(
    user: User, monkeypatch: pytest.MonkeyPatch, line: str, at_hand: str | None, told: bool
) -> None:
    monkeypatch.setattr(apptrain, "AT_HAND", at_hand)
    assert user.types(line) == (5, "", f"apptrain: {at_hand}\n" if told else "")


@pytest.fixture
def runs(user: User, monkeypatch: pytest.MonkeyPatch) -> User:
    """One whose `run` asks for the Python as it does, and whose venv is made by a program that tells."""

    def run(_arguments: object, check_python: Callable[[str], None]) -> int:
        check_python("note\n")
        user.calls.append("runs")
        return 0

    def make(words: list[str], *, check: bool) -> Any:
        assert not check
        user.calls.append((words, signal.getsignal(signal.SIGINT)))
        return SimpleNamespace(returncode=user.home.joinpath("status").exists() * 3)

    monkeypatch.setattr(embedded, "main", run)
    monkeypatch.setattr(subprocess, "run", make)
    monkeypatch.setattr(mistakes, "has_torch", lambda: False)
    monkeypatch.setattr(apptrain, "AT_HAND", "")
    monkeypatch.setattr(sys, "argv", ["apptrain", "run", "x"])
    return user


NO_TORCH = "note\napptrain: no Python here has torch: making a venv that has (VENV=DIR takes another)\n"


@pytest.mark.parametrize(("given", "name"), [("", ".venv"), ("mine", "mine"), ("/other", "/other")])
def test_a_venv_that_is_all_that_is_missing_is_made_and_the_line_run_again(
    runs: User, monkeypatch: pytest.MonkeyPatch, given: str, name: str
) -> None:
    monkeypatch.setenv("VENV", given)
    before = signal.getsignal(signal.SIGINT)
    said = NO_TORCH
    if given:
        said = f"note\napptrain: VENV={runs.home / name} is not there: making a venv with torch there\n"
    assert runs.types("run x") == (0, "", said)
    venv = str(runs.home / name)
    (words, meanwhile), became = runs.calls
    assert (words, became) == (
        [f"{runs.home}/tools/venv.sh", venv, "run"],
        [f"{runs.home}/apptrain", "run", "x"],
    )
    meanwhile(signal.SIGINT, None)  # Ctrl-C reaches tools/venv.sh, which is waited for
    assert (os.environ["VENV"], signal.getsignal(signal.SIGINT)) == (venv, before)


def test_a_venv_that_cannot_be_made_is_the_end(runs: User, capsys: pytest.CaptureFixture[str]) -> None:
    (runs.home / "status").touch()
    with pytest.raises(SystemExit) as ended:
        apptrain.main(["run", "x"])
    assert (ended.value.code, capsys.readouterr().err) == (3, NO_TORCH)
    assert len(runs.calls) == 1


def test_a_ctrl_c_that_is_ignored_stays_so(runs: User) -> None:
    """As behind & in a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runs.types("run x")
        assert (runs.calls[0][1], signal.getsignal(signal.SIGINT)) == (signal.SIG_IGN, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "there", [".venv", "containers/image.sif", "containers/image-cu128.sif", "no venv.sh", "by hand"]
)
def test_no_venv_is_made_beside_another_or_an_image_or_without_our_tools(
    runs: User, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    if there == "no venv.sh":
        (runs.home / "tools/venv.sh").unlink()
    elif there == "by hand":
        monkeypatch.setattr(apptrain, "AT_HAND", None)
    else:
        (runs.home / there).touch()
    assert runs.refusal("run x").startswith("run needs torch, and this Python (")


@pytest.mark.parametrize(("name", "asks"), [("run", True), ("demo", False)])
def test_packages_that_an_environment_lacks_are_asked_for_but_not_of_who_tries_it_out(
    runs: User, monkeypatch: pytest.MonkeyPatch, name: str, asks: bool
) -> None:
    monkeypatch.setattr(apptrain, "AT_HAND", LACKS)
    status, _, err = runs.types(name)
    lines = err.splitlines()
    assert lines[0] == f"apptrain: {LACKS}"
    if asks:
        said = f"apptrain: run: nothing else here has torch: add them, or make -C {runs.home} venv"
        assert (status, lines[1:]) == (64, [said])
    else:
        assert (status, len(runs.calls)) == (0, 2)


def test_an_environment_that_is_taken_is_told(runs: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apptrain, "AT_HAND", HAS)
    monkeypatch.setattr(mistakes, "has_torch", lambda: True)
    assert runs.types("run x") == (0, "", f"apptrain: {HAS}\n")
    assert runs.calls == ["runs"]


@pytest.mark.parametrize("is_old", [False, True])
def test_before_scaling_makes_a_venv_a_run_is_checked_if_this_python_can(
    runs: User, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    def main(_words: object, _env: object, check_run: Callable[[list[str]], None]) -> int:
        check_run(["--nodes", "1"])
        return 4

    monkeypatch.setattr(scaling, "main", main)
    monkeypatch.setattr(embedded, "check", runs.tells("check"))
    monkeypatch.setattr(mistakes, "has_torch", lambda: True)
    if is_old:
        monkeypatch.setattr(mistakes, "OLDEST", (9,))
    assert runs.types("scaling")[0] == 4
    assert runs.calls == ([] if is_old else [("check", ["--nodes", "1"])])
    monkeypatch.setattr(mistakes, "has_torch", lambda: False)
    (runs.home / ".venv").touch()
    assert runs.types("scaling")[2].startswith("apptrain: scaling needs torch, and this Python (")


# --- in the image -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "image", "rest"),
    [
        ("run --image", "", []),
        ("run --image --nodes 3 -- x.py --image y", "", ["--nodes", "3", "--", "x.py", "--image", "y"]),
        ("run --nodes 3 --image my.sif --device cpu -- x.py", "my.sif", ["--nodes", "3", "--device", "cpu", "--", "x.py"]),
        ("run --nodes 3 --image=my.sif", "my.sif", ["--nodes", "3"]),
        ("run --image=my.sif --mode exec", "my.sif", ["--mode", "exec"]),
        ("run --image unpacked.py -- x.py", "unpacked.py", ["--", "x.py"]),
    ],
)  # fmt: skip
def test_the_same_is_run_in_an_image(
    user: User, monkeypatch: pytest.MonkeyPatch, line: str, image: str, rest: list[str]
) -> None:
    (Path("unpacked.py") / ".singularity.d").mkdir(parents=True)
    start = str(user.home / "containers/run.sh")
    inside = ["python", "-P", "-m", "entrypoint.cli.embedded", *rest]
    own = user.home / "containers" / stacks.image_on(Path("image.sif"), os.uname().machine).name
    for given, expected in (("", image or str(own)), ("given.sif", image or "given.sif")):
        monkeypatch.setenv("APPTRAIN_IMAGE", given)
        user.calls.clear()
        assert user.types(line) == (0, "", "")
        assert user.calls == [[start, expected, *inside]]
        assert os.environ[VARIABLE] == ""


def test_the_contents_of_the_image_are_told_to_the_manifest(user: User) -> None:
    Path("my.sif").write_bytes(SIF)
    Path("my.json").write_text(f'{{"partition_sha256": "abc", "bytes": {len(SIF)}}}')
    user.types("run --image my.sif -- x.py")
    assert os.environ[VARIABLE] == "abc"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run --image my.py --lr 1", "my.py is no image: did you mean `{us} run --image -- my.py --lr 1`?"),
        ("run --nodes 3 --image=my.py -- 1", "my.py is no image: did you mean `{us} run --nodes 3 --image -- my.py 1`?"),
        ("run --image -m mod", "-m stands before --: did you mean `{us} run --image -- -m mod`?"),
        ("run --image my.sif my.py --lr 1 -- 2", "my.py stands before --: did you mean `{us} run --image=my.sif -- my.py --lr 1 2`?"),
        ("demo --image my.py", "my.py is no image: did you mean `{us} run --nodes 2 --image -- my.py`?"),
        ("demo --image=my.sif my.py", "my.py stands before --: did you mean `{us} run --nodes 2 --image=my.sif -- my.py`?"),
    ],
)  # fmt: skip
def test_a_script_in_the_place_of_the_image_or_before_the_dashes_is_refused(
    user: User, line: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert user.refusal(line) == said.format(us=user.home / "apptrain")


# --- the image ----------------------------------------------------------------------------------------------


@pytest.fixture
def builds(user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    """One with Apptainer."""

    def make(words: list[str], *, check: bool) -> Any:
        user.calls.append(words)
        return SimpleNamespace(returncode=int(check))

    monkeypatch.setattr(subprocess, "run", make)
    (tmp_path / "apptainer").touch(mode=0o755)
    return user


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("build", ["", "", "", ""]),
        ("fetch --stack cu128 --offline d", ["cu128", "", "d", ""]),
        ("build --extra=e --image i.sif", ["", "e", "", "i.sif"]),
    ],
)
def test_the_image_is_built_by_a_venv_of_its_own(
    builds: User, monkeypatch: pytest.MonkeyPatch, line: str, options: list[str]
) -> None:
    Path("e").touch()
    stack, extra, offline, image = options
    words = ["--stack", stack, "--extra", extra, "--offline", offline, "--image", image, line.split()[0]]
    for given, venv in (
        ("", builds.home / ".venv-image"),
        ("mine", builds.home / "mine"),
        ("/x", Path("/x")),
    ):
        monkeypatch.setenv("IMAGE_VENV", given)
        builds.calls.clear()
        assert builds.types(f"image {line}") == (0, "", "")
        assert builds.calls == [
            [f"{builds.home}/tools/venv.sh", str(venv), "image"],
            [f"{venv}/bin/python", f"{builds.home}/containers/build.py", *words],
        ]


@pytest.mark.parametrize("program", ["apptainer", "singularity", ""])
def test_apptainer_or_singularity_builds_and_none_is_needed_to_fetch(
    builds: User, tmp_path: Path, program: str
) -> None:
    (tmp_path / "apptainer").unlink()
    if program:
        (tmp_path / program).touch(mode=0o755)
        assert builds.types("image build")[0] == 0
    else:
        assert builds.types("image fetch")[0] == 0
        builds.calls.clear()
        assert builds.refusal("image build").startswith(
            "image build: neither apptainer nor singularity is on PATH: load it (module avail apptainer), or "
        )


@pytest.mark.parametrize("line", ["verify", "inspect"])
def test_an_image_that_is_missing_is_told_before_a_venv_is_made(builds: User, line: str) -> None:
    assert builds.refusal(f"image {line} --image no.sif").startswith(f"image {line}: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("build --stack cu1", "image build: STACK=cu1: there is no such stack: give one of cu132, cu128, cu126"),
        ("build --image .", "image build: IMAGE=.: it is a directory: give the file to build, NAME.sif"),
        ("fetch --image v1.2", "image fetch: IMAGE=v1.2: its name does not end with .sif: give the file to build, NAME.sif"),
        ("fetch --extra no", "image fetch: EXTRA=no: there is no such file: give a requirements file"),
        ("build my.sif --stack cu128", "image build: my.sif stands without --image: did you mean `{us} image build --stack cu128 --image my.sif`?"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(builds: User, line: str, said: str) -> None:
    us = "apptrain" if os.access("apptrain", os.X_OK) else builds.home / "apptrain"
    assert builds.refusal(f"image {line}") == said.format(us=us)


@pytest.mark.parametrize(
    "line", ["image", "image --help", "image -h", "image build --help", "image --help-all"]
)
def test_the_help_of_the_image_names_the_stacks_if_they_are_here(user: User, line: str) -> None:
    status, out, err = user.types(line)
    assert (status, err) == (0, "")
    assert "--stack NAME     which CUDA: cu132 (default), cu128, cu126 (stacks.yaml)\n" in out
    (user.home / "Makefile").unlink()
    assert "--stack NAME     which CUDA (stacks.yaml)\n" in user.types(line)[1]


def test_a_checkout_that_is_not_whole_is_refused(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    def become(_program: str, _words: object) -> NoReturn:
        raise OSError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "execvp", become)
    assert user.refusal("run --image my.sif") == (
        f"{user.home}/containers/run.sh cannot be started (No such file or directory): use a whole checkout"
    )
