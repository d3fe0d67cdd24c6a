"""The catalogue: each entry finds its own example and no other one's, and none is found where a run was good."""

import copy
import io
from pathlib import Path

import pytest

from entrypoint.core import strict_yaml
from entrypoint.explain import catalogue, judge
from entrypoint.explain.catalogue import Entry, Wrong
from entrypoint.explain.judge import Judgement
from entrypoint.explain.scan import Index, Scan
from tests.unit.explain import good, harmless

CHECKOUT = Path(__file__).resolve().parents[3]
GOOD_LINES = 20_000
INDEX = Index(catalogue.load())
DATA = strict_yaml.load(catalogue.SOURCE)


def scanned(text: str, name: str = "x.log") -> Scan:
    scan = Scan(INDEX)
    scan.read(io.BytesIO(text.encode()), name, 1 << 30)
    return scan


def judged(text: str) -> Judgement:
    return judge.of(scanned(text), catalogue.own_error())


def test_it_has_all_families() -> None:
    families = {entry.family for entry in catalogue.load()}
    assert len(catalogue.load()) >= 120
    assert families >= {
        *(
            "rendezvous",
            "torchrun",
            "NCCL",
            "gloo",
            "GPUs",
            "libraries",
            "Apptainer",
            "memory and files",
            "Slurm",
        ),
        *("PBS", "MPI", "data loaders", "DDP", "checkpoints", "internet", "job script", "apptrain"),
    }


@pytest.mark.parametrize("entry", catalogue.load(), ids=lambda entry: entry.id)
def test_an_example_is_found_by_its_own_entry_alone(entry: Entry) -> None:
    found = {one.entry.id for one in scanned(entry.example).found if one.entry}
    assert found == {entry.id}


@pytest.mark.parametrize("entry", catalogue.load(), ids=lambda entry: entry.id)
def test_an_example_alone_is_judged_as_its_entry(entry: Entry) -> None:
    found = judged(entry.example)
    if entry.kind in ("echo", "hint", "warning"):
        assert found.causes == ()
        assert found.unknown is not None
    else:
        assert [one.entry.id for one in found.causes] == [entry.id]


def test_every_pattern_is_found_on_a_line_of_its_own_words() -> None:
    """By way of its key too, which a pattern that begins inside a word would not have."""
    lost = []
    for entry in catalogue.load():
        for pattern in entry.any:
            line = b" x ".join(pattern.parts).decode()
            if pattern.ends or any(word in line.encode() for word in entry.none):
                continue
            frame = f'  File "{entry.frame.decode()}/x.py", line 3, in f\n' if entry.frame else ""
            found = scanned(f"{frame}{line}\n").found
            if not any(one.entry for one in found):
                lost.append((entry.id, pattern.text))
    assert lost == []


STEP = "srun: error: Unable to create step for job 7: "
ZIP = "RuntimeError: [enforce fail at inline_container.cc:746] . "
IN_HOME = '  File "/home/me/.local/lib/python3.11/site-packages/x.py", line 3, in f\n'


@pytest.mark.parametrize(
    ("text", "id"),
    [
        (f"{IN_HOME}ImportError: cannot import name 'a' from 'b'\n", "home-packages"),
        (f"{IN_HOME}ImportError: Using `bitsandbytes` requires Accelerate\n", "module-not-found"),
        ("ImportError: /x/te.so: undefined symbol: nvte_gelu\n", "undefined-symbol"),
        ("ImportError: /x/c.so.12: undefined symbol: __nvJitLinkCreate_12_4\n", "cuda-library-shadowed"),
        (
            "FATAL: while locking x: can't open o.img, currently in use by another process\n",
            "apptainer-overlay",
        ),
        ("OSError: database in use by another process\n", ""),
        (f"{STEP}Requested node configuration is not available\n", "slurm-step-too-large"),
        (f"{STEP}Requested nodes are not available\n", "slurm-step-too-large"),
        ("x3006c0s13b0n0.hsn.lab: rank 3 died from signal 9\n", "rank-killed"),
        ("=   KILLED BY SIGNAL: 9 (Killed)\n", "rank-killed"),
        ("YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n", "rank-killed"),
        ("n1: rank 3 died from signal 11\n", "segfault"),
        ("=   KILLED BY SIGNAL: 11 (Segmentation fault)\n", "segfault"),
        ("n1: rank 3 died from signal 15\n", "rank-terminated"),
        ("=   KILLED BY SIGNAL: 15 (Terminated)\n", "rank-terminated"),
        ("=   KILLED BY SIGNAL: 6 (Aborted)\n", "rank-aborted"),
        (f"{ZIP}unexpected pos 64 vs 1\n", "disk-full"),
        (f"{ZIP}PytorchStreamWriter failed writing file data/0: file write failed\n", "disk-full"),
        (f"{ZIP}open file failed with strerror: No such file or directory\n", "file-missing"),
        (f"{ZIP}open file failed with strerror: Is a directory\n", ""),
        (f"{ZIP}invalid file name: checkpoints/.tmp\n", ""),
        ("apex is asked for but it is not installed\n", ""),
    ],
)
def test_a_line_is_of_the_entry_that_says_no_more_than_it(text: str, id: str) -> None:
    assert [one.entry.id for one in scanned(text).found if one.entry] == [id] * bool(id)


def test_nothing_is_found_in_logs_of_good_runs() -> None:
    text = "\n".join(good.lines(GOOD_LINES))
    found = judged(text)
    assert [(one.entry.id, one.first.text) for one in found.causes] == []
    kinds = {one.entry.id: one.first.text for one in found.others if one.entry.kind != "echo"}
    assert kinds == {}


@pytest.mark.parametrize("line", harmless.LINES)
def test_a_harmless_line_with_the_words_of_a_cause_is_none(line: str) -> None:
    traceback = f'Traceback (most recent call last):\n  File "a.py", line 3, in f\n{line}\n'
    assert {one.entry.id for text in (line, traceback) for one in scanned(text).found if one.entry} == set()


def test_nothing_is_found_in_what_openpbs_recorded_but_where_something_failed() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted((CHECKOUT / "tests/recordings/openpbs").rglob("*")):
        if path.is_file() and path.suffix in ("", ".log", ".txt"):
            found[path.name] = [one.entry.id for one in judged(path.read_text(errors="replace")).causes]
    failed = {"pbsdsh-process-life.txt", "signals.txt", "spawn-from-a-task.txt"}
    assert {name for name, ids in found.items() if ids} == failed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "Two Words"}, "is no id"),
        ({"id": "port-in-use"}, "two entries have this id"),
        ({"any": []}, "any must be a list of 1 to"),
        ({"any": ["*"]}, "says too little"),
        ({"any": ["ab"]}, "says too little"),
        ({"kind": "guess"}, "give one of cause, symptom, warning, hint, echo"),
        ({"follows": ["nothing-such"]}, "follows nothing-such, which is no entry"),
        ({"why": ""}, "why must be a text"),
        ({"do": []}, "do must say at least one thing"),
        ({"do": [{"if": "x"}]}, "do holds texts"),
        ({"node": "maybe"}, "node is true, false or alone"),
        ({"regex": "x"}, "unknown key regex"),
        ({"title": "x" * 5000}, "title must be a text of 1 to 2000"),
    ],
)
def test_what_is_wrong_in_it_is_refused_with_its_name(change: dict[str, object], says: str) -> None:
    data = copy.deepcopy(DATA)
    data[0].update(change)
    with pytest.raises(Wrong, match=says):
        catalogue.check(data)


@pytest.mark.parametrize("data", [None, {}, [], [1], "x", [{}] * 2000])
def test_what_is_no_catalogue_is_refused(data: object) -> None:
    with pytest.raises(Wrong):
        catalogue.check(data)


def test_a_pattern_has_its_parts_in_order_and_its_ends() -> None:
    whole = catalogue.pattern("^GLIBC_*not found$")
    assert whole.is_in(b"[rank1]: GLIBC_2.34 not found ", b"GLIBC_2.34 not found ")
    assert not whole.is_in(b"x GLIBC_2.34 not found", b"x GLIBC_2.34 not found")
    assert not whole.is_in(b"GLIBC_2.34 not found here", b"GLIBC_2.34 not found here")
    assert not whole.is_in(b"not found GLIBC_", b"not found GLIBC_")
