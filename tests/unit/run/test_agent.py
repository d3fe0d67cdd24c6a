"""What the process around torchrun's agent tells of its ranks, without torch."""

import json
import os
import subprocess
import time

import pytest

from entrypoint.run import agent


@pytest.mark.parametrize(("script", "status", "signum"), [("exit 3", 3, 0), ("kill -9 $$", 137, 9)])
def test_how_a_rank_ended_is_told_and_the_rank_left_to_the_agent(
    script: str, status: int, signum: int
) -> None:
    reader, writer = os.pipe()
    report = agent.Reporter(writer)
    began = time.time()
    rank = subprocess.Popen(["sh", "-c", script])
    agent._watch(5, rank.pid, report)
    assert rank.wait() == (-signum or status)
    agent._watch(5, rank.pid, report)  # which nothing is known of any more
    os.close(writer)
    with os.fdopen(reader) as said:
        (line,) = said
    event = json.loads(line)
    assert began <= event.pop("time") <= time.time()
    assert event == {"event": "ended", "rank": 5, "status": status, "signal": signum}


def test_an_error_of_many_lines_is_told_as_one_of_bounded_length() -> None:
    error = RuntimeError("the server socket has failed to listen\n\n  port: 29500 " + "x" * 600)
    said = agent._one_line(error)
    assert said.startswith("RuntimeError: the server socket has failed to listen port: 29500 xxx")
    assert len(said) == 500
