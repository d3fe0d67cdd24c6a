"""Computes the accuracy over all ranks; each sample counts once. `evaluate` is the entry.

Whole batches are dealt out in turn and integers are summed, so the figure is that of a single process to the
last digit. All ranks use rank 0's BatchNorm statistics, which are also the saved ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from train.datasets import Source
from train.distributed import World
from train.precision import Precision
from train.sampler import evaluation_batches


@dataclass(frozen=True, kw_only=True)
class Score:
    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """In 0..1."""
        return self.correct / self.total


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    source: Source,
    precision: Precision,
    world: World,
    batch_size: int,
    on: Literal["test", "train"] = "test",
    beat: Callable[[], None] = lambda: None,
) -> Score:
    """Count the right answers on the evaluation split, or on as many of the first training images; every
    rank returns the same score. `beat` is called for every batch."""
    world.broadcast(list(model.buffers()))
    model.eval()
    size = source.test_size if on == "test" else min(source.test_size, source.train_size)
    batches = evaluation_batches(size=size, batch_size=batch_size, rank=world.rank, world_size=world.size)
    correct = torch.zeros((), dtype=torch.int64, device=world.device)
    total = 0
    for images, labels in source.plain_batches(batches, on):
        with precision.autocast():
            answers = model(precision.laid_out(images)).argmax(1)
        correct += (answers == labels).sum()
        total += len(labels)
        beat()
    model.train()
    summed_correct, summed_total = world.sum([int(correct), total])
    return Score(correct=summed_correct, total=summed_total)
