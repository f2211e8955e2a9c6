"""What an attack proves of a whole run: a lower bound of its ε beside the proven upper one.

One step of the engine is played, at the noise at which few plays tell most. Noise is linear in σ, so the most
noise that the attack leaves possible there bounds the multiplier at any σ; a run of such steps is then
composed as the accountant does, with every rounding to the attacker's disadvantage.
"""

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from gredp.audit.bounds import Claim
from gredp.audit.examples import SIGMA
from gredp.audit.game import audit
from gredp.errors import GredpError
from gredp.privacy.accountant import check_delta, epsilon
from gredp.privacy.ledger import Entry

PLAYS = 1500


@dataclass(frozen=True)
class LowerBound:
    """ε of the run is at least `epsilon`; wrong with probability at most `alpha`.

    It is a statement about runs of independent steps with Gaussian noise on Poisson samples: how they are
    drawn is tested elsewhere. All rows that come from one game share its α.
    """

    epsilon: float
    multiplier_upper: float
    delta: float
    alpha: float
    plays: int
    direction: str

    def to_json(self) -> dict[str, Any]:
        """With the names that a game's row has in a record."""
        found = asdict(self)
        lower, most = found.pop("epsilon"), found.pop("multiplier_upper")
        return {"audited_epsilon_lower": lower, "audited_multiplier_upper": most, **found}


def audited_lower_bound(
    method: str,
    noise: str = "white",
    claim: str = "proven",
    clipping: str | None = None,
    *,
    sigma: float,
    sample_rate: float,
    steps: int,
    layers: int = 2,
    delta: float = 1e-5,
    alpha: float = 0.01,
    plays: int = PLAYS,
) -> LowerBound:
    """For one row of a table: `steps` of this method at its noise scale `sigma` and rate `sample_rate`.

    `layers` are played as that many blocks; fewer than the network has give a bound that is valid and lower.
    The game depends on neither σ, rate nor steps and is played once for all rows that differ in these only.

    | case | ε |
    |---|---|
    | no noise at all (`plain`) | rejected: it claims nothing |
    | the attack finds nothing | 0 |
    """
    check_delta(delta)
    if method == "plain":
        raise GredpError("plain training claims no ε: there is nothing to refute")
    if not (sigma > 0 and math.isfinite(sigma)):
        raise GredpError(f"an audit needs a noise scale above 0, not {sigma}")
    per_sigma, direction = _played(method, noise, claim, clipping, layers, alpha, plays)
    z = per_sigma * sigma
    return LowerBound(optimistic_epsilon(z, sample_rate, steps, delta), z, delta, alpha, plays, direction)


@lru_cache(maxsize=64)
def _played(
    method: str, noise: str, claim: str, clipping: str | None, layers: int, alpha: float, plays: int
) -> tuple[float, str]:
    """(the most noise that the attack leaves possible, in units of σ; the direction of the canary)."""
    from gredp.audit.victims import EngineStep

    options = {"method": method, "noise": noise, "claim": claim, "clipping": clipping}
    # Where each block has the whole norm, all together move √layers times as far as the noise expects.
    # Unless it grows with them no play errs, and how seldom they might bounds the noise only loosely.
    apart = math.sqrt(layers) if claim == "paper" or clipping == "layer_wise" else 1.0
    victim = EngineStep(options, SIGMA * apart, grids=((15,), *[(4, 4)] * (layers - 1)))
    # Odd pairs in all blocks at once meet every weakness of the methods but one: shaped noise has a
    # variance for each frequency, so there the canary is a single wave.
    direction = "sinusoid" if noise == "shaped" else "odd pair"
    scale = float(victim.optimizer.sigma)
    attacked = Claim((Entry(scale, 1.0, 1),))
    found = audit(victim, victim.grids, attacked, plays=plays, alpha=alpha, only=(direction,))
    return found.best.multiplier_upper / scale, direction


def optimistic_epsilon(z: float, sample_rate: float, steps: int, delta: float) -> float:
    """ε of this run from below: losses are rounded down, where the accountant rounds them up."""
    if math.isinf(z):
        return 0.0
    entry = Entry(z, sample_rate, steps)
    upper = epsilon([entry], delta)
    if sample_rate == 1 or upper == 0 or math.isinf(upper):
        return upper / (1 + 1e-8) - 1e-8 if 0 < upper < math.inf else upper
    from dp_accounting.pld import privacy_loss_distribution as pld

    width = max(upper / (50 * steps), 1e-5)  # each step loses up to this much
    single = pld.from_gaussian_mechanism(
        z,
        pessimistic_estimate=False,
        value_discretization_interval=width,
        sampling_prob=sample_rate,
        use_connect_dots=False,
    )
    return max(0.0, min(upper, float(single.self_compose(steps).get_epsilon_for_delta(delta))))
