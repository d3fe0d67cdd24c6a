"""Manifests of every format, in today's shape."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.record import reading

FIRST = {"attempt": 0, "scheduler": "slurm", "nodes": ["a", "b"], "command": ["x.py"], "image": None}


def test_the_first_format_is_read_in_todays_shape(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"format": 1, "attempts": [FIRST]}))
    found = reading.read(path)
    schema = json.loads((Path(__file__).parents[3] / "docs/manifest.schema.json").read_text())
    assert list(found) == schema["required"]
    assert found["command"] == ["x.py"]
    assert [node["name"] for node in found["nodes"]] == ["a", "b"]
    assert found["attempts"] == [FIRST]
    assert (found["code"], found["config"], found["results"]) == (None, None, None)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"command": 1}, "command is 1, not a list"),
        ({"command": ["x", None]}, "command[1] is null, not a text"),
        ({"config": []}, "config is a list, not an object"),
        ({"attempts": 7}, "attempts is 7, not a list"),
        ({"attempts": [FIRST, 7]}, "attempts[1] is 7, not an object"),
        ({"attempts": [FIRST | {"nodes": "a\x1b"}]}, 'attempts[0].nodes is "a?", not a list'),
        ({"attempts": [FIRST | {"world_size": True}]}, "attempts[0].world_size is true, not a whole number"),
        ({"environment": {"values": {"TZ": 1}}}, "environment.values.TZ is 1, not a text"),
        ({"schema_version": "2"}, 'schema_version is "2", not a whole number'),
        ({"command": {"a": 1}}, "command is an object, not a list"),
        ({"command": "x" * 50}, f'command is "{"x" * 40}", not a list'),
        ({"seeds": {"a\x1b": []}}, "seeds.a? is a list, not a text or a number"),
        (
            {"attempts": [FIRST | {"status": -1}]},
            "attempts[0].status is -1, not a whole number from 0 to 9007199254740992",
        ),
        (
            {"attempts": [FIRST | {"status": 2**53 + 1}]},
            "attempts[0].status is 9007199254740993, not a whole number",
        ),
        (
            {"attempts": [FIRST | {"status": 10**60}]},
            f"attempts[0].status is 1{'0' * 39}, not a whole number",
        ),
    ],
)
def test_a_field_of_another_kind_is_named(tmp_path: Path, keys: dict[str, object], why: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"attempts": [FIRST], **keys}))
    with pytest.raises(ValueError, match=re.escape(why)):
        reading.read(path)


def test_a_number_may_be_as_large_as_a_float_counts(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"attempts": [FIRST | {"status": 2**53}]}))
    assert reading.read(path)["attempts"][0]["status"] == 2**53


def test_of_what_the_attempts_alone_tell_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"attempts": [FIRST, FIRST | {"nodes": ["c"], "command": ["y.py"]}]}))
    found = reading.read(path)
    assert (found["command"], found["nodes"]) == (["y.py"], [{"name": "c", "plan": None}])


@pytest.mark.parametrize(("size", "is_read"), [(8 << 20, True), ((8 << 20) + 1, False)])
def test_a_manifest_has_at_most_eight_mebibytes(tmp_path: Path, size: int, is_read: bool) -> None:
    text = json.dumps({"attempts": [], "x": ""})
    (tmp_path / "manifest.json").write_text(text.replace('""', f'"{"a" * (size - len(text))}"'))
    if is_read:
        assert reading.of_run(tmp_path, "read")["attempts"] == []
        return
    with pytest.raises(BadInput, match="it has more than 8388608 bytes") as refused:
        reading.of_run(tmp_path, "read")
    assert refused.value.id == "manifest-damaged"


def test_a_manifest_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b'{"attempts": "\xff"}')
    with pytest.raises(BadInput) as refused:
        reading.of_run(tmp_path, "read")
    assert str(refused.value) == (
        f"{tmp_path}/manifest.json is no manifest: it is no text (byte 14 is not UTF-8): "
        "take it from a copy, or give another run"
    )


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="give a run directory, such as runs/NAME-ID") as refused:
        reading.of_run(tmp_path / "nowhere", "read")
    assert refused.value.id == "run-missing"


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"schema_version": 3, "attempts": []}))
    with pytest.raises(ValueError, match="it is of format 3, and this apptrain reads up to 2"):
        reading.read(path)


def test_of_a_folder_with_runs_the_newest_is_named(tmp_path: Path) -> None:
    for name, at in (("old", 1), ("new", 3), ("middle", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
        os.utime(tmp_path / name / "manifest.json", (at, at))
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(BadInput) as refused:
        reading.of_run(tmp_path, "compared")
    assert str(refused.value) == (
        f"{tmp_path} cannot be compared: manifest.json: No such file or directory: give a run directory, such as {tmp_path}/new"
    )
    assert reading.such_as(tmp_path / "no run") == reading.such_as(tmp_path / "file") == "runs/NAME-ID"


def test_a_run_that_is_closed_to_us_is_not_said_to_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def closed(path: Any, **options: Any) -> os.stat_result:
        """Its parent tells what it is, and it tells nothing of what is in it."""
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", closed)
    with pytest.raises(BadInput) as refused:
        reading.check_folder(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path} cannot be read (Permission denied): check the path, and that you may read it"
    )
