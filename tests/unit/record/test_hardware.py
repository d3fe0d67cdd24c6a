"""What a node is made of, from recorded files of its kernel."""

import os
from pathlib import Path

from entrypoint.record import hardware


def test_a_gpu_node_is_told_from_its_kernels_files(tmp_path: Path) -> None:
    files = {
        "cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t\t: sse2 avx2\n\nprocessor\t: 1\n",
        "meminfo": "MemTotal:       16384 kB\nMemFree: 1 kB\n",
        "driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun\n",
        "driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H100\nIRQ: 7\n",
        "driver/nvidia/gpus/0000:02:00.0/information": "IRQ: 7\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = hardware.look(tmp_path)
    usable = len(os.sched_getaffinity(0))
    assert found.pop("kernel") == os.uname().release
    assert found == {
        "cpu": {"model": "AMD EPYC 7763", "flags": ["avx2", "sse2"], "usable": usable},
        "memory": 16384 * 1024,
        "gpus": ["NVIDIA H100", "unknown"],
        "driver": "580.65.06",
    }


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    found = hardware.look(tmp_path)
    assert found["cpu"] | {"usable": 0} == {"model": os.uname().machine, "flags": [], "usable": 0}
    assert (found["memory"], found["gpus"], found["driver"]) == (None, [], None)
