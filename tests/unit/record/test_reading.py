"""Manifests of every format, in today's shape."""

import json
from pathlib import Path

import pytest

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


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"schema_version": 3, "attempts": []}))
    with pytest.raises(ValueError, match="it is of format 3, and this apptrain reads up to 2"):
        reading.read(path)
