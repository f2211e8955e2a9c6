"""What layers hand over in bfloat16 gives the gradients that copies of it in single precision give."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gredp import PrivacyEngine
from gredp.gradient.graph import moments
from gredp.gradient.per_sample import Products
from gredp.gradient.rules import convolution_with_bias, group_norm
from oracles import clipped_sum, flat, per_sample_gradients, wavy

CONVOLUTIONS = {
    "as large": nn.Conv2d(4, 6, 3, padding=1),
    "strided": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "dilated, in groups": nn.Conv2d(4, 6, 3, dilation=2, groups=2),
    "around a ring": nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
    "a small map": nn.Conv2d(4, 6, 8),
    "one position": nn.Conv2d(4, 6, 1),
}


def maps(layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 4, 9, 9, generator=generator)
    with torch.no_grad():
        g = torch.randn(layer(x).shape, generator=generator)
    return x.to(dtype), g.to(dtype)


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("spectral", [False, True])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_take_bfloat16_to_the_last_bit(kind, spectral, views):
    layer, factors = CONVOLUTIONS[kind], torch.linspace(0.1, 1, 6 // views)
    x, g = maps(layer)
    half, single = (
        {
            name: gradient.merge_views(views).compact(spectral, Products(rounded=True))
            for name, gradient in convolution_with_bias(layer, *pair).items()
        }
        for pair in ((x, g), (x.float(), g.float()))
    )
    for name in ("weight", "bias"):
        ours, theirs = half[name], single[name]
        assert ours.like.dtype == torch.float32
        assert torch.equal(ours.squared_norm(), theirs.squared_norm())
        assert torch.equal(ours.grid_energy(), theirs.grid_energy())
        assert torch.equal(ours.weighted_sum(factors), theirs.weighted_sum(factors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_group_norm_takes_the_moments_of_its_forward(dtype):
    layer = nn.GroupNorm(2, 4)
    layer = layer.double() if dtype == torch.float64 else layer
    x, g = maps(layer.to(torch.float32)) if dtype == torch.bfloat16 else maps(layer.float(), dtype)
    layer = layer.to(torch.promote_types(dtype, torch.float32))
    known = moments(layer(x.requires_grad_()))
    assert known is not None
    wide = x.detach().unflatten(1, (2, 2)).double().flatten(2)
    torch.testing.assert_close(known[0].double(), wide.mean(2), rtol=1e-5, atol=1e-6)
    found, again = group_norm(layer, x.detach(), g, known), group_norm(layer, x.detach(), g)
    for name in ("weight", "bias"):
        assert found[name].like.dtype == again[name].like.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(found[name].dense(), again[name].dense(), rtol=2e-6, atol=2e-6)


def test_moments_are_of_group_norms_that_autograd_has_seen():
    layer, x = nn.GroupNorm(2, 4), torch.randn(3, 4, 5, 5)
    assert moments(layer.requires_grad_(False)(x)) is None  # nothing to differentiate
    assert moments(F.relu(layer(x.requires_grad_()))) is None
    assert moments(layer.bfloat16()(x.bfloat16())) is None  # rounded
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda _: pytest.fail("unpacked")):
        assert moments(layer.float()(x)) is None


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: F.relu(self.norm(self.first(y))), x, use_reentrant=False)
        return self.last(h.mean((2, 3)))


@pytest.mark.parametrize("model", [Checkpointed(), nn.Sequential(nn.GroupNorm(1, 2), nn.Flatten())])
def test_group_norm_without_moments_is_clipped_as_ever(model):
    """In a checkpoint, and first of all layers, where the input asks for no gradient."""
    model, x = copy.deepcopy(model), torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(4))
    gradients = per_sample_gradients(model, x)
    expected = clipped_sum(gradients, flat(gradients, 0.5))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=len(x)),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        sample_rate=1.0,
    )
    for (batch,) in loader:
        wavy(model(batch)).mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close((parameter.grad * len(x)).double(), expected[name], rtol=1e-4, atol=1e-5)
