"""One training on Slurm, on PBS and on one machine: `apptrain compare` finds them the same, and `rerun` does one again.

Needs root, for a test cluster, which has both schedulers.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.account import PYYAML, REPOSITORY, SCRIPT, SOFTWARE, account
from tests.cluster.images import CHECKOUT
from tests.cluster.test_pbs import BOUND, SMALL, WORK, User
from tests.pbs_double.cluster import BINDS
from tests.pbs_double.cluster import up as pbs_up
from train import metrics

TRAINING = ("-m", "train", *SMALL)
EQUAL = ("image", "lock", "torch", "code", "config", "seed", "world size", "batch per step", "threads", "CPU")

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def user(request: pytest.FixtureRequest) -> Iterator[User]:
    with account(request, binds=[*BINDS, PYYAML]) as found, pbs_up(found.cluster) as pbs:
        found.write(WORK / "here", "")
        shutil.copy(CHECKOUT / "Makefile", found.on_disk(REPOSITORY))
        yield User(account=found, pbs=pbs)


@pytest.fixture(scope="module")
def on_slurm(user: User) -> Path:
    submitted = user.account.submit("-N2", "-c1", SCRIPT, "--device", "cpu", "--", *TRAINING)
    ran = user.account.end(submitted, BOUND)
    assert ran.ended == ("COMPLETED", 0), ran
    return ran.folder


@pytest.fixture(scope="module")
def on_pbs(user: User) -> Path:
    ran = user.ran("-l", "select=2:ncpus=1", args=("--device", "cpu", "--", *TRAINING))
    assert ran.status == 0, "\n".join(ran.lines)
    return ran.folder


@pytest.fixture(scope="module")
def embedded(user: User) -> Path:
    run = WORK / "runs/one machine"
    line = (
        "python",
        "-P",
        "-m",
        "entrypoint.cli.embedded",
        "--nodes",
        "2",
        "--run-dir",
        run,
        "--",
        *TRAINING,
    )
    inside = (REPOSITORY / "containers/run.sh", SOFTWARE / "image.sif", *line)
    ended = user.account.run(*inside, cwd=WORK, timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    return user.account.on_disk(run)


def compared(*runs: Path) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and what is said of the first beside each of the others."""
    line: list[str | Path] = [CHECKOUT / "apptrain", "compare", *runs, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["pairs"]


def test_slurm_pbs_and_one_machine_give_the_same_numbers_and_the_places_are_the_difference(
    on_slurm: Path, on_pbs: Path, embedded: Path
) -> None:
    assert list(metrics.read(on_slurm / "metrics.jsonl").loss) == list(range(1, 41))
    status, pairs = compared(on_slurm, on_pbs, embedded)
    assert (status, [pair["verdict"] for pair in pairs]) == (0, ["identical"] * 2)
    for pair in pairs:
        assert {*EQUAL} <= {*pair["equal"]}
    differ = [{one["name"]: one["values"] for one in pair["differ"]} for pair in pairs]
    assert [found["scheduler"] for found in differ] == [["slurm", "pbs"], ["slurm", "embedded"]]
    assert differ[1]["nodes"] == [["gpu-a01", "gpu-a02"], ["127.0.0.1", "127.0.0.2"]]
    assert differ[0].keys() - {"nodes"} == {"scheduler", "began"}
    assert differ[1].keys() == {"scheduler", "began", "nodes", "transport"}


def test_slurms_run_is_done_again_on_one_machine_from_its_manifest(user: User, on_slurm: Path) -> None:
    run = Path("/", on_slurm.relative_to(user.account.cluster.folder))
    words = (REPOSITORY / "apptrain", "rerun", run, "--go")
    ended = user.account.run(*words, cwd=WORK, timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    line = f"apptrain run --nodes 2 --image '{REPOSITORY}/containers/image.sif' --nproc-per-node 1 "
    assert ended.stdout.startswith(line), ended.stdout
    assert "not the same" not in ended.stderr
    (again,) = user.account.on_disk(WORK / "runs").glob("embedded-*")
    status, (pair,) = compared(on_slurm, again)
    assert (status, pair["verdict"]) == (0, "identical")


def test_slurms_run_is_submitted_again_from_its_manifest(user: User, on_slurm: Path) -> None:
    run = Path("/", on_slurm.relative_to(user.account.cluster.folder))
    words = (REPOSITORY / "apptrain", "rerun", run, "--cluster", "generic", "--go")
    ended = user.account.run(*words, cwd=WORK, timeout=BOUND)
    number = re.search(r"^Submitted batch job (\d+)$", ended.stdout, re.M)
    assert number, ended.stdout + ended.stderr
    ran = user.account.end(int(number[1]), BOUND)
    assert ran.ended == ("COMPLETED", 0), ran
    status, (pair,) = compared(on_slurm, ran.folder)
    assert (status, pair["verdict"]) == (0, "identical")
