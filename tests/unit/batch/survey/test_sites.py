"""What public sites show of their schedulers: the profile that each gives, and that it passes its dry run."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from entrypoint.cli import site
from tests.unit.batch.survey.login import SITES, Login

EXPECTED: dict[str, tuple[dict[str, Any], str]] = {
    "mogon": (
        {
            "title": "mogonnhr, nodes of 4 GPUs",
            "scheduler": "slurm",
            "clusters": ["mogonnhr"],
            "nodes": {"gpus": 4, "cpus": 128, "memory_gib": 992},
            "request": {"partition": "a100dl", "time": "01:00:00", "gpus": "--gpus-per-node={gpus}"},
        },
        "sbatch --nodes=2 --partition=a100dl --gpus-per-node=4 --cpus-per-task=128 --mem=992G --time=01:00:00",
    ),
    "cnaf": (
        {
            "title": "login, nodes of 4 h100",
            "scheduler": "slurm",
            "nodes": {"gpus": 4, "cpus": 64},
            "request": {"partition": "bare-metal-GPU", "time": "01:00:00", "gpus": "--gpus-per-node={gpus}"},
        },
        "sbatch --nodes=2 --partition=bare-metal-GPU --gpus-per-node=4 --cpus-per-task=64 --time=01:00:00",
    ),
    "rcl": (
        {
            "title": "rcl, nodes of 4 nvidia_b200",
            "scheduler": "slurm",
            "clusters": ["rcl"],
            "nodes": {"gpus": 4, "cpus": 192, "memory_gib": 1947},
            "request": {"partition": "rcl", "time": "01:00:00", "gpus": "--gpus-per-node=nvidia_b200:{gpus}"},
        },
        "sbatch --nodes=2 --partition=rcl --gpus-per-node=nvidia_b200:4 --cpus-per-task=192 --mem=1947G --time=01:00:00",
    ),
    "mscluster": (
        {
            "title": "mscluster, nodes of 1 rtx3090",
            "scheduler": "slurm",
            "clusters": ["mscluster"],
            "nodes": {"gpus": 1, "cpus": 28, "memory_gib": 122},
            "request": {
                "partition": "bigbatch",
                "time": "01:00:00",
                "gpus": "--gres=gpu:{gpus}",
                "form": "wrapped",
            },
        },
        "--nodes=2 --partition=bigbatch --gres=gpu:1 --cpus-per-task=28 --mem=122G --time=01:00:00 '--wrap=exec bash ",
    ),
    "polaris": (
        {
            "title": "polaris-pbs-01, nodes of 4 A100",
            "scheduler": "pbs",
            "clusters": ["polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov", "polaris-pbs-01"],
            "nodes": {"gpus": 4, "cpus": 64, "memory_gib": 503, "whole": True},
            "request": {"partition": "prod", "time": "01:00:00", "gpus": "ngpus={gpus}"},
        },
        "qsub -l select=2:ncpus=64:ngpus=4:mem=503gb -l place=scatter -l walltime=01:00:00 -q prod",
    ),
    "metacentrum": (
        {
            "title": "pbs-m1, nodes of 8 GPUs",
            "scheduler": "pbs",
            "clusters": ["pbs-m1.metacentrum.cz", "pbs-m1"],
            "nodes": {"gpus": 8, "cpus": 32, "memory_gib": 503},
            "request": {"partition": "gpu_long", "time": "01:00:00", "gpus": "ngpus={gpus}"},
        },
        "qsub -l select=2:ncpus=32:ngpus=8:mem=503gb -l place=scatter -l walltime=01:00:00 -q gpu_long",
    ),
    "palmetto": (
        {
            "title": "login, nodes of 2 gtx1080",
            "scheduler": "pbs",
            "nodes": {"gpus": 2, "cpus": 20, "memory_gib": 125},
            "request": {"partition": "skygpu", "time": "01:00:00", "gpus": "ngpus={gpus}"},
            "container": {"stack": "cu126"},
        },
        "qsub -l select=2:ncpus=20:ngpus=2:mem=125gb -l place=scatter -l walltime=01:00:00 -q skygpu",
    ),
    "sydney": (
        {
            "title": "login, nodes of 4 GPUs",
            "scheduler": "pbs",
            "nodes": {"gpus": 4, "cpus": 32, "memory_gib": 122},
            "request": {"partition": "jasper_gpu", "time": "01:00:00", "gpus": "ngpus={gpus}"},
        },
        "qsub -l select=2:ncpus=32:ngpus=4:mem=122gb -l place=scatter -l walltime=01:00:00 -q jasper_gpu",
    ),
}
"""The profile without its questions, and what the line has that submits."""


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_public_site_shows_gives_a_profile_that_passes_its_dry_run(
    name: str, login: Login, tmp_path: Path
) -> None:
    login.recorded(name)
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = site.main(["-o", str(tmp_path / "first.yaml")], login.machine())
    found = yaml.safe_load((tmp_path / "first.yaml").read_text())
    assert status == 0
    profile, line = EXPECTED[name]
    ethernet = {"fabric": "ethernet"}
    assert found == {**profile, "documented": [], "tested": None, "launch": ethernet}
    assert line in printed.getvalue()


def test_each_recording_has_its_profile() -> None:
    assert {path.name for path in SITES.iterdir()} - {"README.md"} == set(EXPECTED)
