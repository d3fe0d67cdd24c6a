"""pbs/host.sh, one function at a time: whose job this is, what qsub could not carry, who copies the image to whom."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entrypoint.batch import staging
from entrypoint.node import processes

CHECKOUT = Path(__file__).resolve().parents[3]
START = 'set -euo pipefail; APPTRAIN_HOME=$1; source "$1/host/job.sh"; source "$1/pbs/host.sh"; begin_job; '


def bash(script: str, *arguments: object, **env: str) -> str:
    return subprocess.run(
        ["bash", "-c", START + script, "bash", str(CHECKOUT), *map(str, arguments)],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("env", "is_job"),
    [
        ({}, False),
        ({"PBS_ENVIRONMENT": "PBS_BATCH"}, False),
        ({"PBS_JOBID": "7.srv"}, True),
        ({"PBS_JOBID": "7.srv", "PBS_TASKNUM": "1"}, True),
        ({"PBS_JOBID": "7.srv", "PBS_TASKNUM": "2"}, False),
        ({"PBS_JOBID": "7", "SLURM_JOB_ID": "7"}, False),  # Slurm's own qsub
        (
            {"PBS_JOBID": "7.srv", "SLURM_JOB_ID": "7", "PBS_ENVIRONMENT": "PBS_INTERACTIVE"},
            True,
        ),  # qsub -V there
    ],
)
def test_a_job_of_pbs_is_told_from_its_tasks_and_from_one_of_slurm(env: dict[str, str], is_job: bool) -> None:
    assert bash("if is_pbs_job; then echo yes; fi", **env) == "yes\n" * is_job


def test_lines_that_came_in_variables_of_their_own_are_one_variable_again() -> None:
    binds = {
        "APPTRAIN_BIND": "/a",
        "APPTRAIN_BIND_2": "/b:/c",
        "APPTRAIN_BIND_3": "/d e",
        "APPTRAIN_BIND_5": "/f",
    }
    told = bash("env -0 | grep -z ^APPTRAIN_BIND | sort -z", **binds)
    assert told.split("\0") == ["APPTRAIN_BIND=/a\n/b:/c\n/d e", "APPTRAIN_BIND_5=/f", ""]


def test_a_job_of_a_chain_has_the_variables_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "chain").write_bytes(b"APPTRAIN_ARGS=-- 'a b'\0LARGE=/x\ny\0")
    script = r'printf "%s|" "$APPTRAIN_ARGS" "$LARGE" "${APPTRAIN_CHAIN_FILE-none}" "${carried[@]}"'
    told = bash(script, APPTRAIN_CHAIN_FILE=str(tmp_path / "chain"))
    assert told == "-- 'a b'|/x\ny|none|carried=APPTRAIN_ARGS|carried=LARGE|"


def test_a_job_of_a_chain_whose_run_directory_is_gone_says_so(tmp_path: Path) -> None:
    gone = f"the run directory {tmp_path} is not there on this node: give one that all nodes share in APPTRAIN_RUN_DIR"
    ended = subprocess.run(
        ["bash", "-c", START, "bash", str(CHECKOUT)],
        env={"PATH": os.environ["PATH"], "APPTRAIN_CHAIN_FILE": f"{tmp_path}/chain"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (64, f"apptrain: {gone}\n")


WAVES = r"""
handover_dir=$2 reach=ssh
for rank in {0..10}; do hosts[rank]=h$rank states[rank]=room; done
for change in "${@:3}"; do states[${change%%=*}]=${change#*=}; done
await_all() {
    for i in "${!sources[@]}"; do printf 'h%s:%s|' "${sources[i]}" "${targets[i]-}"; done
    printf '\n'
}
copy_to
"""


@pytest.mark.parametrize(
    ("states", "waves"),
    [
        ([], ["h0:|", "h0: h1 h2 h3 h4 h5 h6 h7 h8|", "h0: h9|h1: h10|"]),
        (["0=unfit", "3=unfit"], ["h1:|", "h1: h2 h4 h5 h6 h7 h8 h9 h10|", ""]),
        (["4=have"], ["", "h4: h0 h1 h2 h3 h5 h6 h7 h8|", "h4: h9|h0: h10|"]),
        (["4=have", "5=have"], ["", "h4: h0 h1 h2 h3 h6 h7 h8|", "h4: h9|h5: h10|"]),
    ],
)
def test_who_can_have_the_image_takes_the_places_of_the_plan(
    states: list[str], waves: list[str], tmp_path: Path
) -> None:
    """The first takes it from the shared file system, or has it; who has it sends it to 8 others."""
    copies = staging.tree([f"h{rank}" for rank in range(11)])
    words = [word for copy in copies for word in (str(copy.wave), copy.source, copy.target)]
    (tmp_path / "copies").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    assert bash(WAVES, tmp_path, *states).splitlines() == waves


def test_after_its_time_no_further_node_gets_a_copy(tmp_path: Path) -> None:
    (tmp_path / "copies").write_bytes(b"0\0\0h0\x001\0h0\0h1\0")
    script = 'read_clock() { seconds=$((${seconds:-0} + 1000)); }; tell() { echo "$*"; };' + WAVES
    assert bash(script, tmp_path).splitlines() == [
        "h0:|",
        "image: no further node gets a copy after 1800 s",
    ]


QSTAT = r"""
qstat() { echo "qstat $*"; }
timeout() { if [[ $1 == -s ]]; then shift 2; fi; shift; "$@"; }
"""


def test_what_pbs_says_of_the_job_is_for_the_image(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\nb\n")
    env = {"PBS_JOBID": "7.srv.site", "PBS_QUEUE": "gpu", "PBS_NODEFILE": str(tmp_path / "nodes")}
    script = QSTAT + r"""describe_job; ask_site; printf '%s|' "$cluster" "${facts[@]:2}" """
    script += "; ((wall > 0 && wall_at > 0)) && echo on"
    assert bash(script, **env) == "srv.site|told=qstat -f 7.srv.site|queue=qstat -Q -f gpu|nodefile=a\nb|on\n"
    script = QSTAT + r"""describe_job; ask_site; printf '%s|' "$cluster" "${facts[@]:2}" """
    assert bash(script, PBS_JOBID="7") == "|told=qstat -f 7|queue=qstat -Q -f workq|"
    assert bash(script) == "|"


def test_a_job_that_is_to_end_asks_nothing_further() -> None:
    """Each question may take half a minute, and PBS kills after ten seconds."""
    script = (
        QSTAT
        + r"""describe_job; trap 'asked_to_end=143' TERM; qstat() { kill "$$"; echo "qstat $*"; }
        ask_site; printf '%s|' "${facts[@]:2}" """
    )
    assert bash(script, PBS_JOBID="7") == "told=qstat -f 7|queue=|"


def test_a_server_that_does_not_answer_says_nothing() -> None:
    script = QSTAT + r"""qstat() { return 1; }; describe_job; ask_site; printf '%s|' "${facts[@]:2}" """
    assert bash(script, PBS_JOBID="7") == "told=|queue=|"


def test_when_the_script_began_and_in_which_zone_is_for_the_image() -> None:
    script = r"""printf -v from '%(%s)T' -1; SECONDS=100; printf -v to '%(%s)T' -1; describe_job
        printf '%s|' "$((from - 100))" "$((to - 100))" "${facts[@]}" """
    from_, to, began, zone, _ = bash(script, TZ="UTC").split("|")
    assert zone == "zone=+0000"
    # bash counts SECONDS from the whole second in which it was set, and describe_job reads two clocks.
    assert int(from_) - 1 <= int(began.removeprefix("began=")) <= int(to) + 1


@pytest.mark.parametrize(
    ("seconds", "fits"), [("1", True), ("9999999", True), ("0", False), ("12345678", False), ("x", False)]
)
def test_the_time_for_a_task_to_answer_is_checked(seconds: str, fits: bool) -> None:
    script = 'refuse() { shift; echo "$*"; exit 0; }; describe_job; echo "$ANSWER"'
    told = bash(script, APPTRAIN_ANSWER_TIMEOUT=seconds)
    error = f"APPTRAIN_ANSWER_TIMEOUT={seconds}: must be seconds (without it 120)"
    assert told == (f"{seconds}\n" if fits else f"{error}\n")
    assert bash(script) == "120\n"


def test_the_job_ends_by_the_wall_clock_as_it_is_now_whatever_it_was_set_to() -> None:
    script = r"""
        read_clock() { seconds=160; }
        wall=1000 wall_at=100 end_at=1300
        read_job_time
        printf -v today '%(%s)T' -1
        echo "$now $(($(job_end) - today))"
        end_at=''
        job_end
        """
    now, left = bash(script).split()
    assert now == "1060"
    assert 238 <= int(left) <= 240


@pytest.mark.parametrize(("status", "is_cut"), [("143", True), ("130", False), ("129", False)])
def test_what_runs_is_ended_at_sigterm_here_and_at_others_by_their_own_traps(
    status: str, is_cut: bool
) -> None:
    script = f'cut_short() {{ echo cut; }}; on_end_signal {status}; echo "$asked_to_end $interrupted"'
    assert bash(script) == "cut\n" * is_cut + f"{status} yes\n"


@pytest.mark.parametrize(
    ("answer", "ends", "is_asked"),
    [
        ("HERE 17 boot", True, True),
        ("HERE 17 boot", False, False),
        ("elsewhere 17 boot", True, False),
        ("HERE 0 boot", True, False),
        ("HERE x boot", True, False),
        (None, True, False),
    ],
)
def test_the_first_nodes_task_is_asked_to_end_or_all_that_are_there(
    answer: str | None, ends: bool, is_asked: bool, tmp_path: Path
) -> None:
    if answer is not None:
        (tmp_path / "tasks").mkdir()
        (tmp_path / "tasks/3.0").write_text(answer.replace("HERE", os.uname().nodename) + "\n")
    script = 'run_dir=$2 attempt=3; end_process() { echo "$*"; return "$3"; }; interrupt 9'
    script = script.replace('return "$3"', f"return {int(not ends)}")
    told = bash(script, tmp_path)
    assert (tmp_path / "tasks/3.end").exists() == (not is_asked)
    assert told == ("TERM 17\n" if answer == "HERE 17 boot" else "")


def test_the_next_job_of_a_chain_gets_what_the_image_has_left_for_it(tmp_path: Path) -> None:
    (tmp_path / "chain.env").write_bytes(b"A=1\0")
    (tmp_path / "chain.args").write_bytes(b"x.py\0")
    script = (
        QSTAT
        + r"""
        qsub() { printf '<%s>' "$APPTRAIN_CHAIN_FILE" "$PWD" "$@" >&2; echo 8.srv; }
        run_dir=$2 handover_dir=$2 chain_words=(-N 'a b') job_script=/x/multinode.pbs
        run_dir=$2/run
        mkdir "$run_dir"
        run_again 2>"$2/called"
        """
    )
    bash(script, tmp_path, PBS_O_WORKDIR=str(tmp_path))
    words = ["-N", "a b", "-v", "APPTRAIN_HOME,APPTRAIN_CHAIN_FILE", "/x/multinode.pbs"]
    shown = "".join(f"<{word}>" for word in [f"{tmp_path}/run/chain.env", str(tmp_path), *words])
    assert (tmp_path / "called").read_text() == shown
    run = tmp_path / "run"
    assert {path.name: path.read_bytes() for path in run.iterdir()} == {
        "chain.env": b"A=1\0",
        "chain.args": b"x.py\0",
        "chain.jobs": b"8.srv\n",
    }
    assert (run / "chain.env").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("no_chain", ["", "as often as it may"])
def test_a_job_that_no_other_may_follow_submits_none(no_chain: str, tmp_path: Path) -> None:
    """Nor one for which the image has left nothing."""
    script = 'qsub() { echo submitted; }; run_dir=$2 handover_dir=/nowhere no_chain=$3; run_again 2>/dev/null || echo "|$?"'
    assert bash(script, tmp_path, no_chain) == f"{no_chain}|1\n"


RUNS = r"""
timeout() { local line; printf -v line '<%s>' "$@"; printf '%s\n' "$line"; }
hosts=(a 'b c' d) stage=/disk bound=7 handover_dir=/nowhere APPTRAIN_IMAGE=/i.sif reach=ssh
stage_bytes=9 stage_id=id
APPTRAIN_HOME="/check out"
"""


def test_each_host_is_asked_by_ssh_and_this_one_at_once() -> None:
    told = bash(RUNS + "each_host look 1 '2 3'")
    line = r"exec {}/bin/bash /check\ out/host/stage.sh look {} /disk 1 2\ 3 "
    bounded = "timeout --kill-after=10 7 "
    ssh = "<--kill-after=10><7><ssh><-o><BatchMode=yes><-o><ConnectTimeout=20><--><{}><{}>"
    assert sorted(told.splitlines()) == sorted(
        [
            f"<--kill-after=10><7></bin/bash><-c><{line.format('', 0)}>",
            ssh.format("b c", line.format(bounded, 1)),
            ssh.format("d", line.format(bounded, 2)),
        ]
    )


def test_whoever_has_the_image_is_told_to_whom_to_send_it() -> None:
    told = bash(RUNS + "sources=(0 2) targets=(' x y'); each_source")
    line = r"/bin/bash /check\ out/host/stage.sh send - /disk 9 id /i.sif "
    assert sorted(told.splitlines()) == sorted(
        [
            f"<--kill-after=10><7></bin/bash><-c><exec {line}x y >",
            "<--kill-after=10><7><ssh><-o><BatchMode=yes><-o><ConnectTimeout=20><--><d>"
            f"<exec timeout --kill-after=10 7 {line}>",
        ]
    )


def test_what_a_timeout_has_just_started_ends_with_the_job_script_too(tmp_path: Path) -> None:
    """It takes a signal for its own until it has noted its child: this one never does."""
    program = tmp_path / "timeout"
    program.write_text(
        f"""#!{sys.executable}
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
os.setpgid(0, 0)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execvp("bash", ["bash", "-c", f"echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/child; exec sleep 60"])
while True:
    signal.pause()
"""
    )
    program.chmod(0o755)
    script = """
        bound=60 handover_dir=$2
        each() { start_bounded true; wait; }
        end_together each & pid=$!
        until [[ -e $2/child ]]; do sleep 0.05; done
        kill -TERM "$pid"
        wait "$pid" || echo "$?"
        """
    assert bash(script, tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}") == "143\n"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while processes.is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_host_that_hangs_keeps_no_other_from_being_asked(tmp_path: Path) -> None:
    """The first one answers once the last one was asked."""
    script = (
        RUNS
        + r"""
        hosts=()
        for ((i = 0; i < 300; i++)); do hosts+=("n$i"); done
        run_on() {
            if (($1 == 299)); then : >"$last"; fi
            { (($1)) || until [[ -e $last ]]; do sleep 0.05; done; printf '%s have\n' "$1"; } &
        }
        last=$2
        each_host look
        """
    )
    answers = bash(script, tmp_path / "last").splitlines()
    assert sorted(answers) == sorted(f"{rank} have" for rank in range(300))


def test_the_image_is_copied_in_waves_until_there_is_none_or_the_job_is_to_end() -> None:
    script = r"""
        reach=ssh
        await_all() { echo "$* $wave"; if [[ $wave == "$stops" ]]; then asked_to_end=143; fi; }
        read_wave() { (($1 < 3)); }
        stops=9; copy_to a b
        stops=1; copy_to a b
        """
    assert bash(script).splitlines() == [
        *(f"each_source {wave}" for wave in range(3)),
        "each_source 0",
        "each_source 1",
    ]


def test_where_ssh_does_not_go_eight_hosts_at_once_take_it_from_the_shared_file_system(
    tmp_path: Path,
) -> None:
    hosts = [f"n{rank}" for rank in range(20)]
    rows = [
        word for copy in staging.from_shared(hosts) for word in (str(copy.wave), copy.source, copy.target)
    ]
    (tmp_path / "copies.shared").write_bytes(b"".join(word.encode() + b"\0" for word in rows))
    script = """
        handover_dir=$2 hosts=("${@:3}") reach=pbsdsh
        for rank in "${!hosts[@]}"; do states[rank]=room; done
        await_all() { echo "${sources[*]} ${targets[*]}"; }
        copy_to
        """
    told, *waves = bash(script, tmp_path, *hosts).splitlines()
    assert (
        told
        == "apptrain: image: copied from the shared file system, to 8 nodes at once, as ssh does not reach n1"
    )
    assert [wave.split() for wave in waves] == [
        [str(rank) for rank in range(*wave)] for wave in ((0, 8), (8, 16), (16, 20))
    ]


def test_answers_that_a_shared_file_system_shows_late_count(tmp_path: Path) -> None:
    script = """
        answers=$2 hosts=(a b c d)
        printf '2 room \\n' >"$answers/2"
        printf '3 unfit it is "full" \\n' >"$answers/3"
        (sleep 0.4; printf '1 have \\n' >"$answers/new"; mv "$answers/new" "$answers/1") &
        print_answers
        """
    assert bash(script, tmp_path).splitlines() == ["1 have ", "2 room ", '3 unfit it is "full" ']
