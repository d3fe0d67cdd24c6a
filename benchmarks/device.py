"""Describes this machine's GPUs as torch, the driver and NVML see them, and how fast they multiply. `ask` is
the entry.

The answers come from a process of its own, with a time limit: if a driver hangs, that process hangs.

    python -P -m benchmarks.device [--matmul]     prints one JSON object
"""

import ctypes
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from benchmarks import bounded
from entrypoint.node import check, driver
from train.peaks import bf16_peak

CHECKOUT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = {
    **{name: name for name in ("torch", "torchvision", "numpy", "safetensors", "tqdm", "matplotlib")},
    "yaml": "pyyaml",
    "psutil": "psutil",
    "tensorboard": "tensorboard",
}
"""What the launcher and the training program import, and pip's names of it."""
NODE: Final = "127.0.0.1"
ANSWER_S: Final = 90.0
"""For torch to be imported from a cold disk, and for the driver to answer."""
SIZE: Final = 8192
SM, MEMORY = 1, 2
"""Of NVML's enumeration nvmlClockType_t."""


class Unready(Exception):
    """No GPU can be used here: why, and what to do, in one line."""


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """For a process that finds this checkout's modules, and no words of a scheduler or of torchrun."""
    foreign = ("SLURM_", "PBS_", "TORCHELASTIC_", "PET_", "APPTRAIN_", "PYTHONSAFEPATH")
    image = ("APPTRAIN_STACK", "APPTRAIN_IMAGE_ID", "APPTRAIN_CUDA_COMPAT")
    kept = {name: value for name, value in env.items() if name in image or not name.startswith(foreign)}
    ours = [str(CHECKOUT / "src"), str(CHECKOUT)]
    known = {*ours, str(CHECKOUT / "tests")}
    others = [part for part in env.get("PYTHONPATH", "").split(":") if part and part not in known]
    return kept | {"PYTHONPATH": ":".join([*ours, *others])}


def launcher(run: Path) -> list[str]:
    """The launcher on this node alone; options, `--` and CMD follow."""
    node = ("--scheduler", "manual", "--nodes", NODE, "--node-rank", "0", "--master-port", str(_free_port()))
    return [sys.executable, "-P", "-m", "entrypoint", "launch", *node, "--run-dir", str(run)]


def _free_port() -> int:
    """For torch's store; the port behind it, of the join, is not used with a single node."""
    with socket.socket() as sock:
        sock.bind((NODE, 0))
        return int(sock.getsockname()[1])


def commit(checkout: Path) -> str | None:
    """The revision that git names; None where it does not, or the folder is no checkout of its own."""
    argv = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=True).stdout
        top, revision = said.splitlines()
        return revision if Path(top).samefile(checkout) else None
    return None


def missing() -> list[str]:
    """The packages that this Python lacks, by pip's names."""
    return [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]


def ask(env: Mapping[str, str], *, matmul: bool = False) -> dict[str, Any]:
    """What `_facts` finds. Raises Unready where there is no GPU that torch can use."""
    if lacking := missing():
        raise Unready(
            f"{sys.executable} lacks {', '.join(lacking)}: install that, or give another Python with "
            "PYTHON=FILE"
        )
    argv = [sys.executable, "-P", "-m", "benchmarks.device", *(["--matmul"] if matmul else [])]
    ended = bounded.run(argv, cwd=CHECKOUT, env=environment(env), seconds=ANSWER_S)
    if ended.status is None:
        raise Unready(
            f"torch and the driver did not answer within {ANSWER_S:.0f} s: see nvidia-smi and dmesg"
        )
    if ended.status:
        last = ended.err.strip().splitlines()[-1:]
        raise Unready(f"torch cannot be asked: {': '.join([f'status {ended.status}', *last])}")
    facts: dict[str, Any] = json.loads(ended.out)
    if not facts["gpus"]:
        raise Unready(_no_gpu(facts, env))
    return facts


def _no_gpu(facts: Mapping[str, Any], env: Mapping[str, str]) -> str:
    if not facts["cuda"]:
        return f"torch {facts['torch']} is built without CUDA: give a Python with a CUDA torch, PYTHON=FILE"
    shown = env.get("CUDA_VISIBLE_DEVICES")
    visible = "CUDA_VISIBLE_DEVICES is not set" if shown is None else f"CUDA_VISIBLE_DEVICES={shown}"
    found = f"driver {facts['driver']}" if facts["driver"] else "no NVIDIA driver is found"
    return f"torch {facts['torch']} sees no GPU ({found}, {visible}): use a machine with an NVIDIA GPU"


def one_line(facts: Mapping[str, Any]) -> str:
    """Such as `2 x NVIDIA A100-SXM4-80GB, driver 580.65.06, torch 2.15.0`."""
    names = [gpu["name"] for gpu in facts["gpus"]]
    each = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{each}, driver {facts['driver']}, torch {facts['torch']}"


def table(facts: Mapping[str, Any]) -> str:
    """What a benchmark's reader needs, aligned."""
    rows = [(name, facts[name]) for name in ("driver", "torch", "cuda", "cudnn", "nccl", "python")]
    for gpu in facts["gpus"]:
        which = f"GPU {gpu['index']}"
        capability = gpu["compute_capability"]
        rows += [
            (which, f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB, compute capability {capability}"),
            ("  SM clock", _clock(gpu)),
            ("  bf16 matmul", _rate(gpu)),
        ]
    return "\n".join(f"{name:<15}{value}" for name, value in rows)


def _clock(gpu: Mapping[str, Any]) -> str:
    if gpu["sm_clock_mhz"] is None:
        return "unknown (NVML does not answer)"
    return (
        f"{gpu['sm_clock_mhz']} MHz after the products, {gpu['sm_clock_max_mhz']} at most; memory "
        f"{gpu['memory_clock_mhz']} MHz; power limit {gpu['power_limit_w']} W"
    )


def _rate(gpu: Mapping[str, Any]) -> str:
    peak = gpu["bf16_peak_tflops"]
    of = (
        f"{gpu['bf16_tflops'] / peak:.1%} of {peak:g} ({gpu['bf16_peak_source']})"
        if peak
        else "peak not known"
    )
    return f"{gpu['bf16_tflops']:.0f} TFLOP/s at {SIZE} x {SIZE} x {SIZE}, {of}"


def _facts(*, matmul: bool) -> dict[str, Any]:
    """Clocks in MHz, None where NVML does not tell. `bf16_tflops` only with `matmul`."""
    import torch

    found = check.gather()
    facts = {name: found[name] for name in ("torch", "cuda", "cudnn", "nccl")}
    gpus = []
    for device in found["devices"]:
        uuid = f"GPU-{torch.cuda.get_device_properties(device['index']).uuid}"
        rate = {"bf16_tflops": _tflops(device["index"])} if matmul else {}
        peak, source = bf16_peak(device["name"]) or (None, None)
        gpus.append(
            {**device, "uuid": uuid, **rate, **_clocks(uuid)}
            | {"bf16_peak_tflops": peak, "bf16_peak_source": source}
        )
    return {
        **facts,
        "driver": driver.ask(driver.VERSION_FILE)["driver"],
        "python": sys.version.split()[0],
        "kernels": torch.cuda.get_arch_list(),
        "gpus": gpus,
    }


def _tflops(index: int) -> float:
    """Of a product of random matrices: the median of 5 times 10, after 3."""
    import torch

    torch.cuda.set_device(index)
    left, right = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    for _ in range(3):
        torch.mm(left, right, out=out)
    milliseconds = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(10):
            torch.mm(left, right, out=out)
        end.record()
        end.synchronize()
        milliseconds.append(begin.elapsed_time(end) / 10)
    return float(2 * SIZE**3 / statistics.median(milliseconds) / 1e9)


def _clocks(uuid: str) -> dict[str, int | None]:
    found: dict[str, int | None] = dict.fromkeys(
        ("sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_mhz", "power_limit_w")
    )
    with suppress(OSError, AttributeError, driver.DriverError):
        call = driver.library("libnvidia-ml.so.1")
        device, value = ctypes.c_void_p(), ctypes.c_uint()
        call("nvmlInit_v2")
        call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
        for name, function, *which in (
            ("sm_clock_mhz", "nvmlDeviceGetClockInfo", SM),
            ("sm_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", SM),
            ("memory_clock_mhz", "nvmlDeviceGetClockInfo", MEMORY),
            ("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit"),
        ):
            call(function, device, *which, ctypes.byref(value))
            found[name] = value.value // (1000 if name.endswith("_w") else 1)  # NVML's milliwatts
    return found


def main(argv: Sequence[str]) -> None:
    print(json.dumps(_facts(matmul="--matmul" in argv)), flush=True)
    os._exit(0)  # nothing of CUDA is to be taken down in an order of Python's choosing


if __name__ == "__main__":
    main(sys.argv[1:])
