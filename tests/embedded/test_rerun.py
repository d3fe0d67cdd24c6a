"""`apptrain rerun --go`: a run of this machine, again from its manifest alone."""

import json
import subprocess
import sys
import uuid
from pathlib import Path

from tests.embedded.jobs import Ended, Job, clean_env, run
from train import metrics

SMALL = ("--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16", "batch_size=16")


def again(ended: Ended, folder: Path, *options: str, **env: str) -> Ended:
    folder.mkdir(exist_ok=True)
    argv = [sys.executable, "-P", "-m", "entrypoint.cli.apptrain", "rerun", str(ended.run), *options]
    return Job(argv, folder, folder / "runs", clean_env(APPTRAIN_PASS="PYTHONPATH", **env)).end()


def test_it_gives_the_same_trace_bit_for_bit(tmp_path: Path) -> None:
    options = ("--nodes", "1", "--nproc-per-node", "2", "--omp-num-threads", "1")
    first = run(tmp_path, *options, "--", "-m", "train", *SMALL, "steps=4", "seed=3")
    assert first.status == 0, first.err
    second = again(first, tmp_path / "elsewhere", "--go")
    assert second.status == 0, second.err
    line = (
        "apptrain run --nodes 1 --nproc-per-node 2 --device cpu --omp-num-threads 1 -- "
        f"-m train {' '.join(SMALL)} steps=4 seed=3"
    )
    assert second.out.splitlines()[0] == line
    (folder,) = second.run.iterdir()
    found, wanted = (metrics.read(one / "metrics.jsonl") for one in (folder, first.run))
    assert list(found.loss) == [1, 2, 3, 4]
    assert (found.loss, found.lr, found.accuracy) == (wanted.loss, wanted.lr, wanted.accuracy)


TELL = "import os, sys; print('has', len(sys.argv[2]), len(os.environ['HF_TOKEN']))"
SECRET = "mine-7-mine"


def test_a_secret_of_the_command_comes_from_the_environment(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TELL)
    command = ("--nodes", "1", "--", str(script), "--hub", SECRET)
    first = run(tmp_path, *command, env={"HF_TOKEN": SECRET})
    assert first.out.startswith("has 11 11\n"), first.err
    asked = again(first, tmp_path / "without", "--go")
    assert (asked.status, asked.err.splitlines()[-1]) == (
        64,
        "apptrain: the command needs HF_TOKEN: set it here",
    )
    shown, *printed = again(first, tmp_path / "with", "--go", HF_TOKEN=SECRET).out.splitlines()
    assert (shown.rpartition(" -- ")[2], printed[0]) == (f"{script} --hub '<secret HF_TOKEN>'", "has 11 11")


def test_a_variable_that_was_passed_is_asked_for_by_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print('made', os.environ.get('STEPS'))")
    named = {"STEPS": "value-5", "ACCELERATE_X": "value-7", "APPTRAIN_PASS": "PYTHONPATH STEPS"}
    first = run(tmp_path, "--nodes", "1", "--", str(script), env=named)
    assert first.out == "made value-5\n", first.err
    assert "value-" not in (first.run / "manifest.json").read_text()
    begin = "apptrain: not the same: environment: the run had"
    said = again(first, tmp_path / "without").err.splitlines()
    assert [line for line in said if "environment" in line] == [
        f"{begin} ACCELERATE_X, whose value is not kept: set it here",
        f"{begin} STEPS, whose value is not kept: set it here, with APPTRAIN_PASS=STEPS",
    ]


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    return subprocess.check_output(["git", "-C", str(folder), *named, *words], text=True, timeout=30).strip()


def test_a_commit_that_is_missing_an_image_built_anew_and_data_that_moved_are_a_line_each(
    tmp_path: Path,
) -> None:
    project, data, image = tmp_path / "project", tmp_path / "data", tmp_path / "image.sif"
    data.mkdir()
    git(tmp_path, "init", "-q", str(project))
    git(project, "remote", "add", "origin", "https://example.org/x.git")
    (project / "script.py").write_text(
        "import json, os\n"
        "said = {'attempt': 0, 'config': {'data.path': 'DATA'}}\n"
        "json.dump(said, open(os.environ['APPTRAIN_RUN_DIR'] + '/config.json', 'w'))\n".replace(
            "DATA", str(data)
        )
    )
    git(project, "add", ".")
    git(project, "commit", "-qm", "Begin")
    commit, had, has = git(project, "rev-parse", "HEAD"), uuid.UUID(int=1), uuid.UUID(int=2)
    first = run(project, "--nodes", "1", "--", "script.py", env={"APPTRAIN_IMAGE_ID": str(had)})
    assert first.status == 0, first.err
    data.rename(tmp_path / "moved")
    image.write_bytes(bytes(48) + has.bytes)
    git(project, "checkout", "-q", "--orphan", "other")
    git(project, "commit", "-qm", "Begin anew")
    git(project, "branch", "-qD", git(project, "branch", "--format=%(refname:short)").split()[0])
    git(project, "reflog", "expire", "--expire=now", "--all")
    git(project, "gc", "-q", "--prune=now")
    now = git(project, "rev-parse", "HEAD")
    said = again(first, project, APPTRAIN_IMAGE=str(image)).err
    of_ours = "apptrain: not the same: apptrain: "  # this checkout's own state, whatever it is
    assert [line for line in said.splitlines() if not line.startswith(of_ours)] == [
        f"apptrain: not the same: image: {image} is {has}, the run had {had}: built anew since",
        f"apptrain: not the same: code: {project} is at commit {now}, the run had {commit} of "
        "https://example.org/x.git: fetch it and check it out",
        f"apptrain: not the same: data: {data} is not here: add data.path=DIR, where it is now",
    ]


def test_a_repository_that_the_run_directory_brings_starts_no_program(tmp_path: Path) -> None:
    trap = tmp_path / "run/trap"
    trap.mkdir(parents=True)
    git(trap, "init", "-q")
    (trap / "x.py").touch()
    git(trap, "add", ".")
    git(trap, "commit", "-qm", "Begin")
    with (trap / ".git/config").open("a") as config:
        config.write(
            "[core]\n\trepositoryformatversion = 1\n"
            f'\tsshCommand = "touch {tmp_path}/ran; false"\n\tfsmonitor = "touch {tmp_path}/ran"\n'
            "[extensions]\n\tpartialClone = origin\n"
            '[remote "origin"]\n\turl = ssh://127.0.0.1/x\n\tpromisor = true\n'
        )
    attempts = [{"nodes": ["a"], "nproc_per_node": 1, "device": "cpu"}]
    code = {"repository": {"commit": "1234567890" * 4}}
    manifest = {"attempts": attempts, "command": ["run/trap/x.py"], "code": code}
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    argv = [sys.executable, "-P", "-m", "entrypoint.cli.apptrain", "rerun", "run"]
    ended = Job(argv, tmp_path, tmp_path / "runs", clean_env(APPTRAIN_PASS="PYTHONPATH")).end()
    now = git(tmp_path, "--git-dir", str(trap / ".git"), "-c", "core.fsmonitor=false", "rev-parse", "HEAD")
    assert (ended.status, ended.err) == (
        0,
        f"apptrain: not the same: code: {trap} is at commit {now}, the run had {'1234567890' * 4}: "
        "fetch it and check it out\n",
    )
    assert not (tmp_path / "ran").exists()
