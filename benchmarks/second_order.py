"""Steps of a private classifier along λ(S + λ)⁻¹ times the released gradient, S second moments of features.

S comes from images that we draw, and is free, or is released by a query of its own (after Mehta et al.,
"Differentially private image classification from features", 2023). Multiplying a released gradient is
post-processing: its certificate is that of the step.

Formal guarantee of the query. A record contributes M = u uᵀ, u its features' coordinates in public
orthonormal directions, divided by the features' length: ‖u‖ ≤ 1, so ‖M‖_F ≤ 1. Released is Σ M + N(0, z²)
over the upper triangle, entries beside the diagonal scaled by √2, so that lengths are Frobenius norms: the
Gaussian mechanism with multiplier z at sampling rate 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gredp.privacy.accountant import epsilon
from gredp.privacy.calibrate import calibrate
from gredp.privacy.certificate import Certificate, Release
from gredp.privacy.ledger import Entry


@dataclass(frozen=True)
class Preconditioner:
    """λ(S + λ)⁻¹ for S = Q diag(s) Qᵀ: the identity on what is orthogonal to Q `[d, k]`."""

    directions: Tensor
    moments: Tensor
    ridge: float

    def __call__(self, rows: Tensor) -> Tensor:
        """`[n, d]` → the same, each row multiplied."""
        return self._multiplied(rows, self.ridge / (self.moments + self.ridge))

    def root(self, rows: Tensor) -> Tensor:
        """The same by the square root, for features before they are clipped."""
        return self._multiplied(rows, (self.ridge / (self.moments + self.ridge)).sqrt())

    def _multiplied(self, rows: Tensor, factors: Tensor) -> Tensor:
        return rows - rows @ self.directions * (1 - factors) @ self.directions.mT


def principal(rows: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Of `[n, d]`, n < d: the `count` directions with the largest second moments, `[d, k]`, and those."""
    squares, turned = torch.linalg.eigh((rows @ rows.mT / len(rows)).double())
    kept = squares > squares[-1] * 1e-6
    kept[: len(rows) - (count or len(rows))] = False
    squares, turned = squares[kept], turned[:, kept]
    directions = rows.mT @ (turned / (squares * len(rows)).sqrt()).to(rows)
    return directions, squares.to(rows)


def certificate(noise_multiplier: float) -> Certificate:
    return Certificate((Release("second moments of features", 1.0, noise_multiplier),))


def query_multiplier(share: float, target_epsilon: float, delta: float) -> float:
    """z of a query with this share of the squared sensitivity that one Gaussian mechanism may have."""
    return calibrate(target_epsilon, delta, 1.0, 1) / math.sqrt(share)


def step_multiplier(query: Certificate, target_epsilon: float, delta: float, steps: int) -> float:
    """z of each of `steps` full steps after the query, whose charge the accountant is told of."""
    spent = (Entry(query.noise_multiplier, 1.0, 1),)
    multiplier = calibrate(target_epsilon, delta, 1.0, steps, spent=spent)
    assert epsilon([*spent, Entry(multiplier, 1.0, steps)], delta) <= target_epsilon
    return multiplier


def contributions(rows: Tensor, directions: Tensor, length: float) -> Tensor:
    """`[n, d]` → `[n, k(k+1)/2]`, each of norm at most 1."""
    u = rows @ directions / length
    u = u / u.norm(dim=1, keepdim=True).clamp(min=1)
    first, second = torch.triu_indices(u.shape[1], u.shape[1])
    return u[:, first] * u[:, second] * torch.where(first == second, 1.0, math.sqrt(2))


def released(
    rows: Tensor, directions: Tensor, length: float, noise_std: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Directions in the span of the given ones, and the second moments of `rows` along them, with noise."""
    size = directions.shape[1]
    first, second = torch.triu_indices(size, size)
    total = torch.zeros(len(first), dtype=torch.float64)
    for few in rows.split(50):
        total += contributions(few, directions, length).double().sum(0)
    generator = torch.Generator().manual_seed(seed)
    total += noise_std * torch.randn(len(total), generator=generator, dtype=torch.float64)
    moments = torch.zeros(size, size, dtype=torch.float64)
    moments[first, second] = total / torch.where(first == second, 1.0, math.sqrt(2))
    moments = moments.triu() + moments.triu(1).mT
    squares, turned = torch.linalg.eigh(moments * (length**2 / len(rows)))
    return directions @ turned.to(rows), squares.clamp(min=0).to(rows)
