"""Checks that this node's NVIDIA driver and GPUs can run the stack in the image. `check_stack` does so before
torch is imported; `check_gpus` compares the plan with the GPUs that torch sees.

NVIDIA's rules of what runs where:

- A driver is new enough for a stack if its version is the stack's lowest or a later one, or if the libcuda
  that torch will load is of the stack's CUDA major version. Forward compatibility (the package
  cuda-compat-MAJOR-MINOR, its libraries first in LD_LIBRARY_PATH, where containers/run.sh puts the directory
  APPTRAIN_CUDA_COMPAT) brings such a libcuda to an older driver: on data-centre GPUs, certified servers with
  RTX cards and Jetson boards, with the driver branches that NVIDIA lists for the package.
- A GPU of compute capability X.Y runs what was compiled for X.y with y <= Y, and nothing else: torch's
  wheels bring no PTX, which the driver could compile for a GPU of another X.
"""

import asyncio
import contextlib
import ctypes
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import counted, plural
from entrypoint.node import processes
from entrypoint.plan import rules
from entrypoint.plan.launch_plan import LaunchPlan
from entrypoint.schedulers import embedded

ANSWER = 20.0
"""Seconds that the driver has to answer."""
NO_DEVICE, DRIVER_MISMATCH, NO_FORWARD_COMPATIBILITY = 100, 803, 804
"""cuInit's errors that have a remedy of their own (CUresult)."""
Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One that the driver has told of."""

    name: str
    capability: Version
    """Compute capability, (major, minor)."""
    address: str = field(default="", compare=False)
    """On the PCI bus, as the driver writes it; empty if it does not say."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a stack asks of a node."""

    driver: str
    """The lowest version of NVIDIA's driver, such as 580 or 525.60.13."""
    capabilities: tuple[Version, ...]
    """The compute capabilities that its torch was compiled for."""

    def has_kernels_for(self, gpu: Gpu) -> bool:
        major, minor = gpu.capability
        return any(has == major and least <= minor for has, least in self.capabilities)


@dataclass(frozen=True, kw_only=True)
class ImageStack(Needs):
    """The stack in this image."""

    name: str
    cuda: str
    """Such as 13.2."""
    lock: str = ""
    """SHA-256 of what the image was locked to; empty where it does not say."""
    others: Mapping[str, Needs] = field(default_factory=dict)
    """The stacks that can be built instead, by name."""


@dataclass(frozen=True, kw_only=True)
class DriverReport:
    """What the driver says of this node to a process with the ranks' environment."""

    driver: str | None = None
    """The driver's version; None where there is none, or it does not say."""
    cuda: Version | None = None
    """(major, minor) of the libcuda that torch will load; None without one."""
    error: tuple[int | None, str] | None = None
    """cuInit's error and its text; without libcuda (None, the linker's text)."""
    gpus: tuple[Gpu, ...] = ()
    """Those that CUDA shows here, in its order; beside an error all of the node, as far as known."""
    silent: bool = False
    """No answer within ANSWER: nothing else is known."""
    failed: str = ""
    """How asking failed, where it did: nothing else is known."""

    @property
    def driver_text(self) -> str:
        if self.driver is None:
            return f"one for CUDA {_dotted(self.cuda)}" if self.cuda else "of unknown version"
        return self.driver + (f" (CUDA {_dotted(self.cuda)})" if self.cuda else "")


def stack_of_image(env: Mapping[str, str]) -> ImageStack | None:
    """The stack as the image's file APPTRAIN_STACK describes it; None without the file: outside an image,
    torch may come from anywhere. Raises BadInput where the file does not describe one."""
    name = env.get("APPTRAIN_STACK")
    if not name or not Path(name).exists():
        return None
    try:
        return described_stack(json.loads(Path(name).read_text()))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInput(
            "image-stack-unreadable",
            f"APPTRAIN_STACK={name} does not describe a stack ({type(error).__name__}: {error}): "
            "build the image again with make image",
        ) from None


def described_stack(facts: Mapping[str, Any]) -> ImageStack:
    """The stack of that description."""
    return ImageStack(
        name=facts["name"],
        cuda=str(facts["cuda"]),
        lock=str(facts.get("lock_sha256", "")),
        others={other: Needs(**_needs(its)) for other, its in facts.get("others", {}).items()},
        **_needs(facts),
    )


def _needs(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "driver": str(facts["driver"]),
        "capabilities": tuple(_capability(text) for text in facts["compute_capability"]),
    }


def _capability(text: str) -> Version:
    major, minor = text.split(".")
    return int(major), int(minor)


async def ask_driver(
    env: Mapping[str, str], *, seconds: float = ANSWER, version_file: Path | None = None
) -> DriverReport:
    """Asks the driver in a process of its own, with the ranks' environment `env`. `version_file` stands for
    /proc/driver/nvidia/version."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(Path(__file__).with_name("driver.py"))),
        *([version_file] if version_file else []),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        start_new_session=True,
        preexec_fn=processes.die_with_parent,
    )
    try:
        out, err = await asyncio.wait_for(child.communicate(), seconds)
    except TimeoutError:
        return DriverReport(silent=True)
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            with contextlib.suppress(TimeoutError):  # Inside a driver that hangs, it may outlive SIGKILL.
                await asyncio.wait_for(child.wait(), 1.0)
    if child.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        return DriverReport(failed=": ".join([f"status {child.returncode}", *lines[-1:]]))
    return _read(json.loads(out))


def _read(said: Mapping[str, Any]) -> DriverReport:
    cuda, error = said["cuda"], said["error"]
    return DriverReport(
        driver=said["driver"],
        cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        error=None if error is None else (error[0], error[1]),
        gpus=tuple(
            Gpu(name=gpu["name"], capability=tuple(gpu["capability"]), address=gpu["address"])
            for gpu in said["gpus"]
        ),
    )


async def check_stack(
    plan: LaunchPlan, env: Mapping[str, str], say: Callable[[str], None]
) -> DriverReport | None:
    """What the driver says, if it was asked. Raises BadInput where the image's CUDA would fail on this node's
    driver or GPUs; `env`: the ranks'."""
    stack = stack_of_image(env) if plan.device == "cuda" else None
    if stack is None:
        return None
    found = await ask_driver(env)
    if found.failed:
        say(f"the NVIDIA driver on {plan.node} could not be asked ({found.failed}): going on without")
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if why := misfit(stack, found, node=plan.node, visible=visible, ranks=plan.nproc_per_node):
        raise BadInput("gpu-stack-misfit", why)
    return found


def misfit(
    stack: ImageStack, found: DriverReport, *, node: str, visible: str | None, ranks: int | None = None
) -> str | None:
    """Why the stack does not run on the GPUs of `node`, and what to do; None where it does, or nobody knows.

    `visible`: CUDA_VISIBLE_DEVICES as the ranks have it. `ranks`: how many of the GPUs are used, the first
    ones; None for all.
    """
    if found.silent:
        return (
            f"the NVIDIA driver on {node} did not answer within {ANSWER:.0f} s, a GPU or the driver hangs: "
            "leave the node out, and tell its administrators (nvidia-smi, dmesg)"
        )
    if _is_too_old(stack, found):
        return _too_old(stack, found, node, found.gpus[:ranks])
    if found.error:
        code, text = found.error
        if code is None:
            return _no_library(found, node, text)
        return _not_started(stack, found, node, visible, code, text)
    return _no_kernels(stack, found, node, found.gpus[:ranks])


def _is_too_old(stack: ImageStack, found: DriverReport) -> bool:
    if found.cuda and found.cuda[0] >= _numbers(stack.cuda)[0]:
        return False
    return found.cuda is not None if found.driver is None else not _reaches(found, stack)


def _reaches(found: DriverReport, needs: Needs) -> bool:
    """Whether the driver itself, without forward compatibility, is known to be new enough."""
    return found.driver is not None and _numbers(found.driver) >= _numbers(needs.driver)


def _too_old(stack: ImageStack, found: DriverReport, node: str, used: Sequence[Gpu]) -> str:
    other = _other_stack(stack, found, used)
    remedies = _or(
        other,
        "have the driver updated",
        "" if other else "take an image that exists with an older CUDA",
        "on data-centre GPUs use CUDA's forward compatibility, if NVIDIA lists this driver for it: name the "
        f"directory of {_compat(stack)} in APPTRAIN_CUDA_COMPAT",
    )
    return (
        f"the stack {stack.name} (CUDA {stack.cuda}) needs NVIDIA driver {stack.driver} or newer, but "
        f"{node} has {found.driver_text}: {remedies}"
    )


def _no_library(found: DriverReport, node: str, text: str) -> str:
    if found.driver:
        return (
            f"{node} has NVIDIA driver {found.driver}, but its libcuda is not visible here ({text}): start "
            "the container with --nv, as containers/run.sh does, or give --device cpu"
        )
    return (
        f"the plan is for cuda, but {node} has no NVIDIA driver ({text}): request GPUs, leave the node out "
        "if they were granted, or give --device cpu"
    )


def _not_started(
    stack: ImageStack, found: DriverReport, node: str, visible: str | None, code: int, text: str
) -> str:
    start = f"CUDA does not start on {node}, error {code} ({text})"
    driver = f"driver {found.driver or 'of unknown version'}"
    is_new_enough = _reaches(found, stack)
    instead = (_other_stack(stack, found, found.gpus), f"have the driver updated to {stack.driver} or newer")
    if code == NO_DEVICE:
        shown = "CUDA_VISIBLE_DEVICES is not set" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
        return (
            f"{start}, with {driver}, and {shown}: request GPUs, correct or unset CUDA_VISIBLE_DEVICES, or "
            "give --device cpu"
        )
    if code == DRIVER_MISMATCH:
        own = "unset APPTRAIN_CUDA_COMPAT if it is set"
        restarted = "after an update of the driver have the node restarted"
        listed = f"name a {_compat(stack)} in APPTRAIN_CUDA_COMPAT for which NVIDIA lists this driver"
        return (
            f"{start}: its {driver} and the libcuda found here (CUDA {_dotted(found.cuda)}) do not go "
            f"together: {_or(own, restarted) if is_new_enough else _or(*instead, listed)}"
        )
    if code == NO_FORWARD_COMPATIBILITY:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in found.gpus)) or "its GPUs"
        return (
            f"{start}: CUDA's forward compatibility does not serve {names} with {driver}, only data-centre "
            "GPUs with the drivers that NVIDIA lists: unset APPTRAIN_CUDA_COMPAT"
            + ("" if is_new_enough else f", and {_or(*instead)}")
        )
    return f"{start}, with {driver}: leave the node out, and tell its administrators (nvidia-smi, dmesg)"


def _no_kernels(stack: ImageStack, found: DriverReport, node: str, used: Sequence[Gpu]) -> str | None:
    lacking: dict[Gpu, list[int]] = {}
    for index, gpu in enumerate(used):
        if not stack.has_kernels_for(gpu):
            lacking.setdefault(gpu, []).append(index)
    if not lacking:
        return None
    each = [
        f"{plural(len(indices), 'GPU')} {', '.join(map(str, indices))} ({gpu.name}, compute capability "
        f"{_dotted(gpu.capability)})"
        for gpu, indices in lacking.items()
    ]
    remedies = _or(
        _other_stack(stack, found, used) or "add a stack that has them (containers/stacks.yaml)",
        "request other GPUs",
        "hide these with CUDA_VISIBLE_DEVICES" if sum(map(len, lacking.values())) < len(used) else "",
    )
    return (
        f"the stack {stack.name} (CUDA {stack.cuda}) has no kernels for {' and '.join(each)} of {node}, "
        f"only for {', '.join(map(_dotted, stack.capabilities))}: {remedies}"
    )


def _other_stack(stack: ImageStack, found: DriverReport, gpus: Sequence[Gpu]) -> str:
    """The advice to take another stack: of those that fit, the one for the newest driver, and of several the
    last by name, which has the newest CUDA. Empty without."""
    fitting = [
        (_numbers(needs.driver), name)
        for name, needs in stack.others.items()
        if _reaches(found, needs) and all(map(needs.has_kernels_for, gpus))
    ]
    if not fitting:
        return ""
    name = max(fitting)[1]
    return f"use the stack {name} (make image STACK={name}, and name that image in APPTRAIN_IMAGE)"


def _compat(stack: ImageStack) -> str:
    return f"cuda-compat-{stack.cuda.replace('.', '-')}"


def _or(*remedies: str) -> str:
    *first, last = [remedy for remedy in remedies if remedy]
    return f"{', '.join(first)}, or {last}" if first else last


def _numbers(version: str) -> Version:
    return tuple(map(int, re.findall(r"\d+", version)))


def _dotted(version: Version | None) -> str:
    return ".".join(map(str, version or ()))


def can_be_there(libcuda: str = "libcuda.so.1", amd: Path = Path("/dev/kfd")) -> bool:
    """Whether torch may see GPUs on this node: of NVIDIA's it needs libcuda, of AMD's the kernel's driver."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(libcuda)
        return True
    return amd.exists()


def check_gpus(plan: LaunchPlan, seen: int | None, say: Callable[[str], None]) -> None:
    """Refuses what would train on the wrong device for a week; `seen`: GPUs that torch sees here, None where
    it could not say (the ranks will). Somebody sits before an embedded job, who is told."""
    if seen is None:
        return
    source = plan.sources["nproc_per_node"]
    if plan.device == "cpu":
        if seen and plan.device_is_default:
            if plan.allocation.scheduler == embedded.NAME:
                say(_left_idle(plan, seen))
                return
            raise BadInput(
                "device-undecided",
                f"torch sees {seen} GPUs on {plan.node}: choose --device cuda or --device cpu",
            )
    elif seen == 0:
        raise BadInput(
            "gpus-not-seen",
            f"torch sees no GPU on {plan.node}, but the plan is for cuda: run `apptrain check` "
            "there (driver, --nv, CUDA_VISIBLE_DEVICES), or give --device cpu",
        )
    elif seen < plan.nproc_per_node or (_is_number_of_gpus(plan) and seen != plan.nproc_per_node):
        if plan.mode == "rank" and (seen > plan.nproc_per_node or plan.allocation.slices == 1):
            return
        site = plan.allocation.gpus_of_site
        of_site = f", or nodes gpus of {site}" if site else ""
        raise BadInput(
            "gpus-fewer-than-ranks",
            f"nproc_per_node is {plan.nproc_per_node} ({source}), but torch sees {seen} GPUs on {plan.node}: "
            f"give --nproc-per-node N, or correct the request{of_site}",
        )
    elif seen > plan.nproc_per_node and plan.allocation.gpus is None:
        say(rules.unused_gpus(plan.nproc_per_node, seen))


def _is_number_of_gpus(plan: LaunchPlan) -> bool:
    """Whether nobody chose the number of ranks: it is that of the GPUs that a scheduler or profile named."""
    allocation = plan.allocation
    of_site = bool(allocation.gpus_of_site) and plan.nproc_per_node == allocation.gpus
    return plan.nproc_is_derived or of_site


def _left_idle(plan: LaunchPlan, seen: int) -> str:
    each = seen // plan.allocation.nnodes
    words = f"--gpus-per-node {each}" if each else f"--nodes {seen} --gpus-per-node 1"
    return (
        f"the plan is for CPUs, but torch sees {counted(seen, 'GPU')} here: give {words}, or --device "
        "cpu if CPUs are meant"
    )
