"""A network's forward pass in the precision of a run."""

from typing import Literal

import torch
from torch import Tensor, nn


def outputs_in(precision: Literal["single", "bf16"], model: nn.Module, x: Tensor) -> Tensor:
    """In single precision, whatever the network itself computes in."""
    half = precision == "bf16"
    if x.dim() == 4 and _quicker_by_pixel(model, half):
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        outputs: Tensor = model(x)
    return outputs.float()


def _quicker_by_pixel(model: nn.Module, half: bool) -> bool:
    """Convolutions are, in `channels_last` order; torch's group normalization in half precision is slower."""
    layers = [*model.modules()]
    slower = half and any(isinstance(layer, nn.GroupNorm) for layer in layers)
    return not slower and any(isinstance(layer, nn.Conv2d) for layer in layers)
