"""Random views of images: shifts with mirrored borders, and left-right flips of color images.

A record's views are drawn independently of which other records were drawn, and that is all that privacy
asks of them: for every choice of views the step is the certified mechanism, so for a random one it is too.
They need not be secret.
"""

import torch
from torch import Tensor

#: the largest shift as a share of the image: 4 of 32 or 28 pixels, 1 of 8
REACH = 1 / 8
#: random numbers that one view takes
DRAWS = 3


def augmented(x: Tensor, uniform: Tensor) -> Tensor:
    """`[n, c, h, w]` images and `[n, DRAWS]` numbers in (0, 1] → a view of each; gray ones not flipped."""
    _, channels, height, width = x.shape
    rows, columns = (_shifted(size, uniform[:, axis]) for axis, size in enumerate((height, width)))
    if channels == 3:
        columns = torch.where(uniform[:, 2:] > 0.5, columns.flip(1), columns)
    image = torch.arange(len(x))[:, None, None]
    return x.movedim(1, -1)[image, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def _shifted(size: int, uniform: Tensor) -> Tensor:
    """`[n, size]`: the place that each place of a shifted line shows, mirrored at the ends."""
    reach = round(size * REACH)
    shift = (uniform * (2 * reach + 1)).ceil().long() - 1 - reach
    places = (torch.arange(size) + shift[:, None]).abs()
    return torch.where(places < size, places, 2 * (size - 1) - places)
