"""`slurm/multinode.sbatch` as users submit it: real Slurm, real Apptainer, the real image, an ordinary user.

Needs root, for the test cluster. Where a test is not about ranks that import torch, its job starts a script of a few
lines once on each node (`--mode exec`), which takes a second instead of ten.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from entrypoint.batch.slurm.options import TABLE
from entrypoint.cli import profiles as render
from entrypoint.job import outcome
from tests.cluster.account import (
    BOUND,
    HOME,
    PACKAGES,
    REPOSITORY,
    SCRIPT,
    SOFTWARE,
    USER,
    WORK,
    Account,
    Ran,
    account,
)
from tests.cluster.images import CHECKOUT
from tests.vcluster.slurm import Proctrack
from train import checkpoint, metrics

SMALL = ("--config", "digits-short", "model.name=shufflenet_v2_x0_5", "data.image_size=16", "batch_size=16")
"""40 steps that take a few seconds: the reference job's data and program, a smaller network and smaller images."""
ONCE = ("--device", "cpu", "--mode", "exec")
AT_ONCE = 150.0
"""Seconds for a refusal on two busy cores; without one the nodes would wait 300 s for each other."""
TELL = """\
import json, os, sys
seen = {name: os.environ.get(name) for name in ("MASTER_PORT", "NODE_RANK", "NNODES", "CUDA_VISIBLE_DEVICES")}
seen |= {"node": os.environ["APPTRAIN_NODE"], "argv": sys.argv[1:], "cwd": os.getcwd(), "cpus": len(os.sched_getaffinity(0))}
print(json.dumps(seen | {"gpus": os.environ.get("SLURM_GPUS_ON_NODE"), "run": os.environ["APPTRAIN_RUN_DIR"]}))
"""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


@pytest.fixture(scope="module")
def all_tests_account(request: pytest.FixtureRequest) -> Iterator[Account]:
    with account(request) as found:
        found.write("else where/tell.py", TELL)
        yield found


TELLING = ("--", HOME / "else where/tell.py")


def told(ran: Ran) -> list[dict[str, object]]:
    """What the script TELL printed on each node, in node-rank order."""
    found = [json.loads(line) for line in ran.printed]
    return sorted(found, key=lambda one: str(one["NODE_RANK"]))


def done(ran: Ran) -> Ran:
    assert ran.ended == ("COMPLETED", 0), ran
    return ran


# --- what a user does -------------------------------------------------------------------------------------------


def test_every_rank_of_three_nodes_greets_and_the_first_lines_say_where_the_run_is(user: Account) -> None:
    options = ("--device", "cpu", "--nproc-per-node", "2", "--", "-m", "train.hello")
    ran = done(user.ran("-N3", "--gpus-per-node=2", "--cpus-per-task=6", SCRIPT, *options))
    run = WORK / f"runs/apptrain-{ran.job.id}"
    port = json.loads((ran.folder / "plan.0.json").read_text())["master_port"]
    assert ran.lines[:5] == [
        f"apptrain: run directory {run}",
        f"apptrain: to follow it: tail -f {shlex.quote(f'{run}/job.log')}",
        f"apptrain: job {ran.job.id}, attempt 0, 3 nodes (gpu-a[01-02],gpu-b07), profile none, "
        f"image {REPOSITORY}/containers/image.sif",
        f"apptrain: job {ran.job.id}, attempt 0: 3 nodes x 2 ranks on cpu, mode torchrun, "
        f"rendezvous gpu-a01:{port}, OMP_NUM_THREADS=3",
        "apptrain: network: rendezvous at gpu-a01 (10.77.42.11) [derived:SLURM_STEP_NODELIST], gloo on eth0",
    ]
    places = enumerate(node for node in ("gpu-a01", "gpu-a02", "gpu-b07") for _ in range(2))
    greetings = [f"[tcp://gpu-a01:{port}] hello from [{node}:gloo] process {rank}/6" for rank, node in places]
    assert ran.printed == sorted(greetings)
    assert re.fullmatch("apptrain: preflight: 3 nodes, nothing found, [0-9.]+ s", ran.lines[5])
    (start,) = (line for line in ran.lines[6:] if line.startswith("apptrain: the ranks started after "))
    assert re.search(
        r" s: job script [\d.]+, task [\d.]+, plan and addresses [\d.]+, nodes [\d.]+, .*torch ", start
    )
    rest = [line for line in ran.lines[6:] if line != start]
    assert rest == [line for line in ran.lines if line in greetings] + [f"apptrain: done: {run}"]
    assert (ran.folder / "job.log").read_text() == ran.text


@pytest.fixture(scope="module")
def embedded(all_tests_account: Account) -> Path:
    """The run directory of the small training on two nodes with two ranks each, all on one machine in the image."""
    run = WORK / "runs/embedded"
    line = ("python", "-P", "-m", "entrypoint.cli.embedded", "--nodes", "2", "--nproc-per-node", "2")
    inside = (REPOSITORY / "containers/run.sh", SOFTWARE / "image.sif", *line, "--run-dir", run)
    ended = all_tests_account.run(*inside, "--", "-m", "train", *SMALL, timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    return all_tests_account.on_disk(run)


@pytest.mark.parametrize(
    ("mode", "request_", "options"),
    [
        ("torchrun", ("--cpus-per-task=2",), ("--nproc-per-node", "2")),
        ("rank", ("--ntasks-per-node=2", "--cpus-per-task=1"), ()),
    ],
)
def test_both_launch_modes_train_as_one_machine_does_bit_for_bit(
    user: Account, embedded: Path, mode: str, request_: tuple[str, ...], options: tuple[str, ...]
) -> None:
    ran = done(user.ran("-N2", *request_, SCRIPT, "--device", "cpu", *options, "--", "-m", "train", *SMALL))
    plans = [json.loads(file.read_text()) for file in sorted(ran.folder.glob("plan.*.json"))]
    assert {(plan["mode"], plan["world_size"], plan["nnodes"]) for plan in plans} == {(mode, 4, 2)}
    found, expected = (metrics.read(run / "metrics.jsonl") for run in (ran.folder, embedded))
    assert list(found.loss) == list(range(1, 41))
    assert (found.loss, found.lr, found.accuracy) == (expected.loss, expected.lr, expected.accuracy)
    results = [json.loads((run / "result.json").read_text()) for run in (ran.folder, embedded)]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


SUM = """\
import sys
import torch.distributed as dist
from model import ones  # beside this script
dist.init_process_group("gloo")
found = ones()
dist.all_reduce(found)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {found.tolist()} {sys.argv[1:]}")
dist.destroy_process_group()
"""


def test_a_script_from_elsewhere_runs_unchanged_with_the_module_beside_it_and_its_arguments(
    user: Account,
) -> None:
    user.write("their project/model.py", "import torch\ndef ones():\n    return torch.ones(2)\n")
    script = user.write("their project/train.py", SUM)
    arguments = ["--name", 'it\'s a "test"', "$HOME", "*", "", "--", "--lr", "0.1"]
    ran = done(user.ran("-N2", "-c1", SCRIPT, "--device=cpu", "--", script, *arguments))
    assert ran.printed == [f"rank {rank} of 2: [2.0, 2.0] {arguments}" for rank in range(2)]


WAIT = """\
import os, pathlib, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def meet():
    number = torch.tensor([int(sys.argv[1])])
    dist.all_reduce(number)
    return number.item()
first, folder = meet(), pathlib.Path(sys.argv[2])
(folder / f"{sys.argv[1]}.{dist.get_rank()}").touch()
deadline = time.monotonic() + 300
while len(list(folder.iterdir())) < 4:
    assert time.monotonic() < deadline, list(folder.iterdir())
    time.sleep(0.05)
print(first, meet(), os.environ["MASTER_PORT"])
dist.destroy_process_group()
"""


def test_two_jobs_at_once_on_the_same_nodes_keep_apart(user: Account) -> None:
    script = user.write("both/wait.py", WAIT)
    met = user.folder("both/met")
    nodes = ("-N2", "--nodelist=gpu-a01,gpu-b07", "-c1")
    jobs = [user.submit(*nodes, SCRIPT, "--device=cpu", "--", script, str(number), met) for number in (1, 10)]
    ran = [done(user.end(job)) for job in jobs]
    assert {one.job.nodes for one in ran} == {"gpu-a01,gpu-b07"}
    ports = [json.loads((one.folder / "plan.0.json").read_text())["master_port"] for one in ran]
    assert ran[0].printed == [f"2 2 {ports[0]}"] * 2
    assert ran[1].printed == [f"20 20 {ports[1]}"] * 2
    assert ports[0] != ports[1]


# --- ways to submit ---------------------------------------------------------------------------------------------


def test_the_elements_of_an_array_are_runs_of_their_own(user: Account) -> None:
    first = user.submit("-N2", "--array=3,5", "--output=%x-%A_%a.out", SCRIPT, *ONCE, *TELLING)
    user.cluster.wait(first, BOUND)
    user.cluster.wait(first + 1, BOUND)
    ports = set()
    for index in (3, 5):
        text = user.on_disk(WORK / f"apptrain-{first}_{index}.out").read_text()
        run = f"{WORK}/runs/apptrain-{first}_{index}"
        assert text.splitlines()[0] == f"apptrain: run directory {run}"
        seen = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert sorted((one["node"], one["run"]) for one in seen) == [("gpu-a01", run), ("gpu-a02", run)]
        ports |= {one["MASTER_PORT"] for one in seen}
    assert len(ports) == 2


LAST_FAILS = """
import os, pathlib, sys, time
print("runs", flush=True)
if os.environ["SLURM_ARRAY_TASK_ID"] == "5":
    sys.exit(os.environ["APPTRAIN_ATTEMPT"] == "0")
while not pathlib.Path("go").exists():
    time.sleep(0.1)
"""


def test_the_last_element_of_an_array_runs_again_alone(user: Account) -> None:
    """Its number is the array's, which means all elements to Slurm."""
    script = user.write("else where/last_fails.py", LAST_FAILS)
    options = ("-N1", "--array=3,5", "--output=%x-%A_%a.out", SCRIPT, "--on-failure=requeue", *ONCE)
    array = user.submit(*options, "--", script)
    outputs = [user.on_disk(WORK / f"apptrain-{array}_{index}.out") for index in (3, 5)]

    def runs() -> list[int]:
        return [one.read_text().splitlines().count("runs") if one.exists() else 0 for one in outputs]

    user.cluster.until(lambda: all(runs()), "both to run", BOUND)
    user.cluster.start_requeued(f"{array}_5")
    assert user.cluster.wait(f"{array}_5", BOUND).state == "COMPLETED"
    user.on_disk(WORK / "go").touch()
    assert user.cluster.wait(f"{array}_3", BOUND).state == "COMPLETED"
    assert runs() == [1, 2]


def test_a_job_that_an_element_of_an_array_submits_is_no_element(user: Account) -> None:
    """It has the variables of that array."""
    inner = shlex.join(
        ["sbatch", "--parsable", "-N2", "--output=%j.out", str(SCRIPT), *map(str, (*ONCE, *TELLING))]
    )
    outer = user.submit("-N1", "--array=1", "--output=outer.out", f"--wrap={inner}")
    user.cluster.wait(outer, BOUND)
    number = int(user.on_disk(WORK / "outer.out").read_text())
    assert done(user.end(number)).lines[0] == f"apptrain: run directory {WORK}/runs/apptrain-{number}"


@pytest.mark.parametrize(
    ("cwd", "script", "option"),
    [
        (WORK, SCRIPT, "--export=NONE"),
        (REPOSITORY / "slurm", "multinode.sbatch", "--export=ALL"),
    ],
)
def test_the_checkout_is_found_from_anywhere_and_without_the_users_environment(
    user: Account, cwd: Path, script: Path | str, option: str
) -> None:
    ran = done(user.ran(option, script, *ONCE, *TELLING, "a b", cwd=cwd))
    assert [(one["node"], one["argv"], one["cwd"], one["NNODES"]) for one in told(ran)] == [
        ("gpu-a01", ["a b"], str(cwd), "2"),
        ("gpu-a02", ["a b"], str(cwd), "2"),
    ]
    assert ran.lines[0] == f"apptrain: run directory {cwd}/runs/apptrain-{ran.job.id}"


@pytest.mark.parametrize(
    "begin", ["", "srun --ntasks=1 --nodes=1 --exact --cpu-bind=none --gpus-per-node=2 "]
)
def test_a_job_submitted_by_a_job_is_not_shaped_by_it(user: Account, begin: str) -> None:
    line = f"{begin}sbatch --wait '{SCRIPT}' {' '.join(ONCE)} -- '{HOME}/else where/tell.py'"
    outer = user.write("else where/submit.sh", f"#!/bin/bash\n{line}\n")
    shape = ("--nodes=3", "--ntasks=5", "--gpus-per-node=2", "--cpus-per-task=3", "--mem-per-cpu=100M")
    number = done(user.ran(*shape, "--distribution=cyclic", outer)).job.id
    ran = done(user.end(number + 1))
    assert [(one["node"], one["NNODES"], one["gpus"]) for one in told(ran)] == [
        ("gpu-a01", "2", "1"),
        ("gpu-a02", "2", "1"),
    ]
    assert ran.said("apptrain")[2].startswith(f"job {ran.job.id}, attempt 0, 2 nodes (gpu-a[01-02]), ")


@pytest.mark.parametrize(
    ("setting", "typed"), [("mem_sort", False), ("mem_sort", True), ("use_interactive_step", True)]
)
def test_inside_an_allocation_bash_does_what_sbatch_does(user: Account, setting: str, typed: bool) -> None:
    user.cluster.configure({"LaunchParameters": setting})
    line = ["bash", *map(str, (SCRIPT, *ONCE, *TELLING, "a b"))]
    shape = ("--nodelist=gpu-a[01-02]", "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=4")
    if typed:
        ended = user.run("salloc", *shape, input=f"exec {shlex.join(line)}\n")
    else:
        ended = user.run("salloc", *shape, *line)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert sorted((one["node"], one["argv"], one["gpus"], one["cwd"]) for one in found) == [
        ("gpu-a01", ["a b"], "2", str(WORK)),
        ("gpu-a02", ["a b"], "2", str(WORK)),
    ]
    assert lines[0].startswith(f"apptrain: run directory {WORK}/runs/interactive-")
    assert lines[-1] == lines[0].replace("run directory", "done:")


COLLIDES = {
    "tasks by GPUs": "SLURM_NTASKS_PER_GPU=1",
    "nodes in an order of one's own": f"SLURM_HOSTFILE='{HOME}/else where/hosts'",
}


@pytest.mark.parametrize("case", COLLIDES)
def test_what_a_script_has_set_for_srun_and_srun_refuses_beside_our_words_is_kept_from_it(
    user: Account, case: str
) -> None:
    user.write("else where/hosts", "gpu-a02\ngpu-a01\n")
    words = "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1"
    text = f"""#!/bin/bash
export {COLLIDES[case]}
srun {words} true 2>'{HOME}/else where/srun.txt' && exit 99
exec bash '{SCRIPT}' {shlex.join(ONCE)} -- '{HOME}/else where/tell.py'
"""
    ran = done(
        user.ran("--nodelist=gpu-a[01-02]", "--gpus-per-node=1", user.write("else where/own.sh", text))
    )
    refusal = user.on_disk(HOME / "else where/srun.txt").read_text()
    assert "mutually exclusive" in refusal or "incompatible" in refusal, refusal
    assert [one["node"] for one in told(ran)] == ["gpu-a01", "gpu-a02"]


class Terminal:
    """A shell of an allocation, at a terminal."""

    def __init__(self, user: Account, *salloc: str) -> None:
        line = shlex.join(["salloc", *salloc])
        self._process = user.cluster.login.start(
            ["script", "--quiet", "--return", "--command", line, "/dev/null"],
            user=USER,
            cwd=WORK,
            env=user.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)
        self.text = ""

    def type(self, text: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def until(self, words: str, times: int = 1) -> None:
        self._read(lambda: self.text.count(words) >= times)

    def until_prompt(self) -> None:
        self._read(lambda: self.text.endswith("$ "))

    def end(self) -> None:
        self.until_prompt()
        self.type("exit\n")
        self._read(lambda: self._process.poll() is not None)

    def _read(self, enough: Callable[[], bool]) -> None:
        assert self._process.stdout
        deadline = time.monotonic() + BOUND
        while not enough():
            assert time.monotonic() < deadline, repr(self.text)
            with suppress(BlockingIOError):
                self.text += os.read(self._process.stdout.fileno(), 1 << 16).decode(errors="replace")
            time.sleep(0.02)


def test_ctrl_c_in_an_allocation_ends_the_ranks_and_keeps_the_allocation(user: Account) -> None:
    script = user.write(
        "else where/sleep.py", "import time\nprint('asl' 'eep', flush=True)\ntime.sleep(600)\n"
    )
    terminal = Terminal(user, "--nodelist=gpu-a[01-02]", "--nodes=2", "--gpus-per-node=1")
    terminal.until_prompt()
    terminal.type(f"bash '{SCRIPT}' {' '.join(ONCE)} -- '{script}'; echo status=$?\n")
    terminal.until("asleep\r\n", times=2)
    terminal.type("\x03")
    terminal.until("status=130")
    terminal.until_prompt()
    assert "ended by a signal (status 130), not run again by this script" in terminal.text
    for node in user.cluster.nodes.values():
        assert node.run(["pgrep", "--full", "sleep.py"]).stdout == ""
    terminal.type("echo $(srun hostname | sort)\n")
    terminal.until("gpu-a01 gpu-a02\r\n")
    terminal.end()


# --- site profiles ------------------------------------------------------------------------------------------------

MODULES = """\
module() { if [[ $* == "load apptainer/1.4" ]]; then export HF_LOADED="$*"; fi; }
"""


def test_the_profile_that_names_the_cluster_is_taken_with_its_modules(user: Account) -> None:
    for node in user.cluster.nodes.values():
        node.run(["tee", "/etc/profile.d/modules.sh"], input=MODULES).check_returncode()
    text = "scheduler: slurm\nclusters: [testbed]\ncontainer: {modules: [apptainer/1.4]}\n"
    file = user.on_disk(user.write("app train/clusters/site.yaml", text))
    try:
        render.render(file, write=True)
        script = user.write("else where/loaded.py", "import os\nprint(os.environ['HF_LOADED'])\n")
        ran = done(user.ran("-N2", SCRIPT, *ONCE, "--", script))
    finally:
        file.unlink()
        file.with_suffix(".host").unlink()
    assert ran.lines[2].startswith(
        f"apptrain: job {ran.job.id}, attempt 0, 2 nodes (gpu-a[01-02]), profile {REPOSITORY}/clusters/site.yaml, "
    )
    assert ran.printed == ["load apptainer/1.4"] * 2


def test_a_run_directory_may_lie_behind_a_symlink_that_the_image_knows_nothing_of(user: Account) -> None:
    """As on clusters whose /scratch leads to a file system that is mounted elsewhere."""
    target = HOME / "of a file system"
    user.folder("of a file system")
    for host in (user.cluster.login, *user.cluster.nodes.values()):
        host.run(["ln", "-sfn", target, "/lscratch"]).check_returncode()
    ran = done(user.ran("-N2", SCRIPT, "--run-dir", "/lscratch/new/run", *ONCE, *TELLING))
    assert ran.lines[0] == "apptrain: run directory /lscratch/new/run"
    assert len(told(ran)) == 2
    assert (user.on_disk(target) / "new/run/job.log").read_text() == ran.text


def profile_file(folder: Path, user: Account, text: str) -> tuple[Path, Path]:
    """(here, on the cluster) a profile of the user's with its host file."""
    here = folder / "my site.d" / "lab.yaml"
    here.parent.mkdir()
    here.write_text(text)
    render.render(here, write=True)
    there = user.write("else where/lab.yaml", text)
    user.write("else where/lab.host", here.with_suffix(".host").read_text())
    return here, there


WRAPPED = """scheduler: slurm
nodes: {gpus: 1, cpus: 8, memory_gib: 32}
request: {form: wrapped, gpus: "--gres=gpu:{gpus}", time: "00:10:00"}
"""


@pytest.mark.parametrize("form", ["options of the script", "wrapped"])
def test_the_line_that_submit_renders_is_one_that_sbatch_takes(
    user: Account, tmp_path: Path, form: str
) -> None:
    cluster, there = "generic", Path(f"{REPOSITORY}/clusters/generic.yaml")
    if form == "wrapped":
        here, there = profile_file(tmp_path, user, WRAPPED)
        cluster = str(here)
    arguments = [*ONCE, "--", str(HOME / "else where/tell.py"), "a b"]
    options = ["--cluster", cluster, "--nodes", "2", "--partition", "all", "--time", "00:10:00"]
    rendered = subprocess.run(
        [sys.executable, "-m", "entrypoint.cli.submit", "--dry-run", *options, *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    moved = {str(CHECKOUT): str(REPOSITORY), str(tmp_path / "my site.d/lab.yaml"): str(there)}

    def on_cluster(words: list[str]) -> list[str]:
        for old, new in moved.items():
            words = [word.replace(old, new) for word in words]
        return words

    *words, last = shlex.split(rendered.stdout)
    if form == "wrapped":
        assert last.startswith("--wrap=")
        last = "--wrap=" + shlex.join(on_cluster(shlex.split(last.removeprefix("--wrap="))))
    words = on_cluster([*words, last])
    ended = user.run(*words, cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stderr
    ran = done(user.end(int(ended.stdout.split()[-1])))
    assert [(one["node"], one["argv"], one["gpus"]) for one in told(ran)] == [
        ("gpu-a01", ["a b"], "1"),
        ("gpu-a02", ["a b"], "1"),
    ]
    assert f", profile {there}, " in ran.lines[2]


PROBE = """\
while read -r option; do
    alone=$(sbatch $option </dev/null 2>&1 | head -n 1)
    with=$(sbatch $option=x /nowhere </dev/null 2>&1 | head -n 1)
    case $alone in
        *unrecognized* | *invalid\\ option*) echo "none $option" ;;
        *requires*) echo "valued $option" ;;
        *) [[ $with == *"doesn't allow"* || $option != --* ]] && echo "flags $option" || echo "optional $option" ;;
    esac
done
"""


def test_the_table_of_sbatchs_options_is_that_of_sbatch(user: Account) -> None:
    """Each is asked of the real one: without a script, or with one that is not there, nothing is submitted."""
    asked = "".join(f"{name}\n" for name in (*TABLE.names, "--no-such"))
    found = user.run("bash", "-c", PROBE, input=asked).stdout.splitlines()
    expected = [f"{kind} {name}" for kind in ("valued", "optional", "flags") for name in getattr(TABLE, kind)]
    assert sorted(found) == sorted([*expected, "none --no-such"])


def test_an_image_that_has_no_apptrain_trains_with_the_checkouts(user: Account) -> None:
    """The image without its two packages and without the variable that our recipe sets."""
    environment = user.write("else where/image.sh", "export LC_ALL=C.UTF-8\n")
    nothing = user.folder("else where/nothing")
    hidden = (f"{nothing}:{PACKAGES}/{name}:ro" for name in ("entrypoint", "train"))
    binds = [f"{environment}:/.singularity.d/env/90-environment.sh:ro", *hidden]
    env = {"APPTRAIN_BIND": "\n".join(binds)}
    number = user.submit("-N2", SCRIPT, "--device=cpu", "--", "-m", "train", *SMALL, "steps=3", env=env)
    ran = done(user.end(number))
    assert (
        f"apptrain: the image is not apptrain's, so apptrain itself comes from {REPOSITORY}: no lock says what is in it, "
        "driver and GPUs are not checked against it, and it may lack InfiniBand's libraries"
    ) in ran.lines
    manifest = json.loads((ran.folder / "manifest.json").read_text())
    assert len(manifest["attempts"][0]["image"]["not_promised"]) == 3
    assert 0 <= manifest["attempts"][0]["queued_s"] < 300
    assert [
        one["step"]
        for one in map(json.loads, (ran.folder / "metrics.jsonl").read_text().splitlines())
        if "loss" in one
    ] == [1, 2, 3]


# --- CPUs --------------------------------------------------------------------------------------------------------


def test_a_task_for_each_rank_is_bound_to_cores_of_its_own(request: pytest.FixtureRequest) -> None:
    own = {
        "TaskPlugin": "task/affinity",
        "NodeName": "DEFAULT CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=262144",
    }
    with account(request, settings=own) as user:
        line = "import os\nprint(os.environ['APPTRAIN_NODE'], sorted(os.sched_getaffinity(0)))\n"
        script = user.write("else where/cores.py", line)
        shape = ("--nodes=2", "--mem=1G", "--gpus-per-node=0")
        bound = done(user.ran(*shape, "--ntasks-per-node=2", "-c1", SCRIPT, "--device", "cpu", "--", script))
        assert bound.printed == ["gpu-a01 [0]", "gpu-a01 [1]", "gpu-a02 [0]", "gpu-a02 [1]"]
        both = ("--device", "cpu", "--nproc-per-node", "2")
        whole = done(user.ran(*shape, "--ntasks-per-node=1", "-c2", SCRIPT, *both, "--", script))
        assert whole.printed == ["gpu-a01 [0, 1]"] * 2 + ["gpu-a02 [0, 1]"] * 2
        exclusive = (*both, "--numa-binding", "exclusive")
        apart = done(user.ran(*shape, "--ntasks-per-node=1", "-c2", SCRIPT, *exclusive, "--", script))
        assert apart.printed == bound.printed


# --- GPU requests -----------------------------------------------------------------------------------------------

GPUS = {
    "--gpus-per-node=2": ("torchrun", 2),
    "--gpus-per-node=0 --gpus=8": ("torchrun", 4),  # all of two nodes': fewer may be spread unevenly
    "--gpus-per-node=0 --gres=gpu:a100:2": ("torchrun", 2),
    "--gpus-per-node=2 --ntasks-per-node=2": ("rank", 2),
    "--gpus-per-node=0 --gpus-per-task=1 --ntasks-per-node=2": ("rank", 2),
}


@pytest.mark.parametrize("form", GPUS)
def test_each_way_to_ask_for_gpus_gives_a_rank_for_each_and_all_see_all_of_them(
    user: Account, form: str
) -> None:
    ran = done(user.ran("--nodes=2", *form.split(), SCRIPT, "--dry-run"))
    mode, nproc_per_node = GPUS[form]
    tasks = 4 if mode == "rank" else 2
    world_size, visible = 2 * nproc_per_node, ",".join(map(str, range(nproc_per_node)))
    for field, value in (
        ("mode", mode),
        ("nproc_per_node", nproc_per_node),
        ("device", "cuda"),
        ("world_size", world_size),
    ):
        found = re.findall(rf"^\d: {field:<24} (\S+)", ran.text, re.MULTILINE)
        assert found == [str(value)] * tasks, ran.text
    granted = re.findall(rf"apptrain: (\S+): GPUs were granted \(CUDA_VISIBLE_DEVICES={visible}\)", ran.text)
    assert sorted(granted) == ["gpu-a01", "gpu-a02"]


@pytest.mark.parametrize("form", ["--gpus=8", "--gres=gpu:a100:2"])
def test_another_way_beside_the_job_scripts_own_is_refused_by_sbatch(user: Account, form: str) -> None:
    """The script asks for --gpus-per-node=1: without a 0 there, no job comes into being that would have to guess."""
    ended = user.run("sbatch", "--nodes=2", form, SCRIPT, *ONCE)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.search(r"Invalid (generic resource \(gres\) specification|GRES specification)", ended.stderr), (
        ended.stderr
    )


def test_a_job_that_asks_for_no_gpus_runs_on_cpus_where_it_says_so(user: Account) -> None:
    ran = done(user.ran("--nodes=2", "--gpus-per-node=0", SCRIPT, *ONCE, *TELLING))
    assert [(one["gpus"], one["CUDA_VISIBLE_DEVICES"]) for one in told(ran)] == [(None, None)] * 2


REFUSED = {
    "uneven GPUs": (
        ("--gpus-per-node=0", "--gpus=3"),
        "SLURM_GPUS=3 on 2 nodes, but SLURM_GPUS_ON_NODE=2 on gpu-a01: every node needs the same number: "
        "request --gpus-per-node rather than --gpus",
    ),
    "a heterogeneous job": (
        ("--nodes=1", ":", "--nodes=1", "--partition=cpu"),
        "SLURM_HET_SIZE=2: a heterogeneous job, whose step may leave nodes out unseen: submit one component "
        "(no ':' between requests)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_before_anything_starts(user: Account, case: str) -> None:
    request_, text = REFUSED[case]
    ran = user.ran("--nodes=2", *request_, SCRIPT)
    assert (ran.ended, ran.text) == (("FAILED", 64), f"apptrain: {text}\n")
    assert ran.job.seconds < AT_ONCE


def test_a_step_of_the_job_script_itself_is_refused_by_each_task(user: Account) -> None:
    ended = user.run("srun", "--nodes=2", "--ntasks-per-node=1", "bash", SCRIPT, *ONCE, *TELLING)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("apptrain: ")]
    found = [
        re.fullmatch(r"apptrain: job \d+, step 0: start this script once, not with srun", line)
        for line in lines
    ]
    assert ended.returncode == 64
    assert lines
    assert all(found)


def test_what_a_node_refuses_is_said_once_and_ends_the_job(user: Account) -> None:
    ran = user.ran("--nodes=2", SCRIPT, "--", "-m", "train.hello")
    assert ran.ended == ("FAILED", 64), ran.text
    said = ran.said("apptrain")[-1]
    node = said.removeprefix("status 64: ").partition(":")[0]
    assert node in ("gpu-a01", "gpu-a02")
    text = (
        f"{node}: the plan is for cuda, but {node} has no NVIDIA driver (libcuda.so.1: cannot open shared object file: "
        "No such file or directory): request GPUs, leave the node out if they were granted, or give --device cpu"
    )
    assert said == f"status 64: {text} (logs: {WORK}/runs/apptrain-{ran.job.id}/logs/0)"
    assert ran.job.seconds < AT_ONCE
    seen = re.compile(r"gpu-a0[12]: GPUs were granted .*: CMD will see none")
    (other,) = {"gpu-a01", "gpu-a02"} - {node}
    # srun may end the other node before it has found the same.
    left = [line for line in ran.launched[:-1] if not seen.fullmatch(line)]
    assert left in ([], [f"{other}: ended by SIGTERM"])


def test_a_mistake_ends_the_job_before_anything_is_made(user: Account) -> None:
    ran = user.ran("--nodes=2", SCRIPT, "--device", "cpu", "--", "none.py")
    message = (
        f"CMD none.py does not exist in {WORK}: check the spelling; a module is given as -m NAME, a program that is "
        "no Python script needs --no-python"
    )
    assert ran.ended == ("FAILED", 64), ran.text
    assert ran.lines == [f"apptrain: {message}"]
    assert ran.job.seconds < AT_ONCE
    assert not user.on_disk(WORK / f"runs/apptrain-{ran.job.id}").exists()


def test_a_dry_run_prints_the_plan_of_every_node_and_starts_nothing(user: Account) -> None:
    user.write(WORK / "a b.py", "")
    ran = done(
        user.ran("--nodes=2", "--cpus-per-task=2", SCRIPT, "--device=cpu", "--dry-run", "--", "a b.py")
    )
    head, line, *plans = ran.lines
    plans = [line for line in plans if not line.startswith("apptrain: ")]
    assert head == "apptrain: the launch line, and below the plan of each task:"
    assert shlex.split(line)[0] == "srun"
    assert shlex.split(line)[-5:] == ["entrypoint", "launch", "--device=cpu", "--", "a b.py"]
    assert [int(line.partition(":")[0]) for line in plans] == sorted([0, 1] * (len(plans) // 2))
    for rank, node in enumerate(("gpu-a01", "gpu-a02")):
        mine = [line.removeprefix(f"{rank}: ") for line in plans if line.startswith(f"{rank}: ")]
        assert f"{'node_rank':<24} {rank}  [derived:SLURM_NODEID]" in mine
        assert f"{'rendezvous.local_addr':<24} {node}  [derived:SLURM_STEP_NODELIST]" in mine
        assert mine[-1].split()[0] == "torchrun"
        assert f"--node-rank={rank} " in mine[-1]
    assert not user.on_disk(WORK / f"runs/apptrain-{ran.job.id}").exists()


def test_a_dry_run_of_what_a_node_refuses_ends_with_64(user: Account) -> None:
    ran = user.ran("--gpus-per-node=0", SCRIPT, "--dry-run")
    assert ran.ended == ("FAILED", 64), ran.text
    refusal = f"apptrain: job {ran.job.id} was granted no GPU on this node that slurm tells of: request GPUs, or give --device"
    assert [ran.text.count(f"{rank}: {refusal}") for rank in (0, 1)] == [1, 1]


# --- the end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "options", "tasks"),
    [((), ("--nproc-per-node", "2"), [""]), (("--ntasks-per-node=2", "-c1"), (), [".0", ".1"])],
    ids=["torchrun", "rank"],
)
def test_the_job_ends_with_the_first_failing_ranks_status_and_says_node_rank_and_error(
    user: Account, request_: tuple[str, ...], options: tuple[str, ...], tasks: list[str]
) -> None:
    script = user.write(
        "else where/fail.py",
        """
        import os, sys, time
        if os.environ["RANK"] == "2":
            sys.stderr.write("Traceback (most recent call last):\\nValueError: no more data\\n")
            sys.exit(7)
        time.sleep(600)
        """.replace("\n        ", "\n"),
    )
    ran = user.ran("--nodes=3", *request_, SCRIPT, "--device", "cpu", *options, "--", script)
    assert ran.ended == ("FAILED", 7), ran.text
    run = WORK / f"runs/apptrain-{ran.job.id}"
    assert ran.said("apptrain")[-1] == (
        f"status 7: rank 2 on gpu-a02: ValueError: no more data (logs: {run}/logs/0)"
    )
    assert len(ran.lines) <= 20, ran.text
    found = [outcome.read(ran.folder / f"outcome/0.{node}{task}") for node in range(3) for task in tasks]
    assert [(one.status, one.rank, one.node) for one in found if one] == [(7, 2, "gpu-a02")] * len(found)


STOP = """
import os, pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(os.environ["APPTRAIN_RUN_DIR"], "saved." + os.environ["NODE_RANK"]).touch()
    sys.exit(75)
saved = pathlib.Path(os.environ["APPTRAIN_RUN_DIR"], "saved." + os.environ["NODE_RANK"]).exists()
signal.signal(signal.SIGUSR2, stop)
print("goes on" if saved else "begins", flush=True)
time.sleep(0 if saved else 600)
"""


def test_a_warned_job_saves_is_requeued_and_goes_on_in_the_same_run_directory(user: Account) -> None:
    script = user.write("else where/stop.py", STOP)
    number = user.submit("--nodes=2", SCRIPT, *ONCE, "--", script)
    user.until_printed(number, "begins\n", times=2)
    user.run("scancel", "--batch", "--signal=USR2", str(number)).check_returncode()
    user.cluster.start_requeued(number)
    ran = done(user.end(number))
    assert (ran.printed, ran.job.restarts) == (["begins"] * 2 + ["goes on"] * 2, 1)
    run = WORK / f"runs/apptrain-{number}"
    begins = re.compile(r"run directory|job \d+, attempt \d+, ")
    assert [line for line in ran.said("apptrain") if begins.match(line)] == [
        f"run directory {run}",
        f"job {number}, attempt 0, 2 nodes (gpu-a[01-02]), profile none, image {REPOSITORY}/containers/image.sif",
        f"run directory {run}",
        f"job {number}, attempt 1, 2 nodes (gpu-a[01-02]), profile none, image {REPOSITORY}/containers/image.sif",
    ]
    assert "the job will run again, and go on there" in ran.said("apptrain")


DEAF = """
import os, pathlib, time
once = pathlib.Path(os.environ["APPTRAIN_RUN_DIR"], "began." + os.environ["NODE_RANK"])
print("goes on" if once.exists() else "begins", flush=True)
if not once.exists():
    once.touch()
    time.sleep(600)
"""


def test_a_script_that_catches_nothing_is_ended_before_the_walltime_and_the_job_runs_again(
    user: Account,
) -> None:
    script = user.write("else where/deaf.py", DEAF)
    # Slurm looks for it every 30 s, and may send it 30 s early: not before the job script can take it.
    limits = ("--nodes=2", "--time=2", "--signal=B:USR2@75")
    number = user.submit(*limits, SCRIPT, "--on-failure=requeue", *ONCE, "--", script)
    user.until_printed(number, "begins\n", times=2)
    user.cluster.start_requeued(number, 120)
    ran = done(user.end(number))
    assert (ran.printed, ran.job.restarts) == (["begins"] * 2 + ["goes on"] * 2, 1)
    (why,) = (line for line in ran.said("apptrain") if line.startswith("status 143: "))
    assert re.fullmatch(
        r"status 143: gpu-a0[12]: the job's time is up, and rank [01] on gpu-a0[12] catches no SIGUSR2: "
        r"ended by SIGTERM \(logs: .*/logs/0\)",
        why,
    )


def test_a_cancelled_job_ends_with_143_and_leaves_no_process(user: Account) -> None:
    script = user.write(
        "else where/sleep.py", "import time\nprint('asl' 'eep', flush=True)\ntime.sleep(600)\n"
    )
    number = user.submit("--nodes=2", SCRIPT, *ONCE, "--", script)
    user.until_printed(number, "asleep\n", times=2)
    user.run("scancel", str(number)).check_returncode()
    ran = user.end(number)
    assert ran.job.state == "CANCELLED"
    assert "ended by a signal (status 143), not run again by this script" in ran.text
    for node in user.cluster.nodes.values():
        assert node.run(["pgrep", "--full", "sleep.py"]).stdout == ""


@pytest.mark.timeout(600, func_only=True)
@pytest.mark.parametrize(
    ("proctrack", "tasks"), [("linuxproc", 1), ("linuxproc", 2), ("cgroup", 1), ("cgroup", 2)]
)
def test_a_cancelled_training_saves_its_last_step_whichever_processes_slurm_signals(
    request: pytest.FixtureRequest, proctrack: Proctrack, tasks: int
) -> None:
    """Under linuxproc all of a task, also the one that shows the image; under cgroup its first. Two tasks of a
    node share that one."""
    if proctrack == "cgroup" and not Path("/sys/fs/cgroup/freezer/cgroup.procs").exists():
        pytest.skip("this machine has no cgroups of version 1")
    with account(request, proctrack=proctrack, settings={"KillWait": "120"}) as user:
        number = start_training(user, tasks=tasks)
        mounts = [
            user.cluster[node].run(["pgrep", "-c", "squashfuse"]).stdout for node in ("gpu-a01", "gpu-a02")
        ]
        assert mounts == ["1\n", "1\n"]
        assert newest_checkpoint(user.on_disk(run_of(number))) is None
        user.run("scancel", str(number)).check_returncode()
        ran = user.end(number)
        assert (ran.job.state, ran.job.restarts) == ("CANCELLED", 0), ran.text
        ended = [outcome.read(file) for file in ran.folder.glob("outcome/0.*")]
        expected = [(143, "ended by SIGTERM")] * 2 * tasks
        assert [one and (one.status, one.error) for one in ended] == expected, ran.text
        assert newest_checkpoint(ran.folder) == last_step(ran.folder), ran.text
        assert "Bus error" not in ran.text
        user.cluster.wait_idle()
        for node in ("gpu-a01", "gpu-a02"):
            assert user.cluster[node].run(["pgrep", "-c", "squashfuse"]).stdout == "0\n"
            assert user.cluster[node].run(["find", "/tmp", "-name", "apptrain*"]).stdout == ""


PREEMPTIONS = {
    "after a grace time": ("never", 60, "", "preempted: "),
    "after a grace time with the job's own warning": (
        "auto",
        60,
        "send_user_signal",
        "saved at a planned end",
    ),
    "at once": (
        "never",
        0,
        "",
        "ended by a signal (status 143): slurm runs the job again, and it goes on there",
    ),
}


@pytest.mark.timeout(600, func_only=True)
@pytest.mark.parametrize("case", PREEMPTIONS)
def test_a_preempted_training_loses_no_step_and_goes_on_by_itself(
    request: pytest.FixtureRequest, case: str
) -> None:
    resume, grace, parameters, said = PREEMPTIONS[case]
    settings = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "KillWait": "120"}
    if parameters:
        settings["PreemptParameters"] = parameters
    with account(request, settings=settings) as user:
        for partition in (
            ["PartitionName=gpu", f"GraceTime={grace}"],
            ["PartitionName=all", "PriorityTier=10"],
        ):
            user.cluster.controller.run(["scontrol", "update", *partition]).check_returncode()
        number = start_training(user, "--nodelist=gpu-a[01-02]", ranks=1, resume=resume)
        first = user.submit(
            "--partition=all", "--nodelist=gpu-a01", "--exclusive", "--output=/dev/null", "--wrap=true"
        )
        user.cluster.until(lambda: user.cluster.job(number).state == "PENDING", "the job to wait", BOUND)
        ran = user.see(number)
        folder = user.on_disk(run_of(number))
        step = last_step(folder)
        assert newest_checkpoint(folder) == step, ran.text
        assert (ran.job.restarts, user.cluster.wait(first, BOUND).state) == (1, "COMPLETED"), ran.text
        assert [line for line in ran.said("apptrain") if line.startswith(said)], ran.text
        assert "to go on: the same line again" not in ran.text
        user.cluster.start_requeued(number)
        user.until_printed(
            number, f"resumed from {run_of(number)}/checkpoints/step-{step:08}: step {step} of"
        )


def start_training(user: Account, *options: str, tasks: int = 1, ranks: int = 2, resume: str = "auto") -> int:
    """Submits a training, with so many tasks and ranks on each node, that goes on for minutes and saves nothing by
    itself; returns when it has done five steps."""
    train = ("-m", "train", *SMALL, "--resume", resume, "steps=5000", "checkpoint.minutes=0")
    nodes = ("--nodes=2", f"--ntasks-per-node={tasks}", f"--cpus-per-task={2 // tasks}")
    each = f"--nproc-per-node={ranks}"
    number = user.submit(*options, *nodes, SCRIPT, "--device=cpu", each, "--", *train)
    log = user.on_disk(run_of(number)) / metrics.NAME
    user.cluster.until(lambda: log.exists() and log.read_text().count("\n") >= 5, "five steps", BOUND)
    return number


def run_of(number: int) -> Path:
    return WORK / f"runs/apptrain-{number}"


def last_step(run: Path) -> int:
    return max(metrics.read(run / metrics.NAME).loss)


def newest_checkpoint(run: Path) -> int | None:
    """The step of the newest checkpoint that is whole."""
    return checkpoint.newest_whole(run / "checkpoints")
