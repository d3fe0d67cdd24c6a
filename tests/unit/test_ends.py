"""The command line's ends: what becomes of an error that a command raises, and which command is called."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.batch import conclude, prepare
from entrypoint.cli import main as cli
from entrypoint.core.errors import Refusal
from entrypoint.node import check
from entrypoint.plan import mistakes


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
        f"apptrain: --env-file {file} cannot be read ({why}): give a file with one NAME=VALUE a line, as "
        "`env >FILE` in a job writes it\n"
    )
