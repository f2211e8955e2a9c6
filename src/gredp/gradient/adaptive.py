"""Clipping norms that follow a quantile of the records' (Andrew et al. 2021; docs/theory.md, section 7).

Beside the gradients a step releases, for each clip group, how many records were within its norm: each record
adds ½ if it was, and −½ if not. The vector of L counts moves by √L/2 at most for one record, and is noised.
The norms of the next step follow from those releases and from nothing else.

The plan stays frozen: gradients are multiplied by w = C₀/C_t before the clip to C₀ and the noise of C₀, and
the sum is divided by w afterwards. That is a clip to C_t with noise in proportion.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gredp.errors import GredpError
from gredp.gradient.clip import ClippedSpectra
from gredp.mechanisms.plan import StepPlan

#: a norm stays within this factor of the first one, so that single precision holds the square of their ratio
FARTHEST = 1e6


def norm_counts(clipped: ClippedSpectra) -> Tensor:
    """`[groups]`: Σ_i ±½, by whether record i was within the norm. One that is not finite was not."""
    within = clipped.within & clipped.kept[:, None]
    return (within.to(torch.float32) - 0.5).sum(0)


class AdaptedNorms:
    """State that moves from step to step: log(C_t/C₀) of every clip group, a function of releases."""

    def __init__(self, plan: StepPlan, expected_batch_size: float) -> None:
        assert plan.quantile is not None
        self.quantile, self.groups = plan.quantile, plan.groups
        self.expected_batch_size = expected_batch_size
        first = torch.tensor([group.clip_norm for group in plan.groups], dtype=torch.float64)
        bounds = self.quantile.min_clipbound, self.quantile.max_clipbound
        low, high = (torch.full_like(first, bound) / first for bound in bounds)
        #: the least and the largest log ratio of each group
        self.limits = low.clamp(min=1 / FARTHEST).log(), high.clamp(max=FARTHEST).log()
        self.log_ratio = torch.zeros_like(first).clamp(*self.limits)

    @property
    def norms(self) -> list[float]:
        """C_t of each clip group."""
        return [g.clip_norm * math.exp(r) for g, r in zip(self.groups, self.log_ratio.tolist())]

    @property
    def squared_weights(self) -> dict[str, Tensor]:
        """w² for each block, `[1]`."""
        squared = torch.exp(-2 * self.log_ratio).float()
        return {name: squared[i : i + 1] for i, group in enumerate(self.groups) for name in group.blocks}

    @property
    def preconditioner(self) -> dict[str, Tensor]:
        return {name: torch.ones(1) for group in self.groups for name in group.blocks}

    def learn(self, noisy_counts: Tensor, noise_std: float) -> None:
        """Take in one release and set the norms of the next step."""
        share = (noisy_counts.double().cpu() / self.expected_batch_size + 0.5).clamp(0, 1)
        step = self.quantile.clipbound_learning_rate * (share - self.quantile.target_unclipped_quantile)
        self.log_ratio = (self.log_ratio - step).clamp(*self.limits)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint; a function of releases."""
        return {"log_ratio": self.log_ratio}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take `state` over, or reject it and change nothing."""
        kept = state["log_ratio"]
        if kept.dtype != torch.float64 or kept.shape != self.log_ratio.shape:
            raise GredpError(f"the adapted norms are not {len(self.groups)} numbers of float64")
        if not ((self.limits[0] <= kept) & (kept <= self.limits[1])).all():
            raise GredpError("the adapted norms are out of their bounds")
        self.log_ratio = kept.clone()
