"""Public sites, from their documentation: the request that each gets, the plan that its job makes, and what
docs/site.md says of it. None of them was run there."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli.main import main
from tests.unit.cli.site import CHECKOUT, SHIPPED, Site

PAGE = CHECKOUT / "docs" / "site.md"
WORKS, TCP, OWN_IMAGE, NO = "plausible", "TCP only", "with another image", "no"
"""What the page says may be expected."""
NODES = ("n1", "n2", "n3")


@dataclass(frozen=True, kw_only=True)
class PublicSite:
    name: str
    """As the page calls it."""
    expected: str
    profile: str = ""
    """One that comes with apptrain, or the text of one; empty: none can be written."""
    line: str = ""
    """What submits, up to the job script."""
    ranks: int = 0
    """On each node, on GPUs."""
    first: str = "n1"
    """The name of the first node's address."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """Variables that the site sets for its users."""
    is_counted: bool = True
    """Whether the scheduler tells a job of its GPUs."""


JUWELS = """\
scheduler: slurm
nodes: {gpus: 4, cpus: 48, whole: true}
request: {partition: booster, time: "01:00:00", gpus: '--gres=gpu:{gpus}', needs: [account]}
host_suffix: i
launch: {fabric: infiniband, interface: ib0}
"""
LONESTAR6 = """\
scheduler: slurm
nodes: {gpus: 3, cpus: 128, whole: true}
request: {partition: gpu-a100, time: "01:00:00", nodes_only: true}
container: {modules: [tacc-apptainer]}
launch: {fabric: infiniband}
"""
OF_SCRIPT = "--ntasks-per-node=1 --requeue --open-mode=append --output=%x-%j.out --signal=B:USR2@120"
"""What stays of the job script's own lines where they cannot all be given."""
SITES = [
    PublicSite(
        name="NCI Gadi, gpuvolta",
        expected=WORKS,
        profile="gadi",
        line="qsub -C '' -N apptrain -j oe -S /bin/bash -l ncpus=144 -l ngpus=12 -l mem=1140gb -l walltime=01:00:00 "
        "-q gpuvolta -P ab12 -l storage=scratch/ab12",
        ranks=4,
        env={"PROJECT": "ab12"},
    ),
    PublicSite(
        name="ALCF Polaris",
        expected=TCP,
        profile="polaris",
        line="qsub -l select=3:system=polaris -l place=scatter -l walltime=00:30:00 -q debug -A ab12 "
        "-l filesystems=home:eagle -l singularity_fakeroot=true",
        ranks=4,
    ),
    PublicSite(name="ALCF Aurora", expected=NO),
    PublicSite(
        name="NERSC Perlmutter",
        expected=TCP,
        profile="perlmutter",
        line="sbatch --nodes=3 --account=ab12 --gpus-per-node=4 --cpus-per-task=128 --mem=0 --time=01:00:00 "
        "--constraint=gpu --qos=regular",
        ranks=4,
        env={"PSCRATCH": "/pscratch/a"},
    ),
    PublicSite(
        name="NCAR Derecho",
        expected=TCP,
        profile="derecho",
        line="qsub -l select=3:ncpus=64:ngpus=4 -l place=scatter -l walltime=01:00:00 -q main -A ab12",
        ranks=4,
    ),
    PublicSite(
        name="TACC Vista",
        expected=WORKS,
        profile="vista",
        line=f"sbatch {OF_SCRIPT} --nodes=3 --partition=gh --account=ab12 --time=01:00:00",
        ranks=1,
        env={"SCRATCH": "/scratch/a", "WORK": "/work/a"},
        is_counted=False,
    ),
    PublicSite(
        name="TACC Lonestar6",
        expected=WORKS,
        profile=LONESTAR6,
        line=f"sbatch {OF_SCRIPT} --nodes=3 --partition=gpu-a100 --account=ab12 --time=01:00:00",
        ranks=3,
        is_counted=False,
    ),
    PublicSite(name="CSCS Alps", expected=NO),
    PublicSite(
        name="BriCS Isambard-AI",
        expected=OWN_IMAGE,
        profile="isambard-ai",
        line="sbatch --nodes=3 --partition=workq --account=ab12 --gpus-per-node=4 --cpus-per-task=288 --time=01:00:00 "
        "--exclusive --mem=0",
        ranks=4,
        env={"APPTRAIN_IMAGE": "/ngc.sif"},
    ),
    PublicSite(name="LUMI", expected=NO),
    PublicSite(name="OLCF Frontier", expected=NO),
    PublicSite(
        name="JSC JUWELS Booster",
        expected=WORKS,
        profile=JUWELS,
        line=f"sbatch {OF_SCRIPT} --nodes=3 --partition=booster --account=ab12 --gres=gpu:4 --cpus-per-task=48 --mem=0 "
        "--time=01:00:00",
        ranks=4,
        first="n1i",
    ),
    PublicSite(
        name="CINECA Leonardo",
        expected=WORKS,
        profile="leonardo",
        line=f"sbatch {OF_SCRIPT} --nodes=3 --partition=boost_usr_prod --account=ab12 --gres=gpu:4 --cpus-per-task=32 "
        "--mem=480G --time=01:00:00",
        ranks=4,
        env={"CINECA_SCRATCH": "/leonardo_scratch/a"},
    ),
    PublicSite(
        name="SURF Snellius",
        expected=WORKS,
        profile="snellius",
        line="sbatch --nodes=3 --partition=gpu_h100 --account=ab12 --gpus-per-node=4 --cpus-per-task=64 --mem=720G "
        "--time=01:00:00",
        ranks=4,
    ),
    PublicSite(
        name="NCSA Delta",
        expected=TCP,
        profile="delta",
        line="sbatch --nodes=3 --partition=gpuA100x4 --account=ab12 --gpus-per-node=4 --cpus-per-task=64 --mem=240G "
        "--time=01:00:00",
        ranks=4,
    ),
    PublicSite(
        name="GWDG Grete",
        expected=WORKS,
        profile="gwdg-grete",
        line="sbatch --nodes=3 --partition=grete --account=ab12 --gpus-per-node=A100:4 --cpus-per-task=64 --mem=0 "
        "--time=01:00:00",
        ranks=4,
    ),
]
GENERAL = [
    PublicSite(
        name="any Slurm",
        expected="",
        profile="generic",
        line="sbatch --nodes=3 --account=ab12 --gpus-per-node=1 --cpus-per-task=8 --mem=32G --time=01:00:00",
        ranks=1,
    ),
    PublicSite(
        name="any PBS",
        expected="",
        profile="generic-pbs",
        line="qsub -l select=3:ncpus=8:ngpus=1:mem=32gb -l place=scatter -l walltime=01:00:00 -A ab12",
        ranks=1,
    ),
]
CAN = [one for one in (*SITES, *GENERAL) if one.profile]


def profile_of(one: PublicSite, site: Site) -> str:
    """The name of its profile, which is there then."""
    if "\n" in one.profile:
        site.write(one.profile)
        return "lab"
    return one.profile


@pytest.mark.parametrize("one", CAN, ids=lambda one: one.name)
def test_each_site_has_its_request(site: Site, one: PublicSite) -> None:
    name = profile_of(one, site)
    script = CHECKOUT / "slurm/multinode.sbatch"
    (site.checkout / "slurm/multinode.sbatch").write_bytes(script.read_bytes())
    words = [
        "--cluster",
        name,
        "--account",
        "ab12",
        "--nodes",
        "3",
        "--dry-run",
        "--",
        "my.py",
        "--lr",
        "0.1",
    ]
    done = site.run("submit.py", *words, **one.env)
    assert done.returncode == 0, done.stderr
    line, script_and_rest = re.split(r" (?='--wrap=exec bash|slurm/multinode|-v )", done.stdout, maxsplit=1)
    assert line.replace("--job-name=apptrain ", "") == one.line
    assert script_and_rest.endswith(("-- my.py --lr 0.1\n", "-- my.py --lr 0.1'\n", " pbs/multinode.pbs\n"))
    first, runs, *_, last = done.stderr.splitlines()
    ranks = "1 rank" if one.ranks == 1 else f"{one.ranks} ranks"
    assert first == f"apptrain: 3 nodes x {ranks} on cuda, mode torchrun"
    assert runs == f"apptrain: runs my.py --lr 0.1 in {site.checkout}"
    assert last == f"apptrain: {name}.yaml was never run there (tested is empty): check this:"


SLURM = """\
SLURM_JOB_ID=812345
SLURM_JOB_NODELIST=n[1-3]
SLURM_JOB_NUM_NODES=3
SLURM_STEP_ID=0
SLURM_STEP_NODELIST=n[1-3]
SLURM_STEP_NUM_NODES=3
SLURM_STEP_NUM_TASKS=3
SLURM_STEP_TASKS_PER_NODE=1(x3)
SLURM_NODEID=1
SLURM_PROCID=1
SLURM_LOCALID=0
SLURM_SUBMIT_DIR=/home/alice
"""
"""What a task of any Slurm has, of what is read."""
PBS = """\
PBS_JOBID=4711.server
PBS_ENVIRONMENT=PBS_BATCH
PBS_NODENUM=1
PBS_TASKNUM=40000003
PBS_O_WORKDIR=/home/alice
PBS_NODEFILE=/spool/4711
"""


def plan(one: PublicSite, file: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Of the second node's task."""
    is_pbs = one.line.startswith("qsub")
    gpus = [f"APPTRAIN_NGPUS={one.ranks}"] if is_pbs else [f"SLURM_GPUS_ON_NODE={one.ranks}"]
    lines = [*(gpus if one.is_counted else []), *(f"{name}={value}" for name, value in one.env.items())]
    env, nodes = folder / "task.env", folder / "nodes"
    env.write_text("\n".join([PBS if is_pbs else SLURM, "USER=alice", *lines, ""]))
    nodes.write_text("".join(f"{node}\n" for node in NODES))
    further = ["--nodefile", str(nodes), "--hostname", "n2"] if is_pbs else []
    status = main(["plan", "--env-file", str(env), "--profile", file, "--json", *further, "--", "my.py"])
    told = capsys.readouterr()
    assert status == 0, told.err
    found: dict[str, Any] = json.loads(told.out)
    return found


@pytest.mark.parametrize("one", CAN, ids=lambda one: one.name)
def test_each_site_has_its_plan(
    site: Site, one: PublicSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = profile_of(one, site)
    found = plan(one, str(site.checkout / "clusters" / f"{name}.yaml"), tmp_path, capsys)
    names = ("device", "mode", "nnodes", "node_rank", "nproc_per_node", "world_size", "master_addr")
    assert {key: found[key] for key in names} == {
        "device": "cuda",
        "mode": "torchrun",
        "nnodes": 3,
        "node_rank": 1,
        "nproc_per_node": one.ranks,
        "world_size": 3 * one.ranks,
        "master_addr": one.first,
    }


def rows() -> dict[str, str]:
    """What the page's table has of each site: what may be expected there."""
    table = PAGE.read_text().partition("\n| site | ")[2].partition("\n\n")[0]
    found = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    return {cells[0].strip(): cells[1].strip() for cells in found}


def test_the_page_says_of_each_site_what_may_be_expected() -> None:
    assert rows() == {one.name: one.expected for one in SITES}


def test_every_profile_that_comes_with_apptrain_is_one_of_these() -> None:
    assert {one.profile for one in CAN if "\n" not in one.profile} == {file.stem for file in SHIPPED}


def test_a_site_that_gives_no_sockets_a_chance_says_so_in_its_profile() -> None:
    """`fabric` ends a job that uses TCP: no profile of a site where that is all has it."""
    for one in SITES:
        if one.profile and one.expected in (WORKS, TCP):
            text = (
                one.profile
                if "\n" in one.profile
                else (CHECKOUT / f"clusters/{one.profile}.yaml").read_text()
            )
            assert ("fabric: " in text) == (one.expected == WORKS), one.name
