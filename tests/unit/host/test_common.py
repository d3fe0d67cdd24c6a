"""host/common.sh: the clock, the processes of a session, the wait for a child, through signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entrypoint.core.plain import file_part
from entrypoint.job import outcome

CHECKOUT = Path(__file__).resolve().parents[3]
ROUNDS = 150
"""bash forgets about one of thirty children that end as a signal comes."""
WAITS = """
set -uo pipefail
source "$1/host/common.sh"
trap interrupted=yes USR2
sleep 100 &
other=$!
for ((i = 0; i < $2; i++)); do
    (sleep 0.01; exit 7) &
    child=$!
    (sleep 0.01; for ((j = 0; j < 5; j++)); do kill -USR2 $$; done) &
    await_end "$child" 77
    echo "$status"
done
kill "$other"
"""


def test_a_child_that_ends_as_a_signal_comes_is_not_waited_for_for_ever() -> None:
    ended = subprocess.run(
        ["bash", "-c", WAITS, "bash", CHECKOUT, str(ROUNDS)], capture_output=True, text=True, timeout=90
    )
    statuses = ended.stdout.split()
    assert (len(statuses), ended.stderr) == (ROUNDS, "")
    assert set(statuses) <= {"7", "77", "140"}, "or the signal's, which bash may tell late"
    assert "7" in statuses


def bash(script: str, *arguments: object, env: dict[str, str] | None = None) -> str:
    line = ["bash", "-c", f'set -euo pipefail; source "$1/host/common.sh"; {script}', "bash", str(CHECKOUT)]
    return subprocess.run(
        [*line, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=90, check=True
    ).stdout


@pytest.mark.parametrize(
    "line",
    [
        *("IFS=:", "IFS=", "set -o noclobber -o noglob", "set -o allexport"),
        *("shopt -s failglob", "shopt -s nullglob dotglob", "shopt -s nocasematch nocaseglob"),
    ],
)
def test_what_the_users_shell_is_told_to_do_otherwise_does_not_count(line: str, tmp_path: Path) -> None:
    (tmp_path / "of shells").write_text(line)
    (tmp_path / "file.env").touch()
    (tmp_path / ".hidden").touch()
    script = """set +eo pipefail; cd "$2"; words='a b:c'; echo 1 >out; echo $words >out; read -r first _ <out; echo "$first"
        echo *.ENV *; [[ a == A ]] && echo same; env | grep REFUSED; echo end"""
    env = {"PATH": os.environ["PATH"], "BASH_ENV": str(tmp_path / "of shells")}
    assert bash(script, tmp_path, env=env) == "a\n*.ENV file.env of shells out\nend\n"


def test_the_clock_does_not_follow_the_wall_clock() -> None:
    """Setting SECONDS is what a wall clock that is set does to it."""
    told = bash("SECONDS=0; read_clock; first=$seconds; SECONDS=5000; read_clock; echo $((seconds - first))")
    assert int(told) < 60


@pytest.mark.parametrize("host", ["gpu-a01", "n0.cluster.site", "a/../b", "node 1", "x:y[1]*"])
def test_the_log_of_a_task_is_called_as_python_would_call_it(host: str) -> None:
    log = bash('name_log /r/logs/3 "$2"; printf %s "$log"', host)
    assert log == f"/r/logs/3/{file_part(host)}.task.log"


@pytest.mark.parametrize(
    ("status", "signum"), [(1, 0), (128, 0), (129, 1), (137, 9), (159, 31), (160, 0), (255, 0)]
)
def test_an_outcome_in_the_entrypoints_place_names_the_signal_of_its_status(
    status: int, signum: int, tmp_path: Path
) -> None:
    file = tmp_path / "0.1"
    bash('write_outcome "$2" "$3" "n 1" "$4"', file, status, "no\nluck")
    found = outcome.read(file)
    assert found is not None
    assert (found.status, found.signal, found.node, found.error) == (status, signum, "n 1", "no luck")
    assert [path.name for path in tmp_path.iterdir()] == ["0.1"]
    assert file.stat().st_mode & 0o777 == 0o600
    bash('write_outcome "$2" 9 other later', file)
    assert outcome.read(file) == found


def test_an_outcome_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    assert bash('write_outcome "$2" 9 n1 why || echo failed', tmp_path / "gone/0.1") == "failed\n"


NAMED = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)
print(os.getpid(), flush=True)
time.sleep(80)
"""


@pytest.mark.parametrize(
    "name", [b"a\nb", b"a b) S 1 1", b") Z 1 2 3 4", b"(((", b"", b"\xd0\xbe\xd0", b"\n\n", b"%s$(x)`x`"]
)
def test_a_session_is_found_whatever_its_processes_are_called(name: bytes) -> None:
    line = [sys.executable, "-ISc", NAMED.format(name=name)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            assert bash('find_session "$2"; printf "%s " "${members[@]}"', process.pid).split() == [
                str(process.pid)
            ]
        finally:
            process.kill()


def test_a_process_that_was_stopped_is_ended_too() -> None:
    with subprocess.Popen(["sleep", "80"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            bash('end_process TERM "$2"', process.pid)
            deadline = time.monotonic() + 60
            while process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert process.returncode == -signal.SIGTERM
        finally:
            process.kill()
