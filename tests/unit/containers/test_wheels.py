"""Wheels, by their locks."""

from pathlib import Path

import pytest

from containers import stacks, wheels
from containers.stacks import BuildRefused


def test_a_changed_wheel_hash_is_an_error_that_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "probe-1.0-py3-none-any.whl").write_bytes(b"no zip at all")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"probe==1.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(BuildRefused) as refusal:
        wheels.fetch(lock, "3.13", "amd64", tmp_path / "cache", folder)
    assert str(refusal.value) == (
        "probe==1.0: the index's wheel does not have the hash that lock.txt has: the file was changed "
        "there or on the way: use another index (PIP_INDEX_URL), or `make lock` if you trust it"
    )


def test_a_wheel_that_is_gone_is_an_error_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "probe-2.0-py3-none-any.whl").write_bytes(b"newer")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"probe==1.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(BuildRefused) as refusal:
        wheels.fetch(lock, "3.13", "amd64", tmp_path / "cache", folder)
    assert str(refusal.value) == (
        "probe==1.0: locked in lock.txt, the index offers 2.0: take what it offers with `make lock`, "
        "or give an index that still has it: PIP_INDEX_URL=URL"
    )


def test_an_extra_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildRefused) as refusal:
        wheels.lock_extra(stacks.find(""), "amd64", tmp_path / "my.txt")
    assert str(refusal.value) == f"EXTRA={tmp_path}/my.txt: there is no such file: give a requirements file"


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
