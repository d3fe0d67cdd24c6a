"""What the fault suite notes and counts (tests/faults), on files that are written here."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import table
from tests.faults.cases import ALL, ROUND
from tests.faults.run import Suffered
from tests.faults.watch import Watch


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """One that looks only when it is told to."""
    return Watch(run_dir=tmp_path / "run", output=tmp_path / "job.out")


def test_a_line_that_was_cut_off_by_a_lost_node_is_passed_over(watch: Watch) -> None:
    watch.run_dir.mkdir()
    (watch.run_dir / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.5}\n{"st\n\0\0\n{"step": 2, "loss": 2.0}\n'
    )
    watch.look()
    assert [step for _, step in watch.steps] == [1, 2]


@pytest.mark.parametrize(
    ("steps", "done", "saved", "expected"),
    [
        ([1, 2, 3, 4], 4, [], (0, 0)),
        ([1, 2, 3, 4, 5, 6, 5, 6, 7], 6, [(4.5, 4)], (2, 0)),  # back to step 4, which was saved in no time
        ([1, 2, 3, 1, 2], 3, [], (3, 0)),  # before the first save
        ([1, 2, 3, 4, 5, 6, 1, 2], 6, [], (6, 2)),  # the save of step 4 was under way
        (
            [1, 2, 3, 4, 5, 6, 5],
            6,
            [(6.5, 4)],
            (2, 2),
        ),  # it took two steps, and was done before it was needed
        ([1, 2, 1, 2, 3, 4, 5, 5], 7, [(6.5, 4)], (1, 0)),  # what had been lost before counts no more
        ([1, 2, 3, 4, 5, 4, 5, 3], 5, [(2.5, 2)], (5, 1)),  # twice since then
        ([1, 2, 3], 0, [], (0, 0)),
    ],
)
def test_lost_are_the_steps_that_are_done_again_and_a_save_may_cost_those_done_meanwhile(
    watch: Watch, steps: list[int], done: int, saved: list[tuple[float, int]], expected: tuple[int, int]
) -> None:
    watch.steps = [(float(at), step) for at, step in enumerate(steps, 1)]
    watch.saved = saved
    assert watch.lost(done, 4) == expected


def suffered(**changes: Any) -> Suffered:
    values: dict[str, Any] = {
        "case": "kill -9 of a rank",
        "seed": "1",
        "moment": "a step",
        "where": "attempt 0, step 9",
        "what": "killed rank 1",
        "evidence": "killed by SIGKILL",
        "then": "requeued",
        "noticed_s": 2.0,
        "first_step_s": 20.0,
        "lost": 1,
        "bound": 8,
        "said": ("Traceback", "apptrain: status 137: rank 1"),
        "planned": False,
    }
    return Suffered(**values | changes)


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, []),
        ({"lost": 8}, []),
        ({"lost": 9}, ["9 steps lost, at most 8 may be"]),
        ({"planned": True}, ["1 steps lost at a planned end"]),
        ({"planned": True, "lost": 0}, []),
        ({"evidence": ""}, ["nothing shows that it happened"]),
        ({"noticed_s": None, "first_step_s": 1000.0}, []),
    ],
)
def test_a_fault_must_be_shown_and_may_cost_what_is_promised(
    changes: dict[str, Any], problems: list[str]
) -> None:
    begin = "kill -9 of a rank (attempt 0, step 9: killed rank 1): "
    assert suffered(**changes).problems == [begin + one for one in problems]


def test_the_table_has_a_row_for_each_case_and_policy_over_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    monkeypatch.setattr(table, "PAGE", page)
    again = suffered(noticed_s=3.5, first_step_s=30.0, lost=0, bound=9, then="started again in the same job")
    walltime = suffered(case="walltime", noticed_s=0.0, first_step_s=None, lost=0, planned=True)
    runs = [
        {"policy": "requeue", "command": "make faults", "problems": [], "faults": [table.row(suffered())]},
        {"policy": "requeue", "command": "make faults", "problems": ["no"], "faults": [table.row(again)]},
        {"policy": "restart", "command": "make it", "problems": [], "faults": [table.row(walltime)]},
    ]
    table.fill_in(json.loads(json.dumps(runs)))
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| kill -9 of a rank (2 times) | requeued, started again in the same job | 2.0 to 3.5 | 20 to 30 "
        f"| 0 to 1 of 9 | {table.TUTORIALS['kill -9 of a rank']} |",
        f"| walltime, `restart` | requeued | as planned | - | 0 | {table.TUTORIALS['walltime']} |",
    ]
    text = page.read_text()
    assert "2 of 3 runs came to the end" in text
    assert text.count("`make faults`") == 1
    assert text.startswith("before\n")
    assert text.endswith(f"{table.END}\nafter\n")


def test_a_round_has_every_case_and_only_under_policies_for_which_it_is_meant() -> None:
    assert {kind for _, kinds in ROUND for kind in kinds} == set(ALL.values())
    assert [(policy, kind) for policy, kinds in ROUND for kind in kinds if policy not in kind.policies] == []
    wanted = [kind for kind in ALL.values() if kind.request]
    firsts = [kinds[0] for _, kinds in ROUND]
    assert [kind for kind in wanted if kind not in firsts] == []
