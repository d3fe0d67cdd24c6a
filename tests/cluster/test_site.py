"""A user's first profile of a Slurm cluster, by `apptrain site` on its login host with its real sinfo and scontrol.

The host has PyYAML, as most login nodes do, and Slurm's own qstat and pbsnodes, which must not be asked. Needs root.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from tests.cluster.account import BOUND, PYYAML, REPOSITORY, USER, WORK, Account, account, clear
from tests.cluster.images import CHECKOUT
from tests.pages import ALICE, Shell, tell

PAGE = CHECKOUT / "docs/site.md"
PLACE = Path(ALICE)
PROFILE = {
    "title": "testbed, nodes of 4 a100",
    "documented": [],
    "tested": None,
    "scheduler": "slurm",
    "clusters": ["testbed"],
    "host_suffix": "-hsn",
    "scratch": "$SCRATCH",
    "nodes": {"gpus": 4, "cpus": 32, "memory_gib": 256},
    "request": {"partition": "gpu", "time": "01:00:00", "gpus": "--gpus-per-node={gpus}"},
    "env": {"NCCL_SOCKET_IFNAME": "hsn"},
}
"""Of the nodes in tests/vcluster/layout.py, as tests/vcluster/slurm.py tells Slurm of them."""
REQUEST = (
    "sbatch --nodes=2 --partition=gpu --gpus-per-node=4 --cpus-per-task=32 --mem=256G --time=01:00:00 "
    f"{PLACE}/slurm/multinode.sbatch --profile mine"
)
TELL = """\
import os
print(os.environ["APPTRAIN_NODE"], os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
"""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def all_tests_user(request: pytest.FixtureRequest) -> Iterator[Account]:
    """Someone whose checkout lies where the pages have it."""
    with account(request, binds=[PYYAML]) as user:
        user.on_disk(REPOSITORY).rename(user.on_disk(PLACE))
        user.on_disk(REPOSITORY).symlink_to(PLACE.name)
        user.write(PLACE / "Makefile", (CHECKOUT / "Makefile").read_text())
        user.write(WORK / "tell.py", TELL)
        yield user


@pytest.fixture
def user(all_tests_user: Account) -> Iterator[Account]:
    """On a cluster that is idle, and with no profile of an earlier test."""
    yield all_tests_user
    clear(all_tests_user)
    for name in ("mine", "lab"):
        for file in all_tests_user.on_disk(PLACE / "clusters").glob(f"{name}.*"):
            file.unlink()


def env(user: Account) -> dict[str, str]:
    """Of a login where the site has set $SCRATCH."""
    path = f"{PLACE}:/usr/local/bin:/usr/bin:/bin"
    return {**user.env, "PATH": path, "USER": USER, "SCRATCH": f"/scratch/{USER}"}


def apptrain(user: Account, *words: str, cwd: Path = WORK) -> CompletedProcess[str]:
    ended = user.run(PLACE / "apptrain", *words, cwd=cwd, env=env(user), timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_a_first_profile_passes_a_dry_run_and_runs_a_job_without_an_edit(user: Account) -> None:
    apptrain(user, "site", "-o", "clusters/mine.yaml", cwd=PLACE)
    assert yaml.safe_load(user.on_disk(PLACE / "clusters/mine.yaml").read_text()) == PROFILE

    tried = apptrain(user, "submit", "--cluster", "mine", "--dry-run", "--", "tell.py", "--lr", "0.1")
    assert tried.stdout == f"{REQUEST} -- tell.py --lr 0.1\n"
    assert "apptrain: 2 nodes x 4 ranks on cuda, mode torchrun" in tried.stderr.splitlines()

    job = ("--device", "cpu", "--mode", "exec", "--follow", "--", "tell.py")
    ran = apptrain(user, "submit", "--cluster", "mine", *job)
    assert {"gpu-a01 hsn0 hsn", "gpu-a02 hsn0 hsn"} <= set(ran.stdout.splitlines()), ran.stdout
    assert re.search(r"^apptrain: run directory /scratch/alice/runs/apptrain-\d+$", ran.stdout, re.M)
    assert f"profile {PLACE}/clusters/mine.yaml" in ran.stdout


def test_the_page_on_sites_shows_what_this_cluster_answers(user: Account) -> None:
    pipe = subprocess.PIPE
    process = user.cluster.login.start(["bash"], user=USER, cwd=PLACE, env=env(user), stdin=pipe, stdout=pipe)
    told = tell(PAGE, Shell(process), "site", {})
    process.communicate(timeout=BOUND)
    assert not told, "\n\n".join(told)
    excerpt = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[0]
    assert excerpt in user.on_disk(PLACE / "clusters/lab.yaml").read_text()
