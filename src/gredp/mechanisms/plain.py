"""Plain training as a configuration of the same step: nothing clipped, nothing noised, ε = ∞."""

import math
from dataclasses import dataclass, replace

from gredp.mechanisms.plan import Mechanism, StepPlan
from gredp.mechanisms.registry import Method, register


@dataclass(frozen=True)
class Plain(Mechanism):
    """The baseline. K is the whole space, so the certificate's multiplier is 0.

    No norm is taken, since nothing is bounded by it; so a record that is not finite spoils the model, as it
    does in plain PyTorch.
    """

    name = "plain"
    in_paper = False
    private = False
    reads = "inputs"

    def step(self, plan: StepPlan, sigma: float, expected_batch_size: float) -> StepPlan:
        return replace(plan, groups=tuple(replace(g, clip_norm=math.inf, noise_std=0.0) for g in plan.groups))


register(Method("plain", Plain, "plain", "#8c8c8c"))
