"""Several views of a record: averaged within it, clipped once; each fast way equals the loop over records."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import oracles
from gredp import BatchMemoryManager, GredpError, PrivacyEngine
from gredp.app.data.augment import DRAWS, augmented
from gredp.gradient.convolution import Correlation, gram, kernels
from gredp.gradient.factored import Outer
from worlds import MECHANISMS, flat, one_step, released, small_model

VIEWS = 3


@pytest.mark.parametrize("chunk", [1, 700, 1 << 20], ids=["one view", "some views", "all"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_every_way_of_a_convolution_equals_the_loop(chunk, groups, mode, monkeypatch):
    """Kernels with some views at a time, and Gram matrices, against ordinary weight gradients."""
    monkeypatch.setattr(kernels, "CHUNK", chunk)
    monkeypatch.setattr(gram, "CHUNK", chunk)
    torch.manual_seed(0)
    x, g = torch.randn(12, 4, 5, 6).double(), torch.randn(12, 6, 5, 3).double()
    pads, stride = (1, 0, 1, 1), (1, 2)
    weight = torch.zeros(6, 4 // groups, 3, 2, dtype=torch.float64, requires_grad=True)

    def kernel(i: int) -> torch.Tensor:
        y = F.conv2d(F.pad(x[i : i + 1], pads, mode=mode), weight, None, stride, groups=groups)
        return torch.autograd.grad(y, weight, g[i : i + 1])[0]

    truth = torch.stack([sum(kernel(i) for i in range(r, r + 4)) for r in range(0, 12, 4)])
    inputs = Correlation(x, g, (3, 2), stride, (1, 1), groups, pads, mode)
    found = inputs.merge_views(4)
    norms, energies = truth.flatten(1).square().sum(1), oracles.grid_energy(truth, 2)
    torch.testing.assert_close(found._materialized().dense(), truth)
    torch.testing.assert_close(gram.gram_norm(found), norms, rtol=1e-9, atol=0)
    torch.testing.assert_close(gram.gram_energy(found), energies, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.weighted_sum(torch.ones(3).double()), truth.sum(0))
    one = found.zero_unless(torch.tensor([False, True, False]))
    torch.testing.assert_close(one.dense()[1], truth[1])
    assert one.dense()[[0, 2]].eq(0).all()


@pytest.mark.parametrize("left", [1.0, 1e-3, 0.0])
def test_no_frequency_of_a_linear_layer_falls_short_where_views_oppose_each_other(left):
    """Σ_t l_t r_tᵀ of nearly constant l against r that nearly sum to zero, as in `test_sequences`."""
    generator = torch.Generator().manual_seed(0)
    held = torch.randn(6, 1, 300, generator=generator) + left * torch.randn(6, 16, 300, generator=generator)
    sign = torch.ones(16, 1)
    sign[::2] = -1
    r = torch.randn(6, 1, 128, generator=generator) * sign
    r = r + left * torch.randn(6, 16, 128, generator=generator)
    gradient = Outer(held * 1e-18, r * 1e18)
    truth = oracles.grid_energy(Outer(gradient.left.double(), gradient.right.double()).dense(), 1)
    found = gradient._gram_energy()
    assert (found >= truth * (1 - 1e-5)).all()
    if left == 1.0:
        assert (found <= truth * (1 + 2e-3)).all()


# ------------------------------------------------------------------ through the engine


class Jittered(Dataset):
    """Records whose transform is drawn anew each time, as a user's data set does it."""

    def __init__(self, x, y):
        self.x, self.y = x, y
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + torch.randn(self.x[i].shape, generator=self.generator), self.y[i]


def private(views: int, clip: float = 0.8, **options):
    generator = torch.Generator().manual_seed(0)
    data = Jittered(torch.randn(6, 1, 5, 5, generator=generator), torch.arange(6) % 4)
    model = small_model()
    return data, *PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=6),
        **({"noise_multiplier": 0.0, "max_grad_norm": clip, "views": views} | options),
    )


def seen(loader):
    return next(iter(loader))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mechanism", ["dpsgd", "dpsgd per layer", "gredp", "gredp shaped"])
def test_a_step_releases_the_clipped_sum_of_records(mechanism, reduction):
    _, model, optimizer, loader = private(VIEWS, loss_reduction=reduction, **MECHANISMS[mechanism])
    x, y = seen(loader)
    assert x.shape == (6 * VIEWS, 1, 5, 5)
    assert y.tolist() == [i % 4 for i in range(6) for _ in range(VIEWS)]
    assert not torch.equal(x[0], x[1])
    F.cross_entropy(model(x), y, reduction=reduction).backward()
    optimizer.step()
    scale = optimizer.expected_batch_size if reduction == "mean" else 1.0
    found = {n: p.grad * scale for n, p in model.named_parameters()}
    rows = oracles.of_records(model, x, VIEWS, targets=y, loss=F.cross_entropy)
    groups = oracles.by_layer(rows, 0.8) if "per layer" in mechanism else oracles.flat(rows, 0.8)
    for name, truth in oracles.clipped_sum(rows, groups).items():
        torch.testing.assert_close(found[name].double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mechanism", ["dpsgd", "gredp"])
def test_one_record_with_all_its_views_moves_the_sum_by_at_most_the_clip_norm(mechanism):
    """N: views that agree, that oppose each other, huge ones, and one that is not finite among others."""
    data, model, optimizer, _ = private(4, **MECHANISMS[mechanism])
    x, y = default_collate([data[i] for i in range(6) for _ in range(4)])
    base = flat(one_step(model, optimizer, x, y))
    generator = torch.Generator().manual_seed(3)
    moves = []
    for scale in (1.0, 1e6, 1e-9, 1e38, math.nan):
        for kind in ("alike", "apart", "one of them"):
            extra = torch.randn(1 if kind == "alike" else 4, 1, 5, 5, generator=generator).expand(4, 1, 5, 5)
            factor = torch.tensor([scale, 1, 1, 1] if kind == "one of them" else [scale] * 4)
            extra = extra * factor.view(-1, 1, 1, 1)
            moved = one_step(model, optimizer, torch.cat([x, extra]), torch.cat([y, y[:4]]))
            moves.append(float((flat(moved) - base).double().norm()))
    assert max(moves) <= 0.8 * (1 + 1e-6)
    assert max(moves) > 0.79  # the bound is met, so that four times less would not pass unnoticed
    assert optimizer.noise_multiplier == 0.0


def test_the_certificate_is_that_of_a_single_view():
    one, many = (private(k, noise_multiplier=1.3, **MECHANISMS["gredp"])[2] for k in (1, 8))
    assert one.certificate == many.certificate
    assert one.private_step.plan == many.private_step.plan


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_the_views_of_a_record_stay_together_in_physical_batches(size):
    _, model, optimizer, loader = private(VIEWS)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as parts:
        sums = []
        for x, y in parts:
            assert len(x) % VIEWS == 0
            assert len(x) <= max(size, VIEWS)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            sums.append(x)
    _, whole, alone, _ = private(VIEWS)
    x = torch.cat(sums)
    truth = one_step(whole, alone, x, torch.arange(6).repeat_interleave(VIEWS) % 4)
    torch.testing.assert_close(flat(released(model, optimizer)), flat(truth), rtol=1e-5, atol=1e-6)


def test_an_empty_batch_is_noised_and_charged():
    _, model, optimizer, _ = private(VIEWS, noise_multiplier=1.0)
    moved = one_step(model, optimizer, torch.zeros(0, 1, 5, 5), torch.zeros(0, dtype=torch.long))
    assert flat(moved).abs().max() > 0


def test_what_cannot_be_is_refused_in_one_line():
    _, model, optimizer, _ = private(VIEWS)
    with pytest.raises(GredpError, match="4 inputs are no whole number of records with 3 views") as error:
        one_step(model, optimizer, torch.zeros(4, 1, 5, 5), torch.zeros(4, dtype=torch.long))
    assert "\n" not in str(error.value)
    with pytest.raises(GredpError, match="use grid='kernel'"):
        private(VIEWS, **MECHANISMS["gredp padded"])
    with pytest.raises(GredpError, match="at least 1, not 0"):
        private(0)


def test_other_views_are_another_run(tmp_path):
    engine = PrivacyEngine()
    model = small_model()
    data = torch.utils.data.TensorDataset(torch.zeros(6, 1, 5, 5), torch.zeros(6, dtype=torch.long))
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "data_loader": DataLoader(data, batch_size=6)}
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), views=2, **settings
    )
    engine.save(tmp_path / "run")
    engine.detach()
    model = small_model()
    engine = PrivacyEngine()
    engine.make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    with pytest.raises(GredpError, match=r"another views \(2\) than now \(1\)"):
        engine.load(tmp_path / "run")


# ------------------------------------------------------------------ the views of gredp train


def slow_view(image: torch.Tensor, dy: int, dx: int, flip: bool) -> torch.Tensor:
    """Pad by mirroring, cut out, turn around."""
    _, h, w = image.shape
    padded = F.pad(image[None], (4, 4, 4, 4), mode="reflect")[0]
    out = padded[:, 4 + dy : 4 + dy + h, 4 + dx : 4 + dx + w]
    return out.flip(2) if flip else out


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 28), (1, 8), (3, 9)])
def test_views_are_shifted_and_color_images_flipped(channels, size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, channels, size, size, generator=generator)
    uniform = 1 - torch.rand(200, DRAWS, dtype=torch.float64, generator=generator)
    found = augmented(x, uniform)
    reach = {32: 4, 28: 4, 8: 1, 9: 1}[size]
    seen = set()
    for image, view, u in zip(x, found, uniform.tolist()):
        dy, dx = (math.ceil(v * (2 * reach + 1)) - 1 - reach for v in u[:2])
        flip = channels == 3 and u[2] > 0.5
        assert torch.equal(view, slow_view(image, dy, dx, flip))
        seen |= {("y", dy), ("x", dx), ("flip", flip)}
    assert len(seen) == 2 * (2 * reach + 1) + (2 if channels == 3 else 1)


def test_one_pixel_of_an_image_too_small_to_shift_stays():
    x = torch.randn(5, 1, 3, 1)
    assert torch.equal(augmented(x, torch.full((5, DRAWS), 1.0).double()), x)
