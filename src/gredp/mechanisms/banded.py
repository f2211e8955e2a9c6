"""Noise n = C⁻¹ξ correlated over steps, C lower-triangular with `bands` bands (docs/theory.md, section 6).

K and Σ of a step are those of the method for the pair (C·sums, ξ): a record moves C·sums by its clipped
gradient times one column of C, and ξ is white over steps. z stays, since columns have norm 1.
"""

import math

from gredp.errors import GredpError


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
    """The rate b·q at which a part is drawn from when it has its turn; above 1 it is rejected."""
    coefficients(bands)
    rate = bands * sample_rate
    if rate > 1 + 1e-9:
        raise GredpError(
            f"{bands} correlation bands at sampling rate {sample_rate:.4g} would draw from each part with "
            f"probability {rate:.4g}: take at most {int(1 / sample_rate + 1e-9)} bands, or a smaller batch"
        )
    return min(rate, 1.0)
