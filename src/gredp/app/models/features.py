"""Small networks for the features of a front."""

import torch
from torch import Tensor, nn

from gredp.app.features.scattering import mirrored
from gredp.errors import GredpError


def linear(input_shape: tuple[int, int, int], classes: int = 10) -> nn.Sequential:
    """One layer on everything, each record first brought to mean 0 and deviation 1.

    So a record counts by its direction alone, and clipping treats faint and bold ones alike.
    """
    channels, height, width = input_shape
    return nn.Sequential(one_deviation(channels), nn.Flatten(), nn.Linear(channels * height * width, classes))


def mirror_linear(input_shape: tuple[int, int, int], classes: int = 10) -> nn.Module:
    """`linear` on scattering features that are averaged over an image and its mirror image."""
    return nn.Sequential(Mirrored(input_shape[0]), *linear(input_shape, classes))


class Mirrored(nn.Module):
    """`[b, 81·c, H, W]` → the same: features that do not tell left from right; nothing to learn.

    What is averaged away would take part in every norm that is clipped.
    """

    order: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor(mirrored(channels)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + x.flip(-1)[:, self.order]) / 2


def one_deviation(channels: int) -> nn.Module:
    """All of a record's features together to mean 0 and deviation 1; nothing to learn."""
    return nn.GroupNorm(1, channels, affine=False)


def scatter_cnn(
    input_shape: tuple[int, int, int] = (243, 8, 8), classes: int = 10, width: int = 64
) -> nn.Module:
    """Two 3×3 convolutions with tanh and a pooling between them, then one layer; records as for `linear`.

    After Tramèr and Boneh, "Differentially private learning needs better features (or much more data)", 2021.
    """
    channels, rows, columns = input_shape
    if min(rows, columns) < 2:
        raise GredpError(f"scatter-cnn needs features of at least 2×2, not {rows}×{columns}")
    return nn.Sequential(
        one_deviation(channels),
        nn.Conv2d(channels, width, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(width * (rows // 2) * (columns // 2), classes),
    )
