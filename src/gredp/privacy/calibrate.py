"""The smallest noise multiplier that keeps a run within a target ε, found from the private side."""

import math
from collections.abc import Callable

from gredp.errors import GredpError
from gredp.privacy.accountant import AccountantName, check_accountant, check_delta, epsilon
from gredp.privacy.ledger import Entry

SMALLEST, LARGEST = 1e-2, 1e6
#: how far, relatively, the result may lie above the exact root
TOLERANCE = 1e-5


def calibrate(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: AccountantName = "pld",
    spent: tuple[Entry, ...] = (),
) -> float:
    """The least noise multiplier z with ε(z) ≤ target_epsilon, to a relative 1e-5 and always on that side.

    What was `spent` before counts against the target.

    | case | result |
    |---|---|
    | target not above 0, or not a number | refused |
    | no steps | the smallest multiplier, since nothing is released |
    | target beyond every multiplier up to 10⁶ | refused, with the ε that can be had |
    """
    if not target_epsilon > 0 or math.isinf(target_epsilon):
        raise GredpError(f"the target epsilon must be a positive number, not {target_epsilon}")
    check_delta(delta)
    check_accountant(accountant)
    Entry(1.0, sample_rate, steps)  # refuses a wrong rate or count before the search

    def search(name: AccountantName, start: float) -> float | None:
        def ratio(log_z: float) -> float:
            """log(ε/target): not above 0 on the private side, nearly straight in log z."""
            eps = epsilon([*spent, Entry(math.exp(log_z), sample_rate, steps)], delta, name)
            return math.log(max(eps, 1e-300) / target_epsilon) if eps < math.inf else math.inf

        return _private_root(ratio, math.log(start))

    # Rényi orders are quick and never below, so their answer is where the tighter search begins.
    rough = search("rdp", 1.0)
    best = rough if accountant == "rdp" else search(accountant, rough if rough is not None else LARGEST)
    if best is None:
        least = epsilon([*spent, Entry(LARGEST, sample_rate, steps)], delta, accountant)
        raise GredpError(
            f"epsilon {target_epsilon} cannot be reached in {steps} steps at rate {sample_rate:.4g} "
            f"and delta {delta}{' after what was spent before' if spent else ''}: "
            f"even a noise multiplier of {LARGEST:.0e} gives {least:.3g}"
        )
    return best


def _private_root(ratio: Callable[[float], float], start: float) -> float | None:
    """exp of the least x with ratio(x) ≤ 0, from above; ratio falls. None if it lies beyond LARGEST."""
    low = high = start
    f_low = f_high = ratio(start)
    stride = 0.2
    while f_high > 0:
        if high >= math.log(LARGEST):
            return None
        low, f_low = high, f_high
        high = min(high + stride, math.log(LARGEST))
        stride *= 2
        f_high = ratio(high)
    while f_low <= 0:
        if low <= math.log(SMALLEST):
            return SMALLEST
        high, f_high = low, f_low
        low = max(low - stride, math.log(SMALLEST))
        stride *= 2
        f_low = ratio(low)
    while high - low > TOLERANCE:
        # A secant, kept inside the bracket and turned to bisection where it would creep along one end.
        share = f_low / (f_low - f_high) if math.isfinite(f_low) else 0.5
        guess = low + (high - low) * min(max(share, 0.05), 0.95) + TOLERANCE / 2
        guess = min(max(guess, low + TOLERANCE / 4), high - TOLERANCE / 4)
        f_guess = ratio(guess)
        if f_guess > 0:
            low, f_low = guess, f_guess
            continue
        high, f_high = guess, f_guess
        f_below = ratio(guess - TOLERANCE)
        if f_below > 0:
            break
        high, f_high = guess - TOLERANCE, f_below
    return math.exp(high)
