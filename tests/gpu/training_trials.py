"""The launcher and the training program on all GPUs: greetings, falling losses, resuming, saving."""

import json
from collections.abc import Mapping
from statistics import mean

from benchmarks.device import NODE

from .trial import PYTHON, Bench, expect

FALLS_TO = 0.7
"""The last losses' mean, of the first ones'."""
SOME = 5
"""Losses at each end."""
MODEL = ("model.safetensors", "optimizer.safetensors")


def hello(bench: Bench) -> str:
    """Every rank greets over NCCL, and a sum over all is right."""
    backend = "nccl" if bench.device == "cuda" else "gloo"
    ended = bench.launch("hello", "-m", "train.hello")
    expect(ended.status == 0, f"the launcher ended with {ended.status}", ended)
    for rank in range(bench.ranks):
        greeting = f"hello from [{NODE}:{backend}] process {rank}/{bench.ranks}"
        expect(greeting in ended.out, f"no {greeting!r}", ended)
    form = f"{bench.ranks} rank{'s' * (bench.ranks > 1)} on one node over {backend}"
    if bench.device == "cpu" or bench.ranks < 2 or "CUDA_VISIBLE_DEVICES" in bench.env:
        return form
    each = bench.ranks // 2  # Each node of the embedded scheduler gets GPUs by their numbers.
    nodes = ("--nodes", "2", "--gpus-per-node", str(each), "--run-dir", str(bench.folder / "nodes"))
    passed = {"APPTRAIN_PASS": "PYTHONPATH"}
    ended = bench.run(*PYTHON, "-m", "entrypoint.cli.embedded", *nodes, "--", "-m", "train.hello", **passed)
    expect(ended.status == 0, f"two nodes ended with {ended.status}", ended)
    expect(ended.out.count(":nccl] process ") == 2 * each, "not every rank of two nodes greets", ended)
    return f"{form}, and {each} on each of two nodes"


def reference(bench: Bench) -> str:
    """The reference training as it is shipped; its loss falls."""
    return _falls(bench.train("reference")) + f", {_speed(bench, 'reference')}"


def mixed(bench: Bench) -> str:
    """bf16 and channels_last; the loss falls."""
    return (
        _falls(bench.train("mixed", "precision=bf16", "channels_last=true")) + f", {_speed(bench, 'mixed')}"
    )


def _falls(found: Mapping[int, float]) -> str:
    values = [found[step] for step in sorted(found)]
    expect(len(values) >= 2 * SOME, f"only {len(values)} steps")
    first, last = mean(values[:SOME]), mean(values[-SOME:])
    expect(last < FALLS_TO * first, f"the loss goes from {first:.3f} to {last:.3f}")
    return f"the loss falls from {first:.3f} to {last:.3f} in {len(values)} steps"


def _speed(bench: Bench, run: str) -> str:
    result = bench.result(run)
    return f"first step after {result['first_step_s']:.1f} s, then {result['images_per_s']:.0f} images/s"


def resume(bench: Bench) -> str:
    """Half of the steps, and the other half, are the whole bit for bit."""
    half = bench.steps // 2
    whole = bench.train("whole")
    bench.train("parts", f"stop_at={half}", status=75)
    parts = bench.train("parts")
    differ = [step for step in sorted(whole) if parts.get(step) != whole[step]]
    expect(
        not differ,
        f"losses differ from step {differ[:1]} on: {[(whole[s], parts.get(s)) for s in differ[:3]]}",
    )
    digests = {run: bench.result(run)["weights_sha256"] for run in ("whole", "parts")}
    expect(len(set(digests.values())) == 1, f"the weights differ: {digests}")
    return f"{half} + {bench.steps - half} steps equal {bench.steps}, weights {digests['whole'][:16]}"


def saves(bench: Bench) -> str:
    """A save in the background holds the state of its own step: the same bytes as one that is waited for."""
    found, held = [], []
    steps = max(2, bench.steps // 3)
    for number, background in enumerate(("true", "false")):
        run = f"saves-{background}"
        more = ("checkpoint.every=2", "checkpoint.keep=0", f"checkpoint.background={background}")
        bench.train(run, *more, f"steps={steps}")
        found.append(_digests(bench, run) | {"end": bench.result(run)["weights_sha256"]})
        held.append(bench.result(run)["checkpoints"]["held_s"])
        expect(number or len(found[0]) > steps // 2, f"only {sorted(found[0])} were saved")
        bench.forget(run)
    differ = [name for name in found[0] if found[0][name] != found[1].get(name)]
    expect(not differ, f"saved otherwise in the background: {', '.join(differ)}")
    return f"{len(found[0]) - 1} saves equal; training was held up {held[0]:.2f} s by them, {held[1]:.2f} s where it waits"


def _digests(bench: Bench, run: str) -> dict[str, str]:
    """What each checkpoint says of its tensors' files."""
    markers = sorted((bench.folder / run / "checkpoints").glob("step-*/complete.json"))
    return {marker.parent.name: _tensors(json.loads(marker.read_text())) for marker in markers}


def _tensors(marker: Mapping[str, Mapping[str, str]]) -> str:
    return " ".join(marker["sha256"][name] for name in MODEL)
