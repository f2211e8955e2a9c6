"""The best of several private runs, chosen privately: what trying out settings really costs.

Formal guarantee. Let Q be one trial: draw a candidate at random, train it, score it with noise; and let Q's
releases be `entries`, whichever candidate it drew. Draw K from a geometric distribution with mean `trials`,
run Q K times, release the trial with the best score, and neither K nor the others. That is (ε, δ)-DP with
ε = `selected_epsilon(entries, trials, delta)`: Theorem 2 of Papernot and Steinke, "Hyperparameter Tuning with
Renyi Differential Privacy" (2022), with η = 1, as `dp-accounting` computes it; Liu and Talwar (2019) have the
same for pure DP. A fixed number of trials has no such bound: all of them must be paid for.
"""

import math
from collections.abc import Iterable

from gredp.errors import GredpError
from gredp.privacy.accountant import ORDERS, check_delta, quiet, spent_by
from gredp.privacy.calibrate import LARGEST, least_multiplier
from gredp.privacy.ledger import Entry


def check_trials(trials: float) -> None:
    if not (trials >= 1 and math.isfinite(trials)):
        raise GredpError(f"the mean number of trials must be at least 1, not {trials}")


def selected_epsilon(entries: Iterable[Entry], trials: float, delta: float) -> float:
    """The proven ε of the best of a random number of trials, each of which spends `entries`.

    | case | ε |
    |---|---|
    | nothing is spent by a trial | 0 |
    | a multiplier of 0 | ∞ |
    | trials = 1 | more than that of one run: the bound does not know that K is 1 |
    """
    check_delta(delta)
    check_trials(trials)
    spent = spent_by(entries)
    if not spent or spent[0][0] == 0:
        return math.inf if spent else 0.0
    from dp_accounting import dp_event, rdp

    trial = dp_event.ComposedDpEvent(
        [
            dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), n)
            for z, q, n in spent
        ]
    )
    with quiet():
        accountant = rdp.RdpAccountant(ORDERS)
        accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, float(trials), 1.0))
        return float(accountant.get_epsilon(delta))


def calibrate_selection(
    target_epsilon: float, delta: float, sample_rate: float, steps: int, score: Entry, trials: float
) -> float:
    """The least noise multiplier of a trial's training with which the selection stays within the target.

    `score` is what a trial spends beside its training. Ends on the private side, to a relative 1e-4.
    """

    def total(z: float) -> float:
        return selected_epsilon([Entry(z, sample_rate, steps), score], trials, delta)

    found = least_multiplier(total, target_epsilon, tolerance=1e-4)
    if found is None:
        raise GredpError(
            f"epsilon {target_epsilon} cannot be reached with {trials:g} trials on average: the scores and "
            f"the choice alone cost {total(LARGEST):.3g}; take fewer trials or more noise on the score"
        )
    return found


def draw_trials(trials: float, uniform: float) -> int:
    """K ≥ 1 with P(K > k) = (1 − 1/trials)^k, from a uniform number in (0, 1]."""
    check_trials(trials)
    if trials == 1:
        return 1
    return max(1, math.ceil(math.log(uniform) / math.log1p(-1 / trials)))
