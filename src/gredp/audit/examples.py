"""Steps written from scratch, broken in ways that are seen in public code: what an auditor must catch.

Each takes `[n, d]` gradients and claims to be a Gaussian mechanism: clipping norm 1, multiplier SIGMA. They
are examples of `gredp audit --target`, and what `gredp audit --self-test` plays.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gredp.audit.bounds import Claim, Floats
from gredp.audit.game import AuditedStep, audit
from gredp.privacy.ledger import Entry

Verdict = str | None
#: noise of the game: at it the fewest plays tell σ from σ/√2
SIGMA = 0.5
EXPECTED = 4


def _clipped_sum(gradients: Floats) -> Floats:
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return np.asarray((gradients / np.maximum(norms, 1)).sum(0))


def _noised(total: Floats, deviation: float = SIGMA) -> Floats:
    return total + deviation * np.random.default_rng().standard_normal(len(total))


def honest_step(gradients: Floats) -> Floats:
    """DP-SGD, for comparison: the auditor must let it pass."""
    return _noised(_clipped_sum(gradients))


def reference_spectral_dp(gradients: Floats) -> Floats:
    """As in the public code of Spectral-DP: gradients of the mean loss are clipped, each gets noise/B.

    The last coefficient that is kept gets none.
    """
    rng, n = np.random.default_rng(), gradients.shape[1]
    total = np.zeros(n, dtype=complex)
    kept = n // 2
    for row in gradients / EXPECTED:
        part = np.fft.fft(_clipped_sum(row[None]), norm="ortho")
        part[kept:] = 0
        noise_: Any = rng.standard_normal(n) + 1j * rng.standard_normal(n)
        noise_[kept - 1 :] = 0
        total += part + SIGMA / math.sqrt(2) * noise_ / EXPECTED
    return np.fft.ifft(total, norm="ortho").real


def variance_for_deviation(gradients: Floats) -> Floats:
    return _noised(_clipped_sum(gradients), SIGMA**2)


def clip_of_each_coordinate(gradients: Floats) -> Floats:
    return _noised(np.clip(gradients, -1, 1).sum(0))


def clip_of_each_view(gradients: Floats) -> Floats:
    """Augmented views of a record are clipped one by one: it counts as often as it has views."""
    return honest_step(np.repeat(gradients, 4, axis=0))


def clip_of_each_layer_to_the_full_norm(gradients: Floats) -> Floats:
    halves = np.split(gradients, 2, axis=1)
    return np.concatenate([honest_step(half) for half in halves])


def noise_before_the_clip(gradients: Floats) -> Floats:
    """Noise that is clipped with its record shrinks with it: the longer the record, the less is left."""
    return _clipped_sum(gradients + SIGMA * np.random.default_rng().standard_normal(gradients.shape))


#: the broken ones, each with the number of other records in its game
BROKEN: dict[Callable[[Floats], Floats], int] = {
    reference_spectral_dp: 3,
    variance_for_deviation: 3,
    clip_of_each_coordinate: 3,
    clip_of_each_view: 3,
    clip_of_each_layer_to_the_full_norm: 3,
    noise_before_the_clip: 0,
}


@dataclass(frozen=True)
class Effort:
    """How hard a game is played: plays that count, chance of a false alarm, seed of the noise."""

    plays: int = 1500
    alpha: float = 1e-6
    seed: int | None = None


def step_game(effort: Effort, step: AuditedStep, sigma: float, others: int = 3) -> Verdict:
    """The game against a step written from scratch, held to one Gaussian mechanism with multiplier σ."""
    claim = Claim((Entry(sigma, 1.0, 1),))
    return verdict(effort, step, ((8,),), claim, ("sinusoid", "quietest", "random"), others)


def verdict(
    effort: Effort, step: AuditedStep, grids: Any, claim: Claim, only: Sequence[str], others: int
) -> Verdict:
    """In two rounds, so that a gross bug is found quickly; each has half of the false-alarm chance."""
    for plays in (effort.plays // 8, effort.plays):
        found = audit(
            step, grids, claim, others=others, plays=plays, alpha=effort.alpha / 2,
            only=only, first_hit=True, seed=effort.seed,
        )  # fmt: skip
        if found.refuted:
            said, best = claim.entries[0].noise_multiplier, found.best
            return f"{best.direction}: multiplier at most {best.multiplier_upper:.3f}, not {said:.3f}"
    return None


def self_test(effort: Effort | None = None) -> Iterator[dict[str, Any]]:
    """One row for each broken step: what the game says of it, and of an honest one (it must be silent)."""
    effort = effort or Effort()
    for step, others in BROKEN.items():
        said, silent = (step_game(effort, s, SIGMA, others) for s in (step, honest_step))
        yield {
            "bug": step.__name__.replace("_", " "),
            "check": "step game",
            "caught": said is not None and silent is None,
            "says": said,
            "false_alarm": silent,
        }
