"""Plain training as a configuration of the same step: nothing clipped, nothing noised, ε = ∞."""

import math
from dataclasses import dataclass, replace

from gredp.mechanisms.plan import Blocks, ClipGroup, Mechanism, Needs, StepPlan
from gredp.mechanisms.registry import Method, register


@dataclass(frozen=True)
class Plain(Mechanism):
    """The baseline. K is the whole space, so the certificate's multiplier is 0.

    No norm is taken, since nothing is bounded by it; so a record that is not finite spoils the model, as it
    does in plain PyTorch.
    """

    name = "plain"
    claimed_by_paper = False
    private = False
    clipping = "flat"

    @property
    def needs(self) -> Needs:
        return "inputs"

    def step(
        self, blocks: Blocks, groups: tuple[ClipGroup, ...], sigma: float, expected_batch_size: float
    ) -> StepPlan:
        return StepPlan(blocks, tuple(replace(g, clip_norm=math.inf, noise_std=0.0) for g in groups))


register(Method("plain", Plain, "plain", "#8c8c8c"))
