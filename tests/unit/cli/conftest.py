"""What the tests of profiles and of submitting share."""

import compileall
import marshal
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.unit.cli.site import CHECKOUT, FORKS, PBS_SCRIPT, SIF, Forks, Site


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    folder = tmp_path_factory.mktemp("forks")
    files = ["/dev/null", str(folder / "out"), str(folder / "err")]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", FORKS],
        env={"PATH": "/usr/bin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:

        def run(
            program: Path, arguments: Sequence[str], cwd: Path, env: dict[str, str]
        ) -> "subprocess.CompletedProcess[str]":
            assert server.stdin is not None
            assert server.stdout is not None
            request = marshal.dumps((str(program), list(arguments), str(cwd), env, files))
            server.stdin.write(len(request).to_bytes(4, "big") + request)
            server.stdin.flush()
            (status,) = server.stdout.read(1)
            out, err = (Path(file).read_text() for file in files[1:])
            return subprocess.CompletedProcess(arguments, status, out, err)

        yield run


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What submits, compiled."""
    folder = tmp_path_factory.mktemp("checkout") / "check out"
    unfinished = shutil.ignore_patterns("*.pyc.*")  # bytecode that another test's Python writes just now
    for part in ("clusters", "entrypoint"):
        shutil.copytree(CHECKOUT / part, folder / part, ignore=unfinished)
    (folder / "containers").mkdir()
    for name in ("containers/__init__.py", "containers/stacks.py", "containers/stacks.yaml"):
        shutil.copy(CHECKOUT / name, folder / name)
    for name, text in (("slurm/multinode.sbatch", "#!/bin/bash\n"), ("pbs/multinode.pbs", PBS_SCRIPT)):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    (folder / "containers" / "image.sif").write_bytes(SIF)
    for name in ("my.py", "my script.py", "a,b.py", "a,b"):
        (folder / name).touch()
    assert compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture
def site(tmp_path: Path, checkout: Path, forks: Forks) -> Site:
    return Site(tmp_path, checkout, forks)
