"""The game: was the canary in the data? Played many times against the same code, then decided.

Each play gives an `AuditedStep` the gradients of all records and gets what it releases. Some plays fix
directions and thresholds, the others are counted; α is shared out over the directions (Bonferroni).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gredp.audit import bounds
from gredp.audit.bounds import Claim, Floats, Rates
from gredp.audit.canaries import LENGTH, Grid, directions, quietest
from gredp.errors import GredpError

#: `[n, d]` gradients of n records (n may be 0) → `[d]` numbers that are released
AuditedStep = Callable[[Floats], Floats]
#: called after every play with the direction and the number of plays that there will be
Tick = Callable[[str, int], None]


@dataclass(frozen=True)
class Attack:
    """The game along one direction, on the plays that count."""

    direction: str
    without: Floats = field(repr=False)
    with_: Floats = field(repr=False)
    threshold: float
    rates: Rates
    multiplier_upper: float
    epsilon_lower: float
    refuted: bool


@dataclass(frozen=True)
class Finding:
    """All attacks on one claim. `refuted` is wrong with probability at most α; its absence proves nothing."""

    claim: Claim
    attacks: tuple[Attack, ...]
    plays: int
    alpha: float
    delta: float

    @property
    def refuted(self) -> bool:
        return any(attack.refuted for attack in self.attacks)

    @property
    def best(self) -> Attack:
        """The attack that proves most."""
        return max(self.attacks, key=lambda attack: (attack.refuted, attack.epsilon_lower))

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "refuted": self.refuted,
            "claimed_multiplier": self.claim.entries[0].noise_multiplier,
            "claimed_epsilon": self.claim.epsilon(self.delta),
            "audited_epsilon_lower": best.epsilon_lower,
            "audited_multiplier_upper": best.multiplier_upper,
            "delta": self.delta,
            "alpha": self.alpha,
            "plays": self.plays,
            "steps": sum(e.steps for e in self.claim.entries),
            "sample_rate": self.claim.entries[0].sample_rate,
            "direction": best.direction,
            "threshold": best.threshold,
            "histogram": _histogram(best),
            "directions": {
                a.direction: {
                    "false_positive_upper": float(a.rates.false_positive),
                    "false_negative_upper": float(a.rates.false_negative),
                    "epsilon_lower": a.epsilon_lower,
                }
                for a in self.attacks
            },
        }


def audit(
    mechanism: AuditedStep,
    grids: Sequence[Grid],
    claim: Claim,
    *,
    clip_norm: float = 1.0,
    others: int = 3,
    plays: int = 1000,
    alpha: float = 0.01,
    delta: float = 1e-5,
    seed: int | None = None,
    only: Sequence[str] = (),
    first_hit: bool = False,
    tick: Tick | None = None,
) -> Finding:
    """Play against `mechanism` and test whether the outcome refutes `claim`.

    Args:
        mechanism: `[n, d]` gradients of n records, n may be 0 → `[d]` released numbers.
        grids: Fourier grid of each block of the d coordinates; `((d,),)` for one block.
        claim: what the mechanism is said to be.
        clip_norm: the norm to which it clips a record.
        others: records without gradient that are in both worlds.
        plays: plays that count, in each world and direction; a third as many, played first, fix thresholds.
        alpha: chance of refuting a true claim.
        delta: δ at which ε is reported.
        seed: of the attacker's choices; drawn if None.
        only: names of the directions to play; all of them by default.
        first_hit: stop at the first refutation, which leaves the chance of a false one unchanged.
        tick: called after every play.

    >>> silent = lambda gradients: gradients.sum(0)  # no clip, no noise
    >>> found = audit(silent, ((8,),), Claim((bounds.Entry(1.0, 1.0, 1),)), plays=20, only=("random",))
    >>> found.refuted
    True
    """
    if not 0 < alpha < 1 or plays < 20:
        raise GredpError(
            f"an audit needs alpha between 0 and 1 and at least 20 plays, not {alpha} and {plays}"
        )
    chosen: dict[str, Floats | None] = {**directions(grids, seed), "quietest": None}
    chosen = {name: chosen[name] for name in only} if only else chosen
    dimension = sum(math.prod(grid) for grid in grids)
    background = np.zeros((others, dimension))
    before = plays // 3

    def play(name: str, records: Floats) -> Floats:
        rows = []
        for _ in range(before + plays):
            rows.append(np.asarray(mechanism(records), dtype=float))
            if rows[-1].shape != (dimension,):
                raise GredpError(f"a play released numbers of shape {rows[-1].shape}, not ({dimension},)")
            if tick is not None:
                tick(name, (before + plays) * (1 + len(chosen)))
        return np.stack(rows)

    noise = play("no canary", background)
    share = alpha / len(chosen)
    attacks = []
    for name, unit in chosen.items():
        unit = quietest(noise[:before]) if unit is None else unit
        canary = LENGTH * clip_norm * unit
        scores = play(name, np.vstack([canary, background])) @ unit
        attacks.append(_attack(name, noise @ unit, scores, before, claim, share, delta))
        if first_hit and attacks[-1].refuted:
            break
    return Finding(claim, tuple(attacks), plays, alpha, delta)


def _attack(
    name: str, without: Floats, with_: Floats, before: int, claim: Claim, alpha: float, delta: float
) -> Attack:
    """Of `[plays]` scores in both worlds, `before` of which fix the threshold."""
    if not (np.isfinite(without).all() and np.isfinite(with_).all()):
        raise GredpError("a play released numbers that are not finite")
    threshold = bounds.best_threshold(without[:before], with_[:before], claim, alpha)
    without, with_ = without[before:], with_[before:]
    rates = bounds.rates(without, with_, threshold, alpha)
    z = bounds.multiplier_upper(rates, claim)
    lower, refuted = bounds.epsilon_lower(z, claim, delta), bool(bounds.excess(rates, claim) > 0)
    return Attack(name, without, with_, threshold, rates, z, lower, refuted)


def _histogram(attack: Attack) -> dict[str, list[float]]:
    edges = np.histogram_bin_edges(np.concatenate([attack.without, attack.with_]), 24)
    without, with_ = (np.histogram(scores, edges)[0].tolist() for scores in (attack.without, attack.with_))
    return {"edges": [round(float(e), 6) for e in edges], "without": without, "with": with_}
