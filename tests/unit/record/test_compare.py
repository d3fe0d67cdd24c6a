"""What `apptrain compare` says of two runs, and which rule explains that their numbers part."""

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.record import causes, compare

MANIFEST: dict[str, Any] = {
    "schema_version": 2,
    "image": {"id": "i", "stack": "cu132", "lock_sha256": "l"},
    "code": {
        "program": {"name": "train", "sha256": "p"},
        "repository": {"commit": "c", "diff_sha256": "d"},
        "apptrain": {"version": "0.1.0", "repository": None},
    },
    "command": ["-m", "train", "--config", "digits"],
    "config": {"seed": 1, "batch_size": 64, "optimizer.lr": 0.1, "checkpoint.every": 0, "threads": 0},
    "nodes": [{"name": "a", "plan": "plan.0.json"}],
    "environment": {"values": {}, "names": ["HF_TOKEN"]},
    "hardware": [{"nodes": ["a"], "cpu": {"model": "EPYC"}, "gpus": [], "driver": "580"}],
    "seeds": {"seed": 1},
    "attempts": [
        {
            "attempt": 0,
            "scheduler": "slurm",
            "began": "2026-01-01T00:00:00+00:00",
            "world_size": 2,
            "device": "cpu",
            "threads": "4",
            "transport": "gloo",
            "versions": {"torch": "2.15.0", "python": "3.11.9"},
            "identity": {"threads": 1, "processor": "AVX2"},
            "checkpoint": None,
        }
    ],
    "results": None,
}


def changed(*changes: tuple[str, object]) -> dict[str, Any]:
    """The manifest with these values in these places, each a path of keys with slashes."""
    manifest = copy.deepcopy(MANIFEST)
    for place, value in changes:
        at: Any = manifest
        *names, last = place.split("/")
        for name in names:
            at = at[int(name)] if isinstance(at, list) else at[name]
        at[last] = copy.deepcopy(value)
    return manifest


def run(path: Path, losses: list[float], *changes: tuple[str, object]) -> str:
    """A run directory whose manifest differs in these places."""
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps(changed(*changes)))
    rows = [{"step": step, "loss": loss, "lr": 0.1} for step, loss in enumerate(losses, 1)]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


Compare = Callable[..., dict[str, Any]]


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    """What is said of a run and another one with these losses and changes."""

    def pair(
        losses: list[float], *changes: tuple[str, object], base: tuple[tuple[str, object], ...] = ()
    ) -> dict[str, Any]:
        paths = [run(tmp_path / "a", [2.0, 1.0], *base), run(tmp_path / "b", losses, *base, *changes)]
        status = compare.main(paths, as_json=True)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["pairs"][0]
        assert status == (0 if found["verdict"] == "identical" else 1)
        return found

    return pair


def test_equal_runs_elsewhere_are_identical_and_the_places_are_listed(compared: Compare) -> None:
    found = compared(
        [2.0, 1.0],
        ("attempts/0/scheduler", "pbs"),
        ("nodes", [{"name": "b", "plan": None}]),
        ("attempts/0/began", "2026-01-02T00:00:00+00:00"),
    )
    assert found["verdict"] == "identical"
    assert [one["name"] for one in found["differ"]] == ["scheduler", "nodes", "began"]
    assert found["equal"][:3] == ["image", "lock", "torch"]


def test_times_and_memory_are_no_difference_of_the_numbers(compared: Compare) -> None:
    def results(peak: int) -> dict[str, object]:
        ranks = [{"rank": 0, "node": "a", "images_per_s": 5.0 * peak, "peak_memory_bytes": peak}]
        return {"job_id": str(peak), "began": f"{peak}", "wall_s": 1.0 * peak, "ranks": ranks}

    found = compared([2.0, 1.0], ("results", results(4)), base=(("results", results(3)),))
    assert (found["verdict"], found["differ"]) == ("identical", [])


CPU_RULES = {
    "lock": ("image/lock_sha256", "m"),
    "torch": ("attempts/0/versions", {"torch": "2.16.0", "python": "3.11.9"}),
    "python": ("attempts/0/versions", {"torch": "2.15.0", "python": "3.12.0"}),
    "code": ("code/program/sha256", "q"),
    "commit": ("code/repository/commit", "e"),
    "changes": ("code/repository/diff_sha256", "f"),
    "optimizer.lr": ("config/optimizer.lr", 0.2),
    "seed": ("seeds/seed", 2),
    "world size": ("attempts/0/world_size", 4),
    "batch per step": ("config/batch_size", 128),
    "threads": ("attempts/0/identity", {"threads": 2, "processor": "AVX2"}),
    "device": ("attempts/0/device", "cuda"),
    "instruction set": ("attempts/0/identity", {"threads": 1, "processor": "AVX512"}),
    "CPU": ("hardware", [{"cpu": {"model": "Xeon"}, "gpus": [], "driver": "580"}]),
    "checkpoint": ("attempts/0/checkpoint", {"path": "/other/checkpoints/step-00000020", "step": 20}),
}
GPU_RULES = {
    "GPUs": ("hardware", [{"cpu": {"model": "EPYC"}, "gpus": ["H100"], "driver": "580"}]),
    "driver": ("hardware", [{"cpu": {"model": "EPYC"}, "gpus": [], "driver": "590"}]),
    "transport": ("attempts/0/transport", "nccl over ib0"),
}


@pytest.mark.parametrize("name", CPU_RULES)
def test_each_rule_explains_where_the_numbers_part(name: str, compared: Compare) -> None:
    found = compared([2.0, 1.5], CPU_RULES[name])
    assert (found["verdict"], found["causes"]) == ("explained", [name])
    assert (found["traces"]["first"], found["traces"]["values"]) == (2, [1.0, 1.5])


@pytest.mark.parametrize(
    ("key", "series", "causes_of"),
    [
        ("data.path", "loss", ["data.path"]),
        ("data.path", "accuracy", ["data.path"]),
        ("evaluate.split", "accuracy", ["evaluate.split"]),
        ("evaluate.split", "loss", []),
        ("evaluate.every", "accuracy", []),
        ("evaluate.batch_size", "loss", []),
    ],
)
def test_other_data_explains_other_numbers_and_another_evaluation_the_accuracy_alone(
    key: str, series: str, causes_of: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("a", 0.5), ("b", 0.25)):
        run(tmp_path / name, [], (f"config/{key}", name))
        row = {"step": 1, "loss": 1.0, "accuracy": 0.75, series: value}
        (tmp_path / name / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    compare.main([str(tmp_path / "a"), str(tmp_path / "b")], as_json=True)
    found = json.loads(capsys.readouterr().out)["pairs"][0]
    assert ([one["name"] for one in found["differ"]], found["causes"]) == ([key], causes_of)
    assert "config" not in found["equal"]


def test_ranks_that_each_trained_for_itself_explain_other_numbers(compared: Compare) -> None:
    found = compared([2.0, 1.5], ("attempts/0/process_group", None))
    assert (found["verdict"], found["causes"]) == ("explained", ["world size"])


@pytest.mark.parametrize("name", GPU_RULES)
def test_rules_of_gpus_hold_on_gpus_alone(name: str, compared: Compare) -> None:
    assert compared([2.0, 1.5], GPU_RULES[name])["verdict"] == "unexplained"


@pytest.mark.parametrize("name", GPU_RULES)
def test_on_gpus_they_explain(name: str, compared: Compare) -> None:
    found = compared([2.0, 1.5], GPU_RULES[name], base=(("attempts/0/device", "cuda"),))
    assert found["causes"] == [name]


def test_every_rule_is_tried_here() -> None:
    named = {row.name for row in causes.ROWS if row.rule}
    assert named - {"config", "arguments"} == {*CPU_RULES, *GPU_RULES} - {"optimizer.lr"}


@pytest.mark.parametrize(
    "change",
    [
        ("image/id", "rebuilt"),
        ("attempts/0/scheduler", "pbs"),
        ("config/checkpoint.every", 20),
        ("attempts/0/threads", "8"),
        ("environment", {"values": {"MKL_CBWR": "COMPATIBLE"}, "names": []}),
        ("code", None),
    ],
)
def test_what_no_rule_names_explains_nothing(change: tuple[str, object], compared: Compare) -> None:
    assert compared([2.0, 1.5], change)["verdict"] == "unexplained"


def test_switches_of_the_environment_are_listed_and_places_are_not(compared: Compare) -> None:
    values = {"MKL_CBWR": "COMPATIBLE", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO"}
    found = compared([2.0, 1.0], ("environment", {"values": values, "names": []}))
    assert found["differ"] == [{"name": "MKL_CBWR", "values": [None, "COMPATIBLE"], "rule": ""}]


def test_a_variable_whose_value_is_not_kept_is_named_if_one_run_has_it_or_nothing_else_explains(
    compared: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"values": {}, "names": ["STEPS", "X"], "passed": ["STEPS"]}
    found = compared([2.0, 1.5], ("environment", environment))
    assert found["differ"] == [{"name": "STEPS", "values": [None, "set, value not kept"], "rule": ""}]
    both = [tmp_path / "one", tmp_path / "two"]
    for at, path in enumerate(both):
        run(path, [2.0, 1.0 + at], ("environment", environment))
    compare.main([str(path) for path in both], as_json=False)
    out = capsys.readouterr().out.splitlines()
    assert "environment" not in out[1]
    assert out[-1] == (
        "unexplained: nothing that differs explains it (docs/compare.md); not recorded are the values of STEPS"
    )


def test_a_run_that_ended_sooner_is_different_without_a_cause(compared: Compare) -> None:
    found = compared([2.0])
    assert (found["verdict"], found["traces"]["lengths"]) == ("one is longer", [2, 1])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"step": 2, "loss": 1.0, "lr": 0.1}],
            "identical for 1 step; of loss one has 2 values, the other 1",
        ),
        (
            [{"step": 1, "loss": 2.0, "lr": 0.1}, {"step": 2, "loss": 1.0, "lr": 0.1, "accuracy": 0.5}],
            "identical for 2 steps; of accuracy one has 0 values, the other 1",
        ),
    ],
)
def test_runs_of_which_one_has_not_all_the_numbers_are_not_identical(
    rows: list[object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [run(tmp_path / name, [2.0, 1.0]) for name in ("a", "b")]
    (tmp_path / "b" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert compare.main(paths, as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"traces: {said}"
    compare.main(paths, as_json=True)
    assert json.loads(capsys.readouterr().out)["pairs"][0]["verdict"] == "other steps"


def test_arguments_count_where_the_config_is_not_known(compared: Compare) -> None:
    base: tuple[tuple[str, object], ...] = (
        ("config", None),
        ("seeds", {}),
        ("command", ["my.py", "--lr", "0.1"]),
    )
    assert compared([2.0, 1.5], ("command", ["my.py", "--lr", "0.2"]), base=base)["causes"] == ["arguments"]


def test_the_comparison_is_a_page_to_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(Path("a"), [2.0, 1.0])
    run(Path("b"), [2.0, 1.5], ("seeds/seed", 2), ("attempts/0/scheduler", "pbs"))
    run(Path("c"), [2.0, 1.5])
    assert compare.main(["a", "b", "c"], as_json=False) == 1
    equal = (
        "image, lock, torch, python, code, commit, changes, config, {}world size, batch per step, threads, device, "
        "GPUs, instruction set, CPU, driver, transport, checkpoint, {}nodes, began"
    )
    assert capsys.readouterr().out.splitlines() == [
        "a and b",
        f"equal: {equal.format('', '')}",
        "different:",
        "  seed       1      2",
        "  scheduler  slurm  pbs",
        "traces: they part at step 2, loss 1.0 and 1.5; the losses are within 0.5 over 2 steps",
        "because of seed: everything random is a function of the seed",
        "",
        "a and c",
        f"equal: {equal.format('seed, ', 'scheduler, ')}",
        "different: nothing that is known",
        "traces: they part at step 2, loss 1.0 and 1.5; the losses are within 0.5 over 2 steps",
        "unexplained: nothing that differs explains it (docs/compare.md)",
    ]


@pytest.mark.parametrize(
    ("losses", "status", "said"),
    [
        ([2.0, 1.0], 0, "traces: identical, bit for bit, over 2 steps"),
        ([2.0], 1, "traces: identical for 1 step; one ends at 2, the other at 1"),
        ([2.0, 1.0, 0.5], 1, "traces: identical for 2 steps; one ends at 2, the other at 3"),
    ],
)
def test_traces_that_do_not_part_need_no_cause(
    losses: list[float], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [run(tmp_path / "a", [2.0, 1.0]), run(tmp_path / "b", losses, ("seeds/seed", 2))]
    assert compare.main(paths, as_json=False) == status
    assert capsys.readouterr().out.splitlines()[2:] == ["different:", "  seed  1  2", said]


def test_what_json_has_no_number_for_is_a_text(compared: Compare) -> None:
    found = compared([2.0, math.inf])["traces"]
    assert (found["values"], found["first"], found["within"]) == ([1.0, "inf"], 2, "inf")


def test_one_that_parts_makes_all_different(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [run(tmp_path / "a", [2.0]), run(tmp_path / "b", [1.0]), run(tmp_path / "c", [2.0])]
    assert compare.main(paths, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["schema_version"] == 1
    assert [one["verdict"] for one in told["pairs"]] == ["unexplained", "identical"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "unknown"),
        (["a", 2], "a, 2"),
        (0, "0"),
        ("x" * 40, "x" * 40),
        ("x" * 41, "x" * 37 + "..."),
        ("a\x1bb", "a?b"),
    ],
)
def test_a_value_takes_40_characters_of_a_table(value: object, shown: str) -> None:
    assert compare.in_short(value) == shown


def differences(*changes: tuple[str, object], base: tuple[tuple[str, object], ...] = ()) -> list[object]:
    """(name, values) of what differs."""
    _, differ = causes.sort(changed(*base), changed(*base, *changes))
    return [(one.name, one.values) for one in differ]


ONE: dict[str, Any] = MANIFEST["attempts"][0]
UNKNOWN_CONFIG: tuple[tuple[str, object], ...] = (
    ("config", None),
    ("seeds", {}),
    ("command", ["a.py", "b", "c"]),
)


@pytest.mark.parametrize(
    ("changes", "base", "values"),
    [
        ([("attempts", [ONE, ONE | {"world_size": 4}])], (), [("world size", (2, [2, 4]))]),
        ([("attempts", [ONE, ONE | {"world_size": None}])], (), []),
        ([("attempts/0/world_size", None)], (), [("world size", (2, None))]),
        ([("attempts/0/process_group", None)], (), [("world size", (2, "2, each for itself"))]),
        ([("attempts/0/process_group", None)], (("attempts/0/world_size", None),), []),
        (
            [("attempts/0/transport", {"b": 1, "a": 2})],
            (("attempts", [ONE | {"transport": {"a": 2, "b": 1}}, ONE | {"transport": {"b": 1, "a": 2}}]),),
            [],
        ),
        ([("command", ["a.py", "b", "d"])], UNKNOWN_CONFIG, [("arguments", (["b", "c"], ["b", "d"]))]),
        ([("command", ["z.py", "b", "c"])], UNKNOWN_CONFIG, []),
        ([("config", None)], (), [("arguments", (None, ["train", "--config", "digits"])),
            ("config", ("known", None)), ("batch per step", (64, None)), ("checkpoint", ("the start", None))]),
        ([("config", {"model": "x", "batch_size": 64, "seed": 2, "checkpoint.every": 9})], (),
            [("optimizer.lr", (0.1, None)), ("model", (None, "x"))]),
        (
            [("hardware", [{"cpu": {"model": "Xeon"}, "gpus": ["H100", "T4"]}, {"gpus": []}, {}])],
            (),
            [("GPUs", (["none"], ["H100, T4", "none"])), ("CPU", (["EPYC"], ["Xeon"])), ("driver", (["580"], None))],
        ),
        ([("hardware", [])], (), [("GPUs", (["none"], None)), ("CPU", (["EPYC"], None)), ("driver", (["580"], None))]),
        ([("attempts/0/checkpoint", {"path": "/x", "step": 1})], (), [("checkpoint", ("the start", "/x"))]),
        ([("attempts/0/checkpoint", {"path": "/x", "step": 1})], (("attempts/0/attempt", 1),), []),
        ([("attempts/0/identity", {"processor": "AVX2"})], (), [("threads", (1, "4"))]),
    ],
)  # fmt: skip
def test_what_differs_is_told_by_the_values_of_both(
    changes: list[tuple[str, object]], base: tuple[tuple[str, object], ...], values: list[object]
) -> None:
    assert differences(*changes, base=base) == values


def test_an_attempt_without_a_number_is_the_first() -> None:
    bare = {name: value for name, value in ONE.items() if name != "attempt"}
    found = differences(("attempts/0/checkpoint", {"path": "/x"}), base=(("attempts", [bare]),))
    assert found == [("checkpoint", ("the start", "/x"))]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    good = run(tmp_path / "a", [2.0])
    empty = run(tmp_path / "b", [])
    other = run(tmp_path / "c", [2.0], ("command", ["my.py"]))
    bare = tmp_path / "d"
    bare.mkdir()
    (silent := Path(run(tmp_path / "e", [])) / "metrics.jsonl").unlink()
    how = (
        'have the script write a line {"step": 1, "loss": 2.3} for each step into it, in the directory '
        "APPTRAIN_RUN_DIR (docs/compare.md)"
    )
    for path, why in (
        (empty, f"metrics.jsonl has no step with a loss: {how}"),
        (silent.parent, f"e cannot be compared: metrics.jsonl: No such file or directory: {how}"),
        (other, f"{good} ran -m train and {other} ran my.py: give runs of the same program"),
        (bare, "manifest.json: No such file or directory"),
    ):
        with pytest.raises(BadInput, match=re.escape(why)):
            compare.main([good, str(path)], as_json=False)
    (bare / "manifest.json").write_text("[]")
    with pytest.raises(BadInput, match="is no manifest: it has no attempts"):
        compare.main([good, str(bare)], as_json=False)
