"""README as somebody new walks it: the clone, the venv, the demo, a script of their own and one that fails.

It starts with an empty home, and with nothing set but how pip reaches packages here; what pip has downloaded for this
machine's venv is not fetched again. What README shows on a cluster is tried in test_pages.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.jobs import clean_env
from tests.host import site
from tests.pages import ALICE, CHECKOUT, FILES, PAGES, Shell, tell

README = PAGES[0]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def repository(folder: Path) -> None:
    """Makes a repository whose one commit is the checkout as it is now, without what git ignores."""
    git = ["git", f"--git-dir={folder}", f"--work-tree={CHECKOUT}"]
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "As it is"]):
        subprocess.run([*git, *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where the clone is to be. Its venv of 5 GB does not stay."""
    yield tmp_path / "apptrain"
    shutil.rmtree(tmp_path / "apptrain/.venv", ignore_errors=True)


@pytest.mark.timeout(3600)  # making that venv, and the demo, beside other lanes
def test_from_the_clone_to_a_script_of_ones_own_it_prints_what_readme_shows(
    tmp_path: Path, place: Path
) -> None:
    home = tmp_path / "home"
    bins = home / ".local/bin"
    bins.mkdir(parents=True)
    (home / ".config/pip").mkdir(parents=True)
    found = site.read(os.environ)
    (home / ".config/pip/pip.conf").write_text(found.pip_conf)
    mine = {"HOME": str(home), "USER": "alice", "PATH": os.pathsep.join([str(bins), os.environ["PATH"]])}
    env = clean_env(**{"PIP_CACHE_DIR": str(CACHE / "pip"), **found.env, **mine})
    env.pop("PYTHONPATH", None)
    repository(tmp_path / "ADDRESS")
    pipe = subprocess.PIPE
    with subprocess.Popen(["bash"], cwd=tmp_path, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        shell = Shell(process)
        told = tell(README, shell, "clone", {str(place): ALICE})
        (bins / "apptrain").symlink_to(place / "apptrain")  # as README has it under "One command"
        for name, text in FILES.items():
            (place / name).write_text(text)
        told += tell(README, shell, "here", {str(place): ALICE})
        process.communicate(timeout=60)
    assert not told, "\n\n".join(told)
    (run,) = (place / "runs").glob("embedded-*/curves.png")
    result = json.loads(run.with_name("result.json").read_text())
    assert (result["total"], result["split"]) == (360, "test")
    assert result["accuracy"] >= 0.97
    assert result["accuracy"] == result["correct"] / 360
    assert run.read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in run.parent.iterdir()}
    assert {"plan.0.json", "plan.1.json", "logs", "outcome", "job.log", "tensorboard", "checkpoints"} <= names
