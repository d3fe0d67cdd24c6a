"""Slurm's own qsub and variables of Torque, from Debian: a second dialect of PBS, which is Slurm underneath.

Needs root, for the test cluster. What it writes for sbatch is not quoted, so its users need paths without blanks.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.account import HOME, REPOSITORY, Account, account

PLUGIN = "/usr/lib/x86_64-linux-gnu/slurm-wlm/spank_pbs.so"
TELL = """\
import json, os
print(json.dumps([os.environ[name] for name in ("APPTRAIN_NODE", "NODE_RANK", "NNODES")]))
"""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def user(request: pytest.FixtureRequest) -> Iterator[Account]:
    with account(request, settings={"JobSubmitPlugins": "pbs"}) as found:
        (found.cluster.folder / "slurm/plugstack.conf").write_text(f"required {PLUGIN}\n")
        found.write("tell.py", TELL)
        yield found


def qsub(user: Account, *words: Path | str) -> int:
    ended = user.run("qsub", "-j", "oe", *words, cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return int(ended.stdout.split()[-1])


def test_slurms_qsub_starts_the_job_script_of_slurm(user: Account) -> None:
    words = ("-l", "nodes=2", "-N", "named", "slurm/multinode.sbatch")
    number = qsub(user, *words, "--device", "cpu", "--mode", "exec", "--", HOME / "tell.py")
    ran = user.end(number)
    assert ran.ended == ("COMPLETED", 0), ran
    assert [json.loads(line) for line in ran.printed] == [["gpu-a01", "0", "2"], ["gpu-a02", "1", "2"]]
    assert ran.folder.name == f"named-{number}"
    assert ran.launched[0] == "taking slurm: the variables of pbs are there too (--scheduler chooses)"


def test_the_job_script_of_pbs_is_refused_there(user: Account) -> None:
    ran = user.end(qsub(user, "-l", "nodes=2", "pbs/multinode.pbs"))
    assert ran.ended == ("FAILED", 64), ran.text
    assert ran.lines == [
        "apptrain: this is a job of Slurm, even where its qsub has started it: sbatch (or that qsub) "
        "slurm/multinode.sbatch, in salloc bash slurm/multinode.sbatch"
    ]
