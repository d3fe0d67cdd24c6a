"""What `apptrain submit` looks at before a job waits: the image, what CMD names, the account, secrets."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.site import SIF, Site

SLURM = "scheduler: slurm\ntested: x\nnodes: {gpus: 1}\nrequest: {partition: gpu}\n"
PBS = "scheduler: pbs\ntested: x\nnodes: {gpus: 1}\n"
FILE = "put NAME=VALUE into a file of mode 600, and give --secrets FILE"


def said(site: Site, *arguments: str, **env: Any) -> list[str]:
    done = site.run("submit.py", "--cluster", "lab", "--dry-run", *arguments, "--", "my.py", **env)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("apptrain: ") for line in done.stderr.splitlines()]


def secrets(site: Site) -> Path:
    file = site.folder / "secrets"
    file.write_text("WANDB_API_KEY=hush-1\nHF_TOKEN=hush-2\n")
    file.chmod(0o600)
    return file


def test_options_of_the_image_are_variables_in_front_of_sbatch(site: Site) -> None:
    site.write(SLURM)
    (site.checkout / "mine.sif").write_bytes(SIF)
    given = ["--image", "mine.sif", "--bind", "/a:/b:ro", "--bind", "c", "--pass", "X Y_*", "--pass=Z"]
    done = site.run(
        "submit.py", "--cluster", "lab", *given, "--", "my.py", APPTRAIN_BIND="/old", APPTRAIN_PASS="OLD"
    )
    assert done.returncode == 0, done.stderr
    here = site.checkout
    line = done.stdout.rpartition("job 7")[0]
    assert shlex.split(line)[:4] == [
        f"APPTRAIN_IMAGE={here}/mine.sif",
        f"APPTRAIN_BIND=/a:/b:ro\n{here}/c",
        "APPTRAIN_PASS=X Y_* Z",
        "sbatch",
    ]
    assert line.startswith("APPTRAIN_IMAGE=")  # as a shell takes it


def test_under_pbs_each_bind_has_a_variable_of_its_own(site: Site) -> None:
    site.write(PBS)
    line = site.submit("--bind", "/a:/b:ro", "--bind", "/c", "--bind", "/d", "--", "my.py")
    found = [word for word in line[-2].split(",") if word.startswith("APPTRAIN_BIND")]
    assert found == ["APPTRAIN_BIND=/a:/b:ro", "APPTRAIN_BIND_2=/c", "APPTRAIN_BIND_3=/d"]


def test_under_pbs_they_and_what_they_name_are_in_the_list_of_qsub(site: Site) -> None:
    site.write(PBS)
    env: dict[str, Any] = {
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "hush",
        "NCCL_DEBUG": "INFO",
        "USER": "u",
        "MINE": "1",
    }
    line = site.submit("--bind", "/a", "--pass", "WANDB_* MINE", "--", "my.py", **env)
    assert line[-2].split(",") == [
        *("APPTRAIN_ARGS=-- my.py", "APPTRAIN_BIND=/a", "APPTRAIN_PASS=WANDB_* MINE", "APPTRAIN_PROFILE=lab"),
        *("MINE=1", "WANDB_MODE=offline"),
    ]
    lines = said(site, "--pass", "WANDB_* MINE", **env)
    assert lines[:2] == [
        "qsub does not carry NCCL_DEBUG: --pass 'NAME PREFIX_*' does",
        f"qsub does not carry WANDB_API_KEY: {FILE}",
    ]


@pytest.mark.parametrize("profile", [SLURM, PBS])
def test_secrets_go_by_a_file_whose_path_alone_is_on_the_line(site: Site, profile: str) -> None:
    site.write(profile)
    file = secrets(site)
    done = site.run("submit.py", "--cluster", "lab", "--secrets", str(file), "--", "my.py")
    assert (done.returncode, len(site.calls())) == (0, 1)
    told = done.stdout + done.stderr + str(site.calls())
    assert ("hush" not in told, str(file) in told) == (True, True)


@pytest.mark.parametrize(
    ("profile", "arguments", "env", "message"),
    [
        (SLURM, "--export=ALL,HF_TOKEN=hush", {}, f"--export with HF_TOKEN: sacct would show its value to others: {FILE}"),
        (SLURM, "--export=ALL,X=hf_abcdefghij0123456789", {}, f"--export with X: sacct would show its value to others: {FILE}"),
        (SLURM, "--export=NONE --pass X", {}, "--export=NONE keeps APPTRAIN_PASS from the job, which is set here: add ALL"),
        (PBS, "-v WANDB_API_KEY", {"WANDB_API_KEY": "hush"}, f"-v with WANDB_API_KEY: qstat -f would show its value to others: {FILE}"),
        (PBS, "-V", {"WANDB_API_KEY": "hush"}, f"-V with WANDB_API_KEY: qstat -f would show its value to others: {FILE}"),
        (PBS, "--pass WANDB_API_KEY", {"WANDB_API_KEY": "hush"}, f"--pass with WANDB_API_KEY: qstat -f would show its value to others: {FILE}"),
        (SLURM, "--pass A,B", {}, "--pass A,B: give NAME or PREFIX_*, in quotes"),
        (SLURM, "--pass SLURM_JWT", {}, "--pass SLURM_JWT: it never reaches a rank: leave it out"),
        (SLURM, "--bind /a:b", {}, "--bind /a:b: give SRC[:DST[:ro]] with paths from /"),
        (SLURM, "--bind a:/b:rw", {}, "--bind a:/b:rw: give SRC[:DST[:ro]] with paths from /"),
        (SLURM, "--bind ~/x", {}, "--bind ~/x: give SRC[:DST[:ro]] with paths from /"),
    ],
)  # fmt: skip
def test_what_would_fail_or_be_seen_is_refused(
    site: Site, profile: str, arguments: str, env: dict[str, str], message: str
) -> None:
    site.write(profile)
    words = [word.replace("'", "") for word in arguments.split()]
    assert (
        site.refused("--cluster", "lab", "--dry-run", *words, "--", "my.py", **env) == f"apptrain: {message}"
    )


def test_an_image_that_is_none_is_refused_also_in_a_dry_run(site: Site) -> None:
    site.write(SLURM)
    image = site.folder / "a.sif"
    for content, size in ((b"", 0), (b"\0" * 99, 99)):
        image.write_bytes(content)
        assert site.refused("--cluster", "lab", "--dry-run", f"--image={image}", "--", "my.py") == (
            f"apptrain: the image {image} ({size} bytes) does not begin as one: it was not copied or built to its end"
        )
    image.write_bytes(b"hsqs" + b"\0" * 99)
    assert site.submit(f"--image={image}", "--", "my.py")


def test_an_image_for_other_processors_than_the_partitions_is_refused(site: Site) -> None:
    site.write(SLURM)
    for name, text in (("sinfo", "gh1"), ("scontrol", "NodeName=gh1 Arch=aarch64 CoresPerSocket=72")):
        (site.bin / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (site.bin / name).chmod(0o755)
    image = site.checkout / "containers/image.sif"
    assert site.refused("--cluster", "lab", "--", "my.py") == (
        f"apptrain: the image {image} is for x86_64, and the nodes have aarch64: build it on such a node, or give "
        "another with --image"
    )
    image.write_bytes(SIF[:45] + b"04\0")
    assert site.run("submit.py", "--cluster", "lab", "--", "my.py").returncode == 0


def test_a_path_that_is_here_and_that_the_image_will_not_show_is_refused(site: Site) -> None:
    """Folders under /srv and the like belong to no image, and nobody binds them."""
    site.write(SLURM)
    folder = Path("/srv") if Path("/srv").is_dir() else Path("/media")
    (site.checkout / "data").symlink_to(folder)
    for word in (str(folder), f"--data={folder}", f"{folder}/new.txt", "data"):
        path = site.checkout / word if word == "data" else folder
        assert site.refused("--cluster", "lab", "--dry-run", "--", "my.py", word) == (
            f"apptrain: the image will not show {path}, which CMD names: give --bind {folder}, or a line of APPTRAIN_BIND"
        )
        assert site.submit("--bind", str(folder), "--", "my.py", word)
    assert site.submit("--", "my.py", "/usr/bin", "/", "/no/such/path", "7", str(site.folder))


def test_what_is_only_perhaps_wrong_is_a_line(site: Site) -> None:
    site.write(SLURM)
    done = site.run("submit.py", "--cluster", "lab", "--dry-run", "--", "/no/x.py", "--token", "hf_abcdefgh")
    assert done.returncode == 0
    assert done.stderr.splitlines()[1:3] == [
        "apptrain: CMD /no/x.py is not seen from here: the job looks for it in its first second",
        f"apptrain: CMD seems to hold a secret, which the scheduler shows to others: {FILE}",
    ]
