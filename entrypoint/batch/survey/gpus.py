"""What a GPU's name says: which stack it needs, and whether CUDA runs on it at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

from entrypoint.batch.survey.draft import Line

OLD = re.compile(r"k[248]0|m[46]0|p40?$|p100|pascal|titan.?(x|xp)?$|gtx|10[678]0", re.IGNORECASE)
"""Maxwell and Pascal, and older: the builds for CUDA 12.8 have dropped them too."""
VOLTA = re.compile(r"v100|volta|titan.?v", re.IGNORECASE)
"""CUDA 13 has dropped them."""
AMD = re.compile(r"(^|[^a-z])mi[0-9]{2,3}", re.IGNORECASE)
PARTS = re.compile(r"[0-9]g\.[0-9]+gb|(^|[^a-z])mig", re.IGNORECASE)
"""Slices of a GPU, which NCCL does not join between nodes."""


def lines(model: str, source: str) -> Iterator[Line]:
    """What follows from the model of the GPUs; empty: the scheduler does not name it."""
    if not model:
        text = "which GPUs are these? For a V100 say stack: cu128, for an older one (P100) stack: cu126"
        yield Line("container.stack", questions=(text,))
    elif VOLTA.search(model):
        yield Line("container.stack", "cu128", f"{source}: {model}; CUDA 13 has dropped GPUs before Turing")
    elif OLD.search(model):
        yield Line(
            "container.stack", "cu126", f"{source}: {model}; newer stacks have dropped GPUs before Volta"
        )
    elif AMD.search(model):
        text = (
            f"{model} looks like a GPU of AMD: the image has CUDA alone. Is there a partition with NVIDIA's?"
        )
        yield Line("container.stack", questions=(text,))
    elif PARTS.search(model):
        text = f"{model} looks like a slice of a GPU (MIG): is there a partition with whole ones?"
        yield Line("container.stack", questions=(text,))


def rank(model: str) -> int:
    """The higher, the rather it is chosen."""
    return -int(bool(AMD.search(model) or PARTS.search(model)))
