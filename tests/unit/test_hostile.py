"""Files of others with anything in them: each reader takes them or refuses them in one printable line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from entrypoint import cli
from entrypoint.errors import BadInput
from entrypoint.job import lock
from entrypoint.job.rundir import job_end
from entrypoint.plan import profile
from entrypoint.schedulers import pbs
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
