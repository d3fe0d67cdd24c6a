"""What stands in the files that the job scripts read is data, whatever it looks like: no word of it is run.

Bash runs what stands in the index of a variable wherever it calculates, so a file of numbers is as dangerous as a
script. tests/unit/host/test_injection.py has the same of variables, arguments and the scheduler's answers.
"""

from pathlib import Path

import pytest

from tests.unit.host.test_injection import Pbs, evils
from tests.unit.slurm.cluster import Cluster


@pytest.mark.parametrize(
    "name", ["unfinished", "restarts", "outcome/0.nodes", "outcome/1.nodes", "outcome/0.0"]
)
def test_nothing_that_stands_in_a_run_directory_is_run(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "ran"
    without_blanks = f"PATH[$(>{canary})]"
    for number, evil in enumerate([*evils(canary), without_blanks]):
        run = tmp_path / f"run{number}"
        (run / "outcome").mkdir(parents=True)
        (run / "unfinished").write_text("0\n")
        (run / name).write_text(f"{evil} {evil}\n")
        Pbs(tmp_path / f"pbs{number}").run(
            "--on-failure", "restart", "--", "train.py", APPTRAIN_RUN_DIR=str(run)
        )
        cluster = Cluster(tmp_path / f"slurm{number}")
        cluster.run("--on-failure", "restart", "--", "train.py", APPTRAIN_RUN_DIR=str(run))
        assert not canary.exists(), evil


@pytest.mark.parametrize("suffix", ["host", "sh"])
def test_nothing_that_stands_beside_a_profile_is_run_nor_by_who_looks_for_its_cluster(
    tmp_path: Path, suffix: str
) -> None:
    canary = tmp_path / "ran"
    for number, evil in enumerate(evils(canary)):
        cluster = Cluster(tmp_path / f"slurm{number}")
        for name in ("planted", "laboratory"):
            (cluster.checkout / f"clusters/{name}.yaml").write_text("scheduler: slurm\n")
            text = f"touch {canary}; digest=0\ncluster=lab\ndigest={evil}\n{evil}\n"
            (cluster.checkout / f"clusters/{name}.{suffix}").write_text(text)
        cluster.run("--", "train.py")
        cluster.run("--profile", "planted", "--", "train.py")
        cluster.run("--dry-run", "--profile", "planted", "--", "train.py")
        assert not canary.exists(), evil
