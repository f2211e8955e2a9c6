"""Networks without branches: convolutions with pooling, then fully connected layers."""

import math
from collections.abc import Sequence

from torch import nn

from gredp.errors import GredpError

Shape = tuple[int, int, int]


def classifier(inputs: int, units: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    """Fully connected layers with these numbers of units, and an activation between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for outputs in units:
        layers += [nn.Linear(inputs, outputs), activation()]
        inputs = outputs
    return layers[:-1]


def convolutional(
    input_shape: Shape,
    widths: Sequence[int],
    units: Sequence[int],
    repeats: int = 1,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Module:
    """For each width `repeats` 3×3 convolutions and a pooling; then layers of these `units`."""
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for features in widths:
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, features, 3, padding=1), activation()]
            channels = features
        layers.append(nn.MaxPool2d(2))
        height, width = height // 2, width // 2
    return nn.Sequential(*layers, *classifier(channels * height * width, units, activation))


def mlp(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One hidden layer of 32 tanh units, for tables."""
    return nn.Sequential(*classifier(math.prod(input_shape), (32, classes), nn.Tanh))


def lenet_small(input_shape: Shape, classes: int) -> nn.Module:
    """LeNet at the size of the embedded digits."""
    return convolutional(input_shape, (8, 16), (64, classes))


def lenet5(
    input_shape: Shape = (1, 28, 28),
    classes: int = 10,
    second: int = 16,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Module:
    """LeNet-5 as the paper uses it: two 5×5 convolutions with pooling, then 120, 84 and `classes` units.

    `second` is the width of the second convolution: customarily 16; the paper's table prints 6. The paper
    does not name the activation.
    """
    channels, height, width = input_shape
    pixels = (height // 2 - 4) // 2 * ((width // 2 - 4) // 2)
    first = [nn.Conv2d(channels, 6, 5, padding=2), activation(), nn.MaxPool2d(2)]
    then = [nn.Conv2d(6, second, 5), activation(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *then, *classifier(second * pixels, (120, 84, classes), activation))


def lenet5_tanh(input_shape: Shape, classes: int) -> nn.Module:
    """LeNet-5 with the bounded activation of its inventors, which noise hurts less."""
    return lenet5(input_shape, classes, activation=nn.Tanh)


def model3(input_shape: Shape = (3, 32, 32), classes: int = 10) -> nn.Module:
    """Model-3 of Spectral-DP: three pairs of convolutions."""
    return signal_kept(convolutional(input_shape, (32, 64, 128), (120, classes), 2))


def alexnet(input_shape: Shape, classes: int) -> nn.Module:
    """AlexNet at the size of small images."""
    return signal_kept(convolutional(input_shape, (64, 192, 384, 256, 256), (120, 84, classes)))


def signal_kept(network: nn.Module) -> nn.Module:
    """The network with He's initial weights, for many layers without normalization.

    Torch's own shrink a signal by √6 at every layer: after eight of them the first steps see little but
    biases, and little but noise where there is some.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


def cnn_tanh(input_shape: Shape, classes: int) -> nn.Module:
    """The end-to-end networks of Papernot et al. 2021, as Tramèr and Boneh 2021 tabulate them.

    Tanh bounds what a noisy weight can do to its output. Gray images: 16 kernels of 8×8 and 32 of 4×4, both
    with stride 2; color: Model-3's six convolutions and 128 units.
    """
    channels, height, width = input_shape
    if channels != 1:
        return convolutional(input_shape, (32, 64, 128), (128, classes), 2, nn.Tanh)
    if min(height, width) < 16:
        raise GredpError(f"cnn-tanh needs images of at least 16×16 if they are gray, not {height}×{width}")
    pixels = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    first = [nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1)]
    then = [nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1)]
    return nn.Sequential(*first, *then, *classifier(32 * pixels, (32, classes), nn.Tanh))
