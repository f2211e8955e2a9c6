"""The paper's own privacy statements, as *claims*: never printed without the proven figure beside them.

They apply the Gaussian mechanism with variance c²σ² to noise of which each real component has only
½c²σ² (docs/theory.md), and so understate ε. Nothing else in the program reads this file's figures.
"""

import math

from gredp.errors import GredpError
from gredp.privacy.accountant import check_delta, epsilon
from gredp.privacy.calibrate import calibrate
from gredp.privacy.ledger import Entry


def theorem3_sigma(claimed_epsilon: float, delta: float) -> float:
    """Theorem 3: σ = √(2 ln(1.25/δ))/ε for one release."""
    check_delta(delta)
    if not claimed_epsilon > 0:
        raise GredpError(f"Theorem 3 needs an epsilon above 0, not {claimed_epsilon}")
    return math.sqrt(2 * math.log(1.25 / delta)) / claimed_epsilon


def theorem3_epsilon(sigma: float, delta: float) -> float:
    """Theorem 3 read the other way: the ε it claims for one release at σ."""
    if not sigma > 0:
        raise GredpError(f"Theorem 3 needs a sigma above 0, not {sigma}")
    return theorem3_sigma(sigma, delta)


def proposition1_epsilon(rdp_epsilon: float, order: float, delta: float) -> float:
    """Proposition 1: (α, ε)-RDP gives (ε + ln(1/δ)/(α−1), δ)-DP. This one holds."""
    check_delta(delta)
    if not order > 1:
        raise GredpError(f"Proposition 1 needs an order above 1, not {order}")
    return rdp_epsilon + math.log(1 / delta) / (order - 1)


def corollary2_epsilon(sigma: float, delta: float, order: float, steps: int) -> float:
    """Corollary 2: `steps`·ε + ln(1/δ)/(α−1), with ε + ln(1/δ)/(α−1) = √(2 ln(1.25/δ))/σ."""
    step_epsilon = theorem3_epsilon(sigma, delta) - proposition1_epsilon(0.0, order, delta)
    if step_epsilon < 0:
        raise GredpError(
            f"Corollary 2 says nothing for sigma {sigma} at order {order}: "
            f"its epsilon per step would be {step_epsilon:.4g}; choose a larger order"
        )
    return proposition1_epsilon(steps * step_epsilon, order, delta)


def claimed_epsilon(entries: tuple[Entry, ...], delta: float) -> float | None:
    """What the paper's experiments would report: DP-SGD's RDP accountant, given σ as if it were z."""
    claims = [
        Entry(e.claimed_multiplier, e.sample_rate, e.steps)
        for e in entries
        if e.claimed_multiplier is not None
    ]
    return epsilon(claims, delta, "rdp") if len(claims) == len(entries) else None


def claimed_sigma(target_epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The σ that the paper's experiments would take for a target ε."""
    return calibrate(target_epsilon, delta, sample_rate, steps, "rdp")
