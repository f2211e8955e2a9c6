"""The smallest noise multiplier that keeps a run within a target ε, found from the private side."""

import math
from collections.abc import Callable
from functools import cache

from gredp.errors import GredpError, choose
from gredp.privacy.accountant import ACCOUNTANTS, AccountantName, check_delta, epsilon
from gredp.privacy.ledger import Entry
from gredp.privacy.schedule import CONSTANT, NoiseSchedule

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
    schedule: NoiseSchedule = CONSTANT,
) -> float:
    """The least noise multiplier z with ε(z) ≤ target_epsilon, to a relative 1e-5 and always on that side.

    `sample_rate` is the probability of each record in each of the `steps`, `accountant` is "pld" (tighter) or
    "rdp". What was `spent` before counts against the target. Under a `schedule`, z is that of factor 1.

    >>> z = calibrate(target_epsilon=2.0, delta=1e-5, sample_rate=0.01, steps=1000, accountant="rdp")
    >>> z < calibrate(1.0, 1e-5, 0.01, 1000, "rdp")
    True
    >>> epsilon([Entry(z, sample_rate=0.01, steps=1000)], 1e-5, "rdp") <= 2.0
    True

    | case | result |
    |---|---|
    | target not above 0, or not a number | rejected |
    | no steps | the smallest multiplier, since nothing is released |
    | target beyond every multiplier up to 10⁶ | rejected, with the ε that can be had |
    """
    check_delta(delta)
    choose("accountant", accountant, ACCOUNTANTS)
    Entry(1.0, sample_rate, steps)  # rejects a wrong rate or count before the search

    def total(z: float, name: AccountantName = accountant) -> float:
        return epsilon([*spent, *schedule.entries(z, sample_rate, steps)], delta, name)

    start, stride, rough = 1.0, 0.2, ACCOUNTANTS[accountant].rough
    if rough is not None:
        near = least_multiplier(lambda z: total(z, rough), target_epsilon, start, stride, 0.01)
        start, stride = LARGEST if near is None else near / 1.07, 0.03
    best = least_multiplier(total, target_epsilon, start, stride)
    if best is None:
        raise GredpError(
            f"epsilon {target_epsilon} cannot be reached in {steps} steps at rate {sample_rate:.4g} "
            f"and delta {delta}{' after what was spent before' if spent else ''}: "
            f"even a noise multiplier of {LARGEST:.0e} gives {total(LARGEST):.3g}"
        )
    return best


def least_multiplier(
    epsilon_of: Callable[[float], float],
    target: float,
    start: float = 1.0,
    stride: float = 0.2,
    tolerance: float = TOLERANCE,
) -> float | None:
    """The least z with epsilon_of(z) ≤ target, from above; ε falls with z. None if it lies beyond LARGEST.

    The search begins at `start` with steps of `stride` in log z, and ends within a relative `tolerance`.
    """
    if not 0 < target < math.inf:
        raise GredpError(f"the target epsilon must be a positive number, not {target}")

    @cache
    def ratio(log_z: float) -> float:
        """log(ε/target): not above 0 on the private side, nearly straight in log z."""
        eps = epsilon_of(math.exp(log_z))
        return math.log(max(eps, 1e-300) / target) if eps < math.inf else math.inf

    least, most = math.log(SMALLEST), math.log(LARGEST)
    low = high = min(max(math.log(start), least), most)
    while ratio(high) > 0:
        if high >= most:
            return None
        low, high, stride = high, min(high + stride, most), 2 * stride
    while ratio(low) <= 0:
        if low <= least:
            return SMALLEST
        low, high, stride = max(low - stride, least), low, 2 * stride
    f_low, f_high, moved = ratio(low), ratio(high), 0.0
    while high - low > tolerance * (1 + 1e-9):
        share = f_low / (f_low - f_high) if math.isfinite(f_low) else 0.5
        # Within a tolerance of one end, the next look goes just across the root; else a little to the
        # private side of where a straight line would put it.
        guess = low + (high - low) * share + tolerance / 2
        guess = min(max(guess, low + tolerance), high - tolerance)
        guess = guess if low < guess < high else (low + high) / 2
        f_guess = ratio(guess)
        again = moved * f_guess > 0  # the same end twice: the other's value is halved, or it would never move
        moved = f_guess
        if f_guess > 0:
            low, f_low, f_high = guess, f_guess, f_high / 2 if again else f_high
        else:
            high, f_high, f_low = guess, f_guess, f_low / 2 if again else f_low
    return math.exp(high)
