"""The scattering transform in real arithmetic, for exported files: other programs know no complex numbers.

`Scattering` defines it. Here a Fourier transform is a product with matrices of cosines and sines, and a
complex number is a pair of its real and imaginary part.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gredp.app.features.scattering import ANGLES, CELL, CHANNELS, GAINS, PAD, wavelets, window

Pair = tuple[Tensor, Tensor]


class RealScattering(nn.Module):
    """`[b, c, height, width]` → `[b, 81·c, height/4, width/4]`, for images of one size."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.shape = channels, height, width
        self.frame = (PAD, PAD + width % 2, PAD, PAD + height % 2)
        self.padded = [side + side % 2 + 2 * PAD for side in (height, width)]
        for name, side, length in zip(("rows", "columns"), (height, width), self.padded):
            self._keep(f"forward_{name}", fourier(length, -1))
            for step in (1, 2):
                self._keep(f"inverse_{name}_{step}", fourier(length, 1, step))
                self.register_buffer(f"window_{name}_{step}", window(side, step).float())
        for step, spectra in zip((1, 2), wavelets(*self.padded)):
            self._keep(f"wavelets_{step}", spectra)

    def _keep(self, name: str, value: Tensor) -> None:
        self.register_buffer(f"{name}_real", value.real.float())
        self.register_buffer(f"{name}_imaginary", value.imag.float())

    def _kept(self, name: str) -> Pair:
        return self.get_buffer(f"{name}_real"), self.get_buffer(f"{name}_imaginary")

    def forward(self, x: Tensor) -> Tensor:
        channels, height, width = self.shape
        x = F.pad(x.reshape(-1, 1, height, width), self.frame, "reflect")
        spectrum = self._spectrum(x)
        finer = self._modulus(spectrum, 1)
        second = self._modulus(self._spectrum(finer.reshape(-1, 1, *self.padded)), 2)
        parts = [
            self._smoothed(x, 0, 1),
            self._smoothed(finer, 1, 1),
            self._smoothed(self._modulus(spectrum, 2), 1, 2),
            self._smoothed(second, 2, 2).reshape(-1, ANGLES**2, height // CELL, width // CELL),
        ]
        return torch.cat(parts, 1).reshape(-1, channels * CHANNELS, height // CELL, width // CELL)

    def _spectrum(self, x: Tensor) -> Pair:
        """`[b, 1, H, W]` → the same, complex."""
        real, imaginary = self._kept("forward_columns")
        return product(self._kept("forward_rows"), (x @ real.mT, x @ imaginary.mT))

    def _modulus(self, spectrum: Pair, step: int) -> Tensor:
        """`[b, 1, H, W]` → `[b, 8, H/step, W/step]`: |x ⋆ ψ| at scale `step` and every `step`-th pixel."""
        (a, b), (c, d) = spectrum, self._kept(f"wavelets_{step}")
        rows, columns = self._kept(f"inverse_rows_{step}"), self._kept(f"inverse_columns_{step}")
        filtered = product(rows, (a * c - b * d, a * d + b * c))
        real, imaginary = product(filtered, (columns[0].mT, columns[1].mT))
        return (real.square() + imaginary.square()).sqrt()

    def _smoothed(self, u: Tensor, order: int, step: int) -> Tensor:
        rows, columns = (self.get_buffer(f"window_{name}_{step}") for name in ("rows", "columns"))
        return rows @ u @ columns.mT * GAINS[order]


def product(left: Pair, right: Pair) -> Pair:
    """Of two complex matrices."""
    (a, b), (c, d) = left, right
    return a @ c - b @ d, a @ d + b @ c


def fourier(length: int, sign: int, step: int = 1) -> Tensor:
    """`[length/step, length]`, complex: a transform (sign −1), or its inverse at every `step`-th pixel."""
    turns = torch.outer(torch.arange(0, length, step), torch.arange(length)) % length
    angles = sign * 2 * math.pi * turns.double() / length
    return torch.polar(torch.full_like(angles, 1 / length if sign > 0 else 1.0), angles)
