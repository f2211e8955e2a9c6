"""Unitary Fourier transforms, frequency groups and bands: the language the mechanisms are written in.

Shapes: a block is `[*lead, *grid]`; a spectrum has the same shape, complex, over the full grid.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from gredp.privacy.certificate import Block


def fft(x: Tensor, axes: int) -> Tensor:
    """Unitary DFT over the last `axes` axes."""
    if not axes or not x.numel():  # the transform of nothing, which FFT libraries refuse
        return x.to(_complex(x))
    return torch.fft.fftn(x, dim=_last(axes), norm="ortho")


def ifft(x: Tensor, axes: int) -> Tensor:
    """Its inverse."""
    return torch.fft.ifftn(x, dim=_last(axes), norm="ortho") if axes and x.numel() else x


def _last(axes: int) -> tuple[int, ...]:
    return tuple(range(-axes, 0))


def _complex(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.dtype in (torch.float64, torch.complex128) else torch.complex64


def distance(grid: tuple[int, ...]) -> Tensor:
    """`[*grid]`: how far each frequency lies from zero, in shares of the highest; alike at k and −k."""
    total = torch.zeros(grid, dtype=torch.float64)
    for axis, n in enumerate(grid):
        k = torch.arange(n)
        shape = [1] * len(grid)
        shape[axis] = n
        total = total + (torch.minimum(k, n - k).double() / max(n // 2, 1)).square().view(shape)
    return total.sqrt()


def mirror(grid: tuple[int, ...]) -> Tensor:
    """`[prod(grid)]`: the flat index of −k for each flat index of k."""
    index = torch.arange(math.prod(grid)).view(grid)
    for axis in range(len(grid)):
        index = index.flip(axis).roll(1, axis)
    return index.flatten()


@lru_cache(maxsize=64)
def real_basis(grid: tuple[int, ...]) -> Tensor:
    """`[n, n]` orthogonal, n = prod(grid): column k holds cos of a pair {k, −k}, column −k its sin.

    A real vector's energies in the two columns add up to those of its spectrum at k and −k.
    """
    n = math.prod(grid)
    waves = torch.fft.fftn(
        torch.eye(n, dtype=torch.float64).view(n, *grid), dim=_last(len(grid)), norm="ortho"
    )
    waves = waves.view(n, n)
    index, other = torch.arange(n), mirror(grid)
    basis = torch.where(index <= other, waves.real, waves.imag[:, other])
    return torch.where(index == other, basis, math.sqrt(2) * basis)


def grid_energy(values: Tensor, axes: int) -> Tensor:
    """`[b, *lead, *grid]` real → `[b, *grid]`: energy of each coefficient, leading axes summed."""
    grid = tuple(values.shape[values.dim() - axes :])
    lead = tuple(range(1, values.dim() - axes))
    if not 1 < math.prod(grid) <= 64:
        energy = fft(values, axes).abs().double().square()
        return energy.sum(lead) if lead else energy
    # Kernels are too small for an FFT to pay; one real matrix product gives the same energies.
    flat = values.reshape(values.shape[0], math.prod(values.shape[1 : values.dim() - axes]), math.prod(grid))
    energy = (flat @ real_basis(grid).to(flat)).square().sum(1, dtype=torch.float64)
    return ((energy + energy[:, mirror(grid).to(flat.device)]) / 2).view(-1, *grid)


def frequency_groups(grid: tuple[int, ...], bands: int) -> Tensor:
    """`[prod(grid)]`: group of each frequency; k and −k alike, low frequencies first.

    One group for each pair {k, −k} as long as there are at most `bands` of them, otherwise the pairs
    in order of their distance from zero are cut into `bands` runs of nearly equal length.
    """
    pairs = torch.minimum(torch.arange(math.prod(grid)), mirror(grid))
    names = pairs.unique()
    order = names[distance(grid).flatten()[names].argsort(stable=True)]
    rank = torch.empty(math.prod(grid), dtype=torch.long)
    rank[order] = torch.arange(len(order))
    return rank[pairs] * min(bands, len(order)) // len(order)


def low_band(grid: tuple[int, ...], ratio: float) -> Tensor:
    """`[prod(grid)]` of bool: the lowest frequencies, at most `ratio` of all but at least zero's own.

    Whole pairs {k, −k} only: half a pair would leave the released gradient complex.
    """
    n = math.prod(grid)
    pair = torch.minimum(torch.arange(n), mirror(grid))
    kept = torch.zeros(n, dtype=torch.bool)
    for k in distance(grid).flatten().argsort(stable=True):
        members = pair == pair[k]
        if not kept[k]:
            if kept.any() and int(kept.sum() + members.sum()) > ratio * n + 1e-9:
                break
            kept |= members
    return kept


@dataclass(frozen=True)
class BlockView:
    """How one block is seen by the step: its grid, and the frequency groups its weights live on.

    `groups` is `[prod(grid)]` with values below `group_count`, or None for a single group.
    `padded` says that the grid is the padded input's and the block a crop of it.
    """

    block: Block
    padded: bool = False
    groups: Tensor | None = None

    @property
    def axes(self) -> int:
        return len(self.block.grid)

    @cached_property
    def group_count(self) -> int:
        return 1 if self.groups is None else int(self.groups.max()) + 1

    @cached_property
    def group_sizes(self) -> Tensor:
        """`[group_count]`: coefficients of the block in each group, all channels together."""
        lead = math.prod(self.block.shape[: len(self.block.shape) - self.axes])
        if self.groups is None:
            return torch.tensor([float(lead * math.prod(self.block.grid))])
        return lead * torch.bincount(self.groups, minlength=self.group_count).float()

    def gather(self, energy: Tensor) -> Tensor:
        """`[B, *grid]` energies of coefficients → `[B, group_count]`."""
        flat = energy.reshape(energy.shape[0], math.prod(self.block.grid))
        if self.groups is None:
            return flat.sum(1, keepdim=True)
        out = flat.new_zeros(flat.shape[0], self.group_count)
        return out.index_add_(1, self.groups.to(flat.device), flat)

    def spread(self, weights: Tensor) -> Tensor:
        """`[group_count]` weights → `[*grid]`."""
        if self.groups is None:
            return weights.reshape([1] * self.axes)
        return weights[self.groups.to(weights.device)].view(self.block.grid)

    def spectrum(self, total: Tensor) -> Tensor:
        """The summed block as a spectrum; a padded sum is one already."""
        return total if self.padded else fft(total, self.axes)

    def real_part(self, spectrum: Tensor) -> Tensor:
        """Inverse transform, real part, crop: `[*lead, *grid]` complex → `[*shape]` real."""
        values = ifft(spectrum, self.axes).real
        if self.padded:
            for axis, kept in enumerate(self.block.released):
                index = torch.tensor(kept, device=values.device)
                values = values.index_select(axis - self.axes, index)
        return values.reshape(self.block.shape)
