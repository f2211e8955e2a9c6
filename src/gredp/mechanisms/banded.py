"""Any method with noise that is correlated over steps (docs/theory.md, section 6)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gredp.errors import GredpError
from gredp.mechanisms.plan import Blocks, ClipGroup, Clipping, Mechanism, Needs, StepPlan, Transform
from gredp.privacy.certificate import Block


def coefficients(bands: int) -> tuple[float, ...]:
    """`[bands]`: the first column of C, c_j ∝ binom(2j, j)/4^j, of norm 1.

    They are those of (1 − x)^(−1/2), the square root of prefix sums. They fall, so C(x) has its roots outside
    of the unit circle: the noise C⁻¹ξ stays bounded, and so does its rounding.
    """
    if bands < 1 or bands != int(bands):
        raise GredpError(f"the number of correlation bands must be a positive whole number, not {bands}")
    column = [1.0]
    for j in range(1, int(bands)):
        column.append(column[-1] * (2 * j - 1) / (2 * j))
    norm = math.hypot(*column)
    return tuple(c / norm for c in column)


def check_bands(bands: int, sample_rate: float) -> float:
    """The rate b·q at which a part is drawn from when it has its turn; refused where it would pass 1."""
    coefficients(bands)
    rate = bands * sample_rate
    if rate > 1 + 1e-9:
        raise GredpError(
            f"{bands} correlation bands at sampling rate {sample_rate:.4g} would draw from each part with "
            f"probability {rate:.4g}: take at most {int(1 / sample_rate + 1e-9)} bands, or a smaller batch"
        )
    return min(rate, 1.0)


@dataclass(frozen=True)
class Banded(Mechanism):
    """The method `inner` with noise n = C⁻¹ξ over steps, C lower-triangular with `bands` bands.

    K and Σ of a step are those of `inner` for the pair (C·sums, ξ): a record moves C·sums by its clipped
    gradient times one column of C, and ξ is white over steps. z is that of `inner` since columns have norm 1.
    """

    inner: Mechanism
    bands: int
    claimed_by_paper = False

    def __post_init__(self) -> None:
        coefficients(self.bands)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def clipping(self) -> Clipping:  # type: ignore[override]
        return self.inner.clipping

    @property
    def transform(self) -> Transform:
        return self.inner.transform

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    def plan(
        self,
        blocks: Sequence[Block],
        clip_norm: float | Sequence[float],
        sigma: float,
        expected_batch_size: float,
    ) -> StepPlan:
        plan = self.inner.plan(blocks, clip_norm, sigma, expected_batch_size)
        return replace(plan, correlation=coefficients(self.bands))

    def step(
        self, blocks: Blocks, groups: tuple[ClipGroup, ...], sigma: float, expected_batch_size: float
    ) -> StepPlan:
        return self.inner.step(blocks, groups, sigma, expected_batch_size)
