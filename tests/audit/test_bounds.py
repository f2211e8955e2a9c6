"""The statistics: exact where there is a closed form, and never an alarm too many."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gredp.app.audit_cases import CASES, PLAYS, RUN_PLAYS
from gredp.audit.bounds import (
    EPSILONS,
    Claim,
    Rates,
    best_threshold,
    epsilon_lower,
    excess,
    guess,
    mu_lower,
    multiplier_upper,
    one_run_epsilon,
    one_run_p_value,
    rates,
    upper,
)
from gredp.privacy.accountant import deltas, epsilon
from gredp.privacy.ledger import Entry

ONE_STEP = Claim((Entry(0.5, 1.0, 1),))
RECORD = Path(__file__).parents[2] / "results" / "audit_null.json"


@pytest.mark.parametrize("plays", [1, 7, 400])
@pytest.mark.parametrize("alpha", [0.2, 0.01, 1e-6])
def test_the_upper_bound_is_the_rate_at_which_so_few_errors_have_probability_alpha(plays, alpha):
    for errors in {0, plays // 3, plays - 1}:
        bound = float(upper(errors, plays, alpha))
        assert stats.binom.cdf(errors, plays, bound) == pytest.approx(alpha, rel=1e-6)
    assert upper(plays, plays, alpha) == 1


def test_rates_count_each_error_once():
    found = rates(np.array([0.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0, 4.0]), 1.5, 0.2)
    assert found == Rates(upper(1, 3, 0.1), upper(1, 4, 0.1))


def test_exact_rates_of_a_gaussian_give_back_its_sensitivity():
    for mu in (0.1, 1.0, 3.0):
        for threshold in (0.2 * mu, mu / 2):
            exact = Rates(stats.norm.sf(threshold), stats.norm.cdf(threshold - mu))
            assert mu_lower(exact) == pytest.approx(mu)
            claim = Claim((Entry(1 / mu, 1.0, 1),))
            z = multiplier_upper(exact, claim)
            assert z == pytest.approx(1 / mu)
            assert epsilon_lower(z, claim, 1e-5) == pytest.approx(claim.epsilon(1e-5), rel=1e-6)


def test_the_curve_says_the_same_as_the_sensitivity():
    """A point below a Gaussian mechanism's trade-off curve passes δ(ε) somewhere, one above it nowhere."""
    curve = Claim((Entry(0.5, 1 - 1e-12, 1),))
    curve.__dict__["curve"] = np.array(deltas(ONE_STEP.entries, EPSILONS.tolist()))
    for fp in (0.02, 0.1, 0.3):
        fn = stats.norm.cdf(stats.norm.isf(fp) - 2)
        assert excess(Rates(fp, fn * 1.01), curve) < 0 < excess(Rates(fp, fn * 0.97), curve)
        assert excess(Rates(fn * 0.97, fp), curve) > 0


def test_the_curve_of_an_accountant_is_the_one_that_gives_its_epsilon():
    for entry in (Entry(0.7, 0.5, 4), Entry(1.0, 1.0, 3)):
        for accountant in ("pld", "rdp"):
            eps = epsilon([entry], 1e-3, accountant)
            assert deltas([entry], [eps], accountant)[0] == pytest.approx(1e-3, rel=0.02)
    assert deltas([], [1.0, 2.0]) == [0.0, 0.0]
    with pytest.raises(ValueError, match="above 0"):
        deltas([Entry(0.0, 1.0, 1)], [1.0])


def test_an_infinite_epsilon_cannot_be_refuted():
    assert excess(Rates(1e-9, 1e-9), Claim((Entry(0.0, 1.0, 1),))) == -math.inf


@pytest.mark.slow
def test_the_multiplier_of_a_sampled_run_is_found_from_the_refuted_side():
    claim = Claim((Entry(1.0, 0.5, 4),))
    found = Rates(0.02, 0.35)
    z = multiplier_upper(found, claim)
    assert excess(found, claim.with_multiplier(z)) > 0 >= excess(found, claim.with_multiplier(z / 1.011))
    assert multiplier_upper(Rates(0.5, 0.6), claim) == math.inf
    assert epsilon_lower(math.inf, claim, 1e-5) == 0


def ideal_audit(rng, alpha: float, claim: Claim, plays: int, noise: float = 1.0) -> bool:
    """An audit along one direction of a mechanism with `noise` times what the claim calls for."""
    entry = claim.entries[0]
    scale = noise * entry.noise_multiplier * math.sqrt(entry.steps)

    def play(count: int) -> tuple[np.ndarray, np.ndarray]:
        shift = rng.binomial(entry.steps, entry.sample_rate, count)
        return scale * rng.standard_normal(count), shift + scale * rng.standard_normal(count)

    threshold = best_threshold(*play(plays // 3), claim, alpha)
    return bool(excess(rates(*play(plays), threshold, alpha), claim) > 0)


NULL = {"one step": ONE_STEP, "4 steps at rate 1/2": Claim((Entry(1.0, 0.5, 4),))}


@pytest.mark.slow
@pytest.mark.parametrize("name", NULL)
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_a_thousand_null_audits_raise_few_alarms(name, alpha):
    rng = np.random.default_rng(11)
    alarms = sum(ideal_audit(rng, alpha, NULL[name], 400) for _ in range(1000))
    assert alarms <= 1000 * alpha + 3 * math.sqrt(1000 * alpha * (1 - alpha))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claim", "plays", "directions"),
    [
        (ONE_STEP, PLAYS, 6),
        (Claim((Entry(1.0, 1.0, 4),)), RUN_PLAYS[1.0], 1),
        (NULL["4 steps at rate 1/2"], RUN_PLAYS[0.5], 1),
    ],
)
def test_a_noise_deficit_of_root_two_is_found_in_99_of_100_audits(claim, plays, directions):
    """Power at the settings of `gredp audit --all`."""
    rng = np.random.default_rng(2)
    alpha, noise = 0.01 / len(CASES) / directions, math.sqrt(0.5)
    found = sum(
        any(ideal_audit(rng, alpha, claim, plays, noise) for _ in range(directions)) for _ in range(500)
    )
    assert found >= 495


def test_the_recorded_null_audits_of_the_engine_are_within_their_level():
    """1,000 whole audits of the real step, as benchmarks/audit_null.py played them."""
    record = json.loads(RECORD.read_text())
    audits, alpha = record["audits"], record["alpha"]
    assert audits >= 1000
    assert record["alarms"] <= audits * alpha + 3 * math.sqrt(audits * alpha * (1 - alpha))


def test_one_run_bounds_follow_the_binomial():
    p = math.e / (1 + math.e)
    assert one_run_p_value(100, 50, 45, 1.0, 0.0) == pytest.approx(stats.binom.sf(44, 50, p))
    assert one_run_p_value(100, 50, 45, 1.0, 1e-5) > one_run_p_value(100, 50, 45, 1.0, 0.0)
    assert one_run_p_value(100, 50, 0, 1.0, 1e-5) == 1
    lower = one_run_epsilon(500, 100, 100, 1e-5, 0.01)
    assert one_run_p_value(500, 100, 100, lower, 1e-5) <= 0.01
    assert 2.9 < lower < math.log(1 / (0.01 ** (-1 / 100) - 1))  # of δ = 0
    assert one_run_epsilon(500, 100, 50, 1e-5, 0.01) == 0


def test_one_run_never_alarms_too_often_on_randomized_response():
    """The mechanism that meets the bound: each coin is reported rightly with probability e^ε/(1 + e^ε)."""
    rng = np.random.default_rng(5)
    p = math.e / (1 + math.e)
    alarms = sum(one_run_p_value(200, 200, rng.binomial(200, p), 1.0, 0.0) <= 0.05 for _ in range(2000))
    assert alarms <= 2000 * 0.05 + 3 * math.sqrt(2000 * 0.05)


def test_guesses_are_the_two_ends():
    inside, outside = guess(np.array([0.3, -1.0, 2.0, 0.1]), 0.25)
    assert (inside, outside) == ([2], [1])
