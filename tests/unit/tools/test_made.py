"""make: the venv that it makes, and what is never left."""

import copy
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.tools.checkout import BOUND, RUNNING, VENV, Checkout, write_wheel


@VENV
def test_making_it_says_what_comes_and_where_to(quick: Checkout) -> None:
    done = quick.make("venv")
    said = [line for line in done.stderr.splitlines() if line.startswith("apptrain: ")]
    tmp = quick.path.parent
    assert [line.replace(str(tmp), "TMP") for line in said] == [
        "apptrain: pip downloads up to 1.0MB and installs 1.0MB in TMP/check out/.venv; pip's cache keeps a copy of the downloads "
        "(PIP_NO_CACHE_DIR=1: none)",
        f"apptrain: making TMP/check out/.venv with Python {RUNNING} (TMP/bin/python3)",
        "apptrain: TMP/check out/.venv is ready",
    ]
    assert "Successfully installed proberun-1.0" in done.stdout
    assert quick.packages() == quick.compiled() == ["proberun"]

    added = quick.make("venv-dev")
    assert f"apptrain: adding requirements/dev.txt to {quick.venv}\n" in added.stderr
    assert quick.packages() == quick.compiled() == ["probedev", "proberun"]


@VENV
def test_a_second_make_does_and_says_nothing(ready: Checkout) -> None:
    before = ready.snapshot()
    for target in ("venv", "venv-dev"):
        done = ready.make(target)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for lock in ("run", "dev"):
        os.utime(ready.lock(lock))
    assert ready.make("venv-dev").stderr == ""
    after = ready.snapshot()
    for lock in ("run", "dev"):
        after[str(ready.lock(lock))] = before[str(ready.lock(lock))]
    assert after == before


@VENV
@pytest.mark.parametrize(("module", "file"), [("entrypoint", "entrypoint"), ("train", "src/train")])
def test_our_modules_are_found_from_any_folder(
    ready: Checkout, tmp_path: Path, module: str, file: str
) -> None:
    (tmp_path / module).mkdir()
    (tmp_path / module / "__main__.py").write_text("print('the user has one too')")
    command = [str(ready.venv / "bin" / "python"), "-P", "-m", module]
    found = subprocess.check_output(command, cwd=tmp_path, text=True, env=ready.env, timeout=BOUND)
    assert found == f"{ready.path / file / '__main__.py'}\n"


@VENV
def test_a_train_py_of_the_users_in_the_checkout_stands_behind_ours(made: Checkout) -> None:
    (made.path / "train.py").write_text("print('the user has one too')")
    command = [str(made.venv / "bin" / "python"), "-P", "-m", "train"]
    ours = f"{made.path}/src/train/__main__.py\n"
    assert subprocess.check_output(command, text=True, timeout=BOUND) == ours


def copy_of(original: Checkout, folder: Path) -> Checkout:
    """The checkout, its venv too, copied to another place as a user would."""
    copied = copy.copy(original)
    copied.path = folder / "copied"
    copied.venv = copied.path / ".venv"
    subprocess.run(["cp", "-a", original.path, copied.path], check=True, timeout=BOUND)
    return copied


@VENV
def test_a_copied_checkout_gets_a_venv_of_its_own(made: Checkout, tmp_path: Path) -> None:
    copied = copy_of(made, tmp_path)
    done = copied.script("run")
    assert done.stderr.startswith(
        f"apptrain: {copied.venv} is made anew: it was made as {made.venv}, and a venv cannot be moved\n"
    )
    assert (copied.venv / "bin/apptrain").samefile(copied.path / "apptrain")
    found = subprocess.check_output([str(copied.venv / "bin/python"), "-P", "-m", "entrypoint"], text=True)
    assert found == f"{copied.path}/entrypoint/__main__.py\n"


@VENV
def test_the_venv_of_another_checkout_is_left_alone_as_long_as_that_is_there(
    quick: Checkout, tmp_path: Path
) -> None:
    shared = str(tmp_path / "shared venv")
    first, second = quick, copy_of(quick, tmp_path)
    assert first.script("run", shared).returncode == 0
    done = second.script("run", shared)
    assert (done.returncode, done.stderr) == (
        64,
        f"apptrain: VENV={shared}: this serves the checkout {first.path}, where a job may use it: "
        "choose another place, make VENV=DIR\n",
    )
    found = subprocess.check_output([f"{shared}/bin/python", "-P", "-m", "train"], text=True)
    assert found == f"{first.path}/src/train/__main__.py\n"
    shutil.rmtree(first.path)
    done = second.script("run", shared)
    assert done.stderr == f"apptrain: {shared} is ready\n"
    found = subprocess.check_output([f"{shared}/bin/python", "-P", "-m", "train"], text=True)
    assert found == f"{second.path}/src/train/__main__.py\n"


@VENV
def test_a_changed_lock_is_followed(made: Checkout, tmp_path: Path) -> None:
    made.lock("run").write_text(write_wheel(tmp_path / "wheels", "probenext"))
    done = made.script("run")
    assert done.stderr.startswith(f"apptrain: {made.venv} is made anew: requirements/run.txt has changed\n")
    assert made.packages() == ["probenext"]


@VENV
def test_settings_of_pip_that_install_elsewhere_do_not_count(quick: Checkout, tmp_path: Path) -> None:
    done = quick.script("run", PIP_TARGET=str(tmp_path / "target"), PIP_USER="1")
    assert (done.returncode, quick.packages(), (tmp_path / "target").exists()) == (0, ["proberun"], False)


@VENV
def test_two_makes_at_once_make_one_venv(quick: Checkout) -> None:
    both = [quick.start("run"), quick.start("run")]
    said = [process.communicate(timeout=BOUND)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("is ready" in text for text in said) == 1, said
    assert sum("waiting for it, at most 30 min" in text for text in said) == 1, said
    assert quick.packages() == ["proberun"]


@VENV
def test_removing_it_takes_only_what_was_made_here(made: Checkout) -> None:
    (made.path / "mine").mkdir()
    refusal = made.make("clean-venv", "VENV=mine")
    assert refusal.stderr.splitlines()[0] == (
        f"apptrain: VENV={made.path}/mine: this was not made here, so it is left alone"
    )
    assert made.make("clean-venv").returncode == 0
    assert ((made.path / "mine").exists(), made.venv.exists()) == (True, False)


@VENV
def test_clean_leaves_the_venv_and_the_runs(made: Checkout) -> None:
    for folder in ("runs/job-1", ".mypy_cache", "build", "entrypoint/__pycache__", "tests", "benchmarks"):
        (made.path / folder).mkdir(parents=True, exist_ok=True)
    assert made.make("clean").returncode == 0
    gone = (".mypy_cache", "build", "entrypoint/__pycache__")
    assert [folder for folder in gone if (made.path / folder).exists()] == []
    assert all((made.path / folder).exists() for folder in (".venv/bin/python", "runs/job-1"))


@VENV
def test_a_package_with_another_hash_is_refused_and_nothing_is_left(quick: Checkout) -> None:
    text = quick.lock("run").read_text()
    quick.lock("run").write_text(text[:-65] + "0" * 64 + "\n")
    done = quick.script("run")
    assert done.returncode == 69
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert done.stderr.endswith(
        "apptrain: pip could not install requirements/run.txt; the reason stands above\n"
        f"apptrain: removing the unfinished {quick.venv}\n"
    )
    assert not quick.venv.exists()


@VENV
def test_a_lock_without_hashes_is_refused(quick: Checkout) -> None:
    quick.lock("run").write_text("proberun==1.0\n")
    done = quick.script("run")
    assert (done.returncode, quick.venv.exists()) == (69, False)
    assert "Hashes are required in --require-hashes mode" in done.stderr


@VENV
def test_a_failed_addition_leaves_what_was_finished_and_is_made_up_for(made: Checkout) -> None:
    good = made.lock("dev").read_text()
    made.lock("dev").write_text("nowhere==1.0 --hash=sha256:" + "0" * 64 + "\n")
    assert [made.script("dev").returncode for _ in range(2)] == [69, 69]
    run = made.script("run")
    assert (run.returncode, run.stderr, "proberun" in made.packages()) == (0, "", True)
    made.lock("dev").write_text(good)
    assert f"apptrain: adding requirements/dev.txt to {made.venv}\n" in made.script("dev").stderr


@pytest.fixture
def silence() -> Iterator[tuple[str, Callable[[], None]]]:
    """An index that takes connections and never answers: its address, and a wait until pip has come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(BOUND)
        taken = []
        yield f"http://127.0.0.1:{server.getsockname()[1]}/", lambda: taken.append(server.accept())
        for connection, _ in taken:
            connection.close()


@VENV
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_make_leaves_nothing(
    quick: Checkout, silence: tuple[str, Callable[[], None]], signum: signal.Signals
) -> None:
    url, pip_has_come = silence
    process = quick.start("run", PIP_FIND_LINKS=url)
    pip_has_come()
    os.killpg(process.pid, signum)
    stderr = process.communicate(timeout=BOUND)[1]
    assert process.returncode == 128 + signum
    assert stderr.endswith(f"apptrain: removing the unfinished {quick.venv}\n")
    assert not quick.venv.exists()


@VENV
def test_a_killed_make_is_noticed_by_the_next_one(
    quick: Checkout, silence: tuple[str, Callable[[], None]]
) -> None:
    url, pip_has_come = silence
    process = quick.start("run", PIP_FIND_LINKS=url)
    pip_has_come()
    (pip,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait(BOUND)
    waiting = quick.start("run")
    assert waiting.stderr is not None
    assert [waiting.stderr.readline() for _ in range(2)] == [
        f"apptrain: {quick.venv} is made anew: an earlier make was cut off before it was finished\n",
        f"apptrain: another make is at work on {quick.venv}: waiting for it, at most 30 min\n",
    ]
    os.kill(int(pip), signal.SIGKILL)
    stderr = waiting.communicate(timeout=BOUND)[1]
    assert (waiting.returncode, stderr.endswith("is ready\n")) == (0, True)
    assert quick.packages() == ["proberun"]
