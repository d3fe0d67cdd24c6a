"""What this node looks up for the meeting: a resolver that hangs keeps no process."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.node import network
from entrypoint.node.network import Endpoint
from entrypoint.ranks.output import Console, Voice
from entrypoint.run import meeting
from tests.unit.meet.meeting import until
from tests.unit.run.test_given import given, our_node


def find_endpoint() -> Coroutine[Any, Any, Any]:
    one = given()
    return meeting.find_endpoint(one, one.plan)


def address_after_a_restart() -> Coroutine[Any, Any, Any]:
    return our_node(given("--on-failure=restart")).address(2)


@pytest.mark.parametrize("look", [find_endpoint, address_after_a_restart])
def test_a_look_at_the_network_that_hangs_keeps_nobody_who_leaves(
    look: Callable[[], Coroutine[Any, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of asyncio's own would: asyncio.run waits for those."""
    began, release, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(plan: Any, _: Any) -> Endpoint:
        began.set()
        release.wait(20)
        ended.set()
        return Endpoint(plan=plan, first="127.0.0.1", interface="lo", address="127.0.0.2")

    async def leave() -> None:
        looking = asyncio.create_task(look())
        await until(began.is_set)
        looking.cancel()
        await asyncio.wait([looking])

    monkeypatch.setattr(network, "find", hang)
    asyncio.run(leave())
    assert not ended.is_set()
    release.set()


def test_a_key_that_cannot_be_read_is_refused_by_a_node_alone_too(tmp_path: Path) -> None:
    one = given(
        *("--join-key-file", str(tmp_path / "missing")),
        APPTRAIN_EMBEDDED_NODELIST="127.0.0.2",
    )
    endpoint = Endpoint(plan=one.plan, first="127.0.0.2", interface="", address="")
    voice = Voice(console=Console(1, progress=False))
    with pytest.raises(BadInput, match=r"--join-key-file .*/missing cannot be read"):
        asyncio.run(meeting.meet(one, one.plan, endpoint, voice, None))
