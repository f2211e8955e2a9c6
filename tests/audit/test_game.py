"""The game against the engine, steps of the user's, and planted bugs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gredp import GredpError
from gredp.app.audit_cases import _digits
from gredp.audit import examples
from gredp.audit.bounds import Claim
from gredp.audit.canaries import directions, quietest
from gredp.audit.examples import Effort
from gredp.audit.game import audit
from gredp.audit.one_run import one_run
from gredp.audit.victims import GRIDS, EngineRun, EngineStep, EngineTurn, LinearLoss
from gredp.privacy.ledger import Entry
from planted import bugs
from planted.selftest import SELF_TEST

CLAIM = Claim((Entry(examples.SIGMA, 1.0, 1),))


def test_a_records_gradient_is_the_record():
    model = LinearLoss((*GRIDS, (8,)))
    x = torch.randn(1, 39)
    model(x).sum().backward()
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), x[0])


def test_directions_are_what_they_are_called():
    found = directions(GRIDS, seed=0)
    for unit in found.values():
        assert np.linalg.norm(unit) == pytest.approx(1)
    mirror = np.concatenate(
        [
            np.roll(
                np.arange(np.prod(g)).reshape(g)[tuple(slice(None, None, -1) for _ in g)],
                1,
                tuple(range(len(g))),
            ).ravel()
            + offset
            for g, offset in zip(GRIDS, (0, 15))
        ]
    )
    np.testing.assert_allclose(found["odd pair"][mirror], -found["odd pair"])
    np.testing.assert_allclose(found["even pair"][mirror], found["even pair"])
    assert not np.array_equal(found["random"], directions(GRIDS)["random"])
    with pytest.raises(GredpError, match="at least 3"):
        directions(((2,),))


def test_the_quietest_direction_is_the_one_with_least_noise():
    noise = np.random.default_rng(0).standard_normal((500, 4)) * [1, 1, 0.1, 1]
    assert abs(quietest(noise)[2]) > 0.99


@pytest.mark.parametrize("method", ["dpsgd", "gredp"])
def test_without_noise_the_engine_moves_by_the_clipped_canary(method):
    victim = EngineStep({"method": method}, 0.0)
    unit = directions(GRIDS, seed=1)["random"]
    np.testing.assert_allclose(victim(np.vstack([100 * unit, np.zeros((3, 31))])), unit, atol=1e-5)
    run = EngineRun({"method": method}, 0.0, 3, 1.0)
    np.testing.assert_allclose(run(np.vstack([100 * unit, np.zeros((3, 31))])), 3 * unit, atol=1e-5)
    assert run.entry.steps == 3


def test_the_sampler_decides_whether_the_canary_takes_part():
    run = EngineRun({"method": "dpsgd"}, 0.0, 4, 0.5, grids=((8,),))
    unit = directions(((8,),), seed=1)["random"]
    took_part = [round(float(run(np.vstack([100 * unit, np.zeros((3, 8))])) @ unit), 4) for _ in range(60)]
    assert set(took_part) <= {0.0, 1.0, 2.0, 3.0, 4.0}
    assert len(set(took_part)) > 2  # all alike with probability below 1e-9


def test_the_claim_is_what_the_ledger_was_charged():
    victim = EngineStep({"method": "gredp", "claim": "paper", "clipping": "flat"}, 0.5)
    assert victim.claim("paper").entries[0].noise_multiplier == 0.5
    assert victim.claim("proven").entries[0].noise_multiplier == pytest.approx(0.5 / math.sqrt(2))
    with pytest.raises(GredpError, match="no claim"):
        EngineStep({"method": "gredp", "noise": "shaped"}, 0.5).claim("paper")


def test_an_honest_step_stands_and_a_false_claim_falls():
    assert not audit(examples.honest_step, ((8,),), CLAIM, plays=400, alpha=1e-7).refuted
    bold = audit(examples.honest_step, ((8,),), Claim((Entry(1.0, 1.0, 1),)), plays=400, alpha=1e-7)
    assert bold.refuted
    row = bold.to_json()
    assert row["claimed_epsilon"] < row["audited_epsilon_lower"] < CLAIM.epsilon(1e-5)
    assert sum(row["histogram"]["with"]) == 400
    assert set(row["directions"]) == {*directions(((8,),)), "quietest"}


def test_steps_that_release_nonsense_are_refused():
    with pytest.raises(GredpError, match="not finite"):
        audit(lambda g: np.full(8, np.nan), ((8,),), CLAIM, plays=20, only=("random",))
    with pytest.raises(GredpError, match=r"not \(8,\)"):
        audit(lambda g: np.zeros(3), ((8,),), CLAIM, plays=20)
    with pytest.raises(GredpError, match="at least 20 plays"):
        audit(examples.honest_step, ((8,),), CLAIM, plays=5)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["white", "real"])
def test_a_claim_of_the_paper_falls_and_the_proven_one_stands(noise):
    """Few plays, seeded; `gredp audit --all` plays every case, without a seed."""
    options = {"method": "gredp", "noise": noise, "claim": "paper", "clipping": "flat"}
    victim = EngineStep(options, 0.5, seed=3)
    settings = {"plays": 400, "only": ("odd pair",), "seed": 3}
    assert audit(victim, GRIDS, victim.claim("paper"), **settings).refuted
    proven = victim.claim("proven")
    assert not audit(victim, GRIDS, proven, alpha=1e-7, **settings).refuted


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["white", "shaped"])
def test_correlated_noise_is_worth_its_claim_and_not_much_more(noise):
    """All releases of a turn, best combined: what is proven stands, and twice the noise falls."""
    options = {"method": "gredp", "noise": noise, "correlation_bands": 3}
    victim = EngineTurn(options, 0.5, grids=((8,),), seed=3)
    (proven,) = victim.claim("proven").entries
    assert (proven.noise_multiplier, proven.sample_rate, proven.steps) == (pytest.approx(0.5), 1.0, 1)
    settings = {"plays": 300, "only": ("sinusoid",), "seed": 3, "alpha": 1e-6}
    assert not audit(victim, ((8,),), Claim((proven,)), **settings).refuted
    assert audit(victim, ((8,),), Claim((Entry(1.0, 1.0, 1),)), **settings).refuted


def test_without_noise_a_turn_gives_the_canary_back_at_its_length():
    victim = EngineTurn({"method": "dpsgd", "correlation_bands": 4}, 0.0, grids=((8,),))
    unit = directions(((8,),), seed=1)["random"]
    for _ in range(3):
        np.testing.assert_allclose(victim(np.vstack([100 * unit, np.zeros((3, 8))])), unit, atol=1e-5)


def test_the_alarm_rings_for_gross_errors_and_not_otherwise():
    """At ε below 1 nobody guesses right; with a 300th of the noise all are found, and so the claim falls."""
    honest = one_run(*_digits(300), {"method": "dpsgd"}, 8.0, alpha=1e-7)
    assert not honest.refuted
    assert honest.guesses == 60

    def a_300th(patch):
        draw = bugs.noise.SecretSource.normal
        patch.setattr(bugs.noise.SecretSource, "normal", lambda self, *rest: draw(self, *rest) / 300)

    with bugs.planted(a_300th):
        broken = one_run(*_digits(300), {"method": "dpsgd"}, 8.0, alpha=1e-3, seed=0)
    assert broken.refuted
    assert broken.audited_epsilon_lower > broken.claimed_epsilon


QUICK = Effort(plays=600, alpha=1e-4, seed=1)


#: seen in many plays only; `tests/test_mutants.py` plants each of them for a test that sees it at once
FAINT = {
    bugs.half_spectrum_without_root_two,
    bugs.noise_divided_by_the_batch,
    bugs.empty_batches_skipped,
    bugs.layers_that_share_a_norm_counted_once,
    bugs.accountant_fed_another_sigma,
    bugs.weights_charged_at_their_mean,
    bugs.forwards_clipped_one_by_one,
}
ROWS = [pytest.param(row, marks=pytest.mark.slow) if row.bug in FAINT else row for row in SELF_TEST]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_planted_bug_is_caught(row):
    """`python tests/planted/record.py` does so without a seed, and each game once more without its bug."""
    assert row.run(QUICK) is not None


@pytest.mark.parametrize("row", {r.check: r for r in SELF_TEST}.values(), ids=lambda row: row.check.__name__)
def test_no_check_speaks_up_without_a_bug(row):
    assert row.run(replace(QUICK, plays=160), with_bug=False) is None


def test_patches_are_taken_back():
    before = bugs.spectrum.BlockView.noise_parts
    with bugs.planted(bugs.real_noise_only):
        assert bugs.spectrum.BlockView.noise_parts is not before
    assert bugs.spectrum.BlockView.noise_parts is before
    with bugs.planted(bugs.divisor_from_the_batch_that_was_drawn):
        assert "expected_batch_size" in vars(bugs.optimizer.PrivateOptimizer)
    assert "expected_batch_size" not in vars(bugs.optimizer.PrivateOptimizer)
