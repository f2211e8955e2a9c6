"""The per-sample gradient of a convolution, as its inputs and output gradients.

Letters: b record, v view, o and c channels out and in, k kernel offset.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from gredp.gradient.convolution.cost import Geometry, cheapest_split, prefer_gram
from gredp.gradient.convolution.gram import gram_energy, gram_norm
from gredp.gradient.convolution.grouped import grouped_kernels, quick_in_groups
from gredp.gradient.convolution.kernels import Kernels, OwnKernels, kernels_of
from gredp.gradient.norms import KEPT, full_precision, parts, squares
from gredp.gradient.per_sample import InPieces, PerSampleGradient, Products


@dataclass(frozen=True)
class Correlation(PerSampleGradient):
    """A convolution of any dimension: the padded input correlated with the output gradient.

    Three ways to a record's norm, chosen once per shape. Its kernel is materialized, a few records at a time
    so that they stay in cache, and kept for the sum where all of them fit: as a group of an ordinary weight
    gradient where the processor is quick at that, else by products of shifted copies. Or two Gram matrices
    give the norm, which is cheaper where the map is small and the kernel large, and the sum is left to one
    ordinary weight gradient.

    Maps may be in bfloat16 until `compact`, whose products are rounded to it then.
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

    def compact(self, spectral: bool, products: Products | None = None) -> PerSampleGradient:
        """Kernels in place of maps, where that is the quicker way and they fit."""
        fit = self.batch * math.prod(self.shape) <= KEPT
        if not fit or prefer_gram(self.geometry, spectral):
            return self._full
        of_maps = self if self.padded_by_zeros else self._full
        return of_maps._materialized(spectral, products)

    @property
    def _full(self) -> "Correlation":
        return replace(self, x=full_precision(self.x), gradient=full_precision(self.gradient))

    def _materialized(self, spectral: bool = False, products: Products | None = None) -> PerSampleGradient:
        made: Iterator[Kernels | OwnKernels]
        if quick_in_groups(self, products):
            made = grouped_kernels(self)
        else:
            layout = self.layout()
            sizes = [len(range(self.batch)[part]) for part in parts(self.batch, math.prod(layout))]
            single = torch.promote_types(self.x.dtype, torch.float32)
            values = [self.x.new_empty(size, *layout, dtype=single) for size in sizes]
            made = kernels_of(self, values, products)
        if spectral:
            return InPieces.of(replace(piece, energies=piece.grid_energy()) for piece in made)
        return InPieces.of(replace(piece, norms=piece.squared_norm()) for piece in made)

    def kernels(self) -> Iterator[Kernels | OwnKernels]:
        """Those of a few records after the other."""
        return grouped_kernels(self) if quick_in_groups(self) else kernels_of(self)

    def dense(self) -> Tensor:
        return self._materialized().dense()

    def norm_bound(self) -> Tensor:
        """Each offset of the kernel meets every input at most once."""
        inputs = squares(self.x if self.mode == "constant" else self.padded)
        left, right = (m.view(self.batch, self.views).sum(1) for m in (inputs, squares(self.gradient)))
        return left * right * math.prod(self.kernel)

    def squared_norm(self) -> Tensor:
        if prefer_gram(self.geometry):
            return gram_norm(self)
        return torch.cat([kernels.squared_norm() for kernels in self.kernels()])

    def grid_energy(self) -> Tensor:
        if prefer_gram(self.geometry, True):
            return gram_energy(self)
        return torch.cat([kernels.grid_energy() for kernels in self.kernels()])

    def weighted_sum(self, factors: Tensor) -> Tensor:
        if self.batch == 0:
            return self.x.new_zeros(self.shape)
        plain = self.mode == "constant" and self.pads[::2] == self.pads[1::2]
        x, weight = self.x if plain else self.padded, self.x.new_empty(()).expand(self.shape)
        zeros = [0] * len(self.kernel)
        padding = list(self.pads[::-2]) if plain else zeros
        geometry = (list(self.stride), padding, list(self.dilation), False, zeros, self.groups)
        backward = torch.ops.aten.convolution_backward
        return backward(self.scaled(factors), x, weight, None, *geometry, [False, True, False])[1]

    def scaled(self, factors: Tensor) -> Tensor:
        """Output gradients times their record's factor."""
        inputs = factors.repeat_interleave(self.views)
        return self.gradient * inputs.view(-1, *[1] * (self.gradient.dim() - 1))

    @cached_property
    def geometry(self) -> Geometry:
        """What the cost of the ways depends on."""
        return Geometry(
            self.shape[1],
            self.shape[0] // self.groups,
            tuple(zip(self.kernel, self.stride, self.positions_read)),
            tuple(self.gradient.shape[2:]),
            math.prod(self.padded_grid),
            self.views,
        )

    @property
    def shapes(self) -> tuple[object, ...]:
        """All but the numbers and how many records they are of."""
        maps = self.x.shape[1:], self.gradient.shape[1:], self.pads, self.mode, self.views
        return (*maps, self.kernel, self.stride, self.dilation, self.groups)

    @property
    def padded_by_zeros(self) -> bool:
        """Whether the padding is of zeros, which need not be there to be multiplied."""
        return self.mode == "constant" and min(self.pads, default=0) >= 0

    @property
    def positions_read(self) -> tuple[int, ...]:
        """Positions of the input that are read."""
        return tuple(self.x.shape[2:]) if self.padded_by_zeros else self.padded_grid

    @cached_property
    def split(self) -> tuple[bool, ...]:
        """For each axis of the kernel, whether its offsets shift the output gradient instead of the input."""
        return cheapest_split(self.geometry)

    def layout(self) -> tuple[int, ...]:
        """A record's kernels as `Kernels` keeps them."""
        geometry = self.geometry
        inner, outer = geometry.offsets(self.split)
        return (self.groups, inner, geometry.channels, outer, geometry.outputs)
