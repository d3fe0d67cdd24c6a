"""The code of a command: its bytes, its commit, its changes, and no secret."""

import hashlib
import os
import shutil
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
    "equals sign": '[filter "a=b"]\n\tclean = {trap}\n',
    "name of other bytes": '[filter "é"]\n\tclean = {trap}\n',
    "worktree": "[core]\n\trepositoryformatversion = 1\n[extensions]\n\tworktreeConfig = true\n",
    "submodule": "[diff]\n\tsubmodule = diff\n",
}
"""Parts of a repository's own configuration; `trap` is a program that must not run."""
DRIVERS = {"equals sign": "filter=a=b", "name of other bytes": "filter=é"}
"""What .gitattributes gives the scripts, if it is not the driver x."""


def add_changed_submodule(project: Path, origin: Path, configuration: str) -> None:
    """One that stands at another commit than the project's own, with a configuration of its own."""
    git(project, "clone", "-q", str(project), str(origin))
    git(project, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(origin), "part")
    git(project, "commit", "-qm", "Add")
    (project / "part/.gitattributes").write_text("*.py diff=x\n")
    (project / "part/script.py").write_text("print(3)\n")
    git(project / "part", "commit", "-qam", "Go on")
    with (project / ".git/modules/part/config").open("a") as config:
        config.write(configuration)


@pytest.mark.parametrize("name", TRAPS)
def test_no_program_runs_that_a_repository_names(project: Path, tmp_path: Path, name: str) -> None:
    trap, ran = tmp_path / "trap", tmp_path / "ran"
    trap.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    trap.chmod(0o755)
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/post-index-change").symlink_to(trap)
    (tmp_path / "included").write_text(TRAPS["filter"].format(trap=trap))
    (project / ".gitattributes").write_text(f"*.py {DRIVERS.get(name, 'filter=x diff=x')}\n", "latin-1")
    (project / ".git/config.worktree").write_text(TRAPS["filter"].format(trap=trap))
    if name == "submodule":
        add_changed_submodule(project, tmp_path / "part", TRAPS["diff driver"].format(trap=trap))
    if name == "lazy fetch":  # the file's blob is gone, so that `git diff` would fetch it
        digest = git(project, "rev-parse", "HEAD:script.py")
        (project / ".git/objects" / digest[:2] / digest[2:]).unlink()
    with (project / ".git/config").open("a", encoding="latin-1") as config:
        config.write(TRAPS[name].format(trap=trap, folder=tmp_path))
    (project / "script.py").write_text("print(2)\n")
    code, _ = source.look(["script.py"], project, {})
    assert code["repository"]["commit"]
    assert not ran.exists()


@pytest.mark.parametrize(("old", "ran"), [(False, True), (True, False)])
def test_a_users_own_filter_stays_if_git_tells_whose_it_is(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool, ran: bool
) -> None:
    (tmp_path / "users").write_text(f'[filter "lfs"]\n\tclean = touch {tmp_path}/ran; cat\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "users"))
    if old:
        (tmp_path / "git").write_text(
            f'#!/bin/sh\ncase $* in *--show-scope*) exit 129 ;; esac\nexec {shutil.which("git")} "$@"\n'
        )
        (tmp_path / "git").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (project / ".gitattributes").write_text("*.py filter=lfs\n")
    (project / "script.py").write_text("print(2)\n")
    code, _ = source.look(["script.py"], project, {})
    assert code["repository"]["changed"] == 1
    assert (tmp_path / "ran").exists() == ran


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


@pytest.fixture
def begin(tmp_path: Path) -> Path:
    """Where the ranks begin: scripts, a module and a package."""
    folder = tmp_path / "begin"
    for name in (
        "t.py",
        "run.sh",
        "t.txt",
        "mod.py",
        "pkg/a.py",
        "pkg/sub.py",
        "pkg/deep/__main__.py",
        "folder.py/x",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    (folder / "link.py").symlink_to("t.py")
    return folder


@pytest.mark.parametrize(
    ("command", "name", "place"),
    [
        (["t.py", "run.sh"], "t.py", "."),
        (["-u", "t.py"], "t.py", "."),
        (["run.sh", "t.py"], "run.sh", "."),
        (["link.py"], "t.py", "."),
        (["pkg/a.py"], "a.py", "pkg"),
        (["t.txt"], None, "."),
        (["folder.py"], None, "."),
        (["none.py"], None, "."),
        (["-m", "mod"], "mod.py", "."),
        (["-m", "pkg"], "pkg", "pkg"),
        (["-m", "pkg.sub", "t.py"], "pkg", "pkg"),
        (["-m", "no_such_module", "t.py"], None, "."),
        (["-m", "."], None, "."),
        (["-m", "/"], None, "."),
        (["-m"], None, "."),
    ],
)
def test_the_program_is_the_first_script_or_the_module(
    command: list[str], name: str | None, place: str, begin: Path
) -> None:
    found = source.program(command, begin)
    assert (found["name"] if found else None) == name
    assert source.folder(command, begin) == (begin / place).resolve()


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["t.py"], "t.py"),
        (["-m", "mod"], "mod.py"),
        (["-m", "pkg.sub"], "pkg/sub.py"),
        (["-m", "pkg.deep"], "pkg/deep/__main__.py"),
        (["-m", "pkg"], None),
        (["-m", "pkg.none"], None),
        (["none.py"], None),
    ],
)
def test_the_file_that_python_runs_is_found_in_its_package(
    command: list[str], file: str | None, begin: Path
) -> None:
    assert source.script(command, begin) == (begin / file if file else None)


def sha256(*parts: tuple[str, str]) -> str:
    return hashlib.sha256(
        b"".join(f"{name}\0{len(text)}\0{text}".encode() for name, text in parts)
    ).hexdigest()


def test_a_digest_is_of_names_and_contents(begin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(*command: str) -> str | None:
        found = source.program(command, begin)
        assert found
        return found["sha256"]

    assert digest("t.py") == sha256(("", "t.py\n"))
    whole = sha256(
        ("a.py", "pkg/a.py\n"), ("deep/__main__.py", "pkg/deep/__main__.py\n"), ("sub.py", "pkg/sub.py\n")
    )
    assert digest("-m", "pkg") == whole
    (begin / "pkg" / "data.bin").write_text("not of the program")
    assert digest("-m", "pkg") == whole
    monkeypatch.setattr(source, "MOST_FILES", 5)  # three of them Python's, and a folder
    assert digest("-m", "pkg") == whole
    monkeypatch.setattr(source, "MOST_FILES", 4)
    assert digest("-m", "pkg") is None
    monkeypatch.setattr(source, "MOST_FILES", 100)
    monkeypatch.setattr(source, "MOST_PROGRAM", 9 + 21 + 11)
    assert digest("-m", "pkg") == whole
    monkeypatch.setattr(source, "MOST_PROGRAM", 9 + 21 + 10)
    assert digest("-m", "pkg") is None
    monkeypatch.setattr(source, "MOST_PROGRAM", 4)
    assert digest("t.py") is None
    (begin / "pkg" / "b.py").symlink_to("nowhere")
    monkeypatch.setattr(source, "MOST_PROGRAM", 1000)
    assert digest("-m", "pkg") is None


HASH = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({"HEAD": HASH}, HASH),
        ({"HEAD": HASH + "0123456789abcdef01234567"}, HASH + "0123456789abcdef01234567"),
        ({"HEAD": HASH[:-1]}, None),
        ({"HEAD": "ref: refs/heads/main", "refs/heads/main": HASH}, HASH),
        (
            {"HEAD": "ref: refs/heads/main", "packed-refs": f"# pack\n{'f' * 40} refs/heads/my-main\n{HASH} refs/heads/main"},
            HASH,
        ),
        ({"HEAD": "ref: refs/heads/main", "packed-refs": f"{HASH} refs/heads/other"}, None),
        ({"HEAD": "ref: refs/heads/main"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_commit_is_read_from_gits_own_files(
    files: dict[str, str], commit: str | None, tmp_path: Path
) -> None:
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / "below").mkdir()
    for name, text in files.items():
        (tmp_path / ".git" / name).write_text(f"{text}\n")
    assert source.commit_of(tmp_path / "below") == commit
    assert source.root_of(tmp_path / "below") == tmp_path


def test_a_worktree_has_its_own_head_and_the_repositorys_references(project: Path, tmp_path: Path) -> None:
    git(project, "worktree", "add", "-qb", "side", str(tmp_path / "tree"))
    (tmp_path / "tree" / "script.py").write_text("print(3)\n")
    git(tmp_path / "tree", "commit", "-qam", "Go on")
    assert source.commit_of(tmp_path / "tree") == git(tmp_path / "tree", "rev-parse", "HEAD")
    assert (
        source.commit_of(project) == git(project, "rev-parse", "HEAD") != source.commit_of(tmp_path / "tree")
    )


def test_a_repository_without_a_commit_or_a_remote_says_so(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "script.py").write_text("print(1)\n")
    unknown = {"commit": None, "state": "unknown: git could not be asked where it ran"}
    assert source.look(["script.py"], tmp_path, {})[0]["repository"] == unknown
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "Begin")
    state = source.look(["script.py"], tmp_path, {})[0]["repository"]
    assert (state["remote"], state["changed"], state["untracked"]) == (None, 0, 0)


def test_changed_and_untracked_files_are_counted(project: Path) -> None:
    for name in ("a.py", "b.py"):
        (project / name).write_text(f"{name}\n" * 9)
    git(project, "add", ".")
    git(project, "commit", "-qm", "More")
    git(project, "mv", "a.py", "moved.py")
    (project / "b.py").write_text("x\n")
    (project / "script.py").unlink()
    (project / "new").touch()
    state = source.look(["moved.py"], project, {})[0]["repository"]
    assert (state["changed"], state["untracked"]) == (3, 1)
