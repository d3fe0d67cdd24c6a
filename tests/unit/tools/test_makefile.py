"""What make's variables become: whole words of a command, never shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
RECORDER = """\
#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done >>"$RECORD"
"""
INJECTION = """2"; touch planted; echo "'$(touch planted)`touch planted`"""


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("demo", ["NODES", "CONFIG"]),
        ("demo IN=image", ["NODES", "CONFIG", "IMAGE"]),
        ("submit", ["NODES", "CLUSTER", "GPUS", "PARTITION", "ACCOUNT", "TIME", "OPTIONS"]),
        ("profiles", ["PROFILE"]),
        ("image", ["STACK", "EXTRA", "OFFLINE", "IMAGE"]),
    ],
)
def test_a_value_reaches_the_command_as_one_word_and_runs_nothing(
    target: str, names: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(RECORDER)
    python.chmod(0o755)
    (tmp_path / "tools").symlink_to(CHECKOUT / "tools")
    (tmp_path / "apptrain").symlink_to(CHECKOUT / "apptrain")
    record = tmp_path / "record"
    values = {name: f"{INJECTION} {name}" for name in names}
    given = [f"{name}={value.replace('$', '$$')}" for name, value in values.items()]  # make's own quoting
    venvs = [f"VENV={tmp_path}", f"IMAGE_VENV={tmp_path}"]
    env = {"PATH": os.environ["PATH"], "RECORD": str(record), "PYTHON": str(python)}
    made: list[str | Path] = [
        "make",
        "-f",
        CHECKOUT / "Makefile",
        "-o",
        "venv",
        "-o",
        "venv-image",
        *target.split(),
        *venvs,
    ]
    ended = subprocess.run([*made, *given], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "planted").exists()
    words = record.read_text().split("\0")
    assert [
        name for name, value in values.items() if not {value, f"--{name.lower()}={value}"} & set(words)
    ] == []


def test_a_profile_is_read_with_the_python_that_is_there_and_nothing_is_installed(tmp_path: Path) -> None:
    """As on most login nodes, whose python3 has PyYAML."""
    env = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "VENV": "/none",
        "IMAGE_VENV": str(tmp_path / "venv"),
    }
    ended = subprocess.run(
        ["make", "profiles"], cwd=CHECKOUT, env=env, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "apptrain: generic: " in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_where_no_python_has_pyyaml_the_venv_is_made_and_that_is_said(tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    (tmp_path / "tools").mkdir()
    bin_.mkdir()
    for name in ("python3", *(f"python3.{minor}" for minor in range(9, 15))):
        (bin_ / name).write_text("#!/bin/sh\nexit 1\n")
        (bin_ / name).chmod(0o755)
    (tmp_path / "tools/venv.sh").write_text('#!/bin/sh\necho "made $*"\n')
    (tmp_path / "tools/venv.sh").chmod(0o755)
    shutil.copy(CHECKOUT / "tools/login-python.sh", tmp_path / "tools")
    env = {"PATH": f"{bin_}:{os.environ['PATH']}", "VENV": "/none", "IMAGE_VENV": ".venv-image"}
    ended = subprocess.run(
        [tmp_path / "tools/login-python.sh"], env=env, capture_output=True, text=True, timeout=30
    )
    assert (ended.returncode, ended.stdout) == (0, f"{tmp_path}/.venv-image/bin/python\n")
    assert "no python3 here has PyYAML" in ended.stderr
    assert "made .venv-image image" in ended.stderr


@pytest.mark.parametrize("name", ["DRY_RUN", "FOLLOW"])
@pytest.mark.parametrize(("value", "is_given"), [("1", True), ("", False), ("0", False)])
def test_a_setting_that_is_0_is_not_given(name: str, value: str, is_given: bool) -> None:
    line = ["make", "-n", "-C", str(CHECKOUT), "submit", f"{name}={value}"]
    shown = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
    assert (f"--{name.lower().replace('_', '-')} " in shown) == is_given


def submitted(folder: Path, words: str) -> "subprocess.CompletedProcess[str]":
    """`make -C CHECKOUT submit` from this folder, whose name has a $ for make to leave alone."""
    line = ["make", "-s", "-C", str(CHECKOUT), "submit", "CLUSTER=generic", "DRY_RUN=1", f"ARGS={words}"]
    env = {"PATH": os.environ["PATH"], "PWD": str(folder), "VENV": sys.prefix, "HOME": str(folder)}
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_script_beside_which_make_was_called_is_not_looked_for_in_the_checkout(tmp_path: Path) -> None:
    folder = tmp_path / "my $(touch planted) work"
    folder.mkdir()
    (folder / "my_script.py").touch()
    done = submitted(folder, "--device cpu -- my_script.py --lr 0.1")
    line = f"{CHECKOUT}/apptrain submit --dry-run --cluster generic --nodes 2 --device cpu -- my_script.py --lr 0.1"
    message = f"apptrain: CMD my_script.py is in {folder} and not in {CHECKOUT}, where make submits from: there, `{line}`"
    assert (done.returncode, done.stdout, done.stderr.splitlines()[0]) == (2, "", message)
    shown = subprocess.run(
        ["bash", "-c", done.stderr.split("`")[1]],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "VENV": sys.prefix, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"apptrain: runs my_script.py --lr 0.1 in {folder}" in shown.stderr.splitlines()
    assert not (folder / "planted").exists()


def test_a_script_that_is_nowhere_is_said_to_be_missing_in_the_checkout(tmp_path: Path) -> None:
    done = submitted(tmp_path, "-- no_script.py")
    assert (done.returncode, done.stderr.partition(": check")[0]) == (
        2,
        f"apptrain: CMD no_script.py does not exist in {CHECKOUT}",
    )
