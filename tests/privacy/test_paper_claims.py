"""What the paper claims, by its own formulas, beside what is proven for the same run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gredp.errors import GredpError
from gredp.mechanisms.dpsgd import DPSGD
from gredp.mechanisms.gredp import GReDP
from gredp.privacy.accountant import epsilon
from gredp.privacy.certificate import Block
from gredp.privacy.ledger import Entry, Ledger
from gredp.privacy.paper_claims import (
    claimed_epsilon,
    claimed_sigma,
    corollary2_epsilon,
    proposition1_epsilon,
    theorem3_epsilon,
    theorem3_sigma,
)

LAYERS = [Block.whole(f"{i}.weight", str(i), (4, 5), 1) for i in range(3)]


def test_theorem3_by_hand():
    # ln(1.25/1e-5) = ln(125000) = 11.7360690…; √(2·11.7360690) = 4.8448053…
    assert theorem3_sigma(1.0, 1e-5) == pytest.approx(4.84480526, rel=1e-8)
    assert theorem3_sigma(0.5, 1e-5) == pytest.approx(2 * 4.84480526, rel=1e-8)


@given(st.floats(1e-3, 1e3), st.floats(1e-12, 0.5))
def test_theorem3_is_its_formula_and_reads_both_ways(eps, delta):
    sigma = theorem3_sigma(eps, delta)
    assert sigma == pytest.approx(math.sqrt(2 * math.log(1.25 / delta)) / eps, rel=1e-12)
    assert theorem3_epsilon(sigma, delta) == pytest.approx(eps, rel=1e-12)


def test_proposition1_by_hand():
    # ln(1/1e-5)/(11 − 1) = 11.512925…/10
    assert proposition1_epsilon(2.0, 11, 1e-5) == pytest.approx(3.1512925465, rel=1e-10)


@given(st.floats(0, 100), st.floats(1.01, 500), st.floats(1e-12, 0.5))
def test_proposition1_is_its_formula(rdp, order, delta):
    assert proposition1_epsilon(rdp, order, delta) == pytest.approx(rdp - math.log(delta) / (order - 1))


def test_proposition1_holds_for_a_gaussian():
    # A Gaussian at z is (α, α/2z²)-RDP. The converted ε must not be below the exact one, at any order.
    exact = epsilon([Entry(2.0, 1.0, 1)], 1e-5)
    assert min(proposition1_epsilon(a / 8, a, 1e-5) for a in (1.5, 2, 5, 10, 11, 20, 100)) > exact


def test_corollary2_by_hand():
    # σ = 4, δ = 1e-5, α = 21: Theorem 3 gives 1.2112013 in one step, of which ln(1/δ)/20 = 0.5756463 is the
    # conversion; 10 steps cost 10·(1.2112013 − 0.5756463) + 0.5756463.
    assert corollary2_epsilon(4.0, 1e-5, 21, 10) == pytest.approx(6.9311966, rel=1e-6)


@given(st.floats(0.1, 4), st.floats(1e-10, 1e-3), st.integers(1, 1000))
def test_corollary2_of_one_step_is_theorem3_and_grows_by_the_same_amount_each_step(sigma, delta, steps):
    order = 200.0
    one = corollary2_epsilon(sigma, delta, order, 1)
    assert one == pytest.approx(theorem3_epsilon(sigma, delta), rel=1e-9)
    conversion = math.log(1 / delta) / (order - 1)
    expected = steps * (one - conversion) + conversion
    assert corollary2_epsilon(sigma, delta, order, steps) == pytest.approx(expected, rel=1e-9)


def test_corollary2_says_nothing_where_the_order_is_too_small():
    # At α = 2 the conversion alone, ln(1/δ) = 11.5, exceeds Theorem 3's 1.2.
    with pytest.raises(GredpError, match=r"sigma 4\.0 at order 2.*larger order"):
        corollary2_epsilon(4.0, 1e-5, 2, 10)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
def test_a_bad_delta_is_refused_everywhere(delta):
    for call in (
        lambda: theorem3_sigma(1.0, delta),
        lambda: theorem3_epsilon(1.0, delta),
        lambda: proposition1_epsilon(1.0, 2.0, delta),
        lambda: corollary2_epsilon(1.0, delta, 20.0, 1),
        lambda: claimed_epsilon((Entry(1.0, 0.5, 1, 1.0),), delta),
    ):
        with pytest.raises(GredpError, match=f"^delta .*not {delta}$"):
            call()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_an_epsilon_or_an_order_out_of_range_is_refused(bad):
    with pytest.raises(GredpError, match=f"not {bad}$"):
        theorem3_sigma(bad, 1e-5)
    with pytest.raises(GredpError, match=f"not {bad}$"):
        proposition1_epsilon(1.0, bad, 1e-5)
    with pytest.raises(GredpError, match=r"not 1\.0$"):
        proposition1_epsilon(1.0, 1.0, 1e-5)


def charged(mechanism, sigma: float, steps: int, rate: float = 0.05) -> tuple[Entry, ...]:
    """The ledger of a run over three layers, charged as the engine does."""
    ledger = Ledger()
    certificate = mechanism.plan(LAYERS, 1.7, sigma, 100.0).certificate()
    for _ in range(steps):
        ledger.charge(certificate, rate, sigma if mechanism.claimed_by_paper else None)
    return ledger.entries


@pytest.mark.parametrize(
    ("clipping", "factor"),
    [("flat", math.sqrt(2)), ("per_layer", math.sqrt(2)), ("layer_wise", math.sqrt(2 * 3))],
)
def test_the_claim_is_dpsgd_at_sigma_and_the_proof_dpsgd_at_a_fraction_of_it(clipping, factor):
    sigma, steps, delta = 1.3, 60, 1e-5
    entries = charged(GReDP(clipping=clipping), sigma, steps)
    dpsgd = charged(DPSGD(), sigma, steps)
    assert claimed_epsilon(entries, delta) == pytest.approx(epsilon(dpsgd, delta, "rdp"), rel=1e-9)
    weaker = charged(DPSGD(), sigma / factor, steps)
    assert epsilon(entries, delta, "rdp") == pytest.approx(epsilon(weaker, delta, "rdp"), rel=1e-9)
    # The proven ε is larger, by the tighter accountant too: the claim understates it.
    assert epsilon(entries, delta, "pld") > 1.2 * claimed_epsilon(entries, delta)


def test_for_dpsgd_claim_and_proof_are_one():
    entries = charged(DPSGD(), 1.3, 60)
    assert claimed_epsilon(entries, 1e-5) == pytest.approx(epsilon(entries, 1e-5, "rdp"), rel=1e-9)


def test_real_noise_is_claimed_private_and_proven_not_to_be():
    entries = charged(GReDP(noise_parts=(1.0, 0.0)), 1.3, 60)
    assert claimed_epsilon(entries, 1e-5) == pytest.approx(claimed_epsilon(charged(DPSGD(), 1.3, 60), 1e-5))
    assert epsilon(entries, 1e-5) == math.inf


def test_no_claim_is_made_for_a_run_of_which_any_step_has_none():
    claimed, unclaimed = Entry(1.0, 0.05, 5, 2.0), Entry(1.0, 0.05, 5)
    assert claimed_epsilon((claimed,), 1e-5) > 0
    assert claimed_epsilon((unclaimed,), 1e-5) is None
    assert claimed_epsilon((claimed, unclaimed), 1e-5) is None


def test_nothing_charged_is_claimed_to_cost_nothing():
    assert claimed_epsilon((), 1e-5) == 0


def test_claimed_sigma_meets_the_target_by_claim_and_misses_it_by_proof():
    target, delta, rate, steps = 2.0, 1e-5, 0.05, 60
    sigma = claimed_sigma(target, delta, rate, steps)
    entries = charged(GReDP(), sigma, steps, rate)
    assert 0.999 * target < claimed_epsilon(entries, delta) <= target
    assert epsilon(entries, delta, "pld") > 1.2 * target
