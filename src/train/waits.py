"""Measures how long a rank waits for the others within its passes: `SyncWaits`.

DistributedDataParallel hands rank 0's buffers to all before a forward pass, and averages gradients while the
backward pass goes on. What is counted is the time in which this rank does nothing else: until the model's own
forward pass begins, and from its last gradient to the end of the backward pass. It holds the exchange itself
and the wait for slower ranks; the rank that waits least tells the exchange alone.
"""

import time
from typing import Any

from torch import nn


class SyncWaits:
    """On a CPU. A GPU works beside this process, so a clock here tells nothing of it; neither does it of a
    model that torch compiles."""

    def __init__(self, model: nn.Module, *, is_known: bool) -> None:
        """`model`: the one inside of DistributedDataParallel."""
        self.waited_s: float | None = 0.0 if is_known else None
        """So far; None where it cannot be measured."""
        self._mark: float | None = None
        """Since when nothing of its own goes on; None outside of passes: evaluations do not count."""
        if is_known:
            model.register_forward_pre_hook(self._forward_begins)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._gradient_is_there)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Before a forward pass of all ranks."""
        self._mark = time.monotonic()

    def end(self) -> None:
        """After the backward pass."""
        self._add(time.monotonic())
        self._mark = None

    def _forward_begins(self, *_: Any) -> None:
        if self._mark is not None:
            now = time.monotonic()
            self._add(now)
            self._mark = now

    def _gradient_is_there(self, _: Any) -> None:
        self._mark = time.monotonic()

    def _add(self, now: float) -> None:
        if self.waited_s is not None and self._mark is not None:
            self.waited_s += now - self._mark
