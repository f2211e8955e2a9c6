"""The networks, by name."""

from collections.abc import Callable
from typing import Any

from torch import nn

from gredp.app.models import sequential
from gredp.app.models.features import linear, mirror_linear, orders_linear, scatter_cnn
from gredp.app.models.resnet import resnet18_1conv, resnet18_2conv, resnet20
from gredp.app.models.wide_resnet import wrn16_4
from gredp.errors import GredpError
from gredp.validation import to_spectral

#: name → what builds it, and the least height and width that it takes
MODELS: dict[str, tuple[Callable[[Any, int], nn.Module], int]] = {
    "mlp": (sequential.mlp, 1),
    "lenet-small": (sequential.lenet_small, 4),
    "lenet5": (sequential.lenet5, 12),
    "lenet5-tanh": (sequential.lenet5_tanh, 12),
    "model3": (sequential.model3, 8),
    "resnet20": (resnet20, 8),
    "alexnet": (sequential.alexnet, 32),
    "cnn-tanh": (sequential.cnn_tanh, 8),
    "wrn16-4": (wrn16_4, 1),
    "resnet18-1conv": (resnet18_1conv, 1),
    "resnet18-2conv": (resnet18_2conv, 1),
    "linear": (linear, 1),
    "mirror-linear": (mirror_linear, 1),
    "orders-linear": (orders_linear, 1),
    "scatter-cnn": (scatter_cnn, 2),
}


def build(name: str, input_shape: tuple[int, ...], classes: int, block: int = 0) -> nn.Module:
    """A freshly initialized network; with `block`, its fully connected layers are block-circulant."""
    if name not in MODELS:
        raise GredpError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}")
    if name != "mlp" and len(input_shape) != 3:
        raise GredpError(f"{name} takes images, not rows of {input_shape[0]} features: use --model mlp")
    make, least = MODELS[name]
    if name != "mlp" and min(input_shape[1:]) < least:
        size = "×".join(map(str, input_shape[1:]))
        raise GredpError(
            f"{name} needs images of at least {least}×{least}, not {size}: use a smaller network"
        )
    model = make(input_shape, classes)
    return to_spectral(model, block) if block else model


__all__ = ["MODELS", "build"]
