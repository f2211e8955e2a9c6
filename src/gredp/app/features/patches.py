"""Patches and wavelets of an image, whitened by images of nobody: nothing to learn, one record at a time.

A patch is whitened, and its cosine with each of `FILTERS` directions is taken. What lies above `THRESHOLD`,
and below −`THRESHOLD`, is averaged over overlapping cells of a grid (Coates, Ng and Lee, "An analysis of
single-layer networks in unsupervised feature learning", 2011; Thiry et al., "The unreasonable effectiveness
of patches in deep convolutional kernels methods", 2021). Directions are random, with the covariance of
whitened patches of `dead_leaves`. Beside these averages, on a 3×3 grid, the image's scattering is kept.

Each part is whitened once more. Its channels enter by their signed roots, since their tails are long, and are
multiplied by (Σ + RIDGE)^(-1/2), Σ their correlations over all cells of `random_images`. Private training
learns few directions before its noise takes over, those that vary most: whitening makes many of them vary
alike. The square root is the symmetric one, which no choice of eigenvectors can turn. Then each part is
brought to the same length.

Color images are photographs, where things may be anywhere: features are averaged over an image and its mirror
image, patches over the whole image are a third part, and scattering is averaged on a 4×4 grid. Gray ones,
which may be writing, are taken as they are.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gredp.app.features.dead_leaves import dead_leaves
from gredp.app.features.normalize import root
from gredp.app.features.random_images import random_images
from gredp.app.features.real_scattering import RealScattering
from gredp.app.features.scattering import Scattering, mirrored
from gredp.errors import GredpError

#: height and width of a patch, and directions that it is compared with
SIDE, FILTERS = 6, 512
#: of the whitened directions, those with the largest variance
DIRECTIONS = 64
#: added to the variances of a patch; the mean variance is 1
PATCH_RIDGE = 0.01
THRESHOLD, GRID, SCATTERING_GRID = 0.15, 3, 4
#: squared length of a whitened patch that counts as no contrast
FLAT = 1e-6
#: how many images of which side the directions come from, and the seed of all images
LEAVES, LEAVES_SIDE, SEED = 16, 64, 23
#: one patch of so many is mixed into directions
MIXED = 16
#: how many images the channels are whitened by, and what is added to their variances, which are 1
DRAWN, RIDGE = 1024, 1.0
#: least deviation that a channel is taken to have: of one that hardly varies, nothing can be said
SMALLEST = 1e-3
#: records at a time: more would leave the processor's cache
CHUNK = 8

#: of a channel: its mean `[C]`, or `[C, cells]`, and what the centered channels are multiplied by `[C, C]`
Whitening = tuple[Tensor, Tensor]


class Patches:
    """Images `[b, c, h, w]` in [0, 1] → `[b, n, 1, 1]`: for every part first channels, then cells."""

    def identity(self) -> dict[str, Any]:
        size = {"side": SIDE, "filters": FILTERS, "directions": DIRECTIONS, "grids": [GRID, SCATTERING_GRID]}
        ridges = {"ridges": [PATCH_RIDGE, RIDGE], "threshold": THRESHOLD}
        images = {"leaves": [LEAVES, LEAVES_SIDE], "drawn": DRAWN, "seed": SEED}
        scattering = {"gray": "scattering as it is", "scattering": Scattering().identity()}
        return {"name": "patches", **size, **ridges, **images, **scattering}

    def load_into(self, model: nn.Module) -> None:
        """Nothing: the network on the features has all its weights from its own initialization."""

    def __call__(self, x: Tensor) -> Tensor:
        patches, whitenings = _parts(*x.shape[1:], x.dtype)
        with torch.no_grad():
            found = [parts(patches, Scattering(), few) for few in x.split(CHUNK)]
        together = [torch.cat(part) for part in zip(*found)]
        return joined([whitened(part, *pair) for part, pair in zip(together, whitenings)])

    def network(self, channels: int, height: int, width: int) -> nn.Module:
        """The same in stock layers, for images of one size."""
        return PatchNetwork(channels, height, width)


class PatchNetwork(nn.Module):
    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.patches, whitenings = _parts(channels, height, width, torch.float32)
        self.scattering = RealScattering(channels, height, width)
        for place, (mean, factor) in enumerate(whitenings):
            self.register_buffer(f"mean_{place}", mean)
            self.register_buffer(f"factor_{place}", factor)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for place, part in enumerate(parts(self.patches, self.scattering, x)):
            found.append(whitened(part, *(self.get_buffer(f"{name}_{place}") for name in ("mean", "factor"))))
        return joined(found)


class Likeness(nn.Module):
    """`[b, c, height, width]` → `[b, 2·FILTERS, GRID, GRID]`: first all above, then all below."""

    whitening: Tensor
    filters: Tensor
    cells: Tensor

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        if min(height, width) < SIDE + GRID - 1:
            least = SIDE + GRID - 1
            raise GredpError(f"patches need images of at least {least}×{least}, not {height}×{width}")
        whitening, filters = bank(channels)
        rows, columns = (cells(size - SIDE + 1, GRID) for size in (height, width))
        self.register_buffer("whitening", whitening.view(-1, channels, SIDE, SIDE))
        self.register_buffer("filters", filters)
        self.register_buffer("cells", torch.kron(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        z = F.conv2d(x, self.whitening).flatten(2)
        z = z / (z.square().sum(1, keepdim=True) + FLAT).sqrt()
        shrunk = F.softshrink(z.mT @ self.filters.mT, THRESHOLD)
        net, whole = self.cells @ shrunk, self.cells @ shrunk.abs()  # above less below, and their sum
        return torch.cat([whole + net, whole - net], 2).mT.unflatten(2, (GRID, GRID)) / 2


def parts(patches: nn.Module, scattering: Any, x: Tensor) -> list[Tensor]:
    """Images → the signed roots of each part, `[b, C, cells]`."""
    fine, coarse = patches(x), scattering(x)
    if x.shape[1] == 1:
        return [root(part).flatten(2) for part in (fine, coarse)]
    fine = (fine + patches(x.flip(-1)).flip(-1)) / 2
    coarse = (coarse + coarse.flip(-1)[:, mirrored(coarse.shape[1])]) / 2
    rows, columns = (cells(size, SCATTERING_GRID).to(x) for size in coarse.shape[2:])
    fine, coarse = root(fine).flatten(2), root(rows @ coarse @ columns.mT).flatten(2)
    return [fine, fine.mean(2, keepdim=True), coarse]


def whitened(part: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
    """`[b, C, cells]` → `[b, C·cells]` of length √(C·cells)."""
    found = (factor @ (part - mean.view(len(mean), -1))).flatten(1)
    return found / (found.square().mean(1, keepdim=True) + FLAT).sqrt()


def joined(found: list[Tensor]) -> Tensor:
    """All parts equally long, with mean square 1 altogether."""
    size = sum(part.shape[1] for part in found) / len(found)
    return torch.cat([part * (size / part.shape[1]) ** 0.5 for part in found], 1)[:, :, None, None]


@cache
def _parts(
    channels: int, height: int, width: int, kind: torch.dtype
) -> tuple[nn.Module, tuple[Whitening, ...]]:
    """What compares patches, and the whitening of each part."""
    patches = Likeness(channels, height, width).to(kind)
    side = max(height, width) * 3 // 2  # shapes that are cut off lie outside
    top, start = (side - height) // 2, (side - width) // 2
    drawn = random_images(DRAWN, channels, side, SEED)[:, :, top : top + height, start : start + width]
    with torch.no_grad():
        found = [parts(patches, Scattering(), images.to(kind)) for images in drawn.split(CHUNK)]
    whitenings = (whitening(torch.cat(part).double()) for part in zip(*found))
    return patches, tuple((mean.to(kind), factor.to(kind)) for mean, factor in whitenings)


def whitening(part: Tensor, ridge: float = RIDGE) -> Whitening:
    """Of `[n, C, cells]`."""
    rows = part.mT.flatten(0, 1)
    mean, deviation = rows.mean(0), rows.std(0).clamp(min=SMALLEST)
    rows = (rows - mean) / deviation
    variances, directions = torch.linalg.eigh(rows.mT @ rows / len(rows))
    factor = directions / (variances.clamp(min=0) + ridge).sqrt() @ directions.mT
    return mean, factor / deviation


@cache
def bank(channels: int) -> tuple[Tensor, Tensor]:
    """Whitening `[directions, c·SIDE²]` and filters `[FILTERS, directions]` of length 1, in double precision.

    Patches lose their mean, and count equally in the covariance whatever their contrast.
    """
    leaves = torch.from_numpy(dead_leaves(LEAVES, channels, LEAVES_SIDE, SEED))
    patches = F.unfold(leaves, SIDE).mT.flatten(0, 1)
    patches = patches - patches.mean(1, keepdim=True)
    patches = patches[patches.square().mean(1) > FLAT]
    patches = patches / patches.square().mean(1, keepdim=True).sqrt()
    variances, directions = torch.linalg.eigh(patches.mT @ patches / len(patches))
    kept = slice(-min(DIRECTIONS, len(variances) - 1), None)
    whitening = (directions / (variances.clamp(min=0) + PATCH_RIDGE).sqrt())[:, kept].mT
    # A random patch of that covariance: a mix of all patches, whatever the signs of the directions.
    generator = torch.Generator().manual_seed(SEED)
    mix = torch.randn(FILTERS, len(patches[::MIXED]), generator=generator, dtype=torch.float64)
    chosen = mix @ patches[::MIXED] @ whitening.mT
    centered = whitening - whitening.mean(1, keepdim=True)
    return centered, chosen / chosen.norm(dim=1, keepdim=True)


def cells(size: int, grid: int) -> Tensor:
    """`[grid, size]`: the mean over each of `grid` overlapping cells of `size` places."""
    places = torch.arange(size)
    index = torch.arange(grid)[:, None]
    first, last = index * size // grid, -(-(index + 1) * size // grid)
    inside = ((first <= places) & (places < last)).double()
    return inside / inside.sum(1, keepdim=True)
