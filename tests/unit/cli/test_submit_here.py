"""entrypoint/cli/submit.py in this process: its branches, in milliseconds each. test_submit.py has the lines that come
out of a checkout of their own."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli import follow, profiles, submit
from entrypoint.core.errors import Unavailable
from entrypoint.plan.profile import Profile
from tests.unit.cli.site import SIF

CHECKOUT = Path(submit.__file__).resolve().parents[2]
SLURM = "scheduler: slurm\ntested: x\nnodes: {gpus: 4, cpus: 64}\nrequest: {partition: gpu}\n"
PBS = "scheduler: pbs\ntested: x\nnodes: {gpus: 4, cpus: 64}\n"
SUBMITS = """#!/bin/sh
printf '%s\\n' "$@" >"$CALLED"
printf '%b' "${ANSWER-Submitted batch job 7\\n}"
exit "${STATUS:-0}"
"""


class Desk:
    """A login node: a profile lab.yaml, an image, my.py, and an sbatch and a qsub that tell how they are called."""

    def __init__(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.folder = folder
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.write(SLURM)

    def write(self, text: str) -> None:
        (self.folder / "lab.yaml").write_text(text)
        profiles.render(self.folder / "lab.yaml", write=True)

    def run(self, *arguments: str, cluster: str = "lab.yaml") -> tuple[int, str, list[str]]:
        """(status, stdout, lines of stderr)."""
        words = [*(["--cluster", cluster] if cluster else []), *arguments]
        self._monkeypatch.setattr(sys, "argv", ["apptrain", "submit", *words])
        status = submit.main(words)
        out, err = self._capsys.readouterr()
        return status, out, [line.removeprefix("apptrain: ") for line in err.splitlines()]

    def words(self, *arguments: str) -> list[str]:
        """The line of a dry run, without its program and its job script's profile."""
        status, out, said = self.run("--dry-run", *arguments)
        assert (status, self.called()) == (0, None), said
        return shlex.split(out)

    def asked(self, *arguments: str) -> list[str]:
        """The words for sbatch or qsub alone."""
        words = self.words(*arguments)
        script = next(at for at, word in enumerate(words) if "/multinode." in word)
        return words[1:script]

    def refusal(self, *arguments: str, cluster: str = "lab.yaml") -> str:
        status, out, said = self.run(*arguments, cluster=cluster)
        assert (status, out, self.called(), len(said)) == (64, "", None, 1)
        return said[0]

    def called(self) -> list[str] | None:
        file = self.folder / "called"
        return file.read_text().splitlines() if file.exists() else None


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Desk:
    for name in [name for name in os.environ if name.startswith(("APPTRAIN_", "SBATCH_", "SLURM_", "PBS_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "qsub"):
        (tmp_path / "bin" / name).write_text(SUBMITS)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "image.sif").write_bytes(SIF)
    (tmp_path / "my.py").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("CALLED", str(tmp_path / "called"))
    monkeypatch.setenv("APPTRAIN_IMAGE", str(tmp_path / "image.sif"))
    monkeypatch.delenv("CALLED_FROM", raising=False)
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, capsys, monkeypatch)


# --- what is submitted, and followed ------------------------------------------------------------------------


def test_a_dry_run_prints_the_line_that_else_is_run_too(desk: Desk) -> None:
    status, out, said = desk.run("--dry-run", "--follow", "--", "my.py", "--lr", "1")
    assert (status, desk.called(), said[0]) == (0, None, "2 nodes x 4 ranks on cuda, mode torchrun")
    status, line, again = desk.run("--", "my.py", "--lr", "1")
    assert (status, line, again) == (0, f"{out}Submitted batch job 7\n", said)
    assert desk.called() == shlex.split(out)[1:]
    assert shlex.split(out)[0] == "sbatch"
    assert (
        shlex.split(out)[-6:]
        == [
            *(f"{CHECKOUT}/slurm/multinode.sbatch", "--profile", f"{desk.folder}/lab.yaml"),
            *("--", "my.py", "--lr"),
            "1",
        ][-6:]
    )


def test_a_site_where_it_was_never_tried_is_told(desk: Desk) -> None:
    line = "lab.yaml was never run there (tested is empty): check this:"
    assert line not in desk.run("--dry-run")[2]
    desk.write(SLURM.replace("tested: x\n", ""))
    assert desk.run("--dry-run")[2][-1] == line


def test_variables_that_an_option_sets_stand_before_the_line(desk: Desk) -> None:
    _, out, _ = desk.run(
        "--dry-run", "--bind", "/a b", "--pass", "X Y_*", "--pass", "Z", "--image", "image.sif"
    )
    assert out.startswith(
        f"APPTRAIN_IMAGE={desk.folder}/image.sif APPTRAIN_BIND='/a b' APPTRAIN_PASS='X Y_* Z' sbatch --nodes=2 "
    )


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is followed, from there on."""
    calls: list[tuple[Any, ...]] = []

    def find(scheduler: str = "") -> str:
        calls.append(("find", scheduler))
        return scheduler

    def ended(job: str, scheduler: str = "", site: Profile | None = None) -> int:
        calls.append((job, scheduler, site.name if site else None))
        return 75

    monkeypatch.setattr(follow, "find", find)
    monkeypatch.setattr(follow, "follow", ended)
    return calls


@pytest.mark.parametrize(
    ("answer", "job"),
    [
        ("Submitted batch job 7\\n", "7"),
        ("8\\n", "8"),
        ("8;cluster\\n", "8;cluster"),
        ("Submitted batch job 12 on cluster other\\n", "12;other"),
        ("a note\\nSubmitted batch job 9\\nanother note\\n", "9"),
    ],
)
def test_the_job_that_was_submitted_is_read_from_the_answer_and_is_followed(
    desk: Desk, followed: list[Any], monkeypatch: pytest.MonkeyPatch, answer: str, job: str
) -> None:
    monkeypatch.setenv("ANSWER", answer)
    assert desk.run("--follow", "--", "my.py")[0] == 75
    assert followed == [("find", "slurm"), (job, "slurm", "lab.yaml")]


def test_a_job_of_pbs_is_the_last_word_of_the_answer(
    desk: Desk, followed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write(PBS)
    monkeypatch.setenv("ANSWER", "a note\\n9[].server\\n")
    assert desk.run("--follow", "--", "my.py")[0] == 75
    assert followed == [("find", "pbs"), ("9[].server", "pbs", "lab.yaml")]


@pytest.mark.parametrize(
    ("profile", "answer", "said"),
    [
        (
            SLURM,
            "Thank you\\n",
            "sbatch has submitted the job, and its answer (Thank you) names none: squeue shows its id: "
            "apptrain submit --follow JOB",
        ),
        (
            PBS,
            "",
            "qsub has submitted the job, and its answer (nothing) names none: qstat shows its id: "
            "apptrain submit --follow JOB",
        ),
    ],
)
def test_a_job_that_the_answer_does_not_name_was_submitted_all_the_same(
    desk: Desk, followed: list[Any], monkeypatch: pytest.MonkeyPatch, profile: str, answer: str, said: str
) -> None:
    desk.write(profile)
    monkeypatch.setenv("ANSWER", answer)
    with pytest.raises(Unavailable) as ended:
        desk.run("--follow", "--", "my.py")
    assert (str(ended.value), ended.value.status, len(followed)) == (said, 69, 1)
    assert desk.called()


def test_what_was_not_submitted_is_not_followed(
    desk: Desk, followed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert desk.run("--dry-run", "--follow")[0] == 0
    assert followed == []
    monkeypatch.setenv("STATUS", "3")
    assert [desk.run(*words)[0] for words in (["--follow"], [])] == [3, 3]
    assert followed == [("find", "slurm")]


def test_without_the_option_nothing_is_followed(desk: Desk, followed: list[Any]) -> None:
    assert (desk.run()[0], followed) == (0, [])


@pytest.mark.parametrize(
    ("cluster", "call"), [("", ("12", "", None)), ("lab.yaml", ("12", "slurm", "lab.yaml"))]
)
def test_a_job_of_before_is_followed_with_its_site_if_that_is_named(
    desk: Desk, followed: list[Any], cluster: str, call: tuple[Any, ...]
) -> None:
    assert desk.run("--follow", "12", cluster=cluster) == (75, "", [])
    assert (followed, desk.called()) == ([call], None)


def test_where_nobody_tells_of_jobs_none_is_submitted_to_be_followed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(desk.folder / "bin"))
    assert desk.refusal("--follow") == (
        "--follow: scontrol is not in PATH: follow a job on a login node of its cluster"
    )


# --- the profile --------------------------------------------------------------------------------------------


def test_the_profile_of_the_variable_is_taken_if_none_is_given(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (desk.folder / "other.yaml").write_text(PBS)
    profiles.render(desk.folder / "other.yaml", write=True)
    monkeypatch.setenv("APPTRAIN_PROFILE", "other.yaml")
    assert desk.run("--dry-run", cluster="")[1].startswith("qsub ")
    assert desk.run("--dry-run")[1].startswith("sbatch ")
    assert "-N x" in desk.run("--dry-run", "-N", "x", cluster="")[1]  # which is qsub's then
    assert "-N x" in desk.run("--dry-run", "-N", "x", "--cluster=other.yaml", cluster="")[1]
    assert "--nodes=3" in desk.asked("-N", "3")


def test_a_name_without_its_option_is_known(desk: Desk) -> None:
    us = shlex.quote(str(CHECKOUT / "apptrain"))
    said = f"generic stands without --cluster: did you mean `{us} submit --cluster generic"
    assert desk.refusal("generic", "--nodes", "3", cluster="") == f"{said} --nodes 3`?"
    assert desk.refusal("generic", "--", "my.py", cluster="") == f"{said} -- my.py`?"
    assert desk.refusal("generic", "my.py", "--lr", "1", cluster="") == f"{said} -- my.py --lr 1`?"
    for words, cluster in ((["gene", "generic"], ""), ([], "")):
        assert desk.refusal(*words, cluster=cluster).startswith("--cluster is missing: give one of delta, ")
    assert desk.refusal("generic").startswith("unrecognized arguments: generic")


def test_a_profile_that_is_not_there_is_refused_with_how_to_get_one(desk: Desk) -> None:
    us = shlex.quote(str(CHECKOUT / "apptrain"))
    writes = f"or run `{us} site -o {{}}` on your cluster's login node, which writes one"
    for given, file in (("x.yaml", "x.yaml"), ("./a b.yaml", "'a b.yaml'"), ("/no/x.yaml", "/no/x.yaml")):
        shown = given.removeprefix("./")
        assert desk.refusal(cluster=given) == (
            f"--cluster {given}: there is no {shown}: check the path, {writes.format(file)}"
        )
    inside = desk.folder / "x.yaml"
    assert desk.refusal(cluster=str(inside)) == (
        f"--cluster {inside}: there is no {inside}: check the path, {writes.format('x.yaml')}"
    )
    clusters = CHECKOUT / "clusters"
    assert desk.refusal(cluster="genric") == (
        f"--cluster genric: there is no {clusters}/genric.yaml: did you mean generic?"
    )
    assert desk.refusal(cluster="zzz").endswith(
        f"or the path of a profile, {writes.format(f'{clusters}/zzz.yaml')}"
    )


def test_a_host_file_that_is_missing_is_as_one_that_is_old(desk: Desk) -> None:
    (desk.folder / "lab.host").unlink()
    said = "--cluster lab.yaml: lab.host is not made from lab.yaml as that is now: "
    assert desk.refusal().startswith(said)
    for spoiled in (b"", b"\xff\xfe"):
        (desk.folder / "lab.host").write_bytes(spoiled)
        assert desk.refusal().startswith(said)
    (desk.folder / "lab.host").unlink()
    (desk.folder / "lab.host").mkdir()
    assert desk.refusal().startswith(said)


# --- the words ----------------------------------------------------------------------------------------------

OURS = ["--nodes=2", "--partition=gpu", "--gpus-per-node=4", "--cpus-per-task=64"]


def but(**changed: str) -> list[str]:
    names = ("nodes", "partition", "gpus", "cpus")
    return [
        changed.get(name, word) for name, word in zip(names, OURS, strict=True) if changed.get(name) != ""
    ]


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ([], OURS),
        (["--nodes", "1"], but(nodes="--nodes=1")),
        (["--nodes=999999"], but(nodes="--nodes=999999")),
        (["--gpus-per-node", "4"], OURS),
        (["--gpus-per-node=1"], but(gpus="--gpus-per-node=1", cpus="--cpus-per-task=16")),
        (["--gpus", "1"], but(gpus="--gpus-per-node=1", cpus="--cpus-per-task=16")),
        (["--gpus", "1", "--gpus-per-node", "2"], but(gpus="--gpus-per-node=2", cpus="--cpus-per-task=32")),
        (["--gpus-per-node=a100:2"], [*but(gpus="", cpus="--cpus-per-task=32"), "--gpus-per-node=a100:2"]),
        (["--gpus-per-node", "a100:2", "--qos", "x"], [*but(gpus="", cpus="--cpus-per-task=32"), "--gpus-per-node", "a100:2", "--qos", "x"]),
        (["-N3", "-p", "big"], but(nodes="--nodes=3", partition="--partition=big")),
        (["-N", "3", "-Jx", "--hold"], [*but(nodes="--nodes=3"), "-Jx", "--hold"]),
        (["--queue=big"], but(partition="--partition=big")),
        (["--options", "--qos=x --nice=1", "--options=-J 'a b'"], [*OURS, "--qos=x", "--nice=1", "-J", "a b"]),
        (["--options", "-J x", "--nodes", "3"], [*but(nodes="--nodes=3"), "-J", "x"]),
        (["--time", "90"], [*OURS, "--time=90"]),
        (["--walltime", "1:00:00", "--time", "2:00:00"], [*OURS, "--time=1:00:00"]),
        (["--device", "cuda", "--qos", "x"], [*OURS, "--qos", "x"]),
        (["-m", "block"], [*OURS, "-m", "block"]),
    ],
)  # fmt: skip
def test_ours_and_sbatchs_options_stand_in_any_order(desk: Desk, typed: list[str], asked: list[str]) -> None:
    assert desk.asked(*typed, "--", "my.py") == asked


@pytest.mark.parametrize(
    ("typed", "job"),
    [
        ([], []),
        (["--", "my.py"], ["--", "my.py"]),
        (["--device", "cuda", "--max_restarts=2", "--doctor"], ["--device", "cuda", "--max_restarts=2", "--doctor"]),
        (["--device", "cuda", "--qos", "x", "--", "-m", "mod", "--qos"], ["--device", "cuda", "--", "-m", "mod", "--qos"]),
    ],
)  # fmt: skip
def test_options_of_the_job_and_its_cmd_go_to_the_job_script(
    desk: Desk, typed: list[str], job: list[str]
) -> None:
    words = desk.words(*typed)
    assert words[words.index("--profile") + 2 :] == job


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["my.py", "--lr", "1"], "my.py stands before --: did you mean `{us} submit --cluster lab.yaml -- my.py --lr 1`?"),
        (["--qos", "x", "-m", "train", "--qos", "y"], "-m stands before --: did you mean `{us} submit --cluster lab.yaml -- --qos x -m train --qos y`?"),
        (["--frob", "--", "my.py"], "--frob: no option of submit, of a job or of sbatch (see apptrain submit --help; sbatch gets it with --options=--frob)"),
        (["--frob=a b"], "--frob=a b: no option of submit, of a job or of sbatch (see apptrain submit --help; sbatch gets it with --options='--frob=a b')"),
        (["--node=3"], "--node=3: no option of submit, of a job or of sbatch: did you mean --nodes or --node-rank?"),
        (["--helpp"], "--helpp: no option of submit, of a job or of sbatch: did you mean --help?"),
        (["--mail_typee", "1"], "--mail_typee: no option of submit, of a job or of sbatch: did you mean --mail-type?"),
        (["--rdzv-id", "x"], "--rdzv-id is torchrun's: leave it out: apptrain brings the nodes together; --master-addr and --master-port say where"),
        (["-lmem=9gb"], "-lmem=9gb is qsub's, and this cluster has Slurm: give --gres, --licenses or --constraint"),
        (["-Zx"], "-Zx: no option of submit, of a job or of sbatch (see apptrain submit --help; sbatch gets it with --options=-Zx)"),
        (["-r", "n"], "-r is qsub's, and this cluster has Slurm: give --requeue or --no-requeue"),
        (["--storage=x"], "--storage=x: sbatch has no such option: give --bind /PATH"),
        (["--nodes", "0"], "--nodes 0: give a whole number from 1"),
        (["--nodes", "1000000"], "--nodes 1000000: give a whole number from 1"),
        (["--gpus-per-node", "x"], "--gpus-per-node x: give a whole number from 1"),
        (["--gpus-per-node", "5"], "--gpus-per-node 5: a node of lab.yaml has 4: ask for more nodes"),
        (["--partition", "a b"], "--partition a b: give one word"),
        (["--account", "a\tb"], "--account a b: give one word"),
        (["--walltime", "90"], "--walltime 90: give MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; a number alone could be seconds or minutes"),
        (["--walltime", "1-0x"], "--walltime 1-0x: give MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; a number alone could be seconds or minutes"),
        (["--time", "1h"], "--time 1h: give minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"),
        (["--bind", ""], "--bind : give SRC[:DST[:ro]] with paths from /"),
        (["--bind", ":/a"], "--bind :/a: give SRC[:DST[:ro]] with paths from /"),
        (["--bind", "/a\n/b"], "--bind /a /b: give SRC[:DST[:ro]] with paths from /"),
        (["--bind", "/a:b"], "--bind /a:b: give SRC[:DST[:ro]] with paths from /"),
        (["--pass", "1A"], "--pass 1A: give NAME or PREFIX_*, in quotes"),
        (["--pass", "A B,C"], "--pass B,C: give NAME or PREFIX_*, in quotes"),
        (["--image", "docker://x/y:1"], "docker://x/y:1: an image is a file: apptainer pull image.sif docker://x/y:1, then --image image.sif"),
        (["--options=-J 'x"], "--options -J 'x: No closing quotation: quote it as for a shell"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_line(desk: Desk, typed: list[str], said: str) -> None:
    us = shlex.quote(str(CHECKOUT / "apptrain"))
    said = said.format(us=us).replace("--cluster lab.yaml", "--cluster lab.yaml --dry-run")
    assert desk.refusal("--dry-run", *typed) == said


def test_without_a_profile_an_option_may_be_of_each_scheduler(desk: Desk) -> None:
    """What is missing is said first, unless nobody has such an option."""
    for words in (["--qos", "x"], ["-l", "mem=9gb"], ["--wrap", "x"]):
        assert desk.refusal(*words, cluster="").startswith("--cluster is missing: ")
    known = "no option of submit, of a job or of sbatch or qsub"
    gets = "sbatch or qsub gets it with --options=--frob"
    assert desk.refusal("--frob", cluster="") == f"--frob: {known} (see apptrain submit --help; {gets})"
    assert desk.refusal("--env", "A=1", cluster="").startswith(f"--env: {known}")


def test_a_bind_is_relative_to_this_folder_and_may_have_a_colon_if_it_is_there(desk: Desk) -> None:
    (desk.folder / "a:b").mkdir()
    assert desk.words("--bind", "data", "--bind", "a:b", "--bind", "x:/y:ro")[0] == (
        "APPTRAIN_BIND=" + "\n".join(f"{desk.folder}/{name}" for name in ("data", "a:b", "x:/y:ro"))
    )


# --- the image ----------------------------------------------------------------------------------------------


def test_an_image_of_ones_own_that_is_missing_is_refused_but_not_in_a_dry_run(desk: Desk) -> None:
    said = f"there is no image {desk.folder}/no.sif: correct the path, or leave it out: `make -C {CHECKOUT} image` builds one of ours"
    assert desk.refusal("--image", "no.sif") == said
    _, _, lines = desk.run("--dry-run", "--image", "no.sif")
    assert f"image {desk.folder}/no.sif (not there yet: make -C {CHECKOUT} image)" in lines


def test_the_image_of_the_stack_is_named_with_how_to_make_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("APPTRAIN_IMAGE")
    here, other = os.uname().machine, "aarch64"
    for nodes, container, image, made in (
        ("", "", "image.sif", "image"),
        ("", "stack: cu126", "image-cu126.sif", "image STACK=cu126"),
        (f", architecture: {here}", "", "image.sif", "image"),
        (f", architecture: {other}", "", "image-aarch64.sif", "image on a node with aarch64"),
        (", driver: '550'", "", "image-cu128.sif", "image STACK=cu128"),
    ):
        desk.write(SLURM.replace("cpus: 64}", f"cpus: 64{nodes}}}") + f"container: {{{container}}}\n")
        line = f"image {CHECKOUT}/containers/{image} (not there yet: make -C {CHECKOUT} {made})"
        assert line in desk.run("--dry-run")[2]
    assert desk.refusal() == (
        f"there is no image {CHECKOUT}/containers/image-cu128.sif: make -C {CHECKOUT} image STACK=cu128, "
        "or give another with --image"
    )


def test_a_stack_that_the_driver_does_not_run_is_refused_unless_compat_is_given(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write(SLURM.replace("cpus: 64}", "cpus: 64, driver: '550'}") + "container: {stack: cu132}\n")
    assert desk.run("--dry-run")[0] == 0  # with the image of APPTRAIN_IMAGE
    monkeypatch.delenv("APPTRAIN_IMAGE")
    assert desk.refusal("--dry-run").startswith(
        "lab.yaml: container stack cu132 needs NVIDIA driver 580, and nodes "
    )
    monkeypatch.setenv("APPTRAIN_CUDA_COMPAT", "/usr/local/cuda/compat")
    assert f"image {CHECKOUT}/containers/image.sif" in desk.run("--dry-run")[2][-2]


@pytest.mark.parametrize(
    ("head", "nodes", "refused"),
    [
        (SIF, "", False),
        (SIF, ", architecture: x86_64", False),
        (SIF, ", architecture: aarch64", True),
        (SIF[:45] + b"04\0", ", architecture: x86_64", True),
        (b"hsqs", ", architecture: aarch64", False),
    ],
)
def test_an_image_for_other_nodes_is_not_submitted(
    desk: Desk, head: bytes, nodes: str, refused: bool
) -> None:
    (desk.folder / "image.sif").write_bytes(head)
    desk.write(SLURM.replace("cpus: 64}", f"cpus: 64{nodes}}}"))
    assert desk.run("--dry-run")[0] == 0
    if refused:
        assert desk.refusal().endswith("build it on such a node, or give another with --image")
    else:
        assert desk.run()[0] == 0


def test_what_is_no_image_is_refused_also_in_a_dry_run(desk: Desk) -> None:
    (desk.folder / "image.sif").write_bytes(b"")
    assert desk.refusal("--dry-run").startswith(
        f"the image {desk.folder}/image.sif (0 bytes) does not begin as one"
    )


def test_without_the_program_that_submits_nothing_is_submitted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert desk.refusal() == "sbatch is not in PATH: submit on a login node of that cluster"
    assert desk.run("--dry-run")[0] == 0


# --- what the profile and the request give ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "words", "said"),
    [
        ("{gpus: 4, whole: true}", ["--gpus-per-node", "4"], ""),
        ("{gpus: 4, whole: true}", ["--gpus-per-node", "3"], "--gpus-per-node 3: nodes of lab.yaml come whole, with 4: leave it out (fewer ranks: --nproc-per-node 3)"),
        ("{gpus: 4}", ["--gpus-per-node", "4"], ""),
        ("{gpus: 4}", ["--gpus-per-node", "5"], "--gpus-per-node 5: a node of lab.yaml has 4: ask for more nodes"),
        ("{gpus: 0}", ["--device", "cpu"], ""),
        ("{gpus: 0}", ["--gpus-per-node", "1"], "--gpus-per-node 1: a node of lab.yaml has 0: ask for more nodes"),
        ("{cpus: 4}", [], "lab.yaml: nodes gpus is missing: say how many GPUs a node has, or 0"),
    ],
)  # fmt: skip
def test_a_node_gives_no_more_gpus_than_it_has_and_a_whole_one_no_fewer(
    desk: Desk, nodes: str, words: list[str], said: str
) -> None:
    desk.write(f"scheduler: slurm\ntested: x\nnodes: {nodes}\n")
    if said:
        assert desk.refusal(*words) == said
    else:
        assert desk.run("--dry-run", *words)[0] == 0


@pytest.mark.parametrize(
    ("request_", "words", "said"),
    [
        ("{time: '00:02:00'}", [], "--time 00:02:00: the ranks are asked to save 120 s before its end"),
        ("{time: '00:02:00'}", ["--time", "3"], ""),
        ("{time: '00:05:00', stop_before: 300}", [], "--time 00:05:00: the ranks are asked to save 300 s before its end"),
        ("{time: '00:05:01', stop_before: 300}", [], ""),
        ("{}", ["--time", "2"], "--time 2: the ranks are asked to save 120 s before its end"),
        ("{}", [], ""),
    ],
)  # fmt: skip
def test_a_job_is_asked_to_save_after_it_has_begun(
    desk: Desk, request_: str, words: list[str], said: str
) -> None:
    desk.write(f"scheduler: slurm\ntested: x\nnodes: {{gpus: 4}}\nrequest: {request_}\n")
    status, _, lines = desk.run("--dry-run", *words)
    assert (status, lines[0].startswith(said or "2 nodes x 4 ranks on cuda")) == (64 if said else 0, True)


def test_make_submits_a_script_from_the_folder_where_it_is(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What make gives empty is left out of the line that is shown."""
    folder = desk.folder / "work"
    folder.mkdir()
    (folder / "their.py").touch()
    monkeypatch.setenv("CALLED_FROM", str(folder))
    where = f"is in {folder} and not in {desk.folder}, where make submits from: there, `{CHECKOUT}/apptrain submit"
    given = ["--nodes", "3", "--time", "", "--options="]
    assert desk.refusal("--dry-run", *given, "--", "their.py", "--lr", "1") == (
        f"CMD their.py {where} --cluster lab.yaml --dry-run --nodes 3 -- their.py --lr 1`"
    )
    assert desk.run("--dry-run", "--", "my.py")[0] == 0
    (folder / "my.py").touch()
    assert desk.run("--dry-run", "--", "my.py")[0] == 0
    assert "their.py stands before --" not in desk.refusal("--dry-run", "their.py")
    for script in ("none.py", "work"):
        assert "where make submits from" not in desk.run("--dry-run", "--", script)[2][0]
    monkeypatch.delenv("CALLED_FROM")
    assert "where make submits from" not in desk.refusal("--dry-run", "--", "their.py")


def test_under_pbs_the_file_of_arguments_is_the_users_alone(desk: Desk) -> None:
    desk.write(PBS)
    for name in ("a b.py", "a,b.py"):
        (desk.folder / name).touch()
    status, out, _ = desk.run("--", "a,b.py", "x y")
    assert status == 0
    (file,) = (desk.folder / "runs/arguments").iterdir()
    assert f"APPTRAIN_ARGS_FILE={file}" in out
    assert file.read_bytes() == b"--\0a,b.py\0x y\0"
    assert [oct(path.stat().st_mode & 0o777) for path in (file, file.parent)] == ["0o600", "0o700"]
    assert desk.run("--", "a,b.py", "x y")[0] == 0  # again, to the same file
    shutil.rmtree(desk.folder / "runs")
    (desk.folder / "runs").touch()
    (desk.folder / "called").unlink()
    status, _, said = desk.run("--", "a,b.py")
    assert (status, desk.called(), said[-1].partition(" cannot be written: ")[2]) == (
        64,
        None,
        "Not a directory",
    )


@pytest.mark.usefixtures("desk")
def test_all_options_of_a_job_are_in_its_whole_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words, there in ((["--help"], False), (["--nodes", "3", "--help-all"], True)):
        with pytest.raises(SystemExit) as ended:
            submit.main(words)
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert ("--hang-timeout S" in shown, "--cluster NAME" in shown) == (there, True)
        assert ("--stop-before" in shown) is there  # of jobs alone


@pytest.mark.parametrize(
    ("needs", "words", "env", "said"),
    [
        ("account", [], {}, "--account is missing: lab.yaml says that a job there needs it: give --account NAME"),
        ("time", [], {}, "--time is missing: lab.yaml says that a job there needs it: give --time HH:MM:SS"),
        ("account", ["--account", "x"], {}, ""),
        ("account", ["-A", "x"], {}, ""),
        ("account", [], {"SBATCH_ACCOUNT": "x"}, ""),
        ("account", [], {"SBATCH_ACCOUNT": ""}, "--account is missing: lab.yaml says that a job there needs it: give --account NAME"),
        ("partition", [], {}, ""),
    ],
)  # fmt: skip
def test_what_a_site_needs_is_asked_for_in_any_way(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, needs: str, words: list[str], env: dict[str, str], said: str
) -> None:
    desk.write(SLURM.replace("partition: gpu", f"partition: gpu, needs: [{needs}]"))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if said:
        assert desk.refusal(*words) == said
    else:
        assert desk.run("--dry-run", *words)[0] == 0


def test_mail_of_qsub_is_no_module_unless_its_letters_are_none(desk: Desk) -> None:
    desk.write(PBS)
    for letters in ("a", "abe", "bejn"):
        words = desk.words("-m", letters, "-N", "x")
        assert words[words.index("-m") + 1] == letters
    for module in ("abejn", "abx", "train"):
        assert desk.refusal("--dry-run", "-m", module).startswith("-m stands before --: did you mean ")


def test_a_variable_that_never_passes_is_refused(desk: Desk) -> None:
    assert desk.refusal("--pass", "A SLURM_JWT") == "--pass SLURM_JWT: it never reaches a rank: leave it out"


def test_the_old_name_of_an_option_is_taken_with_a_line(desk: Desk) -> None:
    assert desk.run("--dry-run", "--gpus", "1")[2][0] == "--gpus is taken for --gpus-per-node"


HIDDEN = "/srv" if Path("/srv").is_dir() else "/media"
"""A folder of this machine that belongs to no image."""


# --- what will run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nproc-per-node", "1"], "2 nodes x 1 rank on cuda, mode torchrun"),
        (["--nproc-per-node", "1"], "1 ranks on each node leave 3 of its 4 GPUs unused"),
        (["--nodes", "1", "--device", "cpu"], "1 node x 1 rank on cpu, mode torchrun"),
        (["--gpus-per-task", "1"], "--gpus-per-task changes what is granted: ranks and devices are checked when the job starts"),
        (["--ntasks-per-node", "4"], "2 nodes x 4 ranks on cuda, mode rank"),
        (["--tasks-per-node", "4"], "2 nodes x 4 ranks on cuda, mode rank"),
        (["--", "my.py", "a b"], "runs my.py 'a b' in {folder}"),
        (["--", "/no/x.py"], "CMD /no/x.py is not seen from here: the job looks for it in its first second"),
        (["--", "my.py", "--token", "hf_abcdefgh"], "CMD seems to hold a secret, which the scheduler shows to others: put NAME=VALUE into a file of mode 600, and give --secrets FILE"),
        ([], "image {folder}/image.sif"),
        ([], "run directory {folder}/runs/NAME-JOB"),
        (["--run-dir", "mine"], "run directory {folder}/mine"),
        (["--run-dir", "/mine"], "run directory /mine"),
    ],
)  # fmt: skip
def test_what_will_run_is_told_a_line_each(desk: Desk, words: list[str], line: str) -> None:
    status, _, said = desk.run("--dry-run", *words)
    assert (status, line.format(folder=desk.folder) in said) == (0, True), said
    if not words:
        assert len(said) == 4


def test_a_folder_that_only_a_job_knows_is_told_as_it_stands_in_the_profile(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write(SLURM + "scratch: $FAST/x\n")
    assert desk.run("--dry-run")[2][-1] == "run directory $FAST/x/runs/NAME-JOB"
    monkeypatch.setenv("FAST", "/fast")
    assert desk.run("--dry-run")[2][-1] == "run directory /fast/x/runs/NAME-JOB"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "x"], "--profile x: --cluster names the profile: leave it out"),
        (["--scheduler", "pbs"], "--scheduler pbs: lab.yaml has slurm: leave it out"),
        (["--start", "mpiexec"], "--start mpiexec: under Slurm tasks start with srun: leave it out"),
        (["--stop-before", "60"], "--stop-before 60: under Slurm it is sbatch --signal=B:USR2@SECONDS"),
        (["--", "nothere.py"], "CMD nothere.py does not exist in {folder}: "),
        (["--", "-m", "train", "--config", "digits", "batch_size=129"], "train: batch_size is 129, no multiple of 8 ranks x accumulation 1 = 8: give a multiple of 8"),
        (["--secrets", "none"], "--secrets {folder}/none cannot be read (No such file or directory): "),
        (["--nproc-per-node", "5"], "5 ranks on a node, but this task sees 4 GPUs (--gpus-per-node): "),
        (["--run-dir", "of-another", "--", "my.py"], "the run directory {folder}/of-another is that of x.py, not of my.py: "),
        (["--", "my.py", HIDDEN], f"the image will not show {HIDDEN}, which CMD names: give --bind {HIDDEN}, "),
    ],
)  # fmt: skip
def test_what_could_not_run_is_not_submitted(desk: Desk, words: list[str], said: str) -> None:
    (desk.folder / "of-another").mkdir()
    (desk.folder / "of-another/manifest.json").write_text('{"attempts": [{"command": ["x.py"]}]}')
    found = desk.refusal(*words)
    whole = said.format(folder=desk.folder)
    assert found.startswith(whole) if whole.endswith((": ", ", ")) else found == whole


def test_a_scheduler_that_is_the_sites_may_be_named_and_a_file_of_secrets_is_read(desk: Desk) -> None:
    (desk.folder / "secrets").write_text("TOKEN=x\n")
    (desk.folder / "secrets").chmod(0o600)
    assert desk.run("--dry-run", "--scheduler", "slurm", "--secrets", "secrets", "--", "my.py")[0] == 0


@pytest.mark.parametrize(("before", "is_fine"), [("3599", True), ("3600", False), ("0", True)])
def test_under_pbs_the_job_script_warns_before_the_end(desk: Desk, before: str, is_fine: bool) -> None:
    desk.write(PBS + "request: {time: '01:00:00'}\n")
    if is_fine:
        assert desk.run("--dry-run", "--stop-before", before)[0] == 0
    else:
        assert desk.refusal("--stop-before", before) == (
            f"--time 01:00:00: the ranks are asked to save {before} s before its end, which is before it begins: ask for "
            "more time, or give a smaller --stop-before"
        )
