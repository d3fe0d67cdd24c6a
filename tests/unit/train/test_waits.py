"""How long a rank waits for the others within its passes."""

import time

import pytest
import torch
from torch import Tensor, nn

from train.waits import SyncWaits


class Together(nn.Module):
    """Takes its time before the model's own forward pass, and after its last gradient, as an exchange does."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        inner = x + next(self.model.parameters()).sum() * 0
        found: Tensor = self.model(inner)
        return found


@pytest.mark.parametrize("is_known", [True, False])
def test_the_exchange_counts_and_the_models_own_work_does_not(*, is_known: bool) -> None:
    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.2)
            return super().forward(x)

    model = Slow(4, 1)
    waits = SyncWaits(model, is_known=is_known)
    waits.begin()
    loss = Together(model)(torch.ones(2, 4)).sum()
    loss.backward()
    time.sleep(0.05)
    waits.end()
    if is_known:
        assert waits.waited_s is not None
        assert 0.1 <= waits.waited_s < 0.2
    else:
        assert waits.waited_s is None


def test_a_frozen_parameter_has_no_gradient() -> None:
    model = nn.Linear(4, 1)
    model.weight.requires_grad_(False)
    assert SyncWaits(model, is_known=True).waited_s == 0.0
