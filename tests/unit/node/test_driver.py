"""The driver's own words, over libraries that stand for NVIDIA's, and a launch that asks it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import entrypoint
from entrypoint.job import outcome
from entrypoint.node import driver, gpu
from entrypoint.node.gpu import DriverReport, Gpu
from tests.unit.node.machines import CU132, FACTS, HAS_NONE, ITS_OWN

CHECKOUT = Path(entrypoint.__file__).parents[1]


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
int cuDeviceGetPCIBusId(char *address, int size, int device) {
    if (number("FAKE_OLD")) return 801;
    snprintf(address, size, "0000:%X:00.0", device);
    return 0;
}
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

    def look(self, seconds: float = gpu.ANSWER, **env: str) -> DriverReport:
        path = ":".join(map(str, self.libraries))
        given = {"LD_LIBRARY_PATH": path, **env}
        return asyncio.run(gpu.ask_driver(given, seconds=seconds, version_file=self.module))


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
    assert machine.look(FAKE_CUDA="13020", FAKE_GPUS="2", FAKE_MAJOR="9") == DriverReport(
        driver="580.65.06",
        cuda=(13, 2),
        gpus=(Gpu(name="Fake 100", capability=(9, 0)), Gpu(name="Fake 101", capability=(9, 1))),
    )
    assert [one.address for one in machine.look(FAKE_GPUS="2").gpus] == ["0000:64:00.0", "0000:65:00.0"]
    assert [one.address for one in machine.look(FAKE_GPUS="1", FAKE_OLD="1").gpus] == [""]
    assert machine.look(FAKE_CUDA="12040") == DriverReport(driver="580.65.06", cuda=(12, 4))
    assert machine.look(FAKE_CUDA="12040", FAKE_NOISE="1") == DriverReport(driver="580.65.06", cuda=(12, 4))


def test_nvml_tells_the_version_where_the_kernel_module_does_not(
    libcuda: Path, libnvidia_ml: Path, tmp_path: Path
) -> None:
    machine = Machine(libraries=(libcuda, libnvidia_ml), module=tmp_path / "no-such-file")
    found = machine.look(FAKE_CUDA="11040", FAKE_GPUS="1", FAKE_MAJOR="7")
    assert found == DriverReport(
        driver="470.256.02", cuda=(11, 4), gpus=(Gpu(name="Fake 100", capability=(7, 0)),)
    )
    assert machine.look(FAKE_CUDA="11040", FAKE_NVML_LOST="1") == DriverReport(cuda=(11, 4))


def test_nvml_tells_the_gpus_where_cuda_does_not_start(
    libcuda: Path, libnvidia_ml: Path, module: Path
) -> None:
    machine = Machine(libraries=(libcuda, libnvidia_ml), module=module)
    first, second = Gpu(name="NVML 7", capability=(7, 5)), Gpu(name="NVML 8", capability=(8, 5))
    mismatch = DriverReport(
        driver="580.65.06", cuda=(13, 2), error=(803, "the text of the error"), gpus=(first, second)
    )
    assert machine.look(FAKE_CUDA="13020", FAKE_INIT="803") == mismatch
    lost = machine.look(FAKE_CUDA="13020", FAKE_INIT="999", FAKE_SECOND_LOST="1")
    assert lost == DriverReport(driver="580.65.06", cuda=(13, 2), error=(999, "unknown error"), gpus=(first,))


def test_libraries_that_are_not_there_are_no_driver(module: Path, tmp_path: Path) -> None:
    none = empty(tmp_path / "none", "libcuda.so.1", "libnvidia-ml.so.1")
    why = (None, f"{none}/libcuda.so.1: file too short")
    assert Machine(libraries=(none,), module=module).look() == DriverReport(driver="580.65.06", error=why)
    assert Machine(libraries=(none,), module=tmp_path / "no-such-file").look() == DriverReport(error=why)


def test_a_driver_that_hangs_is_left_alone_after_its_time(libcuda: Path, module: Path) -> None:
    machine = Machine(libraries=(libcuda,), module=module)
    mark = f"APPTRAIN_TEST={module}"
    assert machine.look(0.5, FAKE_INIT="hang", APPTRAIN_TEST=str(module)) == DriverReport(silent=True)
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
    assert machine.look(FAKE_INIT="crash") == DriverReport(failed="status -9")


def test_a_library_that_lacks_a_function_is_no_reason_to_refuse(module: Path, tmp_path: Path) -> None:
    compiled(tmp_path, "libcuda.so.1", "int cuInit(unsigned flags) { return flags; }")
    found = Machine(libraries=(tmp_path,), module=module).look()
    library = tmp_path / "libcuda.so.1"
    why = f"status 1: AttributeError: {library}: undefined symbol: cuDriverGetVersion"
    assert found == DriverReport(failed=why)
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
    assert err.splitlines()[-1] == f"apptrain: {message}"
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
    message = "apptrain: the NVIDIA driver on 127.0.0.1 could not be asked (status -9): going on without"
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
