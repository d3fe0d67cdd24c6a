"""The double of OpenPBS, held to recordings: requests, placement and variables."""

import re
import shlex
from pathlib import Path

import pytest

from tests.pbs_double import commands, request, variables
from tests.pbs_double.config import Config
from tests.pbs_double.variables import Job, Site
from tests.unit.tests.double import HOSTS, RECORDINGS

CASES = sorted(path.parent.name for path in RECORDINGS.glob("*/nodefile"))
NOT_OURS = {"CASE", "MYVAR"}
"""Set by the recording's own script and request."""


def recorded(case: str) -> dict[str, str]:
    lines = (RECORDINGS / case / "job.txt").read_text().splitlines()
    found = dict(line.partition(" = ")[::2] for line in lines[1:] if " = " in line)
    return {"options": lines[0].partition(": ")[2].partition("  ")[0], **found}


def asked(options: str) -> request.Request:
    words, _ = commands._getopt(shlex.split(options), commands.QSUB_OPTIONS, "qsub")
    return request.read(commands._resources(words))


def placed(case: str) -> list[request.Placed]:
    free = {host: {"ncpus": 16, "ngpus": 8} for host in HOSTS}
    beside = dict.fromkeys(HOSTS, 1) if recorded(case)["exec_host"].startswith("pbsn1/1") else {}
    found = request.arrange(asked(recorded(case)["options"]), free, beside)
    assert found is not None
    return found


def environment(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines()
    return {n: v for n, v in (line.split("=", 1) for line in lines) if n not in NOT_OURS}


def test_the_recordings_are_there() -> None:
    assert len(CASES) == 14
    assert Config(address="").kill_delay == 10.0


@pytest.mark.parametrize("case", CASES)
def test_a_request_becomes_what_the_recording_says(case: str) -> None:
    told = recorded(case)
    chunks, listed = placed(case), asked(told["options"]).listed
    assert request.node_file(chunks) == (RECORDINGS / case / "nodefile").read_text().split()
    assert request.exec_host(chunks) == told["exec_host"]
    assert request.exec_vnode(chunks) == told["exec_vnode"]
    assert {f"Resource_List.{name}": value for name, value in listed.items()} == {
        name: value for name, value in told.items() if name.startswith("Resource_List.")
    }


def test_a_chunk_larger_than_any_host_stays_queued_with_the_recorded_comment() -> None:
    told = recorded("old_gadi_ncpus96_ngpus8")
    wanted = asked("-l ncpus=96 -l ngpus=8 -l mem=4gb")
    total = {host: {"ncpus": 16, "ngpus": 8} for host in HOSTS}
    assert request.arrange(wanted, total, {}) is None
    assert request.why_never(wanted, total) == told["comment"]
    assert {f"Resource_List.{n}": v for n, v in wanted.listed.items()} == {
        name: value for name, value in told.items() if name.startswith("Resource_List.")
    }


@pytest.mark.parametrize("case", CASES)
def test_script_and_tasks_have_exactly_the_recorded_variables(case: str) -> None:
    chunks = placed(case)
    files = sorted((RECORDINGS / case).glob("*.env"))
    assert files
    for file in files:
        real = environment(file)
        array = re.fullmatch(r"(\d+)\[(\d+)\](\..*)", real["PBS_JOBID"])
        given = commands._variables(
            dict(
                commands._getopt(shlex.split(recorded(case)["options"]), commands.QSUB_OPTIONS, "qsub")[0]
            ).get("-v", "")
        )
        job = Job(
            id=real["PBS_JOBID"],
            name=real["PBS_JOBNAME"],
            user="alice",
            home="/home/alice",
            shell="/bin/bash",
            queue="workq",
            cookie=real["PBS_JOBCOOKIE"],
            submitted={name: value for name, value in real.items() if name.startswith("PBS_O_")},
            given={name: value for name, value in given.items() if name not in NOT_OURS},
            hosts=request.hosts(chunks),
            lines=request.node_file(chunks),
            chunks=request.line_chunks(chunks),
            array_id=f"{array[1]}[]{array[3]}" if array else "",
            array_index=array[2] if array else "",
        )
        site = Site(nodefile=f"/var/spool/pbs/aux/{job.id}", tmpdir=f"/var/tmp/pbs.{job.id}", port=15003)
        if file.name.startswith("script."):
            path = {"PATH": real["PATH"]}  # the login shell's profile sets it
            assert {**variables.script(job, site), **path} == real
            continue
        host = re.split(r"[.-]", file.name)[-2]
        index = re.search(r"(?:-n|all\.)(\d+)", file.name)
        line = int(index[1]) % len(job.lines) if index else job.lines.index(host)
        assert job.lines[line] == host
        number = int(real["PBS_TASKNUM"], 16) & 0xFFFF
        assert variables.task(job, site, line=line, number=number) == real, file.name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "-l select=2 -l ncpus=4",
            '"-lresource=" cannot be used with "select" or "place", resource is: ncpus',
        ),
        ("-l select=2 -l nodes=2:ppn=1", "Cannot be used with select or place: nodes"),
        ("-l nodes=2 -l place=scatter", "Cannot be used with select or place: nodes"),
        ("-l place=scatter", 'Cannot have "place" without "select"'),
    ],
)
def test_what_does_not_go_beside_select_and_place_is_refused(options: str, said: str) -> None:
    """As the server of OpenPBS 23.06 is written: no recording has it."""
    with pytest.raises(request.Refused) as refused:
        asked(options)
    assert str(refused.value) == said


def test_a_hook_splits_old_requests_over_nodes_where_a_site_has_one() -> None:
    found = request.read({"ncpus": "96", "ngpus": "8"}, split=48)
    assert (found.listed["select"], found.listed["place"]) == ("2:ncpus=48:ngpus=4", "scatter")


def test_variables_are_split_at_commas_and_lose_their_quotes_unless_they_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BAR", 'it\'s, of "all"')
    assert commands._variables("A=1,B=x y,BAR") == {"A": "1", "B": "x y", "BAR": 'it\'s, of "all"'}
    assert commands._variables("A=-- a.py 'b c',B='1,2',C=1\\,2") == {
        "A": "-- a.py b c",
        "B": "1,2",
        "C": "1,2",
    }


@pytest.mark.parametrize("text", ["A=1,two", "A=it's", "=1"])
def test_a_list_of_variables_that_qsub_cannot_read_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        commands._variables(text)
    assert capsys.readouterr().err == "qsub: cannot send environment with the job\n"
