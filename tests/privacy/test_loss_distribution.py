"""Sums of privacy losses: never below the exact profile, however small δ, and close to it."""

import math

import mpmath
import numpy as np
import pytest

import gredp.privacy.accountant as accounting
from gredp.privacy.accountant import deltas, epsilon
from gredp.privacy.calibrate import calibrate
from gredp.privacy.ledger import Entry
from gredp.privacy.loss_distribution import Losses, gaussian_delta, sampled_delta

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


def exact_sampled(z: float, q: float, eps: float, adding: bool) -> mpmath.mpf:
    """From the definition: the mass of one side minus e^ε that of the other, beyond where they cross."""
    z, q, eps = map(mpmath.mpf, (z, q, eps))
    ratio = mpmath.exp(-eps if adding else eps)
    if ratio <= 1 - q:
        return mpmath.mpf(0) if adding else 1 - mpmath.exp(eps)
    x = z * z * mpmath.log((ratio - 1 + q) / q) + mpmath.mpf(1) / 2
    if adding:
        mixture = q * mpmath.ncdf((x - 1) / z) + (1 - q) * mpmath.ncdf(x / z)
        return mpmath.ncdf(x / z) - mpmath.exp(eps) * mixture
    return q * mpmath.ncdf((1 - x) / z) + (1 - q - mpmath.exp(eps)) * mpmath.ncdf(-x / z)


# ------------------------------------------------------------------ never below the truth


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-11, 1e-13, 1e-15])
@pytest.mark.parametrize("steps", [1, 100, 10_000, 10**6])
def test_epsilon_is_never_below_the_closed_form_however_small_delta_is(steps, delta):
    for mu in (0.1, 1.0, 5.0):
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
        assert truth * (1 - 1e-12) <= found <= truth * 1.5 + 1e-40


def test_a_calibrated_run_ends_within_its_target_at_a_small_delta():
    z = calibrate(8.0, 1e-14, NEARLY_ALL, 10_000)
    assert exact_epsilon(math.sqrt(10_000) / z, 1e-14) <= 8.0
    assert exact_epsilon(math.sqrt(10_000) / z, 1e-14) > 7.9


# ------------------------------------------------------------------ the parts


@pytest.mark.parametrize("mu", [1e-10, 1e-4, 0.3, 1.0, 1.1, 5.0, 300.0])
def test_the_gaussian_profile_keeps_its_digits(mu):
    for place in (-6.0, -1.0, -0.1, 0.0, 0.5, 3.0, 8.0, 20.0):
        eps = mu * mu / 2 + place * mu
        truth = exact_delta(mu, eps)
        off = abs(mpmath.mpf(float(gaussian_delta(mu, eps))) / truth - 1)
        assert off < 1e-15 * (100 + 10 * abs(eps)), (mu, eps)


@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize("q", [1e-6, 0.01, 0.5, NEARLY_ALL, 1.0])
@pytest.mark.parametrize("z", [0.3, 1.0, 50.0])
def test_the_profile_of_a_step_is_exact_to_what_it_says_of_its_rounding(z, q, adding):
    for x in np.linspace(-6, 7, 14) * z:
        y = mpmath.mpf(2 * x - 1) / (2 * z * z)
        loss = float(mpmath.log(1 - mpmath.mpf(q) + q * mpmath.exp(y)))
        eps = -loss if adding else loss
        found, sensitivity = sampled_delta(z, q, np.array([eps]), adding)
        tail = mpmath.ncdf(x / z)
        if not adding:
            tail = q * mpmath.ncdf((1 - x) / mpmath.mpf(z)) + (1 - q) * mpmath.ncdf(-x / z)
        off = abs(float(found[0]) - exact_sampled(z, q, eps, adding))
        assert off <= 2.0**-53 * sensitivity[0] * tail * (1 + 1e-6), (x, eps)


def directly_composed(losses: Losses, epsilons: list[float]) -> list[float]:
    """By multiplication and addition of positive numbers alone, in extended precision: no digit is lost."""
    total, start = np.ones(1, dtype=np.longdouble), 0
    for step in losses.steps:
        for _ in range(step.count):
            total = np.convolve(total, step.masses.astype(np.longdouble))
            start += step.lowest
    places = (start + np.arange(len(total))) * np.longdouble(losses.width)
    finite = math.prod((1 - step.infinite) ** step.count for step in losses.steps)
    above = [(places > eps, eps) for eps in epsilons]
    return [1 - finite + float((-np.expm1(eps - places[i])) @ total[i]) for i, eps in above]


@pytest.mark.parametrize("adding", [False, True])
def test_the_tilted_sum_is_the_direct_one_down_to_the_smallest_delta(adding):
    spent = [(1.0, 0.3, 5), (2.0, 0.1, 4), (3.0, 1.0, 2)]
    losses = Losses(spent, 0.02, -200.0, adding)
    epsilons = [0.0, 0.5, 2.0, 8.0, 14.0, 20.0] if not adding else [0.0, 0.5, 2.0, 3.5, 6.0]
    direct = directly_composed(losses, epsilons)
    assert direct[-1] < 1e-15
    for truth, found in zip(direct, losses.curve(epsilons)):
        assert truth * (1 - 1e-12) <= found <= truth * (1 + 1e-4)
    for delta in (0.1, 1e-3, 1e-8, 1e-16, 1e-24):
        eps = losses.epsilon(delta)
        (at,) = directly_composed(losses, [eps])
        assert delta * (1 - 1e-4) <= at <= delta * (1 + 1e-12)


def test_what_is_counted_for_rounding_is_more_than_there_was():
    """Without it the same sums lie within it of the direct ones, on either side."""
    losses = Losses([(1.0, 0.3, 12)], 0.02, -200.0, False)
    epsilons = [0.5, 2.0, 8.0]
    for theta in (0.5, 1.0, 2.0):
        tilted = losses.tilted(theta)
        for eps, truth in zip(epsilons, directly_composed(losses, epsilons)):
            found, slack = tilted._parts(eps)
            assert abs(found - truth) < slack
        assert slack < 1e-8 * truth


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


def test_too_many_points_are_left_to_renyi_orders(monkeypatch):
    monkeypatch.setattr("gredp.privacy.loss_distribution.LARGEST_WINDOW", 100)
    assert Losses([(1.0, 0.3, 5)], 1e-3, -50.0, False).epsilon(1e-5) == math.inf
    accounting._epsilon.cache_clear()
    assert epsilon([Entry(1.0, 0.3, 5)], 1e-5) == epsilon([Entry(1.0, 0.3, 5)], 1e-5, "rdp")
    accounting._epsilon.cache_clear()
