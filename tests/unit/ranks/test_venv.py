"""`--venv DIR`: shown in the plan, and refused by `launch` unless its Python is the one that runs the ranks."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import entrypoint
from entrypoint.cli import main as cli
from entrypoint.cli.main import main
from entrypoint.core.errors import BadInput
from entrypoint.plan.resolve import resolve
from entrypoint.run import launch

CHECKOUT = Path(entrypoint.__file__).parents[1]
NODE = ("--nodes", "127.0.0.1", "--node-rank", "0", "--device", "cpu")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A venv of the Python that runs the tests."""
    folder = tmp_path / "my venv"
    venv.create(folder, system_site_packages=True, symlinks=True)
    return folder


def refusal(env: dict[str, str], *options: str) -> str | None:
    """What `launch` says of this venv under the tests' own Python; None where it may start."""
    given = vars(cli.parser().parse_args(["launch", *NODE, *options]))
    plan, _ = resolve(env, given, ["-m", "train"], hostname=None)
    try:
        launch.check(plan)
    except BadInput as refused:
        return str(refused)
    return None


def planned(capsys: pytest.CaptureFixture[str], env_file: Path, *options: str) -> tuple[object, object, str]:
    """(venv, its source) of the plan, and the plan as text."""
    arguments = ["plan", "--env-file", str(env_file), *NODE, *options]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    return plan["venv"], plan["sources"]["venv"], capsys.readouterr().out


def test_the_plan_shows_the_venv_and_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none, by_variable = tmp_path / "none.env", tmp_path / "variable.env"
    none.write_text("")
    by_variable.write_text("APPTRAIN_VENV=/home/alice/my venv\n")
    *shown, text = planned(capsys, by_variable)
    assert shown == ["/home/alice/my venv", "env:APPTRAIN_VENV"]
    assert "venv                     /home/alice/my venv  [env:APPTRAIN_VENV]" in text.splitlines()
    *shown, text = planned(capsys, by_variable, "--venv", "other")
    assert shown == ["other", "flag"]
    assert "venv                     other  [flag]" in text.splitlines()
    *shown, text = planned(capsys, none)
    assert shown == [None, "default"]
    assert "venv" not in text


def test_a_folder_that_is_no_venv_is_refused(tmp_path: Path) -> None:
    assert refusal({}, "--venv", str(tmp_path)) == (
        f"--venv {tmp_path} is no venv, it has no pyvenv.cfg: make it with make venv DIR={tmp_path}"
    )
    assert refusal({"APPTRAIN_VENV": "/no/venv"}) == (
        "APPTRAIN_VENV=/no/venv is no venv, it has no pyvenv.cfg: make it with make venv DIR=/no/venv"
    )


def test_a_venv_of_a_python_that_is_not_here_is_refused(made: Path) -> None:
    (made / "bin" / "python").unlink()
    (made / "bin" / "python").symlink_to("/no/such/python")
    assert refusal({"APPTRAIN_VENV": str(made)}) == (
        f"APPTRAIN_VENV={made} was made by another Python than this one, {sys.version.split()[0]}: remove it, and "
        f"make it again with make venv DIR='{made}'"
    )


def test_a_venv_of_another_version_of_python_is_refused(made: Path) -> None:
    lib = made / "lib"
    (lib / f"python3.{sys.version_info.minor}").rename(lib / f"python3.{sys.version_info.minor + 1}")
    assert refusal({}, "--venv", str(made)) == (
        f"--venv {made} was made by another Python than this one, {sys.version.split()[0]}: remove it, and make it "
        f"again with make venv DIR='{made}'"
    )


def test_another_python_than_the_venvs_is_refused(made: Path) -> None:
    assert refusal({}, "--venv", str(made)) == (
        f"--venv {made}, but this is the Python of {sys.prefix}: start it through a job script or containers/run.sh, "
        f"or put {made}/bin first in PATH"
    )


def test_the_venvs_own_python_is_taken_also_through_a_link(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(made)
    monkeypatch.setattr(sys, "prefix", str(made))
    assert refusal({}, "--venv", str(made)) is None
    assert refusal({}, "--venv", str(link)) is None


def test_a_rank_runs_under_the_venvs_python(made: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.prefix)\n")
    argv = [str(made / "bin" / "python"), "-P", "-m", "entrypoint", "launch", *NODE, "--mode", "exec"]
    argv += ["--run-dir", str(tmp_path / "run"), "--", str(script)]
    paths = os.pathsep.join([str(CHECKOUT), *filter(None, sys.path)])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "APPTRAIN_VENV": str(made)}
    ended = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, f"{made}\n"), ended.stderr
    plan = json.loads((tmp_path / "run" / "plan.0.json").read_text())
    assert (plan["venv"], plan["sources"]["venv"]) == (str(made), "env:APPTRAIN_VENV")
