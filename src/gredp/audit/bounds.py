"""From won and lost games to what they prove, at a stated confidence. Statistics only; no torch.

Formal guarantee. Whatever the mechanism does, if its claim is true then a test that uses these bounds, with
thresholds fixed on other plays, refutes it with probability at most `alpha`. No shape of the scores is
assumed: only that the plays are independent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from gredp.privacy.accountant import AccountantName, deltas, epsilon
from gredp.privacy.ledger import Entry

Floats = NDArray[np.float64]
#: where a curve δ(ε) is compared with the attack
EPSILONS = np.concatenate([np.linspace(0, 3, 61), np.linspace(3.25, 20, 68)])

#: the largest ε that one run is searched for, and how close
LARGEST, TOLERANCE = 20.0, 1e-4


@dataclass(frozen=True)
class Rates:
    """Upper bounds on both error rates of the attacker; for many thresholds at once, arrays."""

    false_positive: Any
    false_negative: Any


@dataclass(frozen=True)
class Claim:
    """What is said of the mechanism: these steps, each a Gaussian mechanism on a Poisson sample."""

    entries: tuple[Entry, ...]
    accountant: AccountantName = "pld"

    @property
    def mu(self) -> float | None:
        """Sensitivity in noise deviations where the claim is that of one Gaussian mechanism, else None."""
        if any(e.noise_multiplier == 0 for e in self.entries):
            return math.inf
        if self.accountant != "pld" or any(e.sample_rate < 1 for e in self.entries):
            return None
        return math.hypot(*(math.sqrt(e.steps) / e.noise_multiplier for e in self.entries))

    @cached_property
    def curve(self) -> Floats:
        """δ at each of `EPSILONS`."""
        return np.array(deltas(self.entries, EPSILONS.tolist(), self.accountant))

    def epsilon(self, delta: float) -> float:
        return epsilon(self.entries, delta, self.accountant)

    def with_multiplier(self, z: float) -> "Claim":
        """A run of the same form with another noise."""
        return Claim(tuple(Entry(z, e.sample_rate, e.steps) for e in self.entries), self.accountant)


def upper(errors: Any, plays: int, alpha: float) -> Any:
    """Clopper–Pearson: the rate of errors lies below this with probability at least 1 − alpha."""
    bound = stats.beta.ppf(1 - alpha, np.asarray(errors) + 1.0, np.maximum(plays - np.asarray(errors), 1))
    return np.where(np.asarray(errors) >= plays, 1.0, bound)


def rates(without: Floats, with_: Floats, thresholds: Any, alpha: float) -> Rates:
    """Of the test "score above the threshold: the canary was in"; both hold with probability 1 − alpha."""
    false_positives = len(without) - np.searchsorted(np.sort(without), thresholds, side="right")
    false_negatives = np.searchsorted(np.sort(with_), thresholds, side="right")
    return Rates(
        upper(false_positives, len(without), alpha / 2), upper(false_negatives, len(with_), alpha / 2)
    )


def mu_lower(found: Rates) -> Any:
    """No mechanism with a smaller Gaussian sensitivity μ allows error rates this low."""
    return stats.norm.isf(found.false_positive) - stats.norm.ppf(found.false_negative)


def excess(found: Rates, claim: Claim) -> Any:
    """By how much the attack passes the claim; above 0 the claim is refuted.

    A Gaussian mechanism is held to its μ. Of any other claim each point (ε, δ) is taken: it allows no
    test with e^ε·FPR + FNR < 1 − δ, nor with the two exchanged.
    """
    if claim.mu is not None:
        return mu_lower(found) - claim.mu  # −∞ where there is no noise: ε = ∞ promises nothing
    fp, fn = (np.asarray(rate)[..., None] for rate in (found.false_positive, found.false_negative))
    growth = np.exp(EPSILONS)
    return np.max(1 - claim.curve - np.minimum(growth * fp + fn, growth * fn + fp), -1)


def best_threshold(without: Floats, with_: Floats, claim: Claim, alpha: float) -> float:
    """Where the attack passes the claim by most; take it on plays that are not used again."""
    scores = np.unique(np.concatenate([without, with_]))
    candidates = (scores[1:] + scores[:-1]) / 2 if len(scores) > 1 else scores
    return float(candidates[np.argmax(excess(rates(without, with_, candidates, alpha), claim))])


def multiplier_upper(found: Rates, claim: Claim) -> float:
    """The largest noise multiplier that the attack leaves possible in a run of the claim's form."""
    mu = float(mu_lower(found))
    if mu <= 0:
        return math.inf
    refuted = math.sqrt(sum(e.steps for e in claim.entries)) / mu
    if claim.mu is not None:
        return refuted
    # Sampling only helps a claim, so this much noise is refuted at any rate; the curve may refute less.
    possible = refuted
    while excess(found, claim.with_multiplier(possible)) > 0:
        refuted, possible = possible, possible / 1.15
    while refuted / possible > 1.01:
        middle = math.sqrt(possible * refuted)
        if excess(found, claim.with_multiplier(middle)) > 0:
            refuted = middle
        else:
            possible = middle
    return refuted


def epsilon_lower(z: float, claim: Claim, delta: float) -> float:
    """ε at `delta` of a run of the claim's form with `z`, the most noise that the attack leaves possible."""
    return 0.0 if math.isinf(z) else claim.with_multiplier(z).epsilon(delta)


# ------------------------------------------------------------------ one run, many canaries


def one_run_p_value(canaries: int, guesses: int, right: int, eps: float, delta: float) -> float:
    """How likely `right` or more right guesses of `guesses` are under (ε, δ)-DP: at most this.

    Theorem 5.2 of Steinke et al. 2023. Each of `canaries` was in the data by a fair coin of its own; the
    attacker may be silent about some.
    """
    p = 1 / (1 + math.exp(-eps))
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, p))
    slope = float(np.max(below / np.arange(1, right + 1))) if right else 0.0
    return min(1.0, float(stats.binom.sf(right - 1, guesses, p)) + 2 * canaries * delta * slope)


def one_run_epsilon(canaries: int, guesses: int, right: int, delta: float, alpha: float) -> float:
    """The largest ε that so many right guesses refute at level alpha; 0 if none."""

    def excess_p(eps: float) -> float:
        return one_run_p_value(canaries, guesses, right, eps, delta) - alpha

    if excess_p(0.0) > 0:
        return 0.0
    if excess_p(LARGEST) <= 0:
        return LARGEST
    return max(0.0, float(optimize.bisect(excess_p, 0.0, LARGEST, xtol=TOLERANCE)) - TOLERANCE)


def guess(scores: Floats, share: float) -> tuple[Sequence[int], Sequence[int]]:
    """Who was in and who was out, for the highest and the lowest `share` of the scores."""
    order = np.argsort(scores)
    count = max(1, int(len(scores) * share))
    return order[-count:].tolist(), order[:count].tolist()
