import pytest
import torch

from train import models
from train.config import Optimizer
from train.learner import build_optimizer, weights_sha256
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
    with torch.inference_mode():
        assert torch.allclose(grey(images), colour(images.expand(2, 3, 32, 32)), atol=1e-5)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        TrainingRefused, match=r"^model.name is 'resnet19': give one of alexnet, .*, vit_b_16, .*$"
    ):
        models.build("resnet19", classes=2, channels=3, image_size=32)


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
