"""AlexNet at the size of small images."""

from torch import nn

from gredp.errors import GredpError


def alexnet(
    input_shape: tuple[int, int, int] = (3, 32, 32),
    classes: int = 10,
    widths: tuple[int, ...] = (64, 192, 384, 256, 256),
) -> nn.Module:
    """Five times a 3×3 convolution and a max-pooling; then 120, 84 and `classes` units."""
    channels, height, width = input_shape
    if min(height, width) < 32:
        raise GredpError(f"alexnet needs images of at least 32×32, not {height}×{width}")
    layers: list[nn.Module] = []
    for features in widths:
        layers += [nn.Conv2d(channels, features, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = features, height // 2, width // 2
    layers += [nn.Flatten(), nn.Linear(channels * height * width, 120), nn.ReLU()]
    layers += [nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)]
    return nn.Sequential(*layers)


def alexnet_half(input_shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """The same at half the widths: a quarter of the work, for machines without a GPU."""
    return alexnet(input_shape, classes, (32, 96, 192, 128, 128))
