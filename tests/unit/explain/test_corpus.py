"""`apptrain explain` with a corpus of logs and job scripts, as tests/recordings/explain/README says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from entrypoint.explain import command

CORPUS = Path(__file__).resolve().parents[2] / "recordings/explain"
NEAR = 3
"""Lines that a finding may be away from its trap."""


def rows(kind: str) -> list[Any]:
    found = []
    for part in ("open", "blind", *(f"blind{number}" for number in range(2, 11)), "adverse", "hard"):
        expected = yaml.safe_load((CORPUS / part / "expected.yaml").read_text())[kind]
        for name, row in expected.items():
            found.append(pytest.param(CORPUS / part / kind / name, row, id=f"{part}-{name}"))
    return found


def explained(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    command.main(str(path), as_json=True)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def told(cause: dict[str, Any]) -> str:
    return " ".join(str(cause.get(key, "")) for key in ("id", "title", "why"))


@pytest.mark.parametrize(("path", "expected"), rows("logs"))
def test_the_first_cause_of_a_log_is_named_with_its_rank_and_node(
    path: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    causes = explained(path, capsys)["causes"]
    if expected["cause"] in ("none", "unknown"):
        assert causes == []
        return
    if not causes:
        assert expected.get("unknown_ok"), "not known"
        return
    first = causes[0]
    assert [word for word in expected["keywords"] if not re.search(word, told(first), re.I)] == []
    if first["rank"] is not None:
        assert first["rank"] == expected.get("rank", first["rank"])
    if first["node"] and expected.get("node"):
        assert first["node"].split(".")[0] == expected["node"].split(".")[0]
    assert expected["node_at_fault"] or not first["leave_out"]


@pytest.mark.parametrize(("path", "expected"), rows("scripts"))
def test_each_trap_of_a_job_script_is_found_at_its_line(
    path: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = explained(path, capsys)
    findings = [*found["causes"], *found.get("remarks", [])]
    for trap in expected["traps"]:
        fits = [
            one
            for one in findings
            if re.search(trap["match"], told(one), re.I)
            and (trap.get("anywhere") or abs(one["where"]["line"] - trap["line"]) <= NEAR)
        ]
        assert fits or trap.get("optional"), trap
    assert expected["traps"] or not found["causes"]
