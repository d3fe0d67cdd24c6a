"""torchrun's ranks run under the Python of `--venv`."""

import os
import sys
import venv
from pathlib import Path

from tests.embedded.jobs import CHECKOUT, Job, clean_env, master_port


def test_torchruns_ranks_run_under_the_venvs_python_and_see_what_it_holds(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, system_site_packages=True, symlinks=True)
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / "mine.py").write_text("NAME = 'a package of mine'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, mine\nsys.stdout.write(f'{sys.prefix} {sys.executable} has {mine.NAME}\\n')\n"
    )
    # In the image the venv sees the system's packages; here torch lies in the venv of the tests.
    paths = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "src"), *filter(None, sys.path)])
    argv = [str(folder / "bin" / "python"), "-P", "-m", "entrypoint", "launch", "--venv", str(folder)]
    argv += ["--nodes", "127.0.0.1", "--node-rank", "0", "--device", "cpu", "--nproc-per-node", "2"]
    argv += ["--master-port", master_port(), "--run-dir", str(tmp_path / "run"), "--", str(script)]
    ended = Job(argv, tmp_path, tmp_path / "run", clean_env(PYTHONPATH=paths)).end()
    line = f"{folder} {folder}/bin/python has a package of mine\n"
    assert (ended.status, ended.out) == (0, line * 2), ended.err


def test_the_programs_of_the_chosen_venv_come_first_for_the_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    tool = folder / "bin" / "my-tool"
    tool.write_text("#!/bin/sh\ncommand -v my-tool\ncommand -v python\n")
    tool.chmod(0o755)
    paths = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "src"), *filter(None, sys.path)])
    argv = [str(folder / "bin" / "python"), "-P", "-m", "entrypoint.cli.embedded", "--nodes", "1"]
    argv += ["--mode", "exec", "--run-dir", str(tmp_path / "run"), "--no-python", "--", "my-tool"]
    env = clean_env(PYTHONPATH=paths, APPTRAIN_PASS="PYTHONPATH")
    ended = Job(argv, tmp_path, tmp_path / "run", env).end()
    assert (ended.status, ended.out) == (0, f"{tool}\n{folder}/bin/python\n"), ended.err
