"""Patches against their definition, as loops in double precision, and the images of nobody they come from."""

import math

import numpy as np
import pytest
import torch

from gredp import GredpError
from gredp.app.features import patches
from gredp.app.features.dead_leaves import dead_leaves
from gredp.app.features.patches import Likeness, Patches, bank, cells
from gredp.app.features.random_images import random_images
from gredp.app.features.scattering import Scattering, mirrored
from gredp.app.models import build

FEW = 6


@pytest.fixture(autouse=True)
def few_filters(monkeypatch):
    """The definition does not depend on how many there are, and loops over them are slow."""
    few = {"FILTERS": FEW, "LEAVES": 2, "LEAVES_SIDE": 16, "DRAWN": 5}
    for name, value in few.items():
        monkeypatch.setattr(patches, name, value)
    cached = (bank, patches._parts)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def oracle(image):
    """`[c, h, w]` → `[2·FEW, 3, 3]`: one patch, one filter and one cell at a time; no mirror image."""
    whitening, filters = (t.tolist() for t in bank(len(image)))
    places = [range(size - 5) for size in image.shape[1:]]
    cosines = {}
    for i in places[0]:
        for j in places[1]:
            patch = image[:, i : i + 6, j : j + 6].flatten().tolist()
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
                out[k, a, b] = sum(max(c - 0.15, 0) for c in here) / len(here)
                out[FEW + k, a, b] = sum(max(-c - 0.15, 0) for c in here) / len(here)
    return out


def whole_oracle(image):
    """`[c, h, w]` → the roots of the parts, `[C, cells]` each: two of a gray image, three of others."""
    fine, (wave,) = oracle(image), Scattering()(image[None])
    if len(image) == 1:
        return fine.sqrt().flatten(1), (wave.sign() * wave.abs().sqrt()).flatten(1)
    fine = (fine + oracle(image.flip(-1)).flip(-1)) / 2
    wave = (wave + wave.flip(-1)[mirrored(len(wave))]) / 2
    grid = torch.zeros(len(wave), 4, 4, dtype=torch.float64)
    for a in range(4):
        for b in range(4):
            n, m = wave.shape[1:]
            rows, columns = (slice(k * s // 4, -(-(k + 1) * s // 4)) for k, s in ((a, n), (b, m)))
            grid[:, a, b] = wave[:, rows, columns].mean((1, 2))
    fine, grid = fine.sqrt().flatten(1), (grid.sign() * grid.abs().sqrt()).flatten(1)
    return fine, fine.mean(1, keepdim=True), grid


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 12, 13), (3, 9, 16)])
def test_likeness_to_directions_is_the_definition(shape):
    x = images(2, *shape)
    x[1, :, :, 3:] = 0.5
    want = torch.stack([oracle(record) for record in x])
    torch.testing.assert_close(Likeness(*shape)(x), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 12, 13), (3, 16, 10)])
def test_patches_are_the_definition(shape):
    """Roots of all parts, whitened by what drawn images have, each of the same length."""
    x, (_, height, width) = images(2, *shape), shape
    side = max(height, width) * 3 // 2
    top, start = (side - height) // 2, (side - width) // 2
    drawn = random_images(5, shape[0], side, patches.SEED).double()
    drawn = [whole_oracle(image[:, top : top + height, start : start + width]) for image in drawn]
    got, at, count = Patches()(x).flatten(1), 0, len(drawn[0])
    for place in range(count):
        rows = torch.cat([parts[place].mT for parts in drawn])
        mean, deviation = rows.mean(0), rows.std(0).clamp(min=1e-3)
        rows = (rows - mean) / deviation
        factor = np.linalg.inv((rows.mT @ rows / len(rows) + torch.eye(len(mean))).numpy())
        for record, found in zip(x, got):
            part = (whole_oracle(record)[place] - mean[:, None]) / deviation[:, None]
            part_found = found[at : at + part.numel()].view_as(part)
            assert part_found.square().sum().item() == pytest.approx(got.shape[1] / count, rel=1e-3)
            # W is symmetric in the scaled channels: products with it are the inverse's, up to the length.
            want, have = part.mT @ torch.from_numpy(factor) @ part, part_found.mT @ part_found
            torch.testing.assert_close(have / have.trace(), want / want.trace(), rtol=1e-6, atol=1e-8)
        at += part.numel()
    assert at == got.shape[1]
    torch.testing.assert_close(Patches()(x.float()).double().flatten(1), got, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(1, 12, 13), (3, 32, 32)])
def test_the_network_for_export_gives_the_same(shape):
    x = images(3, *shape).float()
    network = Patches().network(*shape)
    torch.testing.assert_close(network(x), Patches()(x), rtol=1e-3, atol=1e-3)


def test_contrast_and_the_mirror_image_of_a_photograph_do_not_matter():
    x, likeness = images(2, 3, 16, 16), Likeness(3, 16, 16)
    torch.testing.assert_close(likeness(0.3 * x + 0.2), likeness(x), rtol=1e-3, atol=1e-3)
    assert likeness(torch.full((1, 3, 16, 16), 0.7).double()).abs().max() == 0
    turned = [Patches()(y)[:, : 2 * FEW * 9].view(2, -1, 3, 3) for y in (x.flip(-1), x)]
    torch.testing.assert_close(turned[0].flip(-1), turned[1])
    gray = x[:, :1]
    assert not torch.allclose(Patches()(gray.flip(-1)), Patches()(gray))


def test_filters_have_length_1_and_are_whitened():
    whitening, filters = bank(3)
    torch.testing.assert_close(filters.norm(dim=1), torch.ones(FEW, dtype=torch.float64))
    assert whitening.shape == (64, 108)
    assert whitening.sum(1).abs().max() < 1e-9
    assert bank(1)[0].shape == (35, 36)


def test_images_too_small_are_refused():
    with pytest.raises(GredpError, match="at least 8×8, not 7×9"):
        Patches()(torch.zeros(1, 1, 7, 9))


def test_cells_overlap_and_average():
    torch.testing.assert_close(cells(4, 3)[1], torch.tensor([0, 0.5, 0.5, 0], dtype=torch.float64))


def test_the_identity_tells_all_that_the_features_depend_on():
    identity = Patches().identity()
    assert identity["filters"] == FEW
    assert identity["drawn"] == 5
    assert identity["scattering"] == Scattering().identity()


@pytest.mark.parametrize("draw", [random_images, lambda *size: torch.from_numpy(dead_leaves(*size))])
def test_images_of_nobody_are_of_their_seed_alone(draw):
    x = draw(3, 3, 24, 5)
    assert torch.equal(x, draw(3, 3, 24, 5))
    assert not torch.equal(x, draw(3, 3, 24, 6))
    assert x.min() >= 0
    assert x.max() <= 1


def test_random_images_vary_and_gray_ones_are_their_means():
    x = random_images(3, 3, 24, 5)
    assert x.std() > 0.1
    torch.testing.assert_close(random_images(3, 1, 24, 5), x.mean(1, keepdim=True))


def test_each_order_is_standardized():
    x = images(2, 162, 3, 3).float() * torch.tensor([100.0, *[10.0] * 16, *[1.0] * 64] * 2)[:, None, None]
    found = build("orders-linear", (162, 3, 3), 10)[0](x)
    for order in found.unflatten(1, (2, 81)).split([1, 16, 64], 2):
        torch.testing.assert_close(order.mean((1, 2, 3, 4)), torch.zeros(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(order.square().mean((1, 2, 3, 4)), torch.ones(2), atol=1e-3, rtol=0)
    with pytest.raises(GredpError, match="90 channels are not scattering features"):
        build("orders-linear", (90, 3, 3), 10)


def test_dead_leaves_have_edges_and_areas_of_colors_that_vary_together():
    x = dead_leaves(3, 3, 24, 5)
    gray = x.mean(1, keepdims=True)
    assert gray.std() > 0.15
    assert np.abs(x - gray).max() < 0.25
