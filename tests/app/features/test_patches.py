"""Patches against their definition, as loops in double precision, and the images of nobody they come from."""

import math

import numpy as np
import pytest
import torch

from gredp import GredpError
from gredp.app.features import patches
from gredp.app.features.dead_leaves import dead_leaves
from gredp.app.features.patches import Patches, PatchesBesideScattering, bank, cells
from gredp.app.features.scattering import Scattering, mirrored
from gredp.app.models import build

FEW = 6


@pytest.fixture(autouse=True)
def few_filters(monkeypatch):
    """The definition does not depend on how many there are, and loops over them are slow."""
    monkeypatch.setattr(patches, "FILTERS", FEW)
    monkeypatch.setattr(patches, "LEAVES", 2)
    monkeypatch.setattr(patches, "LEAVES_SIDE", 16)
    bank.cache_clear()
    yield
    bank.cache_clear()


def images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def oracle(image):
    """`[c, h, w]` → `[2·FEW, 3, 3]`: one patch, one filter and one cell at a time; no mirror image."""
    whitening, filters = (t.tolist() for t in bank(len(image)))
    places = [range(0, size - 5, 2) for size in image.shape[1:]]
    cosines = {}
    for i, y in enumerate(places[0]):
        for j, x in enumerate(places[1]):
            patch = image[:, y : y + 6, x : x + 6].flatten().tolist()
            mean = sum(patch) / len(patch)
            white = [sum(w * (p - mean) for w, p in zip(row, patch)) for row in whitening]
            length = math.sqrt(sum(v * v for v in white) + 1e-6)
            cosines[i, j] = [sum(f * v for f, v in zip(row, white)) / length for row in filters]
    out = torch.zeros(2 * FEW, 3, 3, dtype=torch.float64)
    for a in range(3):
        for b in range(3):
            n, m = map(len, places)
            rows = range(a * n // 3, math.ceil((a + 1) * n / 3))
            columns = range(b * m // 3, math.ceil((b + 1) * m / 3))
            for k in range(FEW):
                here = [cosines[i, j][k] for i in rows for j in columns]
                out[k, a, b] = 40 * sum(max(c - 0.15, 0) for c in here) / len(here)
                out[FEW + k, a, b] = 40 * sum(max(-c - 0.15, 0) for c in here) / len(here)
    return out


@pytest.mark.parametrize("shape", [(1, 6, 6), (1, 12, 13), (3, 9, 16)])
def test_patches_are_the_definition(shape):
    x = images(2, *shape)
    x[1, :, :, 3:] = 0.5
    got = Patches()(x)
    for record, found in zip(x, got):
        want = oracle(record)
        if len(record) > 1:
            want = (want + oracle(record.flip(-1)).flip(-1)) / 2
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(Patches()(x.float()).double(), got, rtol=1e-3, atol=1e-3)


def test_beside_them_lies_scattering_on_the_same_grid():
    x = images(2, 3, 32, 32).float()
    got, (row, column) = PatchesBesideScattering()(x), (cells(8)[1].float(), cells(8)[2].float())
    assert got.shape == (2, 2 * FEW + 243, 3, 3)
    whole = Scattering()(x)
    whole = (whole + whole.flip(-1)[:, mirrored(243)]) / 2
    want = torch.einsum("bchw,h,w->bc", whole, row, column)
    torch.testing.assert_close(got[:, 2 * FEW :, 1, 2], want)
    torch.testing.assert_close(got[:, : 2 * FEW], Patches()(x))
    network = PatchesBesideScattering().network(3, 32, 32)
    torch.testing.assert_close(network(x), got, rtol=1e-4, atol=1e-3)


def test_contrast_and_the_mirror_image_of_a_photograph_do_not_matter():
    x, front = images(2, 3, 16, 16), Patches()
    torch.testing.assert_close(front(0.3 * x + 0.2), front(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(front(x.flip(-1)).flip(-1), front(x))
    assert not torch.allclose(front(x[:, :1].flip(-1)).flip(-1), front(x[:, :1]))
    assert front(torch.full((1, 3, 8, 8), 0.7)).abs().max() == 0


def test_filters_have_length_1_and_are_whitened():
    whitening, filters = bank(3)
    torch.testing.assert_close(filters.norm(dim=1), torch.ones(FEW, dtype=torch.float64))
    assert whitening.shape == (64, 108)
    assert whitening.sum(1).abs().max() < 1e-9
    assert bank(1)[0].shape == (35, 36)


def test_images_too_small_are_refused():
    with pytest.raises(GredpError, match="at least 6×6, not 5×9"):
        Patches()(torch.zeros(1, 1, 5, 9))


def test_the_identity_tells_all_that_the_features_depend_on():
    before = PatchesBesideScattering().identity()
    assert before["patches"] == Patches().identity() | {"name": "patches"}
    assert before["patches"]["filters"] == FEW
    assert before["scattering"] == Scattering().identity()


def test_each_half_is_standardized():
    network = build("joint-linear", (2 * 1024 + 81, 3, 3), 10)
    x = images(2, 2 * 1024 + 81, 3, 3).float()
    x[:, 2048:] *= 100
    for half in network[0](x).split([2048, 81], 1):
        torch.testing.assert_close(half.mean((1, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(half.square().mean((1, 2, 3)), torch.ones(2), atol=1e-3, rtol=0)
    with pytest.raises(GredpError, match=r"is for patches.scattering, not for 243 channels"):
        build("joint-linear", (243, 3, 3), 10)


def test_each_order_is_standardized():
    x = images(2, 162, 3, 3).float() * torch.tensor([100.0, *[10.0] * 16, *[1.0] * 64] * 2)[:, None, None]
    found = build("orders-linear", (162, 3, 3), 10)[0](x)
    for order in found.unflatten(1, (2, 81)).split([1, 16, 64], 2):
        torch.testing.assert_close(order.mean((1, 2, 3, 4)), torch.zeros(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(order.square().mean((1, 2, 3, 4)), torch.ones(2), atol=1e-3, rtol=0)
    with pytest.raises(GredpError, match="90 channels are not scattering features"):
        build("orders-linear", (90, 3, 3), 10)


def test_dead_leaves_are_of_their_seed_alone_and_cover_the_image():
    x = dead_leaves(3, 3, 24, 5)
    assert np.array_equal(x, dead_leaves(3, 3, 24, 5))
    assert not np.array_equal(x, dead_leaves(3, 3, 24, 6))
    assert x.min() >= 0
    assert x.max() <= 1
    gray = x.mean(1, keepdims=True)
    assert gray.std() > 0.15  # edges and areas
    assert np.abs(x - gray).max() < 0.25  # of colors that vary together
