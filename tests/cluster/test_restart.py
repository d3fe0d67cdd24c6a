"""`--on-failure restart` under real Slurm: nodes and workers that are lost, and a run that goes on.

Needs root, for the test cluster. All jobs have a spare node. Nodes are lost by loss of power: no connection is closed.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.account import BOUND, REPOSITORY, SCRIPT, SOFTWARE, WORK, Account, Ran, account, clear
from tests.vcluster.slurm import SETTINGS

NODES = ("gpu-a01", "gpu-a02", "gpu-b07")
RESTART = ("--device", "cpu", "--on-failure", "restart", "--nnodes", "2", "--peer-timeout", "10")
ONCE = (*RESTART, "--mode", "exec")
SMALL = ("--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16", "batch_size=16")
WORKER = """\
import os, pathlib, time
run, attempt = pathlib.Path(os.environ["APPTRAIN_RUN_DIR"]), os.environ["APPTRAIN_ATTEMPT"]
names = ("APPTRAIN_NODE", "NODE_RANK", "NNODES", "MASTER_ADDR")
print(f"attempt {attempt}:", *(os.environ[name] for name in names), flush=True)
told = run / f".pid.{os.environ['APPTRAIN_NODE']}"
told.write_text(str(os.getpid()))
told.rename(run / f"pid.{attempt}.{os.environ['APPTRAIN_NODE']}")
while not (run / "end").exists():
    time.sleep(0.1)
"""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def all_tests_account(request: pytest.FixtureRequest) -> Iterator[Account]:
    with account(request) as found:
        found.write("else where/worker.py", WORKER)
        yield found


@pytest.fixture
def user(all_tests_account: Account) -> Iterator[Account]:
    """The account, on a cluster whose nodes are all idle before and after a test."""
    clear(all_tests_account)
    yield all_tests_account
    for node in set(NODES) - set(all_tests_account.cluster.nodes):
        all_tests_account.cluster.power_on(node)
    clear(all_tests_account)


@pytest.fixture
def patient_slurm(user: Account) -> Iterator[None]:
    """Slurm takes no node down that answers again after a while."""
    user.cluster.configure({"SlurmdTimeout": "300"})
    yield
    user.cluster.configure({"SlurmdTimeout": SETTINGS["SlurmdTimeout"]})


def submit(user: Account, *arguments: Path | str) -> tuple[int, Path]:
    """(a job's number, its run directory on this machine)."""
    nodes = ("-N3", f"--nodelist={','.join(NODES)}", "--cpus-per-task=1", "--no-kill")
    number = user.submit(*nodes, SCRIPT, *arguments)
    return number, user.on_disk(WORK / f"runs/apptrain-{number}")


def work(user: Account) -> tuple[int, Path]:
    return submit(user, *ONCE, "--", "/home/alice/else where/worker.py")


def up(user: Account, run: Path, attempt: int, *nodes: str) -> None:
    """Waits until these nodes work in this attempt."""
    files = [run / f"pid.{attempt}.{node}" for node in nodes]
    user.cluster.until(lambda: all(file.exists() for file in files), f"{nodes} work in {attempt}", BOUND)


def worked(ran: Ran, attempt: int) -> list[str]:
    begin = f"attempt {attempt}: "
    return [line.removeprefix(begin) for line in ran.printed if line.startswith(begin)]


def done(ran: Ran) -> Ran:
    assert ran.ended == ("COMPLETED", 0), ran
    return ran


def test_a_killed_worker_is_followed_by_a_restart_in_the_same_job(user: Account) -> None:
    number, run = work(user)
    up(user, run, 0, "gpu-a01", "gpu-a02")
    pid = (run / "pid.0.gpu-a02").read_text()
    user.cluster["gpu-a02"].run(["kill", "-KILL", pid]).check_returncode()
    up(user, run, 1, "gpu-a01", "gpu-a02")
    (run / "end").touch()
    ran = done(user.end(number))
    assert worked(ran, 1) == ["gpu-a01 0 2 gpu-a01", "gpu-a02 1 2 gpu-a01"]
    assert ran.launched[-6:-4] == [
        f"CMD of node 1 on gpu-a02 failed first, status 137: killed by SIGKILL ({WORK}/runs/apptrain-{number}/logs/0/gpu-a02.rank1.err)",
        "restart 1 inside the allocation, as attempt 1",
    ], ran.text


def test_where_the_first_node_loses_power_the_others_go_on_and_the_job_is_run_again_to_say_how_it_ended(
    user: Account,
) -> None:
    number, run = work(user)
    up(user, run, 0, "gpu-a01", "gpu-a02")
    user.cluster.power_off("gpu-a01")
    up(user, run, 1, "gpu-a02", "gpu-b07")
    (run / "end").touch()
    user.cluster.until(lambda: user.see(number).job.restarts == 1, "the job to be requeued", BOUND)
    user.cluster.power_on("gpu-a01")
    user.cluster.start_requeued(number)
    ran = done(user.end(number))
    assert (run / "outcome/1.nodes").read_text() == "1 gpu-a02\n2 gpu-b07\n"
    assert ran.lines[-1] == f"apptrain: done: {WORK}/runs/apptrain-{number}"
    assert sorted(file.name for file in (run / "logs").iterdir()) == ["0", "1"]


def test_what_slurm_says_of_a_lost_node_counts_before_its_silence_has_lasted_for_the_peer_timeout(
    user: Account,
) -> None:
    """The last --peer-timeout counts: with 240 s, only Slurm's own 30 s can be what makes them go on in time."""
    number, run = submit(user, *ONCE, "--peer-timeout", "240", "--", "/home/alice/else where/worker.py")
    up(user, run, 0, "gpu-a01", "gpu-a02")
    began = time.monotonic()
    user.cluster.power_off("gpu-a02")
    user.until_printed(number, "srun: error: Node failure on gpu-a02")
    said = time.monotonic()
    up(user, run, 1, "gpu-a01", "gpu-b07")
    after = time.monotonic()
    print(
        f"\nSlurm says it {said - began:.1f} s after the loss, the ranks work again after {after - began:.1f} s"
    )
    (run / "end").touch()
    ran = done(user.end(number))
    lost = "the scheduler reports that the node failed, and nothing was heard from it for 15 s"
    assert f"gpu-a02: lost: {lost}" in ran.launched, ran.text
    assert worked(ran, 1) == ["gpu-a01 0 2 gpu-a01", "gpu-b07 1 2 gpu-a01"]


@pytest.mark.usefixtures("patient_slurm")
def test_a_node_that_is_cut_off_makes_no_second_world(user: Account) -> None:
    number, run = submit(user, *ONCE, "--nnodes", "1:2", "--", "/home/alice/else where/worker.py")
    up(user, run, 0, "gpu-a01", "gpu-a02")
    user.cluster.cut("gpu-a02")
    up(user, run, 1, "gpu-a01", "gpu-b07")
    user.cluster.heal("gpu-a02")
    (run / "end").touch()
    ran = done(user.end(number))
    assert worked(ran, 1) == ["gpu-a01 0 2 gpu-a01", "gpu-b07 1 2 gpu-a01"]
    assert not (run / "pid.1.gpu-a02").exists()
    assert (
        "no restart inside the allocation: other nodes run attempt 1: gpu-a02 was cut off from them; "
        "the job script decides what follows"
    ) in ran.launched, ran.text


@pytest.mark.timeout(3 * BOUND)  # it starts torch on two nodes three times
def test_a_training_that_loses_a_node_goes_on_with_a_spare_to_the_same_weights(user: Account) -> None:
    whole = WORK / "runs/whole"
    line = ("python", "-P", "-m", "entrypoint.cli.embedded", "--nodes", "2", "--run-dir", whole)
    inside = (REPOSITORY / "containers/run.sh", SOFTWARE / "image.sif", *line, "--", "-m", "train", *SMALL)
    ended = user.run(*inside, timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    number, run = submit(user, *RESTART, "--", "-m", "train", *SMALL, "checkpoint.every=1")
    saved = run / "checkpoints"
    user.cluster.until(lambda: any(saved.glob("step-*")), "a checkpoint", BOUND)
    user.cluster.power_off("gpu-a02")
    ran = done(user.end(number))
    said = ran.launched
    assert "gpu-a02: lost: nothing was heard from it for 10 s" in said, ran.text
    assert "restart 1 inside the allocation, as attempt 1, without gpu-a02" in said
    assert (run / "outcome/1.nodes").read_text() == "0 gpu-a01\n2 gpu-b07\n"
    found, expected = (
        json.loads((folder / "result.json").read_text()) for folder in (run, user.on_disk(whole))
    )
    assert found["weights_sha256"] == expected["weights_sha256"]
