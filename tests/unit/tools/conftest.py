"""What the tests of make share; a venv takes long, so it is made once a worker."""

import subprocess
from pathlib import Path

import pytest

from tests.unit.tools.checkout import BASE_PYTHON, BOUND, Checkout


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of this machine without its Pythons, for the end of PATH."""
    folder = tmp_path_factory.mktemp("tools")
    for tool in Path("/usr/bin").iterdir():
        if not tool.name.startswith(("python", "pip")):
            (folder / tool.name).symlink_to(tool)
    return folder


@pytest.fixture
def checkout(tmp_path: Path, tools: Path) -> Checkout:
    return Checkout(tmp_path, tools)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what Python's venv module made for `ready` is kept, as it was then."""
    return tmp_path_factory.mktemp("pristine")


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory, tools: Path, pristine: Path) -> Checkout:
    """A checkout whose venv is there; tests leave it as it is, or copy it."""
    made = Checkout(tmp_path_factory.mktemp("ready"), tools)
    keep = f"""cp -a "$4"/* '{pristine}' && rm '{pristine}/apptrain.venv'"""
    made.add_tool("python3", f"""'{BASE_PYTHON}' "$@" || exit\nif [ "$2 $3" = "-m venv" ]; then {keep}; fi""")
    done = made.make("venv-dev")
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def quick(checkout: Checkout, ready: Checkout, pristine: Path) -> Checkout:
    """A checkout whose Python makes a venv by copying one."""
    assert ready.venv.exists()
    take = f"""exec cp -a '{pristine}/.' "$4\""""
    checkout.add_python("python3", before=f"""if [ "$2 $3" = "-m venv" ]; then {take}; fi""")
    return checkout


@pytest.fixture
def made(quick: Checkout, ready: Checkout) -> Checkout:
    """A checkout with the venv of `ready`, as if it had been made here."""
    subprocess.run(["cp", "-a", ready.venv, quick.venv], check=True, timeout=BOUND)
    for path in (quick.venv / "apptrain.venv", *quick.venv.glob("lib/*/site-packages/apptrain.pth")):
        path.write_text(path.read_text().replace(str(ready.path), str(quick.path)))
    return quick
