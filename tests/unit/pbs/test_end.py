"""`pbs/multinode.pbs` and its neighbours on the double of OpenPBS, with a stand-in for run.sh.

The stand-in does what a test says for a host, and writes the outcome that the entrypoint would write.
tests/cluster/test_pbs.py has the real image, real hosts, ssh and mpiexec.
"""

import marshal
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusters import render
from tests import procs
from tests.pbs_double import config, local
from tests.pbs_double.local import Local
from tests.unit.bounds import shorten

CHECKOUT = Path(__file__).resolve().parents[3]
HOSTS = ("pbsn1", "pbsn2", "pbsn3")
KILL_DELAY = 3.0
QUEUES = {"none": config.KILL_DELAY, "1": 1.0, "4": 4.0, "25": 25.0, "60": 60.0}
"""Further ones, with the kill_delay of each; the first sets none."""
BOUND = 90.0  # s, for anything started here
RUN_SH = """#!{python} -IS
import _signal, marshal, os, sys, time  # which take no time to import
word = sys.argv[sys.argv.index("entrypoint") + 1]
if word in ("prepare", "conclude"):
    code = "import sys; from entrypoint import cli; from entrypoint.job import conclude; conclude.LATE_PAUSE = 0.02; sys.exit(cli.main(sys.argv[1:]))"
    os.execve("{python}", ["{python}", "-Pc", code, *sys.argv[-2:]], {{"PATH": os.environ["PATH"], "PYTHONPATH": "{packages}", "APPTRAIN_STACK": "/none"}})
host, attempt = os.environ.get("PBS_NODENUM", os.environ.get("APPTRAIN_NODE_RANK")), os.environ.get("APPTRAIN_ATTEMPT", "0")
with open("{here}/what", "rb") as file:
    what = marshal.load(file)
what = what.get(attempt + "." + host, what.get(host, {{}}))
run = os.environ["APPTRAIN_RUN_DIR"]
words = sys.argv[sys.argv.index("entrypoint") + 1:]
def put(path, content):  # whole, or not at all
    new = f"{{path}}.{{os.getpid()}}.new"
    with open(new, "wb") as file:
        file.write(content)
    os.rename(new, path)
terms = []
_signal.signal(_signal.SIGTERM, lambda *_: terms.append(time.time()))
put(f"{here}/{{attempt}}.{{host}}.seen", marshal.dumps({{"env": dict(os.environ), "argv": words, "options": sys.argv[1:sys.argv.index("python") - 1], "cwd": os.getcwd()}}))
print(f"host {{host}}", what.get("print", ""), flush=True)
for part in what.get("parts", []):
    sys.stdout.write(part)
    sys.stdout.flush()
    time.sleep(0.01)
image = None
if what.get("fuse"):  # what mounts the image: its own process group, the same session, no handler, no environment
    import subprocess
    image = subprocess.Popen(["sleep", "600"], process_group=0, env={{}})
    rank = subprocess.Popen(["sleep", "601"], start_new_session=True)
    put(f"{here}/{{host}}.pids", f"{{os.getpid()}} {{image.pid}} {{rank.pid}}".encode())
if what.get("wait"):
    deadline = time.monotonic() + 50
    while not (terms or os.path.exists(f"{{run}}/{{what['wait']}}")) and time.monotonic() < deadline:
        time.sleep(0.02)
    if terms:
        if what.get("deaf"):
            time.sleep(50)
        if host == "0":
            open(f"{{run}}/told", "w").close()  # as the join tells the other nodes
        time.sleep(what.get("save", 0))
        put(f"{here}/{{host}}.saved", f"{{image is None or image.poll() is None}} {{len(terms)}}".encode())
        what["status"] = 143
for left in (image, rank) if image else ():
    left.kill()
status = what.get("status", 0)
if status != "none":
    lines = {{"status": status, "rank": what.get("rank", ""), "node": what.get("node", ""), "signal": 0,
        "time": what.get("time", "100.000000"), "error": what.get("error", "")}}
    for number, crew in what.get("crews", {{}}).items():
        put(f"{{run}}/outcome/{{number}}.nodes", crew.encode())
    for number, later in {{attempt: status, **what.get("then", {{}})}}.items():
        text = "".join(f"{{name}}={{value}}\\n" for name, value in {{**lines, "status": later}}.items())
        put(f"{{run}}/outcome/{{number}}.{{host}}", text.encode())
    hand = os.environ["APPTRAIN_HAND"]
    if host == "0" and os.path.isdir(hand):
        with open(f"{{hand}}/state", "rb") as file:
            hosts = [entry[5:].decode() for entry in file.read().split(bytes(1)) if entry[:5] == b"host="]
        crew = [int(line.split()[0]) for crew in what.get("crews", {{}}).values() for line in crew.splitlines()]
        gone = [at for at in range(len(hosts)) if crew and at not in crew]
        if lines["error"].startswith("lost: "):
            gone.append(hosts.index(lines["node"]))
        over = [f"lost={{at}}" for at in gone] + ["asked=yes"] * (status == 143)
        put(f"{{hand}}/over", "".join(entry + chr(0) for entry in over).encode())
    sys.exit(0 if status == 75 else status)
sys.exit(1)
"""
BOUNDS = {
    "host/job.sh": {"LOG_PAUSE": 0.01, "LOG_TRIES": 500},
    "pbs/starters.sh": {"POLL": 0.05, "SETTLE": 1, "SETTLE_ALL": 0, "LOST": 1},
    "pbs/task.sh": {"TRY_PAUSE": 0.02},
}
"""What the scripts allow a shared file system, which is not needed here."""
What = dict[str, dict[str, Any]]
"""What the stand-in does on a host of this rank (`0`), or of an attempt and a rank (`1.0`)."""


class Site:
    """A checkout with the real job script on a double of OpenPBS."""

    def __init__(self, pbs: Local, folder: Path):
        self.pbs = pbs
        self.folder = folder
        self.checkout = folder / "check [out] it's"
        self.submit_dir = folder / "submit, here"
        self.submit_dir.mkdir(parents=True)
        shutil.copytree(CHECKOUT / "pbs", self.checkout / "pbs")
        for name in ("containers", "host", "clusters"):
            (self.checkout / name).mkdir()
        for name in ("job.sh", "common.sh"):
            shutil.copy(CHECKOUT / "host" / name, self.checkout / "host")
        run_sh = self.checkout / "containers/run.sh"
        run_sh.write_text(RUN_SH.format(python=sys.executable, here=folder, packages=CHECKOUT))
        run_sh.chmod(0o755)
        for name, values in BOUNDS.items():
            self.bounds(name, **values)
        self.script = self.checkout / "pbs/multinode.pbs"

    def bounds(self, script: str, **values: float) -> None:
        shorten(self.checkout / script, **values)

    def will(self, what: What | None) -> None:
        """Tells the stand-ins what to do."""
        (self.folder / "what").write_bytes(marshal.dumps(what or {}))

    def submit(
        self, *options: str, what: What | None = None, script: Path | None = None, **variables: str
    ) -> str:
        """qsub, with these variables named in one -v."""
        self.will(what)
        words = [*options, *(["-v", ",".join(variables)] if variables else []), str(script or self.script)]
        ended = self.pbs.run("qsub", *words, cwd=self.submit_dir, env=variables)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def end(self, id: str) -> tuple[str, list[str]]:
        """(exit status, lines of the output) of a job that ends."""
        found = self.pbs.wait(id, limit=BOUND)
        text = self.output(found).read_text()
        print(text)
        return found["Exit_status"], text.splitlines()

    def output(self, attributes: dict[str, str]) -> Path:
        return Path(attributes["Output_Path"].partition(":")[2])

    def ran(self, *options: str, **how: Any) -> tuple[str, list[str]]:
        return self.end(self.submit(*options, **how))

    def run_dir(self, id: str, name: str = "apptrain") -> Path:
        number = id.split(".")[0].replace("[", "_").replace("]", "")
        return self.submit_dir / f"runs/{name}-{number}"

    def seen(self, host: int, attempt: int = 0) -> dict[str, Any]:
        """What the stand-in saw there."""
        found: dict[str, Any] = marshal.loads((self.folder / f"{attempt}.{host}.seen").read_bytes())
        return found

    def hosts_seen(self, attempt: int = 0) -> list[int]:
        return sorted(int(path.name.split(".")[1]) for path in self.folder.glob(f"{attempt}.*.seen"))

    def work(self, id: str, hosts: int = 2) -> None:
        """Returns once so many hosts work, and what ends them knows of them."""
        tasks = self.run_dir(id) / "tasks"
        self.until(lambda: self.hosts_seen() == list(range(hosts)))
        self.until(lambda: all((tasks / f"0.{host}").exists() for host in range(hosts)))

    def until(self, condition: Callable[[], object], bound: float = BOUND) -> None:
        deadline = time.monotonic() + bound
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def sed(self, expression: str) -> Path:
        """The job script with other directives."""
        script = self.checkout / "pbs/edited.pbs"
        edited = subprocess.run(["sed", expression, self.script], capture_output=True, text=True, check=True)
        script.write_text(edited.stdout)
        return script


@pytest.fixture(scope="module")
def pbs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    with local.up(tmp_path_factory.mktemp("pbs"), HOSTS, kill_delay=KILL_DELAY, queues=QUEUES) as found:
        yield found


@pytest.fixture
def site(pbs: Local, tmp_path: Path) -> Site:
    return Site(pbs, tmp_path)


@pytest.fixture
def login(site: Site) -> Iterator[Callable[[str], None]]:
    """Sets what the login shell of the user runs at last."""
    profile = site.pbs.home / ".profile"
    before = profile.read_text()

    def add(text: str) -> None:
        profile.write_text(f"{before}{text}\n")

    yield add
    profile.write_text(before)


def quoted(path: Path) -> str:
    return shlex.quote(str(path))


def ours(lines: list[str]) -> list[str]:
    return [line.removeprefix("apptrain: ") for line in lines if line.startswith("apptrain: ")]


# --- one task on each host -------------------------------------------------------------------------------------------


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
        ("3:ncpus=2:ngpus=1", "scatter", ["pbsn1", "pbsn2", "pbsn3"]),
        ("2:ncpus=2:mpiprocs=2:ngpus=1", "scatter", ["pbsn1", "pbsn2"]),
        ("2:ncpus=1:ngpus=1", "pack", ["pbsn1"]),
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


def test_old_requests_work_as_pbs_reads_them(site: Site) -> None:
    script = site.sed("s/^#PBS -l select.*/#PBS -l nodes=2:ppn=2/; /^#PBS -l place/d")
    status, _ = site.ran(script=script)
    assert (status, site.hosts_seen()) == ("0", [0, 1])
    assert "APPTRAIN_NGPUS" not in site.seen(0)["env"]


def test_where_a_hook_splits_a_request_for_all_nodes_each_gets_its_task(tmp_path: Path) -> None:
    (tmp_path / "pbs").mkdir()
    with local.up(tmp_path / "pbs", HOSTS[:2], split=8) as split:
        site = Site(split, tmp_path / "site")
        script = site.sed("/^#PBS -l select/d; /^#PBS -l place/d")
        assert site.ran("-l", "ncpus=16", "-l", "ngpus=4", script=script)[0] == "0"
        assert [site.seen(host)["env"]["APPTRAIN_NGPUS"] for host in (0, 1)] == ["2", "2"]


def test_without_a_hook_a_request_for_all_nodes_is_one_chunk_on_one(site: Site) -> None:
    script = site.sed("/^#PBS -l select/d; /^#PBS -l place/d")
    id = site.submit("-l", "ncpus=16", "-l", "ngpus=4", script=script)
    _, lines = site.end(id)
    assert site.hosts_seen() == [0]
    assert ours(lines)[2].startswith(f"job {id}, attempt 0, 1 nodes (pbsn1), ")


def test_packed_chunks_are_said_and_their_gpus_added(site: Site) -> None:
    _, lines = site.ran("-l", "select=2:ncpus=1:ngpus=2", "-l", "place=pack")
    assert (
        "2 chunks share one host, as they may without -l place=scatter: each host gets one task, with the GPUs of all its chunks"
        in ours(lines)
    )
    assert site.seen(0)["env"]["APPTRAIN_NGPUS"] == "4"


# --- the environment -------------------------------------------------------------------------------------------------


def test_a_task_has_the_environment_of_the_script_and_pbs_own_of_its_host(site: Site) -> None:
    (site.pbs.home / ".profile").write_text(
        f"PATH=$PATH:{shlex.quote(str(site.pbs.bin))}\nexport OF_LOGIN=$'two\\nlines, \"quoted\" $HOME'\nset -a; odd() {{ :; }}; set +a\n"
    )
    site.ran(GIVEN="a b'c")
    script_path = None
    for host in (0, 1):
        env = site.seen(host)["env"]
        assert env["OF_LOGIN"] == 'two\nlines, "quoted" $HOME'
        assert env["GIVEN"] == "a b'c"
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


# --- output and status ----------------------------------------------------------------------------------------------


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


def test_where_those_that_are_left_fail_too_the_chain_goes_on(site: Site) -> None:
    what: What = {
        "0": {"status": 9, "node": "pbsn1", "crews": {"1": "0 pbsn1\n1 pbsn2\n"}, "then": {"1": 7}},
        "1": {"then": {"1": 0}},
        "2.0": {},
    }
    id = site.submit("-l", "select=2", what=what, APPTRAIN_ON_FAILURE="restart", APPTRAIN_CHAIN="1")
    status, lines = site.end(id)
    assert status == "7"
    assert ours(lines)[-2:] == [
        "it does not go on inside the allocation: as with --on-failure requeue",
        "the job will run again, and go on there",
    ]
    assert (site.run_dir(id) / "restarts").read_text() == "2 0\n"


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
    assert f"task.sh: {here}: {error}" in lines
    assert ours(lines)[-1] == f"status 64: pbsn2: {error} (logs: {site.run_dir(id)}/logs/0)"


def test_a_host_whose_task_cannot_start_gets_an_outcome_that_says_why(site: Site) -> None:
    (site.checkout / "pbs/task.sh").write_text("exit 3\n")
    id = site.submit()
    status, lines = site.end(id)
    error = "its task ended before it said that it had started: pbsdsh said: pbsdsh: task 0x00000000 exit status 3"
    assert status == "1"
    assert re.fullmatch(rf"status 1: pbsn[12]: {error}  \(logs: .*\)", ours(lines)[-1])


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
            f"task.sh: {here}: {error}",
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


# --- a host is lost ---------------------------------------------------------------------------------------------------


LOST = {"status": 1, "node": "pbsn2", "error": "lost: nothing was heard from it for 60 s"}
"""What the other hosts' entrypoints write."""


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


def test_what_a_host_that_is_cut_off_says_of_the_first_does_not_count(site: Site) -> None:
    what: What = {
        "0": {**LOST, "time": "200.000000"},
        "1": {
            "status": 1,
            "node": "pbsn1",
            "error": "lost: nothing was heard from it for 60 s",
            "time": "100.000000",
        },
    }
    id = site.submit(what=what)
    status, lines = site.end(id)
    assert (status, ours(lines)[-1]) == (
        "1",
        f"status 1: pbsn2: {LOST['error']} (logs: {site.run_dir(id)}/logs/0)",
    )


# --- the end ----------------------------------------------------------------------------------------------------------


def processes_gone(folder: Path, hosts: tuple[int, ...] = (0, 1)) -> bool:
    pids = [int(pid) for host in hosts for pid in (folder / f"{host}.pids").read_text().split()]
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return not [
        pid for pid in alive if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    ]


def busy(site: Site, **more: Any) -> str:
    """A job whose hosts work with an image and a rank each, until told."""
    what: What = {
        "0": {"wait": "go", "fuse": 1, "save": 0.3, **more},
        "1": {"wait": "told", "fuse": 1, "status": 143, **more},
    }
    id = site.submit(what=what)
    site.work(id)
    site.until(lambda: all((site.folder / f"{host}.pids").exists() for host in (0, 1)))
    return id


def test_a_deleted_job_saves_with_its_image_within_kill_delay_and_leaves_nothing(site: Site) -> None:
    id = busy(site)
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


def test_an_element_of_an_array_has_no_chain(site: Site) -> None:
    what: What = {str(host): {"status": 75} for host in (0, 1)}
    id = site.submit("-J", "3-4", what=what, APPTRAIN_CHAIN="2")
    element = f"{id.split('[')[0]}[4].pbssrv"
    status, lines = site.end(element)
    again = f"to go on: the same line again with APPTRAIN_RUN_DIR={quoted(site.run_dir(element))}"
    assert (status, ours(lines)[-1]) == (
        "75",
        f"pbs does not run it again (an element of a job array cannot be submitted by itself); {again}",
    )
    site.end(f"{id.split('[')[0]}[3].pbssrv")


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


@pytest.mark.parametrize(
    ("queue", "grace"), [("none", "8"), ("1", "1"), ("4", "3"), ("25", "20"), ("60", "55")]
)
def test_ranks_may_save_until_5_s_before_the_queues_kill_delay_is_over_or_a_fifth_of_it(
    site: Site, queue: str, grace: str
) -> None:
    assert site.ran("-q", queue)[0] == "0"
    assert site.seen(1)["env"]["APPTRAIN_TERM_GRACE"] == grace


# --- other ways to start, GPUs, plans -------------------------------------------------------------------------------


def test_tasks_start_with_pbs_tmrsh_too(site: Site) -> None:
    id = busy(site)
    site.pbs.run("qdel", "-W", "force", id)
    site.until(lambda: processes_gone(site.folder))
    status, lines = site.ran(
        APPTRAIN_START="pbs_tmrsh", what={"1": {"status": 7, "error": "x", "node": "pbsn2"}}
    )
    assert status == "7"
    assert sorted(line for line in lines if line.startswith("host")) == ["host 0 ", "host 1 "]


def test_a_profile_is_found_by_the_servers_name_and_says_how_to_start_and_what_gpus_whole_nodes_have(
    site: Site,
) -> None:
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
    assert [site.seen(host)["env"]["APPTRAIN_NGPUS"] for host in (0, 1)] == ["4", "4"]
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


def mpiexec(folder: Path, version: str) -> str:
    """The line by which a login shell finds an mpiexec of this version."""
    file = folder / "mpi/mpiexec"
    file.parent.mkdir()
    file.write_text(f"#!/bin/sh\necho {shlex.quote(version)}\n")
    file.chmod(0o755)
    return f"PATH={shlex.quote(str(file.parent))}:$PATH"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("mpiexec (OpenRTE) 4.1.4", "-n 2 --host pbsn1,pbsn2 --map-by ppr:1:node --bind-to none"),
        ("HYDRA build details:\n    Version: 4.2.1", "-n 2 -ppn 1 -hosts pbsn1,pbsn2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", "-n 2 -ppn 1 -hosts pbsn1,pbsn2"),
        ("PALS 1.4.0", "-n 2 --ppn 1 --hosts pbsn1,pbsn2 --cpu-bind none"),
    ],
)
def test_each_mpiexec_is_asked_for_one_task_on_each_host_in_its_own_words(
    site: Site, login: Callable[[str], None], version: str, words: str
) -> None:
    login(mpiexec(site.folder, version))
    status, lines = site.ran(APPTRAIN_DRY_RUN="1", APPTRAIN_START="mpiexec")
    assert status == "0"
    (line,) = [line for line in lines if line.startswith("mpiexec")]
    assert shlex.split(line)[: len(words.split()) + 2] == ["mpiexec", *words.split(), "/bin/bash"]


def test_an_mpiexec_that_nobody_knows_is_refused(site: Site, login: Callable[[str], None]) -> None:
    login(mpiexec(site.folder, "slurm-wlm 24.11"))
    error = (
        "mpiexec says of itself: slurm-wlm 24.11: Open MPI, MPICH or PALS is needed: "
        "load its module, or use another --start"
    )
    for dry_run in ("0", "1"):
        assert site.ran(APPTRAIN_DRY_RUN=dry_run, APPTRAIN_START="mpiexec") == ("64", [f"apptrain: {error}"])


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


def test_the_gpus_of_a_hook_must_be_as_many_as_were_granted(tmp_path: Path) -> None:
    (tmp_path / "pbs").mkdir()
    with local.up(tmp_path / "pbs", HOSTS[:2], gpu_hook=True) as hooked:
        site = Site(hooked, tmp_path / "site")
        assert site.ran("-l", "select=2:ncpus=1:ngpus=2")[0] == "0"
        first, second = (site.seen(host)["env"]["CUDA_VISIBLE_DEVICES"] for host in (0, 1))
        assert first.count(",") == second.count(",") == 1
        assert first != second
        (hooked.home / ".profile").write_text(
            "export CUDA_VISIBLE_DEVICES=0,1,2\n" + (hooked.home / ".profile").read_text()
        )
        status, lines = site.ran("-l", "select=2:ncpus=1:ngpus=2")
        assert (status, ours(lines)) == (
            "64",
            [
                "CUDA_VISIBLE_DEVICES=0,1,2 names other than the 2 GPUs that PBS granted on each host: leave it out"
            ],
        )


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        (
            ("-l", "select=1:ncpus=1:ngpus=2:host=pbsn1+1:ncpus=1:ngpus=1:host=pbsn2"),
            {},
            "PBS granted GPUs unevenly (2 on pbsn1, 1 on pbsn2): every host needs the same number: one chunk a host "
            "(-l place=scatter), all alike",
        ),
        ((), {"APPTRAIN_NGPUS": "4"}, "APPTRAIN_NGPUS=4, but PBS granted 1 GPUs on each host: leave it out"),
        (
            (),
            {"APPTRAIN_ANSWER_TIMEOUT": "long"},
            "APPTRAIN_ANSWER_TIMEOUT=long: must be seconds (without it 120)",
        ),
        ((), {"APPTRAIN_START": "srun"}, "--start srun: must be one of pbsdsh, pbs_tmrsh, mpiexec, ssh"),
        ((), {"APPTRAIN_STOP_BEFORE": "soon"}, "APPTRAIN_STOP_BEFORE=soon: must be seconds; 0 leaves it out"),
        (
            ("-l", "walltime=60"),
            {"APPTRAIN_STOP_BEFORE": "90"},
            "--stop-before 90, but the walltime is 60 s: give less, or request more",
        ),
        (
            (),
            {"APPTRAIN_ON_FAILURE": "pray"},
            "APPTRAIN_ON_FAILURE=pray: must be one of stop, requeue, restart",
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


# --- by hand, over what stands for ssh ------------------------------------------------------------------------------


UNAME = """#!/bin/sh
if [ "$1" = -n ] && [ -n "$STANDS_FOR" ]; then echo "$STANDS_FOR"; else exec /bin/uname "$@"; fi
"""
SSH = """#!/bin/bash
while [[ $1 != -- ]]; do shift; done
if [[ $2 == deaf ]]; then exec sleep 600; fi
if [[ $2 != twin* ]]; then export STANDS_FOR=$2; fi
exec /bin/bash -s
"""


@dataclass(frozen=True, kw_only=True)
class ByHand:
    site: Site
    env: dict[str, str]

    def program(self, name: str, text: str, *, folder: str) -> None:
        file = self.site.folder / folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def start(self, nodes: str, what: What | None = None, **env: str) -> "subprocess.Popen[str]":
        """The job script in a process group of its own."""
        self.site.will(what)
        return subprocess.Popen(
            [
                "bash",
                "-c",
                'GROUP=$$ exec bash "$@"',
                "bash",
                self.site.script,
                "--start",
                "ssh",
                "--nodes",
                nodes,
            ],
            cwd=self.site.submit_dir,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, process: "subprocess.Popen[str]", bound: float = BOUND) -> tuple[int, list[str]]:
        """(status, lines) of one that ends in time."""
        try:
            said, _ = process.communicate(timeout=bound)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said.splitlines()

    def left(self) -> list[str]:
        """What runs of this checkout."""
        lines = (line.decode(errors="replace").replace("\0", " ") for _, line in procs.files("cmdline"))
        return [line for line in lines if str(self.site.checkout) in line]


def last(lines: list[str]) -> str:
    """What was said last, without where the logs are, which is checked."""
    run = ours(lines)[0].removeprefix("run directory ")
    assert ours(lines)[-1].endswith(f" (logs: {run}/logs/0)")
    return ours(lines)[-1].removesuffix(f" (logs: {run}/logs/0)")


@pytest.fixture
def hand(site: Site) -> Iterator[ByHand]:
    """A way to start tasks on any host that one may name; nothing of it is left afterwards."""
    first, stand_ins = site.folder / "first", site.folder / "stand-ins"
    path = f"{first}:{stand_ins}:{os.environ['PATH']}"
    found = ByHand(site=site, env={"PATH": path, "HOME": str(site.pbs.home)})
    for name, text in (("ssh", SSH), ("uname", UNAME)):
        found.program(name, text, folder="stand-ins")
    yield found
    site.until(lambda: not found.left())


def test_by_hand_each_host_has_a_task_and_the_first_failure_counts(hand: ByHand) -> None:
    status, lines = hand.end(hand.start("a,b", {"1": {"status": 7, "node": "b", "error": "x"}}))
    assert (status, sorted(lines[3:5])) == (7, ["host 0 ", "host 1 "])
    assert last(lines) == "status 7: b: x"


def test_by_hand_tasks_end_with_the_script_however_it_ends(hand: ByHand) -> None:
    process = hand.start("a,b", {str(host): {"wait": "never"} for host in (0, 1)})
    logs = hand.site.submit_dir / "runs"
    hand.site.until(lambda: any(f.read_text().count("host ") == 2 for f in logs.glob("*/job.log")))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=BOUND)
    hand.site.until(lambda: not hand.left(), 30.0)  # by themselves they would end after 50


HERE = f"{os.uname().nodename},b"
BEFORE = ("readlink", "dirname", "mktemp", "env", "timeout", "tail", "tr", "mkfifo", "tee", "rm")
STARTING = ("mktemp 2", "cat 2", "setsid", "ssh", "mkfifo 4", "uname")
MOMENTS = [
    ("at once", "a,b"),
    *((at, "a,b") for at in BEFORE),
    *((at, n) for at in STARTING for n in ("a,b", HERE)),
]
"""With the hosts: as the script calls a program, for the so manieth time. The clock would tell nothing of where the
script is, and what bash loses is a matter of luck then: an interrupt just as a $(...) has ended."""
AT_A_MOMENT = """#!/bin/sh
echo >>{calls}
if [ "$(wc -l <{calls})" -ge {number} ] && ln -s . {calls}.once 2>/dev/null; then kill -s {signal} -- "-$GROUP"; fi
exec {program} "$@"
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("moment", "nodes"), MOMENTS)
def test_by_hand_a_signal_ends_it_at_whatever_moment_it_comes(
    hand: ByHand, moment: str, nodes: str, signum: signal.Signals
) -> None:
    name, _, number = moment.partition(" ")
    program = shutil.which(name, path=hand.env["PATH"])
    if program:
        text = AT_A_MOMENT.format(
            calls=hand.site.folder / "calls", number=number or 1, signal=signum.name[3:], program=program
        )
        hand.program(name, text, folder="first")
    process = hand.start(nodes, {"0": {"wait": "never"}, "1": {"wait": "outcome/0.0", "status": 9}})
    if not program:
        os.killpg(process.pid, signum)
    status, lines = hand.end(process)
    assert status in (-signum, 128 + signum), lines
    assert not program or (hand.site.folder / "calls").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("nodes", ["a,b", HERE])
def test_by_hand_a_signal_ends_it_while_tasks_run(hand: ByHand, nodes: str, signum: signal.Signals) -> None:
    process = hand.start(nodes, {"0": {"wait": "never"}, "1": {"wait": "outcome/0.0", "status": 9}})
    hand.site.until(lambda: hand.site.hosts_seen() == [0, 1])
    os.killpg(process.pid, signum)
    assert hand.end(process)[0] == 128 + signum


def test_by_hand_a_second_interrupt_does_not_wait_for_tasks_that_do_not_end(hand: ByHand) -> None:
    hand.site.bounds("pbs/starters.sh", TO_END=1, POLL=0.01)
    process = hand.start("a,b", {str(host): {"wait": "never", "deaf": 1} for host in (0, 1)})
    hand.site.until(lambda: hand.site.hosts_seen() == [0, 1])
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.5)  # they may be saving: TO_END, here 1, is not for them
    os.killpg(process.pid, signal.SIGINT)
    assert hand.end(process, 20.0)[0] == 130


def test_by_hand_a_host_that_takes_the_connection_and_no_more_is_named(hand: ByHand) -> None:
    hand.site.bounds("pbs/starters.sh", TO_END=1)
    process = hand.start("a,deaf", {"0": {"wait": "outcome/0.1"}}, APPTRAIN_ANSWER_TIMEOUT="4")
    status, lines = hand.end(process)
    assert status == 1
    assert last(lines) == "status 1: deaf: no task has answered there for 4 s: ssh said: nothing"


def test_by_hand_two_names_of_one_host_are_refused(hand: ByHand) -> None:
    status, lines = hand.end(hand.start("twin1,twin2", {"0": {"status": "none"}, "1": {"status": "none"}}))
    here = os.uname().nodename
    error = f"tasks of (twin1 and twin2|twin2 and twin1) both run on {here}: name it once"
    assert status == 1
    assert re.fullmatch(rf"status 1: twin[12]: {error} \(logs: .*\)", ours(lines)[-1])


def test_by_hand_a_task_that_ends_without_an_outcome_gets_one_while_others_wait_for_it(hand: ByHand) -> None:
    process = hand.start("a,b", {"0": {"wait": "outcome/0.1"}, "1": {"status": "none"}})
    status, lines = hand.end(process)
    assert status == 1
    assert last(lines) == "status 1: b: its task ended and left no outcome"


# --- a task alone -----------------------------------------------------------------------------------------------------


def task(folder: Path, *arguments: str, **env: str) -> tuple[int, str, list[str]]:
    """(status, stderr, lines of its outcome but the time) of pbs/task.sh with this run directory."""
    for name in ("pbs/task.sh", "host/common.sh"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / name, folder / name)
    script = folder / "pbs/task.sh"
    shorten(script, TRIES=2, TRY_PAUSE=0.01)
    ended = subprocess.run(
        ["bash", script, str(folder / "run"), "0", *arguments],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    outcomes = list(folder.glob("run/outcome/0.*"))
    lines = outcomes[0].read_text().splitlines() if outcomes and arguments[1] != "-" else []
    return ended.returncode, ended.stderr, [line for line in lines if not line.startswith("time=")]


def prepared(folder: Path) -> Path:
    run = folder / "run"
    for name in ("tasks", "outcome", "logs/0"):
        (run / name).mkdir(parents=True)
    (run / "tasks/0.env").write_text("A=b\0")
    (run / "tasks/0.argv").write_text(f"{folder}\0true\0")
    return run


def test_a_task_that_does_not_see_the_run_directory_says_so(tmp_path: Path) -> None:
    error = f"the run directory {tmp_path}/run is not there on this node: give one that all nodes share in APPTRAIN_RUN_DIR"
    found = task(tmp_path, "pbsdsh", "1", "pbsn2")
    assert found == (64, f"task.sh: {os.uname().nodename}: {error}\n", [])


def test_a_task_of_one_command_for_all_that_finds_no_place_is_refused(tmp_path: Path) -> None:
    prepared(tmp_path)
    here = os.uname().nodename
    error = "mpiexec tells no rank of one of far1 far2"
    assert task(tmp_path, "mpiexec", "-", "far1", "far2") == (64, f"task.sh: {here}: {error}\n", [])
    assert task(tmp_path, "mpiexec", "-", "far1", "far2", PMI_RANK="2") == (
        64,
        f"task.sh: {here}: {error}\n",
        [],
    )


def test_a_host_without_room_for_temporary_files_is_refused(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mktemp").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/mktemp").chmod(0o755)
    status, _, outcome = task(tmp_path, "ssh", "0", "a", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    error = "no temporary directory can be made: set TMPDIR to a directory of this node"
    assert status == 64
    assert outcome == ["status=64", "rank=", "node=a", "signal=0", f"error={error}"]
    assert (run / "logs/0/a.task.log").read_text() == f"task.sh: {os.uname().nodename}: {error}\n"


@pytest.fixture
def slow_shell(tmp_path: Path) -> str:
    """A file for BASH_ENV: every command of a script comes later than whatever it started in the background."""
    file = tmp_path / "slow.sh"
    file.write_text("trap '/bin/sleep 0.05' DEBUG\n")
    return str(file)


def test_the_status_of_a_task_that_ends_at_once_is_kept(tmp_path: Path, slow_shell: str) -> None:
    prepared(tmp_path)
    (tmp_path / "pbs").mkdir()
    (tmp_path / "pbs/keep.sh").write_text("exit 5\n")
    assert task(tmp_path, "pbsdsh", "0", "a", PBS_NODENUM="0", BASH_ENV=slow_shell)[0] == 5


def test_the_status_of_a_program_that_ends_at_once_is_kept(tmp_path: Path, slow_shell: str) -> None:
    (tmp_path / "own").mkdir()
    held, holds = os.pipe()
    script = 'exec 8<&"$0" && exec bash "$@"'
    ended = subprocess.run(
        ["bash", "-c", script, str(held), CHECKOUT / "pbs/keep.sh", tmp_path / "own", "sh", "-c", "exit 5"],
        env={"PATH": os.environ["PATH"], "BASH_ENV": slow_shell},
        pass_fds=[held],
        start_new_session=True,
        timeout=BOUND,
    )
    os.close(held)
    os.close(holds)
    assert (ended.returncode, (tmp_path / "own").exists()) == (5, False)


def shape(script: Path) -> list[str]:
    """The headings and steps of a job script, each once."""
    steps = re.compile(
        r"# (?:Usage|Reads|Exit|SITE)\b|set -.*|trap .*|if \[\[ .*|source .*|start\(\) \{|run_job .*"
    )
    text = script.read_text().replace("slurm/", "pbs/")
    return list(dict.fromkeys(step[0] for line in text.splitlines() if (step := steps.match(line))))


def test_the_job_scripts_of_both_schedulers_have_the_same_sections_in_the_same_order() -> None:
    mine, other = shape(CHECKOUT / "pbs/multinode.pbs"), shape(CHECKOUT / "slurm/multinode.sbatch")
    assert mine == other
    assert mine[-4:] == [
        'source "$APPTRAIN_HOME/host/job.sh"',
        'source "$APPTRAIN_HOME/pbs/host.sh"',
        "start() {",
        'run_job "$@"',
    ]


def test_a_checkout_that_cannot_be_found_is_said(site: Site) -> None:
    script = site.folder / "alone.pbs"
    shutil.copy(site.script, script)
    assert site.ran(script=script) == (
        "64",
        [f"apptrain: {site.submit_dir} is no checkout of apptrain: set APPTRAIN_HOME to it, with qsub -v"],
    )
