"""The cheap part before a launch: who looks, what is refused, and how it is said."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.doctor import facts, preflight
from tests.unit.doctor.nodes import WHOLE, node, room


def plan(**changes: Any) -> Any:
    values = {"node": "a", "nnodes": 2, "local_rank": None, "device": "cuda", "run_dir": "/scratch/run"}
    return SimpleNamespace(**{**values, **changes})


def settings(**values: Any) -> Any:
    known = {"fabric": None, "no-preflight": False, "doctor": False, **values}
    return SimpleNamespace(value=known.__getitem__)


def look(monkeypatch: pytest.MonkeyPatch, found: facts.NodeFacts, plan: Any, settings: Any) -> Any:
    asked: list[object] = []

    def gather(*arguments: object) -> facts.NodeFacts:
        asked.append(arguments)
        return found

    monkeypatch.setattr(facts, "gather", gather)
    result = asyncio.run(preflight.look(plan, settings, {}))
    return result, asked


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (plan(nnodes=1), settings()),
        (plan(local_rank=1), settings()),
        (plan(), settings(**{"no-preflight": True})),
        (plan(), settings(doctor=True)),
    ],
)
def test_nobody_looks(monkeypatch: pytest.MonkeyPatch, plan: Any, settings: Any) -> None:
    assert look(monkeypatch, WHOLE, plan, settings) == (None, [])


def test_a_node_without_a_fault_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = look(monkeypatch, WHOLE, plan(local_rank=0), settings(fabric="infiniband"))
    assert found.findings == {}
    assert 0 <= found.seconds < 60
    ((name, folders, fabric, env),) = asked
    assert (name, fabric, env) == ("a", "infiniband", {})
    assert list(folders) == ["run directory", "TMPDIR", "/dev/shm"]


def test_on_cpus_neither_the_fabric_nor_shared_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = node(ports=(), limits={**WHOLE.limits, "memlock": 1})
    found, ((_, folders, fabric, _),) = look(
        monkeypatch, lacking, plan(device="cpu"), settings(fabric="infiniband")
    )
    assert (found.findings, fabric, list(folders)) == ({}, "", ["run directory", "TMPDIR"])


def test_a_full_run_directory_is_refused_with_the_node_and_the_way_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(BadInput) as refused:
        look(monkeypatch, room("run directory", refused="No space left on device"), plan(), settings())
    assert str(refused.value) == (
        "a: run directory /scratch/run takes no file of 1 MiB (No space left on device): remove what is not needed "
        "there (df -h, df -i, quota), or give another with --run-dir (--no-preflight goes on)"
    )


def test_what_holds_the_look_is_a_finding_and_holds_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def held(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(preflight, "run_in_thread", held)
    found = asyncio.run(preflight.look(plan(), settings(), {}))
    assert found is not None
    assert found.findings == {"room": "no answer in 5 s: look at its file systems"}


def test_findings_are_told_by_node_and_the_last_line_says_what_it_took() -> None:
    assert preflight.in_words({}, 3, 0.044) == ["preflight: 3 nodes, nothing found, 0.04 s"]
    found = {"a": {"nofile": "x: y"}, "b": {"nofile": "x: y", "memlock": "z"}}
    assert preflight.in_words(found, 3, 0.5) == [
        "preflight: a, b: x: y",
        "preflight: b: z",
        "preflight: 3 nodes, 2 findings, 0.50 s",
    ]
