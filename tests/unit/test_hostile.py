"""Files of others with anything in them: each reader takes them or refuses them in one printable line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from entrypoint.cli import main as cli
from entrypoint.core.errors import BadInput
from entrypoint.job import lock
from entrypoint.job.rundir import job_end
from entrypoint.plan import profile
from entrypoint.schedulers import pbs
from tests.unit.bounds import limited
from train import config
from train import status as train_status

WORDS = "title: nodes: gpus: env: launch: seed: data: end= NaN inf 1:30 010 & * << [ ] { } - ? ! | > ' \" # , \n\t"
PARTS = st.sampled_from(
    [*WORDS.split(" "), "\n", "  ", "\x1b[2J", "\0", "\u2028", "9" * 5000, "[" * 2000, "A=b"]
)
CONTENT = st.one_of(
    st.binary(max_size=200), st.lists(PARTS, max_size=30).map(lambda all_: "".join(all_).encode())
)
READERS: dict[str, Callable[[Path], object]] = {
    "profile": lambda path: profile.load(str(path)),
    "config": config.load,
    "stop": job_end,
    "lock": lock._read,
    "environment": cli.read_env_file,
    "nodes": lambda path: pbs._lines(path, "--nodefile"),
}


@pytest.mark.parametrize("name", READERS)
@seed(1)
@example(b"a: &a [*a]")
@example(b'{"pid":' * 5000)
@settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(content=CONTENT)
def test_whatever_it_holds_is_taken_or_refused_in_a_line(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(content)
    said = ""
    try:
        READERS[name](path)
    except (BadInput, train_status.TrainingRefused) as refusal:
        said = str(refusal)
    assert not said or said.isprintable()
    assert len(said) < 2100


# --- large ones, through the commands ------------------------------------------------------------------------

LARGE = 50_000_000
CONTENTS = {
    "lists": b"[]," * (LARGE // 3),
    "depth": b"[" * LARGE,
    "keys": b"k: 1\n" * (LARGE // 5),
    "lines": b"A=b\n" * (LARGE // 4),
    "one line": b"A=" + b"9" * LARGE,
    "blank": b"\n" * LARGE,
    "zeros": bytes(LARGE),
}
COMMANDS = {
    "a profile": [
        "plan",
        "--profile",
        "./FILE.yaml",
        *["--nodes", "a", "--node-rank", "0", "--device", "cpu", "--", "x.py"],
    ],
    "an environment": ["plan", "--env-file", "FILE.yaml", "--", "x.py"],
    "a node file": [
        "plan",
        "--env-file",
        "pbs.env",
        "--nodefile",
        "FILE.yaml",
        "--device",
        "cpu",
        "--",
        "x.py",
    ],
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_large_file_takes_little_memory_and_time(tmp_path: Path, command: str, content: str) -> None:
    (tmp_path / "FILE.yaml").write_bytes(CONTENTS[content])
    (tmp_path / "pbs.env").write_text("PBS_JOBID=7.server\nPBS_NODEFILE=x\nPBS_TASKNUM=1\n")
    (tmp_path / "x.py").touch()
    ran = limited(tmp_path, *COMMANDS[command])
    assert (ran.returncode, ran.stderr.count("\n"), "Traceback" in ran.stderr) == (64, 1, False), ran.stderr
    assert len(ran.stderr) < 2200
