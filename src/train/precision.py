"""Number formats and memory layout of the forward and backward pass."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

_AUTOCAST: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Precision:
    name: str
    """fp32, bf16 or fp16."""
    device: torch.device
    channels_last: bool = False

    def autocast(self) -> AbstractContextManager[object]:
        """Run a forward pass in this precision. Weights and their gradients stay float32."""
        dtype = _AUTOCAST.get(self.name)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def scaler(self) -> torch.amp.GradScaler:
        """Scales the loss where small gradients would vanish (fp16), else does nothing."""
        return torch.amp.GradScaler(self.device.type, enabled=self.name == "fp16")

    def placed(self, model: nn.Module) -> nn.Module:
        """The model on the device, in this layout."""
        model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def laid_out(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last) if self.channels_last else images
