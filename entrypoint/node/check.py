"""`apptrain check`: prints what this machine offers to torch, and whether it fits. `check` is the entry.

It asks the driver in a process of its own, starts nothing else, and contacts nobody.
"""

import asyncio
import json
import os
import platform
from collections.abc import Mapping
from typing import Any

from entrypoint.core.plain import counted
from entrypoint.node import gpu

VERDICTS = {True: "fits", False: "does not fit", None: "cannot be told"}


def check(*, as_json: bool) -> int:
    """Prints the facts, and in the last line whether this machine fits. Returns 1 if it does not, 0 also
    where that cannot be told. Raises BadInput where the image does not describe its stack."""
    found = asyncio.run(gpu.ask_driver(os.environ))
    facts = {"python": platform.python_version(), "host": platform.node(), **_of_driver(found, os.environ)}
    if found.silent:
        facts["error"] = "the NVIDIA driver does not answer: torch is not asked, it would wait for it"
    else:
        try:
            facts |= gather()
        except (ImportError, OSError) as error:
            facts["error"] = f"torch cannot be imported: {error}"
    fits, why = judged(facts)
    facts |= {"fits": fits, "verdict": f"{VERDICTS[fits]}: {why}"}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_lines(facts)))
    return int(fits is False)


def _of_driver(found: gpu.DriverReport, env: Mapping[str, str]) -> dict[str, Any]:
    """`stack`: the image's, None outside an image. `stack_fits` the driver and the GPUs: None where there is
    none, or it could not be asked. `gpu_problem`: why not."""
    stack = gpu.stack_of_image(env)
    fits, why = None, found.failed or None
    if stack is not None and (found.driver or found.cuda or found.silent):
        why = gpu.misfit(stack, found, node=platform.node(), visible=env.get("CUDA_VISIBLE_DEVICES"))
        fits = why is None
    return {
        "driver": found.driver,
        "driver_cuda": ".".join(map(str, found.cuda)) if found.cuda else None,
        "stack": stack.name if stack else None,
        "stack_fits": fits,
        "gpu_problem": why,
    }


def judged(facts: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Whether training on GPUs can work here, None where that cannot be told, and why."""
    if why := facts.get("error") or (facts["stack_fits"] is False and facts["gpu_problem"]):
        return False, why
    gpus = len(facts["devices"])
    if facts["cuda"] is None:
        return None, f"torch {facts['torch']} is built for CPUs; on CPUs it works"
    if facts["driver"] is None and not gpus:
        why = facts["gpu_problem"] or "no NVIDIA driver here, as on most login nodes"
        return None, f"{why}: run it in a job on a node with GPUs; on CPUs it works"
    if not facts["cuda_available"] or not gpus:
        return False, f"there is a driver, but torch {facts['torch']} sees no GPU: request one"
    what = f"stack {facts['stack']}" if facts["stack"] else f"torch {facts['torch']} (no image's stack here)"
    return True, f"{what} has its driver and {counted(gpus, 'GPU')}"


def gather() -> dict[str, Any]:
    """Versions as strings (None: this torch has no such part); devices with memory in bytes."""
    import torch
    import torch.distributed as dist

    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "gloo": dist.is_gloo_available(),
        "cuda_available": torch.cuda.is_available(),
        "cpu_threads": torch.get_num_threads(),
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
    }


def _device(index: int) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": found.name,
        "memory_bytes": found.total_memory,
        "compute_capability": f"{found.major}.{found.minor}",
    }


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [
        f"{name:<15} {'none' if value is None else value}"
        for name, value in facts.items()
        if name not in ("devices", "fits", "verdict")
    ]
    for device in facts.get("devices", []):
        memory = device["memory_bytes"] / 2**30
        capability = device["compute_capability"]
        lines.append(
            f"GPU {device['index']}: {device['name']}, {memory:.1f} GiB, compute capability {capability}"
        )
    return [*lines, f"{'verdict':<15} {facts['verdict']}"]
