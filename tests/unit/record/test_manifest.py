"""What `manifest.json` says of each attempt, and what becomes of something else that stands there."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from entrypoint.job.rundir import RunDirectory
from entrypoint.node.gpu import ImageStack
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.record import hardware, source
from entrypoint.record.manifest import Manifest, kept_plan
from entrypoint.record.reading import close
from tests.unit.scene import planned

CU132 = ImageStack(name="cu132", cuda="13.2", lock="5e1f", driver="580", capabilities=())
PLAN = planned()


SCHEMA = json.loads((Path(__file__).parents[3] / "docs/manifest.schema.json").read_text())
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "HOME", Path("/nonexistent"))


def manifest(run: RunDirectory) -> dict[str, Any]:
    found = json.loads(run.manifest.read_text())
    jsonschema.validate(found, SCHEMA)
    assert run.manifest.stat().st_mode & 0o777 == 0o600
    return dict(found)


def attempts(run: RunDirectory) -> list[dict[str, object]]:
    return list(manifest(run)["attempts"])


Do = Callable[[Manifest], Awaitable[None]]


def during(
    run: RunDirectory,
    *then: Do,
    stack: ImageStack | None = None,
    image: str = "",
    command: str = "script.py",
    **env: str,
) -> list[str]:
    """What was said of an attempt that was to be added, and of what followed."""
    said: list[str] = []

    async def follow() -> None:
        it = Manifest(run.path, env, said.append)
        await it.tell_node(PLAN)
        plan = replace(PLAN, command=tuple(command.split()))
        await it.record(plan, stack, image_id=image, versions={"torch": "2.15.0"})
        for do in then:
            await do(it)

    asyncio.run(follow())
    return said


def record(run: RunDirectory, stack: ImageStack | None = None, image: str = "") -> list[str]:
    return during(run, stack=stack, image=image)


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
        "ended": None,
        "status": None,
        "scheduler": "embedded",
        "job_id": "7",
        "nodes": ["127.0.0.2", "127.0.0.3"],
        "nproc_per_node": 2,
        "world_size": 4,
        "mode": "torchrun",
        "device": "cpu",
        "no_python": False,
        "threads": PLAN.env["OMP_NUM_THREADS"],
        "transport": "gloo over lo",
        "command": ["script.py"],
        "venv": None,
        "image": None,
        "versions": {"torch": "2.15.0"},
    }
    assert second == first | {
        "image": {"id": "7be444fb", "stack": "cu132", "cuda": "13.2", "lock_sha256": "5e1f"}
    }
    not_promised = [
        "the image's packages are locked",
        "driver and GPUs were checked against the image",
        "the image has the libraries that NCCL needs for InfiniBand",
    ]
    assert foreign == first | {"image": {"id": "7be444fb", "not_promised": not_promised}}


def test_what_is_known_once_the_ranks_are_there_is_said_of_this_attempt_alone(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 1)
    record(run)
    start = {"plan": 0.2, "nodes": 1.5}
    assert during(run, lambda it: it.note(PLAN, start=start)) == []
    first, second = attempts(run)
    assert "start" not in first
    assert second["start"] == start
    found = manifest(run)
    assert found["code"]["program"] is None
    (kind,) = found["hardware"]
    assert kind.pop("nodes") == ["127.0.0.2"]
    assert kind == hardware.look()


def test_changes_are_those_of_the_last_attempt_and_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path, 1)
    code = {"program": None, "repository": None, "apptrain": {"version": "1", "repository": None}}
    for diffs in ({"code.diff": "+a\n"}, {"apptrain.diff": "+b\n"}):
        monkeypatch.setattr(source, "look", lambda *_, diffs=diffs: (code, diffs))
        during(run, lambda it: it.note(PLAN, start={}))
        (found,) = tmp_path.glob("*.diff")
        assert ({found.name: found.read_text()}, found.stat().st_mode & 0o777) == (diffs, 0o600)


def test_the_network_is_that_of_nccls_log_if_somebody_looked(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 1)
    during(run, lambda it: it.end(PLAN, 0, alone=False, network="IB"))
    assert attempts(run)[0]["transport"] == "nccl over IB"


def test_of_gpus_no_network_is_claimed_that_nobody_has_seen(tmp_path: Path) -> None:
    run, said = RunDirectory(tmp_path, 1), Manifest(tmp_path, {}, lambda _: None)
    asyncio.run(record_on(said, replace(PLAN, device="cuda")))
    assert attempts(run)[0]["transport"] == "nccl"


async def record_on(it: Manifest, plan: LaunchPlan) -> None:
    await it.record(plan, None, image_id="", versions={})


def test_the_digest_of_what_is_in_the_image_comes_by_its_variable(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 1)
    during(run, stack=CU132, image="7be444fb", APPTRAIN_IMAGE_PARTITION="5e" * 32)
    assert manifest(run)["image"]["partition_sha256"] == "5e" * 32


@pytest.mark.parametrize("alone", [False, True])
def test_the_end_says_when_and_how(tmp_path: Path, alone: bool) -> None:
    run = RunDirectory(tmp_path, 1)
    assert during(run, lambda it: it.end(PLAN, 75, alone=alone)) == []
    (found,) = attempts(run)
    assert datetime.fromisoformat(str(found["ended"])) >= datetime.fromisoformat(str(found["began"]))
    assert found["status"] == 75
    assert ("process_group" in found) == alone


def test_an_end_that_the_first_node_could_not_tell_is_told_by_who_concludes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 1)
    record(run)
    for attempt, status in ((0, 1), (1, 137), (1, 64)):
        close(tmp_path, attempt, status)
    (found,) = attempts(run)
    assert found["status"] == 137
    assert datetime.fromisoformat(str(found["ended"])).tzinfo is not None


def test_an_end_that_the_first_node_has_told_stays(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 1)
    during(run, lambda it: it.end(PLAN, 75, alone=False))
    before = run.manifest.read_text()
    close(tmp_path, 1, 1)
    assert run.manifest.read_text() == before


@pytest.mark.parametrize("text", [None, "[]", '{"attempts": [{"attempt": 1}]}'])
def test_nothing_else_is_closed(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    close(tmp_path, 1, 137)
    assert [path.read_text() for path in tmp_path.iterdir()] == ([] if text is None else [text])


def test_an_attempt_that_left_nothing_takes_nothing_from_those_before_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 1)
    (tmp_path / "config.json").write_text('{"attempt": 1, "config": {"seed": 7}}')
    (tmp_path / "result.json").write_text('{"accuracy": 0.5}')
    during(run, lambda it: it.end(PLAN, 0, alone=False))
    during(run, lambda it: it.end(replace(PLAN, attempt=2), 1, alone=False))
    found = manifest(run)
    assert (found["config"], found["seeds"], found["results"]) == (
        {"seed": 7},
        {"seed": 7},
        {"accuracy": 0.5},
    )


@pytest.mark.parametrize("of", [0, 1])
def test_what_the_reference_program_leaves_is_taken_if_it_is_of_this_attempt(tmp_path: Path, of: int) -> None:
    run = RunDirectory(tmp_path, 1)
    left = {
        "attempt": of,
        "config": {"seed": 7},
        "identity": {"threads": 1},
        "checkpoint": {"path": "checkpoints/step-00000020", "step": 20},
    }
    (tmp_path / "config.json").write_text(json.dumps(left))
    (tmp_path / "result.json").write_text('{"accuracy": 0.5}')
    during(run, lambda it: it.end(PLAN, 0, alone=False))
    found = manifest(run)
    if of == 1:
        assert (found["config"], found["seeds"]) == ({"seed": 7}, {"seed": 7})
        assert found["results"] == {"accuracy": 0.5}
        assert found["attempts"][0]["checkpoint"] == left["checkpoint"]
        assert found["attempts"][0]["identity"] == {"threads": 1}
    else:
        assert (found["config"], found["seeds"], found["results"]) == (None, {}, None)


def test_no_secret_is_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 1)
    (tmp_path / "config.json").write_text(
        json.dumps({"attempt": 1, "config": {"data.path": f"s3://{TOKEN}@a/b"}})
    )
    during(
        run,
        lambda it: it.note(PLAN, start={}),
        lambda it: it.end(PLAN, 0, alone=False),
        command=f"script.py --hub {TOKEN} --password xyz-7-xyz --wandb=pqr-8-pqr",
        WANDB_API_KEY="pqr-8-pqr",
        HF_TOKEN="stu-9-stu",
        NCCL_DEBUG=f"INFO{TOKEN}",
        OMP_NUM_THREADS="3",
    )
    text = run.manifest.read_text()
    for secret in (TOKEN, "xyz-7-xyz", "pqr-8-pqr", "stu-9-stu"):
        assert secret not in text
    found = manifest(run)
    assert found["environment"]["values"]["OMP_NUM_THREADS"] == PLAN.env["OMP_NUM_THREADS"]
    assert {"HF_TOKEN", "NCCL_DEBUG", "WANDB_API_KEY"} <= {*found["environment"]["names"]}
    assert found["command"][-1] == "--wandb=<secret WANDB_API_KEY>"


def test_of_what_somebody_has_set_for_the_ranks_the_names_are_kept_and_no_value(tmp_path: Path) -> None:
    env = {"STEPS": "abc-5-abc", "HF_TOKEN": "x", "OMP_NUM_THREADS": "3", "HOME": "/h"}
    it = Manifest(tmp_path, env, print, wished=["HF_TOKEN", "OMP_NUM_THREADS", "STEPS"])
    asyncio.run(record_on(it, PLAN))
    found = manifest(RunDirectory(tmp_path, 1))["environment"]
    assert found["passed"] == ["STEPS"]
    assert {"HF_TOKEN", "HOME", "STEPS"} <= {*found["names"]}
    assert "abc-5-abc" not in json.dumps(found)


def test_the_plan_is_kept_with_the_command_of_the_manifest_and_runs_as_it_was(tmp_path: Path) -> None:
    words = ("my.py", "--password", "xyz-7-xyz", "--lr=0.1", "--token", "-pqr-8-pqr", "pqr-8-pqr")
    env = {"HF_TOKEN": "pqr-8-pqr", "NCCL_AUTH_TOKEN": "stu-9-stu"}
    plan = replace(PLAN, command=words, env={**PLAN.env, "X_SECRET": "vwx-1-vwx"})
    kept = kept_plan(plan, env)
    asyncio.run(record_on(Manifest(tmp_path, env, print), plan))
    found = manifest(RunDirectory(tmp_path, 1))
    assert kept["argv"] == [*plan.argv[: -len(words)], *found["command"]]
    assert kept["env"] == dict(PLAN.env) | {"X_SECRET": "<secret>"}
    assert kept | {"argv": plan.argv, "env": dict(plan.env)} == plan.to_json()
    assert plan.argv[-len(words) :] == list(words)
    for secret in ("xyz-7-xyz", "pqr-8-pqr", "stu-9-stu", "vwx-1-vwx"):
        assert secret not in json.dumps(kept) + json.dumps(found)
    assert "NCCL_AUTH_TOKEN" in found["environment"]["names"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"attempts": {}}', '{"attempts": [7]}', '{"format": 1, "att']
)
def test_what_is_no_manifest_stays(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path, 1)
    run.manifest.write_text(text)
    first, second = during(run, lambda it: it.end(PLAN, 0, alone=False))
    assert first == second
    assert first.startswith(f"{run.manifest} does not tell of this attempt: ")
    assert first.endswith(": going on")
    assert run.manifest.read_text() == text


def test_of_an_attempt_that_was_not_added_nothing_is_said(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, 1)
    record(run)
    before = run.manifest.read_text()
    said: list[str] = []
    asyncio.run(Manifest(run.path, {}, said.append).end(PLAN, 69, alone=False))
    asyncio.run(Manifest(run.path, {}, said.append).note(PLAN, start={}))
    assert said == []
    assert run.manifest.read_text() == before
