"""One hidden layer, for tables."""

import math

from torch import nn


def mlp(input_shape: tuple[int, ...], classes: int, width: int = 32) -> nn.Module:
    """`width` tanh units between the features and the classes."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.Tanh(), nn.Linear(width, classes)
    )
