"""The attacker's records: directions in which a canary's gradient points. No torch.

A gradient is the concatenation of blocks, each with its Fourier grid; most directions have the same weight
in every block, so that clipping layer by layer meets a canary that is too long for each of them.
"""

import math
import secrets
from collections.abc import Callable, Sequence

import numpy as np

from gredp.audit.bounds import Floats
from gredp.errors import GredpError

Grid = tuple[int, ...]
#: how many times the clipping norm a canary is long: the clip itself is part of what is attacked
LENGTH = 100.0


def generator(seed: int | None) -> np.random.Generator:
    """For the attacker's own choices; the noise of the mechanism never comes from here."""
    return np.random.default_rng(secrets.randbits(63) if seed is None else seed)


def directions(grids: Sequence[Grid], seed: int | None = None) -> dict[str, Floats]:
    """`name → [d]` of norm 1: the directions that need no plays to be found."""
    if any(grid[-1] < 3 for grid in grids):
        raise GredpError(f"an audit needs blocks of at least 3 coordinates along the last axis, not {grids}")
    rng = generator(seed)
    # Two of them stay in one block: there shaped noise has one variance, and the plain score is the best one.
    single, wave = ([np.zeros(math.prod(grid)) for grid in grids] for _ in range(2))
    single[0][1] = 1.0
    wave[-1] = _wave(grids[-1])
    return {
        "coordinate": _joined(single),
        "odd pair": _joined([_pair(grid, -1) for grid in grids]),
        "even pair": _joined([_pair(grid, +1) for grid in grids]),
        "sinusoid": _joined(wave),
        "random": _joined([rng.standard_normal(math.prod(grid)) for grid in grids]),
    }


def quietest(noise: Floats) -> Floats:
    """`[plays, d]` of releases without a canary → the direction in which they vary least."""
    return np.linalg.eigh(np.cov(noise.T))[1][:, 0]


def _pair(grid: Grid, sign: int) -> Floats:
    part = np.zeros(math.prod(grid))
    part[1], part[grid[-1] - 1] = 1.0, sign
    return part


def _wave(grid: Grid) -> Floats:
    return np.broadcast_to(np.cos(2 * np.pi * np.arange(grid[-1]) / grid[-1]), grid).flatten()


def _joined(parts: Sequence[Floats]) -> Floats:
    unit: Callable[[Floats], Floats] = lambda v: v / max(float(np.linalg.norm(v)), 1e-30)  # noqa: E731
    return unit(np.concatenate([unit(part) for part in parts]))
