"""The plans of a run, one for each stage of its noise, made and certified before its first step."""

from dataclasses import dataclass
from functools import cached_property

from gredp.mechanisms.plan import StepPlan
from gredp.privacy.certificate import Certificate
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
