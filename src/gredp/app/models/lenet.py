"""LeNet-5 as the paper uses it, and a small one for 8×8 digits."""

from torch import nn

from gredp.errors import GredpError


def lenet5(
    input_shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    second: int = 16,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Module:
    """Two 5×5 convolutions with pooling, then 120, 84 and `classes` units.

    `second` is the width of the second convolution: customarily 16; the paper's table prints 6. It does not
    say which activation it takes.
    """
    channels, height, width = input_shape
    if min(height, width) < 12:
        raise GredpError(f"lenet5 needs images of at least 12×12, not {height}×{width}: use lenet-small")
    rows, columns = ((n // 2 - 4) // 2 for n in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, second, 5),
        activation(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * rows * columns, 120),
        activation(),
        nn.Linear(120, 84),
        activation(),
        nn.Linear(84, classes),
    )


def lenet5_tanh(input_shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """LeNet-5 with the bounded activation of its inventors, which noise hurts less."""
    return lenet5(input_shape, classes, activation=nn.Tanh)


def lenet_small(input_shape: tuple[int, int, int] = (1, 8, 8), classes: int = 10) -> nn.Module:
    """The same plan at the size of the embedded digits: two 3×3 convolutions, then 64 and `classes` units."""
    channels, height, width = input_shape
    if min(height, width) < 4:
        raise GredpError(f"lenet-small needs images of at least 4×4, not {height}×{width}")
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )
