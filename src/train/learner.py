"""Holds what training changes: weights, optimizer, loss scale and step, and how one step changes them. Begin
at `Learner`.

It names the parts of the state that must be saved, so that a resumed run goes on bit for bit. Everything else
(learning rate, data order, random numbers) is a function of the step.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from train import rng
from train.config import Config, Optimizer
from train.datasets import Batch
from train.distributed import World, without_sync
from train.precision import Precision
from train.waits import SyncWaits

Tensors = dict[str, Tensor]


class Learner:
    """A model in training on one rank. All ranks hold the same weights."""

    def __init__(self, model: nn.Module, config: Config, world: World) -> None:
        """`model` on the CPU, with the same weights on every rank."""
        self.step = 0
        """Completed optimizer steps."""
        self.position = 0
        """Samples of the training stream that they have consumed."""
        self.precision = Precision(
            name=config.precision, device=world.device, channels_last=config.channels_last
        )
        self.model = self.precision.placed(model)
        self._world, self._config = world, config
        self._optimizer = build_optimizer(self.model, config.optimizer)
        self._scaler = self.precision.scaler()
        self._loss = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)

    def start(self, image: tuple[int, int, int]) -> None:
        """Tie the ranks together, after any state was loaded. `image`: an image's channels, height, width."""
        self._parallel = self._world.wrap(self.model)
        forward: Callable[[Tensor], Tensor] = self._parallel
        self._forward = torch.compile(forward) if self._config.compile else forward
        self._settle(image)
        is_known = self._world.device.type == "cpu" and not self._config.compile
        self.waits = SyncWaits(self.model, is_known=is_known)

    def _settle(self, image: tuple[int, int, int]) -> None:
        """Do one pass and forget it.

        DistributedDataParallel orders the gradients anew after its first, and among more than two ranks the
        last bits of a sum depend on that order: a resumed run must not begin with another.
        """
        before = {name: value.clone() for name, value in self.model.named_buffers()}
        size = self._config.batch_size // (self._world.size * self._config.accumulation)
        images = torch.zeros((size, *image), device=self._world.device)
        labels = torch.zeros(size, dtype=torch.int64, device=self._world.device)
        with self.precision.autocast():
            loss = self._loss(self._forward(self.precision.laid_out(images)), labels)
        loss.backward()
        self._optimizer.zero_grad()
        for name, value in self.model.named_buffers():
            value.copy_(before[name])

    def advance(self, batches: Iterator[Batch], learning_rate: float) -> Tensor:
        """Do one optimizer step. Returns the sum of the losses of this rank's samples, on the device."""
        self.step += 1
        # Dropout and the like draw from torch's generators: keyed by step and rank, no state to save.
        torch.manual_seed(rng.seed_for(self._config.seed, rng.STEP, self.step, self._world.rank))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        passes = self._config.accumulation
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for number in range(1, passes + 1):
            images, labels = next(batches)
            self.waits.begin()
            with without_sync(self._parallel, number < passes):
                with self.precision.autocast():
                    loss = self._loss(self._forward(self.precision.laid_out(images)), labels)
                self._scaler.scale(loss / passes if passes > 1 else loss).backward()
            self.waits.end()
            loss_sum += loss.detach() * len(labels)
        if self._config.optimizer.clip_norm:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optimizer.clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self.position += self._config.batch_size
        return loss_sum

    def weights(self) -> Tensors:
        """Parameters and buffers by name, as they are on this rank.

        Rank 0's are the state: DistributedDataParallel hands its buffers (BatchNorm's statistics) to all
        ranks at the start of every step, so what the other ranks' hold between steps is never used.
        """
        return self.model.state_dict()

    def optimizer_tensors(self) -> Tensors:
        """The optimizer's state as PARAMETER/NAME; all of it is tensors in sgd and adamw."""
        state = self._optimizer.state
        return {
            f"{name}/{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in state[parameter].items()
            if value is not None
        }

    def scaler_state(self) -> dict[str, Any]:
        """The loss scale as plain numbers; empty without fp16."""
        return self._scaler.state_dict()

    def load(
        self,
        *,
        step: int,
        position: int,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        scaler: Mapping[str, Any],
    ) -> None:
        """Take over a saved state. Tensors may lie anywhere. Call it before `start`."""
        self.step, self.position = step, position
        self.model.load_state_dict(weights)
        per_parameter: dict[int, Tensors] = {}
        parameters = dict(self.model.named_parameters())
        numbers = self._numbers()
        for name, value in optimizer.items():
            owner, _, key = name.rpartition("/")
            like = parameters[owner]
            if value.shape == like.shape:
                saved = torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)
            else:
                saved = value.cpu()  # Step counts of adamw, which it reads on the CPU.
            per_parameter.setdefault(numbers[owner], {})[key] = saved
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": per_parameter, "param_groups": groups})
        if scaler:
            self._scaler.load_state_dict(dict(scaler))

    def _numbers(self) -> dict[str, int]:
        """Parameter names to their numbers in the optimizer's state."""
        by_id = {id(parameter): name for name, parameter in self.model.named_parameters()}
        ordered = [value for group in self._optimizer.param_groups for value in group["params"]]
        return {by_id[id(parameter)]: number for number, parameter in enumerate(ordered)}


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """The optimizer, without weight decay on biases and normalisation (tensors of one dimension)."""
    parameters = list(model.parameters())
    groups = [
        {"params": [value for value in parameters if value.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [value for value in parameters if value.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over all parameters and buffers in the order of their names: for each the line
    `NAME DTYPE SHAPE` (shape as in [64, 3, 7, 7]) and the elements' bytes in row-major order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
