"""Stage 3, factors: per-sample gradients of weight-standardized convolutions.

With kernel v = s·(w − mean w) and s = 1/√(‖w − mean w‖² + ε), a gradient κ by v is one by w of
s·(κ − mean κ − v·(v·κ)): a linear map, the same for every record, so the sum needs it once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gredp.gradient.convolution import Correlation
from gredp.gradient.norms import squares
from gredp.gradient.per_sample import PerSampleGradient
from gredp.spectrum import grid_energy

#: what the map's rounding may leave of a gradient that it cancels, relative to that gradient
CANCELED = {torch.float32: 1e-4, torch.float64: 1e-12}


@dataclass(frozen=True)
class Standardized(PerSampleGradient):
    """`kernels` holds the gradients by the standardized kernels `units` `[o, n]`, made with `scales` `[o]`.

    The map cancels what lies along a kernel or its mean. Its rounding differs between one record and the
    sum, so an allowance comes on top of the norms: what is left of a huge κ must not pass the clip.
    """

    kernels: Correlation
    units: Tensor
    scales: Tensor

    @property
    def grid_axes(self) -> int:  # type: ignore[override]
        return self.kernels.grid_axes

    @property
    def batch(self) -> int:
        return self.kernels.batch

    def dense(self) -> Tensor:
        return self._by_weight(self.kernels.dense())

    def merge_views(self, views: int) -> "Standardized":
        return replace(self, kernels=self.kernels.merge_views(views))

    def zero_unless(self, mask: Tensor) -> "Standardized":
        return replace(self, kernels=self.kernels.zero_unless(mask))

    def norm_bound(self) -> Tensor:
        return self.kernels.norm_bound() * self.scales.double().square().max()

    def squared_norm(self) -> Tensor:
        return torch.cat([squares(values) + margin for values, margin in self._parts()])

    def grid_energy(self) -> Tensor:
        parts = []
        for values, margin in self._parts():
            energy = grid_energy(values, self.grid_axes)
            even = margin / math.prod(self.kernels.kernel)
            parts.append(energy + even.view(-1, *[1] * self.grid_axes))
        return torch.cat(parts)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        return self._by_weight(self.kernels.weighted_sum(factors)[None])[0]

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Gradients of a few records at a time, and the allowance on their squared norms."""
        for kernels in self.kernels.kernels():
            values = kernels.dense()
            scaled = values.flatten(2) * self.scales[:, None]
            yield self._by_weight(values), squares(scaled) * CANCELED[values.dtype] ** 2

    def _by_weight(self, values: Tensor) -> Tensor:
        """`[b, o, c, *kernel]` by the standardized kernels → by the weights."""
        flat = values.flatten(2)
        along = (flat * self.units).sum(2, keepdim=True)
        flat = flat - flat.mean(2, keepdim=True) - along * self.units
        return (flat * self.scales[:, None]).view_as(values)
