"""Per-sample gradients of convolutions, the layers in which a private step spends its time.

Letters: b record, o and c channels out and in, k kernel offset.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from gredp.gradient.per_sample import CHUNK, PerSampleGradient, squares
from gredp.spectrum import fft, grid_energy, mirror, real_basis

#: rounding of Gram sums, relative to the product of the matrices' norms
GRAM_ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-14}
#: elements of one layer's per-sample kernels that may be kept between the norms and the sum
KEPT = 1 << 25


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
        return squares(self.values) if self.squares is None else self.squares.double()

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
                largest = torch.maximum(largest, squares(windows.flatten(1)).sqrt())
            columns.append(largest * squares(right).sqrt() * GRAM_ROUNDING[x.dtype])
            scale = (x_size * g_size).square()[:, None]
            sums = (torch.stack(columns, 1) * scale).view(-1, self.groups, len(columns)).sum(1)
            yield sums

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


def _unit(m: Tensor) -> tuple[Tensor, Tensor]:
    """`[b, *]` → the same with each record's largest entry brought to 1, and `[b]` these entries."""
    size = m.flatten(1).abs().amax(1)
    size = size.where(size != 0, 1.0)
    return m / size.view(-1, *[1] * (m.dim() - 1)), size.double()


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
