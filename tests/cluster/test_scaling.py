"""`apptrain scaling --cluster` on a real Slurm cluster: a job for each size, one after another, and what they say."""

import json
import os
import re
import shutil
from collections.abc import Iterator

import pytest

from entrypoint.cli import profiles as render
from tests.cluster.account import BOUND, PYYAML, REPOSITORY, WORK, Account, account
from tests.cluster.images import CHECKOUT

PROFILE = "scheduler: slurm\nnodes: {gpus: 0, cpus: 2, memory_gib: 8}\n"
STEPS = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(12):
    weight.square().sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
if dist.get_rank() == 0:
    print("trained on", dist.get_world_size(), flush=True)
"""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def user(request: pytest.FixtureRequest) -> Iterator[Account]:
    with account(request, binds=[PYYAML]) as found:
        profile = found.write("app train/clusters/model.yaml", PROFILE)
        render.render(found.on_disk(profile), write=True)
        shutil.copy(CHECKOUT / "Makefile", found.on_disk(REPOSITORY))
        found.write(WORK / "steps.py", STEPS)
        yield found


def test_a_job_for_each_size_and_what_they_measured(user: Account) -> None:
    sizes = ("--nodes", "1,2", "--repeats", "1", "--dir", "sweep")
    line = ("scaling", "--cluster", "model", *sizes, "--time", "10")
    submitted = user.run(REPOSITORY / "apptrain", *line, "--device", "cpu", "--", "steps.py")
    assert submitted.returncode == 0, submitted.stderr
    jobs = [int(job) for job in re.findall(r"^apptrain: job (\d+): ", submitted.stderr, re.M)]
    assert len(jobs) == 2, submitted.stderr
    early = user.run(REPOSITORY / "apptrain", "scaling", "sweep")
    assert early.returncode != 0
    assert early.stderr.startswith("apptrain: "), early.stderr
    assert "Traceback" not in early.stderr
    for nodes, job in enumerate(jobs, 1):
        ran = user.end(job, BOUND)
        assert ran.ended == ("COMPLETED", 0), ran
        assert f"trained on {nodes}" in ran.text

    found = user.run(REPOSITORY / "apptrain", "scaling", "sweep", "--json")
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert [(one["nodes"], one["unit"]) for one in said["points"]] == [(1, "steps/s"), (2, "steps/s")], said
    again = user.run(REPOSITORY / "apptrain", *line, "--device", "cpu", "--", "steps.py")
    assert not re.search(r"job \d+: ", again.stderr), again.stderr
    page = user.run(REPOSITORY / "apptrain", "report", "sweep")
    assert page.returncode == 0, page.stderr
    assert (user.on_disk(WORK / "sweep/report.html")).stat().st_size > 10_000
