"""A linear layer that is used again keeps its factors: the sum of both uses is their positions together."""

import pytest
import torch

from gredp.gradient.factored import Outer
from gredp.gradient.per_sample import Dense, add


@pytest.mark.parametrize("positions", [(1, 1), (3, 1), (40, 60)])
def test_joined_factors_are_the_sum_of_both(positions):
    torch.manual_seed(0)
    parts = [Outer(torch.randn(4, t, 5).double(), torch.randn(4, t, 7).double()) for t in positions]
    whole = add(*parts, 1)
    wanted = parts[0].dense() + parts[1].dense()
    assert isinstance(whole, Outer)
    assert torch.allclose(whole.dense(), wanted)
    assert torch.allclose(whole.squared_norm(), Dense(wanted).squared_norm(), rtol=1e-4)
    assert (whole.squared_norm() >= Dense(wanted).squared_norm() * (1 - 1e-12)).all()
    factors = torch.rand(4).double()
    assert torch.allclose(whole.weighted_sum(factors), Dense(wanted).weighted_sum(factors))
    assert torch.allclose(whole.grid_energy(), Dense(wanted).grid_energy(), rtol=1e-4)


def test_other_sums_are_materialized():
    one = Outer(torch.randn(4, 2, 5), torch.randn(4, 2, 7))
    assert isinstance(add(one, Dense(torch.randn(4, 5, 7)), 1), Dense)
