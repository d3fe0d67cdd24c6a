"""Which Python trains: that of the active environment if its torch fits, else the checkout's venv, which is made."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
SCRIPT = CHECKOUT / "tools/login-python.sh"
BOUND = 60
DEMO = ("matplotlib", "pyyaml", "safetensors", "tensorboard", "torchvision", "tqdm")
NO_TORCH = "apptrain: no Python here has torch: making a venv that has (VENV=DIR takes another)"
TELLS = """\
import os, sys
print("trains", sys.prefix, os.environ["PYTHONPATH"].partition(":")[0])
"""


def environment(folder: Path, *packages: str, torch: str = "") -> Path:
    """A venv with the metadata of these packages, and nothing that could be imported."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    for name in (*packages, *(["torch"] if torch else ())):
        (site / f"{name}-1.0.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {torch if name == 'torch' else '1.0'}\n"
        (site / f"{name}-1.0.dist-info/METADATA").write_text(text)
        (site / f"{name}.py").write_text("raise SystemExit('imported')\n")
    return folder


def ask(what: str, **env: Path | str) -> list[str]:
    """What tools/login-python.sh prints, without a venv of the checkout."""
    given = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **{k: str(v) for k, v in env.items()}}
    (here,) = {SCRIPT.parent.parent}
    words = ["bash", str(here / "tools/login-python.sh"), *what.split()]
    ended = subprocess.run(words, env=given, capture_output=True, text=True, timeout=BOUND, check=False)
    assert ended.stderr == ""
    return ended.stdout.splitlines()


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX"])
@pytest.mark.parametrize("torch", ["2.7.0", "2.15.0+cu132", "2.16.0a0+git1234"])
def test_an_active_environment_whose_torch_fits_is_taken_and_nothing_of_it_imported(
    name: str, torch: str, tmp_path: Path
) -> None:
    mine = environment(tmp_path / "my env", "psutil", torch=torch)
    said = f"Python of {name}, {mine}, with torch {torch} (VENV=DIR takes another)"
    for command in ("run", "launch", "check"):
        assert ask(command, **{name: mine}) == [f"{mine}/bin/python", said]


@pytest.mark.parametrize(
    ("packages", "torch", "command", "why"),
    [
        (("psutil",), "2.6.1", "run", "torch 2.6.1 does not fit (2.7 or newer, below 3)"),
        (("psutil",), "3.0.0", "run", "torch 3.0.0 does not fit (2.7 or newer, below 3)"),
        ((), "2.9.0", "run", "torch 2.9.0 is there, but not psutil (pip install them)"),
        (("psutil",), "2.9.0", "demo", f"torch 2.9.0 is there, but not {', '.join(DEMO)} (pip install them)"),
        (("psutil",), "", "run", ""),
        (("psutil", *DEMO), "2.9.0", "plan", ""),
    ],
)
def test_one_that_does_not_fit_is_left_with_the_reason(
    packages: tuple[str, ...], torch: str, command: str, why: str, tmp_path: Path
) -> None:
    mine = environment(tmp_path / "mine", *packages, torch=torch)
    other, *said = ask(
        "any" if command == "plan" else command, VIRTUAL_ENV=mine, PATH=f"{mine}/bin:/usr/bin:/bin"
    )
    assert not other.startswith(str(mine))
    assert said == ([f"VIRTUAL_ENV, {mine}, is not taken: {why}"] if why else [])


def test_venv_is_taken_whatever_it_has_and_a_venv_comes_before_conda(tmp_path: Path) -> None:
    one, two, third = (environment(tmp_path / name, "psutil", torch="2.9.0") for name in ("1", "2", "3"))
    assert ask("run", VENV=one, VIRTUAL_ENV=two, CONDA_PREFIX=third) == [f"{one}/bin/python"]
    assert ask("run", VIRTUAL_ENV=two, CONDA_PREFIX=third)[0] == f"{two}/bin/python"
    old = environment(tmp_path / "old", torch="2.0.0")
    assert ask("run", VIRTUAL_ENV=old, CONDA_PREFIX=third)[0] == f"{third}/bin/python"


def test_a_python_that_does_not_answer_is_left_in_time(tmp_path: Path) -> None:
    mine = environment(tmp_path / "mine", "psutil", torch="2.9.0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/timeout").write_text("#!/bin/sh\nexec /usr/bin/timeout 0.2 sleep 9\n")
    (tmp_path / "bin/timeout").chmod(0o755)
    said = ask("run", VIRTUAL_ENV=mine, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")[1:]
    assert said == [f"VIRTUAL_ENV, {mine}, is not taken: its Python did not say within 20 s what it has"]


def test_a_run_in_an_environment_that_has_torch_alone_finds_apptrain(tmp_path: Path) -> None:
    """Nothing of apptrain is installed there: the packages are those of this Python, without its .pth."""
    mine = tmp_path / "mine"
    venv.create(mine, symlinks=True)
    (site,) = mine.glob("lib/python3.*/site-packages")
    packages = next(Path(path) for path in sys.path if (Path(path) / "torch").is_dir())
    (site / "packages.pth").write_text(f"{packages}\n")
    (tmp_path / "tells.py").write_text(TELLS)
    env = {"PATH": f"{mine}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "CONDA_PREFIX": str(mine)}
    words = [
        str(CHECKOUT / "apptrain"),
        "run",
        "--nodes",
        "1",
        "--mode",
        "exec",
        "--device",
        "cpu",
        "--",
        "tells.py",
    ]
    ended = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=BOUND, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"trains {mine} {CHECKOUT}/host/packages\n"
    assert ended.stderr.startswith(f"apptrain: Python of CONDA_PREFIX, {mine}, with torch 2.")


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A checkout without a venv; its tools/venv.sh makes one whose Python tells how it was called."""
    home = tmp_path / "check out"
    home.mkdir()
    for name in ("entrypoint", "src", "host"):
        shutil.copytree(CHECKOUT / name, home / name, symlinks=True, ignore=shutil.ignore_patterns("*.pyc*"))
    (home / "tools").mkdir()
    for name in ("apptrain", "Makefile", "tools/login-python.sh"):
        shutil.copy(CHECKOUT / name, home / name)
    (home / "tools/venv.sh").write_text(
        '#!/bin/sh\necho "makes $1 $2" >&2\nmkdir -p "$1/bin"\n'
        'printf \'#!/bin/sh\\n[ "$2" = "import os, sys" ] || case $2 in *yaml*) ;; *) shift 3; echo "ran $*";; esac\\n\' >"$1/bin/python"\n'
        'chmod +x "$1/bin/python"\n'
    )
    (home / "tools/venv.sh").chmod(0o755)
    (home / "containers").mkdir()
    (home / "my.py").touch()
    return home


def go(fresh: Path, line: str, **env: str) -> "subprocess.CompletedProcess[str]":
    bare = fresh.parent / "bare"
    if not bare.exists():
        bare.mkdir()
        (bare / "python3").symlink_to(Path(sys.executable).resolve())
    given = {"PATH": f"{bare}:/usr/bin:/bin", "HOME": str(fresh.parent), **env}
    return subprocess.run(line.split(), cwd=fresh, env=given, capture_output=True, text=True, timeout=BOUND)


def test_the_venv_is_made_where_nothing_has_torch_but_not_before_a_mistake_is_told(fresh: Path) -> None:
    wrong = go(fresh, "./apptrain run -- nothere.py")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (64, 1)
    ran = go(fresh, "./apptrain run --nodes 3 -- my.py")
    assert (ran.stdout, ran.stderr) == (
        "ran run --nodes 3 -- my.py\n",
        f"{NO_TORCH}\nmakes {fresh}/.venv run\n",
    )


def test_what_is_trained_without_a_cmd_is_said_before_the_venv_is_made(fresh: Path) -> None:
    ran = go(fresh, "./apptrain run")
    first, *others = ran.stderr.splitlines()
    assert first.startswith("apptrain: no CMD given: trains the reference job, as apptrain demo; your own: ")
    assert (others, ran.stdout) == ([NO_TORCH, f"makes {fresh}/.venv run"], "ran run\n")


def test_a_run_directory_that_cannot_be_is_refused_before_the_venv_is_made(fresh: Path) -> None:
    wrong = go(fresh, "./apptrain run --run-dir my.py/run -- my.py")
    assert (wrong.returncode, (fresh / ".venv").exists()) == (64, False)
    assert wrong.stderr == (
        f"apptrain: the run directory {fresh}/my.py/run cannot be written ({fresh}/my.py is no directory): "
        "give --run-dir a directory that all nodes share and you may write\n"
    )


def test_a_script_that_is_missing_is_told_before_scaling_makes_a_venv(fresh: Path) -> None:
    wrong = go(fresh, "./apptrain scaling --nodes 3,4,8 -- mx.py --batch {64/nodes}")
    assert (wrong.returncode, (fresh / ".venv").exists(), (fresh / "runs").exists()) == (64, False, False)
    assert wrong.stderr == f"apptrain: CMD mx.py does not exist in {fresh}: did you mean my.py?\n"


def test_after_ctrl_c_the_unfinished_venv_is_removed_before_the_command_ends(fresh: Path) -> None:
    (fresh / "tools/venv.sh").write_text(
        "#!/bin/bash\n"
        'mkdir "$1"\n'
        "trap 'sleep 1; rmdir \"$1\"; exit 130' INT\n"
        "kill -INT $PPID\n"  # as a terminal does to both
        "kill -INT $$\n"
    )
    stopped = go(fresh, "./apptrain run -- my.py")
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", f"{NO_TORCH}\n")
    assert not (fresh / ".venv").exists()


def test_the_venv_is_not_made_where_an_image_is_nor_in_a_folder_of_somebodys(fresh: Path) -> None:
    (fresh / "containers/image.sif").touch()
    asked = go(fresh, "./apptrain run -- my.py")
    assert (asked.returncode, asked.stderr.count("\n")) == (64, 1)
    assert "run needs torch, and this Python " in asked.stderr
    (fresh / "containers/image.sif").unlink()
    asked = go(fresh, "./apptrain run -- my.py", VENV=str(fresh / "src"))
    assert (asked.returncode, "run needs torch, and this Python " in asked.stderr) == (64, True)


def test_packages_that_an_environment_lacks_are_asked_for_before_torch_is_downloaded(fresh: Path) -> None:
    mine = environment(fresh.parent / "mine", torch="2.9.0")
    asked = go(fresh, "./apptrain run -- my.py", VIRTUAL_ENV=str(mine))
    assert asked.returncode == 64
    assert asked.stderr.splitlines() == [
        f"apptrain: VIRTUAL_ENV, {mine}, is not taken: torch 2.9.0 is there, but not psutil (pip install them)",
        "apptrain: run: nothing else here has torch: add them, or make venv",
    ]


@pytest.mark.parametrize(
    ("fits", "words", "made"),
    [(True, "", False), (False, "", True), (True, "VENV=other", True), (True, "IN=image", False)],
)
def test_make_demo_makes_a_venv_only_if_no_environment_fits_or_one_is_named(
    fits: bool, words: str, made: bool, fresh: Path
) -> None:
    (fresh / "apptrain").write_text('#!/bin/sh\necho "demo with ${VENV:-none}"\n')
    mine = environment(fresh.parent / "mine", "psutil", *(DEMO if fits else ()), torch="2.9.0")
    done = go(fresh, f"make -s demo {words}", CONDA_PREFIX=str(mine))
    where = "other" if "VENV" in words else ".venv"
    assert ("makes" in done.stderr, done.returncode) == (made, 0), done.stderr
    assert (f"makes {where} run\n" in done.stderr) is made
    assert done.stdout == f"demo with {'other' if 'VENV' in words else 'none'}\n"
