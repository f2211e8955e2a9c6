"""What the ways to a convolution's norms cost, by which one is chosen once per shape."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product


@dataclass(frozen=True)
class Geometry:
    """One group of a convolution, as far as its cost goes."""

    channels: int
    outputs: int
    axes: tuple[tuple[int, int, int], ...]  # kernel, stride and input of each axis
    out: tuple[int, ...]
    area: int  # positions of the padded input
    views: int = 1

    def offsets(self, split: tuple[bool, ...]) -> tuple[int, int]:
        """Kernel offsets that shift the input, and those that shift the output gradient."""
        inner, outer = (
            math.prod(k for (k, _, _), g in zip(self.axes, split) if g == side) for side in (0, 1)
        )
        return inner, outer

    def positions(self, split: tuple[bool, ...]) -> tuple[int, ...]:
        """Where both are multiplied: an axis that shifts the gradient runs over the input."""
        return tuple(size if g else out for (_, _, size), out, g in zip(self.axes, self.out, split))

    def cost(self, split: tuple[bool, ...]) -> float:
        """Nanoseconds for a record's kernels on one core; only their order matters.

        Products at about 40 multiply-adds a nanosecond, copies at about one and a half elements; each
        element of the result costs fresh memory and a look for the norm.
        """
        inner, outer = self.offsets(split)
        rows, columns = self.channels * inner, self.outputs * outer
        copied = rows * (inner > 1) + columns * (outer > 1)
        positions = self.views * math.prod(self.positions(split))
        return positions * (rows * columns / 40 + copied / 1.5) + rows * columns


@lru_cache(maxsize=1024)
def cheapest_split(geometry: Geometry) -> tuple[bool, ...]:
    choices = product(
        *[(False, True) if k > 1 and stride == 1 else (False,) for k, stride, _ in geometry.axes]
    )
    return min(choices, key=geometry.cost)


@lru_cache(maxsize=1024)
def prefer_gram(geometry: Geometry, spectral: bool = False) -> bool:
    """Whether two Gram matrices and a weight gradient cost less than kernels of every record.

    `spectral` asks for energies by frequency, which take a window for each pair of kernel offsets.
    """
    size, positions = math.prod(k for k, _, _ in geometry.axes), geometry.views * math.prod(geometry.out)
    channels, outputs, area = geometry.channels, geometry.outputs, geometry.views * geometry.area
    kernels = geometry.cost(cheapest_split(geometry))
    windows = (size * (size + 1) / 2 + 2 * size) if spectral else size
    gram = (area**2 * channels + positions**2 * outputs) / 40 + 1.2 * windows * positions**2
    if spectral:
        kernels += 1.5 * size * channels * outputs
    return gram + size * channels * outputs * positions / 45 < kernels
