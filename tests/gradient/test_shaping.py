"""Shaped noise: what it saves, what it learns, and that its privacy does not depend on either."""

import math

import pytest
import torch
import torch.nn.functional as F

import oracles
from gredp import GredpError
from gredp.app.data import load
from gredp.app.models.sequential import model3
from gredp.gradient.clip import energies
from gredp.gradient.shaping import LearnedShape, relative_noise_energy
from gredp.gradient.step import _view
from gredp.mechanisms import Shaping
from gredp.mechanisms.plan import StepPlan
from gredp.privacy.certificate import Block
from gredp.spectrum import BlockView, frequency_groups
from worlds import make_private, one_step, records, small_model


def true_energies(model, optimizer, x, y) -> torch.Tensor:
    """`[groups]`: the mean record's energy in each group; a measurement, not part of training."""
    F.cross_entropy(model(x), y).backward()
    gradients = optimizer.capture.take().gradients
    with torch.no_grad():
        views = optimizer.private_step.block_views
        return torch.cat([energies(gradients[name], view) for name, view in views.items()], 1).mean(0)


@pytest.mark.slow
def test_shaping_saves_noise_on_real_gradients_of_model3():
    """Handwritten digits on Model-3's shape: at most 0.6 of white noise's energy, with learned weights."""
    digits = load("digits")
    x = F.interpolate(digits.x_train[:64], scale_factor=4).repeat(1, 3, 1, 1) * 2 - 1
    y = digits.y_train[:64]
    torch.manual_seed(0)
    model = model3()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(12):  # away from the start, where almost all energy sits in the last bias
        plain.zero_grad()
        F.cross_entropy(model(x), y).backward()
        plain.step()
    plain.zero_grad()
    model, optimizer, _, _ = make_private(
        model, (x, y), noise_multiplier=0.5, method="gredp", noise="shaped", seed=1
    )
    step = optimizer.private_step
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    learned = torch.cat(list(step.squared_weights.values()))
    saved = relative_noise_energy(step.learned.sizes, learned, true_energies(model, optimizer, x, y))
    assert saved <= 0.6
    # The same from noise that is really drawn: its energy, at weights that keep the mean record's norm.
    drawn = sum(
        float(
            view.real_part(view.spectrum(torch.randn(view.block.shape)) * view.spread(w.rsqrt()))
            .square()
            .sum()
        )
        for view, w in zip(step.block_views.values(), step.squared_weights.values())
    )
    assert drawn / sum(p.numel() for p in model.parameters()) <= 0.6
    assert abs(optimizer.noise_multiplier - 0.5) < 1e-12


def test_relative_energy_is_one_for_white_noise_and_least_at_the_fourth_root():
    generator = torch.Generator().manual_seed(0)
    n = torch.rand(9, generator=generator) + 0.1
    e = torch.rand(9, generator=generator) ** 4 + 1e-3
    best = float((n * e).sqrt().sum() ** 2 / (n.sum() * e.sum()))
    assert abs(relative_noise_energy(n, torch.full((9,), 3.0), e) - 1) < 1e-6
    assert abs(relative_noise_energy(n, (e / n) ** -0.5, e) - best) < 1e-6
    for exponent in (0.1, 0.3, 0.7, 0.9):
        assert relative_noise_energy(n, (e / n) ** -exponent, e) > best


def one_shape(exponent: float, preconditioner: float = 0.0) -> LearnedShape:
    block = Block.whole("w", "w", (3, 6), 1)
    views = {"w": BlockView(block, groups=frequency_groups((6,), 16))}
    return LearnedShape(Shaping(exponent, preconditioner), views, expected_batch_size=100)


def test_weights_follow_the_released_shares():
    shares = torch.tensor([0.9, 0.4, 0.15, 0.05])
    shape = one_shape(0.5, 0.5)
    shape.learn(shares * 100, 0.0)
    m = shares.double().square() / shape.sizes
    ratio = shape._squared / m.pow(-0.5)
    torch.testing.assert_close(ratio, ratio[:1].expand(4), rtol=1e-6, atol=0)
    # The mean record keeps its norm, so that the clipping norm means what it means for white noise.
    assert abs(float((shape._squared * shares.square()).sum() / shares.square().sum()) - 1) < 1e-6
    p = shape._precondition / m.pow(-0.5)
    torch.testing.assert_close(p, p[:1].expand(4), rtol=1e-6, atol=0)


def test_equal_exponents_step_along_the_weights_themselves():
    """P ∝ w² turns w⁻¹ ⊙ into w ⊙ (docs/theory.md, section 3), up to a scale."""
    shape = one_shape(0.3, 0.3)
    shape.learn(torch.tensor([90.0, 40.0, 15.0, 5.0]), 0.0)
    ratio = shape._precondition / shape._squared
    torch.testing.assert_close(ratio, ratio[:1].expand(4), rtol=1e-12, atol=0)
    # The mean record keeps its norm under P, so that the learning rate means what it means for P = 1.
    shares = torch.tensor([0.9, 0.4, 0.15, 0.05]).double()
    kept = (shape._precondition * shares).square().sum() / shares.square().sum()
    assert abs(float(kept) - 1) < 1e-6


def two_blocks(groups: str, window: int = 50) -> LearnedShape:
    blocks = [Block.whole("a", "a", (3, 6), 1), Block.whole("b", "b", (2, 5), 1)]
    step = StepPlan(tuple(blocks), (), "kernel", shaping=Shaping(groups=groups, window=window))
    return LearnedShape(step.shaping, {b.name: _view(b, step) for b in blocks}, expected_batch_size=100)


def test_groups_say_what_may_differ():
    generator = torch.Generator().manual_seed(0)
    shares = {name: torch.rand(n, generator=generator) * 100 for name, n in (("all", 7), ("layer", 2))}
    both, layer, frequency = (two_blocks(g) for g in ("both", "layer", "frequency"))
    assert (both.counts, layer.counts, frequency.counts) == ([4, 3], [1, 1], [4, 3])
    both.learn(shares["all"], 0.0)
    layer.learn(shares["layer"], 0.0)
    frequency.learn(shares["all"], 0.0)
    # Within a layer alike up to a scale; that scale leaves each layer of the mean record its norm.
    for start, end in ((0, 4), (4, 7)):
        ratio = frequency._squared[start:end] / both._squared[start:end]
        torch.testing.assert_close(ratio, ratio[:1].expand(end - start), rtol=1e-12, atol=0)
        e = shares["all"][start:end].double().square()
        assert abs(float((frequency._squared[start:end] * e).sum() / e.sum()) - 1) < 1e-12
    assert layer._squared[0] != layer._squared[1]


@pytest.mark.parametrize("window", [0, 1, 5])
def test_energies_are_a_faded_mean_of_the_releases(window):
    """Against a loop that weighs each release by (1 − 1/window)^age."""
    generator = torch.Generator().manual_seed(1)
    releases = [100 * torch.rand(7, generator=generator).double() for _ in range(9)]
    stds = [1.0, 3.0, 2.0] * 3
    shape = two_blocks("both", window)
    for release, std in zip(releases, stds):
        shape.learn(release, std)
    fade = [(1 - 1 / window) ** age if window else 1.0 for age in range(8, -1, -1)]
    mean = sum(f * r for f, r in zip(fade, releases)) / sum(fade) / 100
    noise = math.sqrt(sum((f * s) ** 2 for f, s in zip(fade, stds))) / sum(fade) / 100
    share = mean.clamp(min=max(noise, 0.02 / math.sqrt(7)))
    weights = (share.square() / shape.sizes).pow(-0.5)
    ratio = shape._squared / weights
    torch.testing.assert_close(ratio, ratio[:1].expand(7), rtol=1e-12, atol=0)
    again = two_blocks("both", window)
    again.restore({name: value.clone() for name, value in shape.state().items()})
    for one in (shape, again):
        one.learn(releases[0], 1.0)
    assert torch.equal(shape._squared, again._squared)


def test_a_window_follows_energies_that_move():
    """After a change the weights of a short memory are the nearer ones to those of the new energies."""
    before, after = torch.rand(7).double() * 100, torch.rand(7).double() * 100
    found = []
    for window in (0, 10):
        shape = two_blocks("both", window)
        for release in [before] * 50 + [after] * 30:
            shape.learn(release, 0.0)
        found.append(shape._squared)
    new = two_blocks("both")
    new.learn(after, 0.0)
    assert (found[1].log() - new._squared.log()).norm() < 0.5 * (found[0].log() - new._squared.log()).norm()


@pytest.mark.parametrize("options", [{"groups": "rows"}, {"window": -1}, {"window": 1.5}])
def test_shapes_that_cannot_be_are_refused(options):
    with pytest.raises(GredpError) as error:
        Shaping(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("groups", ["both", "layer", "frequency"])
def test_a_preconditioned_step_equals_dense_transforms(groups):
    """Q: linear, convolutional and circulant layers, random w and P, noise off, in float64."""
    x, y = records(6)
    model = small_model().double()
    shaped = {"method": "gredp", "noise": "shaped", "groups": groups, "preconditioner": 0.5}
    model, optimizer, _, _ = make_private(model, (x.double(), y), clip=0.05, **shaped)
    step, generator = optimizer.private_step, torch.Generator().manual_seed(2)
    count = len(step.learned._squared)
    step.learned._squared = torch.rand(count, generator=generator).double() * 3 + 0.1
    step.learned._precondition = torch.rand(count, generator=generator).double() * 3 + 0.1
    w2, p = step.squared_weights, step.learned.preconditioner
    whole = {
        n: tuple(
            t[n][torch.zeros(math.prod(v.block.grid)).long() if v.groups is None else v.groups]
            for t in (w2, p)
        )
        for n, v in step.block_views.items()
    }
    whole = {
        n: tuple(t.double().view(step.block_views[n].block.grid) for t in pair) for n, pair in whole.items()
    }
    found = one_step(model, optimizer, x.double(), y)
    rows = oracles.per_sample_gradients(model, x, y, F.cross_entropy)

    def weighted(name, i, g):
        return oracles.dft(g, step.block_views[name].axes) * whole[name][0].sqrt()

    for name, total in oracles.clipped_sum(rows, oracles.flat(rows, 0.05), measure=weighted).items():
        axes = step.block_views[name].axes
        truth = oracles.inverse_dft(oracles.dft(total, axes) * whole[name][1], axes).real
        torch.testing.assert_close(found[name], truth, rtol=1e-5, atol=1e-7)


def test_no_exponent_is_white_and_noise_beyond_the_shares_is_tamed():
    flat = one_shape(0.0)
    flat.learn(torch.tensor([90.0, 40.0, 15.0, 5.0]), 0.0)
    torch.testing.assert_close(flat._squared, torch.ones(4).double())
    wild = one_shape(0.5)
    wild.learn(torch.tensor([90.0, -500.0, 0.0, 5.0]), 400.0)
    assert torch.isfinite(wild._squared).all()
    assert (wild._squared > 0).all()


def test_shares_of_a_record_have_norm_one_at_most():
    """The sensitivity of the energy query."""
    from gredp.gradient.clip import ClippedSpectra
    from gredp.gradient.shaping import energy_shares

    block = Block.whole("w", "w", (3, 6), 1)
    views = {"w": BlockView(block, groups=frequency_groups((6,), 16))}
    rows = torch.tensor(
        [[1e8, 3.0, 0.0, 1.0], [0.0, 0, 0, 0], [float("nan"), 1, 1, 1], [2e-9, 1e-9, 0, 5e-9]]
    )
    for row in rows:
        kept = torch.isfinite(row).all()[None]
        one = energy_shares(ClippedSpectra({}, {}, {"w": row[None]}, kept, kept[:, None]), views)
        assert float(one.norm()) <= 1 + 1e-6
        assert torch.isfinite(one).all()
