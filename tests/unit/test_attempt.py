"""What one attempt on a node tells the meeting of the nodes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entrypoint import cli, join
from entrypoint.attempt import Attempt
from entrypoint.errors import Unavailable
from entrypoint.output import own_consoles

NODE = {
    "APPTRAIN_EMBEDDED_JOB_ID": "7",
    "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.[1-2]",
    "APPTRAIN_EMBEDDED_NODENAME": "127.0.0.2",
}


def attempt(run_dir: Path, env: dict[str, str], *, before: Attempt | None = None) -> Attempt:
    """Of the second of two nodes."""
    words = ["launch", "--mode", "exec", "--no-python", "--device", "cpu", "--run-dir", str(run_dir)]
    given = vars(cli.parser().parse_args(words))
    given.pop("command_name")
    plan, settings = cli.resolve(NODE | env, given, ["true"], hostname=None)

    async def hold(*, again: bool) -> None:
        raise AssertionError(f"the second node holds the run directory, {again=}")

    return Attempt(plan, settings, NODE | env, own_consoles({}), None, before, hold)


def where_node_0_waits(one: Attempt, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """As the meeting is told it."""
    found = []

    async def meet(*_: object, begun: Callable[[], str | None], **__: Any) -> None:
        found.append(begun())
        raise Unavailable("nobody came")

    monkeypatch.setattr(join, "meet", meet)
    with pytest.raises(Unavailable, match="nobody came"):
        asyncio.run(one.run())
    return found[0]


def test_where_node_0_waits_is_read_from_its_plan_unless_that_may_be_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.0.json").write_text(
        json.dumps({"attempt": 0, "rendezvous": {"local_addr": "127.0.0.9"}})
    )
    counted = {"APPTRAIN_ATTEMPT": "0"}
    assert where_node_0_waits(attempt(tmp_path, counted), monkeypatch) == "127.0.0.9"
    assert where_node_0_waits(attempt(tmp_path, {}), monkeypatch) is None
    again = attempt(tmp_path, counted, before=attempt(tmp_path, counted))
    assert where_node_0_waits(again, monkeypatch) is None
