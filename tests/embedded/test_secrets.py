"""Secrets of a real run: in its environment, arguments, git remote, changes and config. What is written of it has none."""

import subprocess
import sys
from pathlib import Path

from tests.embedded.jobs import CHECKOUT, Job, clean_env, run

SHAPE = "hf_" + "planted" * 4
VALUE, ARGUMENT, LOGIN = "planted-value-1", "planted-argument-1", "planted-login-1"
PLANTED = {
    "HF_TOKEN": VALUE,
    "WANDB_MODE": SHAPE,  # a name that tells nothing
    "NCCL_DEBUG": f"WARN{SHAPE}",  # one whose values are written
    "APPTRAIN_PASS": "PYTHONPATH NCCL_*",
}
FORMS = (
    *("--pass", ARGUMENT, f"--pwd={ARGUMENT}", "--cookie", ARGUMENT, "--token", f"-{ARGUMENT}"),
    *("--header", f"Authorization: Bearer {ARGUMENT}", f"--db=postgresql://u:{ARGUMENT}@h/db"),
)
SCRIPT = """\
import json, os
with open(os.environ["APPTRAIN_RUN_DIR"] + "/metrics.jsonl", "w") as file:
    print(json.dumps({"step": 1, "loss": 1.0}), file=file)
"""
TRAINING = (
    *("-m", "train", "--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16"),
    *("batch_size=16", "steps=2", "evaluate.every=0"),
)


def git(folder: Path, *words: str) -> None:
    named = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *named, *words], check=True, capture_output=True, timeout=30)


def project(folder: Path, changes: str) -> Path:
    folder.mkdir()
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", f"https://me:{LOGIN}@example.org/x.git")
    (folder / "script.py").write_text(SCRIPT)
    (folder / ".gitignore").write_text("run/\nstd*.txt\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "Begin")
    (folder / "script.py").write_text(SCRIPT + changes)
    return folder


def said(*words: Path | str) -> str:
    """All that a command prints."""
    done = subprocess.run(
        [CHECKOUT / "apptrain", *words],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


def written(folder: Path) -> str:
    names = ("manifest.json", "plan.*.json", "config.json", "hardware.*.json", "*.diff")
    return "".join(path.read_text() for name in names for path in folder.glob(name))


def has_none(text: str) -> None:
    for secret in (SHAPE, VALUE, ARGUMENT, LOGIN):
        assert secret not in text, text


def test_what_is_written_of_a_script_and_said_of_it_has_no_secret(tmp_path: Path) -> None:
    runs = []
    for name, changes in (("a", f"# {SHAPE}\n"), ("b", "# no secret\n")):
        words = ("script.py", "--hub", SHAPE, "--password", ARGUMENT, f"--wandb={VALUE}", *FORMS, name)
        folder = project(tmp_path / name, changes)
        ended = run(folder, "--nodes", "2", "--mode", "rank", "--", *words, env=PLANTED)
        assert ended.status == 0, ended.err
        runs.append(ended.run)
    refused, kept = runs
    assert '"diff": "not kept: it seems to hold a secret"' in written(refused)
    assert not (refused / "code.diff").exists()
    diff = kept / "code.diff"
    assert diff.read_text().endswith("+# no secret\n")
    assert diff.stat().st_mode & 0o777 == 0o600
    texts = {
        written(refused): "--password",
        written(kept): "--wandb=<secret HF_TOKEN>",
        said("compare", *runs): "arguments",
        said("compare", *runs, "--json"): "--wandb=<secret HF_TOKEN>",
        said("rerun", kept): "the command holds a secret that no variable had: <secret>",
    }
    for text, known in texts.items():
        assert known in text
        has_none(text)
    assert "https://<secret>@example.org/x.git" in written(kept)


def test_what_the_reference_program_writes_of_its_config_has_no_secret(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "--nodes",
        "1",
        "--",
        *TRAINING,
        f"data.path=https://me:{LOGIN}@host/{VALUE}/{SHAPE}",
        env=PLANTED,
    )
    assert ended.status == 0, ended.err
    assert (
        '"data.path": "https://<secret>@host/<secret HF_TOKEN>/<secret>"'
        in (ended.run / "config.json").read_text()
    )
    for text in (written(ended.run), said("rerun", ended.run)):
        assert "data.path" in text
        has_none(text)


def test_the_doctors_table_has_no_secret(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-P",
        "-m",
        "entrypoint.cli.embedded",
        "--nodes",
        "1",
        "--doctor",
        "--run-dir",
        "run",
    ]
    for options in ((), ("--", "--json")):
        ended = Job([*argv, *options], tmp_path, tmp_path / "run", clean_env(**PLANTED)).end()
        assert "127.0.0.1" in ended.out, ended.err
        has_none(ended.out + ended.err)
