"""Asks NVIDIA's driver about this machine, through its C libraries. gpu.py runs it as a file, so that a
driver that hangs or crashes does so in another process; `ask` is the entry.

libcuda is asked first, as torch will load it: it lists the GPUs that CUDA_VISIBLE_DEVICES leaves (numbers,
UUIDs or MIG instances), in CUDA's order. If it does not start, NVML lists every GPU of the node.

    driver.py [FILE]    FILE stands for /proc/driver/nvidia/version; prints one JSON object:
                        driver  its version, or null
                        cuda    of libcuda, as 1000 * major + 10 * minor; null without libcuda
                        error   null, or [cuInit's number, text]; without libcuda [null, the linker's text]
                        gpus    a list of objects: name, capability as [major, minor], address on the PCI
                                bus, empty if unknown
"""

import contextlib
import ctypes
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VERSION_FILE = "/proc/driver/nvidia/version"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""Of the enumeration CUdevice_attribute."""


class DriverError(Exception):
    """A library's function returned an error; `code` is its number."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def ask(version_file: str) -> dict[str, Any]:
    """The object that is printed."""
    driver = module_version(version_file)
    cuda, error, gpus = _ask_cuda()
    if driver is None or error:
        version, every = _ask_nvml()
        driver, gpus = driver or version, gpus or every
    return {"driver": driver, "cuda": cuda, "error": error, "gpus": gpus}


def module_version(file: str) -> str | None:
    """The kernel module's version; None where there is no module, or it does not say."""
    try:
        text = Path(file).read_text()
    except OSError:
        return None
    found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else None


def _ask_cuda() -> tuple[int | None, tuple[int | None, str] | None, list[dict[str, Any]]]:
    """(version, error, GPUs)."""
    try:
        call = library("libcuda.so.1")
    except OSError as error:
        return None, (None, str(error)), []
    version, count = ctypes.c_int(), ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    try:
        call("cuInit", 0)
    except DriverError as failed:
        return version.value, (failed.code, _cuda_text(call, failed.code)), []
    call("cuDeviceGetCount", ctypes.byref(count))
    return version.value, None, [_cuda_gpu(call, ordinal) for ordinal in range(count.value)]


def _cuda_text(call: Callable[..., None], code: int) -> str:
    text = ctypes.c_char_p()
    with contextlib.suppress(DriverError):
        call("cuGetErrorString", code, ctypes.byref(text))
    return (text.value or b"unknown error").decode(errors="replace")


def _cuda_gpu(call: Callable[..., None], ordinal: int) -> dict[str, Any]:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    call("cuDeviceGetName", name, len(name), device)
    call("cuDeviceGetAttribute", ctypes.byref(major), CAPABILITY_MAJOR, device)
    call("cuDeviceGetAttribute", ctypes.byref(minor), CAPABILITY_MINOR, device)
    return {**_gpu(name, major, minor), "address": cuda_address(call, device)}


def cuda_address(call: Callable[..., None], device: ctypes.c_int) -> str:
    """Of a slice of a GPU (MIG) the GPU's."""
    address = ctypes.create_string_buffer(32)
    with contextlib.suppress(DriverError, AttributeError):
        call("cuDeviceGetPCIBusId", address, len(address), device)
    return address.value.decode(errors="replace")


def _ask_nvml() -> tuple[str | None, list[dict[str, Any]]]:
    """(version, GPUs), as far as NVML answers."""
    version, count = ctypes.create_string_buffer(80), ctypes.c_uint()
    gpus: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, DriverError):
        call = library("libnvidia-ml.so.1")
        call("nvmlInit_v2")
        call("nvmlSystemGetDriverVersion", version, len(version))
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            gpus.append(_nvml_gpu(call, index))
    return version.value.decode(errors="replace") or None, gpus


def _nvml_gpu(call: Callable[..., None], index: int) -> dict[str, Any]:
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(96)
    call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
    call("nvmlDeviceGetName", device, name, len(name))
    call("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
    return _gpu(name, major, minor)


def _gpu(name: Any, major: ctypes.c_int, minor: ctypes.c_int) -> dict[str, Any]:
    capability = [major.value, minor.value]
    return {"name": name.value.decode(errors="replace"), "capability": capability, "address": ""}


def library(name: str) -> Callable[..., None]:
    """What calls the library's functions by name and raises Failed unless they return 0. Raises OSError."""
    library = ctypes.CDLL(name)

    def call(function: str, *arguments: object) -> None:
        if code := library[function](*arguments):
            raise DriverError(code)

    return call


if __name__ == "__main__":
    stdout = os.dup(1)
    os.dup2(2, 1)  # the driver's libraries may print
    os.write(stdout, json.dumps(ask(sys.argv[1] if len(sys.argv) > 1 else VERSION_FILE)).encode())
