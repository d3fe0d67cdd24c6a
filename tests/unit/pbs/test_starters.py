"""pbs/starters.sh, one function at a time: who has answered, who is given up, who is asked to end and when."""

import os
import subprocess
from pathlib import Path

import pytest

from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome

CHECKOUT = Path(__file__).resolve().parents[3]
START = """
set -euo pipefail
LC_ALL=C
source "$1/host/common.sh"
source "$1/pbs/starters.sh"
say() { echo "says $*"; }
run_dir=$2 handover_dir=$2 attempt=3 starter=ssh goes_on='' hosts=(a b c) nnodes=3 seconds=100
pids=() held=() gone_at=() kill_at=() answered=() grace=() ANSWER=120 waiting_since=0 ended_at='' linger=$LINGER
end_ssh() { echo "asks $1"; }
"""
SET = 'show() { local name=$1 at; declare -n all=$name; for at in "${!all[@]}"; do echo "$at=${all[at]}"; done; }\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("tasks", "outcome"):
        (tmp_path / name).mkdir()
    return tmp_path


def bash(script: str, run: Path) -> list[str]:
    """The lines that this prints."""
    return subprocess.run(
        ["bash", "-c", START + SET + script, "bash", str(CHECKOUT), str(run)],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.splitlines()


def outcomes(run: Path) -> dict[str, tuple[int, str, str]]:
    """(status, node, error) by the file's name."""
    found = {path.name: outcome.read(path) for path in (run / "outcome").iterdir()}
    return {name: (one.status, one.node, one.error) for name, one in found.items() if one}


def test_so_many_files_may_be_open_as_the_hosts_need(run: Path) -> None:
    script = "ulimit -Sn 64; for nnodes in 2 100 2; do allow_open_files; ulimit -Sn; done; ulimit -Hn 700; "
    script += "nnodes=1000; allow_open_files; ulimit -Sn"
    assert bash(script, run) == ["264", "656", "656", "700"]


def test_an_outcome_that_cannot_be_written_is_told_once_and_tried_again(run: Path) -> None:
    script = "mv -- $2/outcome $2/full; for i in 1 2 3; do tell_outcome 1 'it ended'; done; "
    script += "mv -- $2/full $2/outcome; tell_outcome 1 'it ended'"
    assert bash(script, run) == ["says b: it ended (not written)"]
    assert outcomes(run) == {"3.1": (1, "b", "it ended")}


# --- who has answered ---------------------------------------------------------------------------------------


def test_a_task_has_answered_once_its_file_says_where_it_runs(run: Path) -> None:
    for name, text in {
        "3.0": "a 17 boot\n",
        "3.2": "",
        "2.1": "b 17 boot\n",
        "3.3": "d 1 x\n",
        "3.env": "x 1 y\n",
    }.items():
        (run / "tasks" / name).write_text(text)
    assert bash("read_new_answers; show answered", run) == ["0=a boot"]
    (run / "tasks/3.2").write_text("c 18 boot2\n")
    assert bash("answered[1]=none; read_new_answers; show answered", run) == [
        "0=a boot",
        "1=none",
        "2=c boot2",
    ]
    assert outcomes(run) == {}


@pytest.mark.parametrize(
    ("starter", "second", "is_refused"),
    [
        ("ssh", "a 18 boot", True),
        ("mpiexec", "a 18 boot", True),
        ("pbsdsh", "a 18 boot", False),
        ("ssh", "a 18 other", False),
    ],
)
def test_two_tasks_on_one_host_are_an_error_unless_pbs_counts_its_hosts(
    starter: str, second: str, is_refused: bool, run: Path
) -> None:
    """A host of the same name that has booted at another time is another one."""
    (run / "tasks/3.0").write_text("a 17 boot\n")
    (run / "tasks/3.1").write_text(f"{second}\n")
    bash(f"starter={starter}; read_new_answers", run)
    assert outcomes(run) == (
        {"3.1": (1, "b", "tasks of a and b both run on a: name it once")} if is_refused else {}
    )


@pytest.mark.parametrize(
    ("state", "given_up"),
    [
        ("pids=(7 8 9); gone_at[0]=95", "its task ended before it said that it had started"),
        ("pids=(7 8 9); gone_at[0]=96", ""),  # a shared file system may still show an answer
        (
            "pids=(7); gone_at[0]=98",
            "its task ended before it said that it had started",
        ),  # no starter is left
        ("pids=(7); gone_at[0]=99", ""),
        ("pids=(7 8 9); waiting_since=-20", "no task has answered there for 120 s"),
        ("pids=(7 8 9); waiting_since=-19", ""),
        ("pids=(7 8 9); gone_at[0]=1; answered[0]=x", ""),
    ],
)
def test_a_task_that_does_not_answer_is_given_up_in_its_time(state: str, given_up: str, run: Path) -> None:
    (run / "tasks/3.0.said").write_text("no\nroute to host\n")
    script = "answered=(x x x); unset 'answered[0]'; asked=''; ask_to_end() { asked+=\"$*;\"; }; "
    told = bash(f'{script} {state}; give_up_silent; echo "$asked"; echo "${{answered[0]-}}"', run)
    if given_up:
        assert told == ["0 10;", "none"]
        assert outcomes(run) == {"3.0": (1, "a", f"{given_up}: ssh said: no route to host ")}
    else:
        assert (told[0], outcomes(run)) == ("", {})


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"3.1.said": "mine", "3.0.said": "all"}, "mine"),
        ({"3.0.said": "all"}, "all"),
        ({}, "nothing"),
        ({"3.1.said": ""}, "nothing"),
    ],
)
def test_what_a_starter_said_stands_in_the_outcome(files: dict[str, str], said: str, run: Path) -> None:
    """One command that starts all tasks speaks for each of them."""
    for name, text in files.items():
        (run / "tasks" / name).write_text(text)
    bash("give_up 1 why", run)
    assert outcomes(run) == {"3.1": (1, "b", f"why: ssh said: {said}")}


def test_an_outcome_that_is_there_stays_and_one_that_cannot_be_written_is_said(run: Path) -> None:
    outcome.write(run / "outcome/3.0", Outcome(status=7, node="a", error="its own"))
    assert bash("tell_outcome 0 later; tell_outcome 1 no 64; run_dir=/nowhere; tell_outcome 2 why", run) == [
        "says c: why (not written)"
    ]
    assert outcomes(run) == {"3.0": (7, "a", "its own"), "3.1": (64, "b", "no")}


@pytest.mark.parametrize(("answers", "pauses"), [(0, 6), (2, 2), (3, 3)])
def test_the_last_answers_are_waited_for_as_long_as_a_shared_file_system_takes(
    answers: int, pauses: int, run: Path
) -> None:
    """One comes in each pause, up to the last."""
    script = f"""
        count=0 nnodes={max(answers, 1)}
        read_clock() {{ :; }}
        read_answers() {{ :; }}
        pause() {{
            echo pause
            count=$((count + 1)) seconds=$((seconds + 1))
            if ((count <= {answers})); then answered+=(x); fi
        }}
        await_last_answers
        """
    assert bash(script, run) == ["pause"] * pauses


# --- who is asked to end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("", ["asks 1", "1=110"]),
        ("kill_at[1]=105", ["1=105"]),  # it was asked before, and has less time
        ("kill_at[1]=900", ["1=110"]),
        ("gone_at[1]=90", []),
        ("unset 'pids[1]'", []),
    ],
)
def test_a_starter_is_asked_to_end_once_and_has_the_least_of_the_times_that_it_was_given(
    state: str, told: list[str], run: Path
) -> None:
    assert bash(f"pids=(7 8 9); {state or ':'}; ask_to_end 1 10; show kill_at", run) == told


def test_all_starters_that_are_left_are_asked_to_end(run: Path) -> None:
    told = bash("pids=(7 8 9); gone_at[0]=1; ask_all_to_end 10; show kill_at", run)
    assert told == ["asks 1", "asks 2", "1=110", "2=110"]


@pytest.mark.parametrize(
    ("goes_on", "over", "gone", "told"),
    [
        ("", None, "", ["", "120"]),
        ("", None, "gone_at[0]=90", ["90", "120"]),
        ("yes", None, "gone_at[0]=90", ["", "120"]),  # the others may go on without the first
        ("yes", b"", "", ["100", "120"]),
        ("", b"lost=1\0lost=2\0", "", ["100", "120", "1=5", "2=5"]),
        ("", b"lost=01\0lost=x\0lost=1234567\0", "", ["100", "120"]),
        ("", b"asked=yes\0", "", ["100", "999999"]),
        ("", b"asked=no\0", "", ["100", "120"]),
    ],
)
def test_once_the_first_host_has_ended_the_others_have_a_time_for_it(
    goes_on: str, over: bytes | None, gone: str, told: list[str], run: Path
) -> None:
    """A host that the first one's launch knows to be lost has little, and ranks that save as much as they need."""
    if over is not None:
        (run / "over").write_bytes(over)
    script = f'goes_on={goes_on}; {gone or ":"}; find_end; echo "$ended_at"; echo "$linger"; show grace'
    assert bash(script, run) == told
    assert bash(f"ended_at=7; {script}", run) == ["7", "120"]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("ended_at=''", []),
        ("ended_at=1", []),
        ("ended_at=-20", ["asks 0", "asks 1", "asks 2"]),
        ("ended_at=95; grace[1]=5", ["asks 1"]),
        ("ended_at=96; grace[1]=5", []),
    ],
)
def test_starters_that_wait_for_ever_are_asked_to_end(state: str, told: list[str], run: Path) -> None:
    assert bash(f"find_end() {{ :; }}; pids=(7 8 9); {state}; end_waiting", run) == told


@pytest.mark.parametrize(("goes_on", "gone", "is_told"), [("", 95, True), ("", 96, False), ("yes", 1, False)])
def test_a_task_that_ended_without_an_outcome_gets_one_unless_the_others_go_on_without_it(
    goes_on: str, gone: int, is_told: bool, run: Path
) -> None:
    bash(f"find_end() {{ :; }}; goes_on={goes_on}; gone_at[1]={gone}; end_waiting", run)
    assert outcomes(run) == ({"3.1": (1, "b", "its task ended and left no outcome")} if is_told else {})


@pytest.mark.parametrize(("at", "is_killed"), [(100, True), (101, False)])
def test_a_starter_that_was_asked_to_end_and_does_not_is_killed(at: int, is_killed: bool, run: Path) -> None:
    script = f"""
        find_end() {{ :; }}
        sleep 50 & pids[1]=$!
        kill_at[1]={at}
        end_waiting
        kill -TERM "${{pids[1]}}" 2>/dev/null || true
        wait "${{pids[1]}}" || echo "$?"
        """
    assert bash(script, run) == (["137"] if is_killed else ["143"])


def test_a_starter_that_has_ended_is_noticed_with_the_time(run: Path) -> None:
    script = """
        (exit 0) & pids[0]=$!
        wait
        sleep 50 & pids[1]=$!
        gone_at[2]=7 pids[2]=1
        find_ended_starters
        echo "<$alive>"
        show gone_at
        kill "${pids[1]}"
        wait "${pids[1]}" || true
        seconds=101
        find_ended_starters
        echo "<$alive>"
        show gone_at
        """
    assert bash(script, run) == ["<yes>", "0=100", "2=7", "<>", "0=100", "1=101", "2=7"]


@pytest.mark.parametrize(
    ("stop_at", "warned", "is_warned"),
    [("50", "", True), ("51", "", False), ("", "", False), ("50", "yes", False)],
)
def test_the_job_is_warned_once_of_the_end_of_its_walltime(
    stop_at: str, warned: str, is_warned: bool, run: Path
) -> None:
    script = f"""
        read_job_time() {{ now=50; }}
        trap 'echo warned' USR2
        stop_at={stop_at} has_warned={warned}
        warn_of_walltime
        warn_of_walltime
        """
    assert bash(script, run) == ["warned"] * is_warned


def test_a_second_interrupt_leaves_starters_no_time(run: Path) -> None:
    (run / "tasks/3.end").touch()
    script = """
        patience=10
        ask_all_to_end() { echo "$1"; }
        end_if_interrupted
        end_if_interrupted
        touch "$run_dir/tasks/3.end"
        end_if_interrupted
        """
    assert bash(script, run) == ["10", "0"]


# --- what is left for the tasks -----------------------------------------------------------------------------


@pytest.mark.parametrize("has_nodefile", [False, True])
def test_the_tasks_find_what_to_run_and_where_and_nothing_of_an_attempt_before(
    has_nodefile: bool, run: Path
) -> None:
    (run / "tasks.env").write_bytes(b"A=1\0")
    (run / "nodes").write_text("a\nb\n")
    for name in ("2.env", "2.env.new", "2.argv"):
        (run / "tasks" / name).touch()
    script = f"PBS_NODEFILE={run / 'nodes' if has_nodefile else ''}; cd /tmp; write_task_files run.sh 'a b'"
    bash(script, run)
    tasks = run / "tasks"
    assert (tasks / "3.argv").read_bytes() == b"/tmp\0run.sh\0a b\0"
    listed = f"APPTRAIN_NODEFILE={tasks}/3.nodefile\0".encode() if has_nodefile else b""
    assert (tasks / "3.env").read_bytes() == b"A=1\0APPTRAIN_ATTEMPT=3\0" + listed
    assert (tasks / "3.env").stat().st_mode & 0o777 == 0o600
    names = {"2.argv", "3.argv", "3.env"} | ({"3.nodefile"} if has_nodefile else set())
    assert {path.name for path in tasks.iterdir()} == names
    if has_nodefile:
        assert (tasks / "3.nodefile").read_text() == "a\nb\n"


@pytest.mark.parametrize("show_only", ["", "print_command"])
def test_a_starter_that_is_not_there_is_refused_with_an_outcome_unless_it_is_only_shown(
    show_only: str, run: Path
) -> None:
    refuse = 'refuse() { shift; echo "$*"; exit 0; }'
    (line,) = bash(f"{refuse}; starter=nothing; show_only={show_only}; check_starter", run)
    path = os.environ["PATH"]
    error = f"--start nothing: there is no nothing in PATH ({path}): load its module, or choose another"
    assert line == error
    assert outcomes(run) == ({} if show_only else {"3.0": (64, "a", error)})
    bash("starter=sh; check_starter", run)
