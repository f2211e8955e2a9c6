"""Records made to be rounded away: no clip misses them, and they take nothing from the others' sum.

N with the records of an attacker who knows floating point: terms so large that what is left of them after
they cancel is rounding, of the norm as well as of the sum that all records share.
"""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from gredp import BlockCirculantLinear, WSConv2d
from gredp.gradient import factored
from gredp.gradient.clip import clip
from gredp.gradient.norms import squares
from oracles import dft
from worlds import make_private

CLIP = 1.0

# ------------------------------------------------------------------ not by the last digit

LAYERS = {
    "linear": (lambda: nn.Linear(300, 200), (300,)),
    "positions": (lambda: nn.Linear(64, 48), (16, 64)),
    "long": (lambda: nn.Linear(512, 256), (4, 512)),
    "embedding": (lambda: nn.Embedding(7, 200), (5,)),
    "many channels": (lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 8, 8)),
    "few channels": (lambda: nn.Conv2d(3, 16, 3, padding=1), (3, 32, 32)),
    "gram": (lambda: nn.Conv2d(128, 128, 3, padding=1), (128, 4, 4)),
    "one axis": (lambda: nn.Conv1d(8, 16, 5), (8, 50)),
    "circulant": (lambda: BlockCirculantLinear(64, 32, 8), (64,)),
    "long blocks": (lambda: BlockCirculantLinear(256, 128, 128), (3, 256)),
    "standardised": (lambda: WSConv2d(8, 8, 3), (8, 6, 6)),
    "group norm": (lambda: nn.GroupNorm(4, 16), (16, 9, 9)),
    "layer norm": (lambda: nn.LayerNorm(200), (10, 200)),
}
METHODS = {
    "dpsgd": {},
    "spectral_dp": {"method": "spectral_dp"},
    "shaped": {"method": "gredp", "noise": "shaped"},
}
ROUNDED = {"rounded": {"precision": "bf16"}, "rounded shaped": {**METHODS["shaped"], "precision": "bf16"}}
KEPT = ("positions", "many channels", "few channels", "one axis")


@pytest.mark.parametrize(
    ("layer", "method"), [*product(LAYERS, METHODS), *product(KEPT, ROUNDED)], ids="-".join
)
def test_what_a_record_adds_is_never_longer_than_the_clip_norm(layer, method):
    """By the double-precision norm, in the weighted domain, of what its factor makes of it in single."""
    torch.manual_seed(0)
    build, shape = LAYERS[layer]
    records = 24
    size = 10 ** (3 * torch.rand(records, *[1] * len(shape)))
    x = torch.randint(7, (records, *shape)) if layer == "embedding" else torch.randn(records, *shape) * size
    model, optimizer, _, _ = make_private(
        build(), (x, x), clip=CLIP, loss_reduction="sum", **(METHODS | ROUNDED)[method]
    )
    step, out = optimizer.private_step, model(x)
    if step.learned is not None:
        step.learned._squared = 0.1 + 3 * torch.rand_like(step.learned._squared)
    (100 * out * torch.randn_like(out)).sum().backward()
    with torch.no_grad():
        clipped = clip(optimizer.capture.take(), step.plan, step.block_views, step.squared_weights)
        longest = 0.0
        for i in range(records):
            square = 0.0
            for name, gradient in clipped.gradients.items():
                one = torch.where(torch.arange(records) == i, clipped.factors[name], 0.0).to(gradient.like)
                view, weights = step.block_views[name], step.squared_weights[name].double()
                if view.columns is not None:  # all of them are kept, and all but the first stand for two
                    energy = gradient.band_sum(one, view).to(torch.complex128).abs().square()
                    weights = 2 - (torch.arange(view.columns) == 0).double()
                elif view.groups is not None:
                    energy = dft(gradient.weighted_sum(one).double(), view.axes).abs().square()
                    weights = weights[view.groups].view(view.block.grid)
                else:
                    energy = gradient.weighted_sum(one).double().square()
                square += float((energy * weights).sum())
            longest = max(longest, square**0.5)
    assert CLIP * (1 - 2e-4) < longest <= CLIP


@pytest.mark.parametrize("length", [1, 63, 64, 100, 5000])
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e18, 1e30])
def test_sums_of_squares_are_exact_to_a_piece_and_never_vanish(length, size):
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(200_000 // length, length, generator=generator) * size
    m[0], m[1, 0] = 0, torch.inf
    truth = m.double().square().sum(1)
    found = squares(m)
    assert found[0] == 0
    assert found[1] == torch.inf
    assert ((found / truth)[2:] - 1).abs().max() <= 64 * 2**-24


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
        assert moved <= CLIP * (1 + 1e-6), (float(moved), float(alone.norm()))


def build_like(model: nn.Module, build) -> nn.Module:
    """The same weights without the hooks."""
    fresh = build()
    fresh.load_state_dict(model.state_dict())
    return fresh


def test_positions_that_cancel_where_no_gradient_is_kept(monkeypatch):
    monkeypatch.setattr(factored, "KEPT", 0)
    torch.manual_seed(0)
    x = torch.rand(200, 8, 64) * 0.1
    x[-1] = 0
    model = OverPositions(nn.Linear(64, 8, bias=False))
    alone = released(model, x)
    x[-1] = opposite(2.0**40, 64).repeat(1, 4, 1)[0]
    again = build_like(model, lambda: OverPositions(nn.Linear(64, 8, bias=False)))
    assert (released(again, x) - alone).norm() <= CLIP * (1 + 1e-6)


@pytest.mark.parametrize("method", [{}, {"method": "gredp", "noise": "shaped"}])
@pytest.mark.parametrize("width", [1024, 4096, 16384])
def test_long_products_that_are_rounded_the_same_way_do_not_pass_the_clip(width, method):
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        size, more = torch.rand(2, generator=generator).tolist()
        x = torch.full((1, 2, width), 0.5 + size) * 1e4
        x[:, 1] *= -(1 + 0.003 + 0.005 * more)
        model = OverPositions(nn.Linear(width, 8, bias=False))
        assert released(model, x, **method).norm() <= CLIP * (1 + 1e-6)


def test_an_ordinary_record_is_clipped_to_its_own_norm():
    """The share that counts as left is far below what canceling leaves of natural gradients."""
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

    assert moved_by_one(1000, step) <= CLIP * (1 + 1e-6)


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
        assert model.layer.weight.grad.norm() <= CLIP * (1 + 1e-6)
