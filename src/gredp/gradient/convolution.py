"""Per-sample gradients of convolutions, the layers in which a private step spends its time.

Letters: b record, v view, o and c channels out and in, k kernel offset.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gredp.gradient.per_sample import (
    CHUNK,
    GRAM_ROUNDING,
    KEPT,
    Buffer,
    PerSampleGradient,
    as_double_if_long,
    normalize_rows,
    squares,
)
from gredp.spectrum import fft, grid_energy, mirror, real_basis


@dataclass(frozen=True)
class Kernels(PerSampleGradient):
    """A convolution's kernels, materialised, in the layout in which they are quickest to make and to use."""

    # [b, group, k, c, k', o]: channels in and out of each group; kernel offsets k that shifted the input
    # and k' that shifted the output gradient, each axis of the kernel among one of the two
    values: Tensor
    shape: tuple[int, ...]
    on_gradient: tuple[bool, ...]  # for each axis of the kernel, whether it is among k'
    # What is asked of them first, taken while they were in cache:
    norms: Tensor | None = None  # [b], squared
    energies: Tensor | None = None  # [b, *grid]

    @property
    def grid_axes(self) -> int:  # type: ignore[override]
        return len(self.shape) - 2

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    def _offsets_first(self) -> Tensor:
        """`[b, group, *kernel, c, o]`."""
        b, groups, _, c, _, o = self.values.shape
        n = self.grid_axes
        inner, outer = (
            [k if g == side else 1 for k, g in zip(self.shape[2:], self.on_gradient)]
            for side in (False, True)
        )
        apart = self.values.view(b, groups, *inner, c, *outer, o)
        pairs = [axis for a in range(n) for axis in (2 + a, 3 + n + a)]
        return apart.permute(0, 1, *pairs, 2 + n, 3 + 2 * n).reshape(b, groups, *self.shape[2:], c, o)

    def dense(self) -> Tensor:
        offsets = range(2, 2 + self.grid_axes)
        last = 2 + self.grid_axes
        return self._offsets_first().permute(0, 1, last + 1, last, *offsets).reshape(self.batch, *self.shape)

    def squared_norm(self) -> Tensor:
        return squares(self.values) if self.norms is None else self.norms

    def grid_energy(self) -> Tensor:
        if self.energies is not None:
            return self.energies
        grid = self.shape[2:]
        b, groups, size = self.batch, self.values.shape[1], math.prod(grid)
        if size > 64 or not b:
            return grid_energy(self.dense(), self.grid_axes)
        # An orthogonal real basis in place of the transform: k and −k share their energies evenly.
        basis = real_basis(grid).to(self.values).t().expand(b * groups, size, size)
        waves = torch.bmm(basis, self._offsets_first().reshape(b * groups, size, -1))
        energy = squares(waves.flatten(0, 1)).view(b, groups, size).sum(1)
        return ((energy + energy[:, mirror(grid).to(energy.device)]) / 2).view(b, *grid)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        total = (factors @ self.values.flatten(1)).view(1, *self.values.shape[1:])
        return Kernels(total, self.shape, self.on_gradient).dense()[0]


@dataclass(frozen=True)
class Correlation(PerSampleGradient):
    """A convolution of any dimension: the padded input correlated with the output gradient.

    Three ways to a record's norm, chosen by a cost model once per shape: materialise its kernel from
    unfolded windows, a few records at a time so that they stay in cache, and keep it for the sum where
    all of them fit; or take two Gram matrices, which is cheaper where the map is small and the kernel
    large, and leave the sum to one ordinary weight gradient.
    """

    x: Tensor  # [b · v, c, *input]
    gradient: Tensor  # [b · v, o, *output]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    pads: tuple[int, ...]  # as F.pad takes them
    mode: str = "constant"
    views: int = 1  # inputs of a record, side by side; its gradient is the sum over them

    @property
    def grid_axes(self) -> int:  # type: ignore[override]
        return len(self.kernel)

    @property
    def batch(self) -> int:
        return self.x.shape[0] // self.views

    def merge_views(self, views: int) -> "Correlation":
        """Views are further positions, read where they lie."""
        return replace(self, views=views)

    def zero_unless(self, mask: Tensor) -> "Correlation":
        inputs = mask.repeat_interleave(self.views)
        x, gradient = (
            t.masked_fill(~inputs.view(-1, *[1] * (t.dim() - 1)), 0) for t in (self.x, self.gradient)
        )
        return replace(self, x=x, gradient=gradient)

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

    def compact(self, spectral: bool, buffer: Buffer | None = None) -> PerSampleGradient:
        """Kernels in place of maps, where that is the quicker way and they fit."""
        fit = self.batch * math.prod(self.shape) <= KEPT
        if not fit or _prefer_gram(self._geometry(), spectral):
            return self
        return self._materialised(spectral, buffer)

    def _materialised(self, spectral: bool = False, buffer: Buffer | None = None) -> "Kernels":
        values = (buffer or Buffer()).take((self.batch, *self._layout()), self.x)
        norms, energies = [], []
        for _, kernels in self._kernels(values):
            if spectral:
                energies.append(kernels.grid_energy())
            else:
                norms.append(kernels.squared_norm())
        taken = (torch.cat(parts) if parts else None for parts in (norms, energies))
        return Kernels(values, self.shape, self.split, *taken)

    def dense(self) -> Tensor:
        return self._materialised().dense()

    def norm_bound(self) -> Tensor:
        """Each offset of the kernel meets every input at most once."""
        inputs = squares(self.x if self.mode == "constant" else self.padded)
        left, right = (m.view(self.batch, self.views).sum(1) for m in (inputs, squares(self.gradient)))
        return left * right * math.prod(self.kernel)

    def squared_norm(self) -> Tensor:
        if self.batch and _prefer_gram(self._geometry()):
            return self._gram_norm()
        parts = [kernels.squared_norm() for _, kernels in self._kernels()]
        return torch.cat(parts) if parts else self.x.new_zeros(0, dtype=torch.float64)

    def grid_energy(self) -> Tensor:
        if self.batch and _prefer_gram(self._geometry(), True):
            return self._gram_energy()
        parts = [kernels.grid_energy() for _, kernels in self._kernels()]
        return torch.cat(parts) if parts else self.x.new_zeros(0, *self.kernel, dtype=torch.float64)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        if self.batch == 0:
            return self.x.new_zeros(self.shape)
        scaled = self._scaled(factors)
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

    def _scaled(self, factors: Tensor) -> Tensor:
        """Output gradients times their record's factor."""
        inputs = factors.repeat_interleave(self.views)
        return self.gradient * inputs.view(-1, *[1] * (self.gradient.dim() - 1))

    def _geometry(self) -> "Geometry":
        """What the cost of the ways depends on."""
        return Geometry(
            self.shape[1],
            self.shape[0] // self.groups,
            tuple(zip(self.kernel, self.stride, self._reach)),
            tuple(self.gradient.shape[2:]),
            math.prod(self.padded_grid),
            self.views,
        )

    @property
    def _zeros(self) -> bool:
        """Whether the padding is of zeros, which need not be there to be multiplied."""
        return self.mode == "constant" and min(self.pads, default=0) >= 0

    @property
    def _reach(self) -> tuple[int, ...]:
        """Positions of the input that are read."""
        return tuple(self.x.shape[2:]) if self._zeros else self.padded_grid

    @cached_property
    def split(self) -> tuple[bool, ...]:
        """For each axis of the kernel, whether its offsets shift the output gradient instead of the input."""
        return _cheapest_split(self._geometry())

    def _layout(self) -> tuple[int, ...]:
        """A record's kernels as `Kernels` keeps them."""
        geometry = self._geometry()
        inner, outer = geometry.offsets(self.split)
        return (self.groups, inner, geometry.channels, outer, geometry.outputs)

    def _kernels(self, values: Tensor | None = None) -> Iterator[tuple[slice, Kernels]]:
        """Slices of the batch with their kernels, written into `values` if given.

        κ_δ = Σ_p g_p x_{p+δ}, and where the stride is 1 also Σ_p g_{p−δ} x_p. So the offsets of some
        axes may shift copies of the input, those of others copies of the output gradient, and one
        batched product of the two gives all offsets: fewer copies than windows of the whole kernel
        would take, and a squarer product, which matrix libraries like better. Over few enough records
        to stay in cache, where copies are cheap; views of a record lie behind one another as if they
        were one map, and where they do not fit, they are added up in turn.
        """
        layout, split = self._layout(), self.split
        groups, inner, channels, outer, outputs = layout
        positions = self._geometry().positions(split)
        rows, columns = inner * channels, outer * outputs
        copies, result = (rows + columns) * math.prod(positions) * groups, rows * columns * groups
        chunk = CHUNK * torch.get_num_threads()  # each has a cache of its own
        step = max(1, min(chunk // max(1, copies * self.views + result), self.batch))
        most = max(1, chunk // max(1, copies))
        views = max(d for d in range(1, self.views + 1) if self.views % d == 0 and d <= most)
        shift_input = self._shifts(self.x.new_zeros(step, groups, inner, channels, views, *positions), False)
        shift_gradient = self._shifts(self.x.new_zeros(step, groups, outer, outputs, views, *positions), True)
        for start in range(0, self.batch, step):
            part = slice(start, min(start + step, self.batch))
            target = None if values is None else values[part].view(-1, rows, columns)
            for first in range(0, self.views, views):
                x, gradient = self._inputs(part, slice(first, first + views))
                left, right = shift_input(x), shift_gradient(gradient).transpose(1, 2)
                if first == 0:
                    product = torch.bmm(left, right, out=target)
                else:
                    product.baddbmm_(left, right)
            yield part, Kernels(product.view(-1, *layout), self.shape, split)

    def _inputs(self, part: slice, views: slice) -> tuple[Tensor, Tensor]:
        """Some views of some records, `[records, group, channels, views, *]`: inputs, output gradients."""
        x, gradient = (t.unflatten(0, (self.batch, self.views))[part, views] for t in (self.x, self.gradient))
        if not self._zeros:
            x = replace(self, x=x.flatten(0, 1)).padded.unflatten(0, x.shape[:2])
        x, gradient = (t.unflatten(2, (self.groups, -1)).movedim(1, 3) for t in (x, gradient))
        return x, gradient

    def _shifts(self, buffer: Tensor, gradient: bool) -> Callable[[Tensor], Tensor]:
        """A function of `[records, group, channels, views, *]`: at each offset of its axes, side by side.

        It gives `[records · group, offsets · channels, positions]`, valid until it is called again. The
        buffer's zeros stay wherever an offset reaches beyond the source, in every call alike.
        """
        _, _, offsets, channels, views, *positions = buffer.shape
        source = self.gradient.shape[2:] if gradient else self._reach
        size = views * math.prod(positions)
        if offsets == 1 and tuple(source) == tuple(positions) and (gradient or not any(self.pads)):
            return lambda x: x.reshape(-1, channels, size)
        own = [range(k) if g == gradient else range(1) for k, g in zip(self.kernel, self.split)]
        moves: list[tuple[Any, Any]] = []
        for index, offset in enumerate(product(*own)):
            places = [self._overlap(axis, delta, gradient) for axis, delta in enumerate(offset)]
            if all(to.start < to.stop for to, _ in places):
                target, at = ([pair[side] for pair in places] for side in (0, 1))
                moves.append(((..., index, slice(None), slice(None), *target), (..., *at)))

        def shift(x: Tensor) -> Tensor:
            shifted = buffer[: len(x)]
            for target, at in moves:
                shifted[target] = x[at]
            return shifted.view(-1, offsets * channels, size)

        return shift

    def _overlap(self, axis: int, delta: int, gradient: bool) -> tuple[slice, slice]:
        """Where on one axis an offset leaves source and target in view of each other: (target, source)."""
        before = self.pads[-2 - 2 * axis] if self._zeros else 0
        size, out, stride = self._reach[axis], self.gradient.shape[2 + axis], self.stride[axis]
        if self.split[axis] != gradient:  # this axis shifts the other side: taken as it is
            whole = slice(0, size if self.split[axis] else out)
            return whole, whole
        shift = delta * self.dilation[axis] - before
        if gradient:  # g_{p−δ} at each position p of the input
            low, high = max(0, shift), min(size, out + shift)
            return slice(low, high), slice(low - shift, high - shift)
        low, high = max(0, -(shift // stride)), min(out, (size - 1 - shift) // stride + 1)
        return slice(low, high), slice(low * stride + shift, (high - 1) * stride + shift + 1, stride)

    def _padded_parts(self, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Slices of `step` inputs with their padded maps, valid until the next one is asked for.

        Zeros are written once into one small buffer: a padded copy of the whole batch would cost more in
        fresh memory than the products that read it.
        """
        zeros = any(self.pads) and self.mode == "constant" and min(self.pads) >= 0
        if zeros:
            buffer = self.x.new_zeros(step, self.x.shape[1], *self.padded_grid)
            inside = tuple(slice(p, p + n) for p, n in zip(self.pads[-2::-2], self.x.shape[2:]))
        for start in range(0, len(self.x), step):
            part = slice(start, min(start + step, len(self.x)))
            if zeros:
                padded = buffer[: part.stop - part.start]
                padded[(slice(None), slice(None), *inside)] = self.x[part]
            else:
                padded = replace(self, x=self.x[part]).padded
            yield part, padded

    def _gram_norm(self) -> Tensor:
        """Σ over positions t, s of ⟨g_t, g_s⟩⟨window_t, window_s⟩, the windows' part from one Gram matrix."""
        kernels = list(product(*[range(k) for k in self.kernel]))
        total, margin = torch.cat(list(self._gram_sums([[(k, k) for k in kernels]]))).unbind(1)
        return total.clamp(min=0) + margin

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
        sums = torch.cat(list(self._gram_sums(list(pairs.values()))))  # [b, differences]
        waves = torch.zeros(len(pairs), *self.kernel, dtype=torch.float64, device=sums.device)
        for row, difference in enumerate(pairs):
            # A unit at the difference, and one at its negative, have the cosine wave as their spectrum.
            for signed in {difference, tuple(-d for d in difference)}:
                waves[(row, *[d % n for d, n in zip(signed, self.kernel)])] += 1
        spectrum = torch.fft.fftn(waves, dim=tuple(range(1, waves.dim()))).real / math.prod(self.kernel)
        energy = torch.tensordot(sums[:, :-1], spectrum, 1).clamp(min=0)
        return energy + sums[:, -1].view(-1, *[1] * len(self.kernel))

    def _gram_sums(self, pairs: list[list[tuple[tuple[int, ...], tuple[int, ...]]]]) -> Iterator[Tensor]:
        """Chunks `[part, len(pairs) + 1]`: for each list the sum over its pairs of offsets, and the margin.

        Both factors are brought to size one first, or the square of a small one could vanish. The sums
        cancel, so an allowance for their rounding, a small multiple of the two matrices' norms, comes
        along: added to a result, it keeps this from falling short of the truth.
        """
        channels, outputs = self.shape[1], self.shape[0] // self.groups
        maps, out = (self.views, *self.padded_grid), (self.views, *self.gradient.shape[2:])
        step = max(1, CHUNK // (math.prod(maps) ** 2 * self.groups))
        for part, padded in self._padded_parts(step * self.views):
            x, x_size = normalize_rows(
                as_double_if_long(self._side_by_side(padded, channels), channels, outputs)
            )
            g, g_size = normalize_rows(
                as_double_if_long(self._side_by_side(self.gradient[part], outputs), channels, outputs)
            )
            gram = (x.transpose(1, 2) @ x).view(-1, *maps, *maps)
            right = (g.transpose(1, 2) @ g).flatten(1)
            columns, largest = [], torch.zeros((), device=x.device)
            for members in pairs:
                windows = x.new_zeros(len(x), *out, *out)
                for first, second in members:
                    windows += gram[(slice(None), *self._places(first), *self._places(second))]
                columns.append(torch.linalg.vecdot(windows.flatten(1), right).double())
                largest = torch.maximum(largest, squares(windows.flatten(1)).sqrt())
            columns.append(largest * squares(right).sqrt() * GRAM_ROUNDING[x.dtype])
            scale = (x_size * g_size).square()[:, None]
            sums = (torch.stack(columns, 1) * scale).view(-1, self.groups, len(columns)).sum(1)
            yield sums

    def _side_by_side(self, maps: Tensor, channels: int) -> Tensor:
        """`[b · v, group · channels, *]` → `[b · group, channels, v · positions]`."""
        apart = maps.reshape(-1, self.views, self.groups, channels, math.prod(maps.shape[2:]))
        return apart.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(2)

    def _places(self, offset: tuple[int, ...]) -> list[slice]:
        """Where the padded inputs meet the kernel's `offset`, over all views and output positions."""
        geometry = zip(offset, self.stride, self.dilation, self.gradient.shape[2:])
        return [slice(None), *(slice(j * d, j * d + s * (n - 1) + 1, s) for j, s, d, n in geometry)]

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
        """`[o, c, *half]`: Σ_b factors_b · spectrum_b, over the half of the padded grid that says it all."""
        scaled = replace(self, gradient=self._scaled(factors))
        total = scaled._padded_product("bgc...,bgo...->goc...").flatten(0, 1)
        return total[..., : self.padded_grid[-1] // 2 + 1]

    def _padded_product(self, equation: str) -> Tensor:
        x, g = self._padded_spectra()
        return torch.einsum(equation, x, g) * math.sqrt(math.prod(self.padded_grid))


@dataclass(frozen=True)
class Geometry:
    """One group of a convolution, as far as its cost goes."""

    channels: int
    outputs: int
    axes: tuple[tuple[int, int, int], ...]  # kernel, stride and input of each axis
    out: tuple[int, ...]
    area: int  # positions of the padded input
    views: int = 1

    def offsets(self, split: tuple[bool, ...]) -> tuple[int, int]:
        """Kernel offsets that shift the input, and those that shift the output gradient."""
        inner, outer = (
            math.prod(k for (k, _, _), g in zip(self.axes, split) if g == side) for side in (0, 1)
        )
        return inner, outer

    def positions(self, split: tuple[bool, ...]) -> tuple[int, ...]:
        """Where both are multiplied: an axis that shifts the gradient runs over the input."""
        return tuple(size if g else out for (_, _, size), out, g in zip(self.axes, self.out, split))

    def cost(self, split: tuple[bool, ...]) -> float:
        """Nanoseconds for a record's kernels on one core; only their order matters.

        Products at about 40 multiply-adds a nanosecond, copies at about one and a half elements; each
        element of the result costs fresh memory and a look for the norm.
        """
        inner, outer = self.offsets(split)
        rows, columns = self.channels * inner, self.outputs * outer
        copied = rows * (inner > 1) + columns * (outer > 1)
        positions = self.views * math.prod(self.positions(split))
        return positions * (rows * columns / 40 + copied / 1.5) + rows * columns


@lru_cache(maxsize=1024)
def _cheapest_split(geometry: Geometry) -> tuple[bool, ...]:
    choices = product(
        *[(False, True) if k > 1 and stride == 1 else (False,) for k, stride, _ in geometry.axes]
    )
    return min(choices, key=geometry.cost)


@lru_cache(maxsize=1024)
def _prefer_gram(geometry: Geometry, spectral: bool = False) -> bool:
    """Whether two Gram matrices and a weight gradient cost less than kernels of every record.

    `spectral` asks for energies by frequency, which take a window for each pair of kernel offsets.
    """
    size, positions = math.prod(k for k, _, _ in geometry.axes), geometry.views * math.prod(geometry.out)
    channels, outputs, area = geometry.channels, geometry.outputs, geometry.views * geometry.area
    kernels = geometry.cost(_cheapest_split(geometry))
    windows = (size * (size + 1) / 2 + 2 * size) if spectral else size
    gram = (area**2 * channels + positions**2 * outputs) / 40 + 1.2 * windows * positions**2
    if spectral:
        kernels += 1.5 * size * channels * outputs
    return gram + size * channels * outputs * positions / 45 < kernels
