"""Unitary Fourier transforms, frequency groups and bands: the language the mechanisms are written in.

Shapes: a block is `[*lead, *grid]`; a spectrum has the same shape, complex. Real blocks have conjugate
coefficients at k and −k, so their spectra are kept over `[*half]` alone: the last axis ends at n//2.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from gredp.privacy.certificate import Block


def fft(x: Tensor, axes: int) -> Tensor:
    """Unitary DFT over the last `axes` axes."""
    if not axes or not x.numel():  # the transform of nothing, which FFT libraries reject
        return x.to(_complex(x))
    return torch.fft.fftn(x, dim=_last(axes), norm="ortho")


#: grids of at most this many coefficients are transformed by a matrix: an FFT does not pay there
SMALL = 64
#: numbers whose squares are added up in their own precision, the sums of which are then in double
PIECE = 64
#: of single precision, on average over a sum: of squares below 2⁻¹²⁶, which vanish, it has no share then
LOWEST_SQUARE = 1e-26


def half_fft(x: Tensor, axes: int) -> Tensor:
    """Unitary DFT of a real block: `[*lead, *grid]` → `[*lead, *half]`."""
    if not axes:
        return x.to(_complex(x))
    if not x.numel():  # the transform of nothing, which FFT libraries reject
        return x.new_zeros(*x.shape[:-1], x.shape[-1] // 2 + 1, dtype=_complex(x))
    grid = tuple(x.shape[x.dim() - axes :])
    if math.prod(grid) > SMALL:
        return torch.fft.rfftn(x, dim=_last(axes), norm="ortho")
    parts = x.reshape(-1, math.prod(grid)) @ _small_transform(grid)[0].to(x)
    return torch.view_as_complex(parts.view(*x.shape[:-1], grid[-1] // 2 + 1, 2))


def half_ifft(x: Tensor, axes: int, length: int) -> Tensor:
    """Real part of the inverse of the full spectrum, given its half: `[*lead, *half]` → `[*lead, *grid]`.

    `length` is the last axis' own. Where the half holds both k and −k and they are not conjugate, the
    real part sees their conjugate mean: that is what torch documents for a single axis, but libraries
    do not agree on it for several at once, so the last axis is taken by itself.
    """
    if not axes:
        return x.real
    if not x.numel():
        return x.real.new_zeros(*x.shape[:-1], length)
    grid = (*x.shape[x.dim() - axes : -1], length)
    if math.prod(grid) > SMALL:
        return _large_inverse(x, axes, length)
    inverse = _small_transform(grid)[1]
    parts = torch.view_as_real(x.resolve_conj()).reshape(-1, len(inverse))
    return (parts @ inverse.to(parts)).view(*x.shape[:-1], length)


def _large_inverse(x: Tensor, axes: int, length: int) -> Tensor:
    if axes > 1:
        x = torch.fft.ifftn(x, dim=_last(axes)[:-1], norm="ortho")
    return torch.fft.irfft(x, n=length, norm="ortho")


@lru_cache(maxsize=256)
def _small_transform(grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """`[n, half · 2]` and `[half · 2, n]`: both maps between a block and the parts of its coefficients."""
    n, half = math.prod(grid), (*grid[:-1], grid[-1] // 2 + 1)
    there = torch.fft.rfftn(
        torch.eye(n, dtype=torch.float64).view(n, *grid), dim=_last(len(grid)), norm="ortho"
    )
    units = torch.eye(2 * math.prod(half), dtype=torch.float64).view(-1, *half, 2)
    back = _large_inverse(torch.view_as_complex(units), len(grid), grid[-1])
    return torch.view_as_real(there).reshape(n, -1), back.reshape(-1, n)


def own_mirrors(n: int) -> tuple[int, ...]:
    """The k with k ≡ −k modulo n."""
    return (0, n // 2) if n > 1 and n % 2 == 0 else (0,)


@lru_cache(maxsize=256)
def _shares_of_noise(n: int) -> Tensor:
    """`[n // 2 + 1, 2]`: see `BlockView.noise_parts`, with a = b = 1."""
    parts = torch.full((n // 2 + 1, 2), math.sqrt(0.5), dtype=torch.float64)
    parts[list(own_mirrors(n))] = 1.0
    return parts


@lru_cache(maxsize=256)
def whole_from_half(grid: tuple[int, ...]) -> Tensor:
    """`[prod(grid)]`: for each frequency the flat index in the half grid of itself or of its negative."""
    half = (*grid[:-1], grid[-1] // 2 + 1)
    index = torch.full(grid, -1)
    index[..., : half[-1]] = torch.arange(math.prod(half)).view(half)
    index = index.flatten()
    return torch.where(index >= 0, index, index[mirror(grid)])


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


@lru_cache(maxsize=256)
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
    if not 1 < math.prod(grid) <= SMALL:
        spectrum = half_fft(values, axes)
        if not lead or not values.numel():
            return whole_energy(
                square_modulus(spectrum).sum(lead) if lead else square_modulus(spectrum), grid
            )
        parts = torch.view_as_real(spectrum).square_().flatten(1, len(lead))
        energy = sum_of_rows(parts.flatten(2)).view(len(values), *spectrum.shape[1 + len(lead) :], 2)
        return whole_energy(energy.sum(-1), grid)
    # Kernels are too small for an FFT to pay; one real matrix product gives the same energies.
    flat = values.reshape(values.shape[0], math.prod(values.shape[1 : values.dim() - axes]), math.prod(grid))
    energy = (flat @ real_basis(grid).to(flat)).square().sum(1, dtype=torch.float64)
    return ((energy + energy[:, mirror(grid).to(flat.device)]) / 2).view(-1, *grid)


def sum_of_rows(squares: Tensor) -> Tensor:
    """`[b, n, m]` → `[b, m]` in double precision; PIECE rows at a time in their own."""
    whole = squares.shape[1] // PIECE * PIECE
    pieces = squares[:, :whole].unflatten(1, (whole // PIECE, PIECE)).sum(2)
    return torch.cat([pieces, squares[:, whole:].sum(1, keepdim=True)], 1).sum(1, dtype=torch.float64)


def square_modulus(spectrum: Tensor) -> Tensor:
    """|·|² of each coefficient, in double precision: a small one's square would vanish in single."""
    parts = torch.view_as_real(spectrum).double().square_()
    return parts[..., 0] + parts[..., 1]  # a sum over an axis of two takes three times as long


def whole_energy(half: Tensor, grid: tuple[int, ...]) -> Tensor:
    """`[b, *half]` energies of a real block → `[b, *grid]`."""
    if not grid or not half.numel():
        return half.new_zeros(half.shape[0], *grid) if grid else half
    flat = half.flatten(1)
    return flat[:, whole_from_half(grid).to(flat.device)].view(-1, *grid)


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
    """`[prod(grid)]` of bool: the lowest frequencies, as few as make `ratio` of all, and never zero alone.

    Frequencies as far from zero as each other stay together: half a pair {k, −k} would leave the released
    gradient complex, and half of a kernel's lowest ones would prefer one of its axes. With frequency
    zero alone all entries of a block would move as one: the classes that share it could not be told apart.
    """
    away = distance(grid).flatten()
    kept = torch.ones_like(away, dtype=torch.bool)
    for edge in away.unique()[1:]:
        kept = away <= edge
        if kept.sum() >= ratio * len(away) - 1e-9:
            break
    return kept


@dataclass(frozen=True)
class BlockView:
    """How one block is seen by the step: its grid, and the frequency groups its weights live on.

    `groups` is `[prod(grid)]` with values below `group_count`, or None for a single group.
    `padded` says that the grid is the padded input's and the block a crop of it.
    `columns` counts those of the half grid's last axis that are summed; the rest are dropped. None for all.
    """

    block: Block
    padded: bool = False
    groups: Tensor | None = None
    columns: int | None = None

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

    @cached_property
    def _parts_by_group(self) -> Tensor:
        """`[half · 2, group_count]`: how many coefficients of each group a part in the half stands for."""
        assert self.groups is not None
        rows = self.half_shape[-self.axes :]
        counts = torch.zeros(math.prod(rows), self.group_count, dtype=torch.float64)
        ones = torch.ones(len(self.groups), dtype=torch.float64)
        counts.index_put_((whole_from_half(self.block.grid), self.groups), ones, accumulate=True)
        return counts.repeat_interleave(2, 0)

    @cached_property
    def _pieces(self) -> tuple[Tensor, Tensor]:
        """`[half · 2, pieces]` and `[pieces, group_count]`: the same by way of at most PIECE parts each."""
        pieces = [
            (group, few)
            for group, column in enumerate(self._parts_by_group.unbind(1))
            for few in column.nonzero()[:, 0].split(PIECE)
        ]
        into = torch.zeros(len(self._parts_by_group), len(pieces))
        for piece, (group, few) in enumerate(pieces):
            into[few, piece] = self._parts_by_group[few, group].float()
        groups = torch.tensor([group for group, _ in pieces])
        return into, one_hot(groups, self.group_count).double()

    def group_energy(self, values: Tensor) -> Tensor:
        """`[B, *grid]` real → `[B, group_count]` in double precision: `gather` of their energies.

        Right to PIECE roundings of their own precision, as `norms.squares` is and in the same way: records
        whose squares leave it are taken in double precision.
        """
        parts = torch.view_as_real(half_fft(values, self.axes)).flatten(1)
        into, of_groups = (m.to(parts.device) for m in self._pieces)
        energy = (parts.square() @ into.to(parts)).double() @ of_groups
        total, lowest = energy.sum(1), LOWEST_SQUARE * parts.shape[1]
        extreme = ~((total > lowest) & total.isfinite())
        if not parts.is_meta and extreme.any():
            energy[extreme] = parts[extreme].double().square_() @ self._parts_by_group.to(parts.device)
        return energy

    def spread(self, weights: Tensor) -> Tensor:
        """`[group_count]` weights → `[*half]`, the half of the grid that spectra are kept over."""
        if self.groups is None:
            return weights.reshape([1] * self.axes)
        whole = weights[self.groups.to(weights.device)].view(self.block.grid)
        return whole[..., : self.length // 2 + 1] if self.axes else whole

    @property
    def length(self) -> int:
        """Of the grid's last axis."""
        return self.block.grid[-1] if self.axes else 1

    @property
    def half_shape(self) -> tuple[int, ...]:
        """Of the block's spectrum as it is kept: `[*lead, *half]`."""
        lead = self.block.shape[: len(self.block.shape) - self.axes]
        return (*lead, *self.block.grid[:-1], self.length // 2 + 1) if self.axes else lead

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The same without the columns that are dropped."""
        return self.half_shape if self.columns is None else (*self.half_shape[:-1], self.columns)

    def kept_spectrum(self, total: Tensor) -> Tensor:
        """`[*lead, *grid]` real → its spectrum over the columns that are kept."""
        return half_fft(total, self.axes)[..., : self.columns]

    def noise_parts(self, a: float, b: float) -> Tensor:
        """`[last axis of the half, 2]`: deviations of real and imaginary noise on each coefficient kept.

        `[2]` for a block without axes. They stand for a and b on *every* coefficient: the real part of the
        inverse sees noise τ through (τ_k + conj τ_−k)/2 alone, of half the variance. The coefficients that
        have both k and −k in the half are averaged by the inverse itself.
        """
        parts = _shares_of_noise(self.length)
        return (parts if self.axes else parts[0]) * torch.tensor([a, b], dtype=torch.float64)

    def spectrum(self, total: Tensor) -> Tensor:
        """The summed block, or some of its rows, as a spectrum; a padded sum is one already."""
        return total if self.padded else half_fft(total, self.axes)

    def inverse(self, spectrum: Tensor) -> Tensor:
        """The real part, of the block or of some of its rows, on the whole grid."""
        return half_ifft(spectrum, self.axes, self.length)

    def real_part(self, spectrum: Tensor) -> Tensor:
        """Inverse transform, real part, crop: `[*lead, *half]` complex → `[*shape]` real."""
        values = self.inverse(spectrum)
        if self.padded:
            for axis, kept in enumerate(self.block.released):
                index = torch.tensor(kept, device=values.device)
                values = values.index_select(axis - self.axes, index)
        return values.reshape(self.block.shape)
