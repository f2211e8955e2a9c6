"""The plans of a run, one for each stage of its noise, each certified before its first step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gredp.errors import GredpError
from gredp.mechanisms.plan import Mechanism, StepPlan, positive_norm
from gredp.mechanisms.registry import noise_scale
from gredp.privacy.certificate import Block, Certificate
from gredp.privacy.schedule import NoiseSchedule


@dataclass(frozen=True)
class Stage:
    """Steps in a row that are noised alike: the plan of each, and what each is charged."""

    plan: StepPlan
    certificate: Certificate
    claimed_multiplier: float | None

    @cached_property
    def cost(self) -> tuple[float, float | None]:
        """The proven multiplier of a step, and the claimed one."""
        return self.certificate.noise_multiplier, self.claimed_multiplier


def stages_of(plan: StepPlan, schedule: NoiseSchedule, claimed: float | None) -> tuple[Stage, ...]:
    """What a run does and costs in each stage of `schedule`; `plan` and `claimed` are those of factor 1."""
    plans = [(factor, plan.scaled(factor)) for _, factor in schedule.stages]
    return tuple(Stage(p, p.certificate(), None if claimed is None else claimed * f) for f, p in plans)


@dataclass(frozen=True)
class Planner:
    """From a requested multiplier and norm to the plan of a step: in `make_private`, and at each change."""

    mechanism: Mechanism
    blocks: tuple[Block, ...]
    expected_batch_size: float

    def plan(
        self, max_grad_norm: Any, noise_multiplier: float, claim: str = "proven"
    ) -> tuple[StepPlan, float, float | list[float]]:
        """The plan, its σ, and its norms as plain numbers."""
        norms: float | list[float]
        if isinstance(max_grad_norm, Sequence):
            norms = [positive_norm(norm) for norm in max_grad_norm]
        else:
            norms = positive_norm(max_grad_norm)
        sigma, rest = 0.0, self.expected_batch_size
        if self.mechanism.private:
            unit = self.mechanism.unit_multiplier(self.blocks, norms, rest)
            sigma = noise_scale(noise_multiplier, unit, claim)
        return self.mechanism.plan(self.blocks, norms, sigma, rest), sigma, norms

    def reject_change(self, what: str, schedule: NoiseSchedule, turns: bool) -> None:
        """Of `noise_multiplier` or `max_grad_norm`, where it means nothing or nothing is proven for it."""
        if not self.mechanism.private:
            raise GredpError(f"{what} means nothing in plain training, which neither clips nor adds noise")
        if what == "max_grad_norm" and self.mechanism.quantile is not None:
            raise GredpError("adaptive clipping sets max_grad_norm by itself: use clipping='flat' to set it")
        if turns:
            raise GredpError(
                f"{what} cannot change where records take turns: correlation bands, poisson_sampling=False"
            )
        if what == "noise_multiplier" and not schedule.constant:
            raise GredpError("a noise_schedule sets the noise of this run: set noise_multiplier without one")
