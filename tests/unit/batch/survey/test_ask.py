"""entrypoint/batch/survey/ask.py: commands that are there, that fail, and that never answer."""

import time
from pathlib import Path

from tests import procs
from tests.unit.batch.survey.login import Login


def test_what_a_command_prints_is_its_answer_and_is_told(login: Login) -> None:
    login.has({"sinfo": "gpu up\ncpu up"})
    machine = login.machine()
    assert machine.ask("sinfo", "--noheader") == "gpu up\ncpu up\n"
    assert machine.told == ["sinfo: 2 lines"]


def test_a_command_that_is_not_there_is_told_and_answers_nothing(login: Login) -> None:
    machine = login.machine()
    assert machine.ask("qstat", "-Qf") == ""
    assert machine.told == ["qstat -Qf: not in PATH"]


def test_a_command_that_fails_says_why_in_one_line(login: Login) -> None:
    login.script(
        "sinfo", "#!/bin/sh\necho half\nprintf 'first\\nslurm_load: Unable\\tto contact\\n' >&2\nexit 1"
    )
    machine = login.machine()
    assert machine.ask("sinfo") == ""
    assert machine.told == ["sinfo: status 1: slurm_load: Unable to contact"]
    login.script("sinfo", "#!/bin/sh\nexit 3")
    assert machine.ask("sinfo") == ""
    assert machine.told[1:] == ["sinfo: status 3: it says nothing"]


def test_a_command_that_never_answers_is_ended_with_its_children(login: Login, tmp_path: Path) -> None:
    """The child holds the output open, which must not hold us up."""
    pid = tmp_path / "pid"
    login.script("sinfo", f"#!/bin/sh\n/bin/sleep 60 &\necho $! >'{pid}'\nwait")
    machine, began = login.machine(answer=1), time.monotonic()
    assert machine.ask("sinfo") == ""
    assert machine.told == ["sinfo: no answer in 1 s"]
    assert time.monotonic() - began < 20
    child = int(pid.read_text())
    while is_alive(child):  # a killed process ends a moment later
        assert time.monotonic() - began < 20
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    return dict(procs.files("stat")).get(pid, b") Z").rpartition(b")")[2].split()[0] != b"Z"


def test_a_child_that_stays_behind_holds_nothing_up(login: Login) -> None:
    login.script("module", "#!/bin/sh\n/bin/sleep 60 &\necho answer")
    began = time.monotonic()
    assert login.machine().ask("module") == "answer\n"
    assert time.monotonic() - began < 20


def test_a_file_that_is_not_there_is_empty_as_one_that_cannot_be_read(login: Login) -> None:
    login.file("sys/class/net/eth0/speed", "25000")
    machine = login.machine()
    assert machine.read("sys/class/net/eth0/speed") == "25000"
    assert machine.read("sys/class/net/eth0/none") == ""
    assert machine.read("sys/class/net/eth0") == ""
    assert machine.names("sys/class/net") == ["eth0"]
    assert machine.names("sys/class/none") == []


def test_commands_speak_english(login: Login) -> None:
    login.script("tell", '#!/bin/sh\necho "$LC_ALL"')
    login.env["LC_ALL"] = "de_DE.UTF-8"
    assert login.machine().ask("tell") == "C\n"
