"""What the process around torchrun's agent tells of its ranks, without torch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from entrypoint.ranks import agent
from entrypoint.ranks.forks import PLACES

ORDER: dict[str, Any] = {"errors": "/nowhere", "options": []}


class Said(list[dict[str, Any]]):
    """What is told of ranks, instead of a pipe."""

    def __call__(self, event: str, **fields: Any) -> None:
        self.append({"event": event, **fields})


def watched(script: str, said: Said) -> agent.Watched:
    """A rank that runs a shell script."""
    return agent.Watched(subprocess.Popen(["sh", "-c", script]), 5, said)  # type: ignore[arg-type]


def told(status: int, signum: int = 0) -> dict[str, Any]:
    return {"event": "ended", "rank": 5, "status": status, "signal": signum}


@pytest.mark.parametrize(("script", "status", "signum"), [("exit 3", 3, 0), ("kill -9 $$", 137, 9)])
def test_how_a_rank_ended_is_told_once(script: str, status: int, signum: int) -> None:
    said, began = Said(), time.time()
    rank = watched(script, said)
    code = -signum or status
    assert (rank.wait(30), rank.wait(), rank.poll()) == (code, code, code)
    (event,) = said
    assert began <= event.pop("time") <= time.time()
    assert event == told(status, signum)


def test_a_rank_that_runs_has_no_status() -> None:
    said = Said()
    rank = watched("exec sleep 60", said)
    assert rank.poll() is None
    with pytest.raises(subprocess.TimeoutExpired, match="rank 5"):
        rank.wait(0.05)
    assert said == []
    os.kill(rank.pid, signal.SIGTERM)
    assert rank.wait(30) == -signal.SIGTERM


def test_a_rank_that_ends_is_told_before_it_is_reaped_also_where_its_watch_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else torchrun's agent would end the others, and one of these would seem to have failed first."""
    monkeypatch.setattr(agent.Watched, "_watch", lambda _: None)
    said = Said()
    rank = watched("kill -9 $$", said)
    reaped = rank._process.poll
    order: list[str] = []

    def reap() -> int | None:
        order.extend(event["event"] for event in said)
        status: int | None = reaped()
        return status

    monkeypatch.setattr(rank._process, "poll", reap)
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    assert rank.poll() == -9
    assert order == ["ended"]
    assert [event | {"time": 0} for event in said] == [told(137, 9) | {"time": 0}]


def test_a_watch_that_comes_after_the_agent_says_nothing_more() -> None:
    said = Said()
    rank = watched("exit 4", said)
    assert rank.wait(30) == 4
    rank._watch()
    assert len(said) == 1


def test_an_error_of_many_lines_is_told_as_one_of_bounded_length() -> None:
    error = RuntimeError("the server socket has failed to listen\n\n  port: 29500 " + "x" * 600)
    said = agent._one_line(error)
    assert said.startswith("RuntimeError: the server socket has failed to listen port: 29500 xxx")
    assert len(said) == 500


def test_an_order_is_read_to_its_end_and_no_further() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"a": 1}\ngo')
    os.close(writer)
    assert [agent._line(reader) for _ in range(3)] == [b'{"a": 1}', b"go", b""]
    os.close(reader)


@pytest.mark.parametrize(
    ("error", "told", "unavailable"),
    [
        (None, "", False),
        (ValueError("x"), "ValueError: x", False),
        (OSError(13, "Permission denied"), "PermissionError: [Errno 13] Permission denied", False),
        ("DistNetworkError", "DistNetworkError: x", True),
        ("DistStoreError", "DistStoreError: x", True),
        ("RendezvousError", "RendezvousError: x", True),
    ],
)
def test_how_the_agent_ended_is_told_and_whether_another_port_may_help(
    error: Exception | str | None, told: str, unavailable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A string: torch's error of this name."""
    from torch import distributed
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    if isinstance(error, str):
        error = getattr(distributed, error, RendezvousError)("x")

    def ends(*_: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(agent, "_run", ends)
    monkeypatch.setattr(agent, "_end_with_parent", lambda *_: None)
    monkeypatch.setattr(agent, "NAME", Path("/proc/self/comm").read_text().strip())
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    reader, writer = os.pipe()
    os.write(writer, b"go\n")
    said = Said()
    try:
        with contextlib.ExitStack() as raises:
            if error is not None:
                raises.enter_context(pytest.raises(type(error)))
            agent._act(ORDER, said, reader, {})  # type: ignore[arg-type]
        for number in before:
            os.kill(os.getpid(), number)  # the warning to all processes of a job
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
    assert said == [{"event": "finished", "error": told, "unavailable": unavailable}]


@pytest.mark.parametrize("order", [b"", b"stop\n"])
def test_an_agent_that_is_not_told_to_go_starts_nothing(
    order: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_run", lambda *_: pytest.fail("it has started the ranks"))
    monkeypatch.setattr(agent, "NAME", Path("/proc/self/comm").read_text().strip())
    reader, writer = os.pipe()
    os.write(writer, order)
    os.close(writer)
    said = Said()
    agent._act(ORDER, said, reader, {})  # type: ignore[arg-type]
    os.close(reader)
    assert said == []


class Left(Exception):
    """In place of the end of this process."""


def test_without_its_parent_it_ends_all_ranks_also_those_that_do_not_heed_sigterm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(agent, "ORPHANS_GRACE", 0.05)
    monkeypatch.setattr(os, "_exit", leave)
    heedless = "trap '' TERM; echo ready; while :; do sleep 0.01; done"
    ranks = [
        subprocess.Popen(["sh", "-c", text], start_new_session=True, stdout=subprocess.PIPE)
        for text in ("echo ready; exec sleep 60", heedless, "echo ready")
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.read(6) == b"ready\n"
    assert ranks[2].wait() == 0
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(Left, match="1"):
        agent._end_with_parent(reader, {number: rank.pid for number, rank in enumerate(ranks)})
    assert [rank.wait() for rank in ranks] == [-signal.SIGTERM, -signal.SIGKILL, 0]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.close()
    os.close(reader)


class Forks:
    """What a template finds out in forks of itself."""

    PLACES = PLACES

    def __init__(
        self, *, gpus: str = "0", threads: tuple[int, ...] = (1,), cuda: str = "open", why: str = ""
    ) -> None:
        self._gpus, self._cuda, self._why = gpus, cuda, why
        self._threads = list(threads)
        self.loaded: set[str] = set()

    def asked_in_fork(self, question: Any, _: int | None = None) -> str:
        return self._cuda if question is agent._open_cuda else self._gpus

    def threads(self) -> int:
        """The last number stays."""
        return self._threads.pop(0) if len(self._threads) > 1 else self._threads[0]

    def why_not(self, _: list[str], loaded: set[str]) -> str:
        self.loaded = loaded
        return self._why


def stand_in() -> ModuleType:
    """For torch, of which a template asks one question here."""
    found = ModuleType("torch")
    found.cuda = SimpleNamespace(device_count=int)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("forks", "why"),
    [
        (Forks(), ""),
        (Forks(gpus=""), ""),
        (Forks(gpus="4"), ""),
        (
            Forks(gpus="4", cuda="RuntimeError: x"),
            "a fork of a process that has imported torch cannot open CUDA here",
        ),
        (Forks(gpus="0", cuda="RuntimeError: x"), ""),
        (Forks(threads=(1, 3)), "--preload mine starts threads: leave it out"),
        (Forks(threads=(1, 3, 1)), ""),  # they end with a fork
        (Forks(threads=(3, 3)), ""),
        (Forks(why="options of Python stand before the script"), "options of Python stand before the script"),
    ],
)
def test_what_speaks_against_forks_of_this_process(
    monkeypatch: pytest.MonkeyPatch, forks: Forks, why: str
) -> None:
    imported: list[list[str]] = []
    monkeypatch.setattr(agent, "_import", imported.append)
    at_start = dict(sys.modules)
    at_start.pop("torch", None)
    monkeypatch.setitem(sys.modules, "torch", stand_in())
    order: dict[str, Any] = {"store": None, "counts_gpus": True, "command": ["script.py"]}
    order |= {"preload": ["mine"], "cores": {}}
    found, seen = agent._fit_for_forks(forks, order, at_start)
    assert (found, seen) == (why, forks._gpus)
    assert imported == [[], ["mine"]]  # torch, and then these
    assert forks.loaded == {"torch"}


@pytest.mark.parametrize(
    ("cores", "why"),
    [({}, ""), ({"0": [0]}, "OMP_PLACES is set, and OpenMP has counted cores as torch was imported")],
)
def test_places_of_threads_speak_against_forks_with_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, cores: dict[str, list[int]], why: str
) -> None:
    monkeypatch.setattr(agent, "_import", lambda _: None)
    monkeypatch.setitem(sys.modules, "torch", stand_in())
    monkeypatch.setenv("OMP_PLACES", "cores")
    order = {"store": None, "counts_gpus": False, "preload": [], "command": ["script.py"], "cores": cores}
    assert agent._fit_for_forks(Forks(gpus="2"), order, {}) == (why, "")  # nobody asked for them


def test_what_the_launcher_reads_ahead_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    imports = ModuleType("apptrain_imports")
    vars(imports)["read_ahead"] = lambda: asked.append("again")
    monkeypatch.setitem(sys.modules, "apptrain_imports", imports)

    def import_module(name: str) -> None:
        asked.append(name)
        imports.read_ahead()

    monkeypatch.setattr("importlib.import_module", import_module)
    agent._import(["mine"])
    assert asked == ["torch", "mine"]


def test_a_preload_that_cannot_be_imported_speaks_against_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def imports(names: list[str]) -> None:
        if names:
            raise ImportError(f"No module named {names[0]!r}")

    monkeypatch.setattr(agent, "_import", imports)
    monkeypatch.setitem(sys.modules, "torch", stand_in())
    order = {"store": None, "counts_gpus": True, "preload": ["mine", "yours"], "command": ["script.py"]}
    assert agent._fit_for_forks(Forks(gpus="2"), order, {}) == (
        "--preload mine,yours: No module named 'mine': correct it",
        "2",
    )
