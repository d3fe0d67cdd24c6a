"""The job script for PBS: output, statuses, lost hosts, and how a job ends."""

import os
import re
import shlex
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pbs_double import local
from tests.unit.pbs.site import BOUND, HOSTS, LOST, Site, What, busy, ours, processes_gone, quoted


def test_lines_come_whole_while_the_job_runs_and_each_hosts_are_in_its_log(site: Site) -> None:
    parts = [piece for number in range(30) for piece in (f"<{number}:", f"{number}>\n")]
    id = site.submit(what={str(host): {"parts": parts, "wait": "go"} for host in (0, 1)})
    run = site.run_dir(id)
    expected = [f"<{number}:{number}>" for number in range(30)]
    site.until(lambda: (run / "job.log").exists() and (run / "job.log").read_text().count("29>") == 2)
    lines = (run / "job.log").read_text().splitlines()[3:]
    assert sorted(lines) == sorted(["host 0 ", "host 1 ", *expected, *expected])
    (run / "go").touch()
    assert site.end(id)[0] == "0"
    for name in HOSTS[:2]:
        assert (run / f"logs/0/{name}.task.log").read_text().splitlines()[1:] == expected


def test_the_job_ends_with_the_status_of_the_first_failure(site: Site) -> None:
    what: What = {
        "0": {"status": 9, "time": "200.000000", "error": "later"},
        "1": {"status": 41, "time": "100.000000", "rank": "1", "node": "pbsn2", "error": "ValueError: no"},
    }
    id = site.submit(what=what)
    status, lines = site.end(id)
    assert status == "41"
    assert ours(lines)[-1] == f"status 41: rank 1 on pbsn2: ValueError: no (logs: {site.run_dir(id)}/logs/0)"


def test_the_tasks_are_asked_to_end_if_what_watches_them_fails(site: Site) -> None:
    starters = site.checkout / "pbs/starters.sh"
    broken = starters.read_text().replace(
        "        end_waiting\n", "        [[ ! -e $run_dir/broken ]]\n        end_waiting\n"
    )
    starters.write_text(broken)
    id = site.submit(what={str(host): {"wait": "never"} for host in (0, 1)})
    site.work(id)
    (site.run_dir(id) / "broken").touch()
    site.until(lambda: len(list(site.folder.glob("?.saved"))) == 2, 30.0)  # which they write when asked
    site.end(id)
    assert not list((site.run_dir(id) / "tasks").glob("*.env"))


def test_another_attempt_follows_where_a_port_was_taken(site: Site) -> None:
    id = site.submit(
        what={"0.0": {"status": 69, "error": "port taken"}, "0.1": {"status": 69, "error": "port taken"}}
    )
    status, lines = site.end(id)
    assert status == "0"
    assert ours(lines)[3:] == [
        "attempt 0: port taken",
        "trying again: attempt 1, with other ports",
        f"done: {site.run_dir(id)}",
    ]
    assert site.seen(1, attempt=1)["env"]["APPTRAIN_ATTEMPT"] == "1"


def test_hosts_that_go_on_without_a_lost_one_are_not_kept_waiting_by_it(site: Site) -> None:
    what: What = {
        "0": {"status": 9, "node": "pbsn1", "crews": {"1": "0 pbsn1\n2 pbsn3\n"}, "then": {"1": 0}},
        "1": {"wait": "never", "deaf": True},
        "2": {"then": {"1": 0}},
    }
    id = site.submit("-l", "select=3", what=what, APPTRAIN_ON_FAILURE="restart", APPTRAIN_NNODES="2")
    status, lines = site.end(id)
    assert (status, ours(lines)[-1]) == ("0", f"done: {site.run_dir(id)}")


def test_a_task_that_comes_up_on_another_host_is_refused_with_both_names(site: Site) -> None:
    """As an index past the end of the node file does."""
    pbsdsh = site.folder / "bin/pbsdsh"
    pbsdsh.parent.mkdir()
    pbsdsh.write_text(
        f'#!/bin/sh\nif [ "$2" = 1 ]; then shift 2; set -- -n 2 "$@"; fi\nexec {shlex.quote(str(site.pbs.bin))}/pbsdsh "$@"\n'
    )
    pbsdsh.chmod(0o755)
    (site.pbs.home / ".profile").write_text(f"PATH={pbsdsh.parent}:$PATH:{shlex.quote(str(site.pbs.bin))}\n")
    try:
        id = site.submit()
        status, lines = site.end(id)
    finally:
        (site.pbs.home / ".profile").write_text(f"PATH=$PATH:{shlex.quote(str(site.pbs.bin))}\n")
    here = os.uname().nodename
    error = f"the task for pbsn2, host 1 of this job, runs as host 0 on {here}: the node file has changed since the job began"
    assert status == "64"
    assert f"apptrain: {here}: {error}" in lines
    assert ours(lines)[-1] == f"status 64: pbsn2: {error} (logs: {site.run_dir(id)}/logs/0)"


def test_a_host_whose_task_cannot_start_gets_an_outcome_that_says_why(site: Site) -> None:
    (site.checkout / "pbs/task.sh").write_text("exit 3\n")
    id = site.submit()
    status, lines = site.end(id)
    error = "its task ended before it said that it had started: pbsdsh said: pbsdsh: task 0x00000000 exit status 3"
    assert status == "1"
    assert re.fullmatch(rf"status 1: pbsn[12]: {error}  \(logs: .*\)", ours(lines)[-1])


def test_where_no_outcome_can_be_written_the_others_are_looked_after_all_the_same(site: Site) -> None:
    """As on a full disk, or over quota: root may write everywhere, so here the folder is gone."""
    (site.checkout / "pbs/task.sh").write_text('rm -rf -- "$1/outcome"\nexit 3\n')
    id = site.submit()
    status, lines = site.end(id)
    run = site.run_dir(id)
    assert status == "1"
    for host in ("pbsn1", "pbsn2"):
        assert any(
            re.fullmatch(rf"{host}: its task ended before .* \(not written\)", line) for line in ours(lines)
        )
    assert not (run / "tasks/0.env").exists()


def test_a_node_file_that_is_not_there_or_empty_is_refused(site: Site, login: Callable[[str], None]) -> None:
    login("export PBS_NODEFILE=/nowhere/nodes")
    assert site.ran() == (
        "64",
        [
            "apptrain: PBS_NODEFILE=/nowhere/nodes cannot be read: it lists the job's hosts: unset it if you set it yourself"
        ],
    )
    empty = site.folder / "empty"
    empty.write_text("\n")
    login(f"export PBS_NODEFILE={shlex.quote(str(empty))}")
    assert site.ran() == (
        "64",
        [f"apptrain: PBS_NODEFILE={empty} has no host in it: ask the administrator"],
    )


def test_a_working_directory_that_a_host_does_not_have_is_refused(site: Site) -> None:
    """It is taken away between qsub and the task."""
    run_sh = site.checkout / "pbs/task.sh"
    lines = run_sh.read_text().replace('cd -- "${command[0]}"', 'cd -- "/nowhere${command[0]}"')
    run_sh.write_text(lines)
    id = site.submit("-l", "select=1:ncpus=1:ngpus=1")
    status, lines_ = site.end(id)
    here = os.uname().nodename
    error = f"the working directory {site.submit_dir} is not there on this node: submit from one that all nodes share"
    assert (status, lines_[3:]) == (
        "64",
        [
            f"apptrain: {here}: {error}",
            f"apptrain: status 64: pbsn1: {error} (logs: {site.run_dir(id)}/logs/0)",
        ],
    )


def test_a_task_that_does_not_answer_is_ended_and_named(site: Site, login: Callable[[str], None]) -> None:
    login("export APPTRAIN_ANSWER_TIMEOUT=4")
    task = site.checkout / "pbs/task.sh"
    task.write_text("if [[ $4 == 1 ]]; then sleep 600; fi\n" + task.read_text())
    id = site.submit(what={"0": {"wait": "outcome/0.1"}})
    status, lines = site.end(id)
    error = "no task has answered there for 4 s: pbsdsh said: nothing"
    assert (status, ours(lines)[-1]) == (
        "1",
        f"status 1: pbsn2: {error} (logs: {site.run_dir(id)}/logs/0)",
    )


@pytest.mark.parametrize("starter", ["pbsdsh", "pbs_tmrsh"])
def test_the_job_ends_when_the_other_hosts_say_that_one_is_lost(tmp_path: Path, starter: str) -> None:
    """PBS itself would take 7 minutes, and pbsdsh waits as long."""
    (tmp_path / "pbs").mkdir()
    with local.up(tmp_path / "pbs", HOSTS) as pbs:
        site = Site(pbs, tmp_path / "site")
        what: What = {"0": {"wait": "go", **LOST}, "1": {"wait": "never"}, "2": {"wait": "go", **LOST}}
        id = site.submit("-l", "select=3:ncpus=1:ngpus=1", what=what, APPTRAIN_START=starter)
        site.until(lambda: site.hosts_seen() == [0, 1, 2])
        pbs.crash("pbsn2")
        (site.run_dir(id) / "go").touch()
        status, lines = site.end(id)
        assert (status, ours(lines)[-1]) == (
            "1",
            f"status 1: pbsn2: {LOST['error']} (logs: {site.run_dir(id)}/logs/0)",
        )


def test_a_host_that_was_the_first_to_be_asked_to_end_is_not_lost_and_has_its_grace(site: Site) -> None:
    what: What = {
        "0": {"wait": "go", "status": 143, "node": "pbsn2", "error": "ended by SIGTERM"},
        "1": {"wait": "later", "status": 143, "node": "pbsn2", "error": "ended by SIGTERM"},
    }
    id = site.submit(what=what)
    run = site.run_dir(id)
    site.until(lambda: site.hosts_seen() == [0, 1])
    (run / "go").touch()
    site.until(lambda: (run / "outcome/0.0").exists())
    time.sleep(2.5)  # the loss of a host would end it after LOST, here 1
    (run / "later").touch()
    assert site.end(id)[0] == "143"
    assert not (site.folder / "1.saved").exists(), "it got no SIGTERM"


def test_where_several_hosts_are_lost_and_one_is_named_the_job_ends_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "pbs").mkdir()
    with local.up(tmp_path / "pbs", HOSTS) as pbs:
        site = Site(pbs, tmp_path / "site")
        site.bounds("pbs/starters.sh", LINGER=1)
        what: What = {"0": {"wait": "go", **LOST}, "1": {"wait": "never"}, "2": {"wait": "never"}}
        id = site.submit("-l", "select=3:ncpus=1:ngpus=1", what=what)
        site.until(lambda: site.hosts_seen() == [0, 1, 2])
        pbs.crash("pbsn2")
        pbs.crash("pbsn3")
        (site.run_dir(id) / "go").touch()
        assert site.end(id)[0] == "1"


def test_a_deleted_job_saves_with_its_image_within_kill_delay_and_leaves_nothing(site: Site) -> None:
    id = busy(site, "-q", "25")
    site.pbs.run("qdel", id)
    found = site.pbs.wait(id, limit=BOUND)
    lines = site.output(found).read_text().splitlines()
    assert (site.folder / "0.saved").read_text() == "True 1", "the image was there, and TERM came once"
    again = f"to go on: the same line again with APPTRAIN_RUN_DIR={quoted(site.run_dir(id))}"
    assert ours(lines)[-1] == f"ended by a signal (status 143), not run again by this script; {again}"
    assert "Terminated" not in "\n".join(lines), "bash tells so of what it waits for"
    assert processes_gone(site.folder)


def test_a_job_that_does_not_end_in_time_leaves_nothing_either(site: Site) -> None:
    id = busy(site, deaf=1)
    site.pbs.run("qdel", id)
    site.pbs.wait(id, limit=BOUND)
    site.until(lambda: processes_gone(site.folder))
    assert not (site.folder / "0.saved").exists()


def test_a_job_deleted_by_force_leaves_nothing(site: Site) -> None:
    id = busy(site)
    site.pbs.run("qdel", "-W", "force", id)
    assert site.pbs.wait(id, limit=BOUND)["Exit_status"] == "265"
    site.until(lambda: processes_gone(site.folder))


def test_what_a_task_leaves_behind_ends_with_it(site: Site) -> None:
    what: What = {str(host): {"fuse": 1, "wait": "go", "status": "none"} for host in (0, 1)}
    id = site.submit(what=what)
    site.until(lambda: all((site.folder / f"{host}.pids").exists() for host in (0, 1)))
    for host in (0, 1):
        os.kill(int((site.folder / f"{host}.pids").read_text().split()[0]), 9)
    assert site.end(id)[0] == "1"
    assert processes_gone(site.folder)


def test_before_the_walltime_is_over_the_ranks_are_asked_to_stop(site: Site) -> None:
    id = site.submit(
        "-l",
        "walltime=40",
        what={str(host): {"wait": "stop", "status": 75} for host in (0, 1)},
        APPTRAIN_STOP_BEFORE="37",
    )
    status, lines = site.end(id)
    assert status == "75"
    assert ours(lines)[3:5] == [
        "warned of the end: asking the ranks to save and stop",
        "saved at a planned end",
    ]
    assert ours(lines)[5].startswith(
        "pbs does not run it again (APPTRAIN_CHAIN, how many jobs may follow, is not set); to go on: "
    )


def test_where_another_job_may_follow_the_stop_file_says_when_this_one_ends(site: Site) -> None:
    what = {str(host): {"wait": "stop", "status": 75} for host in (0, 1)}
    begin = time.time()
    id = site.submit("-l", "walltime=40", what=what, APPTRAIN_STOP_BEFORE="37", APPTRAIN_ON_FAILURE="requeue")
    assert site.end(id)[0] == "75"
    name, _, end = (site.run_dir(id) / "stop").read_text().partition("=")
    assert name == "end"
    assert begin + 40 - 2 <= int(end) <= time.time() + 40


def test_a_chain_goes_on_in_the_same_run_directory_as_often_as_it_may(site: Site) -> None:
    file = site.folder / "args"
    cmd = ["train.py", "a,b", "two\nlines"]
    file.write_text("\0".join(["--device=cpu", "--", *cmd]) + "\0")
    first = site.submit(
        "-l",
        "select=2:ncpus=2:ngpus=2",
        what={"0": {"status": 75}, "1": {"status": 75}},
        APPTRAIN_CHAIN="2",
        APPTRAIN_ARGS_FILE=str(file),
        GIVEN="a b",
    )
    run = site.run_dir(first)
    status, lines = site.end(first)
    assert (status, ours(lines)[-1]) == ("75", "the job will run again, and go on there")
    jobs = run / "chain.jobs"
    site.until(lambda: len(jobs.read_text().split()) == 2)
    second, third = jobs.read_text().split()
    for attempt, id in ((1, second), (2, third)):
        status, lines = site.end(id)
        assert status == "75"
        assert ours(lines)[0] == f"run directory {run}"
        assert ours(lines)[3] == "this run directory has been used before: the run goes on there"
        seen = site.seen(1, attempt)
        assert seen["argv"] == ["launch", "--device=cpu", "--", *cmd]
        assert (seen["env"]["GIVEN"], seen["env"]["APPTRAIN_NGPUS"], seen["cwd"]) == (
            "a b",
            "2",
            str(site.submit_dir),
        )
        assert site.pbs.attributes(id)["Resource_List.walltime"] == "01:00:00"
    assert "pbs does not run it again (APPTRAIN_CHAIN, how many jobs may follow, is 0)" in "\n".join(lines)
    assert stat.S_IMODE((run / "chain.env").stat().st_mode) == 0o600


def test_a_chain_goes_on_with_the_script_that_a_script_of_the_users_has_started(site: Site) -> None:
    mine = site.folder / "mine.pbs"
    mine.write_text(
        "#!/bin/bash\n#PBS -l select=2:ncpus=1\n#PBS -l place=scatter\n#PBS -j oe\n#PBS -N apptrain\n"
        f"cd {shlex.quote(str(site.script.parent))} && bash ./{site.script.name}\n"
    )
    id = site.submit(script=mine, what={"0": {"status": 75}, "1": {"status": 75}}, APPTRAIN_CHAIN="1")
    status, lines = site.end(id)
    assert (status, ours(lines)[-1]) == ("75", "the job will run again, and go on there")
    (following,) = (site.run_dir(id) / "chain.jobs").read_text().split()
    assert site.end(following)[0] == "75"


def test_the_next_job_of_a_chain_has_what_this_one_was_given_for_its_output_mail_and_priority(
    site: Site,
) -> None:
    (site.submit_dir / "logs").mkdir()
    given = (
        *("-o", "logs/", "-e", "logs/errors", "-j", "n", "-m", "be"),
        *("-M", "alice@lab,bob@lab", "-p", "-5", "-r", "n"),
    )
    what: What = {str(host): {"status": 75} for host in (0, 1)}
    first = site.submit(*given, what=what, APPTRAIN_CHAIN="1")
    assert site.end(first)[0] == "75"
    second = (site.run_dir(first) / "chain.jobs").read_text().strip()
    assert site.end(second)[0] == "75"
    mine, theirs = (site.pbs.attributes(id) for id in (first, second))
    names = ("Error_Path", "Join_Path", "Keep_Files", "Mail_Points", "Mail_Users", "Priority", "Rerunable")
    assert [theirs[name] for name in names] == [mine[name] for name in names]
    assert theirs["Mail_Users"] == "alice@lab,bob@lab"
    assert theirs["Output_Path"] == mine["Output_Path"].replace(first, second)


def test_a_deleted_job_of_a_chain_is_its_last(site: Site) -> None:
    id = site.submit(what={"0": {"wait": "go"}, "1": {"wait": "told", "status": 143}}, APPTRAIN_CHAIN="9")
    site.work(id)
    site.pbs.run("qdel", id)
    site.end(id)
    assert not (site.run_dir(id) / "chain.jobs").exists()


def test_pbs_own_rerun_goes_on_with_the_next_attempt(site: Site) -> None:
    if os.geteuid():
        pytest.skip("qrerun is for operators: it needs root")
    id = site.submit(what={"0.0": {"wait": "go"}, "0.1": {"wait": "told"}})
    site.work(id)
    site.pbs.run("qrerun", id)
    status, lines = site.end(id)
    assert status == "0"
    assert "PBS runs this job again (run_count is 2)" in ours(lines)
    assert (site.seen(0, 1)["env"]["APPTRAIN_ATTEMPT"], site.seen(0, 1)["env"]["PBS_JOBID"]) == ("1", id)


def test_the_users_own_grace_wins(site: Site) -> None:
    assert site.ran(APPTRAIN_TERM_GRACE="2")[0] == "0"
    assert [site.seen(host)["env"]["APPTRAIN_TERM_GRACE"] for host in (0, 1)] == ["2", "2"]


def test_how_long_ranks_may_save_is_what_the_jobs_queue_leaves_them(site: Site) -> None:
    assert site.ran("-q", "25")[0] == "0"
    assert site.seen(1)["env"]["APPTRAIN_TERM_GRACE"] == "20"
