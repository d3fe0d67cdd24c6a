"""What `manifest.json` says of each attempt, and what becomes of something else that stands there."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from entrypoint.job.manifest import Manifest
from entrypoint.job.rundir import RunDirectory
from entrypoint.node.gpu import Stack
from tests.unit.scene import planned

CU132 = Stack(name="cu132", cuda="13.2", lock="5e1f", driver="580", capabilities=())


def attempts(run: RunDirectory) -> list[dict[str, object]]:
    found = json.loads(run.manifest.read_text())
    assert found.keys() == {"format", "attempts"}
    assert found["format"] == 1
    assert run.manifest.stat().st_mode & 0o777 == 0o600
    return list(found["attempts"])


def record(run: RunDirectory, stack: Stack | None = None, image: str = "") -> list[str]:
    """What was said of an attempt that was to be added."""
    said: list[str] = []
    asyncio.run(
        Manifest(run, said.append).record(planned(), stack, image_id=image, versions={"torch": "2.15.0"})
    )
    return said


def note(run: RunDirectory, **found: object) -> list[str]:
    said: list[str] = []
    asyncio.run(Manifest(run, said.append).note(**found))
    return said


def test_each_attempt_adds_what_it_ran(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 1)
    for image, stack in (("", None), ("7be444fb", CU132), ("7be444fb", None)):
        assert record(run, stack, image) == []
    first, second, foreign = attempts(run)
    for one in (first, second, foreign):
        assert (
            timedelta(0)
            <= datetime.now(UTC) - datetime.fromisoformat(str(one.pop("began")))
            < timedelta(hours=1)
        )
    assert first == {
        "attempt": 1,
        "scheduler": "embedded",
        "job_id": "7",
        "nodes": ["127.0.0.2", "127.0.0.3"],
        "nproc_per_node": 2,
        "world_size": 4,
        "mode": "torchrun",
        "device": "cpu",
        "command": ["script.py"],
        "venv": None,
        "image": None,
        "versions": {"torch": "2.15.0"},
    }
    assert second == first | {
        "image": {"id": "7be444fb", "stack": "cu132", "cuda": "13.2", "lock_sha256": "5e1f"}
    }
    not_promised = ["the image's packages are locked", "driver and GPUs were checked against the image"]
    assert foreign == first | {"image": {"id": "7be444fb", "not_promised": not_promised}}


@pytest.mark.parametrize("found", [{"process_group": None}, {"start": {"plan": 0.2, "nodes": 1.5}}])
def test_what_is_found_out_later_is_said_of_the_last_attempt_alone(
    tmp_path: Path, found: dict[str, object]
) -> None:
    run = RunDirectory(tmp_path, 1)
    for _ in range(2):
        record(run)
    first, second = attempts(run)
    assert note(run, **found) == []
    assert attempts(run) == [first, second | found]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"attempts": {}}', '{"attempts": [7]}', '{"format": 1, "att']
)
def test_what_is_no_manifest_stays(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path, 1)
    run.manifest.write_text(text)
    for said in (record(run), note(run, process_group=None)):
        (line,) = said
        assert line.startswith(f"{run.manifest} does not tell of this attempt: ")
        assert line.endswith(": going on")
    assert run.manifest.read_text() == text


@pytest.mark.parametrize("text", [None, '{"format": 1, "attempts": []}'])
def test_of_no_attempt_nothing_is_said(tmp_path: Path, text: str | None) -> None:
    run = RunDirectory(tmp_path, 1)
    if text:
        run.manifest.write_text(text)
    assert note(run, start={}) == [
        f"{run.manifest} does not tell of this attempt: it has no attempts: going on"
    ]
