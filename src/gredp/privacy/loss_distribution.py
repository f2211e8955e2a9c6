"""Privacy losses of many steps added up: an upper bound on δ(ε), its rounding included. No torch.

Formal guarantee. `Losses.epsilon(δ)` and `Losses.curve` are never below the exact profile of the steps. What
stands between the two is bounded, and counted against δ:

| what | bound |
|---|---|
| losses on a grid | none needed: "connect the dots" (Doroshenko et al. 2022) dominates at any width |
| losses beyond the grid | their mass counts as an infinite loss |
| rounding of a step's profile and masses | `Step.rounding` of the tail of the losses, n times |
| rounding of the Fourier transform | n·E in every coefficient, see below |
| losses above the window | e^`OUTSIDE` of the tilted mass, by Chernoff |

Why a tilt. A plain Fourier transform rounds by about 1e-16 of the whole mass for each of n steps; beside
δ = 1e-14 that is not small, and the ε that comes out may be too low. So every mass is multiplied by
e^(θ·loss) first and their sum made 1 again, which moves the mass to where losses are as large as ε:

    δ(ε) = e^(K − θε) · Σ_l g(l − ε)·c(l),    g(s) = (1 − e^−s)·e^(−θs) for s > 0, else 0

with c the sum's tilted masses and K the log of what they added up to. It holds for any θ; with that of
Chernoff's bound the factor is little above δ, so an absolute error of c is a relative one of δ.

The error of c. Every stage of a fast transform rounds relative to sums of masses that add up to 1, so each
of its coefficients X is off by at most E = U·(10·log₂N + 8), to which the tilt adds its own (Higham 2002,
theorem 24.2, for the largest coefficient; the constant covers radices up to 11, and the power). Hence
|X̂ⁿ − Xⁿ| ≤ n·E·(|X̂| + 2E)^(n−1). By Parseval the norm of these over √N is that of c's error, and by
Cauchy and Schwarz the sum is off by at most ‖g‖₂ times it: `Tilted.slack`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize, special

Floats = NDArray[np.float64]
#: unit roundoff of double precision
U = 2.0**-53
#: log of the tilted mass that may lie outside of the window, on either side
OUTSIDE = -37.0
#: points of a window beyond which nothing is computed: 10⁷ take seconds and a gigabyte
LARGEST_WINDOW = 10_000_000
NODES, WEIGHTS = np.polynomial.legendre.leggauss(12)


def gaussian_delta(mu: float, eps: Any) -> Any:
    """The exact profile Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) of a Gaussian mechanism with sensitivity μ.

    With Mills' ratio R = Φ(−x)/φ(x) it is φ(x)·(R(x) − R(x + μ)) at x = ε/μ − μ/2; for small μ, where the
    difference would cancel, the integral of −R′(t) = 1 − t·R(t). So it keeps its digits for any ε.
    """
    eps = np.asarray(eps, dtype=np.float64)
    size = np.abs(eps)
    x = size / mu - mu / 2
    if mu <= 1:
        t = x[..., None] + mu / 2 * (NODES + 1)
        gap = mu / 2 * ((1 - t * _mills(t)) @ WEIGHTS)
    else:
        gap = _mills(np.maximum(x, 0)) - _mills(np.maximum(x, 0) + mu)
    with np.errstate(over="ignore"):
        delta = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) * gap
    if mu > 1:
        center = special.ndtr(-x) - np.exp(size + special.log_ndtr(-x - mu))
        delta = np.where(x < 0, center, delta)
    below = -np.expm1(-size) + np.exp(-size) * delta  # δ(−ε) = 1 − e^−ε + e^−ε δ(ε)
    return np.where(eps < 0, below, delta)


def _mills(x: Any) -> Any:
    return math.sqrt(math.pi / 2) * special.erfcx(x / math.sqrt(2))


def sampled_delta(z: float, q: float, eps: Any, adding: bool) -> tuple[Any, Any]:
    """(the exact profile of one step, how sensitive it is to rounding, in units of its tail).

    The step is the mixture (1−q)·N(0, z²) + q·N(1, z²) against N(0, z²), or `adding` the other way round.
    Sampling moves losses and scales masses (Li et al. 2012), so both are the Gaussian profile at another ε.
    """
    loss = -eps if adding else eps
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        small = np.log1p(np.expm1(loss) / q)
        large = loss + np.log1p(-(1 - q) * np.exp(-loss)) - math.log(q)
        whole = np.where(np.abs(loss) < 1, small, large)  # the loss that sampling turns into this one
    inside = np.isfinite(whole)
    whole = np.where(inside, -whole if adding else whole, 0.0)
    share: Any = q - (1 - q) * np.expm1(np.where(inside, eps, 0)) if adding else q
    outside = 0.0 if adding else -np.expm1(np.minimum(eps, 0))
    delta = np.where(inside, share * gaussian_delta(1 / z, whole), outside)
    return delta, 20 + 4 * np.maximum(whole, 0)


@dataclass(frozen=True)
class Part:
    """One step's losses under a tilt; their `masses` add up to 1."""

    masses: Floats
    #: log of what they added up to, rounded up
    log_mass: float
    #: of the tilt, by rounding
    error: float

    @property
    def variance(self) -> float:
        """In squared widths of the grid."""
        places = np.arange(len(self.masses))
        return float(self.masses @ (places - self.masses @ places) ** 2)


@dataclass(frozen=True)
class Step:
    """The losses of one of `count` equal steps: `masses` at `lowest`, `lowest` + 1, … widths of the grid."""

    count: int
    lowest: int
    masses: Floats
    infinite: float
    #: bound on how far rounding may have moved the mass above any loss, relative to it
    rounding: float

    @classmethod
    def of(cls, z: float, q: float, count: int, width: float, log_tail: float, adding: bool) -> "Step":
        far = -float(special.ndtri_exp(log_tail))
        ends = [_loss(z, q, x) for x in (-z * far, z * far + (not adding))]
        low, high = (-ends[1], -ends[0]) if adding else ends
        lowest, highest = math.floor(low / width), math.ceil(high / width) + 1
        losses = _grid(lowest, highest - lowest + 1, width)
        deltas, sensitivity = sampled_delta(z, q, losses, adding)
        deltas = np.minimum.accumulate(deltas)
        falls = np.diff(deltas)
        masses = np.empty_like(deltas)
        masses[0] = 1 - deltas[0] + falls[0] / math.expm1(width)
        masses[1:-1] = (falls[1:] - falls[:-1] * math.exp(width)) / math.expm1(width)
        masses[-1] = falls[-1] / math.expm1(-width)
        masses = np.maximum(masses, 0)
        around = np.abs(np.append(falls, 0)) + np.abs(np.append(0, falls))
        errors = U * (sensitivity * masses + 4 * around / math.expm1(width))
        tails, off = (np.cumsum(values[::-1]) for values in (masses, errors))
        rounding = float(np.max(off[tails > 0] / tails[tails > 0]))
        return cls(count, lowest, masses, float(deltas[-1]), rounding)

    def tilted(self, rate: float) -> Part:
        """`rate` is θ times the width of the grid."""
        places = _grid(self.lowest, len(self.masses), rate)
        exponents = self._logs + places
        largest = float(exponents.max())
        masses = np.exp(exponents - largest)
        total = float(masses.sum())
        masses /= total
        used = masses > 0
        sizes = np.abs(self._logs[used]) + np.abs(places[used]) + abs(largest)
        error = U * (8 + 4 * float(masses[used] @ sizes))
        log_mass = largest + math.log(total) + 4 * U * (abs(largest) + math.log(total))
        return Part(masses, log_mass, error)

    @cached_property
    def _logs(self) -> Floats:
        with np.errstate(divide="ignore"):
            return np.log(self.masses)


def _loss(z: float, q: float, x: float) -> float:
    """log(1 − q + q·e^y): the loss at x when a record is removed."""
    y = (2 * x - 1) / (2 * z * z)
    if abs(y) < 1:
        return math.log1p(q * math.expm1(y))
    return float(np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + y))


class Losses:
    """The privacy losses of all steps in one direction: a record is removed from the data, or added."""

    def __init__(
        self, spent: Iterable[tuple[float, float, int]], width: float, log_tail: float, adding: bool
    ) -> None:
        """`spent` lists (multiplier, rate, steps); a step's tails below e^log_tail are not told apart."""
        self.width = width
        self.steps = [Step.of(z, q, n, width, log_tail, adding) for z, q, n in spent]
        finite = sum(step.count * math.log1p(-step.infinite) for step in self.steps)
        self.infinite = -math.expm1(finite)

    def epsilon(self, delta: float) -> float:
        """The least ε ≥ 0 that is proven at δ; ∞ if none is. Each tilt gives a bound, and sets the next."""
        theta, best = self._theta(delta), math.inf
        for _ in range(3):
            tilted = self.tilted(theta)
            if tilted is None:
                break
            found = tilted.epsilon(delta)
            best = min(best, found)
            if found in (0.0, math.inf) or tilted.tight(found):
                break
            theta = self._nearest(found)
        return best

    def curve(self, epsilons: Iterable[float]) -> list[float]:
        """An upper bound on δ at each ε ≥ 0: the least of those of a few tilts."""
        tilts = [self.tilted(self._theta(delta)) for delta in (0.9, 0.1, 1e-3, 1e-7, 1e-12, 1e-20)]
        return [min((t.delta(eps) for t in tilts if t is not None), default=1.0) for eps in epsilons]

    def log_mass(self, theta: float) -> float:
        """log E e^(θ·loss) of all steps together; convex in θ."""
        return sum(step.count * step.tilted(theta * self.width).log_mass for step in self.steps)

    def _theta(self, delta: float) -> float:
        """Of the least ε that Chernoff's bound e^(K − θε)·max g allows at δ."""
        return self._least(
            lambda theta: (self.log_mass(theta) + _log_largest_g(theta) - math.log(delta)) / theta
        )

    def _nearest(self, eps: float) -> float:
        """Of Chernoff's bound at ε."""
        return self._least(lambda theta: self.log_mass(theta) + _log_largest_g(theta) - theta * eps)

    def _least(self, bound: Callable[[float], float]) -> float:
        limits = (math.log(1e-6), math.log(1e8))
        found = optimize.minimize_scalar(
            lambda x: bound(math.exp(x)), bounds=limits, method="bounded", options={"xatol": 0.02}
        )
        return math.exp(found.x)

    def tilted(self, theta: float) -> "Tilted | None":
        """The sum of the losses under this tilt; None if it would take too many points."""
        width, mass = self.width, self.log_mass(theta)
        variance = sum(step.count * step.tilted(theta * width).variance for step in self.steps)
        reach = math.sqrt(-2 * OUTSIDE / max(variance, 1.0)) / width
        tries = [reach * 2.0**k for k in range(-4, 3)]
        high = min((self.log_mass(theta + s) - mass - OUTSIDE) / s for s in tries)
        # Losses below the window fold into it from above: less tight, but no less true for any ε within.
        low = min(0.0, max((mass + OUTSIDE - self.log_mass(theta - s)) / s for s in tries))
        start, end = math.floor(low / width), math.ceil(high / width)
        if end - start >= LARGEST_WINDOW:
            return None
        return self._composed(theta, start, fft.next_fast_len(max(end - start + 1, 16), real=True))

    def _composed(self, theta: float, start: int, points: int) -> "Tilted":
        of_transform = U * (10 * math.log2(points) + 8)
        logs, angles, uppers = np.zeros((3, points // 2 + 1))
        errors, rounding, log_mass, offset = [], 0.0, 0.0, 0
        for step in self.steps:
            part = step.tilted(theta * self.width)
            transform = fft.rfft(_folded(part.masses, points), points)
            error = of_transform + part.error
            upper = np.log(np.abs(transform) + 2 * error)
            logs += step.count * np.log(np.maximum(np.abs(transform), 1e-300))
            angles += step.count * np.angle(transform)
            uppers += step.count * upper
            errors.append((math.log(step.count * error), upper))
            rounding += step.count * step.rounding
            log_mass += step.count * part.log_mass
            offset += step.count * step.lowest
        # That of each power, and once more for the transform back; nothing is proven where they are huge.
        off = of_transform * np.exp(np.minimum(uppers, 300))
        for log_error, upper in errors:
            off += np.exp(np.minimum(uppers - upper + log_error, 300))
        norm = math.sqrt(2 * float(off @ off) / points)
        rounding *= math.exp(min(rounding, 300))
        slack = (1 + rounding) * math.exp(OUTSIDE) + norm * _norm_of_g(theta, self.width)
        slack += norm * rounding * math.sqrt(1 / (2 * theta * self.width) + 1)
        masses = np.roll(fft.irfft(np.exp(logs + 1j * angles), points), -((start - offset) % points))
        losses = _grid(start, points, self.width)
        return Tilted(theta, losses, np.maximum(masses, 0), log_mass, slack, rounding, self.infinite)


@dataclass(frozen=True)
class Tilted:
    """The sum of all losses under one tilt θ: `masses` at `losses`, which begin at 0 or below."""

    theta: float
    losses: Floats
    masses: Floats
    log_mass: float
    #: bound on what the transform's rounding, and losses above the window, may add to Σ g·c
    slack: float
    #: that of the steps' rounding, relative to the tail
    rounding: float
    infinite: float

    def delta(self, eps: float) -> float:
        """An upper bound on δ(ε), for any ε ≥ 0."""
        found, slack = self._parts(eps)
        return min(1.0, (found + slack) * (1 + 1e-9))  # the rounding of these lines is far below that

    def tight(self, eps: float) -> bool:
        """Whether what is counted for rounding is nothing beside the rest."""
        found, slack = self._parts(eps)
        return slack <= 1e-4 * found

    def _parts(self, eps: float) -> tuple[float, float]:
        above = int(np.searchsorted(self.losses, eps, side="right"))
        first = max(0, above - 1)  # losses within a width below ε count for the tail
        gaps = self.losses[first:] - eps
        weighted = np.exp(np.minimum(-self.theta * gaps, 700)) * self.masses[first:]
        found = float(-np.expm1(-gaps[above - first :]) @ weighted[above - first :])
        factor = math.exp(min(self.log_mass - self.theta * eps, 700))
        slack = self.slack + self.rounding * float(weighted.sum())
        return self.infinite + factor * found, factor * slack

    def epsilon(self, delta: float) -> float:
        """The least ε ≥ 0 at which the bound is at most δ, from above; ∞ if there is none in the window."""

        def excess(eps: float) -> float:
            return math.log(max(self.delta(eps), 1e-320)) - math.log(delta)

        high = float(self.losses[-1])
        if excess(0.0) <= 0:
            return 0.0
        if excess(high) > 0:
            return math.inf
        found = float(optimize.brentq(excess, 0.0, high, rtol=1e-10))
        step = 1e-9 * found + 1e-12
        while excess(found) > 0:
            found, step = found + step, 2 * step
        return found


def _grid(first: int, points: int, width: float) -> Any:
    return np.arange(first, first + points) * width


def _folded(masses: Floats, points: int) -> Floats:
    """Modulo the number of points, as losses are in a transform of that length."""
    if len(masses) <= points:
        return masses
    whole = np.zeros(-(-len(masses) // points) * points)
    whole[: len(masses)] = masses
    return whole.reshape(-1, points).sum(0)


def _norm_of_g(theta: float, width: float) -> float:
    """‖g‖₂ over any grid of this width: at most √(∫g²/width + max g²), since g rises once and falls once."""
    integral = 1 / (theta * (2 * theta + 1) * (2 * theta + 2))
    return math.sqrt(integral / width + math.exp(2 * _log_largest_g(theta)))


def _log_largest_g(theta: float) -> float:
    return -theta * math.log1p(1 / theta) - math.log1p(theta)
