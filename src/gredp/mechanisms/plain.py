"""Plain training as a configuration of the same step: nothing clipped, nothing noised, ε = ∞."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gredp.mechanisms.plan import ClipGroup, Mechanism, StepPlan
from gredp.privacy.certificate import Block


@dataclass(frozen=True)
class Plain(Mechanism):
    """The baseline. K is the whole space, so the certificate's multiplier is 0."""

    name = "plain"
    claimed_by_paper = False

    def plan(
        self,
        blocks: Sequence[Block],
        clip_norm: float | Sequence[float],
        sigma: float,
        expected_batch_size: float,
    ) -> StepPlan:
        everything = ClipGroup("all", tuple(b.name for b in blocks), math.inf, 0.0)
        return StepPlan(tuple(blocks), (everything,))
