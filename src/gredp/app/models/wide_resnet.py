"""A wide residual network with group normalization and weight standardization, as De et al. 2022 train it."""

import torch.nn.functional as F
from torch import Tensor, nn

from gredp.app.models.sequential import Shape
from gredp.layers import WSConv2d


class WideBlock(nn.Module):
    """Normalize, activate, convolve, twice, around an identity or a 1×1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 16) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs)
        self.conv1 = WSConv2d(inputs, outputs, 3, stride, 1)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.conv2 = WSConv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = WSConv2d(inputs, outputs, 1, stride) if stride != 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        out: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return out + (x if self.shortcut is None else self.shortcut(active))


def wrn16_4(input_shape: Shape, classes: int) -> nn.Module:
    """WideResNet-16-4: a stem of 16 channels and two blocks for each width."""
    layers: list[nn.Module] = [WSConv2d(input_shape[0], 16, 3, padding=1)]
    for inputs, width, stride in ((16, 64, 1), (64, 128, 2), (128, 256, 2)):
        layers += [WideBlock(inputs, width, stride), WideBlock(width, width, 1)]
    layers += [nn.GroupNorm(16, 256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, classes))
