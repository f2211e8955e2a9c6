"""Records made to be rounded away: no clip misses them, and they take nothing from the others' sum.

N with the records of an attacker who knows floating point: terms so large that what is left of them after
they cancel is rounding, of the norm as well as of the sum that all records share.
"""

import pytest
import torch
from torch import Tensor, nn

from gredp import BlockCirculantLinear, WSConv2d
from gredp.gradient import per_sample
from worlds import make_private

CLIP = 1.0


class OverPositions(nn.Module):
    """The mean over positions: their gradients meet in one parameter, where they may cancel."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(1)


def released(model: nn.Module, x: Tensor, **options) -> Tensor:
    """The sum over the records of clipped gradients, without noise."""
    model, optimizer, _, _ = make_private(model, (x, torch.zeros(len(x))), clip=CLIP, **options)
    weights = torch.linspace(-1, 1, model(x).flatten(1).shape[1], dtype=x.dtype)
    (model(x).flatten(1) @ weights).mean().backward()
    optimizer.step()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double() * len(x)


def tokens(count: int, width: int) -> Tensor:
    return torch.randn(count, 2, width) + 0.5


def opposite(size: float, width: int) -> Tensor:
    return size * torch.stack([torch.ones(width), -torch.ones(width)])[None]


def checkers(size: float, side: int) -> Tensor:
    sign = (-1.0) ** torch.arange(side)
    return size * (sign[:, None] * sign)[None, None]


ATTACKS = {
    "circulant": (lambda: OverPositions(BlockCirculantLinear(8, 8, 4, bias=False)), tokens(200, 8), {}),
    "out of the band": (
        lambda: nn.Linear(128, 3, bias=False),
        torch.randn(200, 128) * 0.1 + 0.1,
        {"method": "spectral_dp"},
    ),
    "kernel out of the band": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 4, stride=4, bias=False), nn.Flatten()),
        torch.rand(200, 1, 4, 4),
        {"method": "spectral_dp"},
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 1, bias=False), nn.AvgPool2d(4), nn.Flatten()),
        torch.rand(200, 1, 4, 4),
        {},
    ),
    "standardised": (
        lambda: nn.Sequential(WSConv2d(1, 3, 3, bias=False), nn.AvgPool2d(2), nn.Flatten()),
        torch.rand(200, 1, 4, 4),
        {},
    ),
}


@pytest.mark.parametrize("size", [2.0**20, 2.0**27, 2.0**40])
@pytest.mark.parametrize("name", ATTACKS)
def test_terms_that_cancel_take_nothing_from_other_records(name, size):
    torch.manual_seed(0)
    build, x, options = ATTACKS[name]
    record = {
        2: checkers(size, 128)[0, 0, :1],
        3: opposite(size, 8),
        4: checkers(size, 4),
    }[x.dim()]
    model = build()
    alone = released(model, x, **options)
    for joined in (torch.cat([record, x]), torch.cat([x, record])):
        # 200 records and one more: the divisor of the released mean was taken out above
        moved = (released(build_like(model, build), joined, **options) - alone).norm()
        assert moved <= CLIP * (1 + 1e-3), (float(moved), float(alone.norm()))


def build_like(model: nn.Module, build) -> nn.Module:
    """The same weights without the hooks."""
    fresh = build()
    fresh.load_state_dict(model.state_dict())
    return fresh


def test_positions_that_cancel_where_no_gradient_is_kept(monkeypatch):
    monkeypatch.setattr(per_sample, "KEPT", 0)
    torch.manual_seed(0)
    x = torch.rand(200, 8, 64) * 0.1
    x[-1] = 0
    model = OverPositions(nn.Linear(64, 8, bias=False))
    alone = released(model, x)
    x[-1] = opposite(2.0**40, 64).repeat(1, 4, 1)[0]
    again = build_like(model, lambda: OverPositions(nn.Linear(64, 8, bias=False)))
    assert (released(again, x) - alone).norm() <= CLIP * (1 + 1e-3)


@pytest.mark.parametrize("method", [{}, {"method": "gredp", "noise": "shaped"}])
@pytest.mark.parametrize("width", [1024, 4096, 16384])
def test_long_products_that_are_rounded_the_same_way_do_not_pass_the_clip(width, method):
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        size, more = torch.rand(2, generator=generator).tolist()
        x = torch.full((1, 2, width), 0.5 + size) * 1e4
        x[:, 1] *= -(1 + 0.003 + 0.005 * more)
        model = OverPositions(nn.Linear(width, 8, bias=False))
        assert released(model, x, **method).norm() <= CLIP * (1 + 1e-3)


def test_an_ordinary_record_is_clipped_to_its_own_norm():
    """The share that counts as left is far below what cancelling leaves of natural gradients."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 32, 32)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(3600, 2, bias=False)
    )
    assert released(model, x).norm() == pytest.approx(CLIP, rel=1e-5)


# ------------------------------------------------------------------ half precision


def moved_by_one(records: int, step) -> float:
    torch.manual_seed(0)
    x, weights = torch.randn(records, 32) + 1, torch.randn(64)
    return float((step(x, weights) - step(x[1:], weights)).norm())


@pytest.mark.parametrize("where", ["forward", "forward and backward", "everything"])
def test_autocast_changes_neither_norms_nor_sums(where):
    def step(x: Tensor, weights: Tensor) -> Tensor:
        torch.manual_seed(1)
        model, optimizer, _, _ = make_private(
            nn.Linear(32, 64, bias=False), (x, x), clip=CLIP, loss_reduction="sum"
        )
        cast = torch.autocast("cpu", torch.bfloat16)
        with cast:
            loss = (model(x).float() * weights).sum()
            if where != "forward":
                loss.backward()
            if where == "everything":
                optimizer.step()
        if where == "forward":
            loss.backward()
        if where != "everything":
            optimizer.step()
        return model.weight.grad.double()

    assert moved_by_one(1000, step) <= CLIP * (1 + 1e-3)


def test_a_record_that_half_precision_would_round_is_clipped_within_autocast():
    generator = torch.Generator().manual_seed(0)
    for more in (0.002, 0.006, 0.02):
        v = torch.randn(64, generator=generator)
        x = torch.stack([1e4 * v, -1e4 * (1 + more) * v])[None]
        model, optimizer, _, _ = make_private(
            OverPositions(nn.Linear(64, 64, bias=False)), (x, x), clip=CLIP, loss_reduction="sum"
        )
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().sum().backward()
            optimizer.step()
        assert model.layer.weight.grad.norm() <= CLIP * (1 + 1e-3)
