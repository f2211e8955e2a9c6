"""Every record's kernels, materialized from shifted copies of inputs and output gradients."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gredp.gradient.norms import CHUNK, squares
from gredp.gradient.per_sample import Dense, PerSampleGradient, Products
from gredp.spectrum import grid_energy, mirror, real_basis

if TYPE_CHECKING:
    from gredp.gradient.convolution.correlation import Correlation


@dataclass(frozen=True)
class Kernels(PerSampleGradient):
    """A convolution's kernels, materialized, in the layout in which they are quickest to make and to use."""

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
        if not _small(grid, self.batch):
            return grid_energy(self.dense(), self.grid_axes)
        offsets_first = self._offsets_first().flatten(0, 1).flatten(1, -3).flatten(2)
        return _energy_of(offsets_first, grid).unflatten(0, (self.batch, -1)).sum(1)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        total = (factors @ self.values.flatten(1)).view(1, *self.values.shape[1:])
        return Kernels(total, self.shape, self.on_gradient).dense()[0]


@dataclass(frozen=True)
class OwnKernels(Dense):
    """Kernels in the layout of the parameter."""

    def grid_energy(self) -> Tensor:
        grid = self.values.shape[-self.grid_axes :]
        if self.energies is not None or not _small(grid, self.batch):
            return super().grid_energy()
        return _energy_of(self.values.flatten(1, -1 - self.grid_axes).flatten(2).mT, grid)


def _small(grid: Sequence[int], batch: int) -> bool:
    return math.prod(grid) <= 64 and batch > 0


def _energy_of(offsets_first: Tensor, grid: Sequence[int]) -> Tensor:
    """`[b, offsets, n]` → `[b, *grid]`: an orthogonal real basis in place of the transform.

    k and −k share their energies evenly.
    """
    b, size, _ = offsets_first.shape
    basis = real_basis(tuple(grid)).to(offsets_first).t().contiguous().expand(b, size, size)
    energy = squares(torch.bmm(basis, offsets_first).flatten(0, 1)).view(b, size)
    return ((energy + energy[:, mirror(tuple(grid)).to(energy.device)]) / 2).view(b, *grid)


def kernels_of(
    correlation: "Correlation", values: Sequence[Tensor] = (), products: Products | None = None
) -> Iterator[Kernels]:
    """Those of a few records after the other, written into `values` if given, multiplied by `products`.

    κ_δ = Σ_p g_p x_{p+δ}, and where the stride is 1 also Σ_p g_{p−δ} x_p. So the offsets of some
    axes may shift copies of the input, those of others copies of the output gradient, and one
    batched product of the two gives all offsets: fewer copies than windows of the whole kernel
    would take, and a squarer product, which matrix libraries like better. Over few enough records
    to stay in cache, where copies are cheap; views of a record lie behind one another as if they
    were one map, and where they do not fit, they are added up in turn.
    """
    layout, split = correlation.layout(), correlation.split
    groups, inner, channels, outer, outputs = layout
    positions = correlation.geometry.positions(split)
    rows, columns = inner * channels, outer * outputs
    copies, result = (rows + columns) * math.prod(positions) * groups, rows * columns * groups
    chunk = CHUNK * torch.get_num_threads()  # each has a cache of its own
    most = max((len(piece) for piece in values), default=correlation.batch)
    step = max(1, min(chunk // max(1, copies * correlation.views + result), most))
    fit = max(1, chunk // max(1, copies))
    views = max(d for d in range(1, correlation.views + 1) if correlation.views % d == 0 and d <= fit)
    products, dtype = products or Products(), torch.promote_types(correlation.x.dtype, torch.float32)
    dtype = torch.bfloat16 if products.rounds(dtype) else dtype
    shapes = [(step, groups, inner, channels, views), (step, groups, outer, outputs, views)]
    shift_input, shift_gradient = products.reuse(
        (correlation.shapes, shapes, correlation.x.device, dtype, *map(_channels_last, _maps(correlation))),
        lambda: [_shifts(correlation, (*s, *positions), dtype, g) for s, g in zip(shapes, (False, True))],
    )
    read, end = _reader(correlation), 0
    for piece in values or torch.empty(correlation.batch, 0).split(step):  # one of no records too
        for few in piece.split(step):
            part, end = slice(end, end + len(few)), end + len(few)
            target = few.view(-1, rows, columns) if values else None
            for first in range(0, correlation.views, views):
                x, gradient = read(part, slice(first, first + views))
                left, right = shift_input(x), shift_gradient(gradient).transpose(1, 2)
                target = products.multiply(left, right, target, more=first > 0)
        made = piece if values else target
        assert made is not None  # a record has at least one view
        yield Kernels(made.view(-1, *layout), correlation.shape, split)


def _reader(correlation: "Correlation") -> Callable[[slice, slice], tuple[Tensor, Tensor]]:
    """Inputs and output gradients of some records and views, `[records, group, channels, views, *]`."""
    records = (correlation.batch, correlation.views)
    x, gradient = (t.unflatten(0, records) for t in (correlation.x, correlation.gradient))
    by_group = [t.unflatten(2, (correlation.groups, -1)).movedim(1, 3) for t in (x, gradient)]

    def read(part: slice, views: slice) -> tuple[Tensor, Tensor]:
        maps, gradients = (t[part, :, :, views] for t in by_group)
        if not correlation.padded_by_zeros:  # a few at a time
            few = x[part, views]
            padded = replace(correlation, x=few.flatten(0, 1)).padded.unflatten(0, few.shape[:2])
            maps = padded.unflatten(2, (correlation.groups, -1)).movedim(1, 3)
        return maps, gradients

    return read


def _maps(correlation: "Correlation") -> tuple[Tensor, Tensor]:
    return correlation.x, correlation.gradient


def _channels_last(maps: Tensor) -> bool:
    """Whether the channels of a position lie side by side, as in `torch.channels_last`."""
    return maps.shape[1] > 1 and maps.stride(1) == 1


def _laid_out_as(maps: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for `[records, group, offsets, channels, *]`, in memory as the maps are: copies then run along it.

    Either way offsets and channels merge without a copy, and so do views and positions.
    """
    if not _channels_last(maps):
        return maps.new_empty(shape, dtype=dtype)
    records, groups, offsets, channels, *places = shape
    return maps.new_empty(records, groups, *places, offsets, channels, dtype=dtype).movedim((-2, -1), (2, 3))


def _shifts(
    correlation: "Correlation", shape: tuple[int, ...], dtype: torch.dtype, gradient: bool
) -> Callable[[Tensor], Tensor]:
    """A function of `[records, group, channels, views, *]`: at each offset of its axes, side by side.

    It gives `[records · group, offsets · channels, positions]`, valid until it is called again. The
    buffer's zeros stay wherever an offset reaches beyond the source, in every call alike.
    """
    _, _, offsets, channels, views, *positions = shape
    source = correlation.gradient.shape[2:] if gradient else correlation.positions_read
    size = views * math.prod(positions)
    if offsets == 1 and tuple(source) == tuple(positions) and (gradient or not any(correlation.pads)):
        return lambda x: x.reshape(-1, channels, size)
    own = [range(k) if g == gradient else range(1) for k, g in zip(correlation.kernel, correlation.split)]
    if not gradient and sum(len(axis) > 1 for axis in own) > 1:
        return _windows(correlation, shape, dtype)
    buffer = _laid_out_as(_maps(correlation)[gradient], shape, dtype).zero_()
    moves: list[tuple[Tensor, Any]] = []
    for index, offset in enumerate(product(*own)):
        places = [_overlap(correlation, axis, delta, gradient) for axis, delta in enumerate(offset)]
        if all(to.start < to.stop for to, _ in places):
            target, at = ([pair[side] for pair in places] for side in (0, 1))
            where: Any = (..., index, slice(None), slice(None), *target)
            moves.append((buffer[where], (..., *at)))

    def shift(x: Tensor) -> Tensor:
        for target, at in moves:
            target[: len(x)].copy_(x[at])
        return buffer[: len(x)].view(-1, offsets * channels, size)

    return shift


def _windows(
    correlation: "Correlation", shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """The same for an input with offsets on several axes: a copy for each axis, not for each offset.

    Windows over the last axis come first, then windows of those over the axis before it.
    """
    records, groups, offsets, channels, views, *positions = shape
    on_input = [not g for g in correlation.split]
    sizes = zip(on_input, correlation.positions_read, correlation.padded_grid, correlation.pads[-2::-2])
    grid, inside = [], []
    for shifted, read, whole, before in sizes:
        start = before if shifted and correlation.padded_by_zeros else 0
        grid.append(whole if shifted else read)
        inside.append(slice(start, start + read))
    padded = _laid_out_as(correlation.x, (records, groups, 1, channels, views, *grid), dtype).zero_()
    interior: Any = (slice(None), slice(None), 0, ..., *inside)
    own = padded[interior]
    moves: list[tuple[Tensor, Tensor]] = []
    made = padded
    for axis in reversed([axis for axis, shifted in enumerate(on_input) if shifted]):
        k, stride = correlation.kernel[axis], correlation.stride[axis]
        reach = (positions[axis] - 1) * stride + 1
        seen = made.unfold(5 + axis, reach, correlation.dilation[axis])[..., ::stride].narrow(5 + axis, 0, k)
        seen = seen.movedim((5 + axis, -1), (2, 6 + axis))
        done = seen.shape[3]
        made = _laid_out_as(correlation.x, (records, groups, k * done, *seen.shape[4:]), dtype)
        moves.append((made.unflatten(2, (k, done)), seen))

    def shift(x: Tensor) -> Tensor:
        own[: len(x)].copy_(x)
        for target, seen in moves:
            target[: len(x)].copy_(seen[: len(x)])
        return made[: len(x)].view(-1, offsets * channels, views * math.prod(positions))

    return shift


def _overlap(correlation: "Correlation", axis: int, delta: int, gradient: bool) -> tuple[slice, slice]:
    """Where on one axis an offset leaves source and target in view of each other: (target, source)."""
    before = correlation.pads[-2 - 2 * axis] if correlation.padded_by_zeros else 0
    size, stride = correlation.positions_read[axis], correlation.stride[axis]
    out = correlation.gradient.shape[2 + axis]
    if correlation.split[axis] != gradient:  # this axis shifts the other side: taken as it is
        whole = slice(0, size if correlation.split[axis] else out)
        return whole, whole
    shift = delta * correlation.dilation[axis] - before
    if gradient:  # g_{p−δ} at each position p of the input
        low, high = max(0, shift), min(size, out + shift)
        return slice(low, high), slice(low - shift, high - shift)
    low, high = max(0, -(shift // stride)), min(out, (size - 1 - shift) // stride + 1)
    return slice(low, high), slice(low * stride + shift, (high - 1) * stride + shift + 1, stride)
