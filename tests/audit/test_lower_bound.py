"""Lower bounds of ε for rows of a table: below the proven one, near it, above it where noise is missing."""

import pytest

from gredp.audit import lower_bound
from gredp.audit.lower_bound import audited_lower_bound, optimistic_epsilon
from gredp.errors import GredpError
from gredp.mechanisms import StepPlan
from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry

RUN = {"sample_rate": 0.02, "steps": 300}


@pytest.fixture(autouse=True)
def _forget():
    lower_bound._played.cache_clear()


@pytest.mark.parametrize("run", [(1.1, 1 / 40, 400), (0.7, 0.3, 50), (5.0, 0.5, 10), (0.5, 1.0, 3)])
def test_rounding_down_gives_a_little_less_than_rounding_up(run):
    low, high = optimistic_epsilon(*run, 1e-5), epsilon([Entry(*run)], 1e-5)
    assert 0.97 * high <= low <= high


def test_no_noise_and_endless_noise():
    assert optimistic_epsilon(float("inf"), 0.1, 10, 1e-5) == 0
    assert optimistic_epsilon(1e7, 0.1, 10, 1e-5) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "noise", "clipping", "unit"),
    [
        ("dpsgd", "white", "flat", 1.0),
        ("gredp", "white", "layer_wise", 0.5),
        ("gredp", "shaped", "flat", 1.01**-0.5),
    ],
)
def test_the_bound_lies_below_the_proven_epsilon_and_near_it(method, noise, clipping, unit):
    found = audited_lower_bound(method, noise, clipping=clipping, sigma=1.0, plays=400, **RUN)
    proven = epsilon([Entry(unit, RUN["sample_rate"], RUN["steps"])], 1e-5)
    assert 0.3 * proven < found.epsilon <= proven
    assert unit <= found.multiplier_upper < 1.8 * unit


@pytest.mark.slow
def test_the_papers_claim_is_passed_at_the_noise_of_algorithm_2():
    """At the same σ the paper counts z = σ; two layers with noise of half the variance leave σ/2."""
    found = audited_lower_bound("gredp", claim="paper", sigma=1.0, plays=200, **RUN)
    assert found.epsilon > epsilon([Entry(1.0, RUN["sample_rate"], RUN["steps"])], 1e-5, "rdp")


@pytest.mark.slow
def test_missing_noise_lifts_the_bound_above_the_proof(monkeypatch):
    monkeypatch.setattr(StepPlan, "white_part", property(lambda plan: 0.4 * plan.noise_parts[0]))
    found = audited_lower_bound("gredp", clipping="flat", sigma=1.0, plays=200, **RUN)
    assert found.epsilon > epsilon([Entry(0.5**0.5, RUN["sample_rate"], RUN["steps"])], 1e-5)


def test_one_game_serves_all_rows_of_a_method(monkeypatch):
    played = []
    right = lower_bound.audit
    monkeypatch.setattr(lower_bound, "audit", lambda *a, **k: played.append(1) or right(*a, **k))
    found = [audited_lower_bound("dpsgd", sigma=s, plays=60, **RUN) for s in (1.0, 2.0)]
    assert len(played) == 1
    assert found[1].multiplier_upper == 2 * found[0].multiplier_upper
    assert found[1].epsilon < found[0].epsilon


@pytest.mark.parametrize(("method", "sigma"), [("plain", 1.0), ("dpsgd", 0.0), ("dpsgd", float("nan"))])
def test_what_claims_nothing_is_refused(method, sigma):
    with pytest.raises(GredpError):
        audited_lower_bound(method, sigma=sigma, **RUN)
