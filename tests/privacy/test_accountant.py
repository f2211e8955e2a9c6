"""ε of a ledger: against closed forms, against Opacus, and its own laws (monotone, additive, never low)."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

import gredp.privacy.accountant as module
from gredp.errors import GredpError
from gredp.privacy.accountant import ORDERS, Accountant, epsilon, round_up
from gredp.privacy.certificate import Certificate, Release
from gredp.privacy.ledger import Entry, Ledger

BOTH = pytest.mark.parametrize("accountant", ["rdp", "pld"])


def spent(z: float, q: float, steps: int, delta: float, accountant: str) -> float:
    return epsilon([Entry(z, q, steps)], delta, accountant)


# --- closed forms


def gaussian_delta(eps: float, mu: float) -> float:
    """The exact privacy profile of a Gaussian mechanism with sensitivity μ (Balle and Wang 2018)."""
    return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize(
    "entries",
    [
        ((1.0, 1),),
        ((0.3, 1),),
        ((0.05, 3),),
        ((4.0, 100),),
        ((50.0, 7),),
        ((1000.0, 5000),),
        ((2.0, 3), (5.0, 10)),
    ],
)
def test_without_sampling_epsilon_is_the_gaussian_closed_form(entries, delta):
    mu = math.sqrt(sum(n / z**2 for z, n in entries))
    got = epsilon([Entry(z, 1.0, n) for z, n in entries], delta)
    root = 0.0
    if gaussian_delta(0.0, mu) > delta:
        root = brentq(lambda e: gaussian_delta(e, mu) - delta, 0, 10 * mu * (mu + 10) + 10, xtol=1e-13)
    assert got == pytest.approx(root, rel=1e-6, abs=1e-6)
    assert got >= root  # ended on the private side


def test_a_gaussian_whose_total_variation_is_within_delta_costs_nothing():
    # TV = 2Φ(μ/2) − 1 ≈ 0.4·μ: at δ = 1e-3 everything below μ ≈ 2.5e-3 is (0, δ)-private.
    assert spent(500.0, 1.0, 1, 1e-3, "pld") == 0
    assert spent(300.0, 1.0, 1, 1e-3, "pld") > 0


@pytest.mark.parametrize(("z", "steps"), [(1.0, 1), (0.5, 4), (5.0, 100), (20.0, 1000)])
@pytest.mark.parametrize("delta", [1e-7, 1e-4])
def test_without_sampling_rdp_is_its_own_closed_form(z, steps, delta):
    # Rényi divergence T·α/(2z²), turned into (ε, δ) by Proposition 12 of Canonne et al. 2020.
    expected = min(
        steps * a / (2 * z * z) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in ORDERS
    )
    assert spent(z, 1.0, steps, delta, "rdp") == pytest.approx(expected, rel=1e-12)


def sampled_delta(eps: float, z: float, q: float) -> float:
    """The exact profile of one Poisson-subsampled Gaussian, the worse of removing and adding a record.

    P = (1−q)·N(0, z²) + q·N(1, z²) against Q = N(0, z²): the likelihood ratio 1−q+q·e^((2x−1)/2z²)
    grows with x, so the best event is a half-line that starts (ends) where it crosses e^ε (e^−ε).
    """

    def crossing(ratio: float) -> float:
        return z * z * math.log((ratio - 1 + q) / q) + 0.5

    x = crossing(math.exp(eps))
    remove = q * norm.sf((x - 1) / z) + (1 - q) * norm.sf(x / z) - math.exp(eps) * norm.sf(x / z)
    if math.exp(-eps) <= 1 - q:
        return remove
    x = crossing(math.exp(-eps))
    mixture = q * norm.cdf((x - 1) / z) + (1 - q) * norm.cdf(x / z)
    return max(remove, norm.cdf(x / z) - math.exp(eps) * mixture)


@pytest.mark.parametrize(
    ("z", "q", "delta"),
    [(1.0, 0.1, 1e-5), (3.0, 0.5, 1e-6), (0.8, 0.9, 1e-3), (2.0, 0.01, 1e-7)],
)
def test_one_sampled_step_is_never_below_the_exact_profile_and_close_to_it(z, q, delta):
    root = brentq(lambda e: sampled_delta(e, z, q) - delta, 0, 100, xtol=1e-13)
    pld = spent(z, q, 1, delta, "pld")
    # Losses are rounded up to a grid of at most 1e-4 of RDP's ε, which is a few times the ε itself.
    assert root * (1 - 1e-9) <= pld <= root * 1.001
    assert spent(z, q, 1, delta, "rdp") >= root


# --- laws

SETTINGS = [(1.0, 0.02, 200, 1e-5), (3.0, 0.5, 60, 1e-4), (20.0, 0.2, 500, 1e-5)]


@pytest.mark.parametrize(("z", "q", "steps", "delta"), SETTINGS)
def test_rdp_is_the_looser_bound(z, q, steps, delta):
    rdp = spent(z, q, steps, delta, "rdp")
    # The accountant takes the smaller of the two, so the loss distribution itself has to be asked.
    pld = module._pld_epsilon(((z, q, steps),), delta, rdp)
    assert 0.4 * rdp < pld < 0.98 * rdp


@pytest.mark.parametrize(("z", "steps", "delta"), [(1.0, 1, 1e-5), (0.2, 30, 1e-9), (30.0, 400, 1e-3)])
def test_rdp_is_the_looser_bound_without_sampling_too(z, steps, delta):
    assert spent(z, 1.0, steps, delta, "pld") < spent(z, 1.0, steps, delta, "rdp")


@BOTH
@pytest.mark.parametrize(
    "settings",
    [
        [(1.5, 0.1, steps) for steps in (1, 20, 21, 200)],
        [(1.5, q, 20) for q in (0.05, 0.1, 0.102, 0.99, 1.0)],
        [(z, 0.1, 20) for z in (6.0, 1.52, 1.5, 0.7)],
        [(z, 1.0, 20) for z in (8.0, 2.0, 1.999, 1.0, 0.5)],
    ],
    ids=["steps", "rate", "less noise", "less noise, all records"],
)
def test_epsilon_grows_with_steps_rate_and_less_noise(settings, accountant):
    values = [spent(*s, 1e-5, accountant) for s in settings]
    assert all(x < y for x, y in pairwise(values)), values


@BOTH
def test_epsilon_falls_as_delta_grows(accountant):
    values = [spent(1.5, 0.1, 20, delta, accountant) for delta in (1e-7, 1e-5, 1.05e-5)]
    assert all(x > y for x, y in pairwise(values)), values


@BOTH
def test_n_at_once_equals_n_times_one(accountant):
    ledger = Ledger()
    for _ in range(20):
        ledger.charge(Certificate((Release("r", 1.0, 2.0),)), 0.25)
    at_once = spent(2.0, 0.25, 20, 1e-5, accountant)
    assert epsilon(ledger.entries, 1e-5, accountant) == at_once
    assert epsilon([Entry(2.0, 0.25, 1)] * 20, 1e-5, accountant) == at_once
    assert spent(2.0, 0.25, 12, 1e-5, accountant) < at_once


@BOTH
def test_entries_apart_in_the_ledger_are_counted_together_in_any_order(accountant):
    a, b = Entry(2.0, 0.25, 3), Entry(3.0, 0.5, 5)
    merged = epsilon([Entry(2.0, 0.25, 6), Entry(3.0, 0.5, 10)], 1e-5, accountant)
    assert epsilon([a, b, a, b], 1e-5, accountant) == merged
    assert epsilon([b, b, a, a], 1e-5, accountant) == merged
    # A claim is no part of what was spent.
    claimed = [Entry(2.0, 0.25, 2, claimed_multiplier=9.0), Entry(2.0, 0.25, 4), Entry(3.0, 0.5, 10, 1.0)]
    assert epsilon(claimed, 1e-5, accountant) == merged


@BOTH
def test_unlike_entries_compose_as_like_ones_do(accountant):
    # A multiplier that differs in the ninth digit cannot be merged, so this composes two distributions.
    whole = spent(2.0, 0.25, 20, 1e-5, accountant)
    parts = epsilon([Entry(2.0, 0.25, 12), Entry(2.0 + 1e-9, 0.25, 8)], 1e-5, accountant)
    assert parts == pytest.approx(whole, rel=1e-4)
    assert spent(2.0, 0.25, 12, 1e-5, accountant) < 0.9 * whole


@BOTH
def test_steps_with_and_without_sampling_compose(accountant):
    sampled, full = Entry(2.0, 0.25, 10), Entry(6.0, 1.0, 4)
    both = epsilon([sampled, full], 1e-5, accountant)
    alone = [epsilon([entry], 1e-5, accountant) for entry in (sampled, full)]
    assert max(alone) < both < sum(alone)


# --- Opacus, which computes the same quantities by code of its own


OPACUS = [
    [(1.0, 0.01, 1000)],
    [(2.0, 0.1, 200)],
    [(1.0, 0.25, 20)],
    [(1.0, 0.01, 500), (2.0, 0.02, 500)],
]


@pytest.mark.parametrize("history", OPACUS)
def test_rdp_agrees_with_opacus(history):
    from opacus.accountants import RDPAccountant

    theirs = RDPAccountant()
    theirs.history = list(history)
    value, order = theirs.get_privacy_spent(delta=1e-5)
    ours = epsilon([Entry(*h) for h in history], 1e-5, "rdp")
    # Same conversion, and all orders of Opacus are among ours, the best one included. At whole orders
    # the two agree to rounding. At fractional ones the series alternates in sign: Opacus subtracts the
    # negative terms, dp-accounting adds their size, which is an upper bound and up to 0.3 % looser here.
    assert order in ORDERS
    assert value * (1 - 1e-9) <= ours <= value * (1 + 1e-9 if order == int(order) else 1.005)


@pytest.mark.parametrize("history", OPACUS)
def test_pld_agrees_with_opacus_prv(history):
    from opacus.accountants import PRVAccountant

    theirs = PRVAccountant()
    theirs.history = list(history)
    delta, error = 1e-5, 0.005
    # PRV's own guarantee: the true ε lies within ±error of its estimates at δ ± δ/1000. Ours is an upper
    # bound on the truth, so it must not lie below the lower end at all; being tight to 1e-4 of RDP's ε
    # (under 0.001 here, less than `error`) it does not lie above the upper end either.
    lower, _, upper = theirs._get_dprv(error, delta / 1000).compute_epsilon(delta, delta / 1000, error)
    assert upper - lower < 0.012
    assert lower <= epsilon([Entry(*h) for h in history], delta, "pld") <= upper


# --- edges


@BOTH
def test_nothing_charged_costs_nothing(accountant):
    assert epsilon([], 1e-5, accountant) == 0
    assert epsilon([Entry(1.0, 0.5, 0), Entry(0.0, 0.5, 0)], 1e-5, accountant) == 0
    assert epsilon([Entry(math.inf, 0.5, 10)], 1e-5, accountant) == 0


@BOTH
@pytest.mark.parametrize("rate", [1e-6, 0.5, 1.0])
def test_a_multiplier_of_0_costs_everything(accountant, rate):
    assert spent(0.0, rate, 1, 1e-5, accountant) == math.inf
    assert epsilon([Entry(5.0, 0.5, 10), Entry(0.0, rate, 1)], 1e-5, accountant) == math.inf


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 1.5, math.nan, math.inf])
def test_delta_outside_0_and_1_is_refused_even_with_nothing_charged(delta):
    for entries in ([], [Entry(1.0, 0.5, 1)]):
        with pytest.raises(GredpError, match=f"^delta must .*not {delta}$"):
            epsilon(entries, delta)


def test_an_unknown_accountant_is_refused_by_name():
    for call in (lambda: epsilon([], 1e-5, "prv"), lambda: Accountant(Ledger(), "prv")):
        with pytest.raises(GredpError, match="'prv': choose one of pld, rdp"):
            call()


@BOTH
def test_the_accountant_object_is_a_live_view_of_its_ledger(accountant):
    ledger = Ledger()
    view = Accountant(ledger, accountant)
    assert (view.get_epsilon(delta=1e-5), len(view), view.mechanism()) == (0.0, 0, accountant)
    ledger.charge(Certificate((Release("r", 1.0, 2.0),)), 0.25)
    assert len(view) == 1
    assert view.get_epsilon(delta=1e-5) == spent(2.0, 0.25, 1, 1e-5, accountant) > 0


def test_the_default_accountant_is_pld():
    assert Accountant(Ledger()).name == "pld"
    assert epsilon([Entry(2.0, 0.25, 1)], 1e-5) == spent(2.0, 0.25, 1, 1e-5, "pld")


def test_an_epsilon_of_0_by_rdp_needs_no_loss_distribution(monkeypatch):
    # The distribution cannot improve on 0, and at the width that an ε of 0 asks for it takes minutes and
    # ten gigabytes. Four steps at n·q = 5.8e-4 < δ: the record is most likely never drawn.
    def refuse(*_):
        raise AssertionError("a loss distribution was built")

    monkeypatch.setattr(module, "_pld_epsilon", refuse)
    z, q, delta = 1.0, 1.4615e-4, 8.4656e-4
    assert spent(z, q, 4, delta, "rdp") == 0
    assert spent(z, q, 4, delta, "pld") == 0


@pytest.mark.parametrize("z", [1e-3, 5e-3])
def test_next_to_no_noise_has_a_huge_epsilon_and_no_overflow(z):
    """At a rate below 1 losses of 10⁷ would need a grid whose width overflows the exponential."""
    found = spent(z, 0.01, 100, 1e-5, "pld")
    assert 1e6 < found < math.inf
    assert found <= 100 * 0.5 / z**2 * 1.1


def test_the_smallest_delta_that_a_number_can_hold():
    assert 37 < spent(1.0, 1.0, 1, 1e-310, "pld") < 39


def test_the_grid_of_losses_stays_bounded_for_a_huge_epsilon(monkeypatch):
    # Losses reach as far as ε does, so the points of the grid number at least ε/width: at z = 0.001, which
    # a user may well type, a fixed width would mean 10⁹ of them.
    points = []

    def record(spent, width, log_tail):
        points.append(rdp / width)
        return [[]]

    monkeypatch.setattr("gredp.privacy.loss_distribution.both_ways", record)
    monkeypatch.setattr("gredp.privacy.loss_distribution.least_epsilon", lambda *_: 0.0)
    for z in (10.0, 0.1, 0.001):
        rdp = spent(z, 0.5, 10, 1e-5, "rdp")
        module._pld_epsilon(((z, 0.5, 10),), 1e-5, rdp)
    assert len(points) == 3
    assert max(points) < 1e6


# --- for print


@given(st.floats(0, 1e6), st.integers(0, 8))  # at most 15 digits: what a double prints faithfully
@example(0.3, 4)  # its double lies below 0.3
@example(1.00005, 4)
def test_round_up_never_rounds_down_and_not_by_more_than_a_digit(value, digits):
    shown = round_up(value, digits)
    assert shown >= value
    # What is read off the page is the decimal that `shown` prints as; it too must not be below.
    printed = Fraction(f"{shown:.{digits}f}")
    assert printed >= Fraction(value)
    assert printed - Fraction(value) < Fraction(1, 10**digits)


@pytest.mark.parametrize("value", [0.0, 1.0, 2.5, 1e30, math.inf])
def test_round_up_leaves_exact_values_alone(value):
    assert round_up(value) == value


def test_round_up_passes_nan_on():
    assert math.isnan(round_up(math.nan))


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_absurdly_little_noise_gives_an_absurd_epsilon_and_no_error(rate, accountant):
    # μ²/2 is the mean loss of the unsampled mechanism; no bound may lie below it at rate 1
    for z in (1e-6, 1e-9, 1e-13, 1e-18, 1e-200):
        got = spent(z, rate, 3, 1e-5, accountant)
        assert got >= (math.inf if z < 1e-150 else 3 / z**2 / 2)
    assert spent(1e200, rate, 3, 1e-5, accountant) <= 1e-3


def test_a_new_accountant_is_one_entry(monkeypatch):
    """Whatever takes the name of an accountant asks the table: ε, δ(ε), the search for a multiplier."""
    from gredp.privacy.calibrate import calibrate

    twice = module.Accounting(
        "twice Rényi",
        lambda spent, delta: 2 * module.ACCOUNTANTS["rdp"].epsilon(spent, delta),
        lambda spent, epsilons: module.ACCOUNTANTS["rdp"].deltas(spent, [eps / 2 for eps in epsilons]),
    )
    monkeypatch.setitem(module.ACCOUNTANTS, "twice", twice)
    entries = [Entry(1.0, 0.01, 100)]
    assert epsilon(entries, 1e-5, "twice") == 2 * epsilon(entries, 1e-5, "rdp")
    assert module.deltas(entries, [2.0], "twice") == module.deltas(entries, [1.0], "rdp")
    assert calibrate(2.0, 1e-5, 0.01, 100, "twice") == calibrate(1.0, 1e-5, 0.01, 100, "rdp")
    assert Accountant(Ledger(), "twice").name == "twice"
