"""Wavelets of written signs at several sizes, whitened by drawn strokes: nothing to learn, one record each.

A sign is scattered as it is and scaled down, so that wavelets of two scales see strokes and whole loops. It
stands in the middle of an empty ground: what all signs have in common takes part in every norm that is
clipped, and place matters. Of the signed roots of `Scattering` each channel's mean in each cell is removed,
and the channels of a size are multiplied by (Σ + RIDGE)^(-1/2), Σ their correlations over all cells.

Both come from `random_strokes`: no record takes part, and no budget is spent on statistics. All records get
one length.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gredp.app.features.normalize import root
from gredp.app.features.patches import CHUNK, SEED, Whitening, whitened, whitening
from gredp.app.features.random_strokes import random_strokes
from gredp.app.features.real_scattering import RealScattering
from gredp.app.features.scattering import PAD, Scattering
from gredp.errors import GredpError

#: what the image's sides are divided by
SIZES = (1.0, math.sqrt(2), 2.0)
#: how many images of strokes, and what is added to the variances of channels, which are 1
DRAWN, RIDGE = 2048, 4.0


class Writing:
    """Gray images `[b, 1, h, w]` in [0, 1], light on dark → `[b, n, 1, 1]`: sizes, channels, then cells."""

    def identity(self) -> dict[str, Any]:
        strokes = {"sizes": [round(size, 3) for size in SIZES], "drawn": DRAWN, "seed": SEED, "ridge": RIDGE}
        return {"name": "writing", **strokes, "scattering": Scattering().identity()}

    def load_into(self, model: nn.Module) -> None:
        """Nothing: the network on the features has all its weights from its own initialization."""

    def __call__(self, x: Tensor) -> Tensor:
        whitenings = _whitenings(*x.shape[1:], x.dtype)
        found = [whitened(part, *pair) for part, pair in zip(parts(x), whitenings)]
        return torch.cat(found, 1)[:, :, None, None]

    def network(self, channels: int, height: int, width: int) -> nn.Module:
        """The same in stock layers, for images of one size."""
        return WritingNetwork(channels, height, width)


class WritingNetwork(nn.Module):
    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.scattering = nn.ModuleList()
        for place, pair in enumerate(_whitenings(channels, height, width, torch.float32)):
            sides = [scaled(side, SIZES[place]) for side in (height, width)]
            self.scattering.append(RealScattering(channels, *sides))
            matrices = [resize(side, new).float() for side, new in zip((height, width), sides)]
            for name, value in zip(("mean", "factor", "rows", "columns"), (*pair, *matrices)):
                self.register_buffer(f"{name}_{place}", value)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for place, scattering in enumerate(self.scattering):
            names = (f"{name}_{place}" for name in ("rows", "columns", "mean", "factor"))
            rows, columns, mean, factor = map(self.get_buffer, names)
            found.append(whitened(root(scattering(rows @ x @ columns.mT)).flatten(2), mean, factor))
        return torch.cat(found, 1)[:, :, None, None]


@torch.no_grad()
def parts(x: Tensor) -> list[Tensor]:
    """Images → the signed roots of each size, `[b, 81, cells]`."""
    found = []
    for size in SIZES:
        rows, columns = (resize(side, scaled(side, size)).to(x) for side in x.shape[2:])
        few = [root(Scattering()(rows @ part @ columns.mT)).flatten(2) for part in x.split(CHUNK)]
        found.append(torch.cat(few))
    return found


def scaled(side: int, size: float) -> int:
    return round(side / size)


@cache
def resize(side: int, new: int) -> Tensor:
    """`[new, side]`: the mean over as many equal stretches of `side` pixels."""
    ends = torch.arange(new + 1, dtype=torch.float64) * (side / new)
    pixels = torch.arange(side)
    inside = torch.minimum(ends[1:, None], pixels + 1) - torch.maximum(ends[:-1, None], pixels)
    return inside.clamp(min=0) * (new / side)


@cache
def _whitenings(channels: int, height: int, width: int, kind: torch.dtype) -> tuple[Whitening, ...]:
    if channels != 1:
        raise GredpError(f"writing is gray, with 1 channel, not {channels}: use --features patches")
    least = 2 * (PAD + 2)
    if min(height, width) < least:
        raise GredpError(f"writing needs images of at least {least}×{least}, not {height}×{width}")
    side = max(height, width)
    top, start = (side - height) // 2, (side - width) // 2
    drawn = random_strokes(DRAWN, side, SEED)[:, :, top : top + height, start : start + width]
    found: list[Whitening] = []
    for part in parts(drawn.to(kind)):
        mean = part.double().mean(0)
        found.append((mean.to(kind), whitening(part.double() - mean, RIDGE)[1].to(kind)))
    return tuple(found)
