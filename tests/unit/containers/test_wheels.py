"""Wheels, by their locks."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from containers import stacks, wheels
from containers.download import NoAnswer
from containers.stacks import BuildRefused


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """Of one package, with a hash that no file has."""
    file = tmp_path / "lock.txt"
    file.write_text(f"probe==1.0 --hash=sha256:{'0' * 64}\n")
    return file


def test_a_changed_wheel_hash_is_an_error_that_names_the_package(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "probe-1.0-py3-none-any.whl").write_bytes(b"no zip at all")
    for name, value in (("CONFIG_FILE", "/dev/null"), ("FIND_LINKS", str(folder)), ("NO_INDEX", "1")):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(BuildRefused) as refusal:
        wheels.fetch(lock, "3.13", "amd64", tmp_path / "cache", None)
    assert str(refusal.value) == (
        "probe==1.0: the index's wheel does not have the hash that lock.txt has: the file was changed "
        "there or on the way: use another index (PIP_INDEX_URL), or `make lock` if you trust it"
    )


def test_a_wheel_that_is_gone_is_an_error_with_both_versions(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "probe-2.0-py3-none-any.whl").write_bytes(b"newer")
    for name, value in (("CONFIG_FILE", "/dev/null"), ("FIND_LINKS", str(folder)), ("NO_INDEX", "1")):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(BuildRefused) as refusal:
        wheels.fetch(lock, "3.13", "amd64", tmp_path / "cache", None)
    assert str(refusal.value) == (
        "probe==1.0: locked in lock.txt, the index offers 2.0: take what it offers with `make lock`, "
        "or give an index that still has it: PIP_INDEX_URL=URL"
    )


FILL = (
    "fill the directory anew, with the APPTRAIN_CACHE of `make image-fetch` on a machine that has a network"
)


@pytest.mark.parametrize(
    ("held", "state"),
    [
        ("probe-1.0-py3-none-any.whl", "is not the locked file"),
        ("probe-2.0-py3-none-any.whl", "is not there"),
        ("readme", "is not there"),
    ],
)
def test_a_wheel_that_a_directory_lacks_is_named_with_the_directory(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch, held: str, state: str
) -> None:
    folder = tmp_path / "carried"
    folder.mkdir()
    (folder / held).write_bytes(b"cut")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(BuildRefused) as refusal:
        wheels.fetch(lock, "3.13", "amd64", tmp_path / "cache", folder)
    assert str(refusal.value) == f"OFFLINE={folder}: the wheel of probe==1.0 {state}: {FILL}"


def test_an_index_that_cannot_be_reached_offers_nothing_and_is_no_reason_for_other_locks(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself says then that no version was found."""
    settings = {"CONFIG_FILE": "/dev/null", "INDEX_URL": "http://127.0.0.1:1/simple", "RETRIES": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(NoAnswer) as refusal:
        wheels.fetch(lock, "3.13", "amd64", tmp_path / "cache", None)
    assert str(refusal.value) == (
        "pip could not fetch the wheels of lock.txt; the reason stands above: if no index was reached, set "
        "HTTPS_PROXY or PIP_INDEX_URL"
    )


def test_an_index_that_does_not_answer_uv_is_no_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = tmp_path / "my.txt"
    extra.write_text("probe\n")
    settings = {
        "INDEX_URL": "http://127.0.0.1:1/simple",
        "HTTP_RETRIES": "0",
        "NO_CONFIG": "1",
        "NO_CACHE": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"UV_{name}", value)
    with pytest.raises(NoAnswer) as refusal:
        wheels.lock_extra(stacks.find(""), "amd64", extra)
    said = str(refusal.value)
    assert said.startswith(f"EXTRA={extra}: uv could not ask the index: error: ")
    assert said.endswith(": set HTTPS_PROXY or UV_INDEX_URL")
    assert list(tmp_path.iterdir()) == [extra]


def test_an_extra_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildRefused) as refusal:
        wheels.lock_extra(stacks.find(""), "amd64", tmp_path / "my.txt")
    assert str(refusal.value) == f"EXTRA={tmp_path}/my.txt: there is no such file: give a requirements file"


def test_an_extra_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    extra = tmp_path / "my.txt"
    extra.write_bytes(b"# caf\xe9\nidna\n")
    with pytest.raises(BuildRefused) as refusal:
        stacks.check_extra(extra)
    said = f"EXTRA={extra} cannot be read (byte 5 is not UTF-8): give a text file that you may read"
    assert str(refusal.value) == said


def test_an_extra_that_conflicts_with_the_stack_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stacks.find("")
    extra = tmp_path / "my.txt"
    extra.write_text("torch==2.6.0  # the old one\n")
    # The pins contradict each other, so no index has to be asked.
    monkeypatch.setenv("UV_OFFLINE", "1")
    with pytest.raises(BuildRefused) as refusal:
        wheels.lock_extra(stack, "amd64", extra)
    assert str(refusal.value) == (
        f"EXTRA={extra}: torch==2.6.0 does not go with torch=={stack.torch} of stack cu132: "
        "ask for what the stack has, or choose another with STACK=NAME"
    )
    assert list(tmp_path.iterdir()) == [extra]


class Programs:
    """pip and uv, which only tell how they are called."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.env: dict[str, str] = {}
        self.status, self.said = 0, ""
        self.writes: Callable[[list[str]], None] = lambda _: None

    def run(self, command: list[str], env: Mapping[str, str] = os.environ, **_: Any) -> Any:
        self.calls.append(command)
        self.env = dict(env)
        self.writes(command)
        return SimpleNamespace(returncode=self.status, stderr=self.said)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    found = Programs()
    monkeypatch.setattr(subprocess, "run", found.run)
    return found


def values(command: list[str], option: str) -> list[str]:
    return [command[at + 1] for at, word in enumerate(command) if word == option]


@pytest.mark.parametrize(
    ("architecture", "name", "oldest"), [("amd64", "x86_64", 5), ("arm64", "aarch64", 17)]
)
def test_pip_is_asked_for_wheels_of_the_images_python_and_once(
    programs: Programs, tmp_path: Path, architecture: str, name: str, oldest: int
) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("a==1 --hash=sha256:0\n")
    folder = wheels.fetch(lock, "3.13", architecture, tmp_path / "cache", None)
    assert folder == tmp_path / "cache/wheels" / wheels.digest(lock)[:16]
    assert (folder / "complete").exists()
    (command,) = programs.calls
    assert command[:5] == [sys.executable, "-I", "-m", "pip", "download"]
    assert {"--require-hashes", "--no-deps", "--no-input", "--disable-pip-version-check"} <= set(command)
    assert "--no-index" not in command
    for option, found in (
        ("-r", [str(lock)]),
        ("--only-binary", [":all:"]),
        ("--implementation", ["cp"]),
        ("--python-version", ["3.13"]),
        ("--dest", [str(folder)]),
        ("--abi", ["cp313", "abi3", "none"]),
        (
            "--platform",
            [
                *(f"manylinux_2_{minor}_{name}" for minor in range(41, oldest - 1, -1)),
                f"manylinux2014_{name}",
            ],
        ),
    ):
        assert values(command, option) == found
    assert wheels.fetch(lock, "3.13", architecture, tmp_path / "cache", None) == folder
    assert len(programs.calls) == 1


def test_room_is_needed_for_wheels_that_are_not_there_and_for_pips_copy(tmp_path: Path) -> None:
    """Those of another lock do not count."""
    lock, cache = tmp_path / "lock.txt", tmp_path / "cache"
    lock.write_text("a==1\n")
    (cache / "wheels/other").mkdir(parents=True)
    (cache / "wheels/other/complete").touch()
    assert wheels.room(lock, cache, 7, None) == 14
    assert wheels.room(lock, cache, 7, tmp_path) == 7
    folder = cache / "wheels" / wheels.digest(lock)[:16]
    folder.mkdir()
    assert wheels.room(lock, cache, 7, None) == 14
    (folder / "complete").touch()
    assert wheels.room(lock, cache, 7, None) == 0


def test_pips_temporary_files_lie_in_the_cache_and_go(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    (tmp_path / "lock").touch()
    folder = wheels.fetch(tmp_path / "lock", "3.13", "amd64", tmp_path / "cache", None)
    assert Path(programs.env["TMPDIR"]).parent == folder
    assert [path.name for path in folder.iterdir()] == ["complete"]


def test_without_a_network_pip_looks_into_the_folders_that_have_wheels(
    programs: Programs, tmp_path: Path
) -> None:
    for name in ("b/x.whl", "a/y.whl", "a/z.whl", "c/readme"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "lock").touch()
    wheels.fetch(tmp_path / "lock", "3.13", "amd64", tmp_path / "cache", tmp_path)
    (command,) = programs.calls
    assert "--no-index" in command
    assert values(command, "--find-links") == [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        ("THESE PACKAGES DO NOT MATCH THE HASHES\n    a==1 from x:\n", BuildRefused, "a==1: the index's wheel does not "),
        ("THESE PACKAGES DO NOT MATCH THE HASHES\n", BuildRefused, "a package: the index's wheel does not "),
        ("(from versions: 2, 3)\nNo matching distribution found for a==1", BuildRefused, "a==1: locked in lock, the index offers 3: "),
        ("(from versions: none)\nNo matching distribution found for a==1", NoAnswer, "pip could not fetch the wheels of lock; the reason stands above: "),
        ("connection refused", NoAnswer, "pip could not fetch the wheels of lock; the reason stands above: "),
    ],
)  # fmt: skip
def test_what_pip_says_is_shown_and_comes_down_to_a_line(
    programs: Programs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    said: str,
    error: type[Exception],
    text: str,
) -> None:
    programs.status, programs.said = 1, said
    (tmp_path / "lock").touch()
    with pytest.raises(error) as refused:
        wheels.fetch(tmp_path / "lock", "3.13", "amd64", tmp_path / "cache", None)
    assert str(refused.value).startswith(text)
    assert capsys.readouterr().err == said
    assert not list(tmp_path.rglob("complete"))


def compiled(text: str) -> Callable[[list[str]], None]:
    def write(command: list[str]) -> None:
        Path(command[command.index("-o") + 1]).write_text(text)

    return write


def test_extra_packages_are_locked_beside_the_file_without_what_the_stack_has(
    programs: Programs, tmp_path: Path
) -> None:
    stack = stacks.find("")
    extra = tmp_path / "my.txt"
    extra.write_text("einops\n")
    has = next(iter(wheels.pinned(stack.lock("amd64"))))
    new = "einops==0.8 \\\n    --hash=sha256:1\nZ.z==1 \\\n    --hash=sha256:2\n"
    programs.writes = compiled(f"# a remark\n{has}==9 \\\n    --hash=sha256:0\n{new}")
    lock = wheels.lock_extra(stack, "amd64", extra)
    assert lock == tmp_path / "my.cu132-amd64.lock"
    head, _, body = lock.read_text().partition("\n")
    assert head == f"# For my.txt and {stack.lock('amd64').name}: {wheels.digest(extra, stack.lock('amd64'))}"
    assert body == f"# a remark\n{new}"
    (command,) = programs.calls
    assert command[:3] == [str(wheels.uv()), "pip", "compile"]
    assert {"--generate-hashes", "--no-header", "--no-emit-index-url", "--no-emit-find-links"} <= set(command)
    assert values(command, "--python-version") == [stack.base.python]
    assert values(command, "--python-platform") == ["x86_64-manylinux_2_28"]
    assert str(extra) in command
    assert wheels.lock_extra(stack, "amd64", extra) == lock
    assert len(programs.calls) == 1
    extra.write_text("einops>0\n")
    wheels.lock_extra(stack, "amd64", extra)
    assert len(programs.calls) == 2
    assert sorted(tmp_path.iterdir()) == [lock, extra]


def test_what_an_extra_file_includes_is_locked_anew_once_it_has_changed(
    programs: Programs, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    extra, base, more = tmp_path / "my.txt", tmp_path / "sub" / "base.txt", tmp_path / "sub" / "more.txt"
    extra.write_text("-r sub/base.txt\n-r none.txt\n")
    base.write_text("  --constraint=more.txt  # and back\n-r ../my.txt\n")
    more.write_text("einops<1\n")
    programs.writes = compiled("einops==0.8 \\\n    --hash=sha256:1\n")
    for calls, text in ((1, "einops<1\n"), (1, "einops<1\n"), (2, "einops<2\n")):
        more.write_text(text)
        wheels.lock_extra(stacks.find(""), "amd64", extra)
        assert len(programs.calls) == calls


def test_a_conflict_of_extra_packages_with_each_other_is_told_in_uvs_words(
    programs: Programs, tmp_path: Path
) -> None:
    extra = tmp_path / "my.txt"
    extra.write_text("a==1\na==2\n")
    programs.status, programs.said = 1, "No solution:\n  a==1 and a==2\n"
    with pytest.raises(BuildRefused) as refused:
        wheels.lock_extra(stacks.find(""), "amd64", extra)
    assert str(refused.value) == f"EXTRA={extra} does not go with stack cu132: No solution: a==1 and a==2"


def test_a_lock_of_extra_packages_that_cannot_be_written_is_refused(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = tmp_path / "my.txt"
    extra.write_text("einops\n")
    programs.writes = compiled("einops==0.8 \\\n    --hash=sha256:1\n")

    def read_only(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", read_only)
    with pytest.raises(BuildRefused) as refusal:
        wheels.lock_extra(stacks.find(""), "amd64", extra)
    assert str(refusal.value) == (
        f"EXTRA={extra}: its lock {tmp_path}/my.cu132-amd64.lock cannot be written (Permission denied): copy EXTRA "
        "into a folder where you may write"
    )
    assert list(tmp_path.iterdir()) == [extra]


URL = "flash-attn @ https://example.org/flash_attn-2.8-py3-none-any.whl"


@pytest.mark.parametrize("place", [URL, "./flash_attn-2.8-py3-none-any.whl"])
def test_an_extra_package_by_its_place_is_refused_and_gets_no_lock(
    programs: Programs, tmp_path: Path, place: str
) -> None:
    """Also if an earlier version has locked it."""
    stack, extra = stacks.find(""), tmp_path / "my.txt"
    extra.write_text(place)
    has = next(iter(wheels.pinned(stack.lock("amd64"))))
    locked = f"{has}==9 \\\n    --hash=sha256:0\n{place} \\\n    --hash=sha256:1\n"
    mark = f"# For my.txt and {stack.lock('amd64').name}: {wheels.digest(extra, stack.lock('amd64'))}\n"
    programs.writes = compiled(locked)
    for earlier in ("", mark + locked):
        (tmp_path / "my.cu132-amd64.lock").write_text(earlier)
        with pytest.raises(BuildRefused) as refused:
            wheels.lock_extra(stack, "amd64", extra)
        assert str(refused.value) == (
            f"EXTRA={extra}: {place} names a place, and the build has no network: give NAME==VERSION, and the page or "
            "directory that has the wheel in UV_FIND_LINKS and PIP_FIND_LINKS"
        )
        assert (tmp_path / "my.cu132-amd64.lock").read_text() == earlier


def test_an_extra_wheel_that_no_index_has_is_locked_and_fetched_from_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With uv and pip themselves; by its URL it is refused."""
    stack, wheel = stacks.find(""), tmp_path / "probe-1.0-py3-none-any.whl"
    info = {"METADATA": "Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n", "RECORD": ""}
    info["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in info.items():
            archive.writestr(f"probe-1.0.dist-info/{name}", text)
    for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("UV_OFFLINE", "UV_NO_INDEX", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, "1")
    extra = tmp_path / "my.txt"
    extra.write_text("probe==1.0\n")
    lock = wheels.lock_extra(stack, "amd64", extra)
    folder = wheels.fetch(lock, stack.base.python, "amd64", tmp_path / "cache", None)
    assert (folder / wheel.name).read_bytes() == wheel.read_bytes()
    extra.write_text(f"probe @ file://{wheel}\n")
    with pytest.raises(BuildRefused, match=r": probe @ file:///\S+ names a place, "):
        wheels.lock_extra(stack, "amd64", extra)


def test_uv_is_that_of_this_venv_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV", "")
    assert wheels.uv() == Path(sys.executable).with_name("uv")
    monkeypatch.setenv("UV", "/x/uv")
    assert wheels.uv() == Path("/x/uv")


def test_pins_are_read_by_the_names_that_indexes_compare(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("# a==9\nA_b.c==1.0 \\\n    --hash=sha256:0\nd==2; python_version>'3'\n")
    assert wheels.pinned(lock) == {"a-b-c": "1.0", "d": "2"}


def test_a_digest_is_over_all_files_in_order(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    one, other = (wheels.digest(*(tmp_path / name for name in names)) for names in ("ab", "ba"))
    assert one != other
    assert one == "fb8e20fc2e4c3f248c60c39bd652f3c1347298bb977b8b4d5903b85055620603"
