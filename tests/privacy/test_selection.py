"""The price of choosing: against the theorem written out, and against brute force on small mechanisms."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from dp_accounting.privacy_accountant import NeighboringRelation

from gredp.errors import GredpError
from gredp.privacy.accountant import ORDERS, deltas, epsilon
from gredp.privacy.ledger import Entry
from gredp.privacy.selection import calibrate_selection, draw_trials, selected_epsilon

DELTA = 1e-5


def by_the_theorem(z: float, steps: int, trials: float, delta: float) -> float:
    """Theorem 2 with η = 1, for Gaussian steps on all records; then the conversion of Canonne et al. 2020."""
    curve = {a: steps * a / (2 * z * z) for a in ORDERS}
    choice = min((1 - 1 / a) * e + math.log(trials) / a for a, e in curve.items())
    best = math.inf
    for a, e in curve.items():
        chosen = e + 2 * choice + math.log(trials) / (a - 1)
        best = min(best, chosen + math.log1p(-1 / a) - math.log(delta * a) / (a - 1))
    return max(0.0, best)


@pytest.mark.parametrize(("z", "steps", "trials"), [(5.0, 1, 4.0), (2.0, 3, 10.0), (20.0, 40, 1.5)])
def test_it_is_the_theorem(z, steps, trials):
    expected = by_the_theorem(z, steps, trials, DELTA)
    assert selected_epsilon([Entry(z, 1.0, steps)], trials, DELTA) == pytest.approx(expected, rel=1e-3)


def renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    return math.log(np.sum(p**order * q ** (1 - order))) / (order - 1)


def best_of(single: np.ndarray, trials: float) -> np.ndarray:
    """The law of the largest of K draws, K geometric: E[F^K] by its series, term by term."""
    below = np.concatenate([[0.0], np.cumsum(single)])
    weights = (1 / trials) * (1 - 1 / trials) ** np.arange(20_000)
    powers = np.array([np.sum(weights * f ** np.arange(1, 20_001)) for f in below])
    return np.diff(powers)


@pytest.mark.parametrize("trials", [1.5, 4.0, 30.0])
@pytest.mark.parametrize(("values", "lie"), [(2, 0.5), (3, 0.3), (6, 0.7)])
def test_no_small_mechanism_passes_the_bound(trials, values, lie):
    """Randomized response; the outcome itself is the score. All pairs of inputs, every order."""
    orders = [1.5, 2.0, 4.0, 8.0, 32.0]
    accountant = rdp.RdpAccountant(orders, NeighboringRelation.REPLACE_ONE)
    response = dp_event.RandomizedResponseDpEvent(lie, values)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(response, trials, 1.0))
    laws = [np.where(np.arange(values) == i, 1 - lie + lie / values, lie / values) for i in range(values)]
    chosen = [best_of(law, trials) for law in laws]
    worst = [max(renyi(p, q, a) for p in chosen for q in chosen) for a in orders]
    assert all(np.isclose(law.sum(), 1, atol=1e-6) for law in chosen)
    assert all(w <= bound for w, bound in zip(worst, accountant._rdp))
    single = [max(renyi(p, q, a) for p in laws for q in laws) for a in orders]
    assert worst[-1] > single[-1], "choosing must cost something here, or nothing was tested"


def test_a_fixed_number_of_trials_would_pass_it():
    """Why K is random: the best of exactly 30 tells more than the best of 30 on average is allowed to."""
    lie, values, trials = 0.5, 2, 30
    laws = [np.where(np.arange(values) == i, 1 - lie + lie / values, lie / values) for i in range(values)]
    fixed = [np.diff(np.concatenate([[0.0], np.cumsum(law) ** trials])) for law in laws]
    pure = math.log(laws[0][0] / laws[0][1])
    assert np.log(fixed[0] / fixed[1]).max() > 3 * pure
    chosen = [best_of(law, trials) for law in laws]
    assert np.abs(np.log(chosen[0] / chosen[1])).max() <= 3 * pure + 1e-9


def test_it_costs_more_than_one_run_and_grows_with_trials():
    entries = [Entry(1.1, 0.05, 200), Entry(10.0, 1.0, 1)]
    costs = [selected_epsilon(entries, trials, DELTA) for trials in (1, 2, 8, 64)]
    assert epsilon(entries, DELTA, "rdp") < costs[0]
    assert costs == sorted(costs)
    assert selected_epsilon([], 4, DELTA) == 0
    assert selected_epsilon([Entry(0.0, 1.0, 1)], 4, DELTA) == math.inf


def test_calibration_ends_on_the_private_side():
    score = Entry(20.0, 1.0, 1)
    z = calibrate_selection(4.0, DELTA, 0.1, 100, score, 5)
    assert selected_epsilon([Entry(z, 0.1, 100), score], 5, DELTA) <= 4.0
    assert selected_epsilon([Entry(z * 0.999, 0.1, 100), score], 5, DELTA) > 4.0


def test_trials_follow_the_geometric_law():
    uniform = (np.arange(100_000) + 0.5) / 100_000
    drawn = np.array([draw_trials(4.0, u) for u in uniform])
    for k in range(1, 10):
        assert (drawn > k).mean() == pytest.approx(0.75**k, abs=1e-4)
    assert drawn.mean() == pytest.approx(4, abs=0.01)
    assert drawn.min() == 1
    assert draw_trials(1, 0.3) == 1
    assert draw_trials(4.0, 1.0) == 1


@pytest.mark.parametrize("trials", [0.5, math.inf, math.nan])
def test_numbers_that_are_none_are_refused(trials):
    with pytest.raises(GredpError):
        selected_epsilon([Entry(1.0, 1.0, 1)], trials, DELTA)


def test_targets_out_of_reach_are_refused():
    with pytest.raises(GredpError, match="the scores and the choice alone cost"):
        calibrate_selection(0.01, DELTA, 0.1, 100, Entry(1.0, 1.0, 1), 5)


def test_a_choice_composes_with_other_steps_and_with_other_choices():
    """Against dp-accounting's own composition; "pld" has no other bound to offer."""
    trial = [Entry(4.0, 0.1, 50), Entry(6.0, 1.0, 1)]
    rest = [Entry(3.0, 0.05, 40)]
    ledger = [replace(e, trials=t, choice=name) for t, name in ((4.0, "a"), (2.0, "b")) for e in trial]

    def event(entry):
        gaussian = dp_event.GaussianDpEvent(entry.noise_multiplier)
        return dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(entry.sample_rate, gaussian), entry.steps
        )

    accountant = rdp.RdpAccountant(ORDERS)
    for trials in (4.0, 2.0):
        one = dp_event.ComposedDpEvent([event(e) for e in trial])
        accountant.compose(dp_event.RepeatAndSelectDpEvent(one, trials, 1.0))
    accountant.compose(event(rest[0]))
    wanted = accountant.get_epsilon(1e-5)
    for name in ("pld", "rdp"):
        assert wanted <= epsilon([*ledger, *rest], 1e-5, name) <= wanted * (1 + 1e-6)
    assert epsilon(ledger[:2], 1e-5) == selected_epsilon(trial, 4.0, 1e-5)
    assert epsilon([*ledger, Entry(0.0, 0.1, 1)], 1e-5) == math.inf
    with pytest.raises(GredpError, match="no composition of its steps"):
        deltas(ledger, [1.0])
    with pytest.raises(GredpError, match="one mean number of trials"):
        epsilon([ledger[0], replace(ledger[1], trials=3.0)], 1e-5)
    for wrong in ({"trials": 4.0}, {"choice": "a"}, {"trials": 0.5, "choice": "a"}):
        with pytest.raises(GredpError, match="trials go with a choice by name"):
            replace(rest[0], **wrong)
