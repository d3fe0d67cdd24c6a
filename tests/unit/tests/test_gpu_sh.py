"""tools/gpu.sh: what it refuses, and the trials that a CPU can make."""

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu import __main__ as command
from tests.unit.tests.gpu_machine import BOUND, CHECKOUT


def gpu_sh(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return subprocess.run(
        [CHECKOUT / "tools" / "gpu.sh", *arguments],
        env=given | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | env,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def executable(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_gpu_it_is_refused_in_one_line_and_nothing_is_skipped() -> None:
    done = gpu_sh("gpu")
    assert (done.returncode, done.stdout) == (64, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("test-gpu: torch 2.")
    assert " sees no GPU (" in line
    assert line.endswith(", CUDA_VISIBLE_DEVICES=): use a machine with an NVIDIA GPU")


def test_packages_that_the_python_lacks_are_named_before_anything_starts(tmp_path: Path) -> None:
    bare = executable(tmp_path / "python", f'exec "{sys.executable}" -S "$@"')
    done = gpu_sh("gpu", PYTHON=bare)
    assert (done.returncode, done.stdout) == (64, "")
    lacks = "torch, torchvision, numpy, safetensors, tqdm, matplotlib, pyyaml, psutil, tensorboard"
    assert done.stderr == (
        f"test-gpu: {sys.executable} lacks {lacks}: install that, or give another Python with PYTHON=FILE\n"
    )


def test_the_python_is_that_of_the_venv_where_there_is_one_else_python3(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "python3", '[ "$1" = -c ] || echo "python3 $@"')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert gpu_sh("gpu", PYTHON="", VENV="/none", PATH=path).stdout == "python3 -P -m gpu\n"
    executable(tmp_path / "bin" / "python", '[ "$1" = -c ] || echo "venv $@"')
    assert gpu_sh("gpu", "-x", PYTHON="", VENV=str(tmp_path), PATH=path).stdout == "venv -P -m gpu -x\n"


def test_a_package_of_others_that_is_called_tests_stands_in_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("raise SystemExit('not ours')")
    done = gpu_sh("gpu", "--list", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(command.TRIALS)


ON_CPU = """
import sys, tempfile, time
from dataclasses import replace
from pathlib import Path
from gpu.__main__ import TRIALS, attempt
from gpu.trial import Bench, environment

end = time.monotonic() + 250
with tempfile.TemporaryDirectory() as folder:
    bench = Bench(device="cpu", facts={"gpus": []}, ranks=2, folder=Path(folder), env=environment(), end=end)
    wanted = [trial for trial in TRIALS if any(word in trial.name for word in sys.argv[1:])]
    attempt([replace(trial, seconds=250) for trial in wanted], bench, end)
"""


def test_what_a_cpu_can_try_passes_there(tmp_path: Path) -> None:
    (tmp_path / "oncpu.py").write_text(ON_CPU)
    done = gpu_sh("oncpu", "check", "greet", "hang", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line[19:] for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert len(lines) == 3, done.stdout
    assert lines[1] == " all ranks greet over NCCL: 2 ranks on one node over gloo"
    assert lines[2].startswith(
        " a hang is ended, named and recorded: one of 2 ranks skips an all_reduce: rank 1 on 127.0.0.1, status 124: "
        "stuck, no step for 5 s after step 3: it waits for no other rank, and is in skip.py:"
    )
