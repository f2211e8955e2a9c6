"""Small networks with bounded activations, of proven worth under differential privacy."""

from torch import nn

from gredp.errors import GredpError


def cnn_tanh(input_shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """The end-to-end networks of Papernot et al. 2021, as Tramèr and Boneh 2021 tabulate them.

    Tanh bounds what a noisy weight can do to its output. Gray images: 16 kernels of 8×8 and 32 of 4×4, both
    with stride 2; color: Model-3's six convolutions and 128 units.
    """
    channels, height, width = input_shape
    least = 16 if channels == 1 else 8
    if min(height, width) < least:
        raise GredpError(f"cnn-tanh needs images of at least {least}×{least}, not {height}×{width}")
    return _gray(height, width, classes) if channels == 1 else _color(channels, height, width, classes)


def _gray(height: int, width: int, classes: int) -> nn.Module:
    rows, columns = (((n - 4) // 2 - 4) // 2 for n in (height, width))
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * rows * columns, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def _color(channels: int, height: int, width: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for features in (32, 64, 128):
        layers += [nn.Conv2d(channels, features, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(features, features, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        channels = features
    size = channels * (height // 8) * (width // 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, 128), nn.Tanh(), nn.Linear(128, classes))
