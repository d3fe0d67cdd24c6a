"""`apptrain explain` with what a job printed when something broke: the recorded round of `make faults`
(benchmarks/results/faults.json), and what each case of tests/faults expects of it.

Where the run went on as if nothing had been, nothing is named. What the first node took along, the job's next attempt
tells.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from entrypoint.explain import catalogue, judge
from entrypoint.explain.scan import Index, Scan
from tests.faults.cases import ALL

RECORDED = Path(__file__).resolve().parents[3] / "benchmarks/results/faults.json"
CASES = {kind.name: kind for kind in ALL.values()}
FAULTS = [
    pytest.param(fault, id=f"{run['policy']}-{fault['case']}")
    for run in json.loads(RECORDED.read_text())["runs"]
    for fault in run["faults"]
]
INDEX = Index(catalogue.load())


def test_each_case_was_recorded() -> None:
    assert {one.values[0]["case"] for one in FAULTS} >= set(CASES)  # type: ignore[index]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_broke_is_named_from_the_jobs_output_alone(fault: dict[str, Any]) -> None:
    scan = Scan(INDEX)
    scan.read(io.BytesIO("".join(f"{line}\n" for line in fault["said"]).encode()), "job.out", 1 << 20)
    causes = judge.of(scan, catalogue.own_error()).causes
    expected = CASES[fault["case"]].explained
    assert [one.entry.id for one in causes[:1] if one.entry.id not in expected] == []
    assert bool(causes) == bool(expected)
    if causes and causes[0].leave_out:
        assert causes[0].leave_out in fault["what"]
