"""entrypoint/cli/site.py: the first profile of a site, its file, and its dry run."""

import resource
from pathlib import Path

import pytest

from entrypoint.batch.pbs import survey
from entrypoint.batch.survey import host
from entrypoint.cli import profiles, site
from entrypoint.core.errors import BadInput
from entrypoint.plan import profile
from tests.unit.batch.survey.conftest import login, named
from tests.unit.batch.survey.login import Login, address, addresses

__all__ = ["login", "named"]  # fixtures

SLURM = {
    "sinfo": "gpu* up 1-00:00:00 2 32 262144 NO gpu:a100:4 gpu-a[01-02]\n"
    "cpu up 1-00:00:00 1 32 262144 NO (null) gpu-b07\n"
    "all up 1-00:00:00 2 32 262144 NO gpu:a100:4 gpu-a[01-02]",
    "scontrol show config": "ClusterName = testbed\nSelectType = select/cons_tres\nSLURM_VERSION = 24.11.5\nSwitchType = (null)",
    "scontrol --oneliner show node gpu-a01": "NodeName=gpu-a01 CPUEfctv=32 CPUTot=32 RealMemory=262144",
    "ip -j addr": addresses(address("eth0", "10.77.42.1/24"), address("hsn0", "10.77.43.1/24")),
    "getent ahostsv4 gpu-a01-hsn": "10.77.43.11 STREAM gpu-a01-hsn",
    "getent ahostsv4 gpu-a01": "10.77.42.11 STREAM gpu-a01",
    "bash module": f"{host.MODULES}/sw/modules:\napptainer/1.4.5",
}
PROFILE = """\
# A first profile of testbed, by `apptrain site` on login, 2026-11-23.
# Each value says where it comes from. Answer the questions, then delete them. All keys: generic.yaml

title: "testbed, nodes of 4 a100"
documented: []                   # the pages of the site that you checked this against
tested:                          # when it ran there, and with what

scheduler: slurm                 # sinfo answers
clusters: [testbed]              # scontrol show config: ClusterName
host_suffix: -hsn                # gpu-a01-hsn is 10.77.43.11, on the network of hsn0 here
scratch: $SCRATCH                # SCRATCH is /scratch/alice here

nodes:
  gpus: 4                        # sinfo: 2 such nodes in gpu
  cpus: 32                       # sinfo: the least of these nodes
  memory_gib: 256                # sinfo: the least of these nodes

request:
  # question: is gpu the right partition? With GPUs there are also: all (2 nodes with 4 x a100, 1-00:00:00)
  partition: gpu                 # sinfo: the default, 2 nodes with 4 x a100
  time: "01:00:00"               # sinfo: the partition's limit is 1-00:00:00
  gpus: "--gpus-per-node={gpus}" # scontrol show config: SelectType

container:
  modules: [apptainer]           # module avail

# launch:
  # question: NCCL speaks TCP on Slingshot, unless its plugin (aws-ofi-nccl) and libfabric are bound into the image:
  #   docs/site.md has how. Does the site have them?

env:
  # question: hsn0 is Slingshot's name, but no cxi device is here: `ip -br addr` on a compute node says
  NCCL_SOCKET_IFNAME: hsn        # Slingshot: hsn0 here
"""
TOLD = """\
apptrain: sinfo: 3 lines
apptrain: scontrol show config: 4 lines
apptrain: scontrol show node gpu-a01: 1 line
apptrain: ip -j addr: 1 line
apptrain: module avail: 2 lines
"""
PBS = {
    "qstat -Qf": "Queue: gpu\n    enabled = True\n    started = True\n",
    "pbsnodes -a": "g1\n     resources_available.ncpus = 64\n     resources_available.ngpus = 4\n",
    "qstat -Bf": "Server: pbssrv\n",
}


@pytest.fixture
def slurm(login: Login) -> Login:
    login.has(SLURM)
    login.env["SCRATCH"] = "/scratch/alice"
    return login


def test_a_profile_is_printed_and_tried(slurm: Login, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.main([], slurm.machine()) == 0
    printed = capsys.readouterr()
    assert printed.out == PROFILE
    assert (
        printed.err == f"{TOLD}apptrain: 3 questions to answer; it passes a dry run: -o NAME.yaml writes it\n"
    )


def test_a_profile_is_written_with_its_host_file_and_the_line_that_submits_is_shown(
    slurm: Login, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH", "/scratch/alice")
    assert site.main(["-o", "lab.yaml"], slurm.machine()) == 0
    assert Path("lab.yaml").read_text() == PROFILE
    assert "cluster=testbed\nmodule=apptainer\nimage=image.sif\n" in Path("lab.host").read_text()
    printed = capsys.readouterr()
    assert printed.out.startswith(
        "sbatch --nodes=2 --partition=gpu --gpus-per-node=4 --cpus-per-task=32 --mem=256G --time=01:00:00 "
    )
    assert printed.out.endswith(f"/slurm/multinode.sbatch --profile {tmp_path}/lab.yaml\n")
    lines = printed.err.removeprefix(TOLD).splitlines()
    assert (
        lines[0]
        == "apptrain: lab.yaml and lab.host written, with 3 questions to answer: grep -n question lab.yaml"
    )
    assert lines[1] == "apptrain: 2 nodes x 4 ranks on cuda, mode torchrun"
    assert "apptrain: run directory /scratch/alice/runs/NAME-JOB" in lines


def test_a_cluster_that_another_profile_is_for_is_asked_about_where_jobs_look_for_one(
    slurm: Login, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = tmp_path / "clusters"
    clusters.mkdir()
    for module in (profile, profiles):
        monkeypatch.setattr(module, "CLUSTERS", clusters)
    monkeypatch.setenv("SCRATCH", "/scratch/alice")
    assert site.main(["-o", str(clusters / "lab.yaml")], slurm.machine()) == 0
    assert site.main(["-o", str(clusters / "mine.yaml")], slurm.machine()) == 0
    assert site.main(["-o", str(tmp_path / "mine.yaml")], slurm.machine()) == 0
    assert (clusters / "lab.yaml").read_text() == (tmp_path / "mine.yaml").read_text() == PROFILE
    assert (clusters / "mine.yaml").read_text() == PROFILE.replace(
        "clusters: [testbed]              # scontrol show config: ClusterName\n",
        "# question: jobs without --profile take lab.yaml here. Are they to take this one? Then leave the cluster "
        "out there,\n#   and write `clusters: [testbed]`\n",
    )
    assert profiles.by_cluster() == {"testbed": ["lab.yaml"]}
    assert "mine.host written, with 4 questions to answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "name", "why"),
    [
        (
            "lab.yaml",
            "lab.yaml",
            "lab.yaml exists, and nothing is overwritten: give another name, or remove it",
        ),
        (
            "lab.host",
            "lab.yaml",
            "lab.host exists, and nothing is overwritten: give another name, or remove it",
        ),
        ("", "none/lab.yaml", "there is no directory none: make it, or give another"),
        ("", "lab.yml", "a profile is named NAME.yaml, of letters, digits, _ . and -"),
        ("", "my lab.yaml", "a profile is named NAME.yaml, of letters, digits, _ . and -"),
    ],
)
def test_a_file_that_cannot_be_made_is_refused_before_anybody_is_asked(
    there: str,
    name: str,
    why: str,
    slurm: Login,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if there:
        Path(there).write_text("mine")
    assert site.main(["-o", name], slurm.machine()) == 64
    assert capsys.readouterr().err == f"apptrain: -o {name}: {why}\n"
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "root", there} - {""}
    assert not there or Path(there).read_text() == "mine"


def test_a_profile_that_cannot_be_written_to_its_end_is_not_left_behind(
    slurm: Login, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lab.yaml"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limit[1]))  # as a disk that is full
    try:
        assert site.main(["-o", str(file)], slurm.machine()) == 64
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"apptrain: -o {file} cannot be written: File too large"
    assert not file.exists()
    assert site.main(["-o", str(file)], slurm.machine()) == 0


def test_without_its_host_file_no_profile_is_left_behind(
    slurm: Login, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(file: Path, **_: object) -> None:
        raise BadInput("host-file-unwritable", f"{file}: full")

    monkeypatch.setattr(site, "render", refuses)
    assert site.main(["-o", str(tmp_path / "lab.yaml")], slurm.machine()) == 64
    assert capsys.readouterr().err.endswith("lab.yaml: full\n")
    assert not (tmp_path / "lab.yaml").exists()


def test_a_link_that_leads_nowhere_is_not_written_through(slurm: Login, tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").symlink_to(tmp_path / "elsewhere")
    assert site.main(["-o", str(tmp_path / "lab.yaml")], slurm.machine()) == 64
    assert not (tmp_path / "elsewhere").exists()


def test_a_machine_without_a_scheduler_needs_no_profile(
    login: Login, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.main([], login.machine()) == 64
    assert capsys.readouterr() == (
        "",
        "apptrain: neither sinfo nor qstat is in PATH: run it on a login node of a Slurm or PBS cluster. Without a "
        "scheduler no profile is needed: apptrain run -- my_script.py, or apptrain launch --nodes a,b\n",
    )


def test_a_cluster_without_gpus_is_tried_on_cpus(login: Login, capsys: pytest.CaptureFixture[str]) -> None:
    login.has({"sinfo": "cpu* up 1-00:00:00 9 32 262144 NO (null) c[1-9]"})
    assert site.main([], login.machine()) == 0
    printed = capsys.readouterr()
    assert 'title: "login, no GPUs found"\n' in printed.out
    assert printed.err.endswith("it passes a dry run: -o NAME.yaml writes it\n")


def test_slurm_is_asked_where_its_wrappers_of_pbs_are_too(
    slurm: Login, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.has(PBS)
    assert site.main([], slurm.machine()) == 0
    assert capsys.readouterr().out == PROFILE


def test_slingshot_under_pbs_raises_the_question_of_mpiexec(
    login: Login, capsys: pytest.CaptureFixture[str]
) -> None:
    login.has({**PBS, "ip -j addr": addresses(address("hsn0", "10.77.43.1/24"))})
    assert site.main([], login.machine()) == 0
    assert f"\n# question: {survey.PALS}\n" in capsys.readouterr().out


def test_under_pbs_without_slingshot_the_usual_starter_is_taken(
    login: Login, capsys: pytest.CaptureFixture[str]
) -> None:
    login.has(PBS)
    assert site.main([], login.machine()) == 0
    printed = capsys.readouterr().out
    assert "\nscheduler: pbs                   # qstat -Qf answers\n" in printed
    assert "mpiexec" not in printed


def test_a_profile_that_cannot_be_submitted_is_shown_with_the_reason(
    slurm: Login, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.has({**SLURM, "sinfo": "gpu* up 01:00 2 32 262144 NO gpu:a100:4 gpu-a[01-02]"})
    assert site.main([], slurm.machine()) == 64
    printed = capsys.readouterr()
    assert 'time: "00:01:00"' in printed.out
    assert printed.err.splitlines()[-1].startswith(
        "apptrain: it does not pass a dry run: apptrain: --time 00:01:00: the ranks are asked to save 120 s before its end"
    )


def test_words_that_are_no_options_are_refused(slurm: Login, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.main(["lab.yaml"], slurm.machine()) == 64
    assert (
        capsys.readouterr().err == "apptrain: unrecognized arguments: lab.yaml: did you mean -o lab.yaml?\n"
    )
