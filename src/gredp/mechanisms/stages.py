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


@dataclass(frozen=True)
class Stages:
    """What a run does and costs in each step, a function of the step's number alone."""

    schedule: NoiseSchedule
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, plan: StepPlan, schedule: NoiseSchedule, claimed: float | None) -> "Stages":
        """From the plan of a step at factor 1, and its claimed multiplier."""
        plans = [(factor, plan.scaled(factor)) for _, factor in schedule.stages]
        return cls(
            schedule,
            tuple(Stage(p, p.certificate(), None if claimed is None else claimed * f) for f, p in plans),
        )

    def at(self, step: int) -> Stage:
        """The stage of the step with this number, the first being 0."""
        return self.stages[self.schedule.stage(step)]
