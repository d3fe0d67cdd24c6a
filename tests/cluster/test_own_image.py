"""An image that apptrain did not make: a plain Debian with PyPI's torch, under `slurm/multinode.sbatch` and by hand.

It has no variable and no package of ours, and Python as python3 alone. Needs root, for the test cluster.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from entrypoint import __version__
from entrypoint.cli import profiles as render
from tests.cluster.account import REPOSITORY, SCRIPT, SOFTWARE, WORK, Account, Ran, account

BOUND = 400.0
"""Seconds for a job that takes 30 on two cores with nothing else to do: imports are not read from one file."""
IMAGE = SOFTWARE / "image.sif"
SMALL = ("--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16", "batch_size=16")
"""40 steps that take a few seconds."""
LOST = (
    f"apptrain: the image is not apptrain's, so apptrain itself comes from {REPOSITORY}: no lock says what is in it, "
    "driver and GPUs are not checked against it, and it may lack InfiniBand's libraries"
)
NOT_PROMISED = [
    "the image's packages are locked",
    "driver and GPUs were checked against the image",
    "the image has the libraries that NCCL needs for InfiniBand",
]

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def all_tests_account(request: pytest.FixtureRequest) -> Iterator[Account]:
    with account(request, "own") as found:
        yield found


def run(user: Account, *argv: Path | str, env: Mapping[str, str] | None = None) -> Ran:
    """A job on two nodes that is to end well."""
    number = user.submit("--nodes=2", *argv, env={"APPTRAIN_IMAGE": str(IMAGE), **(env or {})})
    ran = user.end(number, BOUND)
    assert ran.ended == ("COMPLETED", 0), ran
    return ran


def manifest(ran: Ran) -> dict[str, object]:
    """The image of its one attempt."""
    (attempt,) = json.loads((ran.folder / "manifest.json").read_text())["attempts"]
    found: dict[str, object] = attempt["image"]
    return found


def test_the_image_has_nothing_of_ours_and_no_python_but_python3(user: Account) -> None:
    script = "command -v python; python3 -c 'import torch; print(torch.__version__)'; python3 -c 'import entrypoint'"
    ended = user.run("apptainer", "-q", "exec", IMAGE, "sh", "-c", script, timeout=BOUND)
    assert ended.stdout.partition("+")[0].strip() == "2.15.0"
    assert "No module named 'entrypoint'" in ended.stderr


def test_every_rank_greets_and_what_is_lost_is_said(user: Account) -> None:
    ran = run(
        user, "--cpus-per-task=2", SCRIPT, "--device=cpu", "--nproc-per-node=2", "--", "-m", "train.hello"
    )
    assert f"image {IMAGE}" in ran.lines[2]
    assert ran.lines.count(LOST) == 1
    assert [line.partition("] ")[2] for line in ran.printed] == [
        f"hello from [{node}:gloo] process {rank}/4"
        for rank, node in enumerate(("gpu-a01",) * 2 + ("gpu-a02",) * 2)
    ]
    assert manifest(ran)["not_promised"] == NOT_PROMISED


def test_the_reference_training_learns_saves_and_draws_its_curves(user: Account) -> None:
    ran = run(user, "--cpus-per-task=1", SCRIPT, "--device=cpu", "--", "-m", "train", *SMALL)
    assert LOST in ran.lines
    result = json.loads((ran.folder / "result.json").read_text())
    assert result["steps"] == 40
    assert {"curves.png", "metrics.jsonl", "tensorboard", "checkpoints"} <= {
        path.name for path in ran.folder.iterdir()
    }
    assert manifest(ran)["not_promised"] == NOT_PROMISED


def test_the_example_for_nvidias_image_trains_in_this_one_over_a_planned_end(user: Account) -> None:
    """NVIDIA's cannot be had here."""
    line = ("bash", REPOSITORY / "examples/nvidia_image.sh", IMAGE, "sbatch", "--parsable", "--nodes=2")
    script = (
        "--cpus-per-task=1",
        SCRIPT,
        "--device=cpu",
        "--",
        REPOSITORY / "examples/ddp.py",
        "--steps=300",
    )
    submitted = user.run(*line, *script)
    assert submitted.returncode == 0, submitted.stderr
    number = int(submitted.stdout)
    run_dir = user.on_disk(WORK / f"runs/apptrain-{number}")
    user.cluster.until((run_dir / "logs/0").exists, f"{run_dir} to begin", BOUND)
    user.run("touch", WORK / f"runs/apptrain-{number}/stop").check_returncode()
    user.cluster.start_requeued(number, BOUND)
    ran = user.end(number, BOUND)
    assert ran.ended == ("COMPLETED", 0), ran
    assert ran.lines.count(LOST) == 2
    assert len(re.findall(r"^rank \d: 300 steps, \S+$", ran.text, re.M)) == 2
    first, second = map(int, re.findall(r"^begins after step (\d+)$", ran.text, re.M))
    assert first == 0 < second < 300


def test_an_image_without_pyyaml_works_with_a_profile(user: Account, tmp_path: Path) -> None:
    """The host half finds it by the cluster's name or by --profile; each task in the image reads it again."""
    profile = "scheduler: slurm\nlaunch: {omp_num_threads: 3}\nenv: {FROM_SITE: 'yes: it is'}\n"
    here = tmp_path / "lab.yaml"
    here.write_text(profile)
    render.render(here, write=True)
    there = user.write("else where/lab.yaml", profile)
    user.write("else where/lab.host", here.with_suffix(".host").read_text())
    broken = user.write("no yaml.py", "raise ImportError('there is no PyYAML here')\n")
    script = user.write(
        "tells.py",
        "import os\ntry:\n    import yaml\nexcept ImportError:\n"
        "    print('[told] no yaml', os.environ['FROM_SITE'], os.environ['OMP_NUM_THREADS'])\n",
    )
    ended = user.run("apptainer", "-q", "exec", IMAGE, "python3", "-c", "import yaml; print(yaml.__file__)")
    inside = ended.stdout.strip()
    assert inside.endswith("/yaml/__init__.py"), ended.stderr
    ran = run(
        user,
        *("--cpus-per-task=1", SCRIPT, "--device=cpu", "--profile", there, "--", script),
        env={"APPTRAIN_BIND": f"{broken}:{inside}:ro"},
    )
    assert f"profile {there}, image {IMAGE}" in ran.text
    assert [line for line in ran.lines if "[told]" in line] != []
    assert ran.text.count("[told] no yaml yes: it is 3") == 2


def test_a_task_by_hand_finds_apptrain_too(user: Account) -> None:
    line = (REPOSITORY / "containers/run.sh", IMAGE, "python", "-P", "-m", "entrypoint", "--version")
    ended = user.run(*line, cwd=WORK, timeout=BOUND)
    assert (ended.returncode, ended.stdout) == (0, f"{__version__}\n"), ended.stderr


def test_the_nodes_of_a_run_on_one_machine_find_apptrain_too(user: Account) -> None:
    script = user.write("says.py", "import os\nprint('[told]', os.environ['RANK'])\n")
    line = (REPOSITORY / "apptrain", "run", "--image", IMAGE, "--nodes", "2", "--device", "cpu")
    makefile = user.on_disk(user.write(REPOSITORY / "Makefile", ""))  # as every checkout has
    try:
        ended = user.run(*line, "--mode", "rank", "--", script, timeout=BOUND)
    finally:
        makefile.unlink()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(re.findall(r"\[told\] (\d)$", ended.stdout, re.M)) == ["0", "1"]
