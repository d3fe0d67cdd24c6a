"""The loop that the training program is measured against: one file, torch's own DDP, nothing else.

The same model, data, batch and optimizer as a config of the training program; no metrics, no bar, no
checkpoints, no agreement on a stop. Run by torchrun; rank 0 prints the images per second of the steps
behind the warm-up.

    torchrun --nproc-per-node 2 benchmarks/ddp_loop.py CONFIG STEPS WARMUP [key=value ...]
"""

import itertools
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from train import config as configs
from train import datasets, models
from train.sampler import Keys


def keys(share: int, size: int) -> Iterator[Keys]:
    """Epochs and indices of one batch after the other, in file order."""
    for number in itertools.count(dist.get_rank()):
        indices = torch.arange(number * share, (number + 1) * share)
        yield indices // size, indices % size


def main() -> None:
    name, steps, warmup, *overrides = sys.argv[1:]
    config = configs.load(configs.find(name), overrides)
    dist.init_process_group("gloo")
    torch.manual_seed(config.seed)
    source = datasets.open_source(config.data, seed=config.seed, device=torch.device("cpu"))
    model = models.build(
        config.model.name, classes=source.classes, channels=source.channels, image_size=source.image_size
    )
    model = DistributedDataParallel(model.train())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, weight_decay=config.optimizer.weight_decay
    )
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    share = config.batch_size // dist.get_world_size()
    batches = source.train_batches(keys(share, source.train_size))
    for step in range(int(steps)):
        if step == int(warmup):
            dist.barrier()
            begin = time.perf_counter()
        images, labels = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(images), labels).backward()
        if config.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - begin
    if dist.get_rank() == 0:
        print(f"images_per_s {(int(steps) - int(warmup)) * config.batch_size / seconds}")
    dist.destroy_process_group()


main()
