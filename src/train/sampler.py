"""Decides which samples a step sees: a pure function of seed, data set size and position. `rank_batches` is
the entry for training, `evaluation_batches` for evaluation.

The training data are an endless stream: the samples of epoch 0 in an order of their own, then those of epoch
1 in another, and so on. The position is the number of samples consumed. A global batch is the next
`batch_size` of the stream, and each rank takes its consecutive share. A batch at the end of an epoch is
filled up from the next one. So every batch is whole, and every sample is seen exactly once an epoch, whatever
the batch size and the number of ranks.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from train import rng

Keys = tuple[Tensor, Tensor]
"""Epochs and sample indices, int64 [n] each: what a sample's data and augmentation are keyed by."""


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int, device: str = "cpu") -> Tensor:
    """The order of an epoch: int64 [size], each of 0 .. size-1 once."""
    samples = torch.arange(size, device=device)
    high, low = (rng.hash32(seed, rng.ORDER, epoch, samples, draw) for draw in range(2))
    return torch.argsort((high << 31) ^ low, stable=True)


def stream(seed: int, size: int, position: int, count: int, device: str = "cpu") -> Keys:
    """The `count` samples that follow the first `position` ones."""
    epochs, indices = [], []
    while count > 0:
        epoch, offset = divmod(position, size)
        part = permutation(seed, epoch, size, device)[offset : offset + count]
        epochs.append(torch.full_like(part, epoch))
        indices.append(part)
        position += len(part)
        count -= len(part)
    return torch.cat(epochs), torch.cat(indices)


def rank_batches(
    *,
    seed: int,
    size: int,
    position: int,
    batch_size: int,
    accumulation: int,
    rank: int,
    world_size: int,
    steps: int,
    device: str = "cpu",
) -> Iterator[Keys]:
    """The micro-batches of one rank for `steps` steps, `accumulation` a step, from a position on.

    `batch_size` is the global one, a multiple of `world_size * accumulation`.
    """
    share = batch_size // world_size
    micro = share // accumulation
    for step in range(steps):
        first = position + step * batch_size + rank * share
        for number in range(accumulation):
            yield stream(seed, size, first + number * micro, micro, device)


def evaluation_batches(*, size: int, batch_size: int, rank: int, world_size: int) -> Iterator[range]:
    """The evaluation batches of one rank: whole batches in turn, so that a batch holds the same samples,
    and gives the same bits, however many ranks there are."""
    for first in range(rank * batch_size, size, world_size * batch_size):
        yield range(first, min(first + batch_size, size))
