"""The job script for PBS: one task on each host, its environment, and the ways to start it."""

import shlex
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entrypoint.batch.login import Wish
from entrypoint.batch.pbs import login
from entrypoint.cli import follow
from entrypoint.cli import profiles as render
from entrypoint.plan.profile import Profile
from tests.pbs_double import local
from tests.unit.pbs.site import HOSTS, Site, What, busy, mpiexec, ours, processes_gone, quoted


def test_a_job_without_options_starts_the_launch_on_two_hosts_and_says_where_it_is(site: Site) -> None:
    id = site.submit()
    status, lines = site.end(id)
    run = site.run_dir(id)
    assert (status, lines[:3]) == (
        "0",
        [
            f"apptrain: run directory {run}",
            f"apptrain: to follow it: tail -f {quoted(run / 'job.log')}",
            f"apptrain: job {id}, attempt 0, 2 nodes (pbsn1,pbsn2), profile none, image {site.checkout}/containers/image.sif",
        ],
    )
    assert sorted(lines[3:5]) == ["host 0 ", "host 1 "]
    assert lines[5:] == [f"apptrain: done: {run}"]
    assert (run / "job.log").read_text().splitlines() == lines
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    for host in (0, 1):
        seen = site.seen(host)
        assert seen["argv"] == ["launch"]
        assert seen["options"] == [
            *("--outcome", f"{run}/outcome/%a.%n", "--bind", "the run directory", str(run))
        ]
        assert seen["cwd"] == str(site.submit_dir)


@pytest.mark.parametrize(
    ("select", "place", "names"),
    [
        ("2:ncpus=2:mpiprocs=2:ngpus=1", "scatter", ["pbsn1", "pbsn2"]),
        (
            "1:ncpus=1:ngpus=2:host=pbsn2+1:ncpus=1:ngpus=3:host=pbsn1+1:ncpus=2:ngpus=1:host=pbsn2",
            "free",
            ["pbsn2", "pbsn1"],
        ),
    ],
)
def test_each_host_gets_one_task_whatever_its_lines(
    site: Site, select: str, place: str, names: list[str]
) -> None:
    status, lines = site.ran("-l", f"select={select}", "-l", f"place={place}")
    assert (status, site.hosts_seen()) == ("0", list(range(len(names))))
    assert [site.seen(rank)["env"]["APPTRAIN_HOSTNAME"] for rank in range(len(names))] == names
    assert sorted(line for line in lines if line.startswith("host")) == [
        f"host {rank} " for rank in range(len(names))
    ]


def test_where_a_hook_splits_a_request_for_all_nodes_each_gets_its_task(tmp_path: Path) -> None:
    (tmp_path / "pbs").mkdir()
    with local.up(tmp_path / "pbs", HOSTS[:2], split=8) as split:
        site = Site(split, tmp_path / "site")
        script = site.sed("/^#PBS -l select/d; /^#PBS -l place/d")
        assert site.ran("-l", "ncpus=16", "-l", "ngpus=4", script=script)[0] == "0"
        assert [site.seen(host)["env"]["APPTRAIN_NGPUS"] for host in (0, 1)] == ["2", "2"]


def test_nodes_that_a_user_asks_for_in_the_old_way_are_submitted_without_the_scripts_select(
    site: Site,
) -> None:
    wish = Wish(nodes=3, options=("-l", "nodes=2:ppn=2"))
    line = login.submission(Profile(scheduler="pbs"), "lab", wish, {}, site.submit_dir).words
    words = line[1 : line.index("-v")]
    assert (site.ran(*words)[0], site.hosts_seen()) == ("0", [0, 1])
    beside = site.pbs.run("qsub", *words[-2:], str(site.script), cwd=site.submit_dir, env={})
    assert beside.stderr == "qsub: Cannot be used with select or place: nodes\n"


def test_a_task_has_the_environment_of_the_script_and_pbs_own_of_its_host(site: Site) -> None:
    (site.pbs.home / ".profile").write_text(
        f"PATH=$PATH:{shlex.quote(str(site.pbs.bin))}\nexport OF_LOGIN=$'two\\nlines, \"quoted\" $HOME'\nset -a; odd() {{ :; }}; set +a\n"
    )
    site.ran(GIVEN="a b'c", APPTRAIN_BIND="/a", APPTRAIN_BIND_2="/b b", APPTRAIN_BIND_3="/c:/d:ro")
    script_path = None
    for host in (0, 1):
        env = site.seen(host)["env"]
        assert env["OF_LOGIN"] == 'two\nlines, "quoted" $HOME'
        assert env["GIVEN"] == "a b'c"
        assert env["APPTRAIN_BIND"].split("\n") == ["/a", "/b b", "/c:/d:ro"]
        assert not {"APPTRAIN_BIND_2", "APPTRAIN_BIND_3"} & set(env)
        assert str(site.pbs.bin) in env["PATH"]
        script_path = script_path or env["PATH"]
        assert env["PATH"] == script_path
        assert env["PBS_NODENUM"] == str(host)
        assert env["PBS_TASKNUM"] != "1"
        assert env["APPTRAIN_ATTEMPT"] == "0"
        assert env["APPTRAIN_NGPUS"] == "1"
        assert env["USER"]
        assert Path(env["APPTRAIN_NODEFILE"]).read_text() == "pbsn1\npbsn2\n"


def test_the_file_of_the_environment_is_private_without_the_cookie_and_gone_at_the_end(site: Site) -> None:
    id = site.submit(what={"0": {"wait": "go"}, "1": {"wait": "go"}})
    run = site.run_dir(id)
    site.until(lambda: site.hosts_seen() == [0, 1])
    file = run / "tasks/0.env"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    names = [entry.partition("=")[0] for entry in file.read_text().split("\0")]
    assert "PBS_JOBID" in names
    assert not {
        "PBS_JOBCOOKIE",
        "PBS_TASKNUM",
        "PBS_NODENUM",
        "PBS_NODEFILE",
        "TMPDIR",
        "CUDA_VISIBLE_DEVICES",
    } & set(names)
    (run / "go").touch()
    assert site.end(id)[0] == "0"
    assert not file.exists()
    cookie = site.seen(0)["env"]["PBS_JOBCOOKIE"]
    assert subprocess.run(["grep", "-rq", cookie, run]).returncode == 1


def test_in_a_private_sandbox_the_run_stays_where_it_was_submitted_also_in_a_chain(site: Site) -> None:
    what: What = {"0.0": {"status": 75}, "0.1": {"status": 75}}
    first = site.submit("-W", "sandbox=PRIVATE", what=what, APPTRAIN_CHAIN="1")
    assert site.end(first)[0] == "75"
    (second,) = (site.run_dir(first) / "chain.jobs").read_text().split()
    assert site.end(second)[0] == "0"
    assert site.pbs.attributes(second)["sandbox"] == "PRIVATE"
    for attempt, id in ((0, first), (1, second)):
        seen = site.seen(1, attempt)
        assert seen["env"]["PBS_JOBDIR"] == f"{site.pbs.home}/pbs.{id}.x8z"
        assert seen["cwd"] == str(site.submit_dir)


def test_an_array_element_has_a_run_of_its_own(site: Site) -> None:
    id = site.submit("-J", "3-5:2")
    number = id.split("[")[0]
    for index in (3, 5):
        status, lines = site.end(f"{number}[{index}].pbssrv")
        assert status == "0"
        assert lines[0] == f"apptrain: run directory {site.submit_dir}/runs/apptrain-{number}_{index}"
    assert site.seen(1)["env"]["PBS_ARRAY_INDEX"] in ("3", "5")


def test_hosts_without_a_node_file_are_served_from_the_copy(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with local.up(tmp_path / "old", HOSTS[:2], nodefile_on_sisters=False) as old:
        site = Site(old, tmp_path / "site")
        assert site.ran()[0] == "0"
        env = site.seen(1)["env"]
        assert not Path(env["PBS_NODEFILE"]).is_relative_to(site.submit_dir)
        assert not Path(env["PBS_NODEFILE"]).exists()
        assert env["APPTRAIN_NODEFILE"].startswith(str(site.submit_dir))


def test_a_profile_whose_path_has_a_blank_reaches_the_tasks_and_the_next_job(site: Site) -> None:
    file = site.submit_dir / "my sites/own.yaml"
    file.parent.mkdir()
    file.write_text("scheduler: pbs\n")
    render.render(file, write=True)
    what: What = {str(host): {"status": 75} for host in (0, 1)}
    given = "--profile 'my sites/own.yaml' -- x.py 'a b'"
    id = site.submit(what=what, APPTRAIN_CHAIN="1", APPTRAIN_ARGS=given)
    assert site.end(id)[0] == "75"
    assert site.end((site.run_dir(id) / "chain.jobs").read_text().strip())[0] == "75"
    for attempt in (0, 1):
        seen = site.seen(1, attempt)
        assert (seen["env"]["APPTRAIN_PROFILE"], seen["argv"]) == (str(file), ["launch", "--", "x.py", "a b"])
        assert str(file) in seen["options"]


def test_arguments_come_through_the_variable_and_what_v_cannot_hold_through_the_file(site: Site) -> None:
    site.ran(APPTRAIN_ARGS="--device cpu -- train.py 'a b'")
    assert site.seen(1)["argv"] == ["launch", "--device=cpu", "--", "train.py", "a b"]
    assert "APPTRAIN_ARGS" not in site.seen(1)["env"], "or they would be read twice"
    file = site.folder / "args"
    cmd = ["train.py", "a,b", "it's", 'say "hi"', "two\nlines", ""]
    file.write_text("\0".join(["--device=cpu", "--on-failure", "stop", "--", *cmd]) + "\0")
    site.ran(APPTRAIN_ARGS_FILE=str(file))
    assert site.seen(1)["argv"] == ["launch", "--device=cpu", "--on-failure=stop", "--", *cmd]
    assert "APPTRAIN_ARGS_FILE" not in site.seen(1)["env"], "or they would be read twice"


def test_tasks_start_with_pbs_tmrsh_too(site: Site) -> None:
    id = busy(site)
    site.pbs.run("qdel", "-W", "force", id)
    site.until(lambda: processes_gone(site.folder))
    status, lines = site.ran(
        APPTRAIN_START="pbs_tmrsh", what={"1": {"status": 7, "error": "x", "node": "pbsn2"}}
    )
    assert status == "7"
    assert sorted(line for line in lines if line.startswith("host")) == ["host 0 ", "host 1 "]


def test_a_profile_is_found_by_the_servers_name_says_how_to_start_and_is_each_tasks(site: Site) -> None:
    file = site.checkout / "clusters/lab.yaml"
    file.write_text("scheduler: pbs\nclusters: [pbssrv]\nstart: pbs_tmrsh\nnodes: {gpus: 4, whole: true}\n")
    file.with_suffix(".host").write_text(render.load_checked(file)[1])
    request = ("-l", "select=2:ncpus=2", "-l", "place=scatter")
    status, lines = site.ran(*request, APPTRAIN_DRY_RUN="1")
    assert status == "0"
    assert [shlex.split(line)[:3] for line in lines if line.startswith("setsid")] == [
        ["setsid", "pbs_tmrsh", "pbsn1"],
        ["setsid", "pbs_tmrsh", "pbsn2"],
    ]
    assert site.ran(*request)[0] == "0"
    assert [site.seen(host)["env"]["APPTRAIN_PROFILE"] for host in (0, 1)] == [str(file)] * 2
    _, lines = site.ran(*request, APPTRAIN_DRY_RUN="1", APPTRAIN_START="pbsdsh")
    assert [shlex.split(line)[1] for line in lines if line.startswith("setsid")] == ["pbsdsh", "pbsdsh"]


def test_a_dry_run_prints_the_launch_lines_and_every_plan_and_starts_nothing(site: Site) -> None:
    id = site.submit("-l", "select=3:ncpus=1:ngpus=1", APPTRAIN_DRY_RUN="1")
    status, lines = site.end(id)
    assert (status, site.hosts_seen(), site.run_dir(id).exists()) == ("0", [], False)
    assert ours(lines) == ["the launch line, and below the plan of each task:"]
    starts = [shlex.split(line) for line in lines if line.startswith("setsid")]
    assert [words[:4] + words[-2:] for words in starts] == [
        ["setsid", "pbsdsh", "-n", str(host), str(host), HOSTS[host]] for host in range(3)
    ]
    for host, name in enumerate(HOSTS):
        plan = [line.removeprefix(f"{host}: ") for line in lines if line.startswith(f"{host}: ")]
        assert f"{'node_rank':<24} {host}  [derived:PBS_NODENUM]" in plan
        assert f"{'rendezvous.local_addr':<24} {name}  [derived:PBS_NODEFILE]" in plan
        assert f"--node-rank={host} " in plan[-1]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("HYDRA build details:\n    Version: 4.2.1", "-n 2 -ppn 1 -hosts pbsn1,pbsn2"),
        ("mpiexec version 1.8.0 revision 0", "-n 2 --ppn 1 --hosts pbsn1,pbsn2 --cpu-bind none"),
    ],
)
def test_an_mpiexec_is_asked_for_one_task_on_each_host_in_its_own_words(
    site: Site, login: Callable[[str], None], says: str, words: str
) -> None:
    login(mpiexec(site.folder, says))
    status, lines = site.ran(APPTRAIN_DRY_RUN="1", APPTRAIN_START="mpiexec")
    assert status == "0"
    (line,) = [line for line in lines if line.startswith("mpiexec")]
    assert shlex.split(line)[: len(words.split()) + 2] == ["mpiexec", *words.split(), "/bin/bash"]


def test_a_starter_that_is_not_in_path_is_refused(site: Site, login: Callable[[str], None]) -> None:
    login("PATH=/usr/bin:/bin")
    id = site.submit(APPTRAIN_HOME=str(site.checkout))
    status, lines = site.end(id)
    error = "--start pbsdsh: there is no pbsdsh in PATH (/usr/bin:/bin): load its module, or choose another"
    assert (status, ours(lines)[0], ours(lines)[-1]) == (
        "64",
        f"qstat -f {id} does not answer: walltime and GPUs are unknown",
        f"status 64: pbsn1: {error} (logs: {site.run_dir(id)}/logs/0)",
    )


def test_each_task_has_the_gpus_that_a_hook_has_granted_on_its_host(tmp_path: Path) -> None:
    (tmp_path / "pbs").mkdir()
    with local.up(tmp_path / "pbs", HOSTS[:2], gpu_hook=True) as hooked:
        site = Site(hooked, tmp_path / "site")
        assert site.ran("-l", "select=2:ncpus=1:ngpus=2")[0] == "0"
        first, second = (site.seen(host)["env"]["CUDA_VISIBLE_DEVICES"] for host in (0, 1))
        assert first.count(",") == second.count(",") == 1
        assert first != second


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        (
            ("-l", "select=1:ncpus=1:ngpus=2:host=pbsn1+1:ncpus=1:ngpus=1:host=pbsn2"),
            {},
            "PBS granted GPUs unevenly (2 on pbsn1, 1 on pbsn2): every host needs the same number: one chunk a host "
            "(-l place=scatter), all alike",
        ),
        (
            (),
            {"APPTRAIN_ANSWER_TIMEOUT": "long"},
            "APPTRAIN_ANSWER_TIMEOUT=long: must be seconds (without it 120)",
        ),
    ],
)
def test_a_request_that_cannot_work_is_refused(
    site: Site, options: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    assert site.ran(*options, **variables) == ("64", [f"apptrain: {message}"])


def by_hand(site: Site, *arguments: str, **env: str) -> tuple[int, str]:
    ended = site.pbs.run("bash", str(site.script), *arguments, env=env)
    return ended.returncode, ended.stderr


def test_inside_an_interactive_job_the_script_takes_its_arguments_from_its_command_line(site: Site) -> None:
    inner = f"cd / && PBS_ENVIRONMENT=PBS_INTERACTIVE bash {shlex.quote(str(site.script))} --device=cpu -- 'a b' c,d"
    script = site.folder / "shell.pbs"
    script.write_text(
        f"#!/bin/bash\n#PBS -l select=2:ncpus=1\n#PBS -l place=scatter\n#PBS -j oe\n#PBS -N apptrain\n{inner}\n"
    )
    id = site.submit(script=script)
    status, lines = site.end(id)
    assert status == "0", lines
    assert site.seen(1)["argv"] == ["launch", "--device=cpu", "--", "a b", "c,d"]
    assert site.seen(1)["cwd"] == "/"
    assert ours(lines)[0] == f"run directory {site.run_dir(id)}"


def test_a_task_must_not_start_the_script(site: Site) -> None:
    script = site.folder / "naive.pbs"
    inner = shlex.join(["pbsdsh", "--", "/bin/bash", str(site.script)])
    script.write_text(f"#!/bin/bash\n#PBS -l select=1:ncpus=1\n#PBS -j oe\n{inner}\n")
    id = site.submit(script=script)
    _, lines = site.end(id)
    assert ours(lines) == [f"job {id}: this is a task: start this script once, not with pbsdsh"]


def test_outside_a_job_hosts_must_be_given_and_a_way_to_reach_them(site: Site) -> None:
    assert by_hand(site) == (
        64,
        "apptrain: this is no PBS job: qsub pbs/multinode.pbs, or give --start ssh and --nodes a,b\n",
    )
    assert by_hand(site, "--nodes", "a,b") == (
        64,
        "apptrain: there is no PBS job whose tasks pbsdsh could start: give --start ssh (or mpiexec) with --nodes\n",
    )
    status, said = by_hand(site, "--start", "ssh", "--nodes", "a[1-")
    assert (status, "--nodes" in said and said.count("\n") == 1) == (64, True)
    assert by_hand(site, SLURM_JOB_ID="7") == (
        64,
        "apptrain: this is a job of Slurm, even where its qsub has started it: sbatch (or that qsub) "
        "slurm/multinode.sbatch, in salloc bash slurm/multinode.sbatch\n",
    )


def test_a_job_of_a_profile_with_scratch_is_followed_while_it_runs(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its output lies in PBS's spool until its end; what is shown before is the run directory's log."""
    lab = site.folder / "lab.yaml"
    lab.write_text("scheduler: pbs\nscratch: $LARGE/of $USER\n")
    render.render(lab, write=True)
    large = site.folder / "large"
    what: What = {"0": {"wait": "go", "print": "trains"}, "1": {"wait": "go"}}
    id = site.submit(what=what, LARGE=str(large), APPTRAIN_PROFILE=str(lab))
    (log,) = found_by(site, lambda: list(large.glob("of */runs/apptrain-*/job.log")))
    found_by(site, lambda: "trains" in log.read_text())

    def qstat(*words: str) -> str:
        shown = site.pbs.run(*words)
        if "trains" in capsys.readouterr().out:  # which it has shown while the job runs
            (log.parent / "go").touch()
        return shown.stdout

    monkeypatch.setattr(follow, "find", lambda _: "pbs")
    monkeypatch.setattr(login, "run", qstat)
    monkeypatch.setattr(follow, "LEAST", 0.1)
    monkeypatch.setattr(follow, "MOST", 0.5)
    assert follow.follow(id) == 0
    assert (log.parent / "go").exists()


def found_by(site: Site, find: Callable[[], Any]) -> Any:
    site.until(find)
    return find()
