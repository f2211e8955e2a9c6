"""Norms and energies from two Gram matrices, where the map is small and the kernel large."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gredp.gradient.norms import CHUNK, GRAM_ROUNDING, as_double_if_long, normalize_rows, squares

if TYPE_CHECKING:
    from gredp.gradient.convolution.correlation import Correlation

Offset = tuple[int, ...]


def gram_norm(correlation: "Correlation") -> Tensor:
    """Σ over positions t, s of ⟨g_t, g_s⟩⟨window_t, window_s⟩, the windows' part from one Gram matrix."""
    kernels = list(product(*[range(k) for k in correlation.kernel]))
    total, margin = torch.cat(list(_sums(correlation, [[(k, k) for k in kernels]]))).unbind(1)
    return total.clamp(min=0) + margin


def gram_energy(correlation: "Correlation") -> Tensor:
    """`[b, *grid]`: the same for each coefficient of the kernel's spectrum.

    |Σ_δ κ_δ e^(−ikδ)|² depends on pairs of offsets through their difference alone, and a difference
    and its negative give the same sum.
    """
    offsets = list(product(*[range(k) for k in correlation.kernel]))
    pairs: dict[Offset, list[tuple[Offset, Offset]]] = {}
    for first, second in product(offsets, offsets):
        difference = tuple(i - j for i, j in zip(first, second))
        if difference >= (0,) * len(difference):
            pairs.setdefault(difference, []).append((first, second))
    sums = torch.cat(list(_sums(correlation, list(pairs.values()))))  # [b, differences]
    waves = torch.zeros(len(pairs), *correlation.kernel, dtype=torch.float64, device=sums.device)
    for row, difference in enumerate(pairs):
        # A unit at the difference, and one at its negative, have the cosine wave as their spectrum.
        for signed in {difference, tuple(-d for d in difference)}:
            waves[(row, *[d % n for d, n in zip(signed, correlation.kernel)])] += 1
    spectrum = torch.fft.fftn(waves, dim=tuple(range(1, waves.dim()))).real / math.prod(correlation.kernel)
    energy = torch.tensordot(sums[:, :-1], spectrum, 1).clamp(min=0)
    return energy + sums[:, -1].view(-1, *[1] * len(correlation.kernel))


def _sums(correlation: "Correlation", pairs: list[list[tuple[Offset, Offset]]]) -> Iterator[Tensor]:
    """Chunks `[part, len(pairs) + 1]`: for each list the sum over its pairs of offsets, and the margin.

    Both factors are brought to size one first, or the square of a small one could vanish. The sums
    cancel, so an allowance for their rounding, a small multiple of the two matrices' norms, comes
    along: added to a result, it keeps this from falling short of the truth.
    """
    channels, outputs = correlation.shape[1], correlation.shape[0] // correlation.groups
    maps = (correlation.views, *correlation.padded_grid)
    out = (correlation.views, *correlation.gradient.shape[2:])
    step = max(1, CHUNK // (math.prod(maps) ** 2 * correlation.groups)) * correlation.views
    for start in range(0, max(1, len(correlation.x)), step):  # one slice of no inputs too
        part = slice(start, start + step)
        padded = replace(correlation, x=correlation.x[part]).padded
        x, g = _side_by_side(correlation, padded), _side_by_side(correlation, correlation.gradient[part])
        x, x_size = normalize_rows(as_double_if_long(x, channels, outputs))
        g, g_size = normalize_rows(as_double_if_long(g, channels, outputs))
        gram = (x.transpose(1, 2) @ x).view(-1, *maps, *maps)
        right = (g.transpose(1, 2) @ g).flatten(1)
        columns, largest = [], torch.zeros((), device=x.device)
        for members in pairs:
            windows = x.new_zeros(len(x), *out, *out)
            for first, second in members:
                windows += gram[(slice(None), *_places(correlation, first), *_places(correlation, second))]
            columns.append(torch.linalg.vecdot(windows.flatten(1), right).double())
            largest = torch.maximum(largest, squares(windows.flatten(1)).sqrt())
        columns.append(largest * squares(right).sqrt() * GRAM_ROUNDING[x.dtype])
        scale = (x_size * g_size).square()[:, None]
        sums = (torch.stack(columns, 1) * scale).view(-1, correlation.groups, len(columns)).sum(1)
        yield sums


def _side_by_side(correlation: "Correlation", maps: Tensor) -> Tensor:
    """`[b · v, group · channels, *]` → `[b · group, channels, v · positions]`."""
    channels = maps.shape[1] // correlation.groups
    apart = maps.reshape(-1, correlation.views, correlation.groups, channels, math.prod(maps.shape[2:]))
    return apart.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(2)


def _places(correlation: "Correlation", offset: Offset) -> list[slice]:
    """Where the padded inputs meet the kernel's `offset`, over all views and output positions."""
    geometry = zip(offset, correlation.stride, correlation.dilation, correlation.gradient.shape[2:])
    return [slice(None), *(slice(j * d, j * d + s * (n - 1) + 1, s) for j, s, d, n in geometry)]
