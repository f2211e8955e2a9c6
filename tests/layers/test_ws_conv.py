"""Standardized convolutions: what the kernels are, and that nothing huge slips past the clip."""

import math

import pytest
import torch
from torch import nn

from gredp import WSConv2d, to_spectral
from gredp.gradient.convolution import Correlation
from gredp.gradient.rules import standardized_convolution
from worlds import MECHANISMS, flat, make_private, one_step


def test_kernels_have_mean_zero_and_norm_one_and_the_scale_of_the_weights_does_not_matter():
    torch.manual_seed(0)
    layer, x = WSConv2d(3, 5, 3, padding=1), torch.randn(2, 3, 6, 6)
    units, _ = layer.standardized()
    with pytest.warns(DeprecationWarning, match="use standardized"):
        assert torch.equal(layer.standardised()[0], units)
    torch.testing.assert_close(units.mean(1), torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(units.norm(dim=1), torch.ones(5), atol=1e-4, rtol=0)
    kernel = torch.stack(
        [(w - w.mean()) / math.sqrt((w - w.mean()).square().sum() + 1e-6) for w in layer.weight.detach()]
    )
    truth = nn.functional.conv2d(x, kernel, layer.bias, padding=1)
    torch.testing.assert_close(layer(x), truth, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        layer.weight.mul_(7).add_(3)
    torch.testing.assert_close(layer(x), truth, rtol=1e-3, atol=1e-3)


def test_a_constant_kernel_is_no_division_by_zero():
    layer = WSConv2d(1, 1, 2, bias=False)
    nn.init.constant_(layer.weight, 0.3)
    out = layer(torch.randn(1, 1, 4, 4))
    out.sum().backward()
    assert out.eq(0).all()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8, 1e12])
@pytest.mark.parametrize("mechanism", ["dpsgd", "gredp shaped"])
def test_records_that_the_map_cancels_stay_within_the_clip(mechanism, scale):
    """N: constant images have gradients along the mean of the kernel, which the map takes to rounding."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, 5, 5), torch.arange(6) % 3
    model = nn.Sequential(WSConv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3))
    model, optimizer, _, _ = make_private(model, (x, y), clip=0.8, batch_size=6, **MECHANISMS[mechanism])
    if optimizer.private_step.learned is not None:
        optimizer.private_step.learned.learn = lambda *_: None  # one clip set for all that is compared
    base = flat(one_step(model, optimizer, x, y))
    for seed in range(5):
        extra = scale * torch.ones(1, 2, 5, 5) + torch.randn(1, 2, 5, 5) * (seed % 2)
        moved = flat(one_step(model, optimizer, torch.cat([x, extra]), torch.cat([y, y[:1]])))
        assert (moved - base).double().norm() <= 0.8 * (1 + 1e-6)


@torch.no_grad()
def test_the_allowance_covers_what_rounding_leaves():
    """A gradient along the mean of the kernels: exactly zero by the weights, whatever its size."""
    torch.manual_seed(0)
    layer = WSConv2d(1, 3, 2, bias=False)
    x = torch.ones(1, 1, 2, 2) * 1e6
    gradient = standardized_convolution(layer, x, torch.ones(1, 3, 1, 1))["weight"]
    assert isinstance(gradient.kernels, Correlation)
    left = gradient.weighted_sum(torch.ones(1)).double().norm()
    assert gradient.squared_norm().sqrt() >= 100 * left
    assert gradient.grid_energy().sum().sqrt() >= 100 * left
    ordinary = standardized_convolution(layer, torch.randn(1, 1, 2, 2), torch.randn(1, 3, 1, 1))["weight"]
    truth = ordinary.dense().double().square().sum()
    assert ordinary.squared_norm().detach().item() <= truth.detach().item() * (1 + 1e-6)


def test_spectral_networks_keep_their_standardized_convolutions():
    model = to_spectral(nn.Sequential(WSConv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 8)), 4)
    assert type(model[0]) is WSConv2d


def test_on_the_padded_grid_its_kernel_keeps_its_own():
    x, y = torch.randn(4, 1, 5, 5), torch.arange(4) % 3
    model = nn.Sequential(WSConv2d(1, 2, 3), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.Linear(8, 3))
    model, optimizer, _, _ = make_private(model, (x, y), **MECHANISMS["gredp padded"])
    grids = {block.name: block.grid for block in optimizer.private_step.plan.blocks}
    assert grids["0.weight"] == (3, 3)
    assert grids["1.weight"] == (3, 3)  # the padded input's
    one_step(model, optimizer, x, y)
