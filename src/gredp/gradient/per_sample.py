"""Per-sample gradients that are stored as their factors and materialised only where nothing else serves.

Each kind answers two questions: how much energy has record i at each frequency, and what is the sum of
all records' gradients with given factors. `dense` is the slow, obvious answer to both.

Letters: b record, o output, i input, t position, k frequency, p and q blocks, c channel.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from gredp.errors import GredpError
from gredp.spectrum import fft, grid_energy, ifft, mirror, real_basis

#: elements that are worked on at once where gradients are materialised: what a core's cache holds
CHUNK = 1 << 20
#: rounding of Gram sums, relative to the product of the matrices' norms
GRAM_ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-14}
#: elements of one layer's per-sample kernels that may be kept between the norms and the sum
KEPT = 1 << 25


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
        values = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        return next(v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point())

    def settled(self, spectral: bool) -> "PerSampleGradient":
        """The form in which to keep it until the step: itself, or something smaller.

        `spectral` says that energies by frequency will be asked for, not norms alone.
        """
        return self

    def squared_norm(self) -> Tensor:
        """`[b]`, in double precision."""
        return _squares(self.dense())

    def grid_energy(self) -> Tensor:
        """`[b, *grid]`: energy of each coefficient of the unitary spectrum, leading axes summed."""
        return grid_energy(self.dense(), self.grid_axes)

    def energy_over(self, axes: int) -> Tensor:
        """The same on a grid of `axes` trailing axes, which a parameter shared by unlike layers may need."""
        return self.grid_energy() if axes == self.grid_axes else grid_energy(self.dense(), axes)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """`[*shape]`: Σ_b factors_b · gradient_b."""
        return torch.tensordot(factors, self.dense(), 1)

    def keep(self, mask: Tensor) -> "PerSampleGradient":
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

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    def dense(self) -> Tensor:
        return self.values

    def squared_norm(self) -> Tensor:
        return self.values.reshape(self.batch, math.prod(self.values.shape[1:])).square().sum(1).double()


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
        return torch.einsum("bto,bti->boi", self.left, self.right)

    def squared_norm(self) -> Tensor:
        positions, o, i = self.left.shape[1], self.left.shape[2], self.right.shape[2]
        if positions == 1:
            return _squares(self.left) * _squares(self.right)
        if positions * (o + i) < o * i:
            # ‖Σ_t l_t r_tᵀ‖² = Σ_ts (l_t·l_s)(r_t·r_s): two Gram matrices instead of the product
            return torch.mul(_gram(self.left), _gram(self.right)).sum((1, 2))
        return torch.cat([_squares(c.dense()) for c in self._chunks(o * i)])

    def grid_energy(self) -> Tensor:
        if self.left.shape[1] == 1:
            return _squares(self.left)[:, None] * fft(self.right, 1).abs().double().square().sum(1)
        size = self.left.shape[2] * self.right.shape[2]
        return torch.cat([grid_energy(c.dense(), 1) for c in self._chunks(size)])

    def weighted_sum(self, factors: Tensor) -> Tensor:
        left = self.left * factors[:, None, None]
        return left.flatten(0, 1).t() @ self.right.flatten(0, 1)

    def _chunks(self, size: int) -> Iterator["Outer"]:
        for part in _parts(self.batch, size):
            yield replace(self, left=self.left[part], right=self.right[part])


@dataclass(frozen=True)
class Circulant(PerSampleGradient):
    """A block-circulant layer: spectrum √d · Σ_t left_p[k] · conj(right_q[k]) for each block."""

    left: Tensor  # [b, t, p, d], output gradient in blocks
    right: Tensor  # [b, t, q, d], input in blocks
    grid_axes: int = 1

    @property
    def batch(self) -> int:
        return self.left.shape[0]

    def _spectra(self) -> tuple[Tensor, Tensor]:
        return fft(self.left, 1), fft(self.right, 1).conj()

    def dense(self) -> Tensor:
        left, right = self._spectra()
        d = left.shape[-1]
        product = torch.einsum("btpk,btqk->bpqk", left, right) * math.sqrt(d)
        return ifft(product, 1).real

    def squared_norm(self) -> Tensor:
        return self.grid_energy().sum(1)

    def grid_energy(self) -> Tensor:
        if self.left.shape[1] != 1:
            return grid_energy(self.dense(), 1)
        # Parseval: the sums over blocks part, so O(p + q) instead of O(pq) for each frequency
        left, right = (m.abs().double().square().sum((1, 2)) for m in self._spectra())
        return left * right * self.left.shape[-1]

    def weighted_sum(self, factors: Tensor) -> Tensor:
        left, right = self._spectra()
        left = (left * factors[:, None, None, None]).flatten(0, 1)
        product = left.permute(2, 1, 0) @ right.flatten(0, 1).permute(2, 0, 1)  # [k, p, q]
        d = self.left.shape[-1]
        return ifft(product.permute(1, 2, 0) * math.sqrt(d), 1).real


@dataclass(frozen=True)
class Lookup(PerSampleGradient):
    """An embedding: row ids_t of the table receives gradient_t."""

    ids: Tensor  # [b, t]
    gradient: Tensor  # [b, t, i], zero at the padding index
    rows: int
    grid_axes: int = 1

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    def dense(self) -> Tensor:
        b, t, i = self.gradient.shape
        out = self.gradient.new_zeros(b, self.rows, i)
        return out.scatter_add_(1, self.ids[..., None].expand(b, t, i), self.gradient)

    def squared_norm(self) -> Tensor:
        same = self.ids[:, :, None] == self.ids[:, None, :]
        return _gram(self.gradient).masked_fill(~same, 0).sum((1, 2))

    def grid_energy(self) -> Tensor:
        size = self.rows * self.gradient.shape[2]
        parts = [
            grid_energy(replace(self, ids=self.ids[p], gradient=self.gradient[p]).dense(), 1)
            for p in _parts(self.batch, size)
        ]
        return torch.cat(parts)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        values = (self.gradient * factors[:, None, None]).flatten(0, 1)
        out = values.new_zeros(self.rows, values.shape[1])
        return out.index_add_(0, self.ids.flatten(), values)


@dataclass(frozen=True)
class Kernels(PerSampleGradient):
    """A convolution's kernels, materialised, in the layout in which they are quickest to make and to use."""

    values: Tensor  # [b, group, k, c, o]: kernel offsets, channels in and out of each group
    shape: tuple[int, ...]
    # What is asked of them first, taken while they were in cache:
    squares: Tensor | None = None  # [b], squared norms
    energies: Tensor | None = None  # [b, *grid]

    @property
    def grid_axes(self) -> int:  # type: ignore[override]
        return len(self.shape) - 2

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    def dense(self) -> Tensor:
        return self.values.permute(0, 1, 4, 3, 2).reshape(self.batch, *self.shape)

    def squared_norm(self) -> Tensor:
        return _squares(self.values) if self.squares is None else self.squares.double()

    def grid_energy(self) -> Tensor:
        if self.energies is not None:
            return self.energies
        grid = self.shape[2:]
        b, groups, size, *channels = self.values.shape
        if size > 64 or not b:
            return grid_energy(self.dense(), self.grid_axes)
        # An orthogonal real basis in place of the transform: k and −k share their energies evenly.
        basis = real_basis(grid).to(self.values).t().expand(b * groups, size, size)
        waves = torch.bmm(basis, self.values.view(b * groups, size, math.prod(channels)))
        energy = waves.square_().sum(2).view(b, groups, size).sum(1, dtype=torch.float64)
        return ((energy + energy[:, mirror(grid).to(energy.device)]) / 2).view(b, *grid)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        total = (factors @ self.values.flatten(1)).view(self.values.shape[1:])
        return total.permute(0, 3, 2, 1).reshape(self.shape)


@dataclass(frozen=True)
class Correlation(PerSampleGradient):
    """A convolution of any dimension: the padded input correlated with the output gradient.

    Three ways to a record's norm, chosen by a cost model once per shape: materialise its kernel from
    unfolded windows, a few records at a time so that they stay in cache, and keep it for the sum where
    all of them fit; or take two Gram matrices, which is cheaper where the map is small and the kernel
    large, and leave the sum to one ordinary weight gradient.
    """

    x: Tensor  # [b, c, *input]
    gradient: Tensor  # [b, o, *output]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    pads: tuple[int, ...]  # as F.pad takes them
    mode: str = "constant"

    @property
    def grid_axes(self) -> int:  # type: ignore[override]
        return len(self.kernel)

    @property
    def batch(self) -> int:
        return self.x.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.gradient.shape[1], self.x.shape[1] // self.groups, *self.kernel)

    @property
    def padded_grid(self) -> tuple[int, ...]:
        sides = [a + b for a, b in zip(self.pads[::2], self.pads[1::2])][::-1]
        return tuple(n + m for n, m in zip(self.x.shape[2:], sides))

    @cached_property
    def padded(self) -> Tensor:
        return F.pad(self.x, self.pads, mode=self.mode) if any(self.pads) else self.x.contiguous()

    def settled(self, spectral: bool) -> PerSampleGradient:
        """Kernels in place of maps, where that is the quicker way and they fit."""
        fit = self.batch * math.prod(self.shape) <= KEPT
        if not fit or _prefer_gram(self._geometry(), spectral):
            return self
        return self._materialised(spectral)

    def _materialised(self, spectral: bool = False) -> "Kernels":
        size, channels, outputs, _, _ = self._geometry()
        values = self.x.new_empty(self.batch, self.groups, size, channels, outputs)
        squares, energies = self.x.new_empty(self.batch), []
        for part, kernels in self._kernels(values):
            if spectral:
                energies.append(Kernels(kernels, self.shape).grid_energy())
            else:
                torch.sum(kernels.flatten(1).square(), 1, out=squares[part])
        if spectral and energies:
            energy = torch.cat(energies)
            return Kernels(values, self.shape, energy.flatten(1).sum(1), energy)
        return Kernels(values, self.shape, squares)

    def dense(self) -> Tensor:
        return self._materialised().dense()

    def squared_norm(self) -> Tensor:
        if self.batch and _prefer_gram(self._geometry()):
            return self._gram_norm()
        parts = [kernels.flatten(1).square().sum(1) for _, kernels in self._kernels()]
        return torch.cat(parts).double() if parts else self.x.new_zeros(0, dtype=torch.float64)

    def grid_energy(self) -> Tensor:
        if self.batch and _prefer_gram(self._geometry(), True):
            return self._gram_energy()
        parts = [Kernels(kernels, self.shape).grid_energy() for _, kernels in self._kernels()]
        return torch.cat(parts) if parts else self.x.new_zeros(0, *self.kernel, dtype=torch.float64)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        if self.batch == 0:
            return self.x.new_zeros(self.shape)
        scaled = self.gradient * factors.view(-1, *[1] * (self.gradient.dim() - 1))
        plain = self.mode == "constant" and self.pads[::2] == self.pads[1::2]
        padding = list(self.pads[::-2]) if plain else [0] * len(self.kernel)
        return torch.ops.aten.convolution_backward(
            scaled,
            self.x if plain else self.padded,
            self.x.new_empty(()).expand(self.shape),
            None,
            list(self.stride),
            padding,
            list(self.dilation),
            False,
            [0] * len(self.kernel),
            self.groups,
            [False, True, False],
        )[1]

    def _geometry(self) -> tuple[int, int, int, int, int]:
        """Kernel size, channels in and out of one group, padded input and output positions."""
        outputs = self.shape[0] // self.groups
        positions = math.prod(self.gradient.shape[2:])
        return math.prod(self.kernel), self.shape[1], outputs, math.prod(self.padded_grid), positions

    def _kernels(self, values: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the batch with their kernels, laid out as in `Kernels`, written into `values` if given.

        One batched product of unfolded windows with the output gradient, over few enough records to
        stay in cache: there the windows are cheap to copy. The product is taken in this order because
        there are more windows than outputs, which matrix libraries like better.
        """
        size, channels, outputs, _, positions = self._geometry()
        width, out = channels * size, self.gradient.shape[2:]
        chunk = CHUNK * torch.get_num_threads()  # each has a cache of its own
        step = max(1, min(chunk // max(1, width * positions * self.groups), self.batch))
        buffer = self.x.new_empty(step, self.groups, *self.kernel, channels, *out)
        for part, x in self._padded_parts(step):
            count, (record, channel, *inner) = len(x), x.stride()
            offsets, places = ([s * n for s, n in zip(inner, by)] for by in (self.dilation, self.stride))
            strides = (record, channels * channel, *offsets, channel, *places)
            windows = x.as_strided((count, *buffer.shape[1:]), strides, x.storage_offset())
            left = buffer[:count].copy_(windows).view(count * self.groups, width, positions)
            right = self.gradient[part].reshape(count * self.groups, outputs, positions)
            target = None if values is None else values[part].view(count * self.groups, width, outputs)
            product = torch.bmm(left, right.transpose(1, 2), out=target)
            yield part, product.view(count, self.groups, size, channels, outputs)

    def _padded_parts(self, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Slices of `step` records with their padded inputs, valid until the next one is asked for.

        Zeros are written once into one small buffer: a padded copy of the whole batch would cost more in
        fresh memory than the products that read it.
        """
        zeros = any(self.pads) and self.mode == "constant" and min(self.pads) >= 0
        if zeros:
            buffer = self.x.new_zeros(step, self.x.shape[1], *self.padded_grid)
            inside = tuple(slice(p, p + n) for p, n in zip(self.pads[-2::-2], self.x.shape[2:]))
        for start in range(0, self.batch, step):
            part = slice(start, min(start + step, self.batch))
            if zeros:
                padded = buffer[: part.stop - part.start]
                padded[(slice(None), slice(None), *inside)] = self.x[part]
            else:
                padded = replace(self, x=self.x[part]).padded
            yield part, padded

    def _gram_norm(self) -> Tensor:
        """Σ over positions t, s of ⟨g_t, g_s⟩⟨window_t, window_s⟩, the windows' part from one Gram matrix."""
        kernels = list(product(*[range(k) for k in self.kernel]))
        return torch.cat([bound[:, 0] for bound in self._gram_bounds([[(k, k) for k in kernels]])])

    def _gram_energy(self) -> Tensor:
        """`[b, *grid]`: the same for each coefficient of the kernel's spectrum.

        |Σ_δ κ_δ e^(−ikδ)|² depends on pairs of offsets through their difference alone, and a difference
        and its negative give the same sum.
        """
        offsets = list(product(*[range(k) for k in self.kernel]))
        pairs: dict[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for first, second in product(offsets, offsets):
            difference = tuple(i - j for i, j in zip(first, second))
            if difference >= (0,) * len(difference):
                pairs.setdefault(difference, []).append((first, second))
        sums = torch.cat(list(self._gram_bounds(list(pairs.values()))))  # [b, differences]
        waves = torch.zeros(len(pairs), *self.kernel, dtype=torch.float64, device=sums.device)
        for row, difference in enumerate(pairs):
            # A unit at the difference, and one at its negative, have the cosine wave as their spectrum.
            for signed in {difference, tuple(-d for d in difference)}:
                waves[(row, *[d % n for d, n in zip(signed, self.kernel)])] += 1
        spectrum = torch.fft.fftn(waves, dim=tuple(range(1, waves.dim()))).real / math.prod(self.kernel)
        energy = torch.tensordot(sums[:, :-1], spectrum, 1).clamp(min=0)
        return energy + sums[:, -1].view(-1, *[1] * len(self.kernel))

    def _gram_bounds(self, pairs: list[list[tuple[tuple[int, ...], tuple[int, ...]]]]) -> Iterator[Tensor]:
        """Chunks `[part, len(pairs) + 1]`: for each list the sum over its pairs of offsets, and the margin.

        Both factors are brought to size one first, or the square of a small one could vanish. The sums
        cancel, so a bound of their rounding error, a small multiple of the two matrices' norms, comes
        along: what is added to a result keeps it from falling short of the truth. A single list, which
        is the norm, has it added already.
        """
        _, channels, outputs, area, positions = self._geometry()
        out = self.gradient.shape[2:]
        step = max(1, CHUNK // (area * area * self.groups))
        for part, padded in self._padded_parts(step):
            x, x_size = _unit(padded.reshape(-1, channels, area))
            g, g_size = _unit(self.gradient[part].reshape(-1, outputs, positions))
            gram = (x.transpose(1, 2) @ x).view(-1, *self.padded_grid, *self.padded_grid)
            right = (g.transpose(1, 2) @ g).flatten(1)
            columns, largest = [], torch.zeros((), device=x.device)
            for members in pairs:
                windows = x.new_zeros(len(x), *out, *out)
                for first, second in members:
                    windows += gram[(slice(None), *self._places(first), *self._places(second))]
                columns.append(torch.linalg.vecdot(windows.flatten(1), right).double())
                largest = torch.maximum(largest, _squares(windows.flatten(1)).sqrt())
            columns.append(largest * _squares(right).sqrt() * GRAM_ROUNDING[x.dtype])
            scale = (x_size * g_size).square()[:, None]
            bounds = (torch.stack(columns, 1) * scale).view(-1, self.groups, len(columns)).sum(1)
            yield bounds if len(pairs) > 1 else bounds[:, :1].clamp(min=0) + bounds[:, 1:]

    def _places(self, offset: tuple[int, ...]) -> list[slice]:
        """Where the padded input meets the kernel's `offset`, over all output positions."""
        geometry = zip(offset, self.stride, self.dilation, self.gradient.shape[2:])
        return [slice(j * d, j * d + s * (n - 1) + 1, s) for j, s, d, n in geometry]

    # The paper's reading: the spectrum over the whole padded input, of which the kernel is a crop.

    def _padded_spectra(self) -> tuple[Tensor, Tensor]:
        """Spectra of the input and of the output gradient spread to its strides, by group of channels."""
        n = self.grid_axes
        spread = self.gradient.new_zeros(*self.gradient.shape[:2], *self.padded_grid)
        at = tuple(slice(0, s * (m - 1) + 1, s) for s, m in zip(self.stride, self.gradient.shape[2:]))
        spread[(slice(None), slice(None), *at)] = self.gradient
        split = (self.groups, -1)
        return fft(self.padded, n).unflatten(1, split), fft(spread, n).conj().unflatten(1, split)

    def padded_energy(self) -> Tensor:
        """`[b, *padded]`: energy of each padded coefficient, from two products instead of o·c of them."""
        x, g = (m.abs().double().square().sum(2) for m in self._padded_spectra())
        return (x * g).sum(1) * math.prod(self.padded_grid)

    def padded_dense(self) -> Tensor:
        """`[b, o, c, *padded]`: each record's spectrum."""
        return self._padded_product("bgc...,bgo...->bgoc...").flatten(1, 2)

    def padded_sum(self, factors: Tensor) -> Tensor:
        """`[o, c, *padded]`: Σ_b factors_b · spectrum_b."""
        scaled = replace(self, gradient=self.gradient * factors.view(-1, *[1] * (self.gradient.dim() - 1)))
        return scaled._padded_product("bgc...,bgo...->goc...").flatten(0, 1)

    def _padded_product(self, equation: str) -> Tensor:
        x, g = self._padded_spectra()
        return torch.einsum(equation, x, g) * math.sqrt(math.prod(self.padded_grid))


def _squares(m: Tensor) -> Tensor:
    """`[b, *]` → `[b]`: sums of squares in double precision.

    The square of a small factor would vanish in single precision while its product with a large one does
    not, and a record whose norm comes out as zero would pass the clip.
    """
    flat = m.reshape(m.shape[0], math.prod(m.shape[1:]))
    return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square()


def _unit(m: Tensor) -> tuple[Tensor, Tensor]:
    """`[b, *]` → the same with each record's largest entry brought to 1, and `[b]` these entries."""
    size = m.flatten(1).abs().amax(1)
    size = size.where(size != 0, 1.0)
    return m / size.view(-1, *[1] * (m.dim() - 1)), size.double()


def _gram(m: Tensor) -> Tensor:
    """`[b, t, n]` → `[b, t, t]` in double precision.

    The sum over it cancels; in single precision a record with large opposing positions would look
    shorter than it is, and would pass the clip.
    """
    m = m.double()
    return m @ m.transpose(1, 2)


@lru_cache(maxsize=1024)
def _prefer_gram(geometry: tuple[int, int, int, int, int], spectral: bool = False) -> bool:
    """Whether two Gram matrices and a weight gradient cost less than kernels of every record.

    `spectral` asks for energies by frequency, which take a window for each pair of kernel offsets.

    Nanoseconds for a record on one core, from products at about 45 multiply-adds a nanosecond and
    copies at about one element a nanosecond; only their order matters.
    """
    size, channels, outputs, area, positions = geometry
    multiplications = size * channels * outputs * positions
    kernels = multiplications / 40 + size * channels * positions / 1.5 + size * channels * outputs / 2
    windows = (size * (size + 1) / 2 + 2 * size) if spectral else size
    gram = (area**2 * channels + positions**2 * outputs) / 40 + 1.2 * windows * positions**2
    if spectral:
        kernels += size**2 * channels * outputs / 40
    return gram + multiplications / 45 < kernels


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

    `scale` turns the stored gradients into those of each record's own loss (the batch size where the
    loss was a mean).
    """

    gradients: Mapping[str, PerSampleGradient]
    batch: int
    scale: float
