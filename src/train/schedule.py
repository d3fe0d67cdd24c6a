"""The learning rate as a pure function of the step; nothing of it needs saving."""

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Linear warm-up to `peak` at step `warmup_steps`, then half a cosine to 0 just after the last step.

    `step` counts from 1 to `total_steps`.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - 1 - warmup_steps) / (total_steps - warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def total_steps(*, steps: int, epochs: int, train_size: int, batch_size: int) -> int:
    """`steps` where it is given (> 0), else as many as see every sample at least `epochs` times."""
    return steps or math.ceil(epochs * train_size / batch_size)
