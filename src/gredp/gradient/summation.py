"""Stage 5, sum: add bounded records, physical batch after physical batch, then over processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gredp.distributed import all_reduce_sum, world_size
from gredp.errors import GredpError
from gredp.gradient.adaptive import norm_counts
from gredp.gradient.clip import ClippedSpectra
from gredp.gradient.convolution import Correlation
from gredp.gradient.convolution.padded import padded_sum
from gredp.gradient.shaping import energy_shares
from gredp.mechanisms.plan import StepPlan
from gredp.spectrum import BlockView


@dataclass
class BoundedSum:
    """Σ_i of clipped gradients. Adding or removing one record moves it by a vector of K.

    `totals` are real and shaped as the parameters, or complex: on the padded grid, or over the columns that a
    view keeps where it drops some. A block that no record reached is absent, which is zero. Where the plan
    asks for it, `shares` is the sum of the records' energy shares (each of norm at most 1), or of ±½ for each
    clip group (`adaptive.norm_counts`).
    """

    plan: StepPlan
    block_views: Mapping[str, BlockView]
    totals: dict[str, Tensor] = field(default_factory=dict)
    shares: Tensor | None = None
    spent: bool = False
    #: how many were added
    records: int = 0

    def add(self, clipped: ClippedSpectra) -> None:
        """Take in one more physical batch."""
        if not isinstance(clipped, ClippedSpectra):
            raise TypeError(f"only ClippedSpectra can be summed, not {type(clipped).__name__}")
        if self.spent:
            raise GredpError("this sum was released already: records cannot join it any more")
        for name, gradient in clipped.gradients.items():
            factors = clipped.factors[name].to(gradient.like.dtype)
            view = self.block_views[name]
            if view.padded:
                assert isinstance(gradient, Correlation)
                total = padded_sum(gradient, factors)
            elif view.columns is not None:
                total = gradient.band_sum(factors, view)
            else:
                total = gradient.weighted_sum(factors)
            self.totals[name] = self.totals[name] + total if name in self.totals else total
        self.records += len(clipped.kept)
        if self.plan.query_std is not None:
            counted = self.plan.quantile is not None
            shares = norm_counts(clipped) if counted else energy_shares(clipped, self.block_views)
            self.shares = shares if self.shares is None else self.shares + shares

    def over_processes(self, parameters: Mapping[str, Tensor]) -> None:
        """Add the sums of all processes. Each record is in one of them, so K is as before."""
        if world_size() == 1:
            return
        for name, view in self.block_views.items():
            self.totals.setdefault(name, empty_sum(view, parameters[name]))
        self.totals = all_reduce_sum(self.totals)
        if self.shares is not None:
            self.shares = all_reduce_sum({"shares": self.shares})["shares"]


def empty_sum(view: BlockView, like: Tensor) -> Tensor:
    """The sum over no records, in the domain and precision of a sum over some."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if not view.padded and view.columns is None:
        return torch.zeros(view.block.shape, dtype=dtype, device=like.device)
    return torch.zeros(view.kept_shape, dtype=dtype.to_complex(), device=like.device)
