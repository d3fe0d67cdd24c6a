"""The page about a run and the archive for a support desk: what stands in them, whatever the run directory
holds."""

import io
import json
import os
import re
import stat
import tarfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.record.traces import Series
from entrypoint.report import charts, command, facts, page

BEGAN = "2026-01-01T00:01:00+00:00"
SECRET = "hf_" + "abcdefghijklmnopqr" + "0123456789"
EVIL = "<script>alert(1)</script>"
KEY = "0123456789abcdef" * 4
PRIVATE = "-----BEGIN RSA PRIVATE KEY-----\nMIIprivatepart\n-----END RSA PRIVATE KEY-----\n"


def attempt(number: int, status: int | None, **more: object) -> dict[str, Any]:
    return {
        "attempt": number,
        "began": BEGAN.replace("00:01", f"00:{1 + 10 * number:02}"),
        "ended": None if status is None else BEGAN.replace("00:01", f"00:{9 + 10 * number:02}"),
        "status": status,
        "scheduler": "slurm",
        "job_id": "7",
        "nodes": ["a", "b"],
        "nproc_per_node": 1,
        "world_size": 2,
        "device": "cpu",
        "start": {"task": 2.0, "nodes": 1.0, "torch": 7.0, "ranks": 0.5},
        "versions": {"torch": "2.15.0"},
        **more,
    }


def ended(status: int, *, rank: int = 1, node: str = "b", error: str = "") -> str:
    return f"status={status}\nrank={rank}\nnode={node}\nsignal=0\ntime=1767226000.5\nerror={error}\n"


def write(path: Path, files: dict[str, object]) -> Path:
    """A run directory; what is no text is written as JSON."""
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def metrics(steps: int) -> str:
    rows = [
        f'{{"step": {s}, "loss": {2 / s}, "lr": 0.1, "images_per_s": {90 + s % 7}}}'
        for s in range(1, steps + 1)
    ]
    return "\n".join([*rows, f'{{"step": {steps}, "accuracy": 0.5, "correct": 1, "total": 2}}', ""])


def manifest(*attempts: dict[str, Any], **more: object) -> dict[str, Any]:
    nodes = [{"name": name, "plan": f"plan.{at}.json"} for at, name in enumerate(attempts[-1]["nodes"])]
    return {
        "schema_version": 2,
        "command": ["train.py", "--token", SECRET],
        "nodes": nodes,
        "attempts": list(attempts),
        **more,
    }


RESULT = {
    "accuracy": 0.975,
    "split": "test",
    "steps": 40,
    "attempt": 0,
    "began": BEGAN,
    "first_step_s": 3.0,
    "train_s": 100.0,
    "images_per_s": 93.0,
    "peak_memory_bytes": 2**31,
    "checkpoints": {"held_s": 1.0},
    "ranks": [
        {"rank": rank, "node": "b", "images_per_s": 30.0, "train_s": 100.0, "input_wait_s": 9.0 * (rank == 2)}
        for rank in range(4)
    ],
}
CONFIG = {"attempt": 0, "name": "digits", "config": {"batch_size": 90, "seed": 1}}
GOOD: dict[str, object] = {
    "manifest.json": manifest(attempt(0, 0)),
    "config.json": CONFIG,
    "result.json": RESULT,
    "metrics.jsonl": metrics(40),
    "plan.0.json": {"mode": "torchrun", "nnodes": 2, "sources": {"nnodes": "derived:SLURM_NNODES"}},
    "outcome/0.0": ended(0, rank=0, node="a"),
    "outcome/0.1": ended(0),
    "job.log": "apptrain: job 7\ndoctor: 2 nodes, 1.0 s\nb: its clock is wrong\nnot healthy: 1 finding\nstep 1\n",
    "logs/0/b.rank1.err": f"Traceback\nHF_TOKEN={SECRET}\nthe key is {KEY}\n",
    "checkpoints/step-00000020/model": "weights",
    "join.key": f"{KEY}\n",
}
RESTARTED = GOOD | {
    "manifest.json": manifest(
        attempt(0, 1),
        attempt(1, 137, checkpoint={"path": "checkpoints/step-00000010", "step": 10}),
        attempt(2, 1, checkpoint={"path": "checkpoints/step-00000020", "step": 20}),
    ),
    "outcome/2.1": ended(1, error=f"ValueError: no {EVIL} with token={SECRET}"),
    "logs/2/b.rank1.err": (
        f"{PRIVATE}Traceback {EVIL}\r\n{'x' * 390} {SECRET}\nValueError HF_TOKEN={SECRET}\n"
    ),
}
MEETING: dict[str, object] = {
    "plan.0.json": {"nodes": ["a", "b"], "argv": ["torchrun", "x.py"], "scheduler": "slurm"},
    "outcome/0.0": "status=69\nrank=\nnode=a\nsignal=0\ntime=1767226000\nerror=b did not come within 300 s\n",
    "job.log": "apptrain: b did not come within 300 s\n",
}
OLDER: dict[str, object] = {
    "manifest.json": {
        "format": 1,
        "attempts": [
            {"attempt": 0, "scheduler": "slurm", "nodes": ["a", "b"], "command": ["x.py"], "image": None}
        ],
    }
}
DAMAGED = GOOD | {
    "manifest.json": '{"attempts": [',
    "result.json": "[1]",
    "metrics.jsonl": metrics(20) + '{"step": 21, "lo\nno line\n{"step": 1' + "0" * 400 + "}\n",
    "outcome/0.1": "nothing",
}
HOSTILE = GOOD | {
    "manifest.json": manifest(
        attempt(
            0, 0, nodes=[EVIL, "b\x1b[31m\u202e"], versions={EVIL: EVIL}, job_id=EVIL, start={EVIL: 1e300}
        ),
        command=[EVIL, "'\"&"],
        environment={"values": {EVIL: EVIL}, "names": []},
        hardware=[{"nodes": [EVIL], "cpu": {"model": EVIL}, "gpus": [EVIL], "driver": EVIL}],
    ),
    "config.json": {"attempt": 0, "config": {EVIL: EVIL, "batch_size": 1e-300}},
    "result.json": {
        "accuracy": 1e300,
        "steps": -1,
        "split": EVIL,
        "ranks": [{EVIL: 1, "rank": EVIL, "node": EVIL}, 7],
    },
    "metrics.jsonl": '{"step": 1, "loss": NaN, "images_per_s": 1e308}\n{"step": 2, "loss": 1e308, "lr": -1e308}\n'
    '{"step": 9223372036854775807, "loss": -1e308, "lr": 1e308, "accuracy": Infinity}\n',
    "job.log": f"apptrain: {EVIL}\x1b]0;x\x07\u202e\n",
    f"stacks/0/{EVIL.replace('/', '')}.txt": "x",
}
CASES = {
    "good": (
        GOOD,
        "Done: test accuracy 97.50 % after 40 steps in 8 min 10 s on 2 nodes.",
        [
            "rank 2 on b waits 9 s for its data",
            "b: its clock is wrong",
            "50.00 % at step 40",
            "import of torch",
        ],
    ),
    "two restarts": (
        RESTARTED,
        "It failed, status 1: rank 1 on b: ValueError: no &lt;script&gt;",
        [
            "attempt 1: status 137",
            "attempt 2 begins, from checkpoints/step-00000020",
            "HF_TOKEN=&lt;secret&gt;",
        ],
    ),
    "failed in the meeting": (
        MEETING,
        "The nodes did not come together, status 69: a: b did not come within 300 s",
        ["manifest.json: not there: no attempt has started its ranks", "torchrun x.py"],
    ),
    "an older version": (OLDER, "No end is known", ["x.py", "plan.0.json: not there"]),
    "damaged": (
        DAMAGED,
        "Done",
        [
            "manifest.json: it is no JSON",
            "result.json: it is no object",
            "outcome: 1 of 2 files cannot be read",
            "metrics.jsonl: line 24: a number has 401 digits",
            "loss: 2 at step 1, 0.1 at step 20",
        ],
    ),
    "hostile": (HOSTILE, "Done", ["1 values are no number", "alert(1)"]),
}


class _Tags(HTMLParser):
    """Which elements a page has, and whether each one is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("href", "src")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", CASES)
def test_a_page_says_how_the_run_ended_and_shows_what_is_left(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files, sentence, words = CASES[name]
    run = write(tmp_path / "run", files)
    assert command.main(run, "", bundled=False, other="", env={}) == 0
    written = run / "report.html"
    assert capsys.readouterr().out.endswith(f"{written}\n")
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    html = written.read_text()
    end = re.search(r'<p class="end \w+">(.*?)</p>', html)
    assert end
    assert end[1].startswith(sentence)
    for word in words:
        assert word in html
    for secret in (SECRET[:9], KEY, "MIIprivatepart"):
        assert secret not in html
    assert not re.search(r"[^\n\x20-\x7e\x80-\uffff]|\u202e|https?:|nan[,\"<]|inf[,\"<]", html)
    assert not re.search(r"[0-9]{40}", html)
    tags = _Tags()
    tags.feed(html)
    assert tags.open == []
    assert not tags.found & {"script", "img", "link", "iframe", "object"}


@pytest.mark.parametrize(
    ("queued", "says"),
    [
        (None, "how long it queued, is not recorded"),
        (3600.0, ", 1 h 00 min of it in the queue"),
        (1e300, "1 attempt in "),
    ],
)
def test_the_time_line_begins_with_the_queue_where_that_is_known(
    tmp_path: Path, queued: float | None, says: str
) -> None:
    more = {} if queued is None else {"queued_s": queued}
    run = write(tmp_path / "run", GOOD | {"manifest.json": manifest(attempt(0, 0, **more))})
    html = page.html(facts.read(run, {}))
    assert says in html
    assert ("the job is submitted" in html) == (queued == 3600.0)
    assert html.count("is not recorded") == (queued is None)


def test_a_page_shows_the_tokens_a_second_that_a_script_tells(tmp_path: Path) -> None:
    rows = "".join(f'{{"step": {at}, "loss": 1.0, "tokens_per_s": {at * 1000}}}\n' for at in (1, 2, 9))
    rows += '{"step": 10, "tokens_per_s": NaN}\n'
    html = page.html(facts.read(write(tmp_path / "run", {**GOOD, "metrics.jsonl": rows}), {}))
    assert "<dt>tokens/s, median</dt><dd>2000</dd>" in html
    assert "rate: 1000 tokens/s at step 1, " in html
    assert "Throughput, samples/s" not in html


@pytest.mark.parametrize(("status", "is_shown"), [(0, False), (75, False), (1, True), (137, True)])
def test_the_end_of_a_log_is_shown_only_if_its_rank_failed(
    tmp_path: Path, status: int, is_shown: bool
) -> None:
    run: dict[str, object] = {"manifest.json": manifest(attempt(0, status)), "outcome/0.1": ended(status)}
    path = write(tmp_path / "run", run | {"logs/0/b.rank1.err": "asked to save\n"})
    assert facts.read(path, {}).tail == (("logs/0/b.rank1.err", ["asked to save"]) if is_shown else ("", []))


def test_a_page_says_what_differs_from_another_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", GOOD)
    changed = manifest(attempt(0, 0, versions={"torch": "2.16.0"}))
    other = write(tmp_path / "other", GOOD | {"manifest.json": changed, "metrics.jsonl": metrics(30)})
    command.main(run, str(tmp_path / "page.html"), bundled=False, other=str(other), env={})
    html = (tmp_path / "page.html").read_text()
    assert "Compared with other" in html
    assert "identical for 30 steps; one ends at 40, the other at 30" in html
    assert "2.16.0" in html
    with pytest.raises(BadInput, match="cannot be compared"):
        command.main(run, "", bundled=False, other=str(write(tmp_path / "bare", MEETING)), env={})


@pytest.mark.parametrize(
    ("out", "files", "id"),
    [
        ("", None, "run-missing"),
        ("", {"notes.txt": "x"}, "report-no-run"),
        ("no/such/folder.html", GOOD, "output-unwritable"),
        (".", GOOD, "output-unwritable"),
    ],
)
def test_what_cannot_be_reported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, files: dict[str, object] | None, id: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write(tmp_path / "run", files) if files else tmp_path / "run"
    with pytest.raises(BadInput) as refused:
        command.main(run, out, bundled=False, other="", env={})
    assert refused.value.id == id


def test_an_archive_has_what_a_support_desk_needs_and_no_key_secret_or_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = tmp_path / "private"
    private.write_text("private words")
    run = write(tmp_path / "run", RESTARTED | {"notes.txt": "mine", "stacks/2/b.rank1.txt": f"in {KEY}"})
    (run / "logs/2/linked.rank0.err").symlink_to(private)
    os.mkfifo(run / "logs/2/pipe.rank0.err")
    command.main(run, "", bundled=True, other="", env={"MY_TOKEN": "not-a-known-shape"})
    said = capsys.readouterr().out
    assert said.endswith(f"{tmp_path}/run-support.tar.gz\n")
    archive = tmp_path / "run-support.tar.gz"
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as packed:
        found = {
            member.name.removeprefix("run-support/"): (packed.extractfile(member) or io.BytesIO())
            .read()
            .decode()
            for member in packed
        }
    assert {
        *("report.html", "manifest.json", "plan.0.json", "outcome/2.1", "job.log", "logs/2/b.rank1.err"),
        *("stacks/2/b.rank1.txt", "metrics.jsonl", "CONTENTS.txt"),
    } <= found.keys()
    everything = "".join(found.values())
    for kept_out in (SECRET, KEY, "MIIprivatepart", "weights", "mine", "private words"):
        assert kept_out not in everything
    assert not [name for name in found if "key" in name or "checkpoints" in name]
    for why in (
        "join.key (the key of the run)",
        "checkpoints (states of the training)",
        "it is a link",
        "a FIFO",
    ):
        assert why in found["CONTENTS.txt"]


@pytest.mark.parametrize(("number", "there"), [(0, True), (1, False)])
def test_the_end_of_a_run_leaves_a_page_if_the_reference_program_ran_in_it(
    tmp_path: Path, number: int, there: bool
) -> None:
    run = write(tmp_path / "run", GOOD)
    assert command.leave(run, number, {}) == ""
    assert (run / "report.html").exists() == there


def test_no_trouble_with_the_page_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", GOOD)

    def broken(*_: object, **__: object) -> str:
        raise RuntimeError("bug")

    monkeypatch.setattr(page, "html", broken)
    assert command.leave(run, 0, {}) == "RuntimeError: bug"


def test_a_file_that_takes_too_long_is_read_in_part(tmp_path: Path) -> None:
    run = write(tmp_path / "run", GOOD | {"metrics.jsonl": metrics(5000)})
    found = facts.read(run, {}, seconds=-1.0)
    assert found.missing == ["metrics.jsonl: read up to step 4095 only, in -1 s"]


def test_a_long_series_keeps_its_least_and_most() -> None:
    series = Series()
    for step in range(1, 100_001):
        series.put(step, 1.0 if step != 77_777 else 9.0)
    points = charts.thinned(series)
    assert len(points) == charts.BUCKETS
    assert (max(point.most for point in points), min(point.least for point in points)) == (9.0, 1.0)
    assert len(charts.curves("Loss", {"loss": series})) < 20_000


def told(run: Path) -> str:
    command.main(run, "", bundled=False, other="", env={})
    return (run / "report.html").read_text()


def test_what_no_rank_knows_is_no_part_of_the_steps(tmp_path: Path) -> None:
    ranks: Any = RESULT["ranks"]
    on_gpus = RESULT | {"ranks": [rank | {"sync_wait_s": None} for rank in ranks]}
    on_cpus = RESULT | {"ranks": [rank | {"sync_wait_s": 2.0} for rank in ranks]}
    said = "exchanging with other ranks"
    assert said not in told(write(tmp_path / "gpu", GOOD | {"result.json": on_gpus}))
    assert said in told(write(tmp_path / "cpu", GOOD | {"result.json": on_cpus}))


def test_one_share_is_drawn_on_the_whole_scale() -> None:
    one = Series()
    one.put(60, 0.9778)
    drawn = charts.curves("Accuracy", {"test": one}, percent=True)
    assert re.findall(r">(\d+) %<", drawn)[-1] == "100"
