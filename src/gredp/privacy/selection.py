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
from gredp.privacy.accountant import ORDERS, _quiet, check_delta
from gredp.privacy.calibrate import _private_root
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
    spent = [e for e in entries if e.steps]
    if not spent:
        return 0.0
    if any(e.noise_multiplier == 0 for e in spent):
        return math.inf
    from dp_accounting import dp_event, rdp

    steps: list[dp_event.DpEvent] = [
        dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(e.sample_rate, dp_event.GaussianDpEvent(e.noise_multiplier)),
            e.steps,
        )
        for e in spent
    ]
    trial = dp_event.ComposedDpEvent(steps)
    with _quiet():
        accountant = rdp.RdpAccountant(ORDERS)
        accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, float(trials), 1.0))
        return float(accountant.get_epsilon(delta))


def calibrate_selection(
    target_epsilon: float, delta: float, sample_rate: float, steps: int, score: Entry, trials: float
) -> float:
    """The least noise multiplier of a trial's training with which the selection stays within the target.

    `score` is what a trial spends beside its training. Ends on the private side, to a relative 1e-4.
    """
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise GredpError(f"the target epsilon must be a positive number, not {target_epsilon}")

    def ratio(log_z: float) -> float:
        eps = selected_epsilon([Entry(math.exp(log_z), sample_rate, steps), score], trials, delta)
        return math.log(max(eps, 1e-300) / target_epsilon) if eps < math.inf else math.inf

    found = _private_root(ratio, 0.0, 0.2, 1e-4)
    if found is None:
        least = selected_epsilon([Entry(1e6, sample_rate, steps), score], trials, delta)
        raise GredpError(
            f"epsilon {target_epsilon} cannot be reached with {trials:g} trials on average: the scores and "
            f"the choice alone cost {least:.3g}; take fewer trials or more noise on the score"
        )
    return found


def draw_trials(trials: float, uniform: float) -> int:
    """K ≥ 1 with P(K > k) = (1 − 1/trials)^k, from a uniform number in (0, 1]."""
    check_trials(trials)
    if trials == 1:
        return 1
    return max(1, math.ceil(math.log(uniform) / math.log1p(-1 / trials)))
