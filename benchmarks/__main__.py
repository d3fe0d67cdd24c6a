"""`make bench ARGS="[WHAT ...] [--pairs N]"`: measures, prints, and keeps the figures as JSON.

Two commands alternate, and the ratio is taken pair by pair. The median and the spread of the ratios are
reported; single times are only shown for orientation. `selection`, which chooses the settings of the demo in
about 20 minutes, measures no time. `image`, `imports`, `packing`, `scaling`, `slurm`, `staging` and `start`
need root, `gpu` a GPU, and `loop` the scripts of others. The Python of `gpu` is the machine's own: before
that is measured, nothing here may import a package that only the tests' venv has.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import checkpoints, saves
from benchmarks.gpu import PAIRS, gpu
from benchmarks.gpu import refusal as gpu_refusal
from benchmarks.loop import loop
from benchmarks.loop import refusal as loop_refusal
from benchmarks.output import output
from benchmarks.selection import selection
from entrypoint.core.errors import BAD_INPUT

HERE = Path(__file__).parent
CHECKOUT = HERE.parent
NODES = 16384


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("what", nargs="*", metavar="WHAT", help="default: all")
    parser.add_argument(
        "--pairs", type=int, metavar="N", help=f"alternating pairs (default: 7, of gpu {PAIRS})"
    )
    options = parser.parse_args()
    known = {
        "startup": startup,
        "throughput": throughput,
        "selection": choose,
        "saves": lambda pairs: saves(pairs, _run, _alternate, _spread),
        "checkpoints": lambda pairs: checkpoints(pairs, _run, _alternate, _spread),
        "explain": lambda pairs: _of("explain", pairs),
        "image": lambda pairs: _of("image", pairs),
        "imports": lambda pairs: _of("imports", pairs),
        "loop": loop,
        "output": output,
        "packing": lambda pairs: _of("packing", pairs),
        "scale": lambda pairs: _of("scale", pairs),
        "scaling": lambda pairs: _of("scaling", pairs),
        "slurm": lambda pairs: _of("slurm", pairs),
        "staging": lambda pairs: _of("staging", pairs),
        "start": lambda pairs: _of("start", pairs),
        "gpu": gpu,
    }
    if unknown := set(options.what) - set(known):
        parser.error(f"unknown: {', '.join(unknown)}: choose from {', '.join(known)}")
    incomplete = False
    for name in chosen(options.what, list(known)):
        pairs = options.pairs or (PAIRS if name == "gpu" else 7)
        load = [round(os.getloadavg()[0], 1)]
        found = known[name](pairs)
        load += [round(os.getloadavg()[0], 1)]
        machine = {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before_and_after": load,
        }
        report = {"command": f"make bench ARGS='{name} --pairs {pairs}'", "machine": machine, **found}
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
        print(f"figures kept in benchmarks/results/{name}.json")
        incomplete |= bool(found.get("failed"))
    sys.exit(int(incomplete))


def chosen(what: list[str], known: list[str]) -> list[str]:
    """What is measured: all unless asked for. What needs more than this machine has is refused, or left out
    of all."""
    names = what or known
    for name, refusal in {"gpu": gpu_refusal, "loop": loop_refusal}.items():
        if name in names and (why := refusal(os.environ)):
            if what:
                print(f"bench: {name}: {why}", file=sys.stderr)
                sys.exit(BAD_INPUT)
            print(f"{name} is left out: {why}", flush=True)
            names = [one for one in names if one != name]
    return names


def startup(pairs: int) -> dict[str, Any]:
    """Seconds that the entrypoint takes on top of a bare interpreter, from a checkout without a venv."""
    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "recorded.env"
        env.write_text(
            f"SLURM_JOB_ID=1\nSLURM_JOB_NODELIST=nid[00001-{NODES}]\nSLURM_STEP_ID=0\nSLURM_NODEID=0\n"
            f"SLURM_STEP_NODELIST=nid[00001-{NODES}]\nSLURM_STEP_TASKS_PER_NODE=1(x{NODES})\n"
            f"SLURM_LOCALID=0\n"
            f"SLURM_NNODES={NODES}\nSLURM_PROCID=0\nSLURM_GPUS_ON_NODE=4\nCUDA_VISIBLE_DEVICES=0,1,2,3\n"
        )
        bare = [sys.executable, "-S", "-c", "pass"]
        ours = {
            "help": [sys.executable, "-S", "-m", "entrypoint", "--help"],
            "plan": [sys.executable, "-S", "-m", "entrypoint", "plan", "--json", "--env-file", str(env)],
        }
        found = {}
        for name, command in ours.items():
            seconds = _alternate(lambda: _seconds(command), lambda: _seconds(bare), pairs)  # noqa: B023
            extra = [one - other for one, other in seconds]
            found[name] = {"seconds": seconds, "above_bare_s": _spread(extra)}
            what = f"{name} for {NODES} nodes" if name == "plan" else f"--{name}"
            print(f"{what}: {statistics.median(extra):.3f} s above a bare interpreter ({_range(extra)})")
        return found


def throughput(pairs: int) -> dict[str, Any]:
    """Images per second of the training program under the launcher, over those of a bare DDP loop."""
    steps, warmup = 40, 10
    overrides = ["evaluate.every=0", "checkpoint.every=0", f"steps={steps}"]

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            command = [sys.executable, "-P", "-m", "entrypoint.cli.embedded", "--run-dir", str(run)]
            _run([*command, "--", "-m", "train", "--config", "digits", *overrides])
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seconds = [1 / row["images_per_s"] for row in rows if "loss" in row and row["step"] > warmup]
        return float(len(seconds) / sum(seconds))

    def bare() -> float:
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        out = _run([*torchrun, str(HERE / "ddp_loop.py"), "digits", str(steps), str(warmup), *overrides])
        return float(out.split("images_per_s ")[1].split()[0])

    rates = _alternate(ours, bare, pairs)
    ratios = [one / other for one, other in rates]
    print(
        f"training under the launcher: {statistics.median(ratios):.3f} of a bare DDP loop ({_range(ratios)})"
    )
    return {"images_per_s": rates, "ratio": _spread(ratios)}


def _of(name: str, pairs: int) -> dict[str, Any]:
    """Of the module and function of this name, which imports what the tests stand on."""
    found: dict[str, Any] = getattr(importlib.import_module(f"benchmarks.{name}"), name)(pairs)
    return found


def choose(_: int) -> dict[str, Any]:
    """The settings of the demo, by cross-validation."""
    return selection(CHECKOUT, os.cpu_count() or 1)


def _alternate(one: Callable[[], float], other: Callable[[], float], pairs: int) -> list[tuple[float, float]]:
    """One warm-up of each, then pairs whose order turns, so that a drift of the machine falls on both."""
    one(), other()
    found = []
    for number in range(pairs):
        if number % 2:
            second = other()
            found.append((one(), second))
        else:
            first = one()
            found.append((first, other()))
        print(f"  pair {number + 1} of {pairs}: {found[-1][0]:.3f} and {found[-1][1]:.3f}", flush=True)
    return found


def _run(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def _seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    _run(command)
    return time.perf_counter() - begin


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _range(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}, {len(values)} pairs"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


if __name__ == "__main__":
    main()
