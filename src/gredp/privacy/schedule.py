"""Noise that changes over a run by a public function of the step, in stages within which it is the same."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import index

from gredp.errors import GredpError
from gredp.privacy.ledger import Entry

#: stages of a schedule that falls; each has a loss distribution of its own to compose
STAGES = 5


@dataclass(frozen=True)
class NoiseSchedule:
    """`stages` of (steps, factor): the noise of a step is its stage's factor times the run's.

    After the last stage its factor stays. A factor depends on the number of the step alone, never on the
    data, so the run is the composition of the stages' mechanisms.
    """

    stages: tuple[tuple[int, float], ...] = ((1, 1.0),)

    def __post_init__(self) -> None:
        for steps, factor in self.stages:
            if not (steps >= 1 and factor > 0 and math.isfinite(factor)):
                raise GredpError(
                    f"a stage of noise has steps and a positive factor, not {steps} steps at {factor}"
                )
        if not self.stages:
            raise GredpError("a noise schedule needs at least one stage of (steps, factor)")

    @classmethod
    def of(cls, stages: "Sequence[tuple[int, float]] | NoiseSchedule | None") -> "NoiseSchedule":
        """From plain pairs; None is constant noise."""
        if stages is None or isinstance(stages, NoiseSchedule):
            return stages or cls()
        try:
            pairs = tuple((index(steps), float(factor)) for steps, factor in stages)
        except (TypeError, ValueError):
            raise GredpError(
                f"a noise schedule is a list of (steps, factor) with whole steps, not {stages!r}"
            ) from None
        return cls(pairs)

    @classmethod
    def towards(cls, end: float, steps: int) -> "NoiseSchedule":
        """From factor 1 to `end` over `steps`, geometrically, in stages of nearly equal length."""
        count = min(STAGES, steps) if end != 1 else 1
        borders = [steps * stage // count for stage in range(count + 1)]
        factors = [end ** (stage / max(1, count - 1)) for stage in range(count)]
        return cls(tuple((b - a, f) for (a, b), f in zip(pairwise(borders), factors)))

    @property
    def constant(self) -> bool:
        return all(factor == 1 for _, factor in self.stages)

    def stage(self, step: int) -> int:
        """The number of the stage that has the step with this number, both counted from 0."""
        ends = list(accumulate(steps for steps, _ in self.stages))
        return min(bisect_right(ends, step), len(ends) - 1)

    def entries(self, noise_multiplier: float, sample_rate: float, steps: int) -> list[Entry]:
        """What `steps` steps will be charged at the run's multiplier."""
        entries = []
        for number, factor in (*self.stages, (steps, self.stages[-1][1])):
            taken = min(number, steps)
            entries.append(Entry(noise_multiplier * factor, sample_rate, taken))
            steps -= taken
        return [entry for entry in entries if entry.steps]


CONSTANT = NoiseSchedule()
