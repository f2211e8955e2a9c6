"""Shaped noise: what it saves, what it learns, and that its privacy does not depend on either."""

import torch
import torch.nn.functional as F

from gredp.data import load
from gredp.gradient.clip import energies
from gredp.gradient.shaping import LearnedShape, relative_noise_energy
from gredp.mechanisms import Shaping
from gredp.models.model3 import model3
from gredp.privacy.certificate import Block
from gredp.spectrum import BlockView, frequency_groups
from worlds import make_private


def true_energies(model, optimizer, x, y) -> torch.Tensor:
    """`[groups]`: the mean record's energy in each group; a measurement, not part of training."""
    F.cross_entropy(model(x), y).backward()
    gradients = optimizer.capture.take().gradients
    with torch.no_grad():
        views = optimizer.private_step.views
        return torch.cat([energies(gradients[name], view) for name, view in views.items()], 1).mean(0)


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
    saved = relative_noise_energy(step.shape.sizes, learned, true_energies(model, optimizer, x, y))
    assert saved <= 0.6
    # The same from noise that is really drawn: its energy, at weights that keep the mean record's norm.
    drawn = sum(
        float(
            view.real_part(view.spectrum(torch.randn(view.block.shape)) * view.spread(w.rsqrt()))
            .square()
            .sum()
        )
        for view, w in zip(step.views.values(), step.squared_weights.values())
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
        one = energy_shares(ClippedSpectra({}, {}, {"w": row[None]}, kept), views)
        assert float(one.norm()) <= 1 + 1e-6
        assert torch.isfinite(one).all()
