"""Driver, stack and devices: whether what we ask the driver is what torch finds, and our refusals are right."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks import device
from benchmarks.bounded import CommandResult
from benchmarks.device import NODE
from entrypoint.node import gpu
from entrypoint.node.gpu import DriverReport, ImageStack

from .trial import PYTHON, Bench, expect

LEAST_DRIVER = {11: "450.80.02", 12: "525", 13: "580"}
"""By CUDA's major version, as in containers/stacks.yaml."""
COMPAT = ("/usr/local/cuda/compat", "/usr/local/cuda/compat/lib")
ORDERS = ("PCI_BUS_ID", "FASTEST_FIRST")


def check(bench: Bench) -> str:
    """`check --json` tells what torch finds."""
    ended = bench.run(*PYTHON, "-m", "entrypoint", "check", "--json")
    expect(ended.status == 0, f"check ended with {ended.status}", ended)
    said = json.loads(ended.out)
    cuda = bench.device == "cuda"
    expect(said["cuda_available"] is cuda, f"cuda_available is {said['cuda_available']}", ended)
    names = [(one["name"], one["memory_bytes"], one["compute_capability"]) for one in said["devices"]]
    expected = [(one["name"], one["memory_bytes"], one["compute_capability"]) for one in bench.gpus]
    expect(names == expected, f"devices are not {expected}", ended)
    if cuda:
        for name in ("driver", "driver_cuda", "cuda", "cudnn", "nccl"):
            expect(said[name], f"{name} is not told", ended)
    expect(said["stack_fits"] is not False, f"gpu_problem: {said['gpu_problem']}", ended)
    return f"driver {said['driver']} (CUDA {said['driver_cuda']}), NCCL {said['nccl']}, {len(names)} devices"


def fits(bench: Bench) -> str:
    """torch computes here, so our rule must say that it fits; and it must refuse what would not."""
    loaded = bench.ask("loaded.py")
    found = _look(bench)
    expect(found.driver and found.cuda and not found.error, f"the driver says {found}")
    expected = [(one["name"], one["compute_capability"]) for one in bench.gpus]
    seen = [(one.name, ".".join(map(str, one.capability))) for one in found.gpus]
    expect(seen == expected, f"the driver lists {seen}, torch {expected}")
    stack = stack_of(bench.facts["cuda"], bench.facts["kernels"])
    says = gpu.misfit(stack, found, node=NODE, visible=None)
    expect(says is None, f"torch computes on every GPU here, and we would say: {says}")
    newer = dataclasses.replace(stack, cuda="99.0", driver="9999")
    says = gpu.misfit(newer, found, node=NODE, visible=None) or ""
    expect(
        f"needs NVIDIA driver 9999 or newer, but {NODE} has {found.driver}" in says, f"refused as {says!r}"
    )
    older = dataclasses.replace(stack, capabilities=((1, 0),))
    says = gpu.misfit(older, found, node=NODE, visible=None) or ""
    expect(re.search(r"has no kernels for GPUs? 0\b", says), f"refused as {says!r}")
    return f"libcuda is {loaded}, {compatibility(loaded, found)}; {_forward(bench, stack)}"


def stack_of(cuda: str, kernels: Sequence[str]) -> ImageStack:
    """This Python's torch as a stack. `kernels`: torch.cuda.get_arch_list(), such as sm_90; what is compiled
    for one GPU alone (sm_90a) and PTX (compute_90) do not count."""
    capabilities = [found for name in kernels if (found := re.fullmatch(r"sm_(\d+)(\d)", name))]
    return ImageStack(
        name="of this Python",
        cuda=cuda,
        driver=LEAST_DRIVER.get(int(cuda.split(".")[0]), LEAST_DRIVER[max(LEAST_DRIVER)]),
        capabilities=tuple((int(found[1]), int(found[2])) for found in capabilities),
    )


def compatibility(loaded: str, found: DriverReport) -> str:
    """Whether the libcuda that torch has loaded is the driver's own."""
    name = Path(loaded).name
    if found.driver and name.endswith(found.driver) and "compat" not in loaded:
        return "the driver's own"
    version = name.removeprefix("libcuda.so.")
    return (
        f"of forward compatibility ({version}, driver {found.driver})"
        if version[:1].isdigit()
        else "of unknown version"
    )


def _forward(bench: Bench, stack: ImageStack) -> str:
    """What follows where the forward compatibility of this machine's CUDA is asked for, if it has one."""
    wanted = [bench.env.get("APPTRAIN_CUDA_COMPAT", ""), *COMPAT]
    folder = next((name for name in wanted if name and (Path(name) / "libcuda.so.1").exists()), None)
    if folder is None:
        return "no forward compatibility is installed here"
    path = f"{folder}:{bench.env.get('LD_LIBRARY_PATH', '')}"
    found = _look(bench, LD_LIBRARY_PATH=path)
    if not found.error:
        return f"with {folder} first CUDA {'.'.join(map(str, found.cuda or ()))} starts"
    code, _ = found.error
    says = gpu.misfit(stack, found, node=NODE, visible=None) or ""
    known = (gpu.DRIVER_MISMATCH, gpu.NO_FORWARD_COMPATIBILITY)
    expect(
        code in known and "APPTRAIN_CUDA_COMPAT" in says,
        f"with {folder} error {found.error}, said as {says!r}",
    )
    return f"with {folder} first CUDA refuses with error {code}, and we say why"


def _look(bench: Bench, **env: str) -> DriverReport:
    return asyncio.run(gpu.ask_driver(device.environment(bench.env) | env))


def visibility(bench: Bench) -> str:
    """CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER mean to us what they mean to torch; none is refused."""
    for order in ORDERS:
        names = [name for name, _ in bench.ask("devices.py", CUDA_DEVICE_ORDER=order)]
        seen = [one.name for one in _look(bench, CUDA_DEVICE_ORDER=order).gpus]
        expect(seen == names, f"CUDA_DEVICE_ORDER={order}: the driver lists {seen}, torch {names}")
    every = bench.ask("devices.py")
    expect(len(every) == bench.ranks, f"torch lists {every}")
    given = bench.env.get("CUDA_VISIBLE_DEVICES")
    ids = given.split(",") if given else [str(index) for index in range(len(every))]
    _shows(bench, ids[-1], every[-1:])
    forms = ["an index"]
    if len(every) > 1:
        _shows(bench, ",".join(reversed(ids)), every[::-1])
        forms.append("all in reverse")
    name, uuid = every[-1]
    if " MIG " not in name:
        _shows(bench, f"GPU-{uuid}", every[-1:])
        ended = bench.launch("uuid", "-m", "train.hello", options=(), CUDA_VISIBLE_DEVICES=f"GPU-{uuid}")
        expect(ended.status == 0, f"the launcher ended with {ended.status}", ended)
        expect(f"hello from [{NODE}:nccl] process 0/1" in ended.out, "not one rank on that GPU", ended)
        forms.append("a UUID, also under the launcher")
    none = {"CUDA_VISIBLE_DEVICES": ""}
    _refused(bench.launch("none", "-m", "train.hello", options=("--device", "cuda"), **none), "no GPU")
    beyond = {"CUDA_VISIBLE_DEVICES": "99"}
    _refused(bench.launch("beyond", "-m", "train.hello", options=(), **beyond), "torch sees no GPU|=99:")
    unset = bench.launch("unset", "-m", "train.hello", options=(), CUDA_VISIBLE_DEVICES=None)
    _refused(unset, "choose --device cuda or --device cpu")
    return f"by {', '.join(forms)}; refused with 64: none, one that is not there, and no word of GPUs"


def _shows(bench: Bench, value: str, expected: Sequence[object]) -> None:
    seen = bench.ask("devices.py", CUDA_VISIBLE_DEVICES=value)
    expect(seen == expected, f"CUDA_VISIBLE_DEVICES={value} shows {seen}, not {expected}")
    found = _look(bench, CUDA_VISIBLE_DEVICES=value)
    names = [one.name for one in found.gpus]
    expect(names == [name for name, _ in seen], f"CUDA_VISIBLE_DEVICES={value}: the driver lists {names}")


def _refused(ended: CommandResult, words: str) -> None:
    """`words`: a pattern; inside an image the driver is asked before torch, and what is said is another line."""
    lines = ended.err.splitlines()
    said = [line for line in lines if line.startswith("apptrain: ") and re.search(words, line)]
    expect(
        ended.status == 64 and len(said) == 1, f"not refused with 64 and a line that says {words!r}", ended
    )


def fork(bench: Bench) -> str:
    """A child that is forked after `import torch`, before CUDA, may use CUDA; so may the parent afterwards."""
    found = bench.ask("forked.py", bench.device, "import")
    expect(found == {"before": False, "child": True, "after": False, "parent": True}, f"found {found}")
    counted = bench.ask("forked.py", bench.device, "device_count")
    then = "may too" if counted["child"] and not counted["after"] else f"may not ({counted})"
    return f"after torch.cuda.device_count() in the parent a child {then}"
