"""The rules of what runs where, and the image's description of its stack."""

import _ctypes
import asyncio
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from containers import stacks
from entrypoint.cli import embedded as ours
from entrypoint.cli import main as cli
from entrypoint.core.errors import BadInput
from entrypoint.node import gpu
from entrypoint.node.gpu import DriverReport, Gpu, ImageStack
from entrypoint.plan.origin import derived_from, from_profile
from entrypoint.plan.resolve import resolve
from tests.unit.node.machines import (
    CU126,
    CU132,
    FACTS,
    H100,
    HAS_NONE,
    ITS_OWN,
    NOT_FOUND,
    TAKE_CU126,
    V100,
    healthy,
)

A100 = Gpu(name="NVIDIA A100-SXM4-80GB", capability=(8, 0))
L40S = Gpu(name="NVIDIA L40S", capability=(8, 9))
B300 = Gpu(name="NVIDIA B300", capability=(10, 3))
THOR = Gpu(name="NVIDIA Thor", capability=(11, 0))
NEXT = Gpu(name="NVIDIA R100", capability=(13, 0))
P100 = Gpu(name="Tesla P100-PCIE-16GB", capability=(6, 0))
B200 = Gpu(name="NVIDIA B200", capability=(10, 0))
GH200 = Gpu(name="NVIDIA GH200 120GB", capability=(9, 0))
RTX = Gpu(name="NVIDIA GeForce RTX 3090", capability=(8, 6))
FORWARD = (
    "on data-centre GPUs use CUDA's forward compatibility, if NVIDIA lists this driver for it: name the directory of "
    "cuda-compat-13-2 in APPTRAIN_CUDA_COMPAT"
)
OTHER_IMAGE = "take an image that exists with an older CUDA"
MISMATCH = "system has unsupported display driver / cuda driver combination"
NO_FORWARD = "forward compatibility was attempted on non supported HW"


@dataclass(frozen=True, kw_only=True)
class Node:
    name: str
    """A sentence."""
    found: DriverReport
    says: str | None
    """The whole line; None where the stack runs."""
    stack: ImageStack = CU132
    visible: str | None = None
    ranks: int | None = None


FITTING = [
    Node(name="the driver branch that the stack needs", found=healthy(H100), says=None),
    Node(name="a newer driver", found=healthy(H100, driver="615.10", cuda=(14, 1)), says=None),
    Node(name="a GPU of a higher minor version", found=healthy(L40S, B300), says=None),
    Node(
        name="an old driver with forward compatibility",
        found=healthy(H100, driver="535.183.01", cuda=(13, 2)),
        says=None,
    ),
    Node(
        name="a driver that says no version, but its CUDA",
        found=DriverReport(cuda=(13, 0), gpus=(H100,)),
        says=None,
    ),
    Node(name="an old GPU that no rank uses", found=healthy(RTX, V100), ranks=1, says=None),
    Node(name="a driver that could not be asked", found=DriverReport(failed="status -11"), says=None),
]
REFUSED = [
    Node(
        name="a driver that is too old where another stack fits",
        found=healthy(A100, driver="535.183.01", cuda=(12, 2)),
        says="the stack cu132 (CUDA 13.2) needs NVIDIA driver 580 or newer, but gpu-a01 has 535.183.01 (CUDA 12.2): "
        f"{TAKE_CU126}, have the driver updated, or {FORWARD}",
    ),
    Node(
        name="a driver that is too old for the newest of the other stacks",
        found=healthy(V100, driver="470.256.02", cuda=(11, 4)),
        says="the stack cu132 (CUDA 13.2) needs NVIDIA driver 580 or newer, but gpu-a01 has 470.256.02 (CUDA 11.4): "
        "use the stack cu118 (make image STACK=cu118, and name that image in APPTRAIN_IMAGE), have the driver "
        f"updated, or {FORWARD}",
    ),
    Node(
        name="a driver that is too old for every stack",
        found=healthy(V100, driver="418.226.00", cuda=(10, 1)),
        says="the stack cu132 (CUDA 13.2) needs NVIDIA driver 580 or newer, but gpu-a01 has 418.226.00 (CUDA 10.1): "
        f"have the driver updated, {OTHER_IMAGE}, or {FORWARD}",
    ),
    Node(
        name="a driver that is too old within its branch",
        stack=ImageStack(name="cu126", cuda="12.6", driver="525.60.13", capabilities=CU126.capabilities),
        found=healthy(A100, driver="525.53", cuda=(11, 8)),
        says="the stack cu126 (CUDA 12.6) needs NVIDIA driver 525.60.13 or newer, but gpu-a01 has 525.53 (CUDA 11.8): "
        f"have the driver updated, {OTHER_IMAGE}, or on data-centre GPUs use CUDA's forward compatibility, if NVIDIA "
        "lists this driver for it: name the directory of cuda-compat-12-6 in APPTRAIN_CUDA_COMPAT",
    ),
    Node(
        name="a driver that is too old and says no version",
        found=DriverReport(cuda=(12, 4), gpus=(A100,)),
        says="the stack cu132 (CUDA 13.2) needs NVIDIA driver 580 or newer, but gpu-a01 has one for CUDA 12.4: have "
        f"the driver updated, {OTHER_IMAGE}, or {FORWARD}",
    ),
    Node(
        name="a driver that is too old and not visible in the container",
        found=DriverReport(driver="535.183.01", error=(None, NOT_FOUND)),
        says="the stack cu132 (CUDA 13.2) needs NVIDIA driver 580 or newer, but gpu-a01 has 535.183.01: "
        f"{TAKE_CU126}, have the driver updated, or {FORWARD}",
    ),
    Node(
        name="a driver that is not visible in the container",
        found=DriverReport(driver="580.65.06", error=(None, NOT_FOUND)),
        says=f"gpu-a01 has NVIDIA driver 580.65.06, but its libcuda is not visible here ({NOT_FOUND}): start the "
        "container with --nv, as containers/run.sh does, or give --device cpu",
    ),
    Node(
        name="a node without a driver",
        found=DriverReport(error=(None, NOT_FOUND)),
        says=f"the plan is for cuda, but gpu-a01 has no NVIDIA driver ({NOT_FOUND}): request GPUs, leave the node "
        "out if they were granted, or give --device cpu",
    ),
    Node(
        name="no GPU that CUDA shows",
        found=DriverReport(
            driver="580.65.06", cuda=(13, 0), error=(100, "no CUDA-capable device is detected")
        ),
        visible="GPU-5fd2",
        says="CUDA does not start on gpu-a01, error 100 (no CUDA-capable device is detected), with driver 580.65.06, "
        "and CUDA_VISIBLE_DEVICES=GPU-5fd2: request GPUs, correct or unset CUDA_VISIBLE_DEVICES, or give --device cpu",
    ),
    Node(
        name="no GPU at all",
        found=DriverReport(
            driver="580.65.06", cuda=(13, 0), error=(100, "no CUDA-capable device is detected")
        ),
        says="CUDA does not start on gpu-a01, error 100 (no CUDA-capable device is detected), with driver 580.65.06, "
        "and CUDA_VISIBLE_DEVICES is not set: request GPUs, correct or unset CUDA_VISIBLE_DEVICES, or give --device cpu",
    ),
    Node(
        name="another libcuda than that of a driver which is new enough",
        found=DriverReport(driver="580.65.06", cuda=(13, 2), error=(803, MISMATCH), gpus=(H100,)),
        says=f"CUDA does not start on gpu-a01, error 803 ({MISMATCH}): its driver 580.65.06 and the libcuda found here "
        "(CUDA 13.2) do not go together: unset APPTRAIN_CUDA_COMPAT if it is set, or after an update of the driver "
        "have the node restarted",
    ),
    Node(
        name="forward compatibility with a driver that it does not serve",
        found=DriverReport(driver="530.30.02", cuda=(13, 2), error=(803, MISMATCH), gpus=(H100,)),
        says=f"CUDA does not start on gpu-a01, error 803 ({MISMATCH}): its driver 530.30.02 and the libcuda found here "
        f"(CUDA 13.2) do not go together: {TAKE_CU126}, have the driver updated to 580 or newer, or name a "
        "cuda-compat-13-2 in APPTRAIN_CUDA_COMPAT for which NVIDIA lists this driver",
    ),
    Node(
        name="forward compatibility with GPUs that it does not serve",
        found=DriverReport(driver="535.183.01", cuda=(13, 2), error=(804, NO_FORWARD), gpus=(RTX, RTX)),
        says=f"CUDA does not start on gpu-a01, error 804 ({NO_FORWARD}): CUDA's forward compatibility does not serve "
        "NVIDIA GeForce RTX 3090 with driver 535.183.01, only data-centre GPUs with the drivers that NVIDIA lists: "
        f"unset APPTRAIN_CUDA_COMPAT, and {TAKE_CU126}, or have the driver updated to 580 or newer",
    ),
    Node(
        name="forward compatibility that nobody needs",
        found=DriverReport(driver="590.44.01", cuda=(13, 2), error=(804, NO_FORWARD)),
        says=f"CUDA does not start on gpu-a01, error 804 ({NO_FORWARD}): CUDA's forward compatibility does not serve "
        "its GPUs with driver 590.44.01, only data-centre GPUs with the drivers that NVIDIA lists: unset "
        "APPTRAIN_CUDA_COMPAT",
    ),
    Node(
        name="another error of CUDA's",
        found=DriverReport(driver="580.65.06", cuda=(13, 0), error=(802, "system not yet initialized")),
        says="CUDA does not start on gpu-a01, error 802 (system not yet initialized), with driver 580.65.06: leave the "
        "node out, and tell its administrators (nvidia-smi, dmesg)",
    ),
    Node(
        name="a driver that hangs",
        found=DriverReport(silent=True),
        says="the NVIDIA driver on gpu-a01 did not answer within 20 s, a GPU or the driver hangs: leave the node out, "
        "and tell its administrators (nvidia-smi, dmesg)",
    ),
    Node(
        name="GPUs that CUDA has dropped",
        found=healthy(V100, V100),
        says=f"{HAS_NONE} GPUs 0, 1 (Tesla V100-SXM2-32GB, compute capability 7.0) of gpu-a01, {ITS_OWN}: "
        f"{TAKE_CU126}, or request other GPUs",
    ),
    Node(
        name="a GPU newer than every stack",
        found=healthy(NEXT, driver="650.10", cuda=(14, 0)),
        says=f"{HAS_NONE} GPU 0 (NVIDIA R100, compute capability 13.0) of gpu-a01, {ITS_OWN}: add a stack that has "
        "them (containers/stacks.yaml), or request other GPUs",
    ),
    Node(
        name="a GPU between the stack's",
        found=healthy(THOR),
        says=f"{HAS_NONE} GPU 0 (NVIDIA Thor, compute capability 11.0) of gpu-a01, {ITS_OWN}: add a stack that has "
        "them (containers/stacks.yaml), or request other GPUs",
    ),
    Node(
        name="mixed GPUs of which some are too old",
        found=healthy(A100, V100, H100, V100),
        says=f"{HAS_NONE} GPUs 1, 3 (Tesla V100-SXM2-32GB, compute capability 7.0) of gpu-a01, {ITS_OWN}: {TAKE_CU126}, "
        "request other GPUs, or hide these with CUDA_VISIBLE_DEVICES",
    ),
    Node(
        name="mixed GPUs that no one stack serves",
        found=healthy(V100, B300, NEXT),
        says=f"{HAS_NONE} GPU 0 (Tesla V100-SXM2-32GB, compute capability 7.0) and GPU 2 (NVIDIA R100, compute "
        f"capability 13.0) of gpu-a01, {ITS_OWN}: add a stack that has them (containers/stacks.yaml), request other "
        "GPUs, or hide these with CUDA_VISIBLE_DEVICES",
    ),
]


@pytest.mark.parametrize("node", [*FITTING, *REFUSED], ids=lambda node: node.name)
def test_the_stack_runs_on_a_node_or_one_line_says_what_to_do(node: Node) -> None:
    said = gpu.misfit(node.stack, node.found, node="gpu-a01", visible=node.visible, ranks=node.ranks)
    assert said == node.says


def of_stacks(architecture: str) -> ImageStack:
    """The default stack as an image for that processor describes it."""
    default = stacks.find("")
    facts = {**default.facts(), "others": stacks.others(default, architecture)}
    return gpu.described_stack(facts)


@pytest.mark.parametrize(
    ("architecture", "used", "driver", "advice"),
    [
        ("amd64", H100, "550.54.15", "use the stack cu128 (make image STACK=cu128, "),
        ("amd64", V100, "580.65.06", "use the stack cu128 (make image STACK=cu128, "),
        ("amd64", P100, "580.65.06", "use the stack cu126 (make image STACK=cu126, "),
        ("amd64", B200, "570.86.15", "use the stack cu128 (make image STACK=cu128, "),
        ("arm64", GH200, "565.57.01", "have the driver updated, take an image that exists with an older CUDA, or on "),
    ],
    ids=str,
)  # fmt: skip
def test_the_advice_is_the_newest_stack_that_this_processor_can_have(
    architecture: str, used: Gpu, driver: str, advice: str
) -> None:
    said = gpu.misfit(
        of_stacks(architecture), healthy(used, driver=driver, cuda=(12, 8)), node="n1", visible=None
    )
    assert said is not None
    assert said.partition(": ")[2].startswith(advice)


def test_the_image_describes_its_stack(tmp_path: Path) -> None:
    path = tmp_path / "stack.json"
    path.write_text(json.dumps(FACTS))
    assert gpu.stack_of_image({"APPTRAIN_STACK": str(path)}) == CU132


def test_outside_an_image_there_is_no_stack(tmp_path: Path) -> None:
    assert gpu.stack_of_image({}) is None
    assert gpu.stack_of_image({"APPTRAIN_STACK": str(tmp_path / "stack.json")}) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "TypeError: list indices must be integers or slices, not str"),
        (json.dumps(FACTS | {"compute_capability": ["9"]}), "ValueError: not enough values to unpack (expected 2, got 1)"),
        (json.dumps({"name": "cu132", "cuda": "13.2"}), "KeyError: 'driver'"),
    ],
)  # fmt: skip
def test_a_file_that_describes_no_stack_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "stack.json"
    path.write_text(text)
    with pytest.raises(BadInput) as refused:
        gpu.stack_of_image({"APPTRAIN_STACK": str(path)})
    assert str(refused.value) == (
        f"APPTRAIN_STACK={path} does not describe a stack ({why}): build the image again with make image"
    )


STACK_CHECKS: dict[str, tuple[str, bool, DriverReport, list[str], str]] = {
    "fits": ("cuda", True, healthy(H100), [], ""),
    "too old a GPU": ("cuda", True, healthy(V100), [], "the stack cu132 .* has no kernels for GPU 0 "),
    "no answer": (
        "cuda",
        True,
        DriverReport(failed="no answer for 60 s"),
        ["the NVIDIA driver on b could not be asked (no answer for 60 s): going on without"],
        "",
    ),
    "for CPUs": ("cpu", True, healthy(V100), [], ""),
    "outside an image": ("cuda", False, healthy(V100), [], ""),
}


@pytest.mark.parametrize("case", STACK_CHECKS)
def test_a_node_is_checked_where_its_ranks_use_the_gpus_of_an_images_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    device, in_image, found, says, refused = STACK_CHECKS[case]
    file = tmp_path / "stack.json"
    env = {"APPTRAIN_STACK": str(file), "CUDA_VISIBLE_DEVICES": "0"}
    if in_image:
        facts = {"name": "cu132", "cuda": "13.2", "driver": "580", "compute_capability": ["7.5", "9.0"]}
        file.write_text(json.dumps(facts))
    asked: list[Mapping[str, str]] = []

    async def ask(env: Mapping[str, str]) -> DriverReport:
        asked.append(env)
        return found

    monkeypatch.setattr(gpu, "ask_driver", ask)
    plan: Any = replace(planned(), device=device, nproc_per_node=1)
    said: list[str] = []
    with pytest.raises(BadInput, match=f"^{refused}") if refused else nullcontext():
        asyncio.run(gpu.check_stack(plan, env, said.append))
    assert said == says
    assert asked == ([env] if device == "cuda" and in_image else [])


def planned(*options: str, mode: str = "torchrun", **env: str) -> Any:
    """The plan of node b of two that are listed by hand."""
    arguments = ["launch", "--nodes", "a,b", "--node-rank", "1", "--mode", mode, *options]
    return resolve(env, vars(cli.parser().parse_args(arguments)), ["x.py"], hostname="b")[0]


def gpu_check(seen: int | None, *options: str, gpus: str | None = None, mode: str = "torchrun") -> str | None:
    """The refusal of a node listed by hand on which torch sees this many GPUs; None where it may start."""
    env = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    try:
        gpu.check_gpus(planned(*options, mode=mode, **env), seen, pytest.fail)
    except BadInput as refused:
        return str(refused)
    return None


def test_gpus_that_nobody_asked_for_are_not_left_idle_in_silence() -> None:
    assert gpu_check(4) == "torch sees 4 GPUs on b: choose --device cuda or --device cpu"
    assert gpu_check(4, "--device", "cpu") is None
    assert gpu_check(0) is None
    assert gpu_check(None) is None


def said_embedded(seen: int, *options: str, nodes: int = 2, **env: str) -> list[str]:
    """What `apptrain run`, whose CMD is a script, says on its first node, where torch sees this many GPUs."""
    job = ours._job(["--nodes", str(nodes), *options, "--", str(Path(__file__))], env, 7)
    plan, _ = ours._plan(job, env)
    said: list[str] = []
    gpu.check_gpus(plan, seen, said.append)
    return said


def test_gpus_of_this_machine_are_not_left_idle_in_silence_by_an_embedded_job() -> None:
    start, end = "the plan is for CPUs, but torch sees ", ", or --device cpu if CPUs are meant"
    assert said_embedded(4) == [f"{start}4 GPUs here: give --gpus-per-node 2{end}"]
    assert said_embedded(1) == [f"{start}1 GPU here: give --nodes 1 --gpus-per-node 1{end}"]
    assert said_embedded(1, nodes=1) == [f"{start}1 GPU here: give --gpus-per-node 1{end}"]
    assert said_embedded(0) == []
    assert said_embedded(4, "--device", "cpu") == said_embedded(4, APPTRAIN_DEVICE="cpu") == []
    assert said_embedded(4, "--gpus-per-node", "0") == []
    assert said_embedded(2, "--gpus-per-node", "2") == []


def test_torch_is_asked_for_gpus_where_something_of_a_driver_is_there(tmp_path: Path) -> None:
    library, none = _ctypes.__file__, tmp_path / "none"
    assert gpu.can_be_there(library, none)
    assert gpu.can_be_there(str(none), tmp_path)
    assert not gpu.can_be_there(str(none), none)


def test_a_plan_for_cuda_needs_a_gpu_that_torch_sees() -> None:
    assert gpu_check(0, gpus="0,1") == (
        "torch sees no GPU on b, but the plan is for cuda: run `apptrain check` there "
        "(driver, --nv, CUDA_VISIBLE_DEVICES), or give --device cpu"
    )


def test_a_derived_number_of_ranks_must_be_what_torch_sees() -> None:
    assert gpu_check(2, gpus="0,1") is None
    assert gpu_check(1, gpus="0,1") == (
        "nproc_per_node is 2 (derived:CUDA_VISIBLE_DEVICES), but torch sees 1 GPUs on b: "
        "give --nproc-per-node N, or correct the request"
    )
    assert gpu_check(4, "--device", "cuda", "--nproc-per-node", "4") is None
    assert gpu_check(1, "--device", "cuda", "--nproc-per-node", "2") == (
        "nproc_per_node is 2 (flag), but torch sees 1 GPUs on b: give --nproc-per-node N, or correct the request"
    )


def test_fewer_ranks_than_gpus_are_said_by_the_node_if_no_scheduler_counted_the_gpus() -> None:
    said: list[str] = []
    gpu.check_gpus(planned("--device", "cuda", "--nproc-per-node", "2"), 4, said.append)
    assert said == ["2 ranks on each node leave 2 of its 4 GPUs unused"]
    gpu.check_gpus(
        planned("--device", "cuda", "--nproc-per-node", "2", CUDA_VISIBLE_DEVICES="0,1,2,3"), 4, pytest.fail
    )


def test_a_task_that_is_one_rank_may_see_one_slice_of_its_own() -> None:
    plan = replace(planned("--device", "cuda", mode="rank", CUDA_VISIBLE_DEVICES="MIG-1"), nproc_per_node=4)
    gpu.check_gpus(plan, 1, pytest.fail)


@pytest.mark.parametrize("seen", [1, 4])
def test_whole_nodes_must_have_the_gpus_that_the_profile_says(seen: int) -> None:
    plan = planned("--device", "cuda", "--nproc-per-node", "2")
    site = replace(plan.allocation, gpus=2, gpus_of_site="lab.yaml")
    plan = replace(
        plan, allocation=site, sources={**plan.sources, "nproc_per_node": from_profile("lab.yaml")}
    )
    gpu.check_gpus(plan, 2, pytest.fail)
    text = (
        rf"^nproc_per_node is 2 \(profile:lab.yaml\), but torch sees {seen} GPUs on b: give --nproc-per-node N, or "
        "correct the request, or nodes gpus of lab.yaml$"
    )
    with pytest.raises(BadInput, match=text):
        gpu.check_gpus(plan, seen, pytest.fail)


@pytest.mark.parametrize(
    ("mode", "seen", "starts"), [("rank", 4, True), ("rank", 1, False), ("torchrun", 4, False)]
)
def test_a_task_that_is_one_rank_may_see_more_gpus_than_its_node_has_ranks(
    mode: str, seen: int, starts: bool
) -> None:
    plan = planned("--device", "cuda", mode=mode, CUDA_VISIBLE_DEVICES="0,1")
    derived = {**plan.sources, "nproc_per_node": derived_from("SLURM_NTASKS_PER_NODE")}
    plan = replace(plan, nproc_per_node=2, sources=derived)
    with nullcontext() if starts else pytest.raises(BadInput, match=f"torch sees {seen} GPUs on b"):
        gpu.check_gpus(plan, seen, pytest.fail)
