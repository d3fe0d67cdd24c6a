"""How long a rank waits for the others within its passes, by a clock that the test sets."""

import pytest
import torch
from torch import Tensor, nn

from train import waits
from train.waits import SyncWaits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waits, "time", made)
    return made


class Model(nn.Linear):
    """Its forward pass takes 20 s."""

    def __init__(self, clock: Clock):
        super().__init__(4, 1)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 20
        return super().forward(x)


def step(model: Model, found: SyncWaits) -> None:
    """3 s before the model's own forward pass, 5 s after its last gradient, as an exchange takes them."""
    found.begin()
    model.clock.now += 3
    model(torch.ones(2, 4)).sum().backward()
    model.clock.now += 5
    found.end()


@pytest.mark.parametrize(("is_known", "waited"), [(True, 16.0), (False, None)])
def test_the_exchange_counts_and_the_models_own_work_does_not(
    clock: Clock, *, is_known: bool, waited: float | None
) -> None:
    model = Model(clock)
    found = SyncWaits(model, is_known=is_known)
    step(model, found)
    step(model, found)
    assert found.waited_s == waited


def test_evaluations_between_the_steps_do_not_count(clock: Clock) -> None:
    model = Model(clock)
    found = SyncWaits(model, is_known=True)
    for _ in range(2):
        step(model, found)
        clock.now += 1000
        with torch.inference_mode():
            model(torch.ones(2, 4))
            model(torch.ones(2, 4))
    assert found.waited_s == 16.0


def test_a_frozen_parameter_has_no_gradient(clock: Clock) -> None:
    model = Model(clock)
    model.weight.requires_grad_(False)
    found = SyncWaits(model, is_known=True)
    step(model, found)
    assert found.waited_s == 8.0
