"""Per-sample gradients that are stored as their factors and materialised only where nothing else serves.

Each kind answers two questions: how much energy has record i at each frequency, and what is the sum of
all records' gradients with given factors. `dense` is the slow, obvious answer to both.

Letters: b record, o output, i input, t position, k frequency, p and q blocks, c channel.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from gredp.errors import GredpError
from gredp.spectrum import SMALL, grid_energy, half_fft, half_ifft, square_modulus, whole_energy

#: elements that are worked on at once where gradients are materialised: what a core's cache holds
CHUNK = 1 << 20
#: elements of one layer's materialised gradients that may be kept between the norms and the sum
KEPT = 1 << 25
#: rounding of a sum of products of two Gram matrices, relative to the product of their norms; in single
#: precision for vectors up to LONG, whose products would be rounded the same way too often beyond
GRAM_ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-14}
LONG = 1024
#: numbers whose squares are added up in their own precision, the sums of which are then in double
PIECE = 64
#: numbers that are taken in double precision at once: a copy of them stays in cache
FEW = 1 << 15


class Buffer:
    """Memory for a layer's gradients, step after step: fresh pages would cost as much as filling them."""

    def __init__(self) -> None:
        self._values: Tensor | None = None

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Uninitialised; overwrites whatever was taken before."""
        size = math.prod(shape)
        held = self._values
        if held is None or held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            held = self._values = like.new_empty(size)
        return held[:size].view(shape)


class PerSampleGradient(ABC):
    """One parameter's gradient for each record of a physical batch."""

    #: trailing axes of the parameter that are its Fourier grid
    grid_axes: int

    @abstractmethod
    def dense(self) -> Tensor:
        """`[b, *shape]`."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Number of records."""

    @property
    def dtype(self) -> torch.dtype:
        return self._stored.dtype

    @property
    def device(self) -> torch.device:
        return self._stored.device

    @property
    def _stored(self) -> Tensor:
        values = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())

    def compact(self, spectral: bool, buffer: "Buffer | None" = None) -> "PerSampleGradient":
        """The form in which to keep it until the step: itself, or something smaller.

        `spectral` says that energies by frequency will be asked for, not norms alone. What is
        materialised goes into `buffer`, if given, and is valid as long as that is not used again.
        """
        return self

    def squared_norm(self) -> Tensor:
        """`[b]`, in double precision."""
        return squares(self.dense())

    def grid_energy(self) -> Tensor:
        """`[b, *grid]`: energy of each coefficient of the unitary spectrum, leading axes summed."""
        return grid_energy(self.dense(), self.grid_axes)

    def energy_over(self, axes: int) -> Tensor:
        """The same on a grid of `axes` trailing axes, which a parameter shared by unlike layers may need."""
        return self.grid_energy() if axes == self.grid_axes else grid_energy(self.dense(), axes)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """`[*shape]`: Σ_b factors_b · gradient_b."""
        return torch.tensordot(factors, self.dense(), 1)

    def norm_bound(self) -> Tensor | None:
        """`[b]`: a bound on the square of what `weighted_sum` adds up for a record before its terms cancel.

        None where they have cancelled already, because the gradient is materialised.
        """
        return None

    def allowance(self, transforms: int, size: int) -> float:
        """By how much a record may be longer in the sum than its norm says, relative to its whole norm.

        The norm may be taken of the product of as many `transforms` of `size` numbers, or of none. In units
        of the rounding u, 2⁻²⁴ in single precision: the sum of a piece's squares is right to 64 in whatever
        order it is added up, its root to 33, a product of two such norms to 66; the record's factor and
        its product with the gradient are rounded by 1 each. A transform is right to 7·log₂ n (FFT) or n·√n
        (a matrix). Sums in double precision add less than 1e-10. Terms that cancel within a record have
        allowances of their own, `norm_bound` and GRAM_ROUNDING.
        """
        transform = size * math.sqrt(size) if size <= SMALL else 7 * math.log2(size)
        return torch.finfo(self.dtype).eps / 2 * (72 + transforms * transform) + 1e-10

    def merge_views(self, views: int) -> "PerSampleGradient":
        """Rows of `views` inputs that are one record's become one row, their sum: views first, clip after."""
        return Dense(_add_views(self.dense(), views), self.grid_axes)

    def zero_unless(self, mask: Tensor) -> "PerSampleGradient":
        """The same with the records outside `mask` set to zero, infinities and NaN included."""
        changed = {}
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == self.batch:
                shaped = mask.view(-1, *[1] * (value.dim() - 1))
                changed[f.name] = value.masked_fill(~shaped, 0)
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class Dense(PerSampleGradient):
    """Materialised: biases, normalisation layers, sums over several uses of one parameter."""

    values: Tensor  # [b, *shape]
    grid_axes: int = 1
    energies: Tensor | None = None  # [b, *grid], where they were asked for early

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    def dense(self) -> Tensor:
        return self.values

    def grid_energy(self) -> Tensor:
        return super().grid_energy() if self.energies is None else self.energies


@dataclass(frozen=True)
class Outer(PerSampleGradient):
    """A linear layer: Σ_t left_t ⊗ right_t. Frequencies are those of the input axis."""

    left: Tensor  # [b, t, o]
    right: Tensor  # [b, t, i]
    grid_axes: int = 1

    @property
    def batch(self) -> int:
        return self.left.shape[0]

    def dense(self) -> Tensor:
        return torch.bmm(self.left.transpose(1, 2), self.right)

    def compact(self, spectral: bool, buffer: "Buffer | None" = None) -> PerSampleGradient:
        """Of a sequence, the product itself where it fits: no second one is needed for the sum then."""
        _, positions, o = self.left.shape
        i = self.right.shape[2]
        # Two Gram matrices and the product over all records, against the product and looks at the result.
        gram = positions * positions * (o + i) / 40 + positions * o * i / 45 + positions * (o + i) / 2
        if positions == 1 or self.batch * o * i > KEPT or gram < positions * o * i / 40 + 2 * o * i:
            return self
        values = (buffer or Buffer()).take((self.batch, o, i), self.left)
        energies = []
        for part, chunk in self._chunks(o * i):
            torch.bmm(chunk.left.transpose(1, 2), chunk.right, out=values[part])
            if spectral:
                energies.append(grid_energy(values[part], 1))
        return Dense(values, 1, torch.cat(energies) if energies else None)

    def squared_norm(self) -> Tensor:
        positions, o, i = self.left.shape[1], self.left.shape[2], self.right.shape[2]
        if positions == 1:
            return squares(self.left) * squares(self.right)
        if positions * (o + i) < o * i:
            return self._gram_norm()
        return torch.cat([squares(c.dense()) for _, c in self._chunks(o * i)])

    def _gram_norm(self) -> Tensor:
        """‖Σ_t l_t r_tᵀ‖² = Σ_ts (l_t·l_s)(r_t·r_s): two Gram matrices instead of the product.

        The sum cancels where positions oppose each other, so an allowance for its rounding comes on
        top: a norm that came out too small would let a record pass the clip. Both factors are brought
        to size one first, or the square of a small one could vanish.
        """
        sizes, grams = [], []
        for factor in (self.left, self.right):
            m, size = normalize_rows(as_double_if_long(factor, self.left.shape[2], self.right.shape[2]))
            grams.append((m @ m.transpose(1, 2)).flatten(1))
            sizes.append(size)
        total = torch.linalg.vecdot(*grams).double().clamp(min=0)
        margin = (squares(grams[0]) * squares(grams[1])).sqrt() * GRAM_ROUNDING[grams[0].dtype]
        return (total + margin) * (sizes[0] * sizes[1]).square()

    def norm_bound(self) -> Tensor | None:
        return None if self.left.shape[1] == 1 else squares(self.left) * squares(self.right)

    def grid_energy(self) -> Tensor:
        positions, o, i = self.left.shape[1], self.left.shape[2], self.right.shape[2]
        if positions == 1:
            right = whole_energy(square_modulus(half_fft(self.right[:, 0], 1)), self.right.shape[2:])
            return squares(self.left)[:, None] * right
        if positions * (o + i) < o * i:
            return torch.cat([c._gram_energy() for _, c in self._chunks(positions * (o + 2 * i))])
        return torch.cat([grid_energy(c.dense(), 1) for _, c in self._chunks(o * i)])

    def _gram_energy(self) -> Tensor:
        """Σ_ts (l_t·l_s) conj(r̂_t[k]) r̂_s[k] for each k: a Gram matrix and the spectra of the inputs.

        Sums cancel as they do in `_gram_norm`, and get the same kind of allowance.
        """
        (left, left_size), (right, right_size) = (
            normalize_rows(as_double_if_long(factor, self.left.shape[2]))
            for factor in (self.left, self.right)
        )
        gram = left @ left.transpose(1, 2)
        spectra = half_fft(right, 1)
        parts = torch.view_as_real(spectra).flatten(2)  # [b, t, half · 2]
        products = (parts * (gram @ parts)).unflatten(2, (-1, 2))
        energy = products.sum((1, 3), dtype=torch.float64).clamp(min=0)
        own = square_modulus(spectra).sum(1)
        # A transform rounds each coefficient in proportion to all of them, so their mean counts too.
        margin = squares(gram).sqrt()[:, None] * (own + own.mean(1, keepdim=True))
        energy = (energy + margin * GRAM_ROUNDING[left.dtype]) * (left_size * right_size).square()[:, None]
        return whole_energy(energy, self.right.shape[2:])

    def weighted_sum(self, factors: Tensor) -> Tensor:
        left = self.left * factors[:, None, None]
        return left.flatten(0, 1).t() @ self.right.flatten(0, 1)

    def merge_views(self, views: int) -> "Outer":
        """Views are further positions."""
        return Outer(_join_views(self.left, views), _join_views(self.right, views))

    def _chunks(self, size: int) -> Iterator[tuple[slice, "Outer"]]:
        for part in _parts(self.batch, size):
            yield part, replace(self, left=self.left[part], right=self.right[part])


@dataclass(frozen=True)
class Circulant(PerSampleGradient):
    """A block-circulant layer: spectrum √d · Σ_t left_p[k] · conj(right_q[k]) for each block."""

    left: Tensor  # [b, t, p, d], output gradient in blocks
    right: Tensor  # [b, t, q, d], input in blocks
    grid_axes: int = 1

    @property
    def batch(self) -> int:
        return self.left.shape[0]

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

    def merge_views(self, views: int) -> "Circulant":
        return Circulant(_join_views(self.left, views), _join_views(self.right, views))

    def squared_norm(self) -> Tensor:
        return self.grid_energy().sum(1)

    def allowance(self, transforms: int, size: int) -> float:
        return super().allowance(2, self.length)

    def norm_bound(self) -> Tensor:
        return squares(self.left) * squares(self.right) * self.length

    def grid_energy(self) -> Tensor:
        if self.left.shape[1] != 1:
            size = self.left.shape[2] * self.right.shape[2] * self.length
            parts = (
                replace(self, left=self.left[part], right=self.right[part])
                for part in _parts(self.batch, size)
            )
            energy = torch.cat([square_modulus(part._product()).sum((1, 2)) for part in parts])
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
class Lookup(PerSampleGradient):
    """An embedding: row ids_t of the table receives gradient_t."""

    ids: Tensor  # [b, t]
    gradient: Tensor  # [b, t, i], zero at the padding index
    rows: int
    grid_axes: int = 1
    distinct: bool = False  # whether at most one position of a row is not zero

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    def dense(self) -> Tensor:
        b, t, i = self.gradient.shape
        out = self.gradient.new_zeros(b, self.rows, i)
        return out.scatter_add_(1, self.ids[..., None].expand(b, t, i), self.gradient)

    def merge_views(self, views: int) -> "Lookup":
        ids, gradient = _join_views(self.ids, views), _join_views(self.gradient, views)
        return Lookup(ids, gradient, self.rows)

    def compact(self, spectral: bool, buffer: "Buffer | None" = None) -> PerSampleGradient:
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


def squares(m: Tensor) -> Tensor:
    """`[b, *]` → `[b]`: sums of squares in double precision, right to PIECE roundings of m's own.

    The square of a small factor would vanish in single precision while its product with a large one does
    not, and a record whose norm comes out as zero would pass the clip: such records are taken in double
    precision, as are few numbers. All of a large array would cost a copy of it.
    """
    flat = m.reshape(m.shape[0], math.prod(m.shape[1:]))
    if flat.numel() <= FEW:
        return _double_squares(flat)
    whole = flat.shape[1] // PIECE * PIECE
    pieces = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (whole // PIECE, PIECE)), dim=2)
    total = _double_squares(pieces)
    if whole < flat.shape[1]:
        total += torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square_()
    least, most = total.aminmax()
    lowest = 1e-26 * flat.shape[1]  # a square that vanishes is below 2⁻¹²⁶
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


def _add_views(rows: Tensor, views: int) -> Tensor:
    """`[b · views, *]` → `[b, *]`, added up."""
    return rows.reshape(rows.shape[0] // views, views, *rows.shape[1:]).sum(1)


def _join_views(rows: Tensor, views: int) -> Tensor:
    """`[b · views, t, *]` → `[b, views · t, *]`."""
    return rows.reshape(rows.shape[0] // views, views * rows.shape[1], *rows.shape[2:])


def _parts(batch: int, size: int) -> Iterator[slice]:
    """Slices of the batch with at most CHUNK elements, `size` to a record; at least one record, one slice."""
    step = max(1, CHUNK // max(size, 1))
    for start in range(0, max(batch, 1), step):
        yield slice(start, start + step)


def add(first: PerSampleGradient, second: PerSampleGradient, grid_axes: int) -> PerSampleGradient:
    """The gradient of a parameter that is used twice: both uses count before the norm is taken."""
    if first.batch != second.batch:
        raise GredpError(
            f"a shared parameter saw {first.batch} records in one use and {second.batch} in another: "
            "the first dimension of every layer's input must be the batch"
        )
    return Dense(first.dense() + second.dense(), grid_axes)


@dataclass(frozen=True)
class PerSampleSpectra:
    """Stage 1: one physical batch, every block of every record, not yet clipped.

    `scale` turns the stored gradients into those of each record's own loss, the mean over its views (the
    number of records where the loss was a mean over all inputs).
    """

    gradients: Mapping[str, PerSampleGradient]
    batch: int
    scale: float
