"""DP-SGD (Abadi et al. 2016): clip each record's gradient, add white noise to the sum."""

from collections.abc import Sequence
from dataclasses import dataclass

from gredp.mechanisms.plan import Clipping, Mechanism, StepPlan, clip_groups
from gredp.privacy.certificate import Block


@dataclass(frozen=True)
class DPSGD(Mechanism):
    """K: balls as `clip_groups` lists them. Σ: σC on every coordinate. z = σ.

    `automatic` clipping (Bu et al. 2022) scales every gradient to norm C·‖g‖/(‖g‖ + 0.01) instead
    of cutting the long ones, which stays in the same ball.
    """

    clipping: Clipping = "flat"
    name = "dpsgd"

    def plan(
        self,
        blocks: Sequence[Block],
        clip_norm: float | Sequence[float],
        sigma: float,
        expected_batch_size: float,
    ) -> StepPlan:
        groups = clip_groups(self.clipping, blocks, clip_norm, sigma)
        return StepPlan(tuple(blocks), groups, normalize=self.clipping == "automatic")
