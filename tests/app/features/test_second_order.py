"""Preconditioned steps of `benchmarks/second_order.py` against dense matrices, and what a record adds."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from second_order import (
    Preconditioner,
    certificate,
    contributions,
    principal,
    query_multiplier,
    released,
    step_multiplier,
)

from gredp.privacy.accountant import epsilon
from gredp.privacy.ledger import Entry


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_preconditioner_is_the_dense_inverse():
    drawn, gradient, ridge = rows(5, 9), rows(3, 9) + 1, 0.7
    found = Preconditioner(*principal(drawn), ridge)
    inverse = ridge * torch.linalg.inv(drawn.mT @ drawn / 5 + ridge * torch.eye(9, dtype=torch.float64))
    torch.testing.assert_close(found(gradient), gradient @ inverse)
    torch.testing.assert_close(found.root(found.root(gradient)), gradient @ inverse)


def test_few_directions_are_those_with_the_largest_moments():
    every, few = principal(rows(5, 9)), principal(rows(5, 9), 2)
    torch.testing.assert_close(few[1], every[1][-2:])
    torch.testing.assert_close(few[0].mT @ few[0], torch.eye(2, dtype=torch.float64))


def test_a_record_adds_its_products_and_at_most_1():
    x = rows(6, 9) * 10
    directions, _ = principal(rows(5, 9), 3)
    for record, found in zip(x, contributions(x, directions, 4.0)):
        u = [sum(record[i] * directions[i, k] for i in range(9)) / 4.0 for k in range(3)]
        u = [value / max(1.0, math.sqrt(sum(v * v for v in u))) for value in u]
        want = [u[i] * u[j] * (1 if i == j else math.sqrt(2)) for i in range(3) for j in range(i, 3)]
        torch.testing.assert_close(found, torch.stack(want))
        assert found.norm() <= 1 + 1e-12


def test_without_noise_the_release_is_the_second_moments():
    x = rows(40, 9)
    x = x / x.norm(dim=1, keepdim=True) * 3
    directions, _ = principal(rows(5, 9), 4)
    turned, moments = released(x, directions, 3.0, 0.0, 1)
    u = x @ directions
    torch.testing.assert_close(turned * moments @ turned.mT, directions @ (u.mT @ u / 40) @ directions.mT)
    noisy = released(x, directions, 3.0, 1.0, 1)[1]
    assert not torch.allclose(noisy, moments)
    assert noisy.min() >= 0


def test_query_and_steps_stay_within_the_target_together():
    query = certificate(query_multiplier(0.1, 2.0, 1e-5))
    multiplier = step_multiplier(query, 2.0, 1e-5, 8)
    spent = epsilon([Entry(query.noise_multiplier, 1.0, 1), Entry(multiplier, 1.0, 8)], 1e-5)
    assert spent == pytest.approx(2.0, rel=1e-3)
    assert spent <= 2.0
