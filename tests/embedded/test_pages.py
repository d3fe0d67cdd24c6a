"""The examples of docs/ that need one machine: a checkout, a shell in it, no scheduler, no root. Those of README are
typed into a clone, in tests/cluster/test_clone.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.embedded.jobs import clean_env
from tests.pages import ALICE, CHECKOUT, FILES, PAGES, Shell, examples, tell

PARTS = (
    "Makefile",
    "apptrain",
    "clusters",
    "containers",
    "entrypoint",
    "host",
    "pbs",
    "slurm",
    "src",
    "tests",
    "tools",
)
NAMES = {
    f",APPTRAIN_HOME={CHECKOUT}": "",
    f"{CHECKOUT}/pbs/multinode.pbs": "pbs/multinode.pbs",
    f"{CHECKOUT}/slurm/multinode.sbatch": "slurm/multinode.sbatch",
    f" (not there yet: make -C {CHECKOUT} image)": "",
    f" (not there yet: make -C {CHECKOUT} image STACK=cu128)": "",
    str(CHECKOUT): ALICE,
}
"""A reader is in the checkout, which has its image; here that is another folder, of links into it."""


def here() -> list[Path]:
    """The pages with examples for one machine."""
    return [page for page in PAGES[1:] if any(one.what == "here" for one in examples(page))]


@pytest.mark.parametrize("page", here(), ids=lambda page: page.name)
def test_the_examples_of_a_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    checkout, home = tmp_path / "apptrain", tmp_path / "home"
    checkout.mkdir()
    home.mkdir()
    for part in PARTS:
        (checkout / part).symlink_to(CHECKOUT / part)
    for name, text in FILES.items():
        (checkout / name).write_text(text)
    bins = [str(checkout), str(Path(sys.executable).parent)]
    env = clean_env() | {
        "HOME": str(home),
        "USER": "alice",
        "PATH": os.pathsep.join([*bins, os.environ["PATH"]]),
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(["bash"], cwd=checkout, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        told = tell(page, Shell(process), "here", NAMES | {str(checkout): ALICE})
        process.communicate()
    assert not told, "\n\n".join(told)
