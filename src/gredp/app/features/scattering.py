"""The scattering transform of an image: what wavelets and moduli tell of it, with nothing to learn.

    order 0   x ⋆ φ        order 1   |x ⋆ ψ₁| ⋆ φ        order 2   ||x ⋆ ψ₁| ⋆ ψ₂| ⋆ φ,   ψ₂ coarser than ψ₁

ψ are Morlet wavelets at `SCALES` scales and `ANGLES` angles, φ a Gaussian window (Bruna and Mallat,
"Invariant scattering convolution networks", 2013). As input of private training: Tramèr and Boneh,
"Differentially private learning needs better features (or much more data)", 2021.

The image is continued by reflection, `PAD` pixels on each side, and then periodically. φ is taken around the
middle of every 4×4 cell. A modulus at scale 2 is smooth: every second pixel of it is computed. ψ are scaled
to the largest common factor at which |φ̂|² + Σ|ψ̂|² is nowhere above 1, so that wavelets and moduli enlarge no
distance and no energy. Each order deep in moduli is smaller than the one before: fixed gains, about right for
photographs, bring them to a common size.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gredp.errors import GredpError

SCALES, ANGLES = 2, 8
#: pixels between two windows, and the width of the reflected frame
CELL = PAD = 2**SCALES
#: features for each channel of the image: orders 0, 1 and 2
CHANNELS = 1 + SCALES * ANGLES + SCALES * (SCALES - 1) // 2 * ANGLES**2
#: what orders 0, 1 and 2 are multiplied by at the end
GAINS = (1.0, 20.0, 200.0)
#: deviation of the finest wavelet and of φ relative to its scale, and frequency of the finest wavelet
WIDTH, FREQUENCY = 0.8, 0.75 * math.pi
#: a wavelet is wider along its crests by 1/SLANT
SLANT = 4 / ANGLES


class Scattering:
    """Images `[b, c, h, w]` → features `[b, 81·c, h/4, w/4]`, rounded down; colors go their own ways.

    Of a color's 81 features the first is of order 0; then come 8 angles for each of 2 scales, and 8×8 pairs
    of angles.
    """

    def identity(self) -> dict[str, Any]:
        options = {"scales": SCALES, "angles": ANGLES, "padding": "reflect", "gains": list(GAINS)}
        return {"name": "scattering", **options}

    def load_into(self, model: nn.Module) -> None:
        """Nothing: the network on the features has all its weights from its own initialization."""

    def __call__(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        if min(h, w) <= PAD + 1:
            raise GredpError(f"scattering needs images of at least {PAD + 2}×{PAD + 2}, not {h}×{w}")
        x = F.pad(x.reshape(b * c, 1, h, w), (PAD, PAD + w % 2, PAD, PAD + h % 2), "reflect")
        fine, coarse = wavelets(*x.shape[2:]).to(torch.complex(x, x).dtype)
        finer = modulus(x, fine, 1)
        moduli = [(0, 1, x), (1, 1, finer), (1, 2, modulus(x, coarse, 2))]
        # One angle at a time: all pairs at once would leave the processor's cache.
        moduli += [(2, 2, modulus(u, coarse, 2)) for u in finer.chunk(ANGLES, 1)]
        parts = [window(h, s).to(x) @ u @ window(w, s).to(x).mT * GAINS[order] for order, s, u in moduli]
        return torch.cat(parts, 1).view(b, c * CHANNELS, h // CELL, w // CELL)


def mirrored(channels: int) -> list[int]:
    """Which feature of an image is the one of its mirror image, columns swapped: angle k becomes −k.

    At scale 2 it is so up to the choice of every second pixel.
    """
    if channels % CHANNELS:
        raise GredpError(f"{channels} channels are not scattering features: those come {CHANNELS} to a color")
    turn = [-k % ANGLES for k in range(ANGLES)]
    first = [1 + ANGLES * j + k for j in range(SCALES) for k in turn]
    second = [1 + SCALES * ANGLES + ANGLES * a + b for a in turn for b in turn]
    return [color + i for color in range(0, channels, CHANNELS) for i in (0, *first, *second)]


def modulus(x: Tensor, spectra: Tensor, step: int) -> Tensor:
    """`[b, 1, H, W]`, spectra `[k, H, W]` → `[b, k, H/step, W/step]`: |x ⋆ ψ| at every `step`-th pixel."""
    product = torch.fft.fft2(x) * (spectra / step**2)
    # Frequencies that agree at those pixels are added up before the inverse transform.
    for axis in (-2, -1) if step > 1 else ():
        product = torch.stack(product.chunk(step, axis)).sum(0)
    filtered: Tensor = torch.fft.ifft2(product)
    return filtered.abs()


@cache
def window(size: int, step: int) -> Tensor:
    """`[size/4, pixels/step]`: φ around the middle of every cell, along one padded axis; rows sum to 1."""
    middles = PAD + (CELL - 1) / 2 + CELL * torch.arange(size // CELL, dtype=torch.float64)
    distance = torch.arange(0, size + size % 2 + 2 * PAD, step) - middles[:, None]
    weights = torch.exp(-distance.square() / (2 * (WIDTH * CELL / 2) ** 2))
    return weights / weights.sum(1, keepdim=True)


@cache
def wavelets(height: int, width: int) -> Tensor:
    """`[SCALES, ANGLES, height, width]`: the spectra of ψ on a periodic grid, in double precision."""
    shapes = [(2**j, math.pi * k / ANGLES) for j in range(SCALES) for k in range(ANGLES)]
    grids = [torch.fft.fft2(morlet(height, width, scale, angle)) for scale, angle in shapes]
    spectra = torch.stack(grids).view(SCALES, ANGLES, height, width)
    # A real image sees k and −k together, each with half.
    energy = spectra.abs().square().sum((0, 1))
    energy = (energy + torch.roll(energy.flip(0, 1), (1, 1), (0, 1))) / 2
    rest = 1 - phi(height, width).square()
    return spectra * (rest / energy).flatten()[1:].min().sqrt()


def phi(height: int, width: int) -> Tensor:
    """`[height, width]`: the spectrum of φ."""
    deviation = WIDTH * CELL / 2
    squared = [(2 * math.pi * torch.fft.fftfreq(n, dtype=torch.float64)).square() for n in (height, width)]
    return torch.exp(-(squared[0][:, None] + squared[1]) * deviation**2 / 2)


def morlet(height: int, width: int, scale: float, angle: float) -> Tensor:
    """`[height, width]`: one wavelet on a periodic grid, around index 0; its sum is 0.

    A Gaussian envelope times (a plane wave − a constant), equal in shape at every scale, of equal gain.
    """
    y, x = (torch.arange(-2 * n, 2 * n, dtype=torch.float64) for n in (height, width))
    along = x * math.cos(angle) + y[:, None] * math.sin(angle)
    across = y[:, None] * math.cos(angle) - x * math.sin(angle)
    deviation = WIDTH * scale
    envelope = torch.exp(-(along.square() + (SLANT * across).square()) / (2 * deviation**2))
    wave = envelope * torch.exp(1j * FREQUENCY / scale * along)
    grid = (wave - envelope * (wave.sum() / envelope.sum())) / scale**2
    return grid.view(4, height, 4, width).sum((0, 2))
