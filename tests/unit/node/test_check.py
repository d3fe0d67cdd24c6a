"""Whether the image's stack runs on a node: NVIDIA's rules, what is said, and how the driver is asked."""

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import entrypoint
from entrypoint.errors import BadInput
from entrypoint.job import outcome
from entrypoint.node import check, driver, gpu
from entrypoint.node.gpu import Found, Gpu, Needs, Stack

CHECKOUT = Path(entrypoint.__file__).parents[1]
FACTS = {
    "name": "cu132",
    "python": "3.13",
    "torch": "2.15.0",
    "torchvision": "0.29.2",
    "cuda": "13.2",
    "cudnn": "9.26.0",
    "nccl": "2.30.7",
    "driver": "580",
    "compute_capability": ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0"],
    "lock_sha256": "5e1f",
    "others": {
        "cu118": {"driver": "450.80.02", "compute_capability": ["6.0", "7.0", "7.5", "8.0"]},
        "cu126": {"driver": "525", "compute_capability": ["5.0", "6.0", "7.0", "7.5", "8.0", "8.6", "9.0"]},
    },
}
CU126 = Needs(driver="525", capabilities=((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0)))
CU132 = Stack(
    name="cu132",
    cuda="13.2",
    lock="5e1f",
    driver="580",
    capabilities=((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
    others={
        "cu118": Needs(driver="450.80.02", capabilities=((6, 0), (7, 0), (7, 5), (8, 0))),
        "cu126": CU126,
    },
)
V100 = Gpu(name="Tesla V100-SXM2-32GB", capability=(7, 0))
A100 = Gpu(name="NVIDIA A100-SXM4-80GB", capability=(8, 0))
L40S = Gpu(name="NVIDIA L40S", capability=(8, 9))
H100 = Gpu(name="NVIDIA H100 80GB HBM3", capability=(9, 0))
B300 = Gpu(name="NVIDIA B300", capability=(10, 3))
THOR = Gpu(name="NVIDIA Thor", capability=(11, 0))
NEXT = Gpu(name="NVIDIA R100", capability=(13, 0))
RTX = Gpu(name="NVIDIA GeForce RTX 3090", capability=(8, 6))

TAKE_CU126 = "use the stack cu126 (make image STACK=cu126, and name that image in APPTRAIN_IMAGE)"
FORWARD = (
    "on data-centre GPUs use CUDA's forward compatibility, if NVIDIA lists this driver for it: name the directory of "
    "cuda-compat-13-2 in APPTRAIN_CUDA_COMPAT"
)
HAS_NONE = "the stack cu132 (CUDA 13.2) has no kernels for"
ITS_OWN = "only for 7.5, 8.0, 8.6, 9.0, 10.0, 12.0"
MISMATCH = "system has unsupported display driver / cuda driver combination"
NO_FORWARD = "forward compatibility was attempted on non supported HW"
NOT_FOUND = "libcuda.so.1: cannot open shared object file: No such file or directory"


@dataclass(frozen=True, kw_only=True)
class Node:
    name: str
    """A sentence."""
    found: Found
    says: str | None
    """The whole line; None where the stack runs."""
    stack: Stack = CU132
    visible: str | None = None
    ranks: int | None = None


def healthy(*gpus: Gpu, driver: str = "580.65.06", cuda: tuple[int, int] = (13, 0)) -> Found:
    return Found(driver=driver, cuda=cuda, gpus=gpus)


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
        found=Found(cuda=(13, 0), gpus=(H100,)),
        says=None,
    ),
    Node(name="an old GPU that no rank uses", found=healthy(RTX, V100), ranks=1, says=None),
    Node(name="a driver that could not be asked", found=Found(failed="status -11"), says=None),
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
        f"have the driver updated, or {FORWARD}",
    ),
    Node(
        name="a driver that is too old within its branch",
        stack=Stack(name="cu126", cuda="12.6", driver="525.60.13", capabilities=CU126.capabilities),
        found=healthy(A100, driver="525.53", cuda=(11, 8)),
        says="the stack cu126 (CUDA 12.6) needs NVIDIA driver 525.60.13 or newer, but gpu-a01 has 525.53 (CUDA 11.8): "
        "have the driver updated, or on data-centre GPUs use CUDA's forward compatibility, if NVIDIA lists this driver "
        "for it: name the directory of cuda-compat-12-6 in APPTRAIN_CUDA_COMPAT",
    ),
    Node(
        name="a driver that is too old and says no version",
        found=Found(cuda=(12, 4), gpus=(A100,)),
        says="the stack cu132 (CUDA 13.2) needs NVIDIA driver 580 or newer, but gpu-a01 has one for CUDA 12.4: have "
        f"the driver updated, or {FORWARD}",
    ),
    Node(
        name="a driver that is too old and not visible in the container",
        found=Found(driver="535.183.01", error=(None, NOT_FOUND)),
        says="the stack cu132 (CUDA 13.2) needs NVIDIA driver 580 or newer, but gpu-a01 has 535.183.01: "
        f"{TAKE_CU126}, have the driver updated, or {FORWARD}",
    ),
    Node(
        name="a driver that is not visible in the container",
        found=Found(driver="580.65.06", error=(None, NOT_FOUND)),
        says=f"gpu-a01 has NVIDIA driver 580.65.06, but its libcuda is not visible here ({NOT_FOUND}): start the "
        "container with --nv, as containers/run.sh does, or give --device cpu",
    ),
    Node(
        name="a node without a driver",
        found=Found(error=(None, NOT_FOUND)),
        says=f"the plan is for cuda, but gpu-a01 has no NVIDIA driver ({NOT_FOUND}): request GPUs, leave the node "
        "out if they were granted, or give --device cpu",
    ),
    Node(
        name="no GPU that CUDA shows",
        found=Found(driver="580.65.06", cuda=(13, 0), error=(100, "no CUDA-capable device is detected")),
        visible="GPU-5fd2",
        says="CUDA does not start on gpu-a01, error 100 (no CUDA-capable device is detected), with driver 580.65.06, "
        "and CUDA_VISIBLE_DEVICES=GPU-5fd2: request GPUs, correct or unset CUDA_VISIBLE_DEVICES, or give --device cpu",
    ),
    Node(
        name="no GPU at all",
        found=Found(driver="580.65.06", cuda=(13, 0), error=(100, "no CUDA-capable device is detected")),
        says="CUDA does not start on gpu-a01, error 100 (no CUDA-capable device is detected), with driver 580.65.06, "
        "and CUDA_VISIBLE_DEVICES is not set: request GPUs, correct or unset CUDA_VISIBLE_DEVICES, or give --device cpu",
    ),
    Node(
        name="another libcuda than that of a driver which is new enough",
        found=Found(driver="580.65.06", cuda=(13, 2), error=(803, MISMATCH), gpus=(H100,)),
        says=f"CUDA does not start on gpu-a01, error 803 ({MISMATCH}): its driver 580.65.06 and the libcuda found here "
        "(CUDA 13.2) do not go together: unset APPTRAIN_CUDA_COMPAT if it is set, or after an update of the driver "
        "have the node restarted",
    ),
    Node(
        name="forward compatibility with a driver that it does not serve",
        found=Found(driver="530.30.02", cuda=(13, 2), error=(803, MISMATCH), gpus=(H100,)),
        says=f"CUDA does not start on gpu-a01, error 803 ({MISMATCH}): its driver 530.30.02 and the libcuda found here "
        f"(CUDA 13.2) do not go together: {TAKE_CU126}, have the driver updated to 580 or newer, or name a "
        "cuda-compat-13-2 in APPTRAIN_CUDA_COMPAT for which NVIDIA lists this driver",
    ),
    Node(
        name="forward compatibility with GPUs that it does not serve",
        found=Found(driver="535.183.01", cuda=(13, 2), error=(804, NO_FORWARD), gpus=(RTX, RTX)),
        says=f"CUDA does not start on gpu-a01, error 804 ({NO_FORWARD}): CUDA's forward compatibility does not serve "
        "NVIDIA GeForce RTX 3090 with driver 535.183.01, only data-centre GPUs with the drivers that NVIDIA lists: "
        f"unset APPTRAIN_CUDA_COMPAT, and {TAKE_CU126}, or have the driver updated to 580 or newer",
    ),
    Node(
        name="forward compatibility that nobody needs",
        found=Found(driver="590.44.01", cuda=(13, 2), error=(804, NO_FORWARD)),
        says=f"CUDA does not start on gpu-a01, error 804 ({NO_FORWARD}): CUDA's forward compatibility does not serve "
        "its GPUs with driver 590.44.01, only data-centre GPUs with the drivers that NVIDIA lists: unset "
        "APPTRAIN_CUDA_COMPAT",
    ),
    Node(
        name="another error of CUDA's",
        found=Found(driver="580.65.06", cuda=(13, 0), error=(802, "system not yet initialized")),
        says="CUDA does not start on gpu-a01, error 802 (system not yet initialized), with driver 580.65.06: leave the "
        "node out, and tell its administrators (nvidia-smi, dmesg)",
    ),
    Node(
        name="a driver that hangs",
        found=Found(silent=True),
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


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
            "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
            "535.183.01",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\n",
            "580.65.06",
        ),
        ("NVRM version: NVIDIA UNIX Kernel Module for aarch64  590.44  Mon Aug 4 2025\n", "590.44"),
        ("GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n", None),
    ],
)
def test_the_kernel_module_says_its_version(tmp_path: Path, text: str, version: str | None) -> None:
    path = tmp_path / "version"
    path.write_text(text)
    assert driver.module_version(str(path)) == version


LIBCUDA = """
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int number(const char *name) { const char *text = getenv(name); return text ? atoi(text) : 0; }
static int is_ready;

int cuDriverGetVersion(int *version) { *version = number("FAKE_CUDA"); return 0; }
int cuInit(unsigned flags) {
    const char *how = getenv("FAKE_INIT");
    if (flags) return 1;
    if (getenv("FAKE_NOISE")) puts("noise");
    if (how && !strcmp(how, "hang")) for (;;) pause();
    if (how && !strcmp(how, "crash")) kill(getpid(), SIGKILL);
    is_ready = !number("FAKE_INIT");
    return number("FAKE_INIT");
}
int cuGetErrorString(int error, const char **text) {
    if (error == 999) return 1;
    *text = "the text of the error";
    return 0;
}
int cuDeviceGetCount(int *count) { *count = number("FAKE_GPUS"); return is_ready ? 0 : 3; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 100; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Fake %d", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute != 75 && attribute != 76) return 1;
    *value = attribute == 75 ? number("FAKE_MAJOR") : device - 100;
    return 0;
}
"""
LIBNVIDIA_ML = """
#include <stdio.h>
#include <stdlib.h>

static int is_ready;
static int gpus[2] = {7, 8};

int nvmlInit_v2(void) { is_ready = !getenv("FAKE_NVML_LOST"); return is_ready ? 0 : 9; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    snprintf(version, size, "%s", "470.256.02");
    return is_ready ? 0 : 1;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **device) { *device = &gpus[index]; return 0; }
int nvmlDeviceGetName(int *device, char *name, unsigned size) { snprintf(name, size, "NVML %d", *device); return 0; }
int nvmlDeviceGetCudaComputeCapability(int *device, int *major, int *minor) {
    *major = *device;
    *minor = 5;
    return getenv("FAKE_SECOND_LOST") && *device == 8 ? 15 : 0;
}
"""


def compiled(folder: Path, name: str, source: str) -> None:
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-x", "c", "-", "-o", str(folder / name)],
        input=source,
        text=True,
        check=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libcuda")
    compiled(folder, "libcuda.so.1", LIBCUDA)
    return folder


@pytest.fixture(scope="module")
def libnvidia_ml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libnvidia-ml")
    compiled(folder, "libnvidia-ml.so.1", LIBNVIDIA_ML)
    return folder


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node made of fakes. Its libraries stand before any real ones."""

    libraries: tuple[Path, ...]
    module: Path
    """What stands for /proc/driver/nvidia/version."""
    env: dict[str, str] = field(default_factory=dict)

    def look(self, seconds: float = gpu.ANSWER, **env: str) -> Found:
        path = ":".join(map(str, self.libraries))
        given = {"LD_LIBRARY_PATH": path, **env}
        return asyncio.run(gpu.look(given, seconds=seconds, version_file=self.module))


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:17:34 UTC 2025\n"
    )
    return path


def empty(folder: Path, *names: str) -> Path:
    """A folder of libraries that cannot be loaded, in front of any that this machine may have."""
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_libcuda_tells_its_gpus_and_nvml_is_not_needed(libcuda: Path, module: Path, tmp_path: Path) -> None:
    machine = Machine(libraries=(libcuda, empty(tmp_path / "none", "libnvidia-ml.so.1")), module=module)
    assert machine.look(FAKE_CUDA="13020", FAKE_GPUS="2", FAKE_MAJOR="9") == Found(
        driver="580.65.06",
        cuda=(13, 2),
        gpus=(Gpu(name="Fake 100", capability=(9, 0)), Gpu(name="Fake 101", capability=(9, 1))),
    )
    assert machine.look(FAKE_CUDA="12040") == Found(driver="580.65.06", cuda=(12, 4))
    assert machine.look(FAKE_CUDA="12040", FAKE_NOISE="1") == Found(driver="580.65.06", cuda=(12, 4))


def test_nvml_tells_the_version_where_the_kernel_module_does_not(
    libcuda: Path, libnvidia_ml: Path, tmp_path: Path
) -> None:
    machine = Machine(libraries=(libcuda, libnvidia_ml), module=tmp_path / "no-such-file")
    found = machine.look(FAKE_CUDA="11040", FAKE_GPUS="1", FAKE_MAJOR="7")
    assert found == Found(driver="470.256.02", cuda=(11, 4), gpus=(Gpu(name="Fake 100", capability=(7, 0)),))
    assert machine.look(FAKE_CUDA="11040", FAKE_NVML_LOST="1") == Found(cuda=(11, 4))


def test_nvml_tells_the_gpus_where_cuda_does_not_start(
    libcuda: Path, libnvidia_ml: Path, module: Path
) -> None:
    machine = Machine(libraries=(libcuda, libnvidia_ml), module=module)
    first, second = Gpu(name="NVML 7", capability=(7, 5)), Gpu(name="NVML 8", capability=(8, 5))
    mismatch = Found(
        driver="580.65.06", cuda=(13, 2), error=(803, "the text of the error"), gpus=(first, second)
    )
    assert machine.look(FAKE_CUDA="13020", FAKE_INIT="803") == mismatch
    lost = machine.look(FAKE_CUDA="13020", FAKE_INIT="999", FAKE_SECOND_LOST="1")
    assert lost == Found(driver="580.65.06", cuda=(13, 2), error=(999, "unknown error"), gpus=(first,))


def test_libraries_that_are_not_there_are_no_driver(module: Path, tmp_path: Path) -> None:
    none = empty(tmp_path / "none", "libcuda.so.1", "libnvidia-ml.so.1")
    why = (None, f"{none}/libcuda.so.1: file too short")
    assert Machine(libraries=(none,), module=module).look() == Found(driver="580.65.06", error=why)
    assert Machine(libraries=(none,), module=tmp_path / "no-such-file").look() == Found(error=why)


def test_a_driver_that_hangs_is_left_alone_after_its_time(libcuda: Path, module: Path) -> None:
    machine = Machine(libraries=(libcuda,), module=module)
    mark = f"APPTRAIN_TEST={module}"
    assert machine.look(0.5, FAKE_INIT="hang", APPTRAIN_TEST=str(module)) == Found(silent=True)
    assert processes_with(mark) == []


def processes_with(text: str) -> list[str]:
    """The command lines of the running processes that have this in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_a_driver_that_crashes_does_so_alone(libcuda: Path, module: Path) -> None:
    machine = Machine(libraries=(libcuda,), module=module)
    assert machine.look(FAKE_INIT="crash") == Found(failed="status -9")


def test_a_library_that_lacks_a_function_is_no_reason_to_refuse(module: Path, tmp_path: Path) -> None:
    compiled(tmp_path, "libcuda.so.1", "int cuInit(unsigned flags) { return flags; }")
    found = Machine(libraries=(tmp_path,), module=module).look()
    library = tmp_path / "libcuda.so.1"
    why = f"status 1: AttributeError: {library}: undefined symbol: cuDriverGetVersion"
    assert found == Found(failed=why)
    assert gpu.misfit(CU132, found, node="gpu-a01", visible=None) is None


class Launch:
    """`launch` of one node on fakes, whose torch leaves a mark when it is imported."""

    def __init__(self, folder: Path, libraries: Path):
        self._folder = folder
        self.imported = folder / "imported"
        # The kernel module's version is that of the machine under the test, where it has one.
        stack = FACTS | {"driver": "1", "others": {}}
        (folder / "stack.json").write_text(json.dumps(stack))
        (folder / "torch.py").write_text(
            f"open({str(self.imported)!r}, 'w').close()\nclass cuda:\n    device_count = staticmethod(lambda: 1)\n"
        )
        self._env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(folder), str(CHECKOUT)]),
            "LD_LIBRARY_PATH": str(libraries),
            "APPTRAIN_STACK": str(folder / "stack.json"),
        }

    def start(self, device: str, **env: str) -> subprocess.Popen[str]:
        argv = [
            sys.executable,
            "-P",
            "-m",
            "entrypoint",
            "launch",
            "--nodes",
            "127.0.0.1",
            "--node-rank",
            "0",
        ]
        argv += ["--device", device, "--nproc-per-node", "1", "--run-dir", str(self._folder / "run")]
        argv += ["--mode", "exec", "--no-python", "--", "echo", "ran"]
        return subprocess.Popen(
            argv,
            cwd=self._folder,
            env=self._env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, device: str, **env: str) -> tuple[int, str, str]:
        """(exit status, stdout, stderr)."""
        process = self.start(device, **env)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


def test_a_launch_is_refused_before_torch_is_imported(libcuda: Path, tmp_path: Path) -> None:
    launch = Launch(tmp_path, libcuda)
    status, out, err = launch.run("cuda", FAKE_CUDA="13020", FAKE_GPUS="1", FAKE_MAJOR="6")
    message = (
        f"{HAS_NONE} GPU 0 (Fake 100, compute capability 6.0) of 127.0.0.1, {ITS_OWN}: add a stack that has them "
        "(containers/stacks.yaml), or request other GPUs"
    )
    assert (status, out) == (64, "")
    assert err.splitlines()[-1] == f"entrypoint: {message}"
    assert not launch.imported.exists()
    ended = outcome.read(tmp_path / "run" / "outcome" / "0.0")
    assert ended is not None
    assert (ended.status, ended.error) == (64, message)


def test_a_launch_goes_on_where_the_stack_fits(libcuda: Path, tmp_path: Path) -> None:
    launch = Launch(tmp_path, libcuda)
    status, out, err = launch.run("cuda", FAKE_CUDA="13020", FAKE_GPUS="1", FAKE_MAJOR="9")
    assert (status, out) == (0, "ran\n"), err
    assert launch.imported.exists()


def test_a_launch_says_that_the_driver_could_not_be_asked_and_goes_on(libcuda: Path, tmp_path: Path) -> None:
    status, out, err = Launch(tmp_path, libcuda).run("cuda", FAKE_INIT="crash")
    assert (status, out) == (0, "ran\n"), err
    message = "entrypoint: the NVIDIA driver on 127.0.0.1 could not be asked (status -9): going on without"
    assert err.splitlines().count(message) == 1


def test_a_launch_can_be_ended_while_the_driver_hangs(libcuda: Path, tmp_path: Path) -> None:
    mark = f"APPTRAIN_TEST={tmp_path}"
    process = Launch(tmp_path, libcuda).start("cuda", FAKE_INIT="hang", APPTRAIN_TEST=str(tmp_path))
    deadline = time.monotonic() + 15
    while not any("driver.py" in line for line in processes_with(mark)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=15)
    assert (process.returncode, "Traceback" in err) == (143, False), err
    assert processes_with(mark) == []


def test_a_launch_on_cpus_does_not_ask_the_driver(libcuda: Path, tmp_path: Path) -> None:
    status, out, err = Launch(tmp_path, libcuda).run("cpu", FAKE_INIT="crash")
    assert (status, out) == (0, "ran\n"), err
    assert "driver" not in err


def checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: Found, *, as_json: bool
) -> tuple[int, str]:
    """`check` on a machine with this driver, on which torch tells but one thing."""

    async def look(env: object) -> Found:  # noqa: ARG001
        return found

    monkeypatch.setattr(gpu, "look", look)
    monkeypatch.setattr(check, "gather", lambda: {"torch": "2.15.0"})
    monkeypatch.setattr(platform, "node", lambda: "gpu-a01")
    monkeypatch.setattr(platform, "python_version", lambda: "3.13.5")
    return check.check(as_json=as_json), capsys.readouterr().out


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stack.json").write_text(json.dumps(FACTS))
    monkeypatch.setenv("APPTRAIN_STACK", str(tmp_path / "stack.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("image")
def test_check_tells_that_the_stack_fits_the_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = checked(monkeypatch, capsys, healthy(H100), as_json=False)
    assert (status, out) == (
        0,
        "python          3.13.5\n"
        "host            gpu-a01\n"
        "driver          580.65.06\n"
        "driver_cuda     13.0\n"
        "stack           cu132\n"
        "stack_fits      True\n"
        "gpu_problem     none\n"
        "torch           2.15.0\n",
    )


@pytest.mark.usefixtures("image")
def test_check_tells_what_to_do_where_the_stack_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = checked(monkeypatch, capsys, healthy(V100, V100), as_json=True)
    assert (status, json.loads(out)) == (
        0,
        {
            "python": "3.13.5",
            "host": "gpu-a01",
            "driver": "580.65.06",
            "driver_cuda": "13.0",
            "stack": "cu132",
            "stack_fits": False,
            "gpu_problem": f"{HAS_NONE} GPUs 0, 1 (Tesla V100-SXM2-32GB, compute capability 7.0) of gpu-a01, {ITS_OWN}: "
            f"{TAKE_CU126}, or request other GPUs",
            "torch": "2.15.0",
        },
    )


@pytest.mark.usefixtures("image")
def test_check_does_not_ask_torch_where_the_driver_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = checked(monkeypatch, capsys, Found(silent=True), as_json=True)
    facts = json.loads(out)
    assert status == 1
    assert "torch" not in facts
    assert facts["error"] == "the NVIDIA driver does not answer: torch is not asked, it would wait for it"
    assert facts["stack_fits"] is False


@pytest.mark.usefixtures("image")
def test_check_on_a_node_without_a_driver_leaves_open_whether_the_stack_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = checked(monkeypatch, capsys, Found(error=(None, NOT_FOUND)), as_json=True)
    facts = json.loads(out)
    assert status == 0
    assert (facts["driver"], facts["stack"], facts["stack_fits"], facts["gpu_problem"]) == (
        None,
        "cu132",
        None,
        None,
    )
