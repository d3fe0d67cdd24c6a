"""Manifests and metrics that somebody else has written, through `compare` and `rerun` as the command has them.

Whatever is in them: an exit status that the docs name, one line if it is 64, no traceback, no control character.
Mutations come from a fixed seed. What was once found to break a command lies in tests/recordings/hostile.
"""

import contextlib
import copy
import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli import apptrain as command
from tests.unit.bounds import limited

ROOT = Path(__file__).parents[3]
FOUND = ROOT / "tests/recordings/hostile"
REPOSITORY = {
    "commit": "c" * 40,
    "state": "s",
    "remote": "r",
    "changed": 1,
    "untracked": 0,
    "diff": "code.diff",
}
ATTEMPT = {
    "attempt": 0,
    "began": "2026-01-01T00:00:00+00:00",
    "ended": None,
    "status": None,
    "scheduler": "embedded",
    "job_id": "7",
    "nodes": ["a", "b"],
    "nproc_per_node": 2,
    "world_size": 4,
    "mode": "torchrun",
    "device": "cpu",
    "no_python": False,
    "threads": "1",
    "transport": "gloo over lo",
    "venv": "/venv",
    "command": ["my.py", "--lr", "0.1"],
    "image": {"id": "i"},
    "versions": {"torch": "2.15.0"},
    "identity": {"threads": 1},
    "checkpoint": {"path": "/c", "step": 20},
}
HONEST: dict[str, Any] = {
    "schema_version": 2,
    "image": {"id": "i", "partition_sha256": "p", "lock_sha256": "l"},
    "code": {
        "program": {"name": "my.py", "sha256": "d"},
        "repository": {**REPOSITORY, "diff_sha256": "d"},
        "apptrain": {"version": "1", "repository": REPOSITORY},
    },
    "command": ["my.py", "--lr", "0.1"],
    "config": {"seed": 1, "batch_size": 64, "data.path": "/data", "optimizer.lr": 0.1},
    "nodes": [{"name": "a", "plan": "plan.0.json"}, {"name": "b", "plan": None}],
    "environment": {"values": {"MKL_CBWR": "AVX2"}, "names": ["HF_TOKEN"]},
    "hardware": [{"nodes": ["a"], "cpu": {"model": "EPYC"}, "gpus": ["H100"], "driver": "580"}],
    "seeds": {"seed": 1},
    "attempts": [ATTEMPT, ATTEMPT | {"attempt": 1, "checkpoint": None}],
    "results": {"accuracy": 0.5},
}
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        2**70,
        1.5,
        1e308,
        "",
        "-x",
        "\x1b[31mred\x9b\x7f\r\n",
        "\u202e",
        "\ud800",
        "\udcff",
        "\0",
    ),
    *(
        "x" * 5000,
        "../../etc",
        "/dev/zero",
        "$(touch x)`;'",
        [],
        {},
        [[]],
        ["x", 1],
        {"x": "\x1b"},
        {"\x1b": {}},
    ),
)
TRACE = "".join(f'{{"step": {step}, "loss": {1 / step}, "lr": 0.1}}\n' for step in range(1, 9))
NUMBERS = (
    "1",
    "-0.0",
    "NaN",
    "Infinity",
    "1e999",
    "1" + 400 * "0",
    '"x"',
    "null",
    "[]",
    "9" * 5000,
    "1.5",
    "true",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with an honest run in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(command, "HOME", tmp_path / "home")
    write(tmp_path / "honest", json.dumps(HONEST), TRACE)
    (tmp_path / "my.py").touch()
    return tmp_path


def write(run: Path, manifest: str | bytes, trace: str | bytes) -> None:
    run.mkdir(exist_ok=True)
    for name, text in (("manifest.json", manifest), ("metrics.jsonl", trace)):
        (run / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))


def stands(*words: str) -> int:
    """The status of a command that behaves, whatever it was given."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = command.main(list(words))
    said, refused = out.getvalue(), err.getvalue()
    assert status in ((0, 64) if words[0] == "rerun" else (0, 1, 64))
    if status == 64:
        assert (said, refused.count("\n"), refused[:10]) == ("", 1, "apptrain: ")
        assert len(refused) < 5000
    for line in (said + refused).splitlines():
        assert line.isprintable()
    if "--json" in words and status != 64:
        json.loads(said, parse_constant=pytest.fail)
    return status


def stand_all(run: str = "hostile") -> None:
    stands("compare", "honest", run)
    stands("compare", run, "honest", "--json")
    stands("rerun", run)


def places(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Each place in a JSON value, from outside inwards."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, *path, key)


def changed(place: tuple[str | int, ...], value: Any) -> Any:
    if not place:
        return value
    manifest: Any = copy.deepcopy(HONEST)
    at = manifest
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    return manifest


@pytest.mark.usefixtures("here")
def test_the_honest_run_is_taken() -> None:
    assert stands("compare", "honest", "honest") == 0
    assert stands("rerun", "honest") == 0


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_each_field_may_hold_anything(here: Path, value: Any) -> None:
    """A third of the fields with each value: another third with the next one."""
    for place in [*places(HONEST)][VALUES.index(value) % 3 :: 3]:
        write(here / "hostile", json.dumps(changed(place, value)), TRACE)
        stand_all()


def test_each_field_may_be_missing(here: Path) -> None:
    for place in places(HONEST):
        manifest: Any = changed(place, None)
        at = manifest
        for key in place[:-1]:
            at = at[key]
        if place:
            del at[place[-1]]
        write(here / "hostile", json.dumps(manifest), TRACE)
        stand_all()


def test_each_byte_may_be_another(here: Path) -> None:
    dice = random.Random(28)
    text = json.dumps(HONEST).encode()
    for _ in range(150):
        some = bytearray(text)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(some))
            some[at : at + dice.randint(0, 30)] = dice.choice(
                (
                    b"",
                    b"\x00",
                    b"\xff",
                    b'"',
                    b"{",
                    b"]",
                    b",",
                    b"9" * 400,
                    b"[" * 2000,
                    b"\\u001b",
                    b"\\ud800",
                    b"1e999",
                )
            )
        write(here / "hostile", bytes(some), TRACE)
        stand_all()


def test_each_line_of_the_metrics_may_be_anything(here: Path) -> None:
    dice = random.Random(28)
    for _ in range(150):
        lines = TRACE.splitlines()
        for _ in range(dice.randint(1, 4)):
            step, loss, lr = dice.choices(NUMBERS, k=3)
            odd = (
                f'{{"step": {step}, "loss": {loss}, "lr": {lr}}}',
                f'{{"step": {dice.randint(-9, 9)}, "lr": 1}}',
            )
            lines.insert(dice.randrange(9), dice.choice((*odd, "", "\x00", "[" * 5000, "\udcff")))
        write(
            here / "hostile", json.dumps(HONEST), "\n".join(lines).encode("utf-8", "surrogateescape") + b"\n"
        )
        stands("compare", "honest", "hostile", "--json")
        stands("compare", "hostile", "honest")


@pytest.mark.parametrize("name", sorted(path.name for path in FOUND.iterdir()))
def test_what_was_found_before_stays_closed(here: Path, name: str) -> None:
    text = (FOUND / name).read_bytes()
    write(here / "hostile", *((json.dumps(HONEST), text) if name.endswith(".jsonl") else (text, TRACE)))
    stand_all()


@pytest.mark.parametrize("name", ["manifest.json", "metrics.jsonl"])
def test_what_is_no_file_is_refused_at_once(here: Path, name: str) -> None:
    (here / "directory").mkdir()
    os.mkfifo(here / "fifo")
    for number, target in enumerate(("fifo", "directory", "/dev/zero", "gone")):
        run = here / str(number)
        write(run, json.dumps(HONEST), TRACE)
        (run / name).unlink()
        (run / name).symlink_to(here / target)
        assert stands("compare", "honest", str(number)) == 64


def test_the_name_of_a_run_directory_cannot_write_to_the_terminal(here: Path) -> None:
    name = "\x1b[31mred\n"
    write(here / name, json.dumps(HONEST), TRACE)
    assert stands("compare", "honest", name) == 0
    assert stands("compare", name, name + "x") == 64
    write(here / name, "[]", TRACE)
    stand_all(name)


LARGE = 50_000_000
FILES = {
    "lists": ("manifest", b'{"attempts": [' + b"[]," * (LARGE // 3)),
    "depth": ("manifest", b"[" * LARGE),
    "most that is read": (
        "manifest",
        b'{"config": {"x": "' + b"\xf0\x9f\x98\x80" + b"x" * (8 << 20) + b'"},"attempts":[]}',
    ),
    "most values": ("manifest", b'{"attempts":[' + b"{}," * 390_000 + b"{}]}"),
    "empty lines": ("metrics", b"\n" * LARGE),
    "one line": ("metrics", b'{"step": 1, "loss": ' + b"1" * LARGE),
    "honest": ("metrics", b"".join(b'{"step": %d, "loss": 1.5}\n' % step for step in range(300_000))),
    "the same step": ("metrics", b'{"step": 1, "loss": 1.5}\n' * 300_000),
    "steps that fall": ("metrics", b"".join(b'{"step": %d, "lr": 1}\n' % -step for step in range(1_000_000))),
    "objects": ("metrics", b"{}\n" * (LARGE // 3)),
}
"""What is given in place of a file, and how it begins; some have 50 MB, the traces of valid lines 8 MB."""


@pytest.mark.parametrize("name", FILES)
def test_a_large_file_takes_little_memory_and_time(here: Path, name: str) -> None:
    place, text = FILES[name]
    write(here / "hostile", *((text, TRACE) if place == "manifest" else (json.dumps(HONEST), text)))
    ran = limited(here, "compare", "honest", "hostile")
    assert ran.returncode in (0, 1, 64), ran.stderr[-2000:]
    assert ran.stderr.count("\n") == (ran.returncode == 64)
