"""The code of a command: its bytes, its commit, its changes, and no secret."""

import os
import subprocess
from pathlib import Path

import pytest

from entrypoint.record import source


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.check_output(["git", "-C", str(folder), *named, *words], text=True, timeout=30).strip()


@pytest.fixture(autouse=True)
def no_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "HOME", Path("/nonexistent"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", "https://me:hunter22@example.org/x.git")
    (folder / "script.py").write_text("print(1)\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "Begin")
    return folder


def test_a_clean_repository_is_its_commit(project: Path) -> None:
    code, diff = source.look(["script.py"], project, {})
    assert code["repository"] == {
        "commit": git(project, "rev-parse", "HEAD"),
        "remote": "https://<secret>@example.org/x.git",
        "changed": 0,
        "untracked": 0,
        "diff_sha256": None,
        "diff": None,
    }
    assert code["program"]["name"] == "script.py"
    assert diff == {}


def test_a_changed_line_changes_the_digests_and_is_kept(project: Path) -> None:
    before, _ = source.look(["script.py"], project, {})
    (project / "script.py").write_text("print(2)\n")
    (project / "new.py").touch()
    after, diff = source.look(["script.py"], project, {})
    assert diff.keys() == {"code.diff"}
    assert "+print(2)" in diff["code.diff"]
    assert after["program"]["sha256"] != before["program"]["sha256"]
    state = after["repository"]
    assert (state["changed"], state["untracked"], state["diff"]) == (1, 1, "code.diff")
    assert len(state["diff_sha256"]) == 64


def test_changes_of_apptrains_checkout_have_a_file_of_their_own(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "apptrain"
    git(tmp_path, "clone", "-q", str(project), str(ours))
    monkeypatch.setattr(source, "HOME", ours)
    (ours / "Makefile").write_text("all:\n")
    for folder in (project, ours):
        (folder / "script.py").write_text(f"print('{folder.name}')\n")
    code, diffs = source.look(["script.py"], project, {})
    assert code["apptrain"]["repository"]["diff"] == "apptrain.diff"
    assert "+print('project')" in diffs["code.diff"]
    assert "+print('apptrain')" in diffs["apptrain.diff"]


def test_changes_with_a_secret_are_not_kept(project: Path) -> None:
    (project / "script.py").write_text("login('hf_abcdefghijklmnopqrstuvwxyz')\n")
    code, diff = source.look(["script.py"], project, {})
    assert diff == {}
    assert code["repository"]["diff"] == "not kept: it seems to hold a secret"


def test_too_many_changes_are_not_kept(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_DIFF", 10)
    (project / "script.py").write_text("print(2)\n")
    code, diff = source.look(["script.py"], project, {})
    assert diff == {}
    assert code["repository"]["diff"].endswith("characters, more than 10")


@pytest.mark.parametrize("packed", [False, True])
def test_without_git_the_commit_is_still_known(
    project: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(project, "rev-parse", "HEAD")
    if packed:
        git(project, "pack-refs", "--all")
    monkeypatch.setenv("PATH", "")
    code, _ = source.look(["script.py"], project, {})
    assert code["repository"] == {"commit": commit, "state": "unknown: git could not be asked where it ran"}


TRAPS = {
    "monitor": "[core]\n\tfsmonitor = {trap}\n",
    "hooks": "[core]\n\thooksPath = {folder}/hooks\n",
    "filter": '[filter "x"]\n\tclean = {trap}\n\tprocess = {trap}\n\trequired = true\n',
    "external diff": "[diff]\n\texternal = {trap}\n",
    "diff driver": '[diff "x"]\n\tcommand = {trap}\n\ttextconv = {trap}\n',
    "pager": "[core]\n\tpager = {trap}\n[pager]\n\tstatus = {trap}\n\tdiff = {trap}\n",
    "alias": "[alias]\n\tstatus = !{trap}\n\tdiff = !{trap}\n",
    "lazy fetch": (
        "[core]\n\trepositoryformatversion = 1\n\tsshCommand = {trap}\n[extensions]\n\tpartialClone = origin\n"
        '[remote "origin"]\n\turl = ssh://127.0.0.1/x\n\tpromisor = true\n\tuploadpack = {trap}\n'
    ),
    "included": "[include]\n\tpath = {folder}/included\n",
}
"""Parts of a repository's own configuration; `trap` is a program that must not run."""


@pytest.mark.parametrize("name", TRAPS)
def test_no_program_runs_that_a_repository_names(project: Path, tmp_path: Path, name: str) -> None:
    trap, ran = tmp_path / "trap", tmp_path / "ran"
    trap.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    trap.chmod(0o755)
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/post-index-change").symlink_to(trap)
    (tmp_path / "included").write_text(TRAPS["filter"].format(trap=trap))
    (project / ".gitattributes").write_text("*.py filter=x diff=x\n")
    if name == "lazy fetch":  # the file's blob is gone, so that `git diff` would fetch it
        digest = git(project, "rev-parse", "HEAD:script.py")
        (project / ".git/objects" / digest[:2] / digest[2:]).unlink()
    with (project / ".git/config").open("a") as config:
        config.write(TRAPS[name].format(trap=trap, folder=tmp_path))
    (project / "script.py").write_text("print(2)\n")
    code, _ = source.look(["script.py"], project, {})
    assert code["repository"]["commit"]
    assert not ran.exists()


@pytest.mark.parametrize("head", ["ref: ../../secret", "ref: refs/heads/main", "no commit\x1b[31m", ""])
def test_only_a_commit_is_taken_from_a_planted_head(tmp_path: Path, head: str) -> None:
    (tmp_path / "secret").write_text("hunter22\n")
    (tmp_path / "x/.git").mkdir(parents=True)
    (tmp_path / "x/.git/HEAD").write_text(head)
    assert source.commit_of(tmp_path / "x") is None


def test_a_planted_head_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / ".git/HEAD")
    assert source.commit_of(tmp_path) is None


def test_what_lies_in_no_repository_is_its_bytes_alone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("pass\n")
    code, _ = source.look(["bash", "-c", "true"], tmp_path, {})
    assert (code["program"], code["repository"]) == (None, None)
    code, _ = source.look(["script.py", "--lr", "0.1"], tmp_path, {})
    assert len(code["program"]["sha256"]) == 64


def test_of_a_module_all_files_of_its_package_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "someones"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for text in ("a = 1\n", "a = 2\n"):
        (package / "part.py").write_text(text)
        found.append(source.look(["-m", "someones.part"], tmp_path, {})[0]["program"])
    assert [one["name"] for one in found] == ["someones", "someones"]
    assert found[0]["sha256"] != found[1]["sha256"]
    assert source.look(["-m", "is_not_there"], tmp_path, {})[0]["program"] is None


@pytest.mark.parametrize("name", ["mine.py", "mine/__main__.py"])
def test_a_module_in_the_folder_of_the_ranks_comes_first_as_for_python(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    found = source.program(["-m", "mine"], tmp_path)
    assert found is not None
    assert found["name"] == name.partition("/")[0]


def test_nothing_in_the_folder_of_the_ranks_is_taken_for_the_reference_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    found = source.program(("-m", "train"), tmp_path)
    assert found is not None
    assert found["name"] == "train"
