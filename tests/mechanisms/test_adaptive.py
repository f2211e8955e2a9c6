"""Clipping norms that follow a quantile: what is counted, released, learned, kept and refused."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from gredp import GredpError
from gredp.mechanisms import mechanism
from gredp.mechanisms.plan import Quantile
from gredp.privacy.certificate import Block
from worlds import batches, make_private, no_gradient_step, one_step, records, small_model, world

LENGTHS = torch.tensor([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8])


def linear(clipping="adaptive", clip=1.0, layers=1, **options):
    """Records whose gradient is their input, in each of the layers."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(layers))

        def forward(self, x):
            return sum(layer(x * 10**i).flatten() for i, layer in enumerate(self.layers))

    x = LENGTHS[:, None] * torch.tensor([[1.0, 0.0, 0.0]])
    return *make_private(Sum(), (x,), clip=clip, clipping=clipping, **options), x


def step_on(model, optimizer, x):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()


def test_a_step_clips_counts_and_moves_its_norm_as_written():
    """Against Andrew et al. by hand, noise off, and in parts."""
    model, optimizer, _, _, x = linear(target_unclipped_quantile=0.7, clipbound_learning_rate=0.3)
    norm = 1.0
    for _ in range(30):
        lengths = LENGTHS.double().numpy()
        clipped = np.minimum(lengths, norm).sum()
        optimizer.zero_grad()
        for part, skip in ((x[:3], True), (x[3:], False)):
            model(part).mean().backward()
            optimizer.signal_skip_step(skip)
            optimizer.step()
        assert float(model.layers[0].weight.grad[0, 0]) * len(x) == pytest.approx(clipped, rel=1e-5)
        norm *= math.exp(-0.3 * (np.mean(lengths <= norm) - 0.7))
        assert optimizer.max_grad_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("clipping", ["adaptive", "adaptive_per_layer"])
@pytest.mark.parametrize("first", [0.01, 100.0])
def test_norms_settle_at_the_quantile_with_noise(clipping, first):
    """From a norm that is far off; of two layers, the second's gradients are ten times longer."""
    layers = 1 if clipping == "adaptive" else 2
    options = {"count_noise": 1.0, "noise_multiplier": 0.3, "target_unclipped_quantile": 0.5}
    model, optimizer, _, _, x = linear(clipping, first, layers, **options)
    seen = []
    for step in range(300):
        step_on(model, optimizer, x)
        if step >= 150:
            seen.append(optimizer.private_step.learned.log_ratio.exp() * first / math.sqrt(layers))
    middle = torch.stack(seen).log().mean(0).exp()
    for layer, norm in enumerate(middle.tolist()):
        assert 0.8 <= norm / 10**layer <= 1.6  # half of the records lie below


def test_a_neighbor_moves_the_counts_by_half_for_each_layer_and_a_bad_record_too():
    """N for the query, whatever the record: over all layers √L/2, never more."""
    model, optimizer, _, _, x = linear("adaptive_per_layer", layers=2)
    step = optimizer.private_step

    def counts(data):
        model(data).mean().backward()
        step.begin_sum(step.plan)
        step.accumulate(optimizer.capture.take())
        return step._bounded.shares

    base = counts(x)
    within = [int((scale * LENGTHS <= math.sqrt(0.5)).sum()) for scale in (1, 10)]
    assert base.tolist() == [within[0] - 4, within[1] - 4]
    for size in (0.0, 1e-3, 0.5, 1e6, 1e38, math.inf, math.nan):
        moved = counts(torch.cat([x, torch.full((1, 3), size)])) - base
        assert moved.abs().tolist() == [0.5, 0.5]


def test_noise_follows_the_norm_and_counts_are_noised():
    """V at a norm far from the first: σ_g·C_t on gradients; counts have the certified deviation."""
    model = nn.Sequential(nn.Linear(200, 100, bias=False))
    model, optimizer, _, engine = make_private(
        model, (torch.ones(2, 200),), noise_multiplier=1.7, clip=0.8, clipping="adaptive"
    )
    learned, released = optimizer.private_step.learned, []
    learned.log_ratio = torch.tensor([math.log(7.0)], dtype=torch.float64)
    learned.learn = lambda counts, _: released.append(float(counts))
    for _ in range(400):
        noise = no_gradient_step(model, optimizer, torch.ones(2, 200))["0.weight"]
    z_g = 1.7 * math.sqrt(1.01)
    assert float(noise.std()) == pytest.approx(z_g * 0.8 * 7, rel=0.03)
    # two records without gradient are within any norm; 6 standard errors of a deviation from 400 draws
    assert np.std(np.array(released) - 1) == pytest.approx(10 * z_g / 2, rel=6 / math.sqrt(800))
    assert engine.ledger.entries[0].noise_multiplier == pytest.approx(1.7)
    assert [r.name for r in optimizer.certificate.releases] == ["all", "records within the norm"]


def test_norms_are_resumed_and_nothing_is_believed(tmp_path):
    settings = {"clipping": "adaptive_per_layer", "noise_multiplier": 1.0}
    model, optimizer, engine = world(**settings)
    for x, y in batches(3):
        one_step(model, optimizer, x, y)
    engine.save(tmp_path / "run")
    norms = optimizer.max_grad_norm
    engine.detach()
    model, optimizer, engine = world(**settings)
    assert optimizer.max_grad_norm != norms
    engine.load(tmp_path / "run")
    assert optimizer.max_grad_norm == norms
    one_step(model, optimizer, *batches(1)[0])
    learned = optimizer.private_step.learned
    for bad in (learned.log_ratio[:1], learned.log_ratio + math.nan, learned.log_ratio + 99):
        with pytest.raises(GredpError, match="adapted norms"):
            learned.restore({"log_ratio": bad})
    engine.detach()
    _, _, engine = world(**settings, target_unclipped_quantile=0.6)
    with pytest.raises(GredpError, match="another adaptive"):
        engine.load(tmp_path / "run")


def test_bounds_hold_and_the_norm_cannot_be_set():
    model, optimizer, _, _, x = linear(clip=2.0, min_clipbound=1.9, max_clipbound=2.1)
    for _ in range(9):
        step_on(model, optimizer, x)
    assert optimizer.max_grad_norm == pytest.approx(1.9)
    with pytest.raises(GredpError, match="sets max_grad_norm by itself"):
        optimizer.max_grad_norm = 3.0
    optimizer.noise_multiplier = 0.5
    step_on(model, optimizer, x)
    assert optimizer.ledger.entries[-1].noise_multiplier == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_unclipped_quantile": 1.0}, "between 0 and 1, not 1.0"),
        ({"count_noise": 0.0}, "above 0 and finite"),
        ({"clipbound_learning_rate": -1.0}, "above 0 and finite"),
        ({"min_clipbound": 2.0, "max_clipbound": 1.0}, "below max_clipbound, not 2.0 and 1.0"),
        ({"unclipped_num_std": 5.0}, "count_noise is the noise on the counts"),
        ({"claim": "paper"}, "no claim about adaptive clipping"),
        ({"method": "spectral_dp"}, "use dpsgd or gredp"),
        ({"method": "gredp", "noise": "shaped"}, "must be flat or automatic"),
        ({"clipping": "flat", "count_noise": 1.0}, "has no option count_noise"),
    ],
)
def test_what_has_no_certificate_is_refused(options, words):
    with pytest.raises(GredpError, match=words) as error:
        mechanism(**({"method": "dpsgd", "clipping": "adaptive"} | options))
    assert "\n" not in str(error.value)


def test_without_noise_nothing_is_proven():
    plan = mechanism("dpsgd", clipping="adaptive").plan([Block.whole("w", "w", (4,), 1)], 1.0, 0.0, 8)
    assert plan.quantile == Quantile()
    assert plan.certificate().noise_multiplier == 0.0
    _, optimizer, _, _ = make_private(small_model(), records(6), clipping="adaptive", noise_multiplier=0.0)
    assert optimizer.noise_multiplier == 0.0
