"""What `apptrain scaling` makes of run directories, whatever they hold."""

import json
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.scaling import command, measured
from entrypoint.scaling.finding import Parts
from entrypoint.scaling.sweep import Sweep, open_folder

EVIL = "<script>alert(1)</script>\x1b[31m\n"


def attempt(nodes: int, **more: object) -> dict[str, Any]:
    return {
        "attempt": 0,
        "began": "2026-01-01T00:00:00+00:00",
        "ended": "2026-01-01T00:10:00+00:00",
        "status": 0,
        "scheduler": "slurm",
        "job_id": "7",
        "nodes": [f"n{at}" for at in range(nodes)],
        "nproc_per_node": 1,
        "world_size": nodes,
        "device": "cpu",
        "threads": "4",
        "versions": {"torch": "2.15.0"},
        **more,
    }


def write(folder: Path, name: str, manifest: dict[str, Any], **files: str) -> Path:
    run = folder / name
    run.mkdir()
    (run / "manifest.json").write_text(json.dumps({"command": ["my.py"], **manifest}))
    for file, content in files.items():
        (run / file.replace("__", ".")).write_text(content)
    return run


def other(folder: Path, name: str, nodes: int, seconds: float, **more: object) -> Path:
    """A run of somebody's script: a hundred steps in so many seconds."""
    found = attempt(nodes, steps={"timed": 100, "seconds": seconds}, **more)
    return write(folder, name, {"attempts": [found]})


def reference(
    folder: Path, name: str, nodes: int, rate: float, *, batch: int = 64, sync: float = 0.0, slow: int = -1
) -> Path:
    """Of the reference program; the first step of each is ten times as long. `sync`: the share of a step that
    each rank waits for the others; the one called `slow` does not wait."""
    rows = [{"step": at, "loss": 1.0, "lr": 0.1, "images_per_s": rate} for at in range(1, 12)]
    rows[0]["images_per_s"] = rate / 10
    train = 10 * batch / rate
    ranks = [
        {
            "rank": rank,
            "node": f"n{rank}",
            "train_s": 2 * train,
            "input_wait_s": train + 0.1 * train,
            "sync_wait_s": train * (0.001 if rank == slow else sync),
            "first_step": {"train_s": train, "input_wait_s": train, "sync_wait_s": 0.0},
        }
        for rank in range(nodes)
    ]
    return write(
        folder,
        name,
        {"command": ["-m", "train"], "config": {"batch_size": batch}, "attempts": [attempt(nodes)]},
        metrics__jsonl="".join(f"{json.dumps(row)}\n" for row in rows),
        result__json=json.dumps({"ranks": ranks, "train_samples": 6400}),
    )


def scaling(
    capsys: pytest.CaptureFixture[str], runs: Sequence[Path], *options: str
) -> tuple[dict[str, Any], str]:
    """(the JSON, the words)."""
    assert command.main([*map(str, runs), *options, "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out)
    assert command.main([*map(str, runs), *options], {}) == 0
    return found, capsys.readouterr().out


def test_the_reference_program_tells_samples_parts_and_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [reference(tmp_path, f"one-{at}", 1, 100 + at) for at in (-1, 0, 1)]
    runs += [reference(tmp_path, f"three-{at}", 3, 150 + at, sync=0.4) for at in (-1, 0, 1)]
    found, words = scaling(capsys, runs)
    assert (found["schema_version"], found["kind"], found["left_out"]) == (1, "strong", [])
    assert found["finding"]["cause"] == "communication"
    first, last = found["points"]
    assert (first["nodes"], first["ranks"], first["repeats"], first["unit"]) == (1, 1, 3, "samples/s")
    assert (last["nodes"], last["speedup"], last["efficiency"]) == (
        3,
        pytest.approx(1.5),
        pytest.approx(0.5),
    )
    assert (last["rate"], last["rate_least"], last["rate_most"]) == pytest.approx((150, 149, 151))
    assert last["shares"] == pytest.approx(
        {"communication": 0.4, "data": 0.1, "imbalance": 0.0, "compute": 0.5}, abs=1e-9
    )
    assert [one["slowest"] for one in found["points"]] == [None, None]
    # 3 ranks of 4 threads, 6,400 samples at 150 a second
    assert last["cost"] == {"cpu_hours_per_epoch": pytest.approx(12 * 6400 / 150 / 3600)}
    assert words.splitlines()[3:] == [
        "nodes  ranks  samples/s  least to most  speed-up  efficiency  communication  data  CPU hours per epoch",
        "    1      1        100      99 to 101      1.00       100 %            0 %  10 %              0.07111",
        "    3      3        150     149 to 151      1.50        50 %           40 %  10 %               0.1422",
        "",
        "It stops paying beyond 1 node: 3 nodes are 1.50 times as fast as 1, where 3.00 would be ideal. What "
        "holds it back is communication: 40 % of a step on 3 nodes, 0 % on 1.",
    ]


def test_one_slow_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [reference(tmp_path, "one", 1, 100), reference(tmp_path, "four", 4, 200, sync=0.6, slow=2)]
    found, _ = scaling(capsys, runs)
    assert (found["finding"]["cause"], found["points"][1]["slowest"]) == ("imbalance", "rank 2 on n2")


def test_a_batch_that_grows_with_the_ranks_is_weak_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [reference(tmp_path, f"{nodes}", nodes, 99.0 * nodes, batch=32 * nodes) for nodes in (1, 2)]
    found, words = scaling(capsys, runs)
    assert (found["kind"], found["finding"]["kind"]) == ("weak", "ideal")
    assert "weak scaling of -m train: the same work a rank and step (32 samples)" in words


def test_of_any_other_program_the_steps_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [other(tmp_path, "b", 2, 5.0), other(tmp_path, "a", 1, 4.0)]
    weak, words = scaling(capsys, runs)
    strong, _ = scaling(capsys, runs, "--strong")
    assert [(one["kind"], one["points"][1]["speedup"]) for one in (weak, strong)] == [
        ("weak", pytest.approx(1.6)),
        ("strong", pytest.approx(0.8)),
    ]
    assert [(one["rate"], one["unit"], one["shares"]) for one in weak["points"]] == [
        (25.0, "steps/s", None),
        (20.0, "steps/s", None),
    ]
    assert weak["points"][0]["cost"] == {"cpu_hours_per_1000_steps": pytest.approx(4 * 40 / 3600)}
    assert "    2      2       20        one run      1.60        80 %              -     -    " in words
    assert "not the same" not in words


def test_two_repeats_are_told_by_their_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [other(tmp_path, "a", 1, 4.0), other(tmp_path, "b", 2, 5.0), other(tmp_path, "c", 2, 10.0)]
    assert " 15       10 to 20      1.20        60 % " in scaling(capsys, runs)[1]


def test_a_refusal_of_one_size_names_what_was_left_out(tmp_path: Path) -> None:
    good, bad = other(tmp_path, "a", 1, 4.0), other(tmp_path, "b", 2, 5.0, status=1)
    with pytest.raises(BadInput, match=rf"^scaling: no run can be measured: {bad}: it failed with status 1$"):
        command.main([str(bad)], {})
    begin = "scaling: all runs that can be measured are on 1 node: give runs on at least two numbers of nodes"
    with pytest.raises(BadInput, match=rf"^{begin}$"):
        command.main([str(good)], {})
    with pytest.raises(BadInput, match=rf"^{begin}; left out: {bad}: it failed with status 1$"):
        command.main([str(good), str(bad)], {})


def test_a_run_that_is_given_twice_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = other(tmp_path, "a", 1, 4.0), other(tmp_path, "b", 2, 5.0)
    assert [point["repeats"] for point in scaling(capsys, [one, one, two])[0]["points"]] == [1, 1]


def test_what_differs_and_should_not_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [other(tmp_path, "a", 1, 4.0), other(tmp_path, "b", 2, 5.0, versions={"torch": "2.9.0"})]
    found, words = scaling(capsys, runs)
    assert found["differs"] == {"torch": ["2.15.0", "2.9.0"]}
    assert "not the same: torch: 2.15.0, 2.9.0\n" in words


def test_a_run_that_tells_no_rate_is_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [other(tmp_path, "a", 1, 4.0), other(tmp_path, "b", 2, 5.0)]
    bad = [
        other(tmp_path, "failed", 4, 5.0, status=1),
        other(tmp_path, "goes-on", 4, 5.0, status=None),
        write(tmp_path, "old", {"attempts": [attempt(4)]}),
        write(tmp_path, "short", {"attempts": [attempt(4, steps={"timed": 3, "seconds": 1.0})]}),
        write(tmp_path, "never", {"attempts": []}),
        other(tmp_path, "alone", 4, 5.0, process_group=None),
        write(tmp_path, "zero", {"attempts": [attempt(4, steps={"timed": 30, "seconds": 0})]}),
        write(tmp_path, "grew", {"attempts": [attempt(4), attempt(2, attempt=1)]}),
        write(tmp_path, "odd", {"config": {"batch_size": 8}, "attempts": [attempt(4)]}, metrics__jsonl="x\n"),
    ]
    found, _ = scaling(capsys, [*good, *bad])
    assert [line.removeprefix(f"{tmp_path}/") for line in found["left_out"]] == [
        "failed: it failed with status 1",
        "goes-on: it has not ended",
        "old: its ranks have told no optimizer steps (an older apptrain, or no optimizer of torch)",
        "short: it has 3 timed steps, and 5 are needed",
        "never: no attempt has started its ranks",
        "alone: no rank joined a process group: each of the 4 ranks trained for itself, on what it took for all "
        "data (docs/own-script.md, Each rank for itself)",
        "zero: its ranks have told no optimizer steps (an older apptrain, or no optimizer of torch)",
        "grew: its attempts ran on 2 and 4 nodes",
        "odd: it has 0 timed steps, and 5 are needed",
    ]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"nodes": []}, "its manifest does not say on how many nodes it ran"),
        ({"world_size": 3}, "its manifest does not say on how many nodes it ran"),
        ({"steps": {"timed": 4, "seconds": 1.0}}, "it has 4 timed steps, and 5 are needed"),
        ({"steps": {"timed": 5, "seconds": 1.0}}, ""),
        ({"world_size": None, "nproc_per_node": 2}, ""),
    ],
)
def test_a_run_counts_if_it_tells_its_nodes_and_five_steps(
    more: dict[str, object], why: str, tmp_path: Path
) -> None:
    run = write(tmp_path, "a", {"attempts": [attempt(4) | {"steps": {"timed": 9, "seconds": 1.0}} | more]})
    if why:
        with pytest.raises(measured.NotMeasured, match=f"^{why}$"):
            measured.read(run, {})
        return
    assert measured.read(run, {}).ranks == (8 if "world_size" in more else 4)


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    first = attempt(2, status=1, device="cuda", world_size=2)
    last = attempt(2, attempt=1, world_size=None, steps={"timed": 9, "seconds": 3.0})
    del last["nproc_per_node"]
    run = write(tmp_path, "a", {"attempts": [first, last]})
    found = measured.read(run, {})
    assert (found.device, found.ranks, found.rate, found.timed, found.unit) == ("cpu", 2, 3.0, 9, "steps/s")
    assert found.name == str(run)


def test_the_first_step_of_each_attempt_warms_up_and_an_earlier_ones_result_is_not_the_runs(
    tmp_path: Path,
) -> None:
    run = reference(tmp_path, "a", 1, 100)
    assert measured.read(run, {}).parts is not None
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*rows[:5], rows[5].replace("100", "10"), *rows[6:], ""]))
    manifest = json.loads((run / "manifest.json").read_text())
    resumed = attempt(1, attempt=1, checkpoint={"path": "x", "step": 5})
    manifest["attempts"] = [attempt(1, attempt=0, status=75), resumed]
    (run / "manifest.json").write_text(json.dumps(manifest))
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"attempt": 0}))
    found = measured.read(run, {})
    assert (found.rate, found.timed, found.parts) == (100.0, 9, None)


@pytest.mark.parametrize(
    ("told", "threads"), [("4", 4), ("99999", 99_999), ("100000", 0), ("-1", 0), ("many", 0), ("", 0)]
)
def test_threads_are_a_number_or_not_known(told: str, threads: int, tmp_path: Path) -> None:
    assert measured.read(other(tmp_path, "a", 1, 4.0, threads=told), {}).threads == threads


def test_a_rate_that_is_no_number_above_0_is_no_step(tmp_path: Path) -> None:
    run = reference(tmp_path, "a", 1, 100)
    rates = ["1", "0.5", "NaN", "Infinity", "0", "-5", "2e12", "0.5", "0.5", "0.5", "0.5"]
    rows = [f'{{"step": {at}, "images_per_s": {rate}}}\n' for at, rate in enumerate(rates, 1)]
    (run / "metrics.jsonl").write_text("".join(rows))
    found = measured.read(run, {})
    assert (found.rate, found.timed, found.unit) == (0.5, 5, "samples/s")


def test_metrics_that_cannot_be_read_are_the_reason(tmp_path: Path) -> None:
    run = reference(tmp_path, "a", 1, 100)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(measured.NotMeasured, match=r"^metrics\.jsonl: .*No such file or directory"):
        measured.read(run, {})


def parts_of(folder: Path, *ranks: "dict[str, object] | None") -> object:
    """What is told of ranks that spend ten seconds beyond their first step."""
    run = reference(folder, "a", 1, 100)
    first = {"train_s": 1.0, "input_wait_s": 0.0, "sync_wait_s": 0.0}
    usual = {"train_s": 11.0, "input_wait_s": 1.0, "sync_wait_s": 2.0, "first_step": first}
    rows = [{"rank": at, "node": "n", **usual, **(one or {})} for at, one in enumerate(ranks)]
    (run / "result.json").write_text(json.dumps({"ranks": rows}))
    return measured.read(run, {}).parts


@pytest.mark.parametrize(
    ("ranks", "parts"),
    [
        ([{}], Parts(0.2, 0.1, 0.0, "")),
        ([{}, {"sync_wait_s": 4.0}], Parts(0.2, 0.1, pytest.approx(0.1), "rank 0 on n")),  # type: ignore[arg-type]
        ([{"sync_wait_s": 0.5}, {"sync_wait_s": 1.0}], Parts(0.05, 0.1, pytest.approx(0.025), "")),  # type: ignore[arg-type]
        ([{"input_wait_s": 30.0, "sync_wait_s": 30.0}], Parts(1.0, 1.0, 1.0, "")),
        ([{"train_s": 1.5, "input_wait_s": 0.1, "sync_wait_s": 0.2}], Parts(0.4, 0.2, 0.0, "")),
        ([{"train_s": 1.0}], None),
        ([{}, {"train_s": None}], None),
        ([{}, {"input_wait_s": None}], None),
        ([{}, {"sync_wait_s": None}], None),
        ([], None),
    ],
)
def test_parts_of_a_step_are_shares_of_the_ranks_time(
    ranks: "list[dict[str, object]]", parts: Parts | None, tmp_path: Path
) -> None:
    assert parts_of(tmp_path, *ranks) == parts


def test_what_is_alike_is_told_by_name(tmp_path: Path) -> None:
    kinds = [
        {"nodes": [], "cpu": {"model": model}, "gpus": gpus}
        for model, gpus in (("B", ["T4", "T4"]), ("A", []))
    ]
    run = write(
        tmp_path,
        "a",
        {
            "attempts": [attempt(1, transport="gloo", steps={"timed": 9, "seconds": 3.0})],
            "code": {"program": {"sha256": "0123456789abcdef"}},
            "image": {"id": "i"},
            "hardware": kinds,
        },
    )
    assert measured.read(run, {}).alike == {
        "program": "0123456789ab",
        "image": "i",
        "torch": "2.15.0",
        "device": "cpu",
        "ranks a node": "1",
        "threads a rank": "4",
        "transport": "gloo",
        "hardware": "A and B, T4",
    }


def test_runs_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    one = other(tmp_path, "1", 1, 4.0)
    steps = {"timed": 9, "seconds": 1.0}
    third = write(tmp_path, "3", {"command": ["their.py"], "attempts": [attempt(2, steps=steps)]})
    with pytest.raises(BadInput, match=rf"^{one} ran my\.py and {third} ran their\.py: "):
        command.main([str(one), str(third)], {})
    batches = [reference(tmp_path, f"b{nodes}", nodes, 9.0, batch=batch) for nodes, batch in ((1, 8), (2, 9))]
    with pytest.raises(BadInput, match=r"\(8 on 1 rank, 9 on 2 ranks\) are neither equal nor in proportion"):
        command.main(list(map(str, batches)), {})
    same = [reference(tmp_path, f"s{nodes}", nodes, 9.0) for nodes in (1, 2)]
    with pytest.raises(BadInput, match=r"\(64 on 1 rank, 64 on 2 ranks\) are those of strong scaling"):
        command.main([*map(str, same), "--weak"], {})


def refused(runs: Sequence[Path | str], *options: str) -> str:
    with pytest.raises(BadInput) as refusal:
        command.main([*map(str, runs), *options], {})
    assert refusal.value.status == 64
    return refusal.value.id


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    one, two = other(tmp_path, "1", 1, 4.0), other(tmp_path, "2", 2, 5.0)
    third = write(
        tmp_path,
        "3",
        {"command": ["their.py"], "attempts": [attempt(2, steps={"timed": 9, "seconds": 1.0})]},
    )
    longer = write(
        tmp_path,
        "4",
        {"command": ["my.py", "--big"], "attempts": [attempt(2, steps={"timed": 9, "seconds": 1.0})]},
    )
    assert refused([one]) == "scaling-one-size"
    assert refused([tmp_path / "nowhere"]) == "run-missing"
    assert refused([one, third]) == "scaling-other-program"
    assert refused([one, longer]) == "scaling-commands-differ"
    assert refused([other(tmp_path, "5", 2, 5.0, status=1)]) == "scaling-nothing"
    more = write(
        tmp_path,
        "6",
        {"attempts": [attempt(2, world_size=4, steps={"timed": 9, "seconds": 1.0})]},
    )
    assert refused([one, two, more]) == "scaling-ranks-differ"
    batches = [reference(tmp_path, f"{batch}", nodes, 9.0, batch=batch) for nodes, batch in ((1, 8), (2, 9))]
    assert refused(batches) == "scaling-batches"
    same = [reference(tmp_path, f"s{nodes}", nodes, 9.0) for nodes in (1, 2)]
    assert refused(same, "--weak") == "scaling-batches"
    assert refused([one, two], "-o", str(tmp_path / "x.png")) == "scaling-picture-kind"
    assert refused([one, two], "-o", str(tmp_path / "no" / "x.svg")) == "output-unwritable"
    os.mkfifo(tmp_path / "x.svg")
    assert refused([one, two], "-o", str(tmp_path / "x.svg")) == "output-unwritable"
    assert (tmp_path / "x.svg").is_fifo()
    assert refused([one, two], "--nodes", "") == "option-empty"
    assert refused(["", two]) == "argument-empty"


@pytest.mark.parametrize("option", ["--nodes=1,2", "--repeats=3", "--minutes=30", "--dir=x", "--cluster=lab"])
def test_an_option_that_does_nothing_while_runs_are_read_is_refused(option: str, tmp_path: Path) -> None:
    name = option.partition("=")[0]
    one, two = other(tmp_path, "1", 1, 4.0), other(tmp_path, "2", 2, 5.0)
    with pytest.raises(
        BadInput, match=rf"^scaling: {name} .*: leave {name} out, or give CMD behind --$"
    ) as refusal:
        command.main([option, str(one), str(two)], {})
    assert refusal.value.id == "scaling-run-option"


def test_sweeps_of_two_kinds_are_read_together_only_if_one_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweeps = []
    for nodes, kind in ((1, "strong"), (2, "weak")):
        asked = Sweep(kind=kind, nodes=(1, 2), repeats=1, command=("my.py",), options=(), cluster="")
        folder = open_folder(tmp_path / kind, asked)
        other(folder.path / "runs", f"n{nodes}-r1", nodes, 4.0)
        folder.note("done", nodes, 1, {"run": f"n{nodes}-r1"})
        sweeps.append(folder.path)
    strong, weak = sweeps
    said = f"{strong} is of strong scaling and {weak} is of weak scaling: give sweeps of one kind"
    with pytest.raises(BadInput, match=rf"^{said}$") as refusal:
        command.main([str(strong), str(weak)], {})
    assert refusal.value.id == "scaling-kinds-differ"
    assert scaling(capsys, sweeps, "--weak")[0]["kind"] == "weak"


@pytest.mark.parametrize("ranks", [3, 4])
def test_more_nodes_with_no_more_ranks_are_no_scaling(ranks: int, tmp_path: Path) -> None:
    one = other(tmp_path, "1", 1, 4.0, world_size=4)
    two = other(tmp_path, "2", 2, 4.0, world_size=ranks)
    more = rf"runs on 2 nodes have {ranks} ranks, and those on 1 have 4: give sizes whose ranks grow with their nodes"
    with pytest.raises(BadInput, match=rf"^{more}$") as refusal:
        command.main([str(two), str(one)], {})
    assert (refusal.value.id, refusal.value.status) == ("scaling-ranks-no-more", 64)


def test_the_picture_is_one_file_that_says_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        other(tmp_path, f"{nodes}-{at}", nodes, 4.0 + at / 9) for nodes in (1, 2, 4, 8, 64) for at in (0, 1)
    ]
    file = tmp_path / "s.svg"
    command.main([*map(str, runs), "-o", str(file)], {})
    assert f"{file} is drawn" in capsys.readouterr().err
    text = file.read_text()
    picture = ET.fromstring(text)
    words = [one.text for one in picture.iter() if one.tag.endswith("}text")]
    assert words[:3] == ["my.py: weak scaling", "Speed-up (1 node: 24.66 steps/s)", "1"]
    assert {"ideal", "measured", "nodes", "64", "100 %"} <= set(words)
    assert len([one for one in picture.iter() if one.tag.endswith("}circle")]) == 10
    assert "64: 100 %" in (picture.findtext("{http://www.w3.org/2000/svg}desc") or "")
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "nan" not in text
    assert file.stat().st_mode & 0o777 == 0o600


DRAWN = """\
<rect class="bg" width="420" height="580"/>
<text class="title" x="8" y="20">my.py: weak scaling</text>
<g transform="translate(0 28)">
<text class="head" x="8" y="18">Speed-up (1 node: 25 steps/s)</text>
<g transform="translate(0 26)">
<line class="grid" x1="52" x2="404" y1="210.0" y2="210.0"/>
<text x="46" y="214.0" text-anchor="end">0</text>
<line class="grid" x1="52" x2="404" y1="147.1" y2="147.1"/>
<text x="46" y="151.1" text-anchor="end">1</text>
<line class="grid" x1="52" x2="404" y1="84.3" y2="84.3"/>
<text x="46" y="88.3" text-anchor="end">2</text>
<line class="grid" x1="52" x2="404" y1="21.4" y2="21.4"/>
<text x="46" y="25.4" text-anchor="end">3</text>
<line class="axis" x1="52" x2="404" y1="210" y2="210"/>
<line class="axis" x1="70.9" x2="70.9" y1="210" y2="214"/>
<text x="70.9" y="227" text-anchor="middle">1</text>
<line class="axis" x1="228.0" x2="228.0" y1="210" y2="214"/>
<text x="228.0" y="227" text-anchor="middle">2</text>
<line class="axis" x1="385.1" x2="385.1" y1="210" y2="214"/>
<text x="385.1" y="227" text-anchor="middle">3</text>
<text x="228.0" y="244" text-anchor="middle">nodes</text>
<polyline class="ideal" points="70.9,147.1 228.0,84.3 385.1,21.4"/>
<text class="ideal-word" x="302.6" y="45.8" text-anchor="end">ideal</text>
<polyline class="seen" points="70.9,147.1 228.0,115.7 385.1,84.3"/>
<circle class="dots" cx="70.9" cy="147.1" r="3.5"/>
<path class="seen" d="M228.0 147.1V84.3M223.0 147.1h10M223.0 84.3h10"/>
<circle class="dots" cx="228.0" cy="115.7" r="3.5"/>
<circle class="dots" cx="385.1" cy="84.3" r="3.5"/>
<text class="seen-word" x="306.6" y="133.7" text-anchor="middle">measured</text>
</g>
</g>
<g transform="translate(0 304)">
<text class="head" x="8" y="18">Efficiency against the ideal</text>
<g transform="translate(0 26)">
<line class="grid" x1="52" x2="404" y1="210.0" y2="210.0"/>
<text x="46" y="214.0" text-anchor="end">0 %</text>
<line class="grid" x1="52" x2="404" y1="120.0" y2="120.0"/>
<text x="46" y="124.0" text-anchor="end">50 %</text>
<line class="grid" x1="52" x2="404" y1="30.0" y2="30.0"/>
<text x="46" y="34.0" text-anchor="end">100 %</text>
<line class="axis" x1="52" x2="404" y1="210" y2="210"/>
<line class="axis" x1="70.9" x2="70.9" y1="210" y2="214"/>
<text x="70.9" y="227" text-anchor="middle">1</text>
<line class="axis" x1="228.0" x2="228.0" y1="210" y2="214"/>
<text x="228.0" y="227" text-anchor="middle">2</text>
<line class="axis" x1="385.1" x2="385.1" y1="210" y2="214"/>
<text x="385.1" y="227" text-anchor="middle">3</text>
<text x="228.0" y="244" text-anchor="middle">nodes</text>
<polyline class="ideal" points="70.9,30.0 228.0,30.0 385.1,30.0"/>
<text class="ideal-word" x="302.6" y="23.0" text-anchor="end">ideal</text>
<polyline class="seen" points="70.9,30.0 228.0,75.0 385.1,90.0"/>
<circle class="dots" cx="70.9" cy="30.0" r="3.5"/>
<path class="seen" d="M228.0 120.0V30.0M223.0 120.0h10M223.0 30.0h10"/>
<circle class="dots" cx="228.0" cy="75.0" r="3.5"/>
<circle class="dots" cx="385.1" cy="90.0" r="3.5"/>
<text class="seen-word" x="306.6" y="108.0" text-anchor="middle">measured</text>
</g>
</g>
</svg>"""


def drawn(folder: Path, *sizes: tuple[int, float]) -> str:
    """The picture of runs of so many nodes, with a hundred steps in so many seconds."""
    folder.mkdir()
    runs = [other(folder, f"{at}", nodes, seconds) for at, (nodes, seconds) in enumerate(sizes)]
    command.main([*map(str, runs), "-o", str(folder / "s.svg")], {})
    return (folder / "s.svg").read_text()


def test_the_points_of_the_picture_lie_by_their_nodes_and_gains(tmp_path: Path) -> None:
    """A node is 157.1 wide. The speed-up reaches to 3.15 in the height of 198, the efficiency to 110 %."""
    text = drawn(tmp_path / "1", (1, 4.0), (2, 4.0), (2, 8.0), (3, 6.0))
    begin, _, rest = text.partition("<style>")
    assert begin.endswith(
        "<title>my.py: weak scaling</title><desc>by nodes: 1: 1.00; 2: 1.50; 3: 2.00; bars reach from the slowest "
        "repeats to the fastest. by nodes: 1: 100 % (100 to 100 %); 2: 75 % (50 to 100 %); 3: 67 % (67 to 67 %). "
        "It pays up to 3 nodes, the most that were tried: 2.00 times as fast as on 1 node, an efficiency of 67 %. "
        "The numbers do not show what holds it back: no parts of the steps are known.</desc>"
    )
    shapes = rest.partition("</style>")[2].rstrip("\n")
    assert shapes.replace("><", ">\n<") == DRAWN


@pytest.mark.parametrize(
    ("sizes", "on_axis", "ideal"),
    [
        (((1, 4.0), (5, 4.0)), ["0", "2", "4"], "70.9,172.3 385.1,21.4"),
        (((1, 4.0), (6, 4.0)), ["1", "2", "4"], "75.8,188.6 380.2,16.7"),
        (((2, 4.0), (11, 4.0)), ["0", "2", "4"], "70.9,175.7 385.1,21.4"),
        (
            ((1, 4.0), (32, 9.0), (64, 8.0)),
            ["1", "2", "4", "8", "16", "32", "64"],
            "63.1,200.0 337.9,45.2 392.9,14.2",
        ),
        (((1, 4.0), (256, 4.0)), ["1", "4", "16", "64", "256"], "60.4,202.4 395.6,13.7"),
        (((1, 4.0), (8, 64.0)), ["0.5", "1", "2", "4", "8"], "72.9,161.4 383.1,15.4"),
    ],
)
def test_axes_are_logarithmic_from_six_times_the_ranks_on(
    sizes: tuple[tuple[int, float], ...], on_axis: list[str], ideal: str, tmp_path: Path
) -> None:
    text = drawn(tmp_path / "1", *sizes).partition("Efficiency against")[0]
    assert re.findall(r'x="46" y="[\d.]+" text-anchor="end">([^<]+)<', text) == on_axis
    assert re.findall(r'<polyline class="ideal" points="([^"]+)"', text) == [ideal]


def test_numbers_of_nodes_do_not_lie_on_each_other(tmp_path: Path) -> None:
    """A digit takes 9, and the next number begins 6 behind it: 70 nodes lie 23.9 behind 50."""
    text = drawn(tmp_path / "1", (1, 4.0), (50, 4.0), (70, 4.0), (71, 4.0), (108, 4.0))
    first = text.partition("Efficiency against")[0]
    assert re.findall(r'y="227" text-anchor="middle">(\w+)<', first) == ["1", "50", "71", "108"]


def test_hostile_names_and_values_stay_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write(
            tmp_path,
            f"{nodes}",
            {
                "command": [f"a/{EVIL}.py"],
                "hardware": [{"nodes": [], "cpu": {"model": EVIL, "flags": []}, "gpus": [EVIL]}],
                "attempts": [
                    attempt(
                        nodes,
                        steps={"timed": 9, "seconds": 1.0},
                        threads="9" * 99,
                        versions={"torch": EVIL},
                        device=EVIL,
                    )
                ],
            },
        )
        for nodes in (1, 2)
    ]
    found, words = scaling(capsys, runs, "-o", str(tmp_path / "s.svg"))
    assert found["points"][0]["cost"] is None
    assert "\x1b" not in words
    assert "\n\n" not in words.split("nodes  ranks")[0].rstrip("\n")
    assert "<script" not in (tmp_path / "s.svg").read_text()
    ET.fromstring((tmp_path / "s.svg").read_text())


def test_numbers_that_are_none_are_no_rates(tmp_path: Path) -> None:
    odd: list[object] = [True, "9", -5, 1e300, None, {}]
    for at, value in enumerate(odd):
        run = write(tmp_path, f"{at}", {"attempts": [attempt(2, steps={"timed": 9, "seconds": value})]})
        with pytest.raises(BadInput):
            command.main([str(run)], os.environ)


@pytest.mark.parametrize("status", [75, 130, 143])
def test_a_run_that_somebody_has_ended_counts_as_far_as_it_came(
    status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [other(tmp_path, "a", 1, 4.0), other(tmp_path, "b", 2, 5.0, status=status)]
    found, _ = scaling(capsys, runs)
    assert (len(found["points"]), found["left_out"]) == (2, [])


def test_what_a_run_costs_is_counted_in_gpus_or_cores_an_epoch_or_so_many_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = [other(tmp_path, f"g{nodes}", nodes, 5.0, device="cuda") for nodes in (1, 2)]
    assert scaling(capsys, gpus)[0]["points"][1]["cost"] == {
        "gpu_hours_per_1000_steps": pytest.approx(2 * 1000 / 20 / 3600)
    }
    cores = [reference(tmp_path, f"c{nodes}", nodes, 100.0) for nodes in (1, 2)]
    for run in cores:  # of a script that has no epochs
        told = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({"ranks": told["ranks"]}))
    found, words = scaling(capsys, cores)
    assert found["points"][1]["cost"] == {
        "cpu_hours_per_1000_steps": pytest.approx(2 * 4 * 1000 * 64 / 100 / 3600)
    }
    assert "CPU hours per 1,000 steps" in words


@pytest.mark.parametrize(
    ("threads", "scheduler", "device", "usable", "is_crowded"),
    [
        ("2", "embedded", "cpu", 4, True),
        ("1", "embedded", "cpu", 4, False),
        ("2", "slurm", "cpu", 4, False),
        ("2", "embedded", "cuda", 4, False),
        ("2", "embedded", "cpu", None, False),
    ],
)
def test_ranks_that_take_all_cores_of_this_machine_are_said_to(
    threads: str,
    scheduler: str,
    device: str,
    usable: int | None,
    is_crowded: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = []
    for nodes, seconds in ((1, 4.0), (2, 6.5)):
        made = attempt(nodes, threads=threads, scheduler=scheduler, device=device)
        made["steps"] = {"timed": 100, "seconds": seconds}
        hardware = [{"nodes": [], "cpu": {"model": "x", "usable": usable, "flags": []}, "gpus": []}]
        runs.append(write(tmp_path, f"{nodes}", {"attempts": [made], "hardware": hardware}))
    sentence = scaling(capsys, runs)[0]["finding"]["sentence"]
    assert ("and 2 ranks share the 4 cores of this machine." in sentence) == is_crowded
    assert ("of this machine" in sentence) == is_crowded


def test_a_rank_that_is_the_slowest_in_one_repeat_alone_is_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [reference(tmp_path, "one", 1, 100), reference(tmp_path, "a", 4, 200, sync=0.6, slow=2)]
    runs.append(reference(tmp_path, "b", 4, 200, sync=0.6, slow=1))
    assert scaling(capsys, runs)[0]["points"][1]["slowest"] is None


@pytest.mark.parametrize(("batch", "kind"), [(67, "strong"), (128, "weak")])
def test_a_batch_that_is_rounded_to_the_ranks_is_the_same(
    batch: int, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [reference(tmp_path, "a", 1, 100), reference(tmp_path, "b", 2, 150, batch=batch)]
    found, words = scaling(capsys, runs)
    assert found["kind"] == kind
    assert ("(64 to 67 samples)" in words) == (kind == "strong")


def test_the_page_of_a_scaling_has_its_finding_sizes_parts_and_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Sweep(kind="strong", nodes=(1, 3, 4), repeats=1, command=("-m", "train"), options=(), cluster="x")
    folder = open_folder(tmp_path / "s", asked)
    runs = tmp_path / "s" / "runs"
    reference(runs, "n1-r1", 1, 100)
    reference(runs, "n3-r1", 3, 150, sync=0.4)
    (runs / "n4-r1").mkdir()
    for nodes in (1, 3, 4):
        folder.note("jobs", nodes, 1, {"run": f"n{nodes}-r1", "job": "7"})
    assert command.report(tmp_path / "s", "", {}) == 0
    page = tmp_path / "s" / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    html = page.read_text()
    assert '<p class="end wait">It stops paying beyond 1 node: 3 nodes are 1.50 times as fast' in html
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in html.split("<tr>")]
    assert ["3 nodes", "40.0 %", "10.0 %", "0.0 %", "50.0 %"] in rows
    assert ["3", "150 samples/s", "10", "n3-r1"] in rows
    assert f"<h2>Left out</h2><ul><li>{runs / 'n4-r1'}: its job has not begun</li></ul>" in html
    assert "<li>torch: 2.15.0</li>" in html
    assert "What differs" not in html
    assert html.count("<svg") == 2
    again = tmp_path / "again.html"
    for nodes in (3, 4):  # what has been measured since counts before what was submitted
        reference(runs, f"n{nodes}-r1.1", nodes, 98.0 * nodes)
        folder.note("done", nodes, 1, {"run": f"n{nodes}-r1.1"})
    assert command.report(tmp_path / "s", str(again), {}) == 0
    assert '<p class="end good">It scales ideally up to 4 nodes' in again.read_text()
    assert "Left out" not in again.read_text()


@pytest.mark.parametrize(("steps", "is_enough"), [(5, True), (4, False)])
def test_five_steps_beside_the_first_are_enough(steps: int, is_enough: bool, tmp_path: Path) -> None:
    runs = [reference(tmp_path, "a", 1, 100), reference(tmp_path, "b", 2, 150)]
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs[1] / "metrics.jsonl").write_text("".join(lines[: 1 + steps]))
    if is_enough:
        assert command.main([*map(str, runs)], {}) == 0
    else:
        assert refused(runs) == "scaling-one-size"


def test_the_parts_of_a_step_are_not_known_if_a_rank_does_not_tell_its_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [reference(tmp_path, "a", 1, 100), reference(tmp_path, "b", 2, 150)]
    told = json.loads((runs[1] / "result.json").read_text())
    del told["ranks"][1]["first_step"]
    (runs[1] / "result.json").write_text(json.dumps(told))
    found, _ = scaling(capsys, runs)
    assert [one["shares"] is None for one in found["points"]] == [False, True]


def test_of_a_directory_the_runs_that_it_has_not_taken_are_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Sweep(kind="weak", nodes=(1, 2, 4), repeats=1, command=("my.py",), options=(), cluster="")
    folder = open_folder(tmp_path / "s", asked)
    with pytest.raises(BadInput, match=r"^scaling: no run can be measured: there is none$"):
        command.main([str(folder.path)], {})
    runs = folder.path / "runs"
    other(runs, "n1-r1", 1, 4.0, status=130)
    other(runs, "n2-r1", 2, 5.0, process_group=None)
    (runs / "n2-r1.log").touch()
    (runs / "n4-r1").mkdir()
    left_out = [
        f"{runs}/n1-r1: it was broken off",
        f"{runs}/n2-r1: no rank joined a process group: each of the 2 ranks trained for itself, on what it took "
        "for all data (docs/own-script.md, Each rank for itself)",
        f"{runs}/n4-r1: no attempt has started its ranks (n4-r1.log beside it)",
    ]
    for read in (command.main, lambda paths, env: command.report(Path(paths[0]), "", env)):
        with pytest.raises(BadInput) as refused:
            read([str(folder.path)], {})
        assert str(refused.value) == f"scaling: no run can be measured: {'; '.join(left_out)}"
    other(runs, "n1-r1.1", 1, 4.0)
    other(runs, "n2-r1.1", 2, 5.0)
    for nodes in (1, 2):
        folder.note("done", nodes, 1, {"run": f"n{nodes}-r1.1"})
    other(runs, "n4-r1.9", 4, 5.0, status=1)
    other(runs, "n4-r1.10", 4, 5.0, status=None)
    found, _ = scaling(capsys, [folder.path])
    assert found["left_out"] == [f"{runs}/n4-r1.10: it has not ended"]
    damaged = runs / "n4-r1.10" / "manifest.json"
    damaged.write_text("[]")
    found, _ = scaling(capsys, [folder.path])
    assert found["left_out"] == [
        f"{damaged} is no manifest: it has no attempts: take it from a copy, or give another run"
    ]
    assert [one["nodes"] for one in found["points"]] == [1, 2]
