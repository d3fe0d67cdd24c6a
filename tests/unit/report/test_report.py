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
from entrypoint.job.outcome import Outcome
from entrypoint.record.traces import Series
from entrypoint.report import bundle, charts, command, facts, page

BEGAN = "2026-01-01T00:01:00+00:00"
NEXT_DAY = "2026-01-02T00:01:00+00:00"
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
    """A run directory; what is no text is written as JSON. Its manifest is from when the run began."""
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        if name == "manifest.json":
            written(file, 0.0)
    return path


def written(file: Path, after: float) -> None:
    """Makes it a file that was last written so many seconds after the run began."""
    began = facts.moment(BEGAN)
    assert began
    os.utime(file, (began + after, began + after))


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
            "<dt>accuracy</dt><dd>97.50 %</dd>",
            "<dt>steps</dt><dd>40</dd>",
            "<dt>images/s</dt><dd>93</dd>",
            "<dt>training</dt><dd>1 min 40 s</dd>",
            "<dt>to the first step</dt><dd>3 s</dd>",
            "<dt>peak memory of a rank</dt><dd>2 GiB</dd>",
            "<dt>where</dt><dd>2 nodes, 2 ranks</dd>",
            "<dt>device</dt><dd>cpu</dd>",
            "<dt>job</dt><dd>7</dd>",
            "task and container 2 s, meeting of the nodes 1 s, import of torch 7 s, start of the ranks 500 ms, "
            "until the first step 2.5 s.",
            "the first step is done",
            "checkpoint of step 20",
            "<th>nnodes</th><td>2 (derived:SLURM_NNODES)</td>",
            "<th>seed</th><td>1</td>",
        ],
    ),
    "each rank for itself": (
        GOOD | {"manifest.json": manifest(attempt(0, 0, process_group=None))},
        "Done: test accuracy 97.50 % after 40 steps in 8 min 10 s on 2 nodes. But no rank joined a process group: "
        "each of the 2 ranks trained for itself, on what it took for all data (docs/own-script.md, Each rank for "
        "itself).",
        ['<p class="end wait">'],
    ),
    "two restarts": (
        RESTARTED,
        "It failed, status 1: rank 1 on b: ValueError: no &lt;script&gt;",
        [
            "<dt>attempts</dt><dd>3</dd>",
            "A dashed line is where an attempt went on from a checkpoint.",
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


@pytest.mark.parametrize("name", ["job.log", "metrics.jsonl", "logs/0/a.rank0.out"])
def test_a_run_of_which_no_end_is_known_goes_on_as_long_as_its_files_are_written(
    tmp_path: Path, name: str
) -> None:
    files: dict[str, object] = {"manifest.json": manifest(attempt(0, None)), name: "x\n", "logs/1/a": ""}
    run = write(tmp_path / "run", files)
    written(run / name, 90.5)
    html = page.html(facts.read(run, {}))
    assert "1 attempt in at least 1 min 40 s" in html
    assert "training 1 min 30 s" in html
    (run / name).unlink()
    (run / name).symlink_to(__file__)
    assert "1 attempt in at least 10.5 s" in page.html(facts.read(run, {}))
    write(run, {"manifest.json": manifest(attempt(0, 0))})
    assert "1 attempt in 8 min 10 s" in page.html(facts.read(run, {}))


@pytest.mark.parametrize(
    ("status", "late", "copied", "says"),
    [
        (None, 60.5, False, "in at least 3 d 0 h"),
        (None, 61.5, True, "in at least 10.5 s"),
        (0, 540.0, False, "in 3 d 0 h"),
        (0, 541.0, True, "in 8 min 10 s"),
    ],
)
def test_the_times_of_files_count_unless_the_manifest_too_is_later_than_all_that_it_tells(
    tmp_path: Path, status: int | None, late: float, copied: bool, says: str
) -> None:
    """`cp -r`, and `touch` against the purge of a scratch file system, give files a later time."""
    files: dict[str, object] = {"job.log": "x\n", "checkpoints/step-00000020/model": ""}
    run = write(tmp_path / "run", files | {"manifest.json": manifest(attempt(0, status))})
    for name in ("job.log", "checkpoints/step-00000020"):
        written(run / name, 3 * 86400.0)
    written(run / "manifest.json", late)
    html = page.html(facts.read(run, {}))
    assert f"1 attempt {says}" in html
    assert ("<td>checkpoint of step 20</td>" in html) == (not copied)
    assert html.count("checkpoints: when each was saved, because this is a copy with other times") == copied


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


@pytest.mark.parametrize("bundled", [False, True])
def test_a_report_is_written_through_a_link_that_was_named_alone(tmp_path: Path, bundled: bool) -> None:
    run = write(tmp_path / "run", GOOD)
    mine = tmp_path / "mine"
    for given, there in (("link", "link"), ("", "run-support.tar.gz" if bundled else "run/report.html")):
        mine.write_text("before")
        (tmp_path / there).symlink_to(mine)
        command.main(run, str(tmp_path / given) if given else "", bundled=bundled, other="", env={})
        is_written = mine.read_bytes() != b"before"
        assert (is_written, (tmp_path / there).is_symlink()) == (bool(given), bool(given))


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


def packed(run: Path, env: dict[str, str] | None = None) -> tuple[bundle.Bundle, dict[str, str]]:
    """The archive of a run, and its texts."""
    found = bundle.pack(facts.read(run, env or {}), "<html>", env or {})
    with tarfile.open(fileobj=io.BytesIO(found.archive)) as archive:
        members = {member.name: (archive.extractfile(member) or io.BytesIO()).read() for member in archive}
    return found, {name.removeprefix("run-support/"): text.decode() for name, text in members.items()}


def test_an_archive_lists_what_is_in_it_and_what_is_not(tmp_path: Path) -> None:
    extra: dict[str, object] = {
        **dict.fromkeys(
            ("curves.png", "report.html", "notes.txt", "tensorboard/a", "hardware.0.1.json"), "x"
        ),
        **dict.fromkeys(("logs/1/a.rank0.out", "logs/1/a.rank0.txt", "logs/x/a.out", "outcome/1.0.2"), "x"),
        **dict.fromkeys(
            ("plan.1.json", "plan.0.1.json", "plan.x.json", "not-passed.txt", "stacks/1/a.txt"), "x"
        ),
        **dict.fromkeys(("logs/1/a.task.log", "stacks/1/nccl.rank0"), "x"),
    }
    found, texts = packed(write(tmp_path / "run", GOOD | extra))
    order = [
        *("report.html", "config.json", "hardware.0.1.json", "manifest.json", "plan.0.1.json", "plan.0.json"),
        *(
            "plan.1.json",
            "result.json",
            "job.log",
            "outcome/1.0.2",
            "outcome/0.0",
            "outcome/0.1",
            "metrics.jsonl",
        ),
        *(
            "not-passed.txt",
            "stacks/1/a.txt",
            "logs/1/a.task.log",
            "logs/1/a.rank0.out",
            "logs/0/b.rank1.err",
            "CONTENTS.txt",
        ),
    ]
    assert found.packed == list(texts) == order
    assert found.left_out == [
        "checkpoints (states of the training)",
        "curves.png (the report has the curves)",
        "join.key (the key of the run)",
        "logs/1/a.rank0.txt (not needed for support)",
        "logs/x/a.out (not needed for support)",
        "notes.txt (not needed for support)",
        "plan.x.json (not needed for support)",
        "report.html (made anew)",
        "stacks/1/nccl.rank0 (NCCL's flight recorder, which is no text: send it by itself)",
        "tensorboard (the same numbers as metrics.jsonl)",
    ]
    lines = texts["CONTENTS.txt"].splitlines()
    assert lines[:4] == [
        "What apptrain report --bundle has packed. Secrets are replaced by <secret>.",
        "Long files are cut in the middle.",
        "",
        "in it: report.html, 6 bytes",
    ]
    assert lines[-10:] == [f"left out: {line}" for line in found.left_out]
    assert found.in_words() == [
        f"in it: 19 files: {', '.join(order[:12])} and 7 more",
        f"left out: {'; '.join(found.left_out)}",
        "Names of nodes, users and paths stand in it: look at it before you send it.",
    ]


def test_an_archive_is_of_nobody_and_of_no_time(tmp_path: Path) -> None:
    run = write(tmp_path / ".run", GOOD)
    found = bundle.pack(facts.read(run, {}), "x", {})
    assert found.archive == bundle.pack(facts.read(run, {}), "x", {}).archive
    assert found.archive[4:8] == bytes(4)
    with tarfile.open(fileobj=io.BytesIO(found.archive)) as archive:
        told = {(one.uid, one.gid, one.uname, one.gname, one.mtime, one.mode) for one in archive}
        assert told == {(0, 0, "", "", 0, 0o600)}
        assert {one.name.partition("/")[0] for one in archive} == {"run-support"}


@pytest.mark.parametrize(
    ("name", "most"), [("outcome/0.1", 1 << 14), ("not-passed.txt", 1 << 16), ("logs/0/a.rank0.out", 1 << 16)]
)
def test_of_a_long_file_both_ends_are_packed(tmp_path: Path, name: str, most: int) -> None:
    line = " " * 63 + "\n"
    whole = line * (2 * most // 64)
    run = write(tmp_path / "run", {"manifest.json": manifest(attempt(0, 0)), name: whole})
    assert packed(run)[1][name] == whole
    write(run, {name: whole + line})
    head, _, tail = packed(run)[1][name].partition("\n... ")
    assert (len(head), tail.partition("...\n")[2]) == (most - 1, line * (most // 64 - 1))


def test_json_is_packed_without_its_secrets_even_if_it_is_none(tmp_path: Path) -> None:
    plan = {"argv": ["a", "--token", "hidden-word"], "nnodes": 2, "env": {"HF_TOKEN": SECRET}}
    run = write(
        tmp_path / "run", GOOD | {"plan.0.json": plan, "plan.1.json": f"{{ {SECRET}", "plan.2.json": [1]}
    )
    texts = packed(run, {"MY_TOKEN": "hidden-word"})[1]
    assert json.loads(texts["plan.0.json"])["nnodes"] == 2
    assert json.loads(texts["plan.2.json"]) == [1]
    assert texts["plan.1.json"] == "{ <secret>"
    assert not [name for name, text in texts.items() if "hidden-word" in text or SECRET in text]


@pytest.mark.parametrize(
    ("bound", "value", "last"),
    [
        ("MOST_FILES", 4, "plan.0.json"),
        ("MOST_FILES", 3, "manifest.json"),
        ("MOST_BYTES", 700, "config.json"),
    ],
)
def test_an_archive_ends_before_it_is_too_large(
    bound: str, value: int, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, bound, value)
    found, _ = packed(write(tmp_path / "run", GOOD))
    assert found.packed[-2] == last
    assert found.left_out[-1].endswith(" and what follows it (the archive would be too large)")


def test_of_more_logs_than_an_archive_takes_the_failed_ranks_come_first_and_then_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [f"logs/2/a.{name}" for name in ("rank0.err", "rank2.err", "rank0.out", "rank2.out")]
    of_failed = ["logs/2/b.rank1.err", "logs/2/b.rank1.out"]
    run = write(tmp_path / "run", RESTARTED | dict.fromkeys([*others, of_failed[1]], "x"))
    order = packed(run)[0].packed
    assert (order[1:3], order[-6:-2]) == (of_failed, others)
    monkeypatch.setattr(bundle, "MOST_FILES", 3)
    assert packed(run)[0].packed[1:-1] == of_failed


@pytest.mark.parametrize(("count", "last"), [(198, "x197 (not needed for support)"), (199, "1 more")])
def test_of_very_many_other_files_two_hundred_are_named(tmp_path: Path, count: int, last: str) -> None:
    run = write(tmp_path / "run", GOOD | {f"x{at:03}": "" for at in range(count)})
    assert packed(run)[0].left_out[-1] == last


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


# --- parts of the page --------------------------------------------------------------------------------------


def outcome(status: int, **more: object) -> str:
    told = {"status": status, "rank": "", "node": "b", "signal": 0, "time": 1767226000.5, "error": "", **more}
    return "".join(f"{name}={value}\n" for name, value in told.items())


@pytest.mark.parametrize(
    ("files", "kind", "sentence"),
    [
        ({}, "wait", "Nothing tells that this run has begun."),
        (
            {"manifest.json": manifest(attempt(0, None))},
            "wait",
            "No end is known: the run goes on, or its first node was lost.",
        ),
        ({"manifest.json": manifest(attempt(0, 0))}, "good", "Done: in 8 min 10 s on 2 nodes."),
        (
            {"manifest.json": manifest(attempt(0, 1), attempt(1, 0)), "result.json": {"steps": 1}},
            "good",
            "Done: after 1 step in 16 min 20 s on 2 nodes in 2 attempts.",
        ),
        (
            {"manifest.json": manifest(attempt(0, None), attempt(1, 0))},
            "good",
            "Done: in at least 8 min 10 s on 2 nodes in 2 attempts.",
        ),
        (  # a day later, by hand
            {"manifest.json": manifest(attempt(0, 0), attempt(1, 0, began=NEXT_DAY, ended=NEXT_DAY))},
            "good",
            "Done: in 8 min 20 s on 2 nodes in 2 attempts.",
        ),
        (
            {"manifest.json": manifest(attempt(0, 75))},
            "wait",
            "Saved at a planned end: the same command with this run directory goes on.",
        ),
        ({"manifest.json": manifest(attempt(0, 7))}, "bad", "It failed, status 7"),
        (
            {"manifest.json": manifest(attempt(0, 137)), "outcome/0.1": outcome(137, rank=1, signal=9)},
            "bad",
            "It failed, status 137: rank 1 on b (signal 9): nothing on stderr",
        ),
        (
            {"outcome/0.1": outcome(64, error="no such file")},
            "bad",
            "It failed before its ranks started, status 64: b: no such file",
        ),
        *(
            (
                {**names, "outcome/0.0": outcome(0, node="a"), "outcome/0.1": outcome(75)},
                "bad",
                f"It failed{when}, status 1: a node: {where} saved to go on, the others ended well",
            )
            for names, when, where in (
                ({"manifest.json": manifest(attempt(0, 1))}, "", "b"),
                ({"plan.0.json": {"nodes": ["a", "b"]}}, " before its ranks started", "b"),
                ({}, " before its ranks started", "node 1"),
            )
        ),
        (  # the manifest is lost
            {"outcome/0.1": outcome(1, rank=1, error="no")},
            "bad",
            "It failed, status 1: rank 1 on b: no",
        ),
        (
            {"outcome/0.1": outcome(1, error="no"), "logs/0/b.rank1.err": "KeyError\n"},
            "bad",
            "It failed, status 1: b: no",
        ),
        (
            {"outcome/0.1": outcome(1, error="no"), "logs/0/b.agent.err": "no\n"},
            "bad",
            "It failed before its ranks started, status 1: b: no",
        ),
        (  # the manifest was not written to its end
            {"manifest.json": manifest(attempt(0, None)), "outcome/0.1": outcome(1, rank=1, error="no")},
            "bad",
            "It failed, status 1: rank 1 on b: no",
        ),
        (
            {"manifest.json": manifest(attempt(0, 69)), "outcome/0.1": outcome(69, rank=0, error="mine")},
            "bad",
            "It failed, status 69: rank 0 on b: mine",
        ),
    ],
)
def test_the_end_of_a_run_is_one_sentence(
    tmp_path: Path, files: dict[str, object], kind: str, sentence: str
) -> None:
    (tmp_path / "run").mkdir()
    assert page.result(facts.read(write(tmp_path / "run", {"logs/x/y": "", **files}), {})) == (kind, sentence)


def rank_row(rank: int, rate: float = 30.0, wait: float = 1.0, node: str = "b") -> dict[str, Any]:
    return {"rank": rank, "node": node, "images_per_s": rate, "train_s": 100.0, "input_wait_s": wait}


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (rank_row(3), []),
        (rank_row(3, rate=24.1), []),
        (rank_row(3, rate=23.9), ["rank 3 on b makes 23.9 images/s, the median of all is 30."]),
        (rank_row(3, wait=5.9), []),
        (rank_row(3, wait=6.1), ["rank 3 on b waits 6.1 s for its data, the median of all is 1 s."]),
        ({"rank": 3}, []),
    ],
)
def test_a_rank_that_is_much_slower_than_the_others_is_named(odd: dict[str, Any], named: list[str]) -> None:
    assert page.stragglers([*map(rank_row, range(3)), odd]) == named
    assert page.stragglers([odd]) == []


@pytest.mark.parametrize(
    ("count", "is_open", "rows", "note"),
    [(16, True, 16, ""), (17, False, 17, ""), (101, False, 100, "The 100 slowest of 101 ranks.")],
)
def test_many_ranks_are_folded_and_of_very_many_the_slowest_are_listed(
    tmp_path: Path, count: int, is_open: bool, rows: int, note: str
) -> None:
    ranks = [rank_row(rank, rate=30.0 + rank / 100) for rank in reversed(range(count))]
    html = told(write(tmp_path / "run", GOOD | {"result.json": RESULT | {"ranks": ranks}}))
    section = html.partition("<h2>Ranks</h2>")[2].partition("<h2>")[0]
    assert "<p>No rank stands out.</p>" in section
    assert ("<details open>" in section) == is_open
    table = section.partition("<tbody>")[2]
    assert table.count("<tr>") == rows
    assert ("<td>100</td>" in table) == (count == 100)  # the fastest
    assert (note or "slowest of") in section or not note
    heads = re.findall(r"<th(.*?)>(.*?)</th>", section)
    aligned = {name for look, name in heads if look == ' class="n"'}
    assert aligned == {"images/s", "waits for data", "peak memory", "peak GPU memory"}


@pytest.mark.parametrize(("count", "charts"), [(2, 0), (3, 2), (512, 2), (513, 0)])
def test_ranks_have_a_bar_each_if_they_are_neither_too_few_nor_too_many(
    tmp_path: Path, count: int, charts: int
) -> None:
    result = RESULT | {"ranks": [*map(rank_row, range(count))]}
    html = told(write(tmp_path / "run", GOOD | {"result.json": result}))
    assert (
        html.count(" rank waits for data</figcaption>") + html.count(" of each rank</figcaption>") == charts
    )


def test_the_parts_of_the_steps_are_shares_of_the_time_in_the_loop(tmp_path: Path) -> None:
    html = told(write(tmp_path / "run", GOOD))
    table = html.partition("Parts of the steps")[2].partition("</figure>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    assert cells == [
        ["waiting for data", "2.25 s", "2.2 %"],
        ["compute, communication and the rest", "1 min 37 s", "97.8 %"],
        ["of it, held up by checkpoints", "1 s", "1.0 %"],
    ]


def test_step_times_are_told_by_their_shares(tmp_path: Path) -> None:
    """Ninety samples a step: 97 steps take 1 s, the others 2, 3 and 9 s."""
    rates = [90.0] * 97 + [45.0, 30.0, 10.0]
    rows = [f'{{"step": {at}, "loss": 1.0, "images_per_s": {rate}}}' for at, rate in enumerate(rates, 1)]
    html = told(write(tmp_path / "run", GOOD | {"metrics.jsonl": "\n".join([*rows, ""])}))
    said = (
        "half of the 100 steps take up to 1 s, 95 % up to 1 s, 99 % up to 9 s, the longest 9 s",
        "half of the 20 steps take up to 1 s",
    )
    assert said[0] in html
    few = "\n".join([*rows[:20], ""])
    assert said[1] in told(write(tmp_path / "few", GOOD | {"metrics.jsonl": few}))
    fewer = "\n".join([*rows[:19], ""])
    assert "steps take up to" not in told(write(tmp_path / "fewer", GOOD | {"metrics.jsonl": fewer}))


def test_the_strip_of_a_start_is_as_wide_as_its_parts(tmp_path: Path) -> None:
    drawn = told(write(tmp_path / "run", GOOD)).partition("<figcaption>The start<")[2].partition("</svg>")[0]
    parts = [tuple(map(float, one)) for one in re.findall(r' x="([\d.]+)%" y="\d+" width="([\d.]+)%"', drawn)]
    assert parts[0][0] == 0
    assert [left + width for left, width in parts] == pytest.approx(
        [*(left for left, _ in parts[1:]), 100], abs=0.02
    )
    assert [width / 100 * 13 for _, width in parts] == pytest.approx([2, 1, 7, 0.5, 2.5], abs=0.01)


def test_the_time_line_has_the_date_where_it_changes(tmp_path: Path) -> None:
    late = attempt(0, 0, began="2026-01-01T23:59:30+00:00", ended="2026-01-02T00:10:00+00:00")
    html = told(write(tmp_path / "run", {"manifest.json": manifest(late)}))
    table = html.partition("<h2>Time line</h2>")[2].partition("<tbody>")[2].partition("</tbody>")[0]
    assert [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")[1:]] == [
        ["2026-01-01 23:59:20", "0 s", "attempt 0 begins"],
        ["23:59:30", "10.5 s", "the ranks have started"],
        ["2026-01-02 00:10:00", "10 min 40 s", "attempt 0 ends, done"],
    ]


def test_of_very_many_events_the_first_and_the_last_are_listed(tmp_path: Path) -> None:
    begin = [f"2026-01-01T{at // 6:02}:{at % 6 * 10:02}" for at in range(40)]
    attempts = [
        attempt(at, 1, began=f"{when}:30+00:00", ended=f"{when}:50+00:00") for at, when in enumerate(begin)
    ]
    html = told(write(tmp_path / "run", {"manifest.json": manifest(*attempts)}))
    table = html.partition("<h2>Time line</h2>")[2].partition("<tbody>")[2].partition("</tbody>")[0]
    assert (table.count("<tr>"), "... 20 more ..." in table) == (101, True)
    strip = html.partition("The whole run")[2].partition("</svg>")[0]
    assert re.findall(r">(attempt \d+: status 1)<", strip)[::29] == [
        "attempt 10: status 1",
        "attempt 39: status 1",
    ]


def test_nodes_are_told_by_their_hardware(tmp_path: Path) -> None:
    kind = {
        "nodes": ["a", "b"],
        "cpu": {"model": "AMD", "usable": 64},
        "gpus": ["H100", "H100", "T4"],
        "memory": 2**39,
        "driver": "570.1",
        "kernel": "5.14",
    }
    bare = {"nodes": ["c"], "memory": 2**29}
    run = write(tmp_path / "run", {"manifest.json": manifest(attempt(0, 0), hardware=[kind, bare])})
    table = told(run).partition("<h2>Nodes</h2>")[2].partition("<tbody>")[2].partition("</tbody>")[0]
    assert [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[1:]] == [
        ["a, b", "64 cores of AMD", "512 GiB", "2 of H100, 1 of T4", "570.1", "5.14"],
        ["c", "", "512 MiB", "-", "-", "-"],
    ]


def test_of_many_nodes_some_are_named(tmp_path: Path) -> None:
    for count, last in ((12, "n11"), (13, "n11 and 1 more")):
        nodes = attempt(0, 0, nodes=[f"n{at}" for at in range(count)])
        html = told(write(tmp_path / str(count), {"manifest.json": manifest(nodes)}))
        assert f"n10, {last}</p>" in html


START = {"script": 1, "task": 2, "plan": 3, "nodes": 4, "torch": 5, "ranks": 6, "odd_part": 7}
"""Seconds: 28 of them, 22 before the ranks start."""
WHOLE: dict[str, object] = GOOD | {
    "manifest.json": manifest(
        attempt(0, 1, start={}),
        attempt(
            1,
            0,
            start=START,
            queued_s=10,
            device="cuda",
            world_size=4,
            versions={"torch": "2.15.0", "numpy": 2},
            transport="gloo",
            threads="4",
            venv="/v",
            checkpoint={"path": "checkpoints/step-00000010", "step": 10},
        ),
        code={
            "program": {"name": "t.py", "sha256": "0123456789abcdef"},
            "repository": {"commit": "c0ffee", "changed": 2},
        },
        image={"stack": "cu132", "id": "i", "cuda": "13.2"},
        environment={"values": {"A": "1"}, "names": []},
    ),
    "result.json": RESULT
    | {"attempt": 1, "began": BEGAN.replace("00:01", "00:11"), "first_step_s": 20.0, "tflop_per_s": 12.5}
    | {"peak_share": 0.4, "peak_gpu_memory_bytes": 3 * 2**29},
    "config.json": {"attempt": 1, "config": {"a": None, "b": [1, 2], "c": "x", "batch_size": 90}},
    "plan.0.json": {
        "scheduler": "slurm",
        "mode": "torchrun",
        "device": "cuda",
        "nnodes": 2,
        "nproc_per_node": 2,
        "world_size": 4,
        "master_addr": "a",
        "master_port": 29500,
        "node_rank": 0,
        "sources": {"nnodes": "derived:X", "mode": "default"},
        "argv": ["torchrun", "a b"],
    },
    "outcome/0.1": ended(1, error="no luck"),
    "outcome/1.0": ended(0, rank=0, node="a"),
    "outcome/1.1": ended(0),
}


@pytest.fixture
def whole(tmp_path: Path) -> str:
    run = write(tmp_path / "run", WHOLE)
    when = 1767226000  # 2026-01-01 00:06:40
    os.utime(run / "checkpoints/step-00000020", (when, when))
    return told(run)


def section(html: str, title: str) -> str:
    return html.partition(f"<h2>{title}</h2>")[2].partition("<h2>")[0]


def pairs(html: str) -> list[tuple[str, str]]:
    return re.findall(r"<tr><th>([^<]*)</th><td>([^<]*)</td></tr>", html)


def test_a_page_begins_with_the_figures_of_the_run(whole: str) -> None:
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", whole) == [
        ("accuracy", "97.50 %"),
        ("steps", "40"),
        ("images/s", "93"),
        ("TFLOP/s", "12.5"),
        ("of the GPUs&#x27; peak", "40.00 %"),
        ("training", "1 min 40 s"),
        ("to the first step", "20 s"),
        ("peak memory of a rank", "2 GiB"),
        ("peak GPU memory of a rank", "1.5 GiB"),
        ("where", "2 nodes, 4 ranks"),
        ("device", "cuda"),
        ("scheduler", "slurm"),
        ("job", "7"),
        ("attempts", "2"),
    ]


def test_without_a_manifest_the_plan_tells_where_it_was_to_run(tmp_path: Path) -> None:
    html = told(write(tmp_path / "run", MEETING))
    tiles = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html)
    assert tiles == [("where", "2 nodes"), ("scheduler", "slurm")]


@pytest.mark.parametrize(("steps", "shown"), [(10**15 - 1, "9" * 15), (10**15, "1e+15")])
def test_very_many_steps_are_shown_in_short(tmp_path: Path, steps: int, shown: str) -> None:
    html = told(write(tmp_path / "run", GOOD | {"result.json": {"steps": steps}}))
    assert f"<dt>steps</dt><dd>{shown}</dd>" in html


def test_a_page_says_when_it_was_made(tmp_path: Path) -> None:
    found = facts.read(write(tmp_path / "run", GOOD), {})
    assert " on 1970-01-01 00:01 UTC. All times are UTC." in page.html(found, now=60.0)
    year = page.html(found).partition("Made by apptrain ")[2].partition(" on ")[2][:4]
    assert int(year) > 2020


def test_a_run_that_took_no_time_says_so(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"manifest.json": manifest(attempt(0, 0, ended=BEGAN, start={}))})
    assert page.result(facts.read(run, {}))[1] == "Done: in 0 s on 2 nodes."


def test_each_part_of_an_attempt_has_its_colour_and_its_time(whole: str) -> None:
    strip, _, start = section(whole, "Time line").partition("The start of the last attempt")
    drawn = [re.findall(r'class="fill (c\d)"[^>]*><title>([^<]*)<', one) for one in (strip, start)]
    parts = [
        ("c8", "job script 1 s"),
        ("c2", "task and container 2 s"),
        ("c3", "plan and addresses 3 s"),
        ("c4", "meeting of the nodes 4 s"),
        ("c1", "import of torch 5 s"),
        ("c7", "start of the ranks 6 s"),
        ("c6", "odd_part 7 s"),
        ("c5", "until the first step 14 s"),
    ]
    ends = [("c6", "training 8 min 00 s"), ("c9", "in the queue 10 s"), ("c6", "training 7 min 40 s")]
    assert drawn == [[*ends[:2], *parts, ends[2]], parts]
    assert "2 attempts in 18 min 00 s, 10 s of it in the queue." in strip
    assert ", ".join(words for _, words in parts) in start
    assert re.findall(r'class="save" x1="([\d.]+)%"', strip) == ["31.48"]
    assert re.findall(r'<text x="0" y="\d+">([^<]+)<', strip) == ["attempt 0: status 1", "attempt 1: done"]
    for at in range(1, 10):
        assert f".fill.c{at}," in whole
    assert ".fill.c0" not in whole
    assert ".fill.c10" not in whole


def test_the_time_line_lists_what_happened_when(whole: str) -> None:
    table = section(whole, "Time line").partition("<tbody>")[2].partition("</tbody>")[0]
    assert [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")[1:]] == [
        ["2026-01-01 00:01:00", "0 s", "attempt 0 begins"],
        ["00:01:00", "0 s", "the ranks have started"],
        ["00:06:40", "5 min 40 s", "checkpoint of step 20"],
        ["00:09:00", "8 min 00 s", "attempt 0 ends, status 1: rank 1 on b: no luck"],
        ["00:10:28", "9 min 28 s", "the job is submitted"],
        ["00:10:38", "9 min 38 s", "attempt 1 begins, from checkpoints/step-00000010"],
        ["00:11:06", "10 min 06 s", "the ranks have started"],
        ["00:11:20", "10 min 20 s", "the first step is done"],
        ["00:19:00", "18 min 00 s", "attempt 1 ends, done"],
    ]


@pytest.mark.parametrize(
    ("status", "files", "says"),
    [
        (75, {"outcome/0.1": ended(75, error="saved")}, "attempt 0 ends, status 75"),
        (1, {}, "attempt 0 ends, status 1"),
        (0, {"outcome/0.1": ended(0)}, "attempt 0 ends, done"),
    ],
)
def test_the_end_of_an_attempt_has_a_cause_if_it_failed(
    tmp_path: Path, status: int, files: dict[str, object], says: str
) -> None:
    html = told(write(tmp_path / "run", {"manifest.json": manifest(attempt(0, status)), **files}))
    assert f"<td>{says}</td>" in html


def test_an_attempt_that_goes_on_has_no_end_yet(tmp_path: Path) -> None:
    html = told(write(tmp_path / "run", {"manifest.json": manifest(attempt(0, None))}))
    assert "attempt 0 ends" not in html
    assert ">attempt 0: no end is known<" in html


@pytest.mark.parametrize(
    ("result", "is_shown"),
    [
        ({"attempt": 0, "began": BEGAN, "first_step_s": 3.0}, True),
        ({"attempt": 1, "began": BEGAN, "first_step_s": 3.0}, False),
        ({"attempt": 0, "first_step_s": 3.0}, False),
        ({"attempt": 0, "began": BEGAN}, False),
    ],
)
def test_the_first_step_is_that_of_the_attempt_which_tells_it(
    tmp_path: Path, result: dict[str, object], is_shown: bool
) -> None:
    run = write(tmp_path / "run", {"manifest.json": manifest(attempt(0, 0)), "result.json": result})
    html = told(run)
    assert ("the first step is done" in html) == is_shown
    assert ("until the first step" in html) == is_shown


@pytest.mark.parametrize(("count", "kept"), [(20, [*range(1, 21)]), (21, [*range(1, 11), *range(12, 22)])])
def test_of_many_checkpoints_the_first_and_last_ten_are_events(
    tmp_path: Path, count: int, kept: list[int]
) -> None:
    run = write(tmp_path / "run", GOOD)
    (run / "checkpoints/step-00000020/model").unlink()
    (run / "checkpoints/step-00000020").rmdir()
    for step in range(1, count + 1):
        (run / f"checkpoints/step-{step:08}").mkdir()
        os.utime(run / f"checkpoints/step-{step:08}", (1767226000 + step, 1767226000 + step))
    html = told(run)
    assert re.findall(r"<td>checkpoint of step (\d+)</td>", html) == [str(step) for step in kept]
    assert html.count('class="save" x1=') == count


def test_what_ran_is_told_by_program_commit_image_and_versions(whole: str) -> None:
    assert pairs(section(whole, "What ran")) == [
        ("program", "t.py 0123456789ab"),
        ("commit", "c0ffee, 2 files changed"),
        ("image", "cu132 i"),
        ("CUDA", "13.2"),
        ("torch", "2.15.0"),
        ("numpy", "2"),
        ("transport", "gloo"),
        ("threads a rank", "4"),
        ("venv", "/v"),
    ]
    assert "<pre>train.py --token &#x27;&lt;secret&gt;&#x27;</pre>" in whole


def test_what_is_not_known_of_what_ran_has_no_row(tmp_path: Path) -> None:
    html = told(write(tmp_path / "run", {"manifest.json": manifest(attempt(0, 0, versions=None))}))
    assert pairs(section(html, "What ran")) == [("image", "none")]


def test_plan_configuration_and_environment_are_folded(whole: str, tmp_path: Path) -> None:
    plan, configuration, environment = section(whole, "Settings").split("</details>")[:3]
    assert pairs(plan) == [
        ("scheduler", "slurm"),
        ("mode", "torchrun (default)"),
        ("device", "cuda"),
        ("nnodes", "2 (derived:X)"),
        ("nproc_per_node", "2"),
        ("world_size", "4"),
        ("master_addr", "a"),
        ("master_port", "29500"),
        ("argv", "torchrun &#x27;a b&#x27;"),
    ]
    assert pairs(configuration) == [("a", "unknown"), ("b", "1, 2"), ("c", "x"), ("batch_size", "90")]
    assert pairs(environment) == [("A", "1")]
    assert (
        "<details><summary>1 line of apptrain and of the program</summary><pre>apptrain: job 7</pre>" in whole
    )
    bare = told(write(tmp_path / "bare", {"manifest.json": manifest(attempt(0, 0))}))
    assert "Settings" not in bare


@pytest.mark.parametrize(
    ("steps", "marked", "note"),
    [
        (300, False, ""),
        (
            301,
            False,
            "The line is the mean of neighbouring steps, and the band reaches from the least to the most.",
        ),
        (300, True, " A dashed line is where an attempt went on from a checkpoint."),
    ],
)
def test_curves_say_what_their_lines_are(tmp_path: Path, steps: int, marked: bool, note: str) -> None:
    again = [attempt(1, 0, checkpoint={"path": "x", "step": 7})] if marked else []
    run = GOOD | {"manifest.json": manifest(attempt(0, 0), *again), "metrics.jsonl": metrics(steps)}
    html = section(told(write(tmp_path / "run", run)), "Training")
    assert re.findall(r'</div><p class="dim">(.*?)</p>', html) == ([note] if note else [])
    assert html.count('class="mark"') == 3 * marked  # the accuracy has one step


def test_the_checkpoint_of_the_first_attempt_is_no_mark(tmp_path: Path) -> None:
    first = attempt(0, 0, checkpoint={"path": "x", "step": 7})
    html = told(write(tmp_path / "run", GOOD | {"manifest.json": manifest(first)}))
    assert 'class="mark"' not in html


@pytest.mark.parametrize("gone", ["accuracy", "steps", "split"])
def test_the_accuracy_at_the_end_is_drawn_if_its_step_and_split_are_told(tmp_path: Path, gone: str) -> None:
    assert "test, at the end: 97.50 % at step 40" in told(write(tmp_path / "all", GOOD))
    result = {name: value for name, value in RESULT.items() if name != gone}
    assert "at the end" not in told(write(tmp_path / "run", GOOD | {"result.json": result}))


def step_rows(*rates: float) -> str:
    rows = [f'{{"step": {at}, "loss": 1.0, "images_per_s": {rate}}}' for at, rate in enumerate(rates, 1)]
    return "\n".join([*rows, ""])


def test_steps_longer_than_nearly_all_are_in_the_last_bar(tmp_path: Path) -> None:
    """Ninety samples a step: 198 steps of 100 ms, and one of 200 and 900 ms."""
    run = write(tmp_path / "run", GOOD | {"metrics.jsonl": step_rows(*[900.0] * 198, 450.0, 100.0)})
    html = section(told(run), "Steps")
    assert (
        "half of the 200 steps take up to 100 ms, 95 % up to 100 ms, 99 % up to 200 ms, the longest 900 ms; "
        "the last bar holds all longer ones too." in html
    )
    assert ">ms a step</text>" in html
    assert html.count('<rect class="fill c1"') == 2
    slow = told(write(tmp_path / "slow", GOOD | {"metrics.jsonl": step_rows(*[45.0] * 20)}))
    assert "the longest 2 s." in slow
    assert ">s a step</text>" in slow


@pytest.mark.parametrize(
    ("steps", "places"),
    [
        (20, [52.0, 123.2, 194.4, 265.6, 336.8]),
        (24, [52.0, 111.3, 170.7, 230.0, 289.3, 348.7]),
        (164, [52 + 8.9 * at for at in range(40)]),
    ],
)
def test_step_times_have_a_bar_for_every_fourth_from_5_to_40(
    tmp_path: Path, steps: int, places: list[float]
) -> None:
    """The times are 1 s, 2 s and so on: each bar has 4, and of the many the last one has 6."""
    rates = [90 / time for time in range(steps, 0, -1)]
    html = section(told(write(tmp_path / "run", GOOD | {"metrics.jsonl": step_rows(*rates)})), "Steps")
    bars = re.findall(r'<rect class="fill c1" x="([\d.]+)" y="[\d.]+" width="[\d.]+" height="([\d.]+)"', html)
    assert [float(place) for place, _ in bars] == pytest.approx(places, abs=0.06)
    assert min(float(height) for _, height in bars) == (184.0 if steps < 100 else 122.7)
    assert f"the longest {charts.duration(steps)}" in html


def test_a_rate_that_is_none_has_no_step_time(tmp_path: Path) -> None:
    rates = [90.0] * 19
    for odd in ("NaN", "0", "-1", "Infinity"):
        rows = step_rows(*rates) + f'{{"step": 20, "images_per_s": {odd}}}\n'
        assert "Step times" not in told(write(tmp_path / odd, GOOD | {"metrics.jsonl": rows}))
    rows = step_rows(*rates) + '{"step": 20, "images_per_s": 0.5}\n'
    assert "the longest 3 min 00 s" in told(write(tmp_path / "good", GOOD | {"metrics.jsonl": rows}))


def test_two_ranks_have_a_spread_and_no_chart(tmp_path: Path) -> None:
    rows = [rank_row(0, rate=29.0), rank_row(1, rate=31.0)]
    html = section(told(write(tmp_path / "run", GOOD | {"result.json": {"ranks": rows}})), "Ranks")
    assert (
        "<p>No rank stands out.</p><p>Images per second of a rank: 29 to 31, half of them up to 30.</p>"
        in html
    )
    assert "<figure>" not in html


@pytest.mark.parametrize(
    ("ranks", "held", "rows"),
    [
        ([{"train_s": 100, "a_wait_s": 10, "x_per_s": 3}, {"train_s": 100, "a_wait_s": 30}], None,
            [["a wait", "20 s", "20.0 %"], ["compute, communication and the rest", "1 min 20 s", "80.0 %"]]),
        ([{"train_s": 10, "input_wait_s": 1, "sync_wait_s": 2}], 0.5,
            [["waiting for data", "1 s", "10.0 %"], ["exchanging with other ranks, or waiting for them", "2 s", "20.0 %"],
            ["the rest", "7 s", "70.0 %"], ["of it, held up by checkpoints", "500 ms", "5.0 %"]]),
        ([{"train_s": 10, "b_s": 11}], None, [["b", "11 s", "110.0 %"]]),
        ([{"train_s": 10, "b_s": 10}], None,
            [["b", "10 s", "100.0 %"], ["compute, communication and the rest", "0 s", "0.0 %"]]),
        ([{"train_s": 0}], 1.0, []),
        ([{"train_s": 50, **{f"p{at:02}_s": 1 for at in range(13)}}], None,
            [*([f"p{at:02}", "1 s", "2.0 %"] for at in range(12)), ["the rest", "38 s", "76.0 %"]]),
    ],
)  # fmt: skip
def test_the_time_in_the_loop_is_told_part_by_part(
    tmp_path: Path, ranks: list[dict[str, object]], held: float | None, rows: list[list[str]]
) -> None:
    result = {"ranks": ranks, "checkpoints": {"held_s": held}}
    html = told(write(tmp_path / "run", GOOD | {"result.json": result}))
    table = html.partition("Parts of the steps")[2].partition("</figure>")[0]
    assert [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]] == rows


def test_ranks_are_told_by_their_spread_and_a_bar_each(tmp_path: Path) -> None:
    rows = [
        rank_row(0, rate=20.0, wait=0.0),
        rank_row(1, rate=30.0, wait=2.5),
        rank_row(2, rate=40.0, node="c"),
    ]
    rows[2] |= {"peak_memory_bytes": 2**30 - 1, "peak_gpu_memory_bytes": 2**30}
    html = section(told(write(tmp_path / "run", GOOD | {"result.json": {"ranks": rows}})), "Ranks")
    assert "<p>Images per second of a rank: 20 to 40, half of them up to 30.</p>" in html
    assert "<li>rank 0 on b makes 20 images/s, the median of all is 30.</li>" in html
    assert re.findall(r'<p class="said">(.*?)</p>', html) == ["from 20 to 40.", "from 0 s to 2.5 s."]
    bars = [re.findall(r'<rect class="fill c1" x="([\d.]+)"', one) for one in html.split("<figure>")[1:]]
    assert bars == [["52.0", "170.7", "289.3"], ["170.7", "289.3"]]
    assert [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in html.split("<tr>")[2:]] == [
        ["0", "b", "20", "0 s", "-", "-"],
        ["1", "b", "30", "2.5 s", "-", "-"],
        ["2", "c", "40", "1 s", "1.02e+03 MiB", "1 GiB"],
    ]
    one = section(told(write(tmp_path / "one", GOOD | {"result.json": {"ranks": rows[:1]}})), "Ranks")
    assert "stands out" not in one
    assert "half of them" not in one


def test_of_very_many_slow_ranks_twenty_are_named(tmp_path: Path) -> None:
    rows = [rank_row(rank, wait=50.0 * (rank % 2)) for rank in range(300)]
    assert len(page.stragglers([*rows, *map(rank_row, range(300, 310))])) == 100
    html = section(told(write(tmp_path / "run", GOOD | {"result.json": {"ranks": rows}})), "Ranks")
    assert html.count("<li>") == 20


def test_a_comparison_has_a_reason_if_the_numbers_part(tmp_path: Path) -> None:
    run = write(tmp_path / "run", GOOD)
    changed = GOOD | {"manifest.json": manifest(attempt(0, 0, versions={"torch": "2.16.0"}))}
    parted = metrics(40).replace('"loss": 2.0', '"loss": 3.0', 1)
    for name, files, row in (
        ("same", changed, ["torch", "2.15.0", "2.16.0", ""]),
        ("other", changed | {"metrics.jsonl": parted},
            ["torch", "2.15.0", "2.16.0", "another version of torch rounds otherwise"]),
    ):  # fmt: skip
        write(tmp_path / name, files)
        command.main(run, "", bundled=False, other=str(tmp_path / name), env={})
        html = section((run / "report.html").read_text(), f"Compared with {name}")
        assert [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in html.split("<tr>")[2:]] == [row]
        assert re.findall(r'<td data-of="([^"]+)">', html) == ["this run", "the other", "why it matters"]
    command.main(run, "", bundled=False, other=str(run), env={})
    html = section((run / "report.html").read_text(), "Compared with run")
    assert "<p>Nothing that is known differs.</p>" in html
    assert "bit for bit, over 40 steps.</p>" in html


def test_runs_of_which_one_has_no_steps_are_not_compared_by_them(tmp_path: Path) -> None:
    run = write(tmp_path / "run", GOOD)
    write(tmp_path / "other", {name: one for name, one in GOOD.items() if name != "metrics.jsonl"})
    command.main(run, "", bundled=False, other=str(tmp_path / "other"), env={})
    assert "identical for" not in section((run / "report.html").read_text(), "Compared with other")


# --- what is read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "began"),
    [
        ({"task": 2.5, "odd": True, "bad": "3", "inf": 1e400, "minus": -1, "huge": 1e7, "ranks": 9}, 2.5),
        ({"none": 0, "task": 9_999_999}, 9_999_999),
        ({}, 0),
        (None, 0),
    ],
)
def test_parts_of_a_start_are_seconds_that_a_start_can_take(
    start: dict[str, object] | None, began: float
) -> None:
    known = attempt(0, 0)
    known["start"] = start
    found = facts.AttemptFacts(0, known)
    assert found.recorded == 1767225660
    assert found.began == 1767225660 - began
    assert set(found.parts) == {name for name in start or {} if name in ("task", "ranks", "none")}


@pytest.mark.parametrize(
    ("queued", "seconds"),
    [(0.5, 0.5), (0, 0), (-1, 0), (1e7, 0), (9_999_999, 9_999_999), ("9", 0), (None, 0)],
)
def test_time_in_a_queue_is_what_a_queue_can_take(queued: object, seconds: float) -> None:
    assert facts.AttemptFacts(0, attempt(0, 0, queued_s=queued)).queued == seconds


def ended_at(time: float) -> Outcome:
    return Outcome(1, None, "b", 0, time, "")


@pytest.mark.parametrize(
    ("ended", "times", "when"),
    [
        (BEGAN, [5.0], 1767225660),
        (None, [5.0, 7.0, 6.0], 7.0),
        (None, [0.5], 0.5),
        (None, [0.0, -1.0, float("nan"), float("inf")], None),
        ("yesterday", [], None),
    ],
)
def test_an_attempt_ends_by_its_manifest_or_with_its_last_task(
    ended: str | None, times: list[float], when: float | None
) -> None:
    tasks = [("b", ended_at(time)) for time in times]
    assert facts.AttemptFacts(0, attempt(0, None) | {"ended": ended}, tasks).ended == when


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (GOOD, []),
        ({name: one for name, one in GOOD.items() if name != "result.json"}, ["result.json: not there, though the run is done"]),
        ({name: one for name, one in RESTARTED.items() if name != "result.json"}, []),
        ({name: one for name, one in GOOD.items() if name != "metrics.jsonl"}, ["metrics.jsonl: not there, so no curves"]),
        ({name: one for name, one in GOOD.items() if name not in ("result.json", "config.json", "metrics.jsonl")}, []),
        (GOOD | {"config.json": "{"}, ["config.json: it is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"]),
        ({name: one for name, one in GOOD.items() if name != "plan.0.json"}, ["plan.0.json: not there"]),
        (GOOD | {"outcome/0.2": "x", "outcome/x": "x"}, ["outcome: 1 of 3 files cannot be read"]),
        ({"outcome/0.1": ended(1), "plan.0.json": {}}, ["manifest.json: not there"]),
        ({"logs/0/a.rank0.out": "", "outcome/0.0": ended(1).replace("rank=1", "rank="), "plan.0.json": {}}, ["manifest.json: not there"]),
        ({"plan.0.json": {}}, ["manifest.json: not there: no attempt has started its ranks"]),
    ],
)  # fmt: skip
def test_what_a_run_should_have_left_is_missed(
    tmp_path: Path, files: dict[str, object], missing: list[str]
) -> None:
    assert facts.read(write(tmp_path / "run", files), {}).missing == missing


def test_the_plan_of_a_node_with_a_task_for_each_rank_is_that_of_its_first(tmp_path: Path) -> None:
    files = {name: one for name, one in GOOD.items() if name != "plan.0.json"}
    found = facts.read(write(tmp_path / "run", files | {"plan.0.0.json": {"mode": "exec"}}), {})
    assert (found.plan, found.missing) == ({"mode": "exec"}, [])


def test_tasks_are_known_by_their_nodes_in_order(tmp_path: Path) -> None:
    names = [f"outcome/{at}.{node}" for at in (1, 0) for node in (10, 2, 0, 1)]
    run = write(tmp_path / "run", GOOD | {name: ended(1) for name in names})
    found = facts.read(run, {})
    assert [[node for node, _ in one.tasks] for one in found.attempts] == [
        ["a", "b", "node 2", "node 10"],
        ["node 0", "node 1", "node 2", "node 10"],
    ]
    assert [one.number for one in found.attempts] == [0, 1]


def test_a_key_of_the_run_is_hidden_wherever_it_stands(tmp_path: Path) -> None:
    run = write(tmp_path / "run", GOOD)
    assert facts.known_secrets(run, {"A": "b"}) == {"A": "b", "JOIN_KEY": KEY}
    (run / "join.key").write_text("a" * 4097)
    assert facts.known_secrets(run, {}) == {}
    (run / "join.key").write_text("a" * 4096)
    assert facts.known_secrets(run, {}) == {"JOIN_KEY": "a" * 4096}


def test_a_line_that_a_tab_makes_long_is_cut_where_others_are() -> None:
    assert list(facts.lines("\t" * 200)) == [""]
    (line,) = facts.lines("\t" * 99 + "ab")
    assert line == " " * 396 + "ab"
    (line,) = facts.lines("x" * 5000)
    assert line == "x" * 397 + "..."


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        ("10%\r20%\r30%\r\nnext\r\n", ["30%", "next", ""]),
        ("a\tb\x1b[31m\u202e  \n", ["a   b?[31m?", ""]),
        ("x" * 400, ["x" * 400]),
        ("x" * 401, ["x" * 397 + "..."]),
    ],
)
def test_a_line_of_a_log_is_what_a_terminal_would_show_last(log: str, shown: list[str]) -> None:
    assert list(facts.lines(log)) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ab\ncd\nefg\nhijk\nlmnop", "ab\ncd\nefg\nhijk\nlmnop"),
        ("ab\ncd\nefg\nhijk\nlmnopq", "ab\ncd\nefg\n... 6 bytes are left out ...\nlmnopq"),
    ],
)
def test_of_a_long_log_the_beginning_and_the_end_are_kept_by_whole_lines(text: str, shown: str) -> None:
    assert facts.ends_of(io.BytesIO(text.encode()), 10) == shown


def test_of_the_log_of_a_rank_that_failed_the_last_lines_are_shown(tmp_path: Path) -> None:
    run: dict[str, object] = {"manifest.json": manifest(attempt(0, 1)), "outcome/0.1": ended(1)}
    log = "".join(f"line {at}\n" for at in range(50)) + "\nend\n\n"
    _, tail = facts.read(write(tmp_path / "run", run | {"logs/0/b.rank1.err": log}), {}).tail
    assert tail == [*(f"line {at}" for at in range(12, 50)), "end"]


def test_stacks_are_named_without_what_a_link_leads_to(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"stacks/0/b.rank1.txt": "x", "manifest.json": manifest(attempt(0, 1))})
    write(tmp_path / "other", {"b.rank0.txt": "x"})
    (run / "stacks/1").symlink_to(tmp_path / "other")
    assert facts.read(run, {}).stacks == ["stacks/0/b.rank1.txt"]
    assert "<h2>The failure</h2><p>Where the ranks were is in stacks/0/b.rank1.txt.</p>" in told(run)
    assert "The failure" not in told(write(tmp_path / "good", GOOD))


@pytest.mark.parametrize(("count", "kept"), [(300, 300), (301, 301)])
def test_of_what_the_launcher_said_the_beginning_and_the_end_are_kept(
    tmp_path: Path, count: int, kept: int
) -> None:
    log = "".join(f"apptrain: {at}\nstep {at}\n" for at in range(count))
    said = facts.read(write(tmp_path / "run", {"job.log": log}), {}).said
    assert (len(said), said[0], said[-1]) == (kept, "apptrain: 0", f"apptrain: {count - 1}")
    assert ("... 1 lines are left out ..." in said) == (count == 301)


@pytest.mark.parametrize(
    ("log", "report"),
    [
        ("doctor: 1 node, 1 s\nx\nhealthy\nstep 1\n", ["doctor: 1 node, 1 s", "x", "healthy"]),
        ("apptrain: doctor: 2 nodes\napptrain: not healthy: 1\n", ["doctor: 2 nodes", "not healthy: 1"]),
        ("doctor: 2 nodes\nhealthy\ndoctor: 3 nodes\nhealthy\n", ["doctor: 3 nodes", "healthy"]),
        ("doctor: 2 nodes\nbroken off\n", []),
        ("the doctor: 2 nodes\nhealthy\n", []),
    ],
)
def test_the_last_report_of_the_doctor_is_shown(tmp_path: Path, log: str, report: list[str]) -> None:
    assert facts.read(write(tmp_path / "run", {"job.log": log}), {}).doctor == report


@pytest.mark.parametrize(
    ("value", "number", "text"),
    [
        (1, 1.0, "1"),
        (0.5, 0.5, "0.5"),
        (True, None, ""),
        ("7", None, "7"),
        (float("nan"), None, "nan"),
        (10**400, None, None),
        ([1], None, ""),
        (None, None, ""),
    ],
)
def test_a_value_of_any_kind_is_a_number_or_none(
    value: object, number: float | None, text: str | None
) -> None:
    assert facts.number({"x": value}, "x") == number
    if text is not None:
        assert facts.text({"x": value}, "x") == text
    assert (facts.number([value], "x"), facts.text(value, "x")) == (None, "")


def test_the_result_of_an_earlier_attempt_is_not_that_of_the_run(tmp_path: Path) -> None:
    several: dict[str, object] = {"manifest.json": manifest(attempt(0, 0), attempt(1, 139))}
    for number, shown in ((0, {}), (1, {"attempt": 1, "steps": 7})):
        run = write(tmp_path / str(number), several | {"result.json": {"attempt": number, "steps": 7}})
        assert facts.read(run, {}, 1.0).result == shown


def test_the_result_of_an_earlier_launch_by_hand_is_not_that_of_the_run(tmp_path: Path) -> None:
    by_hand = {"manifest.json": manifest(attempt(0, 0), attempt(1, 137, attempt=0))}
    for at, time in enumerate((attempt(0, 0)["ended"], attempt(1, 137)["ended"], None)):
        result = {"attempt": 0, "steps": 7, "ended": time}
        run = write(tmp_path / str(at), GOOD | by_hand | {"result.json": result})
        assert facts.read(run, {}).result == (result if at else {})
