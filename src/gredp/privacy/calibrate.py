"""The smallest noise multiplier that keeps a run within a target ε, found from the private side."""

import math

from gredp.errors import GredpError
from gredp.privacy.accountant import AccountantName, check_delta, epsilon
from gredp.privacy.ledger import Entry

SMALLEST, LARGEST = 1e-2, 1e6


def calibrate(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: AccountantName = "pld",
) -> float:
    """The noise multiplier z with ε(z) ≤ target_epsilon, at most about 1e-4 of itself above the root.

    | case | result |
    |---|---|
    | target not above 0, or not a number | refused |
    | no steps | the smallest multiplier, since nothing is released |
    | target beyond every multiplier up to 10⁶ | refused, with the ε that can be had |
    """
    if not target_epsilon > 0 or math.isinf(target_epsilon):
        raise GredpError(f"the target epsilon must be a positive number, not {target_epsilon}")
    check_delta(delta)
    Entry(1.0, sample_rate, steps)  # refuses a wrong rate or count before the search

    def excess(log_z: float) -> float:
        return epsilon([Entry(math.exp(log_z), sample_rate, steps)], delta, accountant) - target_epsilon

    low = high = 0.0
    if excess(0.0) > 0:
        while excess(high) > 0:
            low, high = high, high + math.log(2)
            if high > math.log(LARGEST):
                best = excess(math.log(LARGEST)) + target_epsilon
                raise GredpError(
                    f"epsilon {target_epsilon} cannot be reached in {steps} steps at rate {sample_rate:.4g} "
                    f"and delta {delta}: even a noise multiplier of {LARGEST:.0e} gives {best:.3g}"
                )
    else:
        while excess(low) <= 0:
            low, high = low - math.log(2), low
            if low < math.log(SMALLEST):
                return max(math.exp(high), SMALLEST)
    for _ in range(60):
        if high - low <= 1e-5:
            break
        # Secant within the bracket on the smooth, nearly straight log ε: few evaluations, never outside.
        f_low, f_high = (math.log(excess(x) + target_epsilon) for x in (low, high))
        guess = low + (high - low) * (f_low - math.log(target_epsilon)) / (f_low - f_high)
        guess = min(max(guess + 4e-6, low + 0.02 * (high - low)), high - 0.02 * (high - low))
        if excess(guess) <= 0:
            high = guess
            if excess(guess - 1e-5) > 0:
                break
        else:
            low = guess
    return math.exp(high)
