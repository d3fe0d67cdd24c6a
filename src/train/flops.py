"""Counts the floating-point operations of a training step, for the figures of a run: `per_image`."""

from typing import Any

import torch
from torch import Tensor

from train import models, peaks


def per_image(name: str, *, classes: int, channels: int, image_size: int) -> float | None:
    """Of a forward and a backward pass of one image, as torch's own counter has them: convolutions, matrix
    products and attention, two for each multiply-add; on shapes without numbers. None for a model that cannot
    be counted."""
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with torch.device("meta"):
            model = models.build(name, classes=classes, channels=channels, image_size=image_size)
            images = torch.zeros(2, channels, image_size, image_size)  # normalisation needs two
        with FlopCounterMode(display=False) as counter:
            out: Tensor = model(images)
            out.sum().backward()  # type: ignore[no-untyped-call]
    except Exception:  # of any model of torchvision: a run does not fail for a figure
        return None
    return float(counter.get_total_flops()) / 2


def figures(
    flop: float | None, images_per_s: float | None, *, precision: str, device: str, ranks: int
) -> dict[str, Any]:
    """What a run has reached. `device`: as torch names the GPU of each rank; the share of its peak is that of
    bf16 and fp16, whose peak is one, and None where it is not known."""
    known = peaks.bf16_peak(device) if precision in ("bf16", "fp16") else None
    rate = None if flop is None or images_per_s is None else flop * images_per_s / 1e12
    return {
        "gflop_per_image": None if flop is None else flop / 1e9,
        "tflop_per_s": rate,
        "peak_share": None if rate is None or known is None else rate / (known[0] * ranks),
    }
