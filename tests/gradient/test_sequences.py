"""Layers that see several positions of a record: each way to their norms and sums equals the loop."""

import pytest
import torch

import oracles
from gredp.gradient import norms
from gredp.gradient.factored import Lookup, Outer, Waves
from gredp.gradient.per_sample import Dense
from gredp.privacy.certificate import Block
from gredp.spectrum import BlockView


def outer(records: int, positions: int, o: int, i: int, dtype=torch.float64) -> Outer:
    generator = torch.Generator().manual_seed(positions)
    draw = [torch.randn(records, positions, n, generator=generator, dtype=dtype) for n in (o, i)]
    return Outer(*draw)


@pytest.mark.parametrize("spectral", [False, True])
@pytest.mark.parametrize(
    ("positions", "o", "i"),
    [(1, 5, 4), (64, 20, 12), (9, 3, 70), (2, 40, 33), (24, 30, 70), (24, 30, 67), (9, 12, 2), (9, 12, 1)],
)
def test_a_settled_layer_answers_as_the_loop_does(positions, o, i, spectral, monkeypatch):
    gradient = outer(5, positions, o, i)
    truth = torch.stack(
        [sum(torch.outer(a, b) for a, b in zip(*pair)) for pair in zip(gradient.left, gradient.right)]
    )
    compact = gradient.compact(spectral)
    monkeypatch.setattr(norms, "CHUNK", 2 * o * i)
    in_pieces = gradient.compact(spectral)
    factors = torch.arange(5.0, dtype=torch.float64)
    for kind in (gradient, compact, in_pieces):
        torch.testing.assert_close(kind.dense(), truth, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(kind.squared_norm(), truth.flatten(1).square().sum(1), rtol=1e-9, atol=0)
        torch.testing.assert_close(kind.grid_energy(), oracles.grid_energy(truth, 1), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(kind.weighted_sum(factors), torch.tensordot(factors, truth, 1))


@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize("columns", [1, 7, 36])
@pytest.mark.parametrize(("positions", "o", "i"), [(1, 5, 70), (9, 3, 71), (24, 80, 70), (24, 30, 71)])
def test_a_band_of_the_sum_is_that_of_its_spectrum(positions, o, i, columns, grid):
    gradient = outer(5, positions, o, i)
    factors = torch.arange(5.0, dtype=torch.float64)
    view = BlockView(Block.whole("w", "l", (o, i), grid), columns=columns)
    truth = oracles.dft(torch.einsum("b,bto,bti->oi", factors, gradient.left, gradient.right), grid)
    for kind in (gradient, gradient.compact(True), Dense(gradient.dense())):
        torch.testing.assert_close(kind.band_sum(factors, view), truth[..., :columns], rtol=1e-9, atol=1e-9)
    empty = outer(0, positions, o, i).band_sum(factors[:0], view)
    assert empty.shape == view.kept_shape
    assert not empty.any()


def test_products_are_kept_where_that_saves_a_second_one():
    assert isinstance(outer(8, 64, 64, 64).compact(False), Dense)
    assert isinstance(outer(8, 64, 64, 64).compact(True), Dense)
    assert isinstance(outer(8, 64, 96, 64).compact(True), Waves)  # fewer inputs to transform than rows
    assert isinstance(outer(8, 1, 64, 64).compact(False), Outer)  # norms part into two small ones
    assert isinstance(outer(8, 4, 512, 512).compact(False), Outer)  # Gram matrices are far smaller
    assert isinstance(outer(1, 32, 384, 1536).compact(False), Outer)  # ten times the memory of its factors


@pytest.mark.parametrize("left", [1.0, 1e-2, 1e-4, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1e-18])
def test_norm_is_not_short_where_positions_oppose_each_other(left, scale):
    """Σ_t l_t r_tᵀ of nearly constant l against r that nearly sum to zero; products of tiny by huge."""
    generator = torch.Generator().manual_seed(0)
    held = torch.randn(6, 1, 512, generator=generator) + left * torch.randn(6, 64, 512, generator=generator)
    sign = torch.ones(64, 1)
    sign[::2] = -1
    r = torch.randn(6, 1, 128, generator=generator) * sign
    r = r + left * torch.randn(6, 64, 128, generator=generator)
    gradient = Outer(held * scale, r / scale)
    truth = Outer(gradient.left.double(), gradient.right.double()).dense().flatten(1).square().sum(1)
    found = gradient._gram_norm()
    assert (found >= truth * (1 - 2e-6)).all()
    if left == 1.0:  # an ordinary record is not clipped noticeably harder
        assert (found <= truth * (1 + 1e-4)).all()


def test_rows_that_come_again_count_once_with_their_sum():
    ids = torch.tensor([[0, 1, 0, 2, 0], [3, 3, 3, 3, 3], [4, 0, 1, 2, 3]])
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)
    gradient[0, 2] = -gradient[0, 0]  # the first two of row 0 cancel
    lookup = Lookup(ids, gradient, 5)
    truth = torch.zeros(3, 5, 7, dtype=torch.float64)
    for b in range(3):
        for t in range(5):
            truth[b, ids[b, t]] += gradient[b, t]
    factors = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    for kind in (lookup, lookup.compact(True)):
        torch.testing.assert_close(kind.dense(), truth)
        torch.testing.assert_close(kind.squared_norm(), truth.flatten(1).square().sum(1))
        torch.testing.assert_close(kind.grid_energy(), oracles.grid_energy(truth, 1))
        torch.testing.assert_close(kind.weighted_sum(factors), torch.tensordot(factors, truth, 1))
