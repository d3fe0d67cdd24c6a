"""The double of OpenPBS, held to the recordings of the real one; and a naive job script, which must fail on it.

What a request becomes and which variables there are is compared with every recording; what happens to processes,
with the transcripts under tests/recordings/openpbs/logs.
"""

import os
import pwd
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pbs_double import commands, local, mom, request, variables
from tests.pbs_double.config import Config
from tests.pbs_double.local import Local
from tests.pbs_double.server import NODE_DOWN
from tests.pbs_double.variables import Job, Site

RECORDINGS = Path(__file__).parents[2] / "recordings/openpbs"
LOGS = RECORDINGS / "logs"
CASES = sorted(path.parent.name for path in RECORDINGS.glob("*/nodefile"))
NOT_OURS = {"CASE", "MYVAR"}
"""Set by the recording's own script and request."""
HOSTS = ("pbsn1", "pbsn2", "pbsn3")
KILL_DELAY = 1.0
"""Seconds, of the queue for what lingers; the real one's default is that of Config."""
BOUND = 50.0  # s, for anything waited for here
PATIENT = 600.0
"""Of the other queue, where nothing must wait for it."""
TWO = ("-l", "select=2:ncpus=1", "-l", "place=scatter")
TASK = """\
trap 'echo $EPOCHREALTIME TERM >>{log}.$PBS_NODENUM' TERM
exec {{pause}}<> <(:)
echo $EPOCHREALTIME start >>{log}.$PBS_NODENUM
for ((i = 0; i < 1800; i++)); do echo $EPOCHREALTIME alive >>{log}.$PBS_NODENUM; read -t 0.05 -u $pause; done
"""
"""Logs every TERM and goes on, for a minute and a half."""


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


def test_select_beside_a_plain_resource_is_refused() -> None:
    with pytest.raises(request.Refused) as refused:
        asked("-l select=2 -l ncpus=4")
    assert str(refused.value) == '"-lresource=" cannot be used with "select" or "place", resource is: ncpus'


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


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pbs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("pbs")
    with local.up(folder, HOSTS, kill_delay=PATIENT, queues={"hasty": KILL_DELAY}) as found:
        yield found


def runs(pid: int) -> bool:
    """Whether there is such a process, and it is more than a zombie."""
    return pid in mom.alive([os.getsid(pid)]) if Path(f"/proc/{pid}").exists() else False


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def ran(pbs: Local, script: str, *options: str, name: str = "t") -> tuple[str, str, dict[str, str]]:
    """(stdout, stderr, attributes) of a job."""
    id = pbs.submit(f"#!/bin/bash\n{script}\n", "-N", name, *(options or TWO))
    ended = pbs.wait(id)
    number = id.split(".")[0]
    out, err = (pbs.home / f"{name}.{letter}{number}" for letter in "oe")
    return out.read_text(), err.read_text(), ended


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
    assert len(whole) < 150, "of 200"


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


def there(*files: Path) -> str:
    """Waits for something in these files, in bash."""
    tests = " && ".join(f"-s {file}" for file in files)
    return f"until [[ {tests} ]]; do sleep 0.02; done"


def times(log: Path, host: int) -> tuple[list[float], float]:
    """When a task got TERM, and when it was last seen alive."""
    lines = [line.split() for line in Path(f"{log}.{host}").read_text().splitlines()]
    return [float(when) for when, what in lines if what == "TERM"], max(float(when) for when, _ in lines)


def started(log: Path) -> None:
    until(lambda: all(Path(f"{log}.{host}").exists() for host in (0, 1)), "the tasks start")


def qdel(
    pbs: Local, script: str, log: Path, *options: str, queue: str = "workq"
) -> tuple[float, dict[str, str], str]:
    """(when qdel was called, attributes, stdout) of a job that was deleted once its tasks had started."""
    task = log.with_name("task.sh")
    task.write_text(TASK.format(log=log))
    id = pbs.submit(f"#!/bin/bash\n{script.format(task=task)}\n", "-N", "q", "-q", queue, *TWO)
    started(log)
    when = time.time()
    assert pbs.run("qdel", *options, id).returncode == 0
    ended = pbs.wait(id)
    return when, ended, (pbs.home / f"q.o{id.split('.')[0]}").read_text()


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
    _, err, ended = ran(pbs, f"pbsdsh -- bash {tmp_path}/task.sh", *TWO, "-q", "hasty", "-l", "walltime=2")
    terms, last = times(tmp_path / "log", 1)
    assert len(terms) == 1
    assert KILL_DELAY - 0.3 < last - terms[0] < BOUND
    assert re.search(r"^=>> PBS: job killed: walltime \d+ exceeded limit 2$", err, re.MULTILINE)
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


# --- what a naive job script runs into ---------------------------------------------------------------------------------

NAIVE = """\
export MASTER=$(head -n 1 $PBS_NODEFILE) NNODES=2 DATA="$PWD/data"
echo started
pbsdsh -- bash -c 'echo "node ${PBS_NODEID-none} of ${NNODES-none} master ${MASTER-none} in $PWD"; exit $PBS_NODENUM'
"""
"""As tutorials have it: exports, PBS_NODEID, and the status of pbsdsh."""


def test_a_naive_script_knows_neither_rank_nor_master_on_any_node_and_ends_well(pbs: Local) -> None:
    out, _, ended = ran(pbs, NAIVE)
    lines = [line for line in out.splitlines() if line.startswith("node")]
    assert lines == [f"node none of none master none in {pbs.home}"] * 2
    assert ended["Exit_status"] == "0", "although a task failed"


def test_a_naive_script_runs_two_tasks_on_one_host_when_chunks_are_packed(pbs: Local) -> None:
    out, _, _ = ran(
        pbs,
        NAIVE.replace("$PBS_NODEID", "$PBS_NODENUM").replace("${PBS_NODEID-none}", "$PBS_NODENUM"),
        "-l",
        "select=2:ncpus=1",
    )
    assert [line.split()[1] for line in out.splitlines() if line.startswith("node")] == ["0", "0"]


def test_a_naive_script_loses_what_its_tasks_would_save(pbs: Local, tmp_path: Path) -> None:
    saving = "trap 'sleep 1; touch {log}.saved.$PBS_NODENUM; exit' TERM\ntouch {log}.$PBS_NODENUM; sleep 60 & wait; wait\n"
    log = tmp_path / "log"
    task = tmp_path / "save.sh"
    task.write_text(saving.format(log=log))
    id = pbs.submit(f"#!/bin/bash\npbsdsh -- bash {task}\n", *TWO)
    started(log)
    pbs.run("qdel", id)
    pbs.wait(id)
    assert sorted(path.name for path in tmp_path.glob("log.saved*")) == []


def test_a_naive_script_that_counts_hosts_from_one_runs_twice_on_the_first_and_never_asks(pbs: Local) -> None:
    script = 'for i in 1 2; do pbsdsh -n $i -- sh -c "echo rank $((i - 1)) on \\$PBS_NODENUM"; done'
    out, err, ended = ran(pbs, script)
    assert (sorted(out.splitlines()), err) == (["rank 0 on 1", "rank 1 on 0"], "")
    assert ended["Exit_status"] == "0"


def test_a_naive_script_that_starts_torchrun_itself_runs_on_the_first_host_alone(pbs: Local) -> None:
    out, _, _ = ran(pbs, 'echo "torchrun --nnodes $(sort -u $PBS_NODEFILE | wc -l) on $PBS_NODENUM"')
    assert out == "torchrun --nnodes 2 on 0\n"


def test_a_naive_script_gets_no_answer_from_a_command_substitution(pbs: Local) -> None:
    out, _, _ = ran(pbs, 'MASTER=$(pbsdsh -n 0 -- hostname); echo "master <$MASTER>"')
    assert "master <>" in out.splitlines()


def test_a_naive_script_leaves_what_called_setsid_on_every_host(pbs: Local, tmp_path: Path) -> None:
    file = tmp_path / "pid.$PBS_NODENUM"
    task = f"setsid bash -c 'echo $$ >{file}; exec sleep 304' & {there(file)}"
    ran(pbs, f"pbsdsh -- bash -c {shlex.quote(task)}")
    left = [int((tmp_path / f"pid.{host}").read_text()) for host in (0, 1)]
    assert [runs(pid) for pid in left] == [True, True]
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def test_whoever_submits_is_known_by_the_password_file(pbs: Local) -> None:
    out, _, _ = ran(pbs, "echo $USER")
    assert out.strip() == pwd.getpwuid(os.getuid()).pw_name
