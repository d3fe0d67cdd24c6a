"""The command line's ends: what becomes of an error that a command raises, and which command is called."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint import __version__
from entrypoint.batch import conclude, prepare
from entrypoint.cli import main as cli
from entrypoint.core.errors import BadInput, Refusal, Unavailable
from entrypoint.node import check
from entrypoint.plan import mistakes
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.run import launch


@pytest.fixture
def raises(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what a command raises."""

    def choose(error: BaseException) -> None:
        def run(_argv: object) -> int:
            raise error

        monkeypatch.setattr(cli, "_run", run)

    return choose


def test_ctrl_c_ends_with_130_and_without_a_word(raises: Any, capsys: pytest.CaptureFixture[str]) -> None:
    raises(KeyboardInterrupt())
    assert cli.main(["plan"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_behind_stdout_is_said(raises: Any, capsys: pytest.CaptureFixture[str]) -> None:
    raises(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert cli.main(["plan"]) == 1
    assert capsys.readouterr().err == "apptrain: stdout cannot be written: No space left on device\n"


def test_who_reads_no_further_ends_the_command_and_what_is_left_goes_nowhere(
    raises: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    raises(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: writer, flush=lambda: None))
    try:
        assert cli.main(["plan"]) == 141
        assert os.write(writer, b"left") == 4  # /dev/null now
    finally:
        os.close(writer)


def test_any_other_error_of_the_system_is_no_end_that_was_foreseen(raises: Any) -> None:
    raises(PermissionError(errno.EACCES, "Permission denied"))
    with pytest.raises(PermissionError):
        cli.main(["plan"])


@pytest.mark.parametrize("module", [prepare, conclude])
def test_a_hand_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: Any
) -> None:
    name = module.__name__.rpartition(".")[2]
    asked: list[Path] = []
    error: OSError | None = None

    def run(where: Path, *_: object) -> int:
        asked.append(where)
        if error:
            raise error
        return 3

    monkeypatch.setattr(module, name, run)
    assert cli.main([name, str(tmp_path)]) == 3
    error = OSError(errno.EROFS, "Read-only file system")
    assert cli.main([name, str(tmp_path)]) == Refusal("some-cause", "").status == 64
    error = OSError(errno.EROFS, "Read-only file system", f"{tmp_path}/next")
    assert cli.main([name, str(tmp_path)]) == 64
    assert asked == [tmp_path] * 3
    said = [f"apptrain: {place}: Read-only file system" for place in (tmp_path, tmp_path / "next")]
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize("as_json", [False, True])
def test_the_check_is_called_where_there_is_torch(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    asked: list[bool] = []

    def run(*, as_json: bool) -> int:
        asked.append(as_json)
        return 5

    monkeypatch.setattr(check, "check", run)
    monkeypatch.setattr(mistakes, "check_torch", lambda name: asked.append(name == "check"))
    assert cli.main(["check", *["--json"] * as_json]) == 5
    assert asked == [True, as_json]


@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file or directory"), (b"\xff\xfe=1", "no text")]
)
def test_a_recorded_environment_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, why: str
) -> None:
    file = tmp_path / "job.env"
    if content is not None:
        file.write_bytes(content)
    assert cli.main(["plan", "--env-file", str(file)]) == 64
    assert capsys.readouterr().err == (
        f"apptrain: --env-file {file} cannot be read ({why}): give a file as `env -0 >FILE` in a job "
        "writes it, or with one NAME=VALUE a line\n"
    )


@pytest.mark.parametrize(
    ("error", "status"), [(BadInput("a-b", "wrong"), 64), (Unavailable("a-b", "wrong"), 69)]
)
def test_a_refusal_is_its_line_and_its_status(
    raises: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Refusal,
    status: int,
) -> None:
    monkeypatch.delenv("APPTRAIN_OUTCOME", raising=False)
    raises(error)
    assert cli.main(["plan"]) == status
    assert capsys.readouterr() == ("", "apptrain: wrong\n")


def test_statuses_are_listed_in_their_order_and_only_those_that_can_be() -> None:
    first, *rows = cli.EXIT_STATUS.splitlines()
    assert cli.exit_status() == first == "exit status:"
    assert cli.exit_status("64", "0", "1") == f"{first}\n{rows[0]}\n{rows[1]}"
    assert [row.split()[:2] for row in rows[:2]] == [["0", "done"], ["64", "bad"]]


@pytest.mark.parametrize("command", [[], ["plan"], ["launch"], ["check"], ["prepare"], ["conclude"]])
def test_help_ends_with_0_and_names_the_command(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([*command, "--help"], [*command, "--help-all"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        shown = capsys.readouterr().out
        assert ended.value.code == 0
        assert shown.startswith(f"usage: {' '.join(['apptrain', *command])} ")
        # It stands in the help that it makes longer.
        assert ("--help-all" in shown) is (command in (["plan"], ["launch"]) and "--help" in words)
        assert ("--hang-timeout" in shown) is (command in (["plan"], ["launch"]) and "--help-all" in words)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{__version__}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --devic cpu", "unrecognized arguments: --devic cpu: did you mean --device?"),
        ("launch --devic cpu", "unrecognized arguments: --devic cpu: did you mean --device?"),
        ("check --jso", "unrecognized arguments: --jso: did you mean --json?"),
        ("check x.py", "check takes no script: did you mean `"),
        ("prepare", "the following arguments are required: DIR: see `apptrain prepare --help`"),
        ("conclude", "the following arguments are required: DIR: see `apptrain conclude --help`"),
        ("--versio plan", "unrecognized arguments: --versio"),
        ("--frob plan --nnodes 2", "unrecognized arguments: --frob: see `apptrain --help`"),
        ("launch --json", "unrecognized arguments: --json: see `apptrain launch --help`"),
        ("launch --frob", "unrecognized arguments: --frob: see `apptrain launch --help`"),
    ],
)
def test_a_word_that_a_command_does_not_take_is_refused_in_its_name(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 64
    assert capsys.readouterr().err.startswith(f"apptrain: {said}")


class Launched:
    """Where `launch` ends, in a folder with my.py."""

    def __init__(self) -> None:
        self.plans: list[LaunchPlan] = []
        self.env: dict[str, str] = {}
        self.needed_torch: list[str] = []

    def launch(self, plan: LaunchPlan, _settings: object, env: dict[str, str]) -> int:
        self.plans.append(plan)
        self.env = env
        return 9


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    for name in [name for name in os.environ if name.startswith(("APPTRAIN_", "SLURM_", "PBS_"))]:
        monkeypatch.delenv(name)
    found = Launched()
    monkeypatch.setattr(launch, "launch", found.launch)
    monkeypatch.setattr(mistakes, "check_torch", found.needed_torch.append)
    (tmp_path / "my.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["apptrain", "plan"])
    return found


HERE = os.uname().nodename


def test_a_launch_has_this_machines_environment_and_name_whatever_was_recorded(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.env").write_text("MINE=recorded\n")
    (tmp_path / "secrets").write_text("TOKEN=x\n")
    (tmp_path / "secrets").chmod(0o600)
    monkeypatch.setenv("APPTRAIN_ENV_FILE", str(tmp_path / "job.env"))
    monkeypatch.setenv("MINE", "here")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    words = [
        "launch",
        "--nodes",
        f"a,{HERE}",
        "--device",
        "cpu",
        "--secrets",
        "secrets",
        "--",
        "my.py",
        "--lr",
    ]
    assert cli.main(words) == 9
    (plan,) = launched.plans
    assert (plan.node_rank, plan.command) == (1, ("my.py", "--lr"))
    assert (launched.env["MINE"], launched.env["TOKEN"]) == ("here", "x")
    assert launched.env["PYTHONPATH"].endswith("/mine")
    assert launched.needed_torch == ["launch"]


def test_of_a_recorded_environment_this_machine_knows_no_place(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.env").write_text("X=\n")
    words = ["plan", "--nodes", f"a,{HERE}", "--json", "--", "my.py"]
    assert cli.main(words) == 0
    assert '\n  "node_rank": 1,\n' in capsys.readouterr().out
    assert cli.main([*words[:4], "--env-file", "job.env", "--", "my.py"]) == 64
    monkeypatch.setenv("APPTRAIN_ENV_FILE", "job.env")
    assert cli.main(words) == 64
    assert capsys.readouterr().err.count("--node-rank is not given: give this node's place") == 2
    assert launched.plans == []


def test_what_torchrun_does_not_start_needs_no_torch_and_may_be_no_script(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = ["launch", "--nodes", f"a,{HERE}", "--device", "cpu"]
    assert cli.main([*placed, "--mode", "exec", "--", "nothere.py"]) == 9
    assert launched.needed_torch == []
    assert cli.main([*placed, "--", "nothere.py"]) == 64
    assert capsys.readouterr().err.startswith("apptrain: CMD nothere.py does not exist in ")
    assert len(launched.plans) == 1


@pytest.mark.parametrize(
    ("words", "typed", "told"),
    [
        ("nothere.py", True, True),
        ("nothere.py", False, False),
        ("my.py", True, False),
    ],
)
def test_only_who_types_a_plan_is_told_that_its_script_is_missing(
    launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    typed: bool,
    told: bool,
) -> None:
    if not typed:
        monkeypatch.setattr(sys, "argv", ["entrypoint"])
    assert cli.main(["plan", "--nodes", f"a,{HERE}", "--", words]) == 0
    out, err = capsys.readouterr()
    assert out.endswith(f" {words}\n")
    assert (
        err.startswith("apptrain: launch would refuse this here: CMD nothere.py does not exist in ") is told
    )
    assert err.count("\n") == told
    Path("job.env").write_text("X=\n")
    placed = ["plan", "--nodes", "a,b", "--node-rank", "0", "--env-file", "job.env"]
    assert cli.main([*placed, "--", words]) == 0
    assert capsys.readouterr().err == ""
    assert launched.plans == []


FUNCTIONS = """BASH_FUNC_ml%%=() {  module "$@"
}
BASH_FUNC_module%%=() {  eval "$(/usr/bin/true bash "$@")";
 local st=$?;
 return $st
}
"""
"""As `env` prints what bash 5.2 exports."""
NO_LINE = "is not NAME=VALUE: if a value has several lines, write the file with `env -0 >FILE`"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A=1\n\n# B=2\nC= x=y \nA=3", {"A": "3", "C": " x=y "}),
        ("A=\r\n#B=1\n", {"A": "\r"}),
        (f"A=1\n{FUNCTIONS}B.c=2\n", {"A": "1", "B.c": "2"}),
        ("A=x\nSLURM_JOB_ID=9\n\0#B==\0BASH_FUNC_m%%=() {  x\n}\0", {"A": "x\nSLURM_JOB_ID=9\n", "#B": "=", "BASH_FUNC_m%%": "() {  x\n}"}),
        ("", {}),
        ("A=1\n=x\n", f"line 2: '=x' {NO_LINE}"),
        ("\n\nA\n", f"line 3: 'A' {NO_LINE}"),
        ("A=\r\n #B=1\n", f"line 2: ' #B=1' {NO_LINE}"),
        (f"{FUNCTIONS}B\n", f"line 7: 'B' {NO_LINE}"),
        ("BASH_FUNC_m%%=() {  x\nA=1\n}\n", f"line 3: '}}' {NO_LINE}"),
        ("BASH_FUNC_m%%=() {  x\n local a=1\n", f"line 2: ' local a=1' {NO_LINE}"),
        ("A=1\0=x\0", f"entry 2: '=x' {NO_LINE}"),
    ],
)  # fmt: skip
def test_a_recorded_environment_is_a_variable_a_line(tmp_path: Path, text: str, found: Any) -> None:
    file = tmp_path / "job.env"
    file.write_bytes(text.encode())
    if isinstance(found, dict):
        assert cli.read_env_file(file) == found
    else:
        with pytest.raises(BadInput) as refused:
            cli.read_env_file(file)
        assert str(refused.value) == f"--env-file {file}, {found}"


def test_a_recorded_environment_has_as_many_bytes_as_a_kernel_passes(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_bytes(b"A=".ljust(8 << 20, b"x"))
    assert len(cli.read_env_file(file)["A"]) == (8 << 20) - 2
    with file.open("ab") as opened:
        opened.write(b"x")
    with pytest.raises(BadInput, match=r"cannot be read \(it has more than 8388608 bytes\)"):
        cli.read_env_file(file)
