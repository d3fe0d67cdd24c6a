"""The bf16 peak of NVIDIA's GPUs by the name that torch gives them, from NVIDIA's datasheets.

Dense products with tensor cores: where a datasheet gives the figure with sparsity, it is half of that. At the
highest clock, which a GPU under load does not hold. As of November 2026.
"""

import re
from typing import Final

_A = "NVIDIA {} Tensor Core GPU datasheet"
_PEAKS: Final = (
    ("NVIDIA A100", 312.0, _A.format("A100")),
    ("NVIDIA A40", 149.7, "NVIDIA A40 datasheet"),
    ("NVIDIA A30", 165.0, _A.format("A30")),
    ("NVIDIA A10", 125.0, _A.format("A10")),
    ("NVIDIA L4", 121.0, _A.format("L4")),
    ("NVIDIA L40", 181.05, "NVIDIA L40 datasheet"),
    ("NVIDIA L40S", 362.05, "NVIDIA L40S datasheet"),
    ("NVIDIA H100 80GB HBM3", 989.0, _A.format("H100") + ", SXM"),
    ("NVIDIA H100 PCIe", 756.0, _A.format("H100") + ", PCIe"),
    ("NVIDIA H100 NVL", 835.0, _A.format("H100") + ", NVL"),
    ("NVIDIA H200 NVL", 835.0, _A.format("H200") + ", NVL"),
    ("NVIDIA H200", 989.0, _A.format("H200") + ", SXM"),
    ("NVIDIA GH200", 990.0, "NVIDIA GH200 Grace Hopper Superchip datasheet"),
    ("NVIDIA B200", 2250.0, "NVIDIA HGX B200 datasheet"),
)


def bf16_peak(name: str) -> tuple[float, str] | None:
    """(TFLOP/s, where that stands); None for a name that is not known, and for a part of a GPU (MIG)."""
    if " MIG " in name:
        return None
    for model, tflops, source in _PEAKS:
        if re.fullmatch(rf"{re.escape(model)}([ -].*)?", name):
            return tflops, source
    return None
