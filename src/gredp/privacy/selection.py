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
from dataclasses import replace
from functools import lru_cache

from gredp.errors import GredpError
from gredp.privacy.accountant import ORDERS, Spent, check_delta, quiet, renyi_divergences, spent_by
from gredp.privacy.calibrate import LARGEST, least_multiplier
from gredp.privacy.ledger import Entry, one_unit


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
    return composed_epsilon([replace(entry, trials=trials, choice="one") for entry in entries], delta)


def composed_epsilon(entries: Iterable[Entry], delta: float) -> float:
    """The proven ε of private choices and of all other steps together: their Rényi divergences add up.

    Entries of one choice are the releases of one of its trials, whose number they all state.
    """
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    groups: dict[str, list[Entry]] = {}
    entries = tuple(entries)
    for entry in entries:
        one_unit(entries, entry.unit)
        groups.setdefault(entry.choice, []).append(entry)
    parts = []
    for name, group in groups.items():
        spent, trials = spent_by(replace(e, trials=0.0, choice="") for e in group), group[0].trials
        if any(entry.trials != trials for entry in group):
            raise GredpError(f"the choice {name!r} has one mean number of trials")
        if spent and spent[0][0] == 0:
            return math.inf
        if spent:
            parts.append(_of_choice(spent, trials) if name else renyi_divergences(spent))
    total = [sum(of_order) for of_order in zip(*parts)]
    return float(compute_epsilon(ORDERS, total, delta)[0]) if parts else 0.0


@lru_cache(maxsize=256)
def _of_choice(spent: Spent, trials: float) -> tuple[float, ...]:
    """The divergence at each order of the best of a random number of trials."""
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
    return tuple(float(divergence) for divergence in accountant.rdp)


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
