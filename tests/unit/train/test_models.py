from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from train import models
from train.config import Config, Optimizer
from train.learner import Learner, build_optimizer, weights_sha256
from train.status import TrainingRefused

pytestmark = pytest.mark.xdist_group("train")  # that one worker may import torchvision, for 2 s, and no other


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit_b_16", "googlenet", "squeezenet1_1"])
def test_a_torchvision_model_takes_classes_channels_and_size(name: str) -> None:
    with torch.device("meta"), torch.inference_mode():  # shapes without numbers
        model = models.build(name, classes=7, channels=1, image_size=64).eval()
        assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 7)


def test_the_grey_model_is_the_colour_model_on_grey_images() -> None:
    torch.manual_seed(3)
    colour = models.build("resnet18", classes=5, channels=3, image_size=32).eval()
    torch.manual_seed(3)
    grey = models.build("resnet18", classes=5, channels=1, image_size=32).eval()
    images = torch.rand(2, 1, 32, 32)
    first = next(module for module in grey.modules() if isinstance(module, nn.Conv2d))
    assert first.in_channels == 1
    with torch.inference_mode():
        assert torch.allclose(grey(images), colour(images.expand(2, 3, 32, 32)), atol=1e-5)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        TrainingRefused, match=r"^model.name is 'resnet19': give one of alexnet, .*, vit_b_16, .*$"
    ):
        models.build("resnet19", classes=2, channels=3, image_size=32)


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [("vit_b_32", 40, "Input shape indivisible by patch size!"), ("maxvit_t", 40, "Input size .*")],
)
def test_a_size_that_a_model_does_not_take_is_refused_with_both(name: str, size: int, why: str) -> None:
    with pytest.raises(
        TrainingRefused,
        match=rf"^model\.name={name} cannot be made for data\.image_size={size}: {why}: change one of them$",
    ):
        models.build(name, classes=2, channels=3, image_size=size)


def test_biases_and_normalisation_are_spared_weight_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    for name in ("sgd", "adamw"):
        config = Optimizer(name=name, weight_decay=0.5)  # type: ignore[arg-type]
        groups = build_optimizer(model, config).param_groups
        decays = [(group["weight_decay"], [value.dim() for value in group["params"]]) for group in groups]
        assert decays == [(0.5, [4]), (0.0, [1, 1, 1])]


def test_the_optimizer_is_the_one_that_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    sgd = build_optimizer(model, Optimizer(name="sgd", lr=0.5, momentum=0.8, nesterov=True))
    adamw = build_optimizer(model, Optimizer(name="adamw", lr=0.25))
    assert (type(sgd), type(adamw)) == (torch.optim.SGD, torch.optim.AdamW)
    assert [sgd.defaults[key] for key in ("lr", "momentum", "nesterov")] == [0.5, 0.8, True]
    assert adamw.defaults["lr"] == 0.25


def test_the_digest_of_weights_sees_names_types_shapes_and_values_but_not_layout() -> None:
    weights = {"b": torch.arange(8.0).reshape(1, 2, 2, 2), "a": torch.tensor(3)}
    # printf 'a int64 []\n' and 8 bytes, then 'b float32 [1, 2, 2, 2]\n' and 32 bytes, little-endian.
    expected = weights_sha256(weights)
    assert expected == "ad7e861fa18d1028a723f7bc5ca4a93ffe1c6f815dffba94c09ec0aa3ffe57bd"
    other_layout = weights["b"].contiguous(memory_format=torch.channels_last)
    assert weights_sha256({"a": weights["a"], "b": other_layout}) == expected
    changed = [
        {**weights, "a": torch.tensor(4)},
        {**weights, "a": torch.tensor(3, dtype=torch.int32)},
        {**weights, "a": torch.tensor([3])},
        {"b": weights["b"], "c": weights["a"]},
    ]
    assert expected not in {weights_sha256(other) for other in changed}


# --- a step ---------------------------------------------------------------------------------------------------

SGD = Optimizer(name="sgd", momentum=0.0)
CONFIG = Config(batch_size=4, optimizer=SGD)


def tied(model: Any) -> Any:
    """To no other rank."""
    model.no_sync = nullcontext
    return model


def learner(config: Config = CONFIG, rank: int = 0, **options: Any) -> Learner:
    """Of a small model, alone, without the ranks being tied together by torch."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Dropout(options.get("dropout", 0.0))
    )
    world: Any = SimpleNamespace(device=torch.device("cpu"), size=1, rank=rank, wrap=tied)
    one = Learner(model, config, world)
    one.start((1, 2, 2))
    return one


IMAGES, LABELS = (
    torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(1)),
    torch.tensor([0, 1, 2, 0]),
)


def step(one: Learner, lr: float = 1.0, parts: int = 1) -> tuple[float, Tensor]:
    """(the loss that it returns, how the parameters have changed)."""
    before = nn.utils.parameters_to_vector(one.model.parameters()).detach().clone()
    loss = one.advance(iter(zip(IMAGES.chunk(parts), LABELS.chunk(parts), strict=True)), lr)
    after = nn.utils.parameters_to_vector(one.model.parameters()).detach()
    return float(loss), after - before


def test_what_is_tried_before_the_first_step_leaves_nothing() -> None:
    one = learner()
    torch.manual_seed(3)
    fresh = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Dropout(0.0))
    assert weights_sha256(one.weights()) == weights_sha256(fresh.state_dict())
    assert all(value.grad is None or not value.grad.any() for value in one.model.parameters())
    assert (one.step, one.position, one.optimizer_tensors()) == (0, 0, {})


def test_a_step_goes_as_far_as_the_learning_rate_says_and_counts_its_samples() -> None:
    one, other = learner(), learner()
    _, once = step(one, lr=0.5)
    loss, twice = step(other, lr=1.0)
    assert torch.allclose(twice, 2 * once)
    assert (one.step, one.position) == (1, 4)
    step(one)
    assert (one.step, one.position) == (2, 8)
    scores = learner().model(IMAGES)
    expected = nn.functional.cross_entropy(scores, LABELS, reduction="sum")
    assert loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("norm", [0.0, 0.01, 100.0])
def test_gradients_are_scaled_down_to_the_norm_and_never_up(norm: float) -> None:
    _, free = step(learner())
    _, change = step(learner(replace(CONFIG, optimizer=replace(SGD, clip_norm=norm))))
    assert 0.01 < float(free.norm()) < 100.0
    expected = 0.01 if norm == 0.01 else float(free.norm())
    assert float(change.norm()) == pytest.approx(expected, rel=1e-3)
    assert torch.allclose(change / change.norm(), free / free.norm(), atol=1e-4)


def test_a_step_in_two_passes_is_that_of_their_mean() -> None:
    """But for what the model itself takes of a batch, such as its normalisation."""
    whole, parts = (learner(replace(CONFIG, accumulation=passes)) for passes in (1, 2))
    for one in (whole, parts):
        one.model.eval()
    loss, change = step(whole)
    loss_of_parts, change_of_parts = step(parts, parts=2)
    assert loss_of_parts == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(change_of_parts, change, atol=1e-6)
    assert (parts.step, parts.position) == (1, 4)


def test_label_smoothing_counts() -> None:
    loss, _ = step(learner(replace(CONFIG, label_smoothing=0.2)))
    scores = learner().model(IMAGES)
    expected = nn.functional.cross_entropy(scores, LABELS, reduction="sum", label_smoothing=0.2)
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_what_a_model_draws_differs_by_step_and_rank_and_is_the_same_again() -> None:
    def losses(rank: int, seed: int = 1) -> list[float]:
        one = learner(replace(CONFIG, seed=seed), rank, dropout=0.5)
        return [step(one, lr=0.0)[0] for _ in range(3)]

    assert losses(0) == losses(0)
    assert len({*losses(0), *losses(1), *losses(0, seed=2)}) == 9


@pytest.mark.parametrize("optimizer", [Optimizer(momentum=0.9), Optimizer(name="adamw", lr=0.01)])
def test_a_learner_that_took_a_state_over_goes_on_as_the_one_that_had_it(optimizer: Optimizer) -> None:
    config = replace(CONFIG, optimizer=optimizer)
    one, other = learner(config), learner(config)
    step(one)
    step(one)
    other.load(
        step=one.step,
        position=one.position,
        weights={name: value.clone() for name, value in one.weights().items()},
        optimizer={name: value.clone() for name, value in one.optimizer_tensors().items()},
        scaler=one.scaler_state(),
    )
    assert (other.step, other.position) == (2, 8)
    assert torch.equal(step(one, lr=0.1)[1], step(other, lr=0.1)[1])
    assert weights_sha256(one.weights()) == weights_sha256(other.weights())
