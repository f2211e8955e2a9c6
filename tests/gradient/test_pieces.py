"""Gradients that are kept in several arrays are those of one."""

from dataclasses import replace

import pytest
import torch

import gredp.gradient.norms as norms
from gredp.gradient.convolution import Correlation
from gredp.gradient.factored import Outer
from gredp.gradient.per_sample import Dense, InPieces
from gredp.privacy.certificate import Block
from gredp.spectrum import BlockView, frequency_groups

RECORDS = 7


def gradients():
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    geometry = (3, 3), (1, 1), (1, 1), 1, (1, 1, 1, 1)
    yield Outer(normal(RECORDS, 90, 8), normal(RECORDS, 90, 10))
    yield Correlation(normal(RECORDS, 4, 12, 12), normal(RECORDS, 6, 12, 12), *geometry)


@pytest.mark.parametrize("spectral", [False, True])
@pytest.mark.parametrize("gradient", list(gradients()), ids=lambda g: type(g).__name__)
def test_pieces_answer_as_the_whole(gradient, spectral, monkeypatch):
    truth = gradient.dense()
    monkeypatch.setattr(norms, "CHUNK", 3 * truth[0].numel())
    kept = gradient.compact(spectral)
    assert isinstance(kept, InPieces)
    assert (kept.sizes, kept.batch, kept.grid_axes) == ([3, 3, 1], RECORDS, gradient.grid_axes)
    whole = Dense(truth, gradient.grid_axes)
    block = Block.whole("weight", "layer", tuple(truth.shape[1:]), gradient.grid_axes)
    view = BlockView(block, False, frequency_groups(block.grid, 3))
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(kept.dense(), truth, **close)
    torch.testing.assert_close(kept.squared_norm(), whole.squared_norm(), **close)
    torch.testing.assert_close(kept.grid_energy(), whole.grid_energy(), **close)
    torch.testing.assert_close(kept.energy_in(view), whole.energy_in(view), **close)
    factors = torch.linspace(-1, 2, RECORDS, dtype=torch.float64)
    torch.testing.assert_close(kept.weighted_sum(factors), whole.weighted_sum(factors), **close)
    some = torch.arange(RECORDS) % 3 != 1
    torch.testing.assert_close(kept.zero_unless(some).dense(), whole.zero_unless(some).dense(), **close)
    assert sum(t.numel() for t in kept.tensors().values()) >= truth.numel()


def test_one_piece_and_no_records_are_no_pieces():
    for gradient in gradients():
        assert not isinstance(gradient.compact(False), InPieces)
        none = replace(gradient, **{n: t[:0] for n, t in gradient.tensors().items()})
        assert none.compact(False).weighted_sum(torch.zeros(0, dtype=torch.float64)).abs().sum() == 0
