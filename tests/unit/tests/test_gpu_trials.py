"""tests/gpu: what each trial asks for, and what it makes of the answers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device
from benchmarks.bounded import CommandResult
from entrypoint.cli import main as cli
from entrypoint.node import gpu
from entrypoint.node.gpu import DriverReport, Gpu
from entrypoint.plan import commands
from entrypoint.plan.resolve import resolve
from entrypoint.run import launch
from tests.gpu import __main__ as command
from tests.gpu import node_trials, training_trials, trouble_trials
from tests.gpu.trial import Bench, Trial, Wrong
from tests.unit.tests.gpu_machine import BOUND, CHECKOUT, ended
from train import peaks

A100: dict[str, Any] = {
    "name": "NVIDIA A100-SXM4-80GB",
    "memory_bytes": 85_174_583_296,
    "compute_capability": "8.0",
    "sm_clock_mhz": 1275,
    "sm_clock_max_mhz": 1410,
    "memory_clock_mhz": 1593,
    "power_limit_w": 400,
    "bf16_tflops": 249.6,
    "bf16_peak_tflops": 312.0,
    "bf16_peak_source": "NVIDIA A100 Tensor Core GPU datasheet",
}
FACTS: dict[str, Any] = {
    "torch": "2.15.0+cu132",
    "cuda": "13.2",
    "cudnn": 92600,
    "nccl": "2.30.7",
    "driver": "580.65.06",
    "python": "3.13.5",
    "kernels": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
    "gpus": [{**A100, "index": index, "uuid": f"GPU-{index}"} for index in range(2)],
}
FOUND = DriverReport(
    driver="580.65.06", cuda=(13, 0), gpus=(Gpu(name="NVIDIA A100-SXM4-80GB", capability=(8, 0)),) * 2
)


@dataclass(frozen=True, kw_only=True)
class Recorded(Bench):
    """A machine with two A100 that answers as such a one does."""

    answer: Callable[[list[str], Mapping[str, str | None]], CommandResult]
    asked: list[list[str]] = field(default_factory=list)

    def run(self, *argv: str, **env: str | None) -> CommandResult:
        self.asked.append(list(argv))
        return self.answer(list(argv), env)


@pytest.fixture
def bench(tmp_path: Path) -> Recorded:
    return Recorded(
        device="cuda",
        facts=FACTS,
        ranks=2,
        folder=tmp_path,
        env={},
        end=time.monotonic() + BOUND,
        answer=answers,
    )


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def answers(argv: list[str], env: Mapping[str, str | None]) -> CommandResult:
    words = {Path(word).name for word in argv}
    if "check" in words:
        return ended(out=json.dumps(CHECKED))
    if "entrypoint.cli.embedded" in words:
        return ended(out="".join(f"hello from [127.0.0.{n}:nccl] process {n - 1}/2\n" for n in (1, 2)))
    if "loaded.py" in words:
        return ended(out='"/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06"')
    if "devices.py" in words:
        shown = {None: [0, 1], "1": [1], "1,0": [1, 0], "GPU-1": [1]}[env.get("CUDA_VISIBLE_DEVICES")]
        return ended(out=json.dumps([[A100["name"], str(index)] for index in shown]))
    if "forked.py" in words:
        return ended(out='{"before": false, "child": true, "after": false, "parent": true}')
    run = Path(option(argv, "--run-dir"))
    if "train" in words:
        return trained(run, argv)
    if run.name in LAUNCHED:
        return LAUNCHED[run.name](run)
    raise AssertionError(argv)


CHECKED = {
    "cuda_available": True,
    "stack_fits": None,
    "gpu_problem": None,
    "driver": "580.65.06",
    "driver_cuda": "13.0",
    "cuda": "13.2",
    "cudnn": 92600,
    "nccl": "2.30.7",
    "devices": FACTS["gpus"],
}
HELLO = "[tcp://127.0.0.1:29500] hello from [127.0.0.1:nccl] process {}/{}\n"
STUCK = (
    "apptrain: rank 1 on 127.0.0.1, status 124: stuck, no step for 5 s after step 3: it waits for no other rank, and "
    "is in skip.py:13 read_more_data, while 1 of 2 ranks wait in synchronize, skip.py:27 <module>\n"
)
OOM = (
    "apptrain: rank 1 on 127.0.0.1 failed first, status 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 634.62 "
    "GiB. GPU 1 has a total capacity of 79.32 GiB of which 78.41 GiB is free.\n"
)


def hung(run: Path) -> CommandResult:
    folder = run / "stacks" / "0"
    folder.mkdir(parents=True)
    for rank in range(2):
        (folder / f"127.0.0.1.rank{rank}.txt").write_text('  File "/x/skip.py", line 13 in read_more_data\n')
        (folder / f"nccl.rank{rank}").write_bytes(b"\x80\x02}")
    return ended(124, err=STUCK)


LAUNCHED: dict[str, Callable[[Path], CommandResult]] = {
    "hello": lambda _: ended(out=HELLO.format(0, 2) + HELLO.format(1, 2)),
    "uuid": lambda _: ended(out=HELLO.format(0, 1)),
    "none": lambda _: ended(
        64, err="apptrain: --device cuda, but job manual was granted no GPU on this node: ...\n"
    ),
    "beyond": lambda _: ended(
        64, err="apptrain: torch sees no GPU on 127.0.0.1, but the plan is for cuda: ...\n"
    ),
    "unset": lambda _: ended(
        64, err="apptrain: torch sees 2 GPUs on 127.0.0.1: choose --device cuda or --device cpu\n"
    ),
    "hang": hung,
    "memory": lambda _: ended(1, err="Traceback (most recent call last):\n" + OOM),
}


def trained(run: Path, argv: list[str]) -> CommandResult:
    """What a training leaves; its losses fall from 2.4 by 0.05 a step."""
    settings = dict(word.split("=", 1) for word in argv if "=" in word)
    last = int(settings.get("stop_at", settings["steps"]))
    if settings["steps"] == "40" and "stop_at" not in settings and run.name == "parts":
        assert (run / "metrics.jsonl").exists()
    run.mkdir(exist_ok=True)
    rows = [{"step": step, "loss": 2.4 - 0.05 * step} for step in range(1, last + 1)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    saved = {"saved": 1, "failed": 0, "held_s": 0.25}
    result = {"weights_sha256": "ab" * 32, "first_step_s": 6.5, "images_per_s": 4000.0, "checkpoints": saved}
    (run / "result.json").write_text(json.dumps(result))
    for step in range(2, last + 1, 2):
        marker = run / "checkpoints" / f"step-{step:08}" / "complete.json"
        marker.parent.mkdir(parents=True, exist_ok=True)
        digests = {
            "model.safetensors": f"m{step}",
            "optimizer.safetensors": f"o{step}",
            "state.json": run.name,
        }
        marker.write_text(json.dumps({"sha256": digests, "bytes": {}}))
    out = f"digits-short: resnet18 (11.2 M parameters), digits (1437 train, 360 test), {last} steps of 128 images on 2 x cuda (nccl)\n"
    return ended(75 if "stop_at" in settings else 0, out=out)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own list, by what is visible."""

    async def look(env: Mapping[str, str]) -> DriverReport:
        count = 1 if env.get("CUDA_VISIBLE_DEVICES") in ("1", "GPU-1") else 2
        return replace(FOUND, gpus=FOUND.gpus[:count])

    monkeypatch.setattr(gpu, "ask_driver", look)
    monkeypatch.setattr(node_trials, "COMPAT", ())


SAYS: dict[Callable[[Bench], str], str] = {
    node_trials.check: "driver 580.65.06 (CUDA 13.0), NCCL 2.30.7, 2 devices",
    node_trials.fits: (
        "libcuda is /usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06, the driver's own; no forward compatibility is "
        "installed here"
    ),
    node_trials.visibility: (
        "by an index, all in reverse, a UUID, also under the launcher; refused with 64: none, one that is not there, and "
        "no word of GPUs"
    ),
    node_trials.fork: "after torch.cuda.device_count() in the parent a child may too",
    training_trials.hello: "2 ranks on one node over nccl, and 1 on each of two nodes",
    training_trials.reference: "the loss falls from 2.250 to 0.500 in 40 steps, first step after 6.5 s, then 4000 images/s",
    training_trials.mixed: "the loss falls from 2.250 to 0.500 in 40 steps, first step after 6.5 s, then 4000 images/s",
    training_trials.resume: "20 + 20 steps equal 40, weights abababababababab",
    training_trials.saves: "6 saves equal; training was held up 0.25 s by them, 0.25 s where it waits",
    trouble_trials.hang: "one of 2 ranks skips an all_reduce: " + STUCK.removeprefix("apptrain: ").strip(),
    trouble_trials.memory: OOM.removeprefix("apptrain: ")[:160],
}


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("trial", command.TRIALS, ids=lambda trial: trial.name)
def test_a_trial_passes_on_a_machine_that_is_right_and_its_commands_resolve(
    trial: Trial, bench: Recorded
) -> None:
    assert trial.run(bench) == SAYS[trial.run]
    for argv in bench.asked:
        scripts = [Path(word) for word in argv if word.endswith(".py")]
        assert all(script.is_file() for script in scripts)
        if argv[2:5:2] == ["-m", "launch"] and "/none" not in option(argv, "--run-dir"):
            resolves(argv[4:])


def resolves(argv: list[str]) -> None:
    """The launcher's own plan of it, as a node with two visible GPUs would make it."""
    before, cmd = commands.split_command(argv)
    given = vars(cli.parser().parse_args(before))
    env = {"CUDA_VISIBLE_DEVICES": "0,1"}
    plan, _ = resolve(env, given, cmd, hostname=None)
    launch.check(plan)
    assert (plan.mode, plan.device, plan.nproc_per_node, list(plan.command)) == ("torchrun", "cuda", 2, cmd)


def fails(bench: Recorded, run: Callable[[Bench], str], **changes: Callable[[Path], CommandResult]) -> str:
    """What a trial says of a machine on which these launches end otherwise."""

    def answer(argv: list[str], env: Mapping[str, str | None]) -> CommandResult:
        name = Path(option(argv, "--run-dir")).name if "--run-dir" in argv else Path(argv[2]).name
        before = answers(argv, env)
        return (
            changes[name](Path(option(argv, "--run-dir")) if "--run-dir" in argv else Path())
            if name in changes
            else before
        )

    with pytest.raises(Wrong) as wrong:
        run(replace(bench, answer=answer))
    return str(wrong.value)


def test_a_hang_that_names_another_rank_fails_with_what_was_printed(bench: Recorded) -> None:
    other = fails(
        bench, trouble_trials.hang, hang=lambda _: ended(124, err=STUCK.replace("rank 1", "rank 0"))
    )
    assert other.startswith("0 lines begin with 'apptrain: rank 1 on 127.0.0.1, status 124: stuck")
    assert "    apptrain: rank 0 on 127.0.0.1, status 124: stuck" in other


def test_weights_that_differ_after_a_resume_fail(bench: Recorded) -> None:
    def parts(run: Path) -> CommandResult:
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps(result | {"weights_sha256": "cd" * 32}))
        first = len((run / "metrics.jsonl").read_text().splitlines()) == 20
        return ended(75 if first else 0, out="on 2 x cuda (nccl)")

    found = fails(bench, training_trials.resume, parts=parts)
    assert found == f"the weights differ: { ({'whole': 'ab' * 32, 'parts': 'cd' * 32}) }"


def test_a_loss_that_does_not_fall_fails() -> None:
    with pytest.raises(Wrong, match="the loss goes from 2\\.000 to 1\\.500"):
        training_trials._falls({step: 2.0 if step < 6 else 1.5 for step in range(1, 11)})


@pytest.mark.usefixtures("driver")
def test_a_rule_of_ours_that_would_refuse_a_machine_that_computes_fails(bench: Recorded) -> None:
    old = replace(bench, facts={**FACTS, "kernels": ["sm_90", "compute_90"]})
    with pytest.raises(
        Wrong, match=r"torch computes on every GPU here, and we would say: .*has no kernels for GPUs 0, 1"
    ):
        node_trials.fits(old)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (None, "with DIR first CUDA 13.0 starts"),
        ((803, "unsupported combination"), "with DIR first CUDA refuses with error 803, and we say why"),
        ((804, "not on this GPU"), "with DIR first CUDA refuses with error 804, and we say why"),
    ],
)
def test_forward_compatibility_is_tried_where_it_is_installed(
    error: tuple[int, str] | None, says: str, bench: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libcuda.so.1").touch()

    async def look(env: Mapping[str, str]) -> DriverReport:
        return replace(FOUND, error=error if env["LD_LIBRARY_PATH"].startswith(f"{tmp_path}:") else None)

    monkeypatch.setattr(gpu, "ask_driver", look)
    stack = node_trials.stack_of("13.2", FACTS["kernels"])
    there = replace(bench, env={"APPTRAIN_CUDA_COMPAT": str(tmp_path)})
    assert node_trials._forward(there, stack).replace(str(tmp_path), "DIR") == says


def test_kernels_for_one_gpu_alone_and_ptx_are_not_counted() -> None:
    stack = node_trials.stack_of("12.8", ["sm_75", "sm_90a", "sm_100", "sm_120", "compute_120"])
    assert (stack.capabilities, stack.driver) == (((7, 5), (10, 0), (12, 0)), "525")
    assert node_trials.stack_of("14.0", ["sm_90"]).driver == "580"


def test_what_overruns_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from benchmarks import bounded
mark = "setsid sleep 1000 & echo $! >pid; exec sleep 1000"
ended = bounded.run(["sh", "-c", mark], cwd=Path({str(tmp_path)!r}), env={{"PATH": {os.environ["PATH"]!r}}}, seconds=1)
print(ended.status, ended.seconds < 30)
"""
    env = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=env, capture_output=True, text=True, timeout=BOUND
    )
    assert done.stdout == "None True\n", done.stderr
    pid = int((tmp_path / "pid").read_text())
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_a_peak_is_that_of_the_very_model(name: str, peak: float | None) -> None:
    found = peaks.bf16_peak(name)
    assert (found and found[0]) == peak


def test_what_is_started_finds_this_checkout_and_knows_no_scheduler() -> None:
    given = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "1",
        "PBS_JOBID": "2",
        "APPTRAIN_RUN_DIR": "/x",
        "PET_NNODES": "3",
        "APPTRAIN_CUDA_COMPAT": "/compat",
        "PYTHONPATH": f"{CHECKOUT / 'tests'}:/site:{CHECKOUT}",
    }
    path = f"{CHECKOUT / 'src'}:{CHECKOUT}:/site"
    assert device.environment(given) == {
        "PATH": "/bin",
        "APPTRAIN_CUDA_COMPAT": "/compat",
        "PYTHONPATH": path,
    }
