"""GReDP as the paper writes it: spectrum, clip, complex noise, inverse transform, real part."""

import math
from dataclasses import dataclass, replace
from typing import Any

from gredp.errors import GredpError, choose
from gredp.mechanisms.plan import GRIDS, HALVES, Clipping, Mechanism, StepPlan, Transform
from gredp.mechanisms.registry import Method, register

NOISES: dict[str, dict[str, Any]] = {"white": {}, "real": {"noise_parts": (1.0, 0.0)}}


@dataclass(frozen=True)
class GReDP(Mechanism):
    """K: balls of the spectra's norm. Σ: a²c²σ² on even, b²c²σ² on odd directions. z = σ·min(a, b) (flat).

    With `noise_parts` a = b = 1/√2 (Theorem 1) the released sum has the distribution of DP-SGD at
    σ/√2: the halved variance is paid for with a larger ε. Real noise alone (a = 1, b = 0, Algorithm
    1 read literally) leaves every odd direction of a fully released block without noise: z = 0.

    `per_sample_noise` reads Algorithm 2 literally: as many independent noises as the *expected* batch
    has records, drawn as one of √B the deviation. Their number must not depend on the batch that was
    drawn, or the noise itself would tell whether a record was in it.
    """

    noise_parts: tuple[float, float] = HALVES
    clipping: Clipping = "flat"
    grid: Transform = "kernel"
    per_sample_noise: bool = False
    name = "gredp"

    def __post_init__(self) -> None:
        if len(self.noise_parts) != 2:
            raise GredpError(f"noise_parts are two numbers, real and imaginary, not {len(self.noise_parts)}")
        a, b = self.noise_parts
        if not (a >= 0 and b >= 0 and math.isfinite(a + b) and a + b > 0):
            raise GredpError(f"the noise parts a and b must be 0 or more and not both 0, but are {a} and {b}")
        choose("grid", self.grid, GRIDS)

    def step(self, plan: StepPlan, sigma: float, expected_batch_size: float) -> StepPlan:
        if self.per_sample_noise:
            plan = plan.scaled(math.sqrt(expected_batch_size))
        return replace(plan, noise_parts=self.noise_parts)


register(Method("gredp", GReDP, "GReDP", "#55a868", block=8, paper_clipping="layer_wise", noises=NOISES))
