"""The networks, by name."""

from collections.abc import Callable
from typing import Any

from torch import nn

from gredp.app.models.alexnet import alexnet, alexnet_half
from gredp.app.models.features import linear, mirror_linear, scatter_cnn
from gredp.app.models.lenet import lenet5, lenet5_tanh, lenet_small
from gredp.app.models.mlp import mlp
from gredp.app.models.model3 import model3
from gredp.app.models.resnet import resnet18_1conv, resnet18_2conv, resnet20
from gredp.app.models.small import cnn_tanh
from gredp.app.models.wide_resnet import wrn16_4
from gredp.errors import GredpError
from gredp.validation import to_spectral

MODELS: dict[str, Callable[[Any, int], nn.Module]] = {
    "mlp": mlp,
    "lenet-small": lenet_small,
    "lenet5": lenet5,
    "lenet5-tanh": lenet5_tanh,
    "model3": model3,
    "resnet20": resnet20,
    "alexnet": alexnet,
    "alexnet-half": alexnet_half,
    "cnn-tanh": cnn_tanh,
    "wrn16-4": wrn16_4,
    "resnet18-1conv": resnet18_1conv,
    "resnet18-2conv": resnet18_2conv,
    "linear": linear,
    "mirror-linear": mirror_linear,
    "scatter-cnn": scatter_cnn,
}


def build(name: str, input_shape: tuple[int, ...], classes: int, block: int = 0) -> nn.Module:
    """A freshly initialized network; with `block`, its fully connected layers are block-circulant."""
    if name not in MODELS:
        raise GredpError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}")
    if name != "mlp" and len(input_shape) != 3:
        raise GredpError(f"{name} takes images, not rows of {input_shape[0]} features: use --model mlp")
    model = MODELS[name](input_shape, classes)
    return to_spectral(model, block) if block else model


__all__ = ["MODELS", "build"]
