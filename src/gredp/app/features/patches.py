"""How much an image's patches are like patches of images of nobody: nothing to learn, one record at a time.

A patch is whitened, and its cosine with each of `FILTERS` whitened patches of dead leaves is taken. What lies
above `THRESHOLD`, and below −`THRESHOLD`, is averaged over overlapping cells of a `GRID`×`GRID` grid (Coates,
Ng and Lee, "An analysis of single-layer networks in unsupervised feature learning", 2011; Thiry et al., "The
unreasonable effectiveness of patches in deep convolutional kernels methods", 2021). Whitening and filters
come from `dead_leaves` at a fixed seed.

Color images are photographs: the features are averaged over an image and its mirror image. Gray ones, which
may be writing, are taken as they are.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gredp.app.features.dead_leaves import dead_leaves
from gredp.app.features.real_scattering import RealScattering
from gredp.app.features.scattering import Scattering, mirrored
from gredp.errors import GredpError

#: height and width of a patch, pixels between two of them, and filters
SIDE, STRIDE, FILTERS = 6, 2, 1024
#: of the whitened directions, those with the largest variance
DIRECTIONS = 64
#: added to their variances; the mean variance is 1
RIDGE = 0.01
THRESHOLD, GRID = 0.15, 3
#: brings the mean square of the features' roots to about 1
GAIN = 40.0
#: squared length of a whitened patch that counts as no contrast
FLAT = 1e-6
#: how many images of which side the filters come from, and the seed of both
LEAVES, LEAVES_SIDE, SEED = 16, 64, 23
#: records at a time: more would leave the processor's cache
CHUNK = 4


class Patches:
    """Images `[b, c, h, w]` in [0, 1] → `[b, 2·FILTERS, GRID, GRID]`: first all above, then all below."""

    def identity(self) -> dict[str, Any]:
        size = {"side": SIDE, "stride": STRIDE, "filters": FILTERS, "directions": DIRECTIONS, "grid": GRID}
        leaves = {"leaves": [LEAVES, LEAVES_SIDE, SEED], "ridge": RIDGE, "threshold": THRESHOLD}
        return {"name": "patches", **size, **leaves, "gain": GAIN}

    def load_into(self, model: nn.Module) -> None:
        """Nothing: the network on the features has all its weights from its own initialization."""

    def __call__(self, x: Tensor) -> Tensor:
        network = self.network(*x.shape[1:]).to(x.dtype)
        with torch.no_grad():
            return torch.cat([network(part) for part in x.split(CHUNK)])

    def network(self, channels: int, height: int, width: int) -> nn.Module:
        """The same in stock layers, for images of one size."""
        return PatchNetwork(channels, height, width)


class PatchesBesideScattering(Patches):
    """Patches, then scattering averaged over the same grid: `[b, 2·FILTERS + 81·c, GRID, GRID]`."""

    def identity(self) -> dict[str, Any]:
        parts = {"patches": Patches().identity(), "scattering": Scattering().identity()}
        return {"name": "patches+scattering", **parts}

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([Patches()(x), coarse(Scattering()(x), x.shape[1])], 1)

    def network(self, channels: int, height: int, width: int) -> nn.Module:
        return Beside(channels, height, width)


class PatchNetwork(nn.Module):
    whitening: Tensor
    filters: Tensor
    cells: Tensor

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        if min(height, width) < SIDE:
            raise GredpError(f"patches need images of at least {SIDE}×{SIDE}, not {height}×{width}")
        whitening, filters = bank(channels)
        rows, columns = (cells((size - SIDE) // STRIDE + 1) for size in (height, width))
        self.photograph = channels > 1
        self.register_buffer("whitening", whitening.float().view(-1, channels, SIDE, SIDE))
        self.register_buffer("filters", filters.float())
        self.register_buffer("cells", torch.kron(rows, columns).float())

    def forward(self, x: Tensor) -> Tensor:
        if not self.photograph:
            return self._of(x)
        return (self._of(x) + self._of(x.flip(-1)).flip(-1)) / 2

    def _of(self, x: Tensor) -> Tensor:
        z = F.conv2d(x, self.whitening, stride=STRIDE).flatten(2)
        z = z / (z.square().sum(1, keepdim=True) + FLAT).sqrt()
        shrunk = F.softshrink(z.mT @ self.filters.mT, THRESHOLD)
        net, whole = self.cells @ shrunk, self.cells @ shrunk.abs()  # above less below, and their sum
        return torch.cat([whole + net, whole - net], 2).mT.unflatten(2, (GRID, GRID)) * (GAIN / 2)


class Beside(nn.Module):
    """`PatchesBesideScattering` in stock layers."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.channels = channels
        self.patches = PatchNetwork(channels, height, width)
        self.scattering = RealScattering(channels, height, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.patches(x), coarse(self.scattering(x), self.channels)], 1)


def coarse(x: Tensor, channels: int) -> Tensor:
    """Scattering features `[b, 81·c, H, W]` → `[b, 81·c, GRID, GRID]`; photographs also mirrored."""
    if channels > 1:
        x = (x + x.flip(-1)[:, mirrored(x.shape[1])]) / 2
    rows, columns = (cells(size).to(x) for size in x.shape[2:])
    return rows @ x @ columns.mT


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
    whitening = (directions / (variances.clamp(min=0) + RIDGE).sqrt())[:, kept].mT
    chosen = patches[torch.linspace(0, len(patches) - 1, FILTERS).long()] @ whitening.mT
    centered = whitening - whitening.mean(1, keepdim=True)
    return centered, chosen / chosen.norm(dim=1, keepdim=True)


def cells(size: int) -> Tensor:
    """`[GRID, size]`: the mean over each of GRID overlapping cells of `size` places."""
    places = torch.arange(size)
    index = torch.arange(GRID)[:, None]
    first, last = index * size // GRID, -(-(index + 1) * size // GRID)
    inside = ((first <= places) & (places < last)).double()
    return inside / inside.sum(1, keepdim=True)
