"""Small networks for features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gredp.app.features.scattering import ANGLES, CHANNELS, SCALES, mirrored
from gredp.app.models.sequential import Shape


def standardize(channels: int) -> nn.Module:
    """All features of a record together to mean 0 and deviation 1; nothing to learn."""
    return nn.GroupNorm(1, channels, affine=False)


def linear(input_shape: Shape, classes: int) -> nn.Sequential:
    """One layer on everything, with each record standardized.

    So a record counts by its direction alone, and clipping treats faint and bold ones alike. It starts at 0:
    random first weights would be noise that no budget asks for.
    """
    channels, height, width = input_shape
    last = nn.Linear(channels * height * width, classes)
    nn.init.zeros_(last.weight)
    return nn.Sequential(standardize(channels), nn.Flatten(), last)


def mirror_linear(input_shape: Shape, classes: int) -> nn.Module:
    """`linear` on scattering features that are averaged over an image and its mirror image."""
    return nn.Sequential(Mirrored(input_shape[0]), *linear(input_shape, classes))


def orders_linear(input_shape: Shape, classes: int) -> nn.Module:
    """`linear` on scattering features, each order standardized: none outweighs another."""
    _, flatten, last = linear(input_shape, classes)
    return nn.Sequential(Orders(input_shape[0]), flatten, last)


def scatter_cnn(input_shape: Shape, classes: int) -> nn.Module:
    """Two 3×3 convolutions with tanh and a pooling between them, then one layer; records standardized.

    After Tramèr and Boneh, "Differentially private learning needs better features (or much more data)", 2021.
    """
    channels, rows, columns = input_shape
    first = [nn.Conv2d(channels, 64, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    then = [nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(), nn.Flatten()]
    last = nn.Linear(64 * (rows // 2) * (columns // 2), classes)
    return nn.Sequential(standardize(channels), *first, *then, last)


class Orders(nn.Module):
    """`[b, 81·c, H, W]` → the same: each order to mean 0 and mean square 1; nothing to learn."""

    sizes = (1, SCALES * ANGLES, CHANNELS - 1 - SCALES * ANGLES)

    def __init__(self, channels: int) -> None:
        super().__init__()
        mirrored(channels)  # rejects what is not scattering

    def forward(self, x: Tensor) -> Tensor:
        orders = x.unflatten(1, (-1, CHANNELS)).split(self.sizes, 2)
        return torch.cat([F.layer_norm(order, order.shape[1:]) for order in orders], 2).flatten(1, 2)


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
