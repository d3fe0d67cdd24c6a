"""Draws random numbers that depend on what they are for, not on when they are drawn. `uniform` and `seed_for`
are the entries.

Every draw is keyed by the seed, a purpose and counters (epoch, sample, draw number; or step and rank). So no
generator's state has to be saved, carried along, or kept equal between ranks. The hash applies a 32-bit
mixing function (constants found by the hash-prospector project, Unlicense) for each key. It is integer
arithmetic, so equal on every device.
"""

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

ORDER: Final = 1
AUGMENT: Final = 2
STEP: Final = 3
WEIGHTS: Final = 4
PIXELS: Final = 5

_MASK: Final = 0xFFFFFFFF


def hash32(*keys: int | Tensor) -> Tensor:
    """Mix integer keys (tensors broadcast against each other) to int64 values in 0 .. 2**32-1.

    A number counts with its lower 64 bits, a tensor's elements with their lower 32.
    """
    return torch.as_tensor(_hash(keys))


def uniform(*keys: int | Tensor) -> Tensor:
    """Uniform float32 values in [0, 1), multiples of 2**-24, for the keys as in `hash32`."""
    return (hash32(*keys) >> 8).to(torch.float32) * 2.0**-24


def seed_for(*keys: int) -> int:
    """A seed in 0 .. 2**63-1 for torch's own generators."""
    high, low = (int(_hash((*keys, word))) for word in range(2))
    return (high >> 1) << 32 | low


def _hash(keys: Iterable[int | Tensor]) -> int | Tensor:
    state: int | Tensor = 0x9E3779B9
    for key in keys:
        state = _mix(state ^ (key & _MASK))
        if isinstance(key, int):
            state = _mix(state ^ ((key >> 32) & _MASK))
    return state


def _mix(x: int | Tensor) -> int | Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
