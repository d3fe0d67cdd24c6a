"""`make bench ARGS=gpu` where there is no GPU: its refusals, what it starts, and what it makes of what they print."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import bounded
from benchmarks import gpu as bench
from benchmarks.bounded import CommandResult
from entrypoint.cli import main as cli
from entrypoint.plan import commands
from entrypoint.plan.resolve import resolve
from entrypoint.run import launch
from train import config

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 60  # s, for anything started here
RESNET, VIT = bench.MODELS
H100 = {
    "index": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "memory_bytes": 85_014_020_096,
    "compute_capability": "9.0",
    "uuid": "GPU-1",
    "sm_clock_mhz": 1755,
    "sm_clock_max_mhz": 1980,
    "memory_clock_mhz": 2619,
    "power_limit_w": 700,
    "bf16_tflops": 790.0,
    "bf16_peak_tflops": 989.0,
    "bf16_peak_source": "NVIDIA H100 Tensor Core GPU datasheet, SXM",
}
FACTS = {"torch": "2.15.0", "gpus": [H100]}


# --- refusals ---------------------------------------------------------------------------------------------


def test_without_a_gpu_it_is_refused_in_one_line_before_anything_is_measured() -> None:
    env = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        ["make", "-s", "bench", "ARGS=gpu --pairs 1", f"PYTHON={sys.executable}", "VENV=/no/venv/is/made"],
        cwd=CHECKOUT,
        env=env | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert (done.returncode, done.stdout) == (2, "")
    line, makes = done.stderr.splitlines()
    assert line.startswith("bench: gpu: torch 2.")
    assert " sees no GPU (" in line
    assert makes.endswith("Error 64")


def test_all_of_the_others_are_measured_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gpu_refusal", lambda _: "torch sees no GPU")
    assert command.chosen([], ["startup", "gpu", "slurm"]) == ["startup", "slurm"]
    assert capsys.readouterr() == ("gpu is left out: torch sees no GPU\n", "")
    with pytest.raises(SystemExit) as ended:
        command.chosen(["startup", "gpu"], ["startup", "gpu"])
    assert ended.value.code == 64
    assert capsys.readouterr() == ("", "bench: gpu: torch sees no GPU\n")


# --- figures ------------------------------------------------------------------------------------------------


def printed(step: int, img_s: float, seconds: float) -> str:
    """As torchvision's script prints a step."""
    return (
        f"Epoch: [0]  [{step:2}/60]  eta: 0:00:21  lr: 0.01  img/s: {img_s}  loss: 2.1523 (2.1523)  acc1: 11.7188 (11.7188)"
        f"  acc5: 64.0625 (64.0625)  time: {seconds:.4f}  data: 0.0120  max mem: 22013\n"
    )


THEIRS = (
    "| distributed init (rank 0): env://\nLoading data\nStart training\n"
    + "".join(
        printed(step, 90.5 if step < 40 else 2400.25, 1.5 if step < 59 else 0.128) for step in range(60)
    )
    + "Epoch: [0] Total time: 0:00:21\nTest:  [0/1]  eta: 0:00:00  loss: 2.1 (2.1)  acc1: 10.9 (10.9)  acc5: 60.9 (60.9)"
    "  time: 0.9000  data: 0.8000  max mem: 22013\nTest:  Acc@1 10.938 Acc@5 60.938\nTraining time 0:00:23\n"
)


def test_torchvisions_rates_are_those_of_its_last_steps() -> None:
    assert bench.their_rates(THEIRS, 256, 2) == {"img_s": pytest.approx(4800.5), "images_per_s": 4000.0}


def metrics(path: Path, steps: int = 60) -> None:
    rates = [100.0 if step <= 40 else (2000.0 if step % 2 else 3000.0) for step in range(1, steps + 1)]
    rows = [{"step": step, "loss": 2.0, "lr": 0.01, "images_per_s": one} for step, one in enumerate(rates, 1)]
    lines = [json.dumps(row) for row in [*rows, {"step": steps, "accuracy": 0.1, "correct": 1, "total": 10}]]
    path.write_text("\n".join(lines) + "\n")


def test_our_rate_is_images_over_time_of_the_last_steps(tmp_path: Path) -> None:
    metrics(tmp_path / "metrics.jsonl")
    assert bench.rate(tmp_path / "metrics.jsonl") == pytest.approx(2400.0)
    metrics(tmp_path / "metrics.jsonl", steps=19)
    with pytest.raises(bench.NoFigure, match="it did 19 steps only"):
        bench.rate(tmp_path / "metrics.jsonl")


def test_a_share_is_of_what_all_gpus_could_do() -> None:
    # 2400 images/s of 24.534 GFLOP are 58.9 TFLOP/s.
    assert bench.shares(2400.0, RESNET, [H100, H100]) == {
        "images_per_s": 2400.0,
        "of_peak": pytest.approx(0.02977, abs=1e-5),
        "of_measured_matmul": pytest.approx(0.03727, abs=1e-5),
    }
    unknown = {**H100, "bf16_peak_tflops": None}
    assert bench.shares(2400.0, RESNET, [H100, unknown])["of_peak"] is None


def test_the_operations_of_an_image_are_those_that_torchvision_counts() -> None:
    found = importlib.util.find_spec("torchvision")
    assert found is not None
    assert found.origin is not None
    sources = Path(found.origin).with_name("models")  # importing it would take seconds
    for model, source, weights in (
        (RESNET, "resnet.py", "ResNet50"),
        (VIT, "vision_transformer.py", "ViT_B_16"),
    ):
        _, _, text = (sources / source).read_text().partition(f"class {weights}_Weights(")
        assert f'"_ops": {model.gmacs},' in text.partition("\nclass ")[0]
    assert [model.gflop for model in bench.MODELS] == pytest.approx([24.534, 105.384])


# --- what is started ----------------------------------------------------------------------------------------


class Machine:
    """One H100 that trains as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.ran: list[list[str]] = []
        self.bench = bench.Bench(
            FACTS, folder, Path("/vision/references/classification/train.py"), time.monotonic() + 60
        )
        self.bench.workers = 16
        monkeypatch.setattr(bounded, "run", self.run)
        monkeypatch.setattr(bench, "write_jpegs", lambda pool, _: (pool / "0000.jpg").touch())
        monkeypatch.setattr(bench, "link_images", lambda *_, **__: None)

    def run(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], seconds: float) -> CommandResult:
        assert 0 < seconds <= bench.RUN_S
        assert cwd.is_dir()
        assert env["OMP_NUM_THREADS"] == "1"
        self.ran.append(list(argv))
        if "train" in argv:
            run = Path(argv[argv.index("--run-dir") + 1])
            run.mkdir()
            metrics(run / "metrics.jsonl")
            return CommandResult(status=0, out="", err="", seconds=1.0)
        return CommandResult(status=0, out=THEIRS, err="", seconds=1.0)

    def names(self) -> list[str]:
        """What was started, in words."""
        words = []
        for argv in self.ran:
            model = next(
                (name.removeprefix("model.name=") for name in argv if name.startswith("model.name=")), ""
            )
            if not model:
                way = argv[argv.index("--start-ranks") + 1] if "--start-ranks" in argv else "torchrun"
                words.append(f"{argv[argv.index('--model') + 1]} theirs, {way}")
            elif "data.name=imagefolder" in argv:
                words.append(f"{model} ours")
            else:
                words.append(f"{model} {'compiled' if 'compile=true' in argv else 'eager'}")
        return words


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def thrice(ratio: float) -> dict[str, Any]:
    """The same ratio in three pairs."""
    return {**dict.fromkeys(("median", "min", "max"), pytest.approx(ratio)), "pairs": 3}


def test_both_models_are_measured_alone_and_then_in_alternating_pairs(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    resnet = ["resnet50 ours", *(f"resnet50 theirs, {way}" for way in ("torchrun", "fork", "spawn"))]
    vit = ["vit_b_16 ours", "vit_b_16 theirs, torchrun"]
    found = machine.bench.all(3)
    assert machine.names() == [
        *("resnet50 eager", "resnet50 compiled", "vit_b_16 eager", "vit_b_16 compiled"),
        *(*resnet, *vit, *reversed(resnet), *reversed(vit), *resnet, *vit),
    ]
    ours = {"ours": pytest.approx(2400.0), "theirs_without_waiting": pytest.approx(2400.25)}
    assert found["beside_torchvision"] == {
        "resnet50": {
            "pairs": [{**ours, "theirs": 2000.0, "forks": 2000.0, "spawns": 2000.0}] * 3,
            "ratios": {"ours": thrice(1.2), "forks": thrice(1.0), "spawns": thrice(1.0)},
        },
        "vit_b_16": {"pairs": [{**ours, "theirs": 1000.0}] * 3, "ratios": {"ours": thrice(2.4)}},
    }
    assert found["alone"]["vit_b_16"]["compiled"]["of_peak"] == pytest.approx(0.2557, abs=1e-4)
    assert (found["failed"], found["batch_a_gpu"]) == ([], {"resnet50": 256, "vit_b_16": 128})
    assert json.loads(json.dumps(found))["gpus"] == FACTS
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "resnet50, eager: 2400 images/s, 6.0% of the datasheets' peak"
    assert lines[4] == "  resnet50, pair 1: ours 2400, theirs 2000, forks 2000, spawns 2000 images/s"
    assert lines[-2:] == [
        "resnet50 on JPEGs: ours 1.200 of torchvision's script (1.200 to 1.200, 3 pairs); that script under our "
        "launcher, forks 1.000 of torchvision's script (1.000 to 1.000, 3 pairs); that script under our launcher, "
        "spawns 1.000 of torchvision's script (1.000 to 1.000, 3 pairs)",
        "vit_b_16 on JPEGs: ours 2.400 of torchvision's script (2.400 to 2.400, 3 pairs)",
    ]


def test_what_no_time_was_left_for_takes_nothing_from_the_rest_of_its_pair(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], seconds: float) -> CommandResult:
        if "--start-ranks" in argv:
            return CommandResult(status=None, out="", err="", seconds=31.0)
        return machine.run(argv, cwd=cwd, env=env, seconds=seconds)

    monkeypatch.setattr(bounded, "run", run)
    found = machine.bench.all(1)
    assert found["beside_torchvision"]["resnet50"]["ratios"] == {"ours": {**thrice(1.2), "pairs": 1}}
    assert found["failed"] == [
        f"resnet50, pair 1, {way}: it was ended after 31 s" for way in ("forks", "spawns")
    ]
    assert "resnet50 on JPEGs: ours 1.200 of torchvision's script (1.200 to 1.200, 1 pair)\n" in (
        capsys.readouterr().out
    )


def test_our_command_resolves_and_its_settings_are_the_programs(machine: Machine, tmp_path: Path) -> None:
    machine.bench.ours(RESNET, images=tmp_path)
    (argv,) = machine.ran
    before, cmd = commands.split_command(argv[4:])
    plan, _ = resolve({}, vars(cli.parser().parse_args(before)), cmd, hostname=None)
    launch.check(plan)
    assert (plan.device, plan.nproc_per_node) == ("cuda", 1)
    name, overrides = cmd[3], cmd[4:]
    used = config.load(config.find(name), overrides)
    config.check_batch(used, plan.world_size)
    assert (used.model.name, used.batch_size, used.steps, used.precision) == ("resnet50", 256, 60, "bf16")
    assert (used.data.name, used.data.path, used.data.workers) == ("imagefolder", str(tmp_path), 16)
    assert (used.channels_last, used.compile, used.deterministic) == (True, False, False)


def test_their_script_is_started_by_torchrun_and_by_our_launcher(machine: Machine) -> None:
    script = [
        *("/vision/references/classification/train.py", "--data-path", "/images", "--model", "vit_b_16"),
        *("--batch-size", "128", "--workers", "16", "--epochs", "1"),
        *("--print-freq", "1", "--lr", "0.01", "--amp", "--output-dir", ""),
    ]
    machine.bench.theirs(VIT, Path("/images"), "torchrun")
    assert machine.ran.pop() == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "1", *script),
    ]
    for way, starts in (("forks", "fork"), ("spawns", "spawn")):
        machine.bench.theirs(VIT, Path("/images"), way)
        (argv,) = machine.ran
        before, cmd = commands.split_command(argv[4:])
        plan, settings = resolve({}, vars(cli.parser().parse_args(before)), cmd, hostname=None)
        assert cmd == script
        assert (plan.device, plan.nproc_per_node, settings.value("start-ranks")) == ("cuda", 1, starts)
        machine.ran.clear()


def test_images_are_the_same_every_time_and_as_many_as_a_pass_needs(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        bench.write_jpegs(tmp_path / name, 2)
    one, other = (
        [file.read_bytes() for file in sorted((tmp_path / name).iterdir())] for name in ("one", "other")
    )
    assert one == other
    assert one[0] != one[1]
    assert all(content.startswith(b"\xff\xd8") and len(content) > 10_000 for content in one)
    bench.link_images(tmp_path / "one", tmp_path / "images", train=20, test=8)
    counts = {part: len(list((tmp_path / "images" / part).glob("class?/*.jpg"))) for part in ("train", "val")}
    assert counts == {"train": 20, "val": 8}
    assert {len(list(folder.iterdir())) for folder in (tmp_path / "images" / "val").iterdir()} == {1}
