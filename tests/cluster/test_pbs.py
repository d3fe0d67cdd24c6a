"""`pbs/multinode.pbs` as users submit it: the double of OpenPBS, real hosts, Apptainer, the real image, a real sshd.

Needs root, for the test cluster. tests/unit/tests/test_pbs_double.py holds the double to the recordings of a real OpenPBS,
and tests/unit/pbs/ has what needs no image. Where a test is not about ranks that import torch, its job
starts a script of a few lines once on each node (`--mode exec`).
"""

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.account import HOME, REPOSITORY, SOFTWARE, Account, account
from tests.cluster.images import CHECKOUT, packages
from tests.loud import explain
from tests.pages import SLOW
from tests.pbs_double.cluster import BINDS, HOSTS, Pbs, left_behind
from tests.pbs_double.cluster import up as pbs_up
from train import metrics

SCRIPT = REPOSITORY / "pbs/multinode.pbs"
WORK = HOME / "my [work], 1"
BOUND = 400.0  # s, for a job that takes a few, or 20 where all its ranks import torch on two busy cores
KILL_DELAY = 120.0  # s, so that a save ends on busy cores
SMALL = ("--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16", "batch_size=16")
"""40 steps that take a few seconds."""
ONCE = ("--device", "cpu", "--mode", "exec")
DISK = "/var/local"
BY_HAND = "apptrain-????????-*"
"""Run directories of jobs without a scheduler, in whose names the date stands."""
TELL = """\
import json, os, sys
print(json.dumps({"node": os.environ["APPTRAIN_NODE"], "rank": os.environ["NODE_RANK"], "of": os.environ["NNODES"],
    "argv": sys.argv[1:], "cwd": os.getcwd(), "cookie": "PBS_JOBCOOKIE" in os.environ, "run": os.environ["APPTRAIN_RUN_DIR"]}))
"""
SAVE = """\
import os, signal, sys, time
from pathlib import Path
here, rank, terms = Path(os.environ["APPTRAIN_RUN_DIR"]), os.environ["NODE_RANK"], []
signal.signal(signal.SIGTERM, lambda *_: terms.append(1))
(here / f"began.{rank}").touch()
while not terms:
    time.sleep(0.1)
time.sleep(1)  # in which what shows the image ends, if it is asked to as well
import wave, xml.dom.pulldom  # from the image, for the first time
time.sleep(1)
(here / f"saved.{rank}").write_text(f"{len(terms)} {wave.__name__}")
"""

IMAGE = """\
import os
print(os.environ["APPTRAIN_NODE"], os.environ["APPTAINER_CONTAINER"])
"""
COUNT = """\
import os, sys
rank = os.environ["NODE_RANK"]
for number in range(200):
    for part in (f"<{rank}:", f"{number}:{rank}>\\n"):
        sys.stdout.write(part)
        sys.stdout.flush()
"""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A job that has ended."""

    id: str
    status: int
    lines: list[str]
    folder: Path
    """Its run directory, on this machine."""

    def said(self, who: str) -> list[str]:
        return [line.removeprefix(f"{who}: ") for line in self.lines if line.startswith(f"{who}: ")]

    @property
    def printed(self) -> list[str]:
        """What the ranks printed, sorted."""
        ours = ("apptrain: ", "pbsdsh: ")
        return sorted(line for line in self.lines if not line.startswith(ours))

    @property
    def told(self) -> list[dict[str, object]]:
        """What the script TELL printed on each node, in node-rank order."""
        return sorted((json.loads(line) for line in self.printed), key=lambda one: str(one["rank"]))


@dataclass(frozen=True, kw_only=True)
class User:
    """Someone with a checkout, on a cluster with PBS."""

    account: Account
    pbs: Pbs

    def submit(
        self, *options: Path | str, args: tuple[Path | str, ...] = (), script: Path = SCRIPT, **env: str
    ) -> str:
        """qsub of the job script; `args` are its options and CMD, handed over in a file."""
        file = self.account.write("args", "\0".join(map(str, args)) + "\0")
        given = {**self.account.env, "APPTRAIN_ARGS_FILE": str(file), **env}
        if not args:
            del given["APPTRAIN_ARGS_FILE"]
        names = ",".join(given)
        id = self.pbs.submit(*options, *(["-v", names] if names else []), script, cwd=WORK, env=given)
        explain(f"job {id}", (self.run_dir(id) / "job.log").read_text)
        return id

    def end(self, id: str) -> Ran:
        try:
            found = self.pbs.wait(id, limit=BOUND)
        except TimeoutError as error:
            log = self.run_dir(id) / "job.log"
            raise TimeoutError(f"{id}: {log.read_text() if log.exists() else error}") from None
        lines = [line for line in self.pbs.printed(id).splitlines() if not SLOW.search(line)]
        return Ran(id=id, status=int(found["Exit_status"]), lines=lines, folder=self.run_dir(id))

    def ran(self, *options: Path | str, **how: object) -> Ran:
        return self.end(self.submit(*options, **how))  # type: ignore[arg-type]

    def run_dir(self, id: str) -> Path:
        number = id.split(".")[0].replace("[", "_").replace("]", "")
        return self.account.on_disk(WORK / f"runs/apptrain-{number}")

    def until(self, file: Path, words: str = "") -> None:
        there = lambda: file.exists() and words in file.read_text()  # noqa: E731
        self.account.cluster.until(there, str(file), BOUND)

    def by_hand(self, *arguments: Path | str, host: str = "login1") -> "subprocess.Popen[str]":
        """Starts the job script on a host without a scheduler."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        env = {**self.account.env, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        return self.account.cluster[host].start(
            ["bash", SCRIPT, *arguments], user="alice", cwd=WORK, env=env, **pipes
        )

    def nothing_left(self) -> None:
        """All processes of the user are gone from all nodes."""
        gone = lambda: not left_behind(self.account.cluster)  # noqa: E731
        try:
            self.account.cluster.until(gone, "the nodes to be free", BOUND)
        except TimeoutError:
            assert left_behind(self.account.cluster) == {}


@pytest.fixture(scope="module")
def everyone(request: pytest.FixtureRequest) -> Iterator[User]:
    with (
        account(request, binds=[*BINDS, packages()]) as found,
        pbs_up(found.cluster, kill_delay=KILL_DELAY) as pbs,
    ):
        found.write("else where/tell.py", TELL)
        found.write("else where/save.py", SAVE)
        found.write("else where/count.py", COUNT)
        found.write("else where/image.py", IMAGE)
        found.write(
            "else where/fail.py", 'import os, sys\nsys.exit(41 if os.environ["RANK"] == "3" else 0)\n'
        )
        found.write(WORK / "here", "")
        yield User(account=found, pbs=pbs)


@pytest.fixture
def user(everyone: User) -> Iterator[User]:
    """On nodes where nothing of theirs runs, before and after."""
    everyone.nothing_left()
    yield everyone
    everyone.nothing_left()


def done(ran: Ran) -> Ran:
    assert ran.status == 0, "\n".join(ran.lines)
    return ran


TELLING = (*ONCE, "--", HOME / "else where/tell.py")


def test_every_rank_of_three_nodes_greets_and_the_first_lines_say_where_the_run_is(user: User) -> None:
    ran = done(
        user.ran(
            "-l",
            "select=3:ncpus=2:ngpus=2",
            args=("--device", "cpu", "--nproc-per-node", "2", "--", "-m", "train.hello"),
        )
    )
    run = WORK / f"runs/apptrain-{ran.id.split('.')[0]}"
    assert ran.lines[0] == f"apptrain: run directory {run}"
    threads, place, network, preflight, start = ran.said("apptrain")[3:-1]
    assert re.fullmatch(r"the ranks started after [\d.]+ s: job script [\d.]+, task [\d.]+, plan .*", start)
    assert threads == (
        "OMP_NUM_THREADS=2 is pbs's own, for the whole node: each of the 2 ranks gets 1 (set --omp-num-threads to choose)"
    )
    assert place.startswith(
        f"job {ran.id}, attempt 0: 3 nodes x 2 ranks on cpu, mode torchrun, rendezvous gpu-a01:"
    )
    assert network == "network: rendezvous at gpu-a01 (10.77.42.11) [derived:--nodefile], gloo on eth0"
    assert preflight.startswith("preflight: 3 nodes, nothing found, ")
    places = enumerate(node for node in HOSTS for _ in range(2))
    greeted = sorted(f"hello from [{node}:gloo] process {rank}/6" for rank, node in places)
    assert [line.partition("] ")[2] for line in ran.printed] == greeted
    assert ran.lines[-1] == f"apptrain: done: {run}"
    assert (ran.folder / "job.log").read_text().splitlines() == ran.lines


@pytest.fixture(scope="module")
def embedded(everyone: User) -> Path:
    """The run directory of the small training on two nodes, both on one machine in the image."""
    run = WORK / "runs/embedded"
    line = ("python", "-P", "-m", "entrypoint.cli.embedded", "--nodes", "2")
    inside = (REPOSITORY / "containers/run.sh", SOFTWARE / "image.sif", *line, "--run-dir", run)
    ended = everyone.account.run(*inside, "--", "-m", "train", *SMALL, cwd=WORK, timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    return everyone.account.on_disk(run)


def same_run(run: Path, expected: Path) -> None:
    found, wanted = (metrics.read(folder / "metrics.jsonl") for folder in (run, expected))
    assert list(found.loss) == list(range(1, 41))
    assert (found.loss, found.lr, found.accuracy) == (wanted.loss, wanted.lr, wanted.accuracy)
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, expected)]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


TRAINING = ("--device", "cpu", "--", "-m", "train", *SMALL)


def test_it_trains_as_one_machine_does_bit_for_bit(user: User, embedded: Path) -> None:
    ran = done(user.ran("-l", "select=2:ncpus=1", args=TRAINING))
    plans = [json.loads(file.read_text()) for file in sorted(ran.folder.glob("plan.*.json"))]
    assert [(plan["scheduler"], plan["node_rank"], plan["world_size"]) for plan in plans] == [
        ("pbs", 0, 2),
        ("pbs", 1, 2),
    ]
    same_run(ran.folder, embedded)


def test_a_planned_end_goes_on_in_the_next_job_of_a_chain(user: User) -> None:
    first = user.submit("-l", "select=2:ncpus=1", args=TRAINING, APPTRAIN_CHAIN="1")
    run = user.run_dir(first)
    user.until(run / "plan.1.json")
    (run / "stop").touch()
    ran = user.end(first)
    assert ran.status == 75, "\n".join(ran.lines)
    assert ran.said("apptrain")[-1] == "the job will run again, and go on there"
    (second,) = (run / "chain.jobs").read_text().split()
    ran = done(user.end(second))
    assert ran.said("apptrain")[3] == "this run directory has been used before: the run goes on there"
    assert any(re.match(r"resumed from .*/step-000000\d\d: step \d+ of 40", line) for line in ran.lines)
    assert list(metrics.read(run / "metrics.jsonl").loss) == list(range(1, 41))


def test_a_venv_without_an_image_and_without_apptrain_trains_on_two_hosts(user: User) -> None:
    run = user.account.folder(WORK / "runs") / "of a venv"
    env = {**user.account.environment(), "APPTRAIN_HOME": str(REPOSITORY), "APPTRAIN_DEVICE": "cpu"}
    env |= {"CMD": "ddp.py --steps 300", "APPTRAIN_RUN_DIR": str(run)}
    for name in ("ddp.py", "stop.py"):
        user.account.write(WORK / name, (CHECKOUT / "examples" / name).read_text())
    del env["PATH"]  # PBS passes none
    names = ",".join(env)
    line = ("-v", names, "-l", "select=2:ncpus=1", REPOSITORY / "examples/venv.pbs")
    on_disk = user.account.on_disk(run)
    first = user.pbs.submit(*line, cwd=WORK, env=env)
    user.until(on_disk / "plan.1.json")
    (on_disk / "stop").touch()
    assert int(user.pbs.wait(first, limit=BOUND)["Exit_status"]) == 75, user.pbs.printed(first)
    second = user.pbs.submit(*line, cwd=WORK, env=env)
    assert int(user.pbs.wait(second, limit=BOUND)["Exit_status"]) == 0, user.pbs.printed(second)
    printed = user.pbs.printed(first) + user.pbs.printed(second)
    begins = [int(step) for step in re.findall(r"^begins after step (\d+)$", printed, re.M)]
    assert begins[0] == 0 < begins[1] < 300
    ends = re.findall(r"^rank (\d): 300 steps, (\S+)$", printed, re.M)
    assert sorted(rank for rank, _ in ends) == ["0", "1"]
    assert len({total for _, total in ends}) == 1


def test_the_first_failing_ranks_status_is_the_jobs(user: User) -> None:
    ran = user.ran(
        "-l",
        "select=2:ncpus=2",
        args=("--device=cpu", "--nproc-per-node=2", "--", HOME / "else where/fail.py"),
    )
    assert ran.status == 41
    assert ran.said("apptrain")[-1].startswith("status 41: rank 3 on gpu-a02: ")


@pytest.mark.parametrize("how", ["qdel", "walltime"])
def test_a_training_that_pbs_ends_leaves_a_checkpoint_and_no_process(user: User, how: str) -> None:
    more = ("--device=cpu", "--nproc-per-node=2", "--", "-m", "train", *SMALL, "steps=4000")
    id = user.submit("-l", "select=2:ncpus=2", "-l", "walltime=3600", args=more, APPTRAIN_STOP_BEFORE="0")
    run = user.run_dir(id)
    user.until(run / "metrics.jsonl", "\n")  # by its first step each rank saves when it is asked to end
    if how == "qdel":
        user.pbs.delete(id)
    else:
        user.pbs.limit(id, 1)  # however long it took to start
    ran = user.end(id)
    assert ran.status in ((143, 271) if how == "qdel" else (-29,)), "PBS itself has given both after qdel"
    assert "ended by a signal (status 143), not run again by this script" in ran.said("apptrain")[-1], (
        ran.lines
    )
    steps = len((run / "metrics.jsonl").read_text().splitlines())
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{steps:08}"]
    user.nothing_left()


def test_what_saves_when_deleted_still_has_its_image_on_every_host(user: User) -> None:
    assert saved_when_deleted(user, 3) == ["1 wave"] * 3


def saved_when_deleted(user: User, hosts: int, *options: Path | str) -> list[str]:
    """What each host's program saved, of a job that was deleted once all had begun; nothing of it is left."""
    args = (*options, *ONCE, "--", HOME / "else where/save.py")
    id = user.submit("-l", f"select={hosts}:ncpus=1", args=args)
    run = user.run_dir(id)
    for rank in range(hosts):
        user.until(run / f"began.{rank}")
    user.pbs.delete(id)
    user.end(id)
    user.nothing_left()
    return [(run / f"saved.{rank}").read_text() for rank in range(hosts)]


def test_a_naive_script_has_lost_its_image_when_it_would_save(user: User) -> None:
    """What the test before shows is not the double's kindness."""
    run = user.account.folder(WORK / "runs/naive")
    inside = f"APPTRAIN_RUN_DIR={str(run)!r} NODE_RANK=$PBS_NODENUM exec apptainer exec -B /home {SOFTWARE}/image.sif"
    task = f"{inside} python '{HOME}/else where/save.py'"
    lines = ["#!/bin/bash", "trap : TERM", f"pbsdsh -- bash -c {shlex.quote(task)} & wait", "sleep 5"]
    script = user.account.write("naive.pbs", "\n".join(lines) + "\n")
    id = user.submit(
        "-N", "apptrain", "-l", "select=2:ncpus=1", "-l", "place=scatter", "-j", "oe", script=script
    )
    on_disk = user.account.on_disk(run)
    for rank in range(2):
        user.until(on_disk / f"began.{rank}")
    user.pbs.delete(id)
    user.end(id)
    assert not list(on_disk.glob("saved.*"))


@pytest.mark.parametrize("how", ["qdel -W force", "the first host's script is killed"])
def test_a_job_that_is_killed_leaves_no_process_on_any_host(user: User, how: str) -> None:
    id = user.submit("-l", "select=3:ncpus=1", args=(*ONCE, "--", HOME / "else where/save.py"))
    run = user.run_dir(id)
    for rank in range(3):
        user.until(run / f"began.{rank}")
    if how.startswith("qdel"):
        user.pbs.delete(id, "-W", "force")
    else:
        user.account.cluster["gpu-a01"].run(["pkill", "-KILL", "-f", f"mom_priv/jobs/{id}.SC"])
    user.pbs.wait(id, limit=BOUND)
    user.nothing_left()


def test_array_elements_and_packed_chunks_have_runs_of_their_own(user: User) -> None:
    id = user.submit("-J", "2-3", "-l", "select=2:ncpus=1:ngpus=2", "-l", "place=pack", args=TELLING)
    number = id.split("[")[0]
    for index in (2, 3):
        ran = done(user.end(f"{number}[{index}].pbssrv"))
        (told,) = ran.told
        assert told.pop("node") in HOSTS
        run = f"{WORK}/runs/apptrain-{number}_{index}"
        assert told == {"rank": "0", "of": "1", "argv": [], "cwd": str(WORK), "cookie": False, "run": run}


def test_rank_0_alone_is_shown_where_asked_for_and_every_hosts_log_is_whole(user: User) -> None:
    args = ("--show-ranks", "0", *ONCE, "--", HOME / "else where/count.py")
    ran = done(user.ran("-l", "select=3:ncpus=1", args=args))
    lines = [[f"<{rank}:{number}:{rank}>" for number in range(200)] for rank in range(3)]
    log = (ran.folder / "job.log").read_text().splitlines()
    assert [line for line in log if line.startswith("<")] == lines[0]
    assert log == ran.lines
    for rank, host in enumerate(HOSTS):
        assert (ran.folder / f"logs/0/{host}.rank{rank}.out").read_text().splitlines() == lines[rank]


def test_a_host_that_is_cut_off_ends_the_job_within_peer_timeout(user: User) -> None:
    """PBS would take 7 minutes to notice; pbsdsh waits as long."""
    args = ("--peer-timeout", "8", *ONCE, "--", HOME / "else where/save.py")
    id = user.submit("-l", "select=3:ncpus=1", args=args)
    run = user.run_dir(id)
    for rank in range(3):
        user.until(run / f"began.{rank}")
    user.account.cluster.cut("gpu-b07")
    try:
        ran = user.end(id)
    finally:
        user.account.cluster.heal("gpu-b07")
    logs = WORK / f"runs/apptrain-{id.split('.')[0]}/logs/0"
    assert ran.status == 1, ran.lines
    assert ran.said("apptrain")[-1] == (
        f"status 1: gpu-b07: lost: nothing was heard from it for 8 s (logs: {logs})"
    )
    user.nothing_left()


def chosen(user: User, starter: str) -> str:
    """The option's value for this way to start, once the hosts have this mpiexec, as a module would bring it."""
    name, _, flavour = starter.partition(".")
    for host in HOSTS if flavour else ():
        line = f"printf '#!/bin/sh\\nexec /usr/bin/{starter} \"$@\"\\n' >/usr/local/bin/mpiexec && chmod 755 /usr/local/bin/mpiexec"
        user.account.cluster[host].run(["sh", "-c", line]).check_returncode()
    return name


@pytest.mark.parametrize("starter", ["pbs_tmrsh", "ssh", "mpiexec.openmpi", "mpiexec.mpich"])
def test_every_way_to_start_runs_one_task_on_each_host(user: User, starter: str) -> None:
    name = chosen(user, starter)
    arguments = ['it\'s "quoted"', "a,b", "two\nlines", "$HOME *", ""]
    ran = done(user.ran("-l", "select=3:ncpus=1", args=("--start", name, *TELLING, *arguments)))
    assert [(one["node"], one["rank"], one["of"], one["cookie"]) for one in ran.told] == [
        (host, str(rank), "3", False) for rank, host in enumerate(HOSTS)
    ]
    assert {tuple(one["argv"]) for one in ran.told} == {tuple(arguments)}  # type: ignore[arg-type]


@pytest.fixture
def without_ssh(user: User) -> Iterator[User]:
    """Their ssh is refused, and each host has a disk of its own."""
    begin = f"mkdir -p {DISK} && chmod 1777 {DISK}"
    begin += " && printf '#!/bin/sh\\nexit 255\\n' >/usr/local/bin/ssh && chmod 755 /usr/local/bin/ssh"
    for name in HOSTS:
        user.account.cluster[name].run(["sh", "-c", begin]).check_returncode()
    yield user
    for name in HOSTS:
        user.account.cluster[name].run(["rm", "/usr/local/bin/ssh"])


def test_without_ssh_each_host_copies_the_image_for_itself_and_keeps_nothing(without_ssh: User) -> None:
    args = ("--stage", DISK, *ONCE, "--", HOME / "else where/image.py")
    ran = done(without_ssh.ran("-l", "select=2:ncpus=1", args=args))
    folder = f"{DISK}/apptrain-image-2001.pbs-{ran.id.split('.')[0]}"
    assert ran.printed == [f"{name} {folder}/image.sif" for name in HOSTS[:2]]
    assert any(
        line.startswith(f"image: copied to {DISK} on 2 of 2 nodes in ") for line in ran.said("apptrain")
    )
    assert [without_ssh.account.cluster[name].run(["ls", DISK]).stdout for name in HOSTS] == [""] * 3


@pytest.fixture
def of_tcsh(user: User) -> Iterator[User]:
    """Their login shell is tcsh."""
    hosts = [user.account.cluster[name] for name in ("ctl", "login1", *HOSTS)]
    for host in hosts:
        host.run(["usermod", "--shell", "/bin/tcsh", "alice"]).check_returncode()
    yield user
    for host in hosts:
        host.run(["usermod", "--shell", "/bin/bash", "alice"]).check_returncode()


@pytest.mark.parametrize("starter", ["pbsdsh", "ssh", "mpiexec.openmpi"])
def test_a_login_shell_of_another_kind_does_not_matter(of_tcsh: User, starter: str) -> None:
    naive = of_tcsh.ran("-N", "apptrain", "-j", "oe", script=of_tcsh.account.write("naive.pbs", "true\n"))
    assert naive.lines[0].startswith("Warning: no access to tty"), "tcsh's own, before it starts a script"
    name = chosen(of_tcsh, starter)
    ran = done(of_tcsh.ran("-l", "select=2:ncpus=1", args=("--start", name, *TELLING, "a b", "$HOME")))
    assert ran.lines[0].startswith("apptrain: run directory ")
    assert [(one["node"], one["argv"]) for one in ran.told] == [
        (host, ["a b", "$HOME"]) for host in HOSTS[:2]
    ]


@pytest.mark.parametrize("starter", ["pbs_tmrsh", "ssh", "mpiexec.openmpi", "mpiexec.mpich"])
def test_a_job_is_deleted_in_order_whatever_started_its_tasks(user: User, starter: str) -> None:
    assert saved_when_deleted(user, 2, "--start", chosen(user, starter)) == ["1 wave"] * 2


@pytest.mark.parametrize("starter", ["ssh", "mpiexec.openmpi", "mpiexec.mpich"])
def test_a_killed_job_leaves_nothing_whatever_started_its_tasks(user: User, starter: str) -> None:
    name = chosen(user, starter)
    id = user.submit(
        "-l", "select=2:ncpus=1", args=("--start", name, *ONCE, "--", HOME / "else where/save.py")
    )
    for rank in range(2):
        user.until(user.run_dir(id) / f"began.{rank}")
    user.pbs.delete(id, "-W", "force")
    user.pbs.wait(id, limit=BOUND)
    user.nothing_left()


def test_by_hand_ssh_reaches_machines_without_a_scheduler(user: User) -> None:
    process = user.by_hand(
        "--start", "ssh", "--nodes", "gpu-b07,gpu-a02", "--device", "cpu", "--", "-m", "train.hello"
    )
    said, _ = process.communicate(timeout=BOUND)
    assert process.returncode == 0, said
    greetings = [line.partition("] ")[2] for line in said.splitlines() if "hello" in line]
    assert sorted(greetings) == [
        "hello from [gpu-a02:gloo] process 1/2",
        "hello from [gpu-b07:gloo] process 0/2",
    ]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_by_hand_nothing_stays_when_the_script_is_ended(user: User, signum: int) -> None:
    runs = user.account.on_disk(WORK / "runs")
    before = set(runs.glob(BY_HAND))
    process = user.by_hand(
        "--start", "ssh", "--nodes", "gpu-a01,gpu-b07", *ONCE, "--", HOME / "else where/save.py"
    )
    user.account.cluster.until(lambda: set(runs.glob(BY_HAND)) - before, "a run directory", BOUND)
    (run,) = set(runs.glob(BY_HAND)) - before
    user.until(run / "began.1")
    user.until(run / "began.0")
    os.killpg(process.pid, signum)
    said, _ = process.communicate(timeout=BOUND)
    user.nothing_left()
    if signum != signal.SIGKILL:
        assert f"apptrain: ended by a signal (status {128 + signum}), not run again by this script;" in said
        assert [(run / f"saved.{rank}").read_text() for rank in range(2)] == ["1 wave"] * 2


def test_a_dry_run_shows_the_plan_of_every_node(user: User) -> None:
    ran = done(user.ran("-l", "select=3:ncpus=4:ngpus=2", args=("--dry-run", "--", "-m", "train.hello")))
    for rank, host in enumerate(HOSTS):
        mine = [line.partition(": ")[2] for line in ran.lines if line.startswith(f"{rank}: ")]
        assert any(host in line for line in mine), ran.lines
    assert not ran.folder.exists()
