"""Every recorded environment beside the whole plan, or the whole refusal, that it must give."""

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli.main import main
from tests.unit import plans

TRIES = [*plans.slurm_tries(), *plans.pbs_tries()]
LITERAL = sorted((plans.RECORDINGS / "plans").glob("*.json"))


def printed(
    capsys: pytest.CaptureFixture[str], env_file: Path, options: list[str], cmd: list[str]
) -> tuple[Any, ...]:
    """(exit status, stdout, stderr) of `plan --json`."""
    status = main(["plan", "--env-file", str(env_file), "--json", *options, "--", *cmd])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("one", TRIES, ids=lambda one: one.name)
def test_a_recording_gives_the_plan_or_the_refusal_written_for_it(
    one: plans.Try, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env_file = tmp_path / "recorded.env"
    env_file.write_text(one.text)
    status, out, err = printed(capsys, env_file, one.arguments, plans.CMD)
    if one.plan is None:
        assert (status, out, err) == (64, "", f"apptrain: {one.refused}\n")
    else:
        assert err == "".join(f"apptrain: {line}\n" for line in one.said)
        assert (status, json.loads(out)) == (0, one.plan)


@pytest.mark.parametrize("path", LITERAL, ids=lambda path: path.stem)
def test_a_recording_gives_the_plan_spelled_out_in_full(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = json.loads(path.read_text())
    recording = plans.RECORDINGS / case["recording"]
    options = [option.replace("NODEFILE", str(recording.parent / "nodefile")) for option in case["options"]]
    status, out, err = printed(capsys, recording, options, case["cmd"])
    assert err.splitlines() == case["said"]
    assert (status, json.loads(out)) == (0, case["plan"])


def test_every_recording_has_a_plan_or_a_refusal() -> None:
    recorded = {
        str(path.relative_to(plans.RECORDINGS).with_suffix("")) for path in plans.RECORDINGS.rglob("*.env")
    }
    assert {one.recording for one in TRIES} == recorded
    assert len(recorded) == 176


def test_every_try_says_either_a_plan_or_a_refusal() -> None:
    assert [one.name for one in TRIES if (one.plan is None) == (one.refused is None)] == []


def test_tasks_that_no_variable_tells_apart_are_listed_as_such() -> None:
    """Second tasks on a host and pbsdsh's index past the end: the join refuses the duplicates."""
    for case, entry in plans.cases("openpbs").items():
        lines = plans.RECORDINGS.joinpath("openpbs", case, "nodefile").read_text().split()
        doubtful = [
            place
            for place in entry["places"]
            if "beyond-the-end" in place or _is_second_on_its_host(*_line_and_host(place), lines)
        ]
        assert sorted(entry["cannot_tell"]) == sorted(doubtful)


def _is_second_on_its_host(line: int | None, host: str, lines: list[str]) -> bool:
    return line is not None and lines.index(host) != line


def _line_and_host(place: str) -> tuple[int | None, str]:
    """`pbsdsh-n2.pbsn1` and `pbsdsh-all.2.pbsn1` are the task of line 2; others belong to no line."""
    task, _, host = place.rpartition(".")
    number = task.removeprefix("pbsdsh-n").removeprefix("pbsdsh-all.")
    return (int(number) if number.isdecimal() else None), host
