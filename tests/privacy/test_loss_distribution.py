"""Sums of privacy losses: never below the exact profile, however small δ, and close to it."""

import math

import mpmath
import numpy as np
import pytest

import gredp.privacy.accountant as accounting
from gredp.privacy.accountant import deltas, epsilon
from gredp.privacy.calibrate import calibrate
from gredp.privacy.ledger import Entry
from gredp.privacy.loss_distribution import Tilted, both_ways, least_epsilon

#: forces the path of loss distributions, and is that of the closed form to fifteen digits
NEARLY_ALL = 1 - 1e-15
mpmath.mp.dps = 40


def exact_delta(mu: float, eps: float) -> mpmath.mpf:
    m, e = mpmath.mpf(mu), mpmath.mpf(eps)
    return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


def exact_epsilon(mu: float, delta: float) -> float:
    """From below, by bisection in 40 digits."""
    if exact_delta(mu, 0) <= delta:
        return 0.0
    low, high = mpmath.mpf(0), mpmath.mpf(mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta)) + 1)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exact_delta(mu, middle) > delta else (low, middle)
    return float(low) * (1 - 1e-15)


# ------------------------------------------------------------------ never below the truth


@pytest.mark.parametrize(
    "delta",
    [
        1e-5,
        pytest.param(1e-9, marks=pytest.mark.slow),
        1e-11,
        pytest.param(1e-13, marks=pytest.mark.slow),
        1e-15,
    ],
)
@pytest.mark.parametrize("steps", [1, 100, 10_000, 10**6])
def test_epsilon_is_never_below_the_closed_form_however_small_delta_is(steps, delta):
    for mu in (0.1, 1.0, 5.0)[: 3 if steps > 1 else 2]:  # so close to rate 1 dp-accounting fails for z = 0.2
        z = math.sqrt(steps) / mu
        truth = exact_epsilon(math.sqrt(steps) / z, delta)
        # The grid of losses is coarse for a million steps: looser by a few percent, but never too low.
        for rate, tightness in ((NEARLY_ALL, 0.05), (1.0, 1e-7)):
            assert truth <= epsilon([Entry(z, rate, steps)], delta) <= truth * (1 + tightness)


def test_the_rounding_of_ten_thousand_steps_takes_nothing_from_epsilon():
    """A plain Fourier transform gave 7.6929 and 19.73; by the closed form the first is 7.8687."""
    assert 7.8687 < epsilon([Entry(100.0, NEARLY_ALL, 10_000)], 1e-14) < 7.88
    assert 20.6 < epsilon([Entry(1.5, 0.01, 100_000)], 1e-14) < 20.9


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_divergences_that_drown_in_rounding_are_not_counted_as_nothing(accountant):
    """Their sum comes out negative, which dp-accounting takes for ε = 0; the total variation is 4e-7 here."""
    assert epsilon([Entry(1e6, 1e-3, 10**6)], 1e-9, accountant) > 2.7e-6
    assert deltas([Entry(1e6, 1e-3, 10**6)], [0.0], accountant)[0] > 3.9e-7


def test_a_curve_is_never_below_the_closed_form():
    steps, z = 10_000, 100.0
    epsilons = np.linspace(0, 20, 41).tolist()
    for eps, found in zip(epsilons, deltas([Entry(z, NEARLY_ALL, steps)], epsilons)):
        truth = float(exact_delta(1.0, eps))
        assert truth * (1 - 1e-12) <= found <= truth * 1.5 + 1e-20


def test_a_calibrated_run_ends_within_its_target_at_a_small_delta():
    z = calibrate(8.0, 1e-14, NEARLY_ALL, 10_000)
    assert exact_epsilon(math.sqrt(10_000) / z, 1e-14) <= 8.0
    assert exact_epsilon(math.sqrt(10_000) / z, 1e-14) > 7.9


# ------------------------------------------------------------------ the parts


def directly_composed(parts, epsilons: list[float]) -> list[float]:
    """By multiplication and addition of positive numbers alone, in extended precision: no digit is lost."""
    total, start, finite = np.ones(1, dtype=np.longdouble), 0, 1.0
    for count, step in parts:
        finite *= (1 - step._infinity_mass) ** count
        for _ in range(count):
            total = np.convolve(total, step._probs.astype(np.longdouble))
            start += step._lower_loss
    places = (start + np.arange(len(total))) * np.longdouble(parts[0][1]._discretization)
    above = [(places > eps, eps) for eps in epsilons]
    return [1 - finite + float((-np.expm1(eps - places[i])) @ total[i]) for i, eps in above]


@pytest.mark.parametrize("adding", [0, 1])
def test_the_tilted_sum_is_the_direct_one_down_to_the_smallest_delta(adding):
    parts = both_ways([(1.0, 0.3, 5), (2.0, 0.1, 4), (3.0, 1.0, 2)], 0.02, -200.0)[adding]
    for delta in (1e-3, 1e-8, 1e-16, 1e-24):
        eps = least_epsilon(parts, delta, 5.0)
        (at,) = directly_composed(parts, [eps])
        assert delta * (1 - 1e-4) <= at <= delta * (1 + 1e-12)


@pytest.mark.parametrize("theta", [0.1, 0.5, 1.0, 2.0])
def test_what_is_counted_for_rounding_is_more_than_there_was(theta):
    """Whatever the tilt the bound holds, and without the allowance it is within it of the direct sum."""
    parts, epsilons = both_ways([(1.0, 0.3, 12)], 0.02, -200.0)[0], [0.5, 2.0, 8.0]
    tilted, bare = Tilted(parts, theta), Tilted(parts, theta)
    bare.slack = bare.rounding = 0.0
    for eps, truth in zip(epsilons, directly_composed(parts, epsilons)):
        bound, found = tilted.delta(eps), bare.delta(eps)
        assert truth * (1 - 1e-12) <= bound <= truth * (1 + 1e-6)
        assert abs(found / (1 + 1e-9) - truth) < bound - found


SEVERAL = ((1.0, 0.01, 50), (2.0, 0.2, 30), (6.0, 1.0, 4))


@pytest.mark.parametrize("spent", [((1.0, 0.01, 1000),), ((0.6, 0.004, 5000),), ((3.0, 0.5, 60),), SEVERAL])
def test_where_rounding_does_not_matter_it_is_the_epsilon_of_dp_accounting(spent):
    from dp_accounting import dp_event, pld

    scale = accounting._rdp_epsilon(spent, 1e-6)
    width = 2.0 ** math.floor(math.log2(scale * 1e-4))
    theirs = pld.PLDAccountant(value_discretization_interval=width)
    for z, q, n in spent:
        event = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z))
        theirs.compose(dp_event.SelfComposedDpEvent(event, n))
    ours = epsilon([Entry(*part) for part in spent], 1e-6)
    assert ours == pytest.approx(theirs.get_epsilon(1e-6), rel=2e-6)


def test_where_dp_accounting_fails_renyi_orders_stand():
    assert epsilon([Entry(0.2, NEARLY_ALL, 1)], 1e-9) == epsilon([Entry(0.2, NEARLY_ALL, 1)], 1e-9, "rdp")
