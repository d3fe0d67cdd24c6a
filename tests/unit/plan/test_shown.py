"""Whether the image will show the paths that CMD names, as far as a login node can tell."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.plan import shown, sources
from entrypoint.plan.profile import Container, Profile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for what no image has: all but the current folder, beside it, is shown to nobody."""
    monkeypatch.setattr(shown, "EVERYWHERE", (tmp_path / "always",))
    for name in ("cwd", "data set", "home", "always", "data set/in"):
        (tmp_path / name).mkdir()
    (tmp_path / "data set/file").touch()
    (tmp_path / "cwd/my.py").touch()
    return tmp_path


def look(
    folder: Path,
    *command: str,
    profile: Profile | None = None,
    flags: Mapping[str, str | None] | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    settings = sources.resolve(flags or {}, {}, {}, "", command)
    given = {"HOME": str(folder / "home"), **(env or {})}
    shown.check(settings, profile or Profile(), given, folder / "cwd")


def site(**container: Any) -> Profile:
    return Profile(container=Container(**container))


@pytest.mark.parametrize(
    ("word", "path", "bind"),
    [
        ("{}/data set", "data set", "'{}/data set'"),
        ("{}/data set/file", "data set/file", "'{}/data set'"),
        ("--data={}/data set/in", "data set/in", "'{}/data set/in'"),
        ("{}/data set/in/new.txt", "data set/in", "'{}/data set/in'"),
        ("../data set/file", "cwd/../data set/file", "'{}/data set'"),
    ],
)
def test_a_path_that_is_here_alone_is_refused_with_the_folder_to_bind(
    folder: Path, word: str, path: str, bind: str
) -> None:
    with pytest.raises(BadInput) as refused:
        look(folder, "my.py", word.format(folder))
    assert str(refused.value) == (
        f"the image will not show {folder}/{path}, which CMD names: give --bind {bind.format(folder)}, or a line of "
        "APPTRAIN_BIND"
    )


@pytest.mark.parametrize(
    "word",
    [
        "{}/cwd/x",
        "{}/home/x",
        "{}/always",
        "/usr/bin",
        "/",
        "7",
        "",
        "{}/none/new.txt",
        "new.txt",
        "a" * 5000,
        "a\0b",
        "/etc",
        "--x=",
    ],
)
def test_what_is_shown_or_is_no_path_is_let_pass(folder: Path, word: str) -> None:
    look(folder, "my.py", word.format(folder))


@pytest.mark.parametrize(
    ("binds", "env"),
    [
        (["{}/data set"], {}),
        (["/x", "{}:/y"], {}),
        (["$DATA:/y:ro"], {"DATA": "{}/data set"}),
        (["${{DATA}}"], {"DATA": "{}"}),
        ([], {"APPTRAIN_BIND": "/x\n{}/data set"}),
        ([], {"APPTRAIN_BIND": "/x:{}/data set:ro"}),
    ],
)
def test_what_is_bound_is_shown_with_all_that_is_in_it(
    folder: Path, binds: list[str], env: dict[str, str]
) -> None:
    profile = site(binds=tuple(bind.format(folder) for bind in binds))
    given = {name: value.format(folder) for name, value in env.items()}
    look(folder, "my.py", f"{folder}/data set/file", profile=profile, env=given)


def test_a_variable_that_is_not_set_binds_nothing(folder: Path) -> None:
    with pytest.raises(BadInput):
        look(folder, "my.py", f"{folder}/data set/file", profile=site(binds=("$DATA",)))


def test_the_folders_of_the_run_the_venv_and_the_script_are_shown(folder: Path) -> None:
    word = f"{folder}/data set/file"
    for name in ("run-dir", "venv"):
        look(folder, "my.py", word, flags={name: "../data set"})
    look(folder, f"{folder}/data set/in.py", word)
    (folder / "cwd/link.py").symlink_to(folder / "data set/in.py")
    look(folder, "link.py", word)


@pytest.mark.parametrize(
    "container", [{"obey_binds": True}, {"options": ("--bind", "/x")}, {"options": ("-B/x",)}]
)
def test_a_site_whose_own_words_show_more_is_believed(folder: Path, container: dict[str, Any]) -> None:
    look(folder, "my.py", f"{folder}/data set/file", profile=site(**container))
    with pytest.raises(BadInput):
        look(folder, "my.py", f"{folder}/data set/file", profile=site(options=("--x", "-C")))
