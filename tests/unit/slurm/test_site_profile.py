"""The job script for Slurm: what it makes of a site's profile."""

import itertools
import shlex
import shutil
from pathlib import Path

import pytest

from entrypoint.cli import profiles as render
from tests.unit.slurm.cluster import CHECKOUT, Cluster, said

LAB = "scheduler: slurm\nclusters: [lab, other]\n"
MODULES = """\
module() {{
    printf '%s\\n' "$*" >>{calls}
    if [[ $1 == use ]]; then MODULEPATH=$2; fi
    if [[ $2 == missing/1 ]]; then return 3; fi
    PATH=$PATH:/from/modules
}}
"""


def add_profile(cluster: Cluster, name: str, text: str) -> Path:
    """A profile of the checkout, or of another place, with its host file."""
    file = cluster.checkout / "clusters" / f"{name}.yaml"
    file.write_text(text)
    render.render(file, write=True)
    return file


def test_the_profile_is_the_one_that_knows_the_clusters_name(cluster: Cluster) -> None:
    add_profile(cluster, "elsewhere", "scheduler: slurm\nclusters: [laboratory, la]\n")
    add_profile(cluster, "nameless", "scheduler: slurm\n")
    file = add_profile(cluster, "here", LAB)
    ended = cluster.run()
    assert (ended.returncode, cluster.handed("APPTRAIN_PROFILE")) == (0, str(file))
    assert f"profile {file}," in ended.stdout


def test_the_profile_and_what_follows_are_found_for_a_user_whose_shell_expands_and_overwrites_nothing(
    cluster: Cluster,
) -> None:
    file = add_profile(cluster, "here", LAB)
    options = cluster.folder / "of shells"
    options.write_text("set -o noclobber -o noglob\n")
    saved = {"0": {"status": 75}, "1": {"status": 75}}
    ended = cluster.run(tasks=saved, BASH_ENV=str(options))
    assert (cluster.handed("APPTRAIN_PROFILE"), cluster.scontrol()[-1]) == (str(file), "requeue 7")
    assert ended.returncode == 75


def test_an_option_wins_over_a_variable_and_that_over_the_clusters_name(cluster: Cluster) -> None:
    for name, text in (("here", LAB), ("mine", "scheduler: slurm"), ("other", "scheduler: slurm")):
        add_profile(cluster, name, text)
    clusters = cluster.checkout / "clusters"
    cluster.run(APPTRAIN_PROFILE="other")
    assert cluster.handed("APPTRAIN_PROFILE") == str(clusters / "other.yaml")
    cluster.run("--profile=mine", APPTRAIN_PROFILE="other")
    assert cluster.handed("APPTRAIN_PROFILE") == str(clusters / "mine.yaml")
    assert cluster.launched() == []


@pytest.mark.parametrize(
    "option",
    ["--profile 'my sites/own.yaml'", '--profile="my sites/own.yaml"', r"--profile my\ sites/own.yaml"],
)
def test_a_path_with_a_blank_in_apptrain_args_is_found_by_the_image_and_its_modules_are_loaded(
    cluster: Cluster, option: str
) -> None:
    calls, init = cluster.folder / "modules.txt", cluster.folder / "lmod" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text(MODULES.format(calls=shlex.quote(str(calls))))
    add_profile(cluster, "here", LAB)
    own = "scheduler: slurm\ncontainer: {modules: [mine], stack: cu126}\n"
    (cluster.submit_dir / "my sites").mkdir()
    file = add_profile(cluster, "../../submit/my sites/own", own).resolve()
    ended = cluster.run(APPTRAIN_ARGS=f"{option} -- x.py 'a b'", LMOD_PKG=str(init.parent.parent))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (cluster.handed("APPTRAIN_PROFILE"), cluster.binds()["the profile"]) == (str(file), [str(file)])
    assert cluster.handed("APPTRAIN_IMAGE") == f"{cluster.checkout}/containers/image-cu126.sif"
    assert calls.read_text() == "load mine\n"
    assert cluster.launched() == ["--", "x.py", "a b"]


def test_one_that_is_not_there_is_refused_by_its_whole_name(cluster: Cluster) -> None:
    clusters = cluster.checkout / "clusters"
    assert cluster.refused(APPTRAIN_ARGS="--profile 'no such.yaml' -- x.py") == (
        f"there is no profile {cluster.submit_dir}/no such.yaml: the sites are in {clusters}"
    )


def test_a_profile_says_what_starts_the_image_and_what_it_shows(cluster: Cluster) -> None:
    add_profile(
        cluster,
        "here",
        LAB + "launcher_args: ['--network=single_node_vni', '--comment=a $(touch pwned) b']\n"
        "container: {program: $HOME/bin/apptainer, stack: cu126, pass: [MY_*, TOKEN],\n"
        "            binds: ['$DATA', '/a b:/c:ro', '/`touch pwned`']}\n",
    )
    ended = cluster.run(DATA="/data/it's $HOME", APPTRAIN_BIND="/mine", APPTRAIN_PASS="OWN")
    assert (ended.returncode, ended.stderr) == (0, "")
    handed = {name: cluster.handed(f"APPTRAIN_{name}") for name in ("IMAGE", "APPTAINER", "BIND", "PASS")}
    assert handed == {
        "IMAGE": f"{cluster.checkout}/containers/image-cu126.sif",
        "APPTAINER": f"{cluster.folder}/home/bin/apptainer",
        "BIND": "/mine",
        "PASS": "OWN",
    }
    assert cluster.binds()["the profile's"] == ["/data/it's $HOME", "/a b:/c:ro", "/`touch pwned`"]
    options = cluster.run_options()
    assert [options[at + 1] for at, word in enumerate(options) if word == "--pass"] == ["MY_*", "TOKEN"]
    words = cluster.srun()
    at = words.index("--quit-on-interrupt")
    assert words[at + 1 : at + 3] == ["--network=single_node_vni", "--comment=a $(touch pwned) b"]
    assert not list(cluster.folder.rglob("pwned"))


def test_a_profile_says_how_the_container_is_started_and_what_prepares_it(cluster: Cluster) -> None:
    add_profile(
        cluster,
        "here",
        LAB
        + "container: {options: [--fakeroot, '--security=a;b'], obey_binds: true, wrappers: [/host/adapt.sh]}\n",
    )
    ended = cluster.run()
    assert (ended.returncode, ended.stderr) == (0, "")
    options = cluster.run_options()
    pairs = list(itertools.pairwise(options))
    assert [value for name, value in pairs if name == "--option"] == ["--fakeroot", "--security=a;b"]
    assert [value for name, value in pairs if name == "--wrapper"] == ["/host/adapt.sh"]
    assert "--obey-binds" in options


def test_what_the_user_set_wins_over_the_profile(cluster: Cluster) -> None:
    add_profile(
        cluster, "here", LAB + "scratch: /nowhere\ncontainer: {program: /site/apptainer, stack: cu126}\n"
    )
    mine = {"APPTRAIN_APPTAINER": "/my/apptainer", "APPTRAIN_IMAGE": "/my.sif"}
    assert cluster.run("--run-dir", "run", **mine).returncode == 0
    assert {name: cluster.handed(name) for name in mine} == mine
    assert cluster.handed("APPTRAIN_RUN_DIR") == f"{cluster.submit_dir}/run"


@pytest.mark.parametrize("variable", ["LMOD_PKG", "MODULESHOME"])
def test_modules_are_loaded_from_the_profiles_paths_and_reach_the_nodes(
    cluster: Cluster, variable: str
) -> None:
    calls = cluster.folder / "modules.txt"
    init = cluster.folder / "lmod" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text(MODULES.format(calls=shlex.quote(str(calls))))
    paths = "container: {module_paths: [/soft/modules, $SOFT/more], modules: [spack/1, apptainer]}\n"
    add_profile(cluster, "here", LAB + paths)
    ended = cluster.run(SOFT="/my soft", **{variable: str(init.parent.parent)})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert calls.read_text() == "use /soft/modules /my soft/more\nload spack/1 apptainer\n"
    assert (cluster.handed("PATH") or "").endswith(":/from/modules:/from/modules")


@pytest.mark.parametrize(("init", "status"), [("lmod", 3), ("nowhere", 127)])
def test_modules_that_cannot_be_loaded_end_the_job(cluster: Cluster, init: str, status: int) -> None:
    (cluster.folder / "lmod" / "init").mkdir(parents=True)
    (cluster.folder / "lmod" / "init" / "bash").write_text(MODULES.format(calls="/dev/null"))
    file = add_profile(cluster, "here", LAB + "container: {modules: [missing/1]}\n")
    ended = cluster.run(LMOD_PKG=str(cluster.folder / init))
    assert (ended.returncode, cluster.calls()) == (64, [])
    assert said(ended) == [
        f"module load missing/1 of the profile {file} ended with status {status}: "
        "correct its modules (module avail lists them)"
    ]


def test_two_profiles_for_a_cluster_are_refused(cluster: Cluster) -> None:
    for name in ("a", "b"):
        add_profile(cluster, name, LAB)
    assert cluster.refused() == "a.yaml b.yaml are all for the cluster lab: choose one with --profile"
    assert cluster.run("--profile", "b").returncode == 0


def test_an_unknown_profile_is_refused(cluster: Cluster) -> None:
    clusters = cluster.checkout / "clusters"
    assert cluster.refused("--profile", "nowhere") == (
        f"there is no profile {clusters}/nowhere.yaml: the sites are in {clusters}"
    )


@pytest.mark.parametrize("words", ["--device cpu train.py", "--dry-run train.py", "-m train.hello"])
def test_a_script_without_the_two_dashes_is_told_whatever_options_it_has(
    cluster: Cluster, words: str
) -> None:
    said = cluster.refused(*words.split(), "--profile", "x")
    assert "(CMD comes behind --)" in said


def test_a_profile_without_its_host_file_or_with_an_older_one_is_refused(cluster: Cluster) -> None:
    file = add_profile(cluster, "here", LAB)
    host = file.with_suffix(".host")
    file.write_text(LAB + "title: changed\n")
    assert cluster.refused() == f"{host} is not made from {file} as that is now: make profiles"
    mine = cluster.submit_dir / "it's mine.yaml"
    mine.write_text(LAB)
    assert cluster.refused("--profile", "./it's mine.yaml") == (
        f"{cluster.submit_dir}/./it's mine.host is missing: "
        f"make profiles PROFILE={cluster.submit_dir}/./it\\'s\\ mine.yaml"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("container: {module_paths: [$SCRATCH/m], modules: [x]}", "$SCRATCH/m"),
        ("container: {program: $SCRATCH/apptainer}", "$SCRATCH/apptainer"),
    ],
)
def test_a_variable_that_is_not_set_here_is_refused(cluster: Cluster, text: str, value: str) -> None:
    file = add_profile(cluster, "here", LAB + text)
    assert cluster.refused() == (
        f"{value} in the profile {file}: SCRATCH is not set here: set it, or correct the profile"
    )


def test_the_profiles_that_are_there_are_read_by_the_job_scripts(cluster: Cluster) -> None:
    for file in (CHECKOUT / "clusters").glob("*.*"):
        if file.suffix in (".yaml", ".host"):
            shutil.copy(file, cluster.checkout / "clusters")
    ended = cluster.run(SLURM_CLUSTER_NAME="perlmutter", PSCRATCH=f"{cluster.folder}/pscratch")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert cluster.handed("APPTRAIN_PROFILE") == f"{cluster.checkout}/clusters/perlmutter.yaml"
    assert cluster.handed("APPTRAIN_RUN_DIR") == f"{cluster.folder}/pscratch/runs/apptrain-7"
