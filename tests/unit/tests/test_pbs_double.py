"""The double of OpenPBS, held to recordings: processes."""

import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from tests.pbs_double import commands, local
from tests.pbs_double.config import Config
from tests.pbs_double.local import Local
from tests.pbs_double.server import NODE_DOWN
from tests.unit.tests.double import (
    BOUND,
    HOSTS,
    KILL_DELAY,
    PATIENT,
    RECORDINGS,
    TASK,
    TWO,
    qdel,
    ran,
    runs,
    started,
    there,
    until,
)

LOGS = RECORDINGS / "logs"


def transcript(name: str, command: str) -> list[str]:
    """What the recording has below `--- COMMAND`."""
    lines = (LOGS / name).read_text().splitlines()
    start = lines.index(f"--- {command}") + 1
    end = next(at for at in range(start, len(lines)) if lines[at].startswith("[rc="))
    return lines[start : end + 1]


COMMANDS = {
    "pbsdsh -- sh -c exit 3": ["pbsdsh", "--", "sh", "-c", "exit 3"],
    "pbsdsh -- sh -c exit $PBS_NODENUM": ["pbsdsh", "--", "sh", "-c", "exit $PBS_NODENUM"],
    "pbsdsh -- sh -c kill -9 $$": ["pbsdsh", "--", "sh", "-c", "kill -9 $$"],
    "pbsdsh -- sh -c kill -15 $$": ["pbsdsh", "--", "sh", "-c", "kill -15 $$"],
    "pbsdsh -- nosuchprog": ["pbsdsh", "--", "nosuchprog"],
    "pbsdsh -- /etc/passwd": ["pbsdsh", "--", "/etc/passwd"],
    "pbsdsh bash -c echo no double dash": ["pbsdsh", "bash", "-c", "echo no double dash"],
    "pbsdsh -n 1 -- sh -c exit 5": ["pbsdsh", "-n", "1", "--", "sh", "-c", "exit 5"],
    "pbs_tmrsh pbsn2 sh -c exit 7": ["pbs_tmrsh", "pbsn2", "sh", "-c", "exit 7"],
    "pbs_tmrsh pbsn2 exit 7": ["pbs_tmrsh", "pbsn2", "exit 7"],
    "pbs_tmrsh pbsn2 sh -c kill -9 $$": ["pbs_tmrsh", "pbsn2", "sh", "-c", "kill -9 $$"],
    "pbs_tmrsh pbsn2 nosuchprog": ["pbs_tmrsh", "pbsn2", "nosuchprog"],
}


@pytest.fixture(scope="module")
def printed(pbs: Local) -> dict[str, list[str]]:
    """What each of COMMANDS prints, one after the other in one job."""
    script = "\n".join(
        f"echo '--- {at}'; {shlex.join(argv)}; echo [rc=$?]" for at, argv in enumerate(COMMANDS.values())
    )
    out, _, _ = ran(pbs, script)
    parts = re.split(r"^--- \d+\n", out, flags=re.MULTILINE)[1:]
    return dict(zip(COMMANDS, (part.splitlines() for part in parts), strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_statuses_are_reported_as_recorded(printed: dict[str, list[str]], command: str) -> None:
    assert sorted(printed[command]) == sorted(transcript("pbsdsh-basics.stdout.txt", command))


def test_an_index_past_the_end_wraps_round_in_silence(pbs: Local) -> None:
    out, err, _ = ran(
        pbs, "pbsdsh -n 9 -- sh -c 'echo $PBS_NODENUM'; pbsdsh -c 5 -- sh -c 'echo $PBS_NODENUM'"
    )
    assert (out[0], sorted(out[1:].split()), err) == ("1", ["0", "0", "0", "1", "1"], "")
    assert transcript("pbsdsh-basics.stdout.txt", "pbsdsh -n 9 -- hostname") == ["pbsn2", "[rc=0]"]


def test_a_task_runs_once_for_each_line_of_the_node_file(pbs: Local) -> None:
    out, _, _ = ran(
        pbs, "pbsdsh -- sh -c 'echo $PBS_NODENUM'", "-l", "select=2:ncpus=2:mpiprocs=2", "-l", "place=scatter"
    )
    assert sorted(out.split()) == ["0", "0", "1", "1"]


def test_chunks_without_a_place_land_on_one_host(pbs: Local) -> None:
    out, _, ended = ran(pbs, "cat $PBS_NODEFILE", "-l", "select=2:ncpus=1")
    assert (out, ended["exec_host"]) == ("pbsn1\npbsn1\n", "pbsn1/0+pbsn1/1")


def test_a_task_starts_in_the_home_with_nothing_of_the_script(pbs: Local) -> None:
    task = (
        'echo "$PWD|${MYVAR-unset}|${USER-unset}|${SHELL-unset}|${PBS_NODEFILE-unset}|$PATH|$(umask)|$(cat)|"'
    )
    out, _, _ = ran(pbs, f"cd /; export MYVAR=x; pbsdsh -n 0 -- /bin/sh -c {shlex.quote(task)}")
    assert out == f"{pbs.home}|unset|unset|unset|unset|/bin:/usr/bin|0077||\n"


def test_arguments_arrive_unchanged(pbs: Local) -> None:
    words = ["a", "b c", "", "d'e", 'f"g', "$HOME", "*", "nl\nx"]
    out, _, _ = ran(pbs, shlex.join(["pbsdsh", "-n", "1", "--", "printf", "<%s>", *words]))
    assert out == "".join(f"<{word}>" for word in words)


def test_what_tasks_print_never_passes_through_pbsdsh(pbs: Local) -> None:
    out, _, _ = ran(pbs, 'echo "[$(pbsdsh -n 1 -- echo from the task)]"')
    assert sorted(out.splitlines()) == ["[]", "from the task"]


def test_streams_of_tasks_cannot_be_opened_by_name(pbs: Local) -> None:
    real = (LOGS / "pbsdsh-process-life.txt").read_text()
    out, err, _ = ran(pbs, "pbsdsh -n 1 -- sh -c 'echo hi >/dev/stdout; echo rc=$?'")
    assert "cannot create /dev/stdout: No such device or address" in real
    assert "cannot create /dev/stdout: No such device or address" in err
    assert out == "rc=2\n"


def test_lines_of_two_hosts_tear(pbs: Local) -> None:
    line = 'printf "<$PBS_NODENUM:"; read -t 0.003 -u $pause; echo "$i:$PBS_NODENUM>"'
    task = f"exec {{pause}}<> <(:); for i in {{1..100}}; do {line}; done"
    out, _, _ = ran(pbs, f"pbsdsh -- bash -c {shlex.quote(task)}")
    whole = re.findall(r"^<(\d):\d+:\1>$", out, re.MULTILINE)
    assert len(out) == len(re.sub(r"[^0-9:<>\n]", "", out))
    assert len(whole) < 200


def test_output_is_in_the_spool_until_the_job_ends(pbs: Local, tmp_path: Path) -> None:
    waits = f"until [[ -e {tmp_path}/go ]]; do sleep 0.02; done"
    id = pbs.submit(f"#!/bin/bash\necho begun; {waits}\n", "-N", "spooled", *TWO)
    number = id.split(".")[0]
    spool = pbs.config.spool_of("pbsn1") / "spool" / f"{id}.OU"
    until(lambda: spool.exists() and spool.read_text(), "the script prints")
    assert not (pbs.home / f"spooled.o{number}").exists()
    (tmp_path / "go").touch()
    pbs.wait(id)
    assert (pbs.home / f"spooled.o{number}").read_text() == "begun\n"


def test_the_rest_of_a_tasks_session_dies_with_its_first_process_and_what_called_setsid_does_not(
    pbs: Local, tmp_path: Path
) -> None:
    inside = f"sleep 301 & echo $! >{tmp_path}/inside"
    outside = f"setsid bash -c 'echo $$ >{tmp_path}/outside; exec sleep 302' & {there(tmp_path / 'outside')}"
    task = f"{inside}; {outside}"
    ran(pbs, f"pbsdsh -n 1 -- bash -c {shlex.quote(task)}")
    inside_pid, outside_pid = (int((tmp_path / name).read_text()) for name in ("inside", "outside"))
    assert [runs(inside_pid), runs(outside_pid)] == [False, True]
    os.kill(outside_pid, signal.SIGKILL)


def times(log: Path, host: int) -> tuple[list[float], float]:
    """When a task got TERM, and when it was last seen alive."""
    lines = [line.split() for line in Path(f"{log}.{host}").read_text().splitlines()]
    return [float(when) for when, what in lines if what == "TERM"], max(float(when) for when, _ in lines)


def test_a_plain_scripts_tasks_are_killed_right_after_term_on_all_hosts(pbs: Local, tmp_path: Path) -> None:
    when, ended, out = qdel(pbs, "pbsdsh -- bash {task}", tmp_path / "log")
    for host, count in ((0, 2), (1, 1)):
        terms, last = times(tmp_path / "log", host)
        assert len(terms) <= count  # on a busy machine it is killed before it says TERM
        assert last - when < BOUND
    assert "pbsdsh: killing task 0x00000002 signal 15" in out
    assert "pbsdsh: killing task 0x40000001 signal 15" in out
    assert ended["Exit_status"] in ("271", "143")


def test_a_script_that_lingers_has_kill_delay_and_sisters_get_term_through_pbsdsh(
    pbs: Local, tmp_path: Path
) -> None:
    script = "trap : TERM; pbsdsh -- bash {task} & wait; while :; do sleep 0.1; done"
    when, ended, _ = qdel(pbs, script, tmp_path / "log", queue="hasty")
    for host, count in ((0, 2), (1, 1)):
        terms, last = times(tmp_path / "log", host)
        assert 1 <= len(terms) <= count  # two that come at once are one to a process
        assert KILL_DELAY - 0.3 < last - when < BOUND
    assert ended["Exit_status"] == "271"


def test_sisters_get_no_signal_where_pbsdsh_does_not_pass_it_on(pbs: Local, tmp_path: Path) -> None:
    script = "trap : TERM; setsid pbsdsh -- bash {task} & wait; while sleep 0.1; do :; done"
    when, _, out = qdel(pbs, script, tmp_path / "log", queue="hasty")
    assert [len(times(tmp_path / "log", host)[0]) for host in (0, 1)] == [1, 0]
    assert all(times(tmp_path / "log", host)[1] - when > KILL_DELAY - 0.3 for host in (0, 1))
    assert "killing" not in out


def test_deletion_by_force_is_sigkill(pbs: Local, tmp_path: Path) -> None:
    _, ended, _ = qdel(
        pbs, "trap : TERM; pbsdsh -- bash {task} & wait; sleep 60", tmp_path / "log", "-W", "force"
    )
    assert [times(tmp_path / "log", host)[0] for host in (0, 1)] == [[], []]
    assert ended["Exit_status"] == "265"


def test_a_signal_goes_to_the_outer_shell_too_and_ends_the_job(pbs: Local, tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "task.sh").write_text(TASK.format(log=log))
    id = pbs.submit(f"#!/bin/bash\ntrap : USR1; pbsdsh -- bash {tmp_path}/task.sh & wait; wait\n", *TWO)
    started(log)
    pbs.run("qsig", "-s", "SIGUSR1", id)
    assert pbs.wait(id)["Exit_status"] == "266"


def test_background_processes_end_with_the_script(pbs: Local, tmp_path: Path) -> None:
    pids = [tmp_path / name for name in ("task.0", "task.1", "script")]
    task = f"echo $$ >{tmp_path}/task.$PBS_NODENUM; exec sleep 303"
    started = f"pbsdsh -o -- bash -c {shlex.quote(task)}; sleep 303 & echo $! >{tmp_path}/script"
    _, _, ended = ran(pbs, f"{started}; {there(*pids)}")
    assert ended["Exit_status"] == "0"
    assert [runs(int(pid.read_text())) for pid in pids] == [False] * 3


def test_walltime_is_said_on_stderr_and_gives_kill_delay(pbs: Local, tmp_path: Path) -> None:
    (tmp_path / "task.sh").write_text(TASK.format(log=tmp_path / "log"))
    _, err, ended = ran(pbs, f"pbsdsh -- bash {tmp_path}/task.sh", *TWO, "-q", "hasty", "-l", "walltime=6")
    terms, last = times(tmp_path / "log", 1)
    assert len(terms) == 1
    assert KILL_DELAY - 0.3 < last - terms[0] < BOUND
    assert re.search(r"^=>> PBS: job killed: walltime \d+ exceeded limit 6$", err, re.MULTILINE)
    assert ended["Exit_status"] == "-29"


def test_the_owner_of_a_running_job_may_lower_its_walltime_and_not_raise_it(
    pbs: Local, tmp_path: Path
) -> None:
    script = f"#!/bin/bash\ntouch {tmp_path}/begun; sleep 60\n"
    id = pbs.submit(script, "-N", "t", "-l", "walltime=30", "-q", "hasty", *TWO)
    until((tmp_path / "begun").exists, "the job starts")
    refused = pbs.run("qalter", "-l", "walltime=31", id)
    assert (refused.returncode, refused.stderr) == (159, f"qalter: Unauthorized Request {id}\n")
    assert pbs.run("qalter", "-l", "walltime=1", id).returncode == 0
    ended = pbs.wait(id)
    assert (ended["Resource_List.walltime"], ended["Exit_status"]) == ("00:00:01", "-29")
    assert pbs.run("qalter", "-l", "walltime=1", id).returncode == 35


def test_a_rerun_keeps_the_id_and_is_told_by_run_count_alone(pbs: Local, tmp_path: Path) -> None:
    script = f"cd {tmp_path}; env | grep ^PBS_ | sort >new.$$; mv new.$$ env.$$; touch begun; sleep 60"
    id = pbs.submit(f"#!/bin/bash\n{script}\n", "-N", "again", *TWO)
    until((tmp_path / "begun").exists, "the job runs")
    if os.geteuid():
        assert pbs.run("qrerun", id).stderr == f"qrerun: Unauthorized Request {id}\n"
        pytest.skip("qrerun is for operators: the rest needs root")
    assert pbs.run("qrerun", id).returncode == 0
    until(lambda: len(list(tmp_path.glob("env.*"))) == 2, "it runs again")
    first, second = (set(path.read_text().splitlines()) for path in tmp_path.glob("env.*"))
    assert {line.partition("=")[0] for line in first ^ second} == {"PBS_JOBCOOKIE"}
    assert pbs.attributes(id)["run_count"] == "2"
    assert pbs.attributes(id)["Exit_status"] == "-11"
    pbs.run("qdel", id)
    pbs.wait(id)


def failures(case: str) -> list[tuple[float, str]]:
    """(seconds since the failure, what qstat said) of a recorded failure."""
    lines = (LOGS / "node-failure.txt").read_text().split(f"## {case}")[1].split("##")[0].splitlines()
    found = [re.match(r"([\d.]+) +(job_state = .*)", line) for line in lines]
    return [(float(line[1]), line[2]) for line in found if line]


def test_the_bounds_after_a_lost_host_are_the_recorded_ones() -> None:
    config = Config(address="")
    sister = next(
        when for when, what in failures("every process of the sister") if "Exit_status = -14" in what
    )
    first = next(
        when for when, what in failures("every process of the mother") if "Exit_status = -20" in what
    )
    assert config.sister_lost == pytest.approx(sister, abs=1)
    assert config.first_lost == pytest.approx(first, abs=1)
    assert f"node marked down +{NODE_DOWN:.0f} s" in (LOGS / "node-failure.txt").read_text()


BEFORE_IT_COUNTS = 1.5
"""Seconds for which a host must be lost."""


def lose(folder: Path, host: str, *options: str) -> tuple[dict[str, str], Path, float]:
    """The attributes, soon after, of a job of two hosts that has lost this one; its log; when it was lost."""
    with local.up(folder, HOSTS, look=0.1, sister_lost=BEFORE_IT_COUNTS, first_lost=BEFORE_IT_COUNTS) as pbs:
        log = folder / "log"
        (folder / "task.sh").write_text(TASK.format(log=log))
        id = pbs.submit(f"#!/bin/bash\npbsdsh -- bash {folder}/task.sh\n", *TWO, *options)
        started(log)
        when = time.time()
        pbs.crash(host)
        until(lambda: "Exit_status" in pbs.attributes(id), "PBS gives it up")
        found = pbs.wait(id, "F" if "n" in options else "R")
        if found["job_state"] == "R":
            until(lambda: log.with_name("log.0").read_text().count(" start\n") == 2, "it runs again")
        pbs.run("qdel", "-W", "force", id)
        return found, log, when


def test_after_the_loss_of_a_sister_all_wait_until_pbs_runs_the_job_elsewhere(tmp_path: Path) -> None:
    found, log, when = lose(tmp_path, "pbsn2")
    assert (found["Exit_status"], found["run_count"], found["exec_host"]) == ("-14", "2", "pbsn1/0+pbsn3/0")
    lines = [line.split() for line in Path(f"{log}.0").read_text().splitlines()]
    second_run = [float(stamp) for stamp, what in lines if what == "start"][1]
    last = max(float(stamp) for stamp, _ in lines if float(stamp) < second_run)
    assert last > when + BEFORE_IT_COUNTS - 0.5, "neither pbsdsh nor the task was told"
    assert "TERM" not in {what for _, what in lines}


@pytest.mark.parametrize(
    ("options", "runs", "hosts"), [((), "2", "pbsn2/0+pbsn3/0"), (("-r", "n"), "1", "pbsn1/0+pbsn2/0")]
)
def test_after_the_loss_of_its_first_host_a_job_runs_again_if_it_may(
    tmp_path: Path, options: tuple[str, ...], runs: str, hosts: str
) -> None:
    found, _, _ = lose(tmp_path, "pbsn1", *options)
    assert (found["Exit_status"], found["run_count"], found["exec_host"]) == ("-20", runs, hosts)


def test_in_a_private_sandbox_script_and_tasks_start_in_a_directory_that_ends_with_the_job(
    pbs: Local,
) -> None:
    script = "echo $HOME $PWD $PBS_JOBDIR; pbsdsh -n 1 -- sh -c 'echo $HOME $PWD $PBS_JOBDIR'"
    out, _, ended = ran(pbs, script, *TWO, "-W", "sandbox=PRIVATE")
    first, second = out.splitlines()
    assert first == second
    home, here, told = first.split()
    assert (home, here) == (str(pbs.home), told)
    assert Path(here).parent == pbs.home
    assert not Path(here).exists()
    assert ended["sandbox"] == "PRIVATE"


def test_spawning_from_a_task_works_as_recorded(pbs: Local) -> None:
    nested = "PATH=$PATH:{bin}; pbsdsh -n 0 -- sh -c 'exit 0'; echo nested rc=$?; pbs_tmrsh pbsn2 true; echo tmrsh rc=$?"
    nested = nested.replace("{bin}", str(pbs.bin))
    script = f"""
pbsdsh -n 0 -- bash -c {shlex.quote(nested)}
pbsdsh -n 1 -- bash -c {shlex.quote(nested)}
(unset PBS_JOBCOOKIE; pbsdsh -- true; echo cookie rc=$?)
"""
    out, err, _ = ran(pbs, script)
    real = (LOGS / "spawn-from-a-task.txt").read_text()
    for line in (
        "pbsdsh: tm_init failed, rc = bad environment (17005) (17005)",
        "/opt/pbs/bin/pbs_tmrsh: cannot find PBS_NODEFILE",
    ):
        assert line in real
        assert line in err
    assert sorted(out.splitlines()) == [
        "cookie rc=1",
        "nested rc=0",
        "nested rc=0",
        "tmrsh rc=0",
        "tmrsh rc=255",
    ]


def test_an_element_of_an_array_has_brackets_everywhere(pbs: Local) -> None:
    task = 'echo "$PBS_JOBID ${PBS_ARRAY_INDEX-unset} $TMPDIR"'
    id = pbs.submit(
        f"#!/bin/bash\necho $PBS_ARRAY_INDEX; pbsdsh -n 0 -- bash -c '{task}'\n",
        "-N",
        "arr",
        "-J",
        "3-5:2",
        *TWO,
    )
    number = id.split("[")[0]
    assert id == f"{number}[].pbssrv"
    for index in ("3", "5"):
        pbs.wait(f"{number}[{index}].pbssrv")
        tmp = pbs.config.tmp_of("pbsn1") / f"pbs.{number}[{index}].pbssrv"
        out = (pbs.home / f"arr.o{number}.{index}").read_text()
        assert out == f"{index}\n{number}[{index}].pbssrv unset {tmp}\n"
        assert not tmp.exists()


def test_qsub_passes_nothing_of_its_own_environment(pbs: Local) -> None:
    recorded_ = (LOGS / "qsub-environment-options.txt").read_text().splitlines()
    assert recorded_[5].startswith("script:")
    assert "FOO=unset" in recorded_[5], "with -V"
    id = pbs.submit(
        '#!/bin/bash\necho "${FOO-unset} ${BAR-unset}"\n',
        "-V",
        "-v",
        "BAR",
        "-N",
        "v",
        *TWO,
        env={"FOO": "f", "BAR": "b"},
    )
    pbs.wait(id)
    assert (pbs.home / f"v.o{id.split('.')[0]}").read_text() == "unset b\n"


def test_a_queue_tells_its_kill_delay_where_it_has_one_of_its_own(pbs: Local) -> None:
    assert f"    kill_delay = {PATIENT:.0f}\n" in pbs.run("qstat", "-Q", "-f", "workq").stdout
    unknown = pbs.run("qstat", "-Q", "-f", "noq")
    assert (unknown.returncode, unknown.stderr) == (170, "qstat: Unknown queue noq\n")


def test_a_job_tells_the_queue_that_it_was_sent_to(pbs: Local) -> None:
    out, _, ended = ran(pbs, "echo $PBS_QUEUE $PBS_O_QUEUE", *TWO, "-q", "hasty")
    assert (out, ended["queue"]) == ("hasty hasty\n", "hasty")
    assert pbs.run("qsub", "-q", "noq", input="true\n").stderr == "qsub: Unknown queue\n"


def test_qstat_wraps_long_lines(pbs: Local) -> None:
    text = "x" * 200
    id = pbs.submit("#!/bin/bash\ntrue\n", "-v", f"LONG={text}", *TWO)
    pbs.wait(id)
    shown = pbs.run("qstat", "-x", "-f", id).stdout
    assert max(map(len, shown.splitlines())) <= 79
    assert f"LONG={text}" in shown.replace("\n\t", "")
    assert pbs.run("qstat", "-f", id).returncode == commands.FINISHED
