"""Images of nobody: discs of random size, place and color that hide one another, as leaves on the ground do.

They share with photographs what matters to small patches: edges at all scales and directions, and colors that
mostly vary together. Radii have density ∝ r⁻³, so the statistics do not depend on the scale (Lee, Mumford and
Huang, "Occlusion models for natural images", 2001). The seed is fixed and public, and no record takes part.
"""

import math

import numpy as np
import numpy.typing as npt

#: pixels of an image for which one is kept: edges fall between pixels
FINER = 2
#: radius of the smallest leaf in kept pixels, and of the largest relative to the image
SMALLEST, LARGEST = 1.0, 0.6
#: how far the colors of a leaf lie from its gray
COLOR = 0.25
#: share of an image that may stay uncovered; it is gray
BARE = 0.002


def dead_leaves(count: int, channels: int, side: int, seed: int) -> npt.NDArray[np.float64]:
    """`[count, channels, side, side]` in [0, 1]."""
    random = np.random.Generator(np.random.PCG64(seed))
    images = np.stack([_image(random, channels, side * FINER) for _ in range(count)])
    return images.reshape(count, channels, side, FINER, side, FINER).mean((3, 5))


def _image(random: np.random.Generator, channels: int, side: int) -> npt.NDArray[np.float64]:
    """From the front to the back: a leaf covers what is still bare."""
    image = np.full((channels, side, side), 0.5)
    bare = np.ones((side, side), dtype=bool)
    least, most = SMALLEST * FINER, LARGEST * side
    left = side**2
    while left > BARE * side**2:
        share, row, column, gray, *colors = random.random(4 + channels)
        radius = 1 / math.sqrt(least**-2 - (least**-2 - most**-2) * share)
        y, x = (place * (side + 2 * radius) - radius for place in (row, column))
        top, start = (max(0, int(middle - radius)) for middle in (y, x))
        below, end = (min(side, int(middle + radius) + 2) for middle in (y, x))
        rows, columns = np.arange(top, below)[:, None] - y, np.arange(start, end) - x
        leaf = bare[top:below, start:end] & (rows**2 + columns**2 <= radius**2)
        tint = COLOR * (np.array(colors) - 0.5) * (channels > 1)
        image[:, top:below, start:end][:, leaf] = np.clip(gray + tint, 0, 1)[:, None]
        bare[top:below, start:end] &= ~leaf
        left -= int(leaf.sum())
    return image
