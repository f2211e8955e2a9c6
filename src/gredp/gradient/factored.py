"""Stage 3, factors: linear, block-circulant and embedding layers.

Letters: b record, o output, i input, t position, k frequency, p and q blocks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gredp.gradient.norms import GRAM_ROUNDING, KEPT, as_double_if_long, normalize_rows, parts, squares
from gredp.gradient.per_sample import Dense, InPieces, PerSampleGradient, Products
from gredp.spectrum import (
    BlockView,
    grid_energy,
    half_fft,
    half_ifft,
    square_modulus,
    sum_of_rows,
    whole_energy,
)


class Factored(PerSampleGradient):
    """Stored as tensors `[b, t, *]`, its gradient a sum over positions t."""

    grid_axes = 1

    def merge_views(self, views: int) -> Self:
        """Views are further positions: `[b · views, t, *]` → `[b, views · t, *]`."""
        return self.map_records(lambda rows: rows.unflatten(0, (-1, views)).flatten(1, 2))

    def chunks(self, size: int) -> Iterator[tuple[slice, Self]]:
        """A few records at a time, with `size` elements each when worked on."""
        for part in parts(self.batch, size):
            yield part, self.map_records(itemgetter(part))


@dataclass(frozen=True)
class Outer(Factored):
    """A linear layer: Σ_t left_t ⊗ right_t. Frequencies are those of the input axis."""

    left: Tensor  # [b, t, o]
    right: Tensor  # [b, t, i]

    def dense(self) -> Tensor:
        return torch.bmm(self.left.transpose(1, 2), self.right)

    def joined(self, other: PerSampleGradient) -> "Outer | None":
        """The same layer used again has more positions, as a recurrent one has at every step."""
        if not isinstance(other, Outer):
            return None
        return Outer(torch.cat([self.left, other.left], 1), torch.cat([self.right, other.right], 1))

    def compact(self, spectral: bool, products: Products | None = None) -> PerSampleGradient:
        """Of a sequence, the product itself where it fits: no second one is needed for the sum then."""
        positions, o, i = *self.left.shape[1:], self.right.shape[2]
        # Two Gram matrices and the product over all records, against the product and looks at the result:
        # nanoseconds of one core, fitted to twelve shapes.
        gram = (positions * positions * (o + i) + positions * o * i) / 25
        # Products of wide layers over short sequences would take many times the memory of their factors.
        fits = self.batch * o * i <= KEPT and o * i <= 4 * positions * (o + i)
        if positions == 1 or not fits or gram < positions * o * i / 37 + 0.45 * o * i:
            return self
        products = products or Products()
        return InPieces.of(chunk._product(spectral, products) for _, chunk in self.chunks(o * i))

    def _product(self, spectral: bool, products: Products) -> PerSampleGradient:
        left, right, length = self.left.transpose(1, 2), self.right, self.right.shape[2]
        waves = spectral and right.shape[1] < left.shape[1]  # fewer inputs to transform than rows
        if waves:
            right = _pack(half_fft(right, 1), length)
        values = products.multiply(left, right, left.new_empty(*left.shape[:2], right.shape[2]))
        if waves:
            return Waves(values, length, Waves(values, length).grid_energy())
        taken = {"energies": grid_energy(values, 1)} if spectral else {"norms": squares(values)}
        return Dense(values, 1, **taken)

    def squared_norm(self) -> Tensor:
        positions, o, i = self.left.shape[1], self.left.shape[2], self.right.shape[2]
        if positions == 1:
            return squares(self.left) * squares(self.right)
        if positions * (o + i) < o * i:
            return self._gram_norm()
        return torch.cat([squares(c.dense()) for _, c in self.chunks(o * i)])

    def _gram_norm(self) -> Tensor:
        """‖Σ_t l_t r_tᵀ‖² = Σ_ts (l_t·l_s)(r_t·r_s): two Gram matrices instead of the product.

        The sum cancels where positions oppose each other, so an allowance for its rounding comes on
        top: a norm that came out too small would let a record pass the clip. Both factors are brought
        to size one first, or the square of a small one could vanish.
        """
        left, right, scale = self._normalized(self.left.shape[2], self.right.shape[2])
        left, right = ((m @ m.transpose(1, 2)).flatten(1) for m in (left, right))
        total = torch.linalg.vecdot(left, right).double().clamp(min=0)
        margin = (squares(left) * squares(right)).sqrt() * GRAM_ROUNDING[left.dtype]
        return (total + margin) * scale

    def _normalized(self, *lengths: int) -> tuple[Tensor, Tensor, Tensor]:
        """Both factors brought to size one, in double precision for long sums, and their scale squared."""
        (left, left_size), (right, right_size) = (
            normalize_rows(as_double_if_long(factor, *lengths)) for factor in (self.left, self.right)
        )
        return left, right, (left_size * right_size).square()

    def norm_bound(self) -> Tensor | None:
        return None if self.left.shape[1] == 1 else squares(self.left) * squares(self.right)

    def grid_energy(self) -> Tensor:
        positions, o, i = self.left.shape[1], self.left.shape[2], self.right.shape[2]
        if positions == 1:
            right = whole_energy(square_modulus(half_fft(self.right[:, 0], 1)), self.right.shape[2:])
            return squares(self.left)[:, None] * right
        if positions * (o + i) < o * i:
            return torch.cat([c._gram_energy() for _, c in self.chunks(positions * (o + 2 * i))])
        return torch.cat([grid_energy(c.dense(), 1) for _, c in self.chunks(o * i)])

    def energy_in(self, view: BlockView) -> Tensor:
        if self.left.shape[1] == 1 == view.axes:
            return squares(self.left)[:, None] * view.group_energy(self.right[:, 0])
        return super().energy_in(view)

    def _gram_energy(self) -> Tensor:
        """Σ_ts (l_t·l_s) conj(r̂_t[k]) r̂_s[k] for each k: a Gram matrix and the spectra of the inputs.

        Sums cancel as they do in `_gram_norm`, and get the same kind of allowance.
        """
        left, right, scale = self._normalized(self.left.shape[2])
        gram = left @ left.transpose(1, 2)
        spectra = half_fft(right, 1)
        parts = torch.view_as_real(spectra).flatten(2)  # [b, t, half · 2]
        products = (parts * (gram @ parts)).unflatten(2, (-1, 2))
        energy = products.sum((1, 3), dtype=torch.float64).clamp(min=0)
        own = square_modulus(spectra).sum(1)
        # A transform rounds each coefficient in proportion to all of them, so their mean counts too.
        margin = squares(gram).sqrt()[:, None] * (own + own.mean(1, keepdim=True))
        energy = (energy + margin * GRAM_ROUNDING[left.dtype]) * scale[:, None]
        return whole_energy(energy, self.right.shape[2:])

    def weighted_sum(self, factors: Tensor) -> Tensor:
        return self._sum(factors, self.right)

    def band_sum(self, factors: Tensor, view: BlockView) -> Tensor:
        """What is dropped takes no part in the product: that of half a band takes half the time."""
        if view.axes != 1:
            return super().band_sum(factors, view)
        parts = torch.view_as_real(view.kept_spectrum(self.right)).flatten(2)
        return torch.view_as_complex(self._sum(factors, parts).unflatten(1, (-1, 2)))

    def _sum(self, factors: Tensor, right: Tensor) -> Tensor:
        left = self.left * factors[:, None, None]
        return left.flatten(0, 1).t() @ right.flatten(0, 1)


@dataclass(frozen=True)
class Waves(PerSampleGradient):
    """A linear layer over a sequence, materialized as the spectra of its rows: Σ_t left_t ⊗ F right_t.

    Energies are those of the numbers that are summed. One inverse of the sum does for all records.
    """

    values: Tensor  # [b, o, parts], as `_pack` leaves them
    length: int
    energies: Tensor | None = None  # [b, i], taken while the values were in cache
    grid_axes = 1

    def dense(self) -> Tensor:
        return self.restored(self.values)

    def allowance(self, transforms: int, size: int) -> float:
        return super().allowance(max(1, transforms), self.length)

    def squared_norm(self) -> Tensor:
        return self.grid_energy().sum(1)

    def grid_energy(self) -> Tensor:
        if self.energies is not None:
            return self.energies
        energy = _unpack(sum_of_rows(self.values.square()), self.length).sum(-1)
        return whole_energy(energy, (self.length,))

    def stored_sum(self, factors: Tensor) -> Tensor:
        return torch.tensordot(factors, self.values, 1)

    def restored(self, total: Tensor) -> Tensor:
        return half_ifft(torch.view_as_complex(_unpack(total, self.length)), 1, self.length)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        return self.restored(self.stored_sum(factors))


def _pack(spectrum: Tensor, length: int) -> Tensor:
    """`[*, half]` of one axis → `[*, n]`: its parts side by side, as many as `length` if that is even.

    The highest coefficient is real then, and takes the place of the lowest one's imaginary part, which is
    zero: products with the parts need no columns of zeros.
    """
    parts = torch.view_as_real(spectrum)
    if length % 2 == 0:
        parts[..., 0, 1] = parts[..., -1, 0]
        parts = parts[..., :-1, :]
    return parts.flatten(-2)


def _unpack(parts: Tensor, length: int) -> Tensor:
    """`[*, n]` → `[*, half, 2]`: what `_pack` has packed, or squares of it."""
    if length % 2 == 0:
        parts = F.pad(parts, (0, 2))
        parts[..., -2], parts[..., 1] = parts[..., 1], 0
    return parts.unflatten(-1, (-1, 2))


@dataclass(frozen=True)
class Circulant(Factored):
    """A block-circulant layer: spectrum √d · Σ_t left_p[k] · conj(right_q[k]) for each block."""

    left: Tensor  # [b, t, p, d], output gradient in blocks
    right: Tensor  # [b, t, q, d], input in blocks

    @property
    def length(self) -> int:
        return self.left.shape[-1]

    def _spectra(self) -> tuple[Tensor, Tensor]:
        return half_fft(self.left, 1), half_fft(self.right, 1)

    def _product(self) -> Tensor:
        """`[b, p, q, half]`."""
        left, right = self._spectra()
        return torch.einsum("btpk,btqk->bpqk", left, right.conj()) * math.sqrt(self.length)

    def dense(self) -> Tensor:
        return half_ifft(self._product(), 1, self.length)

    def squared_norm(self) -> Tensor:
        return self.grid_energy().sum(1)

    def allowance(self, transforms: int, size: int) -> float:
        return super().allowance(2, self.length)

    def norm_bound(self) -> Tensor:
        return squares(self.left) * squares(self.right) * self.length

    def grid_energy(self) -> Tensor:
        if self.left.shape[1] != 1:
            size = self.left.shape[2] * self.right.shape[2] * self.length
            energy = torch.cat([square_modulus(c._product()).sum((1, 2)) for _, c in self.chunks(size)])
            return whole_energy(energy, (self.length,))
        # Parseval: the sums over blocks part, so O(p + q) instead of O(pq) for each frequency
        left, right = (square_modulus(m).sum((1, 2)) for m in self._spectra())
        return whole_energy(left * right * self.length, (self.length,))

    def weighted_sum(self, factors: Tensor) -> Tensor:
        left, right = self._spectra()
        left = (left * factors[:, None, None, None]).flatten(0, 1)
        product = left.permute(2, 1, 0) @ right.conj().flatten(0, 1).permute(2, 0, 1)  # [k, p, q]
        return half_ifft(product.permute(1, 2, 0) * math.sqrt(self.length), 1, self.length)


@dataclass(frozen=True)
class Lookup(Factored):
    """An embedding: row ids_t of the table receives gradient_t."""

    ids: Tensor  # [b, t]
    gradient: Tensor  # [b, t, i], zero at the padding index
    rows: int
    distinct: bool = False  # whether at most one position of a row is not zero

    def dense(self) -> Tensor:
        b, t, i = self.gradient.shape
        out = self.gradient.new_zeros(b, self.rows, i)
        return out.scatter_add_(1, self.ids[..., None].expand(b, t, i), self.gradient)

    def merge_views(self, views: int) -> Self:
        return replace(super().merge_views(views), distinct=False)

    def compact(self, spectral: bool, products: Products | None = None) -> PerSampleGradient:
        """Positions with the same row added up at the first of them, after which every row stands alone."""
        same = self.ids[:, :, None] == self.ids[:, None, :]
        first = ~same.tril(-1).any(2, keepdim=True)
        return replace(self, gradient=(same & first).to(self.gradient) @ self.gradient, distinct=True)

    def squared_norm(self) -> Tensor:
        return squares(self.gradient) if self.distinct else self.compact(False).squared_norm()

    def grid_energy(self) -> Tensor:
        return grid_energy(self.gradient, 1) if self.distinct else self.compact(True).grid_energy()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        values = (self.gradient * factors[:, None, None]).flatten(0, 1)
        out = values.new_zeros(self.rows, values.shape[1])
        return out.index_add_(0, self.ids.flatten(), values)
