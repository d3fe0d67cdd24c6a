"""Models by name. The only module that imports torchvision."""

import torch
from torch import nn

from train.status import TrainingRefused


def build(name: str, *, classes: int, channels: int, image_size: int) -> nn.Module:
    """A torchvision classification model with random weights from torch's generator.

    `channels` 1 gives the model that equals the colour one on grey images, with a third of the work in
    its first layer. Raises TrainingRefused for an unknown name, or a size that the model does not take.
    """
    from torchvision import models  # type: ignore[import-untyped]

    known = models.list_models(module=models)
    if name not in known:
        raise TrainingRefused("config-model", f"model.name is {name!r}: give one of {', '.join(known)}")
    options: dict[str, object] = {}
    if name.startswith("vit_"):
        options["image_size"] = image_size
    if name.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    if name in ("googlenet", "inception_v3"):
        options.update(aux_logits=False, init_weights=True)
    try:
        model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    except (ValueError, AssertionError) as error:
        raise TrainingRefused(
            "config-model-size",
            f"model.name={name} cannot be made for data.image_size={image_size}: {error}: change one of them",
        ) from None
    if channels == 1:
        _take_grey(model)
    return model


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _take_grey(model: nn.Module) -> None:
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    with torch.no_grad():
        first.weight = nn.Parameter(first.weight.sum(dim=1, keepdim=True))
    first.in_channels = 1
