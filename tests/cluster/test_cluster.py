"""The test cluster itself: that it is a Slurm cluster as sites have them, breaks where it is told to, and leaves nothing.

Needs root. Jobs are small; what they do is what later tests build on.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests import procs
from tests.host import Bind, Refused, root
from tests.host.places import cache, locked
from tests.vcluster import Cluster, Job, find, up
from tests.vcluster.layout import HIGH_SPEED, MEMBERS

CHECKOUT = Path(__file__).resolve().parents[2]
BOUND = 60.0  # s, for what takes a few
pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shown = tmp_path_factory.mktemp("shown")
    (shown / "file").write_text("from this machine")
    shown.chmod(0o755)
    with ExitStack() as down:
        before = os.umask(0o077)  # that of a cautious account, which must not show on a cluster
        try:
            cluster = down.enter_context(up(binds=[Bind(source=shown, target=Path("/shown"))]))
        finally:
            os.umask(before)
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster of the module, idle before and after a test."""
    shared_cluster.wait_idle(BOUND)
    yield shared_cluster
    shared_cluster.controller.run(["scancel", "--state=pending"])
    shared_cluster.controller.run(["scancel", "--state=running", "--signal=KILL"])
    shared_cluster.wait_idle(BOUND)


def ran(cluster: Cluster, *options: str) -> str:
    """What a job of alice has printed, once it has ended well."""
    job = cluster.wait(cluster.submit(list(options)), BOUND)
    text = printed(cluster, job)
    assert (job.state, job.status) == ("COMPLETED", 0), text
    return text


def printed(cluster: Cluster, job: Job) -> str:
    return cluster.login.run(["cat", job.output]).stdout


def until_printed(cluster: Cluster, job: int, word: str) -> None:
    file = cluster.job(job).output
    cluster.until(lambda: word in cluster.login.run(["cat", file]).stdout, f"{word!r} in {file}", BOUND)


def on(cluster: Cluster, host: str, *argv: str) -> str:
    """What a command of alice prints on a host."""
    ended = cluster[host].run(argv, user="alice")
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def answers(cluster: Cluster, name: str, *, tries: int = 20) -> bool:
    """Whether that name answers gpu-a01, which on busy cores may take it more than the second of one try."""
    ping = ["ping", "-c1", "-W1", name]
    return any(cluster["gpu-a01"].run(ping, user="alice").returncode == 0 for _ in range(tries))


def test_partitions_have_idle_nodes_with_and_without_gpus(cluster: Cluster) -> None:
    said = on(cluster, "login1", "sinfo", "--noheader", "--sort=-P,N", "--format=%P %N %G %c %t")
    assert said == (
        "gpu* gpu-a[01-02],gpu-b07 gpu:a100:4 32 idle\n"
        "cpu cpu-c01 (null) 32 idle\n"
        "all cpu-c01 (null) 32 idle\n"
        "all gpu-a[01-02],gpu-b07 gpu:a100:4 32 idle\n"
    )


def test_homes_and_scratch_are_shared_and_tmp_is_not(cluster: Cluster) -> None:
    on(cluster, "gpu-a01", "touch", "/home/alice/home", "/scratch/scratch", "/tmp/tmp")
    assert on(cluster, "gpu-b07", "find", "/home/alice/home", "/scratch/scratch", "/tmp") == (
        "/home/alice/home\n/scratch/scratch\n/tmp\n"
    )
    assert {on(cluster, member.name, "cat", "/shown/file") for member in MEMBERS} == {"from this machine"}
    assert cluster.login.run(["ls", "/home/alice"], user="bob").returncode != 0


def test_a_host_has_two_networks_with_names_for_both_and_no_way_out(cluster: Cluster) -> None:
    said = on(cluster, "gpu-a01", "getent", "ahosts", "gpu-b07-hsn")
    assert said.splitlines()[0].split() == ["10.77.43.27", "STREAM", "gpu-b07-hsn"]
    assert on(cluster, "gpu-a01", "ip", "route") == (
        "10.77.42.0/24 dev eth0 proto kernel scope link src 10.77.42.11 \n"
        "10.77.43.0/24 dev hsn0 proto kernel scope link src 10.77.43.11 \n"
    )
    for name in ("gpu-b07", "gpu-b07-hsn", "gpu-b07-hsn6", "login1"):
        assert answers(cluster, name)


def test_a_node_that_is_cut_off_hears_nothing_until_it_is_healed(cluster: Cluster) -> None:
    def heard(*expected: bool) -> bool:
        names = ("gpu-b07", "gpu-b07-hsn", "gpu-b07-hsn6", "gpu-a02")
        found = [
            answers(cluster, name, tries=20 if one else 1) for name, one in zip(names, expected, strict=True)
        ]
        return found == list(expected)

    try:
        cluster.cut("gpu-b07", HIGH_SPEED)
        assert heard(True, False, False, True)
        cluster.cut("gpu-b07")
        assert heard(False, False, False, True)
        # Neither end is told: the interface is up and has its carrier.
        assert on(cluster, "gpu-b07", "cat", "/sys/class/net/hsn0/operstate") == "up\n"
    finally:
        cluster.heal("gpu-b07")
    assert heard(True, True, True, True)


def test_a_job_on_a_node_that_dies_is_requeued_and_runs_once_the_node_is_back(cluster: Cluster) -> None:
    step = "srun sh -c 'echo on $(hostname); exec sleep 1000'"
    script = f'[ -n "$SLURM_RESTART_COUNT" ] || {step}'
    number = cluster.submit(["--nodes=3", "--open-mode=append", f"--wrap={script}"])
    # A step that is still being launched fails, and the job with it.
    for node in ("gpu-a01", "gpu-a02", "gpu-b07"):
        until_printed(cluster, number, f"on {node}\n")
    cluster.power_off("gpu-a02")
    with pytest.raises(Refused, match=r"^host gpu-a02 of cluster test\.\d+\.\d+ is off: turn it on$"):
        cluster["gpu-a02"]
    with pytest.raises(Refused, match="is off: turn it on"):
        cluster.cut("gpu-a02")
    assert not answers(cluster, "gpu-a02", tries=1)
    cluster.until(lambda: cluster.node_states()["gpu-a02"] == "down*", "the node to be down", 3 * BOUND)
    cluster.power_on("gpu-a02")
    cluster.start_requeued(number, BOUND)
    job = cluster.wait(number, BOUND)
    assert (job.state, job.restarts) == ("COMPLETED", 1), printed(cluster, job)
    assert "CANCELLED" in printed(cluster, job)


def test_a_node_that_is_off_for_a_moment_only_can_be_used_at_once(cluster: Cluster) -> None:
    assert answers(cluster, "gpu-b07")  # from now on its neighbours know its hardware address
    cluster.power_off("gpu-b07")
    cluster.power_on("gpu-b07")
    assert answers(cluster, "gpu-b07")
    assert on(cluster, "login1", "srun", "--nodelist=gpu-b07", "hostname") == "gpu-b07\n"


def test_a_wait_that_takes_too_long_shows_the_ends_of_the_logs(cluster: Cluster) -> None:
    job = cluster.submit(["--hold", "--wrap=true"])
    with pytest.raises(TimeoutError) as error:
        cluster.wait(job, 0.2)
    assert str(error.value).startswith(f"waited 0.2 s for job {job} to end\n==> ")
    assert f"_slurm_rpc_submit_batch_job: JobId={job} " in str(error.value)
    with pytest.raises(
        Refused, match=r"^sbatch ended with 1: sbatch: error: invalid partition specified: none"
    ):
        cluster.submit(["--partition=none", "--wrap=true"])


@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/freezer/cgroup.procs").exists(),
    reason="this machine has no cgroups of version 1",
)
def test_with_cgroups_tasks_see_their_own_gpus_only_and_no_process_outlives_a_job() -> None:
    with up(proctrack="cgroup") as cluster:
        script = 'cat /dev/nvidia* 2>&1 | sort | uniq -c | sort -n; echo "$CUDA_VISIBLE_DEVICES"; setsid sleep 98764 >/dev/null 2>&1 &'
        text = ran(cluster, "--ntasks=1", "--gpus-per-task=1", f"--wrap=srun sh -c '{script}'")
        assert text.splitlines()[-1] == "0"
        assert text.count("Operation not permitted") == 3
        assert "sleep 98764" not in cluster["gpu-a01"].run(["ps", "-ef"]).stdout
        cluster.power_off("gpu-a01")
        cluster.power_on("gpu-a01")
        assert ran(cluster, "--nodes=3", "--wrap=srun true") == ""
    assert list(Path("/sys/fs/cgroup").glob(f"*/apptrain.{cluster.plan.name}.*")) == []


def test_only_the_login_host_of_a_cluster_that_is_online_reaches_the_package_mirrors() -> None:
    with up(online=True) as cluster:
        mirror = on(cluster, "login1", "cat", "/etc/apt/sources.list").split()[1]
        fetch = f"import urllib.request as r; print(r.urlopen('{mirror}dists/trixie/Release', timeout=20).read(7))"
        assert on(cluster, "login1", "python3", "-c", fetch) == "b'Origin:'\n"
        assert "name resolution" in cluster["gpu-a01"].run(["python3", "-c", fetch]).stderr


def left(name: str) -> list[str]:
    """What there is on this machine of a cluster of that name."""
    found = [str(folder) for folder in (cache() / "hosts").glob(f"{name}.*")]
    lines = (line.replace(b"\0", b" ").decode(errors="replace") for _, line in procs.files("cmdline"))
    found += [line for line in lines if f"/{name}." in line]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"/{name}." in line]
    return found + [str(cgroup) for cgroup in Path("/sys/fs/cgroup").glob(f"*/apptrain.{name}.*")]


def links() -> list[str]:
    return sorted(link.name for link in Path("/sys/class/net").iterdir())


def test_a_cluster_leaves_nothing_of_it_and_nothing_in_this_machines_network() -> None:
    before = links()
    with up("gone") as cluster:
        assert links() == before
        assert left(cluster.plan.name) != []
        cluster.submit(["--nodes=3", "--wrap=srun sleep 1000"])
    assert links() == before
    assert left(cluster.plan.name) == []


def test_a_cluster_whose_test_run_was_killed_ends_and_the_next_start_removes_its_folders() -> None:
    script = "import time; from tests.vcluster import up\nwith up('lost') as c: print(c.plan.name, flush=True); time.sleep(99)"
    run = subprocess.Popen([sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    with run:
        assert run.stdout
        name = run.stdout.readline().strip()
        folders = [cache() / "hosts" / f"{name}.{host}" for host in ("switch", *(m.name for m in MEMBERS))]
        assert all(folder.exists() for folder in folders)
        run.send_signal(signal.SIGKILL)
    for folder in folders:  # as soon as the last of its processes has ended
        with suppress(FileNotFoundError), locked(folder / "lock", BOUND):
            pass  # a start beside this test may have removed it already
    with up("next"):
        assert left(name) == []


def test_a_cluster_brought_up_by_hand_is_everyones_until_it_is_taken_down(tmp_path: Path) -> None:
    name = f"byhand{os.getpid()}"

    def tool(command: str, *argv: str) -> tuple[int, str, str]:
        line = [sys.executable, "-m", "tests.vcluster", command, "--name", name, *argv]
        ended = subprocess.run(line, cwd=CHECKOUT, capture_output=True, text=True, timeout=10 * BOUND)
        return ended.returncode, ended.stdout, ended.stderr

    root.make()  # `up` would, and would say so
    not_up = f"cluster: cluster {name} is not up: python -m tests.vcluster up --name {name}\n"
    assert tool("status") == (64, "", not_up)
    is_up = (0, f"{name} is up: python -m tests.vcluster shell --name {name}\n", "")
    try:
        assert tool("up", "--bind", f"{tmp_path}:/mine:rw", "--set", "KillWait=7") == is_up
        assert tool("run", "--", "srun", "-N3", "touch", "here") == (0, "", "")
        assert tool("run", "--on", "gpu-a01", "--user", "root", "--", "touch", "/mine/file") == (0, "", "")
        assert (tmp_path / "file").exists()
        assert "= 7 sec" in tool("run", "--", "sh", "-c", "scontrol show config | grep KillWait")[1]
        assert tool("off", "gpu-b07") == (0, "", "")
        assert "gpu-b07    compute    off " in tool("status")[1]
        is_off = f"cluster: host gpu-b07 of cluster {name} is off: turn it on\n"
        assert tool("run", "--on", "gpu-b07", "--", "true") == (64, "", is_off)
        assert tool("up") == is_up
        assert tool("status")[1] == (
            "ctl        controller on\n"
            "login1     login      on\n"
            "gpu-a01    compute    on  idle\n"
            "gpu-a02    compute    on  idle\n"
            "gpu-b07    compute    on  idle\n"
            "cpu-c01    compute    on  idle\n"
            f"logs: {cache()}/hosts/{name}.switch/shared/log\n"
        )
        assert tool("cut", "gpu-b07", "--network", "hsn0") == (0, "", "")
        found = find(name)
        assert found
        assert not answers(found, "gpu-b07-hsn", tries=1)
        assert tool("heal", "gpu-b07") == (0, "", "")
        assert answers(found, "gpu-b07-hsn")
        assert "slurmctld.log <==" in tool("logs")[1]
    finally:
        assert tool("down") == (0, "", "")
    assert tool("down") == (0, "", "")
    assert find(name) is None
    assert left(name) == []
