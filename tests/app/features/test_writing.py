"""Wavelets of written signs against their definition, as loops in double precision, and the strokes."""

import itertools
import math

import numpy as np
import pytest
import torch

from gredp import GredpError
from gredp.app.features import patches, random_strokes, writing
from gredp.app.features.scattering import Scattering
from gredp.app.features.writing import Writing

FEW = 5
SHAPE = (1, 12, 13)


@pytest.fixture(autouse=True)
def few_strokes(monkeypatch):
    monkeypatch.setattr(writing, "DRAWN", FEW)
    writing._whitenings.cache_clear()
    yield
    writing._whitenings.cache_clear()


def images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def smaller(image, size):
    """`[1, h, w]` → each new pixel the mean over its rectangle, one at a time."""
    old, new = image.shape[1:], [round(side / size) for side in image.shape[1:]]
    rows, columns = (shares(*sides) for sides in zip(old, new))
    out = torch.zeros(1, *new, dtype=torch.float64)
    for i, j in itertools.product(*map(range, new)):
        for (a, upper), (b, left) in itertools.product(rows[i], columns[j]):
            out[0, i, j] += image[0, a, b] * upper * left
    return out


def shares(old, new):
    """For each new place of a side: the old ones that it covers, and how much of it each of them is."""
    covered = [
        [
            (at, max(0.0, min((k + 1) * old / new, at + 1) - max(k * old / new, at)) * new / old)
            for at in range(old)
        ]
        for k in range(new)
    ]
    return [[(at, share) for at, share in place if share] for place in covered]


def roots(image, size):
    """`[1, h, w]` → `[81, cells]`, one number at a time."""
    found = Scattering()(smaller(image, size)[None])[0].flatten(1)
    return torch.tensor(
        [[math.copysign(math.sqrt(abs(v)), v) for v in row] for row in found.tolist()]
    ).double()


def test_writing_is_the_definition():
    """Each channel centered in each cell by strokes, whitened by their correlations, of one length."""
    x = images(2, *SHAPE)
    drawn = random_strokes.random_strokes(FEW, 13, patches.SEED).double()[:, :, 0:12]
    got, at = Writing()(x).flatten(1), 0
    for size in (1.0, math.sqrt(2), 2.0):
        strokes = torch.stack([roots(image, size) for image in drawn])
        mean = strokes.mean(0)
        rows = torch.cat([(image - mean).mT for image in strokes])
        deviation = rows.std(0).clamp(min=1e-3)
        rows = (rows - rows.mean(0)) / deviation
        inverse = np.linalg.inv((rows.mT @ rows / len(rows) + 4.0 * torch.eye(81)).numpy())
        for image, found in zip(x, got):
            part = (roots(image, size) - mean) / deviation[:, None]
            here = found[at : at + part.numel()].view_as(part)
            # W is symmetric in the scaled channels: products with it are the inverse's, up to the length.
            want, have = part.mT @ torch.from_numpy(inverse) @ part, here.mT @ here
            torch.testing.assert_close(have / have.trace(), want / want.trace(), rtol=1e-6, atol=1e-8)
            assert have.trace().item() == pytest.approx(here.numel(), rel=1e-4)
        at += mean.numel()
    assert at == got.shape[1]
    torch.testing.assert_close(Writing()(x.float()).double().flatten(1), got, rtol=2e-2, atol=2e-2)


def test_the_network_for_export_gives_the_same():
    x = images(3, *SHAPE).float()
    torch.testing.assert_close(Writing().network(*SHAPE)(x), Writing()(x), rtol=1e-3, atol=1e-3)


def test_color_and_small_images_are_refused():
    with pytest.raises(GredpError, match="writing is gray, with 1 channel, not 3"):
        Writing()(torch.zeros(1, 3, 12, 12))
    with pytest.raises(GredpError, match="at least 12×12, not 12×11"):
        Writing()(torch.zeros(1, 1, 12, 11))


def test_the_identity_tells_all_that_the_features_depend_on():
    identity = Writing().identity()
    assert identity["sizes"] == [1.0, 1.414, 2.0]
    assert (identity["drawn"], identity["ridge"], identity["seed"]) == (FEW, 4.0, 23)
    assert identity["scattering"] == Scattering().identity()


def test_strokes_are_of_their_seed_alone_and_look_like_writing():
    x = random_strokes.random_strokes(70, 28, 5)
    assert x.shape == (70, 1, 28, 28)
    assert torch.equal(x, random_strokes.random_strokes(70, 28, 5))
    assert not torch.equal(x, random_strokes.random_strokes(70, 28, 6))
    assert x.min() >= 0
    assert x.max() <= 1
    assert 0.03 < x.mean() < 0.35
    assert x[:, :, :2].max() == x[..., -2:].max() == 0  # the ground around is empty
    assert (x.amax((1, 2, 3)) == 1).all()


def test_a_stroke_is_where_the_pen_has_been():
    """One pixel at a time, by the nearest place of the pen."""
    pen = 9 * images(1, 6, 2)
    found = random_strokes._traced(pen, torch.full((1, 1, 1), 1.2), 9)[0]
    for i in range(9):
        for j in range(9):
            nearest = min(math.dist((i, j), place) for place in pen[0].tolist())
            assert found[i, j].item() == pytest.approx(min(max(1.7 - nearest, 0), 1), abs=1e-6)
