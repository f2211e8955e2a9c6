"""Privacy losses as dp-accounting adds them up, with a bound on what its rounding has taken. No torch.

Formal guarantee. `Tilted.delta(ε)` is at least the δ of the steps at ε, whatever the tilt θ > 0.

dp-accounting adds up losses by a Fourier transform, which rounds by about 1e-16 of the whole mass for each
of n steps: not small beside δ = 1e-14. So each mass is multiplied by e^(θ·loss) first and their sum made 1
again, which moves the mass to where losses are as large as ε:

    δ(ε) = e^(K − θε) · Σ_l g(l − ε)·c(l),    g(s) = (1 − e^−s)·e^(−θs) for s > 0, else 0

with c the tilted masses of the sum and K the log of what they added up to. An error of c is then relative to
Chernoff's bound e^(K − θε), which is little above δ. Added to the sum, and so counted against δ:

| for | at most |
|---|---|
| the transform (Higham 2002, theorem 24.2, in the sup-norm) and the tilt | E in each coefficient |
| hence for their n-th powers, by Parseval, Cauchy and Schwarz | n·E·‖g‖₂ |
| the profile of a step (90 U were seen), and its masses as differences | n·U·(500 + 4·points) of the tail |
| losses outside of the window | their tilted mass, which dp-accounting takes for infinite losses |
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

#: unit roundoff of double precision
U = 2.0**-53
#: [(steps, losses of one of them)]
Parts = list[tuple[int, Any]]


def both_ways(spent: Iterable[tuple[float, float, int]], width: float, log_tail: float) -> list[Parts]:
    """Of (multiplier, rate, steps): when a record is removed, and when one is added."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    tail = max(log_tail, -650.0)
    steps = [(n, from_gaussian_mechanism(z, 1.0, True, width, tail, sampling_prob=q)) for z, q, n in spent]
    pairs = [(n, step._pmf_remove, step._pmf_add) for n, step in steps]
    return [[(n, pmfs[i].to_dense_pmf()) for n, *pmfs in pairs] for i in (0, 1)]


def least_epsilon(parts: Parts, delta: float, scale: float) -> float:
    """The least ε ≥ 0 that is proven at δ; ∞ if none is. `scale` is about as large."""
    thetas = np.geomspace(0.2, 50, 26) * -math.log(delta) / scale
    masses = np.array([sum(n * _tilted(step, theta)[1] for n, step in parts) for theta in thetas])
    best, bounds = math.inf, (masses - math.log(delta)) / thetas
    for _ in range(2):  # the first ε says where the tilt is best
        best = min(best, Tilted(parts, thetas[np.argmin(bounds)]).epsilon(delta))
        bounds = masses - thetas * min(best, 1e300)
    return best


def _tilted(step: Any, theta: float) -> tuple[Any, float, float]:
    """(masses that add up to 1, log of what they did before, bound on their rounding)."""
    used = step._probs > 0
    logs, places = np.log(step._probs[used]), step._lower_loss + np.flatnonzero(used)
    exponents = logs + theta * step._discretization * places
    largest, masses = exponents.max(), np.zeros(step.size)
    masses[used] = np.exp(exponents - largest)
    total = masses.sum()
    masses /= total
    mass = float(largest + math.log(total) + 4 * U * (abs(largest) + math.log(total)))  # rounded up
    return masses, mass, 8 * U * (float(masses[used] @ np.abs(logs)) + abs(mass) + 10)


class Tilted:
    """The sum of all losses under one tilt θ."""

    def __init__(self, parts: Parts, theta: float) -> None:
        from dp_accounting.pld.pld_pmf import DensePLDPmf

        total: Any = None
        self.theta, self.log_mass, self.rounding, error, finite = theta, 0.0, 0.0, 0.0, 0.0
        for n, step in parts:
            masses, mass, off = _tilted(step, theta)
            width = step._discretization
            with np.errstate(over="ignore"):  # a bound on the window that is not needed
                part = DensePLDPmf(width, step._lower_loss, masses, 0.0, True).self_compose(n)
            total = part if total is None else total.compose(part)
            self.log_mass += n * mass
            self.rounding += n * U * (500 + 4 * step.size)
            error += (n + 4) * (off + U * (10 * math.log2(total.size) + 8))  # 4: composed, transformed back
            finite += n * math.log1p(-step._infinity_mass)
        self.masses = np.maximum(total._probs, 0)
        self.losses = (total._lower_loss + np.arange(total.size)) * width
        self.infinite = -math.expm1(finite)
        # ‖g‖₂² over any grid is at most ∫g²/width + max g²: g rises once and falls once.
        square = 1 / (width * theta * (2 * theta + 1) * (2 * theta + 2)) + 1 / (1 + theta) ** 2
        self.slack = error * math.exp(min(error, 300)) * math.sqrt(square) + total._infinity_mass

    def delta(self, eps: float) -> float:
        """1 below the window, where nothing is known."""
        if eps < self.losses[0]:
            return 1.0
        first = int(np.searchsorted(self.losses, eps, side="right")) - 1
        gaps = self.losses[first:] - eps
        tail = np.exp(np.minimum(-self.theta * gaps, 700)) * self.masses[first:]
        found = float(-np.expm1(-gaps[1:]) @ tail[1:]) + self.rounding * float(tail.sum()) + self.slack
        factor = math.exp(min(self.log_mass - self.theta * eps, 700))
        return min(1.0, (self.infinite + factor * found) * (1 + 1e-9))

    def epsilon(self, delta: float) -> float:
        """From above; ∞ if no ε in the window is enough."""
        low, high = max(0.0, float(self.losses[0])), float(self.losses[-1])
        if self.delta(low) <= delta or self.delta(high) > delta:
            return low if self.delta(low) <= delta else math.inf
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high
