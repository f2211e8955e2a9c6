"""Sums of squares that are never short, and the sizes of what is worked on at once."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gredp.spectrum import LOWEST_SQUARE, PIECE

#: elements that are worked on at once where gradients are materialized: what a core's cache holds, and a
#: little less than a power of two, so that they fit where an input of such a size was freed
CHUNK = 15 << 16
#: elements of one layer's materialized gradients that may be kept between the norms and the sum
KEPT = 1 << 25
#: rounding of a sum of products of two Gram matrices, relative to the product of their norms; in single
#: precision for vectors up to LONG, whose products would be rounded the same way too often beyond
GRAM_ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-14}
LONG = 1024
#: numbers that are taken in double precision at once: a copy of them stays in cache
FEW = 1 << 15


def full_precision(x: Tensor) -> Tensor:
    """Norms and sums are taken in single precision at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def squares(m: Tensor) -> Tensor:
    """`[b, *]` → `[b]`: sums of squares in double precision, right to PIECE roundings of m's own.

    The square of a small factor would vanish in single precision while its product with a large one does
    not, and a record whose norm comes out as zero would pass the clip: such records are taken in double
    precision, as are few numbers. All of a large array would cost a copy of it.
    """
    flat = m.reshape(m.shape[0], math.prod(m.shape[1:]))
    if flat.numel() <= FEW or flat.is_meta:  # no values to look at: shapes are all that is asked for
        return _double_squares(flat)
    whole = flat.shape[1] // PIECE * PIECE
    pieces = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (whole // PIECE, PIECE)), dim=2)
    total = _double_squares(pieces)
    if whole < flat.shape[1]:
        total += torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square_()
    least, most = total.aminmax()
    lowest = LOWEST_SQUARE * flat.shape[1]
    if not (least > lowest and most < math.inf):
        extreme = ~((total > lowest) & total.isfinite())
        total[extreme] = _double_squares(flat[extreme])
    return total


def _double_squares(flat: Tensor) -> Tensor:
    return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square()


def normalize_rows(m: Tensor) -> tuple[Tensor, Tensor]:
    """`[b, *]` → the same with each record's largest entry brought to 1, and `[b]` these entries."""
    flat = m.flatten(1)
    size = torch.linalg.vector_norm(flat, ord=math.inf, dim=1) if flat.shape[1] else flat.new_zeros(len(m))
    size = size.where(size != 0, 1.0)
    return m / size.view(-1, *[1] * (m.dim() - 1)), size.double()


def as_double_if_long(m: Tensor, *lengths: int) -> Tensor:
    """In double precision where a Gram matrix is a matrix of long sums."""
    return m.double() if max(lengths) > LONG else m


def parts(batch: int, size: int) -> Iterator[slice]:
    """Slices of the batch with at most CHUNK elements, `size` to a record; at least one record, one slice."""
    step = max(1, CHUNK // max(size, 1))
    for start in range(0, max(batch, 1), step):
        yield slice(start, start + step)
