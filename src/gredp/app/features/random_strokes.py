"""Images of nobody that look like writing: one to three curves of a pen, white on black, in the middle.

What features of written signs have in common, and how they vary together, is close to what these images have:
whitening by them removes most of it and costs no privacy. The seed is fixed and public, and no record takes
part.
"""

import torch
from torch import Tensor

#: curves on an image at most, places of the pen on each, and how many images are drawn at once
CURVES, PLACES, AT_ONCE = 3, 64, 64
#: share of the image's side that the writing fills, and how often a curve begins where the last one ended
FILLED, JOINED = 20 / 28, 0.6
#: half the pen's width at least and at most, of an image of side 28
THIN, THICK = 0.8, 1.7
#: least extent of the writing before it is enlarged, and a place where no pen is
LEAST, AWAY = 0.05, 1e9


def random_strokes(count: int, side: int, seed: int) -> Tensor:
    """`[count, 1, side, side]` in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    # Cubic curves through random control points.
    t = torch.linspace(0, 1, PLACES)
    weights = torch.stack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], 1)
    pen = weights @ torch.rand(count, CURVES, 4, 2, generator=generator)
    joins = torch.rand(count, CURVES, 1, 1, generator=generator) < JOINED
    for k in range(1, CURVES):
        pen[:, k] += (pen[:, k - 1, -1:] - pen[:, k, :1]) * joins[:, k]
    drawn = torch.arange(CURVES) < torch.randint(1, CURVES + 1, (count, 1), generator=generator)
    hidden = ~drawn[:, :, None, None]
    low, high = (pen.masked_fill(hidden, far) for far in (AWAY, -AWAY))
    least, most = low.amin((1, 2)), high.amax((1, 2))
    scale = FILLED * side / (most - least).amax(1).clamp(min=LEAST)
    pen = (pen - (least + most)[:, None, None] / 2) * scale[:, None, None, None] + (side - 1) / 2
    pen = pen.masked_fill(hidden, AWAY)
    width = side / 28 * (THIN + (THICK - THIN) * torch.rand(count, 1, 1, generator=generator))
    parts = [_traced(*few, side) for few in zip(pen.flatten(1, 2).split(AT_ONCE), width.split(AT_ONCE))]
    return torch.cat(parts)[:, None]


def _traced(pen: Tensor, width: Tensor, side: int) -> Tensor:
    """Places of the pen `[n, p, 2]` → `[n, side, side]`: 1 within half its width, with a soft edge."""
    pixels = torch.arange(side)
    rows, columns = ((pen[..., axis, None] - pixels).square() for axis in (0, 1))
    distance = (rows[..., None] + columns[..., None, :]).amin(1).sqrt()
    return (width + 0.5 - distance).clamp(0, 1)
