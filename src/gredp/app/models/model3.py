"""Model-3 of Spectral-DP: three pairs of convolutions."""

from torch import nn

from gredp.errors import GredpError


def model3(
    input_shape: tuple[int, int, int] = (3, 32, 32),
    classes: int = 10,
    widths: tuple[int, ...] = (32, 64, 128),
) -> nn.Module:
    """For each width two 3×3 convolutions and a pooling; then 120 and `classes` units."""
    channels, height, width = input_shape
    if min(height, width) < 8:
        raise GredpError(f"model3 needs images of at least 8×8, not {height}×{width}: use lenet-small")
    layers: list[nn.Module] = []
    for features in widths:
        layers += [nn.Conv2d(channels, features, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(features, features, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = features, height // 2, width // 2
    layers += [nn.Flatten(), nn.Linear(channels * height * width, 120), nn.ReLU(), nn.Linear(120, classes)]
    return nn.Sequential(*layers)
